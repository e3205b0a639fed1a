"""Keeps two builds out of one folder.

Where the file system has ``flock``, the kernel frees the lock of a process that died, on the same
machine at once.  Where it has not (some network and FUSE file systems), a lease file takes its place:
its holder touches it every few seconds, and a waiter takes it over once it has itself watched it stand
still for ``LEASE_SECONDS`` of its own monotonic clock, or at once when the holder is a process of this
machine that is gone.  Neither compares wall clocks, so that clocks that jump or disagree do no harm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from filelock import BaseFileLock, FileLock, LeaseCompromise, SoftFileLease, Timeout

from engine_builder.durable import disk_error, replace_text
from engine_builder.errors import Interrupted, ResourceError

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 30.0
"""How long a lease must stand still before another build takes it; every builder must agree on it."""

_POLL_SECONDS: Final = 0.2
_NO_FLOCK: Final = frozenset(
    {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY}
)


@dataclass(frozen=True)
class Hold:
    """A folder held for one purpose."""

    folder: Path
    lost: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Says so when the lease was lost, which happens only to a build that stood still itself.

        Raises:
            ResourceError: Another build may be at work in the folder by now.
        """
        if self.lost.is_set():
            raise ResourceError(
                "this build stood still for so long that another one may have taken its folder",
                where=str(self.folder),
                hint="run the same command again",
            )


@contextlib.contextmanager
def hold(
    folder: Path,
    what: str,
    *,
    wait: float,
    cancel: threading.Event | None = None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Hold]:
    """Holds ``folder`` for ``what``; waits up to ``wait`` seconds for another build to let go of it.

    ``tell`` hears once whom it waits for.

    Raises:
        ResourceError: It is still held after that, by the named process on the named host; or the
            folder cannot be written to.
        Interrupted: ``cancel`` was set while waiting.
    """
    held = Hold(folder)
    owner = folder / f".{what}.owner"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder, what, held.lost)
        _acquire(lock, folder, owner, wait, cancel, tell)
    except OSError as error:
        raise disk_error(error, folder) from error
    try:
        try:
            replace_text(owner, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except OSError as error:
            raise disk_error(error, folder) from error
        yield held
        held.check()
    finally:
        if not held.lost.is_set():
            owner.unlink(missing_ok=True)
        lock.release()


def _lock(folder: Path, what: str, lost: threading.Event) -> BaseFileLock:
    path = folder / f".{what}.lock"
    if _has_flock(path):
        return FileLock(path, thread_local=False)

    def compromised(loss: LeaseCompromise) -> None:
        log.warning("%s: the lease was lost: %s", folder, loss.reason)
        lost.set()

    return SoftFileLease(
        folder / f".{what}.lease",
        lease_duration=LEASE_SECONDS,
        on_compromise=compromised,
        thread_local=False,
    )


def _has_flock(path: Path) -> bool:
    """Whether the file system of ``path`` knows ``flock``; asked with a lock that excludes nobody."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return False
        raise
    finally:
        os.close(handle)
    return True


def _acquire(
    lock: BaseFileLock,
    folder: Path,
    owner: Path,
    wait: float,
    cancel: threading.Event | None,
    tell: Callable[[str], None] | None,
) -> None:
    deadline = time.monotonic() + wait
    told = False
    while True:
        try:
            lock.acquire(timeout=_POLL_SECONDS, poll_interval=_POLL_SECONDS / 4)
            return
        except Timeout:
            if cancel is not None and cancel.is_set():
                raise Interrupted("the build was stopped while waiting for another one") from None
            if time.monotonic() >= deadline:
                raise ResourceError(
                    f"another build holds this folder: {_owner(owner)}",
                    where=str(folder),
                    hint="wait for it to end, or use another output and cache folder",
                ) from None
            if tell is not None and not told:
                tell(f"{folder} is held by another build, {_owner(owner)}; waiting up to {wait:.0f} s")
                told = True


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "its owner is not recorded"
