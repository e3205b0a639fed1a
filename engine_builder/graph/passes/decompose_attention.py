"""Spells the composite ``Attention`` operator (opset 23) as two products and a softmax."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.naming import Names
from engine_builder.graph.reading import attribute_int, is_op


class DecomposeAttentionPass(ir.passes.InPlacePass):
    """Replaces each ``Attention`` by ``softmax(q*s @ (k*s)^T + mask) @ v`` with ``s = sqrt(scale)``.

    TensorRT has no fp32 kernel for the composite, and fuses the decomposed form into fewer layers.
    The last product keeps the operator's name; the others are named after it.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        targets = [node for node in model.graph.all_nodes() if is_op(node, "Attention")]
        if not targets:
            return ir.passes.PassResult(model, False)
        names = Names(model.graph)
        for node in targets:
            _decompose(node, names)
        return ir.passes.PassResult(model, True)


def _decompose(node: ir.Node, names: Names) -> None:
    graph = node.graph
    if graph is None:
        raise ConversionError("an Attention operator belongs to no graph", where=node.name)
    q, k, v = node.inputs[:3]
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    refused = [
        what
        for what, present in (
            ("past keys or values", any(i is not None for i in node.inputs[4:])),
            ("present or score outputs", any(o.uses() or o.is_graph_output() for o in node.outputs[1:])),
            ("a causal mask", attribute_int(node, "is_causal", 0) != 0),
            ("softcap", "softcap" in node.attributes and node.attributes["softcap"].as_float() != 0.0),
            ("packed heads", attribute_int(node, "q_num_heads", 0) != 0),
        )
        if present
    ]
    if q is None or k is None or v is None:
        refused.append("a missing operand")
    elif any(i.shape is not None and len(i.shape) != 4 for i in (q, k, v)):
        refused.append("packed heads")
    elif (heads := _heads(q)) and (shared := _heads(k)) and heads != shared:
        refused.append(f"{heads} query heads over {shared} key heads")
    if refused:
        raise ConversionError(
            f"Attention with {' and '.join(dict.fromkeys(refused))} cannot be decomposed",
            where=f"node {node.name}",
            hint="export the model with scaled dot-product attention over separate heads",
        )
    assert q is not None
    assert k is not None
    assert v is not None
    if q.shape is None or not isinstance(q.shape[-1], int):
        raise ConversionError("the head dimension of Attention is not known", where=f"node {node.name}")
    name = node.name or node.outputs[0].name or "attention"
    output = node.outputs[0]
    scale = (
        node.attributes["scale"].as_float() if "scale" in node.attributes else 1.0 / math.sqrt(q.shape[-1])
    )
    factor = _initializer(graph, names.fresh(f"{name}.scale"), np.asarray([math.sqrt(scale)], np.float32))
    rank = len(q.shape)
    built: list[ir.Node] = []

    def add(
        op: str, inputs: list[ir.Value], suffix: str, shape: ir.Shape | None, **attributes: object
    ) -> ir.Value:
        own = names.fresh(f"{name}.{suffix}")
        made = ir.node(
            op,
            inputs,
            attributes=attributes,  # type: ignore[arg-type]
            outputs=[ir.Value(name=own, type=ir.TensorType(_float(output)), shape=shape)],
            name=own,
        )
        built.append(made)
        return made.outputs[0]

    scaled_q = add("Mul", [q, factor], "q_scaled", q.shape)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    turned_shape = None if k.shape is None else ir.Shape([k.shape[i] for i in perm])
    turned = add("Transpose", [k], "k_transposed", turned_shape, perm=perm)
    scaled_k = add("Mul", [turned, factor], "k_scaled", turned_shape)
    scores_shape = None if k.shape is None else ir.Shape([*q.shape[:-1], k.shape[-2]])
    scores = add("MatMul", [scaled_q, scaled_k], "qk", scores_shape)
    if mask is not None:
        if mask.dtype == ir.DataType.BOOL:
            zero = _initializer(graph, names.fresh(f"{name}.keep"), np.asarray(0.0, np.float32))
            # The most negative finite value of fp16 and not -inf: a row without keys stays finite,
            # and the value survives the conversion to either half type.
            lowest = _initializer(graph, names.fresh(f"{name}.drop"), np.asarray(-65504.0, np.float32))
            mask = add("Where", [mask, zero, lowest], "mask", mask.shape)
        scores = add("Add", [scores, mask], "masked", scores_shape)
    weights = add("Softmax", [scores], "softmax", scores_shape, axis=-1)
    last = ir.node("MatMul", [weights, v], name=name)
    built.append(last)
    graph.insert_before(node, built)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [], [output], [last.outputs[0]])


def _heads(value: ir.Value) -> int | None:
    count = None if value.shape is None else value.shape[1]
    return count if isinstance(count, int) else None


def _float(value: ir.Value) -> ir.DataType:
    return value.dtype if value.dtype is not None else ir.DataType.FLOAT


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    graph.register_initializer(value)
    return value
