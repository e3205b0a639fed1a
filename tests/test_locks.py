"""Two builds, one folder: real processes, on file systems with and without flock."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine_builder.errors import Interrupted, ResourceError
from engine_builder.locks import Hold, hold
from tests.conftest import REPOSITORY

# A process that holds a folder until its input ends, then says that it let go of it.
HOLDER = """
import errno, fcntl, sys, threading
from pathlib import Path

if {flockless}:
    def no_flock(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")
    fcntl.flock = no_flock

from engine_builder import locks
locks.LEASE_SECONDS = {lease}

with locks.hold(Path({folder!r}), "cache", wait={wait}, tell=lambda text: print("told", text, flush=True)):
    print("held", flush=True)
    sys.stdin.read()
print("released", flush=True)
"""


class Holder:
    """A process that tries to hold a folder."""

    def __init__(
        self, folder: Path, *, flockless: bool = False, wait: float = 30.0, lease: float = 2.0
    ) -> None:
        text = HOLDER.format(folder=str(folder), flockless=flockless, wait=wait, lease=lease)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def end(self) -> tuple[str, str]:
        """Lets it end; returns what else it printed."""
        out, err = self.process.communicate(timeout=60)
        return out, err

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=[False, True], ids=["flock", "lease"])
def flockless(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_second_waits_until_the_first_lets_go(tmp_path: Path, flockless: bool) -> None:
    first = Holder(tmp_path, flockless=flockless)
    assert first.line() == "held"
    second = Holder(tmp_path, flockless=flockless)
    told = second.line()
    assert f"process {first.process.pid} on {socket.gethostname()}" in told
    assert first.end() == ("released\n", "")
    assert second.line() == "held"
    assert second.end() == ("released\n", "")
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {".cache.lock"}  # an empty file stays where flock is, so that waiters share it


def test_the_second_fails_with_the_owner_when_it_may_not_wait(tmp_path: Path, flockless: bool) -> None:
    first = Holder(tmp_path, flockless=flockless)
    assert first.line() == "held"
    second = Holder(tmp_path, flockless=flockless, wait=0.5)
    _, err = second.end()
    assert second.process.returncode == 1
    owner = f"another build holds this folder: process {first.process.pid} on {socket.gethostname()}"
    assert f"ResourceError: {tmp_path}: {owner}" in err
    first.end()


def test_a_killed_holder_holds_nothing(tmp_path: Path, flockless: bool) -> None:
    """On one machine at once, also by lease: the process that it names is gone."""
    first = Holder(tmp_path, flockless=flockless, lease=30.0)
    assert first.line() == "held"
    first.kill()
    started = time.monotonic()
    second = Holder(tmp_path, flockless=flockless, lease=30.0)
    assert second.line() == "held"
    assert time.monotonic() - started < 10
    second.end()


def test_a_stopped_holder_loses_its_lease_and_says_so(tmp_path: Path) -> None:
    """A holder that stands still for longer than the lease may not go on as if nothing had happened."""
    first = Holder(tmp_path, flockless=True)
    assert first.line() == "held"
    os.kill(first.process.pid, signal.SIGSTOP)
    second = Holder(tmp_path, flockless=True)
    assert second.line().startswith("told")
    assert second.line() == "held"
    os.kill(first.process.pid, signal.SIGCONT)
    time.sleep(2.0)  # three heartbeats of a third of the lease each
    out, err = first.end()
    assert "released" not in out
    assert "ResourceError" in err
    assert "stood still" in err
    assert second.end() == ("released\n", "")


def test_a_lease_of_another_host_is_taken_only_after_it_stood_still(tmp_path: Path) -> None:
    lease = tmp_path / ".cache.lease"
    lease.write_text(
        "filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=0123456789abcdef0123456789abcdef\nduration=2.0\n"
    )
    (tmp_path / ".cache.owner").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    # Dates in the past or the future say nothing: only that the lease does not change.
    for date in (0.0, time.time() + 1e8):
        os.utime(lease, (date, date))
        impatient = Holder(tmp_path, flockless=True, wait=0.5)
        assert "process 1 on elsewhere" in impatient.end()[1]
    started = time.monotonic()
    patient = Holder(tmp_path, flockless=True)
    assert patient.line().startswith("told")
    assert patient.line() == "held"
    assert time.monotonic() - started >= 2.0
    patient.end()


def test_a_damaged_owner_costs_only_its_name(tmp_path: Path) -> None:
    first = Holder(tmp_path)
    assert first.line() == "held"
    (tmp_path / ".cache.owner").write_text('{"pid": 1')
    with (
        pytest.raises(ResourceError, match="its owner is not recorded"),
        hold(tmp_path, "cache", wait=0.3),
    ):
        pytest.fail("held twice")
    first.end()


def test_a_waiting_build_can_be_stopped(tmp_path: Path) -> None:
    first = Holder(tmp_path)
    assert first.line() == "held"
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Interrupted), hold(tmp_path, "cache", wait=60.0, cancel=cancel):
        pytest.fail("held twice")
    first.end()


def test_locks_of_two_engines_in_one_folder_are_apart(tmp_path: Path) -> None:
    with hold(tmp_path, "dit_fp16.trt", wait=0.0), hold(tmp_path, "dit_bf16.trt", wait=0.0):
        owners = {path.name for path in tmp_path.glob(".*.owner")}
    assert owners == {".dit_fp16.trt.owner", ".dit_bf16.trt.owner"}


def test_a_lost_hold_is_an_error_that_a_retry_cures() -> None:
    held = Hold(Path("/cache"))
    held.check()
    held.lost.set()
    with pytest.raises(ResourceError, match="run the same command again"):
        held.check()
