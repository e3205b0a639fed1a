"""Plots as inline SVG, and the tables that hold their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine_builder.report.markup import Child, Markup, tag

_TYPES: Final = ("fp32", "fp16", "bf16", "fp8", "mixed")
"""Types with a colour and a pattern of their own; every other is grey."""

WIDTH, HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 46
_FEW = 8
"""More labels than these on one axis would run into each other."""


def type_class(dtype: str) -> str:
    """The CSS class that colours ``dtype``: one of a fixed set, whatever a file says."""
    return f"t-{dtype}" if dtype in _TYPES else "t-other"


def patterns() -> Markup:
    """The fill patterns that tell types apart without colour; once per page, before any plot."""
    marks: Mapping[str, Child] = {
        "fp32": tag("path", d="M0 2h8M0 6h8", class_="mark"),
        "fp16": None,
        "bf16": (tag("circle", cx=2, cy=2, r=1, class_="dot"), tag("circle", cx=6, cy=6, r=1, class_="dot")),
        "fp8": tag("path", d="M-2 2l4-4M0 8l8-8M6 10l4-4", class_="mark"),
        "mixed": tag("path", d="M0 0l8 8M8 0l-8 8", class_="mark"),
        "other": tag("path", d="M2 0v8M6 0v8", class_="mark"),
    }
    defined = [
        tag(
            "pattern",
            tag("rect", width=8, height=8, class_=f"t-{name}"),
            mark,
            id=f"p-{name}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for name, mark in marks.items()
    ]
    return tag("svg", tag("defs", defined), class_="defs", width=0, height=0, aria_hidden="true")


def _fill(dtype: str) -> str:
    return f"url(#p-{dtype if dtype in _TYPES else 'other'})"


def legend(dtypes: Iterable[str]) -> Markup:
    """What each type's colour and pattern is."""
    entries = [
        tag(
            "li",
            tag(
                "svg",
                tag("rect", width=16, height=14, fill=_fill(dtype)),
                width=16,
                height=14,
                aria_hidden="true",
            ),
            " ",
            dtype,
        )
        for dtype in dtypes
    ]
    return tag("ul", entries, class_="legend")


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart: parts of a type each, drawn end to end, and the number as text."""

    label: Child
    parts: tuple[tuple[str, float], ...]
    text: str
    more: tuple[str, ...] = ()
    """Further columns."""


def bars(
    rows: Sequence[Bar],
    headings: Sequence[str],
    caption: str,
    *,
    longest: float | None = None,
    long: bool = False,
) -> Markup:
    """A table whose bars are drawn beside the numbers they stand for.

    Args:
        longest: What a bar of full length stands for, by default the largest of ``rows``.
        long: Whether labels are too long to stand beside a bar on a narrow screen.
    """
    full = longest or max((sum(size for _, size in row.parts) for row in rows), default=0.0)
    body = [
        tag(
            "tr",
            tag("th", row.label, scope="row"),
            tag("td", _bar(row.parts, full), class_="bar"),
            tag("td", row.text, class_="number"),
            [tag("td", text, class_="number") for text in row.more],
        )
        for row in rows
    ]
    first, *others = headings
    head = tag(
        "tr",
        tag("th", first, scope="col"),
        tag("td", class_="bar"),
        [tag("th", heading, scope="col", class_="number") for heading in others],
    )
    classes = "bars long" if long else "bars"
    return tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body), class_=classes)


def _bar(parts: Sequence[tuple[str, float]], full: float) -> Markup:
    drawn: list[Markup] = []
    start = 0.0
    for dtype, size in parts:
        share = 100 * size / full if full > 0 else 0.0
        # A part that is there is seen, however small.
        width = max(share, 0.4) if size > 0 else 0.0
        drawn.append(
            tag("rect", x=f"{start:.2f}%", width=f"{width:.2f}%", height=14, fill=_fill(dtype), class_="edge")
        )
        start += width
    return tag("svg", drawn, width="100%", height=14, aria_hidden="true")


@dataclass(frozen=True)
class Series:
    """Points of one line, (category, value); a value that is None could not be measured."""

    name: str
    points: tuple[tuple[str, float | None], ...]


def line_plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Lines over categories, which are spaced evenly, on a logarithmic axis of values.

    ``limit`` is a value and what it is called, drawn as a line across.  A value that is not above zero
    is drawn at the axis's foot, one that could not be measured as a cross at its top.
    """
    categories = list(dict.fromkeys(category for s in series for category, _ in s.points))
    values = [v for s in series for _, v in s.points if v is not None]
    axis = _Axis.over(values + ([limit[0]] if limit else []))
    step = (WIDTH - _LEFT - _RIGHT) / max(len(categories), 1)
    x_of = {category: _LEFT + step * (index + 0.5) for index, category in enumerate(categories)}
    skip = math.ceil(len(categories) / _FEW)
    drawn: list[Child] = [tag("title", title)]
    for tick in axis.ticks():
        y = axis.place(10.0**tick)
        drawn.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", _spell_power(tick), x=_LEFT - 6, y=y + 4, class_="end"))
    for category in categories[::skip]:
        drawn.append(tag("text", category, x=x_of[category], y=HEIGHT - _BOTTOM + 18, class_="middle"))
    drawn.append(tag("text", x_label, x=(_LEFT + WIDTH - _RIGHT) / 2, y=HEIGHT - 8, class_="middle name"))
    drawn.append(
        tag(
            "text",
            y_label,
            transform=f"translate(13 {(_TOP + HEIGHT - _BOTTOM) / 2:g}) rotate(-90)",
            class_="middle name",
        )
    )
    if limit is not None:
        y = axis.place(limit[0])
        drawn.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="limit"))
        below = y + 14 if y < _TOP + 16 else y - 5
        drawn.append(tag("text", limit[1], x=WIDTH - _RIGHT - 2, y=below, class_="end limit-name"))
    for number, line in enumerate(series):
        drawn.append(_line(line, number, x_of, axis))
    plot = tag("svg", drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="plot")
    return tag("figure", plot, _series_legend(series), tag("figcaption", title))


def _line(line: Series, number: int, x_of: Mapping[str, float], axis: _Axis) -> Markup:
    path: list[str] = []
    marks: list[Markup] = []
    gap = True
    for category, value in line.points:
        x = x_of[category]
        if value is None:
            marks.append(tag("text", "✗", x=x, y=_TOP + 10, class_="middle broken-mark"))
            gap = True
            continue
        y = axis.place(value)
        path.append(f"{'M' if gap else 'L'}{x:.2f} {y:.2f}")
        marks.append(_marker(number, x, y))
        gap = False
    return tag("g", tag("path", d="".join(path) or None, class_="line"), marks, class_=f"s{number % 6}")


def _marker(number: int, x: float, y: float) -> Markup:
    """A shape per series, so that lines differ without colour."""
    shapes = (
        f"M{x - 4:.2f} {y:.2f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{x - 4:.2f} {y - 4:.2f}h8v8h-8z",
        f"M{x:.2f} {y - 5:.2f}l5 9h-10z",
        f"M{x:.2f} {y - 5.5:.2f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        f"M{x:.2f} {y + 5:.2f}l5 -9h-10z",
        f"M{x - 5:.2f} {y - 1.5:.2f}h3.5v-3.5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5z",
    )
    return tag("path", d=shapes[number % len(shapes)], class_="point")


def _series_legend(series: Sequence[Series]) -> Markup:
    entries = [
        tag(
            "li",
            tag(
                "svg",
                tag("path", d="M0 7h26", class_="line"),
                _marker(number, 13, 7),
                width=26,
                height=14,
                class_=f"plot-key s{number % 6}",
                aria_hidden="true",
            ),
            " ",
            line.name,
        )
        for number, line in enumerate(series)
    ]
    return tag("ul", entries, class_="legend")


@dataclass(frozen=True)
class _Axis:
    """The value axis, from ten to the power ``low`` to ten to the power ``high``."""

    low: int
    high: int

    @classmethod
    def over(cls, values: Sequence[float]) -> _Axis:
        powers = [math.log10(v) for v in values if v > 0 and math.isfinite(v)]
        low, high = math.floor(min(powers, default=-8.0)), math.ceil(max(powers, default=0.0))
        return cls(low, max(high, low + 1))

    def place(self, value: float) -> float:
        """The height of ``value`` in the plot's units."""
        power = math.log10(value) if value > 0 else self.low
        share = (power - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - _BOTTOM - _TOP)

    def ticks(self) -> list[int]:
        """The powers that are labelled."""
        powers = range(self.low, self.high + 1)
        return list(powers[:: math.ceil(len(powers) / _FEW)])


def _spell_power(power: int) -> str:
    return f"{10.0**power:g}" if -3 < power < 4 else f"1e{power}"
