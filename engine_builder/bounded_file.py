"""Reads files that others wrote, without waiting for a pipe or filling the memory from a device."""

from __future__ import annotations

from pathlib import Path

from engine_builder.errors import SourceModelError
from engine_builder.one_line import place


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of the regular file at ``path``, of at most ``limit`` bytes.

    Raises:
        SourceModelError: It is unreadable, larger, or no regular file.
        FileNotFoundError: There is no such file, for callers that can say more.
    """
    where = place(path)
    try:
        if path.is_dir():
            raise SourceModelError("is a folder", where=where, hint="name the file in it")
        if path.exists() and not path.is_file():
            raise SourceModelError("is not a regular file", where=where)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SourceModelError(f"cannot be read: {reason}", where=where) from None
    if len(data) > limit:
        raise SourceModelError(f"is larger than {limit >> 20} MiB", where=where)
    return data
