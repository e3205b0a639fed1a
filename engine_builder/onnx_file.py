"""An ONNX file as a ModelProto whose large inline weights stay on disk.

``onnx.load`` holds the file and its parsed copy in memory at once: twice 1.84 GB for the small
model, whose fp32 weights fit inside one file.  Here the file is mapped, and the bytes of each
large initializer are replaced by an external-data reference into the file itself, so that the
rest of the pipeline reads inline weights as lazily as those of a sidecar.

Field numbers are those of onnx.proto: ModelProto.graph 7, GraphProto.initializer 5,
TensorProto.raw_data 9, external_data 13, data_location 14.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_INLINE_BELOW: Final = 4096
"""Bytes; smaller tensors stay in the message, where reading them costs no mapping."""


class NotOnnxError(ValueError):
    """The bytes are no protobuf message of ONNX's shape, or end too early."""


@dataclass(frozen=True)
class OnnxFile:
    """A parsed file: ``spans`` holds (offset, length) of the initializers that were left in it."""

    model: onnx.ModelProto
    spans: frozenset[tuple[int, int]]


def read_onnx(path: Path, *, lazy: bool = True) -> OnnxFile:
    """Parse ``path``; no external data is opened, and with ``lazy`` no large inline weight is held.

    Raises NotOnnxError for what cannot be parsed and OSError for what cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        spans: list[tuple[int, int]] = []
        with memoryview(data) as view:
            message = b"".join(_slim(view, path.name, spans)) if lazy else bytes(view)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(message)
    except DecodeError:
        raise NotOnnxError("its bytes are no ModelProto") from None
    if not _is_text(model):
        raise NotOnnxError("it holds a name that is not UTF-8")
    return OnnxFile(model, frozenset(spans))


def _is_text(message: Message) -> bool:
    """Whether every string is UTF-8: protobuf hands out the others as bytes, to trip whoever reads them."""
    for field, value in message.ListFields():
        if field.type in {field.TYPE_STRING, field.TYPE_MESSAGE}:
            items = (value,) if isinstance(value, str | bytes | Message) else value
            if not all(
                _is_text(item) if isinstance(item, Message) else isinstance(item, str) for item in items
            ):
                return False
    return True


def _slim(view: memoryview, name: str, spans: list[tuple[int, int]]) -> Iterator[bytes]:
    for number, start, body, end in _fields(view, 0, len(view)):
        if number != _GRAPH or body is None:
            yield bytes(view[start:end])
            continue
        graph = b"".join(_slim_graph(view, body, end, name, spans))
        yield _header(_GRAPH, len(graph)) + graph


def _slim_graph(
    view: memoryview, begin: int, stop: int, name: str, spans: list[tuple[int, int]]
) -> Iterator[bytes]:
    for number, start, body, end in _fields(view, begin, stop):
        tensor = None
        if number == _INITIALIZER and body is not None:
            tensor = _slim_tensor(view, body, end, name, spans)
        yield bytes(view[start:end]) if tensor is None else _header(_INITIALIZER, len(tensor)) + tensor


def _slim_tensor(
    view: memoryview, begin: int, stop: int, name: str, spans: list[tuple[int, int]]
) -> bytes | None:
    """The tensor with its raw bytes referred to instead of held; None when it is to stay as it is."""
    if stop - begin < _INLINE_BELOW:
        return None
    fields = list(_fields(view, begin, stop))
    raw = [(body, end) for number, _, body, end in fields if number == _RAW_DATA and body is not None]
    stored_elsewhere = any(number in {_EXTERNAL_DATA, _DATA_LOCATION} for number, *_ in fields)
    if len(raw) != 1 or stored_elsewhere or raw[0][1] - raw[0][0] < _INLINE_BELOW:
        return None
    offset, length = raw[0][0], raw[0][1] - raw[0][0]
    spans.append((offset, length))
    reference = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        reference.external_data.add(key=key, value=value)
    kept = b"".join(bytes(view[start:end]) for number, start, _, end in fields if number != _RAW_DATA)
    entries: bytes = reference.SerializeToString()
    return kept + entries


def _fields(view: memoryview, begin: int, stop: int) -> Iterator[tuple[int, int, int | None, int]]:
    """Number, start of the tag, start of the body (None for a plain number) and end of every field."""
    at = begin
    while at < stop:
        start = at
        tag, at = _varint(view, at, stop)
        wire = tag & 7
        body: int | None = None
        if wire == _VARINT:
            _, at = _varint(view, at, stop)
        elif wire == _LENGTH:
            size, body = _varint(view, at, stop)
            at = body + size
        elif wire in {_FIXED64, _FIXED32}:
            at += 8 if wire == _FIXED64 else 4
        else:
            raise NotOnnxError(f"wire type {wire} at byte {start}")
        if at > stop or tag >> 3 == 0:
            raise NotOnnxError(f"a field at byte {start} runs past the end")
        yield tag >> 3, start, body, at


def _varint(view: memoryview, at: int, stop: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise NotOnnxError("ends inside a number")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise NotOnnxError(f"a number at byte {at} does not end")


def _header(number: int, length: int) -> bytes:
    tag = bytes([number << 3 | _LENGTH])
    while length >= 0x80:
        tag += bytes([length & 0x7F | 0x80])
        length >>= 7
    return tag + bytes([length])
