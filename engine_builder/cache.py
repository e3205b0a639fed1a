"""Results of earlier stages, found again by what they were made from.

An entry is a folder named by its content key: the files of the result and ``entry.json``, which is
written last and lists them with their sizes and hashes.  An entry without it never existed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_builder.durable import (
    FULL,
    disk_error,
    partial_path,
    remove,
    sync_file,
    sync_folder,
    write_durably,
)

log = logging.getLogger(__name__)

FORMAT = 2
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
        """The entry under ``key``, if it is complete and unchanged.

        A file whose inode and modification time are those that were recorded is trusted; any other
        (a copied cache, a file that was touched or edited) is hashed again.
        """
        folder = self._root / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            if manifest["format"] != FORMAT or manifest["key"] != key:
                return None
            files = manifest["files"]
            stamps = {name: _stamp(folder / name) for name in files}
            for name, file in files.items():
                if stamps[name] != file["stamp"] and sha256_file(folder / name) != file["sha256"]:
                    log.warning("cache entry %s: %s is damaged; it is made anew", key, name)
                    return None
            entry = Entry(key, folder, dict(manifest["facts"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if any(stamps[name] != file["stamp"] for name, file in files.items()):
            known = {name: {**file, "stamp": stamps[name]} for name, file in files.items()}
            with contextlib.suppress(OSError):  # it only spares the next reader the hashing
                _record(folder, {**manifest, "files": known})
        return entry

    def make(self, key: str, build: Callable[[Path], Mapping[str, Any]], needed: int | None = None) -> Entry:
        """Runs ``build`` in a temporary folder and keeps what it wrote, with the facts it returned.

        ``needed`` says how many bytes that will be, for the message when they do not fit.

        Raises:
            ResourceError: The cache folder cannot be written to, or its disk is full.
        """
        with self._writing(needed):
            self._root.mkdir(parents=True, exist_ok=True)
            staging = partial_path(self._root / key)
            remove(staging)
            staging.mkdir()
        try:
            try:
                facts = dict(build(staging))
            except OSError as error:
                if error.errno in FULL:
                    raise disk_error(error, self._root, needed) from error
                raise  # it may be about what the stage reads
            with self._writing(needed):
                files = {path.relative_to(staging).as_posix(): path for path in _files(staging)}
                for path in files.values():
                    sync_file(path)
                described = {
                    name: {"sha256": sha256_file(path), "stamp": _stamp(path)} for name, path in files.items()
                }
                _record(staging, {"format": FORMAT, "key": key, "files": described, "facts": facts})
                folder = self._root / key
                remove(folder)
                staging.rename(folder)
                sync_folder(self._root)
        except BaseException:
            remove(staging)
            raise
        return Entry(key, folder, facts)

    def sweep(self) -> int:
        """Removes what killed builds left behind; returns how many files and folders.

        The caller holds the cache's lock, so that no other live builder writes here.
        """
        removed = 0
        for leftover in (*self._root.glob(".*.partial"), *self._root.glob("*/.*.partial")):
            remove(leftover)
            removed += 1
        return removed

    @contextlib.contextmanager
    def _writing(self, needed: int | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(error, self._root, needed) from error


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _stamp(path: Path) -> list[int]:
    """What changes when a file is written to; a further hard link, as publishing makes, changes none."""
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns]


def _record(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_durably(folder / _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
