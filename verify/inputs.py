"""Inputs to compare two models on: drawn from a seed, or recorded from a real run.

Drawn inputs fit the graph's own names, types and shapes.  What an SA3 diffusion transformer calls its
inputs is known and drawn as its runtime would fill them; anything else is drawn by its type:

========================  =========================================================================
``t``, ``timestep(s)``    the diffusion time asked for
``seconds_total``         the duration of the length in seconds, at 44100 / 4096 latents per second
``t5_mask``               40 text tokens on, of 256
``local_add_cond``        normal, standard deviation 0.1: conditioning that does not drown the latents
other masks, booleans     on for the first three quarters of the last axis
other floats              standard normal, as latents are at t = 1
other integers            0 or 1, which every vocabulary has
========================  =========================================================================
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from engine_builder.errors import SourceModelError
from engine_builder.one_line import one_line
from engine_builder.source_graph import TensorSpec

Array = npt.NDArray[Any]
Inputs = Mapping[str, Array]

SAMPLE_RATE: Final = 44100
"""Audio samples per second of Stable Audio's autoencoder."""
SAMPLES_PER_LATENT: Final = 4096
"""Audio samples that one latent frame stands for."""
TEXT_TOKENS_ON: Final = 40

_TIMES: Final = frozenset({"t", "timestep", "timesteps"})
_CONDITIONING_DEVIATION: Final = 0.1


@dataclass(frozen=True)
class Sample:
    """One set of inputs: what it is called, its length in latent frames, its diffusion time.

    ``length`` is 0 when the model has no dynamic length and ``t`` 0 when it has no time input.
    ``load`` makes the arrays anew at each call, so that a long sweep does not hold them all.
    """

    name: str
    length: int
    t: float
    load: Callable[[], Inputs]


def input_specs(graph: onnx.GraphProto) -> tuple[TensorSpec, ...]:
    """The inputs of ``graph`` that have to be given, with numpy's names of their types."""
    weights = {tensor.name for tensor in graph.initializer}
    return tuple(_spec(value) for value in graph.input if value.name not in weights)


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        raise SourceModelError(f"the input {one_line(value.name)!r} is no tensor of a known type") from None
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim
    )
    return TensorSpec(value.name, dtype.name, shape)


def duration_seconds(length: int) -> float:
    """Seconds of audio that ``length`` latent frames stand for: 4092 are 380.1 s."""
    return length * SAMPLES_PER_LATENT / SAMPLE_RATE


def seeded_inputs(specs: Sequence[TensorSpec], *, length: int, t: float, seed: int = 0) -> dict[str, Array]:
    """Inputs by name, drawn from ``seed``.

    Dynamic batch dimensions are 1 and all other dynamic dimensions ``length``.  Each input has a stream
    of its own, keyed by its name: neither the other inputs nor their order change what it gets, and
    ``t`` changes the time input alone.  Raises SourceModelError for a type that cannot be drawn.
    """
    batches = _batches(specs)
    return {spec.name: _draw(spec, _sizes(spec, batches, length), length, t, seed) for spec in specs}


def _batches(specs: Sequence[TensorSpec]) -> set[str]:
    """Names of batch dimensions: those that stand first in an input of several dimensions."""
    return {dim for spec in specs if len(spec.shape) > 1 and isinstance(dim := spec.shape[0], str)}


def _is_batch(spec: TensorSpec, axis: int, batches: set[str]) -> bool:
    dim = spec.shape[axis]
    return axis == 0 and (dim is None or dim in batches or len(spec.shape) > 1)


def _sizes(spec: TensorSpec, batches: set[str], length: int) -> tuple[int, ...]:
    return tuple(
        dim if isinstance(dim, int) else 1 if _is_batch(spec, axis, batches) else length
        for axis, dim in enumerate(spec.shape)
    )


def _draw(spec: TensorSpec, shape: tuple[int, ...], length: int, t: float, seed: int) -> Array:
    dtype = _numpy_dtype(spec)
    random = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    floating = onnx.helper.np_dtype_to_tensor_dtype(dtype) in _FLOATS
    if spec.name in _TIMES:
        return np.full(shape, t, dtype)
    if spec.name == "seconds_total":
        return np.full(shape, duration_seconds(length), dtype)
    if spec.name == "t5_mask":
        return _first_on(shape, TEXT_TOKENS_ON, dtype)
    if "mask" in spec.name.lower() or dtype == np.bool_:
        return _first_on(shape, max(1, shape[-1] * 3 // 4) if shape else 1, dtype)
    if floating:
        deviation = _CONDITIONING_DEVIATION if spec.name == "local_add_cond" else 1.0
        return (deviation * random.standard_normal(shape, np.float32)).astype(dtype)
    if dtype.kind in "iu":
        return random.integers(0, 2, shape).astype(dtype)
    raise SourceModelError(
        f"no values can be drawn for the input {one_line(spec.name)!r} of type {spec.dtype}",
        hint="give recorded inputs",
    )


_FLOATS: Final = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
    }
)


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if spec.dtype == "bfloat16" else np.dtype(spec.dtype)


def _first_on(shape: tuple[int, ...], count: int, dtype: np.dtype[Any]) -> Array:
    on = np.arange(shape[-1]) < count if shape else np.array(True)
    return np.broadcast_to(on, shape).astype(dtype)


def seeded_samples(
    specs: Sequence[TensorSpec],
    *,
    lengths: Sequence[int],
    t: Sequence[float],
    seed: int = 0,
    samples: int = 1,
) -> tuple[Sample, ...]:
    """One sample per length, time and seed, of which there are ``samples`` from ``seed`` on."""
    return tuple(
        Sample(
            f"seed {seed + n}",
            length,
            time,
            partial(seeded_inputs, specs, length=length, t=time, seed=seed + n),
        )
        for length in lengths
        for time in t
        for n in range(samples)
    )


def recorded_samples(specs: Sequence[TensorSpec], path: Path) -> tuple[Sample, ...]:
    """One sample per ``.npz`` file in the folder ``path``, by file name; or the file ``path`` itself.

    Each file holds one array per graph input under its name; other arrays in it are ignored.  Length
    and time are those of the recorded arrays.  Raises SourceModelError that names the file and the
    array, before anything is evaluated.
    """
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise SourceModelError("holds no .npz file", where=str(path), hint="one per recorded sample")
    elif path.is_file():
        files = [path]
    else:
        raise SourceModelError("no such recorded inputs", where=str(path))
    return tuple(_recorded(specs, file) for file in files)


def _recorded(specs: Sequence[TensorSpec], file: Path) -> Sample:
    inputs = _load_recorded(specs, file)
    batches = _batches(specs)
    lengths = [
        inputs[spec.name].shape[axis]
        for spec in specs
        for axis, dim in enumerate(spec.shape)
        if not isinstance(dim, int) and not _is_batch(spec, axis, batches)
    ]
    times = [float(inputs[spec.name].reshape(-1)[0]) for spec in specs if spec.name in _TIMES]
    length, time = next(iter(lengths), 0), next(iter(times), 0.0)
    return Sample(file.name, length, time, partial(_load_recorded, specs, file))


def _load_recorded(specs: Sequence[TensorSpec], file: Path) -> dict[str, Array]:
    where = str(file)
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise SourceModelError("is no .npz archive", where=where)
        with archive:
            missing = [spec.name for spec in specs if spec.name not in archive]
            if missing:
                names = ", ".join(map(one_line, missing))
                raise SourceModelError(f"holds no array for the input {names}", where=where)
            arrays = {spec.name: archive[spec.name] for spec in specs}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceModelError(f"cannot be read: {one_line(str(error), 200)}", where=where) from None
    bound: dict[str, tuple[int, str]] = {}
    return {spec.name: _checked(spec, arrays[spec.name], bound, where) for spec in specs}


def _checked(spec: TensorSpec, array: Array, bound: dict[str, tuple[int, str]], where: str) -> Array:
    """``array`` in the input's type; ``bound`` holds the sizes that symbolic dimensions have so far."""
    label = f"the array {one_line(spec.name)!r}"
    dtype = _numpy_dtype(spec)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise SourceModelError(f"{label} is {array.dtype}, the input {spec.dtype}", where=where)
    wanted = "x".join("?" if dim is None else str(dim) for dim in spec.shape) or "a scalar"
    fits = array.ndim == len(spec.shape) and all(
        size == dim for size, dim in zip(array.shape, spec.shape, strict=True) if isinstance(dim, int)
    )
    if not fits:
        shape = "x".join(map(str, array.shape)) or "a scalar"
        raise SourceModelError(f"{label} is {shape}, the input {wanted}", where=where)
    for size, symbol in _symbolic(array.shape, spec.shape):
        first, name = bound.setdefault(symbol, (size, spec.name))
        if first != size:
            raise SourceModelError(
                f"{symbol} is {first} in {name!r} and {size} in {spec.name!r}", where=where
            )
    result = array.astype(dtype)
    if dtype.kind not in "iub" and not np.isfinite(result.astype(np.float64)).all():
        raise SourceModelError(f"{label} holds values that are not finite", where=where)
    return result


def _symbolic(shape: Sequence[int], dims: Sequence[int | str | None]) -> Iterator[tuple[int, str]]:
    for size, dim in zip(shape, dims, strict=True):
        if isinstance(dim, str):
            yield size, dim
