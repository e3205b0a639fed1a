"""Which linears run in fp8."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from engine_builder.errors import RecipeError
from engine_builder.graph.shapes import ShapeOracle
from engine_builder.graph.structures import Linear

MINIMUM_FEATURES = 128
"""Smallest side of a linear that is worth an fp8 product; below it the quantization costs more."""


@dataclass(frozen=True)
class Selection:
    """The linears chosen for fp8, and the others with the reason they stay in the trunk type."""

    chosen: tuple[Linear, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(linear.name for linear in self.chosen)


def select_linears(
    linears: Sequence[Linear],
    oracle: ShapeOracle,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    left_out: Collection[str] = (),
) -> Selection:
    """The linears with both sides >= 128 that run over the sequence or the text tokens.

    Linears of a single row (the conditioning of timestep and duration) are left out: quantizing two
    of them cost more fidelity than twenty others, and they save nothing.  ``exclude`` then takes
    linears away and ``include`` adds any, both by glob patterns on node names; so ``exclude: ["*"]``
    with ``include`` names the whole selection.

    Args:
        linears: Of the source graph.
        left_out: Names of linears that measured too costly; they stay in the trunk type.
        oracle: Shapes at a typical length; rows are the product of all dimensions but the features.

    Raises:
        RecipeError: A pattern matches no linear.
    """
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(linear.name, pattern) for linear in linears):
                raise RecipeError(
                    f"precision.{key}: no linear is named {pattern!r}",
                    hint="list the names with: structures MODEL.onnx --json",
                )
    chosen: list[Linear] = []
    others: list[tuple[str, str]] = []
    for linear in linears:
        reason = _reason(linear, oracle)
        if not reason and any(fnmatchcase(linear.name, p) for p in exclude):
            reason = "excluded by the recipe"
        if reason and any(fnmatchcase(linear.name, p) for p in include):
            reason = ""
        if not reason and linear.name in left_out:
            reason = "costs more fidelity than min_cosine allows"
        if reason:
            others.append((linear.name, reason))
        else:
            chosen.append(linear)
    return Selection(tuple(chosen), tuple(others))


def _reason(linear: Linear, oracle: ShapeOracle) -> str:
    if min(linear.in_features, linear.out_features) < MINIMUM_FEATURES:
        return f"{linear.in_features} x {linear.out_features}: a side is below {MINIMUM_FEATURES}"
    rows = math.prod(oracle.shape(linear.output)) // linear.out_features
    return "runs over a single row" if rows <= 1 else ""
