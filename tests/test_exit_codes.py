"""Every exit code, each reached by the command line as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engine_builder import errors
from tests.recipes import write_recipe

REPOSITORY = Path(__file__).parent.parent
UNSWEPT = {"fidelity": False}

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")


def command(recipe: Path, *options: str) -> list[str]:
    cache = recipe.parent / "cache"
    return [
        sys.executable,
        "entrypoint.py",
        str(recipe),
        "--cache",
        str(cache),
        "--log-format=json",
        *options,
    ]


def run(recipe: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a build, and what its last line on standard error says."""
    done = subprocess.run(command(recipe, *options), cwd=REPOSITORY, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stderr.splitlines()[-1])


def fails_with(code: int, recipe: Path, *options: str) -> str:
    """The error's message; the process must end with ``code`` and say so in its last line."""
    returned, last = run(recipe, *options)
    assert returned == code, last
    assert (last["event"], last["fields"]["exit_code"]) == ("failed", code)
    assert not list(recipe.parent.rglob("*.trt"))
    return str(last["fields"]["message"])


def linear(path: Path, nodes: list[onnx.NodeProto]) -> Path:
    """A model from ``x`` (1, L, 128) to ``y`` with a weight ``w`` and a shape ``s``."""
    weights = [
        numpy_helper.from_array(np.ones((128, 128), np.float32), "w"),
        numpy_helper.from_array(np.array([1, 3, 5], np.int64), "s"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "L", 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "M", "N"])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def generic(folder: Path, nodes: list[onnx.NodeProto], kind: str) -> Path:
    return write_recipe(
        folder,
        model={"name": "m", "kind": kind, "onnx": linear(folder / "m.onnx", nodes).name},
        precision="fp16" if kind == "sa3-dit" else "fp32",
        profiles=[{"x": [[1, 1, 128], [1, 8, 128], [1, 64, 128]]}],
        verify=UNSWEPT,
    )


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["h"], name="/l/MatMul")


def test_the_codes_are_those_of_the_error_classes() -> None:
    codes = {error.__name__: error.exit_code for error in errors.BuilderError.__subclasses__()}
    assert codes == {
        "RecipeError": 2, "PlatformError": 3, "SourceModelError": 4, "ConversionError": 5, "CompileError": 6,
        "VerificationError": 7, "ResourceError": 8, "Interrupted": 130,
    }  # fmt: skip


def test_0_done(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, verify=UNSWEPT)
    code, last = run(recipe)
    assert (code, last["event"], last["fields"]["verdict"]) == (0, "done", "passed")
    assert (tmp_path / "out/sm_89/dit/dit_fp16.trt").stat().st_size == last["fields"]["bytes"]


def test_2_recipe(tmp_path: Path) -> None:
    assert "fp61" in fails_with(2, write_recipe(tmp_path, precision="fp61"))


def test_2_plugins_that_nobody_allowed(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "build": {"plugins": ["p.so"]},
        "target": {"backend": "tensorrt_rtx", "sm": 89},
    }
    assert "loads no plugin libraries" in fails_with(2, write_recipe(tmp_path, **changes))


def test_2_usage(tmp_path: Path) -> None:
    done = subprocess.run(
        command(write_recipe(tmp_path), "--no-such-option"), cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_3_environment(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, target={"backend": "tensorrt_rtx", "sm": 90})
    assert "cannot build for sm_90 here" in fails_with(3, recipe)


def test_4_source_model(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model={"name": "dit", "onnx": "none.onnx"})
    assert fails_with(4, recipe)


def test_5_conversion(tmp_path: Path) -> None:
    """A single linear is no diffusion transformer: it has neither attention nor norms."""
    output = helper.make_node("Relu", ["h"], ["y"], name="/l/Relu")
    assert fails_with(5, generic(tmp_path, [PRODUCT, output], "sa3-dit"))


def test_6_compile(tmp_path: Path) -> None:
    """No length gives what the Reshape wants, which only TensorRT notices."""
    output = helper.make_node("Reshape", ["h", "s"], ["y"], name="/l/Reshape")
    message = fails_with(6, generic(tmp_path, [PRODUCT, output], "generic"))
    assert "would change volume" in message


def test_7_verification(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, verify={"fidelity": False, "expect": {"fused_attention": {"count": 99}}})
    code, last = run(recipe)
    assert (code, last["event"], last["fields"]["verdict"]) == (7, "done", "failed")
    assert "99" in " ".join(last["fields"]["reasons"])
    assert [path.name for path in (tmp_path / "out").rglob("*.json")] == ["dit_fp16.verify.json"]
    assert not list((tmp_path / "out").rglob("*.trt"))


def test_8_resources(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot write" in fails_with(8, write_recipe(tmp_path, output={"dir": "file/out"}))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_130_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    recipe = write_recipe(tmp_path)
    with subprocess.Popen(command(recipe), cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(number)
        rest = process.stderr.read()
    assert json.loads(line)["stage"] == "source"
    assert process.returncode == 130, rest
    assert json.loads(rest.splitlines()[-1])["fields"]["exit_code"] == 130
    assert not list(tmp_path.rglob("*.trt"))
