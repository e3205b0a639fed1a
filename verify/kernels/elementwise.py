"""Element by element: arithmetic, comparisons, selection and conversion between types.

Arithmetic of the narrow types is done in fp32 and rounded once.  For + - * / and the square root of
two fp16 or bf16 values that equals the hardware's own correctly rounded result (fp32 has more than
twice their significand and two bits); for the transcendental functions it is what the hardware's
fp32 function units give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from verify.kernels.rounding import BLOCK, NARROW, Array, round_in_place, saturate
from verify.kernels.tensor import (
    COMPUTED_IN_FP32,
    Call,
    Kernel,
    Tensor,
    UnsupportedError,
    blocks,
    part,
    rounded,
)

Function = Callable[..., Any]


def apply(call: Call, function: Function, dtype: ir.DataType, *arrays: Array) -> Tensor:
    """``function(*arrays)`` with broadcasting, block by block, rounded to ``dtype``."""
    if dtype not in COMPUTED_IN_FP32:
        return Tensor(np.asarray(function(*arrays)), dtype)
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    out = np.empty(shape, np.float32)
    if out.size <= BLOCK:
        out[...] = function(*arrays)
        round_in_place(out, dtype)
        return Tensor(out, dtype)

    def run(index: Any) -> None:
        block = out[(*index, ...)]
        parts = [part(array, index, out.ndim) for array in arrays]
        if isinstance(function, np.ufunc):
            function(*parts, out=block)
        else:
            block[...] = function(*parts)
        round_in_place(block, dtype)

    call.workers.each(run, blocks(shape))
    return Tensor(out, dtype)


def _ufunc(function: Function, call: Call, *operands: Tensor) -> Tensor:
    return apply(call, function, operands[0].dtype, *(operand.array for operand in operands))


def _variadic(function: Function, call: Call, *operands: Tensor) -> Tensor:
    return reduce(partial(_ufunc, function, call), operands)


def _predicate(function: Function, call: Call, *operands: Tensor) -> Tensor:
    return Tensor(np.asarray(function(*(operand.array for operand in operands))), ir.DataType.BOOL)


def _divide(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if a.array.dtype.kind in "iu":
        # Towards zero, where numpy's integer division goes towards minus infinity.
        quotient = np.abs(a.array) // np.abs(b.array) * (np.sign(a.array) * np.sign(b.array))
        return Tensor(quotient.astype(a.array.dtype), a.dtype)
    return _ufunc(np.divide, call, a, b)


def _power(call: Call, base: Tensor, exponent: Tensor) -> Tensor:
    if base.dtype in COMPUTED_IN_FP32 and exponent.array.size == 1 and exponent.array.item() == 2:
        shape = np.broadcast_shapes(base.array.shape, exponent.array.shape)
        return apply(call, np.square, base.dtype, base.array.reshape(shape))
    if base.array.dtype.kind in "iu":
        return Tensor(np.power(base.array, exponent.array).astype(base.array.dtype), base.dtype)
    return _ufunc(np.power, call, base, exponent.with_array(exponent.array.astype(base.array.dtype)))


def _sigmoid(x: Array) -> Any:
    return 1 / (1 + np.exp(-x))


def _relu(x: Array) -> Any:
    return np.maximum(x, x.dtype.type(0))


def _clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    result = x
    if low is not None:
        result = _ufunc(np.maximum, call, result, low)
    if high is not None:
        result = _ufunc(np.minimum, call, result, high)
    return result


def _where(call: Call, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return apply(call, np.where, x.dtype, condition.array, x.array, y.array)


def _cast(call: Call, x: Tensor) -> Tensor:
    return convert(call, x, ir.DataType(call.attributes["to"]), saturating=bool(call.get("saturate", 1)))


def _cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    return convert(call, x, like.dtype, saturating=bool(call.get("saturate", 1)))


def convert(call: Call, x: Tensor, to: ir.DataType, *, saturating: bool = True) -> Tensor:
    """``x`` in another type.  Overflow gives infinity, except E4M3's largest value when saturating."""
    if to == x.dtype:
        return x
    if to is ir.DataType.STRING or x.dtype is ir.DataType.STRING:
        raise UnsupportedError("text has no place in an engine")
    if to not in COMPUTED_IN_FP32:
        return Tensor(x.array.astype(to.numpy()), to)
    if to is ir.DataType.FLOAT and x.dtype in NARROW:
        return Tensor(x.array, to)  # exact: the values are held in fp32 already
    if x.dtype not in COMPUTED_IN_FP32:
        # From integers and fp64: the library rounds once; through fp32 it would be twice.
        return rounded(x.array.astype(to.numpy()).astype(np.float32), to)
    if to is ir.DataType.FLOAT8E4M3FN and saturating:
        return apply(call, _saturated, to, x.array)
    return apply(call, np.positive, to, x.array)


def _saturated(x: Array) -> Array:
    copy = np.array(x)
    saturate(copy)
    return copy


_UFUNCS: Final[dict[str, Function]] = {
    "Abs": np.abs,
    "Add": np.add,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Exp": np.exp,
    "Floor": np.floor,
    "Log": np.log,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Reciprocal": np.reciprocal,
    "Relu": _relu,
    "Round": np.rint,
    "Sigmoid": _sigmoid,
    "Sign": np.sign,
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Tanh": np.tanh,
}
_VARIADIC: Final = {"Max": np.maximum, "Min": np.minimum}
_PREDICATES: Final = {
    "And": np.logical_and,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "IsNaN": np.isnan,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
}

ELEMENTWISE: Final[dict[str, Kernel]] = {
    **{name: partial(_ufunc, function) for name, function in _UFUNCS.items()},
    **{name: partial(_variadic, function) for name, function in _VARIADIC.items()},
    **{name: partial(_predicate, function) for name, function in _PREDICATES.items()},
    "Cast": _cast,
    "CastLike": _cast_like,
    "Clip": _clip,
    "Div": _divide,
    "Pow": _power,
    "Where": _where,
}
