"""Reads the equations of ``Einsum`` nodes that are matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from engine_builder.graph.reading import is_op


@dataclass(frozen=True)
class Product:
    """How an Einsum of two operands is ``transpose(left) @ transpose(right)``.

    The permutations bring the operands to (batch..., rows, inner) and (batch..., inner, columns).
    """

    left: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def turns_left(self) -> bool:
        return self.left != tuple(sorted(self.left))

    @property
    def turns_right(self) -> bool:
        return self.right != tuple(sorted(self.right))


def product_of(node: ir.Node) -> Product | None:
    """The batched matrix product that an Einsum is, as ``bhid,bhjd->bhij``; None for any other node.

    An outer product, a trace, a sum over a label of one operand alone, and an output in another order
    than (batch, rows, columns) are none.
    """
    if not is_op(node, "Einsum") or len(node.inputs) != 2 or "equation" not in node.attributes:
        return None
    equation = node.attributes["equation"].as_string().replace(" ", "")
    operands, arrow, output = equation.partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or "." in equation or len(output) < 2:
        return None
    batch, rows, columns = output[:-2], output[-2], output[-1]
    inner = set(left) - set(output)
    if len(inner) != 1:
        return None
    (summed,) = inner
    if sorted(left) != sorted(batch + rows + summed) or sorted(right) != sorted(batch + summed + columns):
        return None
    if len(set(left)) != len(left) or len(set(right)) != len(right):
        return None
    return Product(
        tuple(left.index(label) for label in batch + rows + summed),
        tuple(right.index(label) for label in batch + summed + columns),
    )
