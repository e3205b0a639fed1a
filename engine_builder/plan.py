"""Which stages a recipe needs, and the content key of each one's result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_builder import __version__
from engine_builder.cache import Cache, content_key
from engine_builder.durable import write_durably
from engine_builder.precision.options import ConversionOptions
from engine_builder.recipe import Profile, Recipe


@dataclass(frozen=True)
class StagePlan:
    """One stage: what its result depends on, under which key it is kept, whether it is there."""

    name: str
    key: str
    ingredients: Mapping[str, Any]
    cached: bool
    scope: str
    reason: str
    """Why the result is at hand, or what changed since the last build so that it is not."""


def profile_ingredients(profiles: Sequence[Profile]) -> list[dict[str, list[list[int]]]]:
    return [
        {name: [list(r.min), list(r.opt), list(r.max)] for name, r in sorted(p.shapes.items())}
        for p in profiles
    ]


def conversion_ingredients(
    source_sha256: str,
    options: ConversionOptions,
    profiles: Sequence[Profile],
    passes: Mapping[str, int],
    scales_sha256: str | None,
) -> dict[str, Any]:
    """What a converted graph depends on.  Profiles matter only where tables are sized by them."""
    return {
        "source": source_sha256,
        "options": options.canonical(),
        "table lengths": profile_ingredients(profiles) if options.rotary == "baked" else None,
        "passes": dict(passes),
        "scales": scales_sha256,
        "sa3-builder": __version__,
    }


def fidelity_ingredients(
    recipe: Recipe, source_sha256: str, conversion_key: str, evaluator: int, data_sha256: str | None
) -> dict[str, Any]:
    """What a fidelity sweep depends on: not the threshold, which only judges it."""
    sweep = recipe.verify.fidelity
    assert sweep is not None
    return {
        "source": source_sha256,
        "conversion": conversion_key,
        "lengths": list(recipe.fidelity_lengths()),
        "t": list(sweep.t),
        "samples": sweep.samples,
        "seed": sweep.seed,
        "recorded inputs": data_sha256,
        "evaluator": evaluator,
    }


def compile_ingredients(
    recipe: Recipe,
    conversion_key: str,
    profiles: Sequence[Profile],
    sm: int,
    backend: str,
    version: str,
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """What an engine depends on; ``files`` are the hashes of what its build reads beside the model."""
    build = json.loads(recipe.canonical("build"))
    return {
        **({"files": list(files)} if files else {}),
        "conversion": conversion_key,
        "profiles": profile_ingredients(profiles),
        "sm": sm,
        "backend": backend,
        "backend version": version,
        "tf32": recipe.precision.tf32,
        "build": build,
        "sa3-builder": __version__,
    }


def plan_stage(
    cache: Cache, name: str, ingredients: Mapping[str, Any], history: History, scope: str
) -> StagePlan:
    """The stage with its key, and why its result is or is not at hand."""
    key = content_key(name, ingredients)
    cached = cache.find(key) is not None
    previous = history.recall(scope)
    if cached:
        reason = "nothing that it depends on changed"
    elif previous is None:
        reason = "not built before"
    else:
        changed = sorted(
            k for k in {*previous, *ingredients} if previous.get(k) != _plain(ingredients.get(k))
        )
        reason = f"changed: {', '.join(changed)}" if changed else "its result is gone from the cache"
    return StagePlan(name, key, ingredients, cached, scope, reason)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


class History:
    """What each stage of an output was last made from, so that a rebuild can say what changed.

    Only explanations depend on it: a missing or damaged history costs nothing else.
    """

    def __init__(self, root: Path) -> None:
        self._root = root / "history"

    def recall(self, scope: str) -> dict[str, Any] | None:
        try:
            value = json.loads(self._path(scope).read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def record(self, scope: str, ingredients: Mapping[str, Any]) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        write_durably(self._path(scope), json.dumps(_plain(ingredients), sort_keys=True).encode())

    def _path(self, scope: str) -> Path:
        return self._root / f"{content_key('scope', {'scope': scope})}.json"
