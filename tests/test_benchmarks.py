"""The benchmark program runs and its figures are those of what it ran; nothing about time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import REPOSITORY


def test_a_run_on_a_real_export_fills_its_table(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    command = [
        sys.executable,
        str(REPOSITORY / "benchmarks" / "precision.py"),
        "--model",
        str(tiny_models["sm_dynamo20"]),
        "--only",
        "minimal",
        "--lengths",
        "64",
        "--t",
        "1.0",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "sm_dynamo20.json").read_text())["rows"]
    assert row["note"] == ""
    assert row["attention"] == {"fp16": 4}
    assert row["worst_cosine"]["64"] >= 0.99999
    # The engine of the converted export, as the layer table lists it (docs/precision.md).
    assert row["layers"] == 88
    assert row["peak_mb"] > 50
    assert "ours fp16, baked, minimal islands" in (tmp_path / "sm_dynamo20.md").read_text()
