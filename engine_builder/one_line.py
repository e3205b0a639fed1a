"""Foreign text made fit for a one-line message."""

from __future__ import annotations

from pathlib import Path


def one_line(text: str, limit: int = 60) -> str:
    """``text`` cut to ``limit`` characters, with the unprintable ones escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def quoted(text: str, limit: int = 60) -> str:
    """The same between single quotes."""
    return f"'{one_line(text, limit)}'"


def place(path: Path) -> str:
    """A path as the ``where`` of an error: whole, since PATH_MAX is 4096, but printable."""
    return one_line(str(path), 4096)
