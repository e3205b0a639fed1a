"""Computes the integers that are made of constants alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from engine_builder.graph.reading import SMALL, is_float
from engine_builder.graph.shapes import compute


class FoldIndicesPass(ir.passes.InPlacePass):
    """Replaces nodes that compute small integer tensors from constants by what they compute.

    An unoptimized export reshapes the axes of every mean and joins the bounds of every slice at run
    time; the finders read both.  Floats are left to TensorRT: folding them here could round otherwise.
    The model must be topologically sorted and typed.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        opset = model.graph.opset_imports.get("", 17)
        folded = 0
        for node in list(model.graph):
            inputs = _constants(node)
            if inputs is None:
                continue
            arrays = compute(node, inputs, opset)
            if any(np.asarray(array).size > SMALL for array in arrays):
                continue
            for output, array in zip(node.outputs, arrays, strict=True):
                tensor = ir.tensor(np.asarray(array), name=output.name)
                value = ir.Value(
                    name=output.name,
                    type=ir.TensorType(tensor.dtype),
                    shape=ir.Shape(tensor.shape.numpy()),
                    const_value=tensor,
                )
                model.graph.register_initializer(value)
                ir.convenience.replace_all_uses_with(output, value)
            model.graph.remove(node, safe=True)
            folded += 1
        return ir.passes.PassResult(model, bool(folded))


def _constants(node: ir.Node) -> list[np.ndarray | None] | None:
    """The operands of a node that may be folded; None for any other node."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.op_type == "Constant":
        return None
    for output in node.outputs:
        if output.is_graph_output() or output.dtype is None or is_float(output) or not output.name:
            return None
        if not isinstance(output.type, ir.TensorType):
            return None
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    if any(attribute.type in graphs for attribute in node.attributes.values()):
        return None
    found: list[np.ndarray | None] = []
    for value in node.inputs:
        if value is None:
            found.append(None)
        elif value.const_value is None or value.const_value.size > SMALL:
            return None
        else:
            found.append(np.asarray(value.const_value.numpy()))
    return found
