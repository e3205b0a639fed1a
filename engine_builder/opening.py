"""Opens what a recipe names: target, model, profiles, scales; everything that can be refused before work."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_builder.cache import Cache, content_key
from engine_builder.compile.backend import (
    Backend,
    build_files,
)
from engine_builder.errors import PlatformError, SourceModelError
from engine_builder.file_memory import FileMemory
from engine_builder.manifest import ManifestFile
from engine_builder.precision.options import ConversionOptions, resolve_options
from engine_builder.recipe import Profile, Recipe, resolve_profiles
from engine_builder.source import Source, file_sha256, open_source
from engine_builder.stage_runner import Settings, StageRunner

if TYPE_CHECKING:
    from engine_builder.quantize.scales import Scales

log = logging.getLogger(__name__)


def check_target(recipe: Recipe, backend: Backend) -> None:
    """Refuses, before any work, what the backend cannot build here.

    Raises:
        PlatformError: The architecture or the TensorRT library is not to be had.
        RecipeError: The precision or a build option does not exist on this backend.
    """
    for key, refused in backend.refused_options(recipe.build, recipe.target.sm).items():
        raise recipe.error(("build", key), refused)
    for sm in recipe.target.sm:
        reason = backend.check_support(recipe.precision.recipe, sm)
        if reason is not None:
            raise recipe.error(("target", "sm"), reason)
        try:
            backend.check_target(sm)
        except PlatformError as error:
            raise PlatformError(
                error.message, where=recipe.error(("target", "sm"), "").where, hint=error.hint
            ) from error


def check_build_files(recipe: Recipe, *, allow_plugins: bool) -> None:
    """Refuses, before any work, plugins that the operator did not allow, and files that are missing.

    Raises:
        RecipeError: A recipe brings code along, which only the operator can let run.
        PlatformError: A plugin library or a strict timing cache is not there.
    """
    if recipe.build.plugins and not allow_plugins:
        raise recipe.error(
            ("build", "plugins"),
            "plugins are code that the build runs, and are not allowed here",
            hint="--allow-plugins lets those that this recipe names run",
        )
    for path in build_files(recipe.build):
        if not path.is_file():
            raise PlatformError("no such file", where=str(path), hint="the recipe's build section names it")


@dataclass(frozen=True)
class Opened:
    """A recipe with its source checked, and what it asks for resolved against that source."""

    source: Source
    profiles: tuple[Profile, ...]
    options: ConversionOptions
    scales: ScalesFile | None


@dataclass(frozen=True)
class ScalesFile:
    """A scales file that belongs to the source."""

    file: ManifestFile
    scales: Scales


def open_recipe(recipe: Recipe, cache: Cache, memory: FileMemory, clock: StageRunner) -> Opened:
    """Finds and checks what a recipe names: its model, and for fp8 its scales.

    Raises:
        RecipeError: A profile does not fit the model, or fp8 names no scales.
        SourceModelError: The model or the scales cannot be used.
    """
    source = _open_source(recipe, cache, memory, clock)
    profiles = resolve_profiles(recipe, source.inputs)
    options = resolve_options(recipe.precision, generic=recipe.model.kind == "generic")
    scales: ScalesFile | None = None
    if recipe.precision.recipe == "fp8":
        from engine_builder.quantize.scales import load_scales

        path = recipe.precision.scales
        if path is None:
            raise recipe.error(
                ("precision",),
                "fp8 needs calibrated scales and names none",
                hint=f"make them with: entrypoint.py calibrate {recipe.path} --out scales.json, "
                "then set precision.scales",
            )
        loaded = load_scales(path)
        loaded.require_source(source.sha256)
        scales = ScalesFile(ManifestFile(**describe_file(path)), loaded)
    return Opened(source, profiles, options, scales)


def recipe_source(recipe: Recipe, settings: Settings) -> Source:
    """The recipe's model alone, checked and hashed.

    Raises:
        SourceModelError: It cannot be used.
    """
    memory = FileMemory(settings.cache / "hashes.json")
    return _open_source(recipe, Cache(settings.cache), memory, StageRunner(settings))


def _open_source(recipe: Recipe, cache: Cache, memory: FileMemory, clock: StageRunner) -> Source:
    source = open_source(
        source_path(recipe, cache, clock),
        sha256=recipe.model.sha256,
        plugins=bool(recipe.build.plugins),
        float_input=recipe.model.kind != "generic",
        known=memory.recall,
    )
    memory.record(source.files)
    return source


def source_path(recipe: Recipe, cache: Cache, clock: StageRunner) -> Path:
    """The recipe's ONNX file; a sample model is written to the cache first."""
    if recipe.model.onnx is not None:
        return recipe.model.onnx
    sample = recipe.model.sample
    assert sample is not None
    from engine_builder.sample import SAMPLE_VERSION, SampleSpec, Size, Spelling, write_sample

    spec = SampleSpec(Size(sample.size), Spelling(sample.spelling), sample.differential, sample.seed)
    ingredients = {"spec": [str(part) for part in asdict(spec).values()], "version": SAMPLE_VERSION}
    key = content_key("sample", ingredients)
    entry = cache.find(key)
    if entry is None:
        clock.progress("source", f"writing the {sample.size} sample model")

        def write(folder: Path) -> Mapping[str, Any]:
            write_sample(spec, folder / "sample.onnx")
            return {}

        entry = cache.make(key, write)
    return entry.file("sample.onnx")


def table_lengths(source: Source, profiles: Sequence[Profile]) -> list[dict[str, tuple[int, ...]]]:
    """The input shapes at which a rotary table must hold: every bound of every profile, longest last."""
    fixed = {
        spec.name: tuple(d for d in spec.shape if isinstance(d, int))
        for spec in source.inputs
        if all(isinstance(d, int) for d in spec.shape)
    }
    found = [
        {**fixed, **{name: getattr(r, bound) for name, r in profile.shapes.items()}}
        for profile in profiles
        for bound in ("min", "opt", "max")
    ] or [fixed]
    unique = {json.dumps(shapes, sort_keys=True): shapes for shapes in found}
    return sorted(unique.values(), key=lambda shapes: sum(sum(dims) for dims in shapes.values()))


def recorded_digest(folder: Path) -> str:
    """The digest of recorded inputs: of every file's name and content, in order of names.

    Raises:
        SourceModelError: There is no such file or folder.
    """
    files = sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]
    try:
        lines = [f"{file.name} {file_sha256(file)}" for file in files]
    except OSError as error:
        raise SourceModelError(f"cannot be read: {error.strerror}", where=str(folder)) from error
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
