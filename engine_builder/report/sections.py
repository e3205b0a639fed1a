"""The parts of the page about one build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine_builder.report.figures import Bar, Series, bars, legend, line_plot
from engine_builder.report.markup import Child, Markup, tag
from engine_builder.report.subject import GPUS, Subject, megabytes
from verify.report import CheckEntry, FailureEntry

_MEANINGS: Final[Mapping[str, str]] = {
    "fused_attention": "Each attention core runs as one fused kernel that reads the trunk type",
    "fp32_norm": "Each norm computes in fp32, where its squares cannot overflow",
    "fp32_angle": "Each angle is computed in fp32, from the model's input on",
    "fp32_rotation": "Queries and keys are rotated in fp32",
    "baked_rotary": "Rotary angles are read from tables, none is computed at run time",
    "fp8_linear": "Each selected linear runs as an FP8 matrix product",
    "trunk_linear": "Each other linear runs in the trunk type",
    "same_graph": "The engine was built from this converted model",
    "same_structures": "The conversion lost no structure of the source model",
    "contract": "Inputs, outputs and profiles are those that the runtime expects",
    "fidelity": "The converted model computes what the fp32 model computes",
    "engine_fidelity": "The engine, run on a GPU, computes what the fp32 model computes",
}

_VERDICTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "passed": ("✓", "Passed", "This engine is proven to be what its recipe asks for. It can be deployed."),
    "failed": (
        "✗",
        "Failed",
        "This build is not what its recipe asks for. No engine was published; do not use one.",
    ),
    "not verifiable": (
        "?",
        "Not proven",
        "There is not enough evidence that this engine is what its recipe asks for. No engine was published.",
    ),
}

_SHOWN = 50
"""Failures of one check that are spelled out; the ``.verify.json`` has all."""


def section(anchor: str, title: str, lead: Child, *children: Child) -> Markup:
    return tag(
        "section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, children, id=anchor
    )


def verdict(subject: Subject) -> Markup:
    """What an operator has to know, before anything else."""
    report = subject.report
    sign, word, sentence = _VERDICTS[report.verdict]
    classes = {"passed": "good", "failed": "bad"}.get(report.verdict, "unsure")
    return tag(
        "section",
        tag("h2", tag("span", sign, class_="sign", aria_hidden="true"), " ", word),
        tag("p", sentence),
        tag("ul", [tag("li", reason) for reason in report.reasons]) if report.reasons else None,
        tag("ul", [tag("li", note) for note in _notes(subject)], class_="notes"),
        class_=f"verdict {classes}",
        id="verdict",
    )


def _notes(subject: Subject) -> list[str]:
    """What the verdict rests on, and what it does not cover."""
    report = subject.report
    applied = [c for c in report.checks if c.status != "not applicable"]
    passed = sum(c.status == "passed" for c in applied)
    notes = [f"{passed} of {len(applied)} checks passed."]
    fidelity = report.fidelity
    if fidelity is None:
        notes.append("The numbers it computes were not compared with the fp32 model.")
    else:
        where = "" if not fidelity["points"] else f" over {_count(len(fidelity['points']), 'point')}"
        notes.append(
            f"Compared with the fp32 model{where}, the worst cosine of the outputs is "
            f"{_cosine(fidelity['worst_cosine'])}; {fidelity['min_cosine']:g} was asked for."
        )
    if subject.not_run:
        notes.append(f"The engine was not run on a GPU: {subject.not_run}.")
    else:
        notes.append(f"The engine was run on {subject.execution.get('device', 'a GPU')}.")
    if subject.synthetic_scales:
        notes.append("Its fp8 scales were measured on drawn inputs, not on recorded ones.")
    return notes


def figures_of(subject: Subject) -> list[tuple[str, str]]:
    """The figures that describe a build in a few words."""
    report = subject.report
    figures: list[tuple[str, str]] = [
        ("model", subject.origin.model if subject.origin else report.label.split("/")[-2]),
        ("precision", subject.precision),
        ("GPU", _gpu(subject.sm)),
    ]
    if report.engine_file is not None:
        figures.append(("engine size", megabytes(report.engine_file.bytes)))
    figures.append(
        ("worst cosine", "not measured" if subject.worst_cosine is None else _cosine(subject.worst_cosine))
    )
    if report.total_layers is not None:
        figures.append(("engine layers", str(report.total_layers)))
        figures.append(("matrix products", _counts(report.gemm_by_precision or {})))
        figures.append(("fused attention", _counts(report.mha_precision or {})))
    latency = subject.execution.get("latency") or []
    typical = next((x for x in latency if x.get("bound") == "opt"), None)
    if typical is not None:
        figures.append(("latency, typical length", f"{typical['median_ms']:.2f} ms"))
    if subject.origin is not None:
        figures.append(("build time", _seconds(subject.origin.total_seconds)))
    return figures


def key_figures(subject: Subject) -> Markup:
    entries = [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures_of(subject)]
    return tag("dl", entries, class_="key-figures")


def checks(subject: Subject) -> Markup:
    order = {"failed": 0, "not verifiable": 1, "passed": 2, "not applicable": 3}
    rows = sorted(subject.report.checks, key=lambda c: order[c.status])
    table = tag(
        "table",
        head("Check", "Result", "Holds for"),
        tag("tbody", [_check_row(check) for check in rows]),
        class_="stack checks",
    )
    return section(
        "checks",
        "What was checked",
        "Each check looks at the engine's own layers or at the converted model, never at what the "
        "builder meant to do.",
        table,
    )


def _check_row(check: CheckEntry) -> Markup:
    sign = {"passed": "✓ passed", "failed": "✗ failed", "not verifiable": "? not verifiable"}.get(
        check.status
    )
    shown = check.failures[:_SHOWN]
    hidden = len(check.failures) - len(shown)
    failures = (
        tag(
            "details",
            tag("summary", _count(len(check.failures), "failure")),
            tag("ul", [tag("li", _failure(f)) for f in shown]),
            tag("p", f"and {hidden} more in the .verify.json") if hidden else None,
            open=True,
        )
        if shown
        else None
    )
    meaning = _MEANINGS.get(check.name)
    if meaning is None and check.name.startswith("expect."):
        meaning = f"The recipe's expectation of {check.name.removeprefix('expect.')}"
    return tag(
        "tr",
        tag(
            "th",
            meaning or check.name,
            tag("span", " ", tag("code", check.name), class_="aside") if meaning else None,
            failures,
            tag("p", check.note, class_="aside") if check.note else None,
            scope="row",
        ),
        tag(
            "td",
            sign or "– does not apply",
            class_=f"status {check.status.replace(' ', '-')}",
            data_label="Result",
        ),
        tag("td", f"{check.kept} of {check.promised}" if check.promised else "", data_label="Holds for"),
    )


def _failure(failure: FailureEntry) -> Child:
    return (
        tag("code", failure.subject),
        f": {failure.reason}",
        tag("div", "layers: ", ", ".join(failure.layers), class_="aside") if failure.layers else None,
    )


def fidelity(subject: Subject) -> Markup:
    parts: list[Child] = []
    for title, figures in (
        ("The converted model, evaluated as the hardware rounds", subject.report.fidelity),
        ("The engine on the GPU", subject.execution.get("fidelity")),
    ):
        if figures is not None and figures["points"]:
            parts.append(_fidelity_plots(title, figures))
    if not parts:
        return section("fidelity", "How close to fp32", "This build did not measure it.")
    return section(
        "fidelity",
        "How close to fp32",
        "The output's distance from the fp32 model's, over sequence lengths L and diffusion times t. Lower "
        "is closer. Rounded angles show at the longest L and at t near 1.",
        parts,
    )


def _fidelity_plots(title: str, figures: Mapping[str, Any]) -> Child:
    points = sorted(figures["points"], key=lambda p: (p["length"], -p["t"]))
    threshold = float(figures["min_cosine"])
    limit = (1 - threshold, f"limit: cosine {threshold:g}") if 0 < threshold < 1 else None
    rows = [
        tag(
            "tr",
            tag("td", str(p["length"])),
            tag("td", f"{p['t']:g}"),
            tag("td", _cosine(p["cosine"])),
            tag("td", _scientific(p["relative_l2"])),
            tag("td", _scientific(p["max_abs"])),
            tag("td", str(p["nonfinite"])),
            tag("td", f"{p['output']}, {p['sample']}", class_="text"),
        )
        for p in points
    ]
    headings = head("L", "t", "cosine", "relative error", "largest error", "not finite", "output, inputs")
    table = tag("div", tag("table", headings, tag("tbody", rows), class_="numbers"), class_="wide")
    return (
        tag("h3", title),
        tag(
            "div",
            line_plot(
                _by_time(points, lambda p: None if p["cosine"] is None else 1 - p["cosine"]),
                title="1 − cosine of the outputs",
                x_label="sequence length L",
                y_label="1 − cosine",
                limit=limit,
            ),
            line_plot(
                _by_time(points, lambda p: p["relative_l2"]),
                title="Relative error of the outputs (L2)",
                x_label="sequence length L",
                y_label="relative error",
            ),
            class_="plots",
        ),
        numbers(table, "The numbers of these plots"),
    )


def _by_time(points: Sequence[Mapping[str, Any]], value: Any) -> list[Series]:
    """A line per diffusion time: the farthest of all inputs at each length."""
    lines: dict[float, dict[str, float | None]] = {}
    for point in points:
        line = lines.setdefault(point["t"], {})
        length, far = str(point["length"]), value(point)
        if length not in line:
            line[length] = far
        else:
            known = line[length]
            line[length] = None if known is None or far is None else max(known, far)
    return [Series(f"t = {t:g}", tuple(line.items())) for t, line in sorted(lines.items(), reverse=True)]


def engine(subject: Subject) -> Markup | None:
    report = subject.report
    if report.total_layers is None:
        return None
    kinds = sorted((report.layer_types or {}).items(), key=lambda item: (-item[1], item[0]))
    parts: list[Child] = []
    for title, counts, what in (
        ("Matrix products by the type of their operands", report.gemm_by_precision, "type"),
        ("Fused attention kernels by the type of q, k and v", report.mha_precision, "type"),
    ):
        rows = [Bar(dtype, ((dtype, count),), str(count)) for dtype, count in (counts or {}).items()]
        parts.append(bars(rows, (what, "layers"), title) if rows else tag("p", f"{title}: none."))
    rows = [Bar(tag("code", kind), (("other", count),), str(count)) for kind, count in kinds]
    return section(
        "engine",
        "What the engine is made of",
        f"{report.total_layers} layers, read from the {report.layer_source}. TensorRT merges linears that "
        "share an input, so that there are fewer matrix products than linears.",
        tag(
            "div",
            tag("div", parts),
            bars(rows, ("kind", "layers"), "Layers by TensorRT's own kinds"),
            class_="columns",
        ),
    )


def weights(subject: Subject) -> Markup | None:
    if subject.map is None or not subject.map.weights:
        return None
    sizes = {(w.block, w.type): w.bytes for w in subject.map.weights}
    total = sum(sizes.values())
    blocks = list(dict.fromkeys(block for block, _ in sizes))
    of_type = {d: sum(n for (_, dtype), n in sizes.items() if dtype == d) for _, d in sizes}
    dtypes = sorted(of_type, key=lambda d: -of_type[d])
    by_type = [
        Bar(dtype, ((dtype, of_type[dtype]),), megabytes(of_type[dtype]), (_share(of_type[dtype], total),))
        for dtype in dtypes
    ]
    by_block = [
        Bar(
            _block(block),
            tuple((dtype, sizes.get((block, dtype), 0)) for dtype in dtypes),
            megabytes(sum(sizes.get((block, dtype), 0) for dtype in dtypes)),
        )
        for block in blocks
    ]
    cells = [
        tag(
            "tr",
            tag("th", _block(block), scope="row"),
            [tag("td", f"{sizes.get((block, dtype), 0):,}") for dtype in dtypes],
        )
        for block in blocks
    ]
    table = tag("table", head("bytes", *dtypes), tag("tbody", cells), class_="numbers")
    engine_file = subject.report.engine_file
    return section(
        "weights",
        "Where the bytes are",
        f"{megabytes(total)} of constants in the converted model"
        + (f", {megabytes(engine_file.bytes)} in the engine file." if engine_file else "."),
        legend(dtypes),
        tag(
            "div",
            bars(by_type, ("type", "size", "share"), "By type"),
            bars(by_block, ("block", "size"), "By block of the transformer"),
            class_="columns",
        ),
        numbers(tag("div", table, class_="wide"), "Bytes by block and type"),
    )


def _block(block: int | None) -> str:
    return "outside blocks" if block is None else f"block {block}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def sensitivity(subject: Subject) -> Markup | None:
    found = (subject.report.conversion or {}).get("sensitivity")
    if not found:
        return None
    left_out, trunk = set(found["left_out"]), str(subject.report.precision.get("trunk"))
    ranking = found["ranking"]
    rows = [
        Bar(
            (tag("code", r["linear"]), " left out" if r["linear"] in left_out else ""),
            ((trunk if r["linear"] in left_out else "fp8", max(r["cost"], 0.0)),),
            f"{r['cost']:.2e}",
        )
        for r in ranking
    ]
    longest = max((max(r["cost"], 0.0) for r in ranking), default=0.0)
    frontier = [
        Series("whole sweep", tuple((str(p["left_out"]), 1 - p["worst_cosine"]) for p in found["frontier"]))
    ]
    points = [
        tag("tr", tag("td", str(p["left_out"])), tag("td", _cosine(p["worst_cosine"])))
        for p in found["frontier"]
    ]
    more = (
        bars(rows[_TOP:], ("linear", "cost"), "The others", longest=longest, long=True)
        if len(rows) > _TOP
        else None
    )
    return section(
        "sensitivity",
        "What fp8 costs, linear by linear",
        f"The fall in the worst cosine when one linear alone is quantized. The trunk alone reaches "
        f"{_cosine(found['trunk_cosine'])}; with {_count(len(left_out), 'linear')} left out, "
        f"{_cosine(found['reached'])} is reached.",
        bars(rows[:_TOP], ("linear", "cost"), "The costliest linears", longest=longest, long=True),
        numbers(more, f"The other {len(rows) - _TOP}") if more else None,
        line_plot(
            frontier,
            title="1 − worst cosine by the number of linears left out of fp8",
            x_label="linears left out",
            y_label="1 − worst cosine",
        ),
        numbers(
            tag("table", head("left out", "worst cosine"), tag("tbody", points), class_="numbers"),
            "The numbers of this plot",
        ),
    )


_TOP = 12
"""The linears that are worth a look; after them the costs are alike."""


def execution(subject: Subject) -> Markup | None:
    found = subject.execution
    if not found:
        return None
    latency = found.get("latency") or []
    rows = [
        Bar(
            f"profile {x['profile']}, {x['bound']}: {_shapes(x['shapes'])}",
            (("other", x["median_ms"]),),
            f"{x['median_ms']:.2f} ms",
            (f"{x['p05_ms']:.2f} – {x['p95_ms']:.2f}",),
        )
        for x in latency
    ]
    contexts = found.get("context_bytes") or []
    memory = [("weights", found.get("weights_bytes")), ("loaded in all", found.get("loaded_bytes"))]
    memory += [(f"scratch, profile {index}", size) for index, size in enumerate(contexts)]
    return section(
        "execution",
        "On the GPU",
        f"Measured on {found.get('device', 'a GPU')}.",
        bars(rows, ("shapes", "median", "5 – 95 %"), "Latency of one inference", long=True) if rows else None,
        bars(
            [Bar(name, (("other", size),), megabytes(size)) for name, size in memory if size is not None],
            ("memory", "size"),
            "GPU memory",
        ),
    )


def interface(subject: Subject) -> Markup | None:
    contract = subject.report.contract
    if not contract:
        return None
    rows = []
    for mode in ("inputs", "outputs", "unknown"):
        for io in contract.get(mode, ()):
            ranges = [_range(p) for p in io["profiles"]] or [_shape(io["shape"])]
            rows.append(
                tag(
                    "tr",
                    tag("th", tag("code", io["name"]), scope="row"),
                    tag("td", mode.removesuffix("s"), data_label="Kind"),
                    tag("td", io["dtype"], data_label="Type"),
                    tag("td", [tag("div", text) for text in ranges], data_label="Shapes"),
                )
            )
    return section(
        "interface",
        "Inputs and outputs",
        "The shapes of each input are the least, the one it is tuned for, and the greatest, per profile.",
        tag("table", head("Name", "Kind", "Type", "Shapes"), tag("tbody", rows), class_="stack"),
    )


def stages(subject: Subject) -> Markup | None:
    made = subject.origin
    if made is None:
        return None
    rows = [
        Bar(
            (stage.name, " ", tag("span", stage.reason, class_="aside")),
            (("other", stage.seconds),),
            "from cache" if stage.cached else _seconds(stage.seconds),
        )
        for stage in made.stages
    ]
    return section(
        "stages",
        "Where the time went",
        f"{_seconds(made.total_seconds)} in all. What has not changed comes from the cache.",
        bars(rows, ("stage", "time"), "Stages in order", long=True),
    )


def origin(subject: Subject) -> Markup:
    report, made = subject.report, subject.origin
    rows: list[tuple[str, Child]] = []
    if report.engine_file is not None:
        rows.append((f"engine {report.engine_file.file}", _digest(report.engine_file.sha256)))
    if made is not None:
        rows.append((f"recipe {made.recipe.name}", _digest(made.recipe.sha256)))
        rows.append(("what the recipe asks for", _digest(made.recipe_digest)))
        rows.extend(
            (f"source {file.name}, {megabytes(file.bytes)}", _digest(file.sha256)) for file in made.source
        )
        rows.extend(
            (f"converted {file.name}, {megabytes(file.bytes)}", _digest(file.sha256))
            for file in made.converted
        )
        if made.scales is not None:
            rows.append((f"scales {made.scales.name}", _digest(made.scales.sha256)))
        image = made.image or {}
        rows.append(("container image", ", ".join(image.values()) or "not built in a container image"))
        rows.extend((name, version) for name, version in made.versions.items())
    else:
        files = (report.conversion or {}).get("files") or []
        rows.extend((f"converted {f['name']}, {megabytes(f['bytes'])}", _digest(f["sha256"])) for f in files)
        if report.builder is not None:
            rows.append((report.builder.backend, report.builder.version))
    options = {**report.precision, **{f"fp8 {k}": v for k, v in (report.precision.get("fp8") or {}).items()}}
    options.pop("fp8", None)
    rows.extend((f"option {name}", option_text(value)) for name, value in options.items())
    table = tag(
        "table",
        head("What", "Which"),
        tag("tbody", [tag("tr", tag("th", what, scope="row"), tag("td", which)) for what, which in rows]),
        class_="stack",
    )
    lead = "SHA-256 digests and versions of everything that shapes the engine."
    if made is None:
        lead += " There is no manifest, so the source and the versions are not known here."
    warnings = report.information.get("builder_warnings") or []
    return section(
        "origin",
        "What it was built from",
        lead,
        table,
        numbers(
            tag("ul", [tag("li", tag("code", text)) for text in warnings]),
            f"{_count(len(warnings), 'message')} of TensorRT",
        )
        if warnings
        else None,
    )


def numbers(content: Child, summary: str) -> Markup:
    """The numbers of a plot, to unfold on a screen; paper shows them."""
    return tag("details", tag("summary", summary), content, class_="print-open")


def _range(profile: Mapping[str, Sequence[int]]) -> str:
    """The least, typical and greatest shape of a profile; one where they are the same."""
    return " … ".join(dict.fromkeys(_shape(profile[bound]) for bound in ("min", "opt", "max")))


def _shape(shape: Sequence[int]) -> str:
    return "×".join("?" if size < 0 else str(size) for size in shape) or "scalar"


def head(*headings: str) -> Markup:
    return tag("thead", tag("tr", [tag("th", heading, scope="col") for heading in headings]))


def _digest(sha256: str) -> Markup:
    return tag("code", sha256, class_="digest")


def option_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _gpu(sm: int | None) -> str:
    return "unknown" if sm is None else f"sm_{sm}" + (f" ({GPUS[sm]})" if sm in GPUS else "")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in counts.items()) or "none"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _cosine(value: float | None) -> str:
    return "not finite" if value is None or value == -1.0 else f"{value:.6f}"


def _scientific(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {_shape(shape)}" for name, shape in shapes.items())
