"""Recipes for tests: the shortest text that builds, with what a test wants changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PROFILES = [
    {
        "x": [[1, 256, 1], [1, 256, 1292], [1, 256, 4096]],
        "local_add_cond": [[1, 257, 1], [1, 257, 1292], [1, 257, 4096]],
    }
]


def write_recipe(folder: Path, name: str = "recipe.yaml", **changes: Any) -> Path:
    """A recipe in ``folder`` for an SA3 DiT on TensorRT-RTX; ``changes`` replace whole sections."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe: dict[str, Any] = {
        "schema": "sa3-builder/1",
        "model": {"name": "dit", "sample": {"size": "tiny", "spelling": "dynamo20", "seed": 0}},
        "precision": "fp16",
        "profiles": PROFILES,
        "target": {"backend": "tensorrt_rtx", "sm": 89},
        "verify": {"fidelity": {"lengths": [64], "t": [1.0], "min_cosine": 0.9999}},
        "output": {"dir": "out"},
    }
    recipe.update(changes)
    path = folder / name
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path
