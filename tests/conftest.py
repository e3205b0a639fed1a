"""Fixtures that several test files use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.workshop import Workshop

REPOSITORY = Path(__file__).parent.parent
TINY_MODELS = ("sm_torchscript17", "md_torchscript17", "sm_dynamo20", "sm_dynamo23")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real graphs and layer dumps beside the repository."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        reason = "the folder of shared test material, ../shared, is absent"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def tiny_models(shared: Path) -> Mapping[str, Path]:
    """The four real exports of the tiny DiT (embed 128, 2 layers) by name."""
    return {name: shared / "models" / f"{name}.onnx" for name in TINY_MODELS}


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Good conversions and engines of one sample model, made when a test first asks for them."""
    from benchmarks.workshop import Workshop

    return Workshop(tmp_path_factory.mktemp("workshop"))
