"""TensorRT's Python bindings without TensorRT: fetched by pip, imported over stub libraries.

The wheels of the bindings need three shared libraries to be loaded.  Stubs that export what the
bindings link to are enough to import them, so that every class, enumeration and signature can be
read; nothing in them can be called.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
REQUIREMENTS = REPOSITORY / "requirements/conformance.txt"
CACHE = REPOSITORY / "build/conformance"
VERSIONS = ("10.15.1.29", "10.16.1.11", "11.2.1.2", "11.4.0.106")
RTX = "tensorrt_rtx"

_LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
_EXPORTS = (
    "createInferBuilder_INTERNAL", "createInferRuntime_INTERNAL", "createInferRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getBuilderPluginRegistry",
    "getPluginRegistry", "getNvOnnxParserVersion", "initLibNvInferPlugins",
)  # fmt: skip


@dataclass(frozen=True)
class Bindings:
    """One version of the bindings: the environment to import it in, and the module's name there."""

    version: str
    module: str
    environment: Mapping[str, str]

    def run(self, code: str) -> str:
        """What ``code`` prints in a process that can import the bindings."""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=dict(self.environment), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def inventory(self) -> dict[str, list[str]]:
        """The attributes of every class of the module by name; functions and values have none."""
        return json.loads(self.run(_INVENTORY.format(module=self.module)))  # type: ignore[no-any-return]

    def write_stubs(self, folder: Path) -> None:
        """Write the module's signatures to ``folder`` as the package ``tensorrt``, for mypy."""
        folder.mkdir(parents=True)
        self.run(
            "import sys; from mypy.stubgen import main;"
            f"main(['-q', '--inspect-mode', '-m', {self.module!r}, '-o', {str(folder)!r}])"
        )
        package, name = self.module.split(".")
        stub = folder / package / f"{name}.pyi"
        stub.write_text(_corrected(stub.read_text()))
        (folder / package / "__init__.pyi").touch()
        (folder / "tensorrt").mkdir()
        (folder / "tensorrt/__init__.pyi").write_text(f"from {self.module} import *\n__version__: str\n")


_INVENTORY = """
import importlib, json
module = importlib.import_module({module!r})
print(json.dumps({{
    name: sorted(dir(value)) if isinstance(value, type) else []
    for name, value in vars(module).items()
}}))
"""


def load_bindings(version: str) -> Bindings:
    """The bindings of a TensorRT version, or of the TensorRT-RTX that is installed."""
    if version == RTX:
        return Bindings(version, "tensorrt_rtx_bindings.tensorrt_rtx", dict(os.environ))
    paths = [unpack("tensorrt-cu13-bindings", version)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LD_LIBRARY_PATH": str(stub_libraries(version.split(".")[0])),
    }
    return Bindings(version, "tensorrt_bindings.tensorrt", environment)


def unpack(name: str, version: str) -> Path:
    """The folder with the contents of a wheel of ``requirements/conformance.txt``."""
    folder = CACHE / f"{name}-{version}-{sys.implementation.cache_tag}"
    if not folder.is_dir():
        wheel = _fetch(name, version)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        partial.rename(folder)
    return folder


def _fetch(name: str, version: str) -> Path:
    if platform.machine() != "x86_64":
        pytest.skip("the hashes are those of x86-64 wheels")
    target = CACHE / "wheels" / f"{name}-{version}-{sys.implementation.cache_tag}"
    found = list(target.glob("*.whl"))
    if found:
        return found[0]
    match = re.search(
        rf"^{re.escape(f'{name}=={version}')} .*(?:\n    --hash.*)+", REQUIREMENTS.read_text(), re.M
    )
    assert match is not None, f"{name}=={version} is not in {REQUIREMENTS.name}"
    target.mkdir(parents=True, exist_ok=True)
    wanted = target / "requirement.txt"
    wanted.write_text(match[0] + "\n")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input"]
    pip += ["--no-deps", "--only-binary=:all:", "--require-hashes", "-d", str(target), "-r", str(wanted)]
    done = subprocess.run(pip, capture_output=True, text=True)
    found = list(target.glob("*.whl"))
    if done.returncode or not found:
        unavailable(f"{name}=={version} cannot be fetched: {done.stderr.strip()[-300:]}")
    return found[0]


def stub_libraries(major: str) -> Path:
    """A folder with libraries of the names that the bindings link to, every function of which is empty."""
    folder = CACHE / f"libraries-{major}"
    if not folder.is_dir():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            unavailable("there is no C compiler")
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True)
        source = partial / "stubs.c"
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in _EXPORTS))
        for library in _LIBRARIES:
            name = f"lib{library}.so.{major}"
            command = [str(compiler), "-shared", "-fPIC", "-o", str(partial / name), f"-Wl,-soname,{name}"]
            subprocess.run([*command, str(source)], check=True)
        partial.rename(folder)
    return folder


def unavailable(reason: str) -> None:
    """Skip the test; in continuous integration, where the check must not be missing, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _corrected(stub: str) -> str:
    """What stubgen cannot see put right: three things, all of them outside the names of the API."""
    # The module has a value named bool, which is not what the signatures mean.
    lines = ["import builtins", *stub.splitlines()]
    lines = [
        line if line.startswith("bool: ") else re.sub(r"\bbool\b", "builtins.bool", line) for line in lines
    ]
    # 11.x' Dims is iterable by __getitem__ alone; IHostMemory gives a buffer from C.
    extra = {
        "class Dims:": "    def __iter__(self) -> typing.Iterator[builtins.int]: ...",
        "class IHostMemory:": "    def __buffer__(self, flags: builtins.int, /) -> memoryview: ...",
    }
    if re.search(r"^class Dims:\n(    .*\n)*    def __iter__", stub, re.M):
        del extra["class Dims:"]
    lines = [part for line in lines for part in (line, extra.get(line)) if part is not None]
    # A parameter without a default after one with: no signature that Python could have.
    while (number := _faulty_line(lines)) is not None:
        lines[number] = re.sub(r"\(self.*\) ->", "(self, *args, **kwargs) ->", lines[number])
    return "\n".join(lines) + "\n"


def _faulty_line(lines: list[str]) -> int | None:
    try:
        ast.parse("\n".join(lines))
    except SyntaxError as error:
        return None if error.lineno is None else error.lineno - 1
    return None
