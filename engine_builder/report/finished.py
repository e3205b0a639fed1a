"""A finished build: its files, and what the cache still holds of how it came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine_builder.cache import Cache
from engine_builder.compile.isolated import read_layer_table
from engine_builder.conversion_stages import CONVERTED
from engine_builder.engine_stages import LAYERS
from engine_builder.errors import SourceModelError
from engine_builder.manifest import Manifest, origin_of
from engine_builder.publish import OutputPaths
from engine_builder.report.subject import Subject, subject_of
from verify.layers import LayerRecord
from verify.report import VerifyReport, read_report


@dataclass(frozen=True)
class Finished:
    """The report of a build and, when its engine was published, the manifest."""

    paths: OutputPaths
    report: VerifyReport
    manifest: Manifest | None


@dataclass(frozen=True)
class Evidence:
    """The converted model of a build and its engine's layer table, None when nothing was compiled."""

    converted: Path
    layer_table: Path | None

    def layers(self) -> tuple[LayerRecord, ...]:
        if self.layer_table is None:
            return ()
        return read_layer_table(self.layer_table.read_text(encoding="utf-8")).layers


def read_finished(path: Path) -> Finished:
    """The build that ``path``, an engine or a ``.verify.json``, belongs to.

    Raises:
        SourceModelError: There is no report, or it or the manifest cannot be understood.
    """
    paths = OutputPaths(path.with_name(_stem(path.name) + ".trt"))
    try:
        report = read_report(paths.report)
    except OSError as error:
        raise SourceModelError(
            f"the engine's report cannot be read: {error.strerror}",
            where=str(paths.report),
            hint="name an engine, or the .verify.json beside it",
        ) from error
    except ValueError as error:
        raise _foreign(paths.report, error) from error
    try:
        manifest = Manifest.model_validate_json(paths.manifest.read_text(encoding="utf-8"))
    except FileNotFoundError:
        manifest = None  # of a build that failed there is none
    except (OSError, ValueError) as error:
        raise _foreign(paths.manifest, error) from error
    return Finished(paths, report, manifest)


def find_evidence(report: VerifyReport, cache: Cache) -> Evidence | None:
    """What the cache holds of the build that ``report`` is about, told by content; None if not all."""
    files = (report.conversion or {}).get("files") or []
    conversion = _entry(cache, "convert-", lambda facts: files and facts.get("files") == files)
    if conversion is None:
        return None
    if report.engine_file is None:
        return Evidence(conversion / CONVERTED, None)
    digest = report.engine_file.sha256
    compiled = _entry(cache, "compile-", lambda facts: facts.get("sha256") == digest)
    if compiled is None:
        return None
    return Evidence(conversion / CONVERTED, compiled / LAYERS)


def finished_subject(build: Finished, cache: Cache) -> Subject:
    """The build with its precision map, if the cache still holds what that is made from."""
    evidence = find_evidence(build.report, cache)
    origin = None if build.manifest is None else origin_of(build.manifest)
    if evidence is None:
        return Subject(build.report, origin, None)
    return subject_of(build.report, origin, evidence.converted, evidence.layer_table)


def _entry(cache: Cache, prefix: str, wanted: Callable[[Mapping[str, Any]], Any]) -> Path | None:
    for folder in sorted(cache.root.glob(f"{prefix}*")):
        entry = cache.find(folder.name)
        if entry is not None and wanted(entry.facts):
            return entry.folder
    return None


def _stem(name: str) -> str:
    for suffix in (".verify.json", ".manifest.json", ".report.html", ".trt"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _foreign(path: Path, error: Exception) -> SourceModelError:
    fault = error.errors()[0] if isinstance(error, ValidationError) else None
    reason = str(error) if fault is None else f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    return SourceModelError(
        f"it is no report or manifest of this version: {reason}",
        where=str(path),
        hint="build the engine again with this version",
    )
