"""Removes casts that change nothing."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from engine_builder.graph.reading import attribute_int, is_op


class RemoveNoopCastsPass(ir.passes.InPlacePass):
    """Removes each ``Cast`` to the type that its input already has (TorchScript's ``.float()`` marks).

    A cast that produces a graph output from a graph input or another output stays: both names
    are part of the interface.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        removed = 0
        for node in list(model.graph.all_nodes()):
            if not is_op(node, "Cast") or node.graph is None:
                continue
            source, output = node.inputs[0], node.outputs[0]
            if source is None or source.dtype is None or int(source.dtype) != attribute_int(node, "to", 0):
                continue
            if output.is_graph_output():
                if source.producer() is None or source.is_graph_output():
                    continue
                name = output.name
                ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
                source.name = name
            else:
                ir.convenience.replace_all_uses_with(output, source)
            node.graph.remove(node, safe=True)
            removed += 1
        return ir.passes.PassResult(model, bool(removed))
