"""The documentation: its links lead somewhere, its reference is the program's own, its commands run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from engine_builder.recipe_reference import recipe_reference
from engine_builder.sample import SampleSpec, Size, Spelling, write_sample
from tests.conftest import REPOSITORY
from tests.pages import checkout, run_blocks, shell_blocks

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_to_a_file_or_heading(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert "://" not in target, f"{target}: the documentation is read without a network"
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)\)", (REPOSITORY / "README.md").read_text()))
    assert {f"docs/{p.name}" for p in PAGES if p.parent.name == "docs"} <= linked


def test_the_recipe_reference_is_the_schema_s() -> None:
    assert (REPOSITORY / "docs" / "recipe.md").read_text() == recipe_reference(), "make docs writes it anew"


def test_the_readme_s_commands_build_a_verified_engine_from_an_own_model(tmp_path: Path) -> None:
    first, own = shell_blocks(REPOSITORY / "README.md")[:2]
    assert [line.split()[:2] for line in first.splitlines()] == [["make", "smoke"], ["make", "test"]]
    commands = own.splitlines()
    assert len(commands) <= 5
    # The environment is this one; `make smoke` proves the target that makes it.
    assert commands[0] == "make venv"
    folder = checkout(tmp_path / "checkout")
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    write_sample(SampleSpec(Size.TINY, Spelling.DYNAMO20), folder / "dit.onnx")
    run_blocks(["\n".join(commands[1:])], folder, tmp_path)
    report = json.loads((folder / "out" / "sm_89" / "dit" / "dit_fp16.verify.json").read_text())
    assert report["verdict"] == "passed"
    assert (folder / "out" / "sm_89" / "dit" / "dit_fp16.trt").exists()
