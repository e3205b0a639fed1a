"""The stages of one engine: compile, execute where there is a GPU, verify."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_builder.cache import Cache, Entry
from engine_builder.compile.backend import (
    Backend,
    CompileRequest,
    build_files,
    build_options,
    load_options,
)
from engine_builder.conversion_stages import (
    CONVERTED,
)
from engine_builder.file_memory import FileMemory
from engine_builder.opening import (
    Opened,
)
from engine_builder.plan import (
    History,
    StagePlan,
    compile_ingredients,
    plan_stage,
)
from engine_builder.precision.options import ConversionOptions
from engine_builder.publish import OutputPaths, output_paths
from engine_builder.recipe import Profile, Recipe
from engine_builder.source import Source, file_sha256
from engine_builder.stage_runner import StageRunner

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


VERIFY_VERSION = 2
"""Raised when the verdict on an engine may come out differently."""


ENGINE = "engine.trt"


LAYERS = "layers.txt"


REPORT = "verify.json"


@dataclass(frozen=True)
class Prepared:
    """A recipe with its source opened, its graph converted and its fidelity measured."""

    recipe: Recipe
    backend: Backend
    opened: Opened
    conversion: Entry
    sensitivity: Mapping[str, Any] | None
    fidelity: Entry | None
    clock: StageRunner
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


def engine_paths(recipe: Recipe, sm: int) -> OutputPaths:
    output = recipe.output
    return output_paths(output.dir, sm, recipe.model.name, recipe.precision.recipe, output.name)


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


def cosine_threshold(recipe: Recipe) -> float:
    threshold = recipe.min_cosine()
    return -1.0 if threshold is None else threshold


def judged_fidelity(prepared: Prepared) -> Mapping[str, Any] | None:
    """The sweep's figures, judged."""
    return None if prepared.fidelity is None else _judged(prepared.fidelity.facts, prepared.recipe)


def _judged(figures: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A sweep's figures judged by the recipe's threshold, which is not part of the kept result."""
    threshold = cosine_threshold(recipe)
    passed = figures["worst_cosine"] >= threshold
    return {**figures, "min_cosine": threshold, "passed": passed}


def compile_stage(prepared: Prepared, sm: int, folder: Path, clock: StageRunner) -> Mapping[str, Any]:
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
        on_progress=lambda p: clock.progress("compile", p.phase),
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


def execute_stage(
    prepared: Prepared, sm: int, engine: Entry, cache: Cache, clock: StageRunner, scope: str
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


def verify_stage(
    prepared: Prepared,
    sm: int,
    engine: Entry | None,
    fidelity: Mapping[str, Any] | None,
    execution: Mapping[str, Any] | None,
    paths: OutputPaths,
    cache: Cache,
    clock: StageRunner,
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
        "tf32": bool(recipe.precision.tf32),
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
            tf32=bool(recipe.precision.tf32),
        )
        (folder / REPORT).write_text(report.to_json())
        return {"verdict": report.verdict}

    return clock.run(plan, cache, judge_and_keep)
