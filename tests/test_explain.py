"""Why a node has its type: every node of a conversion has a reason, and it is the right one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from benchmarks.workshop import Workshop
from engine_builder.cli.app import app
from engine_builder.errors import RecipeError, SourceModelError
from engine_builder.explain import Explainer, Explanation
from engine_builder.graph.reading import is_float
from engine_builder.pipeline import build
from engine_builder.precision.islands import Rule
from engine_builder.recipe import load_recipe
from engine_builder.source import open_source
from engine_builder.stage_runner import Settings
from tests.recipes import write_recipe
from verify.promises import SPELLED

LAYER = "/transformer/layers.0"
CORE = "attention self_attn of block 0"


def asked(model: ir.Model, name: str, **options: Any) -> Explanation:
    return Explainer(model, where="model.onnx", **options).explain(name)


@pytest.fixture(scope="module")
def fp16(workshop: Workshop) -> ir.Model:
    return ir.load(workshop.convert("fp16").path)


@pytest.fixture(scope="module")
def fp8(workshop: Workshop) -> ir.Model:
    return ir.load(workshop.convert("fp8").path)


# In the sample, by the architecture: x^2 and the gain are the norm's; the angle of the timestep is what its
# cosine reads; the second product of a core ends it; rotations end in the Concat of their halves.
@pytest.mark.parametrize(
    ("node", "dtype", "rule", "structure", "promise"),
    [
        (f"{LAYER}/pre_norm/Pow", "fp32", "norm", "norm pre_norm of block 0", "fp32_norm"),
        (f"{LAYER}/pre_norm/Mul_1", "fp32", "norm", "norm pre_norm of block 0", "fp32_norm"),
        ("/timestep_features/Cos", "fp32", "angle", "angle timestep_features", "fp32_angle"),
        (f"{LAYER}/self_attn/Cos", "fp32", "angle", "angle self_attn 1 of block 0", "fp32_angle"),
        (f"{LAYER}/self_attn/MatMul_1", "fp16", "fused_attention", CORE, "fused_attention"),
        (f"{LAYER}/self_attn/Softmax", "fp16", "fused_attention", CORE, "fused_attention"),
        (f"{LAYER}/ff/ff/ff.2/MatMul", "fp16", "trunk", "linear ff.ff.2 of block 0", "trunk_linear"),
        (
            f"{LAYER}/self_attn/Concat_5",
            "fp32",
            "rotation",
            "rotation self_attn 1 of block 0",
            "fp32_rotation",
        ),
    ],
)
def test_the_reason_of_known_nodes(
    fp16: ir.Model, node: str, dtype: str, rule: str, structure: str, promise: str
) -> None:
    found = asked(fp16, node)
    assert (found.node, found.type, found.rule, found.structure) == (node, dtype, rule, structure)
    assert structure in found.because
    assert found.promise is not None
    assert (found.promise.kind, found.promise.status) == (promise, "kept")


def test_a_norm_is_fp32_because_its_squares_overflow(fp16: ir.Model) -> None:
    found = asked(fp16, f"{LAYER}/pre_norm/Mul_1")
    assert found.because == f"it is part of norm pre_norm of block 0: {Rule.NORM.value}"
    assert "65504" in found.because


def test_a_tensor_is_explained_by_its_maker_and_a_constant_by_its_reader(fp16: ir.Model) -> None:
    product = next(n for n in fp16.graph if n.name == f"{LAYER}/ff/ff/ff.2/MatMul")
    result, weight = product.outputs[0].name or "", product.inputs[1]
    assert weight is not None
    assert asked(fp16, result) == asked(fp16, product.name or "")
    found = asked(fp16, weight.name or "")
    assert (found.node, found.op, found.type) == (weight.name, "constant", "fp16")
    assert found.because.startswith(
        f"MatMul {product.name} reads it: it is part of linear ff.ff.2 of block 0"
    )


def test_casts_and_quantizers_say_for_whom(fp8: ir.Model) -> None:
    product = next(n for n in fp8.graph if n.name == f"{LAYER}/ff/ff/ff.2/MatMul")
    assert (found := asked(fp8, product.name or "")).rule == "fp8"
    assert found.promise is not None
    assert found.promise.kind == "fp8_linear"
    for value in product.inputs[:2]:
        assert value is not None
        dequantize = value.producer()
        assert dequantize is not None
        found = asked(fp8, dequantize.name or "")
        assert (found.op, found.rule) == ("DequantizeLinear", "fp8")
        assert f"MatMul {product.name}" in found.because
    cast = next(
        n for n in fp8.graph if n.op_type == "Cast" and is_float(n.inputs[0]) and is_float(n.outputs[0])
    )
    found = asked(fp8, cast.name or "")
    assert found.rule == "cast"
    assert any(f"{use.node.op_type} {use.node.name}" in found.because for use in cast.outputs[0].uses())


def test_why_a_linear_of_an_fp8_recipe_is_not_fp8(fp8: ir.Model) -> None:
    name = "/to_timestep_embed/to_timestep_embed.0/Gemm"
    found = asked(fp8, name, trunk_linears={name: "runs over a single row"})
    assert found.type == "fp16"
    assert found.because.endswith("it stays in the trunk type fp16 and not fp8: runs over a single row")


CONVERSIONS: dict[str, dict[str, Any]] = {
    "fp32": {"kind": "fp32"},
    "fp16": {"kind": "fp16"},
    "bf16 baked": {"kind": "bf16", "rotary": "baked"},
    "bf16 computed": {"kind": "bf16", "rotary": "computed"},
    "full islands, unbound": {"kind": "fp16", "islands": "full", "bound_attention": False},
    "minimal islands": {"kind": "fp16", "islands": "minimal", "residual": "trunk"},
}


@pytest.mark.parametrize("options", CONVERSIONS.values(), ids=list(CONVERSIONS))
@pytest.mark.parametrize("name", ["sm_torchscript17", "md_torchscript17", "sm_dynamo20", "sm_dynamo23"])
def test_every_node_has_a_reason(
    tiny_models: Mapping[str, Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """The rules are applied to the converted graph: a type that they do not give would have none."""
    workshop = Workshop(tmp_path)
    kind = options["kind"]
    rest = {k: v for k, v in options.items() if k != "kind"}
    converted = workshop.convert(kind, "one", open_source(tiny_models[name]), **rest)
    model = ir.load(converted.path)
    islands = {rule.name.lower() for rule in Rule}
    rules: dict[str, set[str]] = {}
    explainer = Explainer(model, where="model.onnx")
    for node in model.graph:
        found = explainer.explain(node.name or "")
        rules.setdefault(found.rule, set()).add(found.type)
        assert found.rule != "none", (node.name, found.because)
    for rule, types in rules.items():
        if rule in islands:
            assert types == {"fp32"}, rule
    assert rules["trunk"] == {converted.options.trunk}


def test_every_node_of_an_fp8_model_has_a_reason(fp8: ir.Model) -> None:
    explainer = Explainer(fp8, where="model.onnx")
    found = [explainer.explain(node.name or "") for node in fp8.graph]
    assert {e.rule for e in found if e.op in ("QuantizeLinear", "DequantizeLinear")} == {"fp8"}
    # 22 linears of the sample run in fp8.
    assert sum(e.rule == "fp8" and e.op in ("MatMul", "Gemm") for e in found) == 22
    assert not [e for e in found if e.rule == "none"]


def test_a_type_that_no_rule_gives_is_said_to_be_from_elsewhere(workshop: Workshop) -> None:
    model = ir.load(workshop.convert("fp16").path)
    node = next(n for n in model.graph if n.name == f"{LAYER}/ff/ff/ff.2/MatMul")
    for value in (*node.inputs, *node.outputs):
        assert value is not None
        value.type = ir.TensorType(ir.DataType.FLOAT)
    found = asked(model, node.name or "")
    assert (found.type, found.rule) == ("fp32", "none")
    assert found.promise is not None
    assert found.promise.status == "broken"
    assert "is fp32, not fp16" in found.promise.reason


def test_operators_without_the_trunk_type_say_so(workshop: Workshop) -> None:
    """Range has no fp16 form at opset 17; the positions of the rotary embedding are counted with it."""
    model = ir.load(workshop.convert("fp16").path)
    free = ir.node("Range", [_scalar(model, n) for n in ("a", "b", "c")], name="free")
    free.outputs[0].name = "free"
    free.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.append(free)
    found = asked(model, "free")
    assert (found.type, found.rule) == ("fp32", "makes_fp32")


def _scalar(model: ir.Model, name: str) -> ir.Value:
    tensor = ir.tensor(np.float32(1), name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([]), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def test_layers_decide_over_promises(workshop: Workshop) -> None:
    """The engine of a conversion without bound attention does not keep the promise of one with it."""
    promised = workshop.convert("fp16")
    loose = workshop.convert("fp16", "loose", bound_attention=False)
    layers = workshop.layers(loose.path, "loose").layers
    name = f"{LAYER}/self_attn/MatMul_1"
    found = asked(ir.load(promised.path), name, layers=layers)
    assert found.promise is not None
    assert found.promise.status == "broken"
    assert found.layers
    kept = asked(ir.load(promised.path), name, layers=workshop.good_layers("fp16").layers)
    assert kept.promise is not None
    assert kept.promise.status == "kept"
    assert [layer for layer in kept.layers if "mha" in layer]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pre_norm/Mul_1", f"nearest: {LAYER}/pre_norm/Mul_1, "),
        ("/transformer/layers.0/pre_nrm/Mul_1", f"nearest: {LAYER}/pre_norm/Mul_1, "),
        ("toqkv", f"nearest: {LAYER}/self_attn/to_qkv/MatMul, "),
        ("zzz", "list the names with: structures MODEL.onnx --json"),
    ],
)
def test_an_unknown_node_has_near_names(fp16: ir.Model, name: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=f"no node is named {name}") as caught:
        asked(fp16, name)
    assert (caught.value.hint or "").startswith(hint)


def test_a_source_model_has_no_reasons(workshop: Workshop) -> None:
    with pytest.raises(SourceModelError, match="not a converted model"):
        asked(ir.load(workshop.source.path), f"{LAYER}/pre_norm/Pow")


# --- the command ---------------------------------------------------------------------------------


def test_the_command_explains_a_converted_file(workshop: Workshop) -> None:
    file = workshop.convert("fp16").path
    node = f"{LAYER}/pre_norm/Mul_1"
    done = CliRunner().invoke(app, ["explain", str(file), "--node", node])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        f"{node}: fp32, because it is part of norm pre_norm of block 0: {Rule.NORM.value}",
        f"  promise  fp32_norm (fp32) of {node}: kept",
    ]
    done = CliRunner().invoke(app, ["explain", str(file), "--node", node, "--json"])
    assert json.loads(done.output) == json.loads(json.dumps(asked(ir.load(file), node).to_json()))


def test_the_command_explains_a_finished_build(workshop: Workshop, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        model={"name": "sample", "onnx": str(workshop.source.path)},
        verify={"fidelity": {"lengths": [16], "t": [1.0], "min_cosine": 0.99}},
    )
    cache = tmp_path / "cache"
    (outcome,) = build(load_recipe(recipe), Settings(cache))
    node = f"{LAYER}/self_attn/to_qkv/MatMul"
    for file in (outcome.paths.engine, outcome.paths.report):
        done = CliRunner().invoke(
            app, ["explain", str(file), "--node", node, "--json", "--cache", str(cache)]
        )
        found = json.loads(done.output)
        assert (found["type"], found["structure"]) == ("fp16", "linear self_attn.to_qkv of block 0")
        assert found["promise"]["status"] == "kept"
        assert found["layers"]
    done = CliRunner().invoke(
        app, ["explain", str(outcome.paths.report), "--node", node, "--cache", str(tmp_path / "other")]
    )
    assert isinstance(done.exception, SourceModelError)
    assert "not in the cache any more" in str(done.exception)


def test_types_are_spelled_as_reports_spell_them(fp16: ir.Model) -> None:
    node = next(n for n in fp16.graph if n.op_type == "Shape")
    found = asked(fp16, node.name or "")
    assert (found.type, found.rule, found.promise) == ("int64", "no_float", None)
    assert SPELLED[ir.DataType.FLOAT16] == asked(fp16, f"{LAYER}/ff/ff/ff.2/MatMul").type
