"""Evaluates an ONNX graph on the CPU as a strongly typed TensorRT engine would: by declared types.

Every tensor is rounded to its declared type.  Products, convolutions, softmax, normalizations and
reductions sum in fp32 and round once at the end, as the hardware does (with softmax summed in bf16, a
sound bf16 graph reads a velocity cosine of 0.97 instead of 0.9999).  A node whose operands have
different float types is refused, as a strongly typed network refuses it.

onnx's own reference evaluator holds the whole model and every tensor and computes each type as numpy
does; here weights are mapped and converted where they are used, a tensor is dropped after its last
reader, and onnx's implementation is asked only for operators that ``verify.kernels`` lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from engine_builder.errors import ConversionError, ResourceError
from verify.kernels import KERNELS
from verify.kernels.fallback import reference_kernel
from verify.kernels.rounding import BLOCK, NARROW, Array
from verify.kernels.tensor import COMPUTED_IN_FP32, Call, Index, Kernel, Tensor, UnsupportedError, part
from verify.kernels.workers import INLINE, Workers, default_threads, single_threaded_blas

_FLOATS: Final = COMPUTED_IN_FP32 | {ir.DataType.DOUBLE}

_STRICTER: Final[Mapping[str, tuple[int, ...]]] = {
    "Attention": (0, 1, 2, 3),
    "LayerNormalization": (0, 1, 2),
    "Pow": (0, 1),
    "QuantizeLinear": (0, 1),
    "RMSNormalization": (0, 1),
}
"""Operands that TensorRT wants in one float type although ONNX lets them differ."""

_KEPT_BYTES: Final = 1 << 16
"""Constants up to this size are kept converted from one node and one run to the next."""

_OLDEST: Final = 13
"""From this opset on the kernels know every form of their operators."""

_IN_SCORES: Final = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Sub", "Where"})
"""What may stand between q @ k^T and softmax for both to be computed row block by row block."""


@dataclass(frozen=True, eq=False)
class _Step:
    """A node with its kernel, the values it reads, and those that nothing reads after it."""

    node: ir.Node
    kernel: Kernel
    reads: tuple[ir.Value | None, ...]
    writes: tuple[ir.Value, ...]
    call: Call
    groups: tuple[tuple[tuple[int, ...], bool], ...]
    """Operands of one type: their indices, and whether only the float types among them must agree."""


@dataclass(frozen=True, eq=False)
class _Core:
    """Steps from q @ k^T to probabilities @ v, evaluated together so that no score matrix is held."""

    steps: tuple[_Step, ...]


_Stage = _Step | _Core


class StrictEvaluator:
    """Evaluates one model any number of times; weights stay on disk where the model has them there.

    Raises ConversionError when the graph uses an operator that cannot be evaluated or is not sorted.
    """

    def __init__(self, model: Path | ir.Model, *, threads: int | None = None) -> None:
        if isinstance(model, Path):
            model = load(model)
        self._graph = model.graph
        self._threads = default_threads() if threads is None else threads
        self._stages = _stages(model)
        self._drops = _drops(self._stages, set(model.graph.outputs))
        self._kept: dict[ir.Value, Tensor] = {}

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """The graph's inputs, without the initializers that old models list there too."""
        return tuple(value for value in self._graph.inputs if value.const_value is None)

    def run(
        self, inputs: Mapping[str, Array], *, on_stage: Callable[[int, int], None] | None = None
    ) -> dict[str, Array]:
        """The graph's outputs by name, in their declared types; ``inputs`` has the declared types too.

        ``on_stage`` is called with the number of stages done and their total.  Raises ConversionError
        naming the node when types are mixed, a declared type is not met or a node cannot be evaluated,
        and ResourceError when memory runs out.
        """
        values: dict[ir.Value, Tensor] = {}
        for value in self.inputs:
            values[value] = _input(value, inputs)
        with single_threaded_blas(), Workers(self._threads) as workers, np.errstate(all="ignore"):
            for number, stage in enumerate(self._stages):
                try:
                    if isinstance(stage, _Core):
                        self._run_core(stage, values, workers)
                    else:
                        self._run_step(stage, values, workers)
                except MemoryError:
                    last = stage.steps[-1] if isinstance(stage, _Core) else stage
                    raise ResourceError("out of memory", where=_where(last.node)) from None
                for value in self._drops[number]:
                    values.pop(value, None)
                if on_stage is not None:
                    on_stage(number + 1, len(self._stages))
        return {value.name or "": self._read(value, values).to_numpy() for value in self._graph.outputs}

    def _read(self, value: ir.Value, values: Mapping[ir.Value, Tensor]) -> Tensor:
        if value in values:
            return values[value]
        if value in self._kept:
            return self._kept[value]
        if value.const_value is None:
            raise ConversionError(
                f"the value {value.name!r} is read before it is computed",
                hint="the graph is not topologically sorted",
            )
        tensor = Tensor.from_numpy(value.const_value.numpy())
        if tensor.array.nbytes <= _KEPT_BYTES:
            self._kept[value] = tensor
        elif isinstance(value.const_value, ir.ExternalTensor) and tensor.dtype in NARROW:
            # The converted copy is all that is needed: give the mapped pages back.
            value.const_value.release()
        return tensor

    def _operands(self, step: _Step, values: Mapping[ir.Value, Tensor]) -> list[Tensor | None]:
        return [None if value is None else self._read(value, values) for value in step.reads]

    def _run_step(self, step: _Step, values: dict[ir.Value, Tensor], workers: Workers) -> None:
        results = _compute(step, self._operands(step, values), workers)
        values.update(zip(step.writes, results, strict=False))

    def _run_core(self, core: _Core, values: dict[ir.Value, Tensor], workers: Workers) -> None:
        inner = {step.writes[0] for step in core.steps}
        operands = [
            [None if value is None or value in inner else self._read(value, values) for value in step.reads]
            for step in core.steps
        ]
        tiling = _tiling(core, operands)
        if tiling is None:
            for step in core.steps:
                self._run_step(step, values, workers)
            return
        batch, rows, width, columns = tiling
        rank = len(batch) + 2
        out = np.empty((*batch, rows, width), np.float32)
        results: list[ir.DataType] = []
        steps = [_on_matrices(step) for step in core.steps]

        def run(index: Index) -> None:
            flowing: Tensor | None = None
            for step, own in zip(steps, operands, strict=True):
                cut = [_cut(operand, index, rank, step, n) for n, operand in enumerate(own)]
                given = [
                    flowing if value in inner else operand
                    for value, operand in zip(step.reads, cut, strict=True)
                ]
                (flowing,) = _compute(step, given, INLINE)
            assert flowing is not None
            out[index] = flowing.array
            results.append(flowing.dtype)

        height = max(16, BLOCK * 4 // columns)
        workers.each(
            run,
            (
                (*lead, slice(start, start + height))
                for lead in np.ndindex(batch)
                for start in range(0, rows, height)
            ),
        )
        values[core.steps[-1].writes[0]] = Tensor(out, results[0])


def load(path: Path) -> ir.Model:
    """The model at ``path`` with its external weights mapped, its functions inlined.

    Raises ConversionError when it cannot be read.
    """
    try:
        model = ir.load(path)
    except Exception as error:  # onnx-ir and protobuf raise errors of many unrelated classes
        raise ConversionError(f"cannot be read: {error}", where=str(path)) from error
    return InlinePass()(model).model if model.functions else model


def _where(node: ir.Node) -> str:
    return f"node {node.name or (node.outputs[0].name if node.outputs else '')!r} ({node.op_type})"


def _input(value: ir.Value, inputs: Mapping[str, Array]) -> Tensor:
    name = value.name or ""
    if name not in inputs:
        raise ConversionError(f"no values are given for the input {name!r}")
    tensor = Tensor.from_numpy(np.asarray(inputs[name]))
    if value.dtype is not None and tensor.dtype != value.dtype:
        raise ConversionError(
            f"the input {name!r} is declared {_named(value.dtype)} but is given {_named(tensor.dtype)}",
            hint="inputs keep the types of the source graph",
        )
    return tensor


def _named(dtype: ir.DataType) -> str:
    return dtype.name.lower()


def _compute(step: _Step, operands: Sequence[Tensor | None], workers: Workers) -> tuple[Tensor, ...]:
    """The node's results; checks the types of its operands and the declared types of its results."""
    _check_types(step, operands)
    call = replace(step.call, workers=workers)
    try:
        results = step.kernel(call, *operands)
    except UnsupportedError as error:
        raise ConversionError(str(error), where=_where(step.node)) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        shapes = ", ".join("-" if x is None else str(x.array.shape) for x in operands)
        raise ConversionError(
            f"cannot be evaluated with operands of shapes {shapes}: {error}", where=_where(step.node)
        ) from error
    listed = results if isinstance(results, tuple) else (results,)
    for value, result in zip(step.writes, listed, strict=False):
        if value.dtype is not None and value.dtype != result.dtype:
            raise ConversionError(
                f"its output {value.name!r} is declared {_named(value.dtype)} but is {_named(result.dtype)}",
                where=_where(step.node),
            )
    return listed


def _check_types(step: _Step, operands: Sequence[Tensor | None]) -> None:
    for indices, floats_only in step.groups:
        given = [operand for n in indices if n < len(operands) and (operand := operands[n]) is not None]
        dtypes = {x.dtype for x in given if not floats_only or x.dtype in _FLOATS}
        if len(dtypes) > 1:
            raise ConversionError(
                f"its operands are {' and '.join(sorted(map(_named, dtypes)))}, which have to be one type",
                where=_where(step.node),
                hint="a Cast is missing",
            )


@lru_cache(maxsize=1024)
def _schema(op_type: str, domain: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _symbols(schema: onnx.defs.OpSchema | None, count: int) -> list[str]:
    """The type symbol of each operand, such as ``T``; empty where any type may stand."""
    if schema is None:
        return [""] * count
    declared = schema.inputs
    symbols = []
    for n in range(count):
        parameter = declared[min(n, len(declared) - 1)] if declared else None
        symbols.append(parameter.type_str if parameter is not None and parameter.is_homogeneous else "")
    return symbols


def _stages(model: ir.Model) -> tuple[_Stage, ...]:
    steps = [_step(node, model.opset_imports) for node in model.graph]
    known = set(model.graph.inputs) | set(model.graph.initializers.values())
    for step in steps:
        for value in step.reads:
            if value is not None and value not in known:
                raise ConversionError(
                    f"reads the value {value.name!r} before it is computed",
                    where=_where(step.node),
                    hint="the graph is not topologically sorted",
                )
        known.update(step.node.outputs)
    by_node = {step.node: step for step in steps}
    outputs = set(model.graph.outputs)
    cores: dict[ir.Node, _Core] = {}
    inside: set[ir.Node] = set()
    for step in steps:
        if step.node.op_type == "Softmax" and (nodes := _core_nodes(step.node, outputs)):
            cores[nodes[-1]] = _Core(tuple(by_node[node] for node in nodes))
            inside.update(nodes[:-1])
    return tuple(cores.get(step.node, step) for step in steps if step.node not in inside)


def _step(node: ir.Node, opsets: Mapping[str, int]) -> _Step:
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = opsets.get(domain, opsets.get("ai.onnx", 1))
    schema = _schema(node.op_type, domain, version)
    if schema is None:
        raise ConversionError(
            f"opset {version} of domain {domain or 'ai.onnx'!r} has no such operator", where=_where(node)
        )
    if domain == "" and version < _OLDEST:
        raise ConversionError(f"opset {version} is older than {_OLDEST}", where=_where(node))
    symbols = _symbols(schema, len(node.inputs))
    groups: list[tuple[tuple[int, ...], bool]] = []
    for symbol in dict.fromkeys(symbols):
        indices = tuple(n for n, other in enumerate(symbols) if other == symbol)
        if symbol and len(indices) > 1:
            groups.append((indices, False))
    if node.op_type in _STRICTER:
        groups.append((_STRICTER[node.op_type], True))
    attributes = {
        name: attribute.value for name, attribute in node.attributes.items() if not attribute.is_ref()
    }
    reads: tuple[ir.Value | None, ...] = tuple(node.inputs)
    named = [n for n, value in enumerate(node.outputs) if value.name]
    writes = tuple(node.outputs[: named[-1] + 1]) if named else ()
    kernel = KERNELS.get(node.op_type) if domain == "" else None
    if kernel is None:
        # Each value once, and those that only the node's subgraphs read.
        captured = tuple(dict.fromkeys(value for value in (*node.inputs, *_captured(node)) if value))
        kernel = reference_kernel(node, captured, opsets, _result_types(node, schema, symbols, captured))
        groups = [
            (tuple(captured.index(value) for n in indices if (value := node.inputs[n]) is not None), only)
            for indices, only in groups
        ]
        reads, writes = captured, tuple(node.outputs[n] for n in named)
    call = Call(node.op_type, version, attributes, len(writes), INLINE)
    return _Step(node, kernel, reads, writes, call, tuple(groups))


def _result_types(
    node: ir.Node, schema: onnx.defs.OpSchema, symbols: Sequence[str], reads: Sequence[ir.Value]
) -> tuple[int | None, ...]:
    """For each named result of the node, which of the values it reads has the result's type."""
    types: list[int | None] = []
    for n, output in enumerate(node.outputs):
        if not output.name:
            continue
        declared = schema.outputs[min(n, len(schema.outputs) - 1)].type_str
        operand = symbols.index(declared) if declared in symbols else None
        value = None if operand is None else node.inputs[operand]
        types.append(None if value is None else reads.index(value))
    return tuple(types)


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Values of the graph around that the node's subgraphs read."""
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif attribute.type is ir.AttributeType.GRAPHS:
            graphs = list(attribute.as_graphs())
        else:
            continue
        for graph in graphs:
            own = {*graph.inputs, *graph.initializers.values()}
            own.update(value for inner in graph for value in inner.outputs)
            read = [value for inner in graph for value in (*inner.inputs, *_captured(inner))]
            yield from (value for value in (*read, *graph.outputs) if value is not None and value not in own)


def _core_nodes(softmax: ir.Node, outputs: set[ir.Value]) -> tuple[ir.Node, ...]:
    """The nodes from q @ k^T through ``softmax`` to the product with v; empty when it is no such core.

    Every value between them has one reader, so that nobody misses it.
    """
    before = _to_product(softmax, outputs)
    after: list[ir.Node] = []
    value = softmax.outputs[0]
    while before and _only_reader(value, outputs):
        use = next(iter(value.uses()))
        after.append(use.node)
        if use.node.op_type == "MatMul":
            return (*before, softmax, *after) if use.idx == 0 else ()
        if use.node.op_type != "Cast":
            break
        value = use.node.outputs[0]
    return ()


def _to_product(node: ir.Node, outputs: set[ir.Value]) -> tuple[ir.Node, ...]:
    """The nodes from a MatMul to ``node``, without it; empty when there is no such path or several."""
    paths: list[tuple[ir.Node, ...]] = []
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if value is None or producer is None or not _only_reader(value, outputs):
            continue
        if producer.op_type == "MatMul":
            paths.append((producer,))
        elif producer.op_type in _IN_SCORES and (path := _to_product(producer, outputs)):
            paths.append((*path, producer))
    return paths[0] if len(paths) == 1 else ()


def _only_reader(value: ir.Value, outputs: set[ir.Value]) -> bool:
    return len(value.uses()) == 1 and value not in outputs


def _tiling(
    core: _Core, operands: Sequence[Sequence[Tensor | None]]
) -> tuple[tuple[int, ...], int, int, int] | None:
    """Batch dimensions, rows and columns of the result, and columns of the scores.

    None when the core is too small to be worth cutting, or cannot be cut by rows.
    """
    q, k = operands[0]
    v = operands[-1][1]
    assert q is not None
    assert k is not None
    assert v is not None
    if min(q.array.ndim, k.array.ndim, v.array.ndim) < 2 or q.dtype not in COMPUTED_IN_FP32:
        return None
    others = [operand.array.shape for own in operands[1:-1] for operand in own if operand is not None]
    scores = np.broadcast_shapes(q.array.shape[:-2], k.array.shape[:-2])
    rank = len(scores) + 2
    softmax = next(step for step in core.steps if step.node.op_type == "Softmax")
    if softmax.call.get("axis", -1) not in (-1, rank - 1) or any(len(shape) > rank for shape in others):
        return None
    rows, columns = q.array.shape[-2], k.array.shape[-1]
    if math.prod(scores) * rows * columns <= BLOCK:
        return None
    try:
        batch = np.broadcast_shapes(scores, v.array.shape[:-2], *(shape[:-2] for shape in others))
    except ValueError:
        return None
    return (batch, rows, v.array.shape[-1], columns) if batch == scores else None


def _on_matrices(step: _Step) -> _Step:
    """The step on a row block, which has lost its batch dimensions: softmax is along the last axis."""
    if step.node.op_type != "Softmax":
        return step
    return replace(step, call=replace(step.call, attributes={**step.call.attributes, "axis": -1}))


def _cut(operand: Tensor | None, index: Index, rank: int, step: _Step, position: int) -> Tensor | None:
    """The part of an operand that a row block needs: a product's second operand keeps all its rows."""
    if operand is None:
        return None
    at = index[:-1] if step.node.op_type == "MatMul" and position == 1 else index
    return operand.with_array(np.asarray(part(operand.array, at, rank)))


def _drops(stages: Sequence[_Stage], outputs: set[ir.Value]) -> tuple[tuple[ir.Value, ...], ...]:
    """For each stage, the values that nothing reads after it."""
    last: dict[ir.Value, int] = {}
    for number, stage in enumerate(stages):
        steps = stage.steps if isinstance(stage, _Core) else (stage,)
        for step in steps:
            for value in (*step.reads, *step.writes):
                if value is not None and value not in outputs:
                    last[value] = number
    drops: list[list[ir.Value]] = [[] for _ in stages]
    for value, number in last.items():
        drops[number].append(value)
    return tuple(map(tuple, drops))
