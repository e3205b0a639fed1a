"""Runs a command as a container would: no network, its own mounts, a read-only root, no capabilities."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mount:
    """A folder of this machine at ``target`` in the container."""

    source: Path
    target: str
    read_only: bool = False


# The new root is this machine's, read-only, with the mounts laid over it; $1 is an empty folder.
# What follows a "--" is the command; before it come pairs of flag and folder for the mounts.
_ENTER = r"""
set -eu
root=$1; shift
mount -t tmpfs tmpfs "$root"
for entry in /*; do
    if [ -L "$entry" ]; then cp -P "$entry" "$root$entry"
    elif [ -d "$entry" ] && [ "$entry" != /tmp ]; then
        mkdir "$root$entry"
        mount --rbind "$entry" "$root$entry"
        case $entry in /dev|/proc|/sys) ;; *) mount -o remount,bind,ro "$root$entry" ;; esac
    fi
done
while [ "$1" != -- ]; do
    mkdir -p "$root$3"
    mount --bind "$2" "$root$3"
    [ "$1" = rw ] || mount -o remount,bind,ro "$root$3"
    shift 3
done
shift
mount -o remount,ro "$root"
exec chroot "$root" "$@"
"""


@functools.cache
def _isolation() -> tuple[str, ...] | None:
    """How this machine lets us make namespaces, or None when it does not."""
    for prefix in (("unshare", "--net", "--mount"), ("unshare", "--map-root-user", "--net", "--mount")):
        try:
            probe = subprocess.run([*prefix, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
        except FileNotFoundError:
            return None
        if probe.returncode == 0:
            return prefix
    return None


def require_namespaces() -> None:
    """Skips the test where namespaces cannot be made, which CI has to allow."""
    if _isolation() is None:
        reason = "this machine does not let us make network and mount namespaces"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def container_command(
    command: Sequence[str], mounts: Sequence[Mount], root: Path, *, user: int | None = None
) -> list[str]:
    """``command`` inside the namespaces; ``root`` is an empty folder to build its file system on.

    The interpreter, its packages and the repository are there under their own paths.  Runs as
    ``user`` when that user may read them, else as this one; without capabilities in any case.
    """
    isolation = _isolation()
    assert isolation is not None
    root.mkdir(parents=True, exist_ok=True)
    laid: list[str] = []
    for mount in [*mounts, *_needed_under_tmp()]:
        laid += ["ro" if mount.read_only else "rw", str(mount.source), mount.target]
    drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if user is not None and os.geteuid() == 0 and _others_may_read():
        drop += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return [*isolation, "sh", "-c", _ENTER, "enter", str(root), *laid, "--", *drop, *command]


def entrypoint(*arguments: str) -> list[str]:
    """The image's ENTRYPOINT."""
    return [sys.executable, str(REPOSITORY / "entrypoint.py"), *arguments]


def container_environment(own: Mapping[str, str]) -> dict[str, str]:
    """What a container sees: its own variables, a path, and what numeric libraries need on this machine."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("OPENBLAS_", "OMP_"))}
    return {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **kept, **own}


def _needed_under_tmp() -> list[Mount]:
    """/tmp is the container's own, so what lies there of Python and the repository is mounted again."""
    paths = {Path(entry) for entry in sys.path if entry} | {Path(sys.prefix), REPOSITORY}
    top = {path for path in paths if Path("/tmp") in path.parents and path.is_dir()}
    nested = {path for path in top if any(path != other and path.is_relative_to(other) for other in top)}
    return [Mount(path, str(path), read_only=True) for path in sorted(top - nested)]


@functools.cache
def _others_may_read() -> bool:
    paths = {Path(sys.executable).resolve(), REPOSITORY.resolve(), *map(Path, sys.path)}
    return all(
        folder.stat().st_mode & 0o005 == 0o005
        for path in paths
        if path.exists()
        for folder in ([path, *path.parents] if path.is_dir() else path.parents)
    )
