"""Promises against layers: what each layer of evidence proves, on layers written by hand.

The layers are shortened from the layer tables of real builds (TensorRT-RTX 1.7.1), names and types kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from benchmarks import damage
from benchmarks.workshop import PROFILES, Kind, Workshop
from engine_builder.graph.find import find_structures
from engine_builder.precision.options import ConversionOptions
from engine_builder.recipe import Profile, ShapeRange
from engine_builder.source_graph import TensorSpec
from verify.contract import check_contract
from verify.counts import count_layers
from verify.identity import (
    Check,
    Failure,
    Status,
    check_graph_promises,
    check_promises,
    check_provenance,
)
from verify.layers import EngineIO, LayerRecord, ProfileRange, TensorRecord
from verify.promised_precision import promised_precision
from verify.promises import Promise, PromiseKind, lasting_products, make_promises
from verify.rotary_tables import table_faults


def tensors(*dtypes: str) -> tuple[TensorRecord, ...]:
    return tuple(TensorRecord(f"t{n}", dtype, (1, 8)) for n, dtype in enumerate(dtypes))


def layer(
    name: str,
    nodes: str,
    inputs: str = "fp16",
    constants: str = "",
    kind: str = "kgen",
    tactic: str = "",
    outputs: str = "fp16",
) -> LayerRecord:
    """A layer from blank-separated lists of its nodes and of the types of its tensors."""
    return LayerRecord(
        name=name,
        layer_type=kind,
        inputs=tensors(*inputs.split()),
        outputs=tensors(*outputs.split()),
        constants=tensors(*constants.split()),
        tactic=tactic,
        onnx_nodes=tuple(nodes.split()),
    )


def only(kind: PromiseKind, checks: tuple[Check, ...]) -> Check:
    return next(check for check in checks if check.name == kind.value)


def product(dtype: str, kind: PromiseKind = PromiseKind.TRUNK_LINEAR, name: str = "a") -> Promise:
    return Promise(kind, name, (name,), (dtype,), in_engine=(name,))


def judged(promise: Promise, *layers: LayerRecord, tf32: bool = False, casts: str = "") -> Check:
    checks = check_promises([promise], layers, linears=("a", "b"), casts=casts.split(), tf32=tf32)
    return only(promise.kind, checks)


def reason(check: Check) -> str:
    assert check.status is Status.FAILED
    (failure,) = check.failures
    return failure.reason


# --- products ---------------------------------------------------------------------------------


def test_a_linear_is_judged_by_its_product_and_not_by_what_carries_its_name() -> None:
    moves = layer("__myl_MoveReplConc_myl1_83", "a", inputs="fp32", outputs="fp32")
    gemm = layer("a_myl1_84", "a", constants="fp16", kind="gemm")
    assert judged(product("fp16"), moves, gemm).status is Status.PASSED
    assert "no layer computes its product" in reason(judged(product("fp16"), moves))


def test_a_product_of_a_single_row_is_a_generated_kernel() -> None:
    row = layer("__myl_AddSiluReshMulSum_myl0_7", "a", constants="fp16")
    assert judged(product("fp16"), row).status is Status.PASSED
    assert reason(judged(product("bf16"), row)) == (
        "its product is not on bf16: __myl_AddSiluReshMulSum_myl0_7 reads fp16"
    )


def test_the_next_product_that_adds_the_bias_is_not_this_one() -> None:
    """Its own product is on fp32; the next linear's is on fp16 and only adds a's bias."""
    own = layer("a_myl1_6", "a", inputs="fp32", constants="fp32", kind="gemm")
    following = layer("__myl_AddSiluReshMulSum_myl1_7", "a b", constants="fp16")
    assert "a_myl1_6 reads fp32" in reason(judged(product("fp16"), own, following))


def test_linears_that_were_merged_share_one_product() -> None:
    merged = layer("__mye1+__mye2_myl1_16", "a b", inputs="fp8", constants="fp8", kind="gemm")
    assert judged(product("fp8", PromiseKind.FP8_LINEAR), merged).status is Status.PASSED
    assert judged(product("fp16"), merged).status is Status.FAILED


def test_a_split_product_must_be_on_the_type_in_every_part() -> None:
    parts = [layer(f"__mye{n}_myl1_{n}", "a", inputs="fp8", constants="fp8", kind="gemm") for n in range(3)]
    assert judged(product("fp8", PromiseKind.FP8_LINEAR), *parts).status is Status.PASSED
    parts[2] = replace(parts[2], constants=tensors("fp16"))
    assert "__mye2_myl1_2 reads fp16" in reason(judged(product("fp8", PromiseKind.FP8_LINEAR), *parts))


def test_an_fp8_product_reads_fp8_on_both_operands() -> None:
    """An fp8 weight that is turned back into fp16 inside the kernel saves memory and no time."""
    half = layer("a_myl1_25", "a", inputs="fp16", constants="fp8", kind="gemm")
    check = judged(product("fp8", PromiseKind.FP8_LINEAR), half)
    assert reason(check) == "its product is not on fp8: a_myl1_25 reads fp8 on one operand only"
    two = layer("a_myl1_25", "a", inputs="fp8 fp8", kind="gemm")
    assert judged(product("fp8", PromiseKind.FP8_LINEAR), two).status is Status.PASSED


def test_fp8_that_is_cast_before_the_product_is_no_fp8_product() -> None:
    """What TensorRT-RTX makes of a weight with a scale per input channel."""
    kernel = layer("__myl_CastMulCastCastMulFc_myl1_50", "a", "fp8", "fp8 fp16", "runtime_fusion")
    check = judged(product("fp8", PromiseKind.FP8_LINEAR), kernel)
    assert reason(check).endswith("reads fp8 and casts it before the product")
    assert count_layers([kernel]).gemms == {"mixed": 1}
    epilogue = replace(kernel, name="__myl_FcCast_myl1_84")
    assert judged(product("fp8", PromiseKind.FP8_LINEAR), epilogue).status is Status.PASSED
    assert count_layers([epilogue]).gemms == {"fp8": 1}


def test_tf32_shows_in_the_tactic_and_is_a_matter_of_the_recipe() -> None:
    rounded = layer(
        "a_myl1_1",
        "a",
        "fp32",
        "fp32",
        "gemm",
        tactic="sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n",
        outputs="fp32",
    )
    assert "rounds its operands to TF32" in reason(judged(product("fp32"), rounded))
    assert judged(product("fp32"), rounded, tf32=True).status is Status.PASSED


def test_unknown_types_leave_a_product_unproven() -> None:
    """TensorRT 8 to 10 print "N/A due to dynamic shapes" in place of a type."""
    check = judged(product("fp16"), layer("a_myl1_1", "a", inputs="unknown", kind="gemm"))
    assert check.status is Status.NOT_VERIFIABLE
    assert (check.promised, check.kept, check.failures) == (1, 0, ())
    assert check.note == "a: the layers do not say what a_myl1_1 reads"


def test_a_linear_in_no_layer_is_named() -> None:
    assert reason(judged(product("fp16"), layer("x", "b"))) == "no engine layer was made from its nodes"


# --- attention ----------------------------------------------------------------------------------

CORE = Promise(PromiseKind.FUSED_ATTENTION, "pv", ("qk", "s", "pv"), ("fp16",), in_engine=("qk", "s", "pv"))
KERNEL = layer("_gemm_mha_v2_myl1_24", "qk s pv", inputs="fp16 fp16 fp16", kind="kgen")


def test_the_fused_kernel_is_the_one_that_holds_the_whole_core() -> None:
    move = layer("__myl_MoveTran_myl1_23", "qk pv", inputs="fp32", outputs="fp32")
    assert judged(CORE, move, KERNEL).status is Status.PASSED
    split = (layer("qk_myl1_25", "qk", kind="gemm"), layer("__myl_MaxExpSumDiv_myl1_26", "s"), move)
    assert reason(judged(CORE, *split, layer("pv_myl1_27", "pv", kind="gemm"))) == (
        "not one fused kernel but 3 layers: __myl_MaxExpSumDiv_myl1_26 (kgen), pv_myl1_27 (gemm), "
        "qk_myl1_25 (gemm)"
    )


def test_an_fp8_output_does_not_make_the_attention_fp8() -> None:
    absorbed = replace(KERNEL, outputs=tensors("fp8"))
    assert judged(CORE, absorbed).status is Status.PASSED
    quantized = replace(KERNEL, inputs=tensors("fp8", "fp16", "fp16"))
    assert reason(judged(CORE, quantized)) == (
        "its fused kernel _gemm_mha_v2_myl1_24 reads q as fp8, not fp16"
    )


def test_a_mask_stands_before_the_values() -> None:
    masked = replace(KERNEL, inputs=tensors("fp16", "fp16", "bool", "fp16"))
    assert judged(CORE, masked).status is Status.PASSED


def test_packed_queries_keys_and_values_are_judged_too() -> None:
    assert judged(CORE, replace(KERNEL, inputs=tensors("fp16"))).status is Status.PASSED
    assert "reads t0 as fp32" in reason(judged(CORE, replace(KERNEL, inputs=tensors("fp32"))))
    assert judged(CORE, replace(KERNEL, inputs=())).status is Status.NOT_VERIFIABLE


def test_a_composite_attention_is_one_node() -> None:
    composite = Promise(PromiseKind.FUSED_ATTENTION, "mha", ("mha",), ("fp16",), in_engine=("mha",))
    move = layer("__myl_Move_myl1_3", "mha")
    kernel = layer("_gemm_mha_v2_myl1_4", "mha", inputs="fp16 fp16 fp16")
    assert judged(composite, move, kernel).status is Status.PASSED
    assert judged(composite, move).status is Status.FAILED


# --- fp32 structures ----------------------------------------------------------------------------

NORM = Promise(
    PromiseKind.FP32_NORM, "gain", ("pow", "gain"), ("fp32",), in_engine=("pow", "gain"), casts=("in", "out")
)


def test_a_norm_between_its_casts_is_fp32() -> None:
    fused = layer("__myl_CastMulMeanAddSqrtDivMulMulCast_myl1_9", "in pow gain out")
    assert judged(NORM, fused, casts="in out").status is Status.PASSED


def test_a_norm_without_any_of_its_casts_is_not() -> None:
    """One may be lost where TensorRT writes a product in the cast's type; all are never lost (measured)."""
    fused = layer("__myl_MulMeanAddSqrtDivMulMul_myl1_9", "pow gain", inputs="fp32", outputs="fp32")
    assert reason(judged(NORM, fused, casts="in out")) == "no engine layer holds the casts around it: in, out"
    assert judged(NORM, replace(fused, onnx_nodes=("pow", "gain", "out")), casts="in out").status is (
        Status.PASSED
    )


def test_a_cast_that_was_moved_past_a_transpose_shows_in_the_kernels_name() -> None:
    """The LayerNormalization of queries for sm_89: its cast's name is gone, the cast is not."""
    first = layer("__myl_TranCastMeanSubMulMean_myl1_22", "turned pow", outputs="fp32 fp32")
    second = layer("__myl_AddSqrtDivMulMulAdd_myl1_23", "gain", inputs="fp32 fp32", outputs="fp32")
    assert judged(NORM, first, second, casts="in out").status is Status.PASSED
    # A cast of something else, which the layer names, proves nothing; nor does one between 16-bit tensors.
    other = replace(first, onnx_nodes=("turned", "pow", "other"))
    lost = "no engine layer holds the casts around it: in, out"
    assert reason(judged(NORM, other, second, casts="in out other")) == lost
    half = replace(first, outputs=tensors("fp16", "fp16"))
    assert reason(judged(NORM, half, second, casts="in out")) == lost


def test_a_layer_with_part_of_a_norm_and_no_cast_has_fp32_tensors_alone() -> None:
    casts = layer("__myl_Cast_myl1_1", "in", outputs="fp32")
    inner = layer("__myl_MulMean_myl1_2", "pow", inputs="fp32", outputs="fp16")
    assert reason(judged(NORM, casts, inner, casts="in out")) == (
        "__myl_MulMean_myl1_2, which holds pow and no cast, has fp16 tensors"
    )
    moved = layer("__myl_Move_myl1_2", "pow", inputs="fp16", outputs="fp16")
    assert judged(NORM, casts, moved, casts="in out").status is Status.PASSED


def test_the_graph_is_asked_first() -> None:
    broken = replace(NORM, held=False, broken_at="y at Mul gain is fp16, not fp32")
    fused = layer("__myl_CastMulMeanAddSqrtDivMulMulCast_myl1_9", "in pow gain out")
    assert reason(judged(broken, fused)) == "y at Mul gain is fp16, not fp32"
    (check,) = check_graph_promises([broken, NORM])
    assert (check.name, check.promised, check.kept) == ("fp32_norm", 2, 1)
    assert check_graph_promises([NORM]) == ()


# --- the same graph -----------------------------------------------------------------------------


def provenance(*layers: LayerRecord, exact: bool = False) -> tuple[Failure, ...]:
    check = check_provenance({"a", "b", "x__fp16"}, {"w"}, ["a", "b"], layers, exact=exact)
    assert (check.status is Status.FAILED) == bool(check.failures)
    return check.failures


def test_the_parsers_own_layers_are_no_foreign_nodes() -> None:
    helpers = layer("l", "a b w x__fp16 ONNXTRT_Broadcast_3")
    assert provenance(helpers, exact=True) == ()
    numbered = replace(helpers, onnx_nodes=(*helpers.onnx_nodes, "a_12"))
    assert provenance(numbered) == ()
    (failure,) = provenance(numbered, exact=True)
    assert failure.subject == "a_12"


def test_a_product_of_the_graph_must_be_in_the_engine() -> None:
    (failure,) = provenance(layer("l", "a", kind="gemm"))
    assert (failure.subject, failure.reason) == ("b", "no engine layer was made from this node")


def test_a_product_of_the_engine_must_be_in_the_graph() -> None:
    (failure,) = provenance(layer("l", "a b"), layer("m", "c", kind="gemm"))
    assert (failure.subject, failure.layers) == ("c", ("m",))


@pytest.mark.parametrize("name", ["y__fp16", "y__fp32", "y__bf16", "y__q", "y__dq", "y__fp8", "y__fp32_1"])
def test_a_cast_or_quantization_that_the_graph_lacks_gives_another_conversion_away(name: str) -> None:
    (failure,) = provenance(layer("l", f"a b {name}"))
    assert failure.subject == name


def test_any_other_name_is_foreign_only_where_names_are_exact() -> None:
    unknown = layer("l", "a b something")
    assert provenance(unknown) == ()
    (failure,) = provenance(unknown, exact=True)
    assert failure.subject == "something"


def test_products_that_may_be_computed_beforehand_are_not_looked_for(workshop: Workshop) -> None:
    """The sample has 29 linears, 2 products for each of 4 cores and 2 convolutions: 39."""
    for kind in ("fp16", "bf16"):
        model = ir.load(workshop.convert(kind).path)
        assert len(lasting_products(model.graph, find_structures(model))) == 29 + 8 + 2


# --- counts and contract ------------------------------------------------------------------------


def test_trigonometry_is_counted_whichever_graph_it_came_from() -> None:
    layers = [
        layer("__myl_MulSinCosConc_myl1_1", "unknown"),
        layer("__myl_AddEtc_myl1_2", "cos"),
        layer("__myl_Add_myl1_3", "other"),
    ]
    assert count_layers(layers, {"cos"}).runtime_trig == 2


SPECS = [TensorSpec("x", "float32", (1, 256, "L"))]
OUT = [TensorSpec("y", "float32", (1, 256, "L"))]


def io(name: str, mode: str, dtype: str = "fp32", shape: tuple[int, ...] = (1, 256, -1)) -> EngineIO:
    ranges = (ProfileRange((1, 256, 1), (1, 256, 64), (1, 256, 128)),) if mode == "input" else ()
    return EngineIO(name, mode, dtype, shape, ranges)


def test_bindings_without_types_leave_the_contract_unproven() -> None:
    """The 10.x inspector lists names alone, whose types only layers tell, if they do."""
    engine = [io("x", "input", "unknown"), EngineIO("y", "unknown", "unknown", ())]
    check = check_contract(SPECS, OUT, engine, ())
    assert check.status is Status.NOT_VERIFIABLE
    assert check.note == "the layer table does not tell the type of x, y"
    missing = check_contract(SPECS, OUT, engine[:1], ())
    assert missing.status is Status.FAILED
    assert (missing.promised, missing.kept) == (2, 0)


def test_an_input_too_many_does_not_count_among_those_kept() -> None:
    engine = [io("x", "input"), io("y", "output"), io("z", "input")]
    check = check_contract(SPECS, OUT, engine, ())
    assert check.status is Status.FAILED
    assert (check.promised, check.kept) == (2, 2)
    assert [failure.subject for failure in check.failures] == ["z"]


def test_every_bound_of_every_profile_is_compared() -> None:
    profile = Profile({"x": ShapeRange((1, 256, 1), (1, 256, 64), (1, 256, 4096))})
    check = check_contract(SPECS, OUT, [io("x", "input"), io("y", "output")], (profile,))
    assert reason(check) == "profile 0 has max [1, 256, 128] in the engine, [1, 256, 4096] in the recipe"


# --- promises from graphs -----------------------------------------------------------------------


def test_fp32_makes_promises_about_its_products(workshop: Workshop) -> None:
    good = workshop.convert("fp32")
    model = ir.load(good.path)
    made = make_promises(model.graph, find_structures(model), good.options)
    kinds = [promise.kind for promise in made]
    assert kinds.count(PromiseKind.TRUNK_LINEAR) == 29
    assert {p.types for p in made if p.kind is PromiseKind.TRUNK_LINEAR} == {("fp32",)}
    assert PromiseKind.FUSED_ATTENTION not in kinds


def test_every_fp32_structure_of_a_conversion_has_casts_around_it(workshop: Workshop) -> None:
    """Two blocks: 14 norms, 4 rotations of which each has the cast of its result at least."""
    good = workshop.convert("fp16")
    model = ir.load(good.path)
    made = make_promises(model.graph, find_structures(model), good.options)
    for kind, count in ((PromiseKind.FP32_NORM, 14), (PromiseKind.FP32_ROTATION, 4)):
        chosen = [promise for promise in made if promise.kind is kind]
        assert len(chosen) == count
        assert all(promise.casts for promise in chosen)


def test_tables_that_are_as_long_as_the_longest_profile_are_right(workshop: Workshop) -> None:
    """4096 latent frames and 64 memory tokens are 4160 rows; one frame more does not fit."""
    model = ir.load(workshop.convert("bf16").path)
    rotary = find_structures(model).rotary
    longest = {name: shape.max for name, shape in PROFILES[0].shapes.items()}
    assert model.graph.initializers["rotary_cos_table"].shape == ir.Shape([4160, 32])
    assert table_faults(model, rotary, [longest]) == {}
    longer = {name: (*shape[:-1], 4097) for name, shape in longest.items()}
    assert table_faults(model, rotary, [longest, longer]) == {
        f"rotary_{op}_table": f"the table rotary_{op}_table has 4160 rows, the longest profile needs 4161"
        for op in ("cos", "sin")
    }


def test_tables_of_another_law_are_left_to_the_gate(workshop: Workshop) -> None:
    """Positions in two dimensions advance by no constant step; that is no fault by itself."""
    model = ir.load(workshop.convert("bf16").path)
    rows = np.arange(4160)
    angle = np.outer((rows % 7) * (rows // 7 + 1), np.linspace(1, 0.01, 32))
    for name, function in (("rotary_cos_table", np.cos), ("rotary_sin_table", np.sin)):
        tensor = ir.tensor(function(angle).astype(np.float32), name=name)
        model.graph.initializers[name].const_value = tensor
    assert table_faults(model, find_structures(model).rotary, []) == {}


# --- which precision ----------------------------------------------------------------------------


def test_a_converted_file_says_itself_what_it_promises(workshop: Workshop) -> None:
    good = workshop.convert("fp8")
    model = ir.load(good.path)
    found = promised_precision(model, find_structures(model), None, (), "model")
    assert found.origin == "metadata"
    assert found.options == good.options
    # 24 MatMul linears have both sides >= 128 (the shared models' own description); two of them, of
    # the conditioning, run over a single row.
    assert found.fp8_linears == good.fp8_linears
    assert len(good.fp8_linears) == 22


def test_without_metadata_the_types_of_most_decide(workshop: Workshop, tmp_path: Path) -> None:
    kinds: tuple[Kind, ...] = ("fp32", "fp16", "bf16", "fp8")
    for kind in kinds:
        rotary = "baked" if kind == "bf16" else "computed"
        model = ir.load(workshop.convert(kind).path)
        model.metadata_props.clear()
        found = promised_precision(model, find_structures(model), None, (), "model")
        assert (found.origin, found.options.recipe, found.options.rotary) == ("types", kind, rotary)
        assert found.options.bound_attention == (kind != "fp32")
        assert len(found.fp8_linears) == (22 if kind == "fp8" else 0)


def test_one_core_left_in_fp32_is_the_odd_one_out_without_metadata(
    workshop: Workshop, tmp_path: Path
) -> None:
    damage.TYPES["one_core_fp32"](workshop.convert("fp16").path, tmp_path / "damaged.onnx")
    model = ir.load(tmp_path / "damaged.onnx")
    model.metadata_props.clear()
    structures = find_structures(model)
    found = promised_precision(model, structures, None, (), "model")
    promises = make_promises(model.graph, structures, found.options)
    assert [p.subject for p in promises if not p.held] == ["/transformer/layers.0/self_attn/MatMul_1"]


def test_a_graph_of_no_linears_is_fp32() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=10)
    found = promised_precision(model, find_structures(model), None, (), "model")
    assert found.options == ConversionOptions("fp32", "fp32", generic=True)
