"""The precision map on the page: rows are places within a block, columns are blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine_builder.report.figures import type_class
from engine_builder.report.markup import Child, Markup, tag
from engine_builder.report.precision_map import KINDS, MappedStructure
from engine_builder.report.sections import section
from engine_builder.report.subject import Subject

Fault = Callable[[MappedStructure], str]


def precision_map(subject: Subject) -> Markup:
    title = "Precision map"
    if subject.map is None:
        return section(
            "map",
            title,
            "The converted model is no longer in the builder's cache, so that this page cannot say which "
            "structure ended in which type.",
        )
    structures = subject.map.structures
    inside = [s for s in structures if s.block is not None]
    outside = [s for s in structures if s.block is None]
    beside: list[Child] = []
    if inside:
        beside.append(tag("div", _grid(inside, subject.map.blocks, subject.fault), class_="wide"))
    if outside:
        heading = tag("h3", "Outside the blocks") if inside else None
        chips = tag("ul", [_chip(s, subject.fault(s)) for s in outside], class_="chips")
        beside.append(tag("div", heading, chips, class_="outside"))
    parts: list[Child] = [tag("div", beside, class_="beside")]
    by_place = [
        (f"Block {block}", [s for s in inside if s.block == block]) for block in range(subject.map.blocks)
    ]
    parts.append(tag("h3", "With the engine layers that hold them"))
    listings = [
        tag(
            "details", tag("summary", f"{place}: {len(members)} structures"), _listing(members, subject.fault)
        )
        for place, members in (*by_place, ("Outside the blocks", outside))
        if members
    ]
    parts.append(tag("div", listings, class_="listings"))
    seen = sum(s.from_engine for s in structures)
    return section(
        "map",
        title,
        f"The type that each of {len(structures)} structures ended in, block by block. "
        + (
            f"Of {seen} the engine's own layers say it; of the others the strongly typed model that "
            "it was built from."
            if seen
            else "There is no engine, so this is what the converted model says."
        ),
        parts,
    )


def _grid(structures: Sequence[MappedStructure], blocks: int, fault: Fault) -> Markup:
    bodies: list[Markup] = []
    for kind, heading in KINDS.items():
        places: dict[str, dict[int, MappedStructure]] = {}
        for s in structures:
            if s.kind == kind and s.block is not None:
                places.setdefault(s.label, {})[s.block] = s
        if not places:
            continue
        rows = [tag("tr", tag("th", heading, colspan=blocks + 1, scope="rowgroup"), class_="kind")]
        for place, cells in places.items():
            row = [_cell(cells[b], fault(cells[b])) if b in cells else tag("td") for b in range(blocks)]
            rows.append(tag("tr", tag("th", place, scope="row"), row))
        bodies.append(tag("tbody", rows))
    head = tag("tr", tag("th", "block", scope="col"), [tag("th", str(b), scope="col") for b in range(blocks)])
    return tag("table", tag("thead", head), bodies, class_="map")


def _cell(structure: MappedStructure, fault: str) -> Markup:
    classes = type_class(structure.type) + (" broken" if fault else "")
    return tag("td", ("✗ " if fault else ""), structure.type, class_=classes, title=_hover(structure, fault))


def _chip(structure: MappedStructure, fault: str) -> Markup:
    classes = type_class(structure.type) + (" broken" if fault else "")
    return tag(
        "li",
        tag("span", ("✗ " if fault else ""), structure.type, class_=f"chip {classes}"),
        " ",
        structure.label,
        title=_hover(structure, fault),
    )


def _hover(structure: MappedStructure, fault: str) -> str:
    parts = [structure.describe(), structure.detail, fault, ", ".join(structure.layers)]
    return "; ".join(part for part in parts if part)


def _listing(structures: Iterable[MappedStructure], fault: Fault) -> Markup:
    rows = []
    for s in structures:
        broken = fault(s)
        layers = [tag("div", tag("code", layer)) for layer in s.layers]
        rows.append(
            tag(
                "tr",
                tag("th", f"{s.kind} {s.label.removeprefix(f'{s.kind} ')}", scope="row"),
                tag(
                    "td",
                    tag("span", s.type, class_=f"chip {type_class(s.type)}"),
                    tag("strong", f" ✗ {broken}") if broken else None,
                    data_label="Type",
                ),
                tag("td", s.detail, data_label="What"),
                tag("td", layers or "none", data_label="Engine layers"),
                tag("td", tag("code", s.name), data_label="ONNX node"),
            )
        )
    head = tag(
        "tr", [tag("th", h, scope="col") for h in ("Structure", "Type", "What", "Engine layers", "ONNX node")]
    )
    return tag("table", tag("thead", head), tag("tbody", rows), class_="stack")
