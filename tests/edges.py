"""An independent check of a converted graph's types, by the ONNX definitions and nothing else.

It reads the protobuf, not onnx-ir, and knows nothing of what a conversion meant to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
}
SPELLED: dict[str, int] = {
    "tensor(float)": TensorProto.FLOAT, "tensor(float16)": TensorProto.FLOAT16,
    "tensor(bfloat16)": TensorProto.BFLOAT16,
}  # fmt: skip
# Operators whose operands may differ in type: by purpose, or because a body takes what it needs.
MIXED = ("Cast", "CastLike", "Shape", "Size", "QuantizeLinear", "DequantizeLinear", "If", "Loop", "Scan")


def faults(path: Path) -> list[str]:
    """Everything that is wrong with the types and the order of the graph in ``path``; empty if nothing."""
    model = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(str(path), full_check=True)
    opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    return [*graph_faults(model.graph, opset, {}), *_cast_faults(model.graph)]


def declared(graph: onnx.GraphProto) -> dict[str, int]:
    """The element type of every value of ``graph``."""
    types: dict[str, int] = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type
        if kind.HasField("sequence_type"):
            kind = kind.sequence_type.elem_type
        types[value.name] = kind.tensor_type.elem_type
    return types


def graph_faults(graph: onnx.GraphProto, opset: int, outer: Mapping[str, int]) -> Iterator[str]:
    """What is wrong inside ``graph``, which may read the values of ``outer``."""
    types = {**outer, **declared(graph)}
    known = {*outer, *(v.name for v in graph.input), *(t.name for t in graph.initializer)}
    for node in graph.node:
        where = f"{node.op_type} {node.name}"
        for name in node.input:
            if name and name not in known:
                yield f"{where} reads {name} before it is made"
        known.update(node.output)
        for name in (*node.input, *node.output):
            if name and name not in types:
                yield f"{name} at {where} has no type"
        yield from _node_faults(node, opset, types, where)
        for attribute in node.attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from graph_faults(body, opset, {k: v for k, v in types.items() if k in known})


def _node_faults(node: onnx.NodeProto, opset: int, types: Mapping[str, int], where: str) -> Iterator[str]:
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    bound: dict[str, tuple[int, str]] = {}
    free: dict[int, str] = {}
    for names, parameters in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for position, name in enumerate(names):
            if not name or name not in types:
                continue
            parameter = parameters[min(position, len(parameters) - 1)]
            kind = types[name]
            spelled = next((s for s, t in SPELLED.items() if t == kind), None)
            if parameter.type_str in SPELLED:
                if SPELLED[parameter.type_str] != kind:
                    yield f"{name} at {where} is not {parameter.type_str} as the standard fixes it"
                continue
            # seq(tensor(float)) and the like count as well.
            if spelled is not None and not any(spelled in allowed for allowed in parameter.types):
                yield f"{name} at {where} is {FLOATS[kind]}, which opset {opset} does not allow there"
            if kind in FLOATS and node.op_type not in MIXED:
                free[kind] = name
            if parameter.option == variadic and not parameter.is_homogeneous:
                continue
            if parameter.type_str in bound and bound[parameter.type_str][0] != kind:
                other = bound[parameter.type_str][1]
                yield f"{name} and {other} at {where} differ in type"
            bound.setdefault(parameter.type_str, (kind, name))
    if len(free) > 1:
        yield f"{where} mixes " + " and ".join(sorted(f"{FLOATS[t]} {n}" for t, n in free.items()))


def _cast_faults(graph: onnx.GraphProto) -> Iterator[str]:
    """Casts that repeat another, change nothing, or undo one another's rounding to no effect."""
    types = declared(graph)
    makers = {name: node for node in graph.node for name in node.output}
    seen: dict[tuple[str, int], str] = {}
    for node in graph.node:
        if (
            node.op_type != "Cast"
            or types[node.input[0]] not in FLOATS
            or types[node.output[0]] not in FLOATS
        ):
            continue
        key = (node.input[0], types[node.output[0]])
        if types[node.input[0]] == types[node.output[0]]:
            yield f"Cast {node.name} changes nothing"
        if key in seen:
            yield f"Cast {node.name} repeats {seen[key]}"
        seen[key] = node.name
        before = makers.get(node.input[0])
        if before is not None and before.op_type == "Cast" and types[before.input[0]] in FLOATS:
            yield f"Cast {node.name} casts what Cast {before.name} made"
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                read |= {name for inner in body.node for name in inner.input}
                read |= {value.name for value in body.output}
    for tensor in graph.initializer:
        if tensor.name not in read:
            yield f"the constant {tensor.name} is read by nothing"
