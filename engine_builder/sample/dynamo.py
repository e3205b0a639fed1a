"""The graph as PyTorch's dynamo exporter writes it, opset 20, or 23 with composite operators.

Characteristic of it, and kept here: every literal an initializer, one for all equal ones; axes as inputs;
norms with Reciprocal; no Casts that change nothing; cos and sin of the rotary angles computed once; the
text's keys and values in shapes known at export.  At opset 23 norms are RMSNormalization and attention
cores Attention.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, ValueInfoProto, helper

from engine_builder.sample.draft import (
    BOOL,
    FLOAT,
    INT64,
    INT64_MAX,
    INT64_MIN,
    GraphDraft,
    Initializer,
)
from engine_builder.sample.spec import (
    BLOCK_NORM_EPS,
    COND_TOKENS,
    HEAD_NORM_EPS,
    INPUT_SHAPES,
    LATENT_CHANNELS,
    MEMORY_TOKENS,
    MODULATIONS,
    OUTPUT,
    ROTARY_CHANNELS,
    SECONDS_MAX,
    Dimensions,
)
from engine_builder.sample.weights import fourier_frequencies, parameters, rotary_frequencies

IR_VERSION = 10
_ROOT = "dit.transformer"
_TOKENS = f"L + {MEMORY_TOKENS}"
_CONV: dict[str, Any] = {
    "auto_pad": "NOTSET",
    "dilations": [1],
    "group": 1,
    "kernel_shape": [1],
    "pads": [0, 0],
    "strides": [1],
}

Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class _Value:
    """A value's name and its shape, with None for what the exporter did not know."""

    name: str
    shape: Shape


def draft(dims: Dimensions, *, composite: bool) -> GraphDraft:
    """The graph for ``dims``: opset 23 and its composite operators if ``composite``, else opset 20."""
    return _Tape(dims, composite).draft()


class _Tape:
    """Records nodes in the order of the exported program."""

    def __init__(self, dims: Dimensions, composite: bool) -> None:
        self.dims = dims
        self.composite = composite
        self.parameters = parameters(dims)
        self.nodes: list[NodeProto] = []
        self.value_info: list[ValueInfoProto] = []
        self.initializers: dict[str, Initializer] = {}
        self._literals: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._first = {p.stream: name for name, p in reversed(self.parameters.items())}
        self._uses: Counter[str] = Counter()
        self._values = 0
        self._key_angles: _Value | None = None
        self._rotations: dict[str, tuple[_Value, _Value]] = {}

    # -- recording ---------------------------------------------------------------------------------

    def fresh(self, base: str) -> str:
        """``base``, then ``base_1``, ``base_2``..., as the exported program names its results."""
        count = self._uses[base]
        self._uses[base] += 1
        return f"{base}_{count}" if count else base

    def fresh_value(self) -> str:
        self._values += 1
        return f"val_{self._values}"

    def emit(
        self,
        op_type: str,
        node: str,
        outputs: list[_Value],
        *inputs: _Value,
        kind: int = FLOAT,
        **attributes: Any,
    ) -> _Value:
        names = [value.name for value in outputs]
        self.nodes.append(
            helper.make_node(op_type, [value.name for value in inputs], names, node, **attributes)
        )
        self.value_info += [helper.make_tensor_value_info(v.name, kind, v.shape) for v in outputs]
        return outputs[0]

    def op(
        self, base: str, op_type: str, shape: Shape, *inputs: _Value, kind: int = FLOAT, **attributes: Any
    ) -> _Value:
        """A node that is one call of the exported program, ``base`` being the called function."""
        name = self.fresh(base)
        return self.emit(op_type, f"node_{name}", [_Value(name, shape)], *inputs, kind=kind, **attributes)

    def part(
        self, op_type: str, shape: Shape, *inputs: _Value, kind: int = FLOAT, **attributes: Any
    ) -> _Value:
        """A node that is a step inside such a call."""
        name = self.fresh_value()
        node = f"node_{op_type}_{name.removeprefix('val_')}"
        return self.emit(op_type, node, [_Value(name, shape)], *inputs, kind=kind, **attributes)

    def call(self, base: str, op_type: str, shape: Shape, *inputs: _Value, **attributes: Any) -> _Value:
        """A node whose result is named after a call, but itself as a step inside one."""
        node = f"node_{op_type}_{self.fresh_value().removeprefix('val_')}"
        return self.emit(op_type, node, [_Value(self.fresh(base), shape)], *inputs, **attributes)

    def binary(self, op_type: str, left: _Value, right: _Value) -> _Value:
        """An elementwise operator with broadcasting."""
        return self.op(op_type.lower(), op_type, _broadcast(left.shape, right.shape), left, right)

    def unary(self, base: str, op_type: str, value: _Value) -> _Value:
        return self.op(base, op_type, value.shape, value)

    def literal(self, value: NDArray[np.generic]) -> _Value:
        """A constant; equal ones are one initializer."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._literals:
            name = self.fresh_value()
            self._literals[key] = name
            self.initializers[name] = Initializer(name, value, value.shape)
        return _Value(self._literals[key], value.shape)

    def real(self, value: float) -> _Value:
        return self.literal(np.array(value, np.float32))

    def integers(self, *values: int) -> _Value:
        return self.literal(np.array(values, np.int64))

    def parameter(self, name: str, *, transposed: bool = False) -> _Value:
        """An initializer under its module path; one of equal parameters stands for all."""
        parameter = self.parameters[name]
        name = self._first[parameter.stream]
        shape = parameter.shape[::-1] if transposed else parameter.shape
        self.initializers[name] = Initializer(name, parameter, shape, transposed)
        return _Value(name, shape)

    # -- pieces ------------------------------------------------------------------------------------

    def linear(self, module: str, value: _Value, *, bias: bool = False) -> _Value:
        """A linear: Gemm for two-dimensional values, else MatMul on a folded transpose, and Add."""
        if len(value.shape) == 2:
            inputs = [value, self.parameter(f"{module}.weight", transposed=True)]
            if bias:
                inputs.append(self.parameter(f"{module}.bias"))
            shape: Shape = (value.shape[0], inputs[1].shape[0])
            return self.op("linear", "Gemm", shape, *inputs, alpha=1.0, beta=1.0, transA=0, transB=1)
        parameter = self.parameters[f"{module}.weight"]
        weight = _Value(self.fresh_value(), parameter.shape)
        self.initializers[weight.name] = Initializer(weight.name, parameter, parameter.shape)
        shape = (*value.shape[:-1], parameter.shape[1])
        if not bias:
            return self.op("linear", "MatMul", shape, value, weight)
        product = self.part("MatMul", shape, value, weight)
        return self.op("linear", "Add", shape, product, self.parameter(f"{module}.bias"))

    def silu(self, value: _Value) -> _Value:
        return self.op("silu", "Mul", value.shape, value, self.part("Sigmoid", value.shape, value))

    def mlp(self, module: str, value: _Value, *, bias: bool = False) -> _Value:
        return self.linear(f"{module}.2", self.silu(self.linear(f"{module}.0", value, bias=bias)), bias=bias)

    def transpose(self, value: _Value, *perm: int) -> _Value:
        return self.op("permute", "Transpose", tuple(value.shape[axis] for axis in perm), value, perm=perm)

    def unsqueeze(self, value: _Value, axis: int) -> _Value:
        place = axis if axis >= 0 else len(value.shape) + 1 + axis
        shape = (*value.shape[:place], 1, *value.shape[place:])
        return self.op("unsqueeze", "Unsqueeze", shape, value, self.integers(axis))

    def concat(self, shape: Shape, *values: _Value, axis: int) -> _Value:
        return self.op("cat", "Concat", shape, *values, axis=axis)

    def slice_(self, value: _Value, shape: Shape, start: int, end: int, axis: int) -> _Value:
        bounds = [self.integers(bound) for bound in (start, end, axis, 1)]
        return self.op("slice", "Slice", shape, value, *bounds)

    def reshape(self, value: _Value, base: str, shape: Shape, *target: int) -> _Value:
        emit = self.call if -1 in target else self.op
        return emit(base, "Reshape", shape, value, self.integers(*target), allowzero=1)

    def split(self, value: _Value, parts: int) -> list[_Value]:
        """``parts`` equal pieces of the last axis."""
        width = value.shape[-1]
        assert isinstance(width, int)
        name = self.fresh("split")
        shape = (*value.shape[:-1], width // parts)
        pieces = [_Value(f"{name}_split_{index}", shape) for index in range(parts)]
        node = f"node_Split_{self.fresh_value().removeprefix('val_')}"
        self.emit("Split", node, pieces, value, axis=len(shape) - 1, num_outputs=parts)
        return pieces

    def unbind(self, value: _Value, axis: int) -> tuple[_Value, _Value]:
        """The two halves of an axis of two, without the axis."""
        name = self.fresh("unbind")
        place = axis % len(value.shape)
        sliced = (*value.shape[:place], 1, *value.shape[place + 1 :])
        shape = (*value.shape[:place], *value.shape[place + 1 :])
        halves = []
        for index in range(2):
            bounds = [self.integers(bound) for bound in (index, index + 1, axis)]
            half = self.part("Slice", sliced, value, *bounds)
            made = [_Value(self.fresh("getitem"), shape)]
            halves.append(self.emit("Squeeze", f"node_{name}__{index}", made, half, self.integers(axis)))
        return halves[0], halves[1]

    def stack(self, first: _Value, second: _Value) -> _Value:
        """Two of one shape along a new axis 1."""
        single: Shape = (first.shape[0], 1, *first.shape[1:])
        pair = (self.part("Unsqueeze", single, value, self.integers(1)) for value in (first, second))
        return self.op("stack", "Concat", (single[0], 2, *single[2:]), *pair, axis=1)

    def fourier(self, value: _Value) -> _Value:
        """cos and sin of 2 pi f times the value, (1, 256)."""
        for factor in (fourier_frequencies(), np.array(2, np.float32), np.array(np.pi, np.float32)):
            value = self.binary("Mul", value, self.literal(factor))
        pair = self.unary("cos", "Cos", value), self.unary("sin", "Sin", value)
        return self.concat((1, 2 * fourier_frequencies().size), *pair, axis=-1)

    def rms_norm(self, value: _Value, gamma: str, eps: float) -> _Value:
        if self.composite:
            gain = self.parameter(gamma)
            return self.op(
                "rms_norm", "RMSNormalization", value.shape, value, gain,
                axis=-1, epsilon=eps, stash_type=1,
            )  # fmt: skip
        square = self.op("pow", "Pow", value.shape, value, self.real(2))
        reduced = (*value.shape[:-1], 1)
        axis = self.integers(len(value.shape) - 1)
        mean = self.op("mean", "ReduceMean", reduced, square, axis, keepdims=1, noop_with_empty_axes=0)
        root = self.part("Sqrt", reduced, self.binary("Add", mean, self.real(eps)))
        scaled = self.binary("Mul", value, self.unary("rsqrt", "Reciprocal", root))
        return self.binary("Mul", scaled, self.parameter(gamma))

    def to_heads(self, value: _Value) -> _Value:
        """(1, n, heads * d) to (1, heads, n, d)."""
        tokens = value.shape[1]
        heads, width = self.dims.heads, self.dims.head_dim
        count = tokens if isinstance(tokens, int) else -1
        split = self.reshape(value, "view", (1, tokens, heads, width), 1, count, heads, width)
        return self.transpose(split, 0, 2, 1, 3)

    def from_heads(self, value: _Value) -> _Value:
        value = self.transpose(value, 0, 2, 1, 3)
        return self.reshape(value, "_unsafe_view", (1, _TOKENS, self.dims.embed), 1, -1, self.dims.embed)

    def rotate(self, value: _Value, angles: _Value) -> _Value:
        """Rotary embedding of the first channels of each head."""
        outer, axis = value.shape[:-1], len(value.shape) - 1
        turned = self.slice_(value, (*outer, ROTARY_CHANNELS), 0, ROTARY_CHANNELS, axis)
        rest = (*outer, self.dims.head_dim - ROTARY_CHANNELS)
        kept = self.slice_(value, rest, ROTARY_CHANNELS, INT64_MAX, axis)
        known = self._rotations.get(angles.name)
        cos = known[0] if known else self.unary("cos", "Cos", angles)
        straight = self.binary("Mul", turned, cos)
        half = ROTARY_CHANNELS // 2
        target = [size if isinstance(size, int) else -1 for size in outer]
        pair = self.reshape(turned, "view", (*outer, 2, half), *target, 2, half)
        first, second = self.unbind(pair, -2)
        crossed = self.concat(turned.shape, self.unary("neg", "Neg", second), first, axis=-1)
        sin = known[1] if known else self.unary("sin", "Sin", angles)
        self._rotations[angles.name] = cos, sin
        turned = self.binary("Add", straight, self.binary("Mul", crossed, sin))
        return self.concat(value.shape, turned, kept, axis=-1)

    def transposed_key(self, key: _Value) -> _Value:
        """The key's last two axes swapped by way of three dimensions, the shape computed when not known."""
        heads, tokens, width = self.dims.heads, key.shape[2], self.dims.head_dim
        if isinstance(tokens, int):
            target = self.integers(-1, tokens, width)
            flat = self.part("Reshape", (heads, tokens, width), key, target, allowzero=0)
            flat = self.part("Transpose", (heads, width, tokens), flat, perm=[0, 2, 1])
            target = self.integers(1, heads, width, tokens)
            return self.part("Reshape", (1, heads, width, tokens), flat, target, allowzero=0)
        shape = self.part("Shape", (4,), key, kind=INT64, start=0)
        last = self.sizes(shape, 1, -1, INT64_MAX)
        second_last = self.sizes(shape, 1, -2, -1)
        outer = self.sizes(shape, 2, INT64_MIN, -2)
        target = self.part("Concat", (3,), self.integers(-1), second_last, last, kind=INT64, axis=0)
        flat = self.part("Reshape", (None,) * 3, key, target, allowzero=0)
        flat = self.part("Transpose", (None,) * 3, flat, perm=[0, 2, 1])
        target = self.part("Concat", (4,), outer, last, second_last, kind=INT64, axis=0)
        return self.part("Reshape", (None,) * 4, flat, target, allowzero=0)

    def sizes(self, shape: _Value, count: int, start: int, end: int) -> _Value:
        return self.part("Slice", (count,), shape, self.integers(start), self.integers(end), kind=INT64)

    def attention_core(self, query: _Value, key: _Value, value: _Value) -> _Value:
        """Scaled dot-product attention over heads."""
        name = "scaled_dot_product_attention"
        if self.composite:
            return self.op(
                name, "Attention", query.shape, query, key, value,
                is_causal=0, qk_matmul_output_mode=0, softcap=0.0,
            )  # fmt: skip
        scale = self.literal(np.array([self.dims.head_dim**-0.25], np.float32))
        key = self.transposed_key(key)
        query = self.part("Mul", query.shape, query, scale)
        key = self.part("Mul", key.shape, key, scale)
        shape = (key.shape[0], *query.shape[1:3], key.shape[3])
        weights = self.part("MatMul", shape, query, key)
        weights = self.part("Softmax", shape, weights, axis=-1)
        return self.op(name, "MatMul", query.shape, weights, value)

    def attention(self, query: _Value, key: _Value, value: _Value) -> _Value:
        """One core, or the difference of two whose queries and keys are stacked along axis 1."""
        if not self.dims.differential:
            return self.attention_core(query, key, value)
        queries, keys = self.unbind(query, 1), self.unbind(key, 1)
        first, second = (self.attention_core(q, k, value) for q, k in zip(queries, keys, strict=True))
        return self.binary("Sub", first, second)

    def self_attention(self, module: str, value: _Value, angles: _Value, length: _Value) -> _Value:
        packed = self.linear(f"{module}.to_qkv", value)
        heads = [self.to_heads(part) for part in self.split(packed, self.dims.qkv_parts)]
        query, key, value = heads[:3]
        if self.dims.differential:
            query, key = self.stack(query, heads[3]), self.stack(key, heads[4])
        query = self.rms_norm(query, f"{module}.q_norm.gamma", HEAD_NORM_EPS)
        key = self.rms_norm(key, f"{module}.k_norm.gamma", HEAD_NORM_EPS)
        key_angles = self.scaled_angles(angles, length)
        query, key = self.rotate(query, angles), self.rotate(key, key_angles)
        return self.linear(f"{module}.to_out", self.from_heads(self.attention(query, key, value)))

    def scaled_angles(self, angles: _Value, length: _Value) -> _Value:
        """The keys' angles: the queries' times the ratio of the two lengths, which is one."""
        if self._key_angles is None:
            length = self.part("Cast", (), length, to=FLOAT)
            ratio = self.op("truediv", "Div", (), length, length)
            self._key_angles = self.binary("Mul", angles, ratio)
        return self._key_angles

    def cross_attention(self, module: str, value: _Value, cond: _Value) -> _Value:
        packed = self.linear(f"{module}.to_q", value)
        if self.dims.differential:
            query = self.stack(*(self.to_heads(part) for part in self.split(packed, 2)))
        else:
            query = self.to_heads(packed)
        packed = self.linear(f"{module}.to_kv", cond)
        heads = [self.to_heads(part) for part in self.split(packed, self.dims.kv_parts)]
        key = self.stack(*heads[:2]) if self.dims.differential else heads[0]
        query = self.rms_norm(query, f"{module}.q_norm.gamma", HEAD_NORM_EPS)
        key = self.rms_norm(key, f"{module}.k_norm.gamma", HEAD_NORM_EPS)
        return self.linear(f"{module}.to_out", self.from_heads(self.attention(query, key, heads[-1])))

    def gate(self, value: _Value, gate: _Value) -> _Value:
        opened = self.unary("sigmoid", "Sigmoid", self.binary("Sub", self.real(1), gate))
        return self.binary("Mul", value, opened)

    def modulate(self, value: _Value, scale: _Value, shift: _Value) -> _Value:
        return self.binary("Add", self.binary("Mul", value, self.binary("Add", scale, self.real(1))), shift)

    def local_embedding(self, module: str, local: _Value) -> _Value:
        local = self.mlp(module, local, bias=True)
        pads = self.integers(0, MEMORY_TOKENS, 0, 0, 0, 0)
        shape = (1, _TOKENS, self.dims.embed)
        return self.op("pad", "Pad", shape, local, pads, self.real(0), mode="constant")

    def feed_forward(self, module: str, value: _Value) -> _Value:
        plain, gate = self.split(self.linear(f"{module}.0.proj", value, bias=True), 2)
        return self.linear(f"{module}.2", self.binary("Mul", plain, self.silu(gate)), bias=True)

    def layer(
        self, module: str, stream: _Value, cond: _Value, local: _Value, modulation: _Value,
        angles: _Value, length: _Value,
    ) -> _Value:  # fmt: skip
        own = self.parameter(f"{module}.to_scale_shift_gate")
        modulation = self.unsqueeze(self.binary("Add", own, modulation), 1)
        scale, shift, gate, ff_scale, ff_shift, ff_gate = self.split(modulation, MODULATIONS)

        value = self.rms_norm(stream, f"{module}.pre_norm.gamma", BLOCK_NORM_EPS)
        value = self.modulate(value, scale, shift)
        value = self.self_attention(f"{module}.self_attn", value, angles, length)
        stream = self.binary("Add", self.gate(value, gate), stream)

        value = self.rms_norm(stream, f"{module}.cross_attend_norm.gamma", BLOCK_NORM_EPS)
        stream = self.binary("Add", stream, self.cross_attention(f"{module}.cross_attn", value, cond))
        stream = self.binary("Add", stream, self.local_embedding(f"{module}.to_local_embed", local))

        value = self.rms_norm(stream, f"{module}.ff_norm.gamma", BLOCK_NORM_EPS)
        value = self.modulate(value, ff_scale, ff_shift)
        value = self.feed_forward(f"{module}.ff.ff", value)
        return self.binary("Add", self.gate(value, ff_gate), stream)

    # -- the whole ---------------------------------------------------------------------------------

    def text(self, mask: _Value) -> _Value:
        """Text embeddings (1, 256, 768), the padding embedding where ``mask`` (1, 256, 1) is 0."""
        hidden = _Value("t5_hidden", INPUT_SHAPES["t5_hidden"])
        mask = self.op("_to_copy", "Cast", mask.shape, mask, kind=BOOL, to=BOOL)
        return self.op("where", "Where", hidden.shape, mask, hidden, self.parameter("padding_embedding"))

    def conditioning(self, mask: _Value) -> tuple[_Value, _Value]:
        """Conditioning tokens (1, 257, E) and the seconds' global embedding (1, E)."""
        text = self.text(mask)
        seconds, longest = _Value("seconds_total", (1,)), self.real(SECONDS_MAX)
        seconds = self.call("clamp", "Clip", (1,), seconds, self.real(0), longest)
        features = self.fourier(self.unsqueeze(self.binary("Div", seconds, longest), -1))
        seconds = self.linear("seconds_lin", features, bias=True)
        tokens = (1, COND_TOKENS, text.shape[2])
        cond = self.concat(tokens, text, self.unsqueeze(seconds, 1), axis=1)
        return self.mlp("dit.to_cond_embed", cond), self.mlp("dit.to_global_embed", seconds)

    def draft(self) -> GraphDraft:
        x = _Value("x", INPUT_SHAPES["x"])
        local = _Value("local_add_cond", INPUT_SHAPES["local_add_cond"])
        length = self.part("Shape", (1,), local, kind=INT64, start=2, end=3)
        length = self.op("sym_size_int", "Squeeze", (), length, kind=INT64)
        mask = self.unsqueeze(_Value("t5_mask", INPUT_SHAPES["t5_mask"]), -1)
        length = self.op("add", "Add", (), self.literal(np.array(MEMORY_TOKENS)), length, kind=INT64)
        cond, embedding = self.conditioning(mask)
        local = self.transpose(local, 0, 2, 1)
        features = self.fourier(self.unsqueeze(_Value("t", (1,)), 1))
        embedding = self.binary("Add", embedding, self.mlp("dit.to_timestep_embed", features, bias=True))
        latents = self.binary("Add", self.conv("preprocess_conv", x), x)
        latents = self.linear(f"{_ROOT}.project_in", self.transpose(latents, 0, 2, 1))

        memory = self.parameters[f"{_ROOT}.memory_tokens"]
        expanded = _Value("expand", (1, *memory.shape))
        self.initializers[expanded.name] = Initializer(expanded.name, memory, (1, *memory.shape))
        stream = self.concat((1, _TOKENS, self.dims.embed), expanded, latents, axis=1)
        angles = self.angles(length)
        modulation = self.mlp(f"{_ROOT}.global_cond_embedder", embedding, bias=True)
        for index in range(self.dims.depth):
            stream = self.layer(f"{_ROOT}.layers.{index}", stream, cond, local, modulation, angles, length)
        stream = self.slice_(stream, (1, "L", self.dims.embed), MEMORY_TOKENS, INT64_MAX, 1)
        latents = self.transpose(self.linear(f"{_ROOT}.project_out", stream), 0, 2, 1)
        self.binary("Add", self.conv("postprocess_conv", latents), latents)
        return self.finish()

    def conv(self, name: str, value: _Value) -> _Value:
        weight = self.parameter(f"dit.{name}.weight")
        return self.call("conv1d", "Conv", value.shape, value, weight, **_CONV)

    def angles(self, length: _Value) -> _Value:
        """Rotary angles (T, 32): position times inverse frequency, the halves equal."""
        first, step = (self.literal(np.array(value)) for value in (0, 1))
        positions = self.op("arange", "Range", (_TOKENS,), first, length, step, kind=INT64)
        positions = self.op("_to_copy", "Cast", (_TOKENS,), positions, to=FLOAT)
        frequencies = rotary_frequencies()
        name = f"{_ROOT}.rotary_pos_emb.inv_freq"
        self.initializers[name] = Initializer(name, frequencies, frequencies.shape)
        inverse = _Value(name, frequencies.shape)
        shape = (_TOKENS, frequencies.size)
        half = self.op("einsum", "Einsum", shape, positions, inverse, equation="i , j -> i j")
        return self.concat((_TOKENS, ROTARY_CHANNELS), half, half, axis=-1)

    def finish(self) -> GraphDraft:
        self.nodes[-1].output[0] = OUTPUT
        output = helper.make_tensor_value_info(OUTPUT, FLOAT, (1, LATENT_CHANNELS, "L"))
        order = {name: index for index, name in enumerate(self.parameters)}
        initializers = sorted(self.initializers.values(), key=lambda i: order.get(i.name, len(order)))
        opset = 23 if self.composite else 20
        return GraphDraft(self.nodes, initializers, self.value_info[:-1], output, opset, IR_VERSION)


def _broadcast(left: Shape, right: Shape) -> Shape:
    """The shape of an elementwise result; unequal sizes are equal unless one of them is 1."""
    rank = max(len(left), len(right))
    left, right = (1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
