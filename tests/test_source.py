"""Source models: what a good one tells, and every fault as one line with exit code 4."""

# ruff: noqa: E501 - the tables of faults read best with one fault a line

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from engine_builder.errors import SourceModelError
from engine_builder.source import Source, TensorSpec, file_sha256, load_graph, open_source

WEIGHT = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
BIAS = np.arange(32, dtype=np.float32)


def value(name: str, shape: list[int | str] | None, elem: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def linear(opset: int = 17) -> onnx.ModelProto:
    """y = x W + b with x (L, 64), W (64, 32) of 8192 bytes and b (32,) of 128 bytes."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], name="matmul"),
            helper.make_node("Add", ["m", "b"], ["y"], name="add"),
        ],
        "linear",
        [value("x", ["L", 64])],
        [value("y", ["L", 32])],
        [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(BIAS, "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def with_sidecar(folder: Path) -> Path:
    """The linear model with both weights in m.onnx.data: w at 0, b at 8192."""
    model = linear()
    (folder / "m.onnx.data").write_bytes(WEIGHT.tobytes() + BIAS.tobytes())
    for tensor, offset, length in zip(model.graph.initializer, (0, 8192), (8192, 128), strict=True):
        tensor.ClearField("raw_data")
        refer(tensor, location="m.onnx.data", offset=str(offset), length=str(length))
    return saved(model, folder)


def refer(tensor: TensorProto, **entries: str) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)


def edited(path: Path, edit: Callable[[onnx.ModelProto], object]) -> Path:
    model = onnx.load(path, load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString())
    return path


def outcome(path: Path) -> Source | SourceModelError:
    try:
        return open_source(path)
    except SourceModelError as error:
        return error


def fault(path: Path, **options: bool | str) -> str:
    with pytest.raises(SourceModelError) as caught:
        open_source(path, **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 4
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 600
    return text


def test_a_good_model(tmp_path: Path) -> None:
    path = saved(linear(), tmp_path)
    source = open_source(path)
    assert source.inputs == (TensorSpec("x", "float32", ("L", 64)),)
    assert source.outputs == (TensorSpec("y", "float32", ("L", 32)),)
    assert (source.opset, source.ir_version, source.node_count, source.is_sorted) == (17, 8, 2, True)
    # 64 x 32 and 32 floats of 4 bytes
    assert source.weight_bytes == 8192 + 128
    assert source.sidecars == ()
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == file_sha256(path)
    assert source.files[0].size == path.stat().st_size


def test_a_good_model_with_a_sidecar(tmp_path: Path) -> None:
    path = with_sidecar(tmp_path)
    source = open_source(path)
    assert source.weight_bytes == 8192 + 128
    assert [(file.path, file.size) for file in source.sidecars] == [(tmp_path / "m.onnx.data", 8320)]
    # What the docstring promises a shell prints.
    command = "sha256sum m.onnx m.onnx.data | cut -c-64 | sha256sum | cut -c-64"
    printed = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert source.sha256 == printed.stdout.strip()
    # One flipped bit of a weight is another model.
    data = bytearray((tmp_path / "m.onnx.data").read_bytes())
    data[5] ^= 1
    (tmp_path / "m.onnx.data").write_bytes(data)
    assert open_source(path).sha256 != source.sha256


@pytest.mark.parametrize("name", ["sm_torchscript17", "md_torchscript17", "sm_dynamo20", "sm_dynamo23"])
def test_the_real_exports(tiny_models: Mapping[str, Path], name: str) -> None:
    source = open_source(tiny_models[name])
    assert source.opset == int(name[-2:])
    assert [(spec.name, spec.shape) for spec in source.inputs] == [
        ("x", (1, 256, "L")),
        ("t", (1,)),
        ("t5_hidden", (1, 256, 768)),
        ("t5_mask", (1, 256)),
        ("seconds_total", (1,)),
        ("local_add_cond", (1, 257, "L")),
    ]
    assert {spec.dtype for spec in source.inputs} == {"float32"}
    assert [spec.name for spec in source.outputs] == ["velocity"]
    assert source.is_sorted
    model = onnx.load(tiny_models[name])
    constants = [a.t for n in model.graph.node for a in n.attribute if a.name == "value" and a.HasField("t")]
    arrays = [numpy_helper.to_array(tensor) for tensor in (*model.graph.initializer, *constants)]
    assert source.weight_bytes == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("name", ["sm_torchscript17", "sm_dynamo23"])
def test_inline_weights_are_mapped_and_equal(tiny_models: Mapping[str, Path], name: str) -> None:
    path = tiny_models[name]
    lazy = load_graph(open_source(path))
    plain = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    assert set(plain) == set(lazy.graph.initializers)
    for key, array in plain.items():
        tensor = lazy.graph.initializers[key].const_value
        assert tensor is not None
        assert isinstance(tensor, ir.ExternalTensor) == (array.nbytes >= 4096)
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_loading_a_large_inline_model_takes_little_memory(tmp_path: Path) -> None:
    """A model file of 96 MiB is checked, hashed and loaded by a process that grows by less than 48 MiB.

    Sixteen of those MiB are the buffer for hashing.
    """
    model = linear()
    for index in range(24):
        tensor = model.graph.initializer.add(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[1 << 20])
        tensor.raw_data = bytes(4 << 20)
    path = saved(model, tmp_path)
    script = (
        "import resource, sys, pathlib\n"
        "from engine_builder.source import open_source, load_graph\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak()\n"
        "load_graph(open_source(pathlib.Path(sys.argv[1])))\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 48


@pytest.mark.parametrize("links", ["symlink", "hard link"])
def test_an_inline_model_behind_a_link_loads(tmp_path: Path, links: str) -> None:
    (tmp_path / "blobs").mkdir()
    real = saved(linear(), tmp_path / "blobs")
    path = tmp_path / "model.onnx"
    path.symlink_to(real) if links == "symlink" else path.hardlink_to(real)
    loaded = load_graph(open_source(path)).graph.initializers["w"].const_value
    assert loaded is not None
    np.testing.assert_array_equal(loaded.numpy(), WEIGHT)


def test_a_model_behind_a_link_with_a_plain_sidecar_loads(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    path = with_sidecar(tmp_path)
    path.rename(tmp_path / "blobs/m")
    path.symlink_to("blobs/m")
    loaded = load_graph(open_source(path)).graph.initializers["w"].const_value
    assert loaded is not None
    np.testing.assert_array_equal(loaded.numpy(), WEIGHT)


def test_a_remembered_hash_saves_reading(tmp_path: Path) -> None:
    path = with_sidecar(tmp_path)
    asked: list[Path] = []

    def known(file: Path) -> str | None:
        asked.append(file)
        return "ab" * 32 if file.suffix == ".data" else None

    source = open_source(path, known=known)
    assert asked == [path, tmp_path / "m.onnx.data"]
    assert source.files[0].sha256 == file_sha256(path)
    assert source.sidecars[0].sha256 == "ab" * 32


def test_the_demanded_hash(tmp_path: Path) -> None:
    path = saved(linear(), tmp_path)
    right = file_sha256(path)
    assert open_source(path, sha256=right.upper()).sha256 == right
    told = fault(path, sha256="0" * 64)
    assert told.startswith(f"{path}: its SHA-256 is {right}, not {'0' * 64} as model.sha256 demands")


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = with_sidecar(tmp_path)
    data = tmp_path / "m.onnx.data"

    def meddle(file: Path) -> str | None:
        if file == data:
            data.write_bytes(data.read_bytes() + b"more")
        return None

    with pytest.raises(SourceModelError, match=r"m\.onnx\.data: changed while it was read"):
        open_source(path, known=meddle)
    source = open_source(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(SourceModelError, match="changed since it was checked"):
        load_graph(source)


def sparse(path: Path) -> None:
    """Two GiB that take no room on the disk."""
    path.touch()
    os.truncate(path, 2**31)


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def save(make: Callable[[], onnx.ModelProto]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(make().SerializeToString())


FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda path: None, "no such model (check model.onnx in the recipe)"),
    ("dangling link", lambda path: path.symlink_to("gone"), "no such model (the link points to gone, which does not exist)"),
    ("folder", lambda path: path.mkdir(), "is a folder"),
    ("pipe", lambda path: os.mkfifo(path), "is not a regular file"),
    ("link to itself", lambda path: path.symlink_to(path), "cannot be read"),
    ("empty", write(b""), "is empty"),
    ("zeros", write(bytes(1000)), "is no ONNX model"),
    ("noise", write(bytes(range(255, 0, -1)) * 9), "is no ONNX model"),
    ("web page", write(b"\n<!DOCTYPE html><html>Sign in</html>"), "is a web page, not the model"),
    ("web page, BOM", write(b"\xef\xbb\xbf<HTML>"), "is a web page, not the model"),
    ("storage error", write(b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"), "is XML"),
    ("LFS pointer", write(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"), "is a Git LFS pointer, not the model (run `git lfs pull`)"),
    ("JSON", write(b'{"error": "not found"}'), "is JSON text"),
    ("checkpoint", write(b"PK\x03\x04" + bytes(40)), "is a zip archive, such as a PyTorch checkpoint"),
    ("safetensors", write((60).to_bytes(8, "little") + b'{"w":{"dtype":"F32"}}'), "is a safetensors file"),
    ("gzip", write(b"\x1f\x8b\x08" + bytes(9)), "is a gzip archive"),
    ("more than 2 GiB", sparse, "more than a protobuf message can be (export it with external data)"),
    ("another message", save(lambda: onnx.ModelProto(ir_version=8)), "holds no graph with nodes"),
    ("name not UTF-8", lambda path: path.write_bytes(linear().SerializeToString().replace(b"matmul", b"mat\xff\xfel")), "not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_a_file_that_is_no_model(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "m.onnx"
    make(path)
    told = fault(path)
    assert told.startswith(f"{path}: ")
    assert message in told


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    assert "its folder does not exist" in fault(tmp_path / "a/m.onnx")
    assert "cannot be read" in fault(tmp_path / ("x" * 300))
    assert "cannot be read" in fault(Path("a\0b"))


def test_a_model_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = linear().SerializeToString()
    path = tmp_path / "m.onnx"
    for length in [*range(1, 120), *range(120, len(data), 97), *range(len(data) - 60, len(data))]:
        path.write_bytes(data[:length])
        fault(path)


def change(edit: Callable[[onnx.GraphProto], object]) -> Callable[[onnx.ModelProto], object]:
    return lambda model: edit(model.graph)


def reorder(graph: onnx.GraphProto) -> None:
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend(reversed(nodes))


def cycle(graph: onnx.GraphProto) -> None:
    graph.node[0].input[0] = "y"


def inner_cycle(graph: onnx.GraphProto) -> None:
    branch = helper.make_graph(
        [
            helper.make_node("Relu", ["p"], ["q"], name="one"),
            helper.make_node("Relu", ["q"], ["p"], name="two"),
        ],
        "branch",
        [],
        [value("q", None)],
    )
    condition = numpy_helper.from_array(np.array(True), "c")
    graph.initializer.append(condition)
    graph.node.append(helper.make_node("If", ["c"], ["z"], name="if", then_branch=branch, else_branch=branch))


def opset(version: int) -> Callable[[onnx.ModelProto], object]:
    return lambda model: setattr(model.opset_import[0], "version", version)


def dims(*sizes: int) -> Callable[[onnx.GraphProto], object]:
    def edit(graph: onnx.GraphProto) -> None:
        del graph.initializer[0].dims[:]
        graph.initializer[0].dims.extend(sizes)

    return edit


def typed(graph: onnx.GraphProto) -> None:
    tensor = graph.initializer[1]
    tensor.ClearField("raw_data")
    tensor.float_data.extend([0.0] * 31)


def constant(graph: onnx.GraphProto) -> None:
    tensor = helper.make_tensor("k", TensorProto.FLOAT, [2], [1.0, 2.0])
    tensor.dims[0] = 1 << 40
    graph.node.append(helper.make_node("Constant", [], ["k"], name="constant", value=tensor))


GRAPHS: list[tuple[str, Callable[[onnx.ModelProto], object], str]] = [
    ("opset 16", opset(16), "opset 16 is not supported (export it with opset 17 to 23)"),
    ("opset 24", opset(24), "opset 24 is not supported"),
    ("opset of 2^63-1", opset(2**63 - 1), "is not supported"),
    ("no opset", lambda m: m.ClearField("opset_import"), "names none as its ai.onnx opset"),
    ("two opsets", lambda m: m.opset_import.append(helper.make_opsetid("ai.onnx", 18)), "names 17 and 18 as its ai.onnx opset"),
    ("IR version of tomorrow", lambda m: setattr(m, "ir_version", 99), "IR version 99 is outside"),
    ("no IR version", lambda m: m.ClearField("ir_version"), "IR version 0 is outside"),
    ("no nodes", change(lambda g: g.ClearField("node")), "holds no graph with nodes"),
    ("no outputs", change(lambda g: g.ClearField("output")), "the graph has no outputs"),
    ("custom operator", change(lambda g: setattr(g.node[1], "domain", "com.microsoft")), "node 'add' is the custom operator com.microsoft.Add (export without it, or name"),
    ("unknown operator", change(lambda g: setattr(g.node[1], "op_type", "Ad")), "node 'add' is a 'Ad', no ONNX operator at opset 17"),
    ("operator of a later opset", change(lambda g: setattr(g.node[1], "op_type", "Attention")), "node 'add' is a 'Attention', no ONNX operator at opset 17"),
    ("cycle", change(cycle), "the graph has a cycle: 'matmul', 'add'"),
    ("node reading itself", change(lambda g: g.node[1].input.__setitem__(0, "y")), "the graph has a cycle: 'add'"),
    ("cycle in a subgraph", change(inner_cycle), "the graph has a cycle: 'one', 'two'"),
    ("two producers", change(lambda g: g.node[1].output.__setitem__(0, "m")), "two values are named 'm'"),
    ("producer of an input", change(lambda g: g.node[0].output.__setitem__(0, "x")), "two values are named 'x'"),
    ("two nodes of one name", change(lambda g: setattr(g.node[1], "name", "matmul")), "two nodes are named 'matmul'"),
    ("two initializers of one name", change(lambda g: setattr(g.initializer[1], "name", "w")), "two values are named 'w'"),
    ("nothing produces an input", change(lambda g: g.node[1].input.__setitem__(1, "q\n")), "node 'add' reads 'q\\n', which nothing produces"),
    ("nothing produces the output", change(lambda g: setattr(g.output[0], "name", "q")), "nothing produces the output 'q'"),
    ("no float input", change(lambda g: setattr(g.input[0].type.tensor_type, "elem_type", TensorProto.INT64)), "the graph has no float32 input"),
    ("no input", change(lambda g: (g.initializer.append(numpy_helper.from_array(WEIGHT, "x")), g.ClearField("input"))), "the graph has no float32 input"),
    ("fp16 input", change(lambda g: setattr(g.input[0].type.tensor_type, "elem_type", TensorProto.FLOAT16)), "input 'x' is float16; a build starts from the fp32 export"),
    ("input of no type", change(lambda g: g.input[0].ClearField("type")), "input 'x' is no tensor"),
    ("input of unknown type", change(lambda g: setattr(g.input[0].type.tensor_type, "elem_type", 99)), "input 'x' has the unknown element type 99"),
    ("input of no shape", change(lambda g: g.input[0].type.tensor_type.ClearField("shape")), "input 'x' declares no shape"),
    ("input dimension 0", change(lambda g: setattr(g.input[0].type.tensor_type.shape.dim[1], "dim_value", 0)), "input 'x' has a dimension of 0"),
    ("input dimension -1", change(lambda g: setattr(g.input[0].type.tensor_type.shape.dim[1], "dim_value", -1)), "input 'x' has a dimension of -1"),
    ("input dimension 2^40", change(lambda g: setattr(g.input[0].type.tensor_type.shape.dim[1], "dim_value", 1 << 40)), "input 'x' has a dimension of 1099511627776"),
    ("input volume 2^31", change(lambda g: g.input.append(value("z", [65536, 32768]))), "input 'z' has more than 2147483647 elements"),
    ("weight shape too small", change(dims(64, 31)), "tensor 'w' of shape [64, 31] has 8192 external bytes, not 7936"),
    ("weight shape of 2^80", change(dims(1 << 40, 1 << 40)), "tensor 'w' of shape [1099511627776, 1099511627776] has 8192 external bytes"),
    ("weight shape negative", change(dims(-64, -32)), "tensor 'w' has a negative dimension"),
    ("weight of unknown type", change(lambda g: setattr(g.initializer[0], "data_type", 99)), "tensor 'w' has the unknown element type 99"),
    ("small weight of wrong size", change(lambda g: setattr(g.initializer[1], "raw_data", bytes(127))), "tensor 'b' of shape [32] holds 127 bytes where 128 belong"),
    ("typed weight of wrong size", change(typed), "tensor 'b' of shape [32] holds 31 values where 32 belong"),
    ("constant of 2^40 values", change(constant), "tensor 'k' of shape [1099511627776] holds 2 values"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), [g[1:] for g in GRAPHS], ids=[g[0] for g in GRAPHS])
def test_a_graph_that_cannot_be_built(
    tmp_path: Path, edit: Callable[[onnx.ModelProto], object], message: str
) -> None:
    path = edited(saved(linear(), tmp_path), edit)
    told = fault(path)
    assert told.startswith(f"{path}: ")
    assert message in told


def sidecar_entries(**entries: str) -> Callable[[Path], object]:
    """The bias refers to its data with these entries."""
    return lambda path: edited(path, lambda model: refer(model.graph.initializer[1], **entries))


def data_file(edit: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: edit(path.parent / "m.onnx.data")


def in_place_of(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else where the sidecar was."""

    def edit(path: Path) -> None:
        (path.parent / "m.onnx.data").unlink()
        make(path.parent / "m.onnx.data")

    return edit


def as_hub_cache(path: Path) -> None:
    """Model and sidecar as links into a folder of blobs, the way a hub's cache lays them out."""
    blobs = path.parent / "blobs"
    blobs.mkdir()
    for file in (path, path.parent / "m.onnx.data"):
        file.rename(blobs / file.name.replace(".", ""))
        file.symlink_to(Path("blobs", file.name.replace(".", "")))


def linked_folder(path: Path) -> None:
    (path.parent / "real").mkdir()
    (path.parent / "m.onnx.data").rename(path.parent / "real/d")
    (path.parent / "link").symlink_to("real")
    sidecar_entries(location="link/d", offset="8192", length="128")(path)


SIDECARS: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", data_file(Path.unlink), "m.onnx.data: the data file of m.onnx is missing (put it beside m.onnx)"),
    ("truncated", data_file(lambda d: os.truncate(d, 8300)), "m.onnx.data: 8300 bytes long, but tensor 'b' ends at byte 8320"),
    ("emptied", data_file(lambda d: os.truncate(d, 0)), "m.onnx.data: 0 bytes long, but tensor 'w' ends at byte 8192"),
    ("folder", in_place_of(Path.mkdir), "m.onnx.data: the data file is not a regular file"),
    ("pipe", in_place_of(os.mkfifo), "m.onnx.data: the data file is not a regular file"),
    ("hub cache", as_hub_cache, "m.onnx.data: the data file is a symbolic link, as download caches make them (copy the model and its data file into one folder of their own with `cp -L`)"),
    ("link outside", in_place_of(lambda data: data.symlink_to("/etc/passwd")), "m.onnx.data: the data file is a symbolic link"),
    ("linked folder", linked_folder, "link: the data file is a symbolic link"),
    ("hard link", data_file(lambda d: (d.parent / "other").hardlink_to(d)), "m.onnx.data: the data file has 2 hard links"),
    ("no location", sidecar_entries(offset="8192"), "tensor 'b' keeps its data at '', which is not a plain file"),
    ("absolute", sidecar_entries(location="/etc/passwd"), "tensor 'b' keeps its data at '/etc/passwd', which is not a plain file below the model's folder"),
    ("traversal", sidecar_entries(location="../../etc/passwd"), "keeps its data at '../../etc/passwd'"),
    ("hidden traversal", sidecar_entries(location="a/../../m.onnx.data"), "keeps its data at 'a/../../m.onnx.data'"),
    ("backslashes", sidecar_entries(location="..\\m.onnx.data"), "keeps its data at"),
    ("drive", sidecar_entries(location="C:m.onnx.data"), "keeps its data at 'C:m.onnx.data'"),
    ("NUL", sidecar_entries(location="m.onnx.data\0.txt"), "keeps its data at 'm.onnx.data\\x00.txt'"),
    ("the folder itself", sidecar_entries(location="."), "keeps its data at '.'"),
    ("long name", sidecar_entries(location="x" * 5000), "the data file of m.onnx is missing"),
    ("the model itself", sidecar_entries(location="m.onnx", offset="0", length="128"), "m.onnx: the model names itself as its data file"),
    ("negative offset", sidecar_entries(location="m.onnx.data", offset="-1"), "tensor 'b' has the external offset '-1'"),
    ("offset no number", sidecar_entries(location="m.onnx.data", offset="1e3"), "tensor 'b' has the external offset '1e3'"),
    ("endless offset", sidecar_entries(location="m.onnx.data", offset="9" * 5000), "tensor 'b' has the external offset '999"),
    ("offset of other digits", sidecar_entries(location="m.onnx.data", offset="٣"), "tensor 'b' has the external offset '٣'"),
    ("offset past the end", sidecar_entries(location="m.onnx.data", offset="99999"), "8320 bytes long, but tensor 'b' ends at byte 100127"),
    ("negative length", sidecar_entries(location="m.onnx.data", offset="8192", length="-128"), "tensor 'b' has the external length '-128'"),
    ("length 0", sidecar_entries(location="m.onnx.data", offset="8192", length="0"), "tensor 'b' of shape [32] has 0 external bytes, not 128"),
    ("length too large", sidecar_entries(location="m.onnx.data", offset="0", length="8320"), "tensor 'b' of shape [32] has 8320 external bytes, not 128"),
    ("overlap", sidecar_entries(location="m.onnx.data", offset="8191"), "tensor 'w' and tensor 'b' overlap at byte 8191"),
    ("contained", sidecar_entries(location="m.onnx.data", offset="64"), "tensor 'w' and tensor 'b' overlap at byte 64"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), [s[1:] for s in SIDECARS], ids=[s[0] for s in SIDECARS])
def test_a_sidecar_that_does_not_hold_the_weights(
    tmp_path: Path, edit: Callable[[Path], object], message: str
) -> None:
    path = with_sidecar(tmp_path)
    edit(path)
    told = fault(path)
    assert told.startswith(str(tmp_path))
    assert message in told


def test_tensors_may_share_one_range_and_leave_the_length_out(tmp_path: Path) -> None:
    path = with_sidecar(tmp_path)

    def tie(model: onnx.ModelProto) -> None:
        refer(model.graph.initializer[1], location="m.onnx.data", offset="8192")
        twin = model.graph.initializer.add()
        twin.CopyFrom(model.graph.initializer[1])
        twin.name = "twin"

    assert open_source(edited(path, tie)).weight_bytes == 8192 + 2 * 128


def test_sidecars_in_a_folder_below(tmp_path: Path) -> None:
    path = with_sidecar(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/b.bin").write_bytes(BIAS.tobytes())
    sidecar_entries(location="data/b.bin")(path)
    source = open_source(path)
    assert [file.path.relative_to(tmp_path).as_posix() for file in source.sidecars] == [
        "data/b.bin",
        "m.onnx.data",
    ]
    loaded = load_graph(source).graph.initializers["b"].const_value
    assert loaded is not None
    np.testing.assert_array_equal(loaded.numpy(), BIAS)


def test_what_is_allowed(tmp_path: Path) -> None:
    unsorted = open_source(edited(saved(linear(), tmp_path), change(reorder)))
    assert not unsorted.is_sorted
    custom = edited(saved(linear(), tmp_path), change(lambda g: setattr(g.node[1], "domain", "own")))
    assert open_source(custom, plugins=True).node_count == 2
    tokens = edited(
        saved(linear(), tmp_path),
        change(lambda g: setattr(g.input[0].type.tensor_type, "elem_type", TensorProto.INT64)),
    )
    assert open_source(tokens, float_input=False).inputs == (TensorSpec("x", "int64", ("L", 64)),)
    # An initializer that is also an input is its default value, not an input of the engine.
    default = edited(saved(linear(), tmp_path), change(lambda g: g.input.append(value("b", [32]))))
    assert [spec.name for spec in open_source(default).inputs] == ["x"]
    unnamed = edited(
        saved(linear(), tmp_path),
        change(lambda g: (g.node[0].ClearField("name"), g.node[1].ClearField("name"))),
    )
    assert open_source(unnamed).node_count == 2
    open_dimension = edited(
        saved(linear(), tmp_path),
        change(lambda g: g.input[0].type.tensor_type.shape.dim[0].ClearField("dim_param")),
    )
    assert open_source(open_dimension).inputs[0].shape == (None, 64)


def test_subgraphs_may_read_what_surrounds_them(tmp_path: Path) -> None:
    def branch(graph: onnx.GraphProto) -> None:
        body = helper.make_graph(
            [helper.make_node("Relu", ["m"], ["r"], name="relu")], "body", [], [value("r", None)]
        )
        graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
        graph.node.append(helper.make_node("If", ["c"], ["z"], name="if", then_branch=body, else_branch=body))

    path = edited(saved(linear(), tmp_path), change(branch))
    source = open_source(path)
    # MatMul, Add and If, and a Relu in each branch
    assert source.node_count == 5
    assert source.is_sorted
    # What a branch reads must come first: with the If moved to the front the graph is out of order.
    assert not open_source(edited(path, change(reorder))).is_sorted
    told = fault(
        edited(path, change(lambda g: g.node[0].attribute[0].g.node[0].input.__setitem__(0, "nowhere")))
    )
    assert "reads 'nowhere', which nothing produces" in told


def test_local_functions_are_no_custom_operators(tmp_path: Path) -> None:
    def call(model: onnx.ModelProto) -> None:
        body = helper.make_node("Relu", ["a"], ["o"])
        model.functions.append(
            helper.make_function("own", "Twice", ["a"], ["o"], [body], [helper.make_opsetid("", 17)])
        )
        model.graph.node[1].CopyFrom(helper.make_node("Twice", ["m"], ["y"], domain="own", name="twice"))

    path = edited(saved(linear(), tmp_path), call)
    assert open_source(path).node_count == 2
    foreign = edited(path, lambda m: setattr(m.functions[0].node[0], "domain", "com.microsoft"))
    assert "is the custom operator com.microsoft.Relu" in fault(foreign)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_gives_a_source_or_a_source_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(edited(with_sidecar(tmp_path), change(inner_cycle)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    result = outcome(path)
    assert isinstance(result, Source) or str(result).isprintable()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=200))
def test_any_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    fault(path)
