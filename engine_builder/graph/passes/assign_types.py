"""Gives every float value of a graph one type, and casts where producer and consumer disagree."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.operator_types import is_pinned, supports
from engine_builder.graph.reading import is_float, is_op
from engine_builder.graph.weights import ConversionLedger, ConvertedTensor

FLOAT = ir.DataType.FLOAT
SHORT = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16", FLOAT: "fp32"}

# Operators that read a float tensor of any type without computing with it.
_TYPE_BLIND = ("Shape", "Size", "Cast", "IsNaN", "IsInf")
# Operators whose output type is an attribute's or that exist for fp32 only.
_ALWAYS_FP32 = (
    "Range", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike", "Multinomial", "Bernoulli", "If", "Loop", "Scan",
)  # fmt: skip


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
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        trunk: ir.DataType,
        fp32_nodes: Collection[ir.Node],
        ledger: ConversionLedger,
        *,
        clip: bool = False,
    ) -> None:
        super().__init__()
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
        before = {id(v): v.dtype for node in top_level for v in node.outputs}
        for node in top_level:
            label = self._label(node)
            for value in node.outputs:
                if value.dtype == FLOAT:
                    value.type = ir.TensorType(label)
            if is_op(node, "Cast") and before[id(node.outputs[0])] == FLOAT and label != FLOAT:
                node.attributes["to"] = ir.AttrInt64("to", int(label))

        self.forced = tuple(
            node.name or node.op_type
            for node in top_level
            if id(node) not in self._fp32
            and self._is_forced(node)
            and any(is_float(v) for v in (*node.inputs, *node.outputs) if v is not None)
        )
        casts: dict[tuple[int, ir.DataType], ir.Value] = {}
        constants: dict[tuple[int, ir.DataType], ir.Value] = {}
        initializers = {id(v): v for v in graph.initializers.values() if v.dtype == FLOAT}
        originals = {id(v): v.const_value for v in initializers.values()}
        readers: dict[int, set[ir.DataType]] = {}
        wanted: list[tuple[ir.Node, int, ir.Value, ir.DataType]] = []
        for node in top_level:
            label = self._label(node)
            for owner, index, value in _operands(node):
                if value.dtype not in (FLOAT, self._trunk) or is_op(owner, *_TYPE_BLIND):
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
                    constants[key] = self._converted(
                        graph, value, originals[id(value)], want, shared=FLOAT in readers[id(value)]
                    )
                if constants[key] is not value:
                    owner.replace_input_with(index, constants[key])
            elif value.dtype != want:
                key = (id(value), want)
                if key not in casts:
                    casts[key] = _cast(graph, value, want)
                owner.replace_input_with(index, casts[key])

        for position, value in enumerate(graph.outputs):
            if value.dtype == self._trunk:
                _restore_output(graph, position, value)
        return ir.passes.PassResult(model, True)

    def _label(self, node: ir.Node) -> ir.DataType:
        if id(node) in self._fp32 or is_op(node, *_ALWAYS_FP32) or self._is_forced(node):
            return FLOAT
        return self._trunk

    def _is_forced(self, node: ir.Node) -> bool:
        return not supports(node.op_type, node.domain, self._opset, self._trunk)

    def _converted(
        self,
        graph: ir.Graph,
        value: ir.Value,
        tensor: ir.TensorProtocol | None,
        dtype: ir.DataType,
        *,
        shared: bool,
    ) -> ir.Value:
        if tensor is None:
            raise ConversionError(f"the constant {value.name} has no value")
        name = f"{value.name}__{SHORT[dtype]}" if shared or value.is_graph_input() else value.name or ""
        converted = ConvertedTensor(tensor, name, dtype, self._ledger, clip=self._clip)
        if name == value.name:
            value.const_value = converted
            value.type = ir.TensorType(dtype)
            return value
        copy = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape, const_value=converted)
        graph.register_initializer(copy)
        return copy


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


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """``value`` in ``dtype``: a Cast directly behind its producer, or first of all for an input."""
    name = f"{value.name}__{SHORT[dtype]}"
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


def _restore_output(graph: ir.Graph, position: int, value: ir.Value) -> None:
    """Gives a graph output back its name and fp32; the trunk value is renamed."""
    name, dtype = value.name or "", value.dtype
    assert dtype is not None
    value.name = f"{name}__{SHORT[dtype]}"
    node = ir.node(
        "Cast",
        [value],
        attributes={"to": int(FLOAT)},
        outputs=[ir.Value(name=name, type=ir.TensorType(FLOAT), shape=value.shape)],
        name=f"{name}__fp32",
    )
    producer = value.producer()
    if producer is None:
        graph.append(node)
    else:
        graph.insert_after(producer, node)
    graph.outputs[position] = node.outputs[0]
