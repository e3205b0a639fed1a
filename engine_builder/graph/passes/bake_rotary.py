"""Replaces the run-time computation of rotary angles by cosine and sine tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.reading import is_op
from engine_builder.graph.shapes import ShapeOracle
from engine_builder.graph.structures import RotaryEmbedding


@dataclass(frozen=True)
class RotaryTable:
    """A baked table: its initializer, its rows, and how many rows precede the sequence."""

    name: str
    rows: int
    prepended: int
    trig_nodes: tuple[str, ...]


class BakeRotaryPass(ir.passes.InPlacePass):
    """Rewires each rotary Cos and Sin to a slice of an fp32 table and removes the angle chain.

    The angle is evaluated in fp32 as the graph computes it, its cosine and sine in fp64, rounded to
    fp32.  A table is valid for every length up to that of the longest profile because row ``i`` does
    not depend on the length; that is checked at the other lengths of the profiles, not assumed.

    Args:
        rotary: The rotations whose angles to bake.
        lengths: Input shapes by input name, for each length to check; the last one is the longest
            and sizes the table.

    Raises:
        ConversionError: An angle depends on input data, or on the length.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, rotary: Sequence[RotaryEmbedding], lengths: Sequence[Mapping[str, Sequence[int]]]
    ) -> None:
        super().__init__()
        self._rotary = rotary
        self._lengths = lengths
        self.tables: tuple[RotaryTable, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not any(rotation.trig for rotation in self._rotary):
            return ir.passes.PassResult(model, False)
        graph = model.graph
        oracles = [ShapeOracle(model, shapes) for shapes in self._lengths]
        trigs: dict[int, tuple[ir.Node, RotaryEmbedding]] = {}
        for rotation in self._rotary:
            for node in rotation.trig:
                trigs.setdefault(id(node), (node, rotation))
        made: dict[tuple[str, bytes], tuple[ir.Value, list[str], int, int]] = {}
        slices: dict[int, ir.Value] = {}
        types = [(o.name, o.dtype) for o in graph.outputs]
        for trig, rotation in trigs.values():
            angle = trig.inputs[0]
            assert angle is not None
            angles, axis, prepended = self._table(trig, angle, oracles)
            function = np.cos if trig.op_type == "Cos" else np.sin
            numbers = function(angles.astype(np.float64)).astype(np.float32)
            key = (trig.op_type, numbers.tobytes())
            if key not in made:
                same = sum(1 for op, _ in made if op == trig.op_type)
                name = f"rotary_{trig.op_type.lower()}_table" + (f"_{same}" if same else "")
                table = _initializer(graph, name, numbers)
                made[key] = (table, [], int(numbers.shape[axis]), prepended)
                slices[id(table)] = _rows(
                    graph, trig, table, axis, rotation.x, self._row_axis(rotation, angle, axis, oracles)
                )
            table, names, _, _ = made[key]
            names.append(trig.name or "")
            ir.convenience.replace_all_uses_with(trig.outputs[0], slices[id(table)])
        self.tables = tuple(
            RotaryTable(value.name or "", rows, prepended, tuple(names))
            for value, names, rows, prepended in made.values()
        )
        _remove_dead(graph, [trig for trig, _ in trigs.values()])
        survivors = [trig.name for trig, _ in trigs.values() if trig.graph is not None]
        if survivors:
            raise ConversionError(f"rotary trigonometry survives baking: {', '.join(map(str, survivors))}")
        if [(o.name, o.dtype) for o in graph.outputs] != types:
            raise ConversionError("baking the rotary tables changed the graph's outputs")
        return ir.passes.PassResult(model, True)

    def _table(
        self, trig: ir.Node, angle: ir.Value, oracles: Sequence[ShapeOracle]
    ) -> tuple[np.ndarray, int, int]:
        """The angle at the longest length, its row axis, and the rows before the sequence."""
        *others, longest = oracles
        table = longest.evaluate(angle)
        if table.dtype != np.float32 or table.ndim < 2:
            raise ConversionError(
                f"the rotary angle {angle.name} is {table.dtype} of rank {table.ndim}, not an fp32 table",
                where=f"node {trig.name}",
            )
        axis = table.ndim - 2
        for oracle in others:
            shorter = oracle.evaluate(angle)
            rows = shorter.shape[axis]
            if rows > table.shape[axis] or not np.array_equal(shorter, np.take(table, range(rows), axis)):
                raise ConversionError(
                    f"the rotary angle {angle.name} depends on the length, so that no table can replace it",
                    where=f"node {trig.name}",
                    hint="set precision.rotary: computed",
                )
        rows = int(table.shape[axis])
        length = max(
            (max(sizes) for sizes in _dynamic_dims(self._lengths) if max(sizes) <= rows), default=rows
        )
        return table, axis, rows - length

    def _row_axis(
        self, rotation: RotaryEmbedding, angle: ir.Value, axis: int, oracles: Sequence[ShapeOracle]
    ) -> int:
        """The axis of the rotated value, from the end, that has the angle's rows at every length."""
        rank = len(oracles[-1].shape(rotation.x))
        for candidate in (-2, *(-i for i in range(3, rank + 1))):
            if all(o.shape(rotation.x)[candidate] == o.evaluate(angle).shape[axis] for o in oracles):
                return candidate
        raise ConversionError(
            f"no axis of {rotation.x.name} has the rows of the angle {angle.name}",
            where=f"node {rotation.name}",
            hint="set precision.rotary: computed",
        )


def _dynamic_dims(lengths: Sequence[Mapping[str, Sequence[int]]]) -> list[list[int]]:
    """For each input dimension that varies over ``lengths``, its sizes."""
    found: list[list[int]] = []
    for name in lengths[-1]:
        for axis in range(len(lengths[-1][name])):
            sizes = [int(shapes[name][axis]) for shapes in lengths]
            if len(set(sizes)) > 1 or len(lengths) == 1:
                found.append(sizes)
    return found


def _rows(
    graph: ir.Graph, trig: ir.Node, table: ir.Value, axis: int, counted: ir.Value, counted_axis: int
) -> ir.Value:
    """The first rows of ``table``, as many as ``counted`` has at run time.

    They are counted on the rotated value, because the angle's own shape would keep the chain alive
    that the table replaces.
    """
    name = table.name or ""
    size = ir.node(
        "Shape",
        [counted],
        # An end of 0 would be the first axis, so the last one is named by leaving the end out.
        attributes={"start": counted_axis} | ({"end": counted_axis + 1} if counted_axis != -1 else {}),
        outputs=[ir.Value(name=f"{name}.rows", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))],
        name=f"{name}.rows",
    )
    start = _initializer(graph, f"{name}.start", np.asarray([0], np.int64))
    axes = _initializer(graph, f"{name}.axis", np.asarray([axis], np.int64))
    cut = ir.node(
        "Slice",
        [table, start, size.outputs[0], axes],
        outputs=[
            ir.Value(name=f"{name}.slice", type=ir.TensorType(ir.DataType.FLOAT), shape=trig.outputs[0].shape)
        ],
        name=f"{name}.slice",
    )
    graph.insert_before(trig, [size, cut])
    return cut.outputs[0]


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _remove_dead(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    """Removes ``nodes`` and everything that only they read."""
    pending = nodes
    while pending:
        node = pending.pop()
        if node.graph is None or any(o.uses() or o.is_graph_output() for o in node.outputs):
            continue
        sources = [v.producer() for v in node.inputs if v is not None]
        graph.remove(node, safe=True)
        pending.extend(s for s in sources if s is not None and not is_op(s, "Constant"))
