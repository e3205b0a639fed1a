"""Which nodes compute in fp32: the one place where precision is decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import onnx_ir as ir

from engine_builder.graph.reading import constant, is_float, is_op, origin, producer, readers
from engine_builder.graph.structures import Structures
from engine_builder.precision.options import ConversionOptions


class Rule(StrEnum):
    """Why nodes stay fp32; the text completes "it stays fp32 because"."""

    NORM = "the squares of a norm exceed 65504, the largest fp16 number, on trained models"
    ANGLE = "a 16-bit type loses whole turns of an angle, so everything that it is computed from is fp32"
    ROTATION = "the recipe keeps the rotation of queries and keys in fp32 (islands: rope)"
    RESIDUAL = "the sums of the residual stream neither overflow nor collect rounding (residual: fp32)"
    BOUNDARY = "inputs and outputs are fp32, and a cast on this side of it would be a kernel of its own"
    MODULATION = "the recipe keeps the scale, shift and gate around norms in fp32 (islands: full)"
    ATTENTION = "the recipe leaves attention unbound in fp32 (bound_attention: false)"


@dataclass(frozen=True)
class Island:
    """Nodes that one rule keeps in fp32."""

    rule: Rule
    nodes: tuple[ir.Node, ...]


def islands(graph: ir.Graph, structures: Structures, options: ConversionOptions) -> Iterator[Island]:
    """What each rule of ``options`` keeps in fp32; a node may be in several islands.

    In a converted graph these are the nodes that were kept, as in its source.
    """
    for norm in structures.norms:
        yield Island(Rule.NORM, norm.nodes)
    for features in structures.fourier:
        yield Island(Rule.ANGLE, (*features.angle_nodes, features.cos, features.sin))
    for rotation in structures.rotary:
        yield Island(Rule.ANGLE, (*rotation.angle_nodes, *rotation.trig))
        if options.islands != "minimal":
            yield Island(Rule.ROTATION, rotation.nodes)
    if options.residual == "fp32":
        yield Island(Rule.RESIDUAL, tuple(residual_adds(structures)))
    yield Island(Rule.BOUNDARY, tuple(boundary_nodes(graph)))
    if options.islands == "full":
        for norm in structures.norms:
            yield Island(Rule.MODULATION, tuple(_modulation(norm.output)))
    if not options.bound_attention:
        for core in structures.attention:
            yield Island(Rule.ATTENTION, core.nodes)


def fp32_nodes(graph: ir.Graph, structures: Structures, options: ConversionOptions) -> list[ir.Node]:
    """The nodes of ``graph`` that stay fp32 under ``options``, each once, in no particular order."""
    chosen = {id(node): node for island in islands(graph, structures, options) for node in island.nodes}
    return list(chosen.values())


def residual_adds(structures: Structures) -> list[ir.Node]:
    """The additions of the residual stream: from each norm's input back through sums, and onward.

    The stream is what is added to, layer after layer; in fp32 it neither overflows nor collects the
    rounding of every block, and TensorRT computes the sum inside the norm that reads it.
    """
    stream: dict[int, ir.Node] = {}
    pending = [norm.x for norm in structures.norms]
    while pending:
        node = producer(pending.pop())
        if node is None or id(node) in stream or not _adds_branches(node):
            continue
        stream[id(node)] = node
        pending.extend(v for v in node.inputs if v is not None)
    # The last sum of all feeds no norm: it is the one that reads another sum of the stream.
    for node in list(stream.values()):
        for reader, _ in readers(node.outputs[0]):
            if id(reader) not in stream and _adds_branches(reader):
                stream[id(reader)] = reader
    return list(stream.values())


def _adds_branches(node: ir.Node) -> bool:
    """An addition of two activations; with a constant it would be a bias."""
    return is_op(node, "Add") and all(constant(v) is None for v in node.inputs)


_MOVES = ("Transpose", "Reshape", "Slice", "Squeeze", "Unsqueeze", "Flatten")


def boundary_nodes(graph: ir.Graph) -> list[ir.Node]:
    """What lies between the fp32 inputs and outputs and the first or last node that computes.

    Inputs are rearranged before they are cast, and the sum that makes an output is fp32: casting on
    the other side would be a kernel of its own.
    """
    found: list[ir.Node] = []
    pending = [v for v in graph.inputs if is_float(v)]
    while pending:
        for node, index in readers(pending.pop()):
            if is_op(node, *_MOVES) and index == 0:
                found.append(node)
                pending.extend(node.outputs)
    pending = [v for v in graph.outputs if is_float(v)]
    while pending:
        last = producer(pending.pop())
        if last is None:
            continue
        if is_op(last, *_MOVES) and last.inputs[0] is not None:
            found.append(last)
            pending.append(last.inputs[0])
        elif _adds_branches(last):
            found.append(last)
            pending.extend(v for v in last.inputs if v is not None and is_op(producer(v), *_MOVES))
    return found


def _modulation(value: ir.Value) -> list[ir.Node]:
    """The scale and shift that follow a norm up to the next linear, with the sums that feed them."""
    nodes: list[ir.Node] = []
    for node, index in readers(value):
        if not is_op(node, "Mul", "Add"):
            continue
        nodes.append(node)
        for position, operand in enumerate(node.inputs):
            producer = None if operand is None else operand.producer()
            if position != index and is_float(operand) and is_op(producer, "Add", "Sigmoid", "Sub"):
                assert producer is not None
                nodes.append(producer)
        if node.op_type == "Mul":
            nodes.extend(_modulation(node.outputs[0]))
    return nodes


def mask_constants(structures: Structures) -> list[ir.Value]:
    """The constants that the masks of attention cores are made of."""
    found: dict[int, ir.Value] = {}
    for core in structures.attention:
        pending = [core.mask] if core.mask is not None else []
        while pending:
            value = origin(pending.pop())
            node = value.producer()
            if value.const_value is not None:
                found[id(value)] = value
            elif is_op(node, *_MOVES, "Expand", "Where", "Add") and node is not None:
                pending.extend(v for v in node.inputs if v is not None and is_float(v))
    return list(found.values())
