"""What a build says of its engines when it ends: for machines, and in lines for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from engine_builder.cli.shown_path import plain_path, shown_path
from engine_builder.pipeline import Outcome

_COLOURS: Final = {"passed": "green", "failed": "red"}
_LABEL_WIDTH: Final = 10
WIDEST: Final = 100
"""Longer lines than this are hard to read, however wide the window."""


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of one engine, as plain values."""
    report = outcome.report
    fidelity = report.get("fidelity")
    file = report.get("engine_file")
    published = outcome.verdict == "passed"
    return {
        "engine": str(plain_path(outcome.paths.engine if published else outcome.paths.report)),
        "sm": outcome.sm,
        "verdict": outcome.verdict,
        "reasons": list(outcome.reasons),
        "fused_attention": report.get("mha_precision") or {},
        "gemms": report.get("gemm_by_precision") or {},
        "worst_cosine": None if fidelity is None else fidelity.get("worst_cosine"),
        "layers": report.get("total_layers"),
        "bytes": None if file is None else file["bytes"],
        "page": str(plain_path(outcome.paths.page)) if outcome.paths.page.exists() else None,
        "seconds": round(outcome.seconds, 3),
        "rebuilt": outcome.rebuilt,
    }


def block(outcome: Outcome, width: int) -> Iterator[str]:
    """The lines about one engine, with markup; none but a path is longer than ``width``."""
    width = min(width, WIDEST)
    yield f"{_verdict(outcome)}  {escape(str(outcome.report['label']))}"
    for label, text in _facts(outcome):
        head, *rest = textwrap.wrap(
            text, max(width - _LABEL_WIDTH - 2, 20), break_long_words=False, break_on_hyphens=False
        ) or [""]
        yield f"  [dim]{label:<{_LABEL_WIDTH}}[/dim]{escape(head)}"
        for line in rest:
            yield f"  {'':<{_LABEL_WIDTH}}{escape(line)}"


def _facts(outcome: Outcome) -> Iterator[tuple[str, str]]:
    report, figures = outcome.report, summary(outcome)
    published = outcome.verdict == "passed"
    for reason in outcome.reasons:
        yield "reason", reason
    fidelity = report.get("fidelity")
    if fidelity is not None:
        worst = fidelity["worst_cosine"]
        shown = "a value is not finite" if worst == -1.0 else f"worst cosine {worst:.6f}"
        asked = fidelity["min_cosine"]
        yield "fidelity", f"{shown}, {asked:g} asked" if asked > -1.0 else shown
    if figures["layers"] is not None:
        gemms, attention = _pairs(figures["gemms"]), _pairs(figures["fused_attention"])
        yield "layers", f"{figures['layers']}; GEMMs: {gemms}; fused attention: {attention}"
    execution = report.get("information", {}).get("execution") or {}
    if "skipped" in execution:
        yield "gpu", f"not run: {execution['skipped']}"
    elif execution:
        yield "gpu", f"run on {execution.get('device', 'a GPU')}"
    if published:
        yield "engine", f"{shown_path(outcome.paths.engine)}  {figures['bytes'] / 1e6:.1f} MB"
    else:
        yield "report", shown_path(outcome.paths.report)
    if figures["page"] is not None:
        yield "page", shown_path(outcome.paths.page)
    same = published and not outcome.rebuilt
    unchanged = "; this very engine was published before" if same else ""
    yield "time", f"{outcome.seconds:.1f} s{unchanged}"


def overview(outcomes: Sequence[Outcome]) -> Table:
    """A row an engine, for builds of several."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("engine", overflow="fold")
    for column in ("verdict", "worst cosine", "size", "time"):
        table.add_column(column, no_wrap=True, justify="left" if column == "verdict" else "right")
    for outcome in outcomes:
        figures = summary(outcome)
        table.add_row(
            escape(str(outcome.report["label"])),
            _verdict(outcome),
            "" if figures["worst_cosine"] is None else f"{figures['worst_cosine']:.6f}",
            "" if figures["bytes"] is None else f"{figures['bytes'] / 1e6:.1f} MB",
            f"{outcome.seconds:.1f} s",
        )
    return table


def _verdict(outcome: Outcome) -> str:
    colour = _COLOURS.get(outcome.verdict, "yellow")
    return f"[bold {colour}]{escape(outcome.verdict)}[/bold {colour}]"


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "none"
