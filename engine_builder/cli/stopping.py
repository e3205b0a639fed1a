"""How SIGTERM and SIGINT end the process: at the next safe place, and by force when that is far off.

A Python signal handler runs only between two steps of the interpreter, which a long call into
onnxruntime keeps from happening for minutes.  The signal is therefore read by a thread of its own,
through the interpreter's wake-up descriptor, which the C handler writes to at once.  Ending by force is
safe: every file appears complete or not at all, the kernel frees the locks and kills the compiler with
this process, and the next run sweeps what is left.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Final

from engine_builder.errors import Interrupted

GRACE_SECONDS: Final = 5.0
"""From the signal to the end by force; Kubernetes kills after 30 by default, and 10 are promised.

Half of that is left for calls that hold the interpreter's lock, during which no thread counts: 3 s were
seen, on a machine with five times the work that it has cores for.
"""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals(cancel: threading.Event, report: Callable[[Interrupted], None]) -> None:
    """Sets ``cancel`` at the first signal and ends the process at the second, or ``GRACE_SECONDS`` later.

    ``report`` is shown what happened when the end comes by force.  Call it from the main thread.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    for number in _SIGNALS:
        signal.signal(number, _noted)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours, theirs, cancel, report), daemon=True, name="signals").start()


def _noted(signum: int, frame: object) -> None:
    """There has to be a handler for the wake-up descriptor to be written to."""


def _watch(
    ours: socket.socket,
    theirs: socket.socket,
    cancel: threading.Event,
    report: Callable[[Interrupted], None],
) -> None:
    try:
        while True:
            # ``theirs`` is held here so that it stays open as long as the interpreter writes to it.
            received = ours.recv(1)
            if received and received[0] in _SIGNALS:
                if cancel.is_set():
                    os._exit(Interrupted.exit_code)
                cancel.set()
                ours.settimeout(GRACE_SECONDS)
    except TimeoutError:
        # Whatever holds the terminal shall not hold the exit.
        threading.Timer(1.0, os._exit, (Interrupted.exit_code,)).start()
        report(
            Interrupted(
                f"stopped in the middle of a step that did not end within {GRACE_SECONDS:.0f} s",
                hint="run the same command again: it resumes with the last finished stage",
            )
        )
        os._exit(Interrupted.exit_code)
