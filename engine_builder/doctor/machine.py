"""What this machine is: GPUs, driver, libraries, memory.  Nothing here judges it."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from engine_builder import __version__
from engine_builder.compile.backend import load_backend
from engine_builder.compile.device import visible_sm
from engine_builder.errors import PlatformError
from engine_builder.one_line import one_line
from engine_builder.quantize.calibration import calibration_python

_PROBE_SECONDS: Final = 60.0


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Section):
    """A GPU as the management library lists it; ``sm`` is its compute capability, 90 for 9.0."""

    index: int
    name: str
    sm: int
    memory_bytes: int
    free_bytes: int


class Library(_Section):
    """A library's version, or why it cannot be used and what to do about it."""

    version: str | None = None
    problem: str | None = None
    fix: str | None = None


class Machine(_Section):
    """Everything that decides what can be built here.

    ``memory_bytes`` is the smaller of the machine's memory and this container's limit;
    ``visible_sm`` is the GPU that CUDA would use, which may not be the first of ``gpus``.
    """

    builder: str
    python: str
    architecture: str
    cores: int
    memory_bytes: int
    available_bytes: int
    driver: str | None
    driver_cuda: str | None
    driver_problem: str | None
    gpus: tuple[Gpu, ...]
    visible_sm: int | None
    tensorrt: Library
    tensorrt_rtx: Library
    rtx_sms: tuple[int, ...]
    modelopt: Library
    cuda_bindings: Library
    onnxruntime: Library


def read_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine; what is missing is recorded, never raised."""
    driver, cuda, gpus, problem = read_gpus()
    limit, available = read_memory(root)
    rtx, sms = _tensorrt_rtx()
    return Machine(
        builder=__version__,
        python=platform.python_version(),
        architecture=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=limit,
        available_bytes=available,
        driver=driver,
        driver_cuda=cuda,
        driver_problem=problem,
        gpus=gpus,
        visible_sm=visible_sm(),
        tensorrt=_backend_library("tensorrt"),
        tensorrt_rtx=rtx,
        rtx_sms=sms,
        modelopt=_modelopt(),
        cuda_bindings=_package(
            "cuda-bindings", "engines are not run: their fidelity and latency stay unknown"
        ),
        onnxruntime=_package("onnxruntime", "fidelity cannot be measured"),
    )


def read_gpus() -> tuple[str | None, str | None, tuple[Gpu, ...], str | None]:
    """The driver's version, the newest CUDA it runs, the GPUs, and why there are none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, None, (), f"no NVIDIA driver: {error}"
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return (
            _text(pynvml.nvmlSystemGetDriverVersion()),
            f"{cuda // 1000}.{cuda % 1000 // 10}",
            tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())),
            None,
        )
    except pynvml.NVMLError as error:
        return None, None, (), f"the NVIDIA driver does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        sm=10 * major + minor,
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def read_memory(root: Path) -> tuple[int, int]:
    """Bytes of memory that this process may use at all, and that are free for it now.

    A container's limit counts, in either layout of control groups; what is only cached files does
    not count as used.
    """
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    kilobytes = {parts[0].rstrip(":"): int(parts[1]) for parts in lines if len(parts) > 1}
    total, available = 1024 * kilobytes["MemTotal"], 1024 * kilobytes["MemAvailable"]
    groups = root / "sys/fs/cgroup"
    for folder, limit_name, used_name, cached_name in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < total:
            free = limit - used + _statistic(folder / "memory.stat", cached_name)
            return limit, max(0, min(available, free))
    return total, available


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _backend_library(name: Any) -> Library:
    try:
        return Library(version=load_backend(name).version())
    except PlatformError as error:
        return Library(problem=one_line(error.message, 300), fix=error.hint)


def _tensorrt_rtx() -> tuple[Library, tuple[int, ...]]:
    library = _backend_library("tensorrt_rtx")
    sms = load_backend("tensorrt_rtx").supported_sms() if library.version is not None else ()
    return library, sms


def _package(name: str, consequence: str) -> Library:
    try:
        return Library(version=metadata.version(name))
    except metadata.PackageNotFoundError:
        return Library(problem=f"{name} is not installed: {consequence}", fix=f"pip install {name}")


def _modelopt() -> Library:
    """ModelOpt's version, from the Python that calibration would start."""
    try:
        python = calibration_python()
    except PlatformError as error:
        return Library(problem=str(error.message), fix=error.hint)
    code = "from importlib.metadata import version; print(version('nvidia-modelopt'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Library(
            problem=f"the Python for calibration does not start: {error}", fix="make calibrate-env"
        )
    if done.returncode:
        return Library(problem="the Python for calibration has no nvidia-modelopt", fix="make calibrate-env")
    return Library(version=done.stdout.strip())
