"""From measured times to the figures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engine_builder.errors import CompileError

WARM_UP_MS: Final = 300.0
"""A GPU that idled takes this long to raise its clocks."""
MEASURE_MS: Final = 1000.0
LEAST_RUNS: Final = 20
MOST_RUNS: Final = 500


def runs_within(budget_ms: float, once_ms: float) -> int:
    """How many inferences of ``once_ms`` to run in about ``budget_ms``: 20 to 500."""
    return max(LEAST_RUNS, min(MOST_RUNS, round(budget_ms / max(once_ms, 1e-6))))


def summarize(times_ms: Sequence[float]) -> tuple[float, float, float]:
    """Median, 5th and 95th percentile, in milliseconds.

    Raises CompileError when the clock gave something that is no time.
    """
    times = np.asarray(times_ms, np.float64)
    if times.size == 0 or not np.isfinite(times).all() or (times < 0).any():
        raise CompileError("the GPU's clock gave no times for the engine's inferences")
    low, median, high = np.percentile(times, (5, 50, 95))
    return float(median), float(low), float(high)
