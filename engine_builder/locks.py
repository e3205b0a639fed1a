"""Keeps two builds out of one folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from engine_builder.cache import disk_error
from engine_builder.errors import Interrupted, ResourceError

_POLL_SECONDS = 0.2


@contextlib.contextmanager
def hold(folder: Path, what: str, *, wait: float, cancel: threading.Event | None = None) -> Iterator[None]:
    """Holds ``folder`` for ``what``; waits up to ``wait`` seconds for another build to let go of it.

    Raises:
        ResourceError: It is still held after that, by the named process on the named host.
        Interrupted: ``cancel`` was set while waiting.
    """
    path = folder / f".{what}.lock"
    owner = folder / f".{what}.owner"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        deadline = time.monotonic() + wait
        while True:
            try:
                lock.acquire(timeout=_POLL_SECONDS)
                break
            except Timeout:
                if cancel is not None and cancel.is_set():
                    raise Interrupted("the build was stopped while waiting for another one") from None
                if time.monotonic() >= deadline:
                    raise ResourceError(
                        f"another build holds this folder: {_owner(owner)}",
                        where=str(folder),
                        hint="wait for it to end, or use another output and cache folder",
                    ) from None
        owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    except OSError as error:
        raise disk_error(error, folder) from error
    try:
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "its owner is not recorded"
