"""Gives every node a name of its own."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from engine_builder.graph.naming import Names


class NameNodesPass(ir.passes.InPlacePass):
    """Names the nodes that have no name and renames those that repeat an earlier node's.

    Promises are checked by node name in the engine's layers, so that a name must mean one node.
    Names that are unique already stay as they are.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        seen: set[str] = set()
        nameless = []
        for node in model.graph.all_nodes():
            if not node.name or node.name in seen:
                nameless.append(node)
            else:
                seen.add(node.name)
        if not nameless:
            return ir.passes.PassResult(model, False)
        names = Names(model.graph)
        for node in nameless:
            node.name = names.fresh(node.name or node.op_type)
        return ir.passes.PassResult(model, True)
