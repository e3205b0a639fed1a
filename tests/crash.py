"""Kills builds at random moments and looks at what they leave.

``python -m tests.crash --kills 200`` is what ``make crash`` runs; the test suite kills a dozen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_builder.manifest import Manifest

REPOSITORY = Path(__file__).parent.parent
MARK = "SA3_CRASH_TEST"
STAGES = ("start", "source", "convert", "fidelity", "compile", "verify", "publish")
"""Where a build is killed: before its first stage, in each stage, and after the last."""

RECIPE = """\
schema: sa3-builder/1
model: {name: crash, sample: {size: tiny, spelling: torchscript17, seed: 0}}
precision: fp16
profiles:
  - {x: [[1, 256, 1], [1, 256, 8], [1, 256, 64]], local_add_cond: [[1, 257, 1], [1, 257, 8], [1, 257, 64]]}
target: {backend: tensorrt_rtx, sm: 89}
verify: {fidelity: {lengths: [8], t: [1.0], min_cosine: 0.9999}}
output: {dir: out}
"""


@dataclass
class Outcome:
    """What one run did: its exit code, the stages that it finished, and the last one that it began."""

    code: int
    finished: list[str] = field(default_factory=list)
    began: str = "start"
    error: str = ""


@dataclass(frozen=True)
class Reference:
    """An undisturbed build: seconds of each stage, and what every later one must give again.

    The converted model is the same to the byte.  The engine is not: even without a GPU, TensorRT-RTX 1.7.1
    numbers a handful of things in one of two orders (7 of 9.6 million bytes, in one build of four, measured),
    so that engines are compared by size and by all that is verified of them.
    """

    seconds: Mapping[str, float]
    engine_bytes: int
    figures: Mapping[str, Any]
    converted: tuple[str, ...]


class Site:
    """A folder with a recipe, its output and its cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.cache = folder / "cache"
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE)
        self.engine = self.out / "sm_89" / "crash" / "dit_fp16.trt"
        self.mark = uuid.uuid4().hex

    def command(self, *options: str) -> list[str]:
        build = [sys.executable, "entrypoint.py", str(self.recipe), "--cache", str(self.cache)]
        return [*build, "--log-format", "json", *options]

    def run(self, kill: tuple[str, float] | None = None, number: int = signal.SIGKILL) -> Outcome:
        """Builds, and sends signal ``number`` so many seconds after the stage in ``kill`` has begun."""
        process = subprocess.Popen(
            self.command(),
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self.mark},
        )
        assert process.stderr is not None
        outcome = Outcome(0)
        timer: threading.Timer | None = None
        if kill is not None and kill[0] == "start":
            timer = _strike(process, kill[1], number)
        for line in process.stderr:
            if not line.startswith("{"):
                outcome.error += line
                continue
            event = json.loads(line)
            stage = event["stage"]
            if event["event"] == "failed":
                outcome.error += str(event["fields"]["message"])
            elif event["event"] == "started":
                outcome.began = stage
            elif event["event"] == "finished":
                outcome.finished.append(stage)
                if stage == "verify":
                    outcome.began = "publish"
            if kill is not None and timer is None and outcome.began == kill[0]:
                timer = _strike(process, kill[1], number)
        outcome.code = process.wait()
        if timer is not None:
            timer.cancel()
        return outcome

    def survivors(self) -> list[int]:
        """Processes of earlier runs that still live, once the kernel has had a moment to end them."""
        deadline = time.monotonic() + 5
        while True:
            found = list(_marked(self.mark))
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def check_visible(self) -> None:
        """Nothing under a final name may be half-written, or beside what belongs to another engine."""
        report = self.engine.with_name("dit_fp16.verify.json")
        manifest_path = self.engine.with_name("dit_fp16.manifest.json")
        for path in (report, manifest_path):
            if path.exists():
                json.loads(path.read_text())
        if self.engine.exists():
            manifest = Manifest.model_validate_json(manifest_path.read_text())
            assert sha256(self.engine) == manifest.engine.sha256
            assert sha256(report) == manifest.report.sha256
        for entry in self.cache.glob("[!.]*/entry.json"):
            for name, file in json.loads(entry.read_text()).get("files", {}).items():
                assert sha256(entry.parent / name) == file["sha256"], f"{entry.parent / name} is damaged"

    def check_finished(self, outcome: Outcome, reference: Reference | None) -> Manifest:
        """An undisturbed run after any number of kills: proven, the same engine, and nothing left over."""
        assert outcome.code == 0, outcome.error
        self.check_visible()
        manifest = Manifest.model_validate_json(self.engine.with_name("dit_fp16.manifest.json").read_text())
        assert self.figures()["verdict"] == "passed"
        if reference is not None:
            assert manifest.engine.bytes == reference.engine_bytes
            assert self.figures() == reference.figures
            assert tuple(file.sha256 for file in manifest.converted) == reference.converted
        left = [p for folder in (self.out, self.cache) for p in folder.rglob("*") if ".partial" in p.name]
        assert left == []
        return manifest

    def figures(self) -> dict[str, Any]:
        """What is verified of the engine."""
        report = json.loads(self.engine.with_name("dit_fp16.verify.json").read_text())
        names = ("verdict", "mha_precision", "gemm_by_precision", "total_layers", "fidelity")
        return {name: report[name] for name in names}

    def reference(self) -> Reference:
        """An undisturbed build, from nothing."""
        outcome = self.run()
        manifest = self.check_finished(outcome, None)
        seconds = {stage.name: stage.seconds for stage in manifest.stages}
        return Reference(
            # What precedes the first stage, the model's source and publishing are not in the manifest.
            {"start": 1.0, "source": 0.5, "publish": 0.1, **seconds},
            manifest.engine.bytes,
            self.figures(),
            tuple(file.sha256 for file in manifest.converted),
        )


def _strike(process: subprocess.Popen[str], delay: float, number: int) -> threading.Timer:
    timer = threading.Timer(delay, process.send_signal, (number,))
    timer.start()
    return timer


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)
            except OSError:
                continue  # it ended while we looked, or is not ours


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Tally:
    """How many kills hit in which stage, and how many undisturbed runs were right after them."""

    kills: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    missed: int = 0

    def __str__(self) -> str:
        where = ", ".join(f"{self.kills[stage]} in {stage}" for stage in STAGES if self.kills[stage])
        return (
            f"{self.kills.total()} kills ({where}); {self.missed} came after the end of a run; "
            f"{self.completed} undisturbed runs after them, every one right"
        )


def campaign(folder: Path, kills: int, seed: int, *, talk: bool = False) -> Tally:
    """Kills ``kills`` builds, spread over all stages, and lets one in three or so run to its end."""
    site = Site(folder)
    reference = site.reference()
    shutil.rmtree(site.cache)
    shutil.rmtree(site.out)
    draw = random.Random(seed)
    tally = Tally()
    while tally.kills.total() < kills:
        for _ in range(draw.randint(1, 4)):
            # The stage that was hit least so far, so that a dozen kills reach every one.
            stage = min(STAGES, key=lambda name: (tally.kills[name], draw.random()))
            outcome = site.run((stage, draw.uniform(0, reference.seconds[stage])))
            if outcome.code == -signal.SIGKILL:
                tally.kills[outcome.began] += 1
            else:
                assert outcome.code == 0, outcome.error
                tally.missed += 1
            assert site.survivors() == []
            site.check_visible()
            if talk and tally.kills.total() % 10 == 0:
                print(tally, flush=True)  # noqa: T201
            if tally.kills.total() == kills:
                break
        site.check_finished(site.run(), reference)
        tally.completed += 1
        for path in draw.choice(((site.out,), (site.cache,), (site.out, site.cache))):
            shutil.rmtree(path)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(campaign(Path(folder), options.kills, options.seed, talk=True))  # noqa: T201


if __name__ == "__main__":
    main()
