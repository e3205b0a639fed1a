"""Derives the verdict on one engine from everything that is known of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from engine_builder.compile.isolated import read_layer_table
from engine_builder.errors import ConversionError, ResourceError
from engine_builder.graph.find import find_structures
from engine_builder.graph.reading import is_op
from engine_builder.precision.options import ConversionOptions
from engine_builder.recipe import Expect, Profile
from engine_builder.source import Source
from engine_builder.source_graph import TensorSpec
from verify.contract import check_contract, contract_json
from verify.counts import LayerCounts, count_layers
from verify.expectations import check_expectations
from verify.identity import (
    Check,
    Failure,
    Status,
    check_graph_promises,
    check_promises,
    check_provenance,
)
from verify.layers import EngineIO, LayerRecord
from verify.promises import float_casts, lasting_products, make_promises
from verify.report import BuilderEntry, EngineEntry, VerifyReport, check_entry, legacy_keys, verdict_of
from verify.rotary_tables import table_faults

if TYPE_CHECKING:
    from verify.locate import Divergence

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphEvidence:
    """What a converted graph says of itself: its promises' ground, read from the file anew."""

    model: ir.Model
    options: ConversionOptions
    fp8_linears: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineEvidence:
    """An engine's layers and inputs and outputs, and where they were read from."""

    layers: tuple[LayerRecord, ...]
    io: tuple[EngineIO, ...]
    source: str
    file: EngineEntry | None = None
    builder: BuilderEntry | None = None

    @property
    def lists_graph_names(self) -> bool:
        """Whether the layers' metadata can name nothing but nodes of the graph: so in a build's log."""
        return self.source.startswith("builder log")


def judge(
    *,
    label: str,
    engine: EngineEvidence | None,
    graph: GraphEvidence | None,
    inputs: Sequence[TensorSpec] | None = None,
    outputs: Sequence[TensorSpec] | None = None,
    profiles: Sequence[Profile] = (),
    expect: Expect | None = None,
    fidelity: Mapping[str, Any] | None = None,
    engine_fidelity: Mapping[str, Any] | None = None,
    divergence: Divergence | None = None,
    source_counts: Mapping[str, int] | None = None,
    tf32: bool = False,
    further: Sequence[Check] = (),
    precision: Mapping[str, Any] | None = None,
    conversion: Mapping[str, Any] | None = None,
    information: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """The report on an engine; each check that lacks its evidence is left out or not verifiable.

    Args:
        label: The engine's name in reports, such as ``sm_89/sa3-sm-music/dit_fp16.trt``.
        engine: The layers; None when the build stopped before there was an engine.
        graph: The converted graph; without it only counts can be checked.
        inputs, outputs: Of the source graph, for the contract.
        profiles: Of the recipe.
        expect: Counts that the recipe asks for.
        fidelity: The sweep of the converted graph against fp32.
        engine_fidelity: That of the engine itself, where it could be run.
        divergence: Where the converted graph begins to differ, if it was looked for.
        source_counts: How many structures of each kind the source graph has.
        tf32: Whether fp32 products may round their operands to TF32.
        further: Checks that were made elsewhere.
        precision, conversion, information: Carried into the report as they are.
    """
    checks: list[Check] = []
    counts: LayerCounts | None = None
    structures: dict[str, int] | None = None
    rotations_fp32: int | None = None
    trig: set[str] | None = None
    if graph is not None:
        found = find_structures(graph.model)
        structures = found.counts()
        trig = {n.name or "" for n in graph.model.graph if is_op(n, "Cos", "Sin")}
        rotations_fp32 = sum(
            all(v.dtype == ir.DataType.FLOAT for n in r.nodes for v in n.outputs) for r in found.rotary
        )
        longest = _longest(profiles, () if engine is None else engine.io)
        promises = make_promises(
            graph.model.graph,
            found,
            graph.options,
            graph.fp8_linears,
            table_faults(graph.model, found.rotary, longest) if graph.options.rotary == "baked" else {},
        )
        nodes = {n.name or "" for n in graph.model.graph.all_nodes()}
        if engine is None:
            checks.extend(check_graph_promises(promises))
        else:
            checks.extend(
                check_promises(
                    promises,
                    engine.layers,
                    linears=[linear.name for linear in found.linears],
                    casts=float_casts(graph.model.graph),
                    nodes=nodes,
                    tf32=tf32,
                )
            )
            checks.append(
                check_provenance(
                    nodes,
                    set(graph.model.graph.initializers),
                    lasting_products(graph.model.graph, found),
                    engine.layers,
                    exact=engine.lists_graph_names and "" not in nodes and not graph.model.functions,
                )
            )
        if source_counts is not None:
            checks.append(_same_structures(source_counts, structures))
        elif not graph.options.generic:
            checks.append(_has_structures(structures))
    if engine is not None:
        counts = count_layers(engine.layers, trig)
        if inputs is not None and outputs is not None:
            checks.append(check_contract(inputs, outputs, engine.io, profiles))
        if expect is not None:
            checks.extend(check_expectations(expect, counts))
    if fidelity is not None:
        checks.append(_fidelity_check("fidelity", fidelity, divergence))
    if engine_fidelity is not None:
        checks.append(_fidelity_check("engine_fidelity", engine_fidelity))
    checks.extend(further)
    verdict, reasons = verdict_of(checks)
    if engine is None and verdict == "passed":
        verdict, reasons = (
            "not verifiable",
            ("there is no engine: what holds of its graph is all that is known",),
        )
    return VerifyReport(
        verdict=verdict,
        reasons=reasons,
        **legacy_keys(
            engine.file.file if engine and engine.file else Path(label).name,
            label,
            counts,
            checks,
            rotations_fp32,
        ),
        engine_file=engine.file if engine else None,
        builder=engine.builder if engine else None,
        layer_source=engine.source if engine else "none: the build stopped before compiling",
        precision=dict(precision or {}),
        checks=tuple(check_entry(c) for c in checks),
        fidelity=None if fidelity is None else dict(fidelity),
        contract=contract_json(engine.io) if engine and engine.io else None,
        conversion=None if conversion is None else dict(conversion),
        structures=structures,
        layer_types=None if counts is None else dict(counts.by_layer_type),
        information=dict(information or {}),
    )


def _longest(profiles: Sequence[Profile], io: Sequence[EngineIO]) -> list[dict[str, tuple[int, ...]]]:
    """The largest input shapes of each profile: the recipe's, or those that the engine lists."""
    if profiles:
        return [{name: shape.max for name, shape in profile.shapes.items()} for profile in profiles]
    inputs = [i for i in io if i.mode == "input" and i.profiles]
    count = max((len(i.profiles) for i in inputs), default=0)
    return [{i.name: i.profiles[n].max for i in inputs if n < len(i.profiles)} for n in range(count)]


def _same_structures(source: Mapping[str, int], converted: Mapping[str, int]) -> Check:
    """That the converted graph has as many of each structure as the source: none was lost or split.

    Rotary trigonometry is what baking removes, so it is not counted.
    """
    kinds = [kind for kind in converted if kind in source and kind != "rotary_trig_nodes"]
    failures = tuple(
        Failure(
            kind,
            f"the source graph has {source[kind]} {kind.replace('_', ' ')}, the converted {converted[kind]}",
            (),
            (),
        )
        for kind in kinds
        if source[kind] != converted[kind]
    )
    status = Status.FAILED if failures else Status.PASSED
    return Check("same_structures", status, len(kinds), len(kinds) - len(failures), failures)


def _has_structures(converted: Mapping[str, int]) -> Check:
    """That the graph has each structure that every SA3 DiT has: about one that is not found nothing is
    promised."""
    kinds = [kind for kind in converted if kind != "rotary_trig_nodes"]
    failures = tuple(
        Failure(kind, f"the graph has no {kind.replace('_', ' ')}, which an SA3 DiT must have", (), ())
        for kind in kinds
        if not converted[kind]
    )
    status = Status.FAILED if failures else Status.PASSED
    return Check("same_structures", status, len(kinds), len(kinds) - len(failures), failures)


def _fidelity_check(name: str, report: Mapping[str, Any], divergence: Divergence | None = None) -> Check:
    """The sweep's verdict point by point; a point without a finite cosine fails."""
    nodes = () if divergence is None else (divergence.node,)
    threshold = report["min_cosine"]
    failures = tuple(
        Failure(
            f"L={point['length']} t={point['t']:g}",
            f"{point['nonfinite']} values are not finite"
            if point["nonfinite"]
            else f"cosine {point['cosine']:.6f} < {threshold:g}",
            nodes,
            (),
        )
        for point in report["points"]
        if point["nonfinite"] or point["cosine"] is None or not point["cosine"] >= threshold
    )
    total = len(report["points"])
    status = Status.FAILED if failures else Status.PASSED
    note = f"the first node to differ: {divergence}" if failures and divergence is not None else ""
    return Check(name, status, total, total - len(failures), failures, note)


def _where_it_differs(source: Source, converted: Path, fidelity: Mapping[str, Any]) -> Divergence | None:
    """For a sweep that failed, the node at fault, looked for at the shortest length."""
    if not _fidelity_check("fidelity", fidelity).failures:
        return None
    from verify.inputs import seeded_inputs
    from verify.locate import locate

    shortest = min(fidelity["points"], key=lambda point: (point["length"], point["cosine"] or -1.0))
    inputs = seeded_inputs(source.inputs, length=shortest["length"], t=shortest["t"])
    try:
        return locate(source.path, converted, inputs)
    except (ConversionError, ResourceError) as error:
        log.warning("the node at fault could not be looked for: %s", error)
        return None


def judge_build(
    *,
    label: str,
    sm: int,
    converted: Path,
    options: ConversionOptions,
    fp8_linears: Sequence[str],
    source: Source,
    profiles: Sequence[Profile],
    expect: Expect,
    backend: str,
    engine: Mapping[str, Any] | None,
    layer_table: str | None,
    fidelity: Mapping[str, Any] | None,
    conversion: Mapping[str, Any],
    sensitivity: Mapping[str, Any] | None = None,
    execution: Mapping[str, Any] | None = None,
    tf32: bool = False,
) -> VerifyReport:
    """The report on an engine that was just built, or on a conversion that did not pass the gate.

    ``engine`` holds what the compiler said of the engine (sha256, bytes, version, layer_source);
    it and ``layer_table`` are None when nothing was compiled.  ``execution`` holds what running it
    showed, or under ``skipped`` why it was not run.
    """
    evidence: EngineEvidence | None = None
    information: dict[str, Any] = {}
    if engine is not None and layer_table is not None:
        table = read_layer_table(layer_table)
        evidence = EngineEvidence(
            layers=table.layers,
            io=table.io,
            source=f"{engine['layer_source']} ({backend} {engine['version']}, at build time)",
            file=EngineEntry(file=Path(label).name, sha256=engine["sha256"], bytes=engine["bytes"]),
            builder=BuilderEntry(backend=backend, version=engine["version"], sm=sm),
        )
        information["builder_warnings"] = engine["warnings"]
    if execution is not None:
        information["execution"] = dict(execution)
    return judge(
        label=label,
        engine=evidence,
        graph=GraphEvidence(ir.load(converted), options, tuple(fp8_linears)),
        inputs=source.inputs,
        outputs=source.outputs,
        profiles=profiles,
        expect=expect,
        fidelity=fidelity,
        engine_fidelity=None if execution is None else execution.get("fidelity"),
        divergence=None if fidelity is None else _where_it_differs(source, converted, fidelity),
        source_counts=conversion.get("counts"),
        tf32=tf32,
        precision=options.canonical(),
        conversion={**conversion, "sensitivity": sensitivity},
        information=information,
    )
