"""The composite Attention operator, computed row block by row block: no score matrix is held.

Its intermediate values are rounded where the standard's decomposition has a tensor: the scaled q
and k, the scores, the masked scores and the probabilities.  Each product and the softmax sum in fp32.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import onnx_ir as ir

from verify.kernels.reductions import softmax
from verify.kernels.rounding import BLOCK, Array, round_in_place
from verify.kernels.tensor import COMPUTED_IN_FP32, Call, Kernel, Tensor, UnsupportedError, part

_KNOWN: Final = frozenset(
    {
        "is_causal",
        "kv_num_heads",
        "q_num_heads",
        "qk_matmul_output_mode",
        "scale",
        "softcap",
        "softmax_precision",
    }
)
"""Attributes that are evaluated, are refused by value, or change nothing: softmax is always fp32."""


def _by_head(array: Array, heads: int | None) -> Array:
    """(batch, heads, rows, head size), from that or from (batch, rows, heads * head size)."""
    if array.ndim == 4:
        return array
    if not heads:
        raise UnsupportedError("Attention with operands of three dimensions needs its head counts")
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)


def _scaled(array: Array, scale: np.float32, dtype: ir.DataType) -> Array:
    result = np.multiply(array, scale, order="C")
    round_in_place(result, dtype)
    return result


def _bias(mask: Tensor | None) -> Array | None:
    if mask is None:
        return None
    if mask.dtype is ir.DataType.BOOL:
        return np.where(mask.array, np.float32(0), np.float32(-np.inf))
    return mask.array


def _attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *more: Tensor | None,
) -> Tensor:
    if unknown := call.attributes.keys() - _KNOWN:
        raise UnsupportedError(f"Attention with {', '.join(sorted(unknown))}")
    if past_key or past_value or any(more) or call.outputs > 1 or call.get("softcap", 0.0):
        raise UnsupportedError("TensorRT's Attention has no past keys, soft cap or score output")
    if q.dtype not in COMPUTED_IN_FP32:
        raise UnsupportedError(f"no Attention of {q.dtype.name.lower()}")
    queries = _by_head(q.array, call.get("q_num_heads"))
    keys, values = (_by_head(operand.array, call.get("kv_num_heads")) for operand in (k, v))
    batch, heads, rows, head_size = queries.shape
    columns = keys.shape[2]
    shared = heads // keys.shape[1]
    root = np.array([math.sqrt(call.get("scale") or 1 / math.sqrt(head_size))], np.float32)
    round_in_place(root, q.dtype)
    keys = _scaled(keys, root[0], q.dtype)
    bias = _bias(mask)
    causal = bool(call.get("is_causal", 0))
    out: Array = np.empty((batch, heads, rows, values.shape[-1]), np.float32)

    def run(job: tuple[int, int, slice]) -> None:
        item, head, at = job
        scores = _scaled(queries[item, head, at], root[0], q.dtype) @ keys[item, head // shared].T
        round_in_place(scores, q.dtype)
        if bias is not None or causal:
            if bias is not None:
                scores += part(bias, (item, head, at), 4)
            if causal:
                later = np.arange(columns) > np.arange(rows)[at, None]
                scores[later] = -np.inf
            round_in_place(scores, q.dtype)
        scores = softmax(scores)
        round_in_place(scores, q.dtype)
        tile = out[item, head, at]
        np.matmul(scores, values[item, head // shared], out=tile)
        round_in_place(tile, q.dtype)

    step = max(16, BLOCK * 4 // max(1, columns))
    call.workers.each(
        run,
        (
            (item, head, slice(start, start + step))
            for item in range(batch)
            for head in range(heads)
            for start in range(0, rows, step)
        ),
    )
    if q.array.ndim == 3:
        out = out.swapaxes(1, 2).reshape(batch, rows, -1)
    return q.with_array(out)


ATTENTION: Final[dict[str, Kernel]] = {"Attention": _attention}
