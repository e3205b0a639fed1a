"""The lock files: complete, hashed, consistent with each other, and tied to no index and no machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCKS = ["base", "build", "calibrate", "dev", "gpu", "lock", "rtx", "torch"]
PIN = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>[^ ;\\]+)(?P<rest>.*(?:\n    --hash=sha256:[0-9a-f]{64}.*)*)", re.M
)


def pins(lock: str) -> dict[str, str]:
    """Name to version, of every package of ``requirements/<lock>.txt``."""
    text = (REQUIREMENTS / f"{lock}.txt").read_text()
    return {match["name"]: match["version"] for match in PIN.finditer(text)}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_pinned_with_hashes(lock: str) -> None:
    text = (REQUIREMENTS / f"{lock}.txt").read_text()
    entries = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    found = list(PIN.finditer(text))
    assert len(entries) == len(found) > 0
    assert [match["name"] for match in found if "--hash=" not in match["rest"]] == []


@pytest.mark.parametrize("lock", [*LOCKS, "torch-cpu"])
def test_no_index_and_no_path_is_named(lock: str) -> None:
    text = (REQUIREMENTS / f"{lock}.txt").read_text()
    assert re.findall(r"https?://|file:|--(?:extra-)?index-url|--find-links|(?:^|\s)/\w+/", text) == []


@pytest.mark.parametrize(("smaller", "larger"), [("base", "gpu"), ("base", "rtx"), ("rtx", "dev")])
def test_a_larger_environment_contains_the_smaller_one(smaller: str, larger: str) -> None:
    assert pins(smaller).items() <= pins(larger).items()


def test_calibration_agrees_on_what_it_shares_with_torch_and_with_the_build_tools() -> None:
    calibrate, torch, build = pins("calibrate"), pins("torch"), pins("build")
    assert {name: torch[name] for name in calibrate.keys() & torch.keys()} == {
        name: calibrate[name] for name in calibrate.keys() & torch.keys()
    }
    assert calibrate["setuptools"] == build["setuptools"]


def test_one_version_of_torch_is_named_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(
        item for item in project["optional-dependencies"]["calibrate"] if item.startswith("torch==")
    )
    assert f"torch=={pins('torch')['torch']}" == wanted
    assert f"\n{wanted}+cpu\n" in (REQUIREMENTS / "torch-cpu.txt").read_text()


def test_what_needs_a_gpu_or_torch_stays_out_of_the_runtime() -> None:
    heavy = re.compile(r"torch|modelopt|cupy|cuda-|onnxruntime-gpu|triton")
    assert [name for name in pins("rtx") if heavy.search(name)] == []
    assert [name for name in pins("calibrate") if re.match(r"torch|cupy|cuda-|nvidia-c|triton", name)] == []
