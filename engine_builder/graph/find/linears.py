"""Finds linear layers: matrix products with one constant operand."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from engine_builder.graph.reading import attribute_int, constant, is_op, origin
from engine_builder.graph.structures import Linear, NearMiss


def find_linears(nodes: Sequence[ir.Node]) -> tuple[list[Linear], list[NearMiss]]:
    """Every MatMul or Gemm whose weight is a constant matrix, on either side, transposed or not."""
    found: list[Linear] = []
    missed: list[NearMiss] = []
    for node in nodes:
        if not is_op(node, "MatMul", "Gemm"):
            continue
        sides = [(i, w) for i, v in enumerate(node.inputs[:2]) if (w := _weight(v)) is not None]
        if not sides:
            if is_op(node, "Gemm"):
                missed.append(NearMiss("linear", node.name or "", "neither operand is a constant matrix"))
            continue  # a product of two activations: attention's own
        if len(sides) == 2:
            missed.append(NearMiss("linear", node.name or "", "both operands are constant"))
            continue
        side, (weight, transposed) = sides[0]
        activation = node.inputs[1 - side]
        if activation is None:
            missed.append(NearMiss("linear", node.name or "", "its activation is missing"))
            continue
        if is_op(node, "Gemm") and attribute_int(node, "transB" if side == 1 else "transA", 0):
            transposed = not transposed
        tensor = weight.const_value if weight.const_value is not None else constant(weight)
        if tensor is None:
            missed.append(NearMiss("linear", node.name or "", f"the weight {weight.name} cannot be read"))
            continue
        rows, columns = (int(d) for d in tensor.shape.numpy())
        # A weight on the right is (in, out), one on the left is (out, in).
        out_axis = 1 if side == 1 else 0
        if transposed:
            out_axis = 1 - out_axis
        sizes = (rows, columns)
        found.append(
            Linear(
                node=node,
                weight=weight,
                weight_input=side,
                weight_axis_out=out_axis,
                in_features=sizes[1 - out_axis],
                out_features=sizes[out_axis],
                activation=origin(activation),
                output=node.outputs[0],
            )
        )
    return found, missed


def _weight(value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """The constant matrix behind an operand, and whether a Transpose turns it."""
    if value is None:
        return None
    source, transposed = origin(value), False
    node = source.producer()
    while is_op(node, "Transpose") and node is not None and node.inputs[0] is not None:
        perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else [1, 0]
        if perm == [1, 0]:
            transposed = not transposed
        elif perm != [0, 1]:
            return None
        source = origin(node.inputs[0])
        node = source.producer()
    tensor = constant(source)
    if tensor is None or len(tensor.shape) != 2:
        return None
    return source, transposed
