"""The recipe: one YAML file that says which engine to build from which model.

Every section is a frozen pydantic model in strict mode with unknown keys forbidden.  A fault is
a RecipeError that names file, line and key: ``recipes/x.yaml:12: profiles[0].x: min 4 > opt 2``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from engine_builder.errors import RecipeError
from engine_builder.one_line import one_line, place
from engine_builder.recipe_yaml import MAX_BYTES, Document, KeyPath, key_path, read_yaml

if TYPE_CHECKING:
    from engine_builder.source import TensorSpec

log = logging.getLogger(__name__)

SCHEMA: Final = "sa3-builder/1"
PrecisionName = Literal["fp32", "fp16", "bf16", "fp8"]
BackendName = Literal["tensorrt", "tensorrt_rtx"]
GemmType = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8"]

PRECISION_OPTIONS: Final[Mapping[str, tuple[PrecisionName, ...]]] = {
    "rotary": ("fp16", "bf16", "fp8"),
    "islands": ("fp16",),
    "residual": ("fp16", "bf16", "fp8"),
    "bound_attention": ("fp16",),
    "tf32": ("fp32",),
    "clip_overflow": ("fp16", "fp8"),
    "scales": ("fp8",),
    "weights": ("fp8",),
    "include": ("fp8",),
    "exclude": ("fp8",),
    "trunk": ("fp8",),
    "min_cosine": ("fp8",),
}
"""For which recipes each option of ``precision`` has a meaning; elsewhere it is refused."""

DEFAULT_MIN_COSINE: Final[Mapping[PrecisionName, float]] = {
    "fp32": 0.99999,
    "fp16": 0.9999,
    "bf16": 0.99,
    "fp8": 0.9,
}
"""Worst velocity cosine a build must reach when the recipe names none.

On trained weights fp16 reads 1.0000, bf16 0.9923 at the least, and fp8 0.92 calibrated against
0.64 uncalibrated, so that each floor passes a sound build and stops a broken one.
"""

DEFAULT_LENGTHS: Final = (64, 1292, 4092)
"""Latent frames: short, 120 s of audio, and the longest in use, where lost position shows."""

FIRST_SM: Final[Mapping[PrecisionName, int]] = {"fp32": 75, "fp16": 75, "bf16": 80, "fp8": 89}
"""Lowest compute capability with tensor cores for the type; 75 is the lowest TensorRT 10 knows."""

_FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
_MAX_DIMENSION = 2**31 - 1


class _FaultError(ValueError):
    """A fault found by a validator: its message, where it lies and what to do about it."""

    def __init__(self, message: str, *, hint: str | None = None, key: KeyPath = ()) -> None:
        super().__init__(message)
        self.hint = hint
        self.key = key


@dataclass(frozen=True)
class ShapeRange:
    """Smallest, most frequent and largest shape of one input; the three have the same rank."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """One optimization profile: the shape range of every dynamic input, by name."""

    shapes: Mapping[str, ShapeRange]


_BOUND = re.compile(r"(>=|<=|==|>|<)?\s*(\d{1,9})\Z", re.ASCII)


@dataclass(frozen=True)
class CountBound:
    """What a count must satisfy, written ``96``, ``"==96"``, ``">=170"``, ``"<=2"``, ``">0"`` or ``"<3"``."""

    operator: Literal["==", ">=", "<=", ">", "<"]
    value: int

    def holds(self, count: int) -> bool:
        """Whether ``count`` satisfies the bound."""
        return {
            "==": count == self.value,
            ">=": count >= self.value,
            "<=": count <= self.value,
            ">": count > self.value,
            "<": count < self.value,
        }[self.operator]

    def __str__(self) -> str:
        """The bound as a recipe writes it."""
        return f"{self.operator}{self.value}"


def _count_bound(value: object) -> CountBound:
    if isinstance(value, CountBound):
        return value
    match = _BOUND.match(str(value)) if isinstance(value, int | str) and not isinstance(value, bool) else None
    if match is None:
        raise _FaultError(f'must be a count such as 96 or ">=170", not {_described(value)}')
    operator: Any = match[1] or "=="
    return CountBound(operator, int(match[2]))


def _absolute(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise _FaultError(f"must be a path, not {_described(value)}")
    context: Mapping[str, Path] = info.context or {}
    return Path(context.get("folder", ""), value)


def _precision(value: object) -> object:
    """A bare name as a mapping, and the defaults that depend on the recipe filled in."""
    options = {"recipe": value} if isinstance(value, str) else value
    if not isinstance(options, dict):
        return options
    defaults: dict[object, dict[str, object]] = {
        "bf16": {"rotary": "baked"},
        "fp8": {"weights": "per_tensor", "trunk": "fp16"},
    }
    recipe = options.get("recipe")
    return {**defaults.get(recipe, {}), **options} if isinstance(recipe, str) else options


def _architectures(value: object) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) else (value,)
    if not items:
        raise _FaultError("names no architecture", hint="for example sm: 89")
    result: list[int] = []
    for item in items:
        match = re.fullmatch(r"(?:sm_?)?(\d{2,3})", str(item), re.ASCII)
        if match is None or isinstance(item, bool | float):
            point = re.fullmatch(r"(\d{1,2})\.(\d)", str(item), re.ASCII)
            hint = (
                f"write {point[1]}{point[2]}"
                if point
                else "compute capability without the point, as in sm: 89"
            )
            raise _FaultError(f"must be an architecture such as 89, not {_described(item)}", hint=hint)
        if int(match[1]) in result:
            raise _FaultError(f"sm {match[1]} is given twice")
        result.append(int(match[1]))
    return tuple(result)


def _shape_range(value: object) -> ShapeRange:
    if not isinstance(value, tuple) or len(value) != 3:
        count = f"{len(value)} shapes" if isinstance(value, tuple) else _described(value)
        raise _FaultError(f"must be three shapes [min, opt, max], not {count}")
    names = ("min", "opt", "max")
    shapes: list[tuple[int, ...]] = []
    for name, shape in zip(names, value, strict=True):
        if not isinstance(shape, tuple):
            raise _FaultError(f"{name} must be a shape such as [1, 256, 64], not {_described(shape)}")
        for size in shape:
            if not isinstance(size, int) or isinstance(size, bool):
                raise _FaultError(f"{name} must hold whole numbers, not {_described(size)}")
            if not 1 <= size <= _MAX_DIMENSION:
                raise _FaultError(f"{name} has dimension {_described(size)}, outside 1..{_MAX_DIMENSION}")
        shapes.append(shape)
    low, usual, high = shapes
    if not len(low) == len(usual) == len(high):
        raise _FaultError(f"min, opt and max have {len(low)}, {len(usual)} and {len(high)} dimensions")
    for axis, (a, b, c) in enumerate(zip(low, usual, high, strict=True)):
        if a > b:
            raise _FaultError(f"min {a} > opt {b} in dimension {axis}")
        if b > c:
            raise _FaultError(f"opt {b} > max {c} in dimension {axis}")
    return ShapeRange(low, usual, high)


def _one_or_more(value: object) -> object:
    return value if isinstance(value, tuple) else (value,)


def _not_empty(value: tuple[object, ...]) -> tuple[object, ...]:
    if not value:
        raise _FaultError("is an empty list")
    return value


def _off_as_none(value: object) -> object:
    if value is None:
        raise _FaultError("is empty", hint="write off, or the options of the sweep")
    return {False: None, True: {}}[value] if isinstance(value, bool) else value


def _refit(value: object) -> object:
    return {False: None, True: "all"}[value] if isinstance(value, bool) else value


_Shape = tuple[Annotated[int, Field(ge=1, le=_MAX_DIMENSION)], ...]
RecipePath = Annotated[Path, BeforeValidator(_absolute, json_schema_input_type=str)]
"""A path in a recipe; a relative one starts at the recipe's own folder."""
Bound = Annotated[
    CountBound,
    PlainValidator(_count_bound, json_schema_input_type=int | str),
    PlainSerializer(str, return_type=str),
]
Shapes = Annotated[
    ShapeRange,
    PlainValidator(_shape_range, json_schema_input_type=tuple[_Shape, _Shape, _Shape]),
    PlainSerializer(lambda r: [r.min, r.opt, r.max], return_type=list[tuple[int, ...]]),
]
PlainName = Annotated[str, StringConstraints(pattern=_FILE_NAME, max_length=100)]
Cosine = Annotated[float, Field(gt=0, le=1)]
FloatType = Literal["fp32", "fp16", "bf16", "fp8"]


class _Section(BaseModel):
    model_config = ConfigDict(
        use_attribute_docstrings=True, strict=True, extra="forbid", frozen=True, allow_inf_nan=False
    )

    unkeyed: ClassVar[frozenset[str]] = frozenset()
    """Fields that name things without changing what is built; no content key holds them."""


class Sample(_Section):
    """A random-weight SA3 DiT that the builder writes itself, in place of a model file."""

    size: Literal["tiny", "small", "medium"] = "tiny"
    """Dimensions: a toy of two layers, or those of the released small and medium models."""
    spelling: Literal["torchscript17", "dynamo20", "dynamo23"] = "torchscript17"
    """Which exporter's operators and names the graph is written in."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Of the random weights."""
    differential: bool = False
    """Differential attention, as in the medium model."""


class Model(_Section):
    """The fp32 model: exactly one of ``onnx`` and ``sample``, and the folder name of its engines."""

    unkeyed = frozenset({"name", "sha256"})

    name: PlainName
    """Folder of its engines below `sm_XX`."""
    kind: Literal["sa3-dit", "generic"] = "sa3-dit"
    """An SA3 DiT must have its structures; a generic model has those it has protected."""
    onnx: RecipePath | None = None
    """The fp32 ONNX file."""
    sample: Sample | None = None
    """A random-weight model in place of a file."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)] | None = None
    """Digest that the model must have: of the file alone, or of the list of digests when it has sidecars."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.onnx is None) == (self.sample is None):
            given = "neither is given" if self.onnx is None else "both are given"
            raise _FaultError(f"needs exactly one of onnx and sample; {given}")
        return self


class Precision(_Section):
    """The precision recipe and its options; ``None`` leaves the choice to the precision itself."""

    recipe: PrecisionName
    """The precision."""
    rotary: Literal["baked", "computed"] | None = None
    """Whether rotary angles are computed at run time or read from tables; bf16 bakes by default."""
    islands: Literal["minimal", "rope", "full"] | None = None
    """What is fp32 besides norms and angles: nothing, the rotation (default), the modulation too."""
    residual: Literal["fp32", "trunk"] | None = None
    """Type of the sums that carry the residual stream; fp32 by default."""
    bound_attention: bool | None = None
    """Cast q, k and v to the trunk type before each attention core (default); else none fuses."""
    tf32: bool = False
    """Let products round their operands to TF32."""
    clip_overflow: bool = False
    """Clip weights beyond the type's range instead of refusing them."""
    scales: RecipePath | None = None
    """The scales file that `calibrate` wrote."""
    weights: Literal["per_tensor", "per_channel"] | None = None
    """One scale per weight (default) or per output channel."""
    include: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Linears added to the selection, by glob on node names."""
    exclude: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Linears taken out of the default selection, by glob on node names."""
    trunk: Literal["fp16", "bf16"] | None = None
    """Type of everything that is neither fp8 nor fp32; fp16 by default."""
    min_cosine: Cosine | None = None
    """Leave out the fewest linears that reach this cosine over the sweep."""

    @field_validator(*PRECISION_OPTIONS)
    @classmethod
    def _belongs_to_recipe(cls, value: object, info: ValidationInfo) -> object:
        recipe = info.data.get("recipe")
        valid = PRECISION_OPTIONS[str(info.field_name)]
        if recipe is not None and recipe not in valid:
            raise _FaultError(f"is no option of {recipe}", hint=f"it is one of {', '.join(valid)}")
        return value


class Target(_Section):
    """The backend and the compute capabilities to build for, one engine each."""

    backend: BackendName
    """TensorRT on the GPU itself, or TensorRT-RTX ahead of time on any machine."""
    sm: Annotated[
        tuple[int, ...],
        PlainValidator(_architectures, json_schema_input_type=int | str | tuple[int | str, ...]),
    ]
    """Compute capability without the point; a list builds one engine for each."""


class Build(_Section):
    """Options of the TensorRT builder; what a backend lacks it refuses itself, with a reason."""

    workspace_gb: Annotated[float, Field(gt=0, le=1024)] = 16.0
    """Upper bound of scratch memory during tactic selection and execution, in GiB."""
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = None
    """TensorRT's effort, 0 to 5."""
    aux_streams: Annotated[int, Field(ge=0, le=32)] | None = None
    """Streams beside the main one; 0 removes the waits between them."""
    timing_cache: RecipePath | None = None
    """File to load tactic timings from and save them to."""
    strict_timing_cache: bool = False
    """Fail when the build timed anything that the cache did not hold."""
    hardware_compatibility: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    """Let the engine run on other GPUs than the one it is built on."""
    version_compatible: bool = False
    """Let later TensorRT versions run the engine."""
    refit: Annotated[
        Literal["all", "identical", "individual"] | None,
        BeforeValidator(_refit, json_schema_input_type=bool | Literal["all", "identical", "individual"]),
    ] = None
    """Which weights can be exchanged later."""
    strip_plan: bool = False
    """Leave the weights out of the engine."""
    weight_streaming: bool = False
    """Let the runtime keep weights in host memory."""
    plugins: tuple[RecipePath, ...] = ()
    """Plugin libraries; the operator must allow them with --allow-plugins."""

    @model_validator(mode="after")
    def _cache_to_be_strict_about(self) -> Build:
        if self.strict_timing_cache and self.timing_cache is None:
            raise _FaultError(
                "needs a cache to be strict about",
                hint="add build.timing_cache",
                key=("strict_timing_cache",),
            )
        return self


class Fidelity(_Section):
    """The sweep of the converted graph against fp32: one comparison per length, t and sample."""

    lengths: Annotated[
        tuple[Annotated[int, Field(ge=1, le=_MAX_DIMENSION)], ...],
        Field(max_length=64),
        AfterValidator(_not_empty),
    ] = DEFAULT_LENGTHS
    """Sequence lengths of the drawn inputs."""
    t: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=64), AfterValidator(_not_empty)
    ] = (
        1.0,
        0.5,
        0.02,
    )
    """Diffusion times of the drawn inputs."""
    min_cosine: Cosine | None = None
    """Least cosine that passes; by default 0.99999 for fp32, 0.9999 for fp16, 0.99 for bf16, 0.9 for fp8."""
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    """Draws for each length and time."""
    data: RecipePath | None = None
    """Folder of recorded inputs, one `.npz` by input name for each sample, in place of drawn ones."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Of the drawn inputs."""


class FusedAttention(_Section):
    """How many fused attention kernels the engine must have and which types their inputs may be."""

    count: Bound
    """How many fused attention kernels."""
    type: Annotated[
        tuple[FloatType, ...],
        BeforeValidator(_one_or_more, json_schema_input_type=FloatType | tuple[FloatType, ...]),
    ] = ()
    """The types that their q, k and v may have."""


class Expect(_Section):
    """Counts that the engine's layers must satisfy, beyond what its precision promises."""

    gemms: Mapping[GemmType, Bound] = Field(default_factory=dict)
    """Matrix products by type, such as `{fp8: ">=170"}`."""
    fused_attention: FusedAttention | None = None
    """Fused attention kernels."""
    runtime_trig: Bound | None = None
    """Layers that compute a sine or cosine."""


class Verify(_Section):
    """What must hold before an engine is published; ``fidelity: off`` skips the sweep alone."""

    fidelity: Annotated[
        Fidelity | None, BeforeValidator(_off_as_none, json_schema_input_type=Fidelity | bool)
    ] = Fidelity()
    """The sweep against fp32; `off` skips it."""
    expect: Expect = Expect()
    """Counts that the engine must have, beyond what its precision promises."""


class Output(_Section):
    """Where engines go: ``<dir>/sm_<XX>/<model.name>/<name>``."""

    dir: RecipePath
    """Where engines go, as `<dir>/sm_XX/<model.name>/`."""
    name: PlainName | None = None
    """File name of the engine; by default `dit_<precision>.trt`."""

    @field_validator("name")
    @classmethod
    def _apart_from_reports(cls, value: str | None) -> str | None:
        if value is not None and value.lower().endswith((".json", ".onnx")):
            raise _FaultError(f"{value!r} would pass for a report", hint="end it in .trt")
        return value


class Recipe(_Section):
    """One recipe file; ``load_recipe`` makes it, ``error`` reports later faults by file and line."""

    schema_version: Annotated[Literal["sa3-builder/1"], Field(alias="schema")]
    """Version of this format."""
    model: Model
    """What to build from."""
    precision: Annotated[
        Precision, BeforeValidator(_precision, json_schema_input_type=PrecisionName | Precision)
    ]
    """Name of a precision, or a section with options."""
    profiles: Annotated[
        tuple[Annotated[Mapping[str, Shapes], Field(min_length=1)], ...], Field(max_length=32)
    ] = ()
    """One mapping per optimization profile: for each dynamic input its shapes [min, opt, max]."""
    target: Target
    """What to build for."""
    build: Build = Build()
    """Settings of TensorRT's builder."""
    verify: Verify = Verify()
    """What must hold before an engine is published."""
    output: Output
    """Where the engine goes."""

    _path: Path = PrivateAttr(default=Path("recipe.yaml"))
    _document: Document = PrivateAttr(default=Document({}, {}))
    _file_sha256: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        _check_types_exist(self.precision.recipe, self.target.sm)
        spans = self._length_spans()
        sweep = self.verify.fidelity
        if sweep is not None and spans and "lengths" in sweep.model_fields_set:
            for index, length in enumerate(sweep.lengths):
                if not any(low <= length <= high for low, high in spans):
                    raise _FaultError(
                        f"{length} is outside every profile of x ({_spans(spans)})",
                        hint="a length that no profile holds cannot run",
                        key=("verify", "fidelity", "lengths", index),
                    )
        return self

    @property
    def path(self) -> Path:
        """The recipe file as it was given."""
        return self._path

    @property
    def file_sha256(self) -> str:
        """SHA-256 of the recipe file's bytes, in hex."""
        return self._file_sha256

    def _length_spans(self) -> tuple[tuple[int, int], ...]:
        """Least and greatest L of each profile of an SA3 DiT, from ``x (1, 256, L)``."""
        if self.model.kind != "sa3-dit":
            return ()
        ranges = [profile["x"] for profile in self.profiles if "x" in profile]
        return tuple((r.min[-1], r.max[-1]) for r in ranges if r.min)

    def fidelity_lengths(self) -> tuple[int, ...]:
        """Lengths L of the sweep: the recipe's own, or the default ones that its profiles hold.

        When the profiles end below the longest default length, their greatest L takes its place.
        Empty when the sweep is off.
        """
        sweep = self.verify.fidelity
        if sweep is None:
            return ()
        spans = self._length_spans()
        if not spans or "lengths" in sweep.model_fields_set:
            return sweep.lengths
        held = {n for n in DEFAULT_LENGTHS if any(low <= n <= high for low, high in spans)}
        return tuple(sorted(held if DEFAULT_LENGTHS[-1] in held else held | {max(high for _, high in spans)}))

    def min_cosine(self) -> float | None:
        """Least velocity cosine that passes, or None when the sweep is off."""
        sweep = self.verify.fidelity
        if sweep is None:
            return None
        return sweep.min_cosine or self.precision.min_cosine or DEFAULT_MIN_COSINE[self.precision.recipe]

    def error(self, key: KeyPath | str, message: str, *, hint: str | None = None) -> RecipeError:
        """A RecipeError at the line of ``key``: ``("profiles", 0, "x")`` or ``"profiles[0].x"``."""
        if isinstance(key, str):
            parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
            key = tuple(int(index) if index else name for index, name in parts)
        return RecipeError(
            f"{key_path(key)}: {message}" if key else message,
            where=f"{place(self._path)}:{self._document.line(key)}",
            hint=hint,
        )

    def canonical(self, *sections: str) -> str:
        """What the sections ask for as JSON with sorted keys; all sections but ``output`` by default.

        Left out are paths (a file counts by its content, which the caller adds to its key), names
        that only label the result, and options left open, so that a new option changes no key.
        """
        chosen = sections or ("model", "precision", "profiles", "target", "build", "verify")
        value = {name: _plain(getattr(self, name)) for name in chosen}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def digest(self, *sections: str) -> str:
        """SHA-256 of ``canonical(*sections)`` in hex, for content keys."""
        return hashlib.sha256(self.canonical(*sections).encode()).hexdigest()


def _check_types_exist(precision: PrecisionName, sms: Sequence[int]) -> None:
    for sm in sms:
        if sm < FIRST_SM[precision]:
            raise _FaultError(
                f"sm {sm} has no {precision} tensor cores",
                hint=f"{precision} needs {FIRST_SM[precision]} or higher",
                key=("target", "sm"),
            )


def _plain(value: object) -> object:
    if isinstance(value, _Section):
        fields = {
            name: getattr(value, name) for name in type(value).model_fields if name not in value.unkeyed
        }
        return {name: _plain(field) for name, field in fields.items() if not _unkeyed(field)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, ShapeRange):
        return [value.min, value.opt, value.max]
    return str(value) if isinstance(value, CountBound) else value


def _unkeyed(value: object) -> bool:
    return (
        value is None or isinstance(value, Path) or (isinstance(value, tuple) and any(map(_unkeyed, value)))
    )


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{low}..{high}" for low, high in spans)


def load_recipe(path: Path | str) -> Recipe:
    """Read and check a recipe file.

    Raises RecipeError for a file that cannot be read, is no YAML mapping, or holds a fault; of
    several faults the one that comes first in the file is told, the others are counted by line.
    """
    path = Path(path)
    if path.suffix == ".onnx" and path.is_file():
        raise RecipeError(
            "is a model, not a recipe",
            where=place(path),
            hint=f"write a recipe for it with: entrypoint.py init {place(path)}",
        )
    return read_recipe(_read(path, place(path)), path)


def read_recipe(data: bytes, path: Path) -> Recipe:
    """Check ``data``, the text of a recipe that lies or will lie at ``path``; raises as ``load_recipe``."""
    where = place(path)
    document = read_yaml(data, where)
    if not isinstance(document.value, dict):
        raise RecipeError(
            f"a recipe is a mapping, not {_described(document.value)}",
            where=f"{where}:1",
            hint="see recipes/smoke.yaml",
        )
    try:
        recipe = Recipe.model_validate(document.value, context={"folder": path.absolute().parent})
    except ValidationError as error:
        raise _first_fault(error, document, where) from None
    recipe._path = path
    recipe._document = document
    recipe._file_sha256 = hashlib.sha256(data).hexdigest()
    return recipe


def for_targets(
    recipe: Recipe, *, sms: Sequence[int] | None = None, timing_cache: Path | None = None
) -> Recipe:
    """``recipe`` as if its file named these architectures and this timing cache; None keeps its own.

    Raises RecipeError where the recipe cannot be built for one of them.
    """
    target = recipe.target if sms is None else recipe.target.model_copy(update={"sm": tuple(sms)})
    build = recipe.build
    if timing_cache is not None:
        build = build.model_copy(update={"timing_cache": timing_cache.absolute()})
    try:
        _check_types_exist(recipe.precision.recipe, target.sm)
    except _FaultError as fault:
        raise recipe.error(fault.key, str(fault), hint=fault.hint) from None
    return recipe.model_copy(update={"target": target, "build": build})


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a recipe file, for editors and other tools."""
    schema = Recipe.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}


def _read(path: Path, where: str) -> bytes:
    try:
        if path.is_dir():
            raise RecipeError("is a folder", where=where, hint="name the recipe file in it")
        if path.exists() and not path.is_file():
            raise RecipeError("is not a regular file", where=where)
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RecipeError("no such recipe", where=where, hint=_similar_file(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecipeError(f"cannot be read: {reason}", where=where) from None


def _similar_file(path: Path) -> str | None:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"}]
    except OSError:
        return "its folder does not exist either"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else None


def _first_fault(error: ValidationError, document: Document, where: str) -> RecipeError:
    # A misspelt key also leaves its right spelling missing: the misspelling is told first.
    faults = sorted(_faults(error, document), key=lambda fault: (fault[2] == _MISSING, fault[0]))
    line, key, message, hint = faults[0]
    for other_line, other_key, other, _ in faults[1:]:
        log.info("%s:%d: %s: %s", where, other_line, key_path(other_key), other)
    rest = ""
    if len(faults) > 1:
        others = [f"line {fault[0]} {key_path(fault[1])}" for fault in faults[1:4]]
        more = ", ..." if len(faults) > 4 else ""
        rest = f"; and {len(faults) - 1} more: {', '.join(others)}{more}"
    return RecipeError(f"{key_path(key) or 'recipe'}: {message}{rest}", where=f"{where}:{line}", hint=hint)


def _faults(error: ValidationError, document: Document) -> Iterator[tuple[int, KeyPath, str, str | None]]:
    """Line, key, message and hint of every fault."""
    for item in error.errors(include_url=False):
        key = tuple(part for part in item["loc"] if part != "[key]")
        kind, value, context = item["type"], item["input"], item.get("ctx", {})
        hint: str | None = None
        cause = context.get("error")
        if isinstance(cause, _FaultError):
            key, message, hint = (*key, *cause.key), str(cause), cause.hint
        elif kind == "missing":
            message = _MISSING
        elif kind == "extra_forbidden":
            message, hint = "unknown key", _known_keys(key)
        elif kind == "literal_error":
            message = f"must be {context['expected']}, not {_described(value)}"
            hint = _did_you_mean(value, re.findall(r"'([^']*)'", context["expected"]))
        elif kind == "string_pattern_mismatch":
            message, hint = f"{_described(value)} is not allowed", _PATTERN_HINTS.get(context["pattern"])
        elif kind in {"too_long", "string_too_long"}:
            message = f"is longer than {context['max_length']}"
        elif kind in _TYPE_NAMES:
            message = f"must be {_TYPE_NAMES[kind]}, not {_described(value)}"
        else:
            expected = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            message = f"must be {expected}, not {_described(value)}"
        if kind != "missing":
            # A name standing for a mapping (precision: fp61) has no line of its own below it.
            while key and key not in document.lines:
                key = key[:-1]
        yield document.line(key), key, message, hint


_MISSING: Final = "required key is missing"
_TYPE_NAMES: Final[Mapping[str, str]] = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_PATTERN_HINTS: Final[Mapping[str, str]] = {
    _FILE_NAME: "a plain name of letters, digits, '.', '_' and '-', not beginning with '.' or '-'",
    "^[0-9a-fA-F]{64}$": "64 hex digits, as sha256sum prints them",
}


def _described(value: object) -> str:
    """A YAML value in a few words."""
    if isinstance(value, str):
        return json.dumps(one_line(value), ensure_ascii=False)
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if value is None:
        return "null"
    return one_line(str(value).lower() if isinstance(value, bool) else str(value))


def _known_keys(key: KeyPath) -> str | None:
    """What an unknown key was meant to be, from the fields of the section that holds it."""
    section: type[BaseModel] | None = Recipe
    for part in key[:-1]:
        field = section.model_fields.get(str(part)) if section is not None else None
        section = next(_sections(field.annotation), None) if field is not None else None
    if section is None:
        return None
    names = [field.alias or name for name, field in section.model_fields.items()]
    return _did_you_mean(key[-1], names) or f"known keys: {', '.join(names)}"


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)


def _did_you_mean(value: object, names: Sequence[str]) -> str | None:
    close = difflib.get_close_matches(str(value)[:60], names, n=1)
    return f"did you mean {close[0]}?" if close else None


def resolve_profiles(recipe: Recipe, inputs: Sequence[TensorSpec]) -> tuple[Profile, ...]:
    """The recipe's profiles checked against the model's inputs, holding the dynamic inputs only.

    A dimension is dynamic when its size is a name or None; inputs that share a name must agree on
    its range.  An input of static shape may be listed with exactly that shape.  A model without
    dynamic inputs needs no profile and gets none.

    Raises RecipeError, naming file, line and key.
    """
    specs = {spec.name: spec for spec in inputs}
    dynamic = [spec for spec in inputs if not all(isinstance(size, int) for size in spec.shape)]
    if dynamic and not recipe.profiles:
        names = ", ".join(f"{spec.name} {_shape(spec)}" for spec in dynamic)
        raise recipe.error(
            ("profiles",),
            f"missing, but the model has dynamic inputs: {names}",
            hint="give [min, opt, max] of each",
        )
    return tuple(
        profile
        for index, ranges in enumerate(recipe.profiles)
        if (profile := _profile(recipe, index, ranges, specs, dynamic)).shapes
    )


def _profile(
    recipe: Recipe,
    index: int,
    ranges: Mapping[str, ShapeRange],
    specs: Mapping[str, TensorSpec],
    dynamic: Sequence[TensorSpec],
) -> Profile:
    sizes: dict[str, tuple[str, tuple[int, int, int]]] = {}
    for name, shapes in ranges.items():
        key = ("profiles", index, name)
        if name not in specs:
            raise recipe.error(
                key,
                "the model has no such input",
                hint=_did_you_mean(name, list(specs)) or f"its inputs are {', '.join(specs)}",
            )
        spec = specs[name]
        if len(shapes.min) != len(spec.shape):
            raise recipe.error(key, f"{len(shapes.min)} dimensions, but the model's {name} is {_shape(spec)}")
        for axis, size in enumerate(spec.shape):
            triple = (shapes.min[axis], shapes.opt[axis], shapes.max[axis])
            if isinstance(size, int):
                if triple != (size, size, size):
                    wrong = next(n for n in triple if n != size)
                    raise recipe.error(key, f"dimension {axis} is fixed at {size} in the model, not {wrong}")
            elif isinstance(size, str):
                other, agreed = sizes.setdefault(size, (name, triple))
                if agreed != triple:
                    raise recipe.error(
                        key,
                        f"{size} is {_triple(triple)} here but {_triple(agreed)} in {other}",
                        hint=f"{other} and {name} share {size}",
                    )
    for spec in dynamic:
        if spec.name not in ranges:
            raise recipe.error(
                ("profiles", index), f"input {spec.name} {_shape(spec)} is dynamic and has no shapes here"
            )
    return Profile({spec.name: ranges[spec.name] for spec in dynamic})


def _shape(spec: TensorSpec) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in spec.shape)})"


def _triple(sizes: tuple[int, int, int]) -> str:
    return "/".join(map(str, sizes))
