"""What can be said of baked rotary tables from the converted graph alone: their length and their law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from engine_builder.errors import ConversionError
from engine_builder.graph.reading import is_op
from engine_builder.graph.shapes import ShapeOracle
from engine_builder.graph.structures import RotaryEmbedding

InputShapes = Mapping[str, Sequence[int]]

_BAKED: Final = "rotary_"
"""How the names of the builder's own tables begin; other tables may follow another law."""

_TOLERANCE: Final = 0.02
"""Radians.  fp32 angles up to 4155 rad are off by 2.5e-4 and their step by as much again; an fp16 angle is
off by up to 1 rad there, and by 0.03 rad already at 64 rad."""

_FIRST_ROWS: Final = 8
_FIRST_TOLERANCE: Final = 0.06
"""Radians.  Even bf16 angles and steps are this exact up to 7 rad: half of 2**-5, and 7 times 2**-9."""

_UNIT: Final = 1e-2
"""How far from 1 the squares of a cosine and a sine may sum; in bf16 they are off by 2**-8."""


def table_faults(
    model: ir.Model, rotations: Sequence[RotaryEmbedding], longest: Sequence[InputShapes]
) -> dict[str, str]:
    """What is wrong with the tables that ``rotations`` read, by the table's name.

    Args:
        model: The converted graph.
        rotations: Found in it.
        longest: The largest input shapes of each profile; without them no length is checked.
    """
    faults: dict[str, str] = {}
    for shapes in longest:
        try:
            oracle = ShapeOracle(model, shapes)
        except ConversionError:
            continue  # a dynamic input that the profile does not name: no length to check by
        for rotation in rotations:
            for table in rotation.tables:
                short = _too_short(table, oracle)
                if short:
                    faults.setdefault(table.name or "", short)
    for rotation in rotations:
        if len(rotation.tables) == 2 and all((t.name or "").startswith(_BAKED) for t in rotation.tables):
            cosine, sine = rotation.tables
            fault = _breaks_law(cosine, sine)
            if fault:
                faults.setdefault(cosine.name or "", fault)
    return faults


def _too_short(table: ir.Value, oracle: ShapeOracle) -> str:
    """Why a Slice asks the table for more rows than it has, which ONNX would cut off in silence."""
    for use in table.uses():
        node = use.node
        if not is_op(node, "Slice") or use.idx != 0 or table.shape is None or len(node.inputs) < 4:
            continue
        ends, axes = node.inputs[2], node.inputs[3]
        if ends is None or axes is None:
            continue
        try:
            wanted, axis = (int(oracle.evaluate(v).reshape(-1)[0]) for v in (ends, axes))
        except ConversionError:
            continue  # it depends on data, and is no length
        rows = table.shape[axis]
        if isinstance(rows, int) and rows < wanted < 2**31 - 1:
            return f"the table {table.name} has {rows} rows, the longest profile needs {wanted}"
    return ""


def _breaks_law(cosine: ir.Value, sine: ir.Value) -> str:
    """Where the angle does not advance by one step from row to row, as positions times frequencies do.

    Angles that follow another law from their first rows on are not judged.
    """
    if cosine.const_value is None or sine.const_value is None:
        return ""
    c, s = (np.asarray(t.const_value.numpy()).astype(np.float64) for t in (cosine, sine) if t.const_value)
    if c.shape != s.shape or c.ndim < 2 or c.shape[-2] < 2:
        return ""
    length = np.abs(c * c + s * s - 1)
    if not np.all(np.isfinite(length)) or length.max() > _UNIT:
        row = int(np.unravel_index(np.nanargmax(length), length.shape)[-2])
        return f"row {row} of {cosine.name} and {sine.name} is no cosine and sine of one angle"
    angle = np.arctan2(s, c)
    step = angle[..., 1:2, :] - angle[..., 0:1, :]
    rows = np.arange(c.shape[-2]).reshape(-1, 1)
    off = np.abs(_wrapped(angle - angle[..., 0:1, :] - rows * step))
    if off[..., :_FIRST_ROWS, :].max() > _FIRST_TOLERANCE:
        return ""
    worst = int(np.unravel_index(np.argmax(off), off.shape)[-2])
    if off.max() <= _TOLERANCE:
        return ""
    return f"the angle in row {worst} of {cosine.name} and {sine.name} is off by {off.max():.3g} rad"


def _wrapped(angle: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray((angle + np.pi) % (2 * np.pi) - np.pi)
