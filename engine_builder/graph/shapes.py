"""Concrete shapes, and the integers made of them, at chosen input shapes.

Exported graphs compute reshape targets, slice bounds and rotary positions from shapes at run time.
``ShapeOracle`` answers what each of these is for given input shapes without touching the weights,
so that a pass can ask "how many rows does this linear have at L=1292?" or "what is the angle
table at L=4096?".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from engine_builder.errors import ConversionError
from engine_builder.graph.reading import attribute_int, is_float

Shape = tuple[int, ...]

_INTEGER_LIMIT = 256
"""Integer tensors up to this size are evaluated while shapes are propagated."""

_ELEMENT_LIMIT = 1 << 24
"""Elements of a tensor that is computed; a rotary table of 4,160 rows has 133,120.

A few bytes of a graph can ask for a range of 10^12.
"""


class ShapeOracle:
    """Shapes and shape-derived values of every tensor of ``model`` at ``input_shapes``.

    They are derived when they are asked for, and kept: a changed model needs a new oracle.

    Args:
        model: A model without cycles.
        input_shapes: The concrete shape of each graph input by name; inputs whose declared shape
            is static may be left out.

    Raises:
        ConversionError: An input's shape is neither given nor static.
    """

    def __init__(self, model: ir.Model, input_shapes: Mapping[str, Sequence[int]]) -> None:
        self._opset = model.graph.opset_imports.get("", 17)
        self._shapes: dict[int, Shape] = {}
        self._values: dict[int, np.ndarray] = {}
        for value in model.graph.inputs:
            if value.const_value is not None:
                continue
            given = input_shapes.get(value.name or "")
            if given is None:
                dims = None if value.shape is None else list(value.shape)
                if dims is None or not all(isinstance(d, int) for d in dims):
                    raise ConversionError(f"no shape is given for the dynamic input {value.name}")
                given = [int(d) for d in dims if isinstance(d, int)]
            self._shapes[id(value)] = tuple(int(d) for d in given)
        self._visited: set[int] = set()

    def shape(self, value: ir.Value) -> Shape:
        """The shape of ``value``.

        Raises:
            ConversionError: It could not be derived.
        """
        self._derive(value)
        known = self._shape(value)
        if known is None:
            raise ConversionError(f"the shape of {value.name} could not be derived")
        return known

    def evaluate(self, value: ir.Value) -> np.ndarray:
        """The number tensor that ``value`` is, if it depends on shapes and constants alone.

        Floats are computed in the graph's own type, operator by operator.

        Raises:
            ConversionError: It depends on the data of a graph input.
        """
        self._derive(value)
        if id(value) in self._values:
            return self._values[id(value)]
        if value.const_value is not None:
            return np.asarray(value.const_value.numpy())
        node = value.producer()
        if node is None:
            raise ConversionError(f"{value.name} depends on the data of a graph input")
        if node.op_type == "Shape":
            result: Sequence[np.ndarray] = [self._shape_of(node)]
        elif node.op_type == "Size":
            source = node.inputs[0]
            assert source is not None
            result = [np.asarray(int(np.prod(self.shape(source))), np.int64)]
        else:
            inputs = [None if v is None else self.evaluate(v) for v in node.inputs]
            result = compute(node, inputs, self._opset)
        for output, array in zip(node.outputs, result, strict=False):
            self._values[id(output)] = array
            self._shapes[id(output)] = array.shape
        return self._values[id(value)]

    # Propagation -------------------------------------------------------------------------------

    def _derive(self, value: ir.Value) -> None:
        """Visits what ``value`` is computed from and no other node: large graphs are asked for little."""
        pending = [value.producer()]
        while pending:
            node = pending[-1]
            if node is None or id(node) in self._visited:
                pending.pop()
                continue
            before = [v.producer() for v in node.inputs if v is not None]
            waiting = [n for n in before if n is not None and id(n) not in self._visited]
            if waiting:
                pending.extend(waiting)
                continue
            pending.pop()
            self._visited.add(id(node))
            self._visit(node)

    def _constant(self, value: ir.Value) -> None:
        if value.const_value is not None:
            self._shapes[id(value)] = tuple(int(d) for d in value.const_value.shape.numpy())

    def _shape(self, value: ir.Value | None) -> Shape | None:
        if value is None:
            return None
        known = self._shapes.get(id(value))
        if known is None and value.const_value is not None:
            self._constant(value)
            known = self._shapes.get(id(value))
        return known

    def _known(self, value: ir.Value | None) -> np.ndarray | None:
        """A small integer tensor's value, if it is known already."""
        if value is None:
            return None
        known = self._values.get(id(value))
        if known is None and value.const_value is not None and value.const_value.size <= _INTEGER_LIMIT:
            known = np.asarray(value.const_value.numpy())
            self._values[id(value)] = known
        return known

    def _visit(self, node: ir.Node) -> None:
        if node.op_type == "Constant":
            for output in node.outputs:
                tensor = ir.convenience.get_const_tensor(output)
                if tensor is not None:
                    self._shapes[id(output)] = tuple(int(d) for d in tensor.shape.numpy())
                    if tensor.size <= _INTEGER_LIMIT:
                        self._values[id(output)] = np.asarray(tensor.numpy())
            return
        if node.op_type == "Shape":
            if self._shape(node.inputs[0]) is not None:
                dims = self._shape_of(node)
                self._values[id(node.outputs[0])] = dims
                self._shapes[id(node.outputs[0])] = dims.shape
            return
        if not any(is_float(o) for o in node.outputs):
            inputs = [self._known(v) for v in node.inputs]
            if all(k is not None or v is None for k, v in zip(inputs, node.inputs, strict=True)):
                for output, array in zip(node.outputs, compute(node, inputs, self._opset), strict=False):
                    self._shapes[id(output)] = array.shape
                    if array.size <= _INTEGER_LIMIT:
                        self._values[id(output)] = array
                return
        if node.op_type == "Range":  # over floats: its length is in their values
            with suppress(ConversionError):
                self.evaluate(node.outputs[0])
            return
        shapes = self._infer(node)
        for output, shape in zip(node.outputs, shapes, strict=False):
            if shape is not None:
                self._shapes[id(output)] = shape

    def _shape_of(self, node: ir.Node) -> np.ndarray:
        source = node.inputs[0]
        assert source is not None
        dims = self.shape(source)
        start = attribute_int(node, "start", 0)
        end = attribute_int(node, "end", len(dims))
        return np.asarray(dims[slice(start, end)], np.int64)

    def _infer(self, node: ir.Node) -> Sequence[Shape | None]:
        shapes = [self._shape(v) for v in node.inputs]
        first = shapes[0] if shapes else None
        op = node.op_type
        if op in _SAME_SHAPE:
            return [first]
        if op in _BROADCAST:
            present = [s for s in shapes if s is not None]
            try:
                return [np.broadcast_shapes(*present)] if len(present) == len(shapes) else [None]
            except ValueError:
                return [None]  # the operands do not fit each other at these input shapes
        if first is None:
            return [None] * len(node.outputs)
        rule = _RULES.get(op)
        if rule is not None:
            found = rule(node, shapes, [self._known(v) for v in node.inputs])
            if any(shape is not None for shape in found):
                return found
        return self._infer_by_schema(node)

    def _infer_by_schema(self, node: ir.Node) -> Sequence[Shape | None]:
        """The operator's own inference function in onnx, for operators without a rule here."""
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opset, node.domain)
        except onnx.defs.SchemaError:
            return [None] * len(node.outputs)
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for value in node.inputs:
            shape = self._shape(value)
            if value is None:
                continue
            if value.name is None or shape is None or value.dtype is None:
                return [None] * len(node.outputs)  # onnx asks for the type of every operand
            types[value.name] = onnx.helper.make_tensor_type_proto(int(value.dtype), shape)
            known = self._known(value)
            if known is not None:
                data[value.name] = onnx.numpy_helper.from_array(known, value.name)
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                schema,
                ir.to_proto(node),
                types,
                data,
                opset_imports=[onnx.helper.make_opsetid("", self._opset)],
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
            return [None] * len(node.outputs)
        found: list[Shape | None] = []
        for output in node.outputs:
            proto = inferred.get(output.name or "")
            dims = [] if proto is None else list(proto.tensor_type.shape.dim)
            complete = proto is not None and all(d.HasField("dim_value") for d in dims)
            found.append(tuple(d.dim_value for d in dims) if complete else None)
        return found


_SAME_SHAPE = frozenset(
    [
        "Cast",
        "CastLike",
        "Identity",
        "Neg",
        "Sqrt",
        "Reciprocal",
        "Sigmoid",
        "Softmax",
        "LogSoftmax",
        "Cos",
        "Sin",
        "Clip",
        "Relu",
        "Gelu",
        "Erf",
        "Tanh",
        "Exp",
        "Log",
        "Abs",
        "Not",
        "Floor",
        "Ceil",
        "Round",
        "Sign",
        "HardSwish",
        "LeakyRelu",
        "Elu",
        "Softplus",
        "RMSNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "InstanceNormalization",
        "BatchNormalization",
        "SimplifiedLayerNormalization",
        "QuantizeLinear",
        "DequantizeLinear",
        "CumSum",
        "IsNaN",
        "Dropout",
        "Trilu",
    ]
)
_BROADCAST = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Where",
        "Equal",
        "Less",
        "Greater",
        "LessOrEqual",
        "GreaterOrEqual",
        "And",
        "Or",
        "Xor",
        "Min",
        "Max",
        "Mod",
    ]
)

_Rule = Callable[[ir.Node, Sequence[Shape | None], Sequence[np.ndarray | None]], Sequence[Shape | None]]


def _first(shapes: Sequence[Shape | None]) -> Shape:
    shape = shapes[0]
    assert shape is not None
    return shape


def _matmul(
    node: ir.Node, shapes: Sequence[Shape | None], _: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    a, b = shapes[0], shapes[1]
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return [None]
    return [(*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])]


def _gemm(
    node: ir.Node, shapes: Sequence[Shape | None], _: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    a, b = shapes[0], shapes[1]
    if a is None or b is None:
        return [None]
    rows = a[1] if attribute_int(node, "transA", 0) else a[0]
    columns = b[0] if attribute_int(node, "transB", 0) else b[1]
    return [(rows, columns)]


def _attention(
    node: ir.Node, shapes: Sequence[Shape | None], _: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    q, v = shapes[0], shapes[2]
    if q is None or v is None or len(q) != 4:
        return [None] * len(node.outputs)
    return [(*q[:-1], v[-1]), *([None] * (len(node.outputs) - 1))]


def _transpose(
    node: ir.Node, shapes: Sequence[Shape | None], _: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    x = _first(shapes)
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(x))[::-1]
    return [tuple(x[i] for i in perm)]


def _reshape(
    node: ir.Node, shapes: Sequence[Shape | None], operands: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    x, target = _first(shapes), operands[1]
    if target is None:
        return [None]
    dims = [int(d) for d in target]
    if not attribute_int(node, "allowzero", 0):
        dims = [x[i] if d == 0 else d for i, d in enumerate(dims)]
    if -1 in dims:
        rest = int(np.prod([d for d in dims if d != -1]))
        dims[dims.index(-1)] = int(np.prod(x)) // rest if rest else 0
    return [tuple(dims)]


def _slice(
    node: ir.Node, shapes: Sequence[Shape | None], operands: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    x = list(_first(shapes))
    if any(o is None for o in operands[1:]) or len(operands) < 3:
        return [None]
    starts, ends = operands[1], operands[2]
    assert starts is not None
    assert ends is not None
    axes = operands[3] if len(operands) > 3 and operands[3] is not None else np.arange(len(starts))
    steps = operands[4] if len(operands) > 4 and operands[4] is not None else np.ones(len(starts), np.int64)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x[int(axis)] = len(range(*slice(int(start), int(end), int(step)).indices(x[int(axis)])))
    return [tuple(x)]


def _concat(
    node: ir.Node, shapes: Sequence[Shape | None], _: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    if any(s is None for s in shapes):
        return [None]
    x = list(_first(shapes))
    axis = attribute_int(node, "axis", 0)
    x[axis] = sum(s[axis] for s in shapes if s is not None)
    return [tuple(x)]


def _axes(node: ir.Node, operands: Sequence[np.ndarray | None]) -> list[int] | None:
    if "axes" in node.attributes:
        return [int(a) for a in node.attributes["axes"].as_ints()]
    if len(operands) > 1 and operands[1] is not None:
        return [int(a) for a in operands[1].reshape(-1)]
    return None


def _unsqueeze(
    node: ir.Node, shapes: Sequence[Shape | None], operands: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    axes = _axes(node, operands)
    if axes is None:
        return [None]
    x = list(_first(shapes))
    rank = len(x) + len(axes)
    for axis in sorted(a % rank for a in axes):
        x.insert(axis, 1)
    return [tuple(x)]


def _squeeze(
    node: ir.Node, shapes: Sequence[Shape | None], operands: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    x = _first(shapes)
    axes = _axes(node, operands)
    if axes is None:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            return [None]
        return [tuple(d for d in x if d != 1)]
    dropped = {a % len(x) for a in axes}
    return [tuple(d for i, d in enumerate(x) if i not in dropped)]


def _split(
    node: ir.Node, shapes: Sequence[Shape | None], operands: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    x = _first(shapes)
    axis = attribute_int(node, "axis", 0) % len(x)
    count = len(node.outputs)
    if len(operands) > 1 and operands[1] is not None:
        sizes = [int(s) for s in operands[1]]
    elif "split" in node.attributes:
        sizes = [int(s) for s in node.attributes["split"].as_ints()]
    else:
        part = -(-x[axis] // count)
        sizes = [part] * (count - 1) + [x[axis] - part * (count - 1)]
    return [(*x[:axis], size, *x[axis + 1 :]) for size in sizes]


def _gather(
    node: ir.Node, shapes: Sequence[Shape | None], _: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    x, indices = _first(shapes), shapes[1]
    axis = attribute_int(node, "axis", 0) % max(len(x), 1)
    return [None] if indices is None else [(*x[:axis], *indices, *x[axis + 1 :])]


def _expand(
    node: ir.Node, shapes: Sequence[Shape | None], operands: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    target = operands[1]
    return [None] if target is None else [np.broadcast_shapes(_first(shapes), tuple(int(d) for d in target))]


def _reduce(
    node: ir.Node, shapes: Sequence[Shape | None], operands: Sequence[np.ndarray | None]
) -> Sequence[Shape | None]:
    x = _first(shapes)
    axes = _axes(node, operands)
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        return [None]
    if not axes and attribute_int(node, "noop_with_empty_axes", 0):
        return [x]
    reduced = {a % len(x) for a in axes} if axes else set(range(len(x)))
    if attribute_int(node, "keepdims", 1):
        return [tuple(1 if i in reduced else d for i, d in enumerate(x))]
    return [tuple(d for i, d in enumerate(x) if i not in reduced)]


_RULES: dict[str, _Rule] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Attention": _attention,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Slice": _slice,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Split": _split,
    "Gather": _gather,
    "Expand": _expand,
    "ReduceMean": _reduce,
    "ReduceSum": _reduce,
    "ReduceMax": _reduce,
    "ReduceMin": _reduce,
}


def compute(node: ir.Node, inputs: Sequence[np.ndarray | None], opset: int) -> Sequence[np.ndarray]:
    """The outputs of ``node`` for ``inputs``: operators of shape arithmetic directly, others through onnx.

    Raises:
        ConversionError: They have more than ``_ELEMENT_LIMIT`` elements.
    """
    present = [x for x in inputs if x is not None]
    op = node.op_type
    _refuse_size(node, _grown_size(op, present))
    if op in ("Add", "Sub", "Mul") and len(present) == 2:
        a, b = present
        return [a + b if op == "Add" else a - b if op == "Sub" else a * b]
    if op == "Gather":
        return [np.asarray(np.take(present[0], present[1], axis=attribute_int(node, "axis", 0)))]
    if op == "Concat":
        return [np.concatenate(present, axis=attribute_int(node, "axis", 0))]
    if op == "Div" and len(present) == 2 and np.issubdtype(present[0].dtype, np.integer):
        # ONNX integer division truncates towards zero.
        return [np.asarray(np.trunc(present[0] / present[1])).astype(present[0].dtype)]
    if op in ("Unsqueeze", "Squeeze", "Reshape") and len(present) == 2:
        rule = _RULES[op](node, [x.shape for x in present], list(inputs))[0]
        if rule is not None:
            return [present[0].reshape(rule)]
    evaluator = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset})
    feeds = {
        v.name or "": x for v, x in zip(node.inputs, inputs, strict=True) if v is not None and x is not None
    }
    results = [np.asarray(result) for result in evaluator.run(None, feeds)]
    _refuse_size(node, sum(result.size for result in results))
    return results


def _grown_size(op: str, operands: Sequence[np.ndarray]) -> float:
    """About how many elements come out of an operator that makes more of them than go in."""
    if op == "Range" and len(operands) == 3:
        start, limit, delta = (float(x.reshape(-1)[0]) for x in operands)
        return (limit - start) / delta if delta else 0.0
    if op == "ConstantOfShape" and operands:
        return float(np.prod(operands[0].astype(np.float64)))
    if op == "Expand" and len(operands) == 2:
        pairs = zip_longest(reversed(operands[0].shape), reversed(operands[1].tolist()), fillvalue=1)
        return math.prod(float(max(pair)) for pair in pairs)
    if op == "Tile" and len(operands) == 2:
        return operands[0].size * float(np.prod(operands[1].astype(np.float64)))
    if op == "Pad" and len(operands) >= 2:
        return operands[0].size + float(np.abs(operands[1].astype(np.float64)).sum())
    return float(sum(x.size for x in operands)) if op == "Concat" else 0.0


def _refuse_size(node: ir.Node, elements: float) -> None:
    if elements > _ELEMENT_LIMIT:
        raise ConversionError(
            f"{node.op_type} computes {elements:.3g} constants, more than {_ELEMENT_LIMIT}",
            where=f"node {node.name}",
        )
