"""The seeded faults: each way to break a build, what must catch it and what must be named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from benchmarks import damage
from benchmarks.fault_kinds import (
    Caught,
    Fault,
    another_model,
    as_json,
    at_gate,
    bare_names,
    bare_table,
    by_layers,
    by_recipe,
    by_report,
    by_scales,
    by_source,
    cut_line,
    cut_table,
    expecting,
    first_range,
    flip_byte,
    foreign_scales,
    foreign_source,
    fp8_on_86,
    fp8_unscaled,
    fp16_input,
    hopper,
    in_engine,
    in_graph,
    in_layers,
    in_weight,
    io_changed,
    io_missing,
    layer_changed,
    linear_excluded,
    missing_scale,
    of_depth,
    of_other,
    other_layers,
    retyped,
    same_model,
    stale_scales,
    truncated_source,
    unbaked,
    version_2,
    without_norms,
)
from benchmarks.workshop import Workshop
from engine_builder.recipe import Profile, ShapeRange
from engine_builder.sample import SampleSpec, Size, Spelling
from verify.layers import LayerRecord

_SHORT: Final = (
    Profile(
        {
            "x": ShapeRange((1, 256, 1), (1, 256, 64), (1, 256, 128)),
            "local_add_cond": ShapeRange((1, 257, 1), (1, 257, 64), (1, 257, 128)),
        }
    ),
)
_PROMISE: Final = {
    "fourier_path_fp16": ("fp32_angle", "/seconds/Cos"),
    "fourier_head_fp16": ("fp32_angle", "/seconds/Cos"),
    "timestep_cosine_trunk": ("fp32_angle", "/timestep_features/Cos"),
    "rotary_angle_trunk": ("fp32_angle", f"{damage.ATTENTION}/Cos"),
    "rotation_trunk": ("fp32_rotation", f"{damage.ATTENTION}/Concat_5"),
    "norm_trunk": ("fp32_norm", f"{damage.LAYER}/pre_norm/Mul_1"),
    "gain_trunk": ("fp32_norm", f"{damage.LAYER}/pre_norm/Mul_1"),
    "query_norm_trunk": ("fp32_norm", f"{damage.ATTENTION}/q_norm/Mul_1"),
    "norm_variance_trunk": ("fp32_norm", f"{damage.ATTENTION}/k_norm/Mul_1"),
    "one_core_fp32": ("fused_attention", f"{damage.ATTENTION}/MatMul_1"),
    "values_product_fp32": ("fused_attention", "/transformer/layers.1/cross_attn/MatMul_1"),
    "core_in_bf16": ("fused_attention", f"{damage.LAYER}/cross_attn/MatMul_1"),
    "one_linear_fp32": ("trunk_linear", f"{damage.ATTENTION}/to_qkv/MatMul"),
}
_FF: Final = f"{damage.LAYER}/ff/ff/ff.2/MatMul"
_AT_FAULT: Final = {
    "projections_swapped": damage.TO_OUT,
    "weight_zeroed": damage.TO_OUT,
    "weight_negated": damage.TO_OUT,
    "weight_transposed": damage.TO_OUT,
    "weight_with_nan": damage.TO_OUT,
    "heads_permuted": damage.TO_OUT,
    "block_dropped": "/transformer/Slice",
    "memory_tokens_zeroed": "/transformer/Expand",
    "mask_ignored": "/Where",
    "seconds_ignored": "/Clip",
    "bias_missing": "/to_timestep_embed/to_timestep_embed.0/Gemm",
    "epsilon_wrong": f"{damage.ATTENTION}/q_norm/Add",
    "gain_missing": f"{damage.LAYER}/cross_attend_norm/Mul_1",
    "rotated_twice": f"{damage.ATTENTION}/Cos",
    "cosine_for_sine": f"{damage.ATTENTION}/Mul_4",
    "frequencies_wrong": "/transformer/Einsum",
    "modulation_swapped": f"{damage.LAYER}/Add_2",
    "gate_dropped": f"{damage.LAYER}/Mul_7",
    "residual_dropped": f"{damage.LAYER}/Add_4",
    "activation_changed": "/to_cond_embed/to_cond_embed.1/Mul",
    "softmax_over_queries": f"{damage.ATTENTION}/Softmax",
    "attention_scale_missing": f"{damage.ATTENTION}/Div_7",
}


def _is_core(layer: LayerRecord) -> bool:
    return layer.is_fused_attention


def _is_product(layer: LayerRecord) -> bool:
    return damage.TO_OUT in layer.onnx_nodes and layer.is_gemm


_TF32_TACTIC: Final = "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x32x64"


def _promised(name: str) -> Fault:
    by, names = _PROMISE[name]
    return Fault(name, "types", by, names, 7, in_graph("fp16", damage.TYPES[name]))


def _gate(name: str) -> Fault:
    return Fault(name, "gate", "fidelity", _AT_FAULT[name], 7, at_gate("fp16", damage.NUMBERS[name], 0.9999))


def _engine(name: str, by: str, names: str, make: Callable[[Workshop], Caught]) -> Fault:
    return Fault(name, "engine", by, names, 7, make, fast=False)


def _engine_of(name: str, by: str, names: str) -> Fault:
    return _engine(f"engine_of_{name}", by, names, in_engine("fp16", damage.TYPES[name], name))


def _fp8_engine_of(name: str) -> Fault:
    return _engine(f"engine_of_{name}", "fp8_linear", _FF, in_engine("fp8", damage.FP8[name], name))


def _layers(name: str, by: str, names: str, make: Callable[[Workshop], Caught]) -> Fault:
    return Fault(name, "layers", by, names, 7, make, fast=False)


def _file(name: str, by: str, names: str, exit_code: int, make: Callable[[Workshop], Caught]) -> Fault:
    return Fault(name, "files", by, names, exit_code, make, fast=False)


def _input(name: str, by: str, names: str, exit_code: int, make: Callable[[Workshop], Caught]) -> Fault:
    return Fault(name, "inputs", by, names, exit_code, make)


def _bad_scale(name: str, number: str) -> Fault:
    return _input(
        f"scales_with_{name}", "source model", "/seconds_lin/Gemm", 4, by_scales(first_range(number))
    )


FAULTS: Final[tuple[Fault, ...]] = (
    # A converter that leaves the wrong types: the converted graph breaks its own promises.
    *map(_promised, damage.TYPES),
    Fault("rotary_chain_not_baked", "types", "baked_rotary", f"{damage.ATTENTION}/Cos", 7, unbaked),
    *(
        Fault(name, "tables", "baked_rotary", "rotary_cos_table", 7, in_graph("bf16", function))
        for name, function in damage.TABLES.items()
    ),
    *(
        Fault(name, "fp8", "fp8_linear", _FF, 7, in_graph("fp8", function))
        for name, function in damage.FP8.items()
    ),
    # A converter whose types are right and whose numbers are not: the gate, at a length of 64.
    *map(_gate, damage.NUMBERS),
    *(
        Fault(name, "gate", "fidelity", _FF, 7, at_gate("fp8", function, 0.99))
        for name, function in damage.FP8_NUMBERS.items()
    ),
    # Rounded angles leave short sequences clean: it takes the full length to see them in the numbers.
    # Those of rotations do not show at all on random weights, where attention hardly looks at positions.
    Fault(
        "fourier_path_fp16_at_4092",
        "gate",
        "fidelity",
        "/timestep_features/Cos",
        7,
        at_gate("fp16", damage.TYPES["fourier_path_fp16"], 0.9999, 4092),
        fast=False,
    ),
    # An engine that was built from another graph than the one it is presented with.
    _engine_of("one_core_fp32", "fused_attention", f"{damage.ATTENTION}/MatMul_1"),
    _engine_of("values_product_fp32", "same_graph", "/transformer/layers.1/cross_attn/MatMul_1"),
    _engine_of("core_in_bf16", "fused_attention", f"{damage.LAYER}/cross_attn/MatMul_1"),
    _engine_of("gain_trunk", "same_graph", f"{damage.LAYER}/pre_norm/Mul_1"),
    _engine_of("query_norm_trunk", "same_graph", f"{damage.ATTENTION}/q_norm"),
    _engine_of("rotation_trunk", "fp32_rotation", f"{damage.ATTENTION}/Concat_5"),
    _engine_of("fourier_path_fp16", "same_graph", "/seconds/Sin"),
    _engine_of("rotary_angle_trunk", "same_graph", f"{damage.ATTENTION}/Sin"),
    _fp8_engine_of("linear_unquantized"),
    _fp8_engine_of("weight_unquantized"),
    _fp8_engine_of("scale_per_input_channel"),
    _fp8_engine_of("linear_renamed"),
    _engine(
        "attention_quantized",
        "fused_attention",
        f"{damage.ATTENTION}/MatMul_1",
        in_engine("fp8", damage.ATTENTION_QUANTIZED, "attention_quantized"),
    ),
    _engine("linear_excluded", "fp8_linear", damage.TO_OUT, linear_excluded),
    _engine(
        "bf16_engine_for_fp16", "trunk_linear", damage.TO_OUT, of_other("fp16", same_model("bf16", "bf16"))
    ),
    _engine(
        "fp16_engine_for_bf16",
        "baked_rotary",
        "rotary_cos_table",
        of_other("bf16", same_model("fp16", "fp16")),
    ),
    _engine("fp16_engine_for_fp8", "fp8_linear", _FF, of_other("fp8", same_model("fp16", "fp16"))),
    _engine("fp8_engine_for_fp16", "trunk_linear", _FF, of_other("fp16", same_model("fp8", "fp8"))),
    _engine(
        "fp32_engine_for_fp16",
        "fused_attention",
        f"{damage.ATTENTION}/MatMul_1",
        of_other("fp16", same_model("fp32", "fp32")),
    ),
    _engine(
        "minimal_islands_for_rope",
        "fp32_rotation",
        f"{damage.ATTENTION}/Concat_5",
        of_other("fp16", same_model("fp16", "fp16_minimal", islands="minimal")),
    ),
    _engine(
        "unbound_attention",
        "fused_attention",
        f"{damage.ATTENTION}/MatMul_1",
        of_other("fp16", same_model("fp16", "fp16_unbound", bound_attention=False)),
    ),
    _engine(
        "engine_of_three_blocks",
        "same_graph",
        "/transformer/layers.2/self_attn/to_qkv/MatMul",
        of_other("fp16", of_depth(3)),
    ),
    _engine(
        "engine_of_one_block",
        "same_graph",
        "/transformer/layers.1/self_attn/to_qkv/MatMul",
        of_other("fp16", of_depth(1)),
    ),
    _engine(
        "engine_of_another_exporter",
        "same_graph",
        damage.TO_OUT,
        of_other("fp16", another_model("dynamo", SampleSpec(Size.TINY, Spelling.DYNAMO20, False))),
    ),
    _engine(
        "engine_of_differential_model",
        "same_graph",
        f"{damage.ATTENTION}/MatMul_2",
        of_other("fp16", another_model("differential", SampleSpec(Size.TINY, Spelling.TORCHSCRIPT17, True))),
    ),
    # What a layer table may show of an engine, one tensor at a time.
    _layers(
        "attention_reads_fp32_key",
        "fused_attention",
        f"{damage.ATTENTION}/MatMul_1",
        in_layers("fp16", layer_changed(lambda x: replace(x, inputs=retyped(x.inputs, 1, "fp32")), _is_core)),
    ),
    _layers(
        "attention_reads_fp8_query",
        "fused_attention",
        f"{damage.ATTENTION}/MatMul_1",
        in_layers("fp8", layer_changed(lambda x: replace(x, inputs=retyped(x.inputs, 0, "fp8")), _is_core)),
    ),
    _layers(
        "product_on_one_fp8_operand",
        "fp8_linear",
        damage.TO_OUT,
        in_layers(
            "fp8", layer_changed(lambda x: replace(x, inputs=retyped(x.inputs, 0, "fp16")), _is_product)
        ),
    ),
    _layers(
        "product_rounded_to_tf32",
        "trunk_linear",
        damage.TO_OUT,
        in_layers("fp32", layer_changed(lambda x: replace(x, tactic=_TF32_TACTIC), _is_product)),
    ),
    _layers(
        "input_in_fp16",
        "contract",
        "x",
        in_layers("fp16", io_changed(lambda io: replace(io, dtype="fp16"), "x")),
    ),
    _layers(
        "output_renamed",
        "contract",
        "velocity",
        in_layers("fp16", io_changed(lambda io: replace(io, name="output"), "velocity")),
    ),
    _layers("input_missing", "contract", "t5_mask", in_layers("fp16", io_missing("t5_mask"))),
    _layers(
        "channels_changed",
        "contract",
        "x",
        in_layers("fp16", io_changed(lambda io: replace(io, shape=(1, 128, -1)), "x")),
    ),
    _layers(
        "profile_of_another_recipe",
        "contract",
        "x",
        in_layers("fp16", lambda table: table, profiles=_SHORT),
    ),
    # Files: engines, layer dumps and reports.
    _file("layers_cut_in_a_line", "source model", "given.layers", 4, by_layers(cut_line)),
    _file("layers_cut_between_lines", "same_graph", "/transformer/layers.1", 7, by_layers(cut_table)),
    _file(
        "layers_json_cut",
        "source model",
        "given.layers",
        4,
        by_layers(lambda shop, path: path.write_text(as_json(shop)[:-2000])),
    ),
    _file(
        "layers_foreign_json",
        "source model",
        "given.layers",
        4,
        by_layers(lambda shop, path: path.write_text('{"nodes": []}')),
    ),
    _file(
        "layers_foreign_text",
        "source model",
        "given.layers",
        4,
        by_layers(lambda shop, path: path.write_text("no layers here\n")),
    ),
    _file("engine_not_detailed", "layers", "bare names", 7, by_layers(bare_names)),
    _file("log_not_detailed", "layers", "bare names", 7, by_layers(bare_table)),
    _file("layers_of_another_engine", "same_graph", "__bf16", 7, by_layers(other_layers)),
    _file(
        "report_of_other_layers",
        "report",
        "mha_precision",
        7,
        by_layers(other_layers, onnx=False, report=True),
    ),
    _file(
        "engine_cut_short",
        "source model",
        "changed.trt",
        4,
        by_report(lambda engine, out: out.write_bytes(engine.read_bytes()[:-4096])),
    ),
    _file(
        "engine_empty", "source model", "changed.trt", 4, by_report(lambda engine, out: out.write_bytes(b""))
    ),
    _file("engine_of_another_report", "report", "changed.trt", 7, by_report(flip_byte)),
    _file(
        "report_cut_short",
        "source model",
        "changed.verify.json",
        4,
        by_report(change_report=lambda text: text[:-200]),
    ),
    _file(
        "report_of_another_version",
        "source model",
        "changed.verify.json",
        4,
        by_report(change_report=version_2),
    ),
    _file(
        "report_without_a_key",
        "source model",
        "total_layers",
        4,
        by_report(change_report=lambda text: re.sub(r'\n "total_layers": \d+,', "", text)),
    ),
    _file(
        "wrong_architecture",
        "target",
        "target.sm",
        7,
        by_report(recipe=lambda recipe: recipe["target"].update(sm=120)),
    ),
    _file(
        "wrong_backend",
        "target",
        "target.backend",
        7,
        by_report(recipe=lambda recipe: recipe["target"].update(backend="tensorrt")),
    ),
    _file("too_few_fp8_products", "expect.gemms.fp8", ">=170", 7, expecting(gemms={"fp8": ">=170"})),
    _file(
        "too_few_fused_cores",
        "expect.fused_attention",
        "==96",
        7,
        expecting(fused_attention={"count": 96, "type": ["bf16", "fp16"]}),
    ),
    _file("trigonometry_at_run_time", "expect.runtime_trig", "<=2", 7, expecting(runtime_trig="<=2")),
    # Inputs of a build.
    _input("scales_stale", "source model", "scales.json", 4, stale_scales),
    _input("scales_of_another_model", "source model", "scales.json", 4, foreign_scales),
    _input("scales_lack_a_linear", "source model", damage.TO_OUT, 4, missing_scale),
    _bad_scale("zero", "0"),
    _bad_scale("a_negative_number", "-1.5"),
    _bad_scale("nan", "NaN"),
    _bad_scale("infinity", "Infinity"),
    _input("scales_cut_short", "source model", "changed.scales.json", 4, by_scales(lambda text: text[:-40])),
    _input(
        "weight_beyond_fp16",
        "conversion",
        "dit.preprocess_conv.weight",
        5,
        by_source(in_weight(70000.0)),
    ),
    _input(
        "weight_not_finite",
        "conversion",
        "dit.preprocess_conv.weight",
        5,
        by_source(in_weight(float("nan"))),
    ),
    _input("source_in_fp16", "source model", "'x'", 4, by_source(fp16_input)),
    _input("source_without_norms", "conversion", "RMSNorm", 5, by_source(without_norms)),
    _input("source_cut_short", "source model", "cut.onnx", 4, truncated_source),
    _input("source_of_another_digest", "source model", "source.onnx", 4, foreign_source),
    _input("fp8_without_scales", "recipe", "precision", 2, by_recipe(fp8_unscaled)),
    _input("fp8_for_sm_86", "recipe", "target.sm", 2, by_recipe(fp8_on_86)),
    _input("rtx_for_sm_90", "environment", "sm_90", 3, by_recipe(hopper)),
)
