"""Operators that move, make or measure tensors without arithmetic; most results are views."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx_ir as ir

from verify.kernels.tensor import Call, Kernel, Tensor, rounded


def _integers(operand: Tensor | None) -> list[int] | None:
    return None if operand is None else [int(n) for n in operand.array.reshape(-1)]


def _given(call: Call, name: str, operand: Tensor | None) -> list[int] | None:
    """Integers that older opsets have as an attribute and newer ones as an operand."""
    return _integers(operand) if operand is not None else call.get(name)


def _int64(values: Any) -> Tensor:
    return Tensor(np.asarray(values, np.int64), ir.DataType.INT64)


def _identity(call: Call, x: Tensor) -> Tensor:
    return x


def _constant(call: Call) -> Tensor:
    for name, value in call.attributes.items():
        if name == "value":
            return Tensor.from_numpy(value.numpy())
        if name in ("value_int", "value_ints"):
            return _int64(value)
        if name in ("value_float", "value_floats"):
            return Tensor(np.asarray(value, np.float32), ir.DataType.FLOAT)
    raise ValueError("the constant has no numeric value")


def _constant_of_shape(call: Call, shape: Tensor) -> Tensor:
    value = call.get("value")
    fill = (
        Tensor(np.zeros(1, np.float32), ir.DataType.FLOAT)
        if value is None
        else Tensor.from_numpy(value.numpy())
    )
    return fill.with_array(np.full(_integers(shape) or (), fill.array.reshape(-1)[0]))


def _shape(call: Call, x: Tensor) -> Tensor:
    return _int64(x.array.shape[call.get("start", 0) : call.get("end")])


def _size(call: Call, x: Tensor) -> Tensor:
    return _int64(x.array.size)


def _reshape(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _integers(shape) or []
    if not call.get("allowzero", 0):
        sizes = [x.array.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.with_array(x.array.reshape(sizes))


def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.get("axis", 1)
    head = int(np.prod(x.array.shape[:axis], dtype=np.int64))
    return x.with_array(x.array.reshape(head, -1))


def _squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _given(call, "axes", axes)
    return x.with_array(np.squeeze(x.array, None if chosen is None else tuple(chosen)))


def _unsqueeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.with_array(np.expand_dims(x.array, tuple(_given(call, "axes", axes) or ())))


def _transpose(call: Call, x: Tensor) -> Tensor:
    return x.with_array(np.transpose(x.array, call.get("perm")))


def _concat(call: Call, *operands: Tensor) -> Tensor:
    return operands[0].with_array(np.concatenate([x.array for x in operands], call.attributes["axis"]))


def _split(call: Call, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = call.get("axis", 0)
    parts = _given(call, "split", sizes)
    if parts is None:
        # The last part is the smaller one when the axis does not divide evenly.
        step = -(-x.array.shape[axis] // call.outputs)
        cuts = [step * n for n in range(1, call.outputs)]
    else:
        if sum(parts) != x.array.shape[axis]:
            raise ValueError(f"parts of {parts} do not make up {x.array.shape[axis]}")
        cuts = np.cumsum(parts[:-1]).tolist()
    return tuple(x.with_array(piece) for piece in np.split(x.array, cuts, axis))


def _slice(
    call: Call,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    begin, stop = _integers(starts) or [], _integers(ends) or []
    chosen = _integers(axes) or list(range(len(begin)))
    stride = _integers(steps) or [1] * len(begin)
    index: list[slice] = [slice(None)] * x.array.ndim
    for axis, low, high, step in zip(chosen, begin, stop, stride, strict=True):
        size = x.array.shape[axis]
        # Backwards, an end before the first element means that the first is included.
        end = None if step < 0 and high < -size else high
        index[axis] = slice(low, end, step)
    return x.with_array(x.array[tuple(index)])


def _gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.get("axis", 0)
    return x.with_array(np.take(x.array, indices.array, axis, mode="raise"))


def _expand(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    target = np.broadcast_shapes(x.array.shape, tuple(_integers(shape) or ()))
    return x.with_array(np.broadcast_to(x.array, target))


def _tile(call: Call, x: Tensor, repeats: Tensor) -> Tensor:
    return x.with_array(np.tile(x.array, _integers(repeats) or ()))


def _range(call: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    first, last, step = (operand.array.reshape(()) for operand in (start, limit, delta))
    count = max(0, int(np.ceil((last - first) / step)))
    return rounded(np.arange(count).astype(first.dtype) * step + first, start.dtype)


def _pad(
    call: Call, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    amounts = _integers(pads) or []
    chosen = _integers(axes) or list(range(x.array.ndim))
    widths = [(0, 0)] * x.array.ndim
    for position, axis in enumerate(chosen):
        widths[axis] = (amounts[position], amounts[position + len(chosen)])
    # A negative amount crops.
    crop = tuple(slice(max(0, -a), n - max(0, -b)) for (a, b), n in zip(widths, x.array.shape, strict=True))
    grow = [(max(0, a), max(0, b)) for a, b in widths]
    array = x.array[crop]
    mode = call.get("mode", "constant")
    if mode == "constant":
        fill = 0 if value is None else value.array.item()
        return x.with_array(np.pad(array, grow, constant_values=fill))
    padding: Any = np.pad
    return x.with_array(padding(array, grow, mode))


LAYOUT: Final[dict[str, Kernel]] = {
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Identity": _identity,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
