"""Which weights an engine takes in anew, when the recipe asks for ``refit: individual``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx

from engine_builder.errors import RecipeError

if TYPE_CHECKING:
    import tensorrt as trt

_LINEAR: Final = frozenset({"MatMul", "Gemm", "Conv"})
_PASSES_WEIGHTS: Final = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose"})


def linear_weights(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the weights of linears and convolutions, which are what a fine-tuning changes.

    A gain, a bias or a rotary table is not among them: they stay fused into their kernels.
    """
    matrices = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) >= 2}
    origin = {name: name for name in matrices}
    found: dict[str, None] = {}
    for node in model.graph.node:
        origins = [origin[name] for name in node.input[:1] if name in origin]
        if node.op_type in _PASSES_WEIGHTS and origins:
            origin[node.output[0]] = origins[0]
        elif node.op_type in _LINEAR:
            found.update(dict.fromkeys(origin[name] for name in node.input if name in origin))
    return tuple(found)


def mark_linear_weights(network: trt.INetworkDefinition, model: Path) -> None:
    """Mark the weights of the linears as refittable.

    Raises RecipeError when there are none.
    """
    names = linear_weights(onnx.load(model, load_external_data=False))
    if not [name for name in names if network.mark_weights_refittable(name)]:
        raise RecipeError("the model has no linear whose weights could be refitted", where="build.refit")
