"""Puts a finished engine, its report and its manifest into the output folder."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from engine_builder.durable import disk_error, partial_path, sweep_partials, sync_folder, write_durably


@dataclass(frozen=True)
class OutputPaths:
    """Where one engine and its companions go; the page is there only when it was asked for."""

    engine: Path

    @property
    def report(self) -> Path:
        return self.engine.with_name(f"{self._stem}.verify.json")

    @property
    def manifest(self) -> Path:
        return self.engine.with_name(f"{self._stem}.manifest.json")

    @property
    def page(self) -> Path:
        return self.engine.with_name(f"{self._stem}.report.html")

    @property
    def _stem(self) -> str:
        return self.engine.name.removesuffix(".trt")


def output_paths(folder: Path, sm: int, model: str, precision: str, name: str | None) -> OutputPaths:
    """``<folder>/sm_<sm>/<model>/dit_<precision>.trt``, or ``name`` in that folder."""
    return OutputPaths(folder / f"sm_{sm}" / model / (name or f"dit_{precision}.trt"))


def publish(paths: OutputPaths, engine: Path, report: str, manifest: str, page: str | None = None) -> None:
    """Writes the report, the page, the manifest, and the engine last; each appears complete or not at all.

    An older engine goes first, so that an engine never stands beside the report and manifest of
    another; so does an older page, if there is no new one.  The caller holds the folder's lock for the
    engine.

    Raises:
        ResourceError: The folder cannot be written to or its disk is full.
    """
    try:
        paths.engine.parent.mkdir(parents=True, exist_ok=True)
        sweep_output(paths)
        staged = _staged(engine, paths.engine)
        try:
            paths.engine.unlink(missing_ok=True)
            write_durably(paths.report, report.encode())
            publish_page(paths, page)
            write_durably(paths.manifest, manifest.encode())
            staged.replace(paths.engine)
        finally:
            staged.unlink(missing_ok=True)
        sync_folder(paths.engine.parent)
    except OSError as error:
        raise disk_error(error, paths.engine.parent, engine.stat().st_size) from error


def sweep_output(paths: OutputPaths) -> None:
    """Removes what killed builds of this engine left beside it, and nothing of other engines.

    The caller holds the folder's lock for the engine.
    """
    for final in (paths.engine, paths.report, paths.manifest, paths.page):
        sweep_partials(final, held=True)


def publish_page(paths: OutputPaths, page: str | None) -> None:
    """Writes the page for people, or removes one that is about an earlier build."""
    if page is None:
        paths.page.unlink(missing_ok=True)
    else:
        write_durably(paths.page, page.encode())


def publish_failure(paths: OutputPaths, report: str, page: str | None = None) -> None:
    """Writes the report, and the page if there is one.  An engine of an earlier build is set aside,
    because the report that now stands beside it is not about it.

    Raises:
        ResourceError: The folder cannot be written to or its disk is full.
    """
    try:
        paths.engine.parent.mkdir(parents=True, exist_ok=True)
        sweep_output(paths)
        for old in (paths.engine, paths.manifest):
            if old.exists():
                old.replace(old.with_name(f"{old.name}.superseded"))
        write_durably(paths.report, report.encode())
        publish_page(paths, page)
    except OSError as error:
        raise disk_error(error, paths.engine.parent) from error


def _staged(engine: Path, final: Path) -> Path:
    """The engine under a temporary name in the folder of ``final``.

    A hard link where the file system allows it: engines are gigabytes, and the cached copy is
    read-only, so that neither name can be used to change the other.
    """
    staged = partial_path(final)
    staged.unlink(missing_ok=True)
    try:
        os.link(engine, staged)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        try:
            with engine.open("rb") as source, staged.open("wb") as target:
                shutil.copyfileobj(source, target, 16 << 20)
                target.flush()
                os.fsync(target.fileno())
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
    return staged
