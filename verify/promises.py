"""What a precision promises about a converted graph and the engine built from it, node by node.

Promises are derived from the converted graph by finding its structures anew, so that they hold the
converter to account instead of repeating what it believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import onnx_ir as ir

from engine_builder.graph.reading import is_float, is_op
from engine_builder.graph.structures import Structures
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


SPELLED = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.DOUBLE: "fp64",
}


def make_promises(
    structures: Structures, options: ConversionOptions, fp8_linears: Sequence[str] = ()
) -> tuple[Promise, ...]:
    """Every promise of ``options`` about a converted graph with ``structures``.

    Args:
        structures: Found in the converted graph.
        options: The precision that the graph was converted to.
        fp8_linears: Names of the linears that the recipe selects for fp8.
    """
    promises: list[Promise] = []
    trunk = options.trunk
    for norm in structures.norms:
        promises.append(_typed(PromiseKind.FP32_NORM, norm.nodes[-1], norm.nodes, "fp32"))
    for features in structures.fourier:
        nodes = (*features.angle_nodes, features.cos, features.sin)
        promises.append(_typed(PromiseKind.FP32_ANGLE, features.cos, nodes, "fp32"))
    seen: set[int] = set()
    for rotation in structures.rotary:
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
        if trunk != "fp32" and options.islands != "minimal":
            promises.append(_typed(PromiseKind.FP32_ROTATION, rotation.nodes[-1], rotation.nodes, "fp32"))
    if trunk != "fp32" and options.bound_attention:
        for core in structures.attention:
            promises.append(_fused(core.nodes, core.qk, core.softmax, core.pv, trunk))
    selected = set(fp8_linears)
    for linear in structures.linears:
        node = linear.node
        if linear.name in selected:
            promises.append(_fp8(node))
            selected.discard(linear.name)
        elif trunk != "fp32" and linear.output.dtype is not None:
            promises.append(_typed(PromiseKind.TRUNK_LINEAR, node, (node,), trunk, engine=(linear.name,)))
    for name in sorted(selected):
        promises.append(
            Promise(
                PromiseKind.FP8_LINEAR,
                name,
                (name,),
                ("fp8",),
                held=False,
                broken_at=f"the graph has no linear named {name}",
            )
        )
    return tuple(promises)


def _typed(
    kind: PromiseKind,
    subject: ir.Node,
    nodes: Iterable[ir.Node],
    dtype: str,
    *,
    engine: tuple[str, ...] | None = None,
) -> Promise:
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
        in_engine=names if engine is None else engine,
    )


def _differs(node: ir.Node, dtype: str) -> str:
    for value in (*node.inputs, *node.outputs):
        if value is not None and is_float(value) and value.dtype is not None:
            actual = SPELLED.get(value.dtype, value.dtype.name.lower())
            if actual != dtype:
                return f"{value.name} at {node.op_type} {node.name} is {actual}, not {dtype}"
    return ""


def _fused(nodes: Iterable[ir.Node], qk: ir.Node, softmax: ir.Node, pv: ir.Node, trunk: str) -> Promise:
    """That the products of a core read the trunk type; TensorRT fuses through an fp32 softmax."""
    broken = next((b for n in (qk, pv) if (b := _differs(n, trunk))), "")
    return Promise(
        PromiseKind.FUSED_ATTENTION,
        pv.name or "",
        tuple(n.name or "" for n in nodes),
        (trunk,),
        held=not broken,
        broken_at=broken,
        in_engine=tuple(dict.fromkeys(n.name or "" for n in (qk, softmax, pv))),
    )


def _fp8(node: ir.Node) -> Promise:
    """That both operands of a linear come out of a DequantizeLinear of E4M3 values."""
    broken = ""
    for value in node.inputs[:2]:
        producer = None if value is None else value.producer()
        if producer is not None and is_op(producer, "Transpose", "Cast"):
            source = producer.inputs[0]
            producer = None if source is None else source.producer()
        quantized = (
            None if producer is None or not is_op(producer, "DequantizeLinear") else producer.inputs[0]
        )
        if quantized is None or quantized.dtype != ir.DataType.FLOAT8E4M3FN:
            operand = value.name if value else "an operand"
            broken = f"{operand} of {node.op_type} {node.name} is not quantized to E4M3"
            break
    return Promise(
        PromiseKind.FP8_LINEAR,
        node.name or "",
        (node.name or "",),
        ("fp8",),
        held=not broken,
        broken_at=broken,
        in_engine=(node.name or "",),
    )
