"""What a sample model is: its size, its exporter's spelling, and the dimensions that follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SAMPLE_VERSION = 1  # raised when the same spec gives other bytes, so that kept samples are written anew

LATENT_CHANNELS = 256
LOCAL_CHANNELS = 257  # latent channels and one mask channel
TEXT_TOKENS = 256
TEXT_CHANNELS = 768
COND_TOKENS = TEXT_TOKENS + 1  # text tokens and one seconds token
FOURIER_FEATURES = 256
MEMORY_TOKENS = 64
ROTARY_CHANNELS = 32
ROTARY_BASE = 10000.0
SECONDS_MAX = 384.0
BLOCK_NORM_EPS = 1e-5
HEAD_NORM_EPS = 1e-6
MODULATIONS = 6  # scale, shift, gate of self-attention, then of the feed-forward

INPUT_SHAPES: dict[str, tuple[int | str, ...]] = {
    "x": (1, LATENT_CHANNELS, "L"),
    "t": (1,),
    "t5_hidden": (1, TEXT_TOKENS, TEXT_CHANNELS),
    "t5_mask": (1, TEXT_TOKENS),
    "seconds_total": (1,),
    "local_add_cond": (1, LOCAL_CHANNELS, "L"),
}
OUTPUT = "velocity"


class Spelling(StrEnum):
    """The exporter whose way of writing the graph is followed; the number is the opset."""

    TORCHSCRIPT17 = "torchscript17"
    DYNAMO20 = "dynamo20"
    DYNAMO23 = "dynamo23"


class Size(StrEnum):
    """``tiny`` has 2 layers of 128 channels, ``small`` and ``medium`` the released models' dimensions."""

    TINY = "tiny"
    SMALL = "small"
    MEDIUM = "medium"


@dataclass(frozen=True)
class Dimensions:
    """Widths and depth of the transformer; ``embed`` is ``heads * head_dim``."""

    embed: int
    depth: int
    heads: int
    differential: bool

    head_dim = 64

    @property
    def feed_forward(self) -> int:
        """Inner width of the gated feed-forward, in channels."""
        return 4 * self.embed

    @property
    def qkv_parts(self) -> int:
        """Equal parts of the self-attention projection: q, k, v and, when differential, q_diff, k_diff."""
        return 5 if self.differential else 3

    @property
    def q_parts(self) -> int:
        """Equal parts of the cross-attention query projection: q and, when differential, q_diff."""
        return 2 if self.differential else 1

    @property
    def kv_parts(self) -> int:
        """Equal parts of the cross-attention key-value projection: k, v or k, k_diff, v."""
        return 3 if self.differential else 2


_WIDTHS = {Size.TINY: (128, 2, 2), Size.SMALL: (1024, 20, 16), Size.MEDIUM: (1536, 24, 24)}


@dataclass(frozen=True)
class SampleSpec:
    """Everything that decides a sample model's bytes.

    ``differential=None`` takes what the size has in the released models: differential attention in
    ``medium``, standard attention otherwise.  ``seed`` is at least 0.
    """

    size: Size
    spelling: Spelling
    differential: bool | None = None
    seed: int = 0

    @property
    def dimensions(self) -> Dimensions:
        embed, depth, heads = _WIDTHS[self.size]
        differential = self.size is Size.MEDIUM if self.differential is None else self.differential
        return Dimensions(embed, depth, heads, differential)
