"""The page for people: what it says of real builds, that it is valid, and that it stays by itself."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import html5lib
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from benchmarks.workshop import Workshop
from engine_builder.cache import Cache
from engine_builder.cli.app import app
from engine_builder.errors import SourceModelError
from engine_builder.pipeline import Outcome, build
from engine_builder.recipe import load_recipe
from engine_builder.report.comparison import compare, render_comparison, retyped_structures
from engine_builder.report.figures import Series, line_plot, type_class
from engine_builder.report.finished import finished_subject, read_finished
from engine_builder.report.markup import render, tag
from engine_builder.report.page import render_page
from engine_builder.report.precision_map import KINDS, build_map
from engine_builder.report.subject import Subject
from engine_builder.stage_runner import Settings
from tests.browser import Browser, open_browser, pixels
from tests.conftest import REPOSITORY
from tests.pages import checkout, run_blocks, shell_blocks
from tests.recipes import write_recipe
from verify.report import CheckEntry, FailureEntry

STYLE = (REPOSITORY / "engine_builder/report/style.css").read_text(encoding="utf-8")
Built = Mapping[str, Outcome]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def built(workshop: Workshop, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sample in fp16 and fp8, built with pages.  At L=64 the fp8 cosine is about 0.999."""
    folder = tmp_path_factory.mktemp("recipes")
    precisions = {"fp16": "fp16", "fp8": {"recipe": "fp8", "scales": str(workshop.scales)}}
    outcomes: dict[str, Outcome] = {}
    for name, precision in precisions.items():
        recipe = write_recipe(
            folder,
            f"{name}.yaml",
            model={"name": "sample", "onnx": str(workshop.source.path)},
            precision=precision,
            verify={"fidelity": {"lengths": [64, 128], "t": [1.0, 0.5], "min_cosine": 0.99}},
        )
        (outcomes[name],) = build(load_recipe(recipe), Settings(cache, page=True))
        assert outcomes[name].verdict == "passed", outcomes[name].reasons
    return outcomes


@pytest.fixture(scope="module")
def subjects(built: Built, cache: Path) -> Mapping[str, Subject]:
    return {n: finished_subject(read_finished(o.paths.engine), Cache(cache)) for n, o in built.items()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def tree(page: str) -> Any:
    """The page's elements, those of SVG without their namespace; raises at the first error in its HTML."""
    root = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    for element in root.iter():
        element.tag = str(element.tag).rpartition("}")[2]
    return root


def text_of(page: str) -> str:
    return " ".join(" ".join(tree(page).find("body").itertext()).split())


def table_of(page: str, anchor: str) -> list[list[str]]:
    """The cells of the first table of a section."""
    rows = tree(page).find(f".//section[@id='{anchor}']//table").iter("tr")
    return [["".join(cell.itertext()).strip() for cell in row if cell.tag in ("td", "th")] for row in rows]


# --- what it says -------------------------------------------------------------------------------


def test_the_page_is_what_the_report_command_writes(
    built: Built, subjects: Mapping[str, Subject], cache: Path, tmp_path: Path
) -> None:
    page = built["fp16"].paths.page
    assert page.name == "dit_fp16.report.html"
    assert page.read_text(encoding="utf-8") == render_page(subjects["fp16"])
    out = tmp_path / "page.html"
    done = CliRunner().invoke(
        app, ["report", str(built["fp16"].paths.report), "--out", str(out), "--cache", str(cache)]
    )
    assert (done.exit_code, done.output) == (0, f"{out}\n")
    assert out.read_bytes() == page.read_bytes()


def test_the_verdict_comes_first_and_says_what_it_does_not_cover(built: Built) -> None:
    page = built["fp8"].paths.page.read_text(encoding="utf-8")
    sections = [s.get("id") for s in tree(page).iter("section")]
    assert sections == [
        "verdict", "checks", "map", "fidelity", "engine", "weights", "interface", "stages", "origin"
    ]  # fmt: skip
    said = " ".join("".join(tree(page).find(".//section[@id='verdict']").itertext()).split())
    worst = built["fp8"].report["fidelity"]["worst_cosine"]
    assert "Passed" in said
    assert f"over 4 points, the worst cosine of the outputs is {worst:.6f}; 0.99 was asked for." in said
    assert "The engine was not run on a GPU: this machine has no GPU of sm_89." in said
    assert "Its fp8 scales were measured on drawn inputs, not on recorded ones." in said
    assert "drawn inputs" not in built["fp16"].paths.page.read_text(encoding="utf-8")


def test_the_map_shows_every_structure_and_its_type(subjects: Mapping[str, Subject]) -> None:
    """The sample has 2 blocks of 2 cores, 9 linears, 7 norms and 2 rotations, and 11 linears outside.

    Of the linears outside, 3 are too narrow or run over one row, and 4 more embed the time: fp8 is for the
    2 of the conditioning tokens, for the entry and the exit, and for the 18 in blocks.
    """
    fp16, fp8 = subjects["fp16"].map, subjects["fp8"].map
    assert fp16 is not None
    assert fp8 is not None
    for found, linears in ((fp16, {"fp16": 29}), (fp8, {"fp16": 7, "fp8": 22})):
        assert found.blocks == 2
        kinds = {kind: [s for s in found.structures if s.kind == kind] for kind in KINDS}
        assert {kind: Counter(s.block for s in of) for kind, of in kinds.items()} == {
            "attention": {0: 2, 1: 2},
            "linear": {None: 11, 0: 9, 1: 9},
            "norm": {0: 7, 1: 7},
            "rotation": {0: 2, 1: 2},
            "angle": {None: 2, 0: 2, 1: 2},
        }
        assert Counter(s.type for s in kinds["linear"]) == linears
        assert {s.type for s in kinds["attention"]} == {"fp16"}
        assert {s.type for kind in ("norm", "rotation", "angle") for s in kinds[kind]} == {"fp32"}
        # The engine's own layers tell the types of products; what is inside a fused kernel they do not.
        assert all(s.from_engine for s in kinds["attention"])
        assert all("mha" in s.layers[0] for s in kinds["attention"])
        assert sum(s.from_engine for s in kinds["linear"]) == 29
        assert not any(s.from_engine for s in kinds["norm"])
        assert all(s.layers for s in found.structures)


def test_the_map_is_on_the_page(subjects: Mapping[str, Subject]) -> None:
    rows = table_of(render_page(subjects["fp8"]), "map")
    assert rows[0] == ["block", "0", "1"]
    assert ["self_attn", "fp16", "fp16"] in rows
    assert ["self_attn.to_qkv", "fp8", "fp8"] in rows
    assert ["cross_attn.k_norm", "fp32", "fp32"] in rows


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp8"])
def test_blocks_are_those_that_the_exporter_named(workshop: Workshop, kind: Any) -> None:
    """They are found by the residual stream; the TorchScript exporter spells them in every name."""
    model = ir.load(workshop.convert(kind).path)
    mapped = [s for s in build_map(model).structures if not s.name.startswith("rotary_")]
    assert len(mapped) > 50
    for structure in mapped:
        layer = re.match(r"/transformer/layers\.(\d+)/", structure.name)
        assert structure.block == (int(layer[1]) if layer else None), structure.name


def test_every_spelling_has_the_same_map(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    from engine_builder.source import open_source

    maps = {}
    for name in ("sm_torchscript17", "sm_dynamo20", "sm_dynamo23"):
        converted = workshop.convert("fp16", name, open_source(tiny_models[name]))
        found = build_map(ir.load(converted.path))
        maps[name] = Counter((s.kind, s.block, s.type) for s in found.structures if s.kind != "angle")
    assert maps["sm_dynamo20"] == maps["sm_torchscript17"] == maps["sm_dynamo23"]


def test_bytes_are_those_of_the_converted_file(workshop: Workshop) -> None:
    path = workshop.convert("fp8").path
    constants = onnx.load(path).graph.initializer
    stored = sum(onnx.numpy_helper.to_array(c).nbytes for c in constants)
    weights = build_map(ir.load(path)).weights
    assert sum(w.bytes for w in weights) == stored
    # 18 linears of two blocks, in channels: qkv 128x384, out, q, out 128x128, kv 128x256, local 257x128
    # and 128x128, feed-forward 128x1024 and 512x128; one byte each, and one for the shared zero point.
    per_block = 128 * (384 + 128 + 128 + 128 + 256 + 257 + 128 + 1024 + 512)
    assert [w.bytes for w in weights if w.type == "fp8" and w.block is not None] == [per_block] * 2


def test_numbers_stand_beside_plots(built: Built) -> None:
    page = built["fp16"].paths.page.read_text(encoding="utf-8")
    rows = table_of(page, "fidelity")
    points = built["fp16"].report["fidelity"]["points"]
    assert len(rows) == 1 + len(points) == 5
    first = next(p for p in points if (p["length"], p["t"]) == (64, 1.0))
    assert rows[1][:4] == ["64", "1", f"{first['cosine']:.6f}", f"{first['relative_l2']:.2e}"]
    plots = [s for s in tree(page).iter("svg") if s.get("role") == "img"]
    assert len(plots) == 2
    assert all(sum(e.get("class") == "point" for e in plot.iter("path")) == 4 for plot in plots)


def test_a_failed_gate_is_told_without_an_engine(workshop: Workshop, cache: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        model={"name": "sample", "onnx": str(workshop.source.path)},
        precision={"recipe": "fp8", "scales": str(workshop.scales)},
        verify={"fidelity": {"lengths": [64, 128], "t": [1.0, 0.5], "min_cosine": 0.999999}},
    )
    (outcome,) = build(load_recipe(recipe), Settings(cache, page=True))
    page = outcome.paths.page.read_text(encoding="utf-8")
    assert not outcome.paths.engine.exists()
    said = text_of(page)
    assert "Failed This build is not what its recipe asks for. No engine was published" in said
    assert "There is no engine, so this is what the converted model says." in said
    assert table_of(page, "checks")[1][1:] == ["✗ failed", "0 of 4"]
    assert "What it was built from" in said
    (outcome,) = build(load_recipe(recipe), Settings(cache))
    assert not outcome.paths.page.exists()  # it was about an earlier build


def test_a_page_is_added_to_an_engine_that_is_already_there(
    built: Built, workshop: Workshop, cache: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path,
        model={"name": "sample", "onnx": str(workshop.source.path)},
        verify={"fidelity": {"lengths": [64, 128], "t": [1.0, 0.5], "min_cosine": 0.99}},
    )
    (outcome,) = build(load_recipe(recipe), Settings(cache))
    assert (outcome.verdict, outcome.paths.page.exists()) == ("passed", False)
    engine, manifest = outcome.paths.engine.stat(), outcome.paths.manifest.read_bytes()
    (outcome,) = build(load_recipe(recipe), Settings(cache, page=True))
    assert (outcome.rebuilt, outcome.paths.page.exists()) == (False, True)
    assert outcome.paths.engine.stat() == engine
    assert outcome.paths.manifest.read_bytes() == manifest


def test_a_broken_promise_marks_its_cell(subjects: Mapping[str, Subject]) -> None:
    subject = subjects["fp16"]
    name = "/transformer/layers.1/ff/ff/ff.2/MatMul"
    failure = FailureEntry(subject=name, reason="its product is not on fp16", nodes=(name,), layers=("l1",))
    check = CheckEntry(name="trunk_linear", status="failed", promised=29, kept=28, failures=(failure,))
    report = subject.report.model_copy(
        update={"verdict": "failed", "reasons": ("trunk_linear: 28 of 29 kept",), "checks": (check,)}
    )
    page = render_page(replace(subject, report=report))
    assert ["ff.ff.2", "fp16", "✗ fp16"] in table_of(page, "map")
    marked = [e for e in tree(page).iter("td") if "broken" in e.get("class", "")]
    assert len(marked) == 1
    assert "its product is not on fp16" in marked[0].get("title")
    assert f"{name} : its product is not on fp16 layers: l1" in text_of(page)


def test_without_the_cache_the_page_has_the_rest(built: Built, tmp_path: Path) -> None:
    subject = finished_subject(read_finished(built["fp16"].paths.engine), Cache(tmp_path))
    assert subject.map is None
    said = text_of(render_page(subject))
    assert "no longer in the builder's cache" in said
    assert "Where the bytes are" not in said
    assert "Passed" in said


def test_sensitivity_and_a_run_on_a_gpu_have_their_sections(subjects: Mapping[str, Subject]) -> None:
    subject = subjects["fp8"]
    sensitivity = {
        "trunk_cosine": 0.999999,
        "ranking": [
            {"linear": f"/l.{i}/MatMul", "cosine": 0.99, "cost": 10.0 ** -(i + 2)} for i in range(14)
        ],
        "frontier": [{"left_out": 0, "worst_cosine": 0.98}, {"left_out": 1, "worst_cosine": 0.995}],
        "left_out": ["/l.0/MatMul"],
        "reached": 0.995,
    }
    latency = {"profile": 0, "bound": "opt", "shapes": {"x": [1, 256, 1292]}, "median_ms": 12.345}
    execution = {
        "device": "NVIDIA L4",
        "fidelity": subject.report.fidelity,
        "latency": [{**latency, "p05_ms": 12.0, "p95_ms": 13.0, "runs": 80}],
        "weights_bytes": 9_000_000,
        "context_bytes": [1_500_000],
        "loaded_bytes": 20_000_000,
    }
    report = subject.report.model_copy(
        update={
            "conversion": {**(subject.report.conversion or {}), "sensitivity": sensitivity},
            "information": {"execution": execution},
        }
    )
    page = render_page(replace(subject, report=report))
    assert table_of(page, "sensitivity")[1] == ["/l.0/MatMul left out", "", "1.00e-02"]
    assert len(table_of(page, "sensitivity")) == 13  # a head and the costliest twelve
    said = text_of(page)
    assert "with 1 linear left out, 0.995000 is reached" in said
    assert "The engine was run on NVIDIA L4." in said
    assert ["profile 0, opt: x 1×256×1292", "", "12.35 ms", "12.00 – 13.00"] in table_of(page, "execution")
    assert "The engine on the GPU" in said


def test_what_is_not_finite_is_drawn_and_told(subjects: Mapping[str, Subject]) -> None:
    subject = subjects["fp16"]
    assert subject.report.fidelity is not None
    points = [dict(p) for p in subject.report.fidelity["points"]]
    points[0].update(cosine=None, relative_l2=None, max_abs=None, nonfinite=7)
    fidelity = {**subject.report.fidelity, "points": points, "worst_cosine": -1.0}
    page = render_page(replace(subject, report=subject.report.model_copy(update={"fidelity": fidelity})))
    assert "not finite" in [cell for row in table_of(page, "fidelity") for cell in row]
    crosses = [e for e in tree(page).iter("text") if "broken-mark" in e.get("class", "")]
    assert len(crosses) == 2  # in both plots


def test_a_plot_places_values_by_their_powers_of_ten() -> None:
    """From 1e-6 to 1e-2 over 200 units: each power takes 50, and zero stands at the foot."""
    plot = line_plot(
        [Series("a", (("1", 1e-6), ("2", 1e-4), ("3", 1e-2), ("4", 0.0)))],
        title="t",
        x_label="x",
        y_label="y",
    )
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", plot.split('class="line"')[0])]
    assert heights == [214.0, 114.0, 14.0, 214.0]


# --- comparison ----------------------------------------------------------------------------------


def test_two_builds_compared(
    built: Built, subjects: Mapping[str, Subject], cache: Path, tmp_path: Path
) -> None:
    a, b = subjects["fp16"], subjects["fp8"]
    rows = {row.name: row for row in compare(a, b)}
    assert (rows["precision"].a, rows["precision"].b) == ("fp16", "fp8")
    assert rows["precision"].differs
    assert not rows["source"].differs
    retyped = retyped_structures(a, b)
    assert retyped is not None
    pairs = {(x.type, y.type) for x, y in retyped if x is not None and y is not None}
    assert (len(retyped), pairs) == (22, {("fp16", "fp8")})
    assert retyped_structures(a, a) == []
    out = tmp_path / "both.html"
    files = [str(built[name].paths.engine) for name in ("fp16", "fp8")]
    done = CliRunner().invoke(app, ["report", "--compare", *files, "--out", str(out), "--cache", str(cache)])
    assert done.exit_code == 0
    assert out.read_text(encoding="utf-8") == render_comparison(a, b)
    assert "22 structures ended in another type" in done.output
    assert re.search(r"^precision +fp16 -> fp8$", done.output, re.MULTILINE)
    assert not re.search(r"^source ", done.output, re.MULTILINE)
    done = CliRunner().invoke(app, ["report", "--compare", *files, "--json", "--cache", str(cache)])
    assert json.loads(done.output)["verdict"] == ["passed", "passed"]


@pytest.mark.parametrize(("given", "message"), [(["a"], "needs two builds"), (["a", "b", "c"], "needs two")])
def test_a_comparison_needs_two(given: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["report", "--compare", *given])
    assert message in str(done.exception)


def test_what_is_no_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match="report cannot be read"):
        read_finished(tmp_path / "none.trt")
    (tmp_path / "x.verify.json").write_text('{"schema": "sa3-builder/verify/0"}')
    with pytest.raises(SourceModelError, match="no report or manifest of this version"):
        read_finished(tmp_path / "x.trt")


# --- markup --------------------------------------------------------------------------------------

HOSTILE = (
    "</style></title></svg><script>document.title='owned'</script>",
    '"><img src="http://example.invalid/x.png" onerror="alert(1)">',
    "<!--",
    "]]>&amp;&#x3c;script&#x3e;",
    "' onmouseover='alert(1)",
    "\x00\x1e\x1f\ud800\u202egnp.exe\ufffe",
)


def pages_of(subjects: Mapping[str, Subject]) -> dict[str, str]:
    return {
        **{name: render_page(subject) for name, subject in subjects.items()},
        "comparison": render_comparison(subjects["fp16"], subjects["fp8"]),
    }


def test_pages_are_valid(subjects: Mapping[str, Subject]) -> None:
    for page in pages_of(subjects).values():
        root = tree(page)
        ids = [e.get("id") for e in root.iter() if e.get("id")]
        assert len(ids) == len(set(ids))
        links = [e.get("href") for e in root.iter("a")]
        assert links
        assert {link.removeprefix("#") for link in links} <= set(ids)
        assert len(list(root.iter("h1"))) == 1
        fills = {e.get("fill").removeprefix("url(#").removesuffix(")") for e in root.iter() if e.get("fill")}
        assert fills <= set(ids)
        assert all(e.get("scope") for e in root.iter("th"))


def test_pages_name_nothing_outside(subjects: Mapping[str, Subject]) -> None:
    allowed = {
        *("aria-hidden", "aria-label", "charset", "class", "colspan", "content", "data-label", "href"),
        *("http-equiv", "id", "lang", "name", "open", "role", "scope", "title"),
        *("cx", "cy", "d", "fill", "height", "patternunits", "r", "transform", "viewbox", "width"),
        *("x", "x1", "x2", "y", "y1", "y2"),
    }
    for page in pages_of(subjects).values():
        root = tree(page)
        assert {a.lower() for e in root.iter() for a in e.keys()} <= allowed  # noqa: SIM118  (no dict)
        assert not {"script", "img", "link", "iframe", "object", "embed", "base", "image", "use"} & {
            str(e.tag) for e in root.iter()
        }
        assert all(e.get("href", "#").startswith("#") for e in root.iter())
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_no_name_becomes_markup(workshop: Workshop, subjects: Mapping[str, Subject], tmp_path: Path) -> None:
    """Every name in model and report is hostile: the page has the elements that it has for plain names."""
    skeletons = []
    for names in (["plain"], HOSTILE):
        supply = itertools.cycle(names)
        model = ir.load(workshop.convert("fp16").path)
        for number, node in enumerate(model.graph):
            node.name = f"{number}{next(supply)}"
            node.metadata_props.clear()
        renamed = [s.name for s in build_map(model).structures]

        def text(value: Any) -> Any:
            if isinstance(value, str):
                return next(supply)  # noqa: B023  (used before the next round)
            if isinstance(value, dict):
                return {k: v if k in _KEPT else text(v) for k, v in value.items()}
            return [text(v) for v in value] if isinstance(value, list) else value

        plain = subjects["fp16"].report.model_dump(mode="json", by_alias=True)
        failures = [
            {"subject": n, "reason": next(supply), "nodes": [n], "layers": [next(supply)]} for n in renamed
        ]
        report = type(subjects["fp16"].report).model_validate(
            {
                **{k: v if k in _KEPT else text(v) for k, v in plain.items()},
                "verdict": "failed",
                "checks": [
                    {
                        "name": n,
                        "status": "failed",
                        "promised": 99,
                        "kept": 0,
                        "failures": failures,
                        "note": next(supply),
                    }
                    for n in ("fp32_norm", "trunk_linear", next(supply))
                ],
                "layer_types": {f"{name}{i}": 1 for i, name in enumerate((*HOSTILE[:1], *names)[:2])},
            }
        )
        subject = Subject(report, subjects["fp16"].origin, build_map(model))
        pages = (render_page(subject), render_comparison(subject, subjects["fp8"]))
        skeletons.append([_skeleton(tree(page)) for page in pages])
        for page in pages:
            page.encode("utf-8")
            assert not [e for e in tree(page).iter() if any(a.startswith("on") for a in e.keys())]  # noqa: SIM118
    assert skeletons[0] == skeletons[1]


_KEPT = {
    *("schema", "verdict", "checks", "layer_types", "precision", "fidelity", "contract", "sha256", "backend"),
    *("conversion", "structures", "mha_precision", "gemm_by_precision", "precision_any", "builder"),
}
"""What a report's model or page fixes, or what the page reads numbers from."""


def _skeleton(root: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [(str(e.tag), tuple(sorted(e.keys()))) for e in root.iter()]


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("b", "<i>&\"'", title='"') == '<b title="&quot;">&lt;i&gt;&amp;&quot;&#x27;</b>'
    assert tag("p", tag("br"), ["a", None, "b"], hidden=True, class_=None) == "<p hidden><br>ab</p>"
    assert render("\x00\x1e\ud800ok\n") == "\ufffd\ufffd\ufffdok\n"
    assert tag("rect", x=1 / 3, width=1000) == '<rect x="0.33" width="1000"></rect>'


def test_a_type_that_nobody_knows_has_the_class_of_others() -> None:
    assert [type_class(t) for t in ("fp8", "int64", 'x" onload="')] == ["t-fp8", "t-other", "t-other"]


# --- colours -------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes, A physiologically-based model for simulation of color vision
# deficiency, 2009: severity 1, for linear RGB.
VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray[Any, Any]:
    """A colour in linear RGB (IEC 61966-2-1)."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """CIE L*a*b* under D65."""
    xyz = TO_XYZ @ rgb / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), xyz * 24389 / 27 / 116 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def colours() -> dict[str, str]:
    return dict(re.findall(r"\.t-(\w+) \{ background: (#[0-9a-f]{6});", STYLE))


@pytest.mark.parametrize("vision", VISION)
def test_types_differ_for_every_kind_of_vision(vision: str) -> None:
    """15 is more than six times the just noticeable difference of about 2.3."""
    seen = {name: lab(np.clip(VISION[vision] @ linear(c), 0, 1)) for name, c in colours().items()}
    assert len(seen) == 6
    closest = min(
        (float(np.linalg.norm(seen[a] - seen[b])), a, b) for a, b in itertools.combinations(seen, 2)
    )
    assert closest[0] > 15, closest


def test_the_black_text_on_types_can_be_read() -> None:
    """WCAG 2.2 asks for a contrast of 4.5."""
    for name, colour in colours().items():
        luminance = float(np.dot(linear(colour), TO_XYZ[1]))
        assert (luminance + 0.05) / 0.05 > 4.5, name


# --- in a browser ----------------------------------------------------------------------------------


def test_the_browser_has_nothing_to_say_and_asks_for_nothing(
    browser: Browser, subjects: Mapping[str, Subject]
) -> None:
    for name, page in pages_of(subjects).items():
        visit = browser.visit(page)
        assert (visit.console, visit.requests) == ((), ()), name
        assert "What was checked" in visit.dom or name == "comparison"


def test_the_policy_keeps_the_browser_from_asking(browser: Browser, subjects: Mapping[str, Subject]) -> None:
    """Were a name to become markup after all; and without the policy this test would see it."""
    image = '<main><img src="http://example.invalid/x.png"><script>document.title = "owned"</script>'
    page = render_page(subjects["fp16"]).replace("<main>", image)
    kept = browser.visit(page)
    assert kept.requests == ()
    assert len(kept.console) == 2  # the image and the script
    assert all("Content Security Policy" in line for line in kept.console)
    assert "<title>passed" in kept.dom
    freed = browser.visit(re.sub(r"<meta http-equiv[^>]*>", "", page))
    assert freed.requests == ("http://example.invalid/x.png",)
    assert "<title>owned" in freed.dom


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_fits_its_window(browser: Browser, subjects: Mapping[str, Subject], width: int) -> None:
    for page in (render_page(subjects["fp8"]), render_comparison(subjects["fp16"], subjects["fp8"])):
        wide, inner = browser.measure(page, width, "[document.documentElement.scrollWidth, innerWidth]")
        assert (wide, inner) == (width, width)


@pytest.mark.parametrize(("flags", "border"), [((), (0, 102, 75)), (("--force-dark-mode",), (63, 208, 165))])
@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_a_picture_in_light_and_dark(
    browser: Browser, subjects: Mapping[str, Subject], name: str, flags: tuple[str, ...], border: Any
) -> None:
    rows = pixels(browser.picture(render_page(subjects[name]), 390, 300, *flags))
    assert (len(rows[0]), len(rows)) == (390, 300)
    ground = (255, 255, 255) if not flags else (21, 24, 28)
    counts = Counter(pixel for row in rows for pixel in row)
    assert rows[0][0] == ground
    assert counts[border] > 8 * 100  # the verdict's border, 8 pixels wide
    assert counts[ground] < 390 * 300 * 0.9


def test_it_prints(browser: Browser, subjects: Mapping[str, Subject], tmp_path: Path) -> None:
    file = tmp_path / "page.pdf"
    browser.visit(render_page(subjects["fp8"]), f"--print-to-pdf={file}", "--no-pdf-header-footer")
    pages = len(re.findall(rb"/Type\s*/Page\b", file.read_bytes()))
    assert 2 <= pages <= 8


# --- the documentation -------------------------------------------------------------------------------


def test_the_documentations_commands_run(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "checkout")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    printed = run_blocks(shell_blocks(REPOSITORY / "docs" / "report.md"), folder, tmp_path)
    assert (folder / "out" / "sm_89" / "smoke" / "dit_fp16.report.html").exists()
    assert (folder / "smoke.html").exists()
    assert (folder / "both.html").exists()
    shown = re.findall(r"\n\n```\n(.*?)^```$", (REPOSITORY / "docs" / "report.md").read_text(), re.M | re.S)[
        0
    ]
    # The layer's name is TensorRT's, and numbered anew by each version.
    assert printed[-1].split()[:-1] == shown.split()[:-1]
