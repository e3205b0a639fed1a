"""Runs a recipe: one direction, source to published engine, each stage kept under its content key."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_builder import __version__
from engine_builder.cache import Cache, Entry
from engine_builder.compile.backend import (
    Backend,
    load_backend,
)
from engine_builder.conversion_stages import (
    CONVERTED,
    convert_source,
    measure_fidelity,
    plan_conversion,
    plan_fidelity,
    reach_min_cosine,
)
from engine_builder.durable import check_writable
from engine_builder.engine_stages import (
    ENGINE,
    LAYERS,
    REPORT,
    Prepared,
    compile_stage,
    cosine_threshold,
    engine_paths,
    execute_stage,
    judged_fidelity,
    plan_compile,
    verify_stage,
)
from engine_builder.events import Event
from engine_builder.file_memory import FileMemory
from engine_builder.locks import hold
from engine_builder.manifest import Manifest, ManifestFile, ManifestStage, Origin, origin_of
from engine_builder.opening import (
    check_build_files,
    check_target,
    open_recipe,
)
from engine_builder.plan import (
    History,
)
from engine_builder.publish import OutputPaths, publish, publish_failure, publish_page, sweep_output
from engine_builder.recipe import Recipe, for_targets
from engine_builder.stage_runner import Settings, StageRunner

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """One engine of a recipe: where its files are, and whether it is proven."""

    sm: int
    paths: OutputPaths
    verdict: str
    reasons: tuple[str, ...]
    report: Mapping[str, Any]
    stages: tuple[ManifestStage, ...]
    seconds: float
    rebuilt: bool


def build(recipe: Recipe, settings: Settings) -> tuple[Outcome, ...]:
    """Builds and verifies every engine of ``recipe``, and publishes those that are proven.

    Raises:
        BuilderError: Anything but a failed verification, which is an ``Outcome``.
    """
    backend = load_backend(recipe.target.backend)
    check_target(recipe, backend)
    check_build_files(recipe, allow_plugins=settings.allow_plugins)
    cache = Cache(settings.cache)
    for sm in recipe.target.sm:
        check_writable(engine_paths(recipe, sm).engine.parent)
    with hold(
        settings.cache,
        "cache",
        wait=settings.lock_seconds,
        cancel=settings.cancel,
        tell=lambda text: settings.listener(Event("source", "note", text)),
    ):
        cache.sweep()
        prepared = prepare(recipe, backend, settings, cache)
        return tuple(_one_engine(prepared, sm, settings, cache) for sm in recipe.target.sm)


def prepare(recipe: Recipe, backend: Backend, settings: Settings, cache: Cache) -> Prepared:
    """Everything that the engines of a recipe have in common: source, conversion, fidelity gate."""
    clock = StageRunner(settings)
    history = History(settings.cache)
    memory = FileMemory(settings.cache / "hashes.json")
    started = time.monotonic()
    settings.listener(Event("source", "started"))
    opened = open_recipe(recipe, cache, memory, clock)
    source = opened.source
    settings.listener(
        Event(
            "source",
            "finished",
            f"{source.node_count} nodes, {source.weight_bytes / 1e6:.0f} MB of weights",
            {"seconds": time.monotonic() - started, "cached": False},
        )
    )
    scope = str(engine_paths(recipe, recipe.target.sm[0]).engine.absolute())
    opened, sensitivity = reach_min_cosine(recipe, opened, cache, clock, history, scope)
    plan = plan_conversion(opened, cache, history, scope)
    conversion = clock.run(
        plan,
        cache,
        lambda folder: convert_source(opened, folder / CONVERTED, clock.check_cancelled),
        needed=int(source.weight_bytes * opened.options.trunk_type.itemsize / 4),
    )
    fidelity: Entry | None = None
    if recipe.verify.fidelity is not None:
        gate = plan_fidelity(recipe, opened, plan.key, cache, history, scope)
        fidelity = clock.run(
            gate,
            cache,
            lambda folder: measure_fidelity(recipe, source, conversion.file(CONVERTED), folder, clock),
        )
    return Prepared(
        recipe=recipe,
        backend=backend,
        opened=opened,
        conversion=conversion,
        sensitivity=None if sensitivity is None else sensitivity.facts,
        fidelity=fidelity,
        clock=clock,
        history=history,
        memory=memory,
        seconds=time.monotonic() - started,
        image=settings.image,
    )


def convert_only(recipe: Recipe, out: Path, settings: Settings) -> Mapping[str, Any]:
    """Converts the recipe's model to ``out``; returns what was found and done.

    Raises:
        BuilderError: The source, the recipe or the conversion is at fault.
    """
    clock = StageRunner(settings)
    cache = Cache(settings.cache)
    opened = open_recipe(recipe, cache, FileMemory(settings.cache / "hashes.json"), clock)
    scope = str(out.absolute())
    opened, _ = reach_min_cosine(recipe, opened, cache, clock, History(settings.cache), scope)
    return convert_source(opened, out)


def _one_engine(prepared: Prepared, sm: int, settings: Settings, cache: Cache) -> Outcome:
    """Compiles, verifies and publishes the engine for one architecture."""
    recipe = prepared.recipe
    clock = prepared.clock.branch()
    started = time.monotonic()
    paths = engine_paths(recipe, sm)
    scope = str(paths.engine.absolute())
    with hold(
        paths.engine.parent,
        paths.engine.name,
        wait=settings.lock_seconds,
        cancel=settings.cancel,
        tell=lambda text: settings.listener(Event("compile", "note", text)),
    ) as held:
        sweep_output(paths)
        fidelity = judged_fidelity(prepared)
        engine: Entry | None = None
        if fidelity is None or fidelity["worst_cosine"] >= cosine_threshold(recipe):
            plan = plan_compile(
                recipe,
                prepared.opened,
                prepared.conversion.key,
                prepared.backend,
                sm,
                cache,
                prepared.history,
            )
            engine = clock.run(
                plan,
                cache,
                lambda folder: compile_stage(prepared, sm, folder, clock),
                needed=sum(file["bytes"] for file in prepared.conversion.facts["files"]),
            )
        execution = None if engine is None else execute_stage(prepared, sm, engine, cache, clock, scope)
        verdict = verify_stage(prepared, sm, engine, fidelity, execution, paths, cache, clock)
        report = json.loads(verdict.file(REPORT).read_text())
        seconds = prepared.seconds + time.monotonic() - started
        rebuilt = False
        held.check()
        origin = _origin(prepared, sm, clock.stages, seconds)
        if engine is None or report["verdict"] != "passed":
            page = _page(prepared, engine, verdict, origin, settings) if settings.page else None
            publish_failure(paths, verdict.file(REPORT).read_text(), page)
        else:
            manifest = _manifest(origin, engine, paths, verdict)
            rebuilt = not _is_published(paths, manifest, prepared.memory)
            if rebuilt:
                page = _page(prepared, engine, verdict, origin, settings) if settings.page else None
                text = verdict.file(REPORT).read_text()
                publish(paths, engine.file(ENGINE), text, manifest.to_json(), page)
                prepared.memory.remember(paths.engine, manifest.engine.sha256)
            elif settings.page and not paths.page.exists():
                published = Manifest.model_validate_json(paths.manifest.read_text())
                publish_page(paths, _page(prepared, engine, verdict, origin_of(published), settings))
        return Outcome(
            sm=sm,
            paths=paths,
            verdict=report["verdict"],
            reasons=tuple(report["reasons"]),
            report=report,
            stages=tuple(clock.stages),
            seconds=seconds,
            rebuilt=rebuilt,
        )


def _origin(prepared: Prepared, sm: int, stages: Sequence[ManifestStage], seconds: float) -> Origin:
    recipe, source = prepared.recipe, prepared.source
    return Origin(
        model=recipe.model.name,
        kind=recipe.model.kind,
        precision=recipe.precision.recipe,
        sm=sm,
        backend=prepared.backend.name,
        recipe=ManifestFile(
            name=recipe.path.name, bytes=recipe.path.stat().st_size, sha256=recipe.file_sha256
        ),
        recipe_digest=for_targets(recipe, sms=(sm,)).digest(),
        source=tuple(ManifestFile(name=f.path.name, bytes=f.size, sha256=f.sha256) for f in source.files),
        source_sha256=source.sha256,
        converted=tuple(ManifestFile(**file) for file in prepared.conversion.facts["files"]),
        scales=None if prepared.opened.scales is None else prepared.opened.scales.file,
        versions=versions(prepared.backend),
        image=None if prepared.image is None else dict(prepared.image),
        stages=tuple(stages),
        total_seconds=round(seconds, 3),
    )


def _manifest(origin: Origin, engine: Entry, paths: OutputPaths, verdict: Entry) -> Manifest:
    report = verdict.file(REPORT).read_bytes()
    return Manifest(
        engine=ManifestFile(
            name=paths.engine.name, bytes=engine.facts["bytes"], sha256=engine.facts["sha256"]
        ),
        report=ManifestFile(
            name=paths.report.name, bytes=len(report), sha256=hashlib.sha256(report).hexdigest()
        ),
        **vars(origin),
    )


def _page(
    prepared: Prepared, engine: Entry | None, verdict: Entry, origin: Origin, settings: Settings
) -> str:
    """The page for people about what ``verdict`` says."""
    from engine_builder.report.page import render_page
    from engine_builder.report.subject import subject_of
    from verify.report import read_report

    started = time.monotonic()
    settings.listener(Event("report", "started"))
    subject = subject_of(
        read_report(verdict.file(REPORT)),
        origin,
        prepared.converted,
        None if engine is None else engine.file(LAYERS),
    )
    page = render_page(subject)
    seconds = time.monotonic() - started
    settings.listener(Event("report", "finished", "", {"seconds": seconds, "cached": False}))
    return page


def _is_published(paths: OutputPaths, manifest: Manifest, memory: FileMemory) -> bool:
    """Whether the output folder already holds this engine, made from the same things."""
    try:
        existing = Manifest.model_validate_json(paths.manifest.read_text())
        report = paths.report.read_bytes()
    except (OSError, ValueError):
        return False
    timed = {"stages", "total_seconds"}
    return (
        existing.model_dump(exclude=timed) == manifest.model_dump(exclude=timed)
        and hashlib.sha256(report).hexdigest() == manifest.report.sha256
        and memory.recall(paths.engine) == manifest.engine.sha256
    )


def versions(backend: Backend) -> dict[str, str]:
    """The versions of everything that shapes an engine."""
    found = {"sa3-builder": __version__, "python": platform.python_version(), backend.name: backend.version()}
    for package in ("onnx", "onnx-ir", "onnxruntime", "numpy", "ml_dtypes"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            log.info("%s is not installed as a package; the manifest does not name its version", package)
    return found
