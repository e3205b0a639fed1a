"""Every structure of a converted graph: the type it ended in, and the engine layers that hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnx_ir as ir

from engine_builder.graph.find import find_structures
from engine_builder.graph.reading import is_float, is_op
from engine_builder.graph.structures import AttentionCore, Linear, RotaryEmbedding, Structures
from engine_builder.report.blocks import find_blocks
from engine_builder.report.places import common_prefix, module_path
from verify.counts import attention_type
from verify.layers import UNKNOWN, LayerRecord, index_by_node
from verify.promises import SPELLED

KINDS: Final[Mapping[str, str]] = {
    "attention": "Attention",
    "linear": "Linears",
    "norm": "Norms",
    "rotation": "Rotations of queries and keys",
    "angle": "Angles",
}
"""The kinds of structure in the map's order, with their headings."""

MIXED: Final = "mixed"


@dataclass(frozen=True)
class MappedStructure:
    """One structure and where it ended.

    ``name`` is the one by which reports know it, ``label`` its place within its block; ``block`` is None
    outside the transformer's blocks.  ``type`` is what the engine computes it in where ``from_engine``,
    else the type that the strongly typed graph gives it.
    """

    kind: str
    name: str
    label: str
    block: int | None
    type: str
    from_engine: bool
    detail: str
    nodes: tuple[str, ...]
    layers: tuple[str, ...]

    def describe(self) -> str:
        """Its kind and place in words: ``norm self_attn.q_norm of block 0``."""
        place = self.label.removeprefix(f"{self.kind} ")
        return f"{self.kind} {place}" + ("" if self.block is None else f" of block {self.block}")


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of constants of one type in one block; ``block`` is None for what lies outside or is shared."""

    block: int | None
    type: str
    bytes: int


@dataclass(frozen=True)
class PrecisionMap:
    """Structures by kind and, within a kind, in graph order; how many blocks there are; the weights."""

    blocks: int
    structures: tuple[MappedStructure, ...]
    weights: tuple[WeightBytes, ...]


def build_map(model: ir.Model, layers: Sequence[LayerRecord] = ()) -> PrecisionMap:
    """The map of a converted model; without ``layers`` it says what the graph says."""
    graph = model.graph
    found = find_structures(model)
    blocks = find_blocks(graph, found)
    entries = _Mapper(found, blocks, index_by_node(layers)).entries()
    return PrecisionMap(
        max(blocks.values(), default=-1) + 1, tuple(_labelled(entries)), _weights(graph, blocks)
    )


class _Mapper:
    """Turns structures into entries; labels are still whole module paths, joined by points."""

    def __init__(
        self, found: Structures, blocks: Mapping[int, int], held: Mapping[str, tuple[LayerRecord, ...]]
    ) -> None:
        self._found = found
        self._blocks = blocks
        self._held = held
        self._linears = frozenset(linear.name for linear in found.linears)

    def entries(self) -> list[MappedStructure]:
        found = self._found
        entries = [self._attention(core) for core in found.attention]
        entries += [self._linear(linear) for linear in found.linears]
        entries += [
            self._entry("norm", n.nodes[-1], n.nodes, f"{n.kind} norm, epsilon {n.epsilon:g}")
            for n in found.norms
        ]
        entries += [self._entry("rotation", r.nodes[-1], r.nodes) for r in found.rotary]
        entries += self._rotary_angles(found.rotary)
        entries += [
            self._entry("angle", f.cos, (*f.angle_nodes, f.cos, f.sin), "Fourier features")
            for f in found.fourier
        ]
        return entries

    def _entry(
        self, kind: str, node: ir.Node, nodes: Iterable[ir.Node], detail: str = "", name: str | None = None
    ) -> MappedStructure:
        computing = [n for n in nodes if not is_op(n, "Cast", "Constant")]
        names = tuple(dict.fromkeys(n.name or "" for n in computing))
        return MappedStructure(
            kind=kind,
            name=(node.name or "") if name is None else name,
            label=".".join(module_path(node)),
            block=self._blocks.get(id(node)),
            type=_graph_type(computing),
            from_engine=False,
            detail=detail,
            nodes=names,
            layers=self._holders(names),
        )

    def _holders(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer.name for name in names for layer in self._held.get(name, ())))

    def _attention(self, core: AttentionCore) -> MappedStructure:
        entry = replace(self._entry("attention", core.pv, core.nodes), type=_graph_type((core.qk, core.pv)))
        if not self._held:
            return entry
        of_parts = [self._held.get(n.name or "", ()) for n in (core.qk, core.softmax, core.pv)]
        fused = [
            layer
            for layer in of_parts[-1]
            if layer.is_fused_attention and all(layer in others for others in of_parts)
        ]
        if not fused:
            return replace(entry, detail=f"not fused: {len(entry.layers)} layers")
        kernel = fused[0]
        dtype = attention_type(kernel)
        known = dtype != UNKNOWN
        return replace(
            entry,
            type=dtype if known else entry.type,
            from_engine=known,
            detail="one fused kernel",
            layers=(kernel.name,),
        )

    def _linear(self, linear: Linear) -> MappedStructure:
        detail = f"{linear.in_features} → {linear.out_features}"
        entry = replace(
            self._entry("linear", linear.node, (linear.node,), detail), type=_operand_type(linear)
        )
        products = [p for p in self._held.get(linear.name, ()) if p.is_gemm or p.is_gemv]
        own = [p for p in products if not any(n in self._linears and n != linear.name for n in p.onnx_nodes)]
        types = [p.product_dtype for p in own or products if p.product_dtype not in (None, UNKNOWN)]
        if not types:
            return entry
        # Of layers that several linears share one must be this linear's; its own must all be right.
        other = next((t for t in types if t != entry.type), None) if own else None
        if not own and entry.type not in types:
            other = types[0]
        return replace(
            entry,
            type=other or entry.type,
            from_engine=True,
            layers=tuple(dict.fromkeys(p.name for p in own or products)),
        )

    def _rotary_angles(self, rotations: Sequence[RotaryEmbedding]) -> list[MappedStructure]:
        """The cosines and sines that rotations read, each once: computed, or from a table."""
        entries: list[MappedStructure] = []
        seen: set[int] = set()
        for rotation in rotations:
            if rotation.trig and id(rotation.trig[0]) not in seen:
                seen.add(id(rotation.trig[0]))
                nodes = (*rotation.angle_nodes, *rotation.trig)
                entries.append(self._entry("angle", rotation.trig[0], nodes, "rotary, computed at run time"))
            for table in rotation.tables:
                if id(table) in seen:
                    continue
                seen.add(id(table))
                readers = [use.node for use in table.uses()]
                rows = "" if table.shape is None else f" of {table.shape[0]} rows"
                entry = self._entry("angle", readers[0], readers, f"rotary, baked table{rows}", table.name)
                shared = len({self._blocks.get(id(n)) for n in readers}) > 1
                entries.append(
                    replace(
                        entry,
                        label=table.name or "",
                        type=SPELLED.get(table.dtype, UNKNOWN) if table.dtype else UNKNOWN,
                        block=None if shared else entry.block,
                    )
                )
        return entries


def _graph_type(nodes: Iterable[ir.Node]) -> str:
    """The one float type of all that ``nodes`` read and write, or ``mixed``."""
    types = {
        SPELLED.get(v.dtype, v.dtype.name.lower())
        for node in nodes
        for v in (*node.inputs, *node.outputs)
        if v is not None and v.dtype is not None and is_float(v)
    }
    return types.pop() if len(types) == 1 else MIXED if types else UNKNOWN


def _operand_type(linear: Linear) -> str:
    value = linear.node.inputs[1 - linear.weight_input]
    producer = None if value is None else value.producer()
    if producer is not None and is_op(producer, "DequantizeLinear"):
        quantized = producer.inputs[0]
        if quantized is not None and quantized.dtype is not None:
            return SPELLED.get(quantized.dtype, quantized.dtype.name.lower())
    return _graph_type((linear.node,))


def _labelled(entries: Sequence[MappedStructure]) -> list[MappedStructure]:
    """The entries with labels that are short, and unique within a block and kind."""
    labels: list[str] = []
    skip = {
        block: common_prefix([tuple(e.label.split(".")) for e in entries if e.block == block and e.label])
        for block in {e.block for e in entries if e.block is not None}
    }
    for entry in entries:
        parts = entry.label.split(".") if entry.label else []
        labels.append(".".join(parts[0 if entry.block is None else skip[entry.block] :]))
    key: Callable[[MappedStructure, str], tuple[object, ...]] = lambda e, label: (e.kind, e.block, label)  # noqa: E731
    uses = Counter(key(e, label) for e, label in zip(entries, labels, strict=True))
    numbers: Counter[tuple[object, ...]] = Counter()
    result: list[MappedStructure] = []
    for entry, label in zip(entries, labels, strict=True):
        identity = key(entry, label)
        numbers[identity] += 1
        if not label:
            label = f"{entry.kind} {numbers[identity]}"
        elif uses[identity] > 1:
            label = f"{label} {numbers[identity]}"
        result.append(replace(entry, label=label))
    return result


def _weights(graph: ir.Graph, blocks: Mapping[int, int]) -> tuple[WeightBytes, ...]:
    """Bytes of the initializers by block, outside last, and type."""
    sums: Counter[tuple[int | None, str]] = Counter()
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        of = {blocks.get(id(use.node)) for use in value.uses()}
        block = of.pop() if len(of) == 1 else None
        dtype = tensor.dtype
        sums[block, SPELLED.get(dtype, dtype.name.lower())] += tensor.nbytes
    ordered = sorted(sums.items(), key=lambda item: (item[0][0] is None, item[0][0] or 0, item[0][1]))
    return tuple(WeightBytes(block, dtype, size) for (block, dtype), size in ordered)
