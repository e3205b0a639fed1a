"""What a build tells while it runs.  The library emits events; the command line shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Event:
    """One thing that happened in a stage.

    ``kind`` is ``started``, ``progress`` (``text`` says how far), ``finished`` (``fields`` hold
    ``seconds`` and ``cached``) or ``note``.
    """

    stage: str
    kind: Literal["started", "progress", "finished", "note"]
    text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener for callers that do not watch."""
