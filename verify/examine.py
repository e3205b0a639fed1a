"""Verifies engines and layer dumps that others made, by whatever is at hand to check them against."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx_ir as ir

from engine_builder.compile.backend import load_backend
from engine_builder.compile.device import visible_sm
from engine_builder.errors import PlatformError, RecipeError, SourceModelError
from engine_builder.execute.request import LoadOptions
from engine_builder.graph.find import find_structures
from engine_builder.one_line import place
from engine_builder.precision.convert import annotate
from engine_builder.recipe import BackendName, Profile, Recipe, load_recipe, resolve_profiles
from engine_builder.source import Source, file_sha256, load_graph, open_source
from verify.contract import check_contract
from verify.counts import count_layers
from verify.evidence import EngineEvidence, GraphEvidence, judge
from verify.expectations import check_expectations
from verify.identity import Check, Status
from verify.layers import EngineLayers, NotDetailed, load_layers, parse_inspector_json
from verify.promised_precision import PromisedPrecision, promised_precision
from verify.recorded import (
    check_belongs,
    check_target,
    merged,
    recorded_checks,
    recorded_counts,
    recorded_io,
)
from verify.report import BuilderEntry, EngineEntry, VerifyReport, check_entry, load_report, verdict_of

log = logging.getLogger(__name__)

RTX_MAGIC: Final = b"vtrt"
"""How an engine of TensorRT-RTX begins; its size is the little-endian 64-bit number at byte 16
(measured with 1.7.1, for it is not documented)."""


@dataclass(frozen=True)
class Subject:
    """What to verify and what to check it against; at least one of the first three is needed.

    ``layers`` is a layer dump, ``onnx`` the converted graph that the engine was built from,
    ``recipe`` what it was to become, ``report`` a ``.verify.json`` that was written earlier.
    """

    engine: Path | None = None
    layers: Path | None = None
    report: Path | None = None
    onnx: Path | None = None
    recipe: Path | None = None


@dataclass(frozen=True)
class Inspected:
    """An engine's layers as this machine's own TensorRT lists them, and who listed them."""

    layers: EngineLayers
    source: str
    builder: BuilderEntry | None = None


Inspect = Callable[[Path, tuple[BackendName, ...]], Inspected]


@dataclass(frozen=True)
class _Graph:
    """The converted graph with what it is held to."""

    source: Source
    evidence: GraphEvidence
    profiles: tuple[Profile, ...]
    precision: PromisedPrecision


def examine(subject: Subject, inspect: Inspect | None = None) -> VerifyReport:
    """The report on an engine, from the evidence that ``subject`` names.

    The engine's layers are taken from the dump, else from the engine itself where a GPU can load it,
    else from the earlier report: that one's checks then stand, once the report is known to belong to
    the engine.

    Args:
        subject: The files.
        inspect: Lists an engine's layers, by default with this machine's TensorRT.

    Raises:
        RecipeError: Nothing to verify was named, or the recipe is wrong.
        PlatformError: The engine's layers can be had from nowhere.
        SourceModelError: A file is missing, damaged or foreign.
    """
    if subject.engine is None and subject.layers is None and subject.report is None:
        raise RecipeError(
            "nothing to verify was named", hint="name an engine, or a layer dump with --layers FILE"
        )
    recipe = None if subject.recipe is None else load_recipe(subject.recipe)
    report = None if subject.report is None else load_report(subject.report)
    engine = None if subject.engine is None else engine_entry(subject.engine)
    graph = None if subject.onnx is None else _open_graph(subject.onnx, recipe)
    try:
        found = _layers(subject, recipe, report, inspect or inspect_here)
    except NotDetailed as error:
        return _not_detailed(subject, engine, error)
    if found is None:
        assert report is not None
        return _by_report(report, engine, graph, recipe)
    further = list(_against_report(report, engine, found, recipe))
    if graph is not None:
        further.extend(graph.precision.checks)
    result = judge(
        label=_label(subject),
        engine=EngineEvidence(
            layers=found.layers.layers,
            io=found.layers.io,
            source=found.source,
            file=engine,
            builder=found.builder or (None if report is None else report.builder),
        ),
        graph=None if graph is None else graph.evidence,
        inputs=None if graph is None else graph.source.inputs,
        outputs=None if graph is None else graph.source.outputs,
        profiles=() if graph is None or recipe is None else graph.profiles,
        expect=None if recipe is None else recipe.verify.expect,
        tf32=recipe is not None and bool(recipe.precision.tf32),
        further=further,
        precision=None
        if graph is None
        else {**graph.precision.options.canonical(), "origin": graph.precision.origin},
    )
    if not result.checks:
        return result.model_copy(
            update={"reasons": ("there is nothing to check it against: give --onnx, --recipe or --report",)}
        )
    return result


def engine_entry(path: Path) -> EngineEntry:
    """Name, size and hash of an engine file.

    Raises:
        SourceModelError: It is missing, empty or shorter than it says itself.
    """
    where = place(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(24)
        digest = file_sha256(path)
    except OSError as error:
        raise SourceModelError(f"the engine cannot be read: {error.strerror}", where=where) from None
    if size == 0:
        raise SourceModelError("the engine is empty", where=where)
    if head.startswith(RTX_MAGIC) and len(head) == 24:
        (whole,) = struct.unpack_from("<Q", head, 16)
        if whole > size:
            raise SourceModelError(
                f"the engine is cut short: {size} of {whole} bytes", where=where, hint="copy it again"
            )
    return EngineEntry(file=path.name, sha256=digest, bytes=size)


def inspect_here(engine: Path, backends: tuple[BackendName, ...]) -> Inspected:
    """The layers of ``engine`` by the first of ``backends`` that can load it on this machine's GPU.

    Raises:
        PlatformError: There is no GPU or no TensorRT that loads it.
        SourceModelError: It is no engine.
    """
    sm = visible_sm()
    if sm is None:
        raise PlatformError("an engine can only be inspected on a GPU, and CUDA shows none here")
    refused: PlatformError | None = None
    for name in backends:
        backend = load_backend(name)
        try:
            version = backend.version()
            text = backend.inspect(engine, LoadOptions())
        except PlatformError as error:
            refused = refused or error
            continue
        return Inspected(
            parse_inspector_json(text, where=place(engine)),
            f"inspector ({name} {version}, sm_{sm})",
            BuilderEntry(backend=name, version=version, sm=sm),
        )
    assert refused is not None
    raise refused


def _layers(
    subject: Subject, recipe: Recipe | None, report: VerifyReport | None, inspect: Inspect
) -> Inspected | None:
    """The engine's layers; None where only an earlier report knows them."""
    if subject.layers is not None:
        layers = load_layers(subject.layers)
        return Inspected(layers, f"{layers.source} ({subject.layers.name})")
    if subject.engine is None:
        return None
    try:
        return inspect(subject.engine, _backends(subject.engine, recipe, report))
    except PlatformError as error:
        if report is not None:
            log.info("the report's own record of the layers is used: %s", error)
            return None
        beside = subject.engine.with_name(f"{subject.engine.name.removesuffix('.trt')}.verify.json")
        use = f"--report {beside.name}, which lies beside it" if beside.exists() else "its .verify.json"
        raise PlatformError(
            error.message,
            where=place(subject.engine),
            hint=f"give a dump of its layers with --layers FILE, or {use}"
            + ("" if beside.exists() else " with --report FILE"),
        ) from error


def _backends(engine: Path, recipe: Recipe | None, report: VerifyReport | None) -> tuple[BackendName, ...]:
    """The backends to try, likeliest first."""
    with engine.open("rb") as file:
        is_rtx = file.read(4) == RTX_MAGIC
    named = [
        None if recipe is None else recipe.target.backend,
        None if report is None or report.builder is None else report.builder.backend,
        "tensorrt_rtx" if is_rtx else "tensorrt",
    ]
    both: tuple[BackendName, ...] = ("tensorrt", "tensorrt_rtx")
    first = next(name for name in named if name in both)
    return both if first == "tensorrt" else ("tensorrt_rtx", "tensorrt")


def _open_graph(path: Path, recipe: Recipe | None) -> _Graph:
    source = open_source(path, plugins=True, float_input=False)
    model: ir.Model = load_graph(source)
    annotate(model)
    profiles = () if recipe is None else resolve_profiles(recipe, source.inputs)
    precision = promised_precision(model, find_structures(model), recipe, profiles, place(path))
    evidence = GraphEvidence(model, precision.options, precision.fp8_linears)
    return _Graph(source, evidence, profiles, precision)


def _against_report(
    report: VerifyReport | None, engine: EngineEntry | None, found: Inspected, recipe: Recipe | None
) -> tuple[Check, ...]:
    if report is None:
        return ()
    # Trigonometry is counted by the graph's nodes, which is not part of what is compared here.
    belongs = check_belongs(report, engine, count_layers(found.layers.layers))
    return (belongs,) if recipe is None else (belongs, check_target(report, recipe))


def _by_report(
    report: VerifyReport, engine: EngineEntry | None, graph: _Graph | None, recipe: Recipe | None
) -> VerifyReport:
    """The earlier report, once it is known to belong to the engine, with what can be checked anew.

    What it recorded of the layers is compared with the recipe's counts and the contract; promises by
    node stand as they were checked then.
    """
    made: list[Check] = [] if engine is None else [check_belongs(report, engine, None)]
    counts = recorded_counts(report)
    if recipe is not None:
        made.append(check_target(report, recipe))
        if counts is not None:
            made.extend(check_expectations(recipe.verify.expect, counts))
    if graph is not None:
        made.extend(graph.precision.checks)
        made.append(
            check_contract(
                graph.source.inputs,
                graph.source.outputs,
                recorded_io(report),
                () if recipe is None else graph.profiles,
            )
        )
    checks = merged(recorded_checks(report), made)
    verdict, reasons = verdict_of(checks)
    return report.model_copy(
        update={
            "verdict": verdict,
            "reasons": reasons,
            "checks": tuple(check_entry(check) for check in checks),
            "engine_file": engine or report.engine_file,
        }
    )


def _not_detailed(subject: Subject, engine: EngineEntry | None, error: NotDetailed) -> VerifyReport:
    """An engine whose layers are bare names: nothing about it can be said, so nothing is called false."""
    note = error.message + (f" ({error.hint})" if error.hint else "")
    report = judge(
        label=_label(subject),
        engine=None,
        graph=None,
        further=[Check("layers", Status.NOT_VERIFIABLE, 1, 0, note=note)],
    )
    return report.model_copy(update={"engine_file": engine, "layer_source": "none: bare layer names"})


def _label(subject: Subject) -> str:
    named = subject.engine or subject.layers or subject.report
    assert named is not None
    return named.name
