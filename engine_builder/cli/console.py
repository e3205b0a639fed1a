"""Shows a build on the terminal: plain lines, or a live line where there is a terminal to redraw."""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from engine_builder.cli.outcomes import block, overview, summary
from engine_builder.errors import BuilderError
from engine_builder.events import Event
from engine_builder.pipeline import Outcome

LogFormat = Literal["text", "json"]

HEARTBEAT_SECONDS = 15.0
"""Between two lines of a long stage where nothing can be redrawn."""

_PLAIN_WIDTH = 200
"""Columns of output that goes to a file or a pipe, where nobody can widen the window."""

_LABEL_WIDTH = len("sensitivity")
"""Columns of a stage's name: that of the longest."""


_FRAMES = "-\\|/"


@dataclass
class _Running:
    """The stage that is being worked on, for the lines that say that it still is."""

    stage: str
    text: str
    started: float
    last_line: float


class _StageLine:
    """The running stage as one line that is drawn anew: how long it has run, and what it says."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        running = self._screen._running
        if running is not None:
            now = time.monotonic()
            yield Text.assemble(
                (f"{running.stage:<{_LABEL_WIDTH}} ", "bold"),
                _FRAMES[int(now * 8) % len(_FRAMES)],
                f"{now - running.started:>5.0f} s  ",
                (running.text, "dim"),
                no_wrap=True,
                overflow="ellipsis",
            )


class Screen:
    """Prints events, tables and errors; standard output carries results, standard error the rest.

    With ``log_format`` json, standard error is one JSON object per line: ``time`` (UTC, ISO 8601),
    ``level``, ``stage`` (empty between stages), ``event`` and ``fields``.  Events are ``started``,
    ``finished``, ``note``, ``heartbeat`` (every ``HEARTBEAT_SECONDS`` of a long stage, however little
    the stage itself tells), ``log`` (a record of the library's or of TensorRT's, at its own level),
    ``done`` (one per engine) and ``failed``.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        log_format: LogFormat = "text",
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._quiet = quiet
        self._format = log_format
        self._heartbeat_seconds = heartbeat_seconds
        self.out = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        self._err = Console(stderr=True, highlight=False)
        # NO_COLOR leaves the cursor free to move; a dumb terminal has none.
        self._redraws = self._err.is_terminal and not self._err.is_dumb_terminal
        self._live: Live | None = None
        self._running: _Running | None = None
        self._lock = threading.RLock()
        self._beating: threading.Thread | None = None

    def watch(self, event: Event) -> None:
        """Shows one event of a build."""
        with self._lock:
            self._follow(event)
            if self._format == "json":
                if event.kind != "progress":
                    self._json("info", event.stage, event.kind, {"text": event.text, **event.fields})
            elif not self._quiet:
                self._show(event)

    def _follow(self, event: Event) -> None:
        """Keeps in mind which stage runs, for the heartbeat."""
        now = time.monotonic()
        if event.kind == "started":
            self._running = _Running(event.stage, event.text, now, now)
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
                self._beating.start()
        elif event.kind == "finished":
            self._running = None
        elif event.kind == "progress" and self._running is not None:
            self._running.text = event.text

    def _beat(self) -> None:
        """Says every so often that a stage goes on, whether or not the stage says anything."""
        while True:
            time.sleep(min(1.0, self._heartbeat_seconds))
            with self._lock:
                running, now = self._running, time.monotonic()
                if running is None or now - running.last_line < self._heartbeat_seconds:
                    continue
                running.last_line = now
                seconds = round(now - running.started, 1)
                if self._format == "json":
                    self._json("info", running.stage, "heartbeat", {"text": running.text, "seconds": seconds})
                elif not self._quiet and not self._redraws:
                    label = running.stage
                    self._err.print(
                        f"{label:<{_LABEL_WIDTH}} ... {seconds:.0f} s  {escape(running.text)}", soft_wrap=True
                    )

    def _show(self, event: Event) -> None:
        label = event.stage
        if event.kind == "finished":
            self._stop()
            seconds = event.fields.get("seconds", 0.0)
            mark = "cached" if event.fields.get("cached") else f"{seconds:.1f} s"
            text = f"  [dim]{escape(event.text)}[/dim]" if event.text else ""
            self._err.print(f"[bold]{label:<{_LABEL_WIDTH}}[/bold] {mark:>8}{text}", soft_wrap=True)
        elif event.kind == "note":
            self._err.print(f"{label:<{_LABEL_WIDTH}} {escape(event.text)}", soft_wrap=True)
        elif self._redraws and self._live is None and self._running is not None:
            # Wiped when the stage ends: the line that says so takes its place.
            self._live = Live(_StageLine(self), console=self._err, refresh_per_second=8, transient=True)
            self._live.start()
            atexit.register(self._stop)  # an end by an unforeseen error leaves the cursor visible, too

    def _stop(self) -> None:
        self._running = None
        if self._live is not None:
            self._live.stop()
            self._live = None

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
        """What was built and proven: a few lines an engine, and a table when there are several."""
        self._stop()
        if self._format == "json":
            for outcome in outcomes:
                level = "info" if outcome.verdict == "passed" else "error"
                self._json(level, "", "done", summary(outcome))
            return
        if self._quiet:
            return
        for outcome in outcomes:
            for line in block(outcome, self.out.width):
                # A path that is too long is left whole, so that it can be copied.
                self.out.print(line, soft_wrap=True)
        if len(outcomes) > 1:
            self.out.print()
            self.out.print(overview(outcomes))

    def _json(self, level: str, stage: str, event: str, fields: Mapping[str, Any]) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "stage": stage,
            "event": event,
            "fields": fields,
        }
        with self._lock:
            sys.stderr.write(json.dumps(line, default=str) + "\n")
            sys.stderr.flush()

    def logging_handler(self) -> logging.Handler:
        """A handler that shows the library's log records in this screen's format."""
        screen = self

        class ScreenHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                with screen._lock:
                    level, message = record.levelname.lower(), record.getMessage()
                    if screen._format == "json":
                        stage = "" if screen._running is None else screen._running.stage
                        screen._json(level, stage, "log", {"logger": record.name, "message": message})
                    else:
                        screen._err.print(f"{level}: {escape(message)}", soft_wrap=True)

        return ScreenHandler()


def _one_line(text: str) -> str:
    return " ".join(text.split())
