"""A graph before its weights exist: nodes, and initializers that name where their values come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from engine_builder.sample.spec import INPUT_SHAPES
from engine_builder.sample.weights import Parameter

FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64
BOOL = TensorProto.BOOL
INT64_MAX = np.iinfo(np.int64).max
INT64_MIN = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Initializer:
    """A graph constant: drawn from ``source`` when it is a parameter, else ``source`` itself.

    ``shape`` is the shape written; a ``transposed`` parameter is written as (outputs, inputs).
    """

    name: str
    source: Parameter | NDArray[np.generic]
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the values as written."""
        itemsize = 4 if isinstance(self.source, Parameter) else self.source.dtype.itemsize
        return itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def element_type(self) -> int:
        """The ONNX element type."""
        if isinstance(self.source, Parameter):
            return int(FLOAT)
        return int(helper.np_dtype_to_tensor_dtype(self.source.dtype))


@dataclass(frozen=True)
class GraphDraft:
    """A whole model but for its weights; ``value_info`` gives the types of what the nodes make."""

    nodes: list[NodeProto]
    initializers: list[Initializer]
    value_info: list[ValueInfoProto]
    output: ValueInfoProto
    opset: int
    ir_version: int


def graph_inputs() -> list[ValueInfoProto]:
    """The six float32 inputs of the exported transformer; L is the sequence length."""
    return [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in INPUT_SHAPES.items()]
