"""Makes a bundle: everything that a closed site needs, listed and signed."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_builder import __version__
from engine_builder.airgap import verify_bundle
from engine_builder.airgap.oci import copy_image, open_layout, read_image
from engine_builder.airgap.verify_bundle import (
    BUNDLE_SCHEMA,
    CONTENTS,
    IMAGE,
    NAMESPACE,
    SIGNATURE,
    SUMS,
    TOOL,
    SiteError,
    is_safe,
    parse_signature,
)
from engine_builder.cache import sha256_file
from engine_builder.durable import disk_error
from engine_builder.errors import PlatformError, RecipeError, SourceModelError
from engine_builder.fleet.container import MODELS, PlacedRecipe
from engine_builder.manifest import manifest_schema
from engine_builder.quantize.scales import scales_schema
from engine_builder.recipe import recipe_schema
from engine_builder.source import open_source
from verify.report import verify_schema

log = logging.getLogger(__name__)

SCHEMAS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "recipe": recipe_schema,
    "manifest": manifest_schema,
    "verify": verify_schema,
    "scales": scales_schema,
}


@dataclass(frozen=True)
class BundleRequest:
    """What goes into a bundle.

    ``image`` is an OCI layout, a folder or a tar archive; ``name`` is what the image is called on
    the closed site; ``key`` is the private Ed25519 key that signs, or its public half when an
    agent holds it; ``documents`` are files and folders.
    """

    recipes: tuple[PlacedRecipe, ...]
    image: Path
    key: Path
    documents: tuple[Path, ...]
    name: str | None = None
    sbom: Path | None = None
    with_models: bool = False


def make_bundle(request: BundleRequest, out: Path) -> str:
    """Writes the bundle to the new folder ``out``; returns the image's digest.

    The same request and key give the same bytes.

    Raises:
        RecipeError: ``out`` exists, or the image or a file to gather is not what it should be.
        SourceModelError: A model is to go along and is not here or is damaged.
        PlatformError: ssh-keygen is not installed or does not sign with this key.
        ResourceError: ``out`` cannot be written to.
    """
    if out.exists():
        raise RecipeError("exists already", where=str(out), hint="choose a new folder")
    staged = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            digest = _gather(request, staged)
            _sign(staged, request.key)
            staged.rename(out)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, Path(error.filename or out)) from error
    return digest


def _gather(request: BundleRequest, folder: Path) -> str:
    where = str(request.image)
    with open_layout(request.image) as layout:
        image = read_image(layout, where)
        copy_image(layout, image, folder / IMAGE, where)
    for placed in request.recipes:
        _gather_recipe(placed, folder, with_models=request.with_models)
    (folder / "schemas").mkdir()
    for name, schema in SCHEMAS.items():
        (folder / "schemas" / f"{name}.schema.json").write_text(json.dumps(schema(), indent=1) + "\n")
    for document in request.documents:
        _copy(document, folder / "docs" / document.name)
    if request.sbom is not None:
        _copy(request.sbom, folder / "sbom" / request.sbom.name)
    _copy(Path(verify_bundle.__file__), folder / TOOL)
    contents = {
        "schema": BUNDLE_SCHEMA,
        "sa3-builder": __version__,
        "image": {
            "name": request.name or image.name or f"sa3-builder:{__version__}",
            "digest": image.digest,
            "architecture": image.architecture,
        },
        "recipes": [str(placed.path).lstrip("/") for placed in request.recipes],
        "models": request.with_models,
    }
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n")
    return image.digest


def _gather_recipe(placed: PlacedRecipe, folder: Path, *, with_models: bool) -> None:
    """The recipe and what it reads, at the paths that they have in the container."""
    recipe = placed.recipe
    _copy(recipe.path, folder / str(placed.path).lstrip("/"))
    for file in placed.files:
        if file.key == ("model", "onnx"):
            if with_models:
                _gather_model(placed, file.file, folder / str(file.container).lstrip("/"))
        elif with_models or not file.is_in(MODELS):
            if not file.file.exists():
                raise recipe.error(file.key, f"{file.file} does not exist")
            _copy(file.file, folder / str(file.container).lstrip("/"))


def _gather_model(placed: PlacedRecipe, model: Path, target: Path) -> None:
    recipe = placed.recipe
    if not model.is_file():
        raise SourceModelError("no such model", where=str(model), hint="leave models out with --no-models")
    source = open_source(model, sha256=recipe.model.sha256, plugins=bool(recipe.build.plugins))
    for file in source.files:
        _copy(file.path, target.parent / file.path.relative_to(model.parent))


def _copy(source: Path, target: Path) -> None:
    """Copies a file, or a folder's files without those that begin with a dot."""
    if source.is_dir():
        for path in sorted(source.iterdir()):
            if not path.name.startswith("."):
                _copy(path, target / path.name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if sha256_file(target) != sha256_file(source):
            raise RecipeError(f"two different files would be {target.name} in the bundle", where=str(source))
        return
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        raise RecipeError("no such file", where=str(source)) from None


def _sign(folder: Path, key: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    unsafe = next((name for name in names if not is_safe(name)), None)
    if unsafe is not None:
        raise RecipeError(f"{unsafe!r} is no file name for a bundle", hint="rename it")
    sums = folder / SUMS
    sums.write_text("".join(f"{sha256_file(folder / name)}  {name}\n" for name in names))
    command = ["ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", str(key), str(sums)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PlatformError("ssh-keygen is not installed", hint="apt-get install openssh-client") from None
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PlatformError(
            f"ssh-keygen does not sign: {last}", where=str(key), hint="ssh-keygen -t ed25519 makes a key"
        )
    try:
        parse_signature((folder / SIGNATURE).read_text())
    except SiteError as error:
        raise PlatformError(
            f"the closed site cannot check this key's signature: {error.message}",
            where=str(key),
            hint="ssh-keygen -t ed25519 makes one that it can",
        ) from error
