"""Which tensors an engine has, how they lie in memory, and on which profile a shape runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from engine_builder.errors import CompileError, RecipeError
from engine_builder.execute.request import Bound
from engine_builder.recipe import Profile

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

ALIGNMENT: Final = 256
"""Bytes to which tensors are aligned, as cudaMalloc aligns what it gives."""

NUMPY_TYPES: Final[Mapping[str, Any]] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP8": ml_dtypes.float8_e4m3fn,
    "INT64": np.int64,
    "INT32": np.int32,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "BOOL": np.bool_,
}
"""By member of TensorRT's DataType; INT4 and FP4 are packed, and no input or output here is either."""


@dataclass(frozen=True)
class EngineTensor:
    """An input or output of an engine; ``shape`` has -1 for a dynamic dimension."""

    name: str
    mode: Literal["input", "output"]
    dtype: np.dtype[Any]
    shape: Shape


@dataclass(frozen=True)
class Arena:
    """Where tensors lie in one allocation of ``size`` bytes."""

    offsets: Mapping[str, int]
    size: int


def numpy_type(member: str) -> np.dtype[Any]:
    """The numpy type of a member of ``DataType``, by name.

    Raises CompileError for one that numpy and ml_dtypes cannot hold.
    """
    if member not in NUMPY_TYPES:
        raise CompileError(f"an input or output of the engine is {member}, which cannot be given to it")
    dtype: np.dtype[Any] = np.dtype(NUMPY_TYPES[member])
    return dtype


def arrange(tensors: Iterable[tuple[str, Shape, np.dtype[Any]]]) -> Arena:
    """Place the tensors one after the other, each at a multiple of :data:`ALIGNMENT`.

    An empty tensor gets an address of its own all the same, because TensorRT takes no null.
    """
    offsets: dict[str, int] = {}
    end = 0
    for name, shape, dtype in tensors:
        offsets[name] = end
        size = max(1, math.prod(shape) * dtype.itemsize)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return Arena(offsets, end)


def holds(profile: Profile, shapes: Shapes) -> bool:
    """Whether every dynamic input's shape lies within the profile's range."""
    return all(
        name in shapes
        and len(shapes[name]) == len(r.min)
        and all(a <= n <= b for a, n, b in zip(r.min, shapes[name], r.max, strict=True))
        for name, r in profile.shapes.items()
    )


def plan_runs(profiles: Sequence[Profile], samples: Sequence[Shapes]) -> tuple[tuple[int, int], ...]:
    """Every (sample, profile) such that the profile holds the sample's shapes, by sample.

    Raises RecipeError when a sample fits none.
    """
    runs: list[tuple[int, int]] = []
    for index, shapes in enumerate(samples):
        fitting = [(index, number) for number, profile in enumerate(profiles) if holds(profile, shapes)]
        if not fitting:
            spelled = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise RecipeError(f"no profile of the engine holds {spelled}", where="profiles")
        runs += fitting
    return tuple(runs)


def uncovered(profiles: Sequence[Profile], samples: Sequence[Shapes]) -> tuple[int, ...]:
    """The profiles that hold none of the samples."""
    return tuple(
        number
        for number, profile in enumerate(profiles)
        if not any(holds(profile, shapes) for shapes in samples)
    )


def bounds(profile: Profile, inputs: Sequence[EngineTensor]) -> tuple[tuple[Bound, Shapes], ...]:
    """The input shapes at a profile's bounds, each shape once, by the last bound that has it.

    An engine without dynamic inputs has one such shape, its ``max``.
    """
    found: dict[tuple[tuple[str, Shape], ...], Bound] = {}
    names: tuple[Bound, ...] = ("min", "opt", "max")
    for bound in names:
        shapes = {
            tensor.name: tuple(getattr(profile.shapes[tensor.name], bound))
            if tensor.name in profile.shapes
            else tensor.shape
            for tensor in inputs
        }
        found[tuple(shapes.items())] = bound
    return tuple((bound, dict(shapes)) for shapes, bound in found.items())


def noise(shape: Shape, dtype: np.dtype[Any], seed: int) -> npt.NDArray[Any]:
    """Inputs to measure with: standard normal, because zeros let a GPU clock higher; integers 0 or 1."""
    generator = np.random.default_rng(seed)
    if dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.standard_normal(shape, dtype=np.float32).astype(dtype)
