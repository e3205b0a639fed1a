"""Operators without a kernel of their own, computed by onnx's reference implementation.

The operands of a narrow type are handed over in fp32 and the results are rounded once, so that here
too nothing is summed in the narrow type.  Operators with subgraphs get their operands in the declared
types instead, and the reference implementation rounds inside as numpy does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from verify.kernels.tensor import Call, Kernel, Tensor, UnsupportedError, rounded


def reference_kernel(
    node: ir.Node, reads: tuple[ir.Value, ...], opsets: Mapping[str, int], types: tuple[int | None, ...]
) -> Kernel:
    """A kernel for ``node`` whose operands are ``reads``, the values that it and its subgraphs read.

    ``types`` tells for each result the operand whose type it has, by index; None when the operator
    decides it.
    """
    proto = ir.serde.serialize_node(node)
    with_subgraphs = any(attribute.g.ByteSize() or attribute.graphs for attribute in proto.attribute)
    names = [value.name or "" for value in reads]
    outputs = [value.name or "" for value in node.outputs if value.name]
    cache: dict[tuple[ir.DataType, ...], ReferenceEvaluator] = {}

    def evaluator(dtypes: tuple[ir.DataType, ...]) -> ReferenceEvaluator:
        if dtypes not in cache:
            inputs = [
                helper.make_tensor_value_info(name, int(dtype), None)
                for name, dtype in zip(names, dtypes, strict=True)
            ]
            graph = helper.make_graph(
                [proto], "node", inputs, [onnx.ValueInfoProto(name=name) for name in outputs]
            )
            model = helper.make_model(
                graph, opset_imports=[helper.make_opsetid(domain, n) for domain, n in opsets.items()]
            )
            cache[dtypes] = ReferenceEvaluator(model)
        return cache[dtypes]

    def run(call: Call, *operands: Tensor) -> tuple[Tensor, ...]:
        arrays = [operand.to_numpy() if with_subgraphs else operand.array for operand in operands]
        held = tuple(ir.DataType.from_numpy(array.dtype) for array in arrays)
        try:
            results = evaluator(held).run(None, dict(zip(names, arrays, strict=True)))
        except (NotImplementedError, onnx.defs.SchemaError) as error:
            raise UnsupportedError(f"no kernel for {call.op_type}: {error}") from None
        return tuple(_result(result, types[n], operands) for n, result in enumerate(results))

    return run


def _result(result: Any, like: int | None, operands: tuple[Tensor, ...]) -> Tensor:
    if not isinstance(result, (np.ndarray, np.generic)):
        raise UnsupportedError("sequences and optional values have no place in an engine")
    array = np.asarray(result)
    if like is None or array.dtype != operands[like].array.dtype:
        return Tensor.from_numpy(array)
    return rounded(np.array(array), operands[like].dtype)
