"""Replaces the run-time computation of rotary angles by cosine and sine tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.naming import Names
from engine_builder.graph.reading import attribute_int, is_op
from engine_builder.graph.shapes import ShapeOracle
from engine_builder.graph.structures import RotaryEmbedding


@dataclass(frozen=True)
class RotaryTable:
    """A baked table: its initializer, its rows, and how many rows precede the sequence."""

    name: str
    rows: int
    prepended: int
    trig_nodes: tuple[str, ...]


@dataclass(frozen=True)
class _Made:
    """A table, what replaces the trigonometry by it, and the run-time number of rows in use if it varies."""

    table: ir.Value
    read: ir.Value
    count: ir.Value | None
    trig: list[str]
    rows: int
    prepended: int


class BakeRotaryPass(ir.passes.InPlacePass):
    """Rewires each rotary Cos and Sin to a slice of an fp32 table and removes the angle chain.

    The angle is evaluated in fp32 as the graph computes it, its cosine and sine in fp64, rounded to
    fp32.  A table is valid for every length up to that of the longest profile because row ``i`` does
    not depend on the length; that is checked at the shortest and at one between, not assumed.

    Args:
        rotary: The rotations whose angles to bake.
        lengths: Input shapes by input name, shortest first; the last ones size the table.

    Raises:
        ConversionError: An angle depends on input data, or on the length.
    """

    version: ClassVar[int] = 2

    def __init__(
        self, rotary: Sequence[RotaryEmbedding], lengths: Sequence[Mapping[str, Sequence[int]]]
    ) -> None:
        super().__init__()
        self._rotary = rotary
        self._lengths = _three(lengths)
        self.tables: tuple[RotaryTable, ...] = ()
        self.reads: tuple[ir.Node, ...] = ()
        """The nodes that take the rows of a table: they belong to the fp32 path of the rotation."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not any(rotation.trig for rotation in self._rotary):
            return ir.passes.PassResult(model, False)
        graph = model.graph
        names = Names(graph)
        oracles = [ShapeOracle(model, shapes) for shapes in self._lengths]
        trigs: dict[int, tuple[ir.Node, RotaryEmbedding]] = {}
        for rotation in self._rotary:
            for node in rotation.trig:
                trigs.setdefault(id(node), (node, rotation))
        made: dict[tuple[str, bytes, tuple[int, ...]], _Made] = {}
        types = [(o.name, o.dtype) for o in graph.outputs]
        for trig, rotation in trigs.values():
            angle = trig.inputs[0]
            assert angle is not None
            angles, axis, prepended = self._table(trig, angle, oracles)
            function = np.cos if trig.op_type == "Cos" else np.sin
            numbers = function(angles.astype(np.float64)).astype(np.float32)
            key = (trig.op_type, numbers.tobytes(), tuple(o.evaluate(angle).shape[axis] for o in oracles))
            if key not in made:
                name = names.fresh(f"rotary_{trig.op_type.lower()}_table")
                table = _initializer(graph, name, numbers)
                whole = _uncut(rotation.x)
                counted = self._row_axis(whole, key[2], rotation, oracles)
                read, count = table, None
                if counted is not None:
                    count = _count(graph, trig, whole, counted, names.fresh(f"{name}.rows"))
                    read = _slice(graph, trig, table, axis, count, names)
                made[key] = _Made(table, read, count, [], int(numbers.shape[axis]), prepended)
            made[key].trig.append(trig.name or "")
            _release_shapes(graph, (*rotation.angle_nodes, trig), oracles, key[2], made[key].count, names)
            ir.convenience.replace_all_uses_with(trig.outputs[0], made[key].read, replace_graph_outputs=True)
        self.tables = tuple(
            RotaryTable(m.table.name or "", m.rows, m.prepended, tuple(m.trig)) for m in made.values()
        )
        reads = (m.read.producer() for m in made.values())
        self.reads = tuple(node for node in reads if node is not None)
        _remove_dead(graph, [trig for trig, _ in trigs.values()])
        _refuse_survivors(self._rotary, [trig for trig, _ in trigs.values()])
        if [(o.name, o.dtype) for o in graph.outputs] != types:
            raise ConversionError("baking the rotary tables changed the graph's outputs")
        return ir.passes.PassResult(model, True)

    def _table(
        self, trig: ir.Node, angle: ir.Value, oracles: Sequence[ShapeOracle]
    ) -> tuple[np.ndarray, int, int]:
        """The angle at the longest length, its row axis, and the rows before the sequence."""
        *others, longest = oracles
        try:
            table = longest.evaluate(angle)
        except ConversionError as error:
            raise ConversionError(
                f"the rotary angle {angle.name} is not made of positions alone: {error.message}",
                where=f"node {trig.name}",
                hint="set precision.rotary: computed",
            ) from error
        if table.dtype != np.float32 or table.ndim < 2:
            raise ConversionError(
                f"the rotary angle {angle.name} is {table.dtype} of rank {table.ndim}, not an fp32 table",
                where=f"node {trig.name}",
            )
        varying = [
            i
            for i in range(table.ndim)
            if any(o.evaluate(angle).shape[i : i + 1] != table.shape[i : i + 1] for o in others)
        ]
        axis = varying[0] if len(varying) == 1 else table.ndim - 2
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
        self,
        value: ir.Value,
        rows: tuple[int, ...],
        rotation: RotaryEmbedding,
        oracles: Sequence[ShapeOracle],
    ) -> int | None:
        """The axis of ``value``, from the end, that has ``rows`` at every length.

        None if the angle has the same rows at every length: its table is then read whole.
        """
        for candidate in (-2, *(-i for i in range(3, len(oracles[-1].shape(value)) + 1))):
            if tuple(o.shape(value)[candidate] for o in oracles) == rows:
                return candidate
        if len(set(rows)) == 1:
            return None
        raise ConversionError(
            f"no axis of {value.name} has the rows of the angle",
            where=f"node {rotation.name}",
            hint="set precision.rotary: computed",
        )


def _uncut(value: ir.Value) -> ir.Value:
    """``value`` before any channels were cut from it: where to cut may be asked of the angle itself."""
    node = value.producer()
    while node is not None and is_op(node, "Slice", "Split") and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _three(lengths: Sequence[Mapping[str, Sequence[int]]]) -> list[Mapping[str, Sequence[int]]]:
    """The shortest, one between, and the longest: the shortest may be a single row, which proves nothing."""
    if len(lengths) < 2:
        return list(lengths)
    shortest, longest = lengths[0], lengths[-1]
    between: Mapping[str, Sequence[int]] = lengths[len(lengths) // 2]
    if len(lengths) == 2:
        between = {
            name: [(low + high) // 2 for low, high in zip(shortest[name], longest[name], strict=True)]
            for name in longest
        }
    return [shortest, between, longest]


def _dynamic_dims(lengths: Sequence[Mapping[str, Sequence[int]]]) -> list[list[int]]:
    """For each input dimension that varies over ``lengths``, its sizes."""
    found: list[list[int]] = []
    for name in lengths[-1]:
        for axis in range(len(lengths[-1][name])):
            sizes = [int(shapes[name][axis]) for shapes in lengths]
            if len(set(sizes)) > 1 or len(lengths) == 1:
                found.append(sizes)
    return found


def _count(graph: ir.Graph, trig: ir.Node, counted: ir.Value, axis: int, name: str) -> ir.Value:
    """The number of rows in use: what ``counted`` has along ``axis``, counted from the end, at run time.

    It is counted on the rotated value, because the angle's own shape would keep the chain alive that
    the table replaces.
    """
    size = ir.node(
        "Shape",
        [counted],
        # An end of 0 would be the first axis, so the last one is named by leaving the end out.
        attributes={"start": axis} | ({"end": axis + 1} if axis != -1 else {}),
        outputs=[ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))],
        name=name,
    )
    graph.insert_before(trig, size)
    return size.outputs[0]


def _slice(
    graph: ir.Graph, trig: ir.Node, table: ir.Value, axis: int, count: ir.Value, names: Names
) -> ir.Value:
    """The first ``count`` rows of ``table``."""
    name = names.fresh(f"{table.name}.slice")
    start = _initializer(graph, names.fresh(f"{table.name}.start"), np.asarray([0], np.int64))
    axes = _initializer(graph, names.fresh(f"{table.name}.axis"), np.asarray([axis], np.int64))
    cut = ir.node(
        "Slice",
        [table, start, count, axes],
        outputs=[ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=trig.outputs[0].shape)],
        name=name,
    )
    graph.insert_before(trig, cut)
    return cut.outputs[0]


def _release_shapes(
    graph: ir.Graph,
    chain: Sequence[ir.Node],
    oracles: Sequence[ShapeOracle],
    rows: tuple[int, ...],
    count: ir.Value | None,
    names: Names,
) -> None:
    """Gives the readers of the chain's shapes the same numbers from elsewhere.

    TorchScript asks the angle for the number of channels to rotate; the whole chain would stay for it.
    """
    for value in (output for node in chain for output in node.outputs):
        for use in list(value.uses()):
            if not is_op(use.node, "Shape") or use.node.graph is not graph:
                continue
            parts: list[ir.Value | int] = []
            begin = attribute_int(use.node, "start", 0)
            end = attribute_int(use.node, "end", len(oracles[-1].shape(value)))
            for sizes in list(zip(*(o.shape(value) for o in oracles), strict=True))[begin:end]:
                if len(set(sizes)) == 1:
                    parts.append(int(sizes[0]))
                elif sizes == rows and count is not None:
                    parts.append(count)
            if len(parts) != oracles[-1].evaluate(use.node.outputs[0]).size:
                continue  # a size that neither is fixed nor counts rows: something else needs the chain
            ir.convenience.replace_all_uses_with(
                use.node.outputs[0], _joined(graph, use.node, parts, names), replace_graph_outputs=True
            )
            graph.remove(use.node, safe=True)


def _joined(graph: ir.Graph, before: ir.Node, parts: Sequence[ir.Value | int], names: Names) -> ir.Value:
    """A vector of sizes, some of which are known only at run time."""
    known = [part for part in parts if isinstance(part, int)]
    if len(known) == len(parts):
        return _initializer(graph, names.fresh("rotary_sizes"), np.asarray(known, np.int64))
    values = [
        part
        if isinstance(part, ir.Value)
        else _initializer(graph, names.fresh(f"rotary_size_{part}"), np.asarray([part], np.int64))
        for part in parts
    ]
    if len(values) == 1:
        return values[0]
    name = names.fresh("rotary_sizes")
    node = ir.node(
        "Concat",
        values,
        attributes={"axis": 0},
        outputs=[ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(values)]))],
        name=name,
    )
    graph.insert_before(before, node)
    return node.outputs[0]


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _refuse_survivors(rotary: Sequence[RotaryEmbedding], trig: Sequence[ir.Node]) -> None:
    """Refuses what is left of the chains, except where something else than a rotation reads it.

    Raises:
        ConversionError: A Cos or Sin of a rotation, or a node of its chain that nothing reads, is left.
    """
    left = [node for node in trig if node.graph is not None]
    for rotation in rotary:
        left.extend(
            node
            for node in rotation.angle_nodes
            if rotation.trig
            and node.graph is not None
            and not any(o.uses() or o.is_graph_output() for o in node.outputs)
        )
    if left:
        names = ", ".join(dict.fromkeys(str(node.name) for node in left))
        raise ConversionError(f"rotary trigonometry survives baking: {names}")


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
