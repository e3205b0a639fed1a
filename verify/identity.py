"""Checks promises against an engine's layers by the ONNX nodes that each layer was fused from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from verify.layers import LayerRecord, index_by_node
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


def check_promises(
    promises: Sequence[Promise], layers: Sequence[LayerRecord], *, baked_tables: int | None
) -> tuple[Check, ...]:
    """One check per kind of promise, in a fixed order; a kind without promises is not applicable.

    ``baked_tables`` is how many rotations read tables, where the recipe bakes them, else None: a
    baked graph keeps that promise by having no rotary trigonometry left to make one about.
    """
    held = index_by_node(layers)
    checks: list[Check] = []
    for kind in PromiseKind:
        made = [p for p in promises if p.kind == kind]
        if not made and kind is PromiseKind.BAKED_ROTARY and baked_tables:
            checks.append(Check(kind.value, Status.PASSED, baked_tables, baked_tables))
            continue
        if not made:
            checks.append(Check(kind.value, Status.NOT_APPLICABLE, 0, 0))
            continue
        failures = [f for p in made if (f := _broken(p, held)) is not None]
        checks.append(
            Check(
                kind.value,
                Status.FAILED if failures else Status.PASSED,
                len(made),
                len(made) - len(failures),
                tuple(failures),
            )
        )
    return tuple(checks)


def check_provenance(
    node_names: Sequence[str], weighty: Sequence[str], layers: Sequence[LayerRecord]
) -> Check:
    """Whether the layers were built from the graph that has ``node_names``.

    Args:
        node_names: Every node and initializer name of the converted graph.
        weighty: Nodes that no optimization removes: matrix products and convolutions.
        layers: The engine's layers.
    """
    known = set(node_names)
    held = index_by_node(layers)
    missing = [name for name in weighty if name not in held]
    failures = [Failure(name, "no engine layer was made from this node", (name,), ()) for name in missing]
    foreign = [name for name in held if name not in known and name.rsplit("_", 1)[0] not in known]
    # The parser adds helper layers under names of its own; a foreign graph shows by its products.
    if missing and foreign:
        failures.append(
            Failure(
                foreign[0],
                "the engine holds this node, the graph does not",
                (foreign[0],),
                tuple(layer.name for layer in held[foreign[0]]),
            )
        )
    return Check(
        "same_graph",
        Status.FAILED if failures else Status.PASSED,
        len(weighty),
        len(weighty) - len(missing),
        tuple(failures),
    )


def _broken(promise: Promise, held: Mapping[str, tuple[LayerRecord, ...]]) -> Failure | None:
    """Why ``promise`` is not kept, or None; the graph's own types are looked at first."""
    layers = tuple(dict.fromkeys(layer.name for node in promise.in_engine for layer in held.get(node, ())))

    def failure(reason: str) -> Failure:
        return Failure(promise.subject, reason, promise.nodes, layers)

    if not promise.held:
        return failure(promise.broken_at)
    if promise.in_engine and not layers:
        return failure("no engine layer was made from its nodes")
    if promise.kind is PromiseKind.FUSED_ATTENTION:
        reason = _unfused(promise, held)
        return failure(reason) if reason else None
    if promise.kind is PromiseKind.FP8_LINEAR:
        holders = held[promise.in_engine[0]]
        if not any(_reads_fp8(layer) for layer in holders):
            types = sorted({t.dtype for layer in holders for t in (*layer.inputs, *layer.constants)})
            return failure(f"its layer reads {', '.join(types) or 'nothing'}, not FP8 operands")
    return None


def _reads_fp8(layer: LayerRecord) -> bool:
    """Whether both operands of a product are FP8: an input, and a constant or another input."""
    inputs = [t for t in layer.inputs if t.dtype == "fp8"]
    return bool(inputs) and (len(inputs) > 1 or any(t.dtype == "fp8" for t in layer.constants))


def _unfused(promise: Promise, held: Mapping[str, tuple[LayerRecord, ...]]) -> str:
    """Why the core of ``promise`` is not one fused kernel that reads the promised type, or nothing."""
    holders = [held.get(node, ()) for node in promise.in_engine]
    shared = [
        layer
        for layer in holders[-1]
        if layer.is_fused_attention and all(layer in others for others in holders)
    ]
    if not shared:
        split = sorted({f"{layer.name} ({layer.layer_type})" for layers in holders for layer in layers})
        return f"not one fused kernel but {len(split)} layers: {', '.join(split)}"
    wrong = [
        f"{name} as {t}"
        for name, t in zip("qkv", shared[0].qkv_dtypes, strict=False)
        if t not in promise.types
    ]
    if wrong:
        return f"its fused kernel {shared[0].name} reads {', '.join(wrong)}, not {promise.types[0]}"
    return ""
