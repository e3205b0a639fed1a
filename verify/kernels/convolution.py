"""Conv and ConvTranspose in any number of dimensions: one matrix product per kernel tap.

The products of all taps are summed in fp32 and rounded once; no unfolded copy of the input is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from verify.kernels.rounding import Array
from verify.kernels.tensor import COMPUTED_IN_FP32, Call, Kernel, Tensor, UnsupportedError, rounded


def _steps(call: Call, rank: int) -> tuple[list[int], list[int]]:
    return list(call.get("strides") or [1] * rank), list(call.get("dilations") or [1] * rank)


def _span(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    return [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]


def _halves(call: Call, total: list[int]) -> tuple[list[int], list[int]]:
    """Padding split to both sides, the odd element at the end for SAME_UPPER, else at the start."""
    upper = call.get("auto_pad") == "SAME_UPPER"
    small, large = [n // 2 for n in total], [n - n // 2 for n in total]
    return (small, large) if upper else (large, small)


def _check(call: Call, x: Tensor) -> None:
    if x.dtype not in COMPUTED_IN_FP32:
        raise UnsupportedError(f"no {call.op_type} of {x.dtype.name.lower()}")


def _bias(out: Array, bias: Tensor | None) -> Array:
    if bias is not None:
        out += bias.array.reshape(-1, *[1] * (out.ndim - 2))
    return out


def _convolve(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check(call, x)
    kernel = weight.array.shape[2:]
    rank = len(kernel)
    strides, dilations = _steps(call, rank)
    span = _span(kernel, dilations)
    size = x.array.shape[2:]
    auto = call.get("auto_pad", "NOTSET")
    pads = list(call.get("pads") or [0] * 2 * rank)
    begin, end = pads[:rank], pads[rank:]
    if auto.startswith("SAME"):
        total = [max(0, (-(-n // s) - 1) * s + k - n) for n, s, k in zip(size, strides, span, strict=True)]
        begin, end = _halves(call, total)
    elif auto == "VALID":
        begin, end = [0] * rank, [0] * rank
    padded = x.array
    if any(begin) or any(end):
        padded = np.pad(padded, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    result = [(n - k) // s + 1 for n, k, s in zip(padded.shape[2:], span, strides, strict=True)]

    groups = call.get("group", 1)
    batch, channels = padded.shape[:2]
    features = weight.array.shape[0]
    taps = weight.array.reshape(groups, features // groups, channels // groups, *kernel)
    source = padded.reshape(batch, groups, channels // groups, *padded.shape[2:])
    out = np.zeros((batch, groups, features // groups, int(np.prod(result))), np.float32)
    for tap in np.ndindex(*kernel):
        window: tuple[Any, ...] = tuple(
            slice(at * d, at * d + (n - 1) * s + 1, s)
            for at, d, n, s in zip(tap, dilations, result, strides, strict=True)
        )
        seen = source[(..., *window)].reshape(batch, groups, channels // groups, -1)
        out += np.matmul(taps[(..., *tap)], seen)
    return rounded(_bias(out.reshape(batch, features, *result), bias), x.dtype)


def _transpose(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check(call, x)
    kernel = weight.array.shape[2:]
    rank = len(kernel)
    strides, dilations = _steps(call, rank)
    span = _span(kernel, dilations)
    size = x.array.shape[2:]
    extra = list(call.get("output_padding") or [0] * rank)
    full = [(n - 1) * s + k + e for n, s, k, e in zip(size, strides, span, extra, strict=True)]
    auto = call.get("auto_pad", "NOTSET")
    pads = list(call.get("pads") or [0] * 2 * rank)
    begin, end = pads[:rank], pads[rank:]
    shape = call.get("output_shape")
    if shape or auto.startswith("SAME"):
        wanted = list(shape)[-rank:] if shape else [n * s for n, s in zip(size, strides, strict=True)]
        begin, end = _halves(call, [max(0, f - w) for f, w in zip(full, wanted, strict=True)])
    elif auto == "VALID":
        begin, end = [0] * rank, [0] * rank

    groups = call.get("group", 1)
    batch, channels = x.array.shape[:2]
    features = weight.array.shape[1] * groups
    taps = weight.array.reshape(groups, channels // groups, features // groups, *kernel)
    source = x.array.reshape(batch, groups, channels // groups, -1)
    out = np.zeros((batch, groups, features // groups, *full), np.float32)
    for tap in np.ndindex(*kernel):
        window: tuple[Any, ...] = tuple(
            slice(at * d, at * d + (n - 1) * s + 1, s)
            for at, d, n, s in zip(tap, dilations, size, strides, strict=True)
        )
        product = np.matmul(np.swapaxes(taps[(..., *tap)], 1, 2), source)
        out[(..., *window)] += product.reshape(batch, groups, features // groups, *size)
    kept: tuple[Any, ...] = tuple(slice(b, n - e) for b, n, e in zip(begin, full, end, strict=True))
    return rounded(_bias(out.reshape(batch, features, *full)[(..., *kept)].copy(), bias), x.dtype)


CONVOLUTIONS: Final[dict[str, Kernel]] = {"Conv": _convolve, "ConvTranspose": _transpose}
