"""Small graphs in ONNX's text form, with the constants that a test gives them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from engine_builder.graph.find import find_structures
from engine_builder.graph.structures import Structures
from engine_builder.precision.convert import annotate, normalizing_passes
from engine_builder.sample import SampleSpec, Size, Spelling, write_sample

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLES = tuple((spelling, differential) for spelling in Spelling for differential in (False, True))
"""The six kinds of tiny sample model."""


def graph(
    text: str, constants: Mapping[str, Any] | None = None, *, opset: int = 17, typed: bool = True
) -> onnx.ModelProto:
    """A model whose graph is written as ``(inputs) => (outputs) { nodes }``.

    Nodes are named after their first output.  Constants become initializers: fp32 for floats, int64
    for integers, unless they are arrays of another type.  ``typed=False`` leaves out all types but
    those of inputs and outputs, as the TorchScript exporter does.
    """
    model: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: {8 if opset < 21 else 10}, opset_import: ["" : {opset}]> graph {text}'
    )
    for name, value in (constants or {}).items():
        array = np.asarray(value)
        if not isinstance(value, np.ndarray):
            array = array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = node.output[0]
    return onnx.shape_inference.infer_shapes(model, strict_mode=True) if typed else model


def normalized(model: onnx.ModelProto) -> ir.Model:
    """The model as a conversion sees it."""
    loaded = ir.from_proto(model)
    for graph_pass in normalizing_passes():
        graph_pass(loaded)
    return loaded


def structures(model: onnx.ModelProto) -> Structures:
    """What is found in ``model`` as it is; the same must be found once it is normalized."""
    loaded = ir.from_proto(model)
    annotate(loaded)
    found = find_structures(loaded)
    again = find_structures(normalized(model))
    assert found.counts() == again.counts()
    assert len(found.near_misses) == len(again.near_misses)
    return found


def names(nodes: tuple[ir.Node, ...]) -> set[str | None]:
    return {node.name for node in nodes}


@cache
def sample(spelling: Spelling, differential: bool) -> Path:
    """A tiny sample model, written once per test session."""
    path = Path(mkdtemp(prefix="sa3-sample-")) / f"{spelling}_{'md' if differential else 'sm'}.onnx"
    return write_sample(SampleSpec(Size.TINY, spelling, differential, 0), path)


def dit_shapes(length: int) -> dict[str, tuple[int, ...]]:
    """The input shapes of the DiT at a latent length."""
    return {
        "x": (1, 256, length),
        "t": (1,),
        "t5_hidden": (1, 256, 768),
        "t5_mask": (1, 256),
        "seconds_total": (1,),
        "local_add_cond": (1, 257, length),
    }


LENGTHS = tuple(dit_shapes(length) for length in (1, 1292, 4096))
"""The standard profile's bounds."""
