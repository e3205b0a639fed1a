"""What every command shares: its options, its screen, and the request to stop."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from engine_builder.errors import RecipeError

if TYPE_CHECKING:
    from engine_builder.cli.console import Screen


@dataclass
class Session:
    """What the options that every command shares were set to."""

    debug: bool = False
    quiet: bool = False
    log_format: str = "text"
    cancel: threading.Event = field(default_factory=threading.Event)
    _screen: Screen | None = None

    def screen(self) -> Screen:
        """The one screen of this process; a second would not know what the first is showing."""
        from engine_builder.cli.console import Screen

        if self._screen is not None:
            return self._screen
        screen = Screen(quiet=self.quiet, log_format="json" if self.log_format == "json" else "text")
        self._screen = screen
        root = logging.getLogger()
        root.handlers[:] = [screen.logging_handler()]
        # Libraries are heard from WARNING on; the builder's own records go deeper with --debug.
        root.setLevel(logging.ERROR if self.quiet else logging.WARNING)
        for package in ("engine_builder", "verify"):
            logging.getLogger(package).setLevel(logging.INFO if self.debug else logging.NOTSET)
        return screen


SESSION = Session()


def _set_debug(value: bool) -> bool:
    SESSION.debug = SESSION.debug or value
    return value


def _set_quiet(value: bool) -> bool:
    SESSION.quiet = SESSION.quiet or value
    return value


def _set_log_format(value: str) -> str:
    if value not in ("text", "json"):
        raise typer.BadParameter("must be text or json")
    SESSION.log_format = value
    return value


Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks and debug messages.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="Show errors only.")]
LogFormat = Annotated[
    str, typer.Option("--log-format", callback=_set_log_format, help="text, or json: one object per line.")
]
CacheDir = Annotated[
    Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
    typer.Option(
        "--cache",
        envvar="SA3_BUILDER_CACHE",
        help="Where results of stages are kept.",
        show_default="the user's cache folder",
    ),
]


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/sa3-builder``, by default ``~/.cache/sa3-builder``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sa3-builder"


def numbers(text: str, kind: Any, option: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise RecipeError(f"{option} must be numbers separated by commas, not {text!r}") from None


def architectures(text: str) -> tuple[int, ...]:
    """The compute capabilities of ``--sm 89,120``."""
    sms: tuple[int, ...] = numbers(text, int, "--sm")
    wrong = next((sm for sm in sms if not 10 <= sm <= 999), None)
    if wrong is not None or len(set(sms)) < len(sms):
        fault = "one is given twice" if wrong is None else f"{wrong} is none"
        raise RecipeError(f"--sm must be compute capabilities without the point, such as 89,120: {fault}")
    return sms


def choice(kind: Any, text: str, option: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        names = ", ".join(member.value for member in kind)
        raise RecipeError(f"{option} must be one of {names}, not {text!r}") from None
