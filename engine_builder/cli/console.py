"""Shows a build on the terminal: plain lines, or a live line where there is a terminal to redraw."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from engine_builder.errors import BuilderError
from engine_builder.events import Event
from engine_builder.pipeline import Outcome

LogFormat = Literal["text", "json"]

_HEARTBEAT_SECONDS = 15.0
"""Between two lines of a long stage where nothing can be redrawn."""

_LABEL = {
    "source": "source",
    "convert": "convert",
    "calibrate": "calibrate",
    "fidelity": "fidelity",
    "compile": "compile",
    "verify": "verify",
}


class Screen:
    """Prints events, tables and errors; standard output carries results, standard error the rest."""

    def __init__(self, *, quiet: bool = False, log_format: LogFormat = "text") -> None:
        self._quiet = quiet
        self._format = log_format
        self.out = Console(highlight=False)
        self._err = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._last_line = 0.0

    def watch(self, event: Event) -> None:
        """Shows one event of a build."""
        if self._format == "json":
            self._json("info", event.stage, event.kind, {"text": event.text, **event.fields})
            return
        if self._quiet:
            return
        label = _LABEL.get(event.stage, event.stage)
        if event.kind == "finished":
            self._stop()
            seconds = event.fields.get("seconds", 0.0)
            mark = "cached" if event.fields.get("cached") else f"{seconds:.1f} s"
            text = f"  [dim]{escape(event.text)}[/dim]" if event.text else ""
            self._err.print(f"[bold]{label:<9}[/bold] {mark:>8}{text}", soft_wrap=True)
        elif event.kind in ("started", "progress"):
            self._running(label, event)

    def _running(self, label: str, event: Event) -> None:
        text = f"{label:<9} {escape(event.text)}"
        if self._err.is_terminal:
            if self._status is None:
                self._status = self._err.status(text)
                self._status.start()
            else:
                self._status.update(text)
            return
        now = time.monotonic()
        if event.kind == "progress" and now - self._last_line >= _HEARTBEAT_SECONDS:
            self._err.print(f"{label:<9} ... {escape(event.text)}", soft_wrap=True)
            self._last_line = now
        elif event.kind == "started":
            self._last_line = now

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def fail(self, error: BuilderError) -> None:
        """One line: what is wrong, where, and what to do next."""
        self._stop()
        if self._format == "json":
            self._json(
                "error",
                "",
                "failed",
                {
                    "kind": error.kind,
                    "exit_code": error.exit_code,
                    "message": error.message,
                    "where": error.where,
                    "hint": error.hint,
                },
            )
            return
        self._err.print(f"[bold red]error[/bold red]: {escape(_one_line(str(error)))}", soft_wrap=True)

    def closing(self, outcomes: Sequence[Outcome]) -> None:
        """What was built and proven, one row an engine."""
        self._stop()
        if self._format == "json":
            for outcome in outcomes:
                self._json("info", "build", "done", summary(outcome))
            return
        if self._quiet:
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("engine", "verdict", "attention", "GEMMs", "worst cosine", "layers", "size", "time"):
            table.add_column(column, no_wrap=True)
        for outcome in outcomes:
            s = summary(outcome)
            colour = {"passed": "green", "failed": "red"}.get(outcome.verdict, "yellow")
            table.add_row(
                escape(str(report_label(outcome))),
                f"[{colour}]{outcome.verdict}[/{colour}]",
                _pairs(s["fused_attention"]),
                _pairs(s["gemms"]),
                "" if s["worst_cosine"] is None else f"{s['worst_cosine']:.6f}",
                "" if s["layers"] is None else str(s["layers"]),
                "" if s["bytes"] is None else f"{s['bytes'] / 1e6:.1f} MB",
                f"{outcome.seconds:.1f} s",
            )
        self.out.print(table)
        for outcome in outcomes:
            published = outcome.verdict == "passed"
            path = outcome.paths.engine if published else outcome.paths.report
            self.out.print(f"  {'engine' if published else 'report'}: {escape(str(path))}", soft_wrap=True)
            for reason in outcome.reasons:
                self.out.print(f"  sm_{outcome.sm}: {escape(reason)}", soft_wrap=True)
            if outcome.verdict == "passed" and not outcome.rebuilt:
                self.out.print(
                    f"  sm_{outcome.sm}: nothing rebuilt: recipe, source and builder are unchanged",
                    soft_wrap=True,
                )

    def _json(self, level: str, stage: str, event: str, fields: Mapping[str, Any]) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "stage": stage,
            "event": event,
            "fields": fields,
        }
        sys.stderr.write(json.dumps(line, default=str) + "\n")
        sys.stderr.flush()

    def logging_handler(self) -> logging.Handler:
        """A handler that shows the library's log records in this screen's format."""
        screen = self

        class ScreenHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if screen._format == "json":
                    screen._json(
                        record.levelname.lower(), record.name, "log", {"message": record.getMessage()}
                    )
                else:
                    screen._err.print(
                        f"{record.levelname.lower()}: {escape(record.getMessage())}", soft_wrap=True
                    )

        return ScreenHandler()


def report_label(outcome: Outcome) -> str:
    """The engine's place below the output folder."""
    return str(outcome.report["label"])


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of the closing table."""
    report = outcome.report
    fidelity = report.get("fidelity")
    file = report.get("engine_file")
    published = outcome.verdict == "passed"
    return {
        "engine": str(outcome.paths.engine if published else outcome.paths.report),
        "sm": outcome.sm,
        "verdict": outcome.verdict,
        "reasons": list(outcome.reasons),
        "fused_attention": report.get("mha_precision") or {},
        "gemms": report.get("gemm_by_precision") or {},
        "worst_cosine": None if fidelity is None else fidelity.get("worst_cosine"),
        "layers": report.get("total_layers"),
        "bytes": None if file is None else file["bytes"],
        "seconds": round(outcome.seconds, 3),
        "rebuilt": outcome.rebuilt,
    }


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


def _one_line(text: str) -> str:
    return " ".join(text.split())
