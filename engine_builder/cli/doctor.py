"""The command that says what this machine can build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, CacheDir, Debug, LogFormat, Quiet, default_cache
from engine_builder.errors import PlatformError

if TYPE_CHECKING:
    from engine_builder.doctor.examine import Diagnosis


def doctor(
    recipe: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Argument(help="A recipe to look at this machine for."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="As for build: let the recipe's plugins run.")
    ] = False,
    cache: CacheDir = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Say what this machine can build; with a recipe, what keeps it from building that one.

    Exits with 3 when the recipe cannot be built here.
    """
    from engine_builder.compile.backend import load_backend
    from engine_builder.doctor.examine import diagnose, examine_machine, examine_recipe
    from engine_builder.doctor.machine import read_machine
    from engine_builder.recipe import load_recipe

    SESSION.screen()
    asked = None if recipe is None else load_recipe(recipe)
    machine = read_machine()
    if asked is None:
        diagnosis = diagnose(machine, examine_machine(machine))
    else:
        findings = examine_recipe(
            machine,
            asked,
            load_backend(asked.target.backend),
            cache or default_cache(),
            allow_plugins=allow_plugins,
        )
        diagnosis = diagnose(machine, findings, str(recipe))
    typer.echo(diagnosis.to_json() if as_json else as_text(diagnosis), nl=not as_json)
    if not diagnosis.able:
        raise typer.Exit(PlatformError.exit_code)


def as_text(diagnosis: Diagnosis) -> str:
    """The diagnosis for people: a line for the machine, one for each finding, and the conclusion."""
    machine = diagnosis.machine
    lines = [
        f"sa3-builder {machine.builder}, Python {machine.python}, {machine.architecture}, "
        f"{machine.cores} cores, {machine.available_bytes / 2**30:.1f} of "
        f"{machine.memory_bytes / 2**30:.1f} GiB of memory free"
    ]
    for finding in diagnosis.findings:
        lines.append(f"{finding.level:<8} {finding.subject}: {finding.text}")
        if finding.fix is not None and finding.level != "ok":
            lines.append(f"{'':<8} fix: {finding.fix}")
    if diagnosis.recipe is not None:
        able = "can be built here" if diagnosis.able else "cannot be built here"
        lines.append(f"{diagnosis.recipe} {able}")
    return "\n".join(lines)
