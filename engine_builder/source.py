"""The source model: an fp32 ONNX file with its sidecars, checked and hashed before any work.

Whatever is wrong with the files is told here in one line with exit code 4, so that every later
stage may rely on a graph that is complete, acyclic and within its files.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx_ir as ir

from engine_builder.errors import SourceModelError
from engine_builder.one_line import place
from engine_builder.onnx_file import NotOnnxError, OnnxFile, read_onnx
from engine_builder.source_graph import TensorSpec, check_graph
from engine_builder.source_weights import check_weights

__all__ = ["Source", "SourceFile", "TensorSpec", "file_sha256", "load_graph", "open_source"]

_CHUNK: Final = 1 << 24
_DAMAGED: Final = "it is damaged or was cut short; fetch it again"
_CHANGED: Final = "something still writes to it; wait until it is done"
_MAX_MODEL_BYTES: Final = 2**31 - 1
"""The largest message protobuf can hold."""

_FOREIGN: Final = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model", "run `git lfs pull`"),
    (b"<!doctype html", "a web page, not the model", "the download needs a direct link or a login"),
    (b"<html", "a web page, not the model", "the download needs a direct link or a login"),
    (b"<?xml", "XML, such as a storage server's error message", "fetch the model again"),
    (b"{", "JSON text, not the model", "fetch the model again"),
    (b"pk\x03\x04", "a zip archive, such as a PyTorch checkpoint", "unpack it, or export it to ONNX"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"gguf", "a GGUF file", "export the model to ONNX"),
)


@dataclass(frozen=True)
class SourceFile:
    """One file of a source model: its size in bytes and the SHA-256 of its content in hex."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """A checked source model; ``files`` holds the model file first, then its sidecars by location.

    ``sha256`` is that of the model file alone when there is no sidecar, else that of the list of
    all files' digests, one a line: ``sha256sum M.onnx M.onnx.data | cut -c-64 | sha256sum``.
    """

    path: Path
    files: tuple[SourceFile, ...]
    sha256: str
    opset: int
    ir_version: int
    producer: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weight_bytes: int
    node_count: int
    is_sorted: bool

    @property
    def sidecars(self) -> tuple[SourceFile, ...]:
        """The external-data files that the model's tensors lie in."""
        return self.files[1:]


def open_source(
    path: Path,
    *,
    sha256: str | None = None,
    plugins: bool = False,
    float_input: bool = True,
    known: Callable[[Path], str | None] | None = None,
) -> Source:
    """Check and hash the model at ``path``; its weights are neither loaded nor allocated.

    ``sha256`` is the digest that the recipe demands.  ``plugins`` admits operators of foreign
    domains; ``float_input`` demands a float32 graph input.  ``known`` may return a file's digest
    when it is remembered for the unchanged file, which saves reading gigabytes again.

    Raises SourceModelError.
    """
    where = place(path)
    before = _stamp(path)
    if before.size == 0:
        raise SourceModelError("is empty", where=where, hint="fetch the model again")
    if before.size > _MAX_MODEL_BYTES:
        raise SourceModelError(
            f"is {before.size} bytes long, more than a protobuf message can be",
            where=where,
            hint="export it with external data",
        )
    try:
        parsed = _parse(path, lazy=True)
        model = parsed.model
        graph = check_graph(model, where, plugins=plugins, float_input=float_input)
        weights = check_weights(model, path, parsed.spans)
        producer = f"{model.producer_name} {model.producer_version}".strip()
    except OSError as error:
        raise SourceModelError(f"cannot be read: {error.strerror}", where=where) from None
    files = tuple(_hashed(file, known) for file in (path, *weights.sidecars))
    if _stamp(path) != before:
        raise SourceModelError("changed while it was read", where=where, hint=_CHANGED)
    digest = _combined([file.sha256 for file in files])
    if sha256 is not None and sha256.lower() != digest:
        raise SourceModelError(
            f"its SHA-256 is {digest}, not {sha256.lower()} as model.sha256 demands",
            where=where,
            hint="fetch the right file, or correct the recipe if this is the model you mean",
        )
    return Source(
        path=path,
        files=files,
        sha256=digest,
        opset=graph.opset,
        ir_version=model.ir_version,
        producer=producer,
        inputs=graph.inputs,
        outputs=graph.outputs,
        weight_bytes=weights.bytes,
        node_count=graph.node_count,
        is_sorted=graph.is_sorted,
    )


def load_graph(source: Source) -> ir.Model:
    """The source as an onnx-ir model whose weights, inline ones too, are mapped when they are used.

    Raises SourceModelError when the file changed since ``open_source``.
    """
    path = source.path if source.sidecars else source.path.resolve()
    if _stamp(path).size != source.files[0].size:
        raise SourceModelError("changed since it was checked", where=place(source.path), hint=_CHANGED)
    # onnx-ir maps no file that is a link or has several names, so those are read whole.
    lazy = not path.is_symlink() and path.stat().st_nlink == 1
    model: ir.Model = ir.from_proto(_parse(path, lazy=lazy).model)
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes in hex, read in chunks of 16 MiB; raises OSError."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


@dataclass(frozen=True)
class _Stamp:
    """What changes when a file is written to."""

    size: int
    modified_ns: int
    inode: int


def _stamp(path: Path) -> _Stamp:
    where = place(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise SourceModelError("no such model", where=where, hint=_missing(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceModelError(f"cannot be read: {reason}", where=where) from None
    if stat.S_ISDIR(status.st_mode):
        raise SourceModelError("is a folder", where=where, hint="name the .onnx file in it")
    if not stat.S_ISREG(status.st_mode):
        raise SourceModelError("is not a regular file", where=where)
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def _missing(path: Path) -> str:
    if path.is_symlink():
        return f"the link points to {path.readlink()}, which does not exist"
    return "its folder does not exist" if not path.parent.is_dir() else "check model.onnx in the recipe"


def _parse(path: Path, *, lazy: bool) -> OnnxFile:
    try:
        return read_onnx(path, lazy=lazy)
    except NotOnnxError as error:
        with path.open("rb") as file:
            head = file.read(512).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
        for magic, what, remedy in _FOREIGN:
            if head.startswith(magic):
                raise SourceModelError(f"is {what}", where=place(path), hint=remedy) from None
        if b'{"' in head[8:16]:
            raise SourceModelError(
                "is a safetensors file", where=place(path), hint="export it to ONNX"
            ) from None
        raise SourceModelError(f"is no ONNX model: {error}", where=place(path), hint=_DAMAGED) from None


def _hashed(path: Path, known: Callable[[Path], str | None] | None) -> SourceFile:
    before = _stamp(path)
    try:
        digest = (known(path) if known is not None else None) or file_sha256(path)
    except OSError as error:
        raise SourceModelError(f"cannot be read: {error.strerror}", where=place(path)) from None
    if _stamp(path) != before:
        raise SourceModelError("changed while it was read", where=place(path), hint=_CHANGED)
    return SourceFile(path, before.size, digest)


def _combined(digests: list[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
