"""What a transformer's ONNX graph is made of, as values.

Each structure is found by shape (``engine_builder.graph.find``), whichever exporter spelled it,
and holds references into the graph it was found in.  A structure that almost matches is a
``NearMiss``: data that says which node was looked at and why it was refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalization: ``x / sqrt(mean(x^2) + epsilon) * gain`` (RMSNorm) or its centred form.

    ``nodes`` run from the square to the multiplication by the gain; on trained models ``x^2``
    exceeds 65504, so none of them may be fp16.
    """

    kind: str
    """``rms``, ``layer``, ``group`` or ``instance``."""
    nodes: tuple[ir.Node, ...]
    x: ir.Value
    output: ir.Value
    gain: ir.Value | None
    epsilon: float


@dataclass(frozen=True, eq=False)
class RotaryEmbedding:
    """One rotation of a query or key: ``x * cos(angle) + rotate_half(x) * sin(angle)``.

    ``angle`` is shaped (rows, rotated dims) or broadcasts to it; it depends on positions alone.
    ``nodes`` are the rotation itself, from the first slice of ``x`` to ``output``; the
    trigonometric nodes and the chain that computes the angle are kept apart because they are
    shared between rotations and may be replaced by tables.
    """

    nodes: tuple[ir.Node, ...]
    trig: tuple[ir.Node, ...]
    """The Cos and Sin nodes, in this order; empty when cosine and sine are read from tables."""
    tables: tuple[ir.Value, ...]
    """The constant cosine and sine tables, in this order; empty when they are computed."""
    angle: ir.Value | None
    angle_nodes: tuple[ir.Node, ...]
    x: ir.Value
    output: ir.Value

    @property
    def name(self) -> str:
        """The name of the rotation's last node, by which reports know it."""
        return self.nodes[-1].name or ""


@dataclass(frozen=True, eq=False)
class FourierFeatures:
    """``[cos(w*x) | sin(w*x)]`` of a graph input: the timestep and duration embeddings.

    The angle reaches about 62,000 rad, so its whole path back to the graph input is part of it.
    """

    nodes: tuple[ir.Node, ...]
    cos: ir.Node
    sin: ir.Node
    angle: ir.Value
    angle_nodes: tuple[ir.Node, ...]
    output: ir.Value


@dataclass(frozen=True, eq=False)
class AttentionCore:
    """``softmax(q @ k^T * scale + mask) @ v``, the part that TensorRT fuses into one kernel.

    ``nodes`` run from the first scaling of ``q`` or ``k`` to the second matrix product; a
    composite ``Attention`` operator is the single node of its core.
    """

    nodes: tuple[ir.Node, ...]
    qk: ir.Node
    softmax: ir.Node
    pv: ir.Node
    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None
    output: ir.Value

    @property
    def name(self) -> str:
        """The name of the core's last node, by which reports know it."""
        return self.pv.name or ""


@dataclass(frozen=True, eq=False)
class Linear:
    """A matrix product with a constant operand.

    ``weight`` is the constant's own value, before any transposition; ``weight_axis_out`` is its
    axis that runs over the output features.  ``weight_input`` is the operand index of the weight.
    """

    node: ir.Node
    weight: ir.Value
    weight_input: int
    weight_axis_out: int
    in_features: int
    out_features: int
    activation: ir.Value
    output: ir.Value

    @property
    def name(self) -> str:
        return self.node.name or ""


@dataclass(frozen=True)
class NearMiss:
    """A node that looked like the anchor of a structure, and why it was not one."""

    structure: str
    node: str
    reason: str


@dataclass(frozen=True, eq=False)
class Structures:
    """Everything that was found in one graph, in graph order."""

    norms: tuple[Norm, ...]
    rotary: tuple[RotaryEmbedding, ...]
    fourier: tuple[FourierFeatures, ...]
    attention: tuple[AttentionCore, ...]
    linears: tuple[Linear, ...]
    near_misses: tuple[NearMiss, ...]

    def counts(self) -> dict[str, int]:
        return {
            "norms": len(self.norms),
            "rotary_embeddings": len(self.rotary),
            "rotary_trig_nodes": len({id(n) for r in self.rotary for n in r.trig}),
            "fourier_features": len(self.fourier),
            "attention_cores": len(self.attention),
            "linears": len(self.linears),
        }

    def to_json(self) -> Mapping[str, Any]:
        """Names only: a description of the graph that can be stored and compared."""

        def names(nodes: tuple[ir.Node, ...]) -> list[str]:
            return [n.name or "" for n in nodes]

        return {
            "counts": self.counts(),
            "norms": [
                {
                    "kind": s.kind,
                    "nodes": names(s.nodes),
                    "gain": s.gain.name if s.gain is not None else None,
                    "epsilon": s.epsilon,
                }
                for s in self.norms
            ],
            "rotary_embeddings": [
                {
                    "name": s.name,
                    "nodes": names(s.nodes),
                    "trig": names(s.trig),
                    "tables": [t.name for t in s.tables],
                    "angle": s.angle.name if s.angle is not None else None,
                }
                for s in self.rotary
            ],
            "fourier_features": [
                {
                    "cos": s.cos.name,
                    "sin": s.sin.name,
                    "angle": s.angle.name,
                    "angle_nodes": names(s.angle_nodes),
                }
                for s in self.fourier
            ],
            "attention_cores": [
                {
                    "name": s.name,
                    "nodes": names(s.nodes),
                    "q": s.q.name,
                    "k": s.k.name,
                    "v": s.v.name,
                    "mask": s.mask.name if s.mask is not None else None,
                }
                for s in self.attention
            ],
            "linears": [
                {"node": s.name, "weight": s.weight.name, "in": s.in_features, "out": s.out_features}
                for s in self.linears
            ],
            "near_misses": [
                {"structure": m.structure, "node": m.node, "reason": m.reason} for m in self.near_misses
            ],
        }
