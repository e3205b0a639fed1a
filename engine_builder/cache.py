"""Results of earlier stages, found again by what they were made from.

An entry is a folder named by its content key: the files of the result and ``entry.json``, which is
written last and lists them with their sizes and hashes.  An entry without it never existed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_builder.errors import ResourceError

log = logging.getLogger(__name__)

FORMAT = 1
"""Raised whenever the layout of an entry changes; entries of other formats are ignored."""

_MANIFEST = "entry.json"
_BLOCK = 16 << 20


@dataclass(frozen=True)
class Entry:
    """A finished result: its key, its folder, and what the stage said of it."""

    key: str
    folder: Path
    facts: Mapping[str, Any]

    def file(self, name: str) -> Path:
        return self.folder / name


def content_key(stage: str, ingredients: Mapping[str, Any]) -> str:
    """The key of a stage's result: a hash over everything that it depends on.

    ``ingredients`` is anything JSON can spell; its order does not matter.
    """
    text = json.dumps(
        {"stage": stage, "format": FORMAT, **ingredients}, sort_keys=True, separators=(",", ":")
    )
    return f"{stage}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class Cache:
    """A folder of entries.  Anything unreadable in it is treated as absent and overwritten."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def root(self) -> Path:
        return self._root

    def find(self, key: str) -> Entry | None:
        """The entry under ``key``, if it is complete: every file present in its recorded size."""
        folder = self._root / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            if manifest["format"] != FORMAT or manifest["key"] != key:
                return None
            for name, file in manifest["files"].items():
                if (folder / name).stat().st_size != file["size"]:
                    log.warning("cache entry %s: %s has changed its size; it is made anew", key, name)
                    return None
            return Entry(key, folder, manifest["facts"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def make(self, key: str, build: Callable[[Path], Mapping[str, Any]]) -> Entry:
        """Runs ``build`` in a temporary folder and keeps what it wrote, with the facts it returned.

        Raises:
            ResourceError: The cache folder cannot be written to.
        """
        with self._writing():
            self._root.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=f".{os.getpid()}", dir=self._root))
        try:
            facts = dict(build(staging))
            files = {
                path.relative_to(staging).as_posix(): {"size": path.stat().st_size}
                for path in sorted(staging.rglob("*"))
                if path.is_file()
            }
            manifest = {"format": FORMAT, "key": key, "files": files, "facts": facts}
            with self._writing():
                write_durably(staging / _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
                folder = self._root / key
                if folder.exists():
                    shutil.rmtree(folder)
                staging.rename(folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return Entry(key, folder, facts)

    def sweep(self) -> int:
        """Removes what killed builds left behind; returns how many folders.

        A staging folder carries the pid of its builder; the caller holds the cache's lock, so that
        no other live builder has one here.
        """
        removed = 0
        for leftover in self._root.glob(".*-*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
                removed += 1
        return removed

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(error, self._root) from error


def disk_error(error: OSError, path: Path) -> ResourceError:
    """The error a user sees when ``path`` cannot be written: full, over quota or read-only."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = {
        errno.ENOSPC: "free space on that disk, then run the same command again",
        errno.EDQUOT: "raise the quota or free space, then run the same command again",
        errno.EROFS: "mount it writable or choose another folder",
        errno.EACCES: "make it writable for this user or choose another folder",
        errno.EPERM: "make it writable for this user or choose another folder",
    }.get(error.errno or 0)
    return ResourceError(f"cannot write: {reason}", where=str(path), hint=hint)


def write_durably(path: Path, data: bytes) -> None:
    """Writes ``data`` so that ``path`` is either absent, old or complete, even after a power cut."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` durable, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
