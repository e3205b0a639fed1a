"""Raises a graph to a later opset, for types that the standard knew only later."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.operator_types import supports
from engine_builder.graph.reading import is_op

LATEST = 22
"""The last opset that this pass raises a graph to: bf16 convolutions appear in it."""

# Operators whose definition changed up to opset 22 by more types, or by attributes and inputs whose
# absence means what it meant before (ONNX operator change log).
_WIDENED = frozenset(
    {
        "Abs", "AveragePool", "Bernoulli", "Cast", "CastLike", "Constant", "ConstantOfShape", "Conv",
        "ConvTranspose", "DequantizeLinear", "Dropout", "Elu", "Equal", "EyeLike", "Flatten",
        "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity", "If",
        "InstanceNormalization", "IsInf", "IsNaN", "Loop", "LpNormalization", "LpPool", "MaxPool", "Mish",
        "Multinomial", "Pad", "QuantizeLinear", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike", "ReduceMax", "ReduceMin", "Reshape", "Round", "Scan", "ScatterElements",
        "ScatterND", "Selu", "Shape", "Size", "Softplus", "Softsign", "Squeeze", "ThresholdedRelu",
        "Transpose", "Unsqueeze", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin",
        "Sinh", "Tan", "Det",
    }
)  # fmt: skip
_REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
               "ReduceMin", "ReduceProd", "ReduceSumSquare")  # fmt: skip


class UpgradeOpsetPass(ir.passes.InPlacePass):
    """Raises the graph to the first opset at which its operators take ``dtype``, and to ``minimum``.

    Reductions get their axes as an input (opset 18) and an even Split its number of outputs; the
    other operators that changed only gained types.  A graph that already is there is left alone.

    Raises:
        ConversionError: An operator changed its meaning in between.
    """

    version: ClassVar[int] = 1

    def __init__(self, dtype: ir.DataType, minimum: int = 0) -> None:
        super().__init__()
        self._dtype = dtype
        self._minimum = minimum

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        current = model.graph.opset_imports.get("", 0)
        target = max(self._minimum, current)
        nodes = list(model.graph.all_nodes())
        kinds = {(n.op_type, n.domain) for n in nodes if n.domain in ("", "ai.onnx")}
        for opset in range(target, LATEST + 1):
            if all(
                supports(op, domain, opset, self._dtype) or not supports(op, domain, LATEST, self._dtype)
                for op, domain in kinds
            ):
                target = opset
                break
        if target == current:
            return ir.passes.PassResult(model, False)
        for node in nodes:
            if node.domain in ("", "ai.onnx"):
                _upgrade(node, current, target)
        model.graph.opset_imports[""] = target
        # IR 9 came with opset 19 and E4M3, IR 10 with opset 21 (ONNX versioning table).
        model.ir_version = max(model.ir_version, 10 if target >= 21 else 9 if target >= 19 else 8)
        return ir.passes.PassResult(model, True)


def _upgrade(node: ir.Node, current: int, target: int) -> None:
    try:
        old = onnx.defs.get_schema(node.op_type, current, "").since_version
        new = onnx.defs.get_schema(node.op_type, target, "").since_version
    except onnx.defs.SchemaError as error:
        raise ConversionError(
            f"the operator {node.op_type} is not defined at opset {target}", where=f"node {node.name}"
        ) from error
    if old == new:
        return
    if is_op(node, *_REDUCTIONS) and current < 18:
        _axes_as_input(node)
    elif is_op(node, "Split") and current < 18:
        if len(node.inputs) < 2 or node.inputs[1] is None:
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    elif node.op_type == "Resize" and current >= 13:
        return  # 18 and 19 added attributes whose defaults are the old behaviour
    elif node.op_type not in _WIDENED and node.op_type not in _REDUCTIONS:
        raise ConversionError(
            f"{node.op_type} changed its meaning between opset {current} and {target}",
            where=f"node {node.name}",
            hint=f"export the model at opset {target} or later",
        )


def _axes_as_input(node: ir.Node) -> None:
    attribute = node.attributes.pop("axes", None)
    if attribute is None or node.graph is None:
        return
    axes = [int(a) for a in attribute.as_ints()]
    name = "reduction_axes_" + "_".join(str(a).replace("-", "m") for a in axes)
    value = node.graph.initializers.get(name)
    if value is None:
        tensor = ir.tensor(np.asarray(axes, np.int64), name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([len(axes)]), const_value=tensor
        )
        node.graph.register_initializer(value)
    node.resize_inputs(2)
    node.replace_input_with(1, value)
