"""Runs a recipe: one direction, source to published engine, each stage kept under its content key."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_builder import __version__
from engine_builder.cache import Cache, Entry, content_key
from engine_builder.compile.backend import (
    Backend,
    CompileRequest,
    build_files,
    build_options,
    load_backend,
    load_options,
)
from engine_builder.durable import check_writable
from engine_builder.errors import Interrupted, PlatformError, SourceModelError
from engine_builder.events import Event, Listener, ignore
from engine_builder.file_memory import FileMemory
from engine_builder.locks import hold
from engine_builder.manifest import Manifest, ManifestFile, ManifestStage
from engine_builder.plan import (
    History,
    StagePlan,
    compile_ingredients,
    conversion_ingredients,
    fidelity_ingredients,
    plan_stage,
)
from engine_builder.precision.options import ConversionOptions, resolve_options
from engine_builder.publish import OutputPaths, output_paths, publish, publish_failure, sweep_output
from engine_builder.recipe import Profile, Recipe, for_targets, resolve_profiles
from engine_builder.source import Source, file_sha256, load_graph, open_source

if TYPE_CHECKING:
    from engine_builder.quantize.scales import Scales

log = logging.getLogger(__name__)

GATE_VERSION = 1
"""Raised when the fidelity sweep measures differently; its kept results are then made anew."""

VERIFY_VERSION = 1
"""Raised when the verdict on an engine may come out differently."""


@dataclass(frozen=True)
class Settings:
    """Where a build keeps its results, who watches it, and how it is told to stop."""

    cache: Path
    listener: Listener = ignore
    cancel: threading.Event | None = None
    lock_seconds: float = 600.0
    image: Mapping[str, str] | None = None
    allow_plugins: bool = False


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


class _Clock:
    """Runs stages, tells the listener about them and remembers how long each took."""

    def __init__(self, settings: Settings, stages: Sequence[ManifestStage] = ()) -> None:
        self._settings = settings
        self.stages: list[ManifestStage] = list(stages)

    @property
    def cancel(self) -> threading.Event | None:
        return self._settings.cancel

    def branch(self) -> _Clock:
        """A clock that has seen the same stages, for what comes after them for one engine."""
        return _Clock(self._settings, self.stages)

    def progress(self, stage: str, text: str) -> None:
        self._settings.listener(Event(stage, "progress", text))

    def run(
        self,
        plan: StagePlan,
        cache: Cache,
        build: Callable[[Path], Mapping[str, Any]],
        needed: int | None = None,
    ) -> Entry:
        """The stage's result, from the cache or made now; ``needed`` is its size in bytes, about."""
        self.check_cancelled()
        started = time.monotonic()
        self._settings.listener(
            Event(plan.name, "started", plan.reason, {"key": plan.key, "cached": plan.cached})
        )
        entry = cache.find(plan.key)
        cached = entry is not None
        if entry is None:
            entry = cache.make(plan.key, build, needed)
        History(cache.root).record(plan.scope, plan.ingredients)
        seconds = time.monotonic() - started
        self.stages.append(
            ManifestStage(
                name=plan.name, key=plan.key, cached=cached, reason=plan.reason, seconds=round(seconds, 3)
            )
        )
        self._settings.listener(
            Event(plan.name, "finished", plan.reason, {"seconds": seconds, "cached": cached, "key": plan.key})
        )
        return entry

    def check_cancelled(self) -> None:
        if self._settings.cancel is not None and self._settings.cancel.is_set():
            raise Interrupted("the build was stopped", hint="run the same command again to resume")


def build_clock(settings: Settings) -> _Clock:
    """A clock for a caller that runs no whole build."""
    return _Clock(settings)


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


def check_target(recipe: Recipe, backend: Backend) -> None:
    """Refuses, before any work, what the backend cannot build here.

    Raises:
        PlatformError: The architecture or the TensorRT library is not to be had.
        RecipeError: The precision or a build option does not exist on this backend.
    """
    for key, refused in backend.refused_options(recipe.build, recipe.target.sm).items():
        raise recipe.error(("build", key), refused)
    for sm in recipe.target.sm:
        reason = backend.check_support(recipe.precision.recipe, sm)
        if reason is not None:
            raise recipe.error(("target", "sm"), reason)
        try:
            backend.check_target(sm)
        except PlatformError as error:
            raise PlatformError(
                error.message, where=recipe.error(("target", "sm"), "").where, hint=error.hint
            ) from error


def check_build_files(recipe: Recipe, *, allow_plugins: bool) -> None:
    """Refuses, before any work, plugins that the operator did not allow, and files that are missing.

    Raises:
        RecipeError: A recipe brings code along, which only the operator can let run.
        PlatformError: A plugin library or a strict timing cache is not there.
    """
    if recipe.build.plugins and not allow_plugins:
        raise recipe.error(
            ("build", "plugins"),
            "plugins are code that the build runs, and are not allowed here",
            hint="--allow-plugins lets those that this recipe names run",
        )
    for path in build_files(recipe.build):
        if not path.is_file():
            raise PlatformError("no such file", where=str(path), hint="the recipe's build section names it")


@dataclass(frozen=True)
class Prepared:
    """A recipe with its source opened, its graph converted and its fidelity measured."""

    recipe: Recipe
    backend: Backend
    opened: Opened
    conversion: Entry
    sensitivity: Mapping[str, Any] | None
    fidelity: Entry | None
    clock: _Clock
    history: History
    memory: FileMemory
    seconds: float
    image: Mapping[str, str] | None = None

    @property
    def source(self) -> Source:
        return self.opened.source

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return self.opened.profiles

    @property
    def options(self) -> ConversionOptions:
        return self.opened.options

    @property
    def converted(self) -> Path:
        return self.conversion.file(CONVERTED)


CONVERTED = "converted.onnx"
ENGINE = "engine.trt"
LAYERS = "layers.txt"
REPORT = "verify.json"


@dataclass(frozen=True)
class Opened:
    """A recipe with its source checked, and what it asks for resolved against that source."""

    source: Source
    profiles: tuple[Profile, ...]
    options: ConversionOptions
    scales: ScalesFile | None


@dataclass(frozen=True)
class ScalesFile:
    """A scales file that belongs to the source."""

    file: ManifestFile
    scales: Scales


def open_recipe(recipe: Recipe, cache: Cache, memory: FileMemory, clock: _Clock) -> Opened:
    """Finds and checks what a recipe names: its model, and for fp8 its scales.

    Raises:
        RecipeError: A profile does not fit the model, or fp8 names no scales.
        SourceModelError: The model or the scales cannot be used.
    """
    source = _open_source(recipe, cache, memory, clock)
    profiles = resolve_profiles(recipe, source.inputs)
    options = resolve_options(recipe.precision, generic=recipe.model.kind == "generic")
    scales: ScalesFile | None = None
    if recipe.precision.recipe == "fp8":
        from engine_builder.quantize.scales import load_scales

        path = recipe.precision.scales
        if path is None:
            raise recipe.error(
                ("precision",),
                "fp8 needs calibrated scales and names none",
                hint=f"make them with: entrypoint.py calibrate {recipe.path} --out scales.json, "
                "then set precision.scales",
            )
        loaded = load_scales(path)
        loaded.require_source(source.sha256)
        scales = ScalesFile(ManifestFile(**_file(path)), loaded)
    return Opened(source, profiles, options, scales)


def recipe_source(recipe: Recipe, settings: Settings) -> Source:
    """The recipe's model alone, checked and hashed.

    Raises:
        SourceModelError: It cannot be used.
    """
    memory = FileMemory(settings.cache / "hashes.json")
    return _open_source(recipe, Cache(settings.cache), memory, _Clock(settings))


def _open_source(recipe: Recipe, cache: Cache, memory: FileMemory, clock: _Clock) -> Source:
    source = open_source(
        source_path(recipe, cache, clock),
        sha256=recipe.model.sha256,
        plugins=bool(recipe.build.plugins),
        float_input=recipe.model.kind != "generic",
        known=memory.recall,
    )
    memory.record(source.files)
    return source


def prepare(recipe: Recipe, backend: Backend, settings: Settings, cache: Cache) -> Prepared:
    """Everything that the engines of a recipe have in common: source, conversion, fidelity gate."""
    clock = _Clock(settings)
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
    opened, sensitivity = _reach_min_cosine(recipe, opened, cache, clock, history, scope)
    plan = plan_conversion(opened, cache, history, scope)
    conversion = clock.run(
        plan,
        cache,
        lambda folder: _convert(opened, folder / CONVERTED),
        needed=int(source.weight_bytes * opened.options.trunk_type.itemsize / 4),
    )
    fidelity: Entry | None = None
    if recipe.verify.fidelity is not None:
        gate = plan_fidelity(recipe, opened, plan.key, cache, history, scope)
        fidelity = clock.run(
            gate,
            cache,
            lambda folder: _measure(recipe, source, conversion.file(CONVERTED), folder, clock),
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


def plan_conversion(opened: Opened, cache: Cache, history: History, scope: str) -> StagePlan:
    from engine_builder.precision.convert import pass_versions

    scales = opened.scales
    ingredients = conversion_ingredients(
        opened.source.sha256,
        opened.options,
        opened.profiles,
        pass_versions(),
        None if scales is None else scales.file.sha256,
    )
    return plan_stage(cache, "convert", ingredients, history, f"convert {scope}")


def plan_fidelity(
    recipe: Recipe, opened: Opened, conversion_key: str, cache: Cache, history: History, scope: str
) -> StagePlan:
    asked = recipe.verify.fidelity
    data = None if asked is None or asked.data is None else recorded_digest(asked.data)
    ingredients = fidelity_ingredients(recipe, opened.source.sha256, conversion_key, GATE_VERSION, data)
    return plan_stage(cache, "fidelity", ingredients, history, f"fidelity {scope}")


def plan_compile(
    recipe: Recipe,
    opened: Opened,
    conversion_key: str,
    backend: Backend,
    sm: int,
    cache: Cache,
    history: History,
) -> StagePlan:
    ingredients = compile_ingredients(
        recipe,
        conversion_key,
        opened.profiles,
        sm,
        backend.name,
        backend.version(),
        [file_sha256(path) for path in build_files(recipe.build)],
    )
    scope = str(engine_paths(recipe, sm).engine.absolute())
    return plan_stage(cache, "compile", ingredients, history, f"compile {scope}")


def recorded_digest(folder: Path) -> str:
    """The digest of recorded inputs: of every file's name and content, in order of names.

    Raises:
        SourceModelError: There is no such file or folder.
    """
    files = sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]
    try:
        lines = [f"{file.name} {file_sha256(file)}" for file in files]
    except OSError as error:
        raise SourceModelError(f"cannot be read: {error.strerror}", where=str(folder)) from error
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _reach_min_cosine(
    recipe: Recipe, opened: Opened, cache: Cache, clock: _Clock, history: History, scope: str
) -> tuple[Opened, Entry | None]:
    """For an fp8 recipe with ``min_cosine``: the options with the costliest linears left out."""
    wanted, options, scales = recipe.precision.min_cosine, opened.options, opened.scales
    if wanted is None or options.fp8 is None or scales is None:
        return opened, None
    asked = recipe.verify.fidelity
    sweep: dict[str, Any] = {
        "lengths": list(recipe.fidelity_lengths()) or [64],
        "t": list(asked.t) if asked is not None else [1.0, 0.5, 0.02],
        "seed": 0 if asked is None else asked.seed,
        "min_cosine": wanted,
    }
    ingredients = {
        **conversion_ingredients(opened.source.sha256, options, opened.profiles, {}, scales.file.sha256),
        "sweep": sweep,
        "evaluator": GATE_VERSION,
    }
    plan = plan_stage(cache, "sensitivity", ingredients, history, f"sensitivity {scope}")

    def rank(folder: Path) -> Mapping[str, Any]:
        from engine_builder.quantize.sensitivity import rank_linears

        def progress(text: str) -> None:
            clock.check_cancelled()
            clock.progress("sensitivity", text)

        assert options.fp8 is not None
        found = rank_linears(
            load_graph(opened.source),
            opened.source.path,
            options,
            table_lengths(opened.source, opened.profiles),
            scales.scales.ranges(options.fp8.weights),
            lengths=sweep["lengths"],
            t=sweep["t"],
            min_cosine=wanted,
            seed=sweep["seed"],
            progress=progress,
        )
        return found.to_json()

    entry = clock.run(plan, cache, rank)
    chosen = replace(options, fp8=replace(options.fp8, left_out=tuple(entry.facts["left_out"])))
    return replace(opened, options=chosen), entry


def convert_only(recipe: Recipe, out: Path, settings: Settings) -> Mapping[str, Any]:
    """Converts the recipe's model to ``out``; returns what was found and done.

    Raises:
        BuilderError: The source, the recipe or the conversion is at fault.
    """
    clock = _Clock(settings)
    cache = Cache(settings.cache)
    opened = open_recipe(recipe, cache, FileMemory(settings.cache / "hashes.json"), clock)
    scope = str(out.absolute())
    opened, _ = _reach_min_cosine(recipe, opened, cache, clock, History(settings.cache), scope)
    return _convert(opened, out)


def source_path(recipe: Recipe, cache: Cache, clock: _Clock) -> Path:
    """The recipe's ONNX file; a sample model is written to the cache first."""
    if recipe.model.onnx is not None:
        return recipe.model.onnx
    sample = recipe.model.sample
    assert sample is not None
    from engine_builder.sample import SAMPLE_VERSION, SampleSpec, Size, Spelling, write_sample

    spec = SampleSpec(Size(sample.size), Spelling(sample.spelling), sample.differential, sample.seed)
    ingredients = {"spec": [str(part) for part in asdict(spec).values()], "version": SAMPLE_VERSION}
    key = content_key("sample", ingredients)
    entry = cache.find(key)
    if entry is None:
        clock.progress("source", f"writing the {sample.size} sample model")

        def write(folder: Path) -> Mapping[str, Any]:
            write_sample(spec, folder / "sample.onnx")
            return {}

        entry = cache.make(key, write)
    return entry.file("sample.onnx")


def engine_paths(recipe: Recipe, sm: int) -> OutputPaths:
    output = recipe.output
    return output_paths(output.dir, sm, recipe.model.name, recipe.precision.recipe, output.name)


def _convert(opened: Opened, out: Path) -> Mapping[str, Any]:
    from engine_builder.precision.convert import convert

    source, options, scales = opened.source, opened.options, opened.scales
    ranges = None
    if scales is not None and options.fp8 is not None:
        ranges = scales.scales.ranges(options.fp8.weights)
    conversion = convert(load_graph(source), out, options, table_lengths(source, opened.profiles), ranges)
    rounded = conversion.losses
    return {
        "files": [_file(path) for path in conversion.files],
        "counts": dict(conversion.counts),
        "near_misses": conversion.structures["near_misses"],
        "passes": list(conversion.passes),
        "tables": [asdict(table) for table in conversion.tables],
        "forced_fp32": list(conversion.forced_fp32),
        "fp8": None
        if scales is None
        else {
            "linears": list(conversion.fp8_linears),
            "trunk_linears": dict(conversion.trunk_linears),
            "calibration": scales.scales.calibration.model_dump(mode="json"),
            "synthetic_data": scales.scales.synthetic,
        },
        "weights": {
            "converted": len(rounded),
            "overflowed": {loss.tensor: loss.overflowed for loss in rounded if loss.overflowed},
            "subnormal": sum(loss.subnormal for loss in rounded),
            "subnormal_worst": [
                [loss.tensor, loss.subnormal, loss.elements]
                for loss in sorted(rounded, key=lambda x: (-x.subnormal / max(x.elements, 1), x.tensor))[:5]
                if loss.subnormal
            ],
        },
    }


def table_lengths(source: Source, profiles: Sequence[Profile]) -> list[dict[str, tuple[int, ...]]]:
    """The input shapes at which a rotary table must hold: every bound of every profile, longest last."""
    fixed = {
        spec.name: tuple(d for d in spec.shape if isinstance(d, int))
        for spec in source.inputs
        if all(isinstance(d, int) for d in spec.shape)
    }
    found = [
        {**fixed, **{name: getattr(r, bound) for name, r in profile.shapes.items()}}
        for profile in profiles
        for bound in ("min", "opt", "max")
    ] or [fixed]
    unique = {json.dumps(shapes, sort_keys=True): shapes for shapes in found}
    return sorted(unique.values(), key=lambda shapes: sum(sum(dims) for dims in shapes.values()))


def _measure(
    recipe: Recipe, source: Source, converted: Path, folder: Path, clock: _Clock
) -> Mapping[str, Any]:
    from verify.fidelity import sweep

    asked = recipe.verify.fidelity
    assert asked is not None

    def progress(text: str) -> None:
        clock.check_cancelled()
        clock.progress("fidelity", text)

    report = sweep(
        source.path,
        converted,
        lengths=recipe.fidelity_lengths(),
        t=asked.t,
        min_cosine=0.0,
        seed=asked.seed,
        samples=asked.samples,
        recorded=asked.data,
        progress=progress,
    )
    return report.to_json()


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
        fidelity = _fidelity(prepared)
        engine: Entry | None = None
        if fidelity is None or fidelity["worst_cosine"] >= _threshold(recipe):
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
                lambda folder: _compile(prepared, sm, folder, clock),
                needed=sum(file["bytes"] for file in prepared.conversion.facts["files"]),
            )
        execution = None if engine is None else _execute(prepared, sm, engine, cache, clock, scope)
        verdict = _verify(prepared, sm, engine, fidelity, execution, paths, cache, clock)
        report = json.loads(verdict.file(REPORT).read_text())
        seconds = prepared.seconds + time.monotonic() - started
        rebuilt = False
        held.check()
        if engine is None or report["verdict"] != "passed":
            publish_failure(paths, verdict.file(REPORT).read_text())
        else:
            manifest = _manifest(prepared, sm, engine, paths, verdict, clock.stages, seconds)
            rebuilt = not _is_published(paths, manifest, prepared.memory)
            if rebuilt:
                publish(paths, engine.file(ENGINE), verdict.file(REPORT).read_text(), manifest.to_json())
                prepared.memory.remember(paths.engine, manifest.engine.sha256)
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


def _threshold(recipe: Recipe) -> float:
    threshold = recipe.min_cosine()
    return -1.0 if threshold is None else threshold


def _fidelity(prepared: Prepared) -> Mapping[str, Any] | None:
    """The sweep's figures, judged."""
    return None if prepared.fidelity is None else _judged(prepared.fidelity.facts, prepared.recipe)


def _judged(figures: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A sweep's figures judged by the recipe's threshold, which is not part of the kept result."""
    threshold = _threshold(recipe)
    passed = figures["worst_cosine"] >= threshold
    return {**figures, "min_cosine": threshold, "passed": passed}


def _compile(prepared: Prepared, sm: int, folder: Path, clock: _Clock) -> Mapping[str, Any]:
    from engine_builder.compile.isolated import compile_engine

    recipe = prepared.recipe
    request = CompileRequest(
        onnx=prepared.converted,
        engine=folder / ENGINE,
        sm=sm,
        options=build_options(recipe.build, tf32=bool(recipe.precision.tf32)),
        profiles=prepared.profiles,
    )
    compiled = compile_engine(
        prepared.backend.name,
        request,
        cancel=clock.cancel,
        on_progress=lambda p: clock.progress("compile", f"{p.phase}, {p.seconds:.0f} s"),
    )
    (folder / LAYERS).write_text(compiled.plan.layer_table)
    # The published engine may be a hard link to this file: nobody shall change either in place.
    (folder / ENGINE).chmod(0o444)
    return {
        "sha256": compiled.plan.sha256,
        "bytes": compiled.plan.size,
        "version": compiled.plan.version,
        "layer_source": compiled.layer_source,
        "compile_seconds": round(compiled.plan.seconds, 3),
        "warnings": list(compiled.plan.messages)[:100],
    }


def _execute(
    prepared: Prepared, sm: int, engine: Entry, cache: Cache, clock: _Clock, scope: str
) -> Mapping[str, Any]:
    """What running the engine showed, or under ``skipped`` why it was not run."""
    from engine_builder.execute.stage import EXECUTE_VERSION, EngineRun, run_engine, why_not

    recipe, sweep = prepared.recipe, prepared.recipe.verify.fidelity
    reason = why_not(prepared.backend, sm)
    if reason is not None:
        return {"skipped": reason}
    asked = EngineRun(
        engine=engine.file(ENGINE),
        load=load_options(recipe.build, prepared.converted),
        source=prepared.source.path,
        inputs=prepared.source.inputs,
        profiles=prepared.profiles,
        sweep=sweep,
        lengths=recipe.fidelity_lengths(),
    )
    ingredients = {
        "engine": engine.facts["sha256"],
        "fidelity": None if prepared.fidelity is None else prepared.fidelity.key,
        "execution": EXECUTE_VERSION,
    }
    plan = plan_stage(cache, "execute", ingredients, prepared.history, f"execute {scope}")

    def run(folder: Path) -> Mapping[str, Any]:
        def progress(text: str) -> None:
            clock.check_cancelled()
            clock.progress("execute", text)

        return run_engine(prepared.backend, asked, folder, cancel=clock.cancel, progress=progress)

    facts = dict(clock.run(plan, cache, run).facts)
    if facts["fidelity"] is not None:
        facts["fidelity"] = _judged(facts["fidelity"], recipe)
    return facts


def _verify(
    prepared: Prepared,
    sm: int,
    engine: Entry | None,
    fidelity: Mapping[str, Any] | None,
    execution: Mapping[str, Any] | None,
    paths: OutputPaths,
    cache: Cache,
    clock: _Clock,
) -> Entry:
    """The report on an engine, or on a conversion that did not pass the gate, kept like any result."""
    recipe = prepared.recipe
    label = f"sm_{sm}/{recipe.model.name}/{paths.engine.name}"
    ingredients = {
        "conversion": prepared.conversion.key,
        "engine": None if engine is None else engine.facts["sha256"],
        "fidelity": fidelity,
        "execution": execution,
        "expect": json.loads(recipe.canonical("verify")).get("expect"),
        "profiles": [[*p.shapes] for p in prepared.profiles],
        "label": label,
        "verifier": VERIFY_VERSION,
    }
    plan = plan_stage(cache, "verify", ingredients, prepared.history, f"verify {label}")

    def judge_and_keep(folder: Path) -> Mapping[str, Any]:
        from verify.evidence import judge_build

        report = judge_build(
            label=label,
            sm=sm,
            converted=prepared.converted,
            options=prepared.options,
            fp8_linears=(prepared.conversion.facts["fp8"] or {}).get("linears", ()),
            sensitivity=prepared.sensitivity,
            source=prepared.source,
            profiles=prepared.profiles,
            expect=recipe.verify.expect,
            backend=prepared.backend.name,
            engine=None if engine is None else engine.facts,
            layer_table=None if engine is None else engine.file(LAYERS).read_text(),
            fidelity=fidelity,
            conversion=prepared.conversion.facts,
            execution=execution,
        )
        (folder / REPORT).write_text(report.to_json())
        return {"verdict": report.verdict}

    return clock.run(plan, cache, judge_and_keep)


def _manifest(
    prepared: Prepared,
    sm: int,
    engine: Entry,
    paths: OutputPaths,
    verdict: Entry,
    stages: Sequence[ManifestStage],
    seconds: float,
) -> Manifest:
    recipe, source = prepared.recipe, prepared.source
    report = verdict.file(REPORT).read_bytes()
    return Manifest(
        engine=ManifestFile(
            name=paths.engine.name, bytes=engine.facts["bytes"], sha256=engine.facts["sha256"]
        ),
        report=ManifestFile(
            name=paths.report.name, bytes=len(report), sha256=hashlib.sha256(report).hexdigest()
        ),
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


def _file(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
