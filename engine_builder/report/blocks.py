"""Which block of a transformer a node belongs to: by the residual stream, so for every exporter's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from engine_builder.graph.reading import is_float, is_op, origin
from engine_builder.graph.structures import Structures
from engine_builder.precision.islands import residual_adds


def find_blocks(graph: ir.Graph, structures: Structures) -> Mapping[int, int]:
    """The block, from 0, of every node that belongs to exactly one, by the node's identity.

    A node belongs to the branch whose sum in the residual stream it reaches first.  A block begins at
    each branch with attention that follows a branch without.  What several blocks share, what makes the
    stream and what reads its end belong to none.

    Args:
        graph: Topologically sorted.
        structures: Found in ``graph``.
    """
    order = {id(node): position for position, node in enumerate(graph)}
    sums = sorted((n for n in residual_adds(structures) if id(n) in order), key=lambda n: order[id(n)])
    branch_of = {id(node): 1 << index for index, node in enumerate(sums)}
    reached: dict[int, int] = {}
    for node in reversed(list(graph)):
        bits = 0
        for output in node.outputs:
            # A size that is read from one block's activations and used in all makes nothing shared.
            for use in output.uses() if is_float(output) or is_op(node, "QuantizeLinear") else ():
                bits |= branch_of.get(id(use.node)) or reached.get(id(use.node), 0)
        reached[id(node)] = bits
    blocks = _number(sums, [reached.get(id(core.pv), 0) for core in structures.attention])
    if not blocks:
        return {}
    outside = _ancestors(_entries(sums, structures))
    found: dict[int, int] = {}
    for node in graph:
        bits = branch_of.get(id(node)) or reached[id(node)]
        touched = {blocks[index] for index in range(bits.bit_length()) if bits >> index & 1}
        if len(touched) == 1 and id(node) not in outside:
            found[id(node)] = touched.pop()
    return found


def _number(sums: list[ir.Node], attention: Iterable[int]) -> list[int]:
    """The block of each branch; none without attention."""
    attends = 0
    for bits in attention:
        attends |= bits & -bits
    if not attends:
        return []
    blocks: list[int] = []
    block, inside = -1, False
    for index in range(len(sums)):
        with_attention = bool(attends >> index & 1)
        block += with_attention and not inside
        inside = with_attention
        blocks.append(max(block, 0))
    return blocks


def _entries(sums: list[ir.Node], structures: Structures) -> list[ir.Node]:
    """The nodes that compute what the first sums add to: the stream before any block."""
    normed = {id(origin(norm.x)) for norm in structures.norms}
    stream = {id(node) for node in sums}
    entries: list[ir.Node] = []
    for node in sums:
        for operand in node.inputs:
            source = None if operand is None else origin(operand)
            producer = None if source is None else source.producer()
            if producer is not None and id(source) in normed and id(producer) not in stream:
                entries.append(producer)
    return entries


def _ancestors(nodes: Iterable[ir.Node]) -> set[int]:
    pending = list(nodes)
    seen: set[int] = set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None:
                pending.append(producer)
    return seen
