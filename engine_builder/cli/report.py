"""The command that writes pages for people about finished builds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, CacheDir, Debug, LogFormat, Quiet, default_cache
from engine_builder.errors import RecipeError

if TYPE_CHECKING:
    from engine_builder.report.comparison import Row


def report(
    builds: Annotated[
        list[Path], typer.Argument(metavar="BUILD...", help="An engine, or its .verify.json; two to compare.")
    ],
    compare: Annotated[bool, typer.Option("--compare", help="Compare two builds.")] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Option("--out", help="The HTML file to write.", show_default=".report.html beside the engine"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    cache: CacheDir = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Write a page for people about a finished build, or compare two.

    The precision map comes from the cache; without it the page says so and has the rest.  A comparison
    is printed, and written as a page with --out.
    """
    from engine_builder.cache import Cache
    from engine_builder.durable import write_durably
    from engine_builder.report.comparison import compare as compare_builds
    from engine_builder.report.comparison import render_comparison, retyped_structures
    from engine_builder.report.finished import finished_subject, read_finished
    from engine_builder.report.page import render_page

    SESSION.screen()
    if len(builds) != (2 if compare else 1):
        raise RecipeError(
            "--compare needs two builds" if compare else "name one build",
            hint="two with: report --compare A B",
        )
    kept = Cache(cache or default_cache())
    finished = [read_finished(path) for path in builds]
    subjects = [finished_subject(build, kept) for build in finished]
    if not compare:
        page = out or finished[0].paths.page
        write_durably(page, render_page(subjects[0]).encode())
        if not quiet:
            typer.echo(str(page))
        return
    a, b = subjects
    if out is not None:
        write_durably(out, render_comparison(a, b).encode())
    rows = compare_builds(a, b)
    retyped = retyped_structures(a, b)
    if as_json:
        typer.echo(json.dumps({row.name: [row.a, row.b] for row in rows}, indent=1))
    elif not quiet:
        typer.echo(_text(rows, None if retyped is None else len(retyped)))
        if out is not None:
            typer.echo(str(out))


def _text(rows: Sequence[Row], retyped: int | None) -> str:
    """What differs, a line each, and how much does not."""
    different = [row for row in rows if row.differs]
    width = max((len(row.name) for row in different), default=0)
    lines = [f"{row.name:<{width}}  {row.a} -> {row.b}" for row in different]
    if retyped is not None:
        lines.append(f"{retyped} structures ended in another type")
    lines.append(f"{len(rows) - len(different)} of {len(rows)} properties are the same")
    return "\n".join(lines)
