"""No false alarm: every good graph in every precision for two architectures, over the whole sweep.

    python benchmarks/matrix.py                        # everything, into benchmarks/results/matrix.{md,json}
    python benchmarks/matrix.py --keep /tmp/matrix     # results of stages are kept there, and taken up again
    python benchmarks/matrix.py --only s_dynamo20_sm --lengths 64

Graphs are the real exports in ../shared/models, where that folder is, and a sample in each spelling
with each kind of attention.  fp8 is built twice: with every linear that it selects, and with
``min_cosine: 0.999``, which leaves out the costliest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.workshop import PROFILES, measured_scales  # noqa: E402
from engine_builder.errors import BuilderError  # noqa: E402
from engine_builder.pipeline import build  # noqa: E402
from engine_builder.recipe import load_recipe  # noqa: E402
from engine_builder.sample import SampleSpec, Size, Spelling, write_sample  # noqa: E402
from engine_builder.source import open_source  # noqa: E402
from engine_builder.stage_runner import Settings  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results"
SHARED = REPOSITORY.parent / "shared" / "models"
ARCHITECTURES: Final = (89, 120)

PRECISIONS: Final[Mapping[str, tuple[dict[str, Any], float]]] = {
    "fp32": ({"recipe": "fp32"}, 0.999999),
    "fp16": ({"recipe": "fp16"}, 0.99999),
    "bf16": ({"recipe": "bf16"}, 0.9999),
    "fp8": ({"recipe": "fp8"}, 0.99),
    "fp8 0.999": ({"recipe": "fp8", "min_cosine": 0.999}, 0.999),
}
"""What is asked of each precision, and the least cosine that it must reach."""


@dataclass(frozen=True)
class Row:
    """One engine of the table."""

    graph: str
    precision: str
    sm: int
    verdict: str
    worst_cosine: float | None
    attention: Mapping[str, int]
    gemms: Mapping[str, int]
    layers: int | None
    fp8_linears: str
    """Linears that run in fp8, of those that fp8 would select."""
    reasons: tuple[str, ...]


def graphs(folder: Path) -> dict[str, Path]:
    """The good graphs by name: real exports, then samples, which are written to ``folder``."""
    found = {path.stem: path for path in sorted(SHARED.glob("*.onnx"))}
    for spelling in Spelling:
        for differential in (False, True):
            name = f"s_{spelling.value}_{'md' if differential else 'sm'}"
            path = folder / f"{name}.onnx"
            if not path.exists():
                write_sample(SampleSpec(Size.TINY, spelling, differential), path)
            found[name] = path
    return found


def rows(
    name: str, onnx: Path, precision: str, folder: Path, lengths: Sequence[int], t: Sequence[float]
) -> Iterator[Row]:
    """Builds one graph in one precision for both architectures."""
    options, threshold = PRECISIONS[precision]
    options = dict(options)
    if options["recipe"] == "fp8":
        scales = folder / f"{name}.scales.json"
        if not scales.exists():
            measured_scales(open_source(onnx), scales)
        options["scales"] = str(scales)
    recipe = {
        "schema": "sa3-builder/1",
        "model": {"name": name, "onnx": str(onnx)},
        "precision": options,
        "profiles": [
            {key: [list(s) for s in (r.min, r.opt, r.max)] for key, r in PROFILES[0].shapes.items()}
        ],
        "target": {"backend": "tensorrt_rtx", "sm": list(ARCHITECTURES)},
        "verify": {"fidelity": {"lengths": list(lengths), "t": list(t), "min_cosine": threshold}},
        "output": {"dir": str(folder / "out" / precision.replace(" ", "_"))},
    }
    path = folder / f"{name}.{precision.replace(' ', '_')}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    try:
        outcomes = build(load_recipe(path), Settings(folder / "cache"))
    except BuilderError as error:
        for sm in ARCHITECTURES:
            yield Row(name, precision, sm, f"error {error.exit_code}", None, {}, {}, None, "", (str(error),))
        return
    for outcome in outcomes:
        report = outcome.report
        fidelity, fp8 = report["fidelity"] or {}, report["conversion"].get("fp8")
        kept = ""
        if fp8 is not None:
            costly = sum("min_cosine" in reason for reason in fp8["trunk_linears"].values())
            kept = f"{len(fp8['linears'])}/{len(fp8['linears']) + costly}"
        yield Row(
            graph=name,
            precision=precision,
            sm=outcome.sm,
            verdict=outcome.verdict,
            worst_cosine=fidelity.get("worst_cosine"),
            attention=report["mha_precision"] or {},
            gemms=report["gemm_by_precision"] or {},
            layers=report["total_layers"],
            fp8_linears=kept,
            reasons=outcome.reasons,
        )


def as_markdown(table: Sequence[Row], lengths: Sequence[int], t: Sequence[float]) -> str:
    """The table for people."""
    lines = [
        f"Worst cosine against fp32 over L in {{{', '.join(map(str, lengths))}}} and t in "
        f"{{{', '.join(f'{x:g}' for x in t)}}}.",
        "",
        "| graph | precision | sm | verdict | worst cosine | attention | GEMMs | layers | fp8 linears |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        cosine = "" if row.worst_cosine is None else f"{row.worst_cosine:.7f}"
        layers = "" if row.layers is None else str(row.layers)
        counts = f"{_pairs(row.attention)} | {_pairs(row.gemms)} | {layers} | {row.fp8_linears}"
        lines.append(f"| {row.graph} | {row.precision} | {row.sm} | {row.verdict} | {cosine} | {counts} |")
    alarms = [row for row in table if row.verdict != "passed"]
    lines += ["", f"{len(table)} engines, {len(alarms)} false alarms."]
    lines += [f"- {r.graph} {r.precision} sm_{r.sm}: {'; '.join(r.reasons)}" for r in alarms]
    return "\n".join(lines) + "\n"


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


def main() -> int:
    """Builds what was asked for; 0 when every engine passed."""
    parser = argparse.ArgumentParser(description="Every good graph in every precision: no false alarm.")
    parser.add_argument("--only", action="append", default=[], help="only this graph (may be repeated)")
    parser.add_argument("--precision", action="append", default=[], choices=list(PRECISIONS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1292, 4092])
    parser.add_argument("--t", type=float, nargs="+", default=[1.0, 0.5, 0.02])
    parser.add_argument("--keep", type=Path, help="keep graphs and results of stages in this folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    table: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sa3-matrix-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = graphs(folder)
        unknown = set(options.only) - set(found)
        if unknown:
            parser.error(f"no such graph: {', '.join(sorted(unknown))}")
        for precision in options.precision or PRECISIONS:
            for name, onnx in found.items():
                if options.only and name not in options.only:
                    continue
                for row in rows(name, onnx, precision, folder, options.lengths, options.t):
                    table.append(row)
                    print(f"{row.verdict:<8} {name} {precision} sm_{row.sm}", file=sys.stderr, flush=True)
    text = as_markdown(table, options.lengths, options.t)
    print(text, end="")
    if not options.only and not options.precision:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "matrix.md").write_text(text)
        (options.out / "matrix.json").write_text(json.dumps([asdict(r) for r in table], indent=1) + "\n")
    return 0 if all(row.verdict == "passed" for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
