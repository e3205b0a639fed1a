"""Compares a converted graph with its fp32 source over sequence lengths and diffusion times.

The reference is onnxruntime in fp32 on the CPU, the candidate the strict evaluator, which rounds every
tensor to its declared type.  Rounded angles show at full length and t near 1 and leave short
sequences clean, so a sweep covers both ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine_builder.errors import BuilderError, ConversionError, RecipeError, ResourceError, SourceModelError
from engine_builder.one_line import one_line
from engine_builder.onnx_file import read_onnx
from verify.inputs import Array, Inputs, Sample, input_specs, recorded_samples, seeded_samples
from verify.kernels.workers import default_threads
from verify.strict import StrictEvaluator

log = logging.getLogger(__name__)

Outputs = Mapping[str, Array]

_WORST: Final = -1.0
"""Stands for the cosine of outputs that are not finite: no threshold accepts it."""


@dataclass(frozen=True)
class FidelityPoint:
    """The candidate's farthest output from the reference at one length, time and set of inputs.

    ``cosine`` and ``relative_l2`` (the difference's norm over the reference's) are computed in fp64 over
    the whole output.  They and ``max_abs`` are NaN when ``nonfinite``, the candidate's count of NaN and
    infinite values, is not 0.
    """

    length: int
    t: float
    sample: str
    output: str
    cosine: float
    relative_l2: float
    max_abs: float
    nonfinite: int

    @property
    def score(self) -> float:
        """The cosine, or -1 when values are not finite."""
        return _WORST if self.nonfinite else self.cosine

    def to_json(self) -> dict[str, Any]:
        """Plain values; a figure that does not exist is null."""
        return {
            "length": self.length,
            "t": self.t,
            "sample": self.sample,
            "output": self.output,
            "cosine": _or_none(self.cosine),
            "relative_l2": _or_none(self.relative_l2),
            "max_abs": _or_none(self.max_abs),
            "nonfinite": self.nonfinite,
        }


@dataclass(frozen=True)
class FidelityReport:
    """All points of a sweep and the least cosine that passes."""

    points: tuple[FidelityPoint, ...]
    min_cosine: float

    @property
    def worst_point(self) -> FidelityPoint:
        """The first point with the lowest score."""
        return min(self.points, key=lambda point: point.score)

    @property
    def worst(self) -> float:
        """The lowest cosine; -1 when a value anywhere is not finite."""
        return self.worst_point.score

    @property
    def passed(self) -> bool:
        """Whether every value is finite and every cosine at least ``min_cosine``."""
        # The cosine of values that are not finite is NaN, which is not at least anything.
        return all(point.cosine >= self.min_cosine for point in self.points)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the fidelity section of ``.verify.json`` holds them."""
        return {
            "passed": self.passed,
            "min_cosine": self.min_cosine,
            "worst_cosine": self.worst,
            "worst": self.worst_point.to_json(),
            "points": [point.to_json() for point in self.points],
        }


def sweep(
    reference: Path,
    candidate: Path,
    *,
    lengths: Sequence[int],
    t: Sequence[float],
    min_cosine: float,
    seed: int = 0,
    samples: int = 1,
    recorded: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> FidelityReport:
    """Compare ``candidate`` with the fp32 graph ``reference``.

    Inputs are drawn, ``samples`` times for each of ``lengths`` (latent frames) and ``t`` (diffusion
    times); or those in the folder ``recorded``, at their own lengths and times.  ``progress`` is told
    what is being evaluated, often enough for it to stop the sweep by raising.

    Raises SourceModelError when the reference or the recorded inputs cannot be used, ConversionError
    when the candidate cannot, RecipeError when nothing is to be compared, and ResourceError when
    memory runs out.  A candidate that differs is no error but a report that did not pass.
    """
    points = plan_samples(reference, lengths=lengths, t=t, seed=seed, samples=samples, recorded=recorded)
    if not points:
        raise RecipeError("the fidelity sweep has no points", hint="name at least one length and one t")
    tell = progress or _ignore
    expected = reference_outputs(reference, points, progress=tell)
    actual = candidate_outputs(candidate, points, progress=tell)
    results = []
    for sample, wanted, got in zip(points, expected, actual, strict=True):
        point = compare(sample, wanted, got)
        log.info(
            "fidelity at L=%d t=%g, %s: cosine %.7f, %d values not finite",
            point.length,
            point.t,
            point.sample,
            point.cosine,
            point.nonfinite,
        )
        results.append(point)
    return FidelityReport(tuple(results), min_cosine)


def plan_samples(
    reference: Path,
    *,
    lengths: Sequence[int],
    t: Sequence[float],
    seed: int = 0,
    samples: int = 1,
    recorded: Path | None = None,
) -> tuple[Sample, ...]:
    """The samples of a sweep, for the inputs that the graph at ``reference`` declares.

    Raises SourceModelError.
    """
    try:
        specs = input_specs(read_onnx(reference).model.graph)
    except (ValueError, OSError) as error:  # NotOnnxError is a ValueError, as is an empty file's
        raise SourceModelError(f"cannot be read: {error}", where=str(reference)) from None
    if recorded is not None:
        return recorded_samples(specs, recorded)
    return seeded_samples(specs, lengths=lengths, t=t, seed=seed, samples=samples)


def reference_outputs(
    path: Path, samples: Iterable[Sample], *, progress: Callable[[str], None] | None = None
) -> Iterator[Outputs]:
    """The outputs of the fp32 graph at ``path`` by name, sample by sample, from onnxruntime.

    Raises SourceModelError when onnxruntime cannot run it or its outputs are not finite.
    """
    tell = progress or _ignore
    session: Any = None
    for sample in samples:
        tell(f"reference at {_at(sample)}")
        inputs = sample.load()
        try:
            if session is None:
                session = _session(path)
            results = session.run(None, dict(inputs))
        except Exception as error:  # onnxruntime's errors have no class in common
            raise _reference_error(error, path) from error
        outputs = dict(zip((output.name for output in session.get_outputs()), results, strict=True))
        for name, array in outputs.items():
            if not np.isfinite(array).all():
                raise SourceModelError(
                    f"its output {one_line(name)!r} is not finite at {_at(sample)}",
                    where=str(path),
                    hint="without a finite fp32 reference nothing can be compared",
                )
        yield outputs


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = default_threads()
    # The source as it is written; fusions also doubled the peak memory at full length.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # The arena would keep the memory of the longest sequence, and a packed copy doubles the weights.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    # Idle threads that spin would take the candidate's time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _reference_error(error: Exception, path: Path) -> BuilderError:
    if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "Failed to allocate" in str(error):
        return ResourceError("out of memory in onnxruntime", where=str(path))
    text = one_line(" ".join(str(error).split()), 300)
    return SourceModelError(f"onnxruntime cannot run it: {text}", where=str(path))


def candidate_outputs(
    candidate: Path | StrictEvaluator,
    samples: Iterable[Sample],
    *,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Outputs]:
    """The outputs of the converted graph by name, sample by sample, strictly evaluated.

    Raises ConversionError when it cannot be evaluated.
    """
    tell = progress or _ignore
    evaluator = StrictEvaluator(candidate) if isinstance(candidate, Path) else candidate
    for sample in samples:
        yield evaluator.run(_known(evaluator, sample.load()), on_stage=_every_tenth(tell, _at(sample)))


def _known(evaluator: StrictEvaluator, inputs: Inputs) -> Inputs:
    """The inputs that the candidate has; one that became unused may be gone."""
    names = {value.name for value in evaluator.inputs}
    return {name: array for name, array in inputs.items() if name in names}


def _every_tenth(tell: Callable[[str], None], place: str) -> Callable[[int, int], None]:
    told = [-1]

    def on_stage(done: int, total: int) -> None:
        tenth = done * 10 // total
        if tenth > told[0]:
            told[0] = tenth
            tell(f"candidate at {place}, {tenth * 10} %")

    return on_stage


def compare(sample: Sample, expected: Outputs, actual: Outputs) -> FidelityPoint:
    """How far ``actual`` is from ``expected``: the figures of the output that is farthest.

    Raises ConversionError when an output is missing or has another shape.
    """
    return min(
        (_compare_output(sample, name, array, actual) for name, array in expected.items()),
        key=lambda point: point.score,
    )


def _compare_output(sample: Sample, name: str, expected: Array, outputs: Outputs) -> FidelityPoint:
    if name not in outputs:
        raise ConversionError(f"the converted graph has no output {name!r}")
    wanted, got = expected.astype(np.float64), outputs[name].astype(np.float64)
    if wanted.shape != got.shape:
        raise ConversionError(f"the output {name!r} is {got.shape}, in the source graph {wanted.shape}")
    nonfinite = int(got.size - np.isfinite(got).sum())
    if nonfinite:
        figures = (math.nan, math.nan, math.nan)
    else:
        figures = _figures(wanted.reshape(-1), got.reshape(-1))
    return FidelityPoint(sample.length, sample.t, sample.name, name, *figures, nonfinite)


def _figures(wanted: Array, got: Array) -> tuple[float, float, float]:
    """Cosine, relative L2 and greatest difference of two finite fp64 vectors."""
    difference = got - wanted
    norm, other = float(np.linalg.norm(wanted)), float(np.linalg.norm(got))
    error = float(np.linalg.norm(difference))
    if norm == 0 or other == 0:
        # Two zero vectors agree; against one alone there is no direction to compare.
        cosine = 1.0 if norm == other else 0.0
    else:
        cosine = min(1.0, max(-1.0, float(wanted @ got) / (norm * other)))
    relative = error / norm if norm else (0.0 if error == 0 else math.inf)
    return cosine, relative, float(np.abs(difference).max(initial=0.0))


def _at(sample: Sample) -> str:
    return f"L={sample.length} t={sample.t:g}, {sample.name}"


def _or_none(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def _ignore(text: str) -> None:
    """Progress that nobody wants to see."""
