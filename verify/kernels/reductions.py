"""Softmax, normalizations and reductions: summed in fp32, rounded once, as TensorRT's kernels do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from verify.kernels.rounding import BLOCK, Array, round_in_place
from verify.kernels.tensor import (
    COMPUTED_IN_FP32,
    Call,
    Kernel,
    Tensor,
    UnsupportedError,
    rounded,
)


def _over_rows(call: Call, x: Tensor, function: Callable[[Array], Array], axis: int = -1) -> Tensor:
    """``function`` of blocks of whole rows along ``axis``, rounded to x's type."""
    if x.dtype not in COMPUTED_IN_FP32:
        raise UnsupportedError(f"no {call.op_type} of {x.dtype.name.lower()}")
    array = np.moveaxis(x.array, axis, -1)
    rows = array.reshape(-1, array.shape[-1])
    out = np.empty(rows.shape, np.float32)

    def run(at: slice) -> None:
        out[at] = function(rows[at])
        round_in_place(out[at], x.dtype)

    step = max(1, BLOCK // max(1, rows.shape[1]))
    call.workers.each(run, (slice(start, start + step) for start in range(0, len(rows), step)))
    return x.with_array(np.moveaxis(out.reshape(array.shape), -1, axis))


def softmax(x: Array) -> Array:
    """Softmax along the last axis in fp32."""
    shifted: Array = x - x.max(axis=-1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=-1, keepdims=True)
    return shifted


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _along_axis(function: Callable[[Array], Array], call: Call, x: Tensor) -> Tensor:
    return _over_rows(call, x, function, call.get("axis", -1))


def _normalize(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None, *, centred: bool) -> Tensor:
    axis = call.get("axis", -1) % x.array.ndim
    epsilon = np.float32(call.get("epsilon", 1e-5))
    shape = x.array.shape
    gain = np.broadcast_to(scale.array, shape[axis:]).reshape(-1)
    shift = None if bias is None else np.broadcast_to(bias.array, shape[axis:]).reshape(-1)

    def run(rows: Array) -> Array:
        if centred:
            rows = rows - rows.mean(axis=-1, keepdims=True)
        power = np.square(rows).mean(axis=-1, keepdims=True)
        result: Array = rows * (1 / np.sqrt(power + epsilon)) * gain
        return result if shift is None else result + shift

    flat = _over_rows(call, x.with_array(x.array.reshape(*shape[:axis], -1)), run)
    return flat.with_array(flat.array.reshape(shape))


def _rms_normalization(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    """fp32 throughout, where the standard's own decomposition rounds before the gain as well."""
    return _normalize(call, x, scale, None, centred=False)


def _layer_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if call.outputs > 1:
        raise UnsupportedError("LayerNormalization's mean and deviation outputs have no TensorRT form")
    return _normalize(call, x, scale, bias, centred=True)


def _reduce(function: Callable[..., Any], call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = call.get("axes") if axes is None else axes.array.tolist()
    if not chosen and call.get("noop_with_empty_axes", 0):
        return x
    keep = bool(call.get("keepdims", 1))
    array = function(x.array, axis=tuple(chosen) if chosen else None, keepdims=keep)
    return rounded(np.asarray(array, x.array.dtype), x.dtype)


def _sum_square(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    return np.square(x).sum(axis=axis, keepdims=keepdims)


def _l1(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    return np.abs(x).sum(axis=axis, keepdims=keepdims)


def _l2(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    return np.sqrt(_sum_square(x, axis, keepdims))


_REDUCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceMax": np.max,
    "ReduceMean": np.mean,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
    "ReduceSumSquare": _sum_square,
}

REDUCTIONS: Final[dict[str, Kernel]] = {
    **{name: partial(_reduce, function) for name, function in _REDUCTIONS.items()},
    "LayerNormalization": _layer_normalization,
    "LogSoftmax": partial(_along_axis, _log_softmax),
    "RMSNormalization": _rms_normalization,
    "Softmax": partial(_along_axis, softmax),
}
