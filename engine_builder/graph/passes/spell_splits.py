"""Spells a split that goes through a sequence as slices."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from engine_builder.graph.naming import Names
from engine_builder.graph.reading import attribute_int, constant, ints, is_op, scalar


class SpellSplitsPass(ir.passes.InPlacePass):
    """Replaces each ``SequenceAt`` that takes one part out of a ``SplitToSequence`` by a ``Slice``.

    That is how PyTorch's exporters write ``chunk`` when nothing optimizes it.  A sequence has no place in
    a strongly typed network: nothing casts one, and TensorRT has none.  The slice has the name of the
    node that took the part.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names = Names(model.graph)
        spelled = 0
        for node in list(model.graph.all_nodes()):
            if not is_op(node, "SplitToSequence") or len(node.inputs) < 2 or node.graph is None:
                continue
            for use in list(node.outputs[0].uses()):
                bounds = _bounds(node, use.node)
                if bounds is not None:
                    _slice(node, use.node, bounds, names)
                    spelled += 1
            if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                node.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, bool(spelled))


def _bounds(split: ir.Node, reader: ir.Node) -> tuple[int, int] | None:
    """Where the part that ``reader`` takes begins and ends, if that is known before run time."""
    sizes = constant(split.inputs[1])
    index = scalar(reader.inputs[1]) if is_op(reader, "SequenceAt") else None
    listed = ints(split.inputs[1])
    if sizes is None or index is None or not listed or reader.graph is not split.graph:
        return None
    place = int(index)
    if len(sizes.shape) == 0:  # parts of one size, of which the last may be shorter
        return (place * listed[0], (place + 1) * listed[0]) if place >= 0 else None
    ends = [int(end) for end in np.cumsum(listed)]
    place += len(listed) if place < 0 else 0
    return (ends[place] - listed[place], ends[place]) if 0 <= place < len(listed) else None


def _slice(split: ir.Node, reader: ir.Node, bounds: tuple[int, int], names: Names) -> None:
    graph, source, output = reader.graph, split.inputs[0], reader.outputs[0]
    assert graph is not None
    assert source is not None
    operands = [source]
    for role, number in zip(
        ("start", "end", "axis"), (*bounds, attribute_int(split, "axis", 0)), strict=True
    ):
        tensor = ir.tensor(np.asarray([number], np.int64), name=names.fresh(f"{reader.name}.{role}"))
        operands.append(
            ir.Value(
                name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([1]), const_value=tensor
            )
        )
        graph.register_initializer(operands[-1])
    taken = ir.node("Slice", operands, name=reader.name)
    graph.insert_before(reader, taken)
    ir.convenience.replace_nodes_and_values(graph, reader, [reader], [], [output], [taken.outputs[0]])
