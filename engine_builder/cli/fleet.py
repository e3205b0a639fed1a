"""The commands for many builds: jobs for a cluster, and what they left behind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, Debug, LogFormat, Quiet, architectures
from engine_builder.errors import RecipeError

if TYPE_CHECKING:
    from engine_builder.fleet.collect import Matrix
    from engine_builder.recipe import Recipe


def k8s(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, YAML files.")],
    sm: Annotated[str, typer.Option("--sm", help="Architectures, such as 89,90,120.")],
    image: Annotated[str, typer.Option("--image", help="The builder's image, by tag or digest.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Option(
            "--out", help="Folder for a kustomize tree.", show_default="plain YAML to standard output"
        ),
    ] = None,
    models: Annotated[
        str, typer.Option(help="Where models are: pvc:NAME or host:/FOLDER.")
    ] = "pvc:sa3-models",
    outputs: Annotated[str, typer.Option(help="Where engines go: pvc:NAME or host:/FOLDER.")] = "pvc:sa3-out",
    cache: Annotated[
        str,
        typer.Option(
            "--cache",
            help="Where stages and timing caches are kept: pvc:NAME, host:/FOLDER, or scratch, which "
            "ends with the pod.",
        ),
    ] = "pvc:sa3-cache",
    retries: Annotated[int, typer.Option(min=0, max=100, help="Times that a build is tried again.")] = 3,
    deadline: Annotated[
        int, typer.Option(min=60, help="Seconds after which one try of a build is stopped.")
    ] = 4 * 3600,
    queue: Annotated[
        int, typer.Option(min=0, help="Seconds that a job may wait for nodes, besides its tries.")
    ] = 24 * 3600,
    keep: Annotated[int, typer.Option(min=0, help="Seconds after which a finished job is removed.")] = 7
    * 24
    * 3600,
    cpu: Annotated[str, typer.Option(help="Cores to reserve for a build.")] = "2",
    source_gb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0.001,
            help="Size of each model in GB.",
            show_default="as measured, or 5.8 if not on this machine",
        ),
    ] = None,
    runtime_class: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="RuntimeClass of GPU jobs, where the cluster needs one, such as nvidia."),
    ] = None,
    indexed: Annotated[
        str, typer.Option(help="One Indexed Job for all recipes: auto (more than 20), always or never.")
    ] = "auto",
    parallelism: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Builds of an Indexed Job that run at once.", show_default="all"),
    ] = None,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Let the jobs run the plugins that recipes name.")
    ] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Write Kubernetes jobs that build recipes, one per recipe and architecture."""
    from engine_builder.fleet.container import place_recipes
    from engine_builder.fleet.jobs import FleetOptions
    from engine_builder.fleet.kustomize import kustomize_files, plain_yaml, write_tree
    from engine_builder.fleet.storage import parse_storage

    SESSION.screen()
    if indexed not in ("auto", "always", "never"):
        raise RecipeError(f"--indexed must be auto, always or never, not {indexed!r}")
    options = FleetOptions(
        image=image,
        models=parse_storage(models, "--models"),
        outputs=parse_storage(outputs, "--outputs"),
        cache=parse_storage(cache, "--cache", scratch=True),
        retries=retries,
        deadline=deadline,
        queue=queue,
        keep=keep,
        cpu=cpu,
        source_bytes=None if source_gb is None else int(source_gb * 1e9),
        runtime_class=runtime_class,
        indexed="always" if indexed == "always" else "never" if indexed == "never" else "auto",
        parallelism=parallelism,
        allow_plugins=allow_plugins,
    )
    sms = architectures(sm)
    placed = place_recipes(recipes)
    if out is None:
        typer.echo(plain_yaml(placed, sms, options), nl=False)
        return
    files = kustomize_files(placed, sms, options, _command())
    removed = write_tree(files, out)
    if not quiet:
        typer.echo(f"{out}: {len(files)} files; apply {', '.join(f'overlays/sm_{one}' for one in sms)}")
        for path in removed:
            typer.echo(f"removed {path}, which an earlier call wrote")


def collect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sm_XX folders.")],
    recipe: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--recipe", help="A recipe that was to be built; may be given again."),
    ] = None,
    sm: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--sm", help="Architectures to expect.", show_default="those that the recipes name"),
    ] = None,
    image: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--image", help="The image that the engines are to come from."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the matrix as JSON.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Show which engines of a fleet are verified, failed, missing or stale; exit code 7 unless all are
    verified."""
    from engine_builder.fleet.collect import collect as read_tree
    from engine_builder.fleet.collect import expected_slots
    from engine_builder.fleet.image import Image
    from engine_builder.recipe import load_recipe

    SESSION.screen()
    if sm is not None and not recipe:
        raise RecipeError("--sm says what to expect of recipes", hint="add --recipe")
    wanted = expected_slots(
        [load_recipe(path) for path in recipe or ()],
        () if sm is None else architectures(sm),
        _source_digest,
    )
    matrix = read_tree(folder, wanted, image=None if image is None else Image(image))
    if as_json:
        typer.echo(json.dumps(matrix.to_json(), indent=1))
    elif not quiet:
        typer.echo(_matrix_text(matrix))
    if not matrix.complete:
        raise typer.Exit(7)


def _command() -> str:
    import sys

    return shlex.join(["sa3-builder", *sys.argv[1:]])


def _source_digest(recipe: Recipe) -> str | None:
    """What the engine's source must hash to, as far as this machine can tell."""
    from engine_builder.source import open_source

    if recipe.model.sha256 is not None:
        return recipe.model.sha256
    if recipe.model.onnx is None or not recipe.model.onnx.exists():
        return None
    return open_source(recipe.model.onnx, plugins=bool(recipe.build.plugins)).sha256


def _matrix_text(matrix: Matrix) -> str:
    """The matrix with a row per engine, the sum below it, and why each hole is one."""
    sms = matrix.sms
    table = [["model", "precision", *(f"sm_{sm}" for sm in sms)]]
    for (model, precision, file), cells in matrix.rows.items():
        usual = file == f"dit_{precision}.trt"
        states = (cells[sm].state if sm in cells else "-" for sm in sms)
        table.append([model, precision if usual else f"{precision} ({file})", *states])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines.append(
        ", ".join(f"{count} {state}" for state, count in matrix.counts().items() if count) or "nothing here"
    )
    for cell in matrix.cells:
        if cell.reason:
            slot = cell.slot
            lines.append(f"sm_{slot.sm}/{slot.model}/{slot.file}: {cell.state}: {cell.reason}")
    return "\n".join(lines)
