"""doctor: what it finds on machines that were looked at, and on what they might have been.

``tests/data/doctor_h200*.json`` is what it printed on a machine with one NVIDIA H200: with
TensorRT-RTX installed, with the GPU hidden from CUDA, and for a recipe of TensorRT for sm_90, which
that machine lacked.  ``doctor_no_gpu.json`` is from a machine without a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine_builder.compile.tensorrt as tensorrt_backend
import engine_builder.doctor.examine as examine_module
from engine_builder.cli.doctor import as_text
from engine_builder.compile.backend import load_backend
from engine_builder.doctor.examine import Diagnosis, Finding, diagnose, examine_machine, examine_recipe
from engine_builder.doctor.machine import Gpu, Library, Machine, read_gpus, read_machine, read_memory
from tests.recipes import write_recipe

DATA = Path(__file__).parent / "data"
REPOSITORY = Path(__file__).parent.parent
GIB = 2**30


def recorded(name: str) -> Diagnosis:
    return Diagnosis.model_validate_json((DATA / f"doctor_{name}.json").read_text())


H200 = recorded("h200").machine
TENSORRT = Library(version="10.15.1.29")


@pytest.mark.parametrize("name", ["h200", "h200_hidden", "h200_sm90", "no_gpu"])
def test_a_diagnosis_reads_back_as_it_was_printed(name: str) -> None:
    assert recorded(name).to_json() == (DATA / f"doctor_{name}.json").read_text()


@pytest.mark.parametrize("name", ["h200", "h200_hidden", "no_gpu"])
def test_the_same_machine_gets_the_same_findings(name: str) -> None:
    then = recorded(name)
    assert diagnose(then.machine, examine_machine(then.machine)) == then
    assert then.able


def test_what_a_person_reads_of_an_h200() -> None:
    assert as_text(recorded("h200")).splitlines() == [
        "sa3-builder 0.1.0, Python 3.12.3, x86_64, 16 cores, 125.2 of 125.8 GiB of memory free",
        "ok       driver: driver 580.159.04, which runs CUDA up to 13.0",
        "ok       gpu 0: NVIDIA H200, sm_90, 139.8 GiB of 140.4 GiB free",
        "warning  tensorrt: TensorRT cannot be imported: No module named 'tensorrt'",
        "         fix: use the container image, or target.backend: tensorrt_rtx without a GPU",
        "ok       tensorrt_rtx: TensorRT-RTX 1.7.1.116 builds for sm_75, sm_80, sm_86, sm_89, sm_120, "
        "sm_121, without a GPU",
        "ok       execution: cuda-bindings 13.3.1 runs engines for sm_90",
        "warning  calibration: calibration needs nvidia-modelopt and torch, which are not installed here",
        "         fix: make calibrate-env, or name a Python that has them in SA3_BUILDER_CALIBRATE_PYTHON",
    ]


def test_what_an_h200_without_tensorrt_lacks_for_sm_90() -> None:
    then = recorded("h200_sm90")
    assert not then.able
    (problem,) = [finding for finding in then.findings if finding.level == "problem"]
    assert problem.text == "TensorRT cannot be imported: No module named 'tensorrt'"
    assert as_text(then).splitlines()[-1] == "sm90.yaml cannot be built here"


def test_machines_that_were_not_at_hand() -> None:
    def finding(subject: str, **changes: Any) -> Finding:
        found = examine_machine(H200.model_copy(update=changes))
        return next(item for item in found if item.subject == subject)

    assert finding("tensorrt", tensorrt=TENSORRT).text == "TensorRT 10.15.1.29 builds for sm_90"
    assert "CUDA shows none" in finding("tensorrt", tensorrt=TENSORRT, visible_sm=None).text
    ada = Gpu(index=1, name="NVIDIA L40S", sm=89, memory_bytes=48 * GIB, free_bytes=47 * GIB)
    mixed = finding("cuda", gpus=(*H200.gpus, ada))
    assert mixed.level == "warning"
    assert "CUDA would use the one of sm_90" in mixed.text
    assert "CUDA_VISIBLE_DEVICES" in (mixed.fix or "")
    assert finding("calibration", modelopt=Library(version="0.47.0")).level == "ok"
    lacking = Library(problem="cuda-bindings is not installed: engines are not run", fix="pip install x")
    assert finding("execution", cuda_bindings=lacking).fix == "pip install x"


# --- with a recipe --------------------------------------------------------------------------


def findings(
    folder: Path, machine: Machine = H200, *, allow_plugins: bool = False, **changes: Any
) -> dict[str, Finding]:
    """What is found for a recipe with ``changes``, by subject."""
    from engine_builder.recipe import load_recipe

    recipe = load_recipe(write_recipe(folder, **changes))
    backend = load_backend(recipe.target.backend)
    found = examine_recipe(machine, recipe, backend, folder / "cache", allow_plugins=allow_plugins)
    return {finding.subject: finding for finding in found}


def problems(found: dict[str, Finding]) -> list[str]:
    return [subject for subject, finding in found.items() if finding.level == "problem"]


@pytest.fixture
def tensorrt_on_h200(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The H200 as it would be in the container with TensorRT."""
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.15.1.29"))
    monkeypatch.setattr(tensorrt_backend, "visible_sm", lambda: 90)
    return H200.model_copy(update={"tensorrt": TENSORRT})


def test_a_recipe_of_the_gpus_own_architecture(tmp_path: Path, tensorrt_on_h200: Machine) -> None:
    found = findings(tmp_path, tensorrt_on_h200, target={"backend": "tensorrt", "sm": 90})
    assert problems(found) == []
    assert found["tensorrt 10.15.1.29, sm_90"].text == "builds fp16"
    assert set(found) == {"driver", "gpu 0", "tensorrt 10.15.1.29, sm_90", "memory", "cache", "output"}


def test_a_recipe_of_another_architecture(tmp_path: Path, tensorrt_on_h200: Machine) -> None:
    found = findings(tmp_path, tensorrt_on_h200, target={"backend": "tensorrt", "sm": [89, 90]})
    assert problems(found) == ["tensorrt 10.15.1.29, sm_89"]
    wrong = found["tensorrt 10.15.1.29, sm_89"]
    assert wrong.text == "target.sm: TensorRT cannot build for sm_89 here; it can for sm_90"
    assert wrong.fix == "build on a GPU of sm_89, or write sm: 90"


def test_options_that_the_build_would_refuse(tmp_path: Path, tensorrt_on_h200: Machine) -> None:
    plugin, cache = tmp_path / "p.so", tmp_path / "t.cache"
    build = {
        "plugins": [str(plugin)],
        "timing_cache": str(cache),
        "strict_timing_cache": True,
        "optimization_level": 0,
    }
    changes: dict[str, Any] = {"target": {"backend": "tensorrt", "sm": 90}, "build": build}
    found = findings(tmp_path, tensorrt_on_h200, **changes)
    assert problems(found) == ["build.timing_cache", "build.plugins", "build"]
    assert "--allow-plugins" in (found["build.plugins"].fix or "")
    plugin.touch()
    cache.touch()
    found = findings(tmp_path, tensorrt_on_h200, allow_plugins=True, **changes)
    assert problems(found) == ["build.timing_cache"]


def test_tensorrt_rtx_builds_without_running(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    found = findings(tmp_path, recorded("no_gpu").machine)
    assert problems(found) == []
    assert "driver" not in found  # which nothing here needs
    subject = next(iter(found))
    assert subject.startswith("tensorrt_rtx 1.")
    assert found[subject].text == "builds fp16, and does not run it here"
    refused = findings(tmp_path, target={"backend": "tensorrt_rtx", "sm": 90})
    (problem,) = problems(refused)
    assert refused[problem].fix == "H100 and H200 need target.backend: tensorrt"
    unsupported = findings(tmp_path, precision="fp32", target={"backend": "tensorrt_rtx", "sm": 75})
    reasons = [unsupported[subject].text for subject in problems(unsupported)]
    assert reasons == ["TensorRT-RTX has no fp32 matrix product for sm_75"]


def test_files_that_a_recipe_lacks(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    found = findings(tmp_path, precision="fp8")
    assert problems(found) == ["precision.scales"]
    assert "make calibrate-env" in (found["precision.scales"].fix or "")
    able = H200.model_copy(update={"modelopt": Library(version="0.47.0")})
    found = findings(tmp_path, able, precision={"recipe": "fp8", "scales": "s.json"})
    assert found["precision.scales"].text.endswith("s.json does not exist")
    assert "calibrate-env" not in (found["precision.scales"].fix or "")
    found = findings(tmp_path, model={"name": "dit", "onnx": "none.onnx"})
    assert problems(found) == ["model"]
    (tmp_path / "foreign.onnx").write_text("no model")
    found = findings(tmp_path, model={"name": "dit", "onnx": "foreign.onnx"})
    assert problems(found) == ["model"]
    without = H200.model_copy(update={"onnxruntime": Library(problem="none", fix="pip install onnxruntime")})
    assert problems(findings(tmp_path, without)) == ["fidelity"]


def test_room_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny sample needs 3 GiB of memory with its sweep, and 3 GiB of scratch."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

    def memory(limit: int, available: int) -> tuple[str, str]:
        machine = H200.model_copy(update={"memory_bytes": limit * GIB, "available_bytes": available * GIB})
        finding = findings(tmp_path, machine)["memory"]
        return finding.level, finding.text

    assert memory(8, 4) == ("ok", "4.0 GiB free, for at most 3.0 GiB")
    assert memory(8, 2) == ("warning", "2.0 GiB free, and the build may take 3.0 GiB")
    assert memory(2, 2) == ("problem", "2.0 GiB in all, and the build may take 3.0 GiB")
    monkeypatch.setattr(examine_module, "free_bytes", lambda folder: GIB if "cache" in str(folder) else None)
    found = findings(tmp_path)
    assert problems(found) == ["cache"]
    assert "1.0 GiB free" in found["cache"].text
    assert found["output"].text.startswith("unknown room")
    (tmp_path / "file").touch()
    found = findings(tmp_path, output={"dir": "file/out"})
    assert "cannot be written to" in found["output"].text


# --- reading the machine --------------------------------------------------------------------


def meminfo(root: Path) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal:       33554432 kB\nMemFree:            1024 kB\n"
        "MemAvailable:   16777216 kB\nHugePages_Total: 0\n"
    )
    return root


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_memory_of_a_machine_and_of_containers(tmp_path: Path) -> None:
    bare = meminfo(tmp_path / "bare")
    assert read_memory(bare) == (32 * GIB, 16 * GIB)
    stat = f"anon 5\ninactive_file {GIB}\n"
    second = meminfo(tmp_path / "v2")
    files = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{6 * GIB}\n", "memory.stat": stat}
    group(second / "sys/fs/cgroup", files)
    assert read_memory(second) == (8 * GIB, 3 * GIB)  # 8 - 6, and 1 of cached files
    unlimited = meminfo(tmp_path / "max")
    group(unlimited / "sys/fs/cgroup", {"memory.max": "max\n", "memory.current": "5\n"})
    assert read_memory(unlimited) == (32 * GIB, 16 * GIB)
    first = meminfo(tmp_path / "v1")
    files = {"memory.limit_in_bytes": f"{4 * GIB}", "memory.usage_in_bytes": f"{5 * GIB}"}
    group(first / "sys/fs/cgroup/memory", files)
    assert read_memory(first) == (4 * GIB, 0)


class NvmlError(Exception):
    """The management library's error."""


def nvml(**changes: Any) -> SimpleNamespace:
    """The management library of a machine with one H200, as it answers."""
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetCudaDriverVersion_v2": 13000,
        "nvmlSystemGetDriverVersion": "580.159.04",
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150754820096, free=150109880320),
        "nvmlDeviceGetName": b"NVIDIA H200",
        **changes,
    }

    def call(answer: Any) -> Any:
        def function(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return function

    return SimpleNamespace(NVMLError=NvmlError, **{name: call(answer) for name, answer in answers.items()})


def test_gpus_are_read_from_the_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert read_gpus() == ("580.159.04", "13.0", H200.gpus, None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=NvmlError("library not found")))
    assert read_gpus() == (None, None, (), "no NVIDIA driver: library not found")
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetCount=NvmlError("lost")))
    assert read_gpus() == (None, None, (), "the NVIDIA driver does not answer: lost")


def test_a_python_for_calibration_that_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    monkeypatch.setenv("SA3_BUILDER_CALIBRATE_PYTHON", str(python))
    assert "not a Python that can be started" in (read_machine().modelopt.problem or "")
    python.write_text("#!/bin/sh\necho 0.47.0\n")
    python.chmod(0o755)
    assert read_machine().modelopt == Library(version="0.47.0")
    python.write_text("#!/bin/sh\nexit 1\n")
    assert "has no nvidia-modelopt" in (read_machine().modelopt.problem or "")


# --- the command ----------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "entrypoint.py", "doctor", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_the_command_without_a_recipe(tmp_path: Path) -> None:
    done = run("--json")
    assert done.returncode == 0, done.stderr
    diagnosis = Diagnosis.model_validate_json(done.stdout)
    assert diagnosis.machine.python == sys.version.split()[0]
    assert json.loads(done.stdout)["schema"] == "sa3-builder/doctor/1"


def test_the_command_with_recipes(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    good = run(str(write_recipe(tmp_path, "good.yaml")), "--cache", str(tmp_path))
    assert good.returncode == 0, good.stdout
    assert good.stdout.splitlines()[-1] == f"{tmp_path}/good.yaml can be built here"
    bad = run(str(write_recipe(tmp_path, "bad.yaml", target={"backend": "tensorrt_rtx", "sm": 90})))
    assert bad.returncode == 3
    assert "problem  tensorrt_rtx 1." in bad.stdout
    assert "fix: H100 and H200 need target.backend: tensorrt" in bad.stdout
    faulty = run(str(write_recipe(tmp_path, "faulty.yaml", precision="fp61")))
    assert faulty.returncode == 2
    assert "fp61" in faulty.stderr
