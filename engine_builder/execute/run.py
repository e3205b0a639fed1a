"""Runs an engine on sets of inputs and measures it at the bounds of its profiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine_builder.errors import CompileError
from engine_builder.execute.cuda import Device
from engine_builder.execute.loading import engine_profiles, load_engine
from engine_builder.execute.request import Bound, ExecuteRequest, Execution, Latency, Run
from engine_builder.execute.statistics import MEASURE_MS, WARM_UP_MS, runs_within, summarize
from engine_builder.execute.tensors import (
    Arena,
    EngineTensor,
    Shapes,
    arrange,
    bounds,
    noise,
    numpy_type,
    plan_runs,
)

if TYPE_CHECKING:
    import tensorrt as trt

Arrays = Mapping[str, npt.NDArray[Any]]
OnPhase = Callable[[str], None]


def execute(trt: Any, request: ExecuteRequest, on_phase: OnPhase) -> Execution:
    """Load the engine, run it on every set of inputs, and measure it.

    ``trt`` is the module tensorrt or tensorrt_rtx.  Inputs that the engine does not have are left
    out: a converted graph may have dropped one that had no effect.

    Raises PlatformError without a GPU, ResourceError when its memory runs out, RecipeError for
    inputs that no profile holds, and what :func:`loading.load_engine` raises.
    """
    started = time.monotonic()
    with Device() as device:
        on_phase("Loading engine")
        free = device.free_bytes()
        engine = load_engine(trt, request.engine, request.load)
        session = Session(trt, engine, device)
        loaded = free - device.free_bytes()
        runs = _run_samples(session, request, on_phase)
        latencies = _measure(session, on_phase)
        return Execution(
            device=device.name,
            runs=runs,
            latencies=latencies,
            context_bytes=tuple(
                int(engine.get_device_memory_size_for_profile_v2(number))
                for number in range(engine.num_optimization_profiles)
            ),
            weights_bytes=int(engine.get_engine_stat(trt.EngineStat.TOTAL_WEIGHTS_SIZE)),
            loaded_bytes=loaded,
            seconds=time.monotonic() - started,
        )


class Session:
    """An engine with one execution context and one allocation that holds its inputs and outputs."""

    def __init__(self, trt: Any, engine: trt.ICudaEngine, device: Device) -> None:
        """Raises CompileError when TensorRT gives no context, mostly for want of GPU memory."""
        self.device = device
        self.tensors = tuple(_tensor(trt, engine, index) for index in range(engine.num_io_tensors))
        self.inputs = tuple(tensor for tensor in self.tensors if tensor.mode == "input")
        self.profiles = engine_profiles(trt, engine)
        context = engine.create_execution_context()
        if context is None:
            raise CompileError(
                "TensorRT gives no execution context for the engine",
                hint="the GPU's memory may not hold what the largest profile needs",
            )
        self._context = context
        self._profile = 0
        self._base = 0
        self._room = 0

    def prepare(self, profile: int, shapes: Shapes) -> Arena:
        """Select the profile, set the input shapes and give every tensor its address.

        Raises CompileError for shapes that the engine does not take.
        """
        context, device = self._context, self.device
        if profile != self._profile:
            if not context.set_optimization_profile_async(profile, device.stream):
                raise CompileError(f"the engine does not switch to its profile {profile}")
            device.synchronize()
            self._profile = profile
        for tensor in self.inputs:
            if not context.set_input_shape(tensor.name, tuple(shapes[tensor.name])):
                raise CompileError(f"the engine does not take {tensor.name} {list(shapes[tensor.name])}")
        if missing := context.infer_shapes():
            raise CompileError(f"the engine wants values to know the shape of {', '.join(missing)}")
        arena = arrange((t.name, self.shape(t), t.dtype) for t in self.tensors)
        if arena.size > self._room:
            self._base, self._room = device.allocate(arena.size), arena.size
        for name, offset in arena.offsets.items():
            if not context.set_tensor_address(name, self._base + offset):
                raise CompileError(f"the engine does not take an address for {name}")
        return arena

    def shape(self, tensor: EngineTensor) -> tuple[int, ...]:
        """The tensor's shape under the input shapes last set."""
        shape = tuple(int(size) for size in self._context.get_tensor_shape(tensor.name))
        if any(size < 0 for size in shape):
            raise CompileError(f"the shape of {tensor.name} depends on values, {list(shape)}")
        return shape

    def enqueue(self) -> None:
        """Put one inference into the stream."""
        if not self._context.execute_async_v3(self.device.stream):
            raise CompileError("the engine does not run: TensorRT refused to enqueue it")

    def run(self, profile: int, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """One inference: outputs by name.

        Raises CompileError when an input is missing or the engine fails.
        """
        given = {tensor.name: _input(tensor, inputs) for tensor in self.inputs}
        arena = self.prepare(profile, {name: array.shape for name, array in given.items()})
        for name, array in given.items():
            self.device.upload(array, self._base + arena.offsets[name])
        self.enqueue()
        return {
            t.name: self.device.download(self._base + arena.offsets[t.name], self.shape(t), t.dtype)
            for t in self.tensors
            if t.mode == "output"
        }

    def measure(self, profile: int, bound: Bound, shapes: Shapes) -> Latency:
        """Warm latency of one inference at the given shapes."""
        arrays = {t.name: noise(shapes[t.name], t.dtype, seed) for seed, t in enumerate(self.inputs)}
        self.run(profile, arrays)
        once, *_ = summarize(self.device.time(self.enqueue, 3))
        self.device.time(self.enqueue, runs_within(WARM_UP_MS, once))
        times = self.device.time(self.enqueue, runs_within(MEASURE_MS, once))
        median, low, high = summarize(times)
        return Latency(profile, bound, dict(shapes), median, low, high, len(times))


def _tensor(trt: Any, engine: trt.ICudaEngine, index: int) -> EngineTensor:
    name = engine.get_tensor_name(index)
    return EngineTensor(
        name=name,
        mode="input" if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else "output",
        dtype=numpy_type(engine.get_tensor_dtype(name).name),
        shape=tuple(int(size) for size in engine.get_tensor_shape(name)),
    )


def _input(tensor: EngineTensor, inputs: Arrays) -> npt.NDArray[Any]:
    if tensor.name not in inputs:
        raise CompileError(f"the engine has an input {tensor.name} that the source model does not have")
    return np.ascontiguousarray(inputs[tensor.name], tensor.dtype)


def _run_samples(session: Session, request: ExecuteRequest, on_phase: OnPhase) -> tuple[Run, ...]:
    names = {tensor.name for tensor in session.inputs}
    shapes = [_shapes(path, names) for path in request.inputs]
    runs: list[Run] = []
    for sample, profile in plan_runs(session.profiles, shapes):
        on_phase(f"Running sample {sample + 1} of {len(shapes)} on profile {profile}")
        with np.load(request.inputs[sample]) as file:
            outputs = session.run(profile, {name: file[name] for name in file.files if name in names})
        path = request.outputs / f"{sample}.{profile}.npz"
        # numpy's own format holds neither bf16 nor fp8; both are exact in fp32.
        plain = {n: a if a.dtype.kind in "biuf" else a.astype(np.float32) for n, a in outputs.items()}
        np.savez(path, allow_pickle=False, **plain)
        runs.append(Run(sample, profile, path))
    return tuple(runs)


def _shapes(path: Path, names: set[str]) -> Shapes:
    with np.load(path) as file:
        return {name: file[name].shape for name in file.files if name in names}


def _measure(session: Session, on_phase: OnPhase) -> tuple[Latency, ...]:
    found: list[Latency] = []
    for number, profile in enumerate(session.profiles):
        for bound, shapes in bounds(profile, session.inputs):
            on_phase(f"Measuring profile {number} at its {bound}")
            found.append(session.measure(number, bound, shapes))
    return tuple(found)
