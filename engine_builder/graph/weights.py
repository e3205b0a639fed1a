"""Constants converted while they are written, a few megabytes at a time.

A converted model never holds its weights in memory: each tensor keeps a reference to its fp32
source (usually a range of an external data file) and converts chunk by chunk when it is asked for
its bytes.  What rounding did to the values is counted on the way.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

CHUNK_ELEMENTS = 1 << 16
"""Elements converted at a time: 256 KiB of fp32, which stays in a core's cache from pass to pass."""

NUMPY_TYPE: dict[ir.DataType, Any] = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    ir.DataType.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
}

_MAX = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.3895313892515355e38}


def _bits(value: float) -> np.uint32:
    """The bit pattern of a non-negative fp32 value."""
    return np.float32(value).view(np.uint32)


_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = _bits(float("inf"))
_SMALLEST_NORMAL = {ir.DataType.FLOAT16: _bits(2.0**-14), ir.DataType.BFLOAT16: _bits(2.0**-126)}
# Half way to the next value above the largest: from here on round-to-nearest gives infinity.
_OVERFLOWS_FROM = {ir.DataType.FLOAT16: _bits(65520.0), ir.DataType.BFLOAT16: _bits(3.3961775292304957e38)}


@dataclass(frozen=True)
class TensorLoss:
    """What converting one constant did: elements that overflowed, became subnormal, were not finite."""

    tensor: str
    dtype: str
    elements: int
    overflowed: int
    subnormal: int
    not_finite: int
    max_abs: float


class ConversionLedger:
    """Collects a ``TensorLoss`` per converted constant; safe to share between writer threads."""

    def __init__(self) -> None:
        self._losses: dict[tuple[str, str], TensorLoss] = {}
        self._lock = threading.Lock()

    def record(self, loss: TensorLoss) -> None:
        with self._lock:
            self._losses[loss.tensor, loss.dtype] = loss

    def losses(self) -> tuple[TensorLoss, ...]:
        """By name, so that the report does not depend on the order of the writer threads."""
        with self._lock:
            return tuple(self._losses[key] for key in sorted(self._losses))


def stream(tensor: ir.TensorProtocol) -> Iterator[np.ndarray]:
    """The elements of ``tensor`` in order, flat, in arrays of at most ``CHUNK_ELEMENTS``.

    External tensors are read with plain reads rather than through a memory map, because pages of
    a map count as resident memory until the kernel needs them back.  An array is valid until the
    next one is asked for: they share one buffer.

    Raises:
        OSError: The file ends inside the tensor.
    """
    if isinstance(tensor, ir.ExternalTensor) and tensor.dtype in NUMPY_TYPE:
        dtype = NUMPY_TYPE[tensor.dtype]
        remaining = tensor.size
        block = np.empty(min(CHUNK_ELEMENTS, max(remaining, 1)), dtype)
        with Path(tensor.path).open("rb", buffering=0) as file:
            file.seek(tensor.offset or 0)
            while remaining:
                part = block[: min(remaining, block.size)]
                _fill(file, part, tensor)
                remaining -= part.size
                yield part
        return
    flat = np.asarray(tensor.numpy()).reshape(-1)
    for start in range(0, max(flat.size, 1), CHUNK_ELEMENTS):
        yield flat[start : start + CHUNK_ELEMENTS]


def _fill(file: FileIO, array: np.ndarray, tensor: ir.ExternalTensor) -> None:
    view = array.view(np.uint8).data
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError(f"{tensor.path}: ends inside the tensor {tensor.name}")
        view = view[count:]


class StreamedTensor(ir.TensorProtocol):
    """A constant that is made from another, chunk by chunk, each time its bytes are needed."""

    def __init__(self, source: ir.TensorProtocol, name: str, dtype: ir.DataType) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = ir.Shape(source.shape.numpy())
        self.doc_string = None
        self.raw = source
        self.metadata_props = {}
        self.meta = {}
        self._source = source

    @property
    def size(self) -> int:
        return math.prod(int(d) for d in self.shape.numpy())

    @property
    def nbytes(self) -> int:
        return self.size * int(NUMPY_TYPE[self.dtype].itemsize)

    def chunks(self) -> Iterator[np.ndarray]:
        """The converted elements in order, flat; an array is valid until the next one is asked for."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        flat = np.empty(self.size, NUMPY_TYPE[self.dtype])
        start = 0
        for chunk in self.chunks():
            flat[start : start + chunk.size] = chunk
            start += chunk.size
        return flat.reshape(tuple(int(d) for d in self.shape.numpy()))

    def __array__(self, dtype: Any = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.numpy().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def tobytes(self) -> bytes:
        return b"".join(chunk.tobytes() for chunk in self.chunks())

    def tofile(self, file: Any) -> None:
        for chunk in self.chunks():
            file.write(chunk.view(np.uint8).data)


class ConvertedTensor(StreamedTensor):
    """``source`` rounded to ``dtype`` (fp16 or bf16), to nearest even.

    Values beyond the type's range become infinite, or its largest value when ``clip`` is set;
    either way they are counted in ``ledger``.
    """

    def __init__(
        self,
        source: ir.TensorProtocol,
        name: str,
        dtype: ir.DataType,
        ledger: ConversionLedger,
        *,
        clip: bool,
    ) -> None:
        super().__init__(source, name, dtype)
        self._ledger = ledger
        self._clip = clip

    def chunks(self) -> Iterator[np.ndarray]:
        limit, normal = _OVERFLOWS_FROM[self.dtype], _SMALLEST_NORMAL[self.dtype]
        overflowed = subnormal = not_finite = elements = 0
        largest = np.uint32(0)
        magnitude = np.empty(CHUNK_ELEMENTS, np.uint32)
        rounded = np.empty(CHUNK_ELEMENTS, NUMPY_TYPE[self.dtype])
        for block in stream(self._source):
            # Magnitudes as integers: fp32 values without their sign order like their bit patterns.
            bits = np.bitwise_and(block.view(np.uint32), _MAGNITUDE, out=magnitude[: block.size])
            peak = bits.max(initial=0)
            elements += block.size
            if peak >= _INFINITY:
                not_finite += int(np.count_nonzero(bits >= _INFINITY))
                peak = bits[bits < _INFINITY].max(initial=0)
            if peak >= limit:
                overflowed += int(np.count_nonzero((bits >= limit) & (bits < _INFINITY)))
                if self._clip:
                    block = np.clip(block, -_MAX[self.dtype], _MAX[self.dtype])
            largest = max(largest, peak)
            if bits.min(initial=_INFINITY) < normal:
                subnormal += int(np.count_nonzero(bits < normal)) - int(np.count_nonzero(bits == 0))
            out = rounded[: block.size]
            with np.errstate(over="ignore"):
                out[...] = block
            yield out
        self._ledger.record(
            TensorLoss(
                self.name or "",
                self.dtype.name.lower(),
                elements,
                overflowed,
                subnormal,
                not_finite,
                float(np.uint32(largest).view(np.float32)),
            )
        )


def writer_threads() -> int:
    """Threads that convert and write at once; more than four gain nothing on one disk."""
    return max(1, min(4, len(os.sched_getaffinity(0))))
