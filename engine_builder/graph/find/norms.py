"""Finds normalizations: RMSNorm and LayerNorm, decomposed or composite."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from engine_builder.graph.find.attention import is_scale
from engine_builder.graph.reading import (
    attribute_int,
    constant,
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


def find_norms(nodes: Sequence[ir.Node]) -> tuple[list[Norm], list[NearMiss]]:
    """Every norm among ``nodes``; a mean of squares that leads to no norm is a near miss."""
    found: list[Norm] = []
    missed: list[NearMiss] = []
    match: Norm | str | None
    for node in nodes:
        if node.op_type in _COMPOSITE and node.domain in ("", "ai.onnx"):
            match = _composite(node)
        elif is_op(node, "ReduceMean"):
            match = _decomposed(node)
        elif is_op(node, *_LENGTHS):
            match = _by_length(node)
        else:
            continue
        if isinstance(match, Norm):
            found.append(match)
        elif match is not None:
            missed.append(NearMiss("norm", node.name or "", match))
    return found, missed


def _composite(node: ir.Node) -> Norm | str:
    kind = _COMPOSITE[node.op_type]
    epsilon = node.attributes.get("epsilon")
    x, gain = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x is None:
        return "it has no input"
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
    if _reduced_axes(mean) is None:
        given = len(mean.inputs) > 1 and mean.inputs[1] is not None
        return (
            "the axes of the mean of squares are not constant"
            if given
            else "the mean of squares runs over every axis"
        )
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
                elif _is(numerator, squared):
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
    # An exporter that merges nothing subtracts the mean once for the square and once for the quotient.
    again = [n for v in normalized.inputs if _is(v, squared) and (n := producer(v)) and n is not centred]
    nodes.extend(n for n in again if kind == "layer")
    nodes.append(normalized)

    output, gain = normalized.outputs[0], None
    gained = _gain(output)
    if gained is not None:
        more, gain = gained
        nodes.extend(more)
        output = more[-1].outputs[0]
        if kind == "layer":
            biased = [
                (r, found)
                for r, i in readers(output)
                if is_op(r, "Add") and (found := _vector(other_operand(r, i))) is not None
            ]
            if len(biased) == 1:
                nodes.extend((*biased[0][1], biased[0][0]))
                output = biased[0][0].outputs[0]
    return Norm(kind, tuple(nodes), x, output, gain, epsilon)


def _by_length(length: ir.Node) -> Norm | None:
    """``x / max(||x||, epsilon)``, then scaled: its epsilon of 1e-12 would be zero in fp16.

    The length may be scaled, squared, bounded and inverted on its way: ``||x|| / sqrt(n)`` is the root
    of the mean square.  None if the length serves another end.
    """
    x = _square_of(producer(length.inputs[0])) if is_op(length, "ReduceSum") else length.inputs[0]
    if x is None:
        return None
    x = origin(x)
    square = producer(length.inputs[0]) if is_op(length, "ReduceSum") else None
    nodes = [length] if square is None else [square, length]
    epsilon = 0.0
    value = length.outputs[0]
    for _ in range(_FAR):
        following = list(readers(value))
        for node, index in following:
            divides = is_op(node, "Div") and index == 1
            if (divides or is_op(node, "Mul")) and _is(other_operand(node, index), x):
                nodes.append(node)
                gained = _gain(node.outputs[0])
                more, gain = gained if gained is not None else ([], None)
                nodes.extend(more)
                return Norm("l2", tuple(nodes), x, nodes[-1].outputs[0], gain, epsilon)
        if len(following) != 1:
            return None
        node, index = following[0]
        if is_op(node, *_BOUNDS) and (bound := _bound(node, index)) is not None:
            epsilon = bound
        elif not (is_op(node, *_UNARY) or (is_op(node, *_SCALINGS) and _scales(node, index))):
            return None
        nodes.append(node)
        value = node.outputs[0]
    return None


_LENGTHS = ("ReduceL2", "ReduceSum", "ReduceSumSquare")
_BOUNDS = ("Add", "Clip", "Max")
_SCALINGS = ("Div", "Mul", "Pow")
_UNARY = ("Expand", "Reciprocal", "Reshape", "Sqrt", "Unsqueeze")


def _bound(node: ir.Node, index: int) -> float | None:
    """The constant scalar that is added to operand ``index`` or bounds it from below."""
    return scalar(node.inputs[1 - index]) if len(node.inputs) > 1 and index < 2 else None


def _scales(node: ir.Node, index: int) -> bool:
    """Whether the other operand of a multiplication, division or power is a scalar."""
    return is_scale(other_operand(node, index))


def _gain(value: ir.Value) -> tuple[list[ir.Node], ir.Value] | None:
    """The multiplication by a constant gain that follows, directly or after one by a constant scale.

    With the nodes that compute the gain from constants, as ``1 + weight``.  A scale without a gain
    behind it is left to what follows: it may be an attention core's.
    """
    nodes: list[ir.Node] = []
    while True:
        following = list(readers(value))
        if len(following) != 1 or not is_op(following[0][0], "Mul"):
            return None
        node, index = following[0]
        factor = other_operand(node, index)
        made = _vector(factor)
        if made is None or factor is None:
            return None
        nodes.extend((*made, node))
        if not is_scale(factor):
            return nodes, origin(factor)
        value = node.outputs[0]


_FAR = 8
"""Nodes that may make a gain out of constants."""


def _vector(value: ir.Value | None) -> list[ir.Node] | None:
    """The nodes that compute a per-channel vector or a scalar from constants alone; None if it is not.

    A scalar may also be made of a shape, as the square root of the number of channels.
    """
    if value is None or not is_float(value):
        return None
    nodes: dict[int, ir.Node] = {}
    pending = [value]
    while pending:
        source = origin(pending.pop())
        tensor = constant(source)
        if tensor is not None:
            if sum(1 for d in tensor.shape.numpy() if d != 1) > 1:
                return None
            continue
        node = source.producer()
        if node is None or len(nodes) > _FAR:
            return None
        if is_op(node, "Cast") and not is_float(node.inputs[0]):
            if not is_scale(source):
                return None
            nodes[id(node)] = node
            continue
        if not is_op(node, "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Unsqueeze", "Reshape", "Exp"):
            return None
        nodes[id(node)] = node
        pending.extend(v for v in node.inputs if v is not None and is_float(v))
    return list(reversed(nodes.values()))


def _is(value: ir.Value | None, target: ir.Value) -> bool:
    """Whether ``value`` is ``target``, or the same difference computed once more."""
    if value is None:
        return False
    if origin(value) is target:
        return True
    one, two = producer(value), target.producer()
    if one is None or two is None or not (is_op(one, "Sub") and is_op(two, "Sub")):
        return False
    return all(
        a is not None and b is not None and origin(a) is origin(b)
        for a, b in zip(one.inputs, two.inputs, strict=True)
    )


def _only(found: object, *op_types: str) -> tuple[ir.Node, int] | None:
    matches = [(n, i) for n, i in found if is_op(n, *op_types)]  # type: ignore[attr-defined]
    return matches[0] if len(matches) == 1 else None
