"""Constants converted while they are written, a few megabytes at a time.

A converted model never holds its weights in memory: each tensor keeps a reference to its fp32
source (usually a range of an external data file) and converts chunk by chunk when it is asked for
its bytes.  What rounding did to the values is counted on the way.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

CHUNK_ELEMENTS = 1 << 20
"""Elements converted at a time: 4 MiB of fp32, so that a worker needs about 10 MiB."""

NUMPY_TYPE: dict[ir.DataType, Any] = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    ir.DataType.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
}

_MAX = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.3895313892515355e38}
_SMALLEST_NORMAL = {ir.DataType.FLOAT16: 2.0**-14, ir.DataType.BFLOAT16: 2.0**-126}
# Half way to the next value above the largest: from here on round-to-nearest gives infinity.
_OVERFLOWS_FROM = {ir.DataType.FLOAT16: 65520.0, ir.DataType.BFLOAT16: 3.3961775292304957e38}


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
    a map count as resident memory until the kernel needs them back.
    """
    if isinstance(tensor, ir.ExternalTensor) and tensor.dtype in NUMPY_TYPE:
        dtype = NUMPY_TYPE[tensor.dtype]
        remaining = tensor.size * dtype.itemsize
        with Path(tensor.path).open("rb", buffering=0) as file:
            file.seek(tensor.offset or 0)
            while remaining:
                block = file.read(min(remaining, CHUNK_ELEMENTS * dtype.itemsize))
                if not block:
                    raise OSError(f"{tensor.path}: ends inside the tensor {tensor.name}")
                while len(block) % dtype.itemsize:
                    block += file.read(dtype.itemsize - len(block) % dtype.itemsize)
                remaining -= len(block)
                yield np.frombuffer(block, dtype)
        return
    flat = np.asarray(tensor.numpy()).reshape(-1)
    for start in range(0, max(flat.size, 1), CHUNK_ELEMENTS):
        yield flat[start : start + CHUNK_ELEMENTS]


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
        """The converted elements in order, flat."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        parts = list(self.chunks())
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
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
            file.write(chunk.tobytes())


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
        target = NUMPY_TYPE[self.dtype]
        overflowed = subnormal = not_finite = elements = 0
        largest = 0.0
        for block in stream(self._source):
            magnitude = np.abs(block)
            peak = float(magnitude.max(initial=0.0))
            elements += block.size
            if not np.isfinite(peak):
                finite = np.isfinite(block)
                not_finite += int(block.size - np.count_nonzero(finite))
                peak = float(magnitude[finite].max(initial=0.0))
            if peak >= limit:
                overflowed += int(np.count_nonzero((magnitude >= limit) & np.isfinite(block)))
                if self._clip:
                    block = np.clip(block, -_MAX[self.dtype], _MAX[self.dtype])
            largest = max(largest, peak)
            small = magnitude < normal
            if small.any():
                subnormal += int(np.count_nonzero(small & (magnitude != 0)))
            with np.errstate(over="ignore"):
                yield block.astype(target)
        self._ledger.record(
            TensorLoss(
                self.name or "",
                self.dtype.name.lower(),
                elements,
                overflowed,
                subnormal,
                not_finite,
                largest,
            )
        )


def writer_threads() -> int:
    """Threads that convert and write at once; more than four gain nothing on one disk."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""
