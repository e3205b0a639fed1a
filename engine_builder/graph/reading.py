"""Reading a graph past the nodes that change a value's representation but not its meaning.

Exporters sprinkle ``Identity`` and marker casts, converted graphs carry real casts and Q/DQ
pairs.  Structures are found with the same code in all of them by looking through these nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with numpy)
import numpy as np
import onnx_ir as ir

FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})

SMALL = 4096
"""Constants with more elements than this are weights, and are not looked into while matching."""


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether ``node`` is one of the standard-domain operators ``op_types``."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in op_types


def is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in FLOAT_TYPES


def attribute_int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _is_representation(node: ir.Node | None) -> bool:
    if node is None or not node.inputs or node.inputs[0] is None:
        return False
    if is_op(node, "Identity"):
        return True
    if is_op(node, "Cast"):
        # A cast between float types keeps the meaning; a missing type means that the exporter
        # did not annotate the value, which only happens for the float marker casts.
        return is_float(node.outputs[0]) and (node.inputs[0].dtype is None or is_float(node.inputs[0]))
    return is_op(node, "QuantizeLinear", "DequantizeLinear")


def origin(value: ir.Value) -> ir.Value:
    """``value`` followed back through Identity, float casts and Q/DQ pairs."""
    seen = 0
    node = value.producer()
    while node is not None and _is_representation(node):
        previous = node.inputs[0]
        if previous is None:
            break
        value, node = previous, previous.producer()
        seen += 1
        if seen > 1_000_000:  # a cycle: the source check refuses those, a foreign graph may not
            break
    return value


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes ``value``, past representation changes."""
    return None if value is None else origin(value).producer()


def readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Nodes that read ``value``, past representation changes, with the operand index."""
    pending = [value]
    while pending:
        for use in pending.pop().uses():
            if _is_representation(use.node) and use.idx == 0:
                pending.extend(use.node.outputs)
            else:
                yield use.node, use.idx


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant behind ``value`` (initializer or Constant node), or None."""
    if value is None:
        return None
    value = origin(value)
    if value.const_value is not None:
        return value.const_value
    node = value.producer()
    if node is not None and is_op(node, "Constant"):
        return ir.convenience.get_const_tensor(value)
    return None


def small_array(value: ir.Value | None) -> np.ndarray | None:
    """The constant behind ``value`` as an array, if it is a small one."""
    tensor = constant(value)
    if tensor is None or tensor.size > SMALL:
        return None
    return np.asarray(tensor.numpy())


def scalar(value: ir.Value | None) -> float | None:
    """The single number that ``value`` is, or None."""
    array = small_array(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def ints(value: ir.Value | None) -> list[int] | None:
    array = small_array(value)
    if array is None or not np.issubdtype(array.dtype, np.integer):
        return None
    return [int(i) for i in array.reshape(-1)]


def rank_of(value: ir.Value | None) -> int | None:
    """The number of dimensions of ``value``, from its declaration or from how it is computed."""
    for _ in range(_FAR):
        if value is None:
            return None
        if value.shape is not None:
            return len(value.shape)
        tensor = constant(value)
        if tensor is not None:
            return len(tensor.shape)
        node = value.producer()
        if node is None:
            return None
        if is_op(node, "Transpose") and "perm" in node.attributes:
            return len(node.attributes["perm"].as_ints())
        if is_op(node, "Reshape", "Expand"):
            return _length(node.inputs[1])
        if is_op(node, *_RANK_KEEPING):
            # Of the operands of an elementwise operator, the constant ones seldom have full rank.
            data = [v for v in node.inputs if v is not None and constant(v) is None]
            value = data[0] if data else None
        else:
            return None
    return None


_FAR = 32
_RANK_KEEPING = (
    "Add", "Cast", "Concat", "Div", "Identity", "MatMul", "Mul", "Neg", "Slice", "Softmax", "Sub", "Transpose"
)  # fmt: skip


def _length(shape: ir.Value | None) -> int | None:
    """The number of elements of a one-dimensional integer tensor, which may be joined at run time."""
    if shape is None:
        return None
    listed = ints(shape)
    if listed is not None:
        return len(listed)
    node = producer(shape)
    if is_op(node, "Concat") and node is not None:
        parts = [_length(v) for v in node.inputs]
        return None if any(part is None for part in parts) else sum(part or 0 for part in parts)
    if is_op(node, "Unsqueeze"):
        return 1  # a single size, given a dimension
    declared = None if shape.shape is None or len(shape.shape) != 1 else shape.shape[0]
    return declared if isinstance(declared, int) else None


def other_operand(node: ir.Node, index: int) -> ir.Value | None:
    """The second operand of a binary node, seen from operand ``index``."""
    return node.inputs[1 - index] if len(node.inputs) == 2 else None


class Fingerprints:
    """Numbers that are equal for values computed in the same way from the same things.

    Exporters that do not merge equal computations compute one angle, or take one half of a query,
    several times over.  Representation changes do not count.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._known: dict[object, int] = {}

    def __call__(self, value: ir.Value) -> int:
        pending = [origin(value)]
        while pending:
            current = pending[-1]
            if id(current) in self._numbers:
                pending.pop()
                continue
            operands = [None if v is None else origin(v) for v in _operands(current)]
            missing = [v for v in operands if v is not None and id(v) not in self._numbers]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            key = _key(current, [-1 if v is None else self._numbers[id(v)] for v in operands])
            self._numbers[id(current)] = self._known.setdefault(key, len(self._known))
        return self._numbers[id(origin(value))]


def _operands(value: ir.Value) -> tuple[ir.Value | None, ...]:
    node = value.producer()
    return () if node is None or constant(value) is not None or _is_opaque(node) else tuple(node.inputs)


def _is_opaque(node: ir.Node) -> bool:
    """A node that is equal to itself alone: one with a body, or with no inputs, as random numbers."""
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return not node.inputs or any(a.type in graphs for a in node.attributes.values())


def _key(value: ir.Value, operands: list[int]) -> object:
    tensor = constant(value)
    if tensor is not None and tensor.size <= SMALL:
        return ("constant", tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
    node = value.producer()
    if node is None or tensor is not None or _is_opaque(node):
        return ("value", id(value))
    attributes = tuple(sorted((a.name, repr(a.value)) for a in node.attributes.values()))
    return (node.domain, node.op_type, attributes, tuple(operands), value.index())
