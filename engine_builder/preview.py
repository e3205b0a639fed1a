"""What a build would do, before it does anything."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_builder.cache import Cache
from engine_builder.compile.backend import load_backend
from engine_builder.conversion_stages import plan_conversion, plan_fidelity
from engine_builder.engine_stages import engine_paths, plan_compile
from engine_builder.file_memory import FileMemory
from engine_builder.opening import check_target, open_recipe
from engine_builder.plan import History, StagePlan
from engine_builder.recipe import Recipe
from engine_builder.stage_runner import Settings, StageRunner

# Measured on two cores without a GPU, per GB of fp32 weights (1.84 GB and 5.8 GB models): converting
# 2 to 4 s, compiling 14 to 23 s with three times the engine's size in memory at the peak.
_CONVERT_SECONDS_PER_GB = 4.0
_COMPILE_SECONDS_PER_GB = 20.0
_COMPILE_MEMORY_PER_GB = 2.2e9
_LEAST_SECONDS = {"convert": 1.0, "fidelity": 1.0, "compile": 3.0, "sensitivity": 10.0}
_BASE_MEMORY = 0.6e9
_TYPE_SHARE = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "fp8": 0.28}
"""Engine and converted graph in proportion to the fp32 weights (1.84 GB -> 0.94 GB fp16, 0.49 GB fp8)."""

_FLOPS = 4e10
"""Products per second of the strict evaluator on two cores, which the sweep's time is estimated by."""


def preview(recipe: Recipe, cache_folder: Path) -> dict[str, Any]:
    """Stages with their keys, cache hits and reasons; files; expected memory, disk and time.

    Nothing is built.  A sample model that the recipe names is written to the cache, because its
    digest is part of every key.

    Raises:
        BuilderError: What a build would raise before its first long stage.
    """
    backend = load_backend(recipe.target.backend)
    check_target(recipe, backend)
    settings = Settings(cache_folder)
    cache, history = Cache(cache_folder), History(cache_folder)
    opened = open_recipe(recipe, cache, FileMemory(cache_folder / "hashes.json"), StageRunner(settings))
    gigabytes = opened.source.weight_bytes / 1e9
    scope = str(engine_paths(recipe, recipe.target.sm[0]).engine.absolute())
    conversion = plan_conversion(opened, cache, history, scope)
    stages: list[tuple[StagePlan, float]] = [(conversion, _CONVERT_SECONDS_PER_GB * gigabytes)]
    if recipe.verify.fidelity is not None:
        gate = plan_fidelity(recipe, opened, conversion.key, cache, history, scope)
        rows = sum(recipe.fidelity_lengths()) * len(recipe.verify.fidelity.t)
        products = rows * opened.source.weight_bytes / 4 * 2
        stages.append((gate, products / _FLOPS))
    for sm in recipe.target.sm:
        stages.append(
            (
                plan_compile(recipe, opened, conversion.key, backend, sm, cache, history),
                _COMPILE_SECONDS_PER_GB * gigabytes,
            )
        )
    described = [
        {
            **{k: v for k, v in asdict(stage).items() if k in ("name", "key", "cached", "reason")},
            "expected_seconds": 0.0 if stage.cached else max(seconds, _LEAST_SECONDS.get(stage.name, 1.0)),
        }
        for stage, seconds in stages
    ]
    share = _TYPE_SHARE[recipe.precision.recipe]
    missing = sum(1 for stage, _ in stages if not stage.cached and stage.name in ("convert", "compile"))
    compiles = any(not stage.cached and stage.name == "compile" for stage, _ in stages)
    return {
        "recipe": str(recipe.path),
        "source": {
            "path": str(opened.source.path),
            "sha256": opened.source.sha256,
            "weight_bytes": opened.source.weight_bytes,
            "nodes": opened.source.node_count,
        },
        "options": opened.options.canonical(),
        "stages": described,
        "engines": [
            {
                "sm": sm,
                "engine": str(paths.engine),
                "report": str(paths.report),
                "manifest": str(paths.manifest),
                "exists": paths.engine.exists(),
            }
            for sm in recipe.target.sm
            for paths in (engine_paths(recipe, sm),)
        ],
        "needs": {
            "memory_bytes": int(
                _BASE_MEMORY + (_COMPILE_MEMORY_PER_GB * gigabytes * share * 1.2 if compiles else 0)
            ),
            "disk_bytes": int(missing * share * opened.source.weight_bytes),
            "seconds": sum(float(stage["expected_seconds"]) for stage in described),
        },
    }
