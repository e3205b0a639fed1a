"""Saves models without holding their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from engine_builder.durable import UNWRITABLE, disk_error, replacing_together
from engine_builder.graph.weights import writer_threads

INLINE_LIMIT = 64 << 20
"""Models with less weight than this, in bytes, are one file; larger ones have a ``.data`` sidecar."""

_SIDECAR_MINIMUM = 1024
"""Constants below this size, in bytes, stay in the graph even when there is a sidecar."""


def save_model(
    model: ir.Model,
    path: Path,
    *,
    accept: Callable[[], None] | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[Path, ...]:
    """Writes ``model`` to ``path``; returns the files written (the model, then its sidecar if any).

    The bytes depend on the model alone.  Both files appear under their names only when they are
    complete; the sidecar comes first, so that a model never lacks it.  ``accept`` is called when all
    constants are written and before anything appears: what it raises leaves ``path`` as it was.  ``check``
    is called before each constant of a sidecar is written, and stops the writing by raising.

    Raises:
        ResourceError: The disk is full or the folder cannot be written to.
    """
    total = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    sidecar = path.with_name(path.name + ".data")
    try:
        _hold_small(model, None if total < INLINE_LIMIT else _SIDECAR_MINIMUM)
        with replacing_together(path, sidecar) as folder:
            if total < INLINE_LIMIT:
                ir.save(model, folder / path.name)
            else:
                ir.save(
                    model,
                    folder / path.name,
                    external_data=sidecar.name,
                    size_threshold_bytes=_SIDECAR_MINIMUM,
                    max_workers=writer_threads(),
                    max_in_flight_bytes=64 << 20,
                    callback=None if check is None else lambda tensor, info: check(),
                )
            if accept is not None:
                accept()
        return (path,) if total < INLINE_LIMIT else (path, sidecar)
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise disk_error(error, path, total) from error
        raise


def _hold_small(model: ir.Model, below: int | None) -> None:
    """Reads constants that stay in the model file (all of them if ``below`` is None, else those of
    fewer bytes): a lazy one refers to a range of the source file, which the new file must not."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and (below is None or tensor.nbytes < below):
            value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
