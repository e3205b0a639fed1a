"""What a precision promises about a converted graph and the engine built from it, node by node.

Promises are derived from the converted graph by finding its structures anew, so that they hold the
converter to account instead of repeating what it believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import onnx_ir as ir

from engine_builder.graph.reading import constant, is_float, is_op
from engine_builder.graph.structures import AttentionCore, Linear, RotaryEmbedding, Structures
from engine_builder.precision.options import ConversionOptions


class PromiseKind(StrEnum):
    """The kinds of promise; each is one check in the report."""

    FUSED_ATTENTION = "fused_attention"
    FP32_NORM = "fp32_norm"
    FP32_ANGLE = "fp32_angle"
    FP32_ROTATION = "fp32_rotation"
    BAKED_ROTARY = "baked_rotary"
    FP8_LINEAR = "fp8_linear"
    TRUNK_LINEAR = "trunk_linear"


@dataclass(frozen=True)
class Promise:
    """One structure and the type it was promised.

    ``types`` are the accepted types of what the promise is about: the q, k and v of a fused core,
    the operands of a linear, every float value of a norm.  ``nodes`` are ONNX node names in the
    converted graph; ``held`` says whether the graph itself keeps the promise, and ``broken_at``
    names the node and the type where it does not.
    """

    kind: PromiseKind
    subject: str
    nodes: tuple[str, ...]
    types: tuple[str, ...]
    held: bool = True
    broken_at: str = ""
    in_engine: tuple[str, ...] = ()
    """The nodes that must be found in an engine layer; empty when the graph alone decides."""
    casts: tuple[str, ...] = ()
    """The casts around an fp32 structure: an engine that has none of them computes it in one type
    with its surroundings."""


SPELLED = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.DOUBLE: "fp64",
}


def make_promises(
    graph: ir.Graph,
    structures: Structures,
    options: ConversionOptions,
    fp8_linears: Sequence[str] = (),
    table_faults: Mapping[str, str] | None = None,
) -> tuple[Promise, ...]:
    """Every promise of ``options`` about a converted graph with ``structures``.

    Args:
        graph: The converted graph.
        structures: Found in it.
        options: The precision that the graph was converted to.
        fp8_linears: Names of the linears that the recipe selects for fp8.
        table_faults: What is wrong with baked rotary tables, by initializer name.
    """
    promises: list[Promise] = []
    trunk = options.trunk
    for norm in structures.norms:
        promises.append(_typed(PromiseKind.FP32_NORM, norm.nodes[-1], norm.nodes, "fp32"))
    for features in structures.fourier:
        nodes = (*features.angle_nodes, features.cos, features.sin)
        promises.append(_typed(PromiseKind.FP32_ANGLE, features.cos, nodes, "fp32"))
    promises.extend(_rotary(structures.rotary, options, table_faults or {}))
    if trunk != "fp32" and options.bound_attention:
        promises.extend(_fused(core, trunk) for core in structures.attention)
    selected = dict.fromkeys(fp8_linears)
    for linear in structures.linears:
        if linear.node.graph is not graph:
            continue  # a conversion leaves the bodies of control flow as they are
        if linear.name in selected:
            promises.append(_fp8(linear, trunk))
            del selected[linear.name]
        else:
            promises.append(_typed(PromiseKind.TRUNK_LINEAR, linear.node, (linear.node,), trunk))
    promises.extend(
        Promise(
            PromiseKind.FP8_LINEAR,
            name,
            (name,),
            ("fp8",),
            held=False,
            broken_at=f"the graph has no linear named {name}",
        )
        for name in selected
    )
    return tuple(promises)


def _rotary(
    rotations: Sequence[RotaryEmbedding], options: ConversionOptions, table_faults: Mapping[str, str]
) -> list[Promise]:
    promises: list[Promise] = []
    seen: set[int] = set()
    for rotation in rotations:
        for trig in rotation.trig:
            if id(trig) in seen:
                continue
            seen.add(id(trig))
            if options.rotary == "baked":
                promises.append(
                    Promise(
                        PromiseKind.BAKED_ROTARY,
                        trig.name or "",
                        (trig.name or "",),
                        (),
                        held=False,
                        broken_at=f"{trig.op_type} {trig.name} computes a rotary angle at run time",
                    )
                )
            else:
                promises.append(_typed(PromiseKind.FP32_ANGLE, trig, (*rotation.angle_nodes, trig), "fp32"))
        for table in rotation.tables:
            if id(table) in seen or options.rotary != "baked":
                continue
            seen.add(id(table))
            promises.append(_table(table, table_faults.get(table.name or "", "")))
        if options.trunk != "fp32" and options.islands != "minimal":
            promises.append(_typed(PromiseKind.FP32_ROTATION, rotation.nodes[-1], rotation.nodes, "fp32"))
    return promises


def _table(table: ir.Value, fault: str) -> Promise:
    """That a rotary table is fp32, is right, and is read by the engine."""
    name = table.name or ""
    cuts = tuple(u.node.name or "" for u in table.uses() if u.idx == 0 and is_op(u.node, "Slice", "Gather"))
    if table.dtype is not None and table.dtype != ir.DataType.FLOAT:
        fault = f"the table {name} is {SPELLED.get(table.dtype, table.dtype.name.lower())}, not fp32"
    return Promise(
        PromiseKind.BAKED_ROTARY,
        name,
        cuts,
        ("fp32",),
        held=not fault,
        broken_at=fault,
        in_engine=cuts,
    )


def _typed(kind: PromiseKind, subject: ir.Node, nodes: Iterable[ir.Node], dtype: str) -> Promise:
    """That every float value that ``nodes`` read and write is ``dtype``, except through casts."""
    nodes = tuple(n for n in nodes if not is_op(n, "Cast", "Constant"))
    broken = next((b for n in nodes if (b := _differs(n, dtype))), "")
    names = tuple(dict.fromkeys(n.name or "" for n in nodes))
    return Promise(
        kind,
        subject.name or "",
        names,
        (dtype,),
        held=not broken,
        broken_at=broken,
        in_engine=names,
        casts=() if kind is PromiseKind.TRUNK_LINEAR else _casts_around(nodes),
    )


def _casts_around(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """The casts between float types that ``nodes`` read from and write to.

    One behind a product is left out: TensorRT writes the product in the cast's type and drops the
    cast (measured on every graph and precision here; all other casts stay in the layers' metadata).
    """
    around: dict[str, None] = {}
    for node in nodes:
        before = [v.producer() for v in node.inputs if v is not None]
        after = [use.node for v in node.outputs for use in v.uses()]
        for cast in (*before, *after):
            if is_op(cast, "Cast") and cast is not None and is_float(cast.inputs[0]):
                source = cast.inputs[0]
                maker = None if source is None else source.producer()
                result = cast.outputs[0]
                read = bool(result.uses()) or result.is_graph_output()
                if read and is_float(result) and not is_op(maker, *_PRODUCTS):
                    around[cast.name or ""] = None
    return tuple(around)


_PRODUCTS = ("MatMul", "Gemm", "Conv")
"""The operators that TensorRT computes as a matrix product."""


def float_casts(graph: ir.Graph) -> list[str]:
    """Names of the casts between float types."""
    return [
        node.name or ""
        for node in graph
        if is_op(node, "Cast") and is_float(node.inputs[0]) and is_float(node.outputs[0])
    ]


def lasting_products(graph: ir.Graph, structures: Structures) -> list[str]:
    """Names of the products that no optimization can remove: of data that comes from a graph input.

    One of shapes and constants alone, such as positions by rotary frequencies, may be computed when
    the engine is built.
    """
    angles = {
        id(n)
        for chain in (
            *(r.angle_nodes for r in structures.rotary),
            *(f.angle_nodes for f in structures.fourier),
        )
        for n in chain
    }
    fed = {id(v) for v in graph.inputs if v.const_value is None}
    names: list[str] = []
    for node in graph:
        if is_op(node, "Shape", "Size") or not any(v is not None and id(v) in fed for v in node.inputs):
            continue
        fed.update(id(v) for v in node.outputs)
        if is_op(node, *_PRODUCTS) and id(node) not in angles:
            names.append(node.name or "")
    return names


def _differs(node: ir.Node, dtype: str) -> str:
    for value in (*node.inputs, *node.outputs):
        if value is not None and is_float(value) and value.dtype is not None:
            actual = SPELLED.get(value.dtype, value.dtype.name.lower())
            if actual != dtype:
                return f"{value.name} at {node.op_type} {node.name} is {actual}, not {dtype}"
    return ""


def _fused(core: AttentionCore, trunk: str) -> Promise:
    """That the products of a core read the trunk type; TensorRT fuses through an fp32 softmax."""
    broken = next((b for n in (core.qk, core.pv) if (b := _differs(n, trunk))), "")
    return Promise(
        PromiseKind.FUSED_ATTENTION,
        core.name,
        tuple(n.name or "" for n in core.nodes),
        (trunk,),
        held=not broken,
        broken_at=broken,
        in_engine=tuple(dict.fromkeys(n.name or "" for n in (core.qk, core.softmax, core.pv))),
    )


def _fp8(linear: Linear, trunk: str) -> Promise:
    """That both operands of a linear come out of a well-formed DequantizeLinear of E4M3 values."""
    node = linear.node
    broken = ""
    for index, value in enumerate(node.inputs[:2]):
        fault = _dequantized(value, linear, trunk, is_weight=index == linear.weight_input)
        if fault:
            broken = f"{value.name if value else 'an operand'} of {node.op_type} {node.name} {fault}"
            break
    return Promise(
        PromiseKind.FP8_LINEAR,
        linear.name,
        (linear.name,),
        ("fp8",),
        held=not broken,
        broken_at=broken,
        in_engine=(linear.name,),
    )


def _dequantized(value: ir.Value | None, linear: Linear, trunk: str, *, is_weight: bool) -> str:
    """What is wrong with an operand's quantization, each a way to lose the FP8 product or its range."""
    node = None if value is None else value.producer()
    while node is not None and is_op(node, "Transpose", "Cast", "Identity"):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    quantized = node.inputs[0] if node is not None and is_op(node, "DequantizeLinear") else None
    if node is None or quantized is None or len(node.inputs) < 2 or node.inputs[1] is None:
        return "is not quantized to E4M3"
    if quantized.dtype != ir.DataType.FLOAT8E4M3FN:
        spelled = "nothing known" if quantized.dtype is None else quantized.dtype.name
        return f"is quantized to {spelled}, not to E4M3"
    scale, tensor = node.inputs[1], constant(node.inputs[1])
    if scale.dtype is not None and SPELLED.get(scale.dtype) != trunk:
        # An fp32 scale on an fp16 activation makes TensorRT write the product in fp32 (measured).
        return f"has a scale of type {SPELLED.get(scale.dtype, scale.dtype.name)}, not {trunk}"
    if tensor is None:
        return f"has the scale {scale.name}, which is not constant"
    numbers = np.asarray(tensor.numpy()).astype(np.float64)
    if not np.all(np.isfinite(numbers) & (numbers > 0)):
        bad = numbers[~(np.isfinite(numbers) & (numbers > 0))].flat[0]
        return f"has the scale {bad:g} in {scale.name}"
    if numbers.size > 1:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        rank = 2 if quantized.shape is None else len(quantized.shape)
        if not is_weight:
            return f"has {numbers.size} scales where an activation has one"
        if axis % rank != linear.weight_axis_out:
            return f"has a scale per input channel (axis {axis})"
    zero = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    if zero is not None and np.any(np.asarray(zero.numpy()).astype(np.float32)):
        # TensorRT accepts a nonzero zero point in silence (measured).
        return "has a zero point that is not zero"
    return ""
