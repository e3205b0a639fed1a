"""Why a node of a converted graph has its type: the structure it is part of, the rule, the promise."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import onnx_ir as ir

from engine_builder.errors import RecipeError, SourceModelError
from engine_builder.graph.find import find_structures
from engine_builder.graph.passes.assign_types import lacks_type, makes_fp32
from engine_builder.graph.reading import is_float, is_op, origin
from engine_builder.graph.structures import Structures
from engine_builder.precision.description import read_description
from engine_builder.precision.islands import islands
from engine_builder.report.precision_map import MappedStructure, build_map
from verify.identity import check_promises
from verify.layers import LayerRecord, index_by_node
from verify.promises import SPELLED, Promise, float_casts, make_promises

_NEAREST: Final = 3
_LARGEST: Final = {"fp16": 65504.0, "bf16": float(2**128 - 2**120)}


@dataclass(frozen=True)
class PromiseStatus:
    """What a precision promises about a node's structure, and whether that holds.

    ``status`` is ``kept`` or ``broken``, by the engine's layers where there are any and by the graph
    alone where there are none, or ``not verifiable``.
    """

    kind: str
    subject: str
    types: tuple[str, ...]
    status: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Why a node has its type.

    ``type`` is that of its float outputs, or of its first output when it has none; ``rule`` names the
    rule for programs, ``because`` says it for people; ``structure`` is the kind and place of what the
    node is part of, empty for a node outside every structure; ``layers`` are the engine layers that
    were made from it.
    """

    node: str
    op: str
    type: str
    rule: str
    because: str
    structure: str
    promise: PromiseStatus | None
    layers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Explainer:
    """Explains the nodes of one converted model.

    Args:
        model: As ``convert`` wrote it.
        where: The model's file, for messages.
        layers: Those of its engine, if there is one.
        trunk_linears: Why linears of an fp8 recipe stayed in the trunk type, by node name.

    Raises:
        SourceModelError: The model was not converted by this builder.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        where: str,
        layers: Sequence[LayerRecord] = (),
        trunk_linears: Mapping[str, str] | None = None,
    ) -> None:
        described = read_description(model.metadata_props, where)
        if described is None:
            raise SourceModelError(
                "it is not a converted model: only a conversion gives nodes a type for a reason",
                where=where,
                hint="convert it first: convert RECIPE --out converted.onnx",
            )
        self._where = where
        self._graph = model.graph
        self._options = described.options
        self._fp8_linears = described.fp8_linears
        self._layers = layers
        self._held = index_by_node(layers)
        self._trunk_linears = trunk_linears or {}
        self._opset = model.graph.opset_imports.get("", 17)
        self._found: Structures = find_structures(model)
        self._map = build_map(model, layers).structures
        self._islands = {
            id(node): island.rule
            for island in reversed(list(islands(model.graph, self._found, self._options)))
            for node in island.nodes
        }
        self._nodes = {node.name or "": node for node in model.graph}
        self._promises = make_promises(model.graph, self._found, self._options, self._fp8_linears)
        self._tables = {id(table) for rotation in self._found.rotary for table in rotation.tables}

    def explain(self, name: str) -> Explanation:
        """Explains a node, the node that makes a tensor, or a constant by its first reader.

        Raises:
            RecipeError: The model has nothing of this name; the hint has the nearest names.
        """
        node, constant = self._resolve(name)
        structure = self._structure(node)
        rule, because = self._reason(node, structure)
        if constant is not None:
            because = f"{node.op_type} {node.name} reads it: {because}"
        return Explanation(
            node=name if constant is not None else node.name or "",
            op="constant" if constant is not None else node.op_type,
            type=_type_of(node) if constant is None else _spelled(constant),
            rule=rule,
            because=because,
            structure="" if structure is None else structure.describe(),
            promise=self._promise(node),
            layers=tuple(layer.name for layer in self._held.get(node.name or "", ())),
        )

    def _resolve(self, name: str) -> tuple[ir.Node, ir.Value | None]:
        """The node of this name or that makes the tensor of this name; for a constant its first reader."""
        if name in self._nodes:
            return self._nodes[name], None
        constant = self._graph.initializers.get(name)
        reader = None if constant is None else next((use.node for use in constant.uses()), None)
        if constant is not None and reader is not None:
            return reader, constant
        for node in self._graph:
            if any(value.name == name for value in node.outputs):
                return node, None
        raise RecipeError(
            f"no node is named {name}", where=self._where, hint=_nearest(name, list(self._nodes))
        )

    def _structure(self, node: ir.Node) -> MappedStructure | None:
        return next((s for s in self._map if node.name in s.nodes), None)

    def _reason(self, node: ir.Node, structure: MappedStructure | None) -> tuple[str, str]:
        """The rule that gave the node its type, by name and in words."""
        representation = self._representation(node)
        if representation is not None:
            return representation
        floats = [v for v in node.outputs if is_float(v)]
        if not floats:
            return "no_float", f"it computes no floats but {_type_of(node)}, which no recipe changes"
        actual, trunk = _type_of(node), self._options.trunk
        part = "" if structure is None else f"it is part of {structure.describe()}: "
        if trunk == "fp32":
            return "trunk", f"{part}the recipe's trunk type is fp32, so everything is"
        rule = self._islands.get(id(node))
        if rule is not None and actual == "fp32":
            return rule.name.lower(), f"{part}{rule.value}"
        if actual == trunk:
            return self._trunk(node, structure, part)
        if actual == "fp32":
            return self._exception(node) or _unexplained(actual)
        return _unexplained(actual)

    def _representation(self, node: ir.Node) -> tuple[str, str] | None:
        """The reason for a node that only changes how a value is spelled."""
        source = node.inputs[0] if node.inputs else None
        if source is None:
            return None
        readers = list(
            dict.fromkeys(f"{u.node.op_type} {u.node.name}" for v in node.outputs for u in v.uses())
        )
        for_whom = _some(readers) or "the graph's output"
        if is_op(node, "Cast") and is_float(source) and is_float(node.outputs[0]):
            return "cast", (
                f"it converts {source.name} from {_spelled(source)} to {_type_of(node)} for {for_whom}, "
                "which computes in that type"
            )
        if is_op(node, "QuantizeLinear"):
            return "fp8", f"it rounds {source.name} to E4M3, the input of a linear that runs in fp8"
        if is_op(node, "DequantizeLinear"):
            return "fp8", (
                f"it gives {for_whom} an E4M3 operand; TensorRT computes the product in fp8 when both are"
            )
        return None

    def _trunk(self, node: ir.Node, structure: MappedStructure | None, part: str) -> tuple[str, str]:
        trunk = self._options.trunk
        if structure is not None and structure.kind == "attention":
            return "fused_attention", f"{part}TensorRT fuses a core only when its products read {trunk}"
        if structure is not None and structure.kind == "linear":
            if structure.name in self._fp8_linears:
                return "fp8", f"{part}its operands are fp8 and its result {trunk}, the recipe's trunk type"
            if structure.name in self._trunk_linears:
                why = self._trunk_linears[structure.name]
                return "trunk", f"{part}it stays in the trunk type {trunk} and not fp8: {why}"
        return "trunk", f"{part}{trunk} is the recipe's trunk type, and no rule keeps it in fp32"

    def _exception(self, node: ir.Node) -> tuple[str, str] | None:
        """The reason for an fp32 node that is on no island."""
        if makes_fp32(node):
            return "makes_fp32", f"{node.op_type} makes fp32 numbers whatever it reads"
        lacking = lacks_type(node, self._opset, self._options.trunk_type)
        if lacking:
            return "lacks_type", lacking
        if any(v is not None and id(origin(v)) in self._tables for v in node.inputs):
            return "table", "it reads a baked rotary table, and the rotation that uses it is fp32"
        limit = _LARGEST[self._options.trunk]
        for value in node.inputs:
            tensor = None if value is None else value.const_value
            if value is not None and tensor is not None and tensor.size == 1:
                number = float(tensor.numpy().reshape(-1)[0])
                if abs(number) > limit:
                    return "range", f"its constant {value.name} is {number:g}, beyond {self._options.trunk}"
        if _only_shape(node):
            return "shape", "it is what is left of a computation of which only the shape is still read"
        return None

    def _promise(self, node: ir.Node) -> PromiseStatus | None:
        promise = next((p for p in self._promises if node.name in p.nodes), None)
        if promise is None:
            return None
        status, reason = self._kept(promise)
        return PromiseStatus(promise.kind.value, promise.subject, promise.types, status, reason)

    def _kept(self, promise: Promise) -> tuple[str, str]:
        if not self._layers:
            return ("kept", "") if promise.held else ("broken", promise.broken_at)
        checks = check_promises(
            [promise],
            self._layers,
            linears=[linear.name for linear in self._found.linears],
            casts=float_casts(self._graph),
        )
        check = next(c for c in checks if c.promised)
        if check.failures:
            return "broken", check.failures[0].reason
        return ("kept", "") if check.kept else ("not verifiable", check.note)


def _unexplained(actual: str) -> tuple[str, str]:
    return "none", f"no rule of its recipe makes it {actual}: the file was changed after its conversion"


def _only_shape(node: ir.Node) -> bool:
    """Whether nothing but shapes is read of what ``node`` computes."""
    pending, seen = [node], {id(node)}
    while pending:
        current = pending.pop()
        for value in current.outputs:
            if value.is_graph_output():
                return False
            for use in value.uses():
                if is_op(use.node, "Shape", "Size") or id(use.node) in seen:
                    continue
                if not any(is_float(v) for v in use.node.outputs):
                    return False
                seen.add(id(use.node))
                pending.append(use.node)
    return True


def _type_of(node: ir.Node) -> str:
    floats = [v for v in node.outputs if is_float(v)]
    return _spelled((floats or list(node.outputs))[0]) if node.outputs else "nothing"


def _spelled(value: ir.Value) -> str:
    return "unknown" if value.dtype is None else SPELLED.get(value.dtype, value.dtype.name.lower())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NEAREST])
    return shown if len(names) <= _NEAREST else f"{shown} and {len(names) - _NEAREST} more"


def _nearest(name: str, known: Sequence[str]) -> str:
    """The names that hold ``name``, shortest first, then those that are or hold something like it."""
    found = _holding(name, known) + difflib.get_close_matches(name, known, _NEAREST, 0.5)
    parts = {part for k in known for part in k.split("/") if part}
    for part in difflib.get_close_matches(name.rpartition("/")[2], parts, _NEAREST, 0.6):
        found += _holding(part, known)
    nearest = list(dict.fromkeys(found))[:_NEAREST]
    if not nearest:
        return "list the names with: structures MODEL.onnx --json"
    return f"nearest: {', '.join(nearest)}"


def _holding(text: str, known: Sequence[str]) -> list[str]:
    return sorted((k for k in known if text.lower() in k.lower()), key=lambda k: (len(k), k))[:_NEAREST]
