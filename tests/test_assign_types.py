"""Types: every edge of converted graphs by the ONNX definitions, and each rule on a small graph."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from engine_builder.errors import ConversionError
from engine_builder.graph.passes.assign_types import AssignTypesPass
from engine_builder.graph.passes.name_nodes import NameNodesPass
from engine_builder.graph.passes.remove_noops import RemoveNoopsPass
from engine_builder.graph.weights import ConversionLedger
from engine_builder.precision.convert import convert
from engine_builder.precision.options import ConversionOptions
from engine_builder.sample import Spelling
from tests.conftest import TINY_MODELS
from tests.edges import declared, faults, graph_faults
from tests.graphs import LENGTHS, SAMPLES, Array, graph, normalized, sample

FP32, FP16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
TRUNK = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def options(trunk: Any, **more: Any) -> ConversionOptions:
    return ConversionOptions(trunk, trunk, **more)


# Whole graphs -------------------------------------------------------------------------------------


def check_conversion(source: Path, chosen: ConversionOptions, folder: Path) -> None:
    """Types, order and checker; names of I/O and nodes; the same bytes twice."""
    out = folder / "converted.onnx"
    convert(ir.load(source), out, chosen, LENGTHS)
    assert faults(out) == []
    original, model = onnx.load(source), onnx.load(out)
    for old, new in ((original.graph.input, model.graph.input), (original.graph.output, model.graph.output)):
        assert [(v.name, v.type) for v in new] == [(v.name, v.type) for v in old]
    assert {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)} == {FP32}
    kept = {node.name: node.op_type for node in model.graph.node}
    assert len(kept) == len(model.graph.node), "a name means one node"
    check_vanished(original.graph, kept, baked=chosen.rotary == "baked")
    again = folder / "again.onnx"
    convert(ir.load(source), again, chosen, LENGTHS)
    assert digest(again) == digest(out)


def check_vanished(original: onnx.GraphProto, kept: Mapping[str, str], *, baked: bool) -> None:
    """Nodes keep their names and operators; those that are gone had a reason to go.

    Constants, aliases and casts to the type that is there have one, so has the trigonometry of baked
    rotations, and then whatever only such nodes read.
    """
    types = declared(original)
    outputs = {value.name for value in original.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in original.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    makers = {name: node for node in original.node for name in node.output}
    gone = set()
    trig = 0
    asked: list[onnx.NodeProto] = []
    for node in reversed(original.node):
        if node.name in kept:
            assert kept[node.name] == node.op_type or node.op_type == "Attention"
            continue
        gone.add(node.name)
        idle = node.op_type in ("Constant", "Identity") or (
            node.op_type == "Cast" and types[node.input[0]] == types[node.output[0]]
        )
        if baked and node.op_type in ("Cos", "Sin"):
            trig += 1
            continue
        unread = all(r.name in gone for o in node.output for r in readers.get(o, ()))
        if baked and node.op_type == "Shape" and not unread:
            asked.append(node)  # the angle's size, which comes from elsewhere now
            continue
        assert idle or (unread and not outputs & set(node.output)), node.name
    assert all(makers[node.input[0]].name in gone for node in asked)
    every = sum(node.op_type in ("Cos", "Sin") for node in original.node)
    # Two Fourier features keep a cosine and a sine each.
    assert trig == (every - 4 if baked else 0)


CHOICES = [
    options("fp16"),
    options("bf16", rotary="baked"),
    options("fp16", rotary="baked"),
    options("fp16", islands="minimal", residual="trunk"),
    options("fp16", islands="full", bound_attention=False),
    options("bf16", islands="minimal", residual="trunk"),
]
# Every export with the default of each type, and one of each exporter with everything else.
EXPORT_CASES = [
    (name, chosen)
    for name in TINY_MODELS
    for chosen in (CHOICES if name in ("sm_torchscript17", "sm_dynamo23") else CHOICES[:2])
]


def label(value: Any) -> str:
    if not isinstance(value, ConversionOptions):
        return str(value)
    return f"{value.trunk}-{value.rotary}-{value.islands}-{value.residual}"


@pytest.mark.parametrize(("name", "chosen"), EXPORT_CASES, ids=label)
def test_a_converted_export_is_typed_consistently(
    name: str, chosen: ConversionOptions, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    check_conversion(tiny_models[name], chosen, tmp_path)


@pytest.mark.parametrize(("spelling", "differential"), SAMPLES)
def test_a_converted_sample_is_typed_consistently(
    spelling: Spelling, differential: bool, tmp_path: Path
) -> None:
    check_conversion(sample(spelling, differential), CHOICES[differential], tmp_path)


def test_the_checker_of_these_tests_sees_a_wrong_edge(tmp_path: Path) -> None:
    """The independent check itself fails where it should."""
    out = tmp_path / "converted.onnx"
    convert(ir.load(sample(Spelling.DYNAMO20, False)), out, options("fp16"), LENGTHS)
    model = ir.load(out)
    cast = next(n for n in model.graph if n.op_type == "Cast" and n.outputs[0].dtype == ir.DataType.FLOAT16)
    source = cast.inputs[0]
    assert source is not None
    reader, index = next((use.node, use.idx) for use in cast.outputs[0].uses())
    reader.replace_input_with(index, source)
    found = list(graph_faults(ir.to_proto(model).graph, 20, {}))
    assert any(f"at {reader.op_type} {reader.name} differ in type" in fault for fault in found)
    assert any(f"{reader.op_type} {reader.name} mixes" in fault for fault in found)


# Rules --------------------------------------------------------------------------------------------


def assign(
    text: str,
    fp32: Collection[str] = (),
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 18,
    trunk: str = "fp16",
    folder: Path,
) -> onnx.ModelProto:
    """The graph with the named nodes in fp32 and the others in the trunk type, written and checked."""
    model = normalized(graph(text, constants, opset=opset))
    keep = [node for node in model.graph if node.name in fp32]
    assert len(keep) == len(fp32)
    AssignTypesPass(TRUNK[trunk], keep, ConversionLedger())(model)
    RemoveUnusedNodesPass()(model)
    ir.save(model, folder / "typed.onnx")
    assert faults(folder / "typed.onnx") == []
    return onnx.load(folder / "typed.onnx")


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [np.asarray(output) for output in session.run(None, dict(feeds))]


def casts(model: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(n.input[0], n.output[0]) for n in model.graph.node if n.op_type == "Cast"]


def test_one_cast_serves_every_reader_of_a_type(tmp_path: Path) -> None:
    text = (
        "(float[4] x) => (float[4] y) { a = Exp(x) b = Neg(a) c = Abs(a) d = Tanh(a) e = Sqrt(a) "
        "f = Add(b, c) g = Add(d, e) y = Mul(f, g) }"
    )
    model = assign(text, ["a", "e"], folder=tmp_path)
    assert casts(model) == [
        ("a", "a__fp16"), ("e", "e__fp16"), ("y__fp16", "y")
    ]  # fmt: skip
    assert [n.name for n in model.graph.node if n.op_type != "Cast"] == list("abcdefgy")


def test_a_constant_is_converted_where_it_is_used_and_kept_where_it_is_not(tmp_path: Path) -> None:
    text = (
        "(float[4] x) => (float[4] y) { a = Mul(x, both) b = Mul(a, both) c = Add(b, trunk) d = "
        "Mul(a, full) e = Add(d, c) y = Neg(e) }"
    )
    constants = {n: np.full(4, v, np.float32) for n, v in (("both", 2.0), ("trunk", 3.0), ("full", 5.0))}
    model = assign(text, ["a", "d"], constants, folder=tmp_path)
    stored = {t.name: (t.data_type, onnx.numpy_helper.to_array(t)[0]) for t in model.graph.initializer}
    assert stored == {
        "both": (FP32, 2.0), "both__fp16": (FP16, 2.0), "trunk": (FP16, 3.0), "full": (FP32, 5.0)
    }  # fmt: skip
    # x=1: a=2, b=4, c=7, d=10, e=17
    assert run(model, {"x": np.ones(4, np.float32)})[0].tolist() == [-17.0] * 4


def test_an_output_that_is_also_read_inside_is_cast_once(tmp_path: Path) -> None:
    text = "(float[4] x) => (float[4] y, float[4] z) { y = Neg(x) a = Exp(y) z = Abs(a) }"
    model = assign(text, ["a"], folder=tmp_path)
    assert casts(model) == [("x", "x__fp16"), ("y__fp16", "y"), ("a", "a__fp16"), ("z__fp16", "z")]
    assert [n.input[0] for n in model.graph.node if n.name == "a"] == ["y"]


def test_inputs_and_constants_may_be_outputs(tmp_path: Path) -> None:
    text = (
        "(float[4] x) => (float[4] x, float[4] w, float[4] k, float[4] y) { k = Constant <value "
        "= float[4] {1,2,3,4}> () a = Mul(x, w) y = Add(a, k) }"
    )
    constants = {"w": np.asarray([1.0002, 2, 3, 4], np.float32)}
    model = assign(text, [], constants, folder=tmp_path)
    assert [o.name for o in model.graph.output] == ["x", "w", "k", "y"]
    types = declared(model.graph)
    assert [types[name] for name in ("x", "w", "k", "y")] == [FP32] * 4
    x = np.arange(4, dtype=np.float32) + np.float32(0.1)
    got = run(model, {"x": x})
    assert got[0].tolist() == x.tolist()
    assert got[1][0] == np.float32(1.0002), "an output is not rounded for the sake of its other readers"


def test_an_alias_of_an_output_keeps_both_names(tmp_path: Path) -> None:
    text = (
        "(float[4] x) => (float[4] y, float[4] z, float[4] w) { y = Neg(x) z = Identity(y) w = Identity(x) }"
    )
    model = assign(text, [], folder=tmp_path)
    assert [o.name for o in model.graph.output] == ["y", "z", "w"]
    x = np.ones(4, np.float32)
    assert [o.tolist() for o in run(model, {"x": x})] == [[-1.0] * 4, [-1.0] * 4, [1.0] * 4]


BRANCHES = (
    "then_branch = one () => (float[4] p) { p1 = Mul(a, w) p = Add(p1, c) }, "
    "else_branch = two () => (float[4] q) { q1 = Identity(a) q = Neg(q1) }"
)


@pytest.mark.parametrize("trunk", ["fp16", "bf16"])
def test_a_branch_gets_what_it_captures_in_fp32(trunk: str, tmp_path: Path) -> None:
    text = (
        f"(float[4] x, bool flag) => (float[4] y) {{ a = Neg(x) b = Mul(a, w) r = If (flag) "
        f"<{BRANCHES}> y = Add(r, b) }}"
    )
    constants = {"w": np.full(4, 3.0, np.float32), "c": np.full(4, 0.5, np.float32)}
    model = assign(text, [], constants, trunk=trunk, folder=tmp_path)
    stored = {t.name: t.data_type for t in model.graph.initializer}
    assert stored == {"w": FP32, f"w__{trunk}": FP16 if trunk == "fp16" else BF16, "c": FP32}
    if trunk == "fp16":
        x = np.ones(4, np.float32)
        assert run(model, {"x": x, "flag": np.asarray(True)})[0].tolist() == [-3 + 0.5 - 3] * 4
        assert run(model, {"x": x, "flag": np.asarray(False)})[0].tolist() == [1.0 - 3] * 4


def test_a_branch_may_hand_out_a_value_from_outside(tmp_path: Path) -> None:
    """Its Identity is all that it has: without it the branch would have no node and no output of its own."""
    text = (
        "(float[4] x, bool flag) => (float[4] y) { a = Neg(x) y = If (flag) <"
        "then_branch = one () => (float[4] p) { p = Identity(a) },"
        "else_branch = two () => (float[4] q) { q = Abs(a) }> }"
    )
    model = assign(text, [], folder=tmp_path)
    assert run(model, {"x": np.ones(4, np.float32), "flag": np.asarray(True)})[0].tolist() == [-1.0] * 4


def test_a_loop_carries_fp32(tmp_path: Path) -> None:
    text = (
        "(float[4] x) => (float[4] y) { a = Neg(x) r = Loop (n, , a) <body = step "
        "(int64 i, bool go, float[4] s) => (bool on, float[4] t) { on = Identity(go) t = Add(s, a) }>"
        "y = Abs(r) }"
    )
    model = assign(text, [], {"n": 3}, folder=tmp_path)
    assert run(model, {"x": np.ones(4, np.float32)})[0].tolist() == [4.0] * 4


@pytest.mark.parametrize("trunk", ["fp16", "bf16"])
@pytest.mark.parametrize("opset", [18, 20])
def test_what_the_standard_pins_stays_fp32(opset: int, trunk: str, tmp_path: Path) -> None:
    text = (
        '(float[1,1,4] x) => (float[1,1,8] y) { a = Neg(x) b = Resize <mode = "linear"> (a, roi, '
        "scales) y = Abs(b) }"
    )
    constants = {"scales": np.asarray([1, 1, 2], np.float32), "roi": np.zeros(0, np.float32)}
    model = assign(text, [], constants, opset=opset, trunk=trunk, folder=tmp_path)
    assert {t.name: t.data_type for t in model.graph.initializer}["scales"] == FP32


def test_an_operator_without_the_trunk_type_is_fp32_and_reported() -> None:
    # Convolutions take bf16 from opset 22 on, IsInf any half type from opset 20 on.
    text = (
        "(float[1,4,9] x) => (float[1,4,9] y, bool[1,4,9] z) { a = Neg(x) b = Conv(a, w) y = "
        "Abs(b) z = IsInf(b) }"
    )
    model = normalized(graph(text, {"w": np.zeros((4, 4, 1), np.float32)}, opset=17))
    typing = AssignTypesPass(ir.DataType.BFLOAT16, [], ConversionLedger())
    typing(model)
    assert typing.forced == ("b", "z")
    assert {n.name: n.outputs[0].dtype for n in model.graph}["b"] == ir.DataType.FLOAT


def test_is_inf_before_opset_20_reads_fp32(tmp_path: Path) -> None:
    text = "(float[4] x) => (bool[4] z, bool[4] n) { a = Neg(x) z = IsInf(a) n = IsNaN(a) }"
    model = assign(text, [], opset=17, folder=tmp_path)
    reads = {n.name: n.input[0] for n in model.graph.node}
    types = declared(model.graph)
    assert (types[reads["z"]], types[reads["n"]]) == (FP32, FP16)


def test_sequences_stay_fp32(tmp_path: Path) -> None:
    text = (
        "(float[4,6] x) => (float[2,6] y) { a = Neg(x) s = SplitToSequence <axis = 0> (a, two) i "
        "= SequenceAt(s, one) y = Abs(i) }"
    )
    model = assign(text, [], {"two": 2, "one": 1}, opset=17, folder=tmp_path)
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert run(model, {"x": x})[0].tolist() == x[2:].tolist()


def test_a_decision_about_fp32_values_is_made_in_fp32(tmp_path: Path) -> None:
    """4096.5 and 4096 are one number in fp16."""
    text = "(float[1] x) => (float[1] y) { c = Greater(x, bound) m = Cast <to = 1> (c) y = Neg(m) }"
    model = assign(text, [], {"bound": 4096.0}, folder=tmp_path)
    assert run(model, {"x": np.asarray([4096.5], np.float32)})[0].tolist() == [-1.0]


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize(
    ("value", "fp16", "bf16"),
    [
        (LOWEST, -65504.0, -float(2**128 - 2**120)),
        (-np.inf, -np.inf, -np.inf),
        (-1e9, -65504.0, -998244352.0),  # bf16: 238 * 2**22
        (-1e4, -1e4, -9984.0),  # within fp16's range; bf16: 156 * 2**6
    ],
)
def test_a_fill_beyond_the_range_becomes_the_lowest_value(
    value: float, fp16: float, bf16: float, tmp_path: Path
) -> None:
    text = "(float[4] x, bool[4] m) => (float[4] y) { a = Neg(x) b = Where(m, a, low) y = Softmax(b) }"
    for trunk, expected in (("fp16", fp16), ("bf16", bf16)):
        model = normalized(graph(text, {"low": np.float32(value)}, opset=18))
        ledger = ConversionLedger()
        AssignTypesPass(TRUNK[trunk], [], ledger)(model)
        stored = model.graph.initializers["low"].const_value
        assert stored is not None
        assert float(stored.numpy()) == expected
        assert sum(loss.overflowed + loss.not_finite for loss in ledger.losses()) == 0
        ir.save(model, tmp_path / "typed.onnx")
        assert faults(tmp_path / "typed.onnx") == []


def test_a_factor_beyond_the_range_is_computed_with_in_fp32(tmp_path: Path) -> None:
    text = "(float[4] x) => (float[4] y) { a = Neg(x) b = Div(a, million) y = Abs(b) }"
    model = assign(text, [], {"million": 1e6}, folder=tmp_path)
    assert {t.name: t.data_type for t in model.graph.initializer} == {"million": FP32}
    # 2e6 / 1e6: 2e6 does not fit into fp16 either, so ask for what does: 1000 / 1e6 = 0.001.
    got = run(model, {"x": np.full(4, 1000, np.float32)})[0]
    np.testing.assert_allclose(got, 0.001, rtol=2**-11)


def test_a_mask_of_constants_saturates_and_a_weight_overflows(tmp_path: Path) -> None:
    mask = np.triu(np.full((8, 8), LOWEST, np.float32), 1)
    text = (
        "(float[1,2,8,64] q, float[1,2,64,8] k, float[1,2,8,64] v) => (float[1,2,8,64] y) {"
        "s = MatMul(q, k) m = Add(s, mask) p = Softmax <axis = -1> (m) o = MatMul(p, v) y = MatMul(o, w) }"
    )
    weight = np.eye(64, dtype=np.float32)
    generic = options("fp16", generic=True)
    model = graph(text, {"mask": mask, "w": weight}, opset=18)
    convert(ir.from_proto(model), tmp_path / "masked.onnx", generic, [{}])
    stored = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "masked.onnx").graph.initializer
    }
    assert stored["mask"].min() == -65504.0
    weight[3, 5] = 7e4
    model = graph(text, {"mask": mask, "w": weight}, opset=18)
    with pytest.raises(
        ConversionError, match="1 weights in 1 tensors exceed fp16's range; the largest is 70000 in w"
    ):
        convert(ir.from_proto(model), tmp_path / "heavy.onnx", generic, [{}])
    assert list(tmp_path.glob("*heavy*")) == [], "what was refused leaves nothing behind"


def test_names_that_are_taken_are_not_given_again(tmp_path: Path) -> None:
    text = (
        "(float[4] x) => (float[4] y) { a__fp16 = Exp(x) a = Neg(a__fp16) b = Abs(a) y__fp16 = "
        "Neg(b) y = Exp(y__fp16) }"
    )
    model = assign(text, ["a", "y"], folder=tmp_path)
    everything = [n.name for n in model.graph.node]
    assert len(set(everything)) == len(everything)
    assert {"a__fp16", "a__fp16_1", "y__fp16"} <= set(everything)


def test_a_graph_with_fp16_in_it_is_refused() -> None:
    model = ir.from_proto(
        graph("(float[4] x) => (float[4] y) { a = Cast <to = 10> (x) b = Neg(a) y = Cast <to = 1> (b) }")
    )
    with pytest.raises(ir.passes.PreconditionError) as caught:
        AssignTypesPass(ir.DataType.FLOAT16, [], ConversionLedger())(model)
    error = caught.value.__cause__
    assert isinstance(error, ConversionError)
    assert error.message == "a is already fp16: the source must be an fp32 graph"
    assert error.where == "node a"


def test_a_value_of_unknown_type_is_refused() -> None:
    model = ir.from_proto(graph("(float[4] x) => (float[4] y) { a = Neg(x) y = Exp(a) }", typed=False))
    with pytest.raises(ir.passes.PreconditionError) as caught:
        AssignTypesPass(ir.DataType.FLOAT16, [], ConversionLedger())(model)
    assert isinstance(caught.value.__cause__, ConversionError)
    assert caught.value.__cause__.message == "the type of a is not known"


# Passes before it ---------------------------------------------------------------------------------


def test_nodes_without_a_name_of_their_own_get_one() -> None:
    proto = graph("(float[4] x) => (float[4] y) { a = Neg(x) b = Exp(a) c = Neg(b) d = Neg(c) y = Abs(d) }")
    for node, name in zip(proto.graph.node, ("", "layer", "layer", "", "Neg"), strict=True):
        node.name = name
    model = ir.from_proto(proto)
    assert NameNodesPass()(model).modified
    # "Neg" is the name of the last node, so that the nameless ones get others.
    assert [n.name for n in model.graph] == ["Neg_1", "layer", "layer_1", "Neg_2", "Neg"]
    assert not NameNodesPass()(model).modified


def test_nodes_of_a_branch_are_told_apart_from_those_outside() -> None:
    proto = graph(
        "(float[4] x, bool flag) => (float[4] y) { a = Neg(x) y = If (flag) <"
        "then_branch = one () => (float[4] p) { p = Neg(a) },"
        "else_branch = two () => (float[4] q) { q = Exp(a) }> }"
    )
    for branch in proto.graph.node[1].attribute:
        branch.g.node[0].name = "a"
    model = ir.from_proto(proto)
    NameNodesPass()(model)
    found = [node.name for node in model.graph.all_nodes()]
    assert len(set(found)) == 4
    assert "" not in found


def test_unsorted_nodes_are_sorted(tmp_path: Path) -> None:
    proto = graph("(float[4] x) => (float[4] y) { a = Neg(x) b = Exp(a) y = Abs(b) }")
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = ir.from_proto(proto)
    TopologicalSortPass()(model)
    AssignTypesPass(ir.DataType.FLOAT16, [], ConversionLedger())(model)
    ir.save(model, tmp_path / "typed.onnx")
    assert faults(tmp_path / "typed.onnx") == []


def test_casts_to_the_type_that_is_there_go() -> None:
    text = (
        "(float[4] x) => (float[4] y, float[4] z) { a = Cast <to = 1> (x) b = Neg(a) c = Cast "
        "<to = 1> (b) y = Cast <to = 1> (c) z = Cast <to = 1> (x) }"
    )
    model = ir.from_proto(graph(text))
    RemoveNoopsPass()(model)
    # z is a second name of an input, which only a node can give.
    assert [(n.op_type, n.outputs[0].name) for n in model.graph] == [("Neg", "y"), ("Cast", "z")]
