"""``verify`` and ``schema`` as a user runs them: sources of evidence, exit codes, what is printed.

Engines are compiled for real by TensorRT-RTX; a GPU is stood in for by the layers of the same engine in
the inspector's spelling.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import yaml
from jsonschema import Draft202012Validator

import verify.examine as examine_module
from benchmarks import damage
from benchmarks.fault_kinds import as_json
from benchmarks.workshop import PROFILES, Workshop
from engine_builder.errors import PlatformError, RecipeError, SourceModelError
from engine_builder.execute.request import LoadOptions
from engine_builder.pipeline import build
from engine_builder.recipe import load_recipe
from engine_builder.stage_runner import Settings
from tests.conftest import REPOSITORY
from tests.recipes import write_recipe
from verify.examine import Inspected, Subject, examine, inspect_here
from verify.layers import parse_inspector_json
from verify.report import VerifyReport
from verify.schemas import SCHEMAS, SchemaName

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

CORE = "/transformer/layers.0/self_attn/MatMul_1"


@dataclass(frozen=True)
class Built:
    """An engine that a build published, with the files beside it."""

    engine: Path
    report: Path
    manifest: Path
    recipe: Path


@pytest.fixture(scope="module")
def built(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The workshop's sample as fp16 for sm_89, built by the pipeline."""
    folder = tmp_path_factory.mktemp("built")
    recipe = write_recipe(folder, model={"name": "dit", "onnx": str(workshop.source.path)})
    (outcome,) = build(load_recipe(recipe), Settings(folder / "cache"))
    assert outcome.verdict == "passed", outcome.reasons
    return Built(outcome.paths.engine, outcome.paths.report, outcome.paths.manifest, recipe)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "entrypoint.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done


def layer_file(workshop: Workshop, kind: Any = "fp16") -> Path:
    workshop.good_layers(kind)
    return workshop.folder / f"{kind}.layers.txt"


def check(report: VerifyReport, name: str) -> Any:
    return next(c for c in report.checks if c.name == name)


# --- exit codes, as a process -------------------------------------------------------------------


def test_good_layers_pass_against_their_graph(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "new" / "v.json"
    good = workshop.convert("fp16")
    done = run("verify", "--layers", layer_file(workshop), "--onnx", good.path, "--out", out, "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    Draft202012Validator(SCHEMAS[SchemaName.VERIFY]()).validate(report)
    assert report == json.loads(out.read_text())
    assert report["verdict"] == "passed"
    assert report["precision"]["origin"] == "metadata"
    # Two blocks of a self- and a cross-attention, 7 norms a block, 29 linears.
    kept = {c["name"]: c["kept"] for c in report["checks"]}
    assert (kept["fused_attention"], kept["fp32_norm"], kept["trunk_linear"]) == (4, 14, 29)


def test_an_engine_alone_needs_a_gpu_and_the_advice_names_its_report(built: Built) -> None:
    done = run("verify", built.engine)
    assert done.returncode == 3
    assert "CUDA shows none here" in done.stderr
    assert f"--report {built.report.name}, which lies beside it" in done.stderr


def test_a_broken_promise_exits_with_7_and_names_the_node(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "damaged.onnx"
    damage.TYPES["one_core_fp32"](workshop.convert("fp16").path, out)
    workshop.layers(out, "cli_one_core_fp32")
    done = run("verify", "--layers", workshop.folder / "cli_one_core_fp32.layers.txt", "--onnx", out)
    assert done.returncode == 7
    failed = [line for line in done.stdout.splitlines() if "failed" in line]
    assert failed[0].endswith("layers.txt: failed")
    assert len(failed) == 2
    assert failed[1].split() == ["fused_attention", "failed", "3/4"]
    assert f"{CORE}: /transformer/layers.0/self_attn/Mul_8_output_0 at MatMul" in done.stdout


def test_a_damaged_file_exits_with_4(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text('{"Layers": [{"Name"')
    done = run("verify", "--layers", path, "--log-format", "json")
    assert done.returncode == 4
    fields = json.loads(done.stderr.splitlines()[-1])["fields"]
    assert (fields["exit_code"], fields["where"]) == (4, str(path))


def test_nothing_to_verify_is_a_usage_error() -> None:
    assert run("verify").returncode == 2
    assert run("verify", "--diff", "a.json", "b.json", "--onnx", "c.onnx").returncode == 2


@pytest.mark.parametrize("name", SchemaName)
def test_schema_prints_each_schema(name: SchemaName) -> None:
    done = run("schema", name.value)
    assert done.returncode == 0
    assert json.loads(done.stdout) == SCHEMAS[name]()


def test_an_unknown_schema_is_a_usage_error() -> None:
    done = run("schema", "nonsense")
    assert done.returncode == 2
    assert "verify, recipe, scales, manifest" in done.stderr


def test_two_reports_are_compared(workshop: Workshop, tmp_path: Path) -> None:
    paths = []
    for kind in ("fp16", "bf16"):
        path = tmp_path / f"{kind}.json"
        converted = workshop.convert("fp16" if kind == "fp16" else "bf16").path
        report = examine(Subject(layers=layer_file(workshop, kind), onnx=converted))
        path.write_text(report.to_json())
        paths.append(path)
    done = run("verify", "--diff", *paths)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert 'checks.baked_rotary.status: "not applicable" -> "passed"' in lines
    assert "mha_precision.fp16: 4 -> null" in lines
    assert run("verify", "--diff", paths[0], paths[0]).stdout == "the reports are the same\n"
    as_list = json.loads(run("verify", "--diff", *paths, "--json").stdout)
    assert {"path": "mha_precision.bf16", "a": None, "b": 4} in as_list
    paths[1].write_text("{")
    assert run("verify", "--diff", *paths).returncode == 4


# --- sources of evidence ------------------------------------------------------------------------


def test_without_a_graph_only_counts_are_checked(workshop: Workshop, tmp_path: Path) -> None:
    def asked(**expect: Any) -> VerifyReport:
        recipe = write_recipe(tmp_path, verify={"fidelity": False, "expect": expect})
        return examine(Subject(layers=layer_file(workshop), recipe=recipe))

    met = asked(gemms={"fp16": ">=20", "fp8": 0}, fused_attention={"count": 4, "type": "fp16"})
    assert met.verdict == "passed"
    assert [c.name for c in met.checks] == ["expect.gemms.fp16", "expect.gemms.fp8", "expect.fused_attention"]
    missed = asked(fused_attention={"count": 4, "type": "bf16"}, runtime_trig="<=1")
    assert missed.verdict == "failed"
    assert missed.reasons == (
        "expect.fused_attention: 0 of 1 kept; expect.fused_attention: the engine has 0 of type bf16, "
        "the recipe asks for ==4",
        # One kernel each for the angles of t and of seconds, and one for those of the rotations.
        "expect.runtime_trig: 0 of 1 kept; expect.runtime_trig: the engine has 3, the recipe asks for <=1",
    )


def test_with_nothing_to_check_against_nothing_is_proven(workshop: Workshop) -> None:
    report = examine(Subject(layers=layer_file(workshop)))
    assert report.verdict == "not verifiable"
    assert report.reasons == ("there is nothing to check it against: give --onnx, --recipe or --report",)
    assert report.total_layers is not None


def stub(text: str) -> Any:
    """A GPU on which the inspector prints ``text``."""

    def inspect(engine: Path, backends: tuple[str, ...]) -> Inspected:
        return Inspected(parse_inspector_json(text), f"inspector ({backends[0]})")

    return inspect


def test_an_engine_on_a_gpu_is_inspected(workshop: Workshop, built: Built) -> None:
    report = examine(
        Subject(
            engine=built.engine,
            onnx=workshop.convert("fp16").path,
            report=built.report,
            recipe=built.recipe,
        ),
        stub(as_json(workshop)),
    )
    assert report.verdict == "passed", report.reasons
    # An engine of TensorRT-RTX begins with its own magic, and is tried with that backend first.
    assert report.layer_source == "inspector (tensorrt_rtx)"
    assert report.engine_file is not None
    assert report.engine_file.sha256 == json.loads(built.report.read_text())["engine_file"]["sha256"]
    assert report.precision["origin"] == "recipe"
    assert {"report", "target", "same_precision"} <= {c.name for c in report.checks}


def test_an_engine_without_detailed_layers_is_not_verifiable(
    workshop: Workshop, built: Built, tmp_path: Path
) -> None:
    """Not a list of broken promises: there is no evidence for any of them."""
    bare = json.dumps({"Layers": ["a", "b"], "Bindings": ["x", "velocity"]})
    subject = Subject(engine=built.engine, onnx=workshop.convert("fp16").path)
    report = examine(subject, stub(bare))
    assert report.verdict == "not verifiable"
    assert [c.name for c in report.checks] == ["layers"]
    assert "without detailed profiling verbosity" in report.reasons[0]
    path = tmp_path / "bare.json"
    path.write_text(bare)
    done = run("verify", "--layers", path, "--out", tmp_path / "v.json")
    assert done.returncode == 7
    assert json.loads((tmp_path / "v.json").read_text())["verdict"] == "not verifiable"


def test_without_a_gpu_the_report_beside_the_engine_stands(built: Built) -> None:
    report = examine(Subject(engine=built.engine, report=built.report, recipe=built.recipe))
    assert report.verdict == "passed", report.reasons
    names = [c.name for c in report.checks]
    assert names.index("fp32_norm") < names.index("report")
    assert check(report, "report").promised == 1


def test_a_report_alone_is_judged_by_what_it_records(built: Built, tmp_path: Path) -> None:
    assert examine(Subject(report=built.report)).verdict == "passed"
    record = json.loads(built.report.read_text())
    entry = next(c for c in record["checks"] if c["name"] == "fp32_norm")
    entry["status"] = "failed"
    other = tmp_path / "edited.verify.json"
    other.write_text(json.dumps(record))
    # The verdict follows from the checks, whatever the file says of itself.
    assert record["verdict"] == "passed"
    assert examine(Subject(report=other)).verdict == "failed"


def test_the_recorded_contract_is_compared_with_a_graph(workshop: Workshop, built: Built) -> None:
    other = workshop.sample("source")
    report = examine(Subject(engine=built.engine, report=built.report, onnx=other))
    assert check(report, "contract").status == "passed"


def test_a_stripped_file_is_held_to_its_own_types(workshop: Workshop, tmp_path: Path) -> None:
    """A converted graph of somebody else's names no precision: its one fp32 core is the odd one out."""
    damaged = tmp_path / "damaged.onnx"
    damage.TYPES["one_core_fp32"](workshop.convert("fp16").path, damaged)
    model = ir.load(damaged)
    model.metadata_props.clear()
    ir.save(model, damaged)
    workshop.layers(damaged, "cli_one_core_fp32")
    report = examine(
        Subject(layers=workshop.folder / "cli_one_core_fp32.layers.txt", onnx=damaged, recipe=None)
    )
    assert report.precision["origin"] == "types"
    assert [f.subject for f in check(report, "fused_attention").failures] == [CORE]
    assert [c.name for c in report.checks if c.status == "failed"] == ["fused_attention"]


def test_a_graph_of_another_precision_than_the_recipe_says_so(workshop: Workshop, built: Built) -> None:
    bf16 = workshop.convert("bf16").path
    report = examine(Subject(layers=layer_file(workshop, "bf16"), onnx=bf16, recipe=built.recipe))
    assert report.verdict == "failed"
    failures = {f.subject: f.reason for f in check(report, "same_precision").failures}
    assert failures == {
        "recipe": "the graph was converted with bf16, the recipe asks for fp16",
        "trunk": "the graph was converted with bf16, the recipe asks for fp16",
        "rotary": "the graph was converted with baked, the recipe asks for computed",
    }


def test_metadata_of_a_newer_version_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    model = ir.load(workshop.convert("fp16").path)
    options = json.loads(model.metadata_props["sa3_builder.options"])
    model.metadata_props["sa3_builder.options"] = json.dumps({**options, "sparsity": True})
    ir.save(model, tmp_path / "newer.onnx")
    with pytest.raises(SourceModelError, match="the option sparsity is not known"):
        examine(Subject(layers=layer_file(workshop), onnx=tmp_path / "newer.onnx"))


def test_the_same_conversion_describes_itself_in_the_same_bytes(workshop: Workshop) -> None:
    model = ir.load(workshop.convert("fp8").path)
    assert list(json.loads(model.metadata_props["sa3_builder.options"])) == sorted(
        json.loads(model.metadata_props["sa3_builder.options"])
    )
    assert model.metadata_props["sa3_builder.precision"] == "fp8"
    assert len(json.loads(model.metadata_props["sa3_builder.fp8_linears"])) == 22


# --- the GPU ------------------------------------------------------------------------------------


class FakeBackend:
    """A backend that can or cannot load an engine."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def version(self) -> str:
        return "11.2.1"

    def inspect(self, engine: Path, load: LoadOptions) -> str:
        if self._text is None:
            raise PlatformError("TensorRT cannot be imported")
        return self._text


def test_the_first_backend_that_loads_the_engine_inspects_it(
    workshop: Workshop, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = {"tensorrt": FakeBackend(None), "tensorrt_rtx": FakeBackend(as_json(workshop))}
    monkeypatch.setattr(examine_module, "visible_sm", lambda: 89)
    monkeypatch.setattr(examine_module, "load_backend", lambda name: backends[name])
    found = inspect_here(built.engine, ("tensorrt", "tensorrt_rtx"))
    assert found.source == "inspector (tensorrt_rtx 11.2.1, sm_89)"
    assert found.builder is not None
    assert (found.builder.backend, found.builder.sm) == ("tensorrt_rtx", 89)
    assert len(found.layers.layers) == len(workshop.good_layers("fp16").layers)
    with pytest.raises(PlatformError, match="cannot be imported"):
        inspect_here(built.engine, ("tensorrt",))


def test_without_a_gpu_no_backend_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_module, "visible_sm", lambda: None)
    with pytest.raises(PlatformError, match="CUDA shows none here"):
        inspect_here(Path("engine.trt"), ("tensorrt",))


# --- mistakes -----------------------------------------------------------------------------------


def test_an_engine_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match="No such file"):
        examine(Subject(engine=tmp_path / "none.trt"))
    with pytest.raises(SourceModelError, match="Is a directory"):
        examine(Subject(engine=tmp_path))


def test_a_recipe_whose_profiles_do_not_fit_the_graph(workshop: Workshop, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, profiles=[{"z": [[1], [1], [1]]}])
    with pytest.raises(RecipeError, match="no such input"):
        examine(
            Subject(layers=layer_file(workshop), onnx=workshop.convert("fp16").path, recipe=recipe),
        )


def test_the_profiles_of_the_recipe_are_those_of_the_workshop(built: Built) -> None:
    """The contract of the good engine is compared with real numbers, not with none."""
    profile = yaml.safe_load(built.recipe.read_text())["profiles"][0]
    assert {k: tuple(tuple(s) for s in v) for k, v in profile.items()} == {
        k: (r.min, r.opt, r.max) for k, r in PROFILES[0].shapes.items()
    }
