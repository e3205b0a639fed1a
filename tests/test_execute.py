"""Running engines: what can be known without a GPU, and the CUDA part on one where there is one.

TensorRT itself is in none of these tests.  A stand-in engine that copies its input takes its
place where only the order of calls, or only the GPU, is what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import engine_builder.execute.cuda as cuda_module
import engine_builder.execute.stage as stage
from engine_builder.compile.backend import build_files, build_options, load_backend, load_options
from engine_builder.compile.isolated import execute_engine
from engine_builder.compile.log import MessageLog, load_error
from engine_builder.compile.refit import linear_weights, mark_linear_weights
from engine_builder.compile.timing import TimingCache
from engine_builder.compile.versions import member
from engine_builder.errors import (
    BuilderError,
    CompileError,
    PlatformError,
    RecipeError,
    ResourceError,
    SourceModelError,
)
from engine_builder.execute.cuda import Device
from engine_builder.execute.loading import load_plugins
from engine_builder.execute.request import ExecuteRequest, Execution, Latency, LoadOptions, Run
from engine_builder.execute.run import Session, execute
from engine_builder.execute.statistics import runs_within, summarize
from engine_builder.execute.tensors import (
    Arena,
    EngineTensor,
    arrange,
    bounds,
    holds,
    noise,
    numpy_type,
    plan_runs,
    uncovered,
)
from engine_builder.onnx_file import read_onnx
from engine_builder.pipeline import build as run_recipe
from engine_builder.recipe import Build, Fidelity, Profile, ShapeRange, load_recipe
from engine_builder.source_graph import TensorSpec
from engine_builder.stage_runner import Settings
from tests.recipes import write_recipe
from verify.fidelity import reference_outputs
from verify.inputs import input_specs

F32 = np.dtype(np.float32)
SHORT = Profile({"x": ShapeRange((1, 256, 1), (1, 256, 64), (1, 256, 1292))})
LONG = Profile({"x": ShapeRange((1, 256, 1024), (1, 256, 4092), (1, 256, 4096))})


# --- shapes, profiles and memory ------------------------------------------------------------


def test_tensors_lie_one_after_the_other_on_256_bytes() -> None:
    half = np.dtype(np.float16)
    arena = arrange([("x", (1, 3), F32), ("mask", (200,), half), ("empty", (0, 7), F32), ("y", (2,), half)])
    # 12 bytes take one unit of 256, 400 take two, nothing takes one.
    assert arena == Arena({"x": 0, "mask": 256, "empty": 768, "y": 1024}, 1280)


@pytest.mark.parametrize(
    ("member_name", "dtype", "size"),
    [
        ("FLOAT", np.float32, 4),
        ("BF16", ml_dtypes.bfloat16, 2),
        ("FP8", ml_dtypes.float8_e4m3fn, 1),
        ("INT64", np.int64, 8),
    ],
)
def test_types_of_engine_tensors(member_name: str, dtype: Any, size: int) -> None:
    assert numpy_type(member_name) == np.dtype(dtype)
    assert numpy_type(member_name).itemsize == size


def test_packed_types_are_refused() -> None:
    with pytest.raises(CompileError, match="INT4"):
        numpy_type("INT4")


@pytest.mark.parametrize(
    ("shape", "short", "long"),
    [((1, 256, 1), True, False), ((1, 256, 1292), True, True), ((1, 256, 4096), False, True),
     ((1, 256, 4097), False, False), ((1, 255, 64), False, False), ((256, 64), False, False)],
)  # fmt: skip
def test_a_profile_holds_what_lies_within_its_bounds(shape: tuple[int, ...], short: bool, long: bool) -> None:
    assert (holds(SHORT, {"x": shape}), holds(LONG, {"x": shape})) == (short, long)
    assert not holds(SHORT, {"z": shape})
    assert holds(Profile({}), {"x": shape})


def test_every_sample_runs_on_every_profile_that_holds_it() -> None:
    samples = [{"x": (1, 256, n)} for n in (64, 1292, 4092)]
    assert plan_runs((SHORT, LONG), samples) == ((0, 0), (1, 0), (1, 1), (2, 1))
    assert uncovered((SHORT, LONG), samples[:1]) == (1,)
    with pytest.raises(RecipeError, match=r"no profile of the engine holds x \[1, 256, 5000\]"):
        plan_runs((SHORT, LONG), [{"x": (1, 256, 5000)}])


def test_bounds_of_a_profile_are_measured_once_each() -> None:
    inputs = (
        EngineTensor("x", "input", F32, (1, 256, -1)),
        EngineTensor("t", "input", F32, (1,)),
    )
    assert bounds(SHORT, inputs) == (
        ("min", {"x": (1, 256, 1), "t": (1,)}),
        ("opt", {"x": (1, 256, 64), "t": (1,)}),
        ("max", {"x": (1, 256, 1292), "t": (1,)}),
    )
    one = Profile({"x": ShapeRange((1, 256, 9), (1, 256, 9), (1, 256, 9))})
    assert bounds(one, inputs) == (("max", {"x": (1, 256, 9), "t": (1,)}),)
    assert bounds(Profile({}), inputs[1:]) == (("max", {"t": (1,)}),)


def test_a_profile_without_a_sample_gets_its_longest() -> None:
    specs = (TensorSpec("x", "float32", (1, 256, "L")), TensorSpec("t", "float32", (1,)))
    samples = [{"x": (1, 256, 64)}]
    assert stage.extra_lengths((SHORT, LONG), samples, specs) == (4096,)
    assert stage.extra_lengths((SHORT,), samples, specs) == ()


def test_noise_has_the_shape_and_type_and_is_the_same_again() -> None:
    a = noise((4, 1000), np.dtype(ml_dtypes.bfloat16), 7)
    assert (a.shape, a.dtype) == ((4, 1000), np.dtype(ml_dtypes.bfloat16))
    assert np.array_equal(a, noise((4, 1000), np.dtype(ml_dtypes.bfloat16), 7))
    assert 0.9 < float(a.astype(np.float32).std()) < 1.1
    assert set(np.unique(noise((100,), np.dtype(np.int64), 0))) == {0, 1}


# --- times ----------------------------------------------------------------------------------


def test_median_and_percentiles() -> None:
    assert summarize([float(n) for n in range(1, 102)]) == (51.0, 6.0, 96.0)
    for wrong in ([], [1.0, math.nan], [-1.0]):
        with pytest.raises(CompileError, match="no times"):
            summarize(wrong)


@pytest.mark.parametrize(("once", "runs"), [(0.0, 500), (0.1, 500), (10.0, 100), (25.0, 40), (1000.0, 20)])
def test_how_often_to_measure_in_a_second(once: float, runs: int) -> None:
    assert runs_within(1000.0, once) == runs


# --- CUDA -----------------------------------------------------------------------------------


def fake_cuda(devices: int = 1, failing: str = "", error: int = 2) -> SimpleNamespace:
    """A CUDA runtime of which one call fails; every other gives zero."""

    class Error(int):
        name = "cudaErrorMemoryAllocation" if error == 2 else "cudaErrorIllegalAddress"

    def call(name: str) -> Callable[..., tuple[Any, ...]]:
        results: dict[str, tuple[Any, ...]] = {
            "cudaGetDeviceCount": (devices,),
            "cudaStreamCreate": (7,),
            "cudaMalloc": (4096,),
            "cudaEventCreate": (1,),
            "cudaEventElapsedTime": (0.25,),
        }
        return lambda *_: (Error(error) if name == failing else Error(0), *results.get(name, ()))

    names = (
        "cudaGetDeviceCount", "cudaSetDevice", "cudaStreamCreate", "cudaStreamDestroy",
        "cudaStreamSynchronize", "cudaMalloc", "cudaFree", "cudaMemcpyAsync", "cudaEventCreate",
        "cudaEventRecord", "cudaEventDestroy", "cudaEventElapsedTime",
    )  # fmt: skip
    return SimpleNamespace(
        **{name: call(name) for name in names},
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2),
        cudaError_t=SimpleNamespace(cudaErrorMemoryAllocation=2),
        cudaGetErrorString=lambda code: (0, b"what it means"),
    )


@pytest.mark.parametrize(
    ("fake", "kind", "message"),
    [
        (fake_cuda(devices=0), PlatformError, "CUDA shows none"),
        (fake_cuda(failing="cudaGetDeviceCount", error=35), PlatformError, "CUDA shows none"),
        (fake_cuda(failing="cudaMalloc"), ResourceError, "the GPU's memory ran out"),
        (
            fake_cuda(failing="cudaStreamSynchronize", error=700),
            CompileError,
            "does not run: cudaErrorIllegalAddress: what it means",
        ),
    ],
)
def test_cuda_errors(
    monkeypatch: pytest.MonkeyPatch, fake: SimpleNamespace, kind: type[BuilderError], message: str
) -> None:
    monkeypatch.setattr(cuda_module, "cuda_runtime", lambda: fake)
    with pytest.raises(kind, match=message), Device() as device:
        device.upload(np.zeros(3, np.float32), device.allocate(12))


def test_times_are_those_between_pairs_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "cuda_runtime", fake_cuda)
    done: list[int] = []
    with Device() as device:
        assert device.time(lambda: done.append(1), 5) == [0.25] * 5
    assert len(done) == 5


def test_without_cuda_bindings_engines_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(PlatformError, match="cuda-bindings cannot be imported") as caught:
        Device()
    assert caught.value.hint == "pip install cuda-bindings"
    runs_here: Any = SimpleNamespace(can_execute=lambda sm: sm == 90)
    assert stage.why_not(runs_here, 89) == "this machine has no GPU of sm_89"
    assert stage.why_not(runs_here, 90) == "cuda-bindings is not installed"


# --- an engine that copies, in place of a real one ------------------------------------------


class CopyContext:
    """The execution context of an engine whose output ``y`` is its input ``x``."""

    def __init__(self, copy: Callable[[int, int, int, int], bool]) -> None:
        self.profile = 0
        self.switches = 0
        self._copy = copy
        self._shape: tuple[int, ...] = ()
        self._address: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile, self.switches = profile, self.switches + 1
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shape = shape
        return holds((SHORT, LONG)[self.profile], {name: shape})

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shape

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._address[name] = address
        return address % 256 == 0

    def execute_async_v3(self, stream: int) -> bool:
        return self._copy(self._address["y"], self._address["x"], 4 * math.prod(self._shape), stream)


MODES = SimpleNamespace(TensorIOMode=SimpleNamespace(INPUT="in"))


def copy_engine(context: CopyContext | None) -> Any:
    def profile_shape(name: str, profile: int) -> tuple[tuple[int, ...], ...]:
        r = (SHORT, LONG)[profile].shapes[name]
        return r.min, r.opt, r.max

    return SimpleNamespace(
        num_io_tensors=2,
        num_optimization_profiles=2,
        get_tensor_name=lambda index: "xy"[index],
        get_tensor_mode=lambda name: "in" if name == "x" else "out",
        get_tensor_dtype=lambda name: SimpleNamespace(name="FLOAT"),
        get_tensor_shape=lambda name: (1, 256, -1),
        get_tensor_profile_shape=profile_shape,
        create_execution_context=lambda: context,
    )


@dataclass
class HostDevice:
    """A device whose memory is the host's; it measures nothing."""

    stream: int = 0
    memory: dict[int, Any] = field(default_factory=dict)

    def allocate(self, size: int) -> int:
        base = np.zeros(size + 256, np.uint8)
        address = -(-base.ctypes.data // 256) * 256
        self.memory[address] = base
        return address

    def upload(self, array: Any, address: int) -> None:
        import ctypes

        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        import ctypes

        array = np.empty(shape, dtype)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        return array

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def copy(self, target: int, source: int, size: int, stream: int) -> bool:
        import ctypes

        ctypes.memmove(target, source, size)
        return True


def test_a_session_switches_profiles_and_grows_its_memory_only_when_needed() -> None:
    device = HostDevice()
    context = CopyContext(device.copy)
    session = Session(MODES, copy_engine(context), device)  # type: ignore[arg-type]
    assert session.profiles == (SHORT, LONG)
    assert [tensor.name for tensor in session.inputs] == ["x"]
    for profile, length in ((0, 64), (0, 1292), (0, 1), (1, 4096), (1, 1024), (0, 2)):
        x = noise((1, 256, length), F32, length)
        assert np.array_equal(session.run(profile, {"x": x})["y"], x)
    assert context.switches == 2
    # Room for L = 64, 1292 and 4096; the shorter ones run in what is there.
    assert len(device.memory) == 3


def test_what_a_session_refuses() -> None:
    device = HostDevice()
    session = Session(MODES, copy_engine(CopyContext(device.copy)), device)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="input x that the source model does not have"):
        session.run(0, {})
    with pytest.raises(CompileError, match=r"does not take x \[1, 256, 4096\]"):
        session.run(0, {"x": noise((1, 256, 4096), F32, 0)})
    with pytest.raises(CompileError, match="gives no execution context"):
        Session(MODES, copy_engine(None), device)  # type: ignore[arg-type]
    refusing = CopyContext(lambda *_: False)
    with pytest.raises(CompileError, match="refused to enqueue"):
        Session(MODES, copy_engine(refusing), device).run(0, {"x": noise((1, 256, 9), F32, 0)})  # type: ignore[arg-type]


@pytest.fixture
def gpu() -> Iterator[Device]:
    """The GPU of this machine."""
    try:
        device = Device()
    except PlatformError as error:
        pytest.skip(f"needs an NVIDIA GPU and cuda-bindings: {error.message}")
    with device:
        yield device


def test_a_session_on_a_gpu(gpu: Device) -> None:
    runtime = cuda_module.cuda_runtime()
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice

    def copy(target: int, source: int, size: int, stream: int) -> bool:
        return int(runtime.cudaMemcpyAsync(target, source, size, kind, stream)[0]) == 0

    session = Session(MODES, copy_engine(CopyContext(copy)), gpu)
    for profile, length in ((0, 64), (1, 4096), (0, 1)):
        x = noise((1, 256, length), F32, length)
        assert np.array_equal(session.run(profile, {"x": x})["y"], x)
    measured = session.measure(1, "max", {"x": (1, 256, 4096)})
    assert measured.runs == 500
    # 4 MB read and written: at 20 TB/s, which no GPU reaches, it would take 0.4 microseconds.
    assert 0.0004 < measured.low_ms <= measured.median_ms <= measured.high_ms


def test_memory_of_a_gpu(gpu: Device) -> None:
    assert gpu.name.startswith(("NVIDIA", "Tesla", "Quadro", "GeForce"))
    free = gpu.free_bytes()
    values = np.arange(1000, dtype=np.float32).astype(ml_dtypes.bfloat16)
    address = gpu.allocate(256 << 20)
    assert free - gpu.free_bytes() >= 256 << 20
    gpu.upload(values, address)
    assert np.array_equal(gpu.download(address, (1000,), values.dtype), values)
    with pytest.raises(ResourceError, match="the GPU's memory ran out"):
        gpu.allocate(1 << 50)


# --- comparing with the source --------------------------------------------------------------


def stand_in(source: Path, factor: Callable[[int], float]) -> Callable[..., Execution]:
    """An execution whose outputs are the source's, times a factor for each length.

    A sample of up to 16 frames runs on profile 0, a longer one on profile 1.
    """

    def run(backend: str, request: ExecuteRequest, **_: object) -> Execution:
        runs: list[Run] = []
        for number, file in enumerate(request.inputs):
            with np.load(file) as inputs:
                held = dict(inputs)
            length = held["x"].shape[-1]
            sample: Any = SimpleNamespace(load=lambda held=held: held, length=length, t=0, name="")
            (outputs,) = reference_outputs(source, [sample])
            profile = int(length > 16)
            path = request.outputs / f"{number}.{profile}.npz"
            np.savez(path, allow_pickle=False, velocity=outputs["velocity"] * factor(length))
            runs.append(Run(number, profile, path))
        latency = Latency(0, "max", {"x": (1, 256, 16)}, 1.23456, 1.0, 2.0, 500)
        return Execution("a GPU", tuple(runs), (latency,), (10, 20), 30, 40, 1.0)

    return run


def test_an_engine_is_compared_on_every_profile_it_ran_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path
) -> None:
    """The stand-in engine is exact on profile 0 and half a turn off on profile 1."""
    source = shared / "models/sm_torchscript17.onnx"
    ranges = {
        "x": ShapeRange((1, 256, 1), (1, 256, 8), (1, 256, 16)),
        "local_add_cond": ShapeRange((1, 257, 1), (1, 257, 8), (1, 257, 16)),
    }
    longer = {
        name: ShapeRange((*r.min[:2], 17), (*r.min[:2], 20), (*r.min[:2], 24)) for name, r in ranges.items()
    }
    monkeypatch.setattr(stage, "execute_engine", stand_in(source, lambda length: 1 - 2 * (length > 16)))
    asked = stage.EngineRun(
        engine=tmp_path / "e.trt",
        load=LoadOptions(),
        source=source,
        inputs=input_specs(read_onnx(source).model.graph),
        profiles=(Profile(ranges), Profile(longer)),
        sweep=Fidelity(t=(0.5,)),
        lengths=(8,),
    )
    backend: Any = SimpleNamespace(name="tensorrt")
    facts = stage.run_engine(backend, asked, tmp_path, progress=lambda text: None)
    points = [(p["length"], p["sample"], round(p["cosine"], 6)) for p in facts["fidelity"]["points"]]
    # No sample lies in the second profile, so that its longest shape is tried.
    assert points == [(8, "seed 0, profile 0", 1.0), (24, "seed 0, profile 1", -1.0)]
    assert facts["latency"] == [
        {"profile": 0, "bound": "max", "shapes": {"x": [1, 256, 16]}, "median_ms": 1.2346, "p05_ms": 1.0,
         "p95_ms": 2.0, "runs": 500}
    ]  # fmt: skip
    assert (facts["context_bytes"], facts["weights_bytes"], facts["loaded_bytes"]) == ([10, 20], 30, 40)
    assert list(tmp_path.iterdir()) == []


def test_a_build_reports_what_running_its_engine_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path
) -> None:
    """The build as on a GPU: the engine is TensorRT-RTX's own, its outputs are the stand-in's."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    source = shared / "models/sm_torchscript17.onnx"

    def ranges(low: int, high: int) -> dict[str, list[list[int]]]:
        names = {"x": 256, "local_add_cond": 257}
        return {name: [[1, width, low], [1, width, low], [1, width, high]] for name, width in names.items()}

    recipe = load_recipe(
        write_recipe(
            tmp_path,
            model={"name": "dit", "onnx": str(source)},
            profiles=[ranges(1, 16), ranges(17, 24)],
            verify={"fidelity": {"lengths": [8], "t": [0.5]}},
        )
    )

    def build() -> Any:
        (outcome,) = run_recipe(recipe, Settings(tmp_path / "cache"))
        return outcome

    def check(outcome: Any) -> Any:
        return next(c for c in outcome.report["checks"] if c["name"] == "engine_fidelity")

    skipped = build()
    assert skipped.report["information"]["execution"] == {"skipped": "this machine has no GPU of sm_89"}
    assert skipped.verdict == "passed"

    monkeypatch.setattr(stage, "why_not", lambda backend, sm: None)
    monkeypatch.setattr(stage, "execute_engine", stand_in(source, lambda length: 1.0))
    first = build()
    assert (first.verdict, check(first)["status"], check(first)["promised"]) == ("passed", "passed", 2)
    assert first.report["information"]["execution"]["latency"][0]["median_ms"] == 1.2346
    assert [s.name for s in first.stages if not s.cached] == ["execute", "verify"]
    assert first.rebuilt
    assert not build().rebuilt

    # Another seed is another execution; this engine is wrong where only the second profile goes.
    path = tmp_path / "recipe.yaml"
    path.write_text(path.read_text().replace("lengths:", "seed: 1\n    lengths:"))
    recipe = load_recipe(path)
    monkeypatch.setattr(stage, "execute_engine", stand_in(source, lambda length: 1 - 2 * (length > 16)))
    wrong = build()
    assert wrong.verdict == "failed"
    assert [failure["subject"] for failure in check(wrong)["failures"]] == ["L=24 t=0.5"]
    assert not wrong.paths.engine.exists()


# --- loading --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        # TensorRT's own words, as published in reports of each failure.
        (
            "6: The engine plan file is not compatible with this version of TensorRT, expecting library "
            "version 10.16.0.72 got 10.15.1.29, please rebuild.",
            PlatformError,
            r"built by TensorRT 10\.15\.1\.29, and this is 10\.16\.0\.72",
        ),
        (
            "6: The engine plan file is generated on an incompatible device, expecting compute 9.0 got "
            "compute 8.9, please rebuild.",
            PlatformError,
            "built for sm_89, and this GPU is sm_90",
        ),
        (
            "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion "
            "stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current "
            "Version: 239, Serialized Engine Version: 237)",
            PlatformError,
            "its format is 237, and here it is 239",
        ),
        # As TensorRT-RTX 1.7.1 puts it: on an H200, for an engine of sm_89 and for one that it built there
        # for the GPU at hand; and without a driver.
        (
            "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine cannot run on this "
            "GPU, which has compute capability 9.0. Supported compute capabilities: 8.9. TensorRT-RTX does "
            "not support this compute capability, so the engine cannot be rebuilt for it. In "
            "throwUnlessComputeCapSupported at /_src/runtime/dispatch/runtime.cpp:84)",
            PlatformError,
            r"does not run on this GPU, which is sm_90 .*target\.backend: tensorrt",
        ),
        (
            "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine cannot run on this "
            "GPU, which has compute capability 9.0. Supported compute capabilities: None. TensorRT-RTX does "
            "not support this compute capability, so the engine cannot be rebuilt for it. In "
            "throwUnlessComputeCapSupported at /_src/runtime/dispatch/runtime.cpp:84)",
            PlatformError,
            "does not run on this GPU, which is sm_90",
        ),
        (
            "IRuntime::deserializeCudaEngine: Error Code 1: Cuda Runtime (In ScopedCudaStream at "
            "/_src/x.cpp:25 (cudaError 35: CUDA driver version is insufficient for CUDA runtime version))",
            PlatformError,
            "CUDA shows none here",
        ),
        ("[x.cpp::y::2] Error Code 2: OutOfMemory (Requested size was 5 bytes.)", ResourceError, "ran out"),
        ("IRuntime::deserializeCudaEngine: Error Code 9: Something new", CompileError, "Something new"),
        ("", CompileError, "gives no reason"),
    ],
)  # fmt: skip
def test_why_an_engine_does_not_load(text: str, kind: type[BuilderError], message: str) -> None:
    messages = MessageLog()
    messages.add("ERROR", text)
    error = load_error(messages, Path("e.trt"))
    assert type(error) is kind
    assert error.where == "e.trt"
    with pytest.raises(kind, match=message):
        raise error


def test_files_that_are_no_engines(tmp_path: Path) -> None:
    """With the real TensorRT-RTX, which tells a damaged file from a missing GPU."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    backend = load_backend("tensorrt_rtx")
    for content, message in (
        (b"", "the engine is empty"),
        (b"x" * 4096, "no engine of this TensorRT version"),
        (b"ftrt" + b"\0" * 60, "cut short|no engine"),
    ):
        engine = tmp_path / "e.trt"
        engine.write_bytes(content)
        with pytest.raises(SourceModelError, match=message) as caught:
            backend.inspect(engine, LoadOptions())
        assert caught.value.where == str(engine)
    with pytest.raises(SourceModelError, match="cannot be read: No such file"):
        backend.inspect(tmp_path / "none.trt", LoadOptions())


def test_execution_without_a_gpu_is_an_error_of_the_environment(tmp_path: Path) -> None:
    """Through the child process, with the real cuda-bindings where they are installed."""
    from engine_builder.compile.device import visible_sm

    if visible_sm() is not None:
        pytest.skip("there is a GPU")
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    (tmp_path / "e.trt").write_bytes(b"x")
    with pytest.raises(PlatformError) as caught:
        execute_engine("tensorrt_rtx", ExecuteRequest(tmp_path / "e.trt", (), tmp_path))
    assert caught.value.exit_code == 3
    with pytest.raises(PlatformError):
        execute(MODES, ExecuteRequest(tmp_path / "e.trt", (), tmp_path), lambda phase: None)


def test_plugins_are_loaded_or_named() -> None:
    loaded: list[str] = []

    def load_library(path: str) -> object:
        loaded.append(path)
        return None if "bad" in path else object()

    trt = SimpleNamespace(get_plugin_registry=lambda: SimpleNamespace(load_library=load_library))
    load_plugins(trt, (Path("a.so"), Path("b.so")))
    assert loaded == ["a.so", "b.so"]
    with pytest.raises(PlatformError, match=r"bad\.so: TensorRT cannot load this plugin library"):
        load_plugins(trt, (Path("bad.so"),))


# --- options that only the GPU backend has --------------------------------------------------


def test_how_an_engine_is_loaded_follows_from_how_it_was_built() -> None:
    converted = Path("converted.onnx")
    assert load_options(Build(), converted) == LoadOptions()
    build = Build.model_validate({"version_compatible": True, "strip_plan": True, "plugins": ("p.so",)})
    assert load_options(build, converted) == LoadOptions(True, converted, (Path("p.so"),))


def test_a_stripped_plan_says_how_it_is_refitted() -> None:
    assert build_options(Build(strip_plan=True)).flags == ("REFIT_IDENTICAL", "STRIP_PLAN")
    assert build_options(Build(strip_plan=True, refit="all")).flags == ("REFIT", "STRIP_PLAN")


def test_the_files_that_decide_a_build() -> None:
    options: dict[str, Any] = {"timing_cache": "t.cache", "plugins": ("p.so",)}
    assert build_files(Build.model_validate(options)) == (Path("p.so"),)
    strict = Build.model_validate({**options, "strict_timing_cache": True})
    assert build_files(strict) == (Path("p.so"), Path("t.cache"))
    assert build_options(strict).timing_cache == TimingCache(Path("t.cache"), strict=True)


def test_a_member_that_11_dropped_is_named_with_its_version() -> None:
    trt = SimpleNamespace(__name__="tensorrt", __version__="11.4.0.106", BuilderFlag=SimpleNamespace(REFIT=4))
    assert member(trt, "BuilderFlag", "REFIT") == 4
    with pytest.raises(PlatformError, match=r"11\.4\.0\.106 has no BuilderFlag\.FP16") as caught:
        member(trt, "BuilderFlag", "FP16")
    assert caught.value.hint == "it went with TensorRT 11.0"


def test_the_weights_that_refit_individual_marks(shared: Path) -> None:
    """Every matrix that a linear or convolution of the tiny export reads; no gain is among them."""
    import onnx

    model = onnx.load(shared / "models/sm_torchscript17.onnx", load_external_data=False)
    names = linear_weights(model)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    assert all(len(shapes[name]) >= 2 for name in names)
    consumers = [n for n in model.graph.node if n.op_type in ("MatMul", "Gemm", "Conv")]
    direct = {name for node in consumers for name in node.input if len(shapes.get(name, ())) >= 2}
    assert direct <= set(names)
    gains = {name for name in shapes if name.endswith(("gamma", "norm.weight"))}
    assert not gains & set(names)


def test_marking_weights_with_the_real_parser(tmp_path: Path) -> None:
    """TensorRT-RTX knows the weights by the names that the graph gives them."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    from engine_builder.compile.log import attach_logger
    from tests.test_compile import attention

    path = attention(tmp_path / "a.onnx")
    messages = MessageLog()
    builder = trt.Builder(attach_logger(trt, messages))
    network = builder.create_network(0)
    assert trt.OnnxParser(network, attach_logger(trt, messages)).parse_from_file(str(path))
    mark_linear_weights(network, path)
    assert messages.errors == []
    assert (
        network.weights_marked_refittable("to_qkv.weight")
        if hasattr(network, "weights_marked_refittable")
        else network.are_weights_marked_refittable("to_qkv.weight")
    )
