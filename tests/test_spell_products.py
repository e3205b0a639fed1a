"""Einsum as matrix products: which equations are one, and that the numbers stay the same.

What an equation computes is taken from numpy.einsum.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from engine_builder.graph.passes.spell_products import SpellProductsPass
from tests.graphs import graph

SIZES = {"b": 2, "h": 3, "i": 5, "j": 7, "d": 4}

PRODUCTS = {
    "bhid,bhjd->bhij": ["Transpose", "MatMul"],  # keys are turned
    "b h i j, b h j d -> b h i d": ["MatMul"],
    "bihd,bjhd->bhij": ["Transpose", "Transpose", "MatMul"],
    "bhid,bhjd->hbij": ["Transpose", "Transpose", "MatMul"],
    "id,dj->ij": ["MatMul"],
    "di,dj->ij": ["Transpose", "MatMul"],
}
OTHERS = [
    "i,j->ij",  # the outer product of rotary angles
    "bhij,bhj->bhi",
    "bhid,bhid->bhi",  # a dot product per row
    "bhid,bhjd->bhji",  # the second operand's rows come first
    "bhid,bjd->bhij",
    "bhid,hjd->bhij",
    "bhid->bhdi",
    "...id,...jd->...ij",
    "id,dj",
    "iid,dj->ij",
]


def model_of(equation: str) -> tuple[ir.Model, list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    rng = np.random.default_rng(0)
    shapes = [[SIZES.get(label, 2) for label in term.replace("...", "b")] for term in terms]
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    heads = ", ".join(f"float[{','.join(map(str, shape))}] x{n}" for n, shape in enumerate(shapes))
    inputs = ", ".join(f"x{n}" for n in range(len(terms)))
    text = f'({heads}) => (float y) {{ y = Einsum <equation = "{equation}"> ({inputs}) }}'
    return ir.from_proto(graph(text, typed=False)), operands


@pytest.mark.parametrize("equation", PRODUCTS)
def test_a_product_is_spelled_as_matmul_and_computes_the_same(equation: str) -> None:
    model, operands = model_of(equation)
    result = SpellProductsPass()(model)
    assert result.modified
    assert [node.op_type for node in model.graph] == PRODUCTS[equation]
    assert model.graph.node(len(PRODUCTS[equation]) - 1).name == "y"
    proto = ir.to_proto(model)
    (found,) = ReferenceEvaluator(proto).run(None, {f"x{n}": x for n, x in enumerate(operands)})
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.einsum(equation, *operands), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("equation", OTHERS)
def test_what_is_no_product_stays(equation: str) -> None:
    model, _ = model_of(equation)
    assert not SpellProductsPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Einsum"]
