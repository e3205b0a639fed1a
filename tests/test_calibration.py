"""Calibration: ranges worked out by hand, ModelOpt's own scales, and what can go wrong.

ModelOpt runs in its own environment, which `make calibrate-env` makes; without one these tests skip,
except in continuous integration.  What does not need ModelOpt does not skip.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from engine_builder.cli.app import app
from engine_builder.errors import (
    BuilderError,
    ConversionError,
    Interrupted,
    PlatformError,
    ResourceError,
    SourceModelError,
)
from engine_builder.graph.find.linears import find_linears
from engine_builder.quantize import calibration
from engine_builder.quantize.activations import activation_amax
from engine_builder.quantize.calibration import CalibrationOptions, calibrate, calibration_python
from engine_builder.quantize.samples import FIRST_SEED, DataDigest, RecordedData, SyntheticData
from engine_builder.quantize.scales import ZERO_FLOOR, Floored, LinearRange, Scales, load_scales
from engine_builder.quantize.skeleton import normalize, write_skeleton
from engine_builder.source import Source, load_graph, open_source
from tests.conftest import REPOSITORY

# A graph whose every number is exact in fp32 ---------------------------------------------------------


W1 = np.zeros((4, 8), np.float32)
W1[0, 0], W1[1, 1], W1[3, 7] = 2, -3, 0.5
W2 = np.zeros((2, 8), np.float32)  # transposed by the Gemm: 8 in, 2 out
W2[0, 0], W2[1, 1] = 1, -4
W3 = np.array([[1, 0], [0, -8]], np.float32)
X_SHORT = np.array([[[1, 2, 3, -4]]], np.float32)
X_LONG = np.array([[[0, 5, 0, 0], [-6, 1, 0, 2]]], np.float32)


def value(name: str, shape: list[int | str], elem: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray],
    opset: int = 17,
) -> onnx.ModelProto:
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def three_linears() -> onnx.ModelProto:
    """``first`` reads x (1, L, 4), ``second`` x W1 summed over L (1, 8), ``third`` nothing but zeros."""
    return model(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h"], name="first"),
            helper.make_node("ReduceSum", ["h", "axis"], ["s"], name="sum", keepdims=0),
            helper.make_node("Gemm", ["s", "w2"], ["g"], name="second", transB=1),
            helper.make_node("Mul", ["g", "zero"], ["z"], name="nothing"),
            helper.make_node("MatMul", ["z", "w3"], ["y"], name="third"),
        ],
        [value("x", [1, "L", 4])],
        [value("y", [1, 2])],
        {"w1": W1, "w2": W2, "w3": W3, "zero": np.zeros((), np.float32), "axis": np.array([1], np.int64)},
    )


def opened(proto: onnx.ModelProto, folder: Path) -> Source:
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return open_source(path)


def recorded(folder: Path, *samples: Mapping[str, Any]) -> RecordedData:
    folder.mkdir(exist_ok=True)
    for number, arrays in enumerate(samples):
        np.savez(folder / f"{number}.npz", **arrays)
    return RecordedData(folder)


@pytest.fixture(scope="session")
def modelopt() -> Path:
    """A Python that has ModelOpt."""
    try:
        return calibration_python()
    except PlatformError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def by_hand(modelopt: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Scales]:
    folder = tmp_path_factory.mktemp("by_hand")
    source = opened(three_linears(), folder)
    data = recorded(folder / "data", {"x": X_SHORT}, {"x": X_LONG})
    return source, calibrate(source, CalibrationOptions(data, per_channel=True))


def test_ranges_are_those_worked_out_by_hand(by_hand: tuple[Source, Scales]) -> None:
    """first: |x| is 6 at most.  x W1 is [2, -6, 0.., -2] for the short sample; for the long one it is
    [0, -15, ..] and [-12, -3, .., 1], whose sum is [-12, -18, 0.., 1]: second reads 18 at most."""
    _, scales = by_hand
    assert scales.linears == {
        "first": LinearRange(
            activation_amax=6.0,
            weight_amax=3.0,
            weight_channel_amax=(2.0, 3.0, *[ZERO_FLOOR] * 5, 0.5),
        ),
        "second": LinearRange(activation_amax=18.0, weight_amax=4.0, weight_channel_amax=(1.0, 4.0)),
        "third": LinearRange(activation_amax=ZERO_FLOOR, weight_amax=8.0, weight_channel_amax=(1.0, 8.0)),
    }
    assert scales.floored == (
        Floored(linear="first", operand="weight_channels", channels=5),
        Floored(linear="third", operand="activation"),
    )
    assert scales.missing == {}


def test_scales_say_what_they_were_made_of(by_hand: tuple[Source, Scales]) -> None:
    source, scales = by_hand
    assert (scales.source.name, scales.source.sha256) == ("m.onnx", source.sha256)
    assert not scales.synthetic
    assert [(s.name, s.length, s.t) for s in scales.samples] == [("0.npz", 1, 0.0), ("1.npz", 2, 0.0)]
    expected = hashlib.sha256()
    for x in (X_SHORT, X_LONG):
        expected.update(f"x\0float32\0{list(x.shape)}\0".encode() + x.tobytes())
    assert scales.data.sha256 == expected.hexdigest()
    assert scales.calibration.method == "max"
    assert scales.calibration.versions["nvidia-modelopt"] == "0.47.0"


def test_the_source_is_left_as_it_was(by_hand: tuple[Source, Scales]) -> None:
    source, _ = by_hand
    assert source.path.read_bytes() == three_linears().SerializeToString()


@pytest.fixture(scope="module")
def differential(modelopt: Path, tiny_models: Mapping[str, Path]) -> tuple[Source, SyntheticData, Scales]:
    source = open_source(tiny_models["md_torchscript17"])
    data = SyntheticData((64,), (1.0, 0.02))
    return source, data, calibrate(source, CalibrationOptions(data))


def test_modelopt_measures_what_onnxruntime_and_numpy_measure(
    differential: tuple[Source, SyntheticData, Scales],
) -> None:
    """Both run the graph in fp32 without optimization.  They read the weights by different kernels,
    whose sums differ in the last bits: at most 8e-7 was seen."""
    source, data, scales = differential
    own = activation_amax(source, data.samples(source.inputs))
    measured = {linear: r.activation_amax for linear, r in scales.linears.items()}
    assert len(measured) == 29
    assert measured == pytest.approx(own, rel=1e-5)
    assert scales.synthetic
    assert (scales.missing, scales.floored) == ({}, ())


# ModelOpt's fp8 mode writes amax / 127 * 448 / 127 as the scale of every quantized activation.
_END_TO_END = """
import json, sys
import numpy as np, onnx
from onnx import numpy_helper
from modelopt.onnx.quantization import quantize
source, data, out = sys.argv[1:]
quantize(source, quantize_mode="fp8", calibration_data=dict(np.load(data)), calibration_method="max",
         calibration_eps=["cpu"], op_types_to_quantize=["MatMul", "Gemm"], high_precision_dtype="fp32",
         disable_mha_qdq=True, output_path=out,
         calibration_shapes="x:1x256x64,local_add_cond:1x257x64")
graph = onnx.load(out).graph
constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
for n in graph.node:
    if n.op_type == "Constant":
        constants[n.output[0]] = numpy_helper.to_array(n.attribute[0].t)
quantized = {n.output[0]: n.input for n in graph.node if n.op_type == "QuantizeLinear"}
found = {}
for node in graph.node:
    if node.op_type == "DequantizeLinear" and node.input[0] in quantized:
        value = quantized[node.input[0]][0]
        if value not in constants:
            found[value] = float(constants[node.input[1]])
print("SCALES" + json.dumps(found))
"""


def test_ranges_are_the_ones_in_modelopts_own_fp8_scales(
    modelopt: Path, differential: tuple[Source, SyntheticData, Scales], tmp_path: Path
) -> None:
    source, data, scales = differential
    drawn = [sample.load() for sample in data.samples(source.inputs)]
    stacked: dict[str, Any] = {name: np.concatenate([inputs[name] for inputs in drawn]) for name in drawn[0]}
    np.savez(tmp_path / "two.npz", **stacked)
    files = [str(path) for path in (source.path, tmp_path / "two.npz", tmp_path / "q.onnx")]
    run = subprocess.run(
        [str(modelopt), "-c", _END_TO_END, *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    end_to_end = json.loads(run.stdout.rpartition("SCALES")[2])
    linears, _ = find_linears(list(load_graph(source).graph.all_nodes()))
    expected = {
        linear.name: end_to_end[linear.activation.name] * 127**2 / 448
        for linear in linears
        if linear.activation.name in end_to_end
    }
    # ModelOpt's own choice leaves out 10: the 7 of a single row, project_in and both cross to_q.
    assert len(expected) == 19
    measured = {name: scales.linears[name].activation_amax for name in expected}
    assert measured == pytest.approx(expected, rel=1e-5)


def test_entropy_clips_a_long_tail_whatever_the_order_of_the_samples(modelopt: Path, tmp_path: Path) -> None:
    """A normal activation with one value of 100 in 100,000 is cut near the bulk; the range of max is 100."""
    source = opened(three_linears(), tmp_path)
    bulk = np.random.default_rng(0).standard_normal((1, 25000, 4)).astype(np.float32)
    tail = np.zeros((1, 8, 4), np.float32)
    tail[0, 0, 0] = 100
    small = bulk[:, :100] * np.float32(1e-4)
    orders = (bulk, tail, small), (small, tail, bulk)
    amax = []
    for number, order in enumerate(orders):
        data = recorded(tmp_path / str(number), *({"x": x} for x in order))
        scales = calibrate(source, CalibrationOptions(data, "entropy"))
        assert scales.calibration.method == "entropy"
        amax.append(scales.linears["first"].activation_amax)
    assert amax[0] == amax[1]
    assert 3 < amax[0] < 50


def test_what_is_not_finite_is_named(modelopt: Path, tmp_path: Path) -> None:
    proto = three_linears()
    proto.graph.node[3].CopyFrom(helper.make_node("Exp", ["g"], ["z"], name="overflow"))
    source = opened(proto, tmp_path)
    data = recorded(tmp_path / "data", {"x": X_SHORT}, {"x": X_SHORT * 100})  # exp(2400)
    with pytest.raises(ConversionError, match=r"z is not finite .* sample 1\.npz, L=1, t=0"):
        calibrate(source, CalibrationOptions(data))


def test_cuda_that_is_not_there_is_a_fault_of_the_environment(modelopt: Path, tmp_path: Path) -> None:
    probe = "import onnxruntime as o; print('CUDAExecutionProvider' in o.get_available_providers())"
    if (
        subprocess.run([str(modelopt), "-c", probe], capture_output=True, text=True, check=True).stdout[0]
        == "T"
    ):
        pytest.skip("this onnxruntime has CUDA")
    source = opened(three_linears(), tmp_path)
    with pytest.raises(PlatformError, match=r"has no CUDAExecutionProvider .*--provider cpu"):
        calibrate(source, CalibrationOptions(recorded(tmp_path / "data", {"x": X_SHORT}), provider="cuda"))


def test_the_command_writes_the_same_file_and_says_that_it_is_synthetic(
    modelopt: Path, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    path = tiny_models["sm_dynamo23"]
    arguments = ["--lengths", "32", "--t", "0.5", "--json", "--per-channel"]
    files = ["--out", str(tmp_path / "s.json"), "--cache", str(tmp_path / "cache")]
    run = subprocess.run(
        [sys.executable, "entrypoint.py", "calibrate", str(recipe_file(tmp_path, path)), *arguments, *files],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    assert (printed["linears"], printed["samples"], printed["synthetic"]) == (29, 1, True)
    assert "29 linears from 1 synthetic samples" in run.stderr
    text = (tmp_path / "s.json").read_text()
    document = json.loads(text)
    assert document["data"]["synthetic"] is True
    assert document["samples"] == [{"name": "draw 1", "length": 32, "t": 0.5}]
    assert len(document["linears"]["node_linear_28"]["weight_channel_amax"]) == 256
    again = calibrate(open_source(path), CalibrationOptions(SyntheticData((32,), (0.5,)), per_channel=True))
    assert again.to_json() == text


# Without ModelOpt -------------------------------------------------------------------------------------


def recipe_file(folder: Path, onnx_path: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        "schema: sa3-builder/1\n"
        f"model: {{name: t, onnx: {onnx_path}}}\n"
        "precision: fp16\n"
        "profiles:\n"
        "  - x: [[1, 256, 1], [1, 256, 32], [1, 256, 64]]\n"
        "    local_add_cond: [[1, 257, 1], [1, 257, 32], [1, 257, 64]]\n"
        "target: {backend: tensorrt_rtx, sm: 89}\n"
        "output: {dir: out}\n"
    )
    return path


def test_recorded_inputs_that_do_not_fit_are_a_fault_of_the_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, sys.executable)
    source = opened(three_linears(), tmp_path)
    data = recorded(tmp_path / "data", {"x": X_SHORT[..., :3]})
    with pytest.raises(SourceModelError, match=r"0\.npz: the array 'x' is 1x1x3, the input 1xLx4"):
        calibrate(source, CalibrationOptions(data))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--out is needed"),
        (["--out", "s.json", "--method", "mean"], 2, "--method must be max or entropy, not 'mean'"),
        (["--out", "s.json", "--provider", "tpu"], 2, "--provider must be cpu or cuda, not 'tpu'"),
        (["--out", "s.json", "--lengths", "64,x"], 2, "--lengths must be numbers"),
        (["--out", "s.json", "--lengths", "0"], 2, "--lengths must be 1 or more, not 0"),
        (["--out", "s.json", "--t", "1.5"], 2, "--t must lie between 0 and 1"),
        (["--out", "s.json", "--data", "none.npz"], 4, "none.npz: no such recorded inputs"),
    ],
)
def test_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, sys.executable)
    monkeypatch.chdir(tmp_path)
    recipe = recipe_file(tmp_path, opened(three_linears(), tmp_path).path)
    result = CliRunner().invoke(app, ["calibrate", str(recipe), "--cache", str(tmp_path / "c"), *arguments])
    assert isinstance(result.exception, BuilderError)
    assert result.exception.exit_code == code
    assert message in str(result.exception)
    assert not (tmp_path / "s.json").exists()


def test_the_recipe_says_where_its_scales_go_and_which_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = {
        "amax": {"x": 6.0, "s": 18.0, "z": 0.5},
        "data_sha256": "00" * 32,
        "samples": [],
        "versions": {},
    }
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setattr(calibration, "run_process", lambda *arguments: answer)
    recipe = recipe_file(tmp_path, opened(three_linears(), tmp_path).path)
    precision = "precision: {recipe: fp8, scales: made/s.json, weights: per_channel}"
    recipe.write_text(recipe.read_text().replace("precision: fp16", precision))
    result = CliRunner().invoke(
        app, ["calibrate", str(recipe), "--cache", str(tmp_path / "c")], catch_exceptions=False
    )
    assert result.exit_code == 0
    scales = load_scales(tmp_path / "made" / "s.json")
    assert scales.linears["second"].weight_channel_amax == (1.0, 4.0)


def test_a_python_that_is_none_is_a_fault_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, str(tmp_path))
    with pytest.raises(PlatformError, match=f"{calibration.PYTHON_VARIABLE}=.*: is not a Python"):
        calibration_python()


def test_without_modelopt_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(calibration.PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(calibration, "_ROOT", tmp_path)
    if importlib.util.find_spec("modelopt"):
        pytest.skip("this Python has ModelOpt itself")
    with pytest.raises(PlatformError, match="make calibrate-env") as caught:
        calibration_python()
    assert caught.value.exit_code == 3
    python = tmp_path / ".venv-calibrate" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert calibration_python() == python


def stand_in(folder: Path, script: str) -> str:
    """An executable that stands where the Python with ModelOpt should be."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("kill -9 $$", ResourceError, "was killed, most likely because memory ran out"),
        ("kill -15 $$", Interrupted, "was stopped"),
        ("kill -11 $$", ConversionError, "ended unexpectedly with SIGSEGV"),
        ("echo deep; echo trouble >&2; exit 9", ConversionError, "with exit code 9: trouble"),
        ("exit 0", ConversionError, "with exit code 0"),
        ("echo 'ModuleNotFoundError: No module named x'; exit 1", PlatformError, "environment is incomplete"),
        (f'exec {sys.executable} "$@"', PlatformError, "ModelOpt cannot be imported"),
    ],
)
def test_a_process_that_ends_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, kind: type[BuilderError], message: str
) -> None:
    if "exec" in script and importlib.util.find_spec("modelopt"):
        pytest.skip("this Python has ModelOpt")
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, stand_in(tmp_path, script))
    source = opened(three_linears(), tmp_path)
    data = recorded(tmp_path / "data", {"x": X_SHORT})
    with pytest.raises(kind, match=message):
        calibrate(source, CalibrationOptions(data))


def test_a_request_to_stop_ends_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, stand_in(tmp_path, f"echo $$ >{pid_file}; exec sleep 60"))
    source = opened(three_linears(), tmp_path)
    cancel = threading.Event()

    def stop() -> None:
        deadline = time.monotonic() + 5
        while not pid_file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        cancel.set()

    threading.Thread(target=stop).start()
    started = time.monotonic()
    with pytest.raises(Interrupted):
        calibrate(source, CalibrationOptions(recorded(tmp_path / "data", {"x": X_SHORT})), cancel=cancel)
    assert time.monotonic() - started < 10
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_a_source_that_changes_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = opened(three_linears(), tmp_path)

    def process(*arguments: Any) -> dict[str, Any]:
        os.utime(source.path, ns=(0, 0))
        return {}

    monkeypatch.setenv(calibration.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setattr(calibration, "run_process", process)
    with pytest.raises(SourceModelError, match="changed while it was calibrated"):
        calibrate(source, CalibrationOptions(SyntheticData((4,))))


def test_a_linear_that_modelopt_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = {"amax": {"x": 6.0, "s": 18.0}, "data_sha256": "00" * 32, "samples": [], "versions": {}}
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setattr(calibration, "run_process", lambda *arguments: answer)
    scales = calibrate(opened(three_linears(), tmp_path), CalibrationOptions(SyntheticData((4,))))
    assert list(scales.linears) == ["first", "second"]
    assert scales.missing == {"third": "ModelOpt gave no range for its activation"}


def test_a_linear_in_a_subgraph_is_named_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["inner"], name="hidden")],
        "then",
        [],
        [value("inner", ["L", 2])],
    )
    other = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["other"], name="hidden too")],
        "else",
        [],
        [value("other", ["L", 2])],
    )
    proto = model(
        [
            helper.make_node("If", ["flag"], ["a"], name="if", then_branch=branch, else_branch=other),
            helper.make_node("MatMul", ["a", "w"], ["y"], name="outer"),
        ],
        [value("x", ["L", 2]), value("flag", [], TensorProto.BOOL)],
        [value("y", ["L", 2])],
        {"w": W3},
    )
    answer = {"amax": {"a": 1.0}, "data_sha256": "00" * 32, "samples": [], "versions": {}}
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setattr(calibration, "run_process", lambda *arguments: answer)
    scales = calibrate(opened(proto, tmp_path), CalibrationOptions(SyntheticData((4,))))
    assert list(scales.linears) == ["outer"]
    assert scales.missing == {"hidden": "it lies in a subgraph", "hidden too": "it lies in a subgraph"}


def test_a_model_without_linears_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(calibration.PYTHON_VARIABLE, sys.executable)
    proto = model(
        [helper.make_node("Neg", ["x"], ["y"], name="n")], [value("x", ["L"])], [value("y", ["L"])], {}
    )
    with pytest.raises(ConversionError, match="has no linear"):
        calibrate(opened(proto, tmp_path), CalibrationOptions(SyntheticData((4,))))


# The skeleton and the samples ---------------------------------------------------------------------------


def big_linear(weight: np.ndarray) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="m")]
    rows, columns = weight.shape
    return model(nodes, [value("x", ["L", rows])], [value("y", ["L", columns])], {"w": weight})


def test_large_weights_are_inputs_read_from_the_source_itself(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    source = opened(big_linear(weight), tmp_path)
    graph = load_graph(source)
    normalize(graph)
    (tmp_path / "work").mkdir()
    skeleton = write_skeleton(graph, find_linears(list(graph.graph.all_nodes()))[0], tmp_path / "work")
    written = onnx.load(skeleton.graph)
    assert [tensor.name for tensor in written.graph.initializer] == []
    assert [i.name for i in written.graph.input] == ["x", "w"]
    assert skeleton.graph.stat().st_size < 1024 < weight.nbytes
    (mapped,) = skeleton.weights
    assert mapped.path == str(source.path)
    np.testing.assert_array_equal(mapped.array(), weight)
    assert not mapped.array().flags.writeable
    assert skeleton.activations == ("x",)
    probe = next(node for node in written.graph.node if node.name == skeleton.probes[0])
    assert (probe.op_type, list(probe.input)) == ("Shape", ["x"])
    onnx.checker.check_model(written)


def test_weights_that_lie_in_no_file_are_written_to_one(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    graph: ir.Model = ir.from_proto(big_linear(weight))
    skeleton = write_skeleton(graph, find_linears(list(graph.graph.all_nodes()))[0], tmp_path)
    np.testing.assert_array_equal(skeleton.weights[0].array(), weight)


def test_drawn_samples_are_never_those_of_the_fidelity_sweep(tiny_models: Mapping[str, Path]) -> None:
    """Recipes seed the sweep with up to 2**32 - 1 and draw up to 1000 samples from there on."""
    assert FIRST_SEED > 2**32 - 1 + 1000
    specs = open_source(tiny_models["sm_dynamo20"]).inputs
    data = SyntheticData((8, 16), (1.0, 0.5), draws=2)
    samples = data.samples(specs)
    assert [(s.name, s.length, s.t) for s in samples] == [
        (f"draw {draw}", length, t) for length in (8, 16) for t in (1.0, 0.5) for draw in (1, 2)
    ]
    x = {s.name: s.load()["x"] for s in samples if s.length == 8 and s.t == 1.0}
    assert x["draw 1"].shape == (1, 256, 8)
    assert not np.array_equal(x["draw 1"], x["draw 2"])


def test_the_digest_tells_names_types_shapes_and_values_apart() -> None:
    ones = np.ones((2, 3), np.float32)
    variants: list[dict[str, np.ndarray]] = [
        {"a": ones},
        {"b": ones},
        {"a": ones.reshape(3, 2)},
        {"a": ones.view(np.int32)},
        {"a": ones * 2},
        {"a": ones, "b": ones},
    ]
    digests = set()
    for inputs in variants:
        digest = DataDigest()
        digest.update(inputs)
        digests.add(digest.hexdigest())
    assert len(digests) == len(variants)
