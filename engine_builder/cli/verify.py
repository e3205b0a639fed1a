"""The commands that verify what others built, compare reports, and print the schemas of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from engine_builder.cli.session import SESSION, Debug, LogFormat, Quiet, choice
from engine_builder.errors import RecipeError, VerificationError

if TYPE_CHECKING:
    from verify.report import VerifyReport

_SHOWN = 10
"""Broken promises that are printed of each check; the report holds all."""


def verify(
    engine: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Argument(help="An engine; its layers are read on a GPU, unless --layers or --report tell."),
    ] = None,
    layers: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--layers", help="The engine's layers: the inspector's JSON, or a build log."),
    ] = None,
    onnx: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--onnx", help="The converted ONNX it was built from, to check promises by node."),
    ] = None,
    recipe: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--recipe", help="The recipe it was to be built by."),
    ] = None,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--report", help="An earlier .verify.json, to be checked to belong to the engine."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="The .verify.json to write."),
    ] = None,
    diff: Annotated[
        Optional[tuple[Path, Path]],  # noqa: UP045
        typer.Option("--diff", metavar="OLD NEW", help="Say what changed between two .verify.json instead."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Prove what an engine is, or a layer dump, whoever made it.

    Exits with 0 when every check passed, 7 when one failed or lacks its evidence, 4 when a file is damaged,
    3 when the engine's layers can only be read on a GPU.
    """
    SESSION.screen()
    if diff is not None:
        if any(path is not None for path in (engine, layers, onnx, recipe, report, out)):
            raise RecipeError("--diff compares two reports and goes with nothing else but --json")
        _print_differences(*diff, as_json=as_json)
        return
    from verify.examine import Subject, examine

    found = examine(Subject(engine, layers, report, onnx, recipe))
    if out is not None:
        _write(out, found)
    if as_json:
        typer.echo(found.to_json(), nl=False)
    elif not quiet:
        typer.echo(as_text(found))
    if found.verdict != "passed":
        raise typer.Exit(VerificationError.exit_code)


def schema(
    kind: Annotated[str, typer.Argument(help="verify, recipe, scales or manifest.")],
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Print the JSON Schema (2020-12) of a file that the builder reads or writes."""
    from verify.schemas import SCHEMAS, SchemaName

    SESSION.screen()
    typer.echo(json.dumps(SCHEMAS[choice(SchemaName, kind, "the schema")](), indent=1))


def as_text(report: VerifyReport) -> str:
    """The report for people: the verdict, a line for each check, and what is broken."""
    lines = [f"{report.label}: {report.verdict}", f"layers: {report.layer_source}"]
    width = max((len(check.name) for check in report.checks), default=0)
    for check in report.checks:
        if check.status == "not applicable":
            continue
        note = f"  {check.note}" if check.note else ""
        lines.append(f"  {check.name:<{width}}  {check.status:<14} {check.kept}/{check.promised}{note}")
        for failure in check.failures[:_SHOWN]:
            lines.append(f"  {'':<{width}}    {failure.subject}: {failure.reason}")
            if failure.layers:
                lines.append(f"  {'':<{width}}      in {', '.join(failure.layers)}")
        if len(check.failures) > _SHOWN:
            lines.append(f"  {'':<{width}}    and {len(check.failures) - _SHOWN} more")
    if report.total_layers is not None:
        gemms = _pairs(report.gemm_by_precision)
        fused = _pairs(report.mha_precision)
        lines.append(
            f"{report.total_layers} layers; GEMMs: {gemms}; fused attention: {fused}; "
            f"with sine or cosine: {report.n_runtime_cossin}"
        )
    if not report.checks:
        lines.extend(report.reasons)
    return "\n".join(lines)


def _pairs(counts: dict[str, int] | None) -> str:
    return ", ".join(f"{n} {name}" for name, n in (counts or {}).items()) or "none"


def _write(path: Path, report: VerifyReport) -> None:
    from engine_builder.durable import disk_error, write_durably

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, report.to_json().encode())
    except OSError as error:
        raise disk_error(error, path) from error


def _print_differences(a: Path, b: Path, *, as_json: bool) -> None:
    from verify.report import differences, load_report

    left, right = (load_report(path).model_dump(mode="json", by_alias=True) for path in (a, b))
    found = differences(left, right)
    if as_json:
        typer.echo(json.dumps([{"path": path, "a": x, "b": y} for path, x, y in found], indent=1))
        return
    for path, x, y in found:
        typer.echo(f"{path}: {_value(x)} -> {_value(y)}")
    if not found:
        typer.echo("the reports are the same")


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
