"""The command that says why a node has its type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine_builder.cli.session import SESSION, CacheDir, Debug, LogFormat, Quiet, default_cache
from engine_builder.errors import SourceModelError

if TYPE_CHECKING:
    from engine_builder.explain import Explanation


def explain(
    subject: Annotated[
        Path, typer.Argument(metavar="FILE", help="A converted ONNX model, an engine, or its .verify.json.")
    ],
    node: Annotated[str, typer.Option("--node", help="Name of a node, a tensor or a constant.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
    cache: CacheDir = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Say why a node of a converted model has its type: by structure, rule and promise.

    For an engine or its report the converted model and the engine's layers are taken from the cache.
    """
    import onnx_ir as ir

    from engine_builder.explain import Explainer
    from engine_builder.source import load_graph, open_source

    SESSION.screen()
    if subject.suffix == ".onnx":
        model = load_graph(open_source(subject, float_input=False))
        explainer = Explainer(model, where=str(subject))
    else:
        from engine_builder.cache import Cache
        from engine_builder.report.finished import find_evidence, read_finished

        build = read_finished(subject)
        evidence = find_evidence(build.report, Cache(cache or default_cache()))
        if evidence is None:
            raise SourceModelError(
                "the converted model of this build is not in the cache any more",
                where=str(subject),
                hint="name the cache with --cache, or a converted model in place of the report",
            )
        trunk_linears = ((build.report.conversion or {}).get("fp8") or {}).get("trunk_linears", {})
        explainer = Explainer(
            ir.load(evidence.converted),
            where=str(evidence.converted),
            layers=evidence.layers(),
            trunk_linears=trunk_linears,
        )
    found = explainer.explain(node)
    typer.echo(json.dumps(found.to_json(), indent=1) if as_json else _text(found))


def _text(found: Explanation) -> str:
    lines = [f"{found.node}: {found.type}, because {found.because}"]
    if found.promise is not None:
        promise = found.promise
        reason = f": {promise.reason}" if promise.reason else ""
        types = f" ({', '.join(promise.types)})" if promise.types else ""
        lines.append(f"  promise  {promise.kind}{types} of {promise.subject}: {promise.status}{reason}")
    lines.extend(f"  layer    {layer}" for layer in found.layers)
    return "\n".join(lines)
