"""Converters side by side on one graph: time, memory, fidelity, fused attention, engine layers.

    python benchmarks/precision.py                 # the small sample, 1.8 GB
    python benchmarks/precision.py --size medium   # 5.8 GB
    python benchmarks/precision.py --model dit.onnx --fp8

Every converter runs in a process of its own.  ModelOpt's run in the calibration environment
(``make calibrate-env``, or SA3_BUILDER_CALIBRATE_PYTHON); without it they are left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from engine_builder.compile.backend import BuildOptions, CompileRequest  # noqa: E402
from engine_builder.compile.isolated import compile_engine  # noqa: E402
from engine_builder.errors import BuilderError  # noqa: E402
from engine_builder.recipe import Profile, ShapeRange  # noqa: E402
from engine_builder.sample import SampleSpec, Size, Spelling, write_sample  # noqa: E402
from verify.counts import count_layers  # noqa: E402
from verify.fidelity import sweep  # noqa: E402

CONTENDERS = REPOSITORY / "benchmarks" / "contenders"


@dataclass(frozen=True)
class Contender:
    """A converter: its name in the table, and the program with its arguments after source and result."""

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    modelopt: bool = False
    compiled: bool = True


@dataclass
class Row:
    """What was measured of one contender; a figure that could not be had is None, ``note`` says why."""

    name: str
    seconds: float | None = None
    peak_mb: float | None = None
    output_mb: float | None = None
    worst_cosine: dict[int, float] = field(default_factory=dict)
    attention: dict[str, int] = field(default_factory=dict)
    gemms: dict[str, int] = field(default_factory=dict)
    layers: int | None = None
    kernels: int | None = None
    engine_mb: float | None = None
    compile_seconds: float | None = None
    note: str = ""


def contenders(scales: Path | None, data: Path | None) -> list[Contender]:
    def ours(**options: Any) -> tuple[str, ...]:
        return (json.dumps(options),)

    found = [
        Contender("onnx-ir load + save (floor)", "load_and_save.py", compiled=False),
        Contender("ours fp16", "ours.py", ours(recipe="fp16", trunk="fp16")),
        Contender("ours fp16, baked", "ours.py", ours(recipe="fp16", trunk="fp16", rotary="baked")),
        Contender(
            "ours fp16, baked, minimal islands",
            "ours.py",
            ours(recipe="fp16", trunk="fp16", rotary="baked", islands="minimal"),
        ),
        Contender("ours bf16", "ours.py", ours(recipe="bf16", trunk="bf16", rotary="baked")),
        Contender("AutoCast fp16", "autocast.py", ("fp16",), modelopt=True),
        Contender("AutoCast bf16", "autocast.py", ("bf16",), modelopt=True),
    ]
    if scales is not None and data is not None:
        found += [
            Contender(
                "ours fp8",
                "ours.py",
                ours(recipe="fp8", trunk="fp16", scales=str(scales), fp8={"weights": "per_tensor"}),
            ),
            Contender("ModelOpt fp8, fp16 trunk", "modelopt_fp8.py", ("fp16", str(data)), modelopt=True),
            Contender("ModelOpt fp8, fp32 trunk", "modelopt_fp8.py", ("fp32", str(data)), modelopt=True),
        ]
    return found


def calibration_python() -> str | None:
    """The Python that has ModelOpt, if there is one."""
    named = os.environ.get("SA3_BUILDER_CALIBRATE_PYTHON")
    local = REPOSITORY / ".venv-calibrate" / "bin" / "python"
    return named or (str(local) if local.exists() else None)


def run_measured(python: str, program: Path, *arguments: str) -> tuple[float, float]:
    """Seconds and peak resident MB of a Python program.

    Raises:
        RuntimeError: It failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        peak = Path(folder) / "peak"
        command = [python, str(CONTENDERS / "measured.py"), str(peak), str(program), *arguments]
        started = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
        seconds = time.monotonic() - started
        if done.returncode:
            tail = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise RuntimeError(f"exit code {done.returncode}: {tail[0][:200] if tail else ''}")
        return seconds, int(peak.read_text()) / 1024


def measure(contender: Contender, source: Path, folder: Path, arguments: argparse.Namespace) -> Row:
    row = Row(contender.name)
    python = calibration_python() if contender.modelopt else sys.executable
    if python is None:
        row.note = "ModelOpt is not installed: make calibrate-env"
        return row
    result = folder / "model.onnx"
    try:
        row.seconds, row.peak_mb = run_measured(
            python, CONTENDERS / contender.program, str(source), str(result), *contender.arguments
        )
        row.output_mb = sum(f.stat().st_size for f in folder.iterdir()) / 1e6
        if not contender.compiled:
            return row
        if arguments.lengths:
            report = sweep(source, result, lengths=arguments.lengths, t=arguments.t, min_cosine=0.0)
            for length in arguments.lengths:
                row.worst_cosine[length] = min(p.score for p in report.points if p.length == length)
        profile = Profile(
            {
                name: ShapeRange((1, width, 1), (1, width, 1292), (1, width, 4096))
                for name, width in (("x", 256), ("local_add_cond", 257))
            }
        )
        engine = compile_engine(
            "tensorrt_rtx",
            CompileRequest(result, folder / "engine.trt", arguments.sm, BuildOptions(16 << 30), (profile,)),
        )
        counts = count_layers(engine.layers)
        row.attention, row.gemms = dict(counts.fused_attention), dict(counts.gemms)
        row.layers = counts.layers
        row.kernels = counts.layers - sum(
            counts.by_layer_type.get(kind, 0)
            for kind in ("signal", "wait", "shape_call", "ShapeHostToDevice")
        )
        row.engine_mb, row.compile_seconds = engine.plan.size / 1e6, engine.plan.seconds
    except (RuntimeError, BuilderError) as error:
        row.note = str(error)[:200]
    return row


def table(rows: Sequence[Row], lengths: Sequence[int]) -> str:
    """The rows as a Markdown table."""
    heads = ["converter", "time s", "peak MB", "output MB"]
    heads += [f"worst cosine L={n}" for n in lengths]
    heads += ["fused attention", "GEMMs", "layers", "kernels", "engine MB", "note"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]

    def number(value: float | None, spec: str) -> str:
        return "" if value is None else format(value, spec)

    def pairs(counts: dict[str, int]) -> str:
        return ", ".join(f"{n} {k}" for k, n in counts.items())

    for r in rows:
        cells = [r.name, number(r.seconds, ".1f"), number(r.peak_mb, ".0f"), number(r.output_mb, ".0f")]
        cells += [number(r.worst_cosine.get(n), ".6f") for n in lengths]
        cells += [pairs(r.attention), pairs(r.gemms), number(r.layers, "d"), number(r.kernels, "d")]
        cells += [number(r.engine_mb, ".1f"), r.note]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an fp32 DiT; by default a sample is written")
    parser.add_argument("--size", choices=["tiny", "small", "medium"], default="small")
    parser.add_argument("--spelling", default="torchscript17")
    parser.add_argument(
        "--lengths", type=lambda s: [int(n) for n in s.split(",") if n], default=[64, 1292, 4092]
    )
    parser.add_argument("--t", type=lambda s: [float(n) for n in s.split(",")], default=[1.0, 0.5, 0.02])
    parser.add_argument("--sm", type=int, default=89)
    parser.add_argument("--fp8", action="store_true", help="also the fp8 converters; needs ModelOpt")
    parser.add_argument("--only", help="run only the contenders whose name contains this")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sa3-bench-") as scratch:
        work = Path(scratch)
        source = arguments.model
        if source is None:
            spec = SampleSpec(Size(arguments.size), Spelling(arguments.spelling))
            source = write_sample(spec, work / "source" / "dit.onnx")
        scales = data = None
        if arguments.fp8:
            scales, data = _calibrate(source, work)
        rows = []
        for number, contender in enumerate(contenders(scales, data)):
            if arguments.only and arguments.only not in contender.name:
                continue
            folder = work / f"{number}"
            folder.mkdir()
            rows.append(measure(contender, source, folder, arguments))
            sys.stderr.write(f"{json.dumps(asdict(rows[-1]))}\n")
            for file in folder.iterdir():
                file.unlink()
    label = arguments.model.stem if arguments.model else f"{arguments.size}_{arguments.spelling}"
    text = table(rows, arguments.lengths)
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "sm": arguments.sm}
    document = {"model": label, "machine": machine, "rows": [asdict(r) for r in rows]}
    (arguments.out / f"{label}.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / f"{label}.md").write_text(f"# {label}, sm_{arguments.sm}\n\n{text}\n")
    sys.stdout.write(text + "\n")


def _calibrate(source: Path, work: Path) -> tuple[Path, Path]:
    """A scales file for ``source``, and one drawn set of inputs for ModelOpt's own run."""
    import numpy as np
    import yaml

    from verify.fidelity import plan_samples

    recipe = {
        "schema": "sa3-builder/1",
        "model": {"name": "bench", "onnx": str(source.resolve())},
        "precision": {"recipe": "fp8", "scales": "scales.json"},
        "profiles": [
            {
                "x": [[1, 256, 1], [1, 256, 1292], [1, 256, 4096]],
                "local_add_cond": [[1, 257, 1], [1, 257, 1292], [1, 257, 4096]],
            }
        ],
        "target": {"backend": "tensorrt_rtx", "sm": 89},
        "output": {"dir": "out"},
    }
    path = work / "bench.yaml"
    path.write_text(yaml.safe_dump(recipe))
    scales, data = work / "scales.json", work / "calibration.npz"
    command = [
        sys.executable,
        str(REPOSITORY / "entrypoint.py"),
        "calibrate",
        str(path),
        "--out",
        str(scales),
    ]
    subprocess.run(command, check=True)
    (sample,) = plan_samples(source, lengths=[256], t=[0.5])
    arrays: dict[str, Any] = dict(sample.load())
    np.savez(data, **arrays)
    return scales, data


if __name__ == "__main__":
    main()
