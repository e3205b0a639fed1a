"""The matrix of a fleet: what is verified, failed, missing and stale, and why."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine_builder.cli.app import app
from engine_builder.errors import RecipeError
from engine_builder.fleet.collect import Cell, Slot, collect, expected_slots, find_slots
from engine_builder.fleet.image import Image, image_of
from engine_builder.manifest import Manifest, ManifestFile
from engine_builder.publish import output_paths
from engine_builder.recipe import Recipe, for_targets, load_recipe
from verify.report import VerifyReport

IMAGE = f"sa3-builder@sha256:{'1' * 64}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def report_text(label: str, precision: str, verdict: str, reasons: tuple[str, ...]) -> str:
    nulls: dict[str, Any] = dict.fromkeys(VerifyReport.model_fields)
    fields = {
        **{name: value for name, value in nulls.items() if name not in ("schema_version", "information")},
        "verdict": verdict,
        "reasons": reasons,
        "engine": label.rpartition("/")[2],
        "label": label,
        "layer_source": "test",
        "precision": {"recipe": precision},
        "checks": (),
    }
    return VerifyReport(**fields).to_json()


class Tree:
    """A fleet's output folder, into which engines are put as builds publish them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def put(
        self,
        sm: int,
        precision: str,
        *,
        model: str = "sa3-m",
        name: str | None = None,
        failed: str | None = None,
        built: int = 1000,
        **changes: Any,
    ) -> Path:
        """Publishes an engine, or the report alone when ``failed`` says why; returns the engine's path."""
        paths = output_paths(self.folder, sm, model, precision, name)
        paths.engine.parent.mkdir(parents=True, exist_ok=True)
        label = f"sm_{sm}/{model}/{paths.engine.name}"
        report = report_text(label, precision, "failed" if failed else "passed", (failed,) if failed else ())
        paths.report.write_text(report)
        if failed:
            return paths.engine
        engine = f"engine {label}".encode()
        paths.engine.write_bytes(engine)
        fields: dict[str, Any] = {
            "engine": ManifestFile(name=paths.engine.name, bytes=len(engine), sha256=digest(engine)),
            "report": ManifestFile(name=paths.report.name, bytes=len(report), sha256=digest(report.encode())),
            "model": model,
            "kind": "sa3-dit",
            "precision": precision,
            "sm": sm,
            "backend": "tensorrt",
            "recipe": ManifestFile(name="r.yaml", bytes=1, sha256="a" * 64),
            "recipe_digest": "b" * 64,
            "source": (),
            "source_sha256": "c" * 64,
            "converted": (),
            "scales": None,
            "versions": {},
            "image": Image(IMAGE).to_manifest(),
            "stages": (),
            "total_seconds": 1.0,
            **changes,
        }
        paths.manifest.write_text(Manifest(**fields).to_json())
        os.utime(paths.manifest, (built, built))
        return paths.engine

    def states(self, **asked: Any) -> dict[tuple[str, int], tuple[str, str]]:
        matrix = collect(self.folder, asked.pop("expected", {}), **asked)
        return {(c.slot.precision, c.slot.sm): (c.state, c.reason) for c in matrix.cells}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "out")


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    def write(precision: str = "fp16", sm: str = "[89, 120]", extra: str = "") -> Recipe:
        path = tmp_path / f"{precision}.yaml"
        path.write_text(
            f"schema: sa3-builder/1\nmodel: {{name: sa3-m, onnx: m.onnx{extra}}}\nprecision: {precision}\n"
            f"target: {{backend: tensorrt, sm: {sm}}}\noutput: {{dir: out}}\n"
        )
        return load_recipe(path)

    return write


def of_recipe(recipe: Recipe, sm: int) -> Mapping[str, Any]:
    return {"recipe_digest": for_targets(recipe, sms=(sm,)).digest()}


VERIFIED = ("verified", "")


def test_a_full_tree_is_complete(tree: Tree) -> None:
    for sm in (89, 120):
        for precision in ("fp16", "fp8"):
            tree.put(sm, precision)
    assert tree.states() == {(p, sm): VERIFIED for p in ("fp16", "fp8") for sm in (89, 120)}
    assert collect(tree.folder, {}).complete


def test_a_hole_in_the_tree_is_missing(tree: Tree) -> None:
    tree.put(89, "fp16")
    tree.put(120, "fp16")
    tree.put(89, "fp8")
    assert tree.states()["fp8", 120] == ("missing", "nothing was published")
    assert not collect(tree.folder, {}).complete


def test_an_empty_folder_is_not_complete(tree: Tree) -> None:
    assert not collect(tree.folder, {}).complete
    with pytest.raises(RecipeError, match="no such folder"):
        collect(tree.folder / "absent", {})


def test_a_failed_verification_says_why(tree: Tree) -> None:
    tree.put(89, "fp8", failed="fp8_linear: 20 of 24 kept; /blocks.0/ff/MatMul: reads half")
    assert tree.states() == {
        ("fp8", 89): ("failed", "fp8_linear: 20 of 24 kept; /blocks.0/ff/MatMul: reads half")
    }


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda e: _flip(e), "dit_fp16.trt is not the engine that its manifest names"),
        (lambda e: e.write_bytes(b"short"), "dit_fp16.trt is not as long as its manifest says"),
        (lambda e: e.unlink(), "dit_fp16.trt is gone"),
        (lambda e: e.with_name("dit_fp16.manifest.json").unlink(), "dit_fp16.manifest.json is gone"),
        (lambda e: e.with_name("dit_fp16.verify.json").unlink(), "dit_fp16.verify.json is gone"),
        (
            lambda e: e.with_name("dit_fp16.verify.json").write_text("{"),
            "dit_fp16.verify.json cannot be read: 1 validation error for VerifyReport",
        ),
        (
            lambda e: e.with_name("dit_fp16.manifest.json").write_bytes(b"\xff"),
            "dit_fp16.manifest.json cannot be read: 1 validation error for Manifest",
        ),
    ],
)
def test_damage_is_a_failure_that_names_the_file(
    tree: Tree, damage: Callable[[Path], object], reason: str
) -> None:
    damage(tree.put(89, "fp16"))
    assert tree.states() == {("fp16", 89): ("failed", reason)}


def test_a_report_of_another_build_is_a_failure(tree: Tree) -> None:
    engine = tree.put(89, "fp16")
    report = engine.with_name("dit_fp16.verify.json")
    report.write_text(report.read_text().replace('"test"', '"tset"'))
    assert tree.states()["fp16", 89] == (
        "failed",
        "dit_fp16.verify.json is not the report that its manifest names",
    )


def test_an_engine_copied_to_another_architecture_is_a_failure(tree: Tree) -> None:
    engine = tree.put(89, "fp16")
    (tree.folder / "sm_120/sa3-m").mkdir(parents=True)
    for path in engine.parent.iterdir():
        (tree.folder / "sm_120/sa3-m" / path.name).write_bytes(path.read_bytes())
    state, reason = tree.states()["fp16", 120]
    assert state == "failed"
    assert reason.startswith("its manifest is that of sa3-m in fp16 for sm_89")


def test_recipes_say_what_is_missing(tree: Tree, recipe: Callable[..., Recipe]) -> None:
    fp16, fp8 = recipe("fp16"), recipe("fp8", sm="90")
    tree.put(89, "fp16", **of_recipe(fp16, 89))
    expected = expected_slots([fp16, fp8], (), lambda _: None)
    assert tree.states(expected=expected) == {
        ("fp16", 89): VERIFIED,
        ("fp16", 120): ("missing", "nothing was published"),
        ("fp8", 90): ("missing", "nothing was published"),
    }
    # The architectures that are asked for take the place of those in the recipes.
    assert set(expected_slots([fp16], (86,), lambda _: None)) == {Slot("sa3-m", "fp16", 86, "dit_fp16.trt")}


def test_an_engine_of_an_older_recipe_is_stale(tree: Tree, recipe: Callable[..., Recipe]) -> None:
    old = recipe("fp16")
    tree.put(89, "fp16", **of_recipe(old, 89))
    # Another architecture in the recipe changes nothing for those it had.
    more = expected_slots([recipe("fp16", sm="[89]")], (), lambda _: None)
    assert tree.states(expected=more) == {("fp16", 89): VERIFIED}
    changed = recipe("{recipe: fp16, rotary: baked}", sm="[89]")
    assert tree.states(expected=expected_slots([changed], (), lambda _: None)) == {
        ("fp16", 89): ("stale", "built from another recipe")
    }


def test_an_engine_of_another_source_is_stale(tree: Tree, recipe: Callable[..., Recipe]) -> None:
    wanted = recipe("fp16", sm="89")
    tree.put(89, "fp16", **of_recipe(wanted, 89))
    for source, state in (
        ("c" * 64, VERIFIED),
        ("d" * 64, ("stale", f"built from source {'c' * 12}, not {'d' * 12}")),
    ):
        expected = expected_slots([wanted], (), lambda _, source=source: source)  # type: ignore[misc]
        assert tree.states(expected=expected) == {("fp16", 89): state}


def test_an_engine_of_another_image_is_stale(tree: Tree) -> None:
    tree.put(89, "fp16")
    assert tree.states(image=Image(IMAGE)) == {("fp16", 89): VERIFIED}
    # The same content under another name.
    assert tree.states(image=Image(f"mirror.example/b@sha256:{'1' * 64}")) == {("fp16", 89): VERIFIED}
    other = f"sa3-builder@sha256:{'2' * 64}"
    assert tree.states(image=Image(other)) == {("fp16", 89): ("stale", f"built in {IMAGE}, not in {other}")}


def test_an_engine_built_outside_an_image_is_stale_where_one_is_asked_for(tree: Tree) -> None:
    tree.put(89, "fp16", image=None)
    assert tree.states(image=Image("b:1")) == {("fp16", 89): ("stale", "built in no image, not in b:1")}


def test_without_recipes_the_latest_build_of_a_model_says_what_is_current(tree: Tree) -> None:
    tree.put(89, "fp16", built=1000)
    tree.put(120, "fp16", built=2000, source_sha256="d" * 64)
    tree.put(89, "fp16", model="sa3-sm", built=500, source_sha256="e" * 64)
    matrix = collect(tree.folder, {})
    assert {(c.slot.model, c.slot.sm): c.state for c in matrix.cells} == {
        ("sa3-m", 89): "stale",
        ("sa3-m", 120): "verified",
        ("sa3-sm", 89): "verified",  # another model has another source
        ("sa3-sm", 120): "missing",
    }
    (stale,) = [c for c in matrix.cells if c.state == "stale"]
    assert stale.reason == "not built from the same source as fp16 for sm_120, the last one built, is"


def test_without_recipes_a_mix_of_images_is_stale(tree: Tree) -> None:
    tree.put(89, "fp16", built=2000)
    tree.put(89, "fp8", built=1000, image={"reference": "old:1"})
    assert tree.states()["fp8", 89] == (
        "stale",
        "not built in the same image as fp16 for sm_89, the last one built, is",
    )


def test_only_engines_and_their_companions_are_found(tree: Tree) -> None:
    tree.put(89, "fp16")
    tree.put(90, "bf16", name="music.engine")
    tree.put(90, "fp8", name="strange.engine", failed="why")
    (tree.folder / "sm_89/sa3-m/.dit_fp16.trt.lock").touch()
    (tree.folder / "sm_89/sa3-m/dit_fp16.trt.superseded").touch()
    (tree.folder / "sm_89/sa3-m/notes.txt").touch()
    (tree.folder / "sm_banana/sa3-m").mkdir(parents=True)
    (tree.folder / "sm_banana/sa3-m/dit_fp16.trt").touch()
    assert find_slots(tree.folder) == {
        Slot("sa3-m", "fp16", 89, "dit_fp16.trt"),
        Slot("sa3-m", "bf16", 90, "music.engine"),
        Slot("sa3-m", "fp8", 90, "strange.engine"),
    }


def test_the_command_prints_the_matrix_and_ends_in_7_unless_it_is_full(tree: Tree) -> None:
    tree.put(89, "fp16")
    tree.put(120, "fp16")
    tree.put(89, "fp8", failed="fidelity: 0 of 9 kept; worst cosine 0.71 < 0.9")
    run = CliRunner()
    result = run.invoke(app, ["collect", str(tree.folder)])
    assert result.exit_code == 7
    assert result.output.splitlines() == [
        "model  precision  sm_89     sm_120",
        "sa3-m  fp16       verified  verified",
        "sa3-m  fp8        failed    missing",
        "2 verified, 1 failed, 1 missing",
        "sm_89/sa3-m/dit_fp8.trt: failed: fidelity: 0 of 9 kept; worst cosine 0.71 < 0.9",
        "sm_120/sa3-m/dit_fp8.trt: missing: nothing was published",
    ]
    found = json.loads(run.invoke(app, ["collect", str(tree.folder), "--json"]).output)
    assert (found["schema"], found["complete"]) == ("sa3-builder/collect/1", False)
    assert found["counts"] == {"verified": 2, "failed": 1, "missing": 1, "stale": 0}
    assert [(c["precision"], c["sm"], c["state"]) for c in found["cells"]] == [
        ("fp16", 89, "verified"),
        ("fp16", 120, "verified"),
        ("fp8", 89, "failed"),
        ("fp8", 120, "missing"),
    ]
    tree.put(89, "fp8")
    tree.put(120, "fp8")
    assert run.invoke(app, ["collect", str(tree.folder)]).exit_code == 0


def test_the_command_takes_a_recipe_and_its_pinned_source(tree: Tree, recipe: Callable[..., Recipe]) -> None:
    wanted = recipe("fp16", extra=f", sha256: {'d' * 64}")
    tree.put(89, "fp16", **of_recipe(wanted, 89))
    arguments = ["collect", str(tree.folder), "--recipe", str(wanted.path), "--sm", "89", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 7
    (cell,) = json.loads(result.output)["cells"]
    assert (cell["state"], cell["reason"]) == ("stale", f"built from source {'c' * 12}, not {'d' * 12}")


def test_the_image_of_a_process_is_what_its_environment_says() -> None:
    assert image_of({}) is None
    told = image_of({"SA3_BUILDER_IMAGE": IMAGE})
    assert told is not None
    assert told.to_manifest() == {"reference": IMAGE, "digest": f"sha256:{'1' * 64}"}
    assert Image("b:1").to_manifest() == {"reference": "b:1"}


def test_a_digest_outweighs_a_name(tree: Tree) -> None:
    tree.put(89, "fp16", image={"reference": "b:1"})
    (cell,) = collect(tree.folder, {}, image=Image("b:1")).cells
    assert isinstance(cell, Cell)
    assert cell.state == "verified"
    (cell,) = collect(tree.folder, {}, image=Image(IMAGE)).cells
    assert cell.state == "stale"
