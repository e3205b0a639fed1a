"""What a build says on standard error, in lines for people and for machines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine_builder.cli.console import Screen
from engine_builder.compile.log import MessageLog
from engine_builder.errors import ResourceError
from engine_builder.events import Event
from tests.conftest import REPOSITORY
from tests.crash import Site


def lines(text: str) -> list[dict[str, Any]]:
    """Every line as an object, each with exactly the promised keys."""
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        assert list(line) == ["time", "level", "stage", "event", "fields"]
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    return found


def test_a_stage_from_start_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(log_format="json")
    screen.watch(Event("compile", "started", "not built before", {"key": "compile-1", "cached": False}))
    screen.watch(Event("compile", "progress", "Parsing ONNX, 1 s"))
    screen.watch(Event("compile", "note", "waiting"))
    screen.watch(Event("compile", "finished", "", {"seconds": 2.0, "cached": False}))
    screen.fail(ResourceError("full", where="/out", hint="free space"))
    told = [(line["level"], line["stage"], line["event"]) for line in lines(capsys.readouterr().err)]
    assert told == [
        ("info", "compile", "started"),
        ("info", "compile", "note"),
        ("info", "compile", "finished"),
        ("error", "", "failed"),
    ]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_long_stage_says_that_it_goes_on(capsys: pytest.CaptureFixture[str], log_format: Any) -> None:
    """Also a stage that says nothing itself, such as one long call into TensorRT."""
    screen = Screen(log_format=log_format, heartbeat_seconds=0.1)
    screen.watch(Event("convert", "started", "not built before"))
    time.sleep(0.35)
    screen.watch(Event("convert", "progress", "half"))
    time.sleep(0.25)
    screen.watch(Event("convert", "finished", "", {"seconds": 0.6, "cached": False}))
    capsys_text = capsys.readouterr().err
    time.sleep(0.3)
    assert capsys.readouterr().err == ""  # nothing after the end
    if log_format == "json":
        beats = [line["fields"] for line in lines(capsys_text) if line["event"] == "heartbeat"]
    else:
        beats = [
            {"seconds": float(line.split()[2]), "text": line}
            for line in capsys_text.splitlines()
            if " ... " in line
        ]
    assert len(beats) >= 2
    assert [beat["seconds"] for beat in beats] == sorted(beat["seconds"] for beat in beats)
    assert "half" in beats[-1]["text"]
    assert "half" not in beats[0]["text"]


def test_tensorrts_messages_keep_their_level(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(log_format="json")
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [screen.logging_handler()]
    root.setLevel(logging.DEBUG)
    try:
        screen.watch(Event("compile", "started"))
        messages = MessageLog()
        for severity in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
            messages.add(severity, f"a message of {severity}")
    finally:
        root.handlers[:], root.level = before, level
    told = [line for line in lines(capsys.readouterr().err) if line["event"] == "log"]
    assert [line["level"] for line in told] == ["critical", "error", "warning", "info", "debug"]
    assert {line["stage"] for line in told} == {"compile"}
    assert told[0]["fields"] == {
        "logger": "engine_builder.tensorrt",
        "message": "a message of INTERNAL_ERROR",
    }


def test_every_line_of_a_build_is_an_object(tmp_path: Path) -> None:
    site = Site(tmp_path)
    done = subprocess.run(site.command("--debug"), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = lines(done.stderr)
    stages = [line["stage"] for line in told if line["event"] == "finished"]
    assert stages == ["source", "convert", "fidelity", "compile", "verify"]
    trt = [line for line in told if line["fields"].get("logger") == "engine_builder.tensorrt"]
    assert {line["level"] for line in trt} >= {"info"}
    assert {line["stage"] for line in trt} == {"compile"}
    assert told[-1]["event"] == "done"
    assert told[-1]["fields"]["verdict"] == "passed"


def test_an_error_is_an_object_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "entrypoint.py", str(tmp_path / "none.yaml"), "--log-format", "json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    (told,) = lines(done.stderr)
    assert (told["level"], told["event"], told["fields"]["exit_code"]) == ("error", "failed", 2)
