"""Ways to damage a converted graph: what a converter, a quantizer or a careless edit may get wrong.

Each function reads a converted model, does its damage and writes the result; it returns the names of
the nodes that are at fault, which is what has to be named.  They are written for the sample model in
TorchScript's spelling, whose node names say what a node is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from engine_builder.graph.find import find_structures
from engine_builder.graph.reading import is_op, origin, readers
from engine_builder.graph.structures import Linear, Structures
from tests.doubles import DOUBLES, retype, trunk_type

Damage = Callable[[Path, Path], tuple[str, ...]]
Array = npt.NDArray[Any]

FLOAT: Final = ir.DataType.FLOAT
LAYER: Final = "/transformer/layers.0"
ATTENTION: Final = f"{LAYER}/self_attn"
TO_OUT: Final = f"{ATTENTION}/to_out/MatMul"


# --- reading and writing --------------------------------------------------------------------


def _edit(change: Callable[[ir.Model], tuple[str, ...]]) -> Damage:
    """A damage function from one that edits the model in memory."""

    def damage(converted: Path, out: Path) -> tuple[str, ...]:
        model = ir.load(converted)
        names = change(model)
        model.graph.sort()
        ir.save(model, out)
        return names

    damage.__doc__ = change.__doc__
    return damage


def _node(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def _linear(model: ir.Model, name: str) -> Linear:
    return next(linear for linear in find_structures(model).linears if linear.name == name)


def _values(value: ir.Value | None) -> Array:
    assert value is not None
    constant = origin(value).const_value
    assert constant is not None
    return constant.numpy()


def _set(value: ir.Value | None, array: Array) -> None:
    """Gives the constant behind ``value`` other numbers of the same type."""
    assert value is not None
    constant = origin(value)
    assert constant.const_value is not None
    kept = array.astype(constant.const_value.dtype.numpy())
    constant.const_value = ir.tensor(kept, name=constant.name)


def _constant(model: ir.Model, name: str, array: Array) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


def _replace_reader_inputs(value: ir.Value, other: ir.Value) -> tuple[str, ...]:
    """Makes every reader of ``value`` read ``other``; returns their names, past casts."""
    names = tuple(node.name or "" for node, _ in readers(value))
    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, other)
    return names


# --- types ----------------------------------------------------------------------------------


def _types(choose: Callable[[Structures], list[ir.Node]], *, fp32: bool) -> Damage:
    def change(model: ir.Model) -> tuple[str, ...]:
        nodes = [n for n in choose(find_structures(model)) if not is_op(n, "Cast", "Constant")]
        retype(model, nodes, FLOAT if fp32 else trunk_type(model))
        return tuple(n.name or "" for n in nodes)

    return _edit(change)


def _other_half(model: ir.Model) -> tuple[str, ...]:
    """One attention core runs in bf16 amid an fp16 graph."""
    core = find_structures(model).attention[1]
    retype(model, [n for n in core.nodes if not is_op(n, "Cast")], ir.DataType.BFLOAT16)
    return tuple(n.name or "" for n in core.nodes)


TYPES: Final[Mapping[str, Damage]] = {
    **{name: DOUBLES[name] for name in DOUBLES if name not in ("one_softmax_fp32", "one_linear_fp32")},
    "one_linear_fp32": _types(lambda s: [s.linears[10].node], fp32=True),
    "values_product_fp32": _types(lambda s: [s.attention[-1].pv], fp32=True),
    "core_in_bf16": _edit(_other_half),
    "query_norm_trunk": _types(lambda s: list(s.norms[1].nodes), fp32=False),
    "norm_variance_trunk": _types(lambda s: list(s.norms[2].nodes[:2]), fp32=False),
    "timestep_cosine_trunk": _types(lambda s: [s.fourier[-1].cos], fp32=False),
}
"""Types that a strongly typed network then computes in: each breaks a promise in the graph itself."""


# --- rotary tables --------------------------------------------------------------------------


def _tables(model: ir.Model) -> tuple[ir.Value, ir.Value]:
    names = model.graph.initializers
    return names["rotary_cos_table"], names["rotary_sin_table"]


def _write_tables(model: ir.Model, angle: Array) -> tuple[str, ...]:
    cosine, sine = _tables(model)
    _set(cosine, np.cos(angle.astype(np.float64)))
    _set(sine, np.sin(angle.astype(np.float64)))
    return ("rotary_cos_table", "rotary_sin_table")


def _angle(model: ir.Model, theta: float = 10000.0) -> Array:
    """positions x inverse frequencies, twice side by side, in fp32 as the source has them."""
    rows, columns = _values(_tables(model)[0]).shape
    half = columns // 2
    frequency = (1 / theta ** (np.arange(half) / half)).astype(np.float32)
    angle = np.arange(rows, dtype=np.float32)[:, None] * frequency
    return np.concatenate([angle, angle], axis=1)


def _short_table(model: ir.Model) -> tuple[str, ...]:
    """The tables end before the longest profile does."""
    for table in _tables(model):
        array = _values(table)[:4000].copy()
        table.const_value = ir.tensor(array, name=table.name)
        table.shape = ir.Shape(array.shape)
    return ("rotary_cos_table", "rotary_sin_table")


def _fp16_angles(model: ir.Model) -> tuple[str, ...]:
    """The tables are made of angles that were rounded to fp16."""
    return _write_tables(model, _angle(model).astype(np.float16))


def _bf16_angles(model: ir.Model) -> tuple[str, ...]:
    """The tables are made of angles that were rounded to bf16."""
    return _write_tables(model, _angle(model).astype(ml_dtypes.bfloat16).astype(np.float32))


def _empty_tables(model: ir.Model) -> tuple[str, ...]:
    """The tables hold zeros."""
    for table in _tables(model):
        _set(table, np.zeros_like(_values(table)))
    return ("rotary_cos_table", "rotary_sin_table")


def _trunk_tables(model: ir.Model) -> tuple[str, ...]:
    """The tables are stored in the trunk type and cast up where they are read."""
    names: list[str] = []
    for table in _tables(model):
        assert table.name is not None
        dtype = trunk_type(model)
        table.const_value = ir.tensor(_values(table).astype(dtype.numpy()), name=table.name)
        table.type = ir.TensorType(dtype)
        for use in list(table.uses()):
            cut = use.node
            for output in cut.outputs:
                output.type = ir.TensorType(dtype)
                uses = list(output.uses())
                cast = ir.node(
                    "Cast",
                    [output],
                    attributes={"to": int(FLOAT)},
                    name=f"{output.name}__fp32",
                    outputs=[
                        ir.Value(name=f"{output.name}__fp32", type=ir.TensorType(FLOAT), shape=output.shape)
                    ],
                )
                model.graph.insert_after(cut, cast)
                for use_of_output in uses:
                    use_of_output.node.replace_input_with(use_of_output.idx, cast.outputs[0])
            names.append(cut.name or "")
        names.append(table.name)
    rotated = [n.name or "" for r in find_structures(model).rotary for n in r.nodes]
    return (*names, *rotated)


TABLES: Final[Mapping[str, Damage]] = {
    "table_too_short": _edit(_short_table),
    "table_of_fp16_angles": _edit(_fp16_angles),
    "table_of_bf16_angles": _edit(_bf16_angles),
    "table_of_zeros": _edit(_empty_tables),
    "table_in_trunk_type": _edit(_trunk_tables),
}
"""Baked rotary tables that are wrong."""


# --- quantization ---------------------------------------------------------------------------


def _quantized(model: ir.Model) -> Linear:
    """The second projection of the first feed-forward: its input is quantized for it alone."""
    return _linear(model, f"{LAYER}/ff/ff/ff.2/MatMul")


def _dequantizer(linear: Linear, *, weight: bool) -> ir.Node:
    value = linear.node.inputs[linear.weight_input if weight else 1 - linear.weight_input]
    node = None if value is None else value.producer()
    assert node is not None
    assert node.op_type == "DequantizeLinear"
    return node


def _unquantize(model: ir.Model, linear: Linear, *, weight: bool) -> None:
    """Takes the Q/DQ pair off one operand."""
    node = _dequantizer(linear, weight=weight)
    if weight:
        q, scale = _values(node.inputs[0]).astype(np.float32), _values(node.inputs[1]).astype(np.float32)
        plain = _constant(model, f"{linear.name}.plain", (q * scale).astype(trunk_type(model).numpy()))
        linear.node.replace_input_with(linear.weight_input, plain)
    else:
        quantize = node.inputs[0].producer() if node.inputs[0] is not None else None
        assert quantize is not None
        assert quantize.inputs[0] is not None
        linear.node.replace_input_with(1 - linear.weight_input, quantize.inputs[0])


def _without_qdq(*, weight: bool, activation: bool) -> Damage:
    def change(model: ir.Model) -> tuple[str, ...]:
        linear = _quantized(model)
        if weight:
            _unquantize(model, linear, weight=True)
        if activation:
            _unquantize(model, linear, weight=False)
        return (linear.name,)

    return _edit(change)


def _scale(number: Callable[[Array], Array], *, weight: bool = False) -> Damage:
    """Gives the scale of one operand of one linear another value."""

    def change(model: ir.Model) -> tuple[str, ...]:
        linear = _quantized(model)
        node = _dequantizer(linear, weight=weight)
        _set(node.inputs[1], number(_values(node.inputs[1]).astype(np.float32)))
        return (linear.name,)

    return _edit(change)


def _fp32_scale(model: ir.Model) -> tuple[str, ...]:
    """The activation's scale is fp32: TensorRT-RTX then writes the product in fp32, in silence."""
    linear = _quantized(model)
    node = _dequantizer(linear, weight=False)
    quantize = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert quantize is not None
    scale = _constant(model, "scale_fp32", _values(node.inputs[1]).astype(np.float32))
    for reader in (quantize, node):
        reader.replace_input_with(1, scale)
    return (linear.name,)


def _per_channel_scale(*, axis_out: bool) -> Damage:
    def change(model: ir.Model) -> tuple[str, ...]:
        linear = _quantized(model)
        node = _dequantizer(linear, weight=True)
        axis = linear.weight_axis_out if axis_out else 1 - linear.weight_axis_out
        shape = _values(node.inputs[0]).shape
        scales = np.linspace(1, 2, shape[axis]) * float(_values(node.inputs[1]))
        name = f"{linear.name}.scales"
        node.replace_input_with(1, _constant(model, name, scales.astype(trunk_type(model).numpy())))
        node.resize_inputs(2)
        node.attributes["axis"] = ir.AttrInt64("axis", axis)
        return (linear.name,)

    return _edit(change)


def _e5m2(model: ir.Model) -> tuple[str, ...]:
    """The weight is E5M2."""
    linear = _quantized(model)
    node = _dequantizer(linear, weight=True)
    array = _values(node.inputs[0]).astype(np.float32).astype(ml_dtypes.float8_e5m2)
    node.replace_input_with(0, _constant(model, f"{linear.name}.e5m2", array))
    node.replace_input_with(2, _constant(model, "e5m2_zero", np.zeros((), ml_dtypes.float8_e5m2)))
    return (linear.name,)


def _zero_point(model: ir.Model) -> tuple[str, ...]:
    """The activation has a zero point of 2, which TensorRT accepts in silence."""
    linear = _quantized(model)
    node = _dequantizer(linear, weight=False)
    node.replace_input_with(2, _constant(model, "zero_2", np.array(2, ml_dtypes.float8_e4m3fn)))
    return (linear.name,)


def _renamed(model: ir.Model) -> tuple[str, ...]:
    """A linear that fp8 was to run has another name and no quantization."""
    linear = _quantized(model)
    name = linear.name
    _unquantize(model, linear, weight=True)
    _unquantize(model, linear, weight=False)
    linear.node.name = f"{name}_replaced"
    return (name,)


def _quantized_attention(model: ir.Model) -> tuple[str, ...]:
    """q, k and the probabilities of one core are quantized to fp8 and back: TensorRT no longer fuses it."""
    core = find_structures(model).attention[0]
    dtype = trunk_type(model)
    scale = _constant(model, "attention_scale", np.array(0.05, np.float32).astype(dtype.numpy()))
    zero = _constant(model, "attention_zero", np.zeros((), ml_dtypes.float8_e4m3fn))
    for reader, index in ((core.qk, 0), (core.qk, 1), (core.pv, 0)):
        value = reader.inputs[index]
        assert value is not None
        for op, kind in (("QuantizeLinear", ir.DataType.FLOAT8E4M3FN), ("DequantizeLinear", dtype)):
            name = f"{reader.name}.{index}.{op}"
            out = ir.Value(name=name, type=ir.TensorType(kind), shape=value.shape)
            node = ir.node(op, [value, scale, zero], outputs=[out], name=name)
            model.graph.insert_before(reader, node)
            value = out
        reader.replace_input_with(index, value)
    return (core.name,)


FP8: Final[Mapping[str, Damage]] = {
    "linear_unquantized": _without_qdq(weight=True, activation=True),
    "weight_unquantized": _without_qdq(weight=True, activation=False),
    "activation_unquantized": _without_qdq(weight=False, activation=True),
    "scale_in_fp32": _edit(_fp32_scale),
    "scale_zero": _scale(lambda s: np.zeros_like(s)),
    "scale_negative": _scale(lambda s: -s),
    "scale_nan": _scale(lambda s: s * np.nan),
    "scale_infinite": _scale(lambda s: s * np.inf),
    "weight_scale_zero": _scale(lambda s: np.zeros_like(s), weight=True),
    "scale_per_input_channel": _per_channel_scale(axis_out=False),
    "weight_in_e5m2": _edit(_e5m2),
    "zero_point": _edit(_zero_point),
    "linear_renamed": _edit(_renamed),
}
"""Quantization that does not make an FP8 product, or not a sound one."""

ATTENTION_QUANTIZED: Final = _edit(_quantized_attention)


# --- numbers --------------------------------------------------------------------------------


def _weight(name: str, change: Callable[[Array], Array]) -> Damage:
    def edit(model: ir.Model) -> tuple[str, ...]:
        weight = _linear(model, name).weight
        _set(weight, change(_values(weight).astype(np.float32)))
        return (name,)

    return _edit(edit)


def _operand(name: str, index: int, change: Callable[[Array], Array]) -> Damage:
    """Changes a constant operand of the node ``name``."""

    def edit(model: ir.Model) -> tuple[str, ...]:
        node = _node(model, name)
        value = node.inputs[index]
        copy = _constant(model, f"{name}.damaged", change(_values(value)).astype(_values(value).dtype))
        node.replace_input_with(index, copy)
        return (name,)

    return _edit(edit)


def _swap_heads(weight: Array) -> Array:
    return np.concatenate([weight[64:128], weight[:64]], axis=0)


def _one_nan(weight: Array) -> Array:
    damaged = weight.copy()
    damaged[3, 5] = np.nan
    return damaged


def _dropped_block(model: ir.Model) -> tuple[str, ...]:
    """The second of two blocks is skipped."""
    streams = [
        n for n in model.graph if is_op(n, "Add") and (n.name or "").startswith("/transformer/layers.")
    ]
    last = {name: [n for n in streams if (n.name or "").startswith(name)][-1] for name in (LAYER, _SECOND)}
    return _replace_reader_inputs(last[_SECOND].outputs[0], last[LAYER].outputs[0])


_SECOND: Final = "/transformer/layers.1"


def _mask_ignored(model: ir.Model) -> tuple[str, ...]:
    """Masked text positions keep their embedding instead of the learned padding."""
    node = _node(model, "/Where")
    node.replace_input_with(0, _constant(model, "all_on", np.ones((1, 256, 1), np.bool_)))
    return ("/Where",)


def _double_rotation(model: ir.Model) -> tuple[str, ...]:
    """The query is rotated by twice its angle."""
    cosine, sine = _node(model, f"{ATTENTION}/Cos"), _node(model, f"{ATTENTION}/Sin")
    angle = cosine.inputs[0]
    assert angle is not None
    twice = ir.node(
        "Mul",
        [angle, _constant(model, "two", np.array(2, np.float32))],
        outputs=[ir.Value(name="twice", type=ir.TensorType(FLOAT), shape=angle.shape)],
        name="twice",
    )
    model.graph.insert_before(cosine, twice)
    for node in (cosine, sine):
        node.replace_input_with(0, twice.outputs[0])
    return (f"{ATTENTION}/Cos", f"{ATTENTION}/Sin")


def _cosine_for_sine(model: ir.Model) -> tuple[str, ...]:
    """Cosine and sine of the query's rotation are exchanged."""
    cosine, sine = (_node(model, f"{ATTENTION}/{op}").outputs[0] for op in ("Cos", "Sin"))
    exchanged = [(use, other) for v, other in ((cosine, sine), (sine, cosine)) for use in v.uses()]
    for use, other in exchanged:
        use.node.replace_input_with(use.idx, other)
    return tuple(use.node.name or "" for use, _ in exchanged)


def _modulation_swapped(model: ir.Model) -> tuple[str, ...]:
    """Scale and shift of the first norm are exchanged."""
    scale, shift = _node(model, f"{LAYER}/Add_2"), _node(model, f"{LAYER}/Add_3")
    a, b = scale.inputs[0], shift.inputs[1]
    scale.replace_input_with(0, b)
    shift.replace_input_with(1, a)
    return (f"{LAYER}/Add_2", f"{LAYER}/Add_3")


def _gate_dropped(model: ir.Model) -> tuple[str, ...]:
    """Self-attention is added without its gate."""
    gated = _node(model, f"{LAYER}/Mul_7")
    gated.replace_input_with(1, _constant(model, "open", np.ones((), trunk_type(model).numpy())))
    return (f"{LAYER}/Mul_7",)


def _residual_dropped(model: ir.Model) -> tuple[str, ...]:
    """The stream is replaced by the branch instead of added to it."""
    node = _node(model, f"{LAYER}/Add_4")
    node.replace_input_with(1, _constant(model, "nothing", np.zeros((), np.float32)))
    return (f"{LAYER}/Add_4",)


def _activation_changed(model: ir.Model) -> tuple[str, ...]:
    """SiLU has become a plain sigmoid, squared."""
    name = "/to_cond_embed/to_cond_embed.1/Mul"
    node = _node(model, name)
    node.replace_input_with(0, node.inputs[1])
    return (name,)


def _softmax_axis(model: ir.Model) -> tuple[str, ...]:
    """The first softmax runs over the queries instead of the keys."""
    _node(model, f"{ATTENTION}/Softmax").attributes["axis"] = ir.AttrInt64("axis", -2)
    return (f"{ATTENTION}/Softmax",)


def _memory_zeroed(model: ir.Model) -> tuple[str, ...]:
    """The learned memory tokens are zeros."""
    _set(_node(model, "/transformer/Expand").inputs[0], np.zeros((64, 128)))
    return ("/transformer/Expand",)


def _layers_swapped(model: ir.Model) -> tuple[str, ...]:
    """The output projections of the two self-attentions are exchanged."""
    names = (TO_OUT, f"{_SECOND}/self_attn/to_out/MatMul")
    first, second = (_linear(model, name).weight for name in names)
    a, b = _values(first).copy(), _values(second).copy()
    _set(first, b)
    _set(second, a)
    return names


NUMBERS: Final[Mapping[str, Damage]] = {
    "weight_zeroed": _weight(TO_OUT, np.zeros_like),
    "weight_negated": _weight(TO_OUT, np.negative),
    "weight_transposed": _weight(TO_OUT, np.transpose),
    "weight_with_nan": _weight(TO_OUT, _one_nan),
    "heads_permuted": _weight(TO_OUT, _swap_heads),
    "projections_swapped": _edit(_layers_swapped),
    "block_dropped": _edit(_dropped_block),
    "memory_tokens_zeroed": _edit(_memory_zeroed),
    "mask_ignored": _edit(_mask_ignored),
    "seconds_ignored": _operand("/Clip", 2, np.zeros_like),
    "bias_missing": _operand("/to_timestep_embed/to_timestep_embed.0/Gemm", 2, np.zeros_like),
    "epsilon_wrong": _operand(f"{ATTENTION}/q_norm/Add", 1, lambda e: np.full_like(e, 1.0)),
    "gain_missing": _operand(f"{LAYER}/cross_attend_norm/Mul_1", 1, np.ones_like),
    "rotated_twice": _edit(_double_rotation),
    "cosine_for_sine": _edit(_cosine_for_sine),
    "frequencies_wrong": _operand("/transformer/Einsum", 1, lambda f: f * 0.5),
    "modulation_swapped": _edit(_modulation_swapped),
    "gate_dropped": _edit(_gate_dropped),
    "residual_dropped": _edit(_residual_dropped),
    "activation_changed": _edit(_activation_changed),
    "softmax_over_queries": _edit(_softmax_axis),
    "attention_scale_missing": _operand(f"{ATTENTION}/Div_7", 0, lambda s: s * 64),
}
"""Graphs whose types are all right and whose results are not."""

FP8_NUMBERS: Final[Mapping[str, Damage]] = {
    "scale_too_small": _scale(lambda s: s / 64),
    "scale_too_large": _scale(lambda s: s * 30000),
}
"""Scales of another model or another day: sound by themselves, wrong for these activations."""
