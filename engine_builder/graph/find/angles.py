"""Finds what takes the sine and cosine of an angle: rotary embeddings and Fourier features.

Rotary embeddings are known by what they do with cosine and sine; whatever else takes both of one
angle is a feature block.  Either way the angle's whole ancestor path belongs to the structure,
because rounding anywhere on it moves the angle.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from engine_builder.graph.find.rotations import MOVES, angle_ancestors, find_rotations
from engine_builder.graph.reading import Fingerprints, is_op, origin, producer, readers, scalar
from engine_builder.graph.structures import FourierFeatures, NearMiss, RotaryEmbedding


def find_angles(
    nodes: Sequence[ir.Node],
) -> tuple[list[RotaryEmbedding], list[FourierFeatures], list[NearMiss]]:
    """Every rotation and every Fourier feature block; unexplained trigonometry is a near miss."""
    fingerprints = Fingerprints()
    rotations, missed = find_rotations(nodes, fingerprints)
    explained = {id(trig) for rotation in rotations for trig in rotation.trig}
    pairs: dict[int, tuple[list[ir.Node], list[ir.Node]]] = {}
    for node in nodes:
        if is_op(node, "Cos", "Sin") and node.inputs[0] is not None and id(node) not in explained:
            cosines, sines = pairs.setdefault(fingerprints(node.inputs[0]), ([], []))
            (cosines if node.op_type == "Cos" else sines).append(node)
    fourier: list[FourierFeatures] = []
    for cosines, sines in pairs.values():
        if cosines and sines:
            features = [_fourier(cos, sin) for cos, sin in zip(cosines, sines, strict=False)]
            fourier.extend(f for f in features if f is not None)
            if all(f is not None for f in features) and len(cosines) == len(sines):
                continue
        explained.update(id(n) for f in fourier for n in (f.cos, f.sin))
        named = {m.node for m in missed}
        missed.extend(
            miss
            for node in (*cosines, *sines)
            if id(node) not in explained and (miss := _reason(node, cosines, sines)).node not in named
        )
    return rotations, fourier, missed


def _fourier(cos: ir.Node, sin: ir.Node) -> FourierFeatures | None:
    """Features of the two, which are joined, or of the data of a graph input."""
    angle = cos.inputs[0]
    assert angle is not None
    ancestors, reads_data = angle_ancestors(angle)
    if sin.inputs[0] is not None and origin(sin.inputs[0]) is not origin(angle):
        more, _ = angle_ancestors(sin.inputs[0])
        ancestors = tuple({id(n): n for n in (*ancestors, *more)}.values())
    joined = _joined(cos, sin)
    if joined is None:
        if not reads_data:
            return None
        return FourierFeatures((cos, sin), cos, sin, origin(angle), ancestors, cos.outputs[0])
    return FourierFeatures((cos, sin, joined), cos, sin, origin(angle), ancestors, joined.outputs[0])


def _joined(cos: ir.Node, sin: ir.Node) -> ir.Node | None:
    """The Concat that holds both, side by side or stacked."""
    for reader, _ in readers(cos.outputs[0]):
        ways = [reader]
        if is_op(reader, "Unsqueeze", "Reshape"):
            ways = [r for r, _ in readers(reader.outputs[0])]
        for way in ways:
            if is_op(way, "Concat") and any(_source(v) is sin for v in way.inputs):
                return way
    return None


def _source(value: ir.Value | None) -> ir.Node | None:
    node = producer(value)
    return producer(node.inputs[0]) if node is not None and is_op(node, "Unsqueeze", "Reshape") else node


def _reason(trig: ir.Node, cosines: list[ir.Node], sines: list[ir.Node]) -> NearMiss:
    """Why a Cos or Sin belongs to nothing that was found."""
    angle = trig.inputs[0]
    assert angle is not None
    name = origin(angle).name
    for lone, absent in ((cosines, "sine"), (sines, "cosine")):
        if not (sines if lone is cosines else cosines):
            return NearMiss("angle", lone[0].name or "", f"no {absent} is taken of its angle {name}")
    other = "sine" if trig.op_type == "Cos" else "cosine"
    for product in _products(trig.outputs[0]):
        return NearMiss(
            "rotary embedding", product.name or "", f"it is not added to a product with the {other} of {name}"
        )
    return NearMiss("rotary embedding", trig.name or "", "its value takes part in no rotation")


def _products(value: ir.Value) -> list[ir.Node]:
    """Multiplications that read ``value``, past rearrangements and scalings."""
    found: list[ir.Node] = []
    pending = [value]
    while pending:
        for reader, index in readers(pending.pop()):
            scaled = is_op(reader, "Mul", "Div") and any(scalar(v) is not None for v in reader.inputs)
            if scaled or is_op(reader, "Concat") or (is_op(reader, *MOVES) and index == 0):
                pending.extend(reader.outputs)
            elif is_op(reader, "Mul"):
                found.append(reader)
    return found
