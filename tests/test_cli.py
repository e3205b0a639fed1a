"""The command line itself: its help, its version, and what is neither a command nor a recipe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from engine_builder import __version__
from engine_builder.cli.app import app
from tests.conftest import REPOSITORY


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}".strip(), command


def test_no_help_text_has_brackets_which_the_markup_would_swallow() -> None:
    found = dict(commands(typer.main.get_command(app)))
    assert {"build", "bundle make"} <= set(found)
    texts = [(n, p.name, getattr(p, "help", None) or "") for n, c in found.items() for p in c.params]
    assert not [text for text in texts if "[" in text[2]]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("buld", "No such command or recipe 'buld'. Did you mean build?"),
        ("nothing-like-it", "No such command or recipe 'nothing-like-it'."),
    ],
)
def test_a_misspelt_command_is_named(word: str, message: str) -> None:
    done = CliRunner().invoke(app, [word, "x.yaml"])
    assert done.exit_code == 2
    assert message in done.output


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"sa3-builder {__version__}\n"


def test_a_python_without_the_requirements_leads_to_make_venv() -> None:
    # -S leaves the environment's packages out.
    script = str(REPOSITORY / "entrypoint.py")
    done = subprocess.run([sys.executable, "-S", script, "r.yaml"], capture_output=True, text=True)
    assert done.returncode == 3
    hint = "make venv, then .venv/bin/python entrypoint.py"
    assert done.stderr == f"error: {sys.executable}: has no module typer ({hint})\n"
