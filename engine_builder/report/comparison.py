"""What two builds have in common and where they differ, as rows for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_builder.report.figures import Bar, Series, bars, legend, line_plot
from engine_builder.report.markup import Child, Markup, tag
from engine_builder.report.page import document
from engine_builder.report.precision_map import MappedStructure, PrecisionMap
from engine_builder.report.sections import figures_of, head, numbers, option_text, section
from engine_builder.report.subject import Subject, megabytes

ABSENT = "–"


@dataclass(frozen=True)
class Row:
    """One property of both builds, as text."""

    name: str
    a: str
    b: str

    @property
    def differs(self) -> bool:
        return self.a != self.b


def compare(a: Subject, b: Subject) -> list[Row]:
    """Everything that both builds can be asked for in one line, whether it differs or not."""
    rows = [Row("verdict", a.report.verdict, b.report.verdict)]
    rows += _rows(dict(figures_of(a)), dict(figures_of(b)))
    return rows + _rows(_origins(a), _origins(b))


def _rows(a: Mapping[str, str], b: Mapping[str, str]) -> list[Row]:
    return [Row(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in dict.fromkeys((*a, *b))]


def _origins(subject: Subject) -> dict[str, str]:
    made = subject.origin
    if made is None:
        return {}
    return {
        "recipe": f"{made.recipe.name} {made.recipe_digest[:12]}",
        "source": made.source_sha256[:12],
        "converted": ", ".join(file.sha256[:12] for file in made.converted),
        "scales": ABSENT if made.scales is None else made.scales.sha256[:12],
        "image": ", ".join((made.image or {}).values()) or ABSENT,
        **made.versions,
        **{
            f"option {k}": option_text(v)
            for k, v in subject.report.precision.items()
            if k not in ("recipe", "fp8")
        },
    }


def render_comparison(a: Subject, b: Subject) -> str:
    """The page about two builds; the same builds give the same text."""
    body = [
        tag(
            "section",
            tag("h2", "A and B"),
            tag("p", tag("strong", "A"), f" {a.name}: {a.report.verdict}"),
            tag("p", tag("strong", "B"), f" {b.name}: {b.report.verdict}"),
            class_="verdict",
            id="builds",
        ),
        section(
            "side-by-side",
            "Side by side",
            "Rows marked ≠ differ.",
            _side_by_side(compare(a, b)),
        ),
        _fidelity(a, b),
        _map(a, b),
        _engines(a, b),
        _weights(a, b),
        _stages(a, b),
    ]
    links = [
        ("side-by-side", "Side by side"),
        ("fidelity", "Fidelity"),
        ("map", "Precision map"),
        ("engine", "Engine"),
        ("weights", "Bytes"),
        ("stages", "Time"),
    ]
    return document(f"{a.name} and {b.name}", "Two builds compared", links, [part for part in body if part])


def _side_by_side(rows: Iterable[Row]) -> Markup:
    cells = [
        tag(
            "tr",
            tag("th", row.name, scope="row"),
            tag("td", row.a, data_label="A"),
            tag("td", row.b, data_label="B"),
            class_="differs" if row.differs else None,
        )
        for row in rows
    ]
    return tag("table", head("", "A", "B"), tag("tbody", cells), class_="stack")


def _fidelity(a: Subject, b: Subject) -> Markup | None:
    points = {
        letter: {
            (p["length"], p["t"], p["output"], p["sample"]): p
            for p in (s.report.fidelity or {}).get("points", ())
        }
        for letter, s in (("A", a), ("B", b))
    }
    if not points["A"] and not points["B"]:
        return None
    keys = sorted({*points["A"], *points["B"]}, key=lambda k: (k[0], -k[1], k[2:]))
    lines = []
    for letter, of in points.items():
        worst: dict[str, float | None] = {str(key[0]): 0.0 for key in keys if key in of}
        for key in keys:
            if key in of:
                cosine, known = of[key]["cosine"], worst[str(key[0])]
                worst[str(key[0])] = None if cosine is None or known is None else max(known, 1 - cosine)
        lines.append(Series(letter, tuple(worst.items())))
    cells = []
    for key in keys:
        found = [points[letter].get(key) for letter in ("A", "B")]
        cosines = [ABSENT if p is None else _cosine(p["cosine"]) for p in found]
        errors = [
            ABSENT if p is None or p["relative_l2"] is None else f"{p['relative_l2']:.2e}" for p in found
        ]
        cells.append(tag("tr", [tag("td", text) for text in (str(key[0]), f"{key[1]:g}", *cosines, *errors)]))
    table = tag(
        "table",
        head("L", "t", "cosine A", "cosine B", "relative error A", "relative error B"),
        tag("tbody", cells),
        class_="numbers",
    )
    return section(
        "fidelity",
        "How close to fp32",
        "The worst of all diffusion times at each length; lower is closer.",
        line_plot(
            lines,
            title="1 − cosine of the outputs, A and B",
            x_label="sequence length L",
            y_label="1 − cosine",
        ),
        numbers(tag("div", table, class_="wide"), "The numbers of this plot"),
    )


def _cosine(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6f}"


Pair = tuple[MappedStructure | None, MappedStructure | None]


def retyped_structures(a: Subject, b: Subject) -> list[Pair] | None:
    """The structures, by kind and name, that ended in another type or that one build lacks.

    None when the map of either is not known.
    """
    if a.map is None or b.map is None:
        return None
    return [(left, right) for left, right in _pairs(a.map, b.map) if _type(left) != _type(right)]


def _pairs(a: PrecisionMap, b: PrecisionMap) -> list[Pair]:
    of_a = {(s.kind, s.name): s for s in a.structures}
    of_b = {(s.kind, s.name): s for s in b.structures}
    return [(of_a.get(key), of_b.get(key)) for key in dict.fromkeys((*of_a, *of_b))]


def _type(structure: MappedStructure | None) -> str:
    return ABSENT if structure is None else structure.type


def _map(a: Subject, b: Subject) -> Markup:
    title = "Structures of another type"
    different = retyped_structures(a, b)
    if different is None:
        lead = "The converted model of at least one build is no longer in the cache."
        return section("map", title, lead)
    rows = []
    for left, right in different:
        either = left or right
        assert either is not None
        rows.append(
            tag(
                "tr",
                tag("th", either.describe(), scope="row"),
                tag("td", _type(left), data_label="A"),
                tag("td", _type(right), data_label="B"),
                tag("td", tag("code", either.name), data_label="ONNX node"),
            )
        )
    table = tag("table", head("Structure", "A", "B", "ONNX node"), tag("tbody", rows), class_="stack")
    return section(
        "map",
        title,
        "The structures that ended in another type."
        if rows
        else "Every structure has the same type in both.",
        table if rows else None,
    )


def _engines(a: Subject, b: Subject) -> Markup | None:
    if a.report.total_layers is None and b.report.total_layers is None:
        return None
    parts: list[Child] = []
    for caption, key in (
        ("Matrix products by the type of their operands", "gemm_by_precision"),
        ("Fused attention kernels by the type of q, k and v", "mha_precision"),
    ):
        counts = [getattr(s.report, key) or {} for s in (a, b)]
        rows = [
            Bar(letter, tuple(of.items()), ", ".join(f"{n} {dtype}" for dtype, n in of.items()) or "none")
            for letter, of in zip("AB", counts, strict=True)
        ]
        parts.append(bars(rows, ("", "layers"), caption))
    kinds = _count_table([s.report.layer_types or {} for s in (a, b)], "kind")
    return section("engine", "What the engines are made of", None, parts, numbers(kinds, "Layers by kind"))


def _count_table(counts: list[Mapping[str, int]], what: str) -> Markup:
    left, right = counts
    names = sorted({*left, *right}, key=lambda n: -max(left.get(n, 0), right.get(n, 0)))
    rows = [
        tag(
            "tr",
            tag("th", tag("code", name), scope="row"),
            [tag("td", str(of.get(name, 0))) for of in counts],
            tag("td", f"{right.get(name, 0) - left.get(name, 0):+d}"),
        )
        for name in names
    ]
    return tag("table", head(what, "A", "B", "change"), tag("tbody", rows), class_="numbers")


def _weights(a: Subject, b: Subject) -> Markup | None:
    if a.map is None or b.map is None:
        return None
    sizes = []
    for subject in (a.map, b.map):
        of: dict[str, int] = {}
        for weight in subject.weights:
            of[weight.type] = of.get(weight.type, 0) + weight.bytes
        sizes.append(of)
    dtypes = sorted({*sizes[0], *sizes[1]}, key=lambda d: -sizes[0].get(d, 0) - sizes[1].get(d, 0))
    rows = [
        Bar(letter, tuple((d, of.get(d, 0)) for d in dtypes), megabytes(sum(of.values())))
        for letter, of in zip("AB", sizes, strict=True)
    ]
    cells = [
        tag("tr", tag("th", d, scope="row"), [tag("td", f"{of.get(d, 0):,}") for of in sizes]) for d in dtypes
    ]
    return section(
        "weights",
        "Where the bytes are",
        None,
        legend(dtypes),
        bars(rows, ("", "size"), "Constants of the converted models by type"),
        numbers(
            tag("table", head("bytes", "A", "B"), tag("tbody", cells), class_="numbers"), "Bytes by type"
        ),
    )


def _stages(a: Subject, b: Subject) -> Markup | None:
    if a.origin is None and b.origin is None:
        return None
    found = [{} if s.origin is None else {stage.name: stage for stage in s.origin.stages} for s in (a, b)]
    rows = []
    for name in dict.fromkeys((*found[0], *found[1])):
        for letter, of in zip("AB", found, strict=True):
            if name in of:
                stage = of[name]
                text = "from cache" if stage.cached else f"{stage.seconds:.1f} s"
                rows.append(Bar(f"{name} {letter}", (("other", stage.seconds),), text))
    return section("stages", "Where the time went", None, bars(rows, ("stage", "time"), "Stages in order"))
