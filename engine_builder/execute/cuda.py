"""The few calls of the CUDA runtime that an execution needs, over cuda-bindings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_builder.errors import BuilderError, CompileError, PlatformError, ResourceError


def cuda_runtime() -> Any:
    """The module ``cuda.bindings.runtime``.

    Raises PlatformError when it is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise PlatformError(
            f"engines cannot be run: cuda-bindings cannot be imported: {error}",
            hint="pip install cuda-bindings",
        ) from error


class Device:
    """The first visible GPU with one stream; memory and stream go when the context ends.

    Addresses are device addresses, sizes bytes.
    """

    def __init__(self) -> None:
        """Raises PlatformError without cuda-bindings or without a GPU."""
        self._cuda = cuda_runtime()
        self._memory: list[int] = []
        error, count = self._cuda.cudaGetDeviceCount()
        if int(error) or count == 0:
            raise PlatformError(
                "engines run on a GPU, and CUDA shows none", hint="run with --gpus all, or skip the execution"
            )
        self._check(self._cuda.cudaSetDevice(0))
        self._stream = self._check(self._cuda.cudaStreamCreate())

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failed kernel every call fails: what it says then would hide the first error.
        self._cuda.cudaStreamSynchronize(self._stream)
        for address in self._memory:
            self._cuda.cudaFree(address)
        self._cuda.cudaStreamDestroy(self._stream)

    @property
    def stream(self) -> int:
        """The stream's handle, as TensorRT takes it."""
        return int(self._stream)

    @property
    def name(self) -> str:
        """The GPU's name, such as ``NVIDIA H200``."""
        return bytes(self._check(self._cuda.cudaGetDeviceProperties(0)).name).rstrip(b"\0").decode()

    def free_bytes(self) -> int:
        """Memory that the GPU has left."""
        return int(self._check(self._cuda.cudaMemGetInfo())[0])

    def allocate(self, size: int) -> int:
        """Raises ResourceError when the GPU's memory does not suffice."""
        address = int(self._check(self._cuda.cudaMalloc(size)))
        self._memory.append(address)
        return address

    def upload(self, array: npt.NDArray[Any], address: int) -> None:
        """Copy a contiguous array to the GPU; returns when it is there."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy(address, array.ctypes.data, array.nbytes, kind)

    def download(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Copy an array from the GPU, once everything before it in the stream is done."""
        array = np.empty(shape, dtype)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(array.ctypes.data, address, array.nbytes, kind)
        return array

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        if size:
            self._check(self._cuda.cudaMemcpyAsync(target, source, size, kind, self._stream))
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the stream; raises CompileError when what ran in it failed."""
        self._check(self._cuda.cudaStreamSynchronize(self._stream))

    def time(self, work: Callable[[], None], count: int) -> list[float]:
        """Milliseconds of each of ``count`` times that ``work`` put something into the stream.

        An event lies before and after each, so that the times are the GPU's, gaps between two
        pieces of work included only where the GPU waits for the next.
        """
        events = [self._check(self._cuda.cudaEventCreate()) for _ in range(2 * count)]
        try:
            for start, end in zip(events[::2], events[1::2], strict=True):
                self._check(self._cuda.cudaEventRecord(start, self._stream))
                work()
                self._check(self._cuda.cudaEventRecord(end, self._stream))
            self.synchronize()
            return [
                float(self._check(self._cuda.cudaEventElapsedTime(start, end)))
                for start, end in zip(events[::2], events[1::2], strict=True)
            ]
        finally:
            for event in events:
                self._cuda.cudaEventDestroy(event)

    def _check(self, answer: tuple[Any, ...]) -> Any:
        """The result of a call: one value, or the tuple of several; raises when it failed."""
        error, *values = answer
        if int(error):
            raise self._error(error)
        return values[0] if len(values) == 1 else tuple(values)

    def _error(self, error: Any) -> BuilderError:
        if error == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            return ResourceError(
                "the GPU's memory ran out while the engine was run",
                hint="stop what else uses the GPU, or lower the profiles' maximum",
            )
        text = self._cuda.cudaGetErrorString(error)[1]
        message = text.decode() if isinstance(text, bytes) else str(text)
        return CompileError(f"the engine does not run: {getattr(error, 'name', error)}: {message}")
