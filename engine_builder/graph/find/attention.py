"""Finds attention cores: softmax(q @ k^T * scale + mask) @ v."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from engine_builder.graph.einsum import product_of
from engine_builder.graph.reading import (
    attribute_int,
    constant,
    is_op,
    origin,
    producer,
    rank_of,
    readers,
    scalar,
)
from engine_builder.graph.structures import AttentionCore, NearMiss


def find_attention(nodes: Sequence[ir.Node]) -> tuple[list[AttentionCore], list[NearMiss]]:
    """Every attention core; a softmax between other things than two products is a near miss."""
    found: list[AttentionCore] = []
    missed: list[NearMiss] = []
    for node in nodes:
        if is_op(node, "Attention"):
            match = _composite(node)
        elif is_op(node, "Softmax"):
            match = _around(node)
        else:
            continue
        if isinstance(match, AttentionCore):
            found.append(match)
        else:
            missed.append(NearMiss("attention core", node.name or "", match))
    return found, missed


def _composite(node: ir.Node) -> AttentionCore | str:
    operands = [origin(value) for value in node.inputs[:3] if value is not None]
    if len(operands) < 3:
        return "it lacks queries, keys or values"
    q, k, v = operands
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    return AttentionCore((node,), node, node, node, q, k, v, mask, node.outputs[0])


def _around(softmax: ir.Node) -> AttentionCore | str:
    scores = softmax.inputs[0]
    if scores is None:
        return "the softmax has no input"
    axis = attribute_int(softmax, "axis", -1)
    if axis != -1 and axis + 1 != rank_of(scores):
        return f"the softmax runs over axis {axis}, not over the keys"

    # Backwards, past the mask and the scale, to the product of queries and keys.
    between: list[ir.Node] = []
    mask: ir.Value | None = None
    value = origin(scores)
    node = value.producer()
    while node is not None and not _is_product(node):
        if is_op(node, "Add", "Sub", "Where"):
            data = [v for v in node.inputs if v is not None and constant(v) is None]
            onward = [v for v in data if _leads_to_product(v)]
            if len(onward) != 1:
                return f"the scores at {node.name} come from {len(onward)} matrix products"
            mask = next((v for v in node.inputs if v is not None and v is not onward[0]), None)
            step = onward[0]
        elif is_op(node, "Mul", "Div"):
            scale_index = next((i for i, v in enumerate(node.inputs) if is_scale(v)), None)
            if scale_index is None or (node.op_type == "Div" and scale_index == 0):
                return f"{node.name} multiplies the scores by something that is not a scale"
            candidate = node.inputs[1 - scale_index]
            if candidate is None:
                return f"{node.name} lacks an operand"
            step = candidate
        elif is_op(node, "Reshape") and node.inputs[0] is not None:
            step = node.inputs[0]  # heads folded into the batch, or unfolded
        elif is_op(node, "Clip", "Tanh", "Softcap"):
            return f"the scores pass through {node.op_type} {node.name}, which TensorRT does not fuse"
        else:
            return f"the softmax reads {node.op_type} {node.name}, not a product of queries and keys"
        between.insert(0, node)
        value = origin(step)
        node = value.producer()
    if node is None:
        return "the softmax reads a graph input or constant"
    qk = node
    q, q_nodes = _unscaled(qk.inputs[0])
    k, k_nodes = _unscaled(qk.inputs[1])
    if q is None or k is None:
        return f"{qk.name} lacks an operand"
    if constant(q) is not None or constant(k) is not None:
        return f"{qk.name} multiplies by a constant: a linear layer, not queries and keys"

    # Forwards, past guards against rows without keys, to the product with the values.
    after: list[ir.Node] = []
    value = softmax.outputs[0]
    while True:
        if value.is_graph_output():
            return f"its probabilities are the graph output {value.name}"
        following = list(readers(value))
        products = [(r, i) for r, i in following if _is_product(r)]
        if len(products) == 1 and len(following) == len(products):
            pv, index = products[0]
            break
        guards = [r for r, _ in following if is_op(r, "Where", "IsNaN", "Dropout", "Mul")]
        onward_guards = [r for r in guards if not is_op(r, "IsNaN")]
        if not guards and len(following) == 1 and is_op(following[0][0], "Reshape") and following[0][1] == 0:
            after.append(following[0][0])
            value = following[0][0].outputs[0]
            continue
        if len(onward_guards) == 1 and len(guards) == len(following):
            after.extend(guards)
            value = onward_guards[0].outputs[0]
            continue
        return "its probabilities are not read by one product with the values alone"
    if index != 0:
        return f"the probabilities are the right operand of {pv.name}"
    v = pv.inputs[1]
    if v is None:
        return f"{pv.name} lacks its values"
    nodes = (*q_nodes, *k_nodes, qk, *between, softmax, *after, pv)
    return AttentionCore(nodes, qk, softmax, pv, q, k, origin(v), mask, pv.outputs[0])


def _is_product(node: ir.Node) -> bool:
    return is_op(node, "MatMul") or product_of(node) is not None


def is_scale(value: ir.Value | None) -> bool:
    """A scalar: a constant, or computed at run time from a shape (``1 / sqrt(head_dim)``)."""
    if value is None:
        return False
    if scalar(value) is not None:
        return True
    node = producer(value)
    for _ in range(16):
        if node is None:
            return False
        if is_op(node, "Shape"):
            return True
        if not is_op(node, "Sqrt", "Div", "Cast", "Slice", "Gather", "Reciprocal", "Pow", "Squeeze", "Mul"):
            return False
        inputs = [v for v in node.inputs if v is not None and constant(v) is None]
        if len(inputs) != 1:
            return False
        node = inputs[0].producer()
    return False


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, list[ir.Node]]:
    """An operand of the first product, back past its scaling and the transposition of the keys."""
    if value is None:
        return None, []
    nodes: list[ir.Node] = []
    value = origin(value)
    while True:
        node = value.producer()
        if node is not None and is_op(node, "Mul", "Div"):
            index = next((i for i, v in enumerate(node.inputs) if is_scale(v)), None)
            if index is None or (node.op_type == "Div" and index == 0):
                break
        elif node is not None and (is_op(node, "Transpose") and swaps_last_two(node)):
            index = 1
        elif node is not None and is_op(node, "Reshape") and (flat := _flattened_transpose(node)):
            # Reshape to three dimensions, transpose the last two, reshape back.
            nodes[:0] = flat
            index = None
            source = flat[0].inputs[0]
            if source is None:
                break
            value = origin(source)
            continue
        else:
            break
        step = node.inputs[1 - index]
        if step is None:
            break
        nodes.insert(0, node)
        value = origin(step)
    return value, nodes


def swaps_last_two(node: ir.Node) -> bool:
    perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else None
    if perm is None or len(perm) < 2:
        return False
    rank = len(perm)
    return perm == [*range(rank - 2), rank - 1, rank - 2]


def _flattened_transpose(last: ir.Node) -> list[ir.Node] | None:
    transpose = producer(last.inputs[0])
    if transpose is None or not is_op(transpose, "Transpose") or not swaps_last_two(transpose):
        return None
    first = producer(transpose.inputs[0])
    return [first, transpose, last] if first is not None and is_op(first, "Reshape") else None


def _leads_to_product(value: ir.Value) -> bool:
    node = producer(value)
    for _ in range(8):
        if node is None:
            return False
        if _is_product(node):
            return True
        if not is_op(node, "Mul", "Div", "Add"):
            return False
        data = [v for v in node.inputs if v is not None and constant(v) is None and not is_scale(v)]
        if not data:
            return False
        node = producer(data[0])
    return False
