"""Removes nodes that change nothing: Identity, and casts to the type that is already there."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from engine_builder.graph.reading import attribute_int, is_op


class RemoveNoopsPass(ir.passes.InPlacePass):
    """Removes each ``Identity``, and each ``Cast`` to the type that its input already has.

    TorchScript shares equal constants through the one and marks ``.float()`` with the other.  A node
    stays where it gives a second name to a value that has one by right: a graph output made from a
    graph input, a constant or another output, or the output of a subgraph made from a value outside.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        removed = 0
        for node in list(model.graph.all_nodes()):
            source = node.inputs[0] if node.inputs else None
            if node.graph is None or source is None or not _changes_nothing(node, source):
                continue
            output = node.outputs[0]
            if output.is_graph_output():
                maker = source.producer()
                if maker is None or maker.graph is not node.graph or source.is_graph_output():
                    continue
                name = output.name
                ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
                source.name = name
            else:
                ir.convenience.replace_all_uses_with(output, source)
            if source.type is None:
                source.type = output.type
            if source.shape is None:
                source.shape = output.shape
            node.graph.remove(node, safe=True)
            removed += 1
        return ir.passes.PassResult(model, bool(removed))


def _changes_nothing(node: ir.Node, source: ir.Value) -> bool:
    if is_op(node, "Identity"):
        return True
    return (
        is_op(node, "Cast") and source.dtype is not None and int(source.dtype) == attribute_int(node, "to", 0)
    )
