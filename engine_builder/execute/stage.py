"""The build's last look at an engine: what it computes and how fast, on the GPU that it is for."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine_builder.compile.backend import Backend
from engine_builder.compile.isolated import execute_engine
from engine_builder.execute.request import ExecuteRequest, Execution, LoadOptions
from engine_builder.execute.tensors import Shapes, holds, uncovered
from engine_builder.recipe import Fidelity, Profile
from engine_builder.source_graph import TensorSpec
from verify.fidelity import FidelityReport, compare, plan_samples, reference_outputs
from verify.inputs import Sample

log = logging.getLogger(__name__)

EXECUTE_VERSION = 1
"""Raised when an execution measures differently; its kept results are then made anew."""


@dataclass(frozen=True)
class EngineRun:
    """An engine to run: its file and how it loads, its source graph with inputs, profiles and sweep.

    Without ``sweep`` the engine is measured only.
    """

    engine: Path
    load: LoadOptions
    source: Path
    inputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    sweep: Fidelity | None
    lengths: tuple[int, ...] = ()


def why_not(backend: Backend, sm: int) -> str | None:
    """Why an engine for ``sm`` cannot be run here; None when it can."""
    if not backend.can_execute(sm):
        return f"this machine has no GPU of sm_{sm}"
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        found = None
    return "cuda-bindings is not installed" if found is None else None


def run_engine(
    backend: Backend,
    asked: EngineRun,
    folder: Path,
    *,
    cancel: threading.Event | None = None,
    progress: Callable[[str], None],
) -> Mapping[str, Any]:
    """Run the engine on every profile, compare it with the fp32 source, and measure it.

    The result holds plain values: ``fidelity``, which is a sweep's report or None, and what
    :meth:`Execution.to_json` says.  ``folder`` is for files in between, which are removed.

    Raises what :func:`execute_engine` and the sweep raise.
    """
    samples, inputs = _save_inputs(asked, folder)
    request = ExecuteRequest(asked.engine, inputs, folder, asked.load)
    execution = execute_engine(
        backend.name,
        request,
        cancel=cancel,
        on_progress=lambda p: progress(p.phase),
    )
    report = compare_runs(asked.source, samples, execution, progress)
    for file in (*inputs, *(run.outputs for run in execution.runs)):
        file.unlink()
    return {"fidelity": None if report is None else report.to_json(), **execution.to_json()}


def compare_runs(
    source: Path, samples: Sequence[Sample], execution: Execution, progress: Callable[[str], None]
) -> FidelityReport | None:
    """Every output of the engine against the reference; None when nothing was run.

    A threshold is not applied: the report's is 0.
    """
    points = []
    for index, expected in enumerate(reference_outputs(source, samples, progress=progress)):
        for run in execution.runs:
            if run.sample == index:
                with np.load(run.outputs) as file:
                    point = compare(samples[index], expected, dict(file))
                points.append(replace(point, sample=f"{point.sample}, profile {run.profile}"))
    return FidelityReport(tuple(points), 0.0) if points else None


def _save_inputs(asked: EngineRun, folder: Path) -> tuple[tuple[Sample, ...], tuple[Path, ...]]:
    """The samples that some profile holds, and a file with the inputs of each."""
    if asked.sweep is None:
        return (), ()
    planned = _samples(asked, asked.lengths, recorded=asked.sweep.data)
    shapes = [_shapes(sample) for sample in planned]
    if asked.sweep.data is None:
        lengths = extra_lengths(asked.profiles, shapes, asked.inputs)
        planned += _samples(asked, lengths) if lengths else ()
    kept: list[Sample] = []
    files: list[Path] = []
    for sample in planned:
        inputs = sample.load()
        if not any(
            holds(p, {n: a.shape for n, a in inputs.items()}) for p in asked.profiles or [Profile({})]
        ):
            log.info("%s is within no profile: the engine is not run on it", sample.name)
            continue
        file = folder / f"input{len(files)}.npz"
        np.savez(file, allow_pickle=False, **inputs)
        kept.append(sample)
        files.append(file)
    return tuple(kept), tuple(files)


def _samples(asked: EngineRun, lengths: Sequence[int], recorded: Path | None = None) -> tuple[Sample, ...]:
    assert asked.sweep is not None
    return plan_samples(
        asked.source,
        lengths=lengths,
        t=asked.sweep.t,
        seed=asked.sweep.seed,
        samples=asked.sweep.samples,
        recorded=recorded,
    )


def _shapes(sample: Sample) -> Shapes:
    return {name: array.shape for name, array in sample.load().items()}


def extra_lengths(
    profiles: Sequence[Profile], samples: Sequence[Shapes], inputs: Sequence[TensorSpec]
) -> tuple[int, ...]:
    """A length for each profile that holds no sample: the longest that its dynamic inputs allow.

    As in drawn samples, the first dimension is the batch and every other dynamic one the length.
    """
    lengths: dict[int, None] = {}
    for number in uncovered(profiles, samples):
        shapes = profiles[number].shapes
        longest = [
            shapes[spec.name].max[axis]
            for spec in inputs
            for axis, size in enumerate(spec.shape)
            if axis and not isinstance(size, int) and spec.name in shapes
        ]
        if longest:
            lengths[min(longest)] = None
    return tuple(lengths)
