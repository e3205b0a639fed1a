"""Finds where a converted graph begins to differ from its source: the node that the gate cannot name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from engine_builder.graph.find import find_structures
from engine_builder.graph.reading import is_float
from engine_builder.precision.convert import normalizing_passes
from verify.inputs import Array, Inputs
from verify.strict import StrictEvaluator, load

_FLOOR: Final = 0.01
"""A relative difference that rounding makes by itself; an fp8 product makes 0.04 (measured)."""

_JUMP: Final = 5.0
"""How many times as far off as its sources a result must be to be called the cause."""


@dataclass(frozen=True)
class Divergence:
    """The first node whose result differs far beyond what it is made from.

    ``relative_l2`` is the norm of the difference over that of the source's own value, infinite where
    a value is not finite; ``before`` is the largest of those that the node's result is made from.
    """

    node: str
    op_type: str
    relative_l2: float
    before: float

    def __str__(self) -> str:
        off = "not finite" if math.isinf(self.relative_l2) else f"off by {self.relative_l2:.3g}"
        return f"{self.op_type} {self.node} is {off} where what it is made from is off by {self.before:.2g}"


def locate(source: Path, converted: Path, inputs: Inputs) -> Divergence | None:
    """The first node of ``converted`` that differs from ``source`` beyond rounding; None if none does.

    Both graphs are evaluated strictly, twice: at the ends of their structures, then at every node
    between the one that stands out and those before it.  Nodes are matched by name, which a conversion
    keeps; memory holds the values at these places, so that a short length is what to locate with.

    Raises:
        ConversionError: One of the graphs cannot be evaluated.
        ResourceError: Memory runs out.
    """
    reference = _normalized(source)
    structures = find_structures(reference)
    ends = {
        node.name or ""
        for node in (
            *(n.nodes[-1] for n in structures.norms),
            *(r.nodes[-1] for r in structures.rotary),
            *(core.pv for core in structures.attention),
            *(linear.node for linear in structures.linears),
            *(node for f in structures.fourier for node in (f.cos, f.sin)),
        )
    }
    ends |= {node.name or "" for v in reference.graph.outputs if (node := v.producer()) is not None}
    end = _first(source, converted, inputs, ends)
    if end is None:
        return None
    between = _between(_normalized(source).graph, end.node, ends)
    return _first(source, converted, inputs, between | (ends - {end.node}), among=between) or end


def _normalized(source: Path) -> ir.Model:
    """The source in the form that conversions begin with, so that nodes have the same names."""
    model = load(source)
    for graph_pass in normalizing_passes():
        graph_pass(model)
    return model


def _first(
    source: Path,
    converted: Path,
    inputs: Inputs,
    places: Collection[str],
    among: Collection[str] | None = None,
) -> Divergence | None:
    """Of the nodes at ``places`` that both graphs have, the first that differs far beyond its sources."""
    reference, candidate = _normalized(source), load(converted)
    others = {node.name: node for node in candidate.graph}
    marked = [
        node
        for node in reference.graph
        if node.name in places and node.name in others and _comparable(node, others[node.name])
    ]
    errors = _errors(
        _values(reference, marked, inputs),
        _values(candidate, [others[node.name] for node in marked], inputs),
        [node.name or "" for node in marked],
    )
    before = _before(reference.graph, set(errors))
    for node in marked:
        name = node.name or ""
        sources = max((errors[n] for n in before[name]), default=0.0)
        if errors[name] > _JUMP * (sources + _FLOOR) and (among is None or name in among):
            return Divergence(name, node.op_type, errors[name], sources)
    return None


def _comparable(node: ir.Node, other: ir.Node) -> bool:
    return bool(node.outputs) and is_float(node.outputs[0]) and is_float(other.outputs[0])


def _values(model: ir.Model, nodes: Sequence[ir.Node], inputs: Inputs) -> list[Array]:
    """The first output of each node, in fp64."""
    outputs = model.graph.outputs
    outputs.clear()
    outputs.extend(node.outputs[0] for node in nodes)
    evaluator = StrictEvaluator(model)
    known = {value.name for value in evaluator.inputs}
    results = evaluator.run({name: array for name, array in inputs.items() if name in known})
    return [results[node.outputs[0].name or ""] for node in nodes]


def _errors(expected: Sequence[Array], actual: Sequence[Array], names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, wanted, got in zip(names, expected, actual, strict=True):
        if wanted.shape != got.shape:
            found[name] = math.inf
            continue
        a, b = wanted.astype(np.float64), got.astype(np.float64)
        norm = float(np.linalg.norm(a))
        difference = float(np.linalg.norm(b - a))
        found[name] = difference / norm if norm else (0.0 if difference == 0 else math.inf)
        if not math.isfinite(found[name]):
            found[name] = math.inf
    return found


def _before(graph: ir.Graph, marked: Collection[str]) -> Mapping[str, frozenset[str]]:
    """For each marked node the nearest marked nodes that its result is made from."""
    reaching: dict[int, frozenset[str]] = {}
    result: dict[str, frozenset[str]] = {}
    for node in graph:
        made_from: frozenset[str] = frozenset().union(
            *(reaching.get(id(v), frozenset()) for v in node.inputs if v is not None)
        )
        name = node.name or ""
        if name in marked:
            result[name] = made_from
            made_from = frozenset((name,))
        reaching.update((id(v), made_from) for v in node.outputs)
    return result


def _between(graph: ir.Graph, name: str, ends: Collection[str]) -> set[str]:
    """The nodes that lie between ``name`` and the nearest of ``ends`` before it, ``name`` included."""
    found: set[str] = set()
    pending = [node for node in graph if node.name == name]
    while pending:
        node = pending.pop()
        if node.name in found:
            continue
        found.add(node.name or "")
        makers = [v.producer() for v in node.inputs if v is not None]
        pending.extend(m for m in makers if m is not None and m.name not in ends)
    return found
