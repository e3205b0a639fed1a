"""What a build looks like on a terminal, in a file, in a narrow window, without colours, and when quiet."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine_builder.cli.outcomes import block, overview, summary
from engine_builder.cli.shown_path import plain_path, shown_path
from engine_builder.pipeline import Outcome
from engine_builder.publish import output_paths
from tests.conftest import REPOSITORY

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-7]|9[0-7]|4[0-7])(?:;[0-9]+)*m")
MARKUP = re.compile(r"\[/?(?:dim|bold[ a-z]*)\]")

SCREEN = """
import time
from engine_builder.cli.console import Screen
from engine_builder.events import Event
screen = Screen(quiet={quiet}, heartbeat_seconds=60)
screen.watch(Event("source", "started"))
screen.watch(Event("source", "finished", "1227 nodes", dict(seconds=0.1, cached=False)))
screen.watch(Event("compile", "started", "changed: precision"))
screen.watch(Event("compile", "progress", "Compiling kernels [layer 7]" + " and more" * 30))
time.sleep(1.4)
screen.watch(Event("compile", "finished", "changed: precision", dict(seconds=1.4, cached=False)))
screen.watch(Event("verify", "finished", "", dict(seconds=0.0, cached=True)))
"""


def in_terminal(code: str, columns: int = 80, **environment: str) -> str:
    """What a program writes to a terminal of ``columns`` columns, with its control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CI")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**plain, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 0.5)
        if ready:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not chunk:
                break
            written += chunk
        elif process.poll() is not None:
            break
    os.close(ours)
    assert process.wait(10) == 0, written
    return written.decode()


def drawn(written: str) -> list[str]:
    """Every line that was ever on the terminal, without control sequences."""
    return [line.strip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", written)) if line.strip()]


def test_a_stage_is_one_line_that_counts_its_seconds() -> None:
    written = in_terminal(SCREEN.format(quiet=False))
    lines = drawn(written)
    running = [line for line in lines if "Compiling kernels [layer 7]" in line]
    assert {re.search(r" ([0-9]+) s ", line)[1] for line in running} >= {"0", "1"}  # type: ignore[index]
    assert all(len(line) <= 80 for line in lines)
    assert all(line.endswith("…") for line in running)  # what does not fit is cut
    assert re.fullmatch(r"compile +1\.4 s  changed: precision", lines[-2])
    assert re.fullmatch(r"verify +cached", lines[-1])
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor is back


def test_colours_stay_away_when_nobody_wants_them() -> None:
    code = (
        "from engine_builder.cli.console import Screen; from engine_builder.errors import ResourceError;"
        "Screen().fail(ResourceError('full', hint='free space'))"
    )
    assert COLOUR.search(in_terminal(code))
    without = in_terminal(code, NO_COLOR="1")
    assert not COLOUR.search(without)
    assert drawn(without) == ["error: full (free space)"]


def test_a_dumb_terminal_and_a_pipe_get_plain_lines() -> None:
    code = SCREEN.format(quiet=False)
    plain = [
        "source         0.1 s  1227 nodes",
        "compile        1.4 s  changed: precision",
        "verify        cached",
    ]
    assert in_terminal(code, TERM="dumb").splitlines() == plain
    piped = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (piped.stdout, piped.stderr.splitlines()) == ("", plain)


def test_quiet_shows_errors_alone() -> None:
    assert in_terminal(SCREEN.format(quiet=True)) == ""
    code = (
        "from engine_builder.cli.console import Screen; from engine_builder.errors import ResourceError;"
        "Screen(quiet=True).fail(ResourceError('full'))"
    )
    assert drawn(in_terminal(code)) == ["error: full"]


def test_an_unforeseen_end_leaves_the_cursor() -> None:
    code = SCREEN.format(quiet=False).split("time.sleep")[0] + "time.sleep(0.5)"
    written = in_terminal(code)
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


# --- the closing lines -----------------------------------------------------------------------------


def outcome(folder: Path, verdict: str = "passed", sm: int = 89, **changes: Any) -> Outcome:
    paths = output_paths(folder, sm, "sa3-medium", "fp8", None)
    report: Mapping[str, Any] = {
        "label": f"sm_{sm}/sa3-medium/dit_fp8.trt",
        "verdict": verdict,
        "mha_precision": {"fp16": 96},
        "gemm_by_precision": {"fp16": 7, "fp32": 2, "fp8": 176},
        "total_layers": 919,
        "engine_file": {"file": "dit_fp8.trt", "sha256": "0" * 64, "bytes": 1_510_000_000},
        "fidelity": {"worst_cosine": 0.9968, "min_cosine": 0.99, "points": []},
        "information": {"execution": {"skipped": f"this machine has no GPU of sm_{sm}"}},
        **changes,
    }
    reasons = () if verdict == "passed" else ("fp8_linear: 221 of 222 kept; /a: its layer reads fp16 " * 3,)
    return Outcome(sm, paths, verdict, reasons, report, (), 133.0, rebuilt=True)


def lines_of(done: Outcome, width: int) -> list[str]:
    return [MARKUP.sub("", line) for line in block(done, width)]


def test_an_engine_in_a_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lines_of(outcome(tmp_path / "recipes" / ".." / "out"), 80) == [
        "passed  sm_89/sa3-medium/dit_fp8.trt",
        "  fidelity  worst cosine 0.996800, 0.99 asked",
        "  layers    919; GEMMs: 7 fp16, 2 fp32, 176 fp8; fused attention: 96 fp16",
        "  gpu       not run: this machine has no GPU of sm_89",
        "  engine    out/sm_89/sa3-medium/dit_fp8.trt  1510.0 MB",
        "  time      133.0 s",
    ]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_line_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    for done in (outcome(tmp_path), outcome(tmp_path, "failed")):
        lines = lines_of(done, width)
        assert all(len(line) <= width for line in lines if str(tmp_path) not in line)
        assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100
        if done.verdict == "failed":
            assert lines[0] == "failed  sm_89/sa3-medium/dit_fp8.trt"
            said = " ".join(" ".join(lines).split())
            assert done.reasons[0].strip() in said
            assert f"report {done.paths.report}" in said


def test_what_was_not_measured_is_not_shown(tmp_path: Path) -> None:
    done = outcome(tmp_path, "failed", fidelity=None, total_layers=None, engine_file=None, information={})
    labels = [line.split()[0] for line in lines_of(done, 200)]
    assert labels == ["failed", "reason", "report", "time"] or labels[:2] == ["failed", "reason"]
    assert not {"fidelity", "layers", "gpu", "engine"} & set(labels)
    assert summary(done)["page"] is None


def test_the_page_is_named_where_there_is_one(tmp_path: Path) -> None:
    done = outcome(tmp_path)
    done.paths.page.parent.mkdir(parents=True)
    done.paths.page.write_text("")
    assert f"  page      {done.paths.page}" in lines_of(done, 80)
    assert summary(done)["page"] == str(done.paths.page)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_several_engines_have_a_table(tmp_path: Path, width: int) -> None:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(overview([outcome(tmp_path), outcome(tmp_path, "failed", sm=120)]))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert all(len(line) <= width for line in lines)
    assert lines[0].split() == ["engine", "verdict", "worst", "cosine", "size", "time"]
    if width >= 80:
        assert [line.split()[:3] for line in lines[1:]] == [
            ["sm_89/sa3-medium/dit_fp8.trt", "passed", "0.996800"],
            ["sm_120/sa3-medium/dit_fp8.trt", "failed", "0.996800"],
        ]


# --- paths -----------------------------------------------------------------------------------------


def test_paths_are_shown_from_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "recipes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(Path("out/a.trt")) == "out/a.trt"
    assert shown_path(tmp_path / "here" / "recipes" / ".." / "out" / "a.trt") == "out/a.trt"
    assert shown_path(Path("recipes/../../there/a.trt")) == str(tmp_path / "there" / "a.trt")


def test_the_parent_of_a_link_is_not_where_its_name_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "recipes").mkdir(parents=True)
    (tmp_path / "far" / "out").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "recipes").symlink_to(tmp_path / "far" / "recipes")
    monkeypatch.chdir(tmp_path / "here")
    assert plain_path(Path("recipes/../out")) == tmp_path / "far" / "out"
    assert plain_path(Path("recipes/a.yaml")) == tmp_path / "here" / "recipes" / "a.yaml"


# --- completion --------------------------------------------------------------------------------------


def completions(*words: str) -> list[str]:
    environment = {
        **os.environ,
        "_SA3_BUILDER_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("sa3-builder", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "entrypoint.py"], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_commands_options_and_the_default_commands_options_are_completed() -> None:
    assert {"build", "explain", "report"} <= set(completions(""))
    assert completions("expl") == ["explain"]
    assert completions("report", "--comp") == ["--compare"]
    assert completions("recipes/smoke.yaml", "--allow") == ["--allow-plugins"]
    # No command begins so; the shell completes file names where nothing is offered.
    assert completions("recipes/sm") == []


def test_the_script_for_the_shell_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "entrypoint.py", "--show-completion", "bash"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "complete -o default -F _sa3_builder_completion sa3-builder" in done.stdout
