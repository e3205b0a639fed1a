"""A report that was written earlier, as evidence: which engine it belongs to, and what it says of it."""

from __future__ import annotations

from collections.abc import Sequence

from engine_builder.recipe import Recipe
from verify.counts import LayerCounts
from verify.identity import Check, Failure, Status
from verify.layers import EngineIO, ProfileRange
from verify.report import CheckEntry, EngineEntry, VerifyReport


def check_belongs(report: VerifyReport, engine: EngineEntry | None, counts: LayerCounts | None) -> Check:
    """Whether ``report`` is about this engine file, and about the engine with these layers."""
    failures: list[Failure] = []
    compared = 0
    recorded = report.engine_file
    if engine is not None:
        compared += 1
        if recorded is None:
            reason = "the report is about a build that made no engine"
            failures.append(Failure(engine.file, reason, (), ()))
        elif recorded.sha256 != engine.sha256:
            theirs, ours = (f"{e.sha256[:12]}... of {e.bytes} bytes" for e in (recorded, engine))
            reason = f"the report is about another file: SHA-256 {theirs}; this one has {ours}"
            failures.append(Failure(engine.file, reason, (), ()))
    if counts is not None:
        for key, here, there in (
            ("total_layers", counts.layers, report.total_layers),
            ("gemm_by_precision", dict(counts.gemms), report.gemm_by_precision),
            ("mha_precision", dict(counts.fused_attention), report.mha_precision),
            ("layer_types", dict(counts.by_layer_type), report.layer_types),
        ):
            compared += 1
            if here != there:
                failures.append(Failure(key, f"the report says {there}, the layers {here}", (), ()))
    status = Status.FAILED if failures else Status.PASSED
    return Check("report", status, compared, compared - len(failures), tuple(failures))


def check_target(report: VerifyReport, recipe: Recipe) -> Check:
    """Whether the reported engine was built by the backend and for an architecture of the recipe."""
    if report.builder is None:
        return Check("target", Status.NOT_VERIFIABLE, 2, 0, note="the report names no builder")
    builder, target = report.builder, recipe.target
    failures: list[Failure] = []
    if builder.sm not in target.sm:
        wanted = ", ".join(f"sm_{sm}" for sm in target.sm)
        reason = f"the engine was built for sm_{builder.sm}, the recipe asks for {wanted}"
        failures.append(Failure("target.sm", reason, (), ()))
    if builder.backend != target.backend:
        reason = f"the engine was built by {builder.backend}, the recipe asks for {target.backend}"
        failures.append(Failure("target.backend", reason, (), ()))
    status = Status.FAILED if failures else Status.PASSED
    return Check("target", status, 2, 2 - len(failures), tuple(failures))


def recorded_counts(report: VerifyReport) -> LayerCounts | None:
    """The counts over the engine's layers that the report holds; None when there was no engine."""
    if report.total_layers is None:
        return None
    return LayerCounts(
        layers=report.total_layers,
        by_layer_type=report.layer_types or {},
        by_output_type=report.precision_any or {},
        gemms=report.gemm_by_precision or {},
        fused_attention=report.mha_precision or {},
        fp8_layers=report.total_fp8_layers or 0,
        runtime_trig=report.n_runtime_cossin or 0,
    )


def recorded_io(report: VerifyReport) -> tuple[EngineIO, ...]:
    """The engine's inputs and outputs that the report holds."""
    contract = report.contract or {}
    return tuple(
        EngineIO(
            name=entry["name"],
            mode=mode,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            profiles=tuple(
                ProfileRange(tuple(p["min"]), tuple(p["opt"]), tuple(p["max"])) for p in entry["profiles"]
            ),
        )
        for key, mode in (("inputs", "input"), ("outputs", "output"), ("unknown", "unknown"))
        for entry in contract.get(key, ())
    )


def recorded_checks(report: VerifyReport) -> tuple[Check, ...]:
    """The report's checks as they were made."""
    return tuple(_check(entry) for entry in report.checks)


def _check(entry: CheckEntry) -> Check:
    return Check(
        name=entry.name,
        status=Status(entry.status),
        promised=entry.promised,
        kept=entry.kept,
        failures=tuple(Failure(f.subject, f.reason, f.nodes, f.layers) for f in entry.failures),
        note=entry.note,
    )


def merged(recorded: Sequence[Check], made: Sequence[Check]) -> tuple[Check, ...]:
    """The recorded checks, with those of the same name made anew in their place and new ones behind."""
    anew = {check.name: check for check in made}
    kept = [anew.pop(check.name, check) for check in recorded]
    return (*kept, *anew.values())
