"""QuantizeLinear and DequantizeLinear to and from E4M3.

Quantization divides in fp32, saturates at 448 and rounds once.  The dequantized value is rounded to
its declared type like every other tensor.  The hardware multiplies the E4M3 values themselves and
applies both scales to the fp32 sum; the emulation adds at most 2**-11 (fp16) or 2**-8 (bf16) of
relative error to an operand whose own rounding is 2**-4, so that a verdict here is never the kinder
one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from verify.kernels.elementwise import apply
from verify.kernels.rounding import E4M3_MAX, Array
from verify.kernels.tensor import COMPUTED_IN_FP32, Call, Kernel, Tensor, UnsupportedError, rounded

_INTEGERS: Final = frozenset({ir.DataType.INT8, ir.DataType.UINT8})


def _aligned(call: Call, scale: Array, rank: int) -> Array:
    """The scale shaped to broadcast along ``axis``, or as the scalar that it is."""
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim != 1 or call.get("block_size", 0):
        raise UnsupportedError("scales per block are not evaluated")
    shape = [1] * rank
    shape[call.get("axis", 1)] = -1
    return scale.reshape(shape)


def _checked(scale: Tensor) -> None:
    if not (np.isfinite(scale.array) & (scale.array > 0)).all():
        raise UnsupportedError("a scale is zero, negative or not finite, which TensorRT refuses")


def _offset(zero_point: Tensor | None) -> None:
    if zero_point is not None and zero_point.array.any():
        raise UnsupportedError("a zero point is not zero, which TensorRT takes for zero or refuses")


def _quantize(call: Call, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    _checked(scale)
    _offset(zero_point)
    if zero_point is not None:
        to = zero_point.dtype
    else:
        to = ir.DataType(call.get("output_dtype", 0) or ir.DataType.UINT8)
    factor = _aligned(call, scale.array, x.array.ndim)
    if to is ir.DataType.FLOAT8E4M3FN:

        def to_e4m3(values: Array, by: Array) -> Array:
            quotient = np.divide(values, by)
            result: Array = np.clip(quotient, -E4M3_MAX, E4M3_MAX)
            return result

        return apply(call, to_e4m3, to, x.array, factor)
    if to in _INTEGERS:
        limits = np.iinfo(to.numpy())
        return Tensor(np.rint(x.array / factor).clip(limits.min, limits.max).astype(to.numpy()), to)
    raise UnsupportedError(f"no quantization to {to.name.lower()}")


def _dequantize(call: Call, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    _checked(scale)
    _offset(zero_point)
    if x.dtype is not ir.DataType.FLOAT8E4M3FN and x.dtype not in _INTEGERS:
        raise UnsupportedError(f"no dequantization of {x.dtype.name.lower()}")
    to = ir.DataType(call.get("output_dtype", 0) or scale.dtype)
    if to not in COMPUTED_IN_FP32:
        raise UnsupportedError(f"no dequantization to {to.name.lower()}")
    factor = _aligned(call, scale.array, x.array.ndim)
    if x.dtype in _INTEGERS:
        return rounded(x.array.astype(np.float32) * factor, to)
    return apply(call, np.multiply, to, x.array, factor)


QUANTIZATION: Final[dict[str, Kernel]] = {"DequantizeLinear": _dequantize, "QuantizeLinear": _quantize}
