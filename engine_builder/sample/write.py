"""Writing a sample model to disk: small ones in one file, large ones with a streamed sidecar."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, StringStringEntryProto, TensorProto, helper

from engine_builder.durable import disk_error, replacing, replacing_together
from engine_builder.sample import dynamo, torchscript
from engine_builder.sample.draft import GraphDraft, Initializer, graph_inputs
from engine_builder.sample.spec import Dimensions, SampleSpec, Spelling
from engine_builder.sample.weights import Parameter, draw

_log = logging.getLogger(__name__)

_INLINE_LIMIT = 64 * 2**20  # protobuf ends at 2 GiB; a model is worth a sidecar long before
_SIDECAR_MINIMUM = 1024  # smaller tensors stay in the model, where shape inference reads them
_ALIGNMENT = 4096
_WORKERS = 2


def write_sample(spec: SampleSpec, path: Path) -> Path:
    """Write the model of ``spec`` to ``path`` and return it; the same ``spec`` gives the same bytes.

    Models of more than 64 MiB keep their weights in ``<name>.data`` next to it, generated and written
    tensor by tensor.  Both files appear under their names only when complete.

    Raises ResourceError when the folder cannot be written or the disk is full.
    """
    write_draft(draft_graph(spec.dimensions, spec.spelling), spec.seed, path)
    return path


def draft_graph(dims: Dimensions, spelling: Spelling) -> GraphDraft:
    """The graph without its weights, as ``spelling``'s exporter writes it."""
    if spelling is Spelling.TORCHSCRIPT17:
        return torchscript.draft(dims)
    return dynamo.draft(dims, composite=spelling is Spelling.DYNAMO23)


def write_draft(draft: GraphDraft, seed: int, path: Path) -> None:
    """Write any draft as ``write_sample`` does, for dimensions that no released model has."""
    size = sum(initializer.size_bytes for initializer in draft.initializers)
    _log.info("writing a sample model with %.1f MB of weights to %s", size / 1e6, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if size <= _INLINE_LIMIT:
            tensors = [_inline(item, seed) for item in draft.initializers]
            with replacing(path) as file:
                file.write(_model(draft, tensors).SerializeToString())
        else:
            _write_with_sidecar(draft, seed, path)
    except OSError as error:
        raise disk_error(error, path, size) from error


def _write_with_sidecar(draft: GraphDraft, seed: int, path: Path) -> None:
    sidecar = path.with_name(f"{path.name}.data")
    tensors = []
    with (
        replacing_together(path, sidecar) as folder,
        (folder / sidecar.name).open("wb") as data_file,
        (folder / path.name).open("wb") as model_file,
    ):
        outside = [item for item in draft.initializers if item.size_bytes >= _SIDECAR_MINIMUM]
        offsets: dict[str, int] = {}
        for item, values in zip(outside, _drawn(outside, seed), strict=True):
            data_file.write(b"\0" * (-data_file.tell() % _ALIGNMENT))
            offsets[item.name] = data_file.tell()
            data_file.write(values.data)
        for item in draft.initializers:
            if item.name in offsets:
                tensors.append(_reference(item, sidecar.name, offsets[item.name]))
            else:
                tensors.append(_inline(item, seed))
        model_file.write(_model(draft, tensors).SerializeToString())


def _drawn(initializers: list[Initializer], seed: int) -> Iterator[NDArray[np.generic]]:
    """The values of each initializer in order, drawn a few ahead on other threads."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        ahead: deque[Future[NDArray[np.generic]]] = deque()
        for initializer in initializers:
            ahead.append(pool.submit(_values, initializer, seed))
            if len(ahead) > _WORKERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _values(initializer: Initializer, seed: int) -> NDArray[np.generic]:
    source = initializer.source
    values = draw(source, seed) if isinstance(source, Parameter) else source
    return np.ascontiguousarray(values.T if initializer.transposed else values).reshape(initializer.shape)


def _inline(initializer: Initializer, seed: int) -> TensorProto:
    data = _values(initializer, seed).tobytes()
    return helper.make_tensor(initializer.name, initializer.element_type, initializer.shape, data, raw=True)


def _reference(initializer: Initializer, location: str, offset: int) -> TensorProto:
    entries = {"location": location, "offset": str(offset), "length": str(initializer.size_bytes)}
    return TensorProto(
        name=initializer.name,
        data_type=initializer.element_type,
        dims=initializer.shape,
        data_location=TensorProto.EXTERNAL,
        external_data=[StringStringEntryProto(key=key, value=value) for key, value in entries.items()],
    )


def _model(draft: GraphDraft, tensors: list[TensorProto]) -> ModelProto:
    graph = helper.make_graph(
        draft.nodes, "main_graph", graph_inputs(), [draft.output], tensors, value_info=draft.value_info
    )
    opset = helper.make_opsetid("", draft.opset)
    return helper.make_model(
        graph, opset_imports=[opset], ir_version=draft.ir_version, producer_name="pytorch"
    )
