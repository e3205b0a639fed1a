"""The commands that run a recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from engine_builder.cli.session import (
    SESSION,
    CacheDir,
    Debug,
    LogFormat,
    Quiet,
    architectures,
    default_cache,
)


def build(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    sm: Annotated[
        Optional[str],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Option("--sm", help="Architectures in place of the recipe's target.sm, such as 89,120."),
    ] = None,
    timing_cache: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--timing-cache", help="Timing cache in place of the recipe's build.timing_cache."),
    ] = None,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Let the build run the plugins that the recipe names.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report/--no-report",
            envvar="SA3_BUILDER_REPORT",
            help="Write a page for people, .report.html, beside each engine.",
        ),
    ] = False,
    lock_wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for another build in the same folders.")
    ] = 600.0,
    cache: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Build, verify and publish the engines of a recipe (the default command)."""
    from engine_builder.cli.outcomes import summary
    from engine_builder.pipeline import build as run_recipe
    from engine_builder.recipe import for_targets, load_recipe
    from engine_builder.stage_runner import Settings
    from engine_builder.supply_chain.image import recorded_image

    screen = SESSION.screen()
    settings = Settings(
        cache or default_cache(),
        screen.watch,
        SESSION.cancel,
        lock_seconds=lock_wait,
        image=recorded_image(os.environ),
        allow_plugins=allow_plugins,
        page=report,
    )
    asked = for_targets(
        load_recipe(recipe),
        sms=None if sm is None else architectures(sm),
        timing_cache=timing_cache,
    )
    outcomes = run_recipe(asked, settings)
    if as_json:
        typer.echo(json.dumps([summary(o) for o in outcomes], indent=1))
    else:
        screen.closing(outcomes)
    if any(o.verdict != "passed" for o in outcomes):
        raise typer.Exit(7)


def convert(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    out: Annotated[Path, typer.Option("--out", help="The converted ONNX file to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found and done as JSON.")] = False,
    cache: CacheDir = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Convert the recipe's model to its precision, without compiling it."""
    from engine_builder.pipeline import convert_only
    from engine_builder.recipe import load_recipe
    from engine_builder.stage_runner import Settings

    screen = SESSION.screen()
    facts = convert_only(
        load_recipe(recipe), out, Settings(cache or default_cache(), screen.watch, SESSION.cancel)
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    elif not quiet:
        counts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in facts["counts"].items())
        typer.echo(f"{out}: {counts}")
