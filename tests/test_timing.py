"""Timing caches: what is read, used, added to and left alone, with a cache that has TensorRT's manners."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_builder.compile.timing import TimingCache, attach_cache, keep_cache
from engine_builder.errors import CompileError, PlatformError


class Cache:
    """A timing cache with entries of one byte each, in TensorRT's manners: ``C`` and the entries."""

    def __init__(self, entries: bytes) -> None:
        self.entries = entries

    def serialize(self) -> bytes:
        return b"C" + self.entries

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.entries += bytes(entry for entry in other.entries if entry not in self.entries)
        return True


class Config:
    """The builder's configuration, as far as timing caches go; ``X`` begins a foreign one."""

    def __init__(self) -> None:
        self.flags: list[object] = []
        self.cache = Cache(b"")

    def create_timing_cache(self, data: bytes) -> Cache | None:
        return None if data[:1] == b"D" else Cache(data[1:])

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return b"x" not in cache.entries

    def get_timing_cache(self) -> Cache:
        return self.cache

    def set_flag(self, flag: object) -> None:
        self.flags.append(flag)


TRT = SimpleNamespace(
    __name__="tensorrt",
    __version__="10.15.1.29",
    BuilderFlag=SimpleNamespace(ERROR_ON_TIMING_CACHE_MISS="error on miss"),
)


def build_with(cache: TimingCache, timed: bytes) -> tuple[Config, list[str]]:
    """A build that uses the cache and times ``timed``."""
    config: Any = Config()
    warnings: list[str] = []
    loaded = attach_cache(TRT, config, cache, warnings.append)
    config.cache.entries += timed
    keep_cache(config, loaded, warnings.append)
    return config, warnings


def test_a_timing_cache_is_made_filled_and_left_alone_when_nothing_is_new(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path / "deep" / "t.cache")
    assert build_with(cache, b"ab")[1] == []
    assert cache.path.read_bytes() == b"Cab"
    build_with(cache, b"c")
    assert cache.path.read_bytes() == b"Cabc"
    before = cache.path.stat().st_mtime_ns
    build_with(cache, b"")
    assert cache.path.stat().st_mtime_ns == before


def test_what_another_build_added_meanwhile_is_kept(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path / "t.cache")
    cache.path.write_bytes(b"Ca")
    config: Any = Config()
    loaded = attach_cache(TRT, config, cache, pytest.fail)
    cache.path.write_bytes(b"Caz")
    config.cache.entries += b"b"
    keep_cache(config, loaded, pytest.fail)
    assert cache.path.read_bytes() == b"Cazb"


@pytest.mark.parametrize("content", [b"Damaged", b"Cx: of another GPU"])
def test_a_foreign_timing_cache_is_neither_used_nor_changed(tmp_path: Path, content: bytes) -> None:
    cache = TimingCache(tmp_path / "t.cache")
    cache.path.write_bytes(content)
    config, warnings = build_with(cache, b"a")
    assert config.cache.entries == b"a"
    assert cache.path.read_bytes() == content
    assert len(warnings) == 1
    assert "neither used nor changed" in warnings[0]
    with pytest.raises(PlatformError, match=r"not of this GPU and TensorRT 10\.15\.1\.29"):
        build_with(TimingCache(cache.path, strict=True), b"")


def test_a_strict_build_times_nothing(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path / "t.cache", strict=True)
    with pytest.raises(PlatformError, match="cannot be read: no such file"):
        build_with(cache, b"")
    cache.path.write_bytes(b"Cab")
    config, warnings = build_with(cache, b"")
    assert (config.flags, warnings) == (["error on miss"], [])
    with pytest.raises(CompileError, match="it was 3 bytes and became 4") as caught:
        build_with(cache, b"c")
    assert caught.value.exit_code == 6
    assert cache.path.read_bytes() == b"Cab"


def test_a_timing_cache_that_cannot_be_saved_costs_a_warning(tmp_path: Path) -> None:
    config: Any = Config()
    warnings: list[str] = []
    loaded = attach_cache(TRT, config, TimingCache(tmp_path / "t.cache"), warnings.append)
    config.cache.entries += b"a"
    (tmp_path / "t.cache").mkdir()
    keep_cache(config, loaded, warnings.append)
    assert len(warnings) == 1
    assert "is not saved" in warnings[0]
    assert "t.cache" in warnings[0]
