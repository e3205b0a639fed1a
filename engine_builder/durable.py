"""Files that appear complete or not at all, whatever happens while they are written.

Everything is written under a temporary name in the folder of its final name, brought to the disk and
then renamed.  A temporary name carries the host and process that writes it, ``.<name>.<host>-<pid>.partial``,
so that what a killed process left behind can be told from what a live one is writing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from engine_builder.errors import ResourceError

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a write fails with when there is no room: disk full, over quota, beyond the largest file."""

UNWRITABLE: Final = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}

_HINTS: Final = {
    errno.ENOSPC: "free space on that disk, then run the same command again",
    errno.EDQUOT: "raise the quota or free space, then run the same command again",
    errno.EFBIG: "raise the limit on the size of files, then run the same command again",
    errno.EROFS: "mount it writable or choose another folder",
    errno.EACCES: "make it writable for this user or choose another folder",
    errno.EPERM: "make it writable for this user or choose another folder",
    errno.ENOTDIR: "a file is in the way of a folder: choose another one",
    errno.EEXIST: "a file is in the way of a folder: choose another one",
}


def disk_error(error: OSError, path: Path, needed: int | None = None) -> ResourceError:
    """The error a user sees when ``path`` cannot be written to; ``needed`` bytes were to go there."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    room = ""
    if error.errno in FULL and needed is not None:
        room = f"; about {megabytes(needed)} are needed"
        free = free_bytes(path)
        if error.errno == errno.ENOSPC and free is not None:
            room += f" and {megabytes(free)} are free"
    return ResourceError(f"cannot write: {reason}{room}", where=str(path), hint=_HINTS.get(error.errno or 0))


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def free_bytes(path: Path) -> int | None:
    """What an ordinary user may still write to the disk of ``path``, which need not exist yet."""
    for place in (path, *path.absolute().parents):
        try:
            disk = os.statvfs(place)
        except OSError:
            continue
        return disk.f_bavail * disk.f_frsize
    return None


def check_writable(folder: Path) -> None:
    """Makes ``folder`` and writes to it, before hours are spent on what is to go there.

    Raises:
        ResourceError: It cannot be made or written to.
    """
    probe = partial_path(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0")
    except OSError as error:
        raise disk_error(error, folder) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def partial_path(final: Path) -> Path:
    """The temporary name under which this process writes ``final``."""
    return final.with_name(f".{final.name}.{_host()}-{os.getpid()}.partial")


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname())[:64]


def sweep_partials(final: Path, *, held: bool = False) -> int:
    """Removes what killed writers of ``final`` left beside it; returns how many.

    A caller that holds the folder's lock for ``final`` (``held``) is the only one to write it, so that
    every temporary of it is dead.  Otherwise only those go whose process on this host is gone.
    """
    pattern = re.compile(re.escape(f".{final.name}.") + r"(?P<host>.+)-(?P<pid>\d+)\.partial")
    removed = 0
    for path in tuple(final.parent.iterdir()) if final.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and (held or (match["host"] == _host() and not _alive(int(match["pid"])))):
            remove(path)
            removed += 1
    return removed


def _alive(pid: int) -> bool:
    """Whether another process has this id.  Its own id is one that a dead process had before it."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name ``final`` when the block ends well, and is removed otherwise."""
    sweep_partials(final)
    partial = partial_path(final)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


@contextlib.contextmanager
def replacing_together(final: Path, *companions: Path) -> Iterator[Path]:
    """A new folder whose files take their final names when the block ends well.

    ``companions`` lie beside ``final`` and belong to it: it never stands there with those of another
    version, because an old ``final`` goes before they come and the new one comes last.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep_partials(final)
    folder = partial_path(final)
    remove(folder)
    try:
        folder.mkdir()
        yield folder
        for file in folder.iterdir():
            sync_file(file)
        written = [companion for companion in companions if (folder / companion.name).exists()]
        if written:
            final.unlink(missing_ok=True)
        for companion in written:
            (folder / companion.name).replace(companion)
        (folder / final.name).replace(final)
    finally:
        remove(folder)
    sync_folder(final.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Writes ``data`` so that ``path`` is either absent, old or complete, even after a power cut."""
    with replacing(path) as file:
        file.write(data)


def replace_text(path: Path, text: str) -> None:
    """Writes a note that readers see whole or not at all, and that need not outlive a power cut."""
    partial = partial_path(path)
    try:
        partial.write_text(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    """Brings a file's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` durable, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
