"""The largest magnitudes of a linear's weight, exact, read from the source a few megabytes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from engine_builder.errors import SourceModelError
from engine_builder.graph.reading import constant
from engine_builder.graph.structures import Linear
from engine_builder.graph.weights import stream


@dataclass(frozen=True, eq=False)
class WeightAmax:
    """Largest magnitude of a weight matrix: of all of it, and per output channel (out_features,), fp32."""

    tensor: float
    channels: npt.NDArray[np.float32]


def weight_amax(linear: Linear) -> WeightAmax:
    """The magnitudes of ``linear``'s weight.

    Raises SourceModelError for a weight that cannot be read or holds a value that is not finite.
    """
    weight = linear.weight
    tensor = weight.const_value if weight.const_value is not None else constant(weight)
    if tensor is None:
        raise SourceModelError(f"the weight {weight.name} cannot be read", where=f"node {linear.name}")
    channels = _amax_along(tensor, linear.weight_axis_out)
    if not np.isfinite(channels).all():
        raise SourceModelError(
            f"the weight {weight.name} holds values that are not finite", where=f"node {linear.name}"
        )
    return WeightAmax(float(channels.max(initial=0.0)), channels)


def _amax_along(tensor: ir.TensorProtocol, axis: int) -> npt.NDArray[np.float32]:
    """Per index of ``axis`` of a matrix, the largest magnitude; NaN where the matrix holds one."""
    rows, columns = (int(size) for size in tensor.shape.numpy())
    result = np.zeros((rows, columns)[axis], np.float32)
    rest = np.zeros(0, np.float32)
    row = 0
    for block in stream(tensor):
        values = np.concatenate([rest, np.abs(block.astype(np.float32, copy=False))])
        whole = values.size // columns
        matrix = values[: whole * columns].reshape(whole, columns)
        rest = values[whole * columns :]
        if axis == 1:
            np.maximum(result, matrix.max(axis=0, initial=0.0), out=result)
        else:
            result[row : row + whole] = matrix.max(axis=1, initial=0.0)
        row += whole
    return result
