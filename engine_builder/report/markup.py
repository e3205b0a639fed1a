"""HTML and SVG as values: whatever is not markup already is escaped, so no name can become markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Sequence["Child"] | None
"""Text to escape, ``Markup``, a sequence of either, or nothing."""

_VOID: Final = frozenset({"br", "col", "hr", "meta"})

# What HTML forbids in text: controls, lone surrogates and non-characters.
_FORBIDDEN: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
    + "|".join(["", *(chr((plane << 16) + last) for plane in range(1, 17) for last in (0xFFFE, 0xFFFF))])
)


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """An element.  ``class_`` spells class, other underscores hyphens; an attribute that is None or False
    is left out, one that is True has no value."""
    spelled = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_text(_plain(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{spelled}>")
    return Markup(f"<{name}{spelled}>{render(children)}</{name}>")


def render(child: Child) -> Markup:
    """The markup of ``child``; text is escaped."""
    if child is None:
        return Markup()
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return Markup(_text(child))
    return Markup("".join(render(part) for part in child))


def _text(text: str) -> str:
    return escape(_FORBIDDEN.sub("\ufffd", text), quote=True)


def _plain(value: str | float) -> str:
    """A number as short as it is: coordinates to a hundredth."""
    return value if isinstance(value, str) else f"{round(value, 2):g}"
