"""Runs the commands of a documentation page, as its reader would type them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.namespaces import REPOSITORY


def shell_blocks(page: Path) -> list[str]:
    """The page's ``sh`` blocks, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def checkout(folder: Path) -> Path:
    """A checkout to work in, whose smoke recipe is swept at one point only."""
    folder.mkdir()
    for name in ("entrypoint.py", "engine_builder", "verify", "docs", "README.md"):
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "recipes", folder / "recipes")
    smoke = folder / "recipes/smoke.yaml"
    text, changes = re.subn(r"fidelity: \{.*\}", "fidelity: {lengths: [64], t: [0.5]}", smoke.read_text())
    assert changes == 1
    smoke.write_text(text)
    return folder


def run_blocks(blocks: list[str], folder: Path, tools: Path) -> list[str]:
    """Runs the blocks in one shell that stops at the first failure; returns what each printed.

    ``tools`` is the first folder of the path.
    """
    mark = "--- end of block ---"
    script = "set -euo pipefail\n" + "".join(f"{block}\necho '{mark}'\n" for block in blocks)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }
    result = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    *printed, rest = result.stdout.split(f"{mark}\n")
    assert result.returncode == 0, f"in block {len(printed) + 1}: {rest}{result.stderr[-4000:]}"
    return printed
