"""Types the values that an exporter left without a type."""

from __future__ import annotations

import copy
from typing import ClassVar

import onnx
import onnx_ir as ir

from engine_builder.graph.operator_types import schema_of
from engine_builder.graph.reading import is_op

_SPELLED = {f"tensor({name})": dtype for name, dtype in (
    ("float", ir.DataType.FLOAT), ("float16", ir.DataType.FLOAT16), ("bfloat16", ir.DataType.BFLOAT16),
    ("double", ir.DataType.DOUBLE), ("int8", ir.DataType.INT8), ("int16", ir.DataType.INT16),
    ("int32", ir.DataType.INT32), ("int64", ir.DataType.INT64), ("uint8", ir.DataType.UINT8),
    ("uint16", ir.DataType.UINT16), ("uint32", ir.DataType.UINT32), ("uint64", ir.DataType.UINT64),
    ("bool", ir.DataType.BOOL), ("string", ir.DataType.STRING),
)}  # fmt: skip

# Operators that name their output's type in an attribute; without it the type is the default, or
# that of the input where there is none.
_NAMED_BY_ATTRIBUTE: dict[str, tuple[str, ir.DataType | None]] = {
    "Cast": ("to", None),
    "RandomNormal": ("dtype", ir.DataType.FLOAT),
    "RandomUniform": ("dtype", ir.DataType.FLOAT),
    "RandomNormalLike": ("dtype", None),
    "RandomUniformLike": ("dtype", None),
    "Bernoulli": ("dtype", None),
    "EyeLike": ("dtype", None),
    "Multinomial": ("dtype", ir.DataType.INT32),
    "SequenceEmpty": ("dtype", ir.DataType.FLOAT),
    "BlackmanWindow": ("output_datatype", ir.DataType.FLOAT),
    "HannWindow": ("output_datatype", ir.DataType.FLOAT),
    "HammingWindow": ("output_datatype", ir.DataType.FLOAT),
}


class InferTypesPass(ir.passes.InPlacePass):
    """Fills in element types by the operators' definitions; a declared type is never changed.

    The TorchScript exporter declares none unless shape inference ran after it.  Shapes are not
    inferred: nothing that follows depends on declared ones.  What cannot be told stays untyped and
    is refused by the pass that needs it.  The model must be topologically sorted.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        opset = model.graph.opset_imports.get("", 17)
        return ir.passes.PassResult(model, _infer(model.graph, opset))


def _infer(graph: ir.Graph, opset: int) -> bool:
    modified = False
    for value in graph.initializers.values():
        if value.type is None and value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
            modified = True
    for node in graph:
        for attribute in node.attributes.values():
            for body in _bodies(attribute):
                _type_body_inputs(node, body)
                modified |= _infer(body, opset)
        for index, output in enumerate(node.outputs):
            if output.type is not None:
                continue
            kind = _output_type(node, index, opset)
            if kind is not None:
                output.type = kind
                modified = True
    return modified


def _bodies(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []


def _type_body_inputs(node: ir.Node, body: ir.Graph) -> None:
    """A Loop's body declares its inputs' types; where it does not, the carried values tell them."""
    if not is_op(node, "Loop"):
        return
    for value, carried in zip(body.inputs[2:], node.inputs[2:], strict=False):
        if value.type is None and carried is not None:
            value.type = copy.copy(carried.type)


def _output_type(node: ir.Node, index: int, opset: int) -> ir.TypeProtocol | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    op, first = node.op_type, node.inputs[0] if node.inputs else None
    if op == "Constant":
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        return None if tensor is None else ir.TensorType(tensor.dtype)
    if op == "ConstantOfShape":
        value = node.attributes.get("value")
        return ir.TensorType(ir.DataType.FLOAT if value is None else value.as_tensor().dtype)
    if op in _NAMED_BY_ATTRIBUTE:
        name, default = _NAMED_BY_ATTRIBUTE[op]
        attribute = node.attributes.get(name)
        kind = default if attribute is None else ir.DataType(attribute.as_int())
        element = kind if kind is not None else (first.dtype if first is not None else None)
        if element is None:
            return None
        tensor_type = ir.TensorType(element)
        return ir.SequenceType(tensor_type) if op == "SequenceEmpty" else tensor_type
    if op in ("If", "Loop", "Scan"):
        body = next((b for a in node.attributes.values() for b in _bodies(a)), None)
        outputs = [] if body is None else list(body.outputs)[1 if op == "Loop" else 0 :]
        return copy.copy(outputs[index].type) if index < len(outputs) else None
    if op in ("SequenceConstruct", "SplitToSequence"):
        return None if first is None or first.dtype is None else ir.SequenceType(ir.TensorType(first.dtype))
    if op in ("SequenceAt", "ConcatFromSequence"):
        return None if first is None or first.dtype is None else ir.TensorType(first.dtype)
    return _by_schema(node, index, opset)


def _by_schema(node: ir.Node, index: int, opset: int) -> ir.TypeProtocol | None:
    """The type of the operand that the definition says the output shares, or its only type."""
    schema = schema_of(node.op_type, "", opset)
    if schema is None or not schema.outputs:
        return None
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    formal = schema.outputs[min(index, len(schema.outputs) - 1)]
    if formal.type_str in _SPELLED:
        return ir.TensorType(_SPELLED[formal.type_str])
    for position, value in enumerate(node.inputs):
        parameter = schema.inputs[min(position, len(schema.inputs) - 1)] if schema.inputs else None
        if parameter is None or value is None or value.type is None:
            continue
        within = position < len(schema.inputs) or parameter.option == variadic
        if within and parameter.type_str == formal.type_str:
            # A type of its own: types are mutable in onnx-ir.
            return copy.copy(value.type)
    allowed = [t for t in formal.types if t in _SPELLED]
    return ir.TensorType(_SPELLED[allowed[0]]) if len(formal.types) == len(allowed) == 1 else None
