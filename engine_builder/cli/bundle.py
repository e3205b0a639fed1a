"""The commands that carry the builder to a site without a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, Debug, LogFormat, Quiet
from engine_builder.errors import (
    BuilderError,
    PlatformError,
    RecipeError,
    ResourceError,
    VerificationError,
)

if TYPE_CHECKING:
    from engine_builder.airgap.verify_bundle import SiteError

bundle = typer.Typer(
    no_args_is_help=True, help="Make, split, join, verify and load a bundle for a site without a network."
)

Key = Annotated[
    Path, typer.Option("--key", help="Public key, or allowed_signers file, of who made the bundle.")
]
Folder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.")]


@bundle.command()
def make(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, YAML files.")],
    image: Annotated[Path, typer.Option("--image", help="The image: an OCI layout, folder or tar archive.")],
    key: Annotated[Path, typer.Option("--key", help="The Ed25519 key that signs, as ssh-keygen makes it.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to make.")],
    name: Annotated[
        Optional[str],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Option(
            help="What the image is to be called on the closed site.", show_default="as it is stored"
        ),
    ] = None,
    models: Annotated[bool, typer.Option("--models/--no-models", help="Take the ONNX models along.")] = False,
    sbom: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--sbom", help="The image's bill of materials, or a folder of them."),
    ] = None,
    docs: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--docs", help="Documentation, files or folders.", show_default="README.md and docs/"),
    ] = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Gather image, recipes, scales, schemas and documentation into one signed folder."""
    from engine_builder.airgap.make import BundleRequest, make_bundle
    from engine_builder.fleet.container import place_recipes

    SESSION.screen()
    request = BundleRequest(
        recipes=place_recipes(recipes),
        image=image,
        key=key,
        documents=tuple(docs) if docs else _documentation(),
        name=name,
        sbom=sbom,
        with_models=models,
    )
    digest = make_bundle(request, out)
    if not quiet:
        typer.echo(f"{out}: image {digest}, {len(recipes)} recipes")


@bundle.command()
def verify(
    folder: Folder, key: Key, debug: Debug = False, quiet: Quiet = False, log_format: LogFormat = "text"
) -> None:
    """Check that a bundle is exactly what was signed; exit code 7 names what is not."""
    from engine_builder.airgap.verify_bundle import SiteError, fingerprint, read_keys, verify_bundle

    SESSION.screen()
    try:
        checked = verify_bundle(folder, read_keys(key))
    except SiteError as error:
        raise _as_builder_error(error) from error
    if not quiet:
        typer.echo(f"{folder}: {checked.files} files as signed by {fingerprint(checked.key)}")


@bundle.command()
def load(
    folder: Folder,
    key: Key,
    into: Annotated[
        str, typer.Option("--into", help="docker, podman, containerd, or auto: the first installed.")
    ] = "auto",
    namespace: Annotated[str, typer.Option(help="Of containerd; Kubernetes uses k8s.io.")] = "default",
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Verify a bundle, then load its image into a container runtime."""
    from engine_builder.airgap.verify_bundle import SiteError, load_image, read_keys, verify_bundle

    SESSION.screen()
    try:
        checked = verify_bundle(folder, read_keys(key))
        name = load_image(checked, into, namespace)
    except SiteError as error:
        raise _as_builder_error(error) from error
    if not quiet:
        typer.echo(f"loaded {name}, {checked.digest}")


@bundle.command()
def split(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", help="Folder for the parts.")],
    size: Annotated[str, typer.Option("--size", help="Size of a part, such as 4GB or 700MiB.")] = "4GB",
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Cut a bundle into parts that fit on media; run again, it goes on where it stopped."""
    from engine_builder.airgap.split import parse_size, split_bundle

    SESSION.screen()
    parts = split_bundle(folder, out, parse_size(size))
    if not quiet:
        typer.echo(f"{out}: {len(parts)} parts; copy the .parts.json file and verify-bundle along with them")


@bundle.command()
def join(
    media: Annotated[list[Path], typer.Argument(metavar="MEDIA...", help="Folders that hold parts.")],
    out: Annotated[Path, typer.Option("--out", help="The bundle's folder, made when all parts are there.")],
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Put a bundle together from its parts, medium by medium; exit code 8 while some are missing."""
    from engine_builder.airgap.verify_bundle import SiteError, join_parts

    SESSION.screen()
    try:
        join_parts(media, out)
    except SiteError as error:
        raise _as_builder_error(error) from error
    if not quiet:
        typer.echo(f"{out}: joined; verify it before use")


def _documentation() -> tuple[Path, ...]:
    """The documentation that lies beside the program."""
    root = Path(__file__).parents[2]
    found = tuple(path for path in (root / "README.md", root / "docs") if path.exists())
    if not found:
        raise RecipeError("no documentation lies beside the program", hint="name it with --docs")
    return found


def _as_builder_error(error: SiteError) -> BuilderError:
    kinds: dict[int, type[BuilderError]] = {
        kind.exit_code: kind for kind in (RecipeError, PlatformError, VerificationError, ResourceError)
    }
    return kinds[error.exit_code](error.message, hint=error.hint)
