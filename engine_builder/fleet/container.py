"""Where a recipe and the files that it names lie inside the builder's container.

The container has these places: ``/recipes``, ``/scales`` and ``/models`` are read, ``/out`` and
``/cache`` are written.  A recipe names its files relative to its own folder, so that ``../models/m.onnx`` and
``../out`` mean the same in a checkout, in the container and in an air-gap bundle.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from engine_builder.errors import RecipeError
from engine_builder.recipe import Recipe, load_recipe
from engine_builder.recipe_yaml import KeyPath

RECIPES: Final = PurePosixPath("/recipes")
SCALES: Final = PurePosixPath("/scales")
MODELS: Final = PurePosixPath("/models")
OUT: Final = PurePosixPath("/out")
CACHE: Final = PurePosixPath("/cache")


@dataclass(frozen=True)
class PlacedFile:
    """A file or folder of this machine, the key that names it, and its path in the container."""

    key: KeyPath
    file: Path
    container: PurePosixPath

    def is_in(self, folder: PurePosixPath) -> bool:
        return self.container.is_relative_to(folder)


@dataclass(frozen=True)
class PlacedRecipe:
    """A recipe as the container sees it; ``files`` are those that it reads."""

    recipe: Recipe
    path: PurePosixPath
    files: tuple[PlacedFile, ...]

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """What decides the engine's path below ``/out/sm_XX``."""
        recipe = self.recipe
        return recipe.model.name, recipe.precision.recipe, recipe.output.name


def place_recipes(paths: Sequence[Path]) -> tuple[PlacedRecipe, ...]:
    """The recipes at ``paths`` as the container sees them, in the order given.

    Raises:
        RecipeError: A recipe is at fault, names a file where the container has no place for it, or
            would overwrite the file or the engine of another one.
    """
    placed = tuple(place_recipe(load_recipe(path)) for path in paths)
    files: dict[PurePosixPath, PlacedRecipe] = {}
    engines: dict[tuple[str, str, str | None], PlacedRecipe] = {}
    for item in placed:
        other = files.setdefault(item.path, item)
        if other is not item:
            raise RecipeError(
                f"has the same file name as {other.recipe.path}",
                where=str(item.recipe.path),
                hint="rename one",
            )
        twin = engines.setdefault(item.identity, item)
        if twin is not item:
            raise item.recipe.error(
                ("model", "name"),
                f"{item.recipe.model.name} in {item.recipe.precision.recipe} is also the engine of "
                f"{twin.recipe.path}",
                hint="give one of them another model.name or output.name",
            )
    return placed


def place_recipe(recipe: Recipe) -> PlacedRecipe:
    """``recipe`` as the container sees it.

    Raises:
        RecipeError: It names a file where the container has no place for it, by file and line.
    """
    for key, file, places in _written(recipe):
        _check_place(recipe, key, _in_container(recipe, file), places)
    read = tuple(
        PlacedFile(key, file, _check_place(recipe, key, _in_container(recipe, file), places))
        for key, file, places in _read(recipe)
    )
    return PlacedRecipe(recipe, RECIPES / recipe.path.name, read)


_Named = tuple[KeyPath, Path, tuple[PurePosixPath, ...]]


def _written(recipe: Recipe) -> Iterator[_Named]:
    yield ("output", "dir"), recipe.output.dir, (OUT,)
    if recipe.build.timing_cache is not None:
        yield ("build", "timing_cache"), recipe.build.timing_cache, (CACHE,)


def _read(recipe: Recipe) -> Iterator[_Named]:
    if recipe.model.onnx is not None:
        yield ("model", "onnx"), recipe.model.onnx, (MODELS,)
    if recipe.precision.scales is not None:
        yield ("precision", "scales"), recipe.precision.scales, (SCALES, RECIPES, MODELS)
    if recipe.verify.fidelity is not None and recipe.verify.fidelity.data is not None:
        yield ("verify", "fidelity", "data"), recipe.verify.fidelity.data, (MODELS,)
    for index, plugin in enumerate(recipe.build.plugins):
        yield ("build", "plugins", index), plugin, (MODELS,)


def _in_container(recipe: Recipe, file: Path) -> PurePosixPath:
    """The path of ``file`` in the container; one that the recipe gives absolutely stays what it is."""
    folder = recipe.path.absolute().parent
    # Joined and not resolved when the recipe was read: what follows the folder is what the recipe says.
    named = RECIPES / file.relative_to(folder) if file.is_relative_to(folder) else PurePosixPath(file)
    return PurePosixPath(posixpath.normpath(named))


def _check_place(
    recipe: Recipe, key: KeyPath, path: PurePosixPath, places: Sequence[PurePosixPath]
) -> PurePosixPath:
    if not any(path.is_relative_to(place) for place in places):
        wanted = " or ".join(map(str, places))
        example = f"..{places[0]}" if places[0] == OUT else f"..{places[0]}/{path.name}"
        raise recipe.error(
            key,
            f"is {path} in the container, which looks for it in {wanted}",
            hint=f"write {example} and put the file there",
        )
    return path
