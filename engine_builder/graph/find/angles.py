"""Finds what takes the sine and cosine of an angle: rotary embeddings and Fourier features.

The two differ in where the angle comes from.  A rotary angle is made of positions: constants and
shapes.  A Fourier angle is made of the data of a graph input.  Either way the angle's whole
ancestor path belongs to the structure, because rounding anywhere on it moves the angle.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from engine_builder.graph.reading import constant, is_float, is_op, origin, producer, readers, scalar
from engine_builder.graph.structures import FourierFeatures, NearMiss, RotaryEmbedding

_REARRANGING = (
    "Slice", "Split", "Squeeze", "Unsqueeze", "Reshape", "Gather", "Transpose", "Concat", "Neg", "Flatten",
)  # fmt: skip


_TABLE_READS = ("Slice", "Gather", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose")


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


def find_angles(
    graph: ir.Graph,
) -> tuple[list[RotaryEmbedding], list[FourierFeatures], list[NearMiss]]:
    """Every rotation and every Fourier feature block; unexplained trigonometry is a near miss."""
    rotations: list[RotaryEmbedding] = []
    fourier: list[FourierFeatures] = []
    missed: list[NearMiss] = []
    cosines: dict[int, list[ir.Node]] = {}
    sines: dict[int, list[ir.Node]] = {}
    order: list[ir.Value] = []
    for node in graph.all_nodes():
        if is_op(node, "Cos", "Sin") and node.inputs[0] is not None:
            angle = origin(node.inputs[0])
            if id(angle) not in cosines:
                cosines[id(angle)], sines[id(angle)] = [], []
                order.append(angle)
            (cosines if node.op_type == "Cos" else sines)[id(angle)].append(node)
    explained: set[int] = set()
    for angle in order:
        ancestors, reads_data = angle_ancestors(angle)
        cos_nodes, sin_nodes = cosines[id(angle)], sines[id(angle)]
        if not cos_nodes or not sin_nodes:
            lone = (cos_nodes or sin_nodes)[0]
            absent = "sine" if cos_nodes else "cosine"
            missed.append(
                NearMiss("angle", lone.name or "", f"no {absent} is taken of its angle {angle.name}")
            )
            continue
        if reads_data:
            fourier.extend(_fourier(angle, ancestors, cos_nodes, sin_nodes))
            explained.update(id(n) for n in (*cos_nodes, *sin_nodes))
            continue
        for cos in cos_nodes:
            for product, index in _products(cos.outputs[0]):
                match = _rotation(product, index, cos, sin_nodes, angle, ancestors)
                if isinstance(match, RotaryEmbedding):
                    rotations.append(match)
                    explained.update(id(trig) for trig in match.trig)
                else:
                    missed.append(NearMiss("rotary embedding", product.name or "", match))
            for user, index in readers(cos.outputs[0]):
                if is_op(user, "RotaryEmbedding") and index == 1 and user.inputs[0] is not None:
                    sin = producer(user.inputs[2])
                    if sin is not None and sin in sin_nodes:
                        rotations.append(
                            RotaryEmbedding(
                                (user,), (cos, sin), (), angle, ancestors, user.inputs[0], user.outputs[0]
                            )
                        )
                        explained.update((id(cos), id(sin)))
        for trig in (*cos_nodes, *sin_nodes):
            if id(trig) not in explained:
                missed.append(
                    NearMiss("rotary embedding", trig.name or "", "its value takes part in no rotation")
                )
    rotations.extend(_tabled(graph))
    return rotations, fourier, missed


def _fourier(
    angle: ir.Value, ancestors: tuple[ir.Node, ...], cos_nodes: list[ir.Node], sin_nodes: list[ir.Node]
) -> Iterable[FourierFeatures]:
    for cos, sin in zip(cos_nodes, sin_nodes, strict=False):
        joined = next(
            (
                reader
                for reader, _ in readers(cos.outputs[0])
                if is_op(reader, "Concat") and any(producer(v) is sin for v in reader.inputs)
            ),
            None,
        )
        nodes = (cos, sin) if joined is None else (cos, sin, joined)
        output = cos.outputs[0] if joined is None else joined.outputs[0]
        yield FourierFeatures(nodes, cos, sin, angle, ancestors, output)


def _products(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Multiplications that read ``value``, past insertions of broadcast dimensions and slices."""
    found: list[tuple[ir.Node, int]] = []
    pending = [value]
    while pending:
        for reader, index in readers(pending.pop()):
            if is_op(reader, "Mul"):
                found.append((reader, index))
            elif (
                is_op(reader, "Unsqueeze", "Reshape", "Expand", "Slice", "Gather", "Transpose") and index == 0
            ):
                pending.extend(reader.outputs)
    return found


def _trig_behind(value: ir.Value | None) -> ir.Node | None:
    """The Cos or Sin that ``value`` is, past the same rearrangements as ``_products``."""
    node = producer(value)
    while node is not None and is_op(node, "Unsqueeze", "Reshape", "Expand", "Slice", "Gather", "Transpose"):
        node = producer(node.inputs[0])
    return node if is_op(node, "Cos", "Sin") else None


def _rotation(
    product: ir.Node,
    index: int,
    cos: ir.Node,
    sin_nodes: list[ir.Node],
    angle: ir.Value,
    ancestors: tuple[ir.Node, ...],
) -> RotaryEmbedding | str:
    """The rotation whose cosine half is ``product``, or why it is none."""
    straight = product.inputs[1 - index]
    if straight is None:
        return "its second operand is missing"
    straight = origin(straight)
    summed = [(r, i) for r, i in readers(product.outputs[0]) if is_op(r, "Add", "Sub")]
    for add, add_index in summed:
        partner = producer(add.inputs[1 - add_index])
        if not is_op(partner, "Mul") or partner is None:
            continue
        for side in (0, 1):
            sin = _trig_behind(partner.inputs[side])
            if sin is None or sin not in sin_nodes:
                continue
            turned = partner.inputs[1 - side]
            if turned is None:
                continue
            found = _assemble(product, add, partner, straight, origin(turned))
            if isinstance(found, str):
                return found
            nodes, x, output = found
            return RotaryEmbedding(nodes, (cos, sin), (), angle, ancestors, x, output)
    return f"it is not added to a product with the sine of {angle.name}"


def _tabled(graph: ir.Graph) -> Iterable[RotaryEmbedding]:
    """Rotations whose cosine and sine are read from constant tables."""
    for add in graph.all_nodes():
        if not is_op(add, "Add"):
            continue
        products = [producer(v) for v in add.inputs]
        if not all(is_op(p, "Mul") for p in products):
            continue
        sides = [(p, *_table_side(p)) for p in products if p is not None]
        if any(table is None for _, table, _ in sides):
            continue
        # Either product may be the one with the turned half; a turned half contains a negation.
        for (straight_mul, cos, straight), (turned_mul, sin, turned) in (sides, sides[::-1]):
            if straight is None or turned is None or cos is None or sin is None:
                continue
            found = _assemble(straight_mul, add, turned_mul, origin(straight), origin(turned))
            if isinstance(found, str) or not any(is_op(n, "Neg") or _is_negation(n) for n in found[0]):
                continue
            nodes, x, output = found
            yield RotaryEmbedding(nodes, (), (cos, sin), None, (), x, output)
            break


def _table_side(product: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """The constant table that a product reads, and its other operand."""
    for side in (0, 1):
        value = product.inputs[side]
        while value is not None:
            value = origin(value)
            tensor = constant(value)
            if tensor is not None:
                break
            node = value.producer()
            value = node.inputs[0] if node is not None and is_op(node, *_TABLE_READS) else None
        if value is not None and len(tensor_shape(value)) >= 2 and min(tensor_shape(value)[-2:]) > 1:
            return value, product.inputs[1 - side]
    return None, None


def tensor_shape(value: ir.Value) -> tuple[int, ...]:
    """The shape of the constant behind ``value``; empty if there is none."""
    tensor = constant(value)
    return () if tensor is None else tuple(int(d) for d in tensor.shape.numpy())


def _assemble(
    product: ir.Node, add: ir.Node, partner: ir.Node, straight: ir.Value, turned: ir.Value
) -> tuple[tuple[ir.Node, ...], ir.Value, ir.Value] | str:
    """The nodes of a rotation, what it rotates and what it yields; or why it is none."""
    # Where the two halves come from: the slices that ``straight`` was taken by ...
    chain = [straight]
    cutting: list[ir.Node] = []
    node = straight.producer()
    while node is not None and is_op(node, "Slice", "Split", "Gather") and node.inputs[0] is not None:
        cutting.append(node)
        chain.append(origin(node.inputs[0]))
        node = chain[-1].producer()
    allowed = {id(v) for v in chain}
    # ... and the rearrangement that turned the other half, back to the same value.
    turning: dict[int, ir.Node] = {}
    reached: set[int] = set()
    pending = [turned]
    while pending:
        value = origin(pending.pop())
        if id(value) in allowed:
            reached.add(id(value))
            continue
        node = value.producer()
        if node is None or not (is_op(node, *_REARRANGING) or _is_negation(node)):
            at = "a graph input or constant" if node is None else f"{node.op_type} {node.name}"
            return f"the half that the sine multiplies comes from {at}, not from a turned {straight.name}"
        if id(node) in turning:
            continue
        turning[id(node)] = node
        count = None if is_op(node, "Concat") else 1
        pending.extend(v for v in node.inputs[:count] if v is not None and is_float(v))
    depth = max(i for i, v in enumerate(chain) if id(v) in reached)
    x = chain[depth]
    if is_op(add, "Sub") and not turning:
        return "the half that the sine multiplies is not turned"
    nodes = [*reversed(cutting[:depth]), *reversed(turning.values()), product, partner, add]

    output = add.outputs[0]
    joined = [r for r, _ in readers(output) if is_op(r, "Concat")]
    if len(joined) == 1:
        rest = [v for v in joined[0].inputs if v is not None and origin(v) is not output]
        slices = [producer(v) for v in rest]
        if all(s is not None and is_op(s, "Slice", "Split") for s in slices):
            kept = [s for s in slices if s is not None and s not in nodes]
            if all(s.inputs[0] is not None and origin(s.inputs[0]) in chain for s in kept):
                if kept:
                    x = chain[max(depth, max(chain.index(origin(s.inputs[0])) for s in kept if s.inputs[0]))]
                nodes = [
                    *reversed(cutting[: chain.index(x)]),
                    *kept,
                    *nodes[len(cutting[:depth]) :],
                    joined[0],
                ]
                output = joined[0].outputs[0]
    return tuple(nodes), x, output


def _is_negation(node: ir.Node) -> bool:
    return is_op(node, "Mul") and any(scalar(v) == -1.0 for v in node.inputs)
