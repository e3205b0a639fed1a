"""Kept results and files: complete or absent, whatever was done to them or to the process."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_builder.cache import FORMAT, Cache, Entry, content_key
from engine_builder.durable import (
    check_writable,
    disk_error,
    partial_path,
    replacing,
    replacing_together,
    sweep_partials,
    write_durably,
)
from engine_builder.errors import ResourceError
from engine_builder.publish import output_paths, publish, publish_failure
from tests.conftest import REPOSITORY

KEY = "convert-0123"
DEAD_PID = 2**22 + 1  # above the largest that Linux gives out (PID_MAX_LIMIT)


def fill(folder: Path) -> dict[str, Any]:
    (folder / "a.onnx").write_bytes(b"converted")
    (folder / "sub").mkdir()
    (folder / "sub" / "b.data").write_bytes(b"weights")
    return {"count": 3}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def entry(cache: Cache) -> Entry:
    return cache.make(KEY, fill)


def test_what_was_made_is_found_again(cache: Cache, entry: Entry) -> None:
    found = cache.find(KEY)
    assert found == entry
    assert found.facts == {"count": 3}
    assert found.file("sub/b.data").read_bytes() == b"weights"
    assert [path.name for path in cache.root.iterdir()] == [KEY]


def test_keys_depend_on_everything_but_order() -> None:
    key = content_key("compile", {"a": 1, "b": [1, 2]})
    assert key == content_key("compile", {"b": [1, 2], "a": 1})
    others = [
        content_key("compile", {"a": 1, "b": [2, 1]}),
        content_key("convert", {"a": 1, "b": [1, 2]}),
        content_key("compile", {"a": "1", "b": [1, 2]}),
    ]
    assert len({key, *others}) == 4


def rewritten(path: Path, **changes: object) -> int:
    manifest = json.loads(path.read_text())
    return path.write_text(json.dumps({**manifest, **changes}))


def becomes_folder(path: Path) -> Path:
    path.unlink()
    path.mkdir()
    return path


def becomes_file(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.write_text("")
    return folder


DAMAGE: dict[str, Callable[[Path], object]] = {
    "entry.json truncated": lambda f: os.truncate(f / "entry.json", 40),
    "entry.json empty": lambda f: os.truncate(f / "entry.json", 0),
    "entry.json garbage": lambda f: (f / "entry.json").write_bytes(os.urandom(500)),
    "entry.json a list": lambda f: (f / "entry.json").write_text("[1, 2]"),
    "entry.json nested": lambda f: (f / "entry.json").write_text("[" * 100_000),
    "entry.json not text": lambda f: (f / "entry.json").write_bytes(b"\xff\xfe\x00{}"),
    "entry.json gone": lambda f: (f / "entry.json").unlink(),
    "entry.json a folder": lambda f: becomes_folder(f / "entry.json"),
    "files a number": lambda f: rewritten(f / "entry.json", files=3),
    "facts a number": lambda f: rewritten(f / "entry.json", facts=3),
    "another version's layout": lambda f: rewritten(f / "entry.json", format=FORMAT + 1),
    "an earlier layout": lambda f: rewritten(f / "entry.json", format=1),
    "another key": lambda f: rewritten(f / "entry.json", key="convert-4567"),
    "a file truncated": lambda f: os.truncate(f / "a.onnx", 3),
    "a file longer": lambda f: (f / "a.onnx").write_bytes(b"converted and more"),
    "a file of garbage, size kept": lambda f: (f / "a.onnx").write_bytes(b"CONVERTED"),
    "a file gone": lambda f: (f / "sub/b.data").unlink(),
    "a file a folder": lambda f: becomes_folder(f / "a.onnx"),
    "the entry a file": becomes_file,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_made_anew(cache: Cache, entry: Entry, damage: Callable[[Path], object]) -> None:
    damage(entry.folder)
    assert cache.find(KEY) is None
    assert cache.make(KEY, fill).facts == {"count": 3}
    found = cache.find(KEY)
    assert found is not None
    assert found.file("a.onnx").read_bytes() == b"converted"


def test_a_copied_cache_is_hashed_once(cache: Cache, entry: Entry, tmp_path: Path) -> None:
    """Inodes and dates are others in a copy; the contents are the same."""
    copy = tmp_path / "copy"
    shutil.copytree(cache.root, copy)
    before = (copy / KEY / "entry.json").read_text()
    assert Cache(copy).find(KEY) is not None
    assert (copy / KEY / "entry.json").read_text() != before
    (copy / KEY / "a.onnx").write_bytes(b"CONVERTED")
    assert Cache(copy).find(KEY) is None


@pytest.mark.parametrize("date", [0, 10**10])
def test_dates_of_a_jumping_clock_do_no_harm(cache: Cache, entry: Entry, date: int) -> None:
    for path in (*entry.folder.rglob("*"), entry.folder):
        os.utime(path, (date, date))
    assert cache.find(KEY) == entry


def test_publishing_by_hard_link_changes_no_entry(cache: Cache, entry: Entry) -> None:
    before = (entry.folder / "entry.json").read_text()
    os.link(entry.file("a.onnx"), cache.root / "published")
    assert cache.find(KEY) == entry
    assert (entry.folder / "entry.json").read_text() == before


def test_a_failed_stage_leaves_nothing(cache: Cache) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        fill(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.make(KEY, fail)
    assert list(cache.root.iterdir()) == []


def test_sweeping_takes_temporaries_and_nothing_else(cache: Cache, entry: Entry) -> None:
    history = cache.root / "history"
    history.mkdir()
    for path in (history / "scope.json", cache.root / "hashes.json", cache.root / ".cache.lock"):
        path.write_text("{}")
    for dead in (cache.root / "compile-9", cache.root / "hashes.json", history / "scope.json"):
        partial_path(dead).write_text("half")
    partial_path(cache.root / "verify-7").mkdir()
    kept = {"history", "hashes.json", ".cache.lock", KEY}
    assert cache.sweep() == 4
    assert {path.name for path in cache.root.iterdir()} == kept
    assert [path.name for path in history.iterdir()] == ["scope.json"]


# --- files that replace others ----------------------------------------------------------------


def dead(final: Path) -> Path:
    """A temporary of ``final`` that a process of this host left, which is no more."""
    name = partial_path(final).name
    return final.with_name(name.replace(f"-{os.getpid()}.", f"-{DEAD_PID}."))


def test_a_temporary_goes_when_its_process_is_gone(tmp_path: Path) -> None:
    final = tmp_path / "a.onnx"
    other_host = tmp_path / f".a.onnx.elsewhere-{DEAD_PID}.partial"
    live = tmp_path / partial_path(final).name.replace(f"-{os.getpid()}.", "-1.")
    others = [other_host, live, dead(tmp_path / "b.onnx"), tmp_path / ".a.onnx.partial"]
    for path in (*others, dead(final), partial_path(final)):
        path.write_text("half")
    assert sweep_partials(final) == 2
    assert sorted(tmp_path.iterdir()) == sorted(others)
    # Whoever holds the lock is the only writer of this file, and still not of the others.
    assert sweep_partials(final, held=True) == 2
    assert sorted(tmp_path.iterdir()) == sorted([dead(tmp_path / "b.onnx"), tmp_path / ".a.onnx.partial"])


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    final = tmp_path / "a.json"
    write_durably(final, b"old")

    def fail() -> None:
        with replacing(final) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert final.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [final]


def test_a_model_never_stands_beside_the_sidecar_of_another(tmp_path: Path, monkeypatch: Any) -> None:
    model, sidecar = tmp_path / "m.onnx", tmp_path / "m.onnx.data"
    seen: list[tuple[bytes | None, bytes | None]] = []

    def look() -> None:
        seen.append(
            (
                model.read_bytes() if model.exists() else None,
                sidecar.read_bytes() if sidecar.exists() else None,
            )
        )

    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        look()
        done = real(path, target)
        look()
        return done

    monkeypatch.setattr(Path, "replace", replace)
    for version in (b"1", b"2"):
        with replacing_together(model, sidecar) as folder:
            (folder / model.name).write_bytes(version)
            (folder / sidecar.name).write_bytes(version)
        look()
    assert seen[-1] == (b"2", b"2")
    assert all(pair[0] is None or pair[0] == pair[1] for pair in seen)
    assert sorted(tmp_path.iterdir()) == [model, sidecar]


# --- publishing -------------------------------------------------------------------------------


def test_an_engine_never_stands_beside_the_report_of_another(tmp_path: Path, monkeypatch: Any) -> None:
    paths = output_paths(tmp_path / "out", 89, "m", "fp16", None)
    seen: list[tuple[str | None, ...]] = []
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        done = real(path, target)
        finals = (paths.engine, paths.report, paths.manifest)
        seen.append(tuple(final.read_text() if final.exists() else None for final in finals))
        return done

    monkeypatch.setattr(Path, "replace", replace)
    for version in ("1", "2"):
        engine = tmp_path / f"engine{version}"
        engine.write_text(version)
        publish(paths, engine, version, version)
    assert seen[-1] == ("2", "2", "2")
    assert all(engine is None or engine == report == manifest for engine, report, manifest in seen)


def test_publishing_sweeps_its_own_temporaries_alone(tmp_path: Path) -> None:
    paths = output_paths(tmp_path / "out", 89, "m", "fp16", None)
    paths.engine.parent.mkdir(parents=True)
    neighbour = dead(paths.engine.with_name("dit_bf16.trt"))
    for path in (dead(paths.engine), dead(paths.report), dead(paths.manifest), neighbour):
        path.write_text("half")
    (tmp_path / "engine").write_text("1")
    publish(paths, tmp_path / "engine", "1", "1")
    left = {path.name for path in paths.engine.parent.iterdir()}
    assert left == {"dit_fp16.trt", "dit_fp16.verify.json", "dit_fp16.manifest.json", neighbour.name}


def test_a_failure_sets_the_old_engine_aside(tmp_path: Path) -> None:
    paths = output_paths(tmp_path / "out", 89, "m", "fp16", None)
    (tmp_path / "engine").write_text("1")
    publish(paths, tmp_path / "engine", "1", "1")
    publish_failure(paths, "failed")
    left = {path.name: path.read_text() for path in paths.engine.parent.iterdir()}
    assert left == {
        "dit_fp16.trt.superseded": "1",
        "dit_fp16.manifest.json.superseded": "1",
        "dit_fp16.verify.json": "failed",
    }


# --- disks that are full or read-only ---------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk in memory with the options given, where this process may."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a disk in memory is not permitted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_named_with_what_was_needed(mounted: Callable[[str], Path]) -> None:
    cache = Cache(mounted("size=1m") / "cache")

    def write(folder: Path) -> dict[str, Any]:
        (folder / "engine.trt").write_bytes(b"\0" * 4_000_000)
        return {}

    with pytest.raises(ResourceError) as caught:
        cache.make(KEY, write, needed=4_000_000)
    text = str(caught.value)
    assert text.startswith(f"{cache.root}: cannot write: No space left on device; about 4.0 MB are needed")
    assert "MB are free" in text
    assert caught.value.exit_code == 8
    assert list(cache.root.iterdir()) == []


def test_a_full_output_disk_keeps_what_was_published(mounted: Callable[[str], Path], tmp_path: Path) -> None:
    paths = output_paths(mounted("size=1m") / "out", 89, "m", "fp16", None)
    (tmp_path / "small").write_bytes(b"1" * 100_000)
    (tmp_path / "large").write_bytes(b"2" * 2_000_000)
    publish(paths, tmp_path / "small", "1", "1")
    with pytest.raises(ResourceError, match=r"No space left on device; about 2\.0 MB are needed"):
        publish(paths, tmp_path / "large", "2", "2")
    left = {path.name: path.stat().st_size for path in paths.engine.parent.iterdir()}
    assert left == {"dit_fp16.trt": 100_000, "dit_fp16.verify.json": 1, "dit_fp16.manifest.json": 1}


def test_a_read_only_folder_is_refused_before_any_work(mounted: Callable[[str], Path]) -> None:
    disk = mounted("ro,size=1m")
    with pytest.raises(ResourceError, match="Read-only file system") as caught:
        check_writable(disk / "sm_89" / "m")
    assert str(disk / "sm_89" / "m") in str(caught.value)
    assert "mount it writable" in str(caught.value)


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ResourceError, match="a file is in the way"):
        check_writable(tmp_path / "out" / "sm_89")


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EFBIG])
def test_quota_and_limits_say_what_was_needed(tmp_path: Path, code: int) -> None:
    error = disk_error(OSError(code, os.strerror(code)), tmp_path / "not" / "yet", 1_500_000)
    assert error.exit_code == 8
    assert "about 1.5 MB are needed" in str(error)
    assert ("are free" in str(error)) == (code == errno.ENOSPC)
    assert error.hint is not None
    assert "run the same command again" in error.hint


def test_the_largest_file_allowed_is_a_resource_error(tmp_path: Path) -> None:
    """What RLIMIT_FSIZE does, and a quota in much the same way: the write fails, the rest stays."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = subprocess.run(
        [sys.executable, "entrypoint.py", "sample", "--out", str(tmp_path / "s.onnx")],
        cwd=REPOSITORY,
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 8, done.stderr
    assert f"{tmp_path / 's.onnx'}: cannot write: File too large; about" in done.stderr
    assert list(tmp_path.iterdir()) == []
