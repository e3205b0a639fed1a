"""Rounding fp32 arrays to the values of a narrower float type, to nearest, ties to even.

Values of fp16, bf16 and E4M3 are exact in fp32, so the evaluator holds them in fp32 arrays and
rounds in place: a rounding then costs six passes over a block in the cache.  numpy's own cast to
fp16 takes 120 ns for each value that underflows, and softmax yields millions of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]

BLOCK: Final = 1 << 16
"""Elements per block: 256 KiB in fp32, so that a block and its scratch stay in a core's L2 cache."""

E4M3_MAX: Final = 448.0
"""The largest finite E4M3 value; quantization saturates there."""

_EXPONENT: Final = np.uint32(0x7F800000)
_BIAS: Final = 127


@dataclass(frozen=True, slots=True)
class _Grid:
    """A float type as a subset of fp32: bits dropped from the significand, least normal exponent.

    From ``2**limit`` on the type overflows, or the arithmetic below would; such blocks take
    ``cast``, the library's conversion.
    """

    dropped: int
    least: int
    limit: int
    cast: type[Any]

    @property
    def floor(self) -> np.uint32:
        return np.uint32((self.least + _BIAS) << 23)

    @property
    def ceiling(self) -> np.uint32:
        return np.uint32((self.limit + _BIAS) << 23)

    @property
    def lift(self) -> np.uint32:
        """Turns the exponent bits of x into the bits of 1.5 * 2**(exponent + dropped)."""
        return np.uint32(self.dropped << 23 | 1 << 22)


_GRIDS: Final = {
    ir.DataType.FLOAT16: _Grid(13, -14, 15, np.float16),
    ir.DataType.BFLOAT16: _Grid(16, -126, 111, ml_dtypes.bfloat16),
    ir.DataType.FLOAT8E4M3FN: _Grid(20, -6, 8, ml_dtypes.float8_e4m3fn),
}

NARROW: Final = frozenset(_GRIDS)
"""The types that are held in fp32 arrays."""


def round_in_place(array: Array, dtype: ir.DataType) -> None:
    """Round a C-contiguous fp32 ``array`` to the values of ``dtype``; fp32 itself is left alone.

    Overflow gives infinity in fp16 and bf16, as on the hardware, and NaN in E4M3, which has no
    infinity (see ``saturate``).  NaN stays NaN.  A zero's sign is not kept.
    """
    grid = _GRIDS.get(dtype)
    if grid is None:
        return
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, BLOCK):
            _round_block(flat[start : start + BLOCK], grid)


def _round_block(block: Array, grid: _Grid) -> None:
    bits = block.view(np.uint32) & _EXPONENT
    if bits.max() >= grid.ceiling:
        block[...] = block.astype(grid.cast)
        return
    # Near 1.5 * 2**(exponent + dropped) the spacing of fp32 is that of the narrow type near x, so the
    # addition rounds as wanted and the subtraction is exact.  Below the least normal exponent the
    # spacing of subnormals stays that of the least exponent.
    np.maximum(bits, grid.floor, out=bits)
    bits += grid.lift
    magic = bits.view(np.float32)
    block += magic
    block -= magic


def saturate(array: Array) -> None:
    """Clamp ``array`` to E4M3's finite range in place, as quantization does; NaN stays NaN."""
    np.clip(array, -E4M3_MAX, E4M3_MAX, out=array)
