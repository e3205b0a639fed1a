"""A graph to measure activations with: the weights of its linears are inputs, and probes read activations.

ModelOpt loads the model it calibrates whole, writes it again and lets onnxruntime load that: three
times 5.8 GB for the medium model.  With its large weights declared as inputs the graph is a few
megabytes; the weights are then given at each run straight from the mapped source files, where
nothing can change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from engine_builder.errors import ResourceError
from engine_builder.graph.structures import Linear
from engine_builder.graph.weights import NUMPY_TYPE, stream
from engine_builder.precision.convert import normalizing_passes

GRAPH: Final = "graph.onnx"
WEIGHTS: Final = "weights.bin"

MAX_IR_VERSION: Final = 11
"""The newest that onnxruntime 1.24 reads; nothing newer is in the graph once it is normalized."""

_INPUT_FROM: Final = 16 << 10
"""Bytes; smaller weights stay in the graph."""

_PROBE: Final = "calibration_probe_"


@dataclass(frozen=True)
class MappedWeight:
    """A weight that lies in ``path`` from ``offset`` bytes on, little-endian and row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int

    def array(self) -> npt.NDArray[np.generic]:
        """The weight as a read-only map of its file; its pages are read when they are used."""
        dtype = NUMPY_TYPE[ir.DataType[self.dtype]]
        return np.memmap(self.path, dtype, mode="r", offset=self.offset, shape=self.shape)


@dataclass(frozen=True)
class Skeleton:
    """The graph on disk, the weights to run it with, its probes and the values that these read."""

    graph: Path
    weights: tuple[MappedWeight, ...]
    probes: tuple[str, ...]
    activations: tuple[str, ...]


def normalize(model: ir.Model) -> None:
    """The form in which a conversion finds linears: sorted, inlined, constants as initializers."""
    for graph_pass in normalizing_passes():
        graph_pass(model)


def write_skeleton(model: ir.Model, linears: Sequence[Linear], folder: Path) -> Skeleton:
    """Writes the skeleton of a normalized ``model`` into ``folder``; ``model`` itself is consumed.

    A probe is a Shape node: it reads one linear's activation, costs nothing to run, and its output
    is an integer that no calibrator looks at.  Raises ResourceError when the folder cannot hold it.
    """
    graph = model.graph
    activations = {linear.activation.name or "": linear.activation for linear in linears}
    try:
        mapped = _release(graph, folder / WEIGHTS)
        probes = [_probe(graph, value, index) for index, value in enumerate(activations.values())]
        model.ir_version = min(model.ir_version or MAX_IR_VERSION, MAX_IR_VERSION)
        path = folder / GRAPH
        ir.save(model, path)
    except OSError as error:
        raise ResourceError(
            f"cannot write the calibration graph: {error.strerror or error}",
            where=str(folder),
            hint="free space there, or set TMPDIR to another folder",
        ) from error
    return Skeleton(path, mapped, tuple(probes), tuple(activations))


def _release(graph: ir.Graph, spill: Path) -> tuple[MappedWeight, ...]:
    """Makes large initializers inputs, and loads the small ones.

    Weights that do not lie in a file as they are get written to ``spill``.
    """
    mapped: list[MappedWeight] = []
    with spill.open("wb") as file:
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if tensor is None:
                continue
            if tensor.dtype not in NUMPY_TYPE or tensor.nbytes < _INPUT_FROM:
                value.const_value = ir.tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=name)
                continue
            if isinstance(tensor, ir.ExternalTensor):
                path, offset = str(Path(tensor.path).absolute()), tensor.offset or 0
            else:
                path, offset = str(spill.absolute()), file.tell()
                for block in stream(tensor):
                    file.write(block.tobytes())
            shape = tuple(int(size) for size in tensor.shape.numpy())
            mapped.append(MappedWeight(name, tensor.dtype.name, shape, path, offset))
            del graph.initializers[name]
            value.const_value = None
            value.type = ir.TensorType(tensor.dtype)
            value.shape = ir.Shape(shape)
            if not value.is_graph_input():
                graph.inputs.append(value)
    return tuple(mapped)


def _probe(graph: ir.Graph, value: ir.Value, index: int) -> str:
    if value.type is None:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    name = f"{_PROBE}{index}"
    node = ir.node("Shape", [value], name=name, outputs=[ir.Value(name=name)])
    graph.append(node)
    return name
