"""Layer records from every spelling of the layer table.

Figures of the shared dumps were counted with grep and by eye, the command is given beside each.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine_builder.errors import SourceModelError, VerificationError
from verify.layers import (
    EngineIO,
    EngineLayers,
    LayerRecord,
    NotDetailed,
    ProfileRange,
    TensorRecord,
    index_by_node,
    load_layers,
    normalise_dtype,
    parse_build_log,
    parse_inspector_json,
    parse_metadata,
)

RTX_DUMP = "inspector/rtx_1.7.1_sm89_sm_fp16.layers.txt"
TRT8_DUMP = "inspector/trt8_resnet_fp16_a100.graph.json"


def fused(dump: EngineLayers) -> list[LayerRecord]:
    return [layer for layer in dump.layers if layer.is_fused_attention]


# --- the shared dumps -----------------------------------------------------------------------


def test_rtx_dump_has_the_hand_counted_layers_and_types(shared: Path) -> None:
    dump = load_layers(shared / RTX_DUMP)
    assert dump.source == "builder log"
    assert len(dump.layers) == 97  # grep -c '^Name: '
    # grep -oE 'LayerType: [A-Za-z_]+' | sort | uniq -c
    assert Counter(layer.layer_type for layer in dump.layers) == {
        "kgen": 49, "gemm": 14, "runtime_fusion": 10, "signal": 7, "wait": 7,
        "cast": 4, "reshape": 4, "ShapeHostToDevice": 1, "shape_call": 1,
    }  # fmt: skip
    # grep -oE 'Datatype: [A-Za-z0-9]+' | sort | uniq -c: 96 Float, 225 Half, 14 Int64
    tensors = [t for layer in dump.layers for t in layer.inputs + layer.outputs + layer.constants]
    assert Counter(t.dtype for t in tensors) == {"fp32": 96, "fp16": 225, "int64": 14}
    assert dump.io == ()  # the file ends with the last layer


def test_rtx_dump_has_one_fused_kernel_per_attention_core(shared: Path) -> None:
    """Two blocks with one self and one cross attention each: grep -c _gemm_mha_v2_myl1 gives 4."""
    cores = fused(load_layers(shared / RTX_DUMP))
    prefix = "/transformer/layers."
    assert [layer.onnx_nodes for layer in cores] == [
        tuple(f"{prefix}{block}/{kind}/{node}" for node in ("MatMul_1", "Softmax", "MatMul"))
        for block in (0, 1)
        for kind in ("self_attn", "cross_attn")
    ]
    assert [layer.qkv_dtypes for layer in cores] == [("fp16", "fp16", "fp16")] * 4
    # k of a cross attention: 2 heads of 64, 257 tokens
    assert cores[1].inputs[1].shape == (2, 64, 257)
    assert cores[0].inputs[0].shape == (2, -1, 64)


def test_rtx_dump_products_and_moves(shared: Path) -> None:
    layers = load_layers(shared / RTX_DUMP).layers
    assert sum(layer.is_gemm for layer in layers) == 24  # 14 gemm + 10 runtime_fusion, all named Fc
    assert sum(layer.is_gemv for layer in layers) == 5  # grep -c MulSum: the single-row linears
    assert {layer.product_dtype for layer in layers} == {None, "fp16"}
    # grep -cE '^Name: __myl_(Move|Repl|Conc|Slic|Resh|Tran)+_myl'
    assert sum(layer.only_moves_data for layer in layers) == 8
    assert sum("Sin" in layer.operators for layer in layers) == 2  # t and seconds, grep -c SinCos
    assert not any(layer.touches_fp8 for layer in layers)


def test_rtx_dump_metadata(shared: Path) -> None:
    layers = load_layers(shared / RTX_DUMP).layers
    names = [name for layer in layers for name in layer.onnx_nodes]
    assert len(names) == 458  # grep -o 'ONNX Layer: ' | wc -l
    assert len(set(names)) == 435  # grep -oE '\[ONNX Layer: [^]]*\]' | sort -u | wc -l
    index = index_by_node(layers)
    # The first linear of to_local_embed was padded, multiplied for both blocks at once, and cut.
    found = index["/transformer/layers.1/to_local_embed/to_local_embed.0/MatMul"]
    assert [layer.is_gemm for layer in found] == [False, True, False]
    # A remark that TensorRT appends is no part of the name: ...Conv]__gemm_from_conv1x1
    assert [layer.layer_type for layer in index["/preprocess_conv/Conv"]] == ["gemm"]


def test_trt8_dump_has_the_hand_counted_layers_and_types(shared: Path) -> None:
    dump = load_layers(shared / TRT8_DUMP)
    assert dump.source == "inspector JSON"
    assert len(dump.layers) == 36  # grep -c '"LayerType"'
    assert Counter(layer.layer_type for layer in dump.layers) == {
        "CaskConvolution": 21, "NoOp": 11, "Reformat": 2, "CudaPooling": 1, "CaskPooling": 1,
    }  # fmt: skip
    # grep -o '"Format/Datatype": "[^"]*FP..': 78 FP16; FP32 at the input and the output only
    tensors = [t for layer in dump.layers for t in layer.inputs + layer.outputs]
    assert Counter(t.dtype for t in tensors) == {"fp16": 78, "fp32": 2}
    assert dump.io == (
        EngineIO("input.1", "input", "fp32", (32, 3, 224, 224)),
        EngineIO("191", "output", "fp32", (32, 1000)),
    )
    first = dump.layers[1]
    assert first.name == "Conv_0 + Relu_1"
    assert first.constants == (
        TensorRecord("Weights", "fp16", (9408,)),  # 64 maps of 7 x 7 x 3
        TensorRecord("Bias", "fp16", (64,)),
    )
    assert first.tactic.startswith("trt_turing_cutlass_image_network_first_layer")
    assert first.onnx_nodes == ()  # 8.x had no metadata


# --- JSON of later releases -----------------------------------------------------------------


def layer_json(name: str = "_gemm_mha_v2_myl0_4", **changes: Any) -> dict[str, Any]:
    tensor = {"Name": "t", "Location": "Device", "Dimensions": [2, -1, 64], "Format/Datatype": "Half"}
    layer = {
        "Name": name,
        "LayerType": "kgen",
        "Inputs": [dict(tensor, Name=n) for n in "qkv"],
        "Outputs": [dict(tensor, Name="o")],
        "TacticName": "_gemm_mha_v2_0x957a2fe283f77dcf35c142c1390a3e6a",
        "StreamId": 0,
        "Metadata": "\x1f".join(f"[ONNX Layer: /attn/{n}]" for n in ("MatMul_1", "Softmax", "MatMul")),
    }
    return layer | changes


def test_json_of_10x() -> None:
    document = {"Layers": [layer_json()], "Bindings": ["q", "o", "q [profile 1]", "o [profile 1]"]}
    dump = parse_inspector_json(json.dumps(document))
    (layer,) = dump.layers
    assert layer.qkv_dtypes == ("fp16", "fp16", "fp16")
    assert layer.onnx_nodes == ("/attn/MatMul_1", "/attn/Softmax", "/attn/MatMul")
    assert layer.inputs[0] == TensorRecord("q", "fp16", (2, -1, 64), "Half")
    assert [(io.name, io.mode) for io in dump.io] == [("q", "input"), ("o", "output")]


def test_json_of_11x() -> None:
    tensor = {"Name": "w", "Dimensions": [768, 128], "Datatype": "FP8", "Format": "(Transposed) Transposed"}
    layer = layer_json(
        "/lin/MatMul_myl1_4",
        LayerType="gemm",
        Inputs=[dict(tensor, Name="x", Dimensions=[1, 768])],
        Constants=[tensor, dict(tensor, Name="alpha", Dimensions=[1], Datatype="Float")],
        Outputs=[dict(tensor, Name="y", Datatype="BFloat16")],
        TacticName="",
    )
    x = {
        "Name": "x", "IOMode": "Input", "DataType": "Float", "Dimensions": [1, 256, -1],
        "ProfileInfo": [
            {"MinShape": [1, 256, 1], "OptShape": [1, 256, 1292], "MaxShape": [1, 256, 4096], "Format": "f"},
            {"MinShape": [1, 256, 8], "OptShape": [1, 256, 8], "MaxShape": [1, 256, 8], "Format": "f"},
        ],
    }  # fmt: skip
    y = dict(x, Name="velocity", IOMode="Output", ProfileInfo=[{"Format": "f"}])
    dump = parse_inspector_json(json.dumps({"Layers": [layer], "I/O Tensors": [x, y]}))
    (gemm,) = dump.layers
    assert (gemm.is_gemm, gemm.product_dtype, gemm.reads_fp8) == (True, "fp8", True)
    assert gemm.outputs[0].dtype == "bf16"
    assert gemm.constants[0].format == "(Transposed) Transposed"
    assert dump.io == (
        EngineIO(
            "x", "input", "fp32", (1, 256, -1),
            (ProfileRange((1, 256, 1), (1, 256, 1292), (1, 256, 4096)),
             ProfileRange((1, 256, 8), (1, 256, 8), (1, 256, 8))),
        ),
        EngineIO("velocity", "output", "fp32", (1, 256, -1)),
    )  # fmt: skip


def test_json_with_a_raw_separator_inside_a_string() -> None:
    raw = json.dumps({"Layers": [layer_json()], "Bindings": []}).replace("\\u001f", "\x1f")
    assert len(parse_inspector_json(raw).layers[0].onnx_nodes) == 3


# --- the text table -------------------------------------------------------------------------

TENSOR = (
    "{{ Name: {0}, Dimensions: [2,-1,64], Strides: [64,128,1], StrideOrder: [1,2,0], "
    "Datatype: {1}, Format: (Linear) Row major }}"
)
TABLE = (
    "Layers:\n"
    f"Name: _gemm_mha_v2_myl1_1, LayerType: kgen, Inputs: [ {TENSOR.format('q', 'Half')}, "
    f"{TENSOR.format('k', 'Half')}, {TENSOR.format('v', 'Half')}], Constants: [], "
    f"Outputs: [ {TENSOR.format('o', 'FP8')}], TacticName: _gemm_mha_v2_0x61, StreamId: 0, "
    "Metadata: [ONNX Layer: /out/Q][ONNX Layer: /attn/MatMul]\n"
    "\n"
    "I/O Tensors:\n"
    " Name: x, IOMode: Input, DataType: Float, Dimensions: [1,256,-1], Location: Device, "
    "IsShapeInferenceIO: false, ProfileInfo: [ { MinShape: [1,256,1], OptShape: [1,256,8], "
    "MaxShape: [1,256,16], Format: Row major linear FP32 format (kLINEAR) }, { MinShape: [1,256,32], "
    "OptShape: [1,256,32], MaxShape: [1,256,32], Format: Row major linear FP32 format (kLINEAR) }]\n"
    " Name: y, IOMode: Output, DataType: Float, Dimensions: [1,256,-1], Location: Device, "
    "ProfileInfo: [ { Format: Row major linear FP32 format (kLINEAR) }]\n"
    "\n"
    "Engine Metadata:\n"
    " Multi-Device: Disabled\n"
)


def test_text_table_with_io() -> None:
    dump = parse_build_log(TABLE)
    (layer,) = dump.layers
    # The FP8 output is the next linear's quantize; the attention itself reads fp16.
    assert (layer.qkv_dtypes, layer.outputs[0].dtype) == (("fp16", "fp16", "fp16"), "fp8")
    assert (layer.reads_fp8, layer.touches_fp8) == (False, True)
    assert dump.io == (
        EngineIO(
            "x", "input", "fp32", (1, 256, -1),
            (ProfileRange((1, 256, 1), (1, 256, 8), (1, 256, 16)),
             ProfileRange((1, 256, 32), (1, 256, 32), (1, 256, 32))),
        ),
        EngineIO("y", "output", "fp32", (1, 256, -1)),
    )  # fmt: skip


def test_whole_log_with_two_tables_gives_the_last() -> None:
    log = f"[V] Building\n[V] {TABLE}[I] again\n[V] {TABLE.replace('/attn/', '/second/')}[I] Engine built\n"
    assert parse_build_log(log).layers[0].onnx_nodes == ("/out/Q", "/second/MatMul")


def test_text_table_of_10x() -> None:
    """One Format/Datatype key, no constants, and a mask between k and v."""
    tensors = ", ".join(f"{{ Name: {n}, Dimensions: [4,40,64], Format/Datatype: Half }}" for n in "qkmv")
    line = (
        f"Name: _gemm_mha_v2_myl0_17, LayerType: kgen, Inputs: [ {tensors}], "
        "Outputs: [ { Name: o, Location: Device, Dimensions: [4,40,64], "
        "Format/Datatype: Row major linear FP32 }], "
        "TacticName: _gemm_mha_v2_0x957a, StreamId: 0, Metadata: [ONNX Layer: /encoder/layers.2/mha/MatMul]"
    )
    (layer,) = parse_build_log(f"Layers:\n{line}\n\nBindings:\nq\no\n").layers
    assert len(layer.inputs) == 4
    assert layer.qkv_dtypes == ("fp16", "fp16", "fp16")
    assert layer.outputs[0].dtype == "fp32"


# --- single rules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("[ONNX Layer: a][ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: a]\x1e[ONNX Layer: b]\x1e", ("a", "b")),
        ("[ONNX Layer: a]\x1f[ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: /p/Conv]__gemm_from_conv1x1", ("/p/Conv",)),
        ("[ONNX Layer: blocks[0]/q k/MatMul][ONNX Layer: x[1]]", ("blocks[0]/q k/MatMul", "x[1]")),
        ("[ONNX Layer: a, TacticName: b]", ("a, TacticName: b",)),
        ("[ONNX Layer: a][ONNX Layer: a]", ("a",)),
        ("(Unnamed Layer* 3) [Shuffle]", ()),
    ],
)
def test_metadata(text: str, names: tuple[str, ...]) -> None:
    assert parse_metadata(text) == names


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("Float", "fp32"), ("Half", "fp16"), ("BFloat16", "bf16"), ("FP8", "fp8"), ("FP4", "fp4"),
        ("E8M0", "e8m0"), ("Int64", "int64"), ("Int32", "int32"), ("Int8", "int8"), ("UInt8", "uint8"),
        ("Int4", "int4"), ("Bool", "bool"),
        ("Row major linear FP32", "fp32"),
        ("Two wide channel vectorized row major FP16 format", "fp16"),
        ("Thirty-two wide channel vectorized row major Int8 format.", "int8"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16"),
        ("N/A due to dynamic shapes", "unknown"), ("", "unknown"),
    ],
)  # fmt: skip
def test_dtype_vocabulary(text: str, dtype: str) -> None:
    assert normalise_dtype(text) == dtype


@pytest.mark.parametrize(
    ("name", "layer_type", "tactic", "expected"),
    [
        ("_gemm_mha_v2_myl1_24", "kgen", "_gemm_mha_v2_0x23bf", True),
        ("_gemv_mha_v1_myl0_3", "kgen", "", True),
        ("__mye8037_gemm_mha_v2", "kgen", "", True),
        ("layer", "PluginV2", "fmha_v2_flash_attention_fp16_64_32_S_64_sm90_kernel", True),
        # A GEMM is named after its node, whose name is the model author's choice.
        ("/encoder/layers_2/mha/attn/key/MatMul_myl0_16", "gemm", "sm80_xmma_gemm_f16f16_f16f16", False),
        ("mhar_proj", "gemm", "", False),
        ("__myl_SlicReshMaxrSubExpSumDivMul_myl1_25", "kgen", "", False),
    ],
)
def test_fused_attention_is_told_from_gemms(name: str, layer_type: str, tactic: str, expected: bool) -> None:
    layer = LayerRecord(name, layer_type, tactic=tactic)
    assert layer.is_fused_attention is expected
    assert layer.is_gemm is (layer_type == "gemm")


@pytest.mark.parametrize("extra", ["int32", "int64", "bool"])
def test_integers_of_a_fused_kernel_are_not_its_values(extra: str) -> None:
    """A mask and a guard against empty rows, as TensorRT-RTX 1.7.1 lists the kernel for sm_89."""
    tensors = (
        TensorRecord("q", "fp16", (2, -1, 64)),
        TensorRecord("k", "fp16", (2, 64, 257)),
        TensorRecord("mask", "fp16", (1, 1, 1, 257)),
        TensorRecord("v", "bf16", (2, 257, 64)),
        TensorRecord("sizes", extra, (1, 1, 11)),
    )
    assert LayerRecord("_gemm_mha_v2_myl1_47", "kgen", tensors).qkv_dtypes == ("fp16", "fp16", "bf16")
    # Nothing is said of a kernel that shows two tensors and integers.
    assert LayerRecord("_gemm_mha_v2_myl1_47", "kgen", (*tensors[:2], tensors[4])).qkv_dtypes == ()


def test_product_dtype_is_that_of_the_weight() -> None:
    """to_out of a self attention with the gate folded in, as TensorRT-RTX 1.7.1 lists it for sm_89."""
    layer = LayerRecord(
        "__myl_FcCastMulAdd_myl1_24",
        "runtime_fusion",
        inputs=(
            TensorRecord("gate", "fp32", (1, 1, 128)),
            TensorRecord("residual", "fp32", (1, -1, 128)),
            TensorRecord("attention", "fp16", (1, -1, 128)),
        ),
        constants=(TensorRecord("weight", "fp16", (1, 128, 128)), TensorRecord("alpha", "fp32", (1,))),
    )
    assert (layer.is_gemm, layer.product_dtype) == (True, "fp16")
    assert LayerRecord("__myl_FcCast_myl1_24", "runtime_fusion", layer.inputs[:2]).product_dtype == "fp32"


def test_operators_of_a_cut_name() -> None:
    layer = LayerRecord("__myl_AddSqrtDivEtc_myl1_16", "kgen")
    assert layer.operators == ("Add", "Sqrt", "Div", "Etc")
    assert not layer.only_moves_data
    assert LayerRecord("/a/MatMul_myl1_3", "gemm").operators == ()


# --- what cannot be verified ----------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"Layers": ["conv1 + relu1"\n,"pool1"\n],\n"Bindings": ["x"\n,"y"\n]}',
        "Layers:\nconv1 + relu1\npool1\n\nBindings:\nx\ny\n",
    ],
)
def test_bare_names_are_not_verifiable(tmp_path: Path, text: str) -> None:
    path = tmp_path / "layers"
    path.write_text(text)
    with pytest.raises(NotDetailed, match="DETAILED") as caught:
        load_layers(path)
    assert isinstance(caught.value, VerificationError)
    assert (caught.value.exit_code, caught.value.kind) == (7, "not verifiable")
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"Layers": [{"Name": "a", "LayerTy', "cut short"),
        ('{"layers": []}', "no TensorRT layer dump"),
        ('{"Layers": []}', "no TensorRT layer dump"),
        ("[1, 2]", "no TensorRT layer dump"),
        ('{"Layers": [{"LayerType": "kgen", "Inputs": [], "Outputs": []}]}', "layer 0 has no Name"),
        ('{"Layers": [{"Name": "a", "LayerType": "k", "Inputs": [7], "Outputs": []}]}', "unknown layout"),
        (json.dumps({"Layers": [layer_json(Metadata="[ONNX Layer: a")]}), "is not closed"),
        ("", "no TensorRT layer dump"),
        ("some text\nof another kind\n", "no TensorRT layer dump"),
        ("Layers:\n", "no TensorRT layer dump"),
        ("Name: a, LayerTy", "layer 0 ends early"),
        ("Name: a, LayerType: kgen, Inputs: [ { Name: x, Dimen", "unreadable Inputs list"),
        ("Name: a, LayerType: kgen, Inputs: []", "lacks its inputs or outputs"),
        (TABLE[: TABLE.index("/attn/MatMul")], "is not closed"),
        ("\udcff", "no TensorRT layer dump"),
    ],
)
def test_damaged_or_foreign_files(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "layers"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SourceModelError, match=reason) as caught:
        load_layers(path)
    assert caught.value.exit_code == 4
    assert caught.value.where == str(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match="No such file"):
        load_layers(tmp_path / "nowhere.json")


def test_json_cut_anywhere_is_damaged(shared: Path) -> None:
    text = (shared / TRT8_DUMP).read_text()
    for end in range(1, len(text.rstrip()) - 1, 499):
        with pytest.raises(SourceModelError):
            parse_inspector_json(text[:end])


def test_text_line_cut_before_its_metadata_is_damaged() -> None:
    line = TABLE.splitlines()[1]
    for end in range(len("Name: "), line.index("TacticName") - 2):
        with pytest.raises(SourceModelError):
            parse_build_log(line[:end])
