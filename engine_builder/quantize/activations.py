"""The ranges of activations measured without ModelOpt, to check its values by."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnxruntime

from engine_builder.graph.find.linears import find_linears
from engine_builder.source import Source, load_graph
from verify.inputs import Sample


def activation_amax(source: Source, samples: Iterable[Sample]) -> dict[str, float]:
    """By linear, the largest magnitude of its activation over all ``samples``.

    onnxruntime runs the source graph as it is, unoptimized, with the activations as further outputs;
    numpy does the rest.  The model and its activations are held in memory, so this is for models
    below protobuf's 2 GiB.
    """
    linears, _ = find_linears(list(load_graph(source).graph.all_nodes()))
    model = onnx.load(source.path)
    given = {value.name for value in model.graph.input}
    wanted = dict.fromkeys(linear.activation.name or "" for linear in linears)
    produced = [name for name in wanted if name not in given]
    present = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in produced if name not in present)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    amax = dict.fromkeys(wanted, 0.0)
    for sample in samples:
        inputs = dict(sample.load())
        arrays = dict(zip(produced, session.run(produced, inputs), strict=True))
        for name in wanted:
            array = arrays[name] if name in arrays else inputs[name]
            amax[name] = max(amax[name], float(np.abs(array).max(initial=0.0)))
    return {linear.name: amax[linear.activation.name or ""] for linear in linears}
