"""The command that measures a model's scales for fp8."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, CacheDir, Debug, LogFormat, Quiet, default_cache, numbers
from engine_builder.errors import RecipeError

if TYPE_CHECKING:
    from engine_builder.quantize.samples import CalibrationData
    from engine_builder.quantize.scales import Scales
    from engine_builder.recipe import Recipe


def calibrate(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file; its model is calibrated.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Option("--out", help="The scales file to write.", show_default="the recipe's precision.scales"),
    ] = None,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Recorded inputs: an .npz file by input name, or a folder of them."),
    ] = None,
    method: Annotated[str, typer.Option(help="max or entropy.")] = "max",
    provider: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    per_channel: Annotated[
        bool, typer.Option("--per-channel", help="Also keep a range per output channel of each weight.")
    ] = False,
    lengths: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Lengths of drawn inputs.", show_default="those of the recipe's fidelity sweep"),
    ] = None,
    t: Annotated[str, typer.Option(help="Diffusion times of drawn inputs.")] = "1.0,0.5,0.02",
    samples: Annotated[int, typer.Option(min=1, help="Draws per length and time.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn inputs.")] = 0,
    cache: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Measure a model's ranges for fp8 with ModelOpt: once, on any machine, without a GPU.

    Without --data the inputs are drawn from a seed; the scales file then says that they are synthetic,
    and so does every report of an engine built with it.
    """
    from engine_builder.events import Event
    from engine_builder.opening import recipe_source
    from engine_builder.quantize.calibration import CalibrationOptions
    from engine_builder.quantize.calibration import calibrate as measure
    from engine_builder.quantize.scales import save_scales
    from engine_builder.recipe import load_recipe
    from engine_builder.stage_runner import Settings

    screen = SESSION.screen()
    asked = load_recipe(recipe)
    destination = out or asked.precision.scales
    if destination is None:
        raise RecipeError("--out is needed: the recipe names no precision.scales")
    for text, choices, option in (
        (method, ("max", "entropy"), "--method"),
        (provider, ("cpu", "cuda"), "--provider"),
    ):
        if text not in choices:
            raise RecipeError(f"{option} must be {' or '.join(choices)}, not {text!r}")
    options = CalibrationOptions(
        data=_data(asked, data, lengths, t, samples, seed),
        method="entropy" if method == "entropy" else "max",
        provider="cuda" if provider == "cuda" else "cpu",
        per_channel=per_channel or asked.precision.weights == "per_channel",
    )
    settings = Settings(cache or default_cache(), screen.watch, SESSION.cancel)
    started = time.monotonic()
    screen.watch(Event("calibrate", "started"))
    scales = measure(
        recipe_source(asked, settings),
        options,
        cancel=SESSION.cancel,
        progress=lambda text: screen.watch(Event("calibrate", "progress", text)),
    )
    save_scales(scales, destination)
    seconds = time.monotonic() - started
    screen.watch(Event("calibrate", "finished", _closing(scales), {"seconds": seconds, "cached": False}))
    if as_json:
        typer.echo(json.dumps(_summary(scales, destination, seconds), indent=1))
    elif not quiet:
        typer.echo(f"{destination}: {_closing(scales)}")


def _data(
    recipe: Recipe, recorded: Path | None, lengths: str | None, t: str, draws: int, seed: int
) -> CalibrationData:
    from engine_builder.quantize.samples import RecordedData, SyntheticData
    from engine_builder.recipe import DEFAULT_LENGTHS

    if recorded is not None:
        return RecordedData(recorded)
    chosen = numbers(lengths, int, "--lengths") if lengths is not None else recipe.fidelity_lengths()
    times = numbers(t, float, "--t")
    if any(length < 1 for length in chosen):
        raise RecipeError(f"--lengths must be 1 or more, not {min(chosen)}")
    if not all(0 <= time <= 1 for time in times):
        raise RecipeError(f"--t must lie between 0 and 1, not {t}")
    return SyntheticData(chosen or DEFAULT_LENGTHS, times, draws, seed)


def _closing(scales: Scales) -> str:
    kind = "synthetic" if scales.synthetic else "recorded"
    text = f"{len(scales.linears)} linears from {len(scales.samples)} {kind} samples"
    if scales.floored:
        text += f", {len(scales.floored)} ranges of zero raised"
    return text + (f", {len(scales.missing)} linears without a range" if scales.missing else "")


def _summary(scales: Scales, path: Path, seconds: float) -> dict[str, object]:
    return {
        "scales": str(path),
        "linears": len(scales.linears),
        "samples": len(scales.samples),
        "synthetic": scales.synthetic,
        "floored": [entry.model_dump(exclude_none=True) for entry in scales.floored],
        "missing": scales.missing,
        "seconds": round(seconds, 3),
    }
