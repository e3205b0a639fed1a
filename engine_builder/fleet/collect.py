"""What a fleet of builds left behind: the matrix of model, precision and architecture.

Reads a tree of ``sm_XX/<model>/<engine>`` with the report and the manifest beside each engine.
Given the recipes, it also tells what is missing and what was built from other things than they
name; without them, the tree's own rows and columns are all that is expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from engine_builder.errors import RecipeError
from engine_builder.fleet.image import Image
from engine_builder.manifest import Manifest
from engine_builder.publish import OutputPaths, output_paths
from engine_builder.recipe import Recipe, for_targets
from engine_builder.source import file_sha256
from verify.report import VerifyReport, read_report

SCHEMA: Final = "sa3-builder/collect/1"

State = Literal["verified", "failed", "missing", "stale"]

_SM_FOLDER: Final = re.compile(r"sm_(\d{2,3})")
_SUFFIXES: Final = (".verify.json", ".manifest.json", ".trt")


@dataclass(frozen=True)
class Slot:
    """One place of the matrix; ``file`` is the engine's name in its folder."""

    model: str
    precision: str
    sm: int
    file: str

    @property
    def row(self) -> tuple[str, str, str]:
        return self.model, self.precision, self.file


@dataclass(frozen=True)
class Cell:
    """What is in a slot, and why it is not a verified engine."""

    slot: Slot
    state: State
    reason: str = ""
    manifest: Manifest | None = None
    built: float = 0.0
    """When the manifest was written, in seconds since the epoch; 0 without one."""


@dataclass(frozen=True)
class Expected:
    """Digests of what a slot's engine has to come from; None where anything will do."""

    recipe: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Matrix:
    """Every slot, ordered by model, precision and architecture."""

    cells: tuple[Cell, ...]

    @property
    def complete(self) -> bool:
        return bool(self.cells) and all(cell.state == "verified" for cell in self.cells)

    @property
    def sms(self) -> tuple[int, ...]:
        return tuple(sorted({cell.slot.sm for cell in self.cells}))

    @property
    def rows(self) -> dict[tuple[str, str, str], dict[int, Cell]]:
        rows: dict[tuple[str, str, str], dict[int, Cell]] = {}
        for cell in self.cells:
            rows.setdefault(cell.slot.row, {})[cell.slot.sm] = cell
        return rows

    def counts(self) -> dict[State, int]:
        states: tuple[State, ...] = ("verified", "failed", "missing", "stale")
        return {state: sum(cell.state == state for cell in self.cells) for state in states}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "complete": self.complete,
            "counts": self.counts(),
            "cells": [
                {
                    **asdict(cell.slot),
                    "state": cell.state,
                    "reason": cell.reason,
                    "engine_sha256": None if cell.manifest is None else cell.manifest.engine.sha256,
                    "recipe_digest": None if cell.manifest is None else cell.manifest.recipe_digest,
                    "source_sha256": None if cell.manifest is None else cell.manifest.source_sha256,
                    "image": None if cell.manifest is None else cell.manifest.image,
                }
                for cell in self.cells
            ],
        }


def expected_slots(
    recipes: Sequence[Recipe], sms: Sequence[int], source_of: Callable[[Recipe], str | None]
) -> dict[Slot, Expected]:
    """The slots that ``recipes`` are to fill, for ``sms`` or else for the architectures they name.

    ``source_of`` gives the digest of a recipe's model, or None where it cannot be known here.

    Raises:
        RecipeError: A recipe cannot be built for one of ``sms``.
    """
    expected: dict[Slot, Expected] = {}
    for recipe in recipes:
        source = source_of(recipe)
        for sm in sms or recipe.target.sm:
            paths = output_paths(Path(), sm, recipe.model.name, recipe.precision.recipe, recipe.output.name)
            slot = Slot(recipe.model.name, recipe.precision.recipe, sm, paths.engine.name)
            expected[slot] = Expected(for_targets(recipe, sms=(sm,)).digest(), source)
    return expected


def collect(
    folder: Path,
    expected: Mapping[Slot, Expected],
    *,
    image: Image | None = None,
    sha256: Callable[[Path], str] = file_sha256,
) -> Matrix:
    """The matrix of what lies in ``folder``.

    Without ``expected`` the slots are every model and precision found, for every architecture
    found, and engines of one model that come from different sources or images are stale but for
    the latest.  ``sha256`` reads an engine's digest; it may remember those of unchanged files.

    Raises:
        RecipeError: ``folder`` is no folder.
    """
    if not folder.is_dir():
        raise RecipeError(
            "no such folder", where=str(folder), hint="name the one that holds the sm_XX folders"
        )
    slots = expected or dict.fromkeys(_grid(find_slots(folder)), Expected())
    cells = [_judged(folder, slot, wanted, image, sha256) for slot, wanted in slots.items()]
    if not expected:
        cells = _without_older(cells)
    order = {"fp32": 0, "fp16": 1, "bf16": 2, "fp8": 3}
    cells.sort(key=lambda c: (c.slot.model, order.get(c.slot.precision, 9), c.slot.file, c.slot.sm))
    return Matrix(tuple(cells))


def find_slots(folder: Path) -> set[Slot]:
    """The slots of which ``folder`` holds an engine, a report or a manifest."""
    found: set[Slot] = set()
    for path in sorted(folder.glob("sm_*/*/*")):
        match = _SM_FOLDER.fullmatch(path.parent.parent.name)
        suffix = next((s for s in _SUFFIXES if path.name.endswith(s)), None)
        if match is None or suffix is None or path.name.startswith(".") or not path.is_file():
            continue
        paths = OutputPaths(path.with_name(f"{path.name.removesuffix(suffix)}.trt"))
        report, manifest = _report(paths.report), _manifest(paths.manifest)
        # An engine's name need not end in .trt; the files beside it say what it is.
        name, precision = paths.engine.name, paths.engine.stem.rpartition("_")[2]
        if isinstance(report, VerifyReport):
            name, precision = report.engine, str(report.precision.get("recipe", precision))
        if isinstance(manifest, Manifest):
            name, precision = manifest.engine.name, manifest.precision
        slot = Slot(model=path.parent.name, precision=precision, sm=int(match[1]), file=name)
        found.add(slot)
    return found


def _grid(found: Iterable[Slot]) -> list[Slot]:
    found = set(found)
    sms = {slot.sm for slot in found}
    return [replace(slot, sm=sm) for slot in {replace(slot, sm=0) for slot in found} for sm in sms]


def _judged(
    folder: Path, slot: Slot, expected: Expected, image: Image | None, sha256: Callable[[Path], str]
) -> Cell:
    paths = OutputPaths(folder / f"sm_{slot.sm}" / slot.model / slot.file)
    if not any(path.exists() for path in (paths.engine, paths.report, paths.manifest)):
        return Cell(slot, "missing", "nothing was published")
    report = _report(paths.report)
    if isinstance(report, str):
        return Cell(slot, "failed", report)
    if report.verdict != "passed":
        return Cell(slot, "failed", "; ".join(report.reasons) or report.verdict)
    manifest = _manifest(paths.manifest)
    if isinstance(manifest, str):
        return Cell(slot, "failed", manifest)
    built = paths.manifest.stat().st_mtime
    damage = _damage(paths, slot, manifest, sha256)
    if damage is not None:
        return Cell(slot, "failed", damage, manifest, built)
    stale = _stale(manifest, expected, image)
    return Cell(slot, "stale" if stale else "verified", stale, manifest, built)


def _damage(paths: OutputPaths, slot: Slot, manifest: Manifest, sha256: Callable[[Path], str]) -> str | None:
    """Why the files beside each other are not what one build published together."""
    if (manifest.model, manifest.precision, manifest.sm) != (slot.model, slot.precision, slot.sm):
        return (
            f"its manifest is that of {manifest.model} in {manifest.precision} for sm_{manifest.sm}: "
            "files were moved or renamed"
        )
    if not paths.engine.is_file():
        return f"{paths.engine.name} is gone"
    if paths.engine.stat().st_size != manifest.engine.bytes:
        return f"{paths.engine.name} is not as long as its manifest says"
    if file_sha256(paths.report) != manifest.report.sha256:
        return f"{paths.report.name} is not the report that its manifest names"
    if sha256(paths.engine) != manifest.engine.sha256:
        return f"{paths.engine.name} is not the engine that its manifest names"
    return None


def _stale(manifest: Manifest, expected: Expected, image: Image | None) -> str:
    """What the engine was built from that is not what is expected, or nothing."""
    reasons = []
    if expected.recipe is not None and manifest.recipe_digest != expected.recipe:
        reasons.append("built from another recipe")
    if expected.source is not None and manifest.source_sha256 != expected.source:
        reasons.append(f"built from source {manifest.source_sha256[:12]}, not {expected.source[:12]}")
    if image is not None and not image.built(manifest):
        reasons.append(f"built in {_named(manifest)}, not in {image}")
    return "; ".join(reasons)


def _without_older(cells: Sequence[Cell]) -> list[Cell]:
    """Engines of one model that come from different things cannot all be current: the last built is."""
    result: list[Cell] = []
    for cell in cells:
        same = [c for c in cells if c.slot.model == cell.slot.model and c.state == "verified" and c.manifest]
        if cell.state != "verified" or cell.manifest is None or not same:
            result.append(cell)
            continue
        latest = max(same, key=lambda c: (c.built, c.slot.sm))
        assert latest.manifest is not None
        where = f"as {latest.slot.precision} for sm_{latest.slot.sm}, the last one built, is"
        if cell.manifest.source_sha256 != latest.manifest.source_sha256:
            result.append(replace(cell, state="stale", reason=f"not built from the same source {where}"))
        elif cell.manifest.image != latest.manifest.image:
            result.append(replace(cell, state="stale", reason=f"not built in the same image {where}"))
        else:
            result.append(cell)
    return result


def _named(manifest: Manifest) -> str:
    image = manifest.image or {}
    return image.get("reference") or image.get("digest") or "no image"


def _report(path: Path) -> VerifyReport | str:
    try:
        return read_report(path)
    except FileNotFoundError:
        return f"{path.name} is gone"
    except (OSError, ValidationError, ValueError) as error:
        return f"{path.name} cannot be read: {_first_line(error)}"


def _manifest(path: Path) -> Manifest | str:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return f"{path.name} is gone"
    except (OSError, ValidationError, ValueError) as error:
        return f"{path.name} cannot be read: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
