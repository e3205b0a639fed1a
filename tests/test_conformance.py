"""Every name, member, method and argument that the sources use exists in the real bindings.

TensorRT itself is not installed where the tests run.  mypy checks the sources against signatures
that are read from the bindings of each version; what it cannot see, names given as strings and
methods that TensorRT calls back, is compared with the bindings' own inventory.  There is a
package of ready-made signatures, tensorrt-stubs, but none for a version after 10.13.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine_builder.compile.backend import build_options
from engine_builder.compile.versions import GONE, OLDEST, is_supported, major_minor
from engine_builder.execute.tensors import NUMPY_TYPES
from engine_builder.recipe import Build
from tests.bindings import CACHE, REPOSITORY, RTX, VERSIONS, Bindings, load_bindings, unpack

EVERY = (*VERSIONS, RTX)
OWN = {RTX: "engine_builder/compile/tensorrt.py"} | dict.fromkeys(
    VERSIONS, "engine_builder/compile/tensorrt_rtx.py"
)
"""The file that is about the other module, by what is checked against."""


def sources() -> dict[str, str]:
    """Every source file that uses the module, by path; it is called ``trt`` wherever it is used."""
    files = [*REPOSITORY.glob("engine_builder/**/*.py"), *REPOSITORY.glob("verify/**/*.py")]
    texts = {file.relative_to(REPOSITORY).as_posix(): file.read_text() for file in sorted(files)}
    return {path: text for path, text in texts.items() if _names(text) & {"trt"}}


def _names(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.arg for node in nodes if isinstance(node, ast.arg)
    }


SOURCES = sources()


def as_module(text: str) -> str:
    """The source with ``trt`` as the imported module instead of a parameter or a variable."""
    text = re.sub(r"^if TYPE_CHECKING:\n    import tensorrt(_rtx)? as trt\n", "", text, flags=re.M)
    text = re.sub(r"\btrt: Any\b", "_trt: Any", text)
    text = re.sub(r"\btrt = ", "_trt = ", text)
    text = text.replace("import annotations\n", "import annotations\n\nimport tensorrt as trt\n", 1)
    rebound = [
        node
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.arg) and node.arg == "trt")
        or (isinstance(node, ast.Name) and node.id == "trt" and isinstance(node.ctx, ast.Store))
    ]
    assert not rebound, f"trt is bound in a way that this test does not know, at line {rebound[0].lineno}"
    return text


@pytest.fixture(scope="session")
def signatures(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Bindings, Path]]:
    """The bindings of each version and the folder of their signatures, made when first asked for."""

    class Lazily(dict[str, tuple[Bindings, Path]]):
        def __missing__(self, version: str) -> tuple[Bindings, Path]:
            bindings = load_bindings(version)
            folder = tmp_path_factory.mktemp("signatures") / version
            bindings.write_stubs(folder)
            self[version] = bindings, folder
            return self[version]

    return Lazily()


@pytest.fixture(scope="session")
def inventories() -> Mapping[str, dict[str, list[str]]]:
    class Lazily(dict[str, dict[str, list[str]]]):
        def __missing__(self, version: str) -> dict[str, list[str]]:
            self[version] = load_bindings(version).inventory()
            return self[version]

    return Lazily()


def check(folder: Path, signatures: Path, texts: Mapping[str, str]) -> list[str]:
    """What mypy finds wrong in the sources under the given signatures.

    Overridden methods are left to the inventory: the bindings declare what they call back with
    in C++'s terms.
    """
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(as_module(text))
        for parent in file.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()
    (folder / "__init__.py").unlink()
    command = [
        sys.executable, "-m", "mypy", "--config-file=", "--no-site-packages", "--follow-imports=skip",
        "--ignore-missing-imports", "--check-untyped-defs", "--no-error-summary", "--hide-error-context",
        "--disable-error-code=override", f"--cache-dir={CACHE / 'mypy' / signatures.name}",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *texts],
        cwd=folder,
        env={"MYPYPATH": str(signatures), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in lines if "[syntax]" in line], lines
    return [line for line in lines if line.split(":")[0] in texts]


def checked(version: str) -> dict[str, str]:
    return {path: text for path, text in SOURCES.items() if path != OWN[version]}


@pytest.mark.parametrize("version", EVERY)
def test_names_methods_and_arguments_exist(
    version: str, signatures: Mapping[str, tuple[Bindings, Path]], tmp_path: Path
) -> None:
    assert check(tmp_path, signatures[version][1], checked(version)) == []


def test_the_sources_that_are_checked() -> None:
    assert set(SOURCES) == {
        f"engine_builder/{name}.py"
        for name in (
            "compile/log", "compile/profiles", "compile/refit", "compile/strongly_typed", "compile/tensorrt",
            "compile/tensorrt_rtx", "compile/timing", "compile/versions", "execute/loading", "execute/run",
        )
    }  # fmt: skip


def test_nothing_of_tensorrt_hides_behind_any() -> None:
    """What mypy knows nothing of it cannot check: apart from the module, a parameter has a type.

    Excepted are the callbacks' types and the lookup of members, which is checked below by name.
    """
    hidden = {
        f"{path}:{argument.arg}"
        for path, text in SOURCES.items()
        for argument in ast.walk(ast.parse(text))
        if isinstance(argument, ast.arg)
        and isinstance(argument.annotation, ast.Name)
        and argument.annotation.id in ("Any", "object")
        and argument.arg != "trt"
    }
    assert hidden == {"engine_builder/compile/log.py:severity"}  # a member of ILogger.Severity


@pytest.mark.parametrize(
    ("fault", "versions", "message"),
    [
        # 11.0 removed it.
        (
            "config.set_flag(trt.BuilderFlag.FP16)",
            VERSIONS[2:],
            '"type[BuilderFlag]" has no attribute "FP16"',
        ),
        ("print(config.int8_calibrator)", VERSIONS[2:], 'has no attribute "int8_calibrator"'),
        ("print(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)", VERSIONS[2:], "EXPLICIT_BATCH"),
        # 11.2 has it, 10.x has not.
        ("print(config.build_route)", VERSIONS[:2], 'has no attribute "build_route"'),
        # No version has it.
        ("config.set_flags(trt.BuilderFlag.TF32)", VERSIONS, 'has no attribute "set_flags"'),
        ("config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)", VERSIONS, '"pool_size"'),
        ("config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, size=1)", VERSIONS, '"size"'),
        ("config.clear_flag('TF32')", VERSIONS, 'incompatible type "str"; expected "BuilderFlag"'),
    ],
)
def test_a_wrong_use_is_found(
    fault: str,
    versions: tuple[str, ...],
    message: str,
    signatures: Mapping[str, tuple[Bindings, Path]],
    tmp_path: Path,
) -> None:
    path = "engine_builder/compile/strongly_typed.py"
    place = "    config.profiling_verbosity = "
    faulty = SOURCES[path].replace(place, f"    {fault}\n{place}")
    assert faulty != SOURCES[path]
    for version in (VERSIONS[0], VERSIONS[-1]):
        found = check(tmp_path / version, signatures[version][1], {path: faulty})
        if version in versions:
            assert [message in line for line in found] == [True], found
        else:
            assert found == []


# --- names that are strings -----------------------------------------------------------------


def looked_up() -> Iterator[tuple[str, str]]:
    """Enumeration and member of every lookup by name with a literal."""
    for text in SOURCES.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "member":
                _, enumeration, name = (getattr(argument, "value", None) for argument in node.args)
                assert isinstance(enumeration, str)
                if isinstance(name, str):
                    yield enumeration, name


def recipe_members() -> set[tuple[str, str]]:
    """Every member that some recipe can ask for."""
    values: dict[str, tuple[object, ...]] = {
        "refit": ("all", "identical", "individual", None),
        "strip_plan": (True,),
        "version_compatible": (True,),
        "weight_streaming": (True,),
        "hardware_compatibility": ("none", "ampere_plus", "same_compute_capability"),
    }
    members: set[tuple[str, str]] = set()
    for key, choices in values.items():
        for value in choices:
            options = build_options(Build.model_validate({key: value}))
            members |= {("BuilderFlag", flag) for flag in options.flags}
            if options.hardware_compatibility is not None:
                members.add(("HardwareCompatibilityLevel", options.hardware_compatibility))
    return members


@pytest.mark.parametrize("version", EVERY)
def test_members_given_by_name_exist(version: str, inventories: Mapping[str, dict[str, list[str]]]) -> None:
    wanted = recipe_members() | set(looked_up())
    assert {
        ("BuilderFlag", "ERROR_ON_TIMING_CACHE_MISS"), ("BuilderFlag", "REFIT_IDENTICAL"),
        ("HardwareCompatibilityLevel", "AMPERE_PLUS"),
    } <= wanted  # fmt: skip
    there = inventories[version]
    assert [pair for pair in sorted(wanted) if pair[1] not in there[pair[0]]] == []


@pytest.mark.parametrize("version", EVERY)
def test_callbacks_override_methods_that_exist(
    version: str, inventories: Mapping[str, dict[str, list[str]]]
) -> None:
    overridden: dict[str, set[str]] = {}
    for text in SOURCES.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Attribute) and ast.unparse(base.value) == "trt":
                        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                        overridden[base.attr] = methods - {"__init__"}
    assert overridden == {
        "ILogger": {"log"},
        "IProgressMonitor": {"phase_start", "step_complete", "phase_finish"},
        "IStreamWriter": {"write"},
    }
    there = inventories[version]
    assert {base: methods & set(there[base]) for base, methods in overridden.items()} == overridden


def test_data_types_have_numpy_types(inventories: Mapping[str, dict[str, list[str]]]) -> None:
    for version in EVERY:
        assert set(NUMPY_TYPES) <= set(inventories[version]["DataType"])


def test_the_table_of_differences_is_what_the_bindings_say(
    inventories: Mapping[str, dict[str, list[str]]],
) -> None:
    """For each enumeration in the table, it lists exactly what the first version has and the last lacks."""
    used = {enumeration for enumeration, _ in recipe_members() | set(looked_up())} | set(GONE)
    for enumeration in used - {"ComputeCapability"}:
        members = [
            {name for name in inventories[version][enumeration] if name.isupper()} for version in VERSIONS
        ]
        assert members[0] - members[-1] == set(GONE.get(enumeration, {})), enumeration
        for name, since in GONE.get(enumeration, {}).items():
            there = [name in found for found in members]
            assert there == [major_minor(version) < since for version in VERSIONS], name


def test_the_versions_that_are_checked_are_supported() -> None:
    assert all(map(is_supported, VERSIONS))
    assert [is_supported(version) for version in ("10.14.1.48", "12.0.0.1", "")] == [False] * 3
    assert major_minor(VERSIONS[0]) == OLDEST


# --- cuda-bindings --------------------------------------------------------------------------


def test_cuda_calls_exist_and_take_the_arguments_given() -> None:
    """Calls through ``self._cuda`` against the signatures that cuda-bindings documents."""
    pins = dict(
        re.findall(r"^(cuda-\w+)==(\S+)", (REPOSITORY / "requirements/conformance.txt").read_text(), re.M)
    )
    locked = (REPOSITORY / "requirements/gpu.txt").read_text()
    assert all(f"{name}=={version} " in locked for name, version in pins.items())
    folders = [unpack(name, version) for name, version in pins.items()]
    tree = ast.parse((REPOSITORY / "engine_builder/execute/cuda.py").read_text())
    calls = {
        node.func.attr: len(node.args)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self._cuda"
    }
    names = {
        ast.unparse(node).removeprefix("self._cuda.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("self._cuda.")
    }
    assert {"cudaMalloc", "cudaMemcpyKind.cudaMemcpyHostToDevice", "cudaEventElapsedTime"} <= names
    code = (
        f"import sys; sys.path[:0] = {list(map(str, folders))!r}\n"
        "import functools, cuda.bindings.runtime as cuda\n"
        f"for name in {sorted(names)!r}:\n"
        "    found = functools.reduce(getattr, name.split('.'), cuda)\n"
        "    print(name, (found.__doc__ or '').strip().splitlines()[:1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documented = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert set(documented) == names
    for name, count in calls.items():
        match = re.search(rf"{name}\((.*?)\)", documented[name])
        assert match is not None, documented[name]
        parameters = [part for part in match[1].split(",") if part.strip()]
        assert len(parameters) == count, documented[name]
