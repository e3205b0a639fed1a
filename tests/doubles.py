"""Test doubles of converters that get one thing wrong: converted graphs, damaged in a named way.

Each function reads a converted model, does its damage and writes the result; it returns the names of
the nodes that it damaged, as a verifier has to name them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from engine_builder.graph.find import find_structures
from engine_builder.graph.reading import is_float, is_op, origin
from engine_builder.graph.structures import Structures

FLOAT = ir.DataType.FLOAT

Double = Callable[[Path, Path], tuple[str, ...]]


def fourier_path_fp16(converted: Path, out: Path) -> tuple[str, ...]:
    """The angles of the timestep's and the duration's features are computed in the trunk type.

    Invisible at a short length with a small t, and wrong by whole turns otherwise: the angles reach
    about 62,000 rad.
    """
    return _damage(converted, out, lambda s: [n for f in s.fourier for n in f.angle_nodes], to_trunk=True)


def fourier_head_fp16(converted: Path, out: Path) -> tuple[str, ...]:
    """Only what lies between the graph input and the frequencies is in the trunk type: clip and divide."""
    return _damage(
        converted,
        out,
        lambda s: [n for f in s.fourier for n in f.angle_nodes if is_op(n, "Clip", "Div", "Min", "Max")],
        to_trunk=True,
    )


def rotary_angle_trunk(converted: Path, out: Path) -> tuple[str, ...]:
    """The positions times the inverse frequencies are in the trunk type; for graphs that compute them."""
    return _damage(converted, out, lambda s: [n for r in s.rotary for n in r.angle_nodes], to_trunk=True)


def rotation_trunk(converted: Path, out: Path) -> tuple[str, ...]:
    """The rotation of one query is in the trunk type."""
    return _damage(converted, out, lambda s: s.rotary[0].nodes, to_trunk=True)


def norm_trunk(converted: Path, out: Path) -> tuple[str, ...]:
    """One norm is computed in the trunk type: in fp16 its squares overflow."""
    return _damage(converted, out, lambda s: s.norms[0].nodes, to_trunk=True)


def gain_trunk(converted: Path, out: Path) -> tuple[str, ...]:
    """The multiplication of one norm by its gain is in the trunk type."""
    return _damage(converted, out, lambda s: s.norms[0].nodes[-1:], to_trunk=True)


def one_core_fp32(converted: Path, out: Path) -> tuple[str, ...]:
    """q and k reach one attention core in fp32, which stops TensorRT from fusing it."""

    def scores(found: Structures) -> list[ir.Node]:
        core = found.attention[0]
        return [node for node in core.nodes if node is not core.pv]

    return _damage(converted, out, scores, to_trunk=False)


def one_softmax_fp32(converted: Path, out: Path) -> tuple[str, ...]:
    """The softmax of one core is fp32 between products in the trunk type: TensorRT-RTX still fuses it."""
    return _damage(converted, out, lambda s: [s.attention[0].softmax], to_trunk=False)


def one_linear_fp32(converted: Path, out: Path) -> tuple[str, ...]:
    """One linear computes in fp32."""
    return _damage(converted, out, lambda s: [s.linears[-1].node], to_trunk=False)


DOUBLES: Mapping[str, Double] = {
    "fourier_path_fp16": fourier_path_fp16,
    "fourier_head_fp16": fourier_head_fp16,
    "rotary_angle_trunk": rotary_angle_trunk,
    "rotation_trunk": rotation_trunk,
    "norm_trunk": norm_trunk,
    "gain_trunk": gain_trunk,
    "one_core_fp32": one_core_fp32,
    "one_softmax_fp32": one_softmax_fp32,
    "one_linear_fp32": one_linear_fp32,
}


def scaled_weight(converted: Path, out: Path, factor: float = 1.02) -> tuple[str, ...]:
    """One linear's weight is off by ``factor``: every type is right, and the velocity is not."""
    model = ir.load(converted)
    linear = find_structures(model).linears[-1]
    weight = linear.weight
    assert weight.const_value is not None
    array = weight.const_value.numpy()
    weight.const_value = ir.tensor((array.astype(np.float32) * factor).astype(array.dtype), name=weight.name)
    ir.save(model, out)
    return (linear.name,)


def trunk_type(model: ir.Model) -> ir.DataType:
    """The half type of a converted model: that of most of its linears' outputs."""
    types = [linear.output.dtype for linear in find_structures(model).linears]
    half = [t for t in types if t is not None and t != FLOAT]
    return max(half, key=half.count)


def _damage(
    converted: Path, out: Path, choose: Callable[[Structures], Collection[ir.Node]], *, to_trunk: bool
) -> tuple[str, ...]:
    model = ir.load(converted)
    trunk = trunk_type(model)
    nodes = [n for n in choose(find_structures(model)) if not is_op(n, "Cast", "Constant")]
    if not nodes:
        raise ValueError("the graph has nothing to damage in this way")
    retype(model, nodes, trunk if to_trunk else FLOAT)
    ir.save(model, out)
    return tuple(dict.fromkeys(node.name or "" for node in nodes))


def retype(model: ir.Model, nodes: Collection[ir.Node], dtype: ir.DataType) -> None:
    """Makes ``nodes`` compute in ``dtype``, with casts wherever they meet the rest of the graph."""
    graph = model.graph
    chosen = {id(node) for node in nodes}
    before = {id(v): v.dtype for node in nodes for v in node.outputs}
    for node in nodes:
        for value in node.outputs:
            if is_float(value):
                value.type = ir.TensorType(dtype)
    for node in nodes:
        for index, operand in enumerate(tuple(node.inputs)):
            if operand is None or not is_float(operand):
                continue
            # A value that was rounded on the way is taken from before the rounding, if that fits.
            source = origin(operand)
            taken = source if dtype == FLOAT and source.dtype == FLOAT else operand
            node.replace_input_with(
                index, taken if taken.dtype == dtype else _cast(graph, taken, dtype, node)
            )
    for node in nodes:
        for value in node.outputs:
            if not is_float(value) or before[id(value)] == dtype:
                continue
            for use in list(value.uses()):
                if id(use.node) not in chosen:
                    use.node.replace_input_with(use.idx, _cast(graph, value, before[id(value)], use.node))


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType | None, reader: ir.Node) -> ir.Value:
    """``value`` in ``dtype`` in front of ``reader``; a constant is converted instead."""
    assert dtype is not None
    name = f"{value.name}__as_{dtype.name.lower()}_for_{reader.name}"
    if value.const_value is not None:
        tensor = ir.tensor(value.const_value.numpy().astype(dtype.numpy()), name=name)
        constant = ir.Value(
            name=name, type=ir.TensorType(dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        if name not in graph.initializers:
            graph.register_initializer(constant)
        return graph.initializers[name]
    existing = next((n for n in graph if n.name == name), None)
    if existing is not None:
        return existing.outputs[0]
    node = ir.node(
        "Cast",
        [value],
        attributes={"to": int(dtype)},
        outputs=[ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)],
        name=name,
    )
    graph.insert_before(reader, node)
    return node.outputs[0]
