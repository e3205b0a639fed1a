"""Quantizes linears to fp8 (E4M3) by pairs of QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.reading import constant, is_op, origin
from engine_builder.graph.structures import Linear
from engine_builder.graph.weights import NUMPY_TYPE, ConvertedTensor, StreamedTensor, stream

E4M3 = ir.DataType.FLOAT8E4M3FN
E4M3_MAX = 448.0
"""The largest finite E4M3 value (OCP 8-bit floating point specification)."""


@dataclass(frozen=True)
class LinearScale:
    """Calibrated ranges of one linear: the largest magnitude of its input, and of its weight.

    ``weight_amax`` holds one number for the whole weight or one per output channel.
    """

    activation_amax: float
    weight_amax: tuple[float, ...]


class InsertQdqPass(ir.passes.InPlacePass):
    """Puts Q/DQ on both operands of each linear in ``scales``, and on nothing else.

    Activations have one scale, weights one scale or one per output channel; the zero point is zero.
    A scale has the type of the tensor it scales: an fp32 scale on an fp16 activation makes TensorRT
    compute the product's output in fp32.  Weights are stored in E4M3, quantized from their fp32
    source by the rounded scale.  Linears that read one value share its quantization.

    Args:
        linears: The linears to quantize, found in this model.
        scales: Ranges by linear name.
        trunk: Type of the activations: FLOAT16 or BFLOAT16.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, linears: tuple[Linear, ...], scales: Mapping[str, LinearScale], trunk: ir.DataType
    ) -> None:
        super().__init__()
        self._linears = linears
        self._scales = scales
        self._trunk = trunk

    def requires(self, model: ir.Model) -> None:
        """Every linear has a usable range, and the graph can spell E4M3."""
        if model.graph.opset_imports.get("", 0) < 19:
            raise ConversionError("Q/DQ in E4M3 needs opset 19 or later; the graph must be upgraded first")
        for linear in self._linears:
            scale = self._scales.get(linear.name)
            if scale is None:
                raise ConversionError("no scale is known for this linear", where=f"node {linear.name}")
            if len(scale.weight_amax) not in (1, linear.out_features):
                raise ConversionError(
                    f"{len(scale.weight_amax)} weight ranges for {linear.out_features} output channels",
                    where=f"node {linear.name}",
                )
            for amax in (scale.activation_amax, *scale.weight_amax):
                if not (np.isfinite(amax) and amax > 0):
                    raise ConversionError(
                        f"the range {amax} is not a finite number > 0", where=f"node {linear.name}"
                    )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        activations: dict[int, float] = {}
        for linear in self._linears:
            value = linear.node.inputs[1 - linear.weight_input]
            assert value is not None
            amax = self._scales[linear.name].activation_amax
            activations[id(value)] = max(amax, activations.get(id(value), 0.0))
        quantized: dict[int, ir.Value] = {}
        weights: dict[tuple[int, tuple[float, ...]], ir.Value] = {}
        zero = _initializer(graph, "e4m3_zero", np.zeros((), ml_dtypes.float8_e4m3fn))
        for linear in self._linears:
            node, side = linear.node, linear.weight_input
            value = node.inputs[1 - side]
            assert value is not None
            if value.dtype != self._trunk:
                raise ConversionError(
                    f"the activation {value.name} is {value.dtype}, not the trunk type",
                    where=f"node {node.name}",
                )
            if id(value) not in quantized:
                quantized[id(value)] = self._activation(graph, node, value, activations[id(value)], zero)
            node.replace_input_with(1 - side, quantized[id(value)])
            ranges = self._scales[linear.name].weight_amax
            key = (id(linear.weight), ranges)
            if key not in weights:
                weights[key] = self._weight(graph, linear, ranges, zero)
            self._read_weight(linear, weights[key])
        return ir.passes.PassResult(model, bool(self._linears))

    def _scale(self, amax: np.ndarray) -> np.ndarray:
        """amax / 448 in the trunk type, rounded up where rounding down would push amax past 448.

        A scale that underflows the type is raised to its smallest normal number.
        """
        target = NUMPY_TYPE[self._trunk]
        exact = np.asarray(amax, np.float64) / E4M3_MAX
        normal = float(np.finfo(np.float16).tiny) if self._trunk == ir.DataType.FLOAT16 else 2.0**-126
        scale = np.maximum(exact, normal).astype(target)
        short = scale.astype(np.float64) < exact
        up = np.nextafter(scale, np.asarray(np.inf, target))
        return np.where(short, up, scale)

    def _activation(
        self, graph: ir.Graph, node: ir.Node, value: ir.Value, amax: float, zero: ir.Value
    ) -> ir.Value:
        scale = _initializer(graph, f"{value.name}__scale", self._scale(np.asarray(amax)))
        q = _node("QuantizeLinear", [value, scale, zero], f"{value.name}__q", E4M3, value.shape)
        dq = _node(
            "DequantizeLinear", [q.outputs[0], scale, zero], f"{value.name}__dq", self._trunk, value.shape
        )
        producer = value.producer()
        if producer is None:
            graph.insert_before(node, [q, dq])
        else:
            graph.insert_after(producer, [q, dq])
        return dq.outputs[0]

    def _weight(self, graph: ir.Graph, linear: Linear, amax: tuple[float, ...], zero: ir.Value) -> ir.Value:
        weight = linear.weight
        source = weight.const_value if weight.const_value is not None else constant(weight)
        if source is None:
            raise ConversionError(f"the weight {weight.name} has no value", where=f"node {linear.name}")
        if isinstance(source, ConvertedTensor):
            source = source.raw
        scale = self._scale(np.asarray(amax if len(amax) > 1 else amax[0]))
        name = f"{weight.name}__fp8"
        tensor = QuantizedTensor(source, name, scale.astype(np.float32), linear.weight_axis_out)
        stored = ir.Value(name=name, type=ir.TensorType(E4M3), shape=weight.shape, const_value=tensor)
        graph.register_initializer(stored)
        scale_value = _initializer(graph, f"{weight.name}__scale", scale)
        attributes = {"axis": linear.weight_axis_out} if scale.ndim else {}
        inputs = [stored, scale_value, zero] if not scale.ndim else [stored, scale_value]
        dq = _node("DequantizeLinear", inputs, f"{weight.name}__dq", self._trunk, weight.shape, attributes)
        graph.insert_before(graph[0], dq)
        return dq.outputs[0]

    def _read_weight(self, linear: Linear, value: ir.Value) -> None:
        """Makes the linear read ``value`` for its weight, through a Transpose where there is one."""
        node, side = linear.node, linear.weight_input
        operand = node.inputs[side]
        assert operand is not None
        turned = origin(operand).producer()
        if turned is not None and is_op(turned, "Transpose"):
            copy = ir.node(
                "Transpose",
                [value],
                attributes=dict(turned.attributes),
                name=f"{value.name}__transposed",
            )
            copy.outputs[0].type = ir.TensorType(self._trunk)
            copy.outputs[0].shape = operand.shape
            assert node.graph is not None
            node.graph.insert_before(node, copy)
            value = copy.outputs[0]
        node.replace_input_with(side, value)


class QuantizedTensor(StreamedTensor):
    """A weight matrix divided by its scale and rounded to E4M3, saturating at +-448."""

    def __init__(self, source: ir.TensorProtocol, name: str, scale: np.ndarray, axis: int) -> None:
        super().__init__(source, name, E4M3)
        self._scale = scale
        self._axis = axis

    def chunks(self) -> Iterator[np.ndarray]:
        columns = int(self.shape.numpy()[1])
        start = 0
        for block in stream(self._source):
            scale: np.ndarray = self._scale
            if scale.ndim:
                index = np.arange(start, start + block.size)
                scale = scale[index % columns if self._axis == 1 else index // columns]
            start += block.size
            yield np.clip(block / scale, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)


def _node(
    op: str,
    inputs: list[ir.Value],
    name: str,
    dtype: ir.DataType,
    shape: ir.Shape | None,
    attributes: Mapping[str, int] | None = None,
) -> ir.Node:
    return ir.node(
        op,
        inputs,
        attributes=dict(attributes or {}),
        outputs=[ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)],
        name=name,
    )


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    graph.register_initializer(value)
    return value
