"""Converts an fp32 graph to the types a recipe asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
    TopologicalSortPass,
)

from engine_builder.errors import BuilderError, ConversionError, SourceModelError
from engine_builder.graph.find import FINDERS_VERSION, find_structures, require_dit
from engine_builder.graph.passes.assign_types import AssignTypesPass
from engine_builder.graph.passes.bake_rotary import BakeRotaryPass, RotaryTable
from engine_builder.graph.passes.decompose_attention import DecomposeAttentionPass
from engine_builder.graph.passes.fold_indices import FoldIndicesPass
from engine_builder.graph.passes.infer_types import InferTypesPass
from engine_builder.graph.passes.insert_qdq import InsertQdqPass, LinearScale
from engine_builder.graph.passes.lift_constants import LiftConstantsPass
from engine_builder.graph.passes.name_nodes import NameNodesPass
from engine_builder.graph.passes.remove_noops import RemoveNoopsPass
from engine_builder.graph.passes.spell_products import SpellProductsPass
from engine_builder.graph.passes.spell_splits import SpellSplitsPass
from engine_builder.graph.passes.upgrade_opset import UpgradeOpsetPass
from engine_builder.graph.shapes import ShapeOracle
from engine_builder.graph.structures import Linear, Structures
from engine_builder.graph.weights import ConversionLedger, TensorLoss
from engine_builder.graph.writing import save_model
from engine_builder.precision.description import DESCRIPTION_VERSION, description
from engine_builder.precision.islands import fp32_nodes, mask_constants
from engine_builder.precision.options import ConversionOptions
from engine_builder.quantize.selection import Selection, select_linears

log = logging.getLogger(__name__)

InputShapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Conversion:
    """A converted model on disk, what was found in its source and what rounding did to its weights."""

    files: tuple[Path, ...]
    structures: Mapping[str, Any]
    counts: Mapping[str, int]
    losses: tuple[TensorLoss, ...]
    tables: tuple[RotaryTable, ...]
    passes: tuple[str, ...]
    forced_fp32: tuple[str, ...]
    """Nodes outside every structure that stay fp32 because their operator lacks the trunk type."""
    fp8_linears: tuple[str, ...]
    trunk_linears: tuple[tuple[str, str], ...]
    """The linears of an fp8 recipe that stay in the trunk type, with the reason."""


@dataclass(frozen=True)
class Retyped:
    """A model whose graph has its types, before its weights are written."""

    structures: Structures
    selection: Selection | None
    tables: tuple[RotaryTable, ...]
    forced_fp32: tuple[str, ...]
    passes: tuple[str, ...]
    ledger: ConversionLedger


def convert(
    model: ir.Model,
    destination: Path,
    options: ConversionOptions,
    lengths: Sequence[InputShapes],
    scales: Mapping[str, LinearScale] | None = None,
    check: Callable[[], None] | None = None,
) -> Conversion:
    """Converts an fp32 ``model`` and writes it to ``destination``.

    Args:
        model: The fp32 model, edited in place; its weights are streamed and never held.
        destination: The converted model, written atomically; weights beyond 64 MiB go to a
            sidecar ``<destination>.data``.
        options: What to convert to.
        lengths: The input shapes of the profiles, smallest first and longest last; they size the
            rotary tables.
        scales: Calibrated ranges by linear, for fp8.
        check: Called every so often; what it raises ends the conversion.

    Raises:
        SourceModelError: A linear that fp8 needs a range of has none.
        ConversionError: A required structure is missing, a structure cannot be converted, or a
            weight overflows the trunk type and clipping was not accepted.
        ResourceError: The result cannot be written.
    """
    retyped = retype(model, options, lengths, scales or {})
    passes = list(retyped.passes)
    _run(model, [RemoveUnusedNodesPass()], passes)
    describe(model, options, () if retyped.selection is None else retyped.selection.names)
    ledger = retyped.ledger
    files = save_model(
        model, destination, accept=lambda: _refuse_overflow(ledger.losses(), options), check=check
    )
    return Conversion(
        files=files,
        structures=retyped.structures.to_json(),
        counts=retyped.structures.counts(),
        losses=ledger.losses(),
        tables=retyped.tables,
        passes=tuple(passes),
        forced_fp32=retyped.forced_fp32,
        fp8_linears=() if retyped.selection is None else retyped.selection.names,
        trunk_linears=() if retyped.selection is None else retyped.selection.left_out,
    )


def retype(
    model: ir.Model,
    options: ConversionOptions,
    lengths: Sequence[InputShapes],
    scales: Mapping[str, LinearScale],
    *,
    before_quantization: Callable[[Sequence[Linear]], None] | None = None,
) -> Retyped:
    """Gives the graph of ``model`` the types of ``options``; raises as ``convert`` does.

    ``before_quantization`` is shown the chosen linears of an fp8 recipe while their operands are
    still in the trunk type.
    """
    applied: list[str] = []
    _run(model, normalizing_passes(), applied)
    if options.trunk != "fp32":
        # Q/DQ in E4M3 came with opset 19, bf16 convolutions with 22.
        _run(model, [UpgradeOpsetPass(options.trunk_type, 19 if options.fp8 is not None else 0)], applied)
    structures = find_structures(model)
    if not options.generic:
        require_dit(structures)
    for miss in structures.near_misses:
        log.info("near miss: %s at %s: %s", miss.structure, miss.node, miss.reason)
    bake = BakeRotaryPass(structures.rotary if options.rotary == "baked" else (), lengths)
    if options.rotary == "baked":
        _run(model, [bake, TopologicalSortPass()], applied)
    selection: Selection | None = None
    if options.fp8 is not None:
        oracle = ShapeOracle(model, lengths[len(lengths) // 2])
        selection = select_linears(
            structures.linears,
            oracle,
            include=options.fp8.include,
            exclude=options.fp8.exclude,
            left_out=options.fp8.left_out,
        )
        _refuse_missing(selection, scales)
    ledger = ConversionLedger()
    forced: tuple[str, ...] = ()
    if options.trunk != "fp32":
        keep = [node for node in fp32_nodes(model.graph, structures, options) if node.graph is not None]
        keep.extend(bake.reads)
        assign = AssignTypesPass(
            options.trunk_type,
            keep,
            ledger,
            clip=options.clip_overflow,
            fills=mask_constants(structures),
        )
        _run(model, [assign], applied)
        forced = assign.forced
    if selection is not None:
        if before_quantization is not None:
            before_quantization(selection.chosen)
        _run(model, [InsertQdqPass(selection.chosen, scales, options.trunk_type)], applied)
    return Retyped(structures, selection, bake.tables, forced, tuple(applied), ledger)


def _refuse_missing(selection: Selection, scales: Mapping[str, LinearScale]) -> None:
    missing = [name for name in selection.names if name not in scales]
    if missing:
        raise SourceModelError(
            f"no scale is known for {len(missing)} of {len(selection.chosen)} linears",
            where=f"node {missing[0]}",
            hint="calibrate the model again, or exclude the linear in the recipe",
        )


def pass_versions() -> dict[str, int]:
    """The version of every pass that shapes a converted graph: an ingredient of its content key."""
    versions = {
        p.__name__: p.version
        for p in (
            AssignTypesPass,
            BakeRotaryPass,
            DecomposeAttentionPass,
            FoldIndicesPass,
            InferTypesPass,
            InsertQdqPass,
            LiftConstantsPass,
            NameNodesPass,
            RemoveNoopsPass,
            SpellProductsPass,
            SpellSplitsPass,
            UpgradeOpsetPass,
        )
    }
    return {**versions, "find_structures": FINDERS_VERSION, "describe": DESCRIPTION_VERSION}


def normalizing_passes() -> list[ir.passes.PassBase]:
    """Brings every exporter's spelling to one form without changing what is computed."""
    return [
        InlinePass(),
        RemoveInitializersFromInputsPass(),
        NameNodesPass(),
        LiftConstantsPass(),
        TopologicalSortPass(),
        InferTypesPass(),
        RemoveNoopsPass(),
        FoldIndicesPass(),
        SpellSplitsPass(),
        DecomposeAttentionPass(),
        SpellProductsPass(),
    ]


def annotate(model: ir.Model) -> None:
    """Sorts the nodes, fills in missing types and computes constant indices: all that the finders need.

    Raises:
        ConversionError: The graph cannot be sorted.
    """
    _run(model, [TopologicalSortPass(), InferTypesPass(), FoldIndicesPass()], [])


def describe(model: ir.Model, options: ConversionOptions, fp8_linears: Sequence[str] = ()) -> None:
    """Marks the model as converted, so that the file alone says what it is and what it promises."""
    model.producer_name = "sa3-builder"
    model.metadata_props.update(description(options, fp8_linears))


def _run(model: ir.Model, passes: Sequence[ir.passes.PassBase], applied: list[str]) -> None:
    for graph_pass in passes:
        name = type(graph_pass).__name__
        try:
            result = graph_pass(model)
        except ir.passes.PassError as error:
            if isinstance(error.__cause__, BuilderError):
                raise error.__cause__ from error
            raise ConversionError(f"{name} failed: {error}") from error
        except ir.passes.PreconditionError as error:
            if isinstance(error.__cause__, BuilderError):
                raise error.__cause__ from error
            raise ConversionError(f"{name} was refused: {error}") from error
        if result.modified:
            applied.append(name)


def _refuse_overflow(losses: Sequence[TensorLoss], options: ConversionOptions) -> None:
    bad = [loss for loss in losses if loss.not_finite]
    if bad:
        raise ConversionError(
            f"the weight {bad[0].tensor} has {bad[0].not_finite} values that are not finite"
            + (f", and {len(bad) - 1} more weights" if len(bad) > 1 else "")
        )
    over = [loss for loss in losses if loss.overflowed]
    if over and not options.clip_overflow:
        worst = max(over, key=lambda loss: loss.max_abs)
        raise ConversionError(
            f"{sum(loss.overflowed for loss in over)} weights in {len(over)} tensors exceed {options.trunk}'s"
            f" range; the largest is {worst.max_abs:.6g} in {worst.tensor}",
            hint="use bf16, or accept clipping with precision.clip_overflow: true",
        )
