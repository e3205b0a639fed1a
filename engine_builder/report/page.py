"""The whole page about one build, as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Final

from engine_builder import __version__
from engine_builder.report import sections
from engine_builder.report.figures import patterns
from engine_builder.report.map_section import precision_map
from engine_builder.report.markup import Child, Markup, tag
from engine_builder.report.subject import Subject

# The browser itself refuses whatever the page would load, should a name ever become markup.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_page(subject: Subject) -> str:
    """The report on ``subject``; the same subject gives the same text."""
    parts = [
        sections.verdict(subject),
        sections.key_figures(subject),
        sections.checks(subject),
        precision_map(subject),
        sections.fidelity(subject),
        sections.engine(subject),
        sections.weights(subject),
        sections.sensitivity(subject),
        sections.execution(subject),
        sections.interface(subject),
        sections.stages(subject),
        sections.origin(subject),
    ]
    links = [
        ("checks", "Checks"),
        ("map", "Precision map"),
        ("fidelity", "Fidelity"),
        ("engine", "Engine"),
        ("weights", "Bytes"),
        ("sensitivity", "fp8 cost"),
        ("execution", "GPU"),
        ("interface", "Interface"),
        ("stages", "Time"),
        ("origin", "Origin"),
    ]
    body = [part for part in parts if part is not None]
    present = [(anchor, text) for anchor, text in links if any(f' id="{anchor}"' in part for part in body)]
    return document(f"{subject.report.verdict}: {subject.name}", subject.name, present, body)


def document(title: str, heading: Child, links: Sequence[tuple[str, str]], body: Sequence[Child]) -> str:
    """A page with its style and nothing from elsewhere."""
    style = resources.files("engine_builder.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    navigation = tag(
        "nav", [tag("a", text, href=f"#{anchor}") for anchor, text in links], aria_label="Sections"
    )
    page = tag(
        "body",
        patterns(),
        tag("header", tag("p", "sa3-builder report", class_="aside"), tag("h1", heading), navigation),
        tag("main", body),
        tag("footer", tag("p", f"Written by sa3-builder {__version__}.", class_="aside")),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, page, lang='en')}\n"
