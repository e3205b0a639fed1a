"""Gives every float value of a graph one type, and casts where producer and consumer disagree."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.naming import Names
from engine_builder.graph.operator_types import is_pinned, output_is_pinned, supports
from engine_builder.graph.reading import is_float, is_op
from engine_builder.graph.weights import NUMPY_TYPE, ConversionLedger, ConvertedTensor, StreamedTensor, stream

FLOAT = ir.DataType.FLOAT
SHORT = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16", FLOAT: "fp32"}

# Operators that read a float tensor of any type without computing with it.
_TYPE_BLIND = ("Shape", "Size", "Cast", "IsNaN", "IsInf")
# Operators whose output type is an attribute's or that exist for fp32 only.
_ALWAYS_FP32 = (
    "Range", "Constant", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike", "Multinomial", "Bernoulli", "If", "Loop", "Scan",
)  # fmt: skip
# Operators for which a scalar beyond the trunk's range is a bound or a fill, such as the lowest float
# where attention is masked: the lowest value of the trunk does the same.  In any other operator it is
# a number to compute with, and the operator stays fp32.
_FILLING = (
    "Add", "Clip", "Concat", "Equal", "Expand", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max",
    "Min", "Pad", "Reshape", "ScatterElements", "ScatterND", "Squeeze", "Sub", "Tile", "Unsqueeze", "Where",
)  # fmt: skip
_LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: float(2**128 - 2**120)}


class AssignTypesPass(ir.passes.InPlacePass):
    """Types a strongly typed network in one go: label the nodes, type the values, cast the edges.

    A node is either fp32 (listed in ``fp32_nodes``) or trunk.  A float value has the type of the
    node that produces it; graph inputs and outputs stay fp32 under their names.  Where a consumer
    needs another type, one Cast per (value, type) is inserted behind the producer.  A constant is
    converted where it is used, and one that is used on both sides exists once in each type.

    Args:
        trunk: FLOAT16 or BFLOAT16.
        fp32_nodes: Nodes that compute in fp32, by identity.
        ledger: Receives what the conversion of each constant did, when the model is written.
        clip: Whether constants beyond the type's range are clipped instead of becoming infinite.
        fills: Constants that are masks: whatever in them is beyond the type's range becomes its largest
            value, and infinities stay.
    """

    version: ClassVar[int] = 2

    def __init__(
        self,
        trunk: ir.DataType,
        fp32_nodes: Collection[ir.Node],
        ledger: ConversionLedger,
        *,
        clip: bool = False,
        fills: Collection[ir.Value] = (),
    ) -> None:
        super().__init__()
        self._fills = {id(value) for value in fills}
        self._trunk = trunk
        self._fp32 = {id(node) for node in fp32_nodes}
        self._ledger = ledger
        self._clip = clip
        self._opset = 17
        self.forced: tuple[str, ...] = ()
        """Nodes that compute in fp32 because their operator has no trunk type at the model's opset."""

    def requires(self, model: ir.Model) -> None:
        """Every value has a type, and floats are fp32: a graph is converted once, from fp32."""
        for node in model.graph.all_nodes():
            for value in node.outputs:
                if value.dtype is None and value.uses():
                    raise ConversionError(
                        f"the type of {value.name} is not known",
                        where=f"node {node.name}",
                        hint="export the model with type annotations (onnx.shape_inference)",
                    )
                if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                    raise ConversionError(
                        f"{value.name} is already {SHORT[value.dtype]}: the source must be an fp32 graph",
                        where=f"node {node.name}",
                        hint="export the model in fp32",
                    )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        self._opset = graph.opset_imports.get("", 17)
        top_level = list(graph)
        self._sort_fills(graph)
        before = {id(v): v.dtype for node in top_level for v in node.outputs}
        for node in top_level:
            label = self._label(node)
            if label == FLOAT:
                continue
            for index, value in enumerate(node.outputs):
                pinned = output_is_pinned(node.op_type, node.domain, self._opset, index)
                if value.dtype == FLOAT and not pinned:
                    value.type = ir.TensorType(label)
            if is_op(node, "Cast") and before[id(node.outputs[0])] == FLOAT:
                node.attributes["to"] = ir.AttrInt64("to", int(label))

        self.forced = tuple(
            node.name or node.op_type
            for node in top_level
            if id(node) not in self._fp32
            and self._is_forced(node)
            and any(is_float(v) for v in (*node.inputs, *node.outputs) if v is not None)
        )
        names = Names(graph)
        casts: dict[tuple[int, ir.DataType], ir.Value] = {}
        constants: dict[tuple[int, ir.DataType], ir.Value] = {}
        initializers = {id(v): v for v in graph.initializers.values() if v.dtype == FLOAT}
        originals = {id(v): v.const_value for v in initializers.values()}
        readers: dict[int, set[ir.DataType]] = {id(v): {FLOAT} for v in graph.outputs}
        wanted: list[tuple[ir.Node, int, ir.Value, ir.DataType]] = []
        for node in top_level:
            label = FLOAT if _decides_on_fp32(node) else self._label(node)
            for owner, index, value in _operands(node):
                if value.dtype not in (FLOAT, self._trunk) or self._is_blind(owner):
                    if id(value) in initializers:
                        readers.setdefault(id(value), set()).add(FLOAT)
                    continue
                want = label
                if owner is not node or is_pinned(owner.op_type, owner.domain, self._opset, index):
                    want = FLOAT
                if id(value) in initializers:
                    readers.setdefault(id(value), set()).add(want)
                wanted.append((owner, index, value, want))

        for owner, index, value, want in wanted:
            if id(value) in initializers:
                if want == FLOAT:
                    continue
                key = (id(value), want)
                if key not in constants:
                    shared = FLOAT in readers[id(value)]
                    constants[key] = self._converted(graph, value, originals[id(value)], want, shared, names)
                if constants[key] is not value:
                    owner.replace_input_with(index, constants[key])
            elif value.dtype != want:
                key = (id(value), want)
                if key not in casts:
                    casts[key] = _cast(graph, value, want, names)
                owner.replace_input_with(index, casts[key])

        restored: dict[int, ir.Value] = {}
        for position, value in enumerate(graph.outputs):
            if value.dtype == self._trunk:
                if id(value) not in restored:
                    existing = casts.get((id(value), FLOAT))
                    restored[id(value)] = _restore_output(graph, value, existing, names)
                graph.outputs[position] = restored[id(value)]
        return ir.passes.PassResult(model, True)

    def _sort_fills(self, graph: ir.Graph) -> None:
        """Tells the scalars beyond the trunk's range that fill from those that are computed with."""
        limit = _LARGEST[self._trunk]
        for value in graph.initializers.values():
            if value.dtype != FLOAT or value.const_value is None or value.const_value.size != 1:
                continue
            if not abs(float(np.asarray(value.const_value.numpy()).reshape(-1)[0])) > limit:
                continue
            self._fills.add(id(value))
            self._fp32.update(id(node) for node, _ in value.uses() if not is_op(node, *_FILLING))

    def _label(self, node: ir.Node) -> ir.DataType:
        if id(node) in self._fp32 or makes_fp32(node) or self._is_forced(node):
            return FLOAT
        return self._trunk

    def _is_forced(self, node: ir.Node) -> bool:
        return bool(lacks_type(node, self._opset, self._trunk))

    def _is_blind(self, node: ir.Node) -> bool:
        return is_op(node, *_TYPE_BLIND) and supports(node.op_type, node.domain, self._opset, self._trunk)

    def _converted(
        self,
        graph: ir.Graph,
        value: ir.Value,
        tensor: ir.TensorProtocol | None,
        dtype: ir.DataType,
        shared: bool,
        names: Names,
    ) -> ir.Value:
        if tensor is None:
            raise ConversionError(f"the constant {value.name} has no value")
        in_place = not shared and not value.is_graph_input()
        name = value.name or "" if in_place else names.fresh(f"{value.name}__{SHORT[dtype]}")
        converted: StreamedTensor
        if id(value) in self._fills:
            converted = _SaturatedTensor(tensor, name, dtype)
        else:
            converted = ConvertedTensor(tensor, name, dtype, self._ledger, clip=self._clip)
        if in_place:
            value.const_value = converted
            value.type = ir.TensorType(dtype)
            return value
        copy = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape, const_value=converted)
        graph.register_initializer(copy)
        return copy


class _SaturatedTensor(StreamedTensor):
    """A mask in the trunk type: finite values stay finite, infinities infinite."""

    def chunks(self) -> Iterator[np.ndarray]:
        limit = _LARGEST[self.dtype]
        for block in stream(self._source):
            finite = np.clip(block, -limit, limit)
            yield np.where(np.isfinite(block), finite, block).astype(NUMPY_TYPE[self.dtype])


def makes_fp32(node: ir.Node) -> bool:
    """Whether the operator's floats are fp32 by an attribute or by the standard, whatever it reads."""
    return is_op(node, *_ALWAYS_FP32)


def lacks_type(node: ir.Node, opset: int, trunk: ir.DataType) -> str:
    """Why a node cannot compute in ``trunk``; empty when it can."""
    if not supports(node.op_type, node.domain, opset, trunk):
        return f"{node.op_type} has no {SHORT[trunk]} form at opset {opset}"
    # A Cast changes a tensor's type, nothing changes a sequence's: these stay what they are.
    if any(not _is_tensor(v) for v in (*node.inputs, *node.outputs) if v is not None):
        return "it holds a sequence, whose type no Cast changes"
    return ""


def _operands(node: ir.Node) -> list[tuple[ir.Node, int, ir.Value]]:
    """The operands of a node, and those that the nodes of its subgraphs take from outside."""
    found = [(node, i, v) for i, v in enumerate(node.inputs) if v is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            bodies = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies = list(attribute.as_graphs())
        else:
            continue
        for body in bodies:
            own = {id(v) for v in body.inputs} | {id(v) for v in body.initializers.values()}
            inner = list(body.all_nodes())
            own |= {id(v) for n in inner for v in n.outputs}
            for n in inner:
                found.extend((n, i, v) for i, v in enumerate(n.inputs) if v is not None and id(v) not in own)
    return found


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)


def _decides_on_fp32(node: ir.Node) -> bool:
    """A comparison or another decision about floats that are all fp32: rounding them may turn it."""
    if any(is_float(v) for v in node.outputs):
        return False
    floats = [v for v in node.inputs if v is not None and is_float(v) and v.const_value is None]
    return bool(floats) and all(v.dtype == FLOAT for v in floats)


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, names: Names) -> ir.Value:
    """``value`` in ``dtype``: a Cast directly behind its producer, or first of all for an input."""
    name = names.fresh(f"{value.name}__{SHORT[dtype]}")
    node = ir.node(
        "Cast",
        [value],
        attributes={"to": int(dtype)},
        outputs=[ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)],
        name=name,
    )
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, node)
    elif len(graph):
        graph.insert_before(graph[0], node)
    else:
        graph.append(node)
    return node.outputs[0]


def _restore_output(graph: ir.Graph, value: ir.Value, cast: ir.Value | None, names: Names) -> ir.Value:
    """The fp32 value that takes a graph output's name; the trunk value is renamed.

    ``cast`` is the value in fp32, if a node of the graph reads it already.
    """
    name, dtype = value.name or "", value.dtype
    assert dtype is not None
    value.name = names.fresh(f"{name}__{SHORT[dtype]}")
    output = cast if cast is not None else _cast(graph, value, FLOAT, names)
    output.name = name
    return output
