"""Threads for the kernels: numpy and BLAS leave the interpreter's lock, so blocks run side by side."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import numpy as np

log = logging.getLogger(__name__)

T = TypeVar("T")

_SETTER: Final = "scipy_openblas_set_num_threads64_"
_GETTER: Final = "scipy_openblas_get_num_threads64_"


class Workers:
    """Runs a function over jobs on up to ``threads`` threads; with one thread, in the caller's own."""

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, function: Callable[[T], None], jobs: Iterable[T]) -> None:
        """Call ``function`` with every job; the first exception is raised here."""

        def quiet(job: T) -> None:
            # numpy's error state belongs to the thread.  Overflow is a result here, not a fault.
            with np.errstate(all="ignore"):
                function(job)

        listed = list(jobs)
        if self._pool is None or len(listed) == 1:
            for job in listed:
                quiet(job)
            return
        for _ in self._pool.map(quiet, listed):
            pass


INLINE: Final = Workers()
"""Runs everything in the calling thread."""


def default_threads() -> int:
    """Two, or one on a machine with a single core."""
    return min(2, os.cpu_count() or 1)


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Keep OpenBLAS to the calling thread while the kernels split the work themselves.

    OpenBLAS's idle threads spin, which on two cores takes the time of the kernels' own threads:
    measured, an attention core at 4156 positions took 3 to 8 times longer beside them.  Without
    numpy's own OpenBLAS nothing is changed.
    """
    library = _openblas()
    if library is None:
        yield
        return
    before = int(library[_GETTER]())
    library[_SETTER](1)
    try:
        yield
    finally:
        library[_SETTER](before)


def _openblas() -> ctypes.CDLL | None:
    """The OpenBLAS that numpy's wheel carries, already loaded by numpy."""
    for path in (Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas64_*"):
        try:
            library = ctypes.CDLL(str(path))
            library[_SETTER], library[_GETTER]
        except (OSError, AttributeError) as error:
            log.debug("%s cannot be told how many threads to use: %s", path.name, error)
            continue
        return library
    return None
