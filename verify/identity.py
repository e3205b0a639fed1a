"""Checks promises against an engine's layers by the ONNX nodes that each layer was fused from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from verify.layers import FLOATING, UNKNOWN, LayerRecord, index_by_node
from verify.promises import Promise, PromiseKind


class Status(StrEnum):
    """How a check ended; derived from evidence, never assumed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_VERIFIABLE = "not verifiable"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Failure:
    """A promise that is not kept: which structure, why, and the layers its nodes ended in."""

    subject: str
    reason: str
    nodes: tuple[str, ...]
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """All promises of one kind: how many were made, how many hold, and those that do not."""

    name: str
    status: Status
    promised: int
    kept: int
    failures: tuple[Failure, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class _Unknown:
    """Why the layers cannot tell whether a promise is kept."""

    reason: str


@dataclass(frozen=True)
class _Engine:
    """An engine's layers by the nodes in them, and what the graph says of these nodes."""

    held: Mapping[str, tuple[LayerRecord, ...]]
    linears: Collection[str]
    casts: Collection[str]
    nodes: Collection[str]


def check_promises(
    promises: Sequence[Promise],
    layers: Sequence[LayerRecord],
    *,
    linears: Collection[str] = (),
    casts: Collection[str] = (),
    nodes: Collection[str] = (),
    tf32: bool = False,
) -> tuple[Check, ...]:
    """One check per kind of promise, in a fixed order; a kind without promises is not applicable.

    Args:
        promises: Made from the converted graph.
        layers: The engine's layers.
        linears: Names of all linears of the graph.
        casts: Names of all its casts between float types.
        nodes: Names of all its nodes; an unknown name in a layer may be a cast of another graph.
        tf32: Whether fp32 products may round their operands to TF32.
    """
    engine = _Engine(index_by_node(layers), frozenset(linears), frozenset(casts), frozenset(nodes))
    return tuple(_check(kind, [p for p in promises if p.kind == kind], engine, tf32) for kind in PromiseKind)


def _check(kind: PromiseKind, made: Sequence[Promise], engine: _Engine, tf32: bool) -> Check:
    if not made:
        return Check(kind.value, Status.NOT_APPLICABLE, 0, 0)
    failures: list[Failure] = []
    unknown: list[str] = []
    for promise in made:
        reason = promise.broken_at if not promise.held else _broken(promise, engine, tf32)
        if isinstance(reason, _Unknown):
            unknown.append(f"{promise.subject}: {reason.reason}")
        elif reason:
            names = [layer.name for node in promise.in_engine for layer in engine.held.get(node, ())]
            failures.append(Failure(promise.subject, reason, promise.nodes, tuple(dict.fromkeys(names))))
    kept = len(made) - len(failures) - len(unknown)
    if failures:
        return Check(kind.value, Status.FAILED, len(made), kept, tuple(failures))
    if unknown:
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return Check(kind.value, Status.NOT_VERIFIABLE, len(made), kept, note=unknown[0] + more)
    return Check(kind.value, Status.PASSED, len(made), kept)


def check_graph_promises(promises: Sequence[Promise]) -> tuple[Check, ...]:
    """The promises that the graph itself breaks, where there is no engine to look at; one check per kind."""
    checks: list[Check] = []
    for kind in PromiseKind:
        made = [p for p in promises if p.kind == kind]
        failures = tuple(Failure(p.subject, p.broken_at, p.nodes, ()) for p in made if not p.held)
        if failures:
            checks.append(Check(kind.value, Status.FAILED, len(made), len(made) - len(failures), failures))
    return tuple(checks)


def _broken(promise: Promise, engine: _Engine, tf32: bool) -> str | _Unknown:
    """Why the engine does not keep a promise that the graph keeps; nothing when it does."""
    if not promise.in_engine:
        return ""
    if not any(node in engine.held for node in promise.in_engine):
        return "no engine layer was made from its nodes"
    match promise.kind:
        case PromiseKind.FUSED_ATTENTION:
            return _unfused(promise, engine)
        case PromiseKind.FP8_LINEAR | PromiseKind.TRUNK_LINEAR:
            return _wrong_product(promise, engine, tf32)
        case PromiseKind.BAKED_ROTARY:
            return ""
        case PromiseKind.FP32_NORM | PromiseKind.FP32_ANGLE | PromiseKind.FP32_ROTATION:
            return _not_fp32(promise, engine)


def _unfused(promise: Promise, engine: _Engine) -> str | _Unknown:
    """Why a core is not one fused kernel that reads the promised type.

    Kernels that only move q, k or v carry the core's names too, so the one that holds all of the
    products and the softmax counts.  Its output says nothing: it is FP8 where the kernel absorbed
    the next linear's quantization.
    """
    holders = [engine.held.get(node, ()) for node in promise.in_engine]
    shared = [
        layer
        for layer in holders[-1]
        if layer.is_fused_attention and all(layer in others for others in holders)
    ]
    if not shared:
        split = sorted(
            {
                f"{layer.name} ({layer.layer_type})"
                for layers in holders
                for layer in layers
                if not layer.only_moves_data
            }
        )
        return f"not one fused kernel but {len(split)} layers: {', '.join(split)}"
    kernel = shared[0]
    read = dict(zip("qkv", kernel.qkv_dtypes, strict=False)) or {
        t.name: t.dtype for t in kernel.inputs if t.dtype in FLOATING
    }
    wrong = [f"{name} as {t}" for name, t in read.items() if t not in (*promise.types, UNKNOWN)]
    if wrong:
        return f"its fused kernel {kernel.name} reads {', '.join(wrong)}, not {promise.types[0]}"
    if not read or UNKNOWN in read.values():
        return _Unknown(f"the layers do not say what its fused kernel {kernel.name} reads")
    return ""


def _wrong_product(promise: Promise, engine: _Engine, tf32: bool) -> str | _Unknown:
    """Why a linear's product is not computed on the promised type.

    Kernels that pad, slice or move carry the linear's name too, and so does the next linear's
    product when it adds this one's bias.  A layer that is this linear's alone must read the promised
    type; of layers that several linears share (TensorRT merges those with one input) one must.
    """
    name, wanted = promise.in_engine[0], promise.types[0]
    products = [layer for layer in engine.held[name] if layer.is_gemm or layer.is_gemv]
    if not products:
        found = ", ".join(f"{layer.name} ({layer.layer_type})" for layer in engine.held[name])
        return f"no layer computes its product: its name is in {found}"
    own = [p for p in products if not any(n in engine.linears and n != name for n in p.onnx_nodes)]
    types = {layer.name: _operand_type(layer) for layer in products}
    wrong = [layer for layer in own if types[layer.name] not in (wanted, UNKNOWN)]
    if not wrong and not any(types[p.name] in (wanted, UNKNOWN) for p in products):
        wrong = products
    if wrong:
        reads = ", ".join(f"{layer.name} reads {types[layer.name]}" for layer in wrong)
        return f"its product is not on {wanted}: {reads}"
    if all(types[p.name] == UNKNOWN for p in products):
        return _Unknown(f"the layers do not say what {products[0].name} reads")
    if wanted == "fp32" and not tf32:
        rounded = [p.name for p in products if "tf32" in p.tactic.lower()]
        if rounded:
            return f"its product rounds its operands to TF32: {', '.join(rounded)}"
    return ""


def _operand_type(layer: LayerRecord) -> str:
    """The type that a product is computed on; FP8 only when both operands are and stay so."""
    dtype = layer.product_dtype or UNKNOWN
    if dtype == "fp8" and not _reads_two_fp8(layer):
        return "fp8 on one operand only"
    if dtype == "fp8" and layer.casts_before_product:
        return "fp8 and casts it before the product"
    return dtype


def _reads_two_fp8(layer: LayerRecord) -> bool:
    inputs = [t for t in layer.inputs if t.dtype == "fp8"]
    return len(inputs) > 1 or (bool(inputs) and any(t.dtype == "fp8" for t in layer.constants))


def _not_fp32(promise: Promise, engine: _Engine) -> str:
    """Why an fp32 structure is not computed in fp32, by what the layers show of it.

    The types inside a fused kernel are not listed.  But an engine that computes the structure in
    another type has no casts around it, and a layer that holds part of it and no cast reads and
    writes fp32 alone.  Where TensorRT moves a cast past a Transpose, the kernel's name still shows it.
    """
    lost = [cast for cast in promise.casts if cast not in engine.held]
    holders = [layer for node in promise.in_engine for layer in engine.held.get(node, ())]
    moved = any(_casts_unnamed(layer, engine) for layer in holders)
    if promise.casts and len(lost) == len(promise.casts) and not moved:
        return f"no engine layer holds the casts around it: {', '.join(lost)}"
    for node in promise.in_engine:
        for layer in engine.held.get(node, ()):
            if layer.only_moves_data or any(name in engine.casts for name in layer.onnx_nodes):
                continue
            if _casts_unnamed(layer, engine):
                continue
            tensors = (*layer.inputs, *layer.outputs, *layer.constants)
            types = sorted({t.dtype for t in tensors if t.dtype in FLOATING} - {"fp32"})
            if types:
                return f"{layer.name}, which holds {node} and no cast, has {', '.join(types)} tensors"
    return ""


def _casts_unnamed(layer: LayerRecord, engine: _Engine) -> bool:
    """Whether a generated kernel casts to or from fp32 more often than it lists casts of the graph."""
    if not any(tensor.dtype == "fp32" for tensor in (*layer.inputs, *layer.outputs)):
        return False
    named = sum(
        name in engine.casts or (bool(engine.nodes) and name not in engine.nodes) for name in layer.onnx_nodes
    )
    return layer.operators.count("Cast") > named


_HELPER = "ONNXTRT_"
"""How TensorRT's ONNX parser begins the names of layers that it adds itself."""

_MADE = re.compile(r"__(?:fp16|fp32|bf16|fp8|q|dq)(?:_\d+)?$")
"""How the names of nodes end that a conversion adds."""


def check_provenance(
    nodes: Collection[str],
    constants: Collection[str],
    products: Sequence[str],
    layers: Sequence[LayerRecord],
    *,
    exact: bool = False,
) -> Check:
    """Whether the layers were built from the graph that has ``nodes``.

    Every product of the graph must be in a layer, every product of the engine must come from the
    graph, and so must every cast and quantization that a conversion adds: the same model converted
    in another way differs in them alone.  Other weights in the same graph do not show here.

    TensorRT-RTX lists no names but the graph's (measured on 80 builds), so that any other one is
    foreign; TensorRT's inspector may list names that its parser made up.

    Args:
        nodes: Every node name of the converted graph.
        constants: Every initializer name.
        products: Names of the nodes that no optimization removes: matrix products and convolutions.
        layers: The engine's layers.
        exact: Whether the layers can only list names of the graph that they were built from.
    """
    held = index_by_node(layers)

    def is_foreign(name: str) -> bool:
        if name in nodes or name in constants or name.startswith(_HELPER):
            return False
        # The parser numbers the layers of a node that it spells with several: name_12.  Exporters
        # number nodes in the same way, so that this is only allowed for where it may happen.
        base, _, number = name.rpartition("_")
        return exact or not (number.isdigit() and base in nodes)

    failures = [
        Failure(name, "no engine layer was made from this node", (name,), ())
        for name in products
        if name not in held
    ]
    missing = len(failures)
    foreign = [name for name in held if is_foreign(name)]
    for name in foreign:
        own = [
            layer
            for layer in held[name]
            if (layer.is_gemm or layer.is_gemv or layer.is_fused_attention)
            and all(map(is_foreign, layer.onnx_nodes))
        ]
        if exact or own or _MADE.search(name):
            where = tuple(layer.name for layer in held[name])
            failures.append(Failure(name, "the engine holds this node, the graph does not", (name,), where))
    if missing and len(failures) == missing and foreign:
        where = tuple(layer.name for layer in held[foreign[0]])
        failures.append(
            Failure(foreign[0], "the engine holds this node, the graph does not", (foreign[0],), where)
        )
    status = Status.FAILED if failures else Status.PASSED
    return Check("same_graph", status, len(products), len(products) - missing, tuple(failures))
