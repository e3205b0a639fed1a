"""Builds that are killed, stopped, starved of memory and disk, or run beside each other."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.crash import Site, campaign

STOP_SECONDS = 10.0
"""From SIGTERM to the end, at any stage."""


def fail_line(stderr: str) -> dict[str, object]:
    """The fields of the last JSON line, which says what failed."""
    event = json.loads(stderr.splitlines()[-1])
    assert event["event"] == "failed"
    fields: dict[str, object] = event["fields"]
    return fields


def test_a_dozen_kills_at_random_moments(tmp_path: Path) -> None:
    tally = campaign(tmp_path, kills=12, seed=6)
    assert tally.kills.total() == 12
    assert len(tally.kills) >= 4  # stages that were hit
    assert tally.completed >= 3


@pytest.fixture(scope="module")
def stopped_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("stopped"))


@pytest.mark.parametrize("stage", ["source", "convert", "fidelity", "compile"])
def test_sigterm_stops_in_time_and_resumes(stopped_site: Site, stage: str) -> None:
    """One stage after the other is stopped; what had finished is found in the cache by the next run."""
    process = subprocess.Popen(
        stopped_site.command(), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    stopped = 0.0
    cached: list[str] = []
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == "started" and event["stage"] == stage:
            time.sleep(0.1)
            stopped = time.monotonic()
            process.send_signal(signal.SIGTERM)
        elif event["event"] == "finished" and event["fields"]["cached"]:
            cached.append(event["stage"])
    assert process.wait() == 130
    assert stopped
    assert time.monotonic() - stopped < STOP_SECONDS
    # The run before stopped one stage earlier, so that all that precedes that one had finished.
    order = ["source", "convert", "fidelity", "compile"]
    assert set(order[1 : max(order.index(stage) - 1, 1)]) <= set(cached)
    stopped_site.check_visible()


def test_after_all_those_stops_the_build_is_right(stopped_site: Site) -> None:
    outcome = stopped_site.run()
    manifest = stopped_site.check_finished(outcome, None)
    assert {"convert", "fidelity"} <= {stage.name for stage in manifest.stages if stage.cached}


BUSY = """
import hashlib, threading
from engine_builder.cli import stopping
stopping.GRACE_SECONDS = 1.0
stopping.stop_on_signals(threading.Event(), lambda error: print(error, flush=True))
print("busy", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # hours in one call that no Python handler interrupts
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_step_that_does_not_end_is_ended(signals: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    time.sleep(0.2)
    for _ in range(signals):
        process.terminate()
        time.sleep(0.2)
    out, _ = process.communicate(timeout=STOP_SECONDS)
    assert process.returncode == 130
    assert ("resumes with the last finished stage" in out) == (signals == 1)


def test_two_builds_into_one_output_and_cache(tmp_path: Path) -> None:
    """One waits for the other, finds everything made, and rebuilds nothing."""
    site = Site(tmp_path)
    pair = [
        subprocess.Popen(
            site.command("--json"),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    rebuilt = sorted(json.loads(out)[0]["rebuilt"] for out, _ in ends)
    assert rebuilt == [False, True]
    notes = [
        json.loads(line)["fields"]["text"] for _, err in ends for line in err.splitlines() if '"note"' in line
    ]
    assert any(f"process {process.pid} on" in note for note in notes for process in pair)
    site.check_visible()


def test_two_builds_of_which_one_may_not_wait(tmp_path: Path) -> None:
    site = Site(tmp_path)
    first = subprocess.Popen(
        site.command(), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert first.stderr is not None
    assert json.loads(first.stderr.readline())["event"] == "started"
    second = subprocess.run(site.command("--lock-wait", "0"), cwd=REPOSITORY, capture_output=True, text=True)
    first.kill()
    first.communicate()
    assert second.returncode == 8
    failure = fail_line(second.stderr)
    assert f"another build holds this folder: process {first.pid} on" in str(failure["message"])
    assert failure["where"] == str(site.cache)


# --- memory and disk --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled_late(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site where everything up to the compiler is in the cache."""
    site = Site(tmp_path_factory.mktemp("late"))
    site.run(("compile", 0.0))
    return site


@pytest.mark.parametrize("megabytes", [800, 900])
def test_memory_that_runs_out_in_tensorrt(compiled_late: Site, megabytes: int) -> None:
    """The compiler's process has the limit of its parent.  Measured with TensorRT-RTX 1.7.1 on two
    cores, the tiny model builds within 1,000 MB of address space; below that it fails in one of several
    ways, at 800 MB because a thread cannot be started."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 1_000_000,) * 2)

    done = subprocess.run(
        compiled_late.command(), cwd=REPOSITORY, capture_output=True, text=True, preexec_fn=limit
    )
    assert done.returncode == 8, done.stderr
    assert "memory ran out" in str(fail_line(done.stderr)["message"])
    assert not compiled_late.engine.exists()


def test_everything_is_right_once_there_is_memory(compiled_late: Site) -> None:
    compiled_late.check_finished(compiled_late.run(), None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path, str], None]]:
    """Mounts a disk in memory over a folder, where this process may."""
    mounted: list[Path] = []

    def mount(place: Path, options: str) -> None:
        place.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a disk in memory is not permitted here: {done.stderr.strip()}")
        mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(
    ("size", "what"),
    [
        ("4m", "the sample model, 6 MB"),
        ("12m", "the engine, 9 MB"),
    ],
)
def test_a_full_cache_disk(
    tmp_path: Path, small_disk: Callable[[Path, str], None], size: str, what: str
) -> None:
    site = Site(tmp_path)
    small_disk(site.cache, f"size={size}")
    done = subprocess.run(site.command(), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 8, (what, done.stderr)
    failure = fail_line(done.stderr)
    assert "No space left on device; about" in str(failure["message"])
    assert "are needed" in str(failure["message"])
    assert str(failure["where"]).startswith(str(site.cache))
    assert not site.engine.exists()
    assert [path for path in site.cache.rglob("*") if ".partial" in path.name] == []


def test_a_read_only_output_is_refused_before_any_work(
    tmp_path: Path, small_disk: Callable[[Path, str], None]
) -> None:
    site = Site(tmp_path)
    small_disk(site.out, "ro")
    done = subprocess.run(site.command(), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 8
    failure = fail_line(done.stderr)
    assert failure["where"] == str(site.engine.parent)
    assert "Read-only file system" in str(failure["message"])
    assert not site.cache.exists()


def test_a_read_only_cache(tmp_path: Path, small_disk: Callable[[Path, str], None]) -> None:
    site = Site(tmp_path)
    small_disk(site.cache, "ro")
    done = subprocess.run(site.command(), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 8
    assert fail_line(done.stderr)["where"] == str(site.cache)


def test_temporaries_of_a_neighbour_stay(compiled_late: Site) -> None:
    """Another recipe may be at work on another engine of the same folder."""
    folder = compiled_late.engine.parent
    folder.mkdir(parents=True, exist_ok=True)
    neighbour = folder / ".dit_bf16.trt.elsewhere-12.partial"
    own = folder / ".dit_fp16.trt.elsewhere-12.partial"
    for path in (neighbour, own):
        path.write_bytes(b"half")
    assert compiled_late.run().code == 0
    assert neighbour.exists()
    assert not own.exists()
    neighbour.unlink()


def test_a_cache_of_another_version_costs_only_time(compiled_late: Site) -> None:
    assert compiled_late.run().code == 0
    for entry in compiled_late.cache.glob("*/entry.json"):
        entry.write_text(json.dumps({"format": 99, "layout": "of the future"}))
    (compiled_late.cache / "hashes.json").write_text('{"/a": [[1], 3]}')
    for path in compiled_late.cache.rglob("*"):
        os.utime(path, (4_000_000_000, 4_000_000_000))
    outcome = compiled_late.run()
    manifest = compiled_late.check_finished(outcome, None)
    assert [stage.name for stage in manifest.stages if stage.cached] == []
    assert compiled_late.run().code == 0
