"""The graph of a source model: its I/O, operators and order, checked before anything else reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import onnx
from onnx import TensorProto

from engine_builder.errors import SourceModelError
from engine_builder.one_line import one_line, quoted

OPSETS: Final = range(17, 24)
"""Supported opsets of ai.onnx, 17 to 23.

17 is what the TorchScript exporter writes and the first with LayerNormalization; 23 brought
RMSNormalization and Attention and is the newest that the structure finders and the strict
evaluator are tested on.  The TensorRT parsers have no gate of their own (a MatMul parses at any
opset), so that a newer graph would build without anyone having checked what it means.
"""

MAX_NODES: Final = 1_000_000
"""Nodes once all functions are inlined; the medium model's export has 18,195 in all."""

MAX_CALL_DEPTH: Final = 64
"""Functions that call one another; those of real exporters do so three or four deep."""

MAX_ELEMENTS: Final = 2**31 - 1
"""TensorRT's limit for one dimension and for the volume of one tensor."""


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output: numpy's name of its type; a dimension is a size, a name, or unknown."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class GraphFacts:
    """What the check of a graph learnt; ``is_sorted`` says whether nodes follow their producers."""

    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    node_count: int
    is_sorted: bool


def check_graph(model: onnx.ModelProto, where: str, *, plugins: bool, float_input: bool) -> GraphFacts:
    """Check the main graph with its subgraphs.

    ``plugins`` admits operators of foreign domains; ``float_input`` demands at least one float32
    graph input.  Raises SourceModelError.
    """
    graph = model.graph
    if not graph.node:
        raise SourceModelError("holds no graph with nodes", where=where, hint="is this really an ONNX model?")
    opset = _opset(model, where)
    if not 1 <= model.ir_version <= onnx.IR_VERSION:
        raise SourceModelError(
            f"IR version {model.ir_version} is outside 1..{onnx.IR_VERSION}",
            where=where,
            hint="export it again with an older onnx",
        )
    _check_operators(model, opset, where, plugins=plugins)
    _check_functions(model, where)
    is_sorted = _check_order(graph, frozenset(), where)
    stored = {tensor.name for tensor in graph.initializer}
    inputs = tuple(_spec(value, "input", where) for value in graph.input if value.name not in stored)
    outputs = tuple(_spec(value, "output", where) for value in graph.output)
    if not outputs:
        raise SourceModelError("the graph has no outputs", where=where)
    for spec in inputs:
        if spec.dtype in {"float16", "bfloat16", "float64"} or spec.dtype.startswith("float8"):
            raise SourceModelError(
                f"input {quoted(spec.name)} is {spec.dtype}; a build starts from the fp32 export",
                where=where,
            )
    if float_input and all(spec.dtype != "float32" for spec in inputs):
        raise SourceModelError("the graph has no float32 input", where=where, hint="is this the right model?")
    return GraphFacts(opset, inputs, outputs, sum(1 for _ in _nodes(graph)), is_sorted)


def _opset(model: onnx.ModelProto, where: str) -> int:
    versions: list[int] = sorted(
        {item.version for item in model.opset_import if item.domain in {"", "ai.onnx"}}
    )
    if len(versions) != 1:
        found = " and ".join(map(str, versions)) or "none"
        raise SourceModelError(
            f"names {found} as its ai.onnx opset where one belongs",
            where=where,
            hint="the file is damaged or cut short",
        )
    if versions[0] not in OPSETS:
        raise SourceModelError(
            f"opset {versions[0]} is not supported",
            where=where,
            hint=f"export it with opset {OPSETS[0]} to {OPSETS[-1]}",
        )
    return versions[0]


def _check_operators(model: onnx.ModelProto, opset: int, where: str, *, plugins: bool) -> None:
    """Refuse operators that neither ONNX at this opset nor the model's own functions define."""
    functions = {(function.domain, function.name) for function in model.functions}
    bodies = [node for function in model.functions for node in _all_nodes(function.node)]
    known: set[tuple[str, str]] = set()
    for node in (*_nodes(model.graph), *bodies):
        domain = "" if node.domain == "ai.onnx" else node.domain
        operator = (domain, node.op_type)
        if operator in known or (node.domain, node.op_type) in functions:
            continue
        known.add(operator)
        if domain:
            if not plugins:
                raise SourceModelError(
                    f"node {_name(node)} is the custom operator {one_line(domain)}.{one_line(node.op_type)}",
                    where=where,
                    hint="export without it, or name the library that implements it under build.plugins",
                )
            continue
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
        except onnx.defs.SchemaError:
            schema = None
        if schema is None or schema.deprecated:
            raise SourceModelError(
                f"node {_name(node)} is a {quoted(node.op_type)}, no ONNX operator at opset {opset}",
                where=where,
            )


def _check_functions(model: onnx.ModelProto, where: str) -> None:
    """Refuse functions that call themselves, or that become too many nodes once they are inlined.

    Forty functions that each call the next one twice are a few kilobytes, and 2^40 nodes.
    """
    functions = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Iterable[onnx.NodeProto], callers: tuple[tuple[str, str], ...]) -> int:
        total = 0
        for node in _all_nodes(nodes):
            key = (node.domain, node.op_type)
            if key not in functions:
                total += 1
                continue
            if key in callers:
                raise SourceModelError(f"the function {quoted(node.op_type)} calls itself", where=where)
            if key not in sizes:
                if len(callers) >= MAX_CALL_DEPTH:
                    raise SourceModelError(
                        f"functions call each other over {MAX_CALL_DEPTH} deep", where=where
                    )
                sizes[key] = size(functions[key].node, (*callers, key))
            total += sizes[key]
        return total

    total = size(model.graph.node, ())
    if functions and total > MAX_NODES:
        raise SourceModelError(f"its functions become {total} nodes, more than {MAX_NODES}", where=where)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    yield from _all_nodes(graph.node)


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _nodes(graph)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _name(node: onnx.NodeProto) -> str:
    return quoted(node.name or f"{node.op_type} -> {', '.join(node.output)}")


def _check_order(graph: onnx.GraphProto, outer: frozenset[str], where: str) -> bool:
    """Check one graph's names and that its nodes can be put in order; True when they are in order.

    Every value has one producer and every read one definition; named nodes have names of their
    own, by which the built engine's layers are later told apart.
    """
    stored = [tensor.name for tensor in graph.initializer]
    stored += [sparse.values.name for sparse in graph.sparse_initializer]
    inputs = [value.name for value in graph.input]
    outputs = [name for node in graph.node for name in node.output if name]
    # An initializer may also be an input, as its default value.
    given = [*inputs, *(name for name in stored if name not in set(inputs))]
    for kind, names in (
        ("value", [*given, *outputs]),
        ("initializer", stored),
        ("node", [node.name for node in graph.node if node.name]),
    ):
        twice = _first_twice(names)
        if twice is not None:
            raise SourceModelError(
                f"two {kind}s are named {quoted(twice)}",
                where=where,
                hint="export it again; names must differ",
            )
    available = outer | set(given)
    local = available | set(outputs)
    producer = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    needs: list[frozenset[int]] = []
    is_sorted = True
    for index, node in enumerate(graph.node):
        for subgraph in _subgraphs(node):
            is_sorted &= _check_order(subgraph, local, where)
        reads = _reads(node)
        unknown = sorted(reads - local)
        if unknown:
            raise SourceModelError(
                f"node {_name(node)} reads {quoted(unknown[0])}, which nothing produces", where=where
            )
        needs.append(frozenset(producer[name] for name in reads if name in producer))
        is_sorted &= all(before < index for before in needs[-1])
    for value in graph.output:
        if value.name not in local:
            raise SourceModelError(f"nothing produces the output {quoted(value.name)}", where=where)
    if not is_sorted:
        _check_acyclic(graph.node, needs, where)
    return is_sorted


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _reads(node: onnx.NodeProto) -> set[str]:
    """Names of the enclosing graph that the node reads, itself or in its subgraphs."""
    names = {name for name in node.input if name}
    for graph in _subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {sparse.values.name for sparse in graph.sparse_initializer}
        own |= {name for inner in graph.node for name in inner.output}
        wanted = {name for inner in graph.node for name in _reads(inner)}
        wanted |= {value.name for value in graph.output}
        names |= wanted - own
    return names


def _check_acyclic(nodes: Sequence[onnx.NodeProto], needs: Sequence[frozenset[int]], where: str) -> None:
    waiting = {index: len(before) for index, before in enumerate(needs)}
    readers: dict[int, list[int]] = {}
    for index, before in enumerate(needs):
        for other in before:
            readers.setdefault(other, []).append(index)
    ready = [index for index, count in waiting.items() if count == 0]
    while ready:
        done = ready.pop()
        del waiting[done]
        for reader in readers.get(done, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    if not waiting:
        return
    # Every node left waits for another one left, so that walking back must close the circle.
    at, walked = min(waiting), []
    while at not in walked:
        walked.append(at)
        at = min(before for before in needs[at] if before in waiting)
    backwards = walked[walked.index(at) :]
    circle = [_name(nodes[index]) for index in (backwards[0], *reversed(backwards[1:]))]
    more = f" and {len(circle) - 3} more" if len(circle) > 3 else ""
    raise SourceModelError(
        f"the graph has a cycle: {', '.join(circle[:3])}{more}",
        where=where,
        hint="the file is damaged; export it again",
    )


def _dtype(elem_type: int) -> str | None:
    if elem_type == TensorProto.STRING:
        return "string"
    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(elem_type).name)
    except KeyError:
        return None


def _spec(value: onnx.ValueInfoProto, role: str, where: str) -> TensorSpec:
    label = f"{role} {quoted(value.name)}"
    kind = value.type.WhichOneof("value")
    tensor = value.type.tensor_type
    if kind != "tensor_type" or not tensor.HasField("shape"):
        what = "is no tensor" if kind != "tensor_type" else "declares no shape"
        raise SourceModelError(f"{label} {what}", where=where, hint="export it with static ranks")
    dtype = _dtype(tensor.elem_type)
    if dtype is None:
        raise SourceModelError(f"{label} has the unknown element type {tensor.elem_type}", where=where)
    shape: list[int | str | None] = []
    for dimension in tensor.shape.dim:
        if not dimension.HasField("dim_value"):
            shape.append(dimension.dim_param or None)
        elif 1 <= dimension.dim_value <= MAX_ELEMENTS:
            shape.append(dimension.dim_value)
        else:
            raise SourceModelError(
                f"{label} has a dimension of {dimension.dim_value}, outside 1..{MAX_ELEMENTS}", where=where
            )
    if prod(size for size in shape if isinstance(size, int)) > MAX_ELEMENTS:
        raise SourceModelError(f"{label} has more than {MAX_ELEMENTS} elements", where=where)
    return TensorSpec(value.name, dtype, tuple(shape))
