"""The stages that all engines of a recipe share: sensitivity, conversion, fidelity sweep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_builder.cache import Cache, Entry
from engine_builder.opening import (
    Opened,
    describe_file,
    recorded_digest,
    table_lengths,
)
from engine_builder.plan import (
    History,
    StagePlan,
    conversion_ingredients,
    fidelity_ingredients,
    plan_stage,
)
from engine_builder.recipe import Recipe
from engine_builder.source import Source, load_graph
from engine_builder.stage_runner import StageRunner

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


GATE_VERSION = 1
"""Raised when the fidelity sweep measures differently; its kept results are then made anew."""


CONVERTED = "converted.onnx"


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


def reach_min_cosine(
    recipe: Recipe, opened: Opened, cache: Cache, clock: StageRunner, history: History, scope: str
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


def convert_source(opened: Opened, out: Path, check: Callable[[], None] | None = None) -> Mapping[str, Any]:
    from engine_builder.precision.convert import convert

    source, options, scales = opened.source, opened.options, opened.scales
    ranges = None
    if scales is not None and options.fp8 is not None:
        ranges = scales.scales.ranges(options.fp8.weights)
    lengths = table_lengths(source, opened.profiles)
    conversion = convert(load_graph(source), out, options, lengths, ranges, check)
    rounded = conversion.losses
    return {
        "files": [describe_file(path) for path in conversion.files],
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


def measure_fidelity(
    recipe: Recipe, source: Source, converted: Path, folder: Path, clock: StageRunner
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
