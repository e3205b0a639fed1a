"""The compile stage with the real TensorRT-RTX, on graphs that build in a fraction of a second."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import engine_builder.compile.tensorrt as tensorrt_backend
from engine_builder.compile.backend import (
    BuildOptions,
    CompiledEngine,
    CompileRequest,
    build_options,
    load_backend,
)
from engine_builder.compile.isolated import Progress, compile_engine, read_layer_table
from engine_builder.compile.log import MESSAGES, translate
from engine_builder.compile.tensorrt_rtx import TensorRTRTX
from engine_builder.errors import (
    BuilderError,
    CompileError,
    Interrupted,
    PlatformError,
    RecipeError,
    ResourceError,
    SourceModelError,
)
from engine_builder.recipe import Build, PrecisionName, Profile, ShapeRange
from verify.layers import EngineIO, ProfileRange, index_by_node

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

RTX = TensorRTRTX()
OPTIONS = BuildOptions(workspace=2**30)
SMS = (75, 80, 86, 89, 120, 121)  # ComputeCapability of TensorRT-RTX 1.7.1
LENGTHS = Profile({"x": ShapeRange((1, 1, 128), (1, 64, 128), (1, 256, 128))})
NUMPY: dict[int, Any] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}
TRUNK = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def save(path: Path, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], opset: int = 20) -> Path:
    """A model from ``x`` (1, L, 128) to ``y``, both fp32."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "L", 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def attention(
    path: Path, trunk: int = TensorProto.FLOAT16, *, core: int | None = None, fp8: bool = False
) -> Path:
    """One self attention of two heads: to_qkv, core, to_out; ``core`` is the type of QK^T alone."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def constant(name: str, value: Any) -> str:
        weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"{name}:0"], name=name, **attributes))
        return f"{name}:0"

    def cast(value: str, to: int) -> str:
        return node("Cast", [value], f"{value}/to_{to}", to=to)

    def quantized(value: str, scale: float) -> str:
        scales = constant(f"{value}/scale", np.asarray(scale, NUMPY[trunk]))
        zero = f"{value}/zero"
        weights.append(helper.make_tensor(zero, TensorProto.FLOAT8E4M3FN, [], [0.0]))
        q = node("QuantizeLinear", [value, scales, zero], f"{value}/Q")
        return node("DequantizeLinear", [q, scales, zero], f"{value}/DQ")

    def linear(value: str, name: str, width: int) -> str:
        weight = constant(f"{name}.weight", (rng.standard_normal((128, width)) * 0.1).astype(NUMPY[trunk]))
        if fp8:
            value, weight = quantized(value, 0.05), quantized(weight, 0.001)
        return node("MatMul", [value, weight], f"{name}/MatMul")

    x = "x" if trunk == TensorProto.FLOAT else cast("x", trunk)
    split = [f"attn/Split:{i}" for i in range(3)]
    qkv = linear(x, "to_qkv", 384)
    nodes.append(helper.make_node("Split", [qkv], split, name="attn/Split", axis=2, num_outputs=3))
    heads = constant("heads", np.array([0, 0, 2, 64]))
    q, k, v = (
        node("Transpose", [node("Reshape", [part, heads], f"attn/r{i}")], f"attn/t{i}", perm=perm)
        for i, (part, perm) in enumerate(zip(split, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True))
    )
    if core is not None:
        q, k = cast(q, core), cast(k, core)
    # Both are scaled: a cast back up alone is undone by TensorRT, which then fuses all the same.
    scale = constant("attn/scale", np.asarray(0.125**0.5, NUMPY[trunk if core is None else core]))
    q, k = node("Mul", [q, scale], "attn/q"), node("Mul", [k, scale], "attn/k")
    scores = node("MatMul", [q, k], "attn/MatMul")
    if core is not None:
        scores = cast(scores, trunk)
    probabilities = node("Softmax", [scores], "attn/Softmax", axis=-1)
    out = node("MatMul", [probabilities, v], "attn/MatMul_1")
    out = node("Transpose", [out], "attn/t3", perm=[0, 2, 1, 3])
    out = node("Reshape", [out, constant("width", np.array([0, 0, 128]))], "attn/r3")
    out = linear(out, "to_out", 128)
    nodes.append(helper.make_node("Cast", [out], ["y"], name="y/Cast", to=TensorProto.FLOAT))
    return save(path, nodes, weights)


CORE = ("attn/MatMul", "attn/Softmax", "attn/MatMul_1")


def request(onnx_file: Path, sm: int = 89, profiles: tuple[Profile, ...] = (LENGTHS,)) -> CompileRequest:
    return CompileRequest(onnx_file, onnx_file.with_suffix(".trt"), sm, OPTIONS, profiles)


def build(onnx_file: Path, sm: int = 89, profiles: tuple[Profile, ...] = (LENGTHS,)) -> CompiledEngine:
    """Build in this process, which spares the start of another."""
    wanted = request(onnx_file, sm, profiles)
    plan = RTX.build(wanted, lambda phase: None)
    layers = read_layer_table(plan.layer_table)
    return CompiledEngine(wanted.engine, plan, RTX.name, sm, layers.layers, layers.io, layers.source)


# --- what an engine consists of -------------------------------------------------------------


@pytest.mark.parametrize("sm", SMS)
def test_fp16_core_is_one_fused_kernel_on_every_architecture(tmp_path: Path, sm: int) -> None:
    engine = build(attention(tmp_path / "a.onnx"), sm)
    (fused,) = [layer for layer in engine.layers if layer.is_fused_attention]
    assert set(CORE) <= set(fused.onnx_nodes)
    assert fused.qkv_dtypes == ("fp16", "fp16", "fp16")
    index = index_by_node(engine.layers)
    for linear in ("to_qkv/MatMul", "to_out/MatMul"):
        assert {la.product_dtype for la in index[linear] if la.is_gemm} == {"fp16"}


def test_bf16_core_is_fused_and_bf16(tmp_path: Path) -> None:
    engine = build(attention(tmp_path / "a.onnx", TensorProto.BFLOAT16))
    assert [la.qkv_dtypes for la in engine.layers if la.is_fused_attention] == [("bf16",) * 3]


def test_fp32_q_and_k_keep_the_core_from_fusing(tmp_path: Path) -> None:
    engine = build(attention(tmp_path / "a.onnx", core=TensorProto.FLOAT))
    assert not any(layer.is_fused_attention for layer in engine.layers)
    index = index_by_node(engine.layers)
    assert {la.product_dtype for la in index["attn/MatMul"] if la.is_gemm} == {"fp32"}
    assert {la.product_dtype for la in index["attn/MatMul_1"] if la.is_gemm} == {"fp16"}


def test_fp8_linears_become_fp8_gemms_and_the_core_stays_fp16(tmp_path: Path) -> None:
    engine = build(attention(tmp_path / "a.onnx", fp8=True))
    index = index_by_node(engine.layers)
    for linear in ("to_qkv/MatMul", "to_out/MatMul"):
        gemms = [layer for layer in index[linear] if layer.is_gemm]
        assert [layer.product_dtype for layer in gemms] == ["fp8"]
        assert gemms[0].reads_fp8
    (fused,) = [layer for layer in engine.layers if layer.is_fused_attention]
    assert fused.qkv_dtypes == ("fp16", "fp16", "fp16")
    assert fused.outputs[0].dtype == "fp8"  # it has absorbed the quantize of to_out


def test_io_contract_and_evidence(tmp_path: Path) -> None:
    path = attention(tmp_path / "a.onnx")
    short = Profile({"x": ShapeRange((1, 8, 128), (1, 8, 128), (1, 8, 128))})
    engine = compile_engine("tensorrt_rtx", request(path, profiles=(LENGTHS, short)))
    ranges = (
        ProfileRange((1, 1, 128), (1, 64, 128), (1, 256, 128)),
        ProfileRange((1, 8, 128), (1, 8, 128), (1, 8, 128)),
    )
    assert engine.io == (
        EngineIO("x", "input", "fp32", (1, -1, 128), ranges),
        EngineIO("y", "output", "fp32", (1, -1, 128)),
    )
    assert engine.layer_source == "builder log"
    assert (engine.path, engine.backend, engine.sm) == (tmp_path / "a.trt", "tensorrt_rtx", 89)
    assert engine.plan.size == engine.path.stat().st_size
    assert engine.plan.version == RTX.version()
    assert engine.plan.seconds > 0
    assert engine.layers == read_layer_table(engine.plan.layer_table).layers


def test_two_processes_give_the_same_bytes(tmp_path: Path) -> None:
    path = attention(tmp_path / "a.onnx")
    first = compile_engine("tensorrt_rtx", request(path))
    again = compile_engine("tensorrt_rtx", replace(request(path), engine=tmp_path / "b.trt"))
    assert first.path.read_bytes() == again.path.read_bytes()
    assert first.plan.sha256 == again.plan.sha256
    assert first.plan.layer_table == again.plan.layer_table


def test_real_graph_in_fp32(shared: Path, tmp_path: Path) -> None:
    """The 24 MatMul linears and the four cores of the dynamo export, none of them fused in fp32."""
    lengths = {
        "x": ShapeRange((1, 256, 1), (1, 256, 1292), (1, 256, 4096)),
        "local_add_cond": ShapeRange((1, 257, 1), (1, 257, 1292), (1, 257, 4096)),
    }
    source = shared / "models/sm_dynamo20.onnx"
    wanted = replace(request(source, profiles=(Profile(lengths),)), engine=tmp_path / "e.trt")
    plan = RTX.build(wanted, lambda phase: None)
    layers = read_layer_table(plan.layer_table)
    assert not any(layer.is_fused_attention for layer in layers.layers)
    assert {layer.product_dtype for layer in layers.layers} == {None, "fp32"}
    names = {io.name: (io.mode, io.dtype) for io in layers.io}
    inputs = ("x", "t", "t5_hidden", "t5_mask", "seconds_total", "local_add_cond")
    assert names == dict.fromkeys(inputs, ("input", "fp32")) | {"velocity": ("output", "fp32")}


# --- what a target can do -------------------------------------------------------------------


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "fp8"])
def test_check_support_says_what_the_compiler_does(tmp_path: Path, precision: PrecisionName, sm: int) -> None:
    path = attention(tmp_path / "a.onnx", TRUNK.get(precision, TensorProto.FLOAT16), fp8=precision == "fp8")
    reason = RTX.check_support(precision, sm)
    if reason is None:
        assert build(path, sm).layers
    else:
        assert f"sm_{sm}" in reason or "sm_89" in reason
        with pytest.raises(CompileError, match=f"sm_{sm}"):
            build(path, sm)


def test_supported_targets_are_read_from_the_library() -> None:
    assert RTX.supported_sms() == SMS


@pytest.mark.parametrize("sm", [70, 90, 100])
def test_unknown_target_is_refused_with_the_known_ones(tmp_path: Path, sm: int) -> None:
    with pytest.raises(PlatformError, match=r"sm_75, sm_80, sm_86, sm_89, sm_120, sm_121") as caught:
        compile_engine("tensorrt_rtx", request(attention(tmp_path / "a.onnx"), sm))
    assert caught.value.exit_code == 3
    assert (caught.value.hint is not None) == (sm == 90)
    assert not (tmp_path / "a.trt").exists()


def test_gpu_backend_without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(PlatformError, match="cannot be imported") as caught:
        load_backend("tensorrt").check_target(90)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("version", "here", "sm", "message"),
    [
        ("10.14.1.48", 90, 90, "10.14.1.48 is not supported"),
        ("12.0.0.1", 90, 90, "12.0.0.1 is not supported"),
        ("10.15.1.29", None, 90, "CUDA shows none"),
        ("11.4.0.106", 90, 89, "cannot build for sm_89 here; it can for sm_90"),
        ("10.15.1.29", 90, 90, None),
    ],
)
def test_gpu_backend_needs_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, version: str, here: int | None, sm: int, message: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__=version))
    monkeypatch.setattr(tensorrt_backend, "visible_sm", lambda: here)
    backend = load_backend("tensorrt")
    if message is None:
        backend.check_target(sm)
        assert backend.can_execute(sm)
    else:
        with pytest.raises(PlatformError, match=message):
            backend.check_target(sm)


def test_gpu_backend_precisions() -> None:
    backend = load_backend("tensorrt")
    assert backend.check_support("fp8", 90) is None
    assert backend.check_support("bf16", 80) is None
    assert "sm_89" in (backend.check_support("fp8", 80) or "")


def test_options_that_a_backend_lacks_are_refused() -> None:
    keys = {
        "timing_cache": "t.cache", "hardware_compatibility": "ampere_plus", "version_compatible": True,
        "refit": "all", "strip_plan": True, "weight_streaming": True, "plugins": ("p.so",),
    }  # fmt: skip
    everything = Build.model_validate(keys)
    assert set(RTX.refused_options(everything)) == {
        "timing_cache", "hardware_compatibility", "version_compatible", "refit", "strip_plan", "plugins",
    }  # fmt: skip
    assert RTX.refused_options(Build(weight_streaming=True, aux_streams=2, optimization_level=0)) == {}
    tensorrt = load_backend("tensorrt")
    assert tensorrt.refused_options(everything, (80, 90)) == {}
    assert set(tensorrt.refused_options(everything, (75, 90))) == {"hardware_compatibility"}
    level_0 = Build.model_validate({"timing_cache": "t.cache", "optimization_level": 0})
    assert set(tensorrt.refused_options(level_0)) == {"timing_cache"}


def test_options_by_tensorrts_names() -> None:
    import tensorrt_rtx as trt

    build_section = Build(
        workspace_gb=1.5, refit="individual", strip_plan=True, version_compatible=True,
        weight_streaming=True, optimization_level=4, aux_streams=1, hardware_compatibility="ampere_plus",
    )  # fmt: skip
    options = build_options(build_section, tf32=True)
    assert options == BuildOptions(
        workspace=3 * 2**29, tf32=True, optimization_level=4, aux_streams=1,
        hardware_compatibility="AMPERE_PLUS",
        flags=("REFIT_INDIVIDUAL", "STRIP_PLAN", "VERSION_COMPATIBLE", "WEIGHT_STREAMING"),
    )  # fmt: skip
    assert set(options.flags) <= set(dir(trt.BuilderFlag))
    assert "AMPERE_PLUS" in dir(trt.HardwareCompatibilityLevel)
    assert build_options(Build()) == BuildOptions(workspace=16 * 2**30)


# --- errors ---------------------------------------------------------------------------------


def small(path: Path, op: str, weight: Any, **options: Any) -> Path:
    nodes = [helper.make_node(op, ["x", "w"], ["y"], name=f"/layers.0/{op}")]
    return save(path, nodes, [numpy_helper.from_array(np.asarray(weight), "w")], **options)


def test_mixed_types_name_the_node_and_both_types(tmp_path: Path) -> None:
    for op, weight in (("MatMul", np.ones((128, 8), np.float16)), ("Mul", np.ones(128, np.float16))):
        with pytest.raises(CompileError, match=r"fp32 and fp16") as caught:
            build(small(tmp_path / "a.onnx", op, weight))
        assert caught.value.where == f"node /layers.0/{op}"
        assert "Cast" in (caught.value.hint or "")


def test_unknown_operator_names_it_and_its_node(tmp_path: Path) -> None:
    for op in ("FooBar", "StringNormalizer"):
        path = save(tmp_path / "a.onnx", [helper.make_node(op, ["x"], ["y"], name="/l/n")], [])
        with pytest.raises(CompileError, match=f"operator {op}") as caught:
            build(path)
        assert caught.value.where == "node /l/n"


def test_impossible_reshape_keeps_tensorrts_reason(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"/layers.0/Reshape.* would change volume 8192 to 15") as caught:
        build(small(tmp_path / "a.onnx", "Reshape", np.array([1, 3, 5])))
    assert "/_src/" not in str(caught.value)


def test_impossible_gather_names_its_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["x", "w"], ["y"], name="/l/Gather", axis=5)]
    weight = numpy_helper.from_array(np.array([0]), "w")
    with pytest.raises(CompileError, match=r"Gather: Axis must be in the range") as caught:
        build(save(tmp_path / "a.onnx", nodes, [weight]))
    assert caught.value.where == "node /l/Gather"
    assert "cudaError" not in str(caught.value)


def test_fp32_attention_operator_has_no_kernel(shared: Path, tmp_path: Path) -> None:
    source = shared / "models/sm_dynamo23.onnx"
    lengths = {
        "x": ShapeRange((1, 256, 1), (1, 256, 64), (1, 256, 64)),
        "local_add_cond": ShapeRange((1, 257, 1), (1, 257, 64), (1, 257, 64)),
    }
    wanted = replace(request(source, profiles=(Profile(lengths),)), engine=tmp_path / "e.trt")
    with pytest.raises(CompileError, match="no fused kernel") as caught:
        RTX.build(wanted, lambda phase: None)
    assert "decompose" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ((), "no optimization profile"),
        ((Profile({"x": ShapeRange((1, 1), (1, 2), (1, 2))}),), "3 dimensions but profile 0 has 2"),
        ((Profile({"x": ShapeRange((1, 1, 7), (1, 1, 7), (1, 1, 7))}),), "but tensor has 128"),
        ((Profile({"x": ShapeRange((1, 9, 128), (1, 4, 128), (1, 8, 128))}),), "does not accept"),
        ((Profile({"z": ShapeRange((1,), (1,), (1,))}),), "missing dimensions in profile 0"),
    ],
)
def test_bad_profiles_are_recipe_errors(tmp_path: Path, profiles: tuple[Profile, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        build(attention(tmp_path / "a.onnx"), profiles=profiles)
    assert (caught.value.where or "").startswith("profiles")


def test_files_that_are_missing_or_foreign(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match="no such ONNX file"):
        build(tmp_path / "nowhere.onnx")
    foreign = tmp_path / "foreign.onnx"
    foreign.write_text("no model at all")
    with pytest.raises(SourceModelError, match="cannot read it as an ONNX model"):
        build(foreign)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="/l/MatMul")]
    weight = numpy_helper.from_array(np.ones((128, 8), np.float32), "w")
    path = save(tmp_path / "split.onnx", nodes, [weight])
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="split.data", size_threshold=0)
    (tmp_path / "split.data").unlink()
    with pytest.raises(SourceModelError, match=r"split\.data: the file with the weights cannot be opened"):
        build(path)


def test_full_disk_and_missing_folder(tmp_path: Path) -> None:
    wanted = request(attention(tmp_path / "a.onnx"))
    with pytest.raises(ResourceError, match="No space left on device") as caught:
        RTX.build(replace(wanted, engine=Path("/dev/full")), lambda phase: None)
    assert caught.value.exit_code == 8
    with pytest.raises(ResourceError, match="No such file or directory"):
        RTX.build(replace(wanted, engine=tmp_path / "none/a.trt"), lambda phase: None)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        # Messages of TensorRT-RTX 1.7.1, collected from builds under limits on memory.
        (
            "[myelinResourceManager.cpp::virtual void* nvinfer1::rt::MyelinHostBuffer::allocate(const "
            "string&, cudaStream_t)::206] Error Code 2: OutOfMemory (Requested size was 503316863 bytes.)",
            ResourceError,
            "memory ran out",
        ),
        (
            "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([myelin_graph.h:1295: "
            "attachExceptionMsgToGraph] MyelinCheckException: myelin_tensor.h:47: CHECK(p) failed.  In "
            "compileGraph at /_src/optimizer/myelin/codeGenerator.cpp:2012)",
            ResourceError,
            "memory ran out",
        ),
        (
            "WeightsContextMemoryMap.cpp:140: Failed to map file to memory: big.onnx.data",
            ResourceError,
            "memory ran out",
        ),
        # INormalization's message as TensorRT 10.x gives it; TensorRT-RTX casts the scale instead.
        (
            "INetworkDefinition::addNormalizationV2: Error Code 4: API Usage Error (/n/RMSNorm: "
            "INormalizationLayer input and scale must have identical types. In validate at /_src/x.cpp:7)",
            CompileError,
            "node /n/RMSNorm: its inputs have different types",
        ),
        (
            "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:99: run_passes] Something "
            "new. In compileGraph at /_src/optimizer/myelin/codeGenerator.cpp:2012)",
            CompileError,
            r"^Something new$",
        ),
    ],
)  # fmt: skip
def test_translation(text: str, kind: type[BuilderError], message: str) -> None:
    error = translate(text)
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error
    assert "/_src/" not in str(error)


# --- the child process ----------------------------------------------------------------------


def children() -> list[int]:
    """Process ids of this process's children."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def test_cancel_stops_the_build_at_once(tmp_path: Path) -> None:
    cancel = threading.Event()
    wanted = request(attention(tmp_path / "a.onnx"))
    before = children()
    started = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        compile_engine("tensorrt_rtx", wanted, cancel=cancel, on_progress=lambda progress: cancel.set())
    assert caught.value.exit_code == 130
    assert time.monotonic() - started < 5
    assert children() == before
    assert not wanted.engine.exists()


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (signal.SIGKILL, ResourceError, "memory ran out"),  # as the kernel's OOM killer does
        (signal.SIGSEGV, CompileError, "ended unexpectedly with SIGSEGV"),
        (signal.SIGTERM, Interrupted, "stopped"),
    ],
)
def test_death_of_the_compiler_is_an_error(
    tmp_path: Path, number: signal.Signals, kind: type[BuilderError], message: str
) -> None:
    before = set(children())

    def strike(progress: Progress) -> None:
        for child in set(children()) - before:
            os.kill(child, number)

    wanted = request(attention(tmp_path / "a.onnx"))
    with pytest.raises(kind, match=message):
        compile_engine("tensorrt_rtx", wanted, on_progress=strike)
    assert not wanted.engine.exists()


def test_errors_cross_the_process_with_place_and_hint(tmp_path: Path) -> None:
    path = small(tmp_path / "a.onnx", "Mul", np.ones(128, np.float16))
    with pytest.raises(CompileError) as here:
        build(path)
    with pytest.raises(CompileError) as there:
        compile_engine("tensorrt_rtx", request(path))
    assert vars(there.value) == vars(here.value)
    assert not (tmp_path / "a.trt").exists()


def test_progress_and_messages_reach_the_caller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Progress] = []
    with caplog.at_level(logging.INFO, logger=MESSAGES.name):
        compile_engine("tensorrt_rtx", request(attention(tmp_path / "a.onnx")), on_progress=seen.append)
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert phases[-1] == "Compiling kernels"  # what it does last and longest
    assert phases.index("Parsing ONNX") < phases.index("Building engine")
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(seen))
    messages = {(record.levelname, record.message.split(":")[0]) for record in caplog.records}
    assert ("INFO", "Total Weights Memory") in messages
    assert not any(record.levelno < logging.INFO for record in caplog.records)
