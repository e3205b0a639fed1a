"""Finds the structures of a graph by shape, for every exporter's spelling."""

from __future__ import annotations

import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.find.angles import find_angles
from engine_builder.graph.find.attention import find_attention
from engine_builder.graph.find.linears import find_linears
from engine_builder.graph.find.norms import find_norms
from engine_builder.graph.structures import Structures

__all__ = ["FINDERS_VERSION", "find_structures", "require_dit"]

FINDERS_VERSION = 3
"""Raised when other nodes may be found: what is kept in fp32 depends on it."""


def find_structures(model: ir.Model) -> Structures:
    """All norms, rotary embeddings, Fourier features, attention cores and linears of ``model``.

    The graph is read, never changed.  Nodes inside subgraphs are visited too.  Values need types:
    what has none is taken for an integer.  A product that makes an angle (positions by frequencies)
    is part of the angle and no linear.
    """
    nodes = list(model.graph.all_nodes())
    norms, missed_norms = find_norms(nodes)
    rotary, fourier, missed_angles = find_angles(nodes)
    attention, missed_attention = find_attention(nodes)
    linears, missed_linears = find_linears(nodes)
    chains = (*(r.angle_nodes for r in rotary), *(f.angle_nodes for f in fourier))
    in_angles = {id(node) for chain in chains for node in chain}
    linears = [linear for linear in linears if id(linear.node) not in in_angles]
    return Structures(
        tuple(norms),
        tuple(rotary),
        tuple(fourier),
        tuple(attention),
        tuple(linears),
        (*missed_norms, *missed_angles, *missed_attention, *missed_linears),
    )


def require_dit(structures: Structures) -> None:
    """Refuses a graph that lacks what every SA3 DiT has.

    Raises:
        ConversionError: naming what is absent and the near misses that explain it.
    """
    absent = [
        what
        for what, found in (
            ("RMSNorm", structures.norms),
            ("rotary embedding", structures.rotary),
            ("Fourier features", structures.fourier),
            ("attention core", structures.attention),
            ("linear", structures.linears),
        )
        if not found
    ]
    if not absent:
        return
    reasons = [f"{m.node}: {m.reason}" for m in structures.near_misses[:4]]
    more = len(structures.near_misses) - len(reasons)
    detail = "; ".join(reasons) + (f"; and {more} more near misses" if more > 0 else "")
    raise ConversionError(
        f"the graph has no {', no '.join(absent)}, which an SA3 DiT must have"
        + (f"; nearest: {detail}" if detail else "; nothing came near"),
        hint="for another kind of model set model.kind: generic",
    )
