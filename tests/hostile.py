"""Files made to hurt, and what they cost: exit code, peak memory and time of the process that met each.

``python -m tests.hostile`` is what ``make hostile`` runs: it prints the whole table and fails when a file
did harm.  The test suite runs a part of it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper

REPOSITORY = Path(__file__).parent.parent
ADDRESS_SPACE = 4_000_000_000
"""Bytes that each process may map; the tiny model's whole build needs 1.0 GB (measured)."""
MAX_PEAK = 1_500_000_000
"""Bytes resident.  The interpreter with its libraries takes 0.15 GB, a process with TensorRT 0.6 GB."""
MAX_CPU_SECONDS = 60.0
"""Of processor time, because the machine may be busy."""
MAX_SECONDS = 300.0
"""On the clock, for what waits instead of computing."""
MAX_LINE = 1_500
"""Characters in the one line that says what is wrong."""

RECIPE_ERROR, SOURCE_ERROR, VERDICT = (2,), (4,), (4, 7)
BOUNDED = (0, 2, 4, 5, 6, 7, 8)
"""For models that are well-formed files: any stage may refuse them, and the odd ones may be built."""

Make = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Case:
    """A hostile input: ``make`` writes it to a folder and returns the command line that meets it."""

    group: str
    name: str
    codes: tuple[int, ...]
    make: Make

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


@dataclass(frozen=True)
class Cost:
    """What the process did and took; ``harm`` is empty when it did none."""

    code: int
    peak: int
    cpu_seconds: float
    seconds: float
    line: str
    harm: tuple[str, ...]


def meet(case: Case, folder: Path) -> Cost:
    """Runs the command line on the hostile file in a process with a limit on memory."""
    places = {name: folder / name for name in ("input", "work", "home", "tmp", "out", "cache")}
    for place in places.values():
        place.mkdir()
    arguments = case.make(places["input"])
    before = _contents(places["input"])
    environment = {
        **os.environ,
        "HOME": str(places["home"]),
        "TMPDIR": str(places["tmp"]),
        "SA3_BUILDER_CACHE": str(places["cache"]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NO_COLOR": "1",
    }

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * MAX_CPU_SECONDS),) * 2)

    started = time.monotonic()
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "entrypoint.py"), *arguments],
            cwd=places["work"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            preexec_fn=limit,
        )
        # Whoever waits for a pipe takes no processor time.
        hanging = threading.Timer(MAX_SECONDS, process.kill)
        hanging.start()
        _, status, usage = os.wait4(process.pid, 0)
        hanging.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    said = (folder / "stderr").read_bytes().decode(errors="replace").strip()
    line = said.splitlines()[-1] if said else ""
    harm = []
    if process.returncode not in case.codes:
        harm.append(f"exit code {process.returncode}, not {' or '.join(map(str, case.codes))}")
    if "Traceback" in said:
        harm.append("a traceback")
    if any(not c.isprintable() for c in said.replace("\n", "")):
        harm.append("control characters on the terminal")
    if len(line) > MAX_LINE:
        harm.append(f"an error of {len(line)} characters")
    peak = usage.ru_maxrss * 1024
    cpu = usage.ru_utime + usage.ru_stime
    if peak > MAX_PEAK:
        harm.append("its memory")
    if cpu > MAX_CPU_SECONDS:
        harm.append("its time")
    if _contents(places["input"]) != before:
        harm.append("its input was changed")
    harm += [f"{name} was written to" for name in ("work", "home", "tmp") if any(places[name].iterdir())]
    if process.returncode and any(path.suffix == ".trt" for path in places["out"].rglob("*")):
        harm.append("an engine was published")
    return Cost(process.returncode, peak, cpu, time.monotonic() - started, line, tuple(harm))


def _contents(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*"))


# --- recipes ----------------------------------------------------------------------------------

PROFILE = {
    "x": [[1, 256, 1], [1, 256, 8], [1, 256, 64]],
    "local_add_cond": [[1, 257, 1], [1, 257, 8], [1, 257, 64]],
}
SAMPLE = {"size": "tiny", "spelling": "dynamo20", "seed": 0}
SMALL = {
    "schema": "sa3-builder/1",
    "model": {"name": "dit", "sample": SAMPLE},
    "precision": "fp16",
    "profiles": [PROFILE],
    "target": {"backend": "tensorrt_rtx", "sm": 89},
    "verify": {"fidelity": {"lengths": [8], "t": [1.0], "min_cosine": 0.99}},
    "output": {"dir": "../out"},
}


def recipe_text(changes: Mapping[str, object]) -> bytes:
    return yaml.safe_dump({**SMALL, **changes}, sort_keys=False, allow_unicode=True).encode()


def of_bytes(data: bytes | Callable[[], bytes]) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / "r.yaml").write_bytes(data if isinstance(data, bytes) else data())
        return [str(folder / "r.yaml")]

    return make


def changed(**changes: object) -> Make:
    return of_bytes(lambda: recipe_text(changes))


def of_path(put: Callable[[Path], object]) -> Make:
    def make(folder: Path) -> list[str]:
        put(folder / "r.yaml")
        return [str(folder / "r.yaml")]

    return make


LAUGHS = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in range(98, 106)
)

RECIPES: Mapping[str, Make] = {
    "empty": of_bytes(b""),
    "only NUL, 1 MB": of_bytes(b"\0" * 1_000_000),
    "NUL inside": of_bytes(b"schema: sa3-builder/1\nmodel: \0\n"),
    "Latin-1": of_bytes(b"schema: caf\xe9\n"),
    "UTF-16": of_bytes(lambda: "schema: sa3-builder/1\n".encode("utf-16")),
    "random bytes": of_bytes(lambda: np.random.default_rng(0).bytes(100_000)),
    "escape sequences for the terminal": of_bytes(b'"\\e]0;owned\\a\\e[2J": 1\nschema: x\n'),
    "10 MB of comment": of_bytes(b"#" * 10_000_000),
    "10 MB of list": of_bytes(b"a: [" + b"1," * 5_000_000 + b"]"),
    "a million keys": of_bytes(lambda: b"\n".join(b"k%d: 1" % i for i in range(1_000_000))),
    "100,000 brackets deep": of_bytes(b"[" * 100_000),
    "100,000 dashes deep": of_bytes(b"- " * 100_000),
    "indented 1,000 levels deep": of_bytes(lambda: b"\n".join(b" " * i + b"a:" for i in range(1_000))),
    "a billion laughs": of_bytes(LAUGHS),
    "an alias to itself": of_bytes(b"a: &a [*a]\n"),
    "merge keys": of_bytes(b"a: &a {x: 1}\nb: {<<: [*a, *a]}\n"),
    "a tag that runs a program": of_bytes(b"schema: !!python/object/apply:os.system [touch ran]\n"),
    "a number of 900,000 digits": of_bytes(b"schema: " + b"9" * 900_000),
    "a sexagesimal of 400,000 parts": of_bytes(b"schema: " + b"1:" * 400_000 + b"1"),
    "the same key twice": of_bytes(lambda: recipe_text({}) + b"precision: bf16\n"),
    "two documents": of_bytes(lambda: recipe_text({}) + b"---\n" + recipe_text({})),
    "a name that leaves the output": changed(model={"name": "../../../evil", "sample": SAMPLE}),
    "an engine name that leaves the output": changed(output={"dir": "../out", "name": "../../evil.trt"}),
    "an absolute engine name": changed(output={"dir": "../out", "name": "/evil.trt"}),
    "infinite and missing numbers": changed(
        verify={"fidelity": {"lengths": [8], "t": [float("inf"), float("nan")], "min_cosine": float("nan")}}
    ),
    "a profile of 10^18 elements": changed(
        profiles=[{"x": [[10**6, 256, 1], [10**6, 256, 10**6], [10**9] * 3]}]
    ),
    "100,000 lengths": changed(verify={"fidelity": {"lengths": list(range(1, 100_001)), "t": [1.0]}}),
    "a folder": of_path(lambda path: path.mkdir()),
    "a pipe that nobody fills": of_path(lambda path: os.mkfifo(path)),
    "a device without end": of_path(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": of_path(lambda path: path.symlink_to(path)),
    "a plugin without leave": changed(build={"plugins": ["evil.so"]}),
}


# --- models -----------------------------------------------------------------------------------


def generic(folder: Path) -> list[str]:
    """A build of ``m.onnx`` as a model of any kind."""
    changes = {
        "model": {"name": "m", "kind": "generic", "onnx": "m.onnx"},
        "profiles": [{"x": [[1, 4, 4], [1, 4, 8], [1, 4, 64]]}],
        "verify": {"fidelity": False},
    }
    (folder / "r.yaml").write_bytes(recipe_text(changes))
    return [str(folder / "r.yaml")]


def model_bytes(data: bytes | Callable[[], bytes]) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / "m.onnx").write_bytes(data if isinstance(data, bytes) else data())
        return generic(folder)

    return make


def graph(
    nodes: list[onnx.NodeProto],
    initializers: list[TensorProto] | None = None,
    *,
    opset: int = 20,
    inputs: list[onnx.ValueInfoProto] | None = None,
    outputs: list[onnx.ValueInfoProto] | None = None,
) -> onnx.ModelProto:
    """A model of ``x`` (1, 4, L) to ``y``."""
    if inputs is None:
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, "L"])]
    if outputs is None:
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["A", "B", "C"])]
    body = helper.make_graph(nodes, "g", inputs, outputs, initializers or [])
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def model_path(put: Callable[[Path], object]) -> Make:
    def make(folder: Path) -> list[str]:
        put(folder / "m.onnx")
        return generic(folder)

    return make


def of_model(build: Callable[[], onnx.ModelProto]) -> Make:
    return model_bytes(lambda: build().SerializeToString())


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), outputs.split(), name=f"/{outputs}", **attributes)


def outside(
    location: str, offset: str = "0", length: str = "64", dims: tuple[int, ...] = (4, 4)
) -> onnx.ModelProto:
    """A model whose weight lies in a file beside it, as the entries say."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        weight.external_data.add(key=key, value=value)
    return graph([node("MatMul", "w x", "y")], [weight])


def overlapping() -> onnx.ModelProto:
    """Two weights of which one begins in the middle of the other."""
    model = outside("m.onnx.data")
    second = outside("m.onnx.data", offset="32").graph.initializer[0]
    second.name = "v"
    model.graph.initializer.append(second)
    model.graph.node[0].name, model.graph.node[0].output[0] = "/z", "z"
    model.graph.node.append(node("MatMul", "v z", "y"))
    return model


def with_sidecar(build: Callable[[], onnx.ModelProto], put: Callable[[Path], object] | None = None) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / "m.onnx").write_bytes(build().SerializeToString())
        (put or (lambda path: path.write_bytes(b"\0" * 4096)))(folder / "m.onnx.data")
        return generic(folder)

    return make


def weight(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def integers(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def nested(depth: int) -> onnx.ModelProto:
    """Ifs inside Ifs."""
    inner = helper.make_graph(
        [node("Identity", "x", "z0")],
        "g0",
        [],
        [helper.make_tensor_value_info("z0", TensorProto.FLOAT, None)],
    )
    for level in range(1, depth):
        value = helper.make_tensor_value_info(f"z{level}", TensorProto.FLOAT, None)
        branch = node("If", "c", f"z{level}", then_branch=inner, else_branch=inner)
        inner = helper.make_graph([branch], f"g{level}", [], [value])
        if level > 12:  # both branches double the file: from here on only one of them grows
            break
    for level in range(13, depth):
        value = helper.make_tensor_value_info(f"z{level}", TensorProto.FLOAT, None)
        flat = helper.make_graph([node("Identity", "x", f"z{level}")], "f", [], [value])
        branch = node("If", "c", f"z{level}", then_branch=inner, else_branch=flat)
        inner = helper.make_graph([branch], f"g{level}", [], [value])
    whole = node("If", "c", "y", then_branch=inner, else_branch=inner)
    return graph([whole], [numpy_helper.from_array(np.array(True), "c")])


def calling_itself() -> onnx.ModelProto:
    model = graph([helper.make_node("F", ["x"], ["y"], domain="local", name="/y")])
    body = [helper.make_node("F", ["a"], ["b"], domain="local", name="/b")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    model.functions.append(helper.make_function("local", "F", ["a"], ["b"], body, opsets))
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def doubling(levels: int) -> onnx.ModelProto:
    """Each function calls the next one twice: 2^levels nodes once they are inlined."""
    model = graph([helper.make_node("F0", ["x"], ["y"], domain="local", name="/y")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    for level in range(levels):
        last = level == levels - 1
        name, domain = ("Relu", "") if last else (f"F{level + 1}", "local")
        body = [
            helper.make_node(name, ["a"], ["m"], domain=domain),
            helper.make_node(name, ["m"], ["b"], domain=domain),
        ]
        model.functions.append(helper.make_function("local", f"F{level}", ["a"], ["b"], body, opsets))
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def truncated() -> bytes:
    whole: bytes = graph([node("MatMul", "w x", "y")], [weight("w", 4, 4)]).SerializeToString()
    return whole[: len(whole) // 2]


MODEL_FILES: Mapping[str, Make] = {
    "empty": model_bytes(b""),
    "random bytes, 1 MB": model_bytes(lambda: np.random.default_rng(0).bytes(1_000_000)),
    "cut in half": model_bytes(truncated),
    "a field of 2^60 bytes": model_bytes(b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x0f" + b"x" * 100),
    "100,000 messages deep": model_bytes(b"\x3a\x05" * 100_000),
    "a device without end": model_path(lambda path: path.symlink_to("/dev/zero")),
    "a pipe that nobody fills": model_path(lambda path: os.mkfifo(path)),
    "a folder": model_path(lambda path: path.mkdir()),
    "weights in /etc": with_sidecar(lambda: outside("/etc/passwd")),
    "weights above the folder": with_sidecar(lambda: outside("../../../../../../etc/passwd")),
    "weights by a link out of the folder": with_sidecar(
        lambda: outside("m.onnx.data"), lambda path: path.symlink_to("/etc/passwd")
    ),
    "weights in a pipe": with_sidecar(lambda: outside("m.onnx.data"), lambda path: os.mkfifo(path)),
    "weights in a folder": with_sidecar(lambda: outside("m.onnx.data"), lambda path: path.mkdir()),
    "weights in no file": with_sidecar(lambda: outside("m.onnx.data"), lambda path: None),
    "weights before the file": with_sidecar(lambda: outside("m.onnx.data", offset="-64")),
    "weights behind the file": with_sidecar(lambda: outside("m.onnx.data", offset="4096")),
    "weights at 2^63": with_sidecar(lambda: outside("m.onnx.data", offset=str(2**63))),
    "weights at no number": with_sidecar(lambda: outside("m.onnx.data", offset="0x10")),
    "weights of another length": with_sidecar(lambda: outside("m.onnx.data", length="63")),
    "weights of 2^60 bytes": with_sidecar(
        lambda: outside("m.onnx.data", length=str(2**60), dims=(2**29, 2**29))
    ),
    "weights that overlap": with_sidecar(overlapping),
    "a name with NUL": with_sidecar(lambda: outside("m.onnx\0.data")),
    "a weight of 2^62 elements, stored inside": of_model(
        lambda: graph([node("MatMul", "w x", "y")], [TensorProto(name="w", data_type=1, dims=[2**31, 2**31])])
    ),
    "a weight of negative size": of_model(
        lambda: graph([node("MatMul", "w x", "y")], [TensorProto(name="w", data_type=1, dims=[-4, 4])])
    ),
    "a weight of no known type": of_model(
        lambda: graph([node("MatMul", "w x", "y")], [TensorProto(name="w", data_type=999, dims=[4])])
    ),
    "a weight shorter than its shape": of_model(
        lambda: graph(
            [node("MatMul", "w x", "y")],
            [TensorProto(name="w", data_type=1, dims=[4, 4], raw_data=b"\0" * 60)],
        )
    ),
    "a circle": of_model(
        lambda: graph([node("Relu", "b", "a"), node("Relu", "a", "b"), node("Add", "x a", "y")])
    ),
    "one name for two values": of_model(
        lambda: graph([node("Relu", "x", "y"), helper.make_node("Abs", ["x"], ["y"], name="/z")])
    ),
    "one name for two nodes": of_model(
        lambda: graph([node("Relu", "x", "y"), helper.make_node("Abs", ["x"], ["z"], name="/y")])
    ),
    "one name for two weights": of_model(
        lambda: graph([node("MatMul", "w x", "y")], [weight("w", 4, 4), weight("w", 4, 4)])
    ),
    "a value from nowhere": of_model(lambda: graph([node("Add", "x nowhere", "y")])),
    "no graph": of_model(lambda: onnx.ModelProto(ir_version=10)),
    "no nodes": of_model(lambda: graph([])),
    "opset 9,999": of_model(lambda: graph([node("Relu", "x", "y")], opset=9_999)),
    "a function that calls itself": of_model(calling_itself),
    "2^40 nodes by functions that call twice": of_model(lambda: doubling(40)),
    "opset 1": of_model(lambda: graph([node("Relu", "x", "y")], opset=1)),
}

MODEL_GRAPHS: Mapping[str, Make] = {
    "no inputs": of_model(lambda: graph([node("Relu", "w", "y")], [weight("w", 4)], inputs=[])),
    "a chain of 2,000 nodes": of_model(
        lambda: graph(
            [
                node("Relu", "x" if i == 0 else f"v{i - 1}", "y" if i == 1_999 else f"v{i}")
                for i in range(2_000)
            ]
        )
    ),
    "Ifs 30 levels deep": of_model(lambda: nested(30)),
    "a constant of 10^13 elements": of_model(
        lambda: graph(
            [node("ConstantOfShape", "s", "k"), node("ReduceSum", "k", "r"), node("Add", "x r", "y")],
            [integers("s", 10**6, 10**7)],
        )
    ),
    "a range of 10^12": of_model(
        lambda: graph(
            [
                node("Range", "a b d", "k"),
                node("Cast", "k", "f", to=1),
                node("ReduceSum", "f", "r"),
                node("Add", "x r", "y"),
            ],
            [
                numpy_helper.from_array(np.array(v, np.int64), n)
                for n, v in (("a", 0), ("b", 10**12), ("d", 1))
            ],
        )
    ),
    "an expansion to 10^13 elements": of_model(
        lambda: graph(
            [node("Expand", "w s", "k"), node("ReduceMax", "k", "r"), node("Add", "x r", "y")],
            [weight("w", 1), integers("s", 10**6, 10**7)],
        )
    ),
    "a tile of 10^13 elements": of_model(
        lambda: graph(
            [node("Tile", "w s", "k"), node("ReduceMax", "k", "r"), node("Add", "x r", "y")],
            [weight("w", 1, 1), integers("s", 10**6, 10**7)],
        )
    ),
    "padding by 10^12": of_model(
        lambda: graph([node("Pad", "x p", "y")], [integers("p", 0, 0, 10**12, 0, 0, 10**12)])
    ),
    "a reshape that does not fit": of_model(
        lambda: graph([node("Reshape", "x s", "y")], [integers("s", 7, 11, 13)])
    ),
    "a loop of 2^62 rounds": of_model(
        lambda: graph(
            [
                node(
                    "Loop",
                    "n  x",
                    "y",
                    body=helper.make_graph(
                        [node("Identity", "c", "d"), node("Relu", "v", "w")],
                        "b",
                        [
                            helper.make_tensor_value_info("i", TensorProto.INT64, []),
                            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
                            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
                        ],
                        [
                            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
                            helper.make_tensor_value_info("w", TensorProto.FLOAT, None),
                        ],
                    ),
                )
            ],
            [numpy_helper.from_array(np.array(2**62, np.int64), "n")],
        )
    ),
    "an operator of no known domain": of_model(
        lambda: graph([helper.make_node("Evil", ["x"], ["y"], domain="evil", name="/y")])
    ),
    "names with line breaks and escapes": of_model(
        lambda: graph([helper.make_node("Evil", ["x"], ["y"], name="a\n\x1b[2J\x1b]0;owned\x07b")])
    ),
    "a name of 5 MB": of_model(lambda: graph([helper.make_node("Evil", ["x"], ["y"], name="n" * 5_000_000)])),
}


# --- scales -----------------------------------------------------------------------------------

SCALES = {
    "schema": "sa3-builder/scales/1",
    "source": {"name": "m.onnx", "sha256": "0" * 64},
    "calibration": {"method": "max", "provider": "cpu", "versions": {}},
    "data": {"synthetic": True, "sha256": "0" * 64},
    "samples": [],
    "floored": [],
    "missing": {},
    "linears": {"/a": {"activation_amax": 1.0, "weight_amax": 1.0}},
}


def of_scales(put: bytes | Callable[[Path], object]) -> Make:
    """An fp8 build with a hostile scales file."""

    def make(folder: Path) -> list[str]:
        path = folder / "s.json"
        if isinstance(put, bytes):
            path.write_bytes(put)
        else:
            put(path)
        precision = {"recipe": "fp8", "scales": "s.json"}
        (folder / "r.yaml").write_bytes(recipe_text({"precision": precision}))
        return [str(folder / "r.yaml")]

    return make


def scales_with(**changes: object) -> Make:
    return of_scales(lambda path: path.write_text(json.dumps({**SCALES, **changes})))


def amax(text: str) -> Make:
    whole = json.dumps({**SCALES, "linears": {"/a": {"activation_amax": "AMAX", "weight_amax": 1.0}}})
    return of_scales(whole.replace('"AMAX"', text).encode())


SCALES_FILES: Mapping[str, Make] = {
    "empty": of_scales(b""),
    "NUL": of_scales(b"\0" * 100_000),
    "not UTF-8": of_scales(b'{"schema": "\xff\xfe"}'),
    "100,000 brackets deep": of_scales(b"[" * 100_000),
    "10 MB of list": of_scales(b"[" + b"1," * 5_000_000 + b"1]"),
    "30 MB of empty lists": of_scales(b"[" + b"[]," * 10_000_000 + b"1]"),
    "a number of a million digits": amax("9" * 1_000_000),
    "no number": amax("NaN"),
    "infinity": amax("1e999"),
    "zero": amax("0"),
    "negative": amax("-1"),
    "the same linear twice": of_scales(
        json.dumps(SCALES).replace('"/a":', '"/a": {"activation_amax": 2, "weight_amax": 2}, "/a":').encode()
    ),
    "a million linears of no model": scales_with(
        linears={f"/{i}": {"activation_amax": 1.0, "weight_amax": 1.0} for i in range(100_000)}
    ),
    "another model's": scales_with(),
    "a pipe that nobody fills": of_scales(lambda path: os.mkfifo(path)),
    "a device without end": of_scales(lambda path: path.symlink_to("/dev/zero")),
    "a folder": of_scales(lambda path: path.mkdir()),
}


# --- layer files ------------------------------------------------------------------------------


def of_layers(put: bytes | Callable[[Path], object]) -> Make:
    def make(folder: Path) -> list[str]:
        path = folder / "layers"
        if isinstance(put, bytes):
            path.write_bytes(put)
        else:
            put(path)
        return ["verify", "--layers", str(path)]

    return make


LAYER = {"Name": "a", "LayerType": "gemm", "Inputs": [], "Outputs": [], "Metadata": ""}


def inspector(**changes: object) -> Make:
    return of_layers(json.dumps({"Layers": [{**LAYER, **changes}], "Bindings": []}).encode())


LAYER_FILES: Mapping[str, Make] = {
    "empty": of_layers(b""),
    "NUL": of_layers(b"\0" * 100_000),
    "random bytes": of_layers(np.random.default_rng(0).bytes(100_000)),
    "not UTF-8": of_layers(b'{"Layers": ["\xff\xfe"]}'),
    "100,000 brackets deep": of_layers(b"[" * 100_000),
    "100,000 braces deep": of_layers(b'{"Layers":' * 100_000),
    "a number of a million digits": of_layers(b'{"Layers": [' + b"9" * 1_000_000 + b"]}"),
    "names for layers": of_layers(b'{"Layers": ["a", "b"], "Bindings": []}'),
    "a number for layers": of_layers(b'{"Layers": 7}'),
    "inputs that are a number": inspector(Inputs=7),
    "metadata of 5 MB of brackets": inspector(Metadata="[ONNX Layer: " * 400_000),
    "a build log cut in the table": of_layers(b"Layers:\nName: a, LayerType: gemm, Inputs: [ { Name: "),
    "a build log of 5 MB of brackets": of_layers(b"Layers:\nName: a, Inputs: " + b"[ { " * 1_250_000),
    "a build log of one endless line": of_layers(b"Layers:\nName: " + b"a, Name: " * 600_000),
    "a pipe that nobody fills": of_layers(lambda path: os.mkfifo(path)),
    "a device without end": of_layers(lambda path: path.symlink_to("/dev/zero")),
    "a folder": of_layers(lambda path: path.mkdir()),
}


def _group(name: str, codes: tuple[int, ...], makes: Mapping[str, Make]) -> list[Case]:
    return [Case(name, what, codes, make) for what, make in makes.items()]


CASES: list[Case] = [
    *_group("recipe", RECIPE_ERROR, RECIPES),
    *_group("model file", SOURCE_ERROR, MODEL_FILES),
    *_group("model graph", BOUNDED, MODEL_GRAPHS),
    *_group("scales", SOURCE_ERROR, SCALES_FILES),
    *_group("layers", VERDICT, LAYER_FILES),
]


def main() -> None:
    wanted = sys.argv[1:]
    print("| input | exit code | peak, MB | processor, s | what it says |\n|---|---|---|---|---|")  # noqa: T201
    harmed = 0
    cases = [case for case in CASES if all(word in str(case) for word in wanted)]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            cost = meet(case, Path(folder))
        said = cost.line.replace(folder, "").removeprefix("error: ").replace("|", "/")
        figures = f"{cost.code} | {cost.peak / 1e6:.0f} | {cost.cpu_seconds:.1f} | {said[:140]}"
        print(f"| {case} | {figures} |", flush=True)  # noqa: T201
        if cost.harm:
            harmed += 1
            print(f"HARM: {case}: {'; '.join(cost.harm)}: {cost.line[:300]}", flush=True)  # noqa: T201
    print(f"\n{len(cases)} hostile inputs, {harmed} did harm")  # noqa: T201
    sys.exit(harmed > 0)


if __name__ == "__main__":
    main()
