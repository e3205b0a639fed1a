"""The passes that bring every exporter's spelling to one form, each on the graph that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import TopologicalSortPass

from engine_builder.graph.find import find_structures
from engine_builder.graph.passes.fold_indices import FoldIndicesPass
from engine_builder.graph.passes.infer_types import InferTypesPass
from engine_builder.graph.passes.lift_constants import LiftConstantsPass
from engine_builder.graph.passes.spell_splits import SpellSplitsPass
from engine_builder.precision.convert import annotate, normalizing_passes
from engine_builder.sample import Spelling
from tests.conftest import TINY_MODELS
from tests.graphs import SAMPLES, Array, graph, normalized, sample

FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


def run(model: onnx.ModelProto | ir.Model, **feeds: Array) -> list[Array]:
    proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [np.asarray(output) for output in session.run(None, feeds)]


# Types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spelling", "differential"), SAMPLES)
def test_inferred_types_are_the_declared_ones(spelling: Spelling, differential: bool) -> None:
    declared = ir.load(sample(spelling, differential))
    proto = onnx.load(sample(spelling, differential))
    del proto.graph.value_info[:]
    bare = ir.from_proto(proto)
    assert all(o.type is None for n in bare.graph for o in n.outputs if not o.is_graph_output())
    InferTypesPass()(bare)
    for one, other in zip(declared.graph, bare.graph, strict=True):
        assert [o.dtype for o in one.outputs] == [o.dtype for o in other.outputs], one.name


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Cast <to = 7> (x)", INT64),
        ("y = Shape(x)", INT64),
        ("y = Greater(x, x)", BOOL),
        ("y = Where(m, x, x)", FLOAT),
        ("y = ArgMax(x)", INT64),
        ("s = Shape(x) y = ConstantOfShape(s)", FLOAT),
        ("s = Shape(x) y = ConstantOfShape <value = int64[1] {3}> (s)", INT64),
        ("y = Constant <value_ints = [1, 2]> ()", INT64),
        ("y = Constant <value_float = 1.0> ()", FLOAT),
        ("y = CastLike(x, m)", BOOL),
        ("y = Pow(x, i)", FLOAT),
        ("y = Gather(x, i)", FLOAT),
        ("v, y = TopK(x, k)", INT64),
        ("y = Range(i, k0, i)", INT64),
        ("y = RandomNormalLike(x)", FLOAT),
        ("y = RandomNormal <shape = [2]> ()", FLOAT),
        ("q = SplitToSequence(x, i) y = SequenceAt(q, i)", FLOAT),
        ("y = If (b) <then_branch = g1 () => (int64[1] p) { p = Shape(x) }, "
         "else_branch = g2 () => (int64[1] q) { q = Shape(x) }>", INT64),
    ],
)  # fmt: skip
def test_a_type_is_told_by_the_operator(body: str, expected: ir.DataType) -> None:
    head = "(float[4] x, bool[4] m, bool b) => (float[4] unused)"
    constants = {"i": 1, "k": [2], "k0": 3}
    used = {n: v for n, v in constants.items() if f" {n})" in body or f" {n}," in body or f"({n}," in body}
    model = ir.from_proto(graph(f"{head} {{ unused = Neg(x) {body} }}", used, opset=18, typed=False))
    assert InferTypesPass()(model).modified
    values = {o.name: o for n in model.graph for o in n.outputs}
    assert values["y"].dtype == expected
    if "q" in values:
        assert isinstance(values["q"].type, ir.SequenceType)


def test_a_declared_type_is_never_changed_and_types_are_not_shared() -> None:
    model = ir.from_proto(graph("(float[4] x) => (float[4] y) { a = Neg(x) y = Abs(a) }", typed=False))
    first = next(n for n in model.graph if n.name == "a").outputs[0]
    first.type = ir.TensorType(ir.DataType.DOUBLE)
    assert not InferTypesPass()(model).modified
    first.type = None
    InferTypesPass()(model)
    assert first.type is not model.graph.inputs[0].type


# Constants ----------------------------------------------------------------------------------------


def test_constants_become_initializers_of_their_names() -> None:
    body = (
        "a = Constant <value = float[2] {1.5, 2.5}> () b = Constant <value_float = 3.0> ()"
        "c = Constant <value_ints = [0, 1]> () d = Constant <value_int = 7> ()"
        "e = Constant <value_floats = [1.0]> ()"
        "z = Constant <value = float[1] {9.0}> ()"
        "f = Add(a, b) g = Gather(f, c) k = Cast <to = 1> (d) h = Add(g, k) y = Mul(h, e)"
    )
    model = ir.from_proto(graph(f"(float[1] x) => (float[2] y, float[1] z) {{ {body} }}"))
    LiftConstantsPass()(model)
    stored = {name: v.const_value for name, v in model.graph.initializers.items()}
    assert {name: t.numpy().tolist() for name, t in stored.items() if t is not None} == {
        "a": [1.5, 2.5], "b": 3.0, "c": [0, 1], "d": 7, "e": [1.0]
    }  # fmt: skip
    # An initializer cannot take an output's place, so z stays a node.
    assert [n.op_type for n in model.graph].count("Constant") == 1
    assert run(model, x=np.zeros(1, np.float32))[0].tolist() == [11.5, 12.5]


def test_integers_made_of_constants_are_computed() -> None:
    """As an unoptimized dynamo export writes the axes of a mean: reshaped at run time."""
    body = (
        "ax = Reshape(minus_one, one_long) s = Mul(x, x) m = ReduceMean(s, ax) e = Add(m, eps) r = Sqrt(e)"
        "n = Div(x, r) y = Mul(n, g)"
    )
    constants = {"minus_one": -1, "one_long": [1], "eps": 1e-6, "g": np.ones(64, np.float32)}
    proto = graph(f"(float[1,T,64] x) => (float[1,T,64] y) {{ {body} }}", constants, opset=18)
    model = ir.from_proto(proto)
    assert find_structures(model).near_misses[0].reason == "the axes of the mean of squares are not constant"
    annotate(model)
    assert len(find_structures(model).norms) == 1
    value = model.graph.initializers["ax"].const_value
    assert value is not None
    assert value.numpy().tolist() == [-1]
    x = np.random.default_rng(0).standard_normal((1, 3, 64), dtype=np.float32)
    np.testing.assert_array_equal(run(model, x=x)[0], run(proto, x=x)[0])


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("a = Shape(x) y = Cast <to = 1> (a)", "float[k] y"),  # depends on the input
        ("a = Add(f, f) y = Neg(a)", "float y"),  # floats are TensorRT's to fold
        ("a = Cast <to = 1> (i) y = Neg(a)", "float y"),
        ("a = Expand(i, many) b = Cast <to = 1> (a) y = Neg(b)", "float[k] y"),  # too large to be indices
    ],
)
def test_what_is_not_an_index_is_left(body: str, output: str) -> None:
    constants = {"f": 1.0, "i": 2, "many": [5000]}
    used = {n: v for n, v in constants.items() if f"({n}" in body or f", {n})" in body}
    model = ir.from_proto(graph(f"(float[n] x) => ({output}) {{ {body} }}", used, opset=18))
    count = len(list(model.graph))
    assert not FoldIndicesPass()(model).modified
    assert len(list(model.graph)) == count


# Splits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "indices", "parts"),
    [
        (4, (0, 1, 2), ((0, 4), (4, 8), (8, 10))),  # one size; the last part is what is left
        ([2, 3, 5], (0, 1, 2), ((0, 2), (2, 5), (5, 10))),
        ([2, 3, 5], (-1, -3, 1), ((5, 10), (0, 2), (2, 5))),
        ([2, 3, 5], (2, 2, 0), ((5, 10), (5, 10), (0, 2))),
    ],
)
def test_a_split_through_a_sequence_is_spelled_as_slices(
    split: Any, indices: tuple[int, ...], parts: tuple[tuple[int, int], ...]
) -> None:
    constants: dict[str, Any] = {"sizes": split, **{f"i{k}": index for k, index in enumerate(indices)}}
    body = "s = SplitToSequence <axis = 1> (x, sizes)" + "".join(
        f" p{k} = SequenceAt(s, i{k}) y{k} = Neg(p{k})" for k in range(3)
    )
    outputs = ", ".join(f"float[2,m{k}] y{k}" for k in range(3))
    proto = graph(f"(float[2,10] x) => ({outputs}) {{ {body} }}", constants)
    model = ir.from_proto(proto)
    SpellSplitsPass()(model)
    TopologicalSortPass()(model)
    assert [n.op_type for n in model.graph] == ["Slice", "Neg"] * 3
    assert [n.name for n in model.graph] == ["p0", "y0", "p1", "y1", "p2", "y2"]
    x = np.arange(20, dtype=np.float32).reshape(2, 10)
    for got, (begin, end) in zip(run(model, x=x), parts, strict=True):
        np.testing.assert_array_equal(got, -x[:, begin:end])


def test_a_sequence_that_is_read_otherwise_stays() -> None:
    body = "s = SplitToSequence <axis = 0> (x, two) l = SequenceLength(s) p = SequenceAt(s, l0) y = Neg(p)"
    model = ir.from_proto(graph(f"(float[4] x, int64 l0) => (float[2] y, int64 l) {{ {body} }}", {"two": 2}))
    assert not SpellSplitsPass()(model).modified


# All together -------------------------------------------------------------------------------------


def test_weights_that_are_inputs_with_a_default_are_weights() -> None:
    """TorchScript's keep_initializers_as_inputs lists every weight among the inputs."""
    proto = graph("(float[1,4] x) => (float[1,4] y) { y = MatMul(x, w) }", {"w": np.eye(4, dtype=np.float32)})
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [4, 4]))
    model = normalized(proto)
    assert [v.name for v in model.graph.inputs] == ["x"]
    assert len(find_structures(model).linears) == 1


@pytest.mark.parametrize("name", TINY_MODELS)
def test_normalizing_changes_nothing_that_is_computed(name: str, tiny_models: dict[str, Path]) -> None:
    from verify.inputs import input_specs, seeded_inputs

    proto = onnx.load(tiny_models[name])
    feeds = seeded_inputs(input_specs(proto.graph), length=9, t=0.5)
    expected, got = run(proto, **feeds)[0], run(normalized(proto), **feeds)[0]
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_normalizing_twice_changes_nothing_more() -> None:
    model = normalized(onnx.load(sample(Spelling.TORCHSCRIPT17, True)))
    assert not any(graph_pass(model).modified for graph_pass in normalizing_passes())
