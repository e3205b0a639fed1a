"""Spells the matrix products that are written as ``Einsum``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from engine_builder.graph.einsum import product_of
from engine_builder.graph.naming import Names


class SpellProductsPass(ir.passes.InPlacePass):
    """Replaces each ``Einsum`` that is a matrix product by a ``MatMul`` of turned operands.

    TensorRT fuses attention around MatMul.  The product keeps the operator's name; an Einsum that is
    something else, as the outer product of rotary angles, stays.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names = Names(model.graph)
        modified = False
        for node in list(model.graph.all_nodes()):
            product = product_of(node)
            graph = node.graph
            if product is None or graph is None or node.inputs[0] is None or node.inputs[1] is None:
                continue
            left, right = node.inputs[0], node.inputs[1]
            if product.turns_left:
                left = _turned(graph, node, left, product.left, names)
            if product.turns_right:
                right = _turned(graph, node, right, product.right, names)
            output = node.outputs[0]
            spelled = ir.node("MatMul", [left, right], name=node.name)
            graph.insert_before(node, spelled)
            ir.convenience.replace_nodes_and_values(graph, node, [node], [], [output], [spelled.outputs[0]])
            modified = True
        return ir.passes.PassResult(model, modified)


def _turned(
    graph: ir.Graph | ir.Function, before: ir.Node, value: ir.Value, perm: Sequence[int], names: Names
) -> ir.Value:
    name = names.fresh(f"{before.name or before.outputs[0].name}.{value.name}_transposed")
    shape = None if value.shape is None else ir.Shape([value.shape[axis] for axis in perm])
    node = ir.node(
        "Transpose",
        [value],
        attributes={"perm": list(perm)},
        outputs=[ir.Value(name=name, type=value.type, shape=shape)],
        name=name,
    )
    graph.insert_before(before, node)
    return node.outputs[0]
