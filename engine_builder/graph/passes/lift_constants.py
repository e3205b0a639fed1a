"""Makes initializers of Constant nodes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from engine_builder.graph.reading import is_op


class LiftConstantsPass(ir.passes.InPlacePass):
    """Replaces each ``Constant`` of numbers by an initializer of its name.

    The TorchScript exporter writes thousands of them.  One that is a graph output stays a node, because
    an initializer cannot take the output's place; so do strings and sparse tensors.
    """

    version: ClassVar[int] = 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        lifted = 0
        for node in list(model.graph.all_nodes()):
            if not is_op(node, "Constant") or node.graph is None or len(node.attributes) != 1:
                continue
            output = node.outputs[0]
            tensor = _tensor(next(iter(node.attributes.values())), output.name or "")
            if tensor is None or output.is_graph_output():
                continue
            value = ir.Value(
                name=output.name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                const_value=tensor,
            )
            node.graph.register_initializer(value)
            ir.convenience.replace_all_uses_with(output, value)
            node.graph.remove(node, safe=True)
            lifted += 1
        return ir.passes.PassResult(model, bool(lifted))


def _tensor(attribute: ir.Attr, name: str) -> ir.TensorProtocol | None:
    if attribute.name == "value":
        tensor: ir.TensorProtocol = attribute.value
        return tensor
    numbers = {
        "value_int": np.int64,
        "value_ints": np.int64,
        "value_float": np.float32,
        "value_floats": np.float32,
    }
    kind = numbers.get(attribute.name)
    return None if kind is None else ir.tensor(np.asarray(attribute.value, kind), name=name)
