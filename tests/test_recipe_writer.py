"""``init`` writes recipes that build unchanged; ``plan`` says what a build would do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from engine_builder.errors import RecipeError
from engine_builder.pipeline import build
from engine_builder.recipe import load_recipe
from engine_builder.recipe_writer import RecipeAnswers, dynamic_dimensions, is_dit, write_recipe_text
from engine_builder.source import TensorSpec
from engine_builder.stage_runner import Settings
from tests.conftest import REPOSITORY, TINY_MODELS
from tests.recipes import write_recipe

ENCODER = (
    TensorSpec("input_ids", "int64", ("batch", "tokens")),
    TensorSpec("on", "float32", (1, None, 8)),
)


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "entrypoint.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_recipe_for_a_real_export_has_the_standard_profile(
    tmp_path: Path, tiny_models: Mapping[str, Path], name: str
) -> None:
    done = command("init", str(tiny_models[name]), "--out", "r.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.model.kind == "sa3-dit"
    assert recipe.profiles[0]["x"].min == (1, 256, 1)
    assert recipe.profiles[0]["local_add_cond"].opt == (1, 257, 1292)
    assert recipe.profiles[0]["x"].max == (1, 256, 4096)
    assert recipe.model.onnx is not None
    assert recipe.model.onnx.samefile(tiny_models[name])


def test_a_written_recipe_builds_unchanged(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    done = command("init", str(tiny_models["sm_dynamo20"]), "--name", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (outcome,) = build(load_recipe(tmp_path / "mine.yaml"), Settings(tmp_path / "cache"))
    assert outcome.verdict == "passed", outcome.reasons
    assert (tmp_path / "out" / "sm_89" / "mine" / "dit_fp16.trt").exists()


def test_another_model_becomes_a_generic_recipe(tmp_path: Path) -> None:
    assert not is_dit(ENCODER)
    assert dynamic_dimensions(ENCODER) == ("batch", "tokens", "on[1]")
    answers = RecipeAnswers("enc", sm=120, ranges={"tokens": (1, 16, 77), "batch": (1, 1, 2)})
    text = write_recipe_text(tmp_path / "m.onnx", tmp_path / "r.yaml", ENCODER, answers)
    document = yaml.safe_load(text)
    assert document["model"] == {"name": "enc", "kind": "generic", "onnx": "m.onnx"}
    # "on" is a boolean in YAML 1.1 unless quoted.
    assert document["profiles"] == [
        {"input_ids": [[1, 1], [1, 16], [2, 77]], "on": [[1, 1, 8], [1, 64, 8], [1, 512, 8]]}
    ]
    (tmp_path / "r.yaml").write_text(text)
    assert load_recipe(tmp_path / "r.yaml").target.sm == (120,)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"rows": (1, 2, 3)}, "the model has no dynamic dimension 'rows'"),
        ({"tokens": (5, 2, 9)}, "the range of tokens must be 1 <= min <= opt <= max"),
        ({"tokens": (0, 2, 9)}, "the range of tokens must be 1 <= min <= opt <= max"),
    ],
)
def test_a_wrong_range_is_refused(
    tmp_path: Path, ranges: dict[str, tuple[int, int, int]], message: str
) -> None:
    answers = RecipeAnswers("enc", ranges=ranges)
    with pytest.raises(RecipeError, match=message):
        write_recipe_text(tmp_path / "m.onnx", tmp_path / "r.yaml", ENCODER, answers)


def test_an_existing_recipe_is_not_overwritten(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    (tmp_path / "r.yaml").write_text("mine")
    done = command("init", str(tiny_models["sm_dynamo20"]), "--out", "r.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: r.yaml: exists already (name another --out, or give --force)"
    assert (tmp_path / "r.yaml").read_text() == "mine"


def test_a_refused_answer_leaves_no_recipe(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    done = command("init", str(tiny_models["sm_dynamo20"]), "--out", "new/r.yaml", "--sm", "9", cwd=tmp_path)
    assert done.returncode == 2
    assert "must be an architecture such as 89, not 9" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_fp8_recipe_is_to_be_calibrated_first(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    model = str(tiny_models["sm_dynamo20"])
    done = command("init", model, "--out", "r.yaml", "--precision", "fp8", cwd=tmp_path)
    assert done.stdout.strip() == (
        "r.yaml: fp8 for sm_89; calibrate it with: entrypoint.py calibrate r.yaml; "
        "then build it with: entrypoint.py r.yaml"
    )


def test_the_plan_says_what_is_missing_and_then_that_nothing_is(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    before = json.loads(command("plan", str(recipe), "--cache", "cache", "--json", cwd=tmp_path).stdout)
    assert [(s["name"], s["cached"], s["reason"]) for s in before["stages"]] == [
        ("convert", False, "not built before"),
        ("fidelity", False, "not built before"),
        ("compile", False, "not built before"),
    ]
    assert not (tmp_path / "out").exists()
    build(load_recipe(recipe), Settings(tmp_path / "cache"))
    after = json.loads(command("plan", str(recipe), "--cache", "cache", "--json", cwd=tmp_path).stdout)
    assert all(stage["cached"] for stage in after["stages"])
    assert [s["key"] for s in after["stages"]] == [s["key"] for s in before["stages"]]
    assert after["needs"]["seconds"] == 0
    assert after["engines"][0]["exists"]


def test_the_plan_refuses_what_a_build_would_refuse(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, target={"backend": "tensorrt_rtx", "sm": 90})
    done = command("plan", str(recipe), "--cache", "cache", cwd=tmp_path)
    assert done.returncode == 3
    assert "sm_90" in done.stderr
