"""Sums of products: MatMul, Gemm and Einsum.

Operands of a narrow type are multiplied exactly in fp32, summed in fp32 and rounded once, which is
what tensor cores do; the order of the sum is BLAS's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from verify.kernels.rounding import Array, round_in_place
from verify.kernels.tensor import COMPUTED_IN_FP32, Call, Index, Kernel, Tensor, part, rounded

_TILE: Final = 1 << 20
"""Elements of a result that one BLAS call computes: enough for its full speed."""
_ROWS: Final = 256


def multiply(
    call: Call, a: Tensor, b: Tensor, finish: Callable[[Array, slice], None] | None = None
) -> Tensor:
    """``a @ b`` as ``numpy.matmul`` defines it; ``finish(rows, at)`` may edit a tile before rounding."""
    if a.dtype not in COMPUTED_IN_FP32:
        return Tensor(np.asarray(np.matmul(a.array, b.array)), a.dtype)
    left = a.array[None, :] if a.array.ndim == 1 else a.array
    right = b.array[:, None] if b.array.ndim == 1 else b.array
    out = _tiles(call, left, right, a, finish)
    if a.array.ndim == 1:
        out = out.reshape(*out.shape[:-2], out.shape[-1])
    if b.array.ndim == 1:
        out = out.reshape(out.shape[:-1])
    return Tensor(out, a.dtype)


def _tiles(
    call: Call, left: Array, right: Array, like: Tensor, finish: Callable[[Array, slice], None] | None
) -> Array:
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*batch, left.shape[-2], right.shape[-1])
    out = np.empty(shape, np.float32)
    if right.ndim == 2 and left.ndim > 2:
        # One weight for every batch entry: one tall product.
        left = left.reshape(1, -1, left.shape[-1])
    tall = out.reshape(*(left.shape[:-2] if right.ndim == 2 else batch), -1, shape[-1])
    rows = max(_ROWS, _TILE // max(1, shape[-1]))

    def run(job: tuple[tuple[int, ...], slice]) -> None:
        index, at = job
        job_index: Index = (*index, at)
        tile = tall[job_index]
        np.matmul(part(left, job_index, tall.ndim), part(right, index, tall.ndim), out=tile)
        if finish is not None:
            finish(tile, at)
        round_in_place(tile, like.dtype)

    call.workers.each(
        run,
        (
            (index, slice(start, start + rows))
            for index in np.ndindex(tall.shape[:-2])
            for start in range(0, tall.shape[-2], rows)
        ),
    )
    return out


def _gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """``alpha * a @ b + beta * c``, rounded once: the bias is added in the product's epilogue."""
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)

    def finish(tile: Array, at: slice) -> None:
        if alpha != 1:
            tile *= np.float32(alpha)
        if c is not None:
            bias = part(c.array, (at,), 2)
            tile += bias if beta == 1 else np.float32(beta) * bias

    left = a.array.T if call.get("transA", 0) else a.array
    right = b.array.T if call.get("transB", 0) else b.array
    if a.dtype in COMPUTED_IN_FP32:
        return multiply(call, a.with_array(left), b.with_array(right), finish)
    product = alpha * (left @ right) + (0 if c is None else beta * c.array)
    return Tensor(np.asarray(product, a.array.dtype), a.dtype)


def _einsum(call: Call, *operands: Tensor) -> Tensor:
    arrays: list[Any] = [operand.array for operand in operands]
    return rounded(np.einsum(call.attributes["equation"], *arrays, optimize=True), operands[0].dtype)


PRODUCTS: Final[dict[str, Kernel]] = {"Einsum": _einsum, "Gemm": _gemm, "MatMul": multiply}
