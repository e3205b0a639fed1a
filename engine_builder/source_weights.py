"""The tensors stored in a source model: that each has the bytes its shape asks for, where it says.

Nothing is allocated or read for it: sizes come from the declared shapes, and the sidecars are
looked at with ``lstat`` only.  A truncated sidecar loads cleanly and fails when it is touched,
minutes into a build, which is why every range is checked here first.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Final

import onnx
from onnx import TensorProto

from engine_builder.errors import SourceModelError
from engine_builder.one_line import one_line, place, quoted

BITS: Final[Mapping[int, int]] = {
    getattr(TensorProto, name): bits
    for bits, names in {
        2: "INT2 UINT2",
        4: "INT4 UINT4 FLOAT4E2M1",
        8: "INT8 UINT8 BOOL FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0",
        16: "INT16 UINT16 FLOAT16 BFLOAT16",
        32: "INT32 UINT32 FLOAT",
        64: "INT64 UINT64 DOUBLE COMPLEX64",
        128: "COMPLEX128",
    }.items()
    for name in names.split()
    if hasattr(TensorProto, name)  # a newer onnx knows more types than an older one
}
"""Bits per element of each ONNX type; those below 8 are packed, the last byte padded."""

_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "float_data": frozenset({"FLOAT", "COMPLEX64"}),
    "double_data": frozenset({"DOUBLE", "COMPLEX128"}),
    "int64_data": frozenset({"INT64"}),
    "uint64_data": frozenset({"UINT32", "UINT64"}),
}
_COPY: Final = "copy the model and its data file into one folder of their own with `cp -L`"


@dataclass(frozen=True)
class Weights:
    """What the stored tensors add up to: bytes in all, and the sidecar files that hold them."""

    bytes: int
    sidecars: tuple[Path, ...]


@dataclass(frozen=True)
class _Span:
    offset: int
    length: int
    tensor: str


def check_weights(model: onnx.ModelProto, path: Path, inline: frozenset[tuple[int, int]]) -> Weights:
    """Check every stored tensor of the model at ``path``.

    ``inline`` holds the (offset, length) references into the model file itself.  Raises
    SourceModelError that names the tensor, or the sidecar and what is wrong with it.
    """
    where = place(path)
    total = 0
    outside: dict[str, list[_Span]] = {}
    for tensor in tensors(model):
        size = _byte_size(tensor, where)
        total += size
        if tensor.data_location != TensorProto.EXTERNAL:
            _check_stored(tensor, size, where)
            continue
        location, span = _reference(tensor, size, where)
        if not (location == path.name and (span.offset, span.length) in inline):
            outside.setdefault(location, []).append(span)
    sidecars = tuple(_sidecar(path, location, spans) for location, spans in sorted(outside.items()))
    return Weights(total, sidecars)


def tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every tensor of the model: initializers and attributes, in subgraphs and functions too."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: onnx.NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for sparse in attribute.sparse_tensors:
            yield from (sparse.values, sparse.indices)
        if attribute.HasField("g"):
            yield from _graph_tensors(attribute.g)
        for graph in attribute.graphs:
            yield from _graph_tensors(graph)


def _label(tensor: TensorProto) -> str:
    return f"tensor {quoted(tensor.name)}" if tensor.name else "an unnamed constant"


def _byte_size(tensor: TensorProto, where: str) -> int:
    """Bytes that the declared shape and type ask for; 0 for text, which has no fixed size."""
    if any(size < 0 for size in tensor.dims):
        raise SourceModelError(f"{_label(tensor)} has a negative dimension", where=where, hint=_EXPORT)
    if tensor.data_type == TensorProto.STRING:
        return 0
    bits = BITS.get(tensor.data_type)
    if bits is None:
        raise SourceModelError(
            f"{_label(tensor)} has the unknown element type {tensor.data_type}", where=where, hint=_EXPORT
        )
    elements: int = prod(tensor.dims)
    return (elements * bits + 7) // 8


def _check_stored(tensor: TensorProto, size: int, where: str) -> None:
    if tensor.data_type == TensorProto.STRING:
        stored, wanted, unit = len(tensor.string_data), prod(tensor.dims), "strings"
    elif tensor.HasField("raw_data"):
        stored, wanted, unit = len(tensor.raw_data), size, "bytes"
    else:
        name = TensorProto.DataType.Name(tensor.data_type)
        field = next((field for field, names in _FIELDS.items() if name in names), "int32_data")
        per_value = 2 if name.startswith("COMPLEX") else 1
        packed = BITS[tensor.data_type] < 8
        stored, unit = len(getattr(tensor, field)), "values"
        wanted = size if packed else prod(tensor.dims) * per_value
    if stored != wanted:
        raise SourceModelError(
            f"{_label(tensor)} of shape {_shape(tensor)} holds {stored} {unit} where {wanted} belong",
            where=where,
            hint=_EXPORT,
        )


def _shape(tensor: TensorProto) -> str:
    return one_line(str(list(tensor.dims)))


_EXPORT: Final = "the file is damaged or its exporter wrote it wrong; export or fetch it again"


def _reference(tensor: TensorProto, size: int, where: str) -> tuple[str, _Span]:
    """Where an external tensor lies, with its offset and length checked against its shape."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    pure = PurePosixPath(location)
    if (
        not location.isprintable()
        or not pure.name
        or pure.is_absolute()
        or ".." in pure.parts
        or "\\" in location
        or ":" in location
    ):
        raise SourceModelError(
            f"{_label(tensor)} keeps its data at {quoted(location)}, which is not a plain file below the"
            " model's folder",
            where=where,
            hint="do not trust this file; export it again with its data file beside it",
        )
    numbers: dict[str, int] = {"offset": 0, "length": size}
    for key in numbers:
        if key in entries:
            if not re.fullmatch(r"\d{1,18}", entries[key], re.ASCII):
                raise SourceModelError(
                    f"{_label(tensor)} has the external {key} {quoted(entries[key])}",
                    where=where,
                    hint=_EXPORT,
                )
            numbers[key] = int(entries[key])
    if numbers["length"] != size:
        raise SourceModelError(
            f"{_label(tensor)} of shape {_shape(tensor)} has {numbers['length']} external bytes, not {size}",
            where=where,
            hint=_EXPORT,
        )
    return location, _Span(numbers["offset"], size, _label(tensor))


def _sidecar(path: Path, location: str, spans: Iterable[_Span]) -> Path:
    """The sidecar's path once it is a regular file of its own that holds every span."""
    sidecar = path.parent / location
    where = place(path.parent / one_line(location, 200))
    for part in [*reversed(sidecar.parents), sidecar][len(path.parent.parts) :]:
        try:
            status = part.lstat()
        except OSError:
            raise SourceModelError(
                f"the data file of {path.name} is missing", where=where, hint=f"put it beside {path.name}"
            ) from None
        if stat.S_ISLNK(status.st_mode):
            raise SourceModelError(
                "the data file is a symbolic link, as download caches make them",
                where=place(part),
                hint=_COPY,
            )
    if not stat.S_ISREG(status.st_mode):
        raise SourceModelError("the data file is not a regular file", where=where)
    if status.st_nlink > 1:
        raise SourceModelError(
            f"the data file has {status.st_nlink} hard links, so that it may change under the build",
            where=where,
            hint=_COPY,
        )
    if sidecar.samefile(path):
        raise SourceModelError("the model names itself as its data file", where=where, hint=_EXPORT)
    last = _Span(0, 0, "")
    for span in sorted((s for s in spans if s.length), key=lambda s: (s.offset, s.length)):
        end = span.offset + span.length
        if end > status.st_size:
            raise SourceModelError(
                f"{status.st_size} bytes long, but {span.tensor} ends at byte {end}",
                where=where,
                hint="it was cut short or belongs to another model; fetch it again",
            )
        same = (span.offset, span.length) == (last.offset, last.length)
        if span.offset < last.offset + last.length and not same:
            raise SourceModelError(
                f"{last.tensor} and {span.tensor} overlap at byte {span.offset}", where=where, hint=_EXPORT
            )
        last = span
    return sidecar
