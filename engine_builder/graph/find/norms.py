"""Finds normalizations: RMSNorm and LayerNorm, decomposed or composite."""

from __future__ import annotations

import onnx_ir as ir

from engine_builder.graph.reading import (
    attribute_int,
    ints,
    is_float,
    is_op,
    origin,
    other_operand,
    producer,
    readers,
    scalar,
)
from engine_builder.graph.structures import NearMiss, Norm

_COMPOSITE = {
    "RMSNormalization": "rms",
    "SimplifiedLayerNormalization": "rms",
    "LayerNormalization": "layer",
    "GroupNormalization": "group",
    "InstanceNormalization": "instance",
}


def find_norms(graph: ir.Graph) -> tuple[list[Norm], list[NearMiss]]:
    """Every norm in ``graph``; a mean of squares that leads to no norm is a near miss."""
    found: list[Norm] = []
    missed: list[NearMiss] = []
    for node in graph.all_nodes():
        if node.op_type in _COMPOSITE and node.domain in ("", "ai.onnx"):
            found.append(_composite(node))
        elif is_op(node, "ReduceMean"):
            match = _decomposed(node)
            if isinstance(match, Norm):
                found.append(match)
            elif match is not None:
                missed.append(NearMiss("norm", node.name or "", match))
    return found, missed


def _composite(node: ir.Node) -> Norm:
    kind = _COMPOSITE[node.op_type]
    epsilon = node.attributes.get("epsilon")
    x, gain = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x is None:
        raise ValueError(f"{node.op_type} {node.name} has no input")
    return Norm(
        kind=kind,
        nodes=(node,),
        x=origin(x),
        output=node.outputs[0],
        gain=None if gain is None else origin(gain),
        epsilon=1e-5 if epsilon is None else epsilon.as_float(),
    )


def _square_of(node: ir.Node | None) -> ir.Value | None:
    """The value that ``node`` squares, as ``Pow(x, 2)`` or ``Mul(x, x)``."""
    if node is None or len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None:
        return None
    if is_op(node, "Pow") and scalar(node.inputs[1]) == 2.0:
        return origin(node.inputs[0])
    if is_op(node, "Mul") and origin(node.inputs[0]) is origin(node.inputs[1]):
        return origin(node.inputs[0])
    return None


def _reduced_axes(node: ir.Node) -> list[int] | None:
    """The axes of a reduction, an attribute up to opset 17 and an input from 18 on."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    return ints(node.inputs[1]) if len(node.inputs) > 1 else None


def _decomposed(mean: ir.Node) -> Norm | str | None:
    """The norm around a ReduceMean; a reason if it averages squares but is no norm; else None."""
    square = producer(mean.inputs[0])
    squared = _square_of(square)
    if square is None or squared is None:
        return None  # an ordinary mean
    axes = _reduced_axes(mean)
    if axes is None:
        return "the axes of the mean of squares are not constant"
    if attribute_int(mean, "keepdims", 1) != 1:
        return "the mean of squares does not keep its reduced dimension"
    nodes = [square, mean]

    centred = producer(squared)
    kind, x = "rms", squared
    if is_op(centred, "Sub") and centred is not None and centred.inputs[0] is not None:
        average = producer(centred.inputs[1])
        averaged = average.inputs[0] if average is not None and is_op(average, "ReduceMean") else None
        if average is not None and averaged is not None and origin(averaged) is origin(centred.inputs[0]):
            kind, x = "layer", origin(centred.inputs[0])
            nodes = [average, centred, *nodes]

    added = _only(readers(mean.outputs[0]), "Add")
    if added is None:
        return "no epsilon is added to the mean of squares"
    add, index = added
    epsilon = scalar(other_operand(add, index))
    if epsilon is None:
        return f"the epsilon added at {add.name} is not a constant scalar"
    nodes.append(add)

    # 1/sqrt(v): Sqrt then Reciprocal, Div(1, .) or a division of x; or Pow(v, -0.5).
    inverse: ir.Node | None = None
    divided: ir.Node | None = None
    rooted = _only(readers(add.outputs[0]), "Sqrt", "Pow")
    if rooted is None:
        return f"no square root follows {add.name}"
    root = rooted[0]
    if root.op_type == "Pow":
        if scalar(root.inputs[1]) != -0.5:
            return f"{root.name} raises to a power that is not -0.5"
        inverse = root
        nodes.append(root)
    else:
        nodes.append(root)
        for reader, index in readers(root.outputs[0]):
            if is_op(reader, "Reciprocal"):
                inverse = reader
            elif is_op(reader, "Div") and index == 1:
                numerator = reader.inputs[0]
                if scalar(numerator) == 1.0:
                    inverse = reader
                elif numerator is not None and origin(numerator) is squared:
                    divided = reader
        if inverse is not None:
            nodes.append(inverse)

    if divided is not None:
        normalized = divided
    elif inverse is not None:
        product = next(
            (
                reader
                for reader, index in readers(inverse.outputs[0])
                if is_op(reader, "Mul") and _is(other_operand(reader, index), squared)
            ),
            None,
        )
        if product is None:
            return f"nothing multiplies the squared value by {inverse.name}"
        normalized = product
    else:
        return f"{root.name} is neither inverted nor divides the squared value"
    nodes.append(normalized)

    output, gain = normalized.outputs[0], None
    gained = _gain(normalized.outputs[0], axes)
    if gained is not None:
        node, gain = gained
        nodes.append(node)
        output = node.outputs[0]
        if kind == "layer":
            biased = [r for r, i in readers(output) if is_op(r, "Add") and _is_vector(other_operand(r, i))]
            if len(biased) == 1:
                nodes.append(biased[0])
                output = biased[0].outputs[0]
    return Norm(kind, tuple(nodes), x, output, gain, epsilon)


def _gain(value: ir.Value, axes: list[int]) -> tuple[ir.Node, ir.Value] | None:
    """The multiplication by a constant gain over the normalized axis that directly follows."""
    following = list(readers(value))
    if len(following) != 1:
        return None
    node, index = following[0]
    gain = other_operand(node, index)
    if not is_op(node, "Mul") or gain is None or not _is_vector(gain):
        return None
    return node, origin(gain)


def _is_vector(value: ir.Value | None) -> bool:
    """A constant with at most one dimension longer than 1: a per-channel gain or bias, or a scalar."""
    if value is None:
        return False
    source = origin(value)
    tensor = source.const_value
    if tensor is None:
        node = source.producer()
        if not is_op(node, "Constant"):
            return False
        tensor = ir.convenience.get_const_tensor(source)
    if tensor is None or not is_float(value):
        return False
    return sum(1 for d in tensor.shape.numpy() if d != 1) <= 1


def _is(value: ir.Value | None, target: ir.Value) -> bool:
    return value is not None and origin(value) is target


def _only(found: object, *op_types: str) -> tuple[ir.Node, int] | None:
    matches = [(n, i) for n, i in found if is_op(n, *op_types)]  # type: ignore[attr-defined]
    return matches[0] if len(matches) == 1 else None
