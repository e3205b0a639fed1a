"""The fidelity sweep: figures, verdicts, drawn and recorded inputs, and a gate that can fail."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engine_builder.errors import ConversionError, Interrupted, RecipeError, SourceModelError
from engine_builder.source_graph import TensorSpec
from verify.fidelity import FidelityPoint, FidelityReport, compare, plan_samples, reference_outputs, sweep
from verify.inputs import Sample, duration_seconds, input_specs, recorded_samples, seeded_inputs

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLE = Sample("seed 0", 64, 0.5, dict)


def save(folder: Path, name: str, text: str) -> Path:
    """A model file whose graph is written in ONNX's text form."""
    path = folder / f"{name}.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> graph {text}'), path)
    return path


def vector(*values: float) -> Array:
    return np.array(values, np.float32)


def figures(expected: Array, actual: Array) -> tuple[float, float, float]:
    point = compare(SAMPLE, {"y": expected}, {"y": actual})
    assert point.nonfinite == 0
    return point.cosine, point.relative_l2, point.max_abs


def test_figures_of_worked_out_vectors() -> None:
    """(3, 4) and (4, 3): cosine 24 / 25, difference (1, -1) of norm sqrt(2) over 5."""
    cosine, relative, greatest = figures(vector(3, 4), vector(4, 3))
    assert cosine == pytest.approx(24 / 25, abs=1e-15)
    assert relative == pytest.approx(math.sqrt(2) / 5, abs=1e-15)
    assert greatest == 1


def test_a_scaled_vector_has_cosine_one_and_an_error() -> None:
    assert figures(vector(1, 2, 2), vector(2, 4, 4)) == (1.0, 1.0, 2.0)


def test_zero_vectors() -> None:
    assert figures(vector(0, 0), vector(0, 0)) == (1.0, 0.0, 0.0)
    assert figures(vector(0, 0), vector(0, 2)) == (0.0, math.inf, 2.0)
    assert figures(vector(0, 2), vector(0, 0)) == (0.0, 1.0, 2.0)


def test_the_cosine_is_computed_in_fp64() -> None:
    """1e6 values that differ by 1e-5 in turn: 1 - cosine is 5e-11, below fp32's 6e-8."""
    expected = np.ones(1_000_000)
    actual = expected + 1e-5 * np.tile([1, -1], 500_000)
    assert 1 - figures(expected, actual)[0] == pytest.approx(5e-11, rel=1e-3)


def test_values_that_are_not_finite_are_counted_and_fail() -> None:
    point = compare(SAMPLE, {"y": vector(1, 2, 3)}, {"y": vector(np.nan, np.inf, 3)})
    assert point.nonfinite == 2
    report = FidelityReport((point,), min_cosine=0.0)
    assert not report.passed
    assert report.worst == -1.0
    written = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert written["worst_cosine"] == -1.0
    assert written["points"][0]["cosine"] is None
    assert written["points"][0]["nonfinite"] == 2


def test_the_farthest_of_several_outputs_is_named() -> None:
    expected = {"a": vector(3, 4), "b": vector(1, 0), "c": vector(1, 1)}
    actual = {"c": vector(1, 1), "b": vector(0, 1), "a": vector(4, 3)}
    point = compare(SAMPLE, expected, actual)
    assert (point.output, point.cosine) == ("b", 0.0)
    assert compare(SAMPLE, expected, actual | {"a": vector(np.nan, 1)}).output == "a"


def test_a_missing_output_or_another_shape_is_an_error() -> None:
    with pytest.raises(ConversionError, match="no output 'y'"):
        compare(SAMPLE, {"y": vector(1)}, {"z": vector(1)})
    with pytest.raises(ConversionError, match=r"'y' is \(1, 2\), in the source graph \(2,\)"):
        compare(SAMPLE, {"y": vector(1, 2)}, {"y": vector(1, 2)[None]})


def test_the_verdict_is_the_worst_points() -> None:
    good = FidelityPoint(64, 1.0, "seed 0", "y", 0.99995, 0.01, 0.1, 0)
    bad = FidelityPoint(4092, 0.5, "seed 0", "y", 0.99, 0.1, 0.2, 0)
    report = FidelityReport((good, bad), min_cosine=0.99)
    assert report.passed  # the threshold itself passes
    assert report.worst_point is bad
    assert report.worst == 0.99
    assert not FidelityReport((good, bad), min_cosine=0.9901).passed
    assert report.to_json()["worst"] == bad.to_json()


# Inputs


SA3 = (
    TensorSpec("x", "float32", (1, 256, "L")),
    TensorSpec("t", "float32", (1,)),
    TensorSpec("t5_hidden", "float32", (1, 256, 768)),
    TensorSpec("t5_mask", "float32", (1, 256)),
    TensorSpec("seconds_total", "float32", (1,)),
    TensorSpec("local_add_cond", "float32", (1, 257, "L")),
)


def test_a_length_has_its_real_seconds() -> None:
    """44100 / 4096 = 10.77 latents per second; sm-music's longest, 4096, is 380.4 s."""
    assert duration_seconds(4096) == pytest.approx(380.4357, abs=1e-4)
    assert duration_seconds(44100) == 4096


def test_sa3_inputs_are_what_its_runtime_would_give() -> None:
    inputs = seeded_inputs(SA3, length=1292, t=0.02)
    assert {name: array.shape for name, array in inputs.items()} == {
        "x": (1, 256, 1292),
        "t": (1,),
        "t5_hidden": (1, 256, 768),
        "t5_mask": (1, 256),
        "seconds_total": (1,),
        "local_add_cond": (1, 257, 1292),
    }
    assert {array.dtype for array in inputs.values()} == {np.dtype(np.float32)}
    assert inputs["t"].item() == np.float32(0.02)
    assert inputs["seconds_total"].item() == np.float32(1292 * 4096 / 44100)
    assert inputs["t5_mask"][0].tolist() == [1] * 40 + [0] * 216
    # 330752 normal values: the sample deviation's own is 1 / sqrt(2 n) = 0.0012.
    assert inputs["x"].std() == pytest.approx(1, abs=0.01)
    assert inputs["local_add_cond"].std() == pytest.approx(0.1, abs=0.001)


def test_draws_depend_on_seed_and_name_alone() -> None:
    first = seeded_inputs(SA3, length=64, t=0.5, seed=7)
    again = seeded_inputs(SA3[::-1], length=64, t=1.0, seed=7)
    for name in ("x", "t5_hidden", "local_add_cond"):
        np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first["x"], seeded_inputs(SA3, length=64, t=0.5, seed=8)["x"])


def test_inputs_of_an_unknown_model_are_drawn_by_type() -> None:
    specs = (
        TensorSpec("waveform", "float16", ("N", 2, "samples")),
        TensorSpec("hidden", "bfloat16", (None, None, 8)),
        TensorSpec("attention_mask", "int64", ("N", "tokens")),
        TensorSpec("keep", "bool", (8,)),
        TensorSpec("input_ids", "int32", ("N", "tokens")),
        TensorSpec("timestep", "float32", ("N",)),
        TensorSpec("positions", "float32", ("samples",)),
        TensorSpec("gain", "float64", ()),
    )
    inputs = seeded_inputs(specs, length=12, t=0.25)
    shapes = {name: array.shape for name, array in inputs.items()}
    assert shapes == {
        "waveform": (1, 2, 12),
        "hidden": (1, 12, 8),
        "attention_mask": (1, 12),
        "keep": (8,),
        "input_ids": (1, 12),
        "timestep": (1,),
        "positions": (12,),
        "gain": (),
    }
    assert inputs["hidden"].dtype == ml_dtypes.bfloat16
    assert [str(array.dtype) for array in inputs.values()] == [spec.dtype for spec in specs]
    assert inputs["attention_mask"].tolist() == [[1] * 9 + [0] * 3]
    assert inputs["keep"].tolist() == [True] * 6 + [False] * 2
    assert set(inputs["input_ids"].reshape(-1).tolist()) <= {0, 1}
    assert inputs["timestep"].tolist() == [0.25]


def test_an_input_that_cannot_be_drawn_is_named() -> None:
    with pytest.raises(SourceModelError, match=r"'z' of type complex64 .*recorded"):
        seeded_inputs([TensorSpec("z", "complex64", (1,))], length=1, t=0.5)


# Sweeps over small models


SOURCE = "(float[1,4,L] x, float[1] t) => (float[1,4,L] y) { s = Mul(x, t) y = Exp(s) }"
IN_FP16 = """(float[1,4,L] x, float[1] t) => (float[1,4,L] y) {
    a = Cast<to = 10>(x)  b = Cast<to = 10>(t)  s = Mul(a, b)  e = Exp(s)  y = Cast<to = 1>(e)
}"""


def test_a_sweep_visits_every_point(tmp_path: Path) -> None:
    told: list[str] = []
    report = sweep(
        save(tmp_path, "source", SOURCE),
        save(tmp_path, "fp16", IN_FP16),
        lengths=[8, 16],
        t=[1.0, 0.5],
        min_cosine=0.9999,
        seed=3,
        samples=2,
        progress=told.append,
    )
    assert [(point.length, point.t, point.sample) for point in report.points] == [
        (length, t, f"seed {seed}") for length in (8, 16) for t in (1.0, 0.5) for seed in (3, 4)
    ]
    assert report.passed
    # fp16 rounds to 2**-11 at each of four steps, so the error is there and small.
    assert all(0 < point.relative_l2 < 4 * 2**-11 for point in report.points)
    assert told[0] == "reference at L=8 t=1, seed 3"
    assert "candidate at L=16 t=0.5, seed 4, 100 %" in told


def test_an_overflow_fails_the_sweep(tmp_path: Path) -> None:
    """exp(12) is beyond fp16's 65504; in fp32 it is a number."""
    report = sweep(
        save(tmp_path, "source", SOURCE),
        save(tmp_path, "fp16", IN_FP16),
        lengths=[64],
        t=[12.0],
        min_cosine=0.0,
    )
    (point,) = report.points
    assert point.nonfinite > 0
    assert math.isnan(point.cosine)
    assert not report.passed


def test_a_source_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, "source", SOURCE)
    with pytest.raises(SourceModelError, match=r"source\.onnx: its output 'y' is not finite at L=64 t=1000"):
        sweep(path, path, lengths=[64], t=[1000.0], min_cosine=0.9)


def test_a_source_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, "source", "(float[1,4,L] x, float[3] w) => (y) { y = MatMul(x, w) }")
    with pytest.raises(
        SourceModelError, match=r"source\.onnx: onnxruntime cannot run it: .*n?MatMul"
    ) as caught:
        sweep(path, path, lengths=[5], t=[1.0], min_cosine=0.9)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no model at all"])
def test_a_source_that_is_no_model_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "source.onnx"
    path.write_bytes(content)
    with pytest.raises(SourceModelError, match=r"source\.onnx: "):
        sweep(path, path, lengths=[5], t=[1.0], min_cosine=0.9)


def test_a_candidate_without_the_output_is_an_error(tmp_path: Path) -> None:
    candidate = save(tmp_path, "renamed", SOURCE.replace("y", "z"))
    with pytest.raises(ConversionError, match="no output 'y'"):
        sweep(save(tmp_path, "source", SOURCE), candidate, lengths=[8], t=[1.0], min_cosine=0.9)


def test_a_sweep_without_points_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, "source", SOURCE)
    with pytest.raises(RecipeError, match="no points"):
        sweep(path, path, lengths=[], t=[1.0], min_cosine=0.9)


def test_progress_can_stop_a_sweep(tmp_path: Path) -> None:
    path = save(tmp_path, "source", SOURCE)

    def stop(text: str) -> None:
        if text.startswith("candidate"):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        sweep(path, path, lengths=[8], t=[1.0], min_cosine=0.9, progress=stop)


# Recorded inputs


def record(folder: Path, name: str, **arrays: Array) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_recorded_inputs_are_used_at_their_own_length_and_time(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    x = np.random.default_rng(0).standard_normal((1, 4, 9))
    record(folder, "b", x=x, t=vector(0.5), noted=vector(1))
    record(folder, "a", x=x[..., :5].astype(np.float16), t=vector(0.25))
    source, candidate = save(tmp_path, "source", SOURCE), save(tmp_path, "fp16", IN_FP16)
    report = sweep(source, candidate, lengths=[64], t=[1.0], min_cosine=0.999, recorded=folder)
    assert [(p.sample, p.length, p.t) for p in report.points] == [("a.npz", 5, 0.25), ("b.npz", 9, 0.5)]
    assert report.passed
    samples = plan_samples(source, lengths=[], t=[], recorded=folder)
    (expected,) = reference_outputs(source, samples[1:])
    np.testing.assert_allclose(expected["y"], np.exp(x * 0.5), rtol=1e-6)


def test_one_recorded_file_can_be_given(tmp_path: Path) -> None:
    path = record(tmp_path, "only", x=np.zeros((1, 4, 3), np.float32), t=vector(1))
    specs = (TensorSpec("x", "float32", (1, 4, "L")), TensorSpec("t", "float32", (1,)))
    (sample,) = recorded_samples(specs, path)
    assert (sample.name, sample.length, sample.t) == ("only.npz", 3, 1.0)


RECORDED = (
    TensorSpec("x", "float32", (1, 4, "L")),
    TensorSpec("c", "float32", (1, 2, "L")),
    TensorSpec("n", "int64", (1,)),
)
GOOD = {"x": np.zeros((1, 4, 3)), "c": np.zeros((1, 2, 3)), "n": np.zeros(1, np.int64)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": None}, "holds no array for the input x"),
        ({"x": np.zeros((1, 5, 3))}, "'x' is 1x5x3, the input 1x4xL"),
        ({"x": np.zeros((4, 3))}, "'x' is 4x3, the input 1x4xL"),
        ({"c": np.zeros((1, 2, 4))}, "L is 3 in 'x' and 4 in 'c'"),
        ({"n": np.zeros(1)}, "'n' is float64, the input int64"),
        ({"x": np.full((1, 4, 3), np.inf)}, "'x' holds values that are not finite"),
        ({"x": np.full((1, 4, 3), 1e300)}, "'x' holds values that are not finite"),
        ({"x": np.array([{}], object)}, "cannot be read: Object arrays"),
    ],
)
def test_bad_recordings_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **changed}.items() if array is not None}
    path = record(tmp_path, "bad", **arrays)
    with np.errstate(over="ignore"), pytest.raises(SourceModelError) as caught:
        recorded_samples(RECORDED, tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_place_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match=r"holds no \.npz file"):
        recorded_samples(RECORDED, tmp_path)
    with pytest.raises(SourceModelError, match="no such recorded inputs"):
        recorded_samples(RECORDED, tmp_path / "absent")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(SourceModelError, match=r"torn\.npz: cannot be read"):
        recorded_samples(RECORDED, tmp_path)
    np.save(tmp_path / "bare.npy", np.zeros(3))
    with pytest.raises(SourceModelError, match=r"bare\.npy: is no \.npz archive"):
        recorded_samples(RECORDED, tmp_path / "bare.npy")


# Real graphs, with crude doubles of what a converter might do wrong


def everything_in_fp16(source: Path, target: Path) -> Path:
    """The graph with every float tensor in fp16, norms and angles too."""
    model = onnx.load(source)
    graph = model.graph
    for tensor in graph.initializer:
        _to_fp16(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _to_fp16(attribute.t)
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    del graph.value_info[:]
    inner = {value.name: f"{value.name}_fp16" for value in (*graph.input, *graph.output)}
    for node in graph.node:
        node.input[:] = [inner.get(name, name) for name in node.input]
        node.output[:] = [inner.get(name, name) for name in node.output]
    nodes = [
        *(helper.make_node("Cast", [v.name], [inner[v.name]], to=TensorProto.FLOAT16) for v in graph.input),
        *graph.node,
        *(helper.make_node("Cast", [inner[v.name]], [v.name], to=TensorProto.FLOAT) for v in graph.output),
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, target)
    return target


def _to_fp16(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def duration_in_fp16(source: Path, target: Path) -> Path:
    """The graph with the clipped duration, an ancestor of 62,000 rad, rounded to fp16; all else in fp32."""
    model = onnx.load(source)
    (clip,) = (node for node in model.graph.node if node.op_type == "Clip")
    at = list(model.graph.node).index(clip)
    name = clip.output[0]
    clip.output[0] = f"{name}_fp32"
    model.graph.node.insert(
        at + 1, helper.make_node("Cast", [f"{name}_fp32"], [f"{name}_fp16"], to=TensorProto.FLOAT16)
    )
    model.graph.node.insert(at + 2, helper.make_node("Cast", [f"{name}_fp16"], [name], to=TensorProto.FLOAT))
    onnx.save(model, target)
    return target


@pytest.mark.parametrize("name", ["sm_torchscript17", "md_torchscript17", "sm_dynamo20", "sm_dynamo23"])
def test_a_model_equals_itself(tiny_models: Mapping[str, Path], name: str) -> None:
    """fp32 against fp32 leaves the order of the sums: 6 digits, so a cosine of 1 - 1e-11 or so."""
    path = tiny_models[name]
    report = sweep(path, path, lengths=[64], t=[1.0, 0.02], min_cosine=1 - 1e-10)
    assert report.passed
    assert max(point.relative_l2 for point in report.points) < 1e-5


@pytest.mark.parametrize("name", ["sm_torchscript17", "md_torchscript17"])
def test_fp16_norms_are_caught_at_any_length(
    tiny_models: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    """x**2 is infinite in the norms, so rows become 0: finite, and wrong."""
    candidate = everything_in_fp16(tiny_models[name], tmp_path / "fp16.onnx")
    report = sweep(tiny_models[name], candidate, lengths=[64], t=[0.5], min_cosine=0.9999)
    assert not report.passed
    assert report.worst < 0.9


@pytest.mark.parametrize("name", ["sm_torchscript17", "md_torchscript17"])
def test_an_angles_ancestor_in_fp16_is_caught_at_full_length(
    tiny_models: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    """380.064 s are 380 s in fp16: 0.064 / 384 * 62832 = 10 rad of the fastest feature."""
    source = tiny_models[name]
    candidate = duration_in_fp16(source, tmp_path / "fp16.onnx")
    report = sweep(source, candidate, lengths=[64, 4092], t=[1.0], min_cosine=0.9999)
    short, full = report.points
    assert short.cosine > 0.9998
    assert full.cosine < 0.98
    assert report.worst_point is full
    assert not report.passed


def test_specs_are_those_of_the_graph(tiny_models: Mapping[str, Path]) -> None:
    assert input_specs(onnx.load(tiny_models["sm_dynamo23"]).graph) == SA3
