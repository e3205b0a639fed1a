"""Runs stages one after the other, keeps their results, and tells a listener about them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_builder.cache import Cache, Entry
from engine_builder.errors import Interrupted
from engine_builder.events import Event, Listener, ignore
from engine_builder.manifest import ManifestStage
from engine_builder.plan import (
    History,
    StagePlan,
)

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Where a build keeps its results, who watches it, and how it is told to stop."""

    cache: Path
    listener: Listener = ignore
    cancel: threading.Event | None = None
    lock_seconds: float = 600.0
    image: Mapping[str, str] | None = None
    allow_plugins: bool = False
    page: bool = False
    """Whether a page for people is written beside each engine."""


class StageRunner:
    """Runs stages, tells the listener about them and remembers how long each took."""

    def __init__(self, settings: Settings, stages: Sequence[ManifestStage] = ()) -> None:
        self._settings = settings
        self.stages: list[ManifestStage] = list(stages)

    @property
    def cancel(self) -> threading.Event | None:
        return self._settings.cancel

    def branch(self) -> StageRunner:
        """A clock that has seen the same stages, for what comes after them for one engine."""
        return StageRunner(self._settings, self.stages)

    def progress(self, stage: str, text: str) -> None:
        self._settings.listener(Event(stage, "progress", text))

    def run(
        self,
        plan: StagePlan,
        cache: Cache,
        build: Callable[[Path], Mapping[str, Any]],
        needed: int | None = None,
    ) -> Entry:
        """The stage's result, from the cache or made now; ``needed`` is its size in bytes, about."""
        self.check_cancelled()
        started = time.monotonic()
        self._settings.listener(
            Event(plan.name, "started", plan.reason, {"key": plan.key, "cached": plan.cached})
        )
        entry = cache.find(plan.key)
        cached = entry is not None
        if entry is None:
            entry = cache.make(plan.key, build, needed)
        History(cache.root).record(plan.scope, plan.ingredients)
        seconds = time.monotonic() - started
        self.stages.append(
            ManifestStage(
                name=plan.name, key=plan.key, cached=cached, reason=plan.reason, seconds=round(seconds, 3)
            )
        )
        self._settings.listener(
            Event(plan.name, "finished", plan.reason, {"seconds": seconds, "cached": cached, "key": plan.key})
        )
        return entry

    def check_cancelled(self) -> None:
        if self._settings.cancel is not None and self._settings.cancel.is_set():
            raise Interrupted("the build was stopped", hint="run the same command again to resume")
