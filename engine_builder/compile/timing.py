"""Timing caches: what the builder measured before, so that it need not, or must not, measure again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_builder.compile.versions import member
from engine_builder.durable import write_durably
from engine_builder.errors import BuilderError, CompileError, PlatformError
from engine_builder.locks import hold

if TYPE_CHECKING:
    import tensorrt as trt

Warn = Callable[[str], None]

_LOCK_SECONDS: Final = 60.0


@dataclass(frozen=True)
class TimingCache:
    """The cache's file; ``strict`` forbids the build to time anything that is not in it."""

    path: Path
    strict: bool = False


@dataclass(frozen=True)
class LoadedCache:
    """What the builder started from: ``content`` as TensorRT serializes it.

    ``usable`` is False when the file belongs to another TensorRT or another GPU, and is not to be
    written over.
    """

    cache: TimingCache
    content: bytes
    usable: bool


def attach_cache(trt: Any, config: trt.IBuilderConfig, cache: TimingCache, warn: Warn) -> LoadedCache:
    """Read the cache and hand it to the builder's configuration; a missing file is an empty cache.

    Raises PlatformError when a strict build lacks its cache, or when the cache is of another
    TensorRT or GPU.  Other builds then start from an empty one, and the file is left alone.
    """
    data = _read(cache)
    native = config.create_timing_cache(data)
    if native is not None and config.set_timing_cache(native, False):
        if cache.strict:
            config.set_flag(member(trt, "BuilderFlag", "ERROR_ON_TIMING_CACHE_MISS"))
        return LoadedCache(cache, bytes(native.serialize()), usable=True)
    if cache.strict:
        raise PlatformError(
            f"the timing cache is not of this GPU and TensorRT {trt.__version__}",
            where=str(cache.path),
            hint="make one here, in a build without strict_timing_cache",
        )
    warn(
        f"{cache.path} is no timing cache of this GPU and TensorRT {trt.__version__}: it is neither used "
        "nor changed; name one file for each GPU and version"
    )
    native = config.create_timing_cache(b"")
    if native is None or not config.set_timing_cache(native, False):
        raise CompileError("TensorRT does not take an empty timing cache")
    return LoadedCache(cache, b"", usable=False)


def _read(cache: TimingCache) -> bytes:
    try:
        return cache.path.read_bytes()
    except FileNotFoundError:
        if not cache.strict:
            return b""
        reason = "no such file"
    except OSError as error:
        reason = error.strerror or str(error)
    raise PlatformError(
        f"the timing cache cannot be read: {reason}",
        where=str(cache.path),
        hint="a build without strict_timing_cache makes one",
    )


def keep_cache(config: trt.IBuilderConfig, loaded: LoadedCache, warn: Warn) -> None:
    """After the build: prove that a strict one timed nothing, or save what another one timed.

    ERROR_ON_TIMING_CACHE_MISS lets some misses pass, so that the strict proof is that the cache
    is byte by byte what it was.  A cache that cannot be saved costs time, not the engine: it is
    a warning.

    Raises CompileError when a strict build timed a tactic.
    """
    after = bytes(config.get_timing_cache().serialize())
    if loaded.cache.strict:
        if after != loaded.content:
            raise CompileError(
                "the build timed tactics that the strict timing cache does not hold: "
                f"it was {len(loaded.content)} bytes and became {len(after)}",
                where=str(loaded.cache.path),
                hint="build once without strict_timing_cache on this GPU to complete it",
            )
        return
    if loaded.usable and after != loaded.content:
        try:
            path = loaded.cache.path
            with hold(path.parent, path.name, wait=_LOCK_SECONDS):
                _merge(config, after, path, warn)
        except (BuilderError, OSError) as error:
            warn(f"the timing cache is not saved: {error}")


def _merge(config: trt.IBuilderConfig, after: bytes, path: Path, warn: Warn) -> None:
    """Add the new entries to the file as it is now, which another build may have added to."""
    data = path.read_bytes() if path.exists() else b""
    merged = config.create_timing_cache(data)
    added = config.create_timing_cache(after)
    if merged is None or added is None or not merged.combine(added, False):
        warn(
            f"{path} is now a timing cache that TensorRT does not combine with this build's; it is left alone"
        )
        return
    content = bytes(merged.serialize())
    if content != data:
        write_durably(path, content)
