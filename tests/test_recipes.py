"""The recipes that ship: each loads, says what its name says, and its schema is the published one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from engine_builder.recipe import load_recipe, recipe_schema
from tests.conftest import REPOSITORY

RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
UPSTREAM = [
    f"{model}_{precision}"
    for model in ("sa3-sm-music", "sa3-sm-sfx", "sa3-m")
    for precision in ("fp32", "fp16", "bf16", "fp8")
]


def test_every_upstream_model_has_every_precision() -> None:
    assert {*UPSTREAM, "smoke", "template_text_encoder", "template_autoencoder"} == {p.stem for p in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_loads_and_satisfies_the_published_schema(path: Path) -> None:
    recipe = load_recipe(path)
    schema = json.loads((path.parent / "schema" / "recipe.schema.json").read_text())
    Draft202012Validator(schema).validate(yaml.safe_load(path.read_text()))
    if path.stem in UPSTREAM:
        model, _, precision = path.stem.rpartition("_")
        assert (recipe.model.name, recipe.precision.recipe) == (model, precision)
        # The profile and the names that SA3's runtime relies on.
        assert recipe.profiles[0]["x"].max == (1, 256, 4096)
        assert recipe.fidelity_lengths() == (64, 1292, 4092)
        assert recipe.output.name is None


def test_the_published_schema_is_the_program_s_own() -> None:
    published = REPOSITORY / "recipes" / "schema" / "recipe.schema.json"
    assert json.loads(published.read_text()) == recipe_schema(), "make schema writes it anew"
