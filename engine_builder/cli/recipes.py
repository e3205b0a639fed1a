"""The commands that help with recipes: write one, and see what it would do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, CacheDir, Debug, LogFormat, Quiet, default_cache
from engine_builder.cli.shown_path import shown_path
from engine_builder.errors import RecipeError


def init(
    model: Annotated[Path, typer.Argument(help="An fp32 ONNX model.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Option("--out", help="The recipe to write.", show_default="NAME.yaml in this folder"),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="Name of the model's output folder.")] = None,  # noqa: UP045
    precision: Annotated[Optional[str], typer.Option(help="fp32, fp16, bf16 or fp8.")] = None,  # noqa: UP045
    backend: Annotated[Optional[str], typer.Option(help="tensorrt or tensorrt_rtx.")] = None,  # noqa: UP045
    sm: Annotated[Optional[int], typer.Option(help="Compute capability, such as 89.")] = None,  # noqa: UP045
    dim: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--dim", help="Range of a dynamic dimension: NAME=min,opt,max. May be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing recipe.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the defaults.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Write a recipe for a model, with profiles from its dynamic axes.

    On a terminal what no flag gives is asked for.
    """
    from engine_builder.durable import write_durably
    from engine_builder.recipe import read_recipe, resolve_profiles
    from engine_builder.recipe_writer import RecipeAnswers, write_recipe_text
    from engine_builder.source import open_source

    SESSION.screen()
    source = open_source(model, float_input=False, known=lambda path: "0" * 64)
    ask = sys.stdin.isatty() and not yes

    def answer(given: str | None, question: str, default: str, choices: tuple[str, ...] = ()) -> str:
        text = given
        if text is None:
            text = str(typer.prompt(question, default=default)) if ask else default
        if choices and text not in choices:
            raise RecipeError(f"{question} must be one of {', '.join(choices)}, not {text!r}")
        return text

    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model.resolve().stem).strip("-.") or "model"
    chosen = RecipeAnswers(
        name=answer(name, "name", plain),
        precision=answer(precision, "precision", "fp16", ("fp32", "fp16", "bf16", "fp8")),  # type: ignore[arg-type]
        backend=answer(backend, "backend", "tensorrt_rtx", ("tensorrt", "tensorrt_rtx")),  # type: ignore[arg-type]
        sm=sm if sm is not None else int(answer(None, "sm", "89")),
        ranges=dict(_range(text) for text in dim or []),
    )
    path = out or Path(f"{chosen.name}.yaml")
    if path.exists() and not force:
        raise RecipeError("exists already", where=str(path), hint="name another --out, or give --force")
    text = write_recipe_text(model, path, source.inputs, chosen).encode()
    resolve_profiles(read_recipe(text, path), source.inputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text)
    if not quiet:
        first = f"calibrate it with: entrypoint.py calibrate {path}; then "
        first = first if chosen.precision == "fp8" else ""
        typer.echo(
            f"{path}: {chosen.precision} for sm_{chosen.sm}; {first}build it with: entrypoint.py {path}"
        )


def _range(text: str) -> tuple[str, tuple[int, int, int]]:
    match = re.fullmatch(r"(.+)=(\d+),(\d+),(\d+)", text, re.ASCII)
    if match is None:
        raise RecipeError(f"--dim must be NAME=min,opt,max, not {text!r}")
    return match[1], (int(match[2]), int(match[3]), int(match[4]))


def plan(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    cache: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Show what a build would do: stages, cache hits and why not, files, memory and time."""
    from engine_builder.preview import preview
    from engine_builder.recipe import load_recipe

    SESSION.screen()
    found = preview(load_recipe(recipe), cache or default_cache())
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    source = found["source"]
    typer.echo(
        f"source   {shown_path(Path(source['path']))}, {source['weight_bytes'] / 1e6:.0f} MB of weights"
    )
    for stage in found["stages"]:
        state = "cached" if stage["cached"] else f"~{stage['expected_seconds']:.0f} s"
        typer.echo(f"{stage['name']:<12} {state:>8}  {stage['reason']}")
    for engine in found["engines"]:
        typer.echo(f"writes   {shown_path(Path(engine['engine']))}")
        typer.echo(f"         {shown_path(Path(engine['report']))}, {Path(engine['manifest']).name}")
    needs = found["needs"]
    memory, disk = needs["memory_bytes"] / 1e9, needs["disk_bytes"] / 1e9
    typer.echo(f"needs    {memory:.1f} GB of memory, {disk:.1f} GB of disk, about {needs['seconds']:.0f} s")
