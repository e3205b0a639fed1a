"""The ``.verify.json`` of an engine: its model, its JSON Schema, its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_builder.errors import SourceModelError
from engine_builder.one_line import one_line, place
from verify.counts import LayerCounts
from verify.identity import Check, Status

SCHEMA: Literal["sa3-builder/verify/1"] = "sa3-builder/verify/1"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class FailureEntry(_Section):
    """A promise that is not kept."""

    subject: Annotated[str, Field(description="The structure's name: an ONNX node, tensor or file.")]
    reason: str
    nodes: Annotated[tuple[str, ...], Field(description="ONNX nodes of the structure.")] = ()
    layers: Annotated[tuple[str, ...], Field(description="Engine layers that these nodes ended in.")] = ()


class CheckEntry(_Section):
    """One check: its verdict and the evidence."""

    name: str
    status: Literal["passed", "failed", "not verifiable", "not applicable"]
    promised: Annotated[int, Field(ge=0, description="Structures that the check is about.")]
    kept: Annotated[int, Field(ge=0, description="Structures for which it holds.")]
    failures: tuple[FailureEntry, ...] = ()
    note: str = ""


class EngineEntry(_Section):
    """The engine file that the report is about."""

    file: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]


class BuilderEntry(_Section):
    """What built the engine."""

    backend: str
    version: str
    sm: int


class VerifyReport(_Section):
    """Everything that is known and proven about one engine.

    The keys from ``engine`` to ``check3_rope_baked`` are read by existing tools; a check that does
    not apply to the precision is null in them, never false.
    """

    schema_version: Annotated[Literal["sa3-builder/verify/1"], Field(alias="schema")] = SCHEMA
    verdict: Literal["passed", "failed", "not verifiable"]
    reasons: Annotated[
        tuple[str, ...], Field(description="Why the verdict is not passed, one line each.")
    ] = ()

    engine: str
    label: str
    total_layers: int | None
    gemm_by_precision: dict[str, int] | None
    n_gemm: int | None
    n_gemm_fp8: int | None
    total_fp8_layers: int | None
    precision_any: dict[str, int] | None
    n_mha_fused: int | None
    mha_precision: dict[str, int] | None
    n_rope_fp32: int | None
    check1_fp8_gemms: bool | None
    check2_native_mha_fused: bool | None
    n_runtime_cossin: int | None
    check3_rope_baked: bool | None

    engine_file: EngineEntry | None
    builder: BuilderEntry | None
    layer_source: Annotated[str, Field(description="Where the layer records came from.")]
    precision: dict[str, Any]
    checks: tuple[CheckEntry, ...]
    fidelity: dict[str, Any] | None
    contract: dict[str, Any] | None
    conversion: dict[str, Any] | None
    structures: dict[str, int] | None
    layer_types: dict[str, int] | None
    information: Annotated[
        dict[str, Any], Field(description="Measurements that no verdict depends on: latency, memory.")
    ] = {}

    def to_json(self) -> str:
        """The report as indented JSON, ending in a newline; the same report gives the same text."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def verify_schema() -> dict[str, Any]:
    """The JSON Schema of ``.verify.json``."""
    schema = VerifyReport.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}


def check_entry(check: Check) -> CheckEntry:
    return CheckEntry(
        name=check.name,
        status=check.status.value,
        promised=check.promised,
        kept=check.kept,
        failures=tuple(
            FailureEntry(subject=f.subject, reason=f.reason, nodes=f.nodes, layers=f.layers)
            for f in check.failures
        ),
        note=check.note,
    )


def verdict_of(
    checks: Sequence[Check],
) -> tuple[Literal["passed", "failed", "not verifiable"], tuple[str, ...]]:
    """The verdict over all checks, and a line per check that stands in its way.

    One failed check fails the engine; a check without evidence leaves it not verifiable; an engine
    with no applicable check at all is not verifiable either, because nothing was proven.
    """
    reasons = []
    for check in checks:
        if check.status is Status.FAILED:
            first = check.failures[0] if check.failures else None
            what = f"{first.subject}: {first.reason}" if first else check.note
            more = f", and {len(check.failures) - 1} more" if len(check.failures) > 1 else ""
            note = f"; {check.note}" if first and check.note else ""
            reasons.append(f"{check.name}: {check.kept} of {check.promised} kept; {what}{more}{note}")
        elif check.status is Status.NOT_VERIFIABLE:
            reasons.append(f"{check.name}: not verifiable: {check.note}")
    if any(c.status is Status.FAILED for c in checks):
        return "failed", tuple(reasons)
    if reasons or all(c.status is Status.NOT_APPLICABLE for c in checks):
        return "not verifiable", tuple(reasons) or ("no check applies to this engine",)
    return "passed", ()


_COUNTED = (
    "total_layers", "gemm_by_precision", "n_gemm", "n_gemm_fp8", "total_fp8_layers", "precision_any",
    "n_mha_fused", "mha_precision", "n_runtime_cossin",
)  # fmt: skip


def legacy_keys(
    engine: str, label: str, counts: LayerCounts | None, checks: Sequence[Check], rotations_fp32: int | None
) -> dict[str, Any]:
    """The flat keys that existing tools read; null where there is no evidence or no such check."""

    def outcome(name: str) -> bool | None:
        check = next((c for c in checks if c.name == name), None)
        if check is None or check.status in (Status.NOT_APPLICABLE, Status.NOT_VERIFIABLE):
            return None
        return check.status is Status.PASSED

    flat: dict[str, Any] = dict.fromkeys(_COUNTED)
    if counts is not None:
        flat = {
            "total_layers": counts.layers,
            "gemm_by_precision": dict(counts.gemms),
            "n_gemm": counts.total_gemms,
            "n_gemm_fp8": counts.gemms.get("fp8", 0),
            "total_fp8_layers": counts.fp8_layers,
            "precision_any": dict(counts.by_output_type),
            "n_mha_fused": counts.total_fused_attention,
            "mha_precision": dict(counts.fused_attention),
            "n_runtime_cossin": counts.runtime_trig,
        }
    return {
        **flat,
        "engine": engine,
        "label": label,
        "n_rope_fp32": rotations_fp32,
        "check1_fp8_gemms": outcome("fp8_linear"),
        "check2_native_mha_fused": outcome("fused_attention"),
        "check3_rope_baked": outcome("baked_rotary"),
    }


def read_report(path: Path) -> VerifyReport:
    """The report at ``path``.

    Raises:
        ValueError: It is not a report of this schema.
    """
    return VerifyReport.model_validate_json(path.read_text(encoding="utf-8"))


def load_report(path: Path) -> VerifyReport:
    """The report at ``path``, for a user who named it.

    Raises:
        SourceModelError: It cannot be read, is cut short, or is not a report of this schema.
    """
    try:
        return read_report(path)
    except OSError as error:
        raise SourceModelError(f"cannot be read: {error.strerror}", where=place(path)) from error
    except ValidationError as error:
        fault = error.errors()[0]
        at = ".".join(one_line(str(part)) for part in fault["loc"])
        reason = f"{at}: {fault['msg']}" if at else fault["msg"]
    except ValueError as error:  # not UTF-8
        reason = str(error)
    raise SourceModelError(
        f"is no report of {SCHEMA}: {one_line(reason, 200)}",
        where=place(path),
        hint="it is damaged, or another version wrote it",
    )


def differences(a: Any, b: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The leaves in which two reports differ, as (path, in a, in b), in the order of ``a``.

    Entries of lists that have a name (``name`` of a check, ``subject`` of a failure) are compared by
    it, wherever they stand.
    """
    left, right = _by_name(a), _by_name(b)
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return [] if a == b else [(prefix, a, b)]
    found: list[tuple[str, Any, Any]] = []
    for key in [*left, *(k for k in right if k not in left)]:
        path = f"{prefix}.{key}" if prefix else str(key)
        found.extend(differences(left.get(key), right.get(key), path))
    return found


def _by_name(value: Any) -> Any:
    """A list of named entries as a mapping; anything else as it is."""
    if not isinstance(value, list | tuple) or not value:
        return {} if isinstance(value, list | tuple) else value
    for key in ("name", "subject"):
        if all(isinstance(entry, Mapping) and key in entry for entry in value):
            names = [str(entry[key]) for entry in value]
            if len(set(names)) == len(names):
                return dict(zip(names, value, strict=True))
    return value
