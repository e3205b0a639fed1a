"""Which nodes compute in fp32: the one place where precision is decided."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from engine_builder.graph.reading import is_float, is_op, readers
from engine_builder.graph.structures import Structures
from engine_builder.precision.options import ConversionOptions


def fp32_nodes(structures: Structures, options: ConversionOptions) -> list[ir.Node]:
    """The nodes that stay fp32 under ``options``, in no particular order.

    Norm chains overflow fp16 (x^2 > 65504), angles lose whole turns in any 16-bit type, and both
    therefore stay fp32 in every recipe, with everything an angle is computed from.
    """
    chosen: dict[int, ir.Node] = {}

    def keep(nodes: Iterable[ir.Node]) -> None:
        chosen.update((id(node), node) for node in nodes)

    for norm in structures.norms:
        keep(norm.nodes)
    for features in structures.fourier:
        keep((*features.angle_nodes, features.cos, features.sin))
    for rotation in structures.rotary:
        keep((*rotation.angle_nodes, *rotation.trig))
        if options.islands != "minimal":
            keep(rotation.nodes)
    if options.islands == "full":
        for norm in structures.norms:
            keep(_modulation(norm.output))
    if not options.bound_attention:
        for core in structures.attention:
            keep(core.nodes)
    return list(chosen.values())


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
