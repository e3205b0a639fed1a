"""Counts over an engine's layers: what can be said of an engine without its ONNX graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from verify.layers import LayerRecord

_TRIG_IN_NAME = re.compile(r"(?:^|[/_.]|(?<=[a-z]))(?:Cos|Sin)(?=$|[/_.\d]|[A-Z])")
_TRIG_OPERATORS = frozenset({"Cos", "Sin"})


@dataclass(frozen=True)
class LayerCounts:
    """Totals over all layers of an engine.

    ``gemms`` and ``fused_attention`` count layers by the type of their operands: TensorRT merges
    linears that share an input, so that a count of GEMMs is below the count of linears.
    """

    layers: int
    by_layer_type: Mapping[str, int]
    by_output_type: Mapping[str, int]
    gemms: Mapping[str, int]
    fused_attention: Mapping[str, int]
    fp8_layers: int
    runtime_trig: int

    @property
    def total_gemms(self) -> int:
        return sum(self.gemms.values())

    @property
    def total_fused_attention(self) -> int:
        return sum(self.fused_attention.values())


def attention_type(layer: LayerRecord) -> str:
    """The type of a fused core's q, k and v; ``mixed`` if they differ."""
    types = set(layer.qkv_dtypes)
    return types.pop() if len(types) == 1 else "mixed" if types else "unknown"


def gemm_type(layer: LayerRecord) -> str:
    """The type of a product's operands; ``mixed`` where FP8 is cast to another type before it."""
    dtype = layer.product_dtype or "unknown"
    return "mixed" if dtype == "fp8" and layer.casts_before_product else dtype


def count_layers(layers: Sequence[LayerRecord], trig_nodes: Collection[str] | None = None) -> LayerCounts:
    """Counts ``layers``.

    Args:
        layers: The engine's layers.
        trig_nodes: Names of the graph's Cos and Sin nodes; without a graph they are told by name.
            A generated kernel that names the operator counts whatever graph it came from.
    """
    trig = 0
    for layer in layers:
        if _TRIG_OPERATORS.intersection(layer.operators):
            trig += 1
        elif trig_nodes is not None:
            trig += any(node in trig_nodes for node in layer.onnx_nodes)
        else:
            trig += any(_TRIG_IN_NAME.search(name) for name in (layer.name, *layer.onnx_nodes))
    return LayerCounts(
        layers=len(layers),
        by_layer_type=dict(sorted(Counter(layer.layer_type for layer in layers).items())),
        by_output_type=dict(sorted(Counter(t.dtype for layer in layers for t in layer.outputs).items())),
        gemms=dict(sorted(Counter(gemm_type(layer) for layer in layers if layer.is_gemm).items())),
        fused_attention=dict(
            sorted(Counter(attention_type(layer) for layer in layers if layer.is_fused_attention).items())
        ),
        fp8_layers=sum(layer.touches_fp8 for layer in layers),
        runtime_trig=trig,
    )
