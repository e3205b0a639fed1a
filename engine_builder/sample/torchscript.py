"""The graph as PyTorch's TorchScript exporter writes it, opset 17.

Characteristic of it, and kept here: shapes computed node by node, a Constant node for every literal,
``.float()`` left behind as Casts that change nothing, equal parameters shared through Identity, and
weights that the exporter transposed renamed to ``onnx::MatMul_N``.  A tensor that was cast to its own
type is from then on known under the Cast's name, which is why a later layer reads an earlier one's Cast.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, ValueInfoProto, helper, numpy_helper, shape_inference

from engine_builder.sample.draft import (
    FLOAT,
    INT64,
    INT64_MAX,
    GraphDraft,
    Initializer,
    graph_inputs,
)
from engine_builder.sample.spec import (
    BLOCK_NORM_EPS,
    COND_TOKENS,
    HEAD_NORM_EPS,
    LATENT_CHANNELS,
    MEMORY_TOKENS,
    MODULATIONS,
    OUTPUT,
    SECONDS_MAX,
    Dimensions,
)
from engine_builder.sample.weights import fourier_frequencies, parameters, rotary_frequencies

OPSET = 17
IR_VERSION = 8
_ROOT = "dit.transformer"
_CONV: dict[str, Any] = {"dilations": [1], "group": 1, "kernel_shape": [1], "pads": [0, 0], "strides": [1]}


def draft(dims: Dimensions) -> GraphDraft:
    """The graph for ``dims``; raises nothing."""
    return _Tape(dims).draft()


class _Tape:
    """Records nodes in the order in which the exporter's trace meets them."""

    def __init__(self, dims: Dimensions) -> None:
        self.dims = dims
        self.parameters = parameters(dims)
        self.nodes: list[NodeProto] = []
        self.named: list[Initializer] = []
        self.folded: list[Initializer] = []
        self._uses: Counter[str] = Counter()

    # -- recording ---------------------------------------------------------------------------------

    def op(self, scope: str, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add one node named as the exporter does; returns its first output."""
        name = f"{scope}/{op_type}"
        count = self._uses[name]
        self._uses[name] += 1
        name = f"{name}_{count}" if count else name
        made = [f"{name}_output_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, made, name, **attributes))
        return made[0]

    def constant(self, scope: str, value: NDArray[np.generic]) -> str:
        return self.op(scope, "Constant", value=numpy_helper.from_array(value))

    def real(self, scope: str, value: float) -> str:
        return self.constant(scope, np.array(value, np.float32))

    def integer(self, scope: str, value: int) -> str:
        return self.constant(scope, np.array(value, np.int64))

    def integers(self, scope: str, *values: int) -> str:
        return self.constant(scope, np.array(values, np.int64))

    def cast(self, scope: str, value: str, to: int = FLOAT) -> str:
        return self.op(scope, "Cast", value, to=to)

    def unsqueeze_late(self, scope: str, value: str) -> str:
        """Unsqueeze at axis 0 as the exporter adds it after tracing, with an unscoped Constant."""
        axis = f"onnx::Unsqueeze_{len(self.nodes)}"
        value_proto = numpy_helper.from_array(np.array([0], np.int64))
        self.nodes.append(helper.make_node("Constant", (), [axis], value=value_proto))
        return self.op(scope, "Unsqueeze", value, axis)

    def parameter(self, name: str, *, transposed: bool = False) -> str:
        """An initializer that kept its module path."""
        parameter = self.parameters[name]
        shape = parameter.shape[::-1] if transposed else parameter.shape
        self.named.append(Initializer(name, parameter, shape, transposed))
        return name

    def folded_parameter(self, name: str, op_type: str) -> str:
        """An initializer that constant folding renamed after its reader."""
        parameter = self.parameters[name]
        renamed = f"onnx::{op_type}_{len(self.nodes)}"
        self.folded.append(Initializer(renamed, parameter, parameter.shape))
        return renamed

    # -- pieces ------------------------------------------------------------------------------------

    def linear(self, scope: str, module: str, value: str, *, rank: int, bias: bool = False) -> str:
        """A linear: Gemm for two-dimensional values with a bias, else MatMul and Add."""
        if rank == 2 and bias:
            weight = self.parameter(f"{module}.weight", transposed=True)
            return self.op(
                scope, "Gemm", value, weight, self.parameter(f"{module}.bias"), alpha=1.0, beta=1.0, transB=1
            )
        product = self.op(scope, "MatMul", value, self.folded_parameter(f"{module}.weight", "MatMul"))
        return self.op(scope, "Add", self.parameter(f"{module}.bias"), product) if bias else product

    def silu(self, scope: str, value: str) -> str:
        return self.op(scope, "Mul", value, self.op(scope, "Sigmoid", value))

    def mlp(self, path: str, module: str, value: str, *, rank: int, bias: bool = False) -> str:
        """Linear, SiLU, linear, as a Sequential of three modules named after the last part of ``path``."""
        name = path.rsplit("/", 1)[1]
        hidden = self.linear(f"{path}/{name}.0", f"{module}.0", value, rank=rank, bias=bias)
        hidden = self.silu(f"{path}/{name}.1", hidden)
        return self.linear(f"{path}/{name}.2", f"{module}.2", hidden, rank=rank, bias=bias)

    def fourier(self, scope: str, value: str, *, unsqueeze: bool) -> str:
        """cos and sin of 2 pi f times the value, (1, 256)."""
        value = self.cast(scope, value)
        if unsqueeze:
            value = self.op(scope, "Unsqueeze", value, self.integers(scope, -1))
        for factor in (fourier_frequencies(), np.array(2, np.float32), np.array(np.pi, np.float32)):
            value = self.op(scope, "Mul", value, self.constant(scope, factor))
        features = self.op(
            scope, "Concat", self.op(scope, "Cos", value), self.op(scope, "Sin", value), axis=-1
        )
        return self.cast(scope, features)

    def rms_norm(self, scope: str, value: str, gamma: str, eps: float) -> str:
        square = self.op(scope, "Pow", value, self.real(scope, 2))
        mean = self.op(scope, "ReduceMean", square, axes=[-1], keepdims=1)
        root = self.op(scope, "Sqrt", self.op(scope, "Add", mean, self.real(scope, eps)))
        inverse = self.op(scope, "Div", self.real(scope, 1), root)
        return self.op(scope, "Mul", self.op(scope, "Mul", value, inverse), gamma)

    def block_norm(self, scope: str, module: str, value: str) -> tuple[str, str]:
        """The norm of the stream in float32; returns it and the stream's new name."""
        stream = self.cast(scope, value)
        gamma = self.folded_parameter(f"{module}.gamma", "Mul")
        return self.cast(scope, self.rms_norm(scope, stream, gamma, BLOCK_NORM_EPS)), stream

    def chunk(self, scope: str, value: str, parts: int) -> list[str]:
        """``parts`` equal slices of the last axis, the width computed from the shape."""
        axis_source = self.op(scope, "Shape", value)
        axis = self.integers(scope, -1)
        width = self.op(scope, "Gather", axis_source, axis, axis=0)
        start = self.integers(scope, 0)
        width = self.op(scope, "Add", width, self.integers(scope, parts - 1))
        width = self.op(scope, "Div", width, self.integers(scope, parts))
        pieces = []
        for index in range(1, parts + 1):
            end = self.op(scope, "Mul", width, self.integers(scope, index))
            pieces.append(self.op(scope, "Slice", value, start, end, axis))
            start = end
        return pieces

    def sizes(self, scope: str, value: str, rank: int) -> list[str]:
        return [
            self.op(scope, "Gather", self.op(scope, "Shape", value), self.integer(scope, axis), axis=0)
            for axis in range(rank)
        ]

    def split_last(self, scope: str, value: str, rank: int, parts: int) -> str:
        """Reshape (..., parts * d) to (..., parts, d)."""
        *outer, last = self.sizes(scope, value, rank)
        inner = self.op(scope, "Div", last, self.integer(scope, parts))
        inner = self.cast(scope, self.cast(scope, inner, INT64), INT64)
        shape = [self.unsqueeze_late(scope, size) for size in outer]
        shape.append(self.integers(scope, parts))
        shape.append(self.unsqueeze_late(scope, inner))
        return self.op(scope, "Reshape", value, self.op(scope, "Concat", *shape, axis=0), allowzero=0)

    def to_heads(self, scope: str, value: str) -> str:
        """(1, n, heads * d) to (1, heads, n, d)."""
        return self.op(
            scope, "Transpose", self.split_last(scope, value, 3, self.dims.heads), perm=[0, 2, 1, 3]
        )

    def cond_to_heads(self, scope: str, value: str) -> str:
        """The same for the conditioning tokens, whose number the exporter knew."""
        shape = self.integers(scope, 1, COND_TOKENS, self.dims.heads, self.dims.head_dim)
        return self.op(
            scope, "Transpose", self.op(scope, "Reshape", value, shape, allowzero=0), perm=[0, 2, 1, 3]
        )

    def from_heads(self, scope: str, value: str) -> str:
        """(1, heads, n, d) to (1, n, heads * d)."""
        batch, heads, tokens, width = self.sizes(scope, value, 4)
        channels = self.op(scope, "Mul", self.op(scope, "Mul", heads, self.integer(scope, 1)), width)
        value = self.op(scope, "Transpose", value, perm=[0, 2, 1, 3])
        shape = [self.unsqueeze_late(scope, size) for size in (batch, tokens, channels)]
        return self.op(scope, "Reshape", value, self.op(scope, "Concat", *shape, axis=0), allowzero=0)

    def stack(self, scope: str, first: str, second: str) -> str:
        """Two of one shape along a new axis 1."""
        first, second = (
            self.op(scope, "Unsqueeze", value, self.integers(scope, 1)) for value in (first, second)
        )
        return self.op(scope, "Concat", first, second, axis=1)

    def unbind(self, scope: str, value: str, axis: int) -> tuple[str, str]:
        first = self.op(scope, "Split", value, self.integers(scope, 1, 1), outputs=2, axis=axis)
        second = first.removesuffix("0") + "1"
        first = self.op(scope, "Squeeze", first, self.integers(scope, axis))
        return first, self.op(scope, "Squeeze", second, self.integers(scope, axis))

    def rotate(self, scope: str, value: str, rank: int, angles: str, length: str) -> tuple[str, str]:
        """Rotary embedding of the first channels; returns it and the angles' new name."""
        channels = self.op(scope, "Gather", self.op(scope, "Shape", angles), self.integer(scope, 1), axis=0)
        angles = self.cast(scope, angles)
        value = self.cast(scope, value)
        start = self.op(scope, "Neg", length)
        axis = self.integers(scope, 0)
        start = self.op(scope, "Unsqueeze", start, self.integers(scope, 0))
        recent = self.op(
            scope, "Slice", angles, start, self.integers(scope, INT64_MAX), axis, self.integers(scope, 1)
        )
        axis, start = self.integers(scope, rank - 1), self.integers(scope, 0)
        end = self.op(scope, "Unsqueeze", channels, self.integers(scope, 0))
        turned = self.op(scope, "Slice", value, start, end, axis, self.integers(scope, 1))
        axis = self.integers(scope, rank - 1)
        start = self.op(scope, "Unsqueeze", channels, self.integers(scope, 0))
        kept = self.op(
            scope, "Slice", value, start, self.integers(scope, INT64_MAX), axis, self.integers(scope, 1)
        )
        straight = self.op(scope, "Mul", turned, self.op(scope, "Cos", recent))
        first, second = self.unbind(scope, self.split_last(scope, turned, rank, 2), -2)
        crossed = self.op(scope, "Concat", self.op(scope, "Neg", second), first, axis=-1)
        crossed = self.op(scope, "Mul", crossed, self.op(scope, "Sin", recent))
        turned = self.cast(scope, self.op(scope, "Add", straight, crossed))
        return self.op(scope, "Concat", turned, self.cast(scope, kept), axis=-1), angles

    def attention_core(self, scope: str, query: str, key: str, value: str) -> str:
        """Scaled dot-product attention over heads, the square root of the scale on each side."""
        shape = self.op(scope, "Shape", query)
        width = self.op(scope, "Slice", shape, self.integers(scope, -1), self.integers(scope, INT64_MAX))
        width = self.op(scope, "Sqrt", self.cast(scope, width))
        scale = self.op(scope, "Div", self.constant(scope, np.array([1], np.float32)), width)
        scale = self.cast(scope, scale)
        key = self.op(scope, "Transpose", key, perm=[0, 1, 3, 2])
        query = self.op(scope, "Mul", query, self.op(scope, "Sqrt", scale))
        key = self.op(scope, "Mul", key, self.op(scope, "Sqrt", scale))
        weights = self.op(scope, "Softmax", self.op(scope, "MatMul", query, key), axis=-1)
        return self.op(scope, "MatMul", weights, value)

    def difference_of_cores(self, scope: str, query: str, key: str, value: str) -> str:
        """Differential attention; ``query`` and ``key`` hold both of their kind along axis 1."""
        queries = self.unbind(scope, query, 1)
        keys = self.unbind(scope, key, 1)
        first, second = (self.attention_core(scope, q, k, value) for q, k in zip(queries, keys, strict=True))
        return self.op(scope, "Sub", first, second)

    def self_attention(self, scope: str, module: str, value: str, angles: str) -> tuple[str, str]:
        rank = 5 if self.dims.differential else 4
        packed = self.linear(f"{scope}/to_qkv", f"{module}.to_qkv", value, rank=3)
        heads = [self.to_heads(scope, part) for part in self.chunk(scope, packed, self.dims.qkv_parts)]
        query, key, value = heads[:3]
        if self.dims.differential:
            query, key = self.stack(scope, query, heads[3]), self.stack(scope, key, heads[4])
        query = self.cast(scope, self.head_norm(scope, module, "q_norm", query))
        key = self.cast(scope, self.head_norm(scope, module, "k_norm", key))
        query, key = self.cast(scope, query), self.cast(scope, key)
        angles = self.cast(scope, angles)
        lengths = [
            self.op(scope, "Gather", self.op(scope, "Shape", side), self.integer(scope, rank - 2), axis=0)
            for side in (query, key)
        ]
        ratio = self.op(scope, "Div", *(self.cast(scope, length) for length in lengths))
        key_angles = self.op(scope, "Mul", ratio, angles)
        query, angles = self.rotate(scope, query, rank, angles, lengths[0])
        key, _ = self.rotate(scope, key, rank, key_angles, lengths[1])
        query, key = self.cast(scope, query), self.cast(scope, key)
        core = self.difference_of_cores if self.dims.differential else self.attention_core
        return self.project_out(scope, module, core(scope, query, key, value)), angles

    def cross_attention(self, scope: str, module: str, value: str, cond: str) -> str:
        packed = self.linear(f"{scope}/to_q", f"{module}.to_q", value, rank=3)
        parts = self.chunk(scope, packed, 2) if self.dims.differential else [packed]
        queries = [self.to_heads(scope, part) for part in parts]
        query = self.stack(scope, *queries) if self.dims.differential else queries[0]
        packed = self.linear(f"{scope}/to_kv", f"{module}.to_kv", cond, rank=3)
        heads = [self.cond_to_heads(scope, part) for part in self.chunk(scope, packed, self.dims.kv_parts)]
        key = self.stack(scope, *heads[:2]) if self.dims.differential else heads[0]
        query = self.cast(scope, self.head_norm(scope, module, "q_norm", query))
        key = self.cast(scope, self.head_norm(scope, module, "k_norm", key))
        core = self.difference_of_cores if self.dims.differential else self.attention_core
        return self.project_out(scope, module, core(scope, query, key, heads[-1]))

    def head_norm(self, scope: str, module: str, side: str, value: str) -> str:
        gamma = f"{module}.{side}.gamma"
        if side == "q_norm" or gamma == self.shared_gain:
            self.parameter(gamma)
        return self.rms_norm(f"{scope}/{side}", value, gamma, HEAD_NORM_EPS)

    def project_out(self, scope: str, module: str, value: str) -> str:
        return self.linear(f"{scope}/to_out", f"{module}.to_out", self.from_heads(scope, value), rank=3)

    def gate(self, scope: str, value: str, gate: str) -> str:
        opened = self.op(scope, "Sigmoid", self.op(scope, "Sub", self.real(scope, 1), gate))
        return self.op(scope, "Mul", value, opened)

    def modulate(self, scope: str, value: str, scale: str, shift: str) -> str:
        gain = self.op(scope, "Add", scale, self.real(scope, 1))
        return self.op(scope, "Add", self.op(scope, "Mul", value, gain), shift)

    def pad_memory(self, scope: str, local: str, stream: str) -> str:
        """Left-pad by as many tokens as the stream is longer, the pads laid out as PyTorch counts them."""
        long, short = (
            self.op(scope, "Gather", self.op(scope, "Shape", value), self.integer(scope, 1), axis=0)
            for value in (stream, local)
        )
        missing = self.op(scope, "Sub", long, short)
        laid = []
        for _ in range(2):
            zeros = [self.integers(scope, 0) for _ in range(2)]
            left = self.unsqueeze_late(scope, missing)
            laid.append(self.op(scope, "Concat", *zeros, left, self.integers(scope, 0), axis=0))
        first = self.integers(scope, 0)
        count = self.op(scope, "Gather", self.op(scope, "Shape", laid[0]), first, axis=0)
        rest = self.op(scope, "Sub", self.integer(scope, 6), count)
        pads = self.cast(scope, laid[1], INT64)
        zero = numpy_helper.from_array(np.array([0], np.int64))
        rest = self.op(scope, "ConstantOfShape", rest, value=zero)
        pads = self.op(scope, "Concat", pads, rest, axis=0)
        pads = self.op(scope, "Reshape", pads, self.integers(scope, -1, 2), allowzero=0)
        axis, start = self.integers(scope, 0), self.integers(scope, -1)
        end, step = self.integers(scope, -INT64_MAX), self.integers(scope, -1)
        pads = self.op(scope, "Slice", pads, start, end, axis, step)
        pads = self.op(scope, "Transpose", pads, perm=[1, 0])
        pads = self.op(scope, "Reshape", pads, self.integers(scope, -1), allowzero=0)
        pads = self.cast(scope, pads, INT64)
        return self.op(scope, "Pad", local, pads, self.real(scope, 0), mode="constant")

    def feed_forward(self, scope: str, module: str, value: str) -> str:
        gated = self.linear(f"{scope}/ff.0/proj", f"{module}.0.proj", value, rank=3, bias=True)
        plain, gate = self.chunk(f"{scope}/ff.0", gated, 2)
        value = self.op(f"{scope}/ff.0", "Mul", plain, self.silu(f"{scope}/ff.0/act", gate))
        return self.linear(f"{scope}/ff.2", f"{module}.2", value, rank=3, bias=True)

    def layer(
        self, index: int, stream: str, cond: str, local: str, modulation: str, angles: str
    ) -> tuple[str, str]:
        scope, module = f"/transformer/layers.{index}", f"{_ROOT}.layers.{index}"
        modulation = self.op(scope, "Add", self.parameter(f"{module}.to_scale_shift_gate"), modulation)
        modulation = self.op(scope, "Unsqueeze", modulation, self.integers(scope, 1))
        scale, shift, gate, ff_scale, ff_shift, ff_gate = self.chunk(scope, modulation, MODULATIONS)

        value, stream = self.block_norm(f"{scope}/pre_norm", f"{module}.pre_norm", stream)
        value = self.modulate(scope, value, scale, shift)
        value, angles = self.self_attention(f"{scope}/self_attn", f"{module}.self_attn", value, angles)
        stream = self.op(scope, "Add", self.gate(scope, value, gate), stream)

        value, stream = self.block_norm(f"{scope}/cross_attend_norm", f"{module}.cross_attend_norm", stream)
        value = self.cross_attention(f"{scope}/cross_attn", f"{module}.cross_attn", value, cond)
        stream = self.op(scope, "Add", stream, value)

        local = self.mlp(f"{scope}/to_local_embed", f"{module}.to_local_embed", local, rank=3, bias=True)
        stream = self.op(scope, "Add", stream, self.pad_memory(scope, local, stream))

        value, stream = self.block_norm(f"{scope}/ff_norm", f"{module}.ff_norm", stream)
        value = self.modulate(scope, value, ff_scale, ff_shift)
        value = self.feed_forward(f"{scope}/ff/ff", f"{module}.ff.ff", value)
        return self.op(scope, "Add", self.gate(scope, value, ff_gate), stream), angles

    # -- the whole ---------------------------------------------------------------------------------

    def conditioning(self) -> tuple[str, str]:
        """Conditioning tokens (1, 257, E) and the global embedding (1, E) of t and the seconds."""
        mask = self.cast("", self.op("", "Unsqueeze", "t5_mask", self.integers("", -1)), 9)
        text = self.op("", "Where", mask, "t5_hidden", self.parameter("padding_embedding"))
        seconds = self.op("", "Clip", "seconds_total", self.real("", 0), self.real("", SECONDS_MAX))
        seconds = self.op("", "Div", seconds, self.real("", SECONDS_MAX))
        features = self.fourier("/seconds", seconds, unsqueeze=True)
        seconds = self.linear("/seconds_lin", "seconds_lin", features, rank=2, bias=True)
        token = self.op("", "Unsqueeze", seconds, self.integers("", 1))
        tokens = self.op("", "Concat", text, token, axis=1)
        tokens = self.mlp("/to_cond_embed", "dit.to_cond_embed", tokens, rank=3)
        return tokens, self.mlp("/to_global_embed", "dit.to_global_embed", seconds, rank=2)

    def timestep(self) -> str:
        time = self.op("", "Unsqueeze", self.cast("", "t"), self.integers("", 1))
        features = self.fourier("/timestep_features", time, unsqueeze=False)
        return self.mlp("/to_timestep_embed", "dit.to_timestep_embed", features, rank=2, bias=True)

    def residual_conv(self, name: str, value: str) -> str:
        weight = self.parameter(f"dit.{name}.weight")
        return self.op("", "Add", self.op(f"/{name}", "Conv", value, weight, **_CONV), value)

    def expand_memory(self, batch: str) -> str:
        scope = "/transformer"
        batch = self.op(scope, "Unsqueeze", batch, self.integers(scope, 0))
        shape = self.op(scope, "Concat", batch, self.integers(scope, -1), self.integers(scope, -1), axis=0)
        shape = self.op(scope, "Reshape", shape, self.integers(scope, -1), allowzero=0)
        one = numpy_helper.from_array(np.array([1], np.int64))
        ones = self.op(scope, "ConstantOfShape", self.op(scope, "Shape", shape), value=one)
        minus = self.op(scope, "Mul", ones, self.integer(scope, -1))
        shape = self.op(scope, "Where", self.op(scope, "Equal", shape, minus), ones, shape)
        return self.op(scope, "Expand", self.parameter(f"{_ROOT}.memory_tokens"), shape)

    def angles(self, stream: str) -> str:
        """Rotary angles (T, 32): position times inverse frequency, the halves equal."""
        scope = "/transformer"
        length = self.op(scope, "Gather", self.op(scope, "Shape", stream), self.integer(scope, 1), axis=0)
        length = self.cast(scope, length, INT64)
        first, step = self.integer(scope, 0), self.integer(scope, 1)
        positions = self.cast(scope, self.op(scope, "Range", first, length, step))
        positions = self.op(scope, "Div", positions, self.real(scope, 1))
        name = f"{_ROOT}.rotary_pos_emb.inv_freq"
        frequencies = rotary_frequencies()
        self.named.append(Initializer(name, frequencies, frequencies.shape))
        half = self.op(scope, "Einsum", positions, name, equation="i , j -> i j")
        return self.op(scope, "Concat", half, half, axis=-1)

    @property
    def shared_gain(self) -> str:
        """The first k gain; all others are equal to it."""
        return f"{_ROOT}.layers.0.self_attn.k_norm.gamma"

    def share_gains(self) -> None:
        """Identity nodes that give the k gains their own names, last layer first."""
        for index in reversed(range(self.dims.depth)):
            for attention in ("cross_attn", "self_attn"):
                name = f"{_ROOT}.layers.{index}.{attention}.k_norm.gamma"
                if name != self.shared_gain:
                    self.nodes.append(helper.make_node("Identity", [self.shared_gain], [name]))

    def draft(self) -> GraphDraft:
        self.share_gains()
        cond, cond_embedding = self.conditioning()
        local = self.op("", "Transpose", "local_add_cond", perm=[0, 2, 1])
        embedding = self.op("", "Add", cond_embedding, self.timestep())
        latents = self.op("", "Transpose", self.residual_conv("preprocess_conv", "x"), perm=[0, 2, 1])

        scope = "/transformer"
        batch = self.op(scope, "Gather", self.op(scope, "Shape", latents), self.integer(scope, 0), axis=0)
        latents = self.linear(f"{scope}/project_in", f"{_ROOT}.project_in", self.cast(scope, latents), rank=3)
        stream = self.op(scope, "Concat", self.expand_memory(batch), latents, axis=1)
        angles = self.angles(stream)
        modulation = self.mlp(
            f"{scope}/global_cond_embedder", f"{_ROOT}.global_cond_embedder", embedding, rank=2, bias=True
        )
        for index in range(self.dims.depth):
            stream, angles = self.layer(index, stream, cond, local, modulation, angles)
        axis, start = self.integers(scope, 1), self.integers(scope, MEMORY_TOKENS)
        end, step = self.integers(scope, INT64_MAX), self.integers(scope, 1)
        stream = self.op(scope, "Slice", stream, start, end, axis, step)
        latents = self.linear(f"{scope}/project_out", f"{_ROOT}.project_out", stream, rank=3)
        self.residual_conv("postprocess_conv", self.op("", "Transpose", latents, perm=[0, 2, 1]))
        return self.finish()

    def finish(self) -> GraphDraft:
        self.nodes[-1].output[0] = OUTPUT
        constants = sum(node.op_type == "Constant" for node in self.nodes)
        for index, node in enumerate(self.nodes):
            node.name = node.name or f"{node.op_type}_{index + constants}"
        order = {name: index for index, name in enumerate(self.parameters)}
        self.named.sort(key=lambda initializer: order.get(initializer.name, len(order)))
        initializers = self.named + self.folded
        output = helper.make_tensor_value_info(OUTPUT, FLOAT, ("Addvelocity_dim_0", LATENT_CHANNELS, "L"))
        value_info = _inferred_types(self.nodes, initializers, output)
        return GraphDraft(self.nodes, initializers, value_info, output, OPSET, IR_VERSION)


def _inferred_types(
    nodes: list[NodeProto], initializers: list[Initializer], output: ValueInfoProto
) -> list[ValueInfoProto]:
    """Types of what the nodes make, by ONNX shape inference with unknown dimensions named, as exported."""
    inputs = graph_inputs()
    inputs += [helper.make_tensor_value_info(i.name, i.element_type, i.shape) for i in initializers]
    graph = helper.make_graph(nodes, "types", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return list(shape_inference.infer_shapes(model).graph.value_info)
