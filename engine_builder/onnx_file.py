"""An ONNX file as a ModelProto whose large inline weights stay on disk.

``onnx.load`` holds the file and its parsed copy in memory at once: twice 1.84 GB for the small
model, whose fp32 weights fit inside one file.  Here the bytes of each large initializer are skipped
and replaced by an external-data reference into the file itself, so that the rest of the pipeline
reads inline weights as lazily as those of a sidecar.

Field numbers are those of onnx.proto: ModelProto.graph 7, GraphProto.initializer 5,
TensorProto.raw_data 9, external_data 13, data_location 14.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BLOCK: Final = 1 << 16
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
    spans: list[tuple[int, int]] = []
    if lazy:
        with path.open("rb", buffering=0) as file:
            message = b"".join(_slim(_Window(file), path.name, spans))
    else:
        message = path.read_bytes()
    model = onnx.ModelProto()
    try:
        model.ParseFromString(message)
    except DecodeError:
        raise NotOnnxError("its bytes are no ModelProto") from None
    if not _is_text(model):
        raise NotOnnxError("it holds a name that is not UTF-8")
    return OnnxFile(model, frozenset(spans))


class _Window:
    """Random access to a file through one block of memory.

    A mapping would be shorter, but a page fault may map 2 MiB around one tensor's header, which for
    the small model adds up to 0.9 GB of resident memory, and a file that shrinks meanwhile kills the
    process.
    """

    def __init__(self, file: FileIO) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._start = 0
        self._block = b""

    def byte(self, at: int) -> int:
        """The byte at an offset below ``size``."""
        if not self._start <= at < self._start + len(self._block):
            self._start, self._block = at, self._read(at, min(_BLOCK, self.size - at))
        return self._block[at - self._start]

    def cut(self, begin: int, end: int) -> bytes:
        """The bytes of a range within ``size``."""
        if self._start <= begin and end <= self._start + len(self._block):
            return self._block[begin - self._start : end - self._start]
        return self._read(begin, end - begin)

    def _read(self, at: int, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = os.pread(self._file.fileno(), count, at)
            if not part:
                raise NotOnnxError("it grew shorter while it was read")
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return b"".join(parts)


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


def _slim(view: _Window, name: str, spans: list[tuple[int, int]]) -> Iterator[bytes]:
    for number, start, body, end in _fields(view, 0, view.size):
        if number != _GRAPH or body is None:
            yield view.cut(start, end)
            continue
        graph = b"".join(_slim_graph(view, body, end, name, spans))
        yield _header(_GRAPH, len(graph)) + graph


def _slim_graph(
    view: _Window, begin: int, stop: int, name: str, spans: list[tuple[int, int]]
) -> Iterator[bytes]:
    for number, start, body, end in _fields(view, begin, stop):
        tensor = None
        if number == _INITIALIZER and body is not None:
            tensor = _slim_tensor(view, body, end, name, spans)
        yield view.cut(start, end) if tensor is None else _header(_INITIALIZER, len(tensor)) + tensor


def _slim_tensor(
    view: _Window, begin: int, stop: int, name: str, spans: list[tuple[int, int]]
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
    kept = b"".join(view.cut(start, end) for number, start, _, end in fields if number != _RAW_DATA)
    entries: bytes = reference.SerializeToString()
    return kept + entries


def _fields(view: _Window, begin: int, stop: int) -> Iterator[tuple[int, int, int | None, int]]:
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


def _varint(view: _Window, at: int, stop: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise NotOnnxError("ends inside a number")
        byte = view.byte(at)
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
