"""Remembers the digests of unchanged files, so that gigabytes are not read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engine_builder.durable import write_durably
from engine_builder.source import SourceFile


class FileMemory:
    """Digests by path, each valid while size, inode, modification and change time are what they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        self._known: dict[str, list[object]] = known if isinstance(known, dict) else {}

    def recall(self, path: Path) -> str | None:
        """The digest of ``path``, if it is remembered and the file has not changed since."""
        try:
            entry = self._known.get(str(path.absolute()))
            return str(entry[1]) if isinstance(entry, list) and entry[0] == _stamp(path) else None
        except (OSError, IndexError):
            return None

    def remember(self, path: Path, sha256: str) -> None:
        self._known[str(path.absolute())] = [_stamp(path), sha256]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, json.dumps(self._known, indent=0, sort_keys=True).encode())

    def record(self, files: Sequence[SourceFile]) -> None:
        """Remembers the digests of freshly hashed files."""
        for file in files:
            if self.recall(file.path) != file.sha256:
                self.remember(file.path, file.sha256)


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
