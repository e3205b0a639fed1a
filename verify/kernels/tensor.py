"""Values as the evaluator holds them, and how a kernel is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx_ir as ir

from verify.kernels.rounding import BLOCK, NARROW, Array, round_in_place
from verify.kernels.workers import Workers

COMPUTED_IN_FP32: Final = NARROW | {ir.DataType.FLOAT}
"""The types whose arithmetic is done in fp32; others are computed as numpy does."""

_E4M3_VALUES: Final = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array and its declared type; fp16, bf16 and E4M3 values lie in an fp32 array."""

    array: Array
    dtype: ir.DataType

    @classmethod
    def from_numpy(cls, array: Array) -> Tensor:
        """A tensor of the array's own type; raises TypeError for a type that ONNX lacks."""
        dtype = ir.DataType.from_numpy(array.dtype)
        if dtype is ir.DataType.FLOAT8E4M3FN:
            return cls(_E4M3_VALUES[array.view(np.uint8)], dtype)
        if dtype in NARROW:
            return cls(array.astype(np.float32), dtype)
        return cls(array, dtype)

    def to_numpy(self) -> Array:
        """The array in its declared type."""
        if self.dtype not in NARROW:
            return self.array
        return self.array.astype(self.dtype.numpy())

    def with_array(self, array: Array) -> Tensor:
        """A tensor of this type that holds some of its values in another arrangement."""
        return Tensor(array, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a kernel is told besides its operands; ``version`` is the opset of ``ai.onnx``."""

    op_type: str
    version: int
    attributes: Mapping[str, Any]
    outputs: int
    workers: Workers

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


Kernel = Callable[..., Tensor | tuple[Tensor, ...]]
"""Called as ``kernel(call, *operands)``; an operand that was left out is None."""


class UnsupportedError(Exception):
    """The operator is used in a way that no TensorRT engine or no kernel here can compute."""


def rounded(array: Array, dtype: ir.DataType) -> Tensor:
    """A freshly computed array as a tensor of ``dtype``, rounded where that is a narrow float type."""
    if dtype in COMPUTED_IN_FP32:
        array = np.asarray(array, np.float32, order="C")
        round_in_place(array, dtype)
    return Tensor(array, dtype)


def blocks(shape: tuple[int, ...], size: int = BLOCK) -> Iterator[Index]:
    """Indices that cut a C-contiguous array into contiguous blocks of about ``size`` elements."""
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) > size:
        axis += 1
    if not shape or 0 in shape:
        return
    rows = max(1, size // math.prod(shape[axis + 1 :]))
    for lead in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], rows):
            yield (*lead, slice(start, start + rows))


def part(array: Array, index: Index, rank: int) -> Array:
    """What belongs to ``index`` of a result of ``rank`` dimensions that ``array`` is broadcast to."""
    first = rank - array.ndim
    own = [
        (0 if isinstance(at, int) else slice(None)) if array.shape[axis - first] == 1 else at
        for axis, at in enumerate(index)
        if axis >= first
    ]
    return array[(*own, ...)]
