"""Finds rotary embeddings: products with a cosine and a sine that are added up to a rotation.

Two spellings are told apart.  Whole: ``x * cos + turned(x) * sin``, where ``turned`` swaps the halves
and negates one.  In halves: ``a * cos - b * sin`` and ``b * cos + a * sin``, joined again.  In either,
cosine and sine are computed from an angle or read from constant tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import onnx_ir as ir

from engine_builder.graph.reading import (
    Fingerprints,
    attribute_int,
    constant,
    ints,
    is_float,
    is_op,
    origin,
    producer,
    readers,
    scalar,
    small_array,
)
from engine_builder.graph.structures import NearMiss, RotaryEmbedding

MOVES = (
    "Expand",
    "Flatten",
    "Gather",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)
"""Operators that rearrange or repeat the elements of their first input."""

_FAR = 64
"""Nodes between a cosine and the product it enters: no exporter writes more than a handful."""


@dataclass(frozen=True, eq=False)
class _Phase:
    """The cosine or sine in a product.

    ``key`` is equal for equal factors, ``angle`` for factors of one angle.
    """

    kind: str
    """``Cos``, ``Sin`` or ``table``."""
    roots: tuple[ir.Node, ...]
    table: ir.Value | None
    path: tuple[ir.Node, ...]
    """What rearranges or scales it on its way into the product."""
    key: int
    angle: int


@dataclass(frozen=True, eq=False)
class _Term:
    """A product of a phase and an activation."""

    product: ir.Node
    phase: _Phase
    data: ir.Value


def find_rotations(
    nodes: Sequence[ir.Node], fingerprints: Fingerprints
) -> tuple[list[RotaryEmbedding], list[NearMiss]]:
    """Every rotation among ``nodes``; a sum of a cosine and a sine that rotates nothing is a near miss."""
    found: list[RotaryEmbedding] = []
    missed: list[NearMiss] = []
    halves: dict[frozenset[tuple[int, int]], tuple[ir.Node, _Term, _Term]] = {}
    for node in nodes:
        if is_op(node, "RotaryEmbedding"):
            match = _composite(node, fingerprints)
            if isinstance(match, str):
                missed.append(NearMiss("rotary embedding", node.name or "", match))
            else:
                found.append(match)
            continue
        terms = _terms(node, fingerprints)
        if terms is None:
            continue
        whole = [_whole(node, *pair, fingerprints) for pair in _orders(terms)]
        rotation = next((w for w in whole if isinstance(w, RotaryEmbedding)), None)
        if rotation is not None:
            found.append(rotation)
            continue
        one, two = terms
        key = frozenset(_half_key(t, fingerprints) for t in terms)
        swapped = frozenset(
            {
                (one.phase.key, _half_key(two, fingerprints)[1]),
                (two.phase.key, _half_key(one, fingerprints)[1]),
            }
        )
        if swapped in halves:
            match = _halves(node, terms, *halves.pop(swapped))
            if isinstance(match, str):
                missed.append(NearMiss("rotary embedding", node.name or "", match))
            else:
                found.append(match)
            continue
        halves[key] = (node, one, two)
    for node, one, two in halves.values():
        if one.phase.kind == "table":
            continue  # a sum of two products with constant matrices need not be a rotation at all
        reason = next(w for w in (_whole(node, *pair, fingerprints) for pair in _orders((one, two))))
        assert isinstance(reason, str)
        missed.append(NearMiss("rotary embedding", one.product.name or "", reason))
    return found, missed


# Factors ----------------------------------------------------------------------------------------


def phase_of(value: ir.Value | None, fingerprints: Fingerprints) -> _Phase | None:
    """The cosine, sine or table that ``value`` is, past rearrangements and scalings; None if none."""
    if value is None:
        return None
    roots: dict[int, ir.Node] = {}
    tables: dict[int, ir.Value] = {}
    path: dict[int, ir.Node] = {}
    pending = [value]
    while pending:
        current = origin(pending.pop())
        if constant(current) is not None:
            if not _is_table(current):
                return None
            tables[id(current)] = current
            continue
        node = current.producer()
        if node is None or len(path) > _FAR:
            return None
        if is_op(node, "Cos", "Sin"):
            roots[id(node)] = node
        elif is_op(node, *MOVES):
            path[id(node)] = node
            source = _required(node, 0)
            stack = producer(source)
            part = None if stack is None else _part(current, node, stack)
            if stack is not None and part is not None:
                path[id(stack)] = stack
                source = part
            pending.append(source)
        elif is_op(node, "Concat"):
            path[id(node)] = node
            pending.extend(v for v in node.inputs if v is not None)
        elif is_op(node, "Mul", "Div") and (scaled := _scaled(node)) is not None:
            path[id(node)] = node
            pending.append(scaled)
        else:
            return None
    ordered = tuple(reversed(path.values()))
    key = fingerprints(value)
    kinds = {node.op_type for node in roots.values()}
    angles = {fingerprints(_required(node, 0)) for node in roots.values()}
    if not tables and len(kinds) == len(angles) == 1:
        return _Phase(kinds.pop(), tuple(roots.values()), None, ordered, key, angles.pop())
    if not roots and len(tables) == 1:
        return _Phase("table", (), next(iter(tables.values())), ordered, key, -1)
    return None


def _required(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node.op_type} {node.name} lacks its input {index}")
    return value


def _scaled(node: ir.Node) -> ir.Value | None:
    """What a multiplication or division by a constant scalar scales, also one that is expanded."""
    for index in (0, 1) if node.op_type == "Mul" else (1,):
        factor = node.inputs[index]
        filled = producer(factor)
        if filled is not None and is_op(filled, "Expand"):
            factor = filled.inputs[0]
        if scalar(factor) is not None:
            return node.inputs[1 - index]
    return None


def _part(output: ir.Value, cut: ir.Node, stack: ir.Node) -> ir.Value | None:
    """The input of the Concat ``stack`` that ``cut`` takes out of it again, if it is a single one.

    Complex numbers are written so: cosine and sine as the real and imaginary part of one tensor.
    """
    if not is_op(stack, "Concat") or any(v is None or v.shape is None for v in stack.inputs):
        return None
    parts = [v for v in stack.inputs if v is not None]
    rank = len(parts[0].shape or ())
    axis = attribute_int(stack, "axis", 0) % max(rank, 1)
    sizes = [v.shape[axis] for v in parts if v.shape is not None]
    known = [int(s) for s in sizes if isinstance(s, int)]
    if len(known) != len(parts):
        return None
    total, span = sum(known), None
    if is_op(cut, "Slice"):
        starts, ends, axes = (ints(v) for v in (*cut.inputs[1:4], None)[:3])
        if starts and ends and axes and len(axes) == 1 and axes[0] % rank == axis:
            span = range(*slice(starts[0], ends[0]).indices(total))
    elif is_op(cut, "Gather") and attribute_int(cut, "axis", 0) % rank == axis:
        index = scalar(cut.inputs[1])
        span = None if index is None else range(int(index) % total, int(index) % total + 1)
    elif is_op(cut, "Split") and attribute_int(cut, "axis", 0) % rank == axis and len(cut.outputs) == total:
        span = range(output.index() or 0, (output.index() or 0) + 1)
    first = 0
    for part, size in zip(parts, known, strict=True):
        if span is not None and len(span) and first <= span[0] and span[-1] < first + size:
            return part
        first += size
    return None


def _is_table(value: ir.Value) -> bool:
    """A float constant with at least two dimensions longer than 1: rows by channels."""
    tensor = constant(value)
    return tensor is not None and is_float(value) and sum(1 for d in tensor.shape.numpy() if d > 1) >= 2


def _terms(node: ir.Node, fingerprints: Fingerprints) -> tuple[_Term, _Term] | None:
    """The two products with a cosine and a sine, or with two tables, that ``node`` adds or subtracts."""
    if not is_op(node, "Add", "Sub"):
        return None
    terms: list[_Term] = []
    for operand in node.inputs:
        product = producer(operand)
        if product is None or not is_op(product, "Mul") or len(product.inputs) != 2:
            return None
        for side in (0, 1):
            data, factor = product.inputs[1 - side], phase_of(product.inputs[side], fingerprints)
            if factor is not None and data is not None:
                terms.append(_Term(product, factor, origin(data)))
                break
        else:
            return None
    one, two = terms
    kinds = {one.phase.kind, two.phase.kind}
    if kinds == {"Cos", "Sin"} and one.phase.angle == two.phase.angle:
        return (one, two) if one.phase.kind == "Cos" else (two, one)
    return (one, two) if kinds == {"table"} and one.phase.key != two.phase.key else None


def _orders(terms: tuple[_Term, _Term]) -> Iterable[tuple[_Term, _Term]]:
    """(cosine, sine) in each order that is possible: which table is which, only the use tells."""
    yield terms
    if terms[0].phase.kind == "table":
        yield terms[::-1]


# Whole ------------------------------------------------------------------------------------------


def _whole(add: ir.Node, cosine: _Term, sine: _Term, fingerprints: Fingerprints) -> RotaryEmbedding | str:
    """``x * cos + turned(x) * sin``, or why it is not that."""
    # The sine's half is turned from something that the cosine's was cut from, or from that itself.
    chain = _cut_from(cosine.data)
    positions = {fingerprints(value): depth for depth, (value, _) in reversed(list(enumerate(chain)))}
    turning: dict[int, ir.Node] = {}
    depth = -1
    pending = [sine.data]
    while pending:
        value = origin(pending.pop())
        if fingerprints(value) in positions:
            depth = max(depth, positions[fingerprints(value)])
            continue
        node = value.producer()
        if node is None or not (is_op(node, *MOVES, "Concat", "Neg") or _is_sign(node)):
            at = "a graph input or constant" if node is None else f"{node.op_type} {node.name}"
            return f"the half that the sine multiplies comes from {at}, not from a turned {cosine.data.name}"
        if id(node) in turning:
            continue
        turning[id(node)] = node
        sources = node.inputs if is_op(node, "Concat", "Mul") else node.inputs[:1]
        pending.extend(v for v in sources if v is not None and is_float(v) and constant(v) is None)
    nodes = list(turning.values())
    if not any(is_op(n, "Concat", "Gather") for n in nodes) or not any(
        is_op(n, "Neg") or _is_sign(n) for n in nodes
    ):
        return "the half that the sine multiplies is not turned"
    x = chain[depth][0]
    cutting = [node for _, node in chain[:depth] if node is not None]
    body = [*reversed(cutting), *reversed(nodes)]
    return _assembled(cosine, sine, body, [cosine.product, sine.product, add], x, add.outputs[0])


def _cut_from(value: ir.Value) -> list[tuple[ir.Value, ir.Node | None]]:
    """``value`` and what it was cut from, each with the node that cut the one before from the next."""
    chain: list[tuple[ir.Value, ir.Node | None]] = []
    while True:
        value = origin(value)
        node = value.producer()
        if node is None or not is_op(node, *MOVES) or node.inputs[0] is None:
            chain.append((value, None))
            return chain
        chain.append((value, node))
        value = node.inputs[0]


def _is_sign(node: ir.Node) -> bool:
    """A multiplication by constants that are all 1 or -1."""
    if not is_op(node, "Mul"):
        return False
    arrays = [a for v in node.inputs if (a := small_array(v)) is not None]
    return any(bool(np.all(np.abs(a.astype(np.float64)) == 1.0)) and bool(np.any(a < 0)) for a in arrays)


# Halves -----------------------------------------------------------------------------------------


def _half_key(term: _Term, fingerprints: Fingerprints) -> tuple[int, int]:
    """The factor and the half, past a negation: ``a*cos - b*sin`` may be ``a*cos + (-b)*sin``."""
    return term.phase.key, fingerprints(_unsigned(term.data)[0])


def _unsigned(value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    node = value.producer()
    if node is not None and is_op(node, "Neg") and node.inputs[0] is not None:
        return origin(node.inputs[0]), [node]
    return value, []


def _halves(
    second: ir.Node, second_terms: tuple[_Term, _Term], first: ir.Node, one: _Term, two: _Term
) -> RotaryEmbedding | str:
    """The rotation whose halves are ``first`` and ``second``, or why they are not."""
    negated = [_unsigned(t.data) for t in (one, two, *second_terms)]
    signs = sum(is_op(node, "Sub") for node in (first, second)) + sum(len(n) for _, n in negated)
    if signs % 2 == 0:
        return f"neither {first.name} nor {second.name} subtracts, or both do"
    chains = [_cut_from(value) for value, _ in negated]
    common = next(
        (v for v, _ in chains[0] if all(any(v is w for w, _ in chain) for chain in chains[1:])), None
    )
    if common is None:
        return f"{one.data.name} and {two.data.name} are not halves of one value"
    cutting: dict[int, ir.Node] = {}
    for chain in chains:
        for value, node in chain:
            if value is common:
                break
            if node is not None:
                cutting[id(node)] = node
    # Pairs are often made by a Reshape before the cut and undone by another behind the join.
    paired = common.producer()
    if paired is not None and is_op(paired, "Reshape") and paired.inputs[0] is not None:
        cutting[id(paired)] = paired
        common = origin(paired.inputs[0])
    stacked = any(is_op(node, "Reshape") for node in cutting.values())
    joined = _join(first.outputs[0], second.outputs[0], stacked=stacked)
    if joined is None:
        return f"the halves {first.name} and {second.name} are not joined"
    products = [t.product for t in (one, two, *second_terms)]
    signs_nodes = [node for _, found in negated for node in found]
    cosine, sine = (one, two) if one.phase.kind != "Sin" else (two, one)
    body = [*reversed(cutting.values()), *signs_nodes]
    return _assembled(
        cosine, sine, body, [*products, first, second, *joined], common, joined[-1].outputs[0], second_terms
    )


def _join(first: ir.Value, second: ir.Value, *, stacked: bool) -> list[ir.Node] | None:
    """What puts two halves into one value again: a Concat, or a stack that is flattened.

    ``stacked`` says that the halves come from an axis of two, so that a Concat alone stacks them.
    """
    ways = []
    for value in (first, second):
        found: dict[int, tuple[ir.Node, list[ir.Node]]] = {}
        for node, _ in readers(value):
            if is_op(node, "Concat"):
                found[id(node)] = (node, [])
            elif is_op(node, "Unsqueeze", "Reshape"):
                found.update((id(r), (r, [node])) for r, _ in readers(node.outputs[0]) if is_op(r, "Concat"))
        ways.append(found)
    for key, (concat, before) in ways[0].items():
        if key not in ways[1]:
            continue
        joined = [*before, *ways[1][key][1], concat]
        if before or stacked:
            following = list(readers(concat.outputs[0]))
            if len(following) == 1 and is_op(following[0][0], "Reshape", "Flatten"):
                joined.append(following[0][0])
        return joined
    return None


# Both -------------------------------------------------------------------------------------------


def _assembled(
    cosine: _Term,
    sine: _Term,
    body: list[ir.Node],
    sums: list[ir.Node],
    x: ir.Value,
    output: ir.Value,
    more: tuple[_Term, ...] = (),
) -> RotaryEmbedding:
    """The rotation with its factors' paths, and with the channels that are joined to it unrotated."""
    nodes = {id(n): n for term in (cosine, sine, *more) for n in term.phase.path}
    nodes.update((id(n), n) for n in (*body, *sums))
    kept = _unrotated(output, x, {id(n): n for n in body})
    if kept is not None:
        concat, slices, x = kept
        nodes = {id(n): n for n in (*slices, *nodes.values(), concat)}
        output = concat.outputs[0]
    trig = {
        id(n): n
        for kind in ("Cos", "Sin")
        for t in (cosine, sine, *more)
        for n in t.phase.roots
        if n.op_type == kind
    }
    return _rotary(tuple(nodes.values()), tuple(trig.values()), (cosine.phase, sine.phase), x, output)


def _rotary(
    nodes: tuple[ir.Node, ...],
    trig: tuple[ir.Node, ...],
    phases: tuple[_Phase, _Phase],
    x: ir.Value,
    output: ir.Value,
) -> RotaryEmbedding:
    tables = tuple(p.table for p in phases if p.table is not None)
    angle = origin(_required(trig[0], 0)) if trig else None
    chain: dict[int, ir.Node] = {}
    for node in trig:
        ancestors, _ = angle_ancestors(_required(node, 0))
        chain.update((id(n), n) for n in ancestors)
    return RotaryEmbedding(nodes, trig, tables, angle, tuple(chain.values()), x, output)


def _unrotated(
    output: ir.Value, x: ir.Value, body: dict[int, ir.Node]
) -> tuple[ir.Node, list[ir.Node], ir.Value] | None:
    """The Concat that puts a rotation beside channels of the same value that are not rotated."""
    joined = [r for r, _ in readers(output) if is_op(r, "Concat")]
    if len(joined) != 1:
        return None
    rest = [v for v in joined[0].inputs if v is not None and origin(v) is not output]
    chain = _cut_from(x)
    depth, slices = 0, dict[int, ir.Node]()
    for value in rest:
        node = producer(value)
        if node is None or not is_op(node, "Slice", "Split", "Gather") or node.inputs[0] is None:
            return None
        source = origin(node.inputs[0])
        place = next((i for i, (v, _) in enumerate(chain) if v is source), None)
        if place is None and id(node) not in body:
            return None
        depth = max(depth, place or 0)
        if id(node) not in body:
            slices[id(node)] = node
    slices.update((id(n), n) for _, n in chain[:depth] if n is not None and id(n) not in body)
    return joined[0], list(slices.values()), chain[depth][0]


def _composite(node: ir.Node, fingerprints: Fingerprints) -> RotaryEmbedding | str:
    if len(node.inputs) < 3 or any(v is None for v in node.inputs[:3]):
        return "it lacks an operand"
    cosine, sine = (phase_of(v, fingerprints) for v in node.inputs[1:3])
    if cosine is None or sine is None:
        return "its cosine or sine is neither computed from an angle nor a constant table"
    nodes = {id(n): n for n in (*cosine.path, *sine.path, node)}
    trig = tuple(sorted({*cosine.roots, *sine.roots}, key=lambda n: n.op_type))
    return _rotary(tuple(nodes.values()), trig, (cosine, sine), origin(_required(node, 0)), node.outputs[0])


def angle_ancestors(angle: ir.Value) -> tuple[tuple[ir.Node, ...], bool]:
    """The float-valued nodes that ``angle`` is computed from, and whether a graph input's data is.

    The path ends at constants, at graph inputs, and where a float is made of integers (a Cast of
    positions, a Range): shapes and indices do not carry rounding.
    """
    nodes: dict[int, ir.Node] = {}
    reads_data = False
    pending = [angle]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None:
            reads_data |= value.is_graph_input() and value.const_value is None and is_float(value)
            continue
        if id(node) in nodes or not is_float(value):
            continue
        nodes[id(node)] = node
        pending.extend(v for v in node.inputs if v is not None and is_float(v))
    return tuple(nodes.values()), reads_data
