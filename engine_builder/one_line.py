"""Foreign text made fit for a one-line message."""

from __future__ import annotations


def one_line(text: str, limit: int = 60) -> str:
    """``text`` cut to ``limit`` characters, with the unprintable ones escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)
