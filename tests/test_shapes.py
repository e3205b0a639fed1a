"""The shape oracle against onnxruntime: every tensor of real graphs, and values made of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from engine_builder.errors import ConversionError
from engine_builder.graph.find import find_structures
from engine_builder.graph.shapes import ShapeOracle
from engine_builder.sample import Spelling
from tests.conftest import TINY_MODELS
from tests.graphs import Array, dit_shapes, graph, normalized, sample

L = 7


def run_everything(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Every tensor that onnxruntime computes, unoptimized, on ones."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    known = {value.name for value in model.graph.output}
    for node in model.graph.node:
        model.graph.output.extend(onnx.ValueInfoProto(name=o) for o in node.output if o and o not in known)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    outputs = [output.name for output in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


def check_against_onnxruntime(path: Path) -> None:
    model = onnx.load(path)
    computed = run_everything(model, dit_shapes(L))
    loaded = ir.from_proto(model)
    oracle = ShapeOracle(loaded, dit_shapes(L))
    for node in loaded.graph:
        for value in node.outputs:
            assert value.name is not None
            assert oracle.shape(value) == computed[value.name].shape, value.name


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_shape_of_a_real_export_is_what_onnxruntime_computes(
    name: str, tiny_models: Mapping[str, Path]
) -> None:
    check_against_onnxruntime(tiny_models[name])


def test_every_shape_of_an_export_without_declarations_is_too(tmp_path: Path) -> None:
    model = onnx.load(sample(Spelling.TORCHSCRIPT17, True))
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "bare.onnx")
    loaded = normalized(model)
    oracle = ShapeOracle(loaded, dit_shapes(L))
    computed = run_everything(model, dit_shapes(L))
    for node in loaded.graph:
        for value in node.outputs:
            assert value.name is not None
            if value.name in computed:  # what normalization renamed is not compared
                assert oracle.shape(value) == computed[value.name].shape, value.name


@pytest.mark.parametrize("length", [1, 64, 4096])
def test_the_rotary_angle_is_evaluated_as_the_graph_computes_it(length: int) -> None:
    model = ir.load(sample(Spelling.DYNAMO20, False))
    (queries, *_) = find_structures(model).rotary
    assert queries.angle is not None
    angle = ShapeOracle(model, dit_shapes(length)).evaluate(queries.angle)
    # theta 10000 over 32 channels, halves equal, 64 memory tokens in front; one fp32 rounding each.
    inverse = (1 / np.float32(10000) ** (np.arange(0, 32, 2, dtype=np.float32) / np.float32(32))).astype(
        np.float32
    )
    half = np.arange(length + 64, dtype=np.float32)[:, None] * inverse
    assert angle.dtype == np.float32
    np.testing.assert_allclose(angle, np.concatenate([half, half], -1), rtol=3e-7)


RULES: list[tuple[str, tuple[int, ...]]] = [
    ("y = Split_ (x)", (2, 3)),
    ("y = MatMul(x, v6)", (2,)),
    ("y = MatMul(v2, x)", (6,)),
    ("y = MatMul(v2, v2)", ()),
    ("y = Flatten <axis = 0> (x)", (1, 12)),
    ("y = Transpose(x)", (6, 2)),
    ("y = ReduceSum <keepdims = 0> (x)", ()),
    ("y = ReduceMean <keepdims = 0> (x, i0)", (6,)),
    ("y = ReduceSum <noop_with_empty_axes = 1> (x)", (2, 6)),
    ("y = Reshape(x, r0)", (2, 3, 2)),
    ("y = Slice(x, i0, i9, im1, i2)", (2, 3)),
    ("y = Slice(x, i9, im9, im1, im1)", (2, 6)),
    ("y = Pad(x, pads)", (2, 9)),
    ("y = Tile(x, r22)", (4, 12)),
    ("y = Expand(x, e)", (4, 2, 6)),
    ("y = Gather <axis = 1> (x, im1)", (2, 1)),
    ("y = Concat <axis = -1> (x, x)", (2, 12)),
    ("y = Gemm <transA = 1, transB = 1> (x, x62)", (6, 6)),
    ("s = Shape(x) y = ConstantOfShape(s)", (2, 6)),
    ("s = Size(x) k = Cast <to = 1> (s) y = Mul(k, x)", (2, 6)),
    ('y = Einsum <equation = "ij,kj->ik"> (x, x)', (2, 2)),
    ("k = Unsqueeze(x, i0) y = Squeeze(k)", (2, 6)),
    ("y, z = TopK(x, i2)", (2, 2)),
]


@pytest.mark.parametrize(("body", "expected"), RULES)
def test_the_rule_of_each_operator(body: str, expected: tuple[int, ...]) -> None:
    if body.startswith("y = Split_"):
        body = "y, z = Split <axis = 1, num_outputs = 2> (x)"
    constants: dict[str, Any] = {
        "v6": np.ones(6, np.float32), "v2": np.ones(2, np.float32), "i0": [0], "i9": [9], "i2": [2],
        "im1": [-1], "im9": [-9], "r0": [0, 3, -1], "pads": [0, 1, 0, 2], "r22": [2, 2], "e": [4, 1, 1],
        "x62": np.ones((6, 2), np.float32),
    }  # fmt: skip
    rank = ",".join("abcdefg"[i] for i in range(len(expected)))
    model = graph(f"(float[n,6] x) => (float[{rank}] y) {{ {body} }}", constants, opset=18, typed=False)
    if len(expected) == 0:
        model.graph.output[0].type.tensor_type.ClearField("shape")
    computed = run_everything(model, {"x": (2, 6)})
    loaded = normalized(model)
    shape = ShapeOracle(loaded, {"x": (2, 6)}).shape(loaded.graph.outputs[0])
    assert shape == computed["y"].shape == expected


def test_the_branches_of_an_if_do_not_stop_the_oracle() -> None:
    body = (
        "s = Shape(x) y = If (flag) <"
        "then_branch = g1 () => (float[n,6] a) { a = Relu(x) },"
        "else_branch = g2 () => (float[n,6] b) { b = Neg(x) }> z = Transpose(x)"
    )
    model = graph(f"(float[n,6] x, bool flag) => (float[n,6] y, float[6,n] z) {{ {body} }}")
    loaded = ir.from_proto(model)
    oracle = ShapeOracle(loaded, {"x": (2, 6), "flag": ()})
    assert oracle.shape(loaded.graph.outputs[1]) == (6, 2)


def test_what_depends_on_data_is_not_evaluated() -> None:
    model = ir.from_proto(graph("(float[4] x) => (float[4] y) { y = Cos(x) }"))
    with pytest.raises(ConversionError, match=r"^x depends on the data of a graph input$"):
        ShapeOracle(model, {}).evaluate(model.graph.outputs[0])


def test_a_dynamic_input_without_a_shape_is_an_error() -> None:
    model = ir.from_proto(graph("(float[n] x) => (float[n] y) { y = Cos(x) }"))
    with pytest.raises(ConversionError, match=r"^no shape is given for the dynamic input x$"):
        ShapeOracle(model, {})


def test_a_shape_that_depends_on_data_is_an_error() -> None:
    model = ir.from_proto(graph("(float[4] x) => (int64[1,n] y) { y = NonZero(x) }"))
    with pytest.raises(ConversionError, match=r"^the shape of y could not be derived$"):
        ShapeOracle(model, {}).shape(model.graph.outputs[0])


def test_a_range_over_floats_is_as_long_as_their_values_say() -> None:
    """Linearly spaced frequencies, as an exporter that folds no constants writes them."""
    body = "end = Cast <to = 1> (count) r = Range(zero, end, half) u = Unsqueeze(r, first) y = MatMul(x, u)"
    model = graph(
        f"(float[n,1] x) => (float[n,m] y) {{ {body} }}", {"zero": 0.0, "half": 0.5, "count": 4, "first": [0]}
    )
    loaded = ir.from_proto(model)
    assert ShapeOracle(loaded, {"x": (3, 1)}).shape(loaded.graph.outputs[0]) == (3, 8)


def test_an_operand_of_unknown_shape_leaves_the_rest_unknown() -> None:
    """An operator without a rule here, whose operand's shape depends on data."""
    body = 'i = NonZero(x) f = Cast <to = 1> (i) y = Einsum <equation = "j,ij->i"> (x, f)'
    model = ir.from_proto(graph(f"(float[4] x) => (float[1] y) {{ {body} }}"))
    with pytest.raises(ConversionError, match=r"^the shape of y could not be derived$"):
        ShapeOracle(model, {}).shape(model.graph.outputs[0])
