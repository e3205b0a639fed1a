"""What a build needs: memory from the model's size, and scratch space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine_builder.recipe import Recipe
from engine_builder.source import open_source

_GIB: Final = 2**30

_COMPILE_FACTOR: Final = 2.0
"""Peak memory of a compilation over the fp32 source's bytes: 3.7 GB for 1.84 GB and 10.2 GB for
5.8 GB, measured with TensorRT-RTX 1.7.1 in fp16."""

_SWEEP_FACTOR: Final = 3.5
"""The same of a fidelity sweep at L = 4092, whose bounds are 8 GB for 1.84 GB and 20 GB for 5.8 GB."""

_BASE: Final = 2 * _GIB
"""The interpreter, TensorRT's libraries, and activations that do not grow with the weights."""

_LIMIT_FACTOR: Final = 1.5

LARGEST_KNOWN: Final = 5_800_000_000
"""Bytes of the largest released source, medium in fp32: assumed where the model file is elsewhere."""

_SAMPLE_BYTES: Final = {"tiny": 6_000_000, "small": 1_840_000_000, "medium": LARGEST_KNOWN}


@dataclass(frozen=True)
class Needs:
    """Memory to reserve, the limit beyond which the build is killed, and scratch space, in GiB."""

    memory: int
    memory_limit: int
    scratch: int


def needs(recipe: Recipe, source_bytes: int) -> Needs:
    """What building ``recipe`` from a source of ``source_bytes`` needs."""
    factor = _COMPILE_FACTOR if recipe.verify.fidelity is None else _SWEEP_FACTOR
    memory = math.ceil((_BASE + factor * source_bytes) / _GIB)
    # The converted model, an engine and its copy under the final name, none larger than the source.
    scratch = math.ceil((_BASE + 3 * source_bytes) / _GIB)
    return Needs(memory, math.ceil(_LIMIT_FACTOR * memory), scratch)


def largest(needed: Sequence[Needs]) -> Needs:
    """What is enough for each of several builds that run in the same kind of pod."""
    return Needs(
        max(n.memory for n in needed), max(n.memory_limit for n in needed), max(n.scratch for n in needed)
    )


def source_size(recipe: Recipe) -> int | None:
    """Bytes of the model and its sidecars, or None when the model file is not on this machine.

    Raises:
        SourceModelError: It is here and cannot be built from.
    """
    if recipe.model.sample is not None:
        return _SAMPLE_BYTES[recipe.model.sample.size]
    model = recipe.model.onnx
    if model is None or not model.exists():
        return None
    # Only the sizes are of interest, so the digests are not computed.
    source = open_source(model, plugins=bool(recipe.build.plugins), known=lambda _: "0" * 64)
    return sum(file.size for file in source.files)
