"""The parameters of a sample model and the random values they take.

The scales are those measured on exports of the public architecture with random weights: a linear has
unit gain (standard deviation ``1/sqrt(inputs)``); what enters the residual stream is ``STREAM`` times
larger, so that the stream's square overflows fp16 in every norm, as on trained models, while the stream
itself stays far below 65504; ``project_out`` undoes it.  Every value depends on the seed and on the
parameter's name alone, never on the order of generation, so that a model can be streamed and its three
spellings compute the same function.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_builder.sample.spec import (
    FOURIER_FEATURES,
    LATENT_CHANNELS,
    LOCAL_CHANNELS,
    MEMORY_TOKENS,
    MODULATIONS,
    ROTARY_BASE,
    ROTARY_CHANNELS,
    TEXT_CHANNELS,
    Dimensions,
)

STREAM = 200.0
_BIAS = 0.1
_GAIN_SPREAD = 0.25
_LOCAL_SHARE = 0.25  # of what another writer adds; enough for the output to depend on local_add_cond
_CONV_GAIN = 0.05  # the two 1x1 convolutions are small corrections to their residual


@dataclass(frozen=True)
class Parameter:
    """One float32 parameter: independent normal values of ``mean`` and ``std``.

    The shape of a linear's weight is (inputs, outputs).  ``stream`` names the random stream; two
    parameters that share it are equal.
    """

    shape: tuple[int, ...]
    std: float
    mean: float
    stream: str


def draw(parameter: Parameter, seed: int) -> NDArray[np.float32]:
    """The parameter's values, float32, contiguous, in its own shape."""
    key = np.random.SeedSequence([seed, zlib.crc32(parameter.stream.encode())])
    values = np.empty(parameter.shape, np.float32)
    np.random.Generator(np.random.SFC64(key)).standard_normal(dtype=np.float32, out=values)
    values *= np.float32(parameter.std)
    if parameter.mean:
        values += np.float32(parameter.mean)
    return values


def parameters(dims: Dimensions) -> dict[str, Parameter]:
    """Every random parameter of the model by its module path, in the order of the modules."""
    found: dict[str, Parameter] = {}

    def add(name: str, *shape: int, std: float, mean: float = 0.0, stream: str | None = None) -> None:
        found[name] = Parameter(shape, std, mean, stream or name)

    def linear(name: str, inputs: int, outputs: int, *, bias: bool = False, gain: float = 1.0) -> None:
        add(f"{name}.weight", inputs, outputs, std=gain / math.sqrt(inputs))
        if bias:
            add(f"{name}.bias", outputs, std=_BIAS)

    def norm(name: str, channels: int, stream: str | None = None) -> None:
        add(f"{name}.gamma", channels, std=_GAIN_SPREAD, mean=1.0, stream=stream)

    embed = dims.embed
    # The writers of all layers together add to the stream what those of 2 layers do, at any depth.
    writer = STREAM * math.sqrt(2 / dims.depth)

    root = "dit.transformer"
    add("padding_embedding", TEXT_CHANNELS, std=0.1)
    linear("dit.to_timestep_embed.0", FOURIER_FEATURES, embed, bias=True)
    linear("dit.to_timestep_embed.2", embed, embed, bias=True)
    linear("dit.to_cond_embed.0", TEXT_CHANNELS, embed)
    linear("dit.to_cond_embed.2", embed, embed)
    linear("dit.to_global_embed.0", TEXT_CHANNELS, embed)
    linear("dit.to_global_embed.2", embed, embed)
    add(f"{root}.memory_tokens", MEMORY_TOKENS, embed, std=STREAM)
    linear(f"{root}.project_in", LATENT_CHANNELS, embed, gain=STREAM)
    linear(f"{root}.project_out", embed, LATENT_CHANNELS, gain=1 / STREAM)
    for index in range(dims.depth):
        layer = f"{root}.layers.{index}"
        add(f"{layer}.to_scale_shift_gate", MODULATIONS * embed, std=1 / math.sqrt(embed))
        for block in ("pre_norm", "cross_attend_norm", "ff_norm"):
            norm(f"{layer}.{block}", embed)
        for attention in ("self_attn", "cross_attn"):
            norm(f"{layer}.{attention}.q_norm", dims.head_dim)
            norm(f"{layer}.{attention}.k_norm", dims.head_dim, stream="k_norm")
            linear(f"{layer}.{attention}.to_out", embed, embed, gain=writer)
        linear(f"{layer}.self_attn.to_qkv", embed, dims.qkv_parts * embed)
        linear(f"{layer}.cross_attn.to_q", embed, dims.q_parts * embed)
        linear(f"{layer}.cross_attn.to_kv", embed, dims.kv_parts * embed)
        linear(f"{layer}.to_local_embed.0", LOCAL_CHANNELS, embed, bias=True)
        linear(f"{layer}.to_local_embed.2", embed, embed, bias=True, gain=_LOCAL_SHARE * writer)
        linear(f"{layer}.ff.ff.0.proj", embed, 2 * dims.feed_forward, bias=True)
        linear(f"{layer}.ff.ff.2", dims.feed_forward, embed, bias=True, gain=writer)
    linear(f"{root}.global_cond_embedder.0", embed, embed, bias=True)
    linear(f"{root}.global_cond_embedder.2", embed, MODULATIONS * embed, bias=True)
    for name in ("dit.preprocess_conv", "dit.postprocess_conv"):
        add(
            f"{name}.weight", LATENT_CHANNELS, LATENT_CHANNELS, 1, std=_CONV_GAIN / math.sqrt(LATENT_CHANNELS)
        )
    linear("seconds_lin", FOURIER_FEATURES, TEXT_CHANNELS, bias=True)
    return found


def rotary_frequencies() -> NDArray[np.float32]:
    """Inverse frequencies of the rotary embedding, radians per position, shape (16,)."""
    exponent = np.arange(0, ROTARY_CHANNELS, 2, dtype=np.float64) / ROTARY_CHANNELS
    return (ROTARY_BASE**-exponent).astype(np.float32)


def fourier_frequencies() -> NDArray[np.float32]:
    """Frequencies of the Fourier features, 0.5 to 10000 periods per unit, spaced by ratio, shape (128,)."""
    return np.geomspace(0.5, 10000.0, FOURIER_FEATURES // 2).astype(np.float32)
