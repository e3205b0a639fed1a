"""What a conversion is asked to do, independent of the recipe file it was read from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import onnx_ir as ir

from engine_builder.recipe import Precision

Trunk = Literal["fp16", "bf16"]

DATA_TYPE = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "fp8": ir.DataType.FLOAT8E4M3FN,
}


@dataclass(frozen=True)
class Fp8Options:
    """Which linears run in fp8, by which ranges."""

    weights: Literal["per_tensor", "per_channel"] = "per_tensor"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Names of linears that stay in the trunk type because min_cosine cannot be reached with them."""


@dataclass(frozen=True)
class ConversionOptions:
    """The precision section of a recipe with every default resolved.

    ``trunk`` is the type of everything that is not kept in fp32; for fp32 recipes it is ``fp32``.
    ``islands`` says what besides norms and angles is kept in fp32:

    - ``minimal``: nothing more; the rotation itself runs in the trunk type;
    - ``rope``: the rotation of queries and keys;
    - ``full``: also the adaptive modulation (scale, shift, gate) around every norm.

    ``residual`` is the type of the sums that carry the residual stream from block to block.

    ``bound_attention`` casts q, k and v to the trunk type in front of each attention core.  Without
    it the cores are fp32 and TensorRT fuses none of them.
    """

    recipe: Literal["fp32", "fp16", "bf16", "fp8"]
    trunk: Literal["fp32", "fp16", "bf16"]
    rotary: Literal["baked", "computed"] = "computed"
    islands: Literal["minimal", "rope", "full"] = "rope"
    residual: Literal["fp32", "trunk"] = "fp32"
    bound_attention: bool = True
    clip_overflow: bool = False
    generic: bool = False
    fp8: Fp8Options | None = None

    def canonical(self) -> dict[str, object]:
        """Every option by name, for content keys and reports."""
        return {**asdict(self)}

    @property
    def trunk_type(self) -> ir.DataType:
        return DATA_TYPE[self.trunk]


def resolve_options(precision: Precision, *, generic: bool) -> ConversionOptions:
    """The precision section of a recipe with its open options set to what measured best."""
    recipe = precision.recipe
    trunk: Literal["fp32", "fp16", "bf16"] = (precision.trunk or "fp16") if recipe == "fp8" else recipe
    return ConversionOptions(
        recipe=recipe,
        trunk=trunk,
        rotary=precision.rotary or ("baked" if trunk == "bf16" else "computed"),
        islands=precision.islands or "rope",
        residual=precision.residual or "fp32",
        bound_attention=precision.bound_attention is not False,
        clip_overflow=precision.clip_overflow,
        generic=generic,
        fp8=Fp8Options(precision.weights or "per_tensor", precision.include, precision.exclude)
        if recipe == "fp8"
        else None,
    )
