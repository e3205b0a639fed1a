"""Baked rotary tables: their rows and values, their use at every length, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from engine_builder.errors import ConversionError
from engine_builder.graph.find import find_structures
from engine_builder.graph.passes.bake_rotary import BakeRotaryPass, RotaryTable
from engine_builder.precision.convert import convert
from engine_builder.precision.options import ConversionOptions
from engine_builder.sample import Spelling
from tests.conftest import TINY_MODELS
from tests.edges import faults
from tests.graphs import LENGTHS, SAMPLES, Array, graph, normalized, sample
from tests.test_structures import (
    CUT,
    INVERSE,
    JOIN,
    OUTER,
    POSITIONS,
    ROTARY_CONSTANTS,
    ROTARY_SPELLINGS,
    ROTATE,
    ROTATED,
    TRIG,
    TURN,
    WIDE,
)
from verify.inputs import input_specs, seeded_inputs

ROWS = 4096 + 64


def session(path: Path | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def baked(source: Path, out: Path, trunk: Any = "fp32") -> tuple[RotaryTable, ...]:
    return convert(ir.load(source), out, ConversionOptions(trunk, trunk, rotary="baked"), LENGTHS).tables


@cache
def baked_sample(
    spelling: Spelling, differential: bool, trunk: str = "bf16"
) -> tuple[Path, tuple[RotaryTable, ...]]:
    """A sample with baked tables, converted once for all tests that only read it."""
    out = Path(mkdtemp(prefix="sa3-baked-")) / "baked.onnx"
    return out, baked(sample(spelling, differential), out, trunk)


def angles(rows: int) -> Array:
    """The rotary angle as the graphs compute it: fp32 positions times fp32 inverse frequencies."""
    inverse = next(
        onnx.numpy_helper.to_array(t)
        for t in onnx.load(sample(Spelling.DYNAMO20, False)).graph.initializer
        if t.name.endswith("inv_freq")
    )
    half = np.arange(rows, dtype=np.float32)[:, None] * inverse
    return np.concatenate([half, half], -1)


# The tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "differential", "trunk"),
    [
        *((*kind, "bf16") for kind in SAMPLES),
        (Spelling.DYNAMO20, False, "fp32"),
        (Spelling.DYNAMO20, True, "fp16"),
    ],
)
def test_a_table_holds_cosine_and_sine_of_the_fp32_angle(
    spelling: Spelling, differential: bool, trunk: str
) -> None:
    out, tables = baked_sample(spelling, differential, trunk)
    assert [(t.name, t.rows, t.prepended) for t in tables] == [
        ("rotary_cos_table", ROWS, 64),
        ("rotary_sin_table", ROWS, 64),
    ]
    assert {len(t.trig_nodes) for t in tables} == {4 if spelling is Spelling.TORCHSCRIPT17 else 2}
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    exact = angles(ROWS).astype(np.float64)
    for name, function in (("rotary_cos_table", np.cos), ("rotary_sin_table", np.sin)):
        assert stored[name].dtype == np.float32, "a table is fp32 whatever the trunk"
        np.testing.assert_array_equal(stored[name], function(exact).astype(np.float32))
    # Row 0 is position 0; row 1 of channel 0 turns by one radian; the last row by 4159.
    assert stored["rotary_cos_table"][0].tolist() == [1.0] * 32
    assert stored["rotary_sin_table"][1, 0] == np.float32(np.sin(1.0))
    assert stored["rotary_cos_table"][-1, 16] == np.float32(np.cos(4159.0))


@pytest.mark.parametrize(("spelling", "differential"), SAMPLES)
def test_nothing_of_the_chain_survives(spelling: Spelling, differential: bool) -> None:
    before = find_structures(ir.load(sample(spelling, differential)))
    out, _ = baked_sample(spelling, differential)
    model = ir.load(out)
    left = {node.name for node in model.graph}
    chain = {n.name for r in before.rotary for n in (*r.angle_nodes, *r.trig)}
    assert len(chain) >= 8
    assert not chain & left
    # Four trigonometric nodes are left: a cosine and a sine of the timestep and of the duration.
    assert sum(node.op_type in ("Cos", "Sin") for node in model.graph) == 4
    after = find_structures(model)
    assert (len(after.rotary), after.counts()["rotary_trig_nodes"]) == (4, 0)
    assert {t.name for r in after.rotary for t in r.tables} == {"rotary_cos_table", "rotary_sin_table"}
    assert after.near_misses == ()
    assert not any(name and "inv_freq" in name for name in model.graph.initializers)


# What they compute --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_baked_graph_computes_what_its_source_does(
    name: str, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "baked.onnx"
    baked(tiny_models[name], out)
    assert faults(out) == []
    reference, candidate = session(tiny_models[name]), session(out)
    specs = input_specs(onnx.load(tiny_models[name]).graph)
    for length in (1, 64, 1292):
        feeds = seeded_inputs(specs, length=length, t=0.5, seed=3)
        (expected,), (got,) = reference.run(None, feeds), candidate.run(None, feeds)
        scale = np.abs(np.asarray(expected)).max()
        assert np.abs(np.asarray(got) - np.asarray(expected)).max() <= 1e-5 * scale


@pytest.mark.parametrize("length", [1, 64, 4096])
def test_each_length_reads_its_own_rows(length: int) -> None:
    out, _ = baked_sample(Spelling.DYNAMO20, False, "fp32")
    model = onnx.load(out)
    slices = [
        n.output[0] for n in model.graph.node if set(n.input) & {"rotary_cos_table", "rotary_sin_table"}
    ]
    assert len(slices) == 2
    # The rows are counted on the queries: feed these and nothing else.
    counted = next(n.input[0] for n in model.graph.node if n.op_type == "Shape" and "rotary" in n.name)
    part = onnx.utils.Extractor(model).extract_model([counted], slices)
    queries = np.zeros((1, 2, length + 64, 64), np.float32)
    rows = session(part.SerializeToString()).run(None, {counted: queries})
    exact = angles(length + 64).astype(np.float64)
    expected = [np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)]
    for got, want in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


# Spellings ----------------------------------------------------------------------------------------


def shapes(*lengths: int) -> list[dict[str, tuple[int, ...]]]:
    return [{"x": (1, 2, length, 64)} for length in lengths]


def bake(
    model: onnx.ModelProto, lengths: Sequence[Mapping[str, Sequence[int]]]
) -> tuple[ir.Model, BakeRotaryPass]:
    loaded = normalized(model)
    baking = BakeRotaryPass(find_structures(loaded).rotary, lengths)
    baking(loaded)
    TopologicalSortPass()(loaded)
    RemoveUnusedNodesPass()(loaded)
    return loaded, baking


@pytest.mark.parametrize("spelling", [s for s in ROTARY_SPELLINGS if "tables" not in s])
def test_every_spelling_bakes_to_what_it_computed(spelling: str) -> None:
    model = graph(f"{ROTATED} {{ {ROTARY_SPELLINGS[spelling]} }}", ROTARY_CONSTANTS)
    loaded, baking = bake(model, shapes(1, 5, 100))
    assert [(t.rows, t.prepended) for t in baking.tables] == [(100, 0)] * 2
    assert not any(n.op_type in ("Cos", "Sin", "Range", "Einsum") for n in loaded.graph)
    reference = session(model.SerializeToString())
    candidate = session(ir.to_proto(loaded).SerializeToString())
    for length in (1, 5, 77, 100):
        x = np.random.default_rng(length).standard_normal((1, 2, length, 64), dtype=np.float32)
        (expected,), (got,) = reference.run(None, {"x": x}), candidate.run(None, {"x": x})
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), atol=2e-6)


def constant_node(array: Array) -> onnx.NodeProto:
    tensor = onnx.numpy_helper.from_array(array, "value")
    return onnx.helper.make_node("Constant", [], ["inv"], "inv", value=tensor)


@pytest.mark.parametrize("storage", ["initializer", "constant node", "external data"])
def test_frequencies_may_be_stored_anywhere(storage: str, tmp_path: Path) -> None:
    body = ROTARY_SPELLINGS["Einsum"]
    model = graph(f"{ROTATED} {{ {body} }}", ROTARY_CONSTANTS)
    if storage == "constant node":
        kept = [t for t in model.graph.initializer if t.name != "inv"]
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
        model.graph.node.insert(0, constant_node(INVERSE))
    path = tmp_path / "source.onnx"
    onnx.save(
        model,
        path,
        save_as_external_data=storage == "external data",
        location="weights.bin",
        size_threshold=0,
    )
    loaded = ir.load(path)
    if storage == "external data":
        assert isinstance(loaded.graph.initializers["inv"].const_value, ir.ExternalTensor)
    generic = ConversionOptions("fp32", "fp32", rotary="baked", generic=True)
    conversion = convert(loaded, tmp_path / "baked.onnx", generic, shapes(3, 9))
    assert [t.rows for t in conversion.tables] == [9, 9]
    stored = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "baked.onnx").graph.initializer
    }
    exact = (np.arange(9, dtype=np.float32)[:, None] * np.tile(INVERSE, 2)).astype(np.float64)
    np.testing.assert_array_equal(stored["rotary_sin_table"], np.sin(exact).astype(np.float32))


def ratio(numerator: str, denominator: str) -> str:
    """A rotation whose angle is scaled by a ratio of lengths, as cross-attending models write it."""
    scaled = f"n = Cast <to = 1> ({numerator}) d = Cast <to = 1> ({denominator}) k = Div(n, d) f = Mul(f0, k)"
    return f"{POSITIONS} {OUTER.replace('f =', 'f0 =')} {scaled} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}"


def test_a_ratio_of_equal_lengths_is_baked_away() -> None:
    loaded, baking = bake(graph(f"{ROTATED} {{ {ratio('T', 'T')} }}", ROTARY_CONSTANTS), shapes(1, 9))
    assert len(baking.tables) == 2
    assert not any(n.op_type == "Div" for n in loaded.graph)


def refusal(model: onnx.ModelProto, lengths: Sequence[Mapping[str, Sequence[int]]]) -> ConversionError:
    loaded = normalized(model)
    baking = BakeRotaryPass(find_structures(loaded).rotary, lengths)
    with pytest.raises(ir.passes.PassError) as caught:
        ir.passes.Sequential(baking)(loaded)
    assert isinstance(caught.value.__cause__, ConversionError)
    return caught.value.__cause__


def test_an_angle_that_depends_on_the_length_is_refused() -> None:
    model = graph(f"{ROTATED} {{ {ratio('T', 'i9')} }}", {**ROTARY_CONSTANTS, "i9": 9})
    error = refusal(model, shapes(2, 5, 9))
    assert error.message == "the rotary angle w depends on the length, so that no table can replace it"
    assert (error.where, error.hint) == ("node c", "set precision.rotary: computed")


def test_an_angle_that_agrees_only_at_the_ends_is_refused() -> None:
    """A profile of 1 and 9: the only row of the shortest is position 0, whose angle is 0 at any scale."""
    model = graph(f"{ROTATED} {{ {ratio('T', 'i9')} }}", {**ROTARY_CONSTANTS, "i9": 9})
    assert "depends on the length" in refusal(model, shapes(1, 9)).message


def test_an_angle_that_is_data_is_refused() -> None:
    head = "(float[1,2,T,64] x, float[T] p) => (float[1,2,T,64] y)"
    body = f"{OUTER} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}"
    lengths = [{"x": (1, 2, n, 64), "p": (n,)} for n in (1, 9)]
    error = refusal(graph(f"{head} {{ {body} }}", ROTARY_CONSTANTS), lengths)
    assert error.message == (
        "the rotary angle w is not made of positions alone: p depends on the data of a graph input"
    )
    assert (error.where, error.hint) == ("node c", "set precision.rotary: computed")


def test_a_name_that_is_taken_is_not_used_twice() -> None:
    constants = {**ROTARY_CONSTANTS, "rotary_cos_table": np.ones(1, np.float32)}
    body = ROTARY_SPELLINGS["Einsum"].replace("a = Slice(x,", "x0 = Mul(x, rotary_cos_table) a = Slice(x0,")
    loaded, baking = bake(graph(f"{ROTATED} {{ {body} }}", constants), shapes(1, 9))
    assert [t.name for t in baking.tables] == ["rotary_cos_table_1", "rotary_sin_table"]
    assert "rotary_cos_table" in loaded.graph.initializers


def test_an_angle_of_fixed_rows_is_read_whole() -> None:
    """A model of one length writes its positions as a constant."""
    positions = {"p": np.arange(9, dtype=np.float32)}
    head = "(float[1,2,9,64] x) => (float[1,2,9,64] y)"
    body = f"{OUTER} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}"
    loaded, baking = bake(graph(f"{head} {{ {body} }}", {**ROTARY_CONSTANTS, **positions}), [{}])
    assert [t.rows for t in baking.tables] == [9, 9]
    x = np.random.default_rng(0).standard_normal((1, 2, 9, 64), dtype=np.float32)
    (got,) = session(ir.to_proto(loaded).SerializeToString()).run(None, {"x": x})
    turned = np.concatenate([-x[..., 16:32], x[..., :16]], -1)
    angle = np.arange(9, dtype=np.float32)[:, None] * np.tile(INVERSE, 2)
    expected = np.concatenate([x[..., :32] * np.cos(angle) + turned * np.sin(angle), x[..., 32:]], -1)
    np.testing.assert_allclose(np.asarray(got), expected, atol=2e-6)


def test_a_graph_without_trigonometry_is_left_alone() -> None:
    model = normalized(graph(f"{ROTATED} {{ {ROTARY_SPELLINGS['tables']} }}", ROTARY_CONSTANTS))
    assert not BakeRotaryPass(find_structures(model).rotary, shapes(1, 9))(model).modified


def test_positions_that_something_else_reads_stay_for_it() -> None:
    head = "(float[1,2,T,64] x) => (float[1,2,T,64] y, float[T] q)"
    body = f"{ROTARY_SPELLINGS['Einsum']} q = Neg(p)"
    loaded, baking = bake(graph(f"{head} {{ {body} }}", ROTARY_CONSTANTS), shapes(1, 9))
    assert len(baking.tables) == 2
    assert [n.op_type for n in loaded.graph if n.name in ("p", "q", "f")] == ["Cast", "Neg"]


def test_rows_may_lie_on_another_axis() -> None:
    """Heads behind the sequence: x is (B, T, H, D) and the angle (T, 1, D)."""
    head = "(float[1,T,2,64] x) => (float[1,T,2,64] y)"
    positions = POSITIONS.replace("start = 2, end = 3", "start = 1, end = 2")
    body = (
        f"{positions} {OUTER} e = Unsqueeze(f, s1) w = Concat <axis = -1> (e, e) {TRIG} {CUT} "
        f"{TURN} {ROTATE} {JOIN}"
    )
    model = graph(f"{head} {{ {body} }}", ROTARY_CONSTANTS)
    loaded, baking = bake(model, [{"x": (1, length, 2, 64)} for length in (1, 9)])
    assert [t.rows for t in baking.tables] == [9, 9]
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 64), dtype=np.float32)
    (expected,) = session(model.SerializeToString()).run(None, {"x": x})
    (got,) = session(ir.to_proto(loaded).SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), atol=2e-6)


def test_who_asks_the_angle_for_its_size_is_answered_from_elsewhere() -> None:
    """The number of channels to rotate is often the angle's, and so is the number of rows."""
    sized = "sz = Shape(w) n = Gather(sz, i1) nv = Unsqueeze(n, s0)"
    body = f"{POSITIONS} {OUTER} {WIDE} {TRIG} {sized} {CUT.replace('s32', 'nv')} {TURN} {ROTATE} {JOIN}"
    loaded, _ = bake(graph(f"{ROTATED} {{ {body} }}", ROTARY_CONSTANTS), shapes(1, 9))
    assert not any(n.op_type in ("Einsum", "Range") for n in loaded.graph)
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 64), dtype=np.float32)
    reference = session(graph(f"{ROTATED} {{ {body} }}", ROTARY_CONSTANTS).SerializeToString())
    (expected,) = reference.run(None, {"x": x})
    (got,) = session(ir.to_proto(loaded).SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), atol=2e-6)
