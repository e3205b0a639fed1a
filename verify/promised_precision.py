"""Which precision a converted graph is held to: the recipe's, what the file says of itself, or its types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import onnx_ir as ir

from engine_builder.graph.reading import is_op
from engine_builder.graph.shapes import ShapeOracle
from engine_builder.graph.structures import Linear, Structures
from engine_builder.precision.description import Description, read_description
from engine_builder.precision.options import ConversionOptions, resolve_options
from engine_builder.quantize.selection import select_linears
from engine_builder.recipe import Profile, Recipe
from verify.identity import Check, Failure, Status
from verify.promises import SPELLED

Origin = Literal["recipe", "metadata", "types"]


@dataclass(frozen=True)
class PromisedPrecision:
    """The options that promises follow from, the linears that shall be fp8, and who said so."""

    options: ConversionOptions
    fp8_linears: tuple[str, ...]
    origin: Origin
    checks: tuple[Check, ...] = ()


def promised_precision(
    model: ir.Model,
    structures: Structures,
    recipe: Recipe | None,
    profiles: Sequence[Profile],
    where: str,
) -> PromisedPrecision:
    """The precision of ``recipe``, else the one that the model's metadata names, else that of its types.

    Args:
        model: The converted graph.
        structures: Found in it.
        recipe: The recipe that the engine was to be built by.
        profiles: Of the recipe, resolved against the model's inputs.
        where: What errors call the model.

    Raises:
        SourceModelError: The metadata cannot be understood.
        RecipeError: A pattern of precision.include or exclude names no linear.
        ConversionError: The shapes that tell which linears fp8 selects cannot be derived.
    """
    described = read_description(dict(model.metadata_props), where)
    if recipe is not None:
        return _of_recipe(model, structures, recipe, profiles, described)
    if described is not None:
        return PromisedPrecision(described.options, described.fp8_linears, "metadata")
    options = _of_types(structures)
    return PromisedPrecision(options, _quantized(structures.linears), "types")


def _of_recipe(
    model: ir.Model,
    structures: Structures,
    recipe: Recipe,
    profiles: Sequence[Profile],
    described: Description | None,
) -> PromisedPrecision:
    options = resolve_options(recipe.precision, generic=recipe.model.kind == "generic")
    selected: tuple[str, ...] = ()
    if options.fp8 is not None:
        # Which linears cost too much was measured when the model was converted; only it knows.
        had = None if described is None else described.options.fp8
        left_out = () if had is None else had.left_out
        options = replace(options, fp8=replace(options.fp8, left_out=left_out))
        shapes = {name: shape.opt for p in profiles[:1] for name, shape in p.shapes.items()}
        selected = select_linears(
            structures.linears,
            ShapeOracle(model, shapes),
            include=recipe.precision.include,
            exclude=recipe.precision.exclude,
            left_out=left_out,
        ).names
    checks = () if described is None else (_same_precision(described.options, options),)
    return PromisedPrecision(options, selected, "recipe", checks)


def _same_precision(converted: ConversionOptions, asked: ConversionOptions) -> Check:
    """That the graph was converted to what the recipe asks for, option by option."""
    had, wanted = _flat(asdict(converted)), _flat(asdict(asked))
    failures = tuple(
        Failure(key, f"the graph was converted with {had.get(key)}, the recipe asks for {value}", (), ())
        for key, value in wanted.items()
        if had.get(key) != value
    )
    status = Status.FAILED if failures else Status.PASSED
    return Check("same_precision", status, len(wanted), len(wanted) - len(failures), failures)


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    nested = options.pop("fp8") or {}
    return {**options, **{f"fp8.{key}": value for key, value in nested.items()}}


def _of_types(structures: Structures) -> ConversionOptions:
    """What most of the graph is: the odd one out among many equals is then what breaks a promise."""
    quantized = _quantized(structures.linears)
    trunk = _majority([SPELLED.get(t) for linear in structures.linears if (t := linear.output.dtype)])
    rotations = structures.rotary
    tabled = sum(bool(r.tables) for r in rotations)
    in_fp32 = sum(all(v.dtype == ir.DataType.FLOAT for n in r.nodes for v in n.outputs) for r in rotations)
    bound = sum(core.qk.outputs[0].dtype != ir.DataType.FLOAT for core in structures.attention)
    return ConversionOptions(
        recipe="fp8" if quantized else trunk,
        trunk=trunk,
        rotary="baked" if rotations and 2 * tabled > len(rotations) else "computed",
        islands="minimal" if 2 * in_fp32 < len(rotations) else "rope",
        bound_attention=2 * bound >= len(structures.attention),
        generic=True,
    )


def _majority(types: Sequence[str | None]) -> Literal["fp32", "fp16", "bf16"]:
    counts = Counter(t for t in types if t in ("fp32", "fp16", "bf16"))
    best = max(counts, key=lambda t: counts[t], default="fp32")
    return "fp16" if best == "fp16" else "bf16" if best == "bf16" else "fp32"


def _quantized(linears: Sequence[Linear]) -> tuple[str, ...]:
    """The linears of which an operand is quantized to E4M3, whether or not the other one is too."""
    return tuple(
        linear.name for linear in linears if any(_is_e4m3(v) for v in linear.node.inputs[:2] if v is not None)
    )


def _is_e4m3(value: ir.Value) -> bool:
    node = value.producer()
    while node is not None and is_op(node, "Transpose", "Cast", "Identity") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    source = None if node is None or not is_op(node, "DequantizeLinear") else node.inputs[0]
    return source is not None and source.dtype == ir.DataType.FLOAT8E4M3FN
