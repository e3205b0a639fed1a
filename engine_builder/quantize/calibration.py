"""Calibration: measures, with ModelOpt, the range of every activation that a linear reads.

Only this needs nvidia-modelopt and torch.  They may live in this Python, or in an environment of their
own that the measuring process is started in; everything else of a scales file is made here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

import onnx_ir as ir

from engine_builder import __version__, errors
from engine_builder.errors import (
    BuilderError,
    ConversionError,
    Interrupted,
    PlatformError,
    ResourceError,
    SourceModelError,
)
from engine_builder.graph.find.linears import find_linears
from engine_builder.graph.structures import Linear
from engine_builder.one_line import one_line, place
from engine_builder.quantize.samples import CalibrationData, RecordedData
from engine_builder.quantize.scales import (
    ZERO_FLOOR,
    Calibration,
    Floored,
    LinearRange,
    Scales,
    ScalesData,
    ScalesSample,
    ScalesSource,
    single,
)
from engine_builder.quantize.skeleton import normalize, write_skeleton
from engine_builder.quantize.weight_amax import WeightAmax, weight_amax
from engine_builder.source import Source, load_graph

log = logging.getLogger(__name__)

PYTHON_VARIABLE: Final = "SA3_BUILDER_CALIBRATE_PYTHON"
"""Environment variable that names the Python which has ModelOpt."""

ENVIRONMENT: Final = ".venv-calibrate"
"""Folder beside entrypoint.py where `make calibrate-env` puts ModelOpt."""

_ROOT: Final = Path(__file__).resolve().parents[2]
_PROCESS: Final = "from engine_builder.quantize.modelopt_process import main; main()"
_POLL_SECONDS: Final = 0.2

_LEAN_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Has glibc return every freed block of 1 MiB or more at once; by default its heap keeps blocks of up to
32 MiB, which makes 2.2 GB of 0.5 in the small model at L=1292 (measured)."""


@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate: ``max`` takes the largest magnitude, ``entropy`` may clip a histogram's tail.

    ``per_channel`` also records the range of each output channel of every weight.
    """

    data: CalibrationData
    method: Literal["max", "entropy"] = "max"
    provider: Literal["cpu", "cuda"] = "cpu"
    per_channel: bool = False


Progress = Callable[[str], None]


def _ignore(text: str) -> None:
    """Progress that nobody watches."""


def calibrate(
    source: Source,
    options: CalibrationOptions,
    *,
    cancel: threading.Event | None = None,
    progress: Progress = _ignore,
) -> Scales:
    """The scales of every linear of ``source``; the same inputs give the same scales.

    Weights are read exactly, a few megabytes at a time; activations are measured by ModelOpt in a
    process of its own.  Temporary files of a few megabytes go to TMPDIR.

    Raises PlatformError when ModelOpt or the provider is not to be had, SourceModelError for weights
    or recorded inputs at fault, ConversionError when the graph cannot be run or a value is not finite,
    ResourceError, and Interrupted after ``cancel``.
    """
    python = calibration_python()
    options.data.samples(source.inputs)  # recorded inputs that do not fit are told before any work
    before = _stamps(source)
    model = load_graph(source)
    normalize(model)
    linears, _ = find_linears(list(model.graph.all_nodes()))
    if not linears:
        raise ConversionError("the model has no linear to calibrate", where=place(source.path))
    progress(f"reading the weights of {len(linears)} linears")
    measured, missing = _measurable(linears, model.graph)
    weights = {linear.name: weight_amax(linear) for linear in measured}
    activation_of = {linear.name: linear.activation.name or "" for linear in measured}
    with tempfile.TemporaryDirectory(prefix="sa3-calibrate-") as name:
        folder = Path(name)
        skeleton = write_skeleton(model, measured, folder)
        job = {
            "graph": str(skeleton.graph),
            "weights": [asdict(weight) for weight in skeleton.weights],
            "probes": skeleton.probes,
            "activations": skeleton.activations,
            "data": _data(options.data),
            "method": options.method,
            "provider": options.provider,
            "folder": str(folder),
        }
        result = run_process(python, job, folder, cancel or threading.Event(), progress)
    if _stamps(source) != before:
        raise SourceModelError(
            "changed while it was calibrated",
            where=place(source.path),
            hint="something still writes to it; wait until it is done",
        )
    return _assemble(source, options, weights, activation_of, missing, result)


def calibration_python() -> Path:
    """The Python that has ModelOpt: the one PYTHON_VARIABLE names, this one, or that of ENVIRONMENT.

    Raises PlatformError when there is none.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise PlatformError("is not a Python that can be started", where=f"{PYTHON_VARIABLE}={named}")
        return Path(named)
    if all(importlib.util.find_spec(package) for package in ("modelopt", "torch")):
        return Path(sys.executable)
    python = _ROOT / ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise PlatformError(
            "calibration needs nvidia-modelopt and torch, which are not installed here",
            hint=f"make calibrate-env, or name a Python that has them in {PYTHON_VARIABLE}",
        )
    return python


def _measurable(linears: Sequence[Linear], graph: ir.Graph) -> tuple[list[Linear], dict[str, str]]:
    """The linears whose activations a probe can read, and the others with the reason."""
    count: dict[str, int] = {}
    for linear in linears:
        count[linear.name] = count.get(linear.name, 0) + 1
    measured: list[Linear] = []
    missing: dict[str, str] = {}
    for linear in linears:
        if not linear.name or count[linear.name] > 1:
            missing[linear.name] = "its name is not unique"
        elif linear.node.graph is not graph:
            missing[linear.name] = "it lies in a subgraph"
        else:
            measured.append(linear)
    return measured, missing


def _data(data: CalibrationData) -> dict[str, Any]:
    if isinstance(data, RecordedData):
        return {"path": str(data.path.absolute())}
    return asdict(data)


def _stamps(source: Source) -> list[tuple[int, int, int]]:
    statuses = [file.path.stat() for file in source.files]
    return [(status.st_size, status.st_ino, status.st_mtime_ns) for status in statuses]


def _assemble(
    source: Source,
    options: CalibrationOptions,
    weights: Mapping[str, WeightAmax],
    activation_of: Mapping[str, str],
    missing: Mapping[str, str],
    result: Mapping[str, Any],
) -> Scales:
    absent = dict(missing)
    floored: list[Floored] = []
    linears: dict[str, LinearRange] = {}
    for name, activation in activation_of.items():
        amax = result["amax"].get(activation)
        if amax is None:
            absent[name] = "ModelOpt gave no range for its activation"
            continue
        weight = weights[name]
        if amax == 0:
            floored.append(Floored(linear=name, operand="activation"))
        if weight.tensor == 0:
            floored.append(Floored(linear=name, operand="weight"))
        channels = [_floor(float(value)) for value in weight.channels] if options.per_channel else None
        if channels is not None and (zeros := int((weight.channels == 0).sum())):
            floored.append(Floored(linear=name, operand="weight_channels", channels=zeros))
        linears[name] = LinearRange(
            activation_amax=_floor(amax),
            weight_amax=_floor(weight.tensor),
            weight_channel_amax=None if channels is None else tuple(channels),
        )
    if not linears:
        raise ConversionError(
            f"no linear could be calibrated: {next(iter(absent.values()))}", where=place(source.path)
        )
    for name, reason in absent.items():
        log.warning("no range for the linear %s: %s", name, reason)
    for entry in floored:
        log.warning("the %s of %s was all zeros; its amax is %g", entry.operand, entry.linear, ZERO_FLOOR)
    return Scales(
        source=ScalesSource(name=source.path.name, sha256=source.sha256),
        calibration=Calibration(
            method=options.method,
            provider=options.provider,
            versions={"sa3-builder": __version__, **result["versions"]},
        ),
        data=ScalesData(synthetic=not isinstance(options.data, RecordedData), sha256=result["data_sha256"]),
        samples=tuple(ScalesSample(**sample) for sample in result["samples"]),
        floored=tuple(floored),
        missing=absent,
        linears=linears,
    )


def _floor(amax: float) -> float:
    return single(amax) if amax > 0 else ZERO_FLOOR


# --- the process that has ModelOpt --------------------------------------------------------------


def run_process(
    python: Path, job: Mapping[str, Any], folder: Path, cancel: threading.Event, progress: Progress
) -> dict[str, Any]:
    """Runs ``modelopt_process`` on ``job`` and returns its result; kills it when ``cancel`` is set."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as pipe, (folder / "output.txt").open("w+b") as output:
        try:
            process = _start(python, path, writing, output)
        finally:
            os.close(writing)
        with _ended(process):
            for message in _messages(pipe, cancel):
                if "progress" in message:
                    progress(message["progress"])
                elif "error" in message:
                    raise _rebuilt(message["error"])
                else:
                    return dict(message["result"])
            raise _death(process.wait(), output, cancel)


def _start(python: Path, job: Path, writing: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    # -P keeps the working folder, which is the user's, from being searched for modules.
    search = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    try:
        return subprocess.Popen(
            [str(python), "-P", "-c", _PROCESS, str(writing), str(job), str(os.getpid())],
            env={**_LEAN_MALLOC, **os.environ, "PYTHONPATH": search},
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    except OSError as error:
        raise PlatformError(f"cannot be started: {error.strerror}", where=str(python)) from error


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _messages(pipe: IO[str], cancel: threading.Event) -> Iterator[dict[str, Any]]:
    """What the process says until it closes the pipe, looking at ``cancel`` several times a second."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(ValueError):  # the pipe was closed from here
            for line in pipe:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        if cancel.is_set():
            raise Interrupted("the calibration was stopped")
        try:
            line = lines.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        if line is None:
            return
        yield json.loads(line)


def _rebuilt(error: Mapping[str, Any]) -> BuilderError:
    kind: type[BuilderError] = getattr(errors, error["kind"])
    return kind(error["message"], where=error["where"], hint=error["hint"])


def _death(code: int, output: IO[bytes], cancel: threading.Event) -> BuilderError:
    """The error for a process that ended without an answer."""
    if cancel.is_set() or -code in (signal.SIGINT, signal.SIGTERM):
        return Interrupted("the calibration was stopped")
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    last = f": {one_line(lines[-1], 300)}" if lines else ""
    if code == -signal.SIGKILL:
        return ResourceError(
            "the calibration was killed, most likely because memory ran out",
            hint="use shorter samples: --lengths 64,1292",
        )
    if any("ModuleNotFoundError" in line or "ImportError" in line for line in lines[-3:]):
        return PlatformError(f"the calibration environment is incomplete{last}", hint="make calibrate-env")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return ConversionError(f"the calibration ended unexpectedly with {how}{last}")
