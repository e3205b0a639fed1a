"""The scales file: what fp8 quantization needs to know of a model, measured once and built from anywhere.

It is JSON of one line per linear and holds largest magnitudes (amax), in the units of the tensors
themselves; the scale of an E4M3 tensor is amax / 448.  Linears go by the names of their nodes in the
source graph, which a conversion keeps.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from engine_builder.bounded_file import read_bounded
from engine_builder.durable import disk_error, write_durably
from engine_builder.errors import SourceModelError
from engine_builder.graph.passes.insert_qdq import E4M3_MAX, LinearScale
from engine_builder.one_line import one_line, place, quoted

SCHEMA: Final = "sa3-builder/scales/1"

ZERO_FLOOR: Final = E4M3_MAX * 2.0**-14
"""What an amax of zero becomes, 0.02734375: its scale is 2**-14, fp16's smallest normal number.

TensorRT refuses a scale of zero, and a subnormal one may be flushed to zero.  A tensor that was all
zeros during calibration quantizes to zeros by any scale.
"""

MAX_BYTES: Final = 32 << 20
"""A scales file is some 20 kB; with a range per output channel that of the medium model has 9 MB.

The limit is on memory: as Python's lists, JSON takes some twenty times its size.
"""

_RECALIBRATE: Final = "make it again with: entrypoint.py calibrate RECIPE"

Amax = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)


class ScalesSource(_Section):
    """The model that was calibrated: its file's name, and the digest of all its files."""

    name: str
    sha256: Sha256


class Calibration(_Section):
    """How the activations were measured."""

    tool: Literal["nvidia-modelopt", "onnxruntime"] = "nvidia-modelopt"
    method: Literal["max", "entropy"]
    provider: Literal["cpu", "cuda"]
    versions: dict[str, str]


class ScalesSample(_Section):
    """One set of inputs: its name, its length in latent frames, its diffusion time."""

    name: str
    length: Annotated[int, Field(ge=0)]
    t: float


class ScalesData(_Section):
    """What the activations were measured on; ``synthetic`` inputs were drawn, not recorded."""

    synthetic: bool
    sha256: Annotated[Sha256, Field(description="Of the arrays of all samples, in order.")]


class Floored(_Section):
    """A linear whose ``operand`` was all zeros, and got ``ZERO_FLOOR``; ``channels`` says how many."""

    linear: str
    operand: Literal["activation", "weight", "weight_channels"]
    channels: Annotated[int, Field(ge=1)] | None = None


class LinearRange(_Section):
    """Largest magnitudes of one linear: of its input, its weight, and the weight's output channels."""

    activation_amax: Amax
    weight_amax: Amax
    weight_channel_amax: Annotated[tuple[Amax, ...], Field(min_length=1)] | None = None


class Scales(_Section):
    """A scales file.  ``load_scales`` reads and ``save_scales`` writes one."""

    schema_version: Annotated[Literal["sa3-builder/scales/1"], Field(alias="schema")] = SCHEMA
    source: ScalesSource
    calibration: Calibration
    data: ScalesData
    samples: tuple[ScalesSample, ...]
    floored: tuple[Floored, ...]
    missing: Annotated[dict[str, str], Field(description="Linears without ranges, and why.")]
    linears: Annotated[dict[str, LinearRange], Field(min_length=1)]

    _where: str = PrivateAttr(default="the scales")

    @property
    def synthetic(self) -> bool:
        """Whether the activations were measured on drawn inputs, which every report must say."""
        return self.data.synthetic

    def require_source(self, sha256: str) -> None:
        """Raises SourceModelError unless the scales are those of the model with this digest."""
        if self.source.sha256 != sha256:
            raise SourceModelError(
                f"holds the scales of another model, {one_line(self.source.name)} with SHA-256 "
                f"{self.source.sha256[:12]}..., not {sha256[:12]}...",
                where=self._where,
                hint="calibrate this model, or build the model that the scales were made for",
            )

    def require(self, linears: Iterable[str]) -> None:
        """Raises SourceModelError, naming it, for the first linear without ranges."""
        absent = [name for name in linears if name not in self.linears]
        if absent:
            reason = self.missing.get(absent[0])
            more = f", and for {len(absent) - 1} more linears" if len(absent) > 1 else ""
            raise SourceModelError(
                f"no scale for the linear {quoted(absent[0])}" + (f": {reason}" if reason else "") + more,
                where=self._where,
                hint="calibrate the model again, or leave the linear out with precision.exclude",
            )

    def ranges(self, weights: Literal["per_tensor", "per_channel"]) -> dict[str, LinearScale]:
        """By linear, the ranges to quantize with.

        Raises SourceModelError for ``per_channel`` when the file holds no ranges of channels.
        """
        result: dict[str, LinearScale] = {}
        for name, linear in self.linears.items():
            channels = linear.weight_channel_amax
            if weights == "per_channel" and channels is None:
                raise SourceModelError(
                    f"holds no weight range per output channel for {quoted(name)}",
                    where=self._where,
                    hint="calibrate with --per-channel, or set precision.weights: per_tensor",
                )
            amax = channels if weights == "per_channel" and channels is not None else (linear.weight_amax,)
            result[name] = LinearScale(linear.activation_amax, amax)
        return result

    def to_json(self) -> str:
        """The file's text: the same values always give the same bytes."""
        return _pretty(self.model_dump(by_alias=True, mode="json", exclude_none=True), depth=2) + "\n"


def _pretty(value: Any, depth: int, indent: str = "") -> str:
    """JSON whose outer ``depth`` levels have a line for each member, and deeper ones none."""
    if not depth or not value or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict):
        lines = [
            f"{json.dumps(k, ensure_ascii=False)}: {_pretty(v, depth - 1, inner)}" for k, v in value.items()
        ]
    else:
        lines = [_pretty(v, depth - 1, inner) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"


def single(value: float) -> float:
    """``value`` as fp32, in the shortest decimal notation that reads back as the same fp32 number."""
    return float(str(np.float32(value)))


def save_scales(scales: Scales, path: Path) -> None:
    """Writes the file, complete or not at all; raises ResourceError when that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, scales.to_json().encode())
    except OSError as error:
        raise disk_error(error, path.parent) from error


def load_scales(path: Path) -> Scales:
    """Reads and checks a scales file.

    Raises SourceModelError, which names the linear whose range is zero, negative or not finite.
    """
    where = place(path)
    try:
        data = read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        raise SourceModelError(
            "no such scales file", where=where, hint="make it with: entrypoint.py calibrate RECIPE"
        ) from None
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise SourceModelError("is nested too deeply", where=where, hint=_RECALIBRATE) from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ones
        raise SourceModelError(
            f"is no JSON: {one_line(str(error), 200)}", where=where, hint=_RECALIBRATE
        ) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        found = f"its schema is {quoted(str(schema))}" if schema is not None else "it names no schema"
        raise SourceModelError(f"is no scales file: {found}, not {SCHEMA}", where=where, hint=_RECALIBRATE)
    try:
        # JSON has lists and whole numbers where the model has tuples and floats.
        scales = Scales.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise _fault(error, where) from None
    scales._where = where
    return scales


def scales_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a scales file."""
    schema = Scales.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    twice = next((key for key, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"the key {quoted(twice)} is given twice")
    return dict(pairs)


def _fault(error: ValidationError, where: str) -> SourceModelError:
    """The first fault, told with the place where it lies."""
    faults = error.errors(include_url=False)
    first = faults[0]
    place_in_file = ".".join(one_line(str(part), 200) for part in first["loc"])
    value = first["input"]
    if first["type"] in ("greater_than", "finite_number"):
        if isinstance(value, int) and value.bit_length() > 1024:
            value = math.inf if value > 0 else -math.inf  # more than the largest fp64
        what = "zero" if value == 0 else "negative" if math.isfinite(value) else "not finite"
        message = f"is {value:g}: a range that is {what}" if value else "is zero"
    else:
        message = f"is wrong: {first['msg'][:1].lower()}{first['msg'][1:]}"
    more = f"; and {len(faults) - 1} more faults" if len(faults) > 1 else ""
    return SourceModelError(f"{place_in_file} {message}{more}", where=where, hint=_RECALIBRATE)
