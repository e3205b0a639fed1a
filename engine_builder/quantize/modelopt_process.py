"""The calibration itself, in the process that ModelOpt gets to itself.

ModelOpt imports torch, replaces methods of onnxruntime's calibrators for the whole process and prints to
standard output.  So it runs in a child, under whichever Python has it; this module is that child.  It
answers on a pipe, one JSON object a line: ``progress``, then ``result`` or ``error``.

What is used of ModelOpt 0.47 is what its own ``quantize(quantize_mode="fp8")`` calibrates with: its
calibrators, ranges symmetric about zero.  Its fp8 mode goes on to turn each range into an INT8 scale,
amax / 127, and that into amax / 127 * 448 / 127, which puts amax at 36 instead of E4M3's 448.  The range
itself is taken here, before any of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import onnx

from engine_builder.child_process import die_with_parent
from engine_builder.errors import (
    BuilderError,
    ConversionError,
    Interrupted,
    PlatformError,
    ResourceError,
)
from engine_builder.quantize.samples import CalibrationData, DataDigest, RecordedData, SyntheticData
from engine_builder.quantize.skeleton import MappedWeight
from verify.inputs import Sample, input_specs

METHODS: Final = ("max", "entropy")
PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

ENTROPY_BINS: Final = 2048
"""Bins of the first sample's histogram.  ModelOpt's default, 128, equals the number of quantized bins
that it searches with, which leaves a single candidate: the whole range, so that entropy is max."""

_PACKAGES: Final = ("nvidia-modelopt", "onnx", "onnxruntime", "onnxruntime-gpu", "torch")


@dataclass(frozen=True)
class Job:
    """What to calibrate: a skeleton, its weights and probed activations, the data, and how."""

    graph: str
    weights: tuple[MappedWeight, ...]
    probes: tuple[str, ...]
    activations: tuple[str, ...]
    data: CalibrationData
    method: str
    provider: str
    folder: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Job:
        data = value["data"]
        return cls(
            graph=value["graph"],
            weights=tuple(MappedWeight(**{**w, "shape": tuple(w["shape"])}) for w in value["weights"]),
            probes=tuple(value["probes"]),
            activations=tuple(value["activations"]),
            data=RecordedData(Path(data["path"])) if "path" in data else SyntheticData(**data),
            method=value["method"],
            provider=value["provider"],
            folder=value["folder"],
        )


Say = Callable[[str, Any], None]


def run(job: Job, say: Say) -> dict[str, Any]:
    """The amax of every activation, the digest and list of the samples, and the versions used.

    Raises PlatformError without ModelOpt or the provider, SourceModelError for recorded data that does
    not fit, ConversionError for a graph that onnxruntime cannot run or a value that is not finite.
    """
    import onnxruntime

    provider = PROVIDERS[job.provider]
    if provider not in onnxruntime.get_available_providers():
        raise PlatformError(
            f"onnxruntime {onnxruntime.__version__} has no {provider}",
            where=sys.prefix,
            hint="install onnxruntime-gpu there, or use --provider cpu",
        )
    say("progress", "loading ModelOpt")
    calibrate = _modelopt()
    skeleton = onnx.load(job.graph)
    before = _initializers(skeleton)
    mapped = {weight.name: weight.array() for weight in job.weights}
    specs = tuple(spec for spec in input_specs(skeleton.graph) if spec.name not in mapped)
    samples = job.data.samples(specs)
    digest = DataDigest()
    try:
        ranges = _measure(calibrate, job, provider, mapped, _Reader(samples, say, digest.update))
        if job.method == "entropy":
            ranges = _measure(calibrate, job, provider, mapped, _Reader(samples, say), within=ranges)
    except onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException as error:
        raise _runtime_error(error) from error
    except _session_errors(onnxruntime) as error:
        raise ConversionError(f"onnxruntime refuses the model: {_first_line(error)}") from error
    after = _initializers(onnx.load(_augmented(job)))
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        raise ConversionError(
            f"ModelOpt changed {len(changed)} initializers of the graph, the first is {changed[0]}"
        )
    return {
        "amax": {name: ranges[name] for name in job.activations if name in ranges},
        "data_sha256": digest.hexdigest(),
        "samples": [{"name": s.name, "length": s.length, "t": s.t} for s in samples],
        "versions": dict(_versions()),
    }


def _measure(
    calibrate: Any,
    job: Job,
    provider: str,
    weights: Mapping[str, np.ndarray],
    reader: _Reader,
    *,
    within: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Amax by activation: the largest magnitude or, ``within`` known ones, that of least entropy loss.

    Histograms start with their final span.  ModelOpt's own start with the span of the first sample and
    add bins for a wider one, so that they depend on the order of the samples, and a first sample that
    is a thousandth of another makes the search, which is quadratic in the bins, last for days.
    """
    reader.say("progress", "preparing the graph")
    methods = calibrate.CalibrationMethod
    calibrator = calibrate.create_calibrator(
        Path(job.graph),
        list(job.probes),  # ModelOpt reads names of nodes here, not types of operators
        augmented_model_path=str(_augmented(job)),
        calibrate_method=methods.MinMax if within is None else methods.Entropy,
        extra_options={"symmetric": True, "execution_providers": [provider]},
    )
    if within is not None:
        calibrator.collector = calibrate.HistogramCollector(
            method="entropy",
            symmetric=True,
            num_bins=ENTROPY_BINS,
            num_quantized_bins=calibrator.num_quantized_bins,
            percentile=None,
            scenario=None,
        )
        calibrator.collector.histogram_dict.update(
            (name, _empty_histogram(amax)) for name, amax in within.items() if amax > 0
        )
    session = _lean_session(_augmented(job), provider)
    calibrator.infer_session = _CheckedSession(session, weights, job.activations, reader)
    calibrator.collect_data(reader)
    reader.say("progress", "choosing ranges")
    ranges = calibrator.compute_data()
    return {name: max(_magnitude(bound) for bound in ranges[name].range_value) for name in ranges}


def _lean_session(graph: Path, provider: str) -> Any:
    """A session like ModelOpt's own, which frees each activation once it is read.

    In onnxruntime's default order the nodes that measure may all run last, and every activation that
    they read lives until then: 1.2 GB in the small model at L=1292 instead of 0.2 (measured).
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_cpu_mem_arena = False
    return onnxruntime.InferenceSession(str(graph), options, providers=[provider])


def _empty_histogram(amax: float) -> tuple[Any, ...]:
    """Counts, edges, smallest and largest value, and span, as ModelOpt's collector keeps them."""
    zero, span = np.float32(0), np.float32(amax)
    return np.zeros(ENTROPY_BINS, np.int64), np.linspace(-span, span, ENTROPY_BINS + 1), zero, zero, span


def _magnitude(bound: Any) -> float:
    return abs(float(np.ravel(bound)[0]))


def _augmented(job: Job) -> Path:
    return Path(job.folder) / "augmented.onnx"


def _session_errors(onnxruntime: Any) -> tuple[type[Exception], ...]:
    state = onnxruntime.capi.onnxruntime_pybind11_state
    return (state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented, ValueError)


def _modelopt() -> Any:
    """onnxruntime's calibration module with ModelOpt's calibrators in it."""
    try:
        from modelopt.onnx.logging_config import configure_logging
        from modelopt.onnx.quantization.ort_patching import patch_ort_modules
        from onnxruntime.quantization import calibrate
    except ImportError as error:
        raise PlatformError(
            f"ModelOpt cannot be imported: {_first_line(error)}",
            where=sys.prefix,
            hint="make calibrate-env",
        ) from error
    configure_logging(level="ERROR")
    patch_ort_modules()
    return calibrate


class _Reader:
    """Hands out one sample at a time, made when it is asked for."""

    def __init__(
        self, samples: Sequence[Sample], say: Say, note: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        self._pending = iter(enumerate(samples, 1))
        self._count = len(samples)
        self._note = note
        self.say = say
        self.sample = ""

    def get_next(self) -> dict[str, np.ndarray] | None:
        number, sample = next(self._pending, (0, None))
        if sample is None:
            return None
        self.sample = f"{sample.name}, L={sample.length}, t={sample.t:g}"
        self.say("progress", f"sample {number} of {self._count}: {self.sample}")
        inputs = dict(sample.load())
        if self._note is not None:
            self._note(inputs)
        return inputs


class _CheckedSession:
    """An onnxruntime session that is given the weights, and whose outputs must be finite.

    ModelOpt replaces infinities in a histogram by float32's largest number, and a maximum skips NaN:
    neither shows in the ranges, so that every output is looked at here.
    """

    def __init__(
        self, session: Any, weights: Mapping[str, np.ndarray], activations: Sequence[str], reader: _Reader
    ) -> None:
        self._session = session
        self._weights = weights
        self._activations = activations
        self._reader = reader

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def run(self, names: Sequence[str] | None, inputs: Mapping[str, Any], run_options: Any = None) -> Any:
        arrays = self._session.run(names, {**inputs, **self._weights}, run_options)
        bad = {
            output.name.removesuffix("_ReduceMax").removesuffix("_ReduceMin")
            for output, array in zip(self._session.get_outputs(), arrays, strict=True)
            if array.dtype.kind == "f" and not np.isfinite(array).all()
        }
        if bad:
            first = next((name for name in self._activations if name in bad), min(bad))
            raise ConversionError(
                f"{first} is not finite for the calibration sample {self._reader.sample}",
                hint="the fp32 model itself overflows on this input",
            )
        return arrays


def _initializers(model: onnx.ModelProto) -> dict[str, str]:
    return {t.name: hashlib.sha256(t.SerializeToString()).hexdigest() for t in model.graph.initializer}


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _runtime_error(error: Exception) -> BuilderError:
    text = _first_line(error)
    if any(word in text.lower() for word in ("alloc", "out of memory")):
        return ResourceError(
            f"memory ran out during calibration: {text}", hint="use shorter samples: --lengths 64,1292"
        )
    return ConversionError(f"onnxruntime cannot run the model: {text}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    """Runs the job in the file argv[2] for the process argv[3]; answers on the file descriptor argv[1]."""
    die_with_parent(int(sys.argv[3]))
    # An interrupt from the keyboard reaches the whole process group; the parent decides about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as pipe:
        say = _sayer(pipe)
        logging.disable(logging.WARNING)
        try:
            say("result", run(Job.from_json(json.loads(Path(sys.argv[2]).read_text())), say))
        except BuilderError as error:
            say(
                "error",
                {
                    "kind": type(error).__name__,
                    "message": error.message,
                    "where": error.where,
                    "hint": error.hint,
                },
            )
        except MemoryError:
            say(
                "error",
                {
                    "kind": "ResourceError",
                    "message": "memory ran out during calibration",
                    "where": None,
                    "hint": "use shorter samples: --lengths 64,1292",
                },
            )


def _sayer(pipe: IO[str]) -> Say:
    def say(kind: str, value: Any) -> None:
        try:
            pipe.write(json.dumps({kind: value}) + "\n")
            pipe.flush()
        except OSError:
            os._exit(Interrupted.exit_code)  # the parent is gone

    return say
