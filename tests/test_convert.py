"""Conversions as a whole: promises kept and broken, what is reported, what is refused."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import engine_builder.graph.passes
from engine_builder.errors import ConversionError
from engine_builder.graph.find import find_structures
from engine_builder.precision.convert import convert, pass_versions
from engine_builder.precision.options import ConversionOptions
from engine_builder.sample import Spelling
from tests import doubles
from tests.conftest import TINY_MODELS
from tests.edges import faults
from tests.graphs import LENGTHS, graph, names, sample
from verify.inputs import input_specs, seeded_inputs
from verify.promises import Promise, PromiseKind, make_promises


def options(trunk: Any, **more: Any) -> ConversionOptions:
    return ConversionOptions(trunk, trunk, **more)


FP16, BAKED = options("fp16"), options("bf16", rotary="baked")


def promises(converted: Path, chosen: ConversionOptions) -> tuple[Promise, ...]:
    model = ir.load(converted)
    return make_promises(model.graph, find_structures(model), chosen)


def broken(converted: Path, chosen: ConversionOptions) -> dict[PromiseKind, list[Promise]]:
    found: dict[PromiseKind, list[Promise]] = {}
    for promise in promises(converted, chosen):
        if not promise.held:
            found.setdefault(promise.kind, []).append(promise)
    return found


# Promises -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [FP16, BAKED], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_conversion_keeps_every_promise(
    name: str, chosen: ConversionOptions, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "converted.onnx"
    convert(ir.load(tiny_models[name]), out, chosen, LENGTHS)
    made = promises(out, chosen)
    assert [p.broken_at for p in made if not p.held] == []
    kinds = [p.kind for p in made]
    assert kinds.count(PromiseKind.FUSED_ATTENTION) == (8 if name.startswith("md") else 4)
    assert kinds.count(PromiseKind.FP32_NORM) == 14
    assert kinds.count(PromiseKind.FP32_ROTATION) == 4


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "fp16.onnx"
    convert(ir.load(sample(Spelling.TORCHSCRIPT17, False)), out, FP16, LENGTHS)
    return out


@pytest.mark.parametrize(
    ("double", "kind", "at"),
    [
        ("fourier_path_fp16", PromiseKind.FP32_ANGLE, "is fp16, not fp32"),
        ("fourier_head_fp16", PromiseKind.FP32_ANGLE, "is fp16, not fp32"),
        ("rotary_angle_trunk", PromiseKind.FP32_ANGLE, "is fp16, not fp32"),
        ("rotation_trunk", PromiseKind.FP32_ROTATION, "is fp16, not fp32"),
        ("norm_trunk", PromiseKind.FP32_NORM, "is fp16, not fp32"),
        ("gain_trunk", PromiseKind.FP32_NORM, "is fp16, not fp32"),
        ("one_core_fp32", PromiseKind.FUSED_ATTENTION, "is fp32, not fp16"),
        ("one_linear_fp32", PromiseKind.TRUNK_LINEAR, "is fp32, not fp16"),
    ],
)
def test_a_converter_that_gets_one_thing_wrong_breaks_that_promise(
    double: str, kind: PromiseKind, at: str, converted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "damaged.onnx"
    damaged = doubles.DOUBLES[double](converted, out)
    onnx.checker.check_model(str(out), full_check=True)
    assert [f for f in faults(out) if "Cast" not in f and "read by nothing" not in f] == []
    before, after = ({n.name: n.outputs[0].dtype for n in ir.load(path).graph} for path in (converted, out))
    changed = {name for name, dtype in before.items() if after[name] != dtype}
    assert changed
    assert changed <= set(damaged), "a double leaves all other types alone"
    told = broken(out, FP16)
    assert set(told) == {kind}
    for promise in told[kind]:
        assert promise.broken_at.endswith(at)
        assert set(promise.nodes) & set(damaged)
    # What was damaged is named, and nothing else is.
    assert len(told[kind]) == {"fourier_path_fp16": 2, "rotary_angle_trunk": 8}.get(double, 1)


def test_an_fp32_softmax_between_fp16_products_breaks_nothing(converted: Path, tmp_path: Path) -> None:
    """TensorRT-RTX fuses through it (measured): fp32 q and k are what stops it."""
    out = tmp_path / "damaged.onnx"
    doubles.one_softmax_fp32(converted, out)
    assert broken(out, FP16) == {}


def test_a_computed_angle_breaks_the_promise_of_a_table(converted: Path) -> None:
    claimed = options("fp16", rotary="baked")
    told = broken(converted, claimed)
    assert set(told) == {PromiseKind.BAKED_ROTARY}
    assert len(told[PromiseKind.BAKED_ROTARY]) == 8


# The report ---------------------------------------------------------------------------------------


def test_a_conversion_says_what_it_found_and_did(tmp_path: Path) -> None:
    done = convert(ir.load(sample(Spelling.TORCHSCRIPT17, True)), tmp_path / "out.onnx", BAKED, LENGTHS)
    assert done.files == (tmp_path / "out.onnx",)
    assert dict(done.counts) == {
        "norms": 14, "rotary_embeddings": 4, "rotary_trig_nodes": 8, "fourier_features": 2,
        "attention_cores": 8, "linears": 29,
    }  # fmt: skip
    assert done.structures["near_misses"] == []
    assert done.forced_fp32 == ()
    assert done.passes[-1] == "RemoveUnusedNodesPass"
    assert {"LiftConstantsPass", "RemoveNoopsPass", "BakeRotaryPass", "AssignTypesPass"} <= set(done.passes)
    assert sum(loss.overflowed + loss.not_finite for loss in done.losses) == 0
    model = onnx.load(tmp_path / "out.onnx")
    assert model.producer_name == "sa3-builder"
    assert {p.key: p.value for p in model.metadata_props}["sa3_builder.precision"] == "bf16"


def test_convolutions_take_bf16_after_the_opset_is_raised(tmp_path: Path) -> None:
    """Conv takes bf16 from opset 22 on; the source is opset 17."""
    done = convert(ir.load(sample(Spelling.TORCHSCRIPT17, False)), tmp_path / "out.onnx", BAKED, LENGTHS)
    model = ir.load(tmp_path / "out.onnx")
    assert model.graph.opset_imports[""] == 22
    assert {n.outputs[0].dtype for n in model.graph if n.op_type == "Conv"} == {ir.DataType.BFLOAT16}
    assert done.forced_fp32 == ()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_fp32_stays_what_it_was(name: str, tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "fp32.onnx"
    convert(ir.load(tiny_models[name]), out, options("fp32"), LENGTHS)
    assert faults(out) == []
    model = onnx.load(out)
    assert not any(n.op_type == "Attention" for n in model.graph.node), "TensorRT has no fp32 kernel for it"
    sessions = [
        onnxruntime.InferenceSession(p, providers=["CPUExecutionProvider"]) for p in (tiny_models[name], out)
    ]
    feeds = seeded_inputs(input_specs(model.graph), length=40, t=0.5)
    expected, got = (np.asarray(s.run(None, feeds)[0]) for s in sessions)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_every_pass_is_an_ingredient_of_the_content_key() -> None:
    """A pass that is changed without its version being raised would leave old results in the cache."""
    listed = pass_versions()
    for module in pkgutil.iter_modules(engine_builder.graph.passes.__path__):
        loaded = importlib.import_module(f"engine_builder.graph.passes.{module.name}")
        for name, kind in vars(loaded).items():
            if name.endswith("Pass") and getattr(kind, "__module__", "") == loaded.__name__:
                assert listed[name] == kind.version
    assert "find_structures" in listed


# Refusals -----------------------------------------------------------------------------------------

PLAIN = "(float[1,8,64] x) => (float[1,8,64] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"
WEIGHTS = {"w": np.eye(64, dtype=np.float32), "v": np.eye(64, dtype=np.float32)}
GENERIC = options("fp16", generic=True)


def plain(**changed: Any) -> ir.Model:
    return ir.from_proto(graph(PLAIN, {**WEIGHTS, **changed}))


def test_a_graph_that_is_no_dit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        ConversionError, match="no RMSNorm, no rotary embedding, no Fourier features"
    ) as caught:
        convert(plain(), tmp_path / "out.onnx", FP16, [{}])
    assert caught.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []
    done = convert(plain(), tmp_path / "out.onnx", GENERIC, [{}])
    assert (done.counts["linears"], done.counts["norms"]) == (2, 0)


def heavy() -> np.ndarray[Any, Any]:
    weight = np.eye(64, dtype=np.float32)
    weight[0, 1], weight[5, 5] = -70000.0, 1e6
    return weight


def test_an_overflowing_weight_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConversionError) as caught:
        convert(plain(w=heavy()), tmp_path / "out.onnx", GENERIC, [{}])
    assert caught.value.message == ("2 weights in 1 tensors exceed fp16's range; the largest is 1e+06 in w")
    assert caught.value.hint == "use bf16, or accept clipping with precision.clip_overflow: true"
    assert list(tmp_path.iterdir()) == []


def test_an_overflowing_weight_is_clipped_when_that_is_accepted(tmp_path: Path) -> None:
    accepting = options("fp16", generic=True, clip_overflow=True)
    done = convert(plain(w=heavy()), tmp_path / "out.onnx", accepting, [{}])
    stored = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer
    }
    assert (stored["w"][0, 1], stored["w"][5, 5]) == (-65504.0, 65504.0)
    assert {loss.tensor: loss.overflowed for loss in done.losses} == {"v": 0, "w": 2}


def test_bf16_holds_what_fp16_does_not(tmp_path: Path) -> None:
    done = convert(plain(w=heavy()), tmp_path / "out.onnx", options("bf16", generic=True), [{}])
    assert sum(loss.overflowed for loss in done.losses) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    weight = np.eye(64, dtype=np.float32)
    weight[3, 3] = value
    with pytest.raises(ConversionError, match=r"^the weight w has 1 values that are not finite$"):
        convert(
            plain(w=weight), tmp_path / "out.onnx", options("bf16", generic=True, clip_overflow=True), [{}]
        )


def test_an_error_of_a_pass_arrives_as_it_was_raised(tmp_path: Path) -> None:
    head = "(float[1,2,4,64] q, float[1,2,4,64] k, float[1,2,4,64] v) => (float[1,2,4,64] y)"
    model = ir.from_proto(graph(f"{head} {{ y = Attention <is_causal = 1> (q, k, v) }}", opset=23))
    with pytest.raises(ConversionError, match=r"^node y: Attention with a causal mask cannot be decomposed"):
        convert(model, tmp_path / "out.onnx", GENERIC, [{}])


def test_an_operator_of_unknown_types_is_refused_by_the_node_that_has_it(tmp_path: Path) -> None:
    model = ir.from_proto(graph("(float[4] x) => (float[4] y) { a = Neg(x) y = Abs(a) }"))
    node = next(n for n in model.graph if n.name == "a")
    node.domain, node.outputs[0].type = "com.example", None
    with pytest.raises(ConversionError) as caught:
        convert(model, tmp_path / "out.onnx", GENERIC, [{}])
    assert (caught.value.message, caught.value.where) == ("the type of a is not known", "node a")


def test_islands_widen_what_is_fp32(tmp_path: Path) -> None:
    """minimal: norms and angles; rope: the rotations too; full: the modulation around the norms too."""
    kept: dict[str, set[str | None]] = {}
    source = sample(Spelling.DYNAMO20, False)
    found = find_structures(ir.load(source))
    for islands in ("minimal", "rope", "full"):
        out = tmp_path / f"{islands}.onnx"
        convert(ir.load(source), out, options("fp16", islands=islands, residual="trunk"), LENGTHS)
        computing = (n for n in ir.load(out).graph if n.op_type != "Cast")
        kept[islands] = {n.name for n in computing if n.outputs[0].dtype == ir.DataType.FLOAT}
    assert kept["minimal"] < kept["rope"] < kept["full"]
    rotation = {name for r in found.rotary for name in names(r.nodes)}
    assert kept["rope"] - kept["minimal"] == rotation - kept["minimal"]
    for norm in found.norms:
        assert names(norm.nodes) <= kept["minimal"]


def test_unbound_attention_computes_every_core_in_fp32(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    convert(ir.load(sample(Spelling.DYNAMO20, False)), out, options("fp16", bound_attention=False), LENGTHS)
    cores = find_structures(ir.load(out)).attention
    assert len(cores) == 4
    assert {n.outputs[0].dtype for core in cores for n in (core.qk, core.softmax, core.pv)} == {
        ir.DataType.FLOAT
    }
