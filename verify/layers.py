"""One record per engine layer, whichever of TensorRT's spellings the layer table came in.

Sources understood: the table that the builder prints at VERBOSE severity (its message begins
``Layers:``), and the engine inspector's JSON of TensorRT 8.x and 10.x (one ``Format/Datatype``
key), of the releases after it (``Datatype`` and ``Format``) and of 11.x (``I/O Tensors`` in
place of ``Bindings``).

A layer's name is cut short when many operators fuse, and the types at its boundary say nothing
about the arithmetic inside; the ONNX nodes that its ``Metadata`` lists are exact.  A promise
about a node is therefore checked in the layers that :func:`index_by_node` gives for it.  Not
all of them compute the node: kernels that only move its data carry its name too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_builder.bounded_file import read_bounded
from engine_builder.errors import SourceModelError, VerificationError

UNKNOWN: Final = "unknown"
FLOATING: Final = frozenset({"fp32", "fp16", "bf16", "fp8", "fp4"})

# TensorRT's spellings in lower case.  Layer tables write Half, format texts write FP16.
_DTYPES: Final[Mapping[str, str]] = {
    "float": "fp32",
    "fp32": "fp32",
    "half": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp4": "fp4",
    "e8m0": "e8m0",
    "int64": "int64",
    "int32": "int32",
    "int8": "int8",
    "uint8": "uint8",
    "int4": "int4",
    "bool": "bool",
}

# Myelin's own kernel names: _gemm_mha_v2_myl1_24, _gemv_mha_v1 where one query row is known.
# Anchored, because a plain GEMM is named after its ONNX node, as in /layers.0/mha/key/MatMul.
_FUSED_ATTENTION: Final = re.compile(r"_*(?:mye\d+_)?(?:gem[mv]_|f)?mha(?:_|$)")
_INDICES: Final = frozenset({"int32", "int64", "bool"})
_FUSED_ATTENTION_TACTIC: Final = re.compile(r"(?:^|_)f?mha(?:_|$)")
# __myl_FcCastMulAdd_myl1_24: abbreviated operators in the order in which they run.
_GENERATED_KERNEL: Final = re.compile(r"__myl_((?:[A-Z][a-z0-9]*)+)")
_OPERATOR: Final = re.compile(r"[A-Z][a-z0-9]*")
_MOVES: Final = frozenset({"Move", "Repl", "Conc", "Slic", "Resh", "Tran"})
_GEMM_TYPE: Final = re.compile(r"gemm|matrixmultiply|fullyconnected", re.IGNORECASE)


class NotDetailed(VerificationError):
    """The engine was built without DETAILED profiling verbosity: its layers are bare names."""

    kind = "not verifiable"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor at the boundary of a layer.

    ``dtype`` is one of fp32, fp16, bf16, fp8, fp4, e8m0, int64, int32, int8, uint8, int4, bool
    and unknown; ``shape`` has -1 for a dynamic dimension; ``format`` is TensorRT's own text.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    format: str = ""

    @property
    def elements(self) -> int:
        """Number of elements, a dynamic dimension counted as one."""
        return math.prod(abs(d) for d in self.shape)


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer of an engine, with the names of the ONNX nodes that were fused into it."""

    name: str
    layer_type: str
    inputs: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()
    constants: tuple[TensorRecord, ...] = ()
    tactic: str = ""
    onnx_nodes: tuple[str, ...] = ()

    @property
    def operators(self) -> tuple[str, ...]:
        """TensorRT's abbreviations of the operators in a generated kernel, from its name.

        Empty for every other layer; the last one is ``Etc`` where TensorRT cut the name.
        """
        match = _GENERATED_KERNEL.match(self.name)
        return tuple(_OPERATOR.findall(match.group(1))) if match else ()

    @property
    def only_moves_data(self) -> bool:
        """True for a generated kernel that copies, pads, slices or transposes, and no more."""
        return bool(self.operators) and _MOVES.issuperset(self.operators)

    @property
    def is_fused_attention(self) -> bool:
        """True for the kernel that holds a whole QK^T, softmax, PV."""
        return bool(_FUSED_ATTENTION.match(self.name) or _FUSED_ATTENTION_TACTIC.search(self.tactic))

    @property
    def qkv_dtypes(self) -> tuple[str, ...]:
        """Types of q, k and v of a fused attention kernel; empty for any other layer.

        They tell the type of the attention.  The output does not: it turns FP8 as soon as the
        kernel absorbs the next linear's quantize.  A mask, if there is one, stands before v; where
        a kernel guards against rows without keys, integers that it works with come behind v.
        """
        data = [t.dtype for t in self.inputs if t.dtype not in _INDICES]
        if not self.is_fused_attention or len(data) < 3:
            return ()
        return data[0], data[1], data[-1]

    @property
    def is_gemm(self) -> bool:
        """True for a matrix product on tensor cores, alone or with a fused epilogue (``Fc``)."""
        if self.is_fused_attention:
            return False
        return bool(_GEMM_TYPE.search(self.layer_type)) or "Fc" in self.operators

    @property
    def is_gemv(self) -> bool:
        """True for the product of a single row, which TensorRT generates as Mul and Sum."""
        pairs = zip(self.operators, self.operators[1:], strict=False)
        return not self.is_gemm and ("Mul", "Sum") in pairs

    @property
    def product_dtype(self) -> str | None:
        """Type of the operands of a GEMM or GEMV; None for any other layer.

        The weight is the largest constant; a product of two activations, or a table that lists
        no constants, is judged by the first floating input.
        """
        if not (self.is_gemm or self.is_gemv):
            return None
        weights = [c for c in self.constants if len(c.shape) > 1 and c.dtype in FLOATING]
        if weights:
            return max(weights, key=lambda c: c.elements).dtype
        return next((t.dtype for t in self.inputs if t.dtype in FLOATING), UNKNOWN)

    @property
    def casts_before_product(self) -> bool:
        """True for a generated kernel that casts its operands and multiplies what comes of it.

        Stored in FP8 and computed in another type: what becomes of a weight with a scale per input
        channel (``__myl_CastMulCastCastMulFc``, measured).
        """
        return "Fc" in self.operators and "Cast" in self.operators[: self.operators.index("Fc")]

    @property
    def reads_fp8(self) -> bool:
        """True when an input or a constant is FP8; an FP8 output alone is only a quantize."""
        return any(t.dtype == "fp8" for t in self.inputs + self.constants)

    @property
    def touches_fp8(self) -> bool:
        """True when any tensor of the layer is FP8."""
        return self.reads_fp8 or any(t.dtype == "fp8" for t in self.outputs)


@dataclass(frozen=True, slots=True)
class ProfileRange:
    """The shapes that one optimization profile allows for one input."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineIO:
    """An input or output of the engine: the part that the runtime relies on.

    ``mode`` is input, output or unknown; ``profiles`` has one range per optimization profile and
    is empty for outputs and for sources that do not print it (``Bindings``).
    """

    name: str
    mode: str
    dtype: str
    shape: tuple[int, ...]
    profiles: tuple[ProfileRange, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLayers:
    """The layers of one engine; ``source`` names the spelling that they were read from."""

    layers: tuple[LayerRecord, ...]
    io: tuple[EngineIO, ...]
    source: str


def index_by_node(layers: Iterable[LayerRecord]) -> dict[str, tuple[LayerRecord, ...]]:
    """Map each ONNX node name to the layers whose metadata lists it, in engine order."""
    index: dict[str, list[LayerRecord]] = {}
    for layer in layers:
        for node in layer.onnx_nodes:
            index.setdefault(node, []).append(layer)
    return {node: tuple(found) for node, found in index.items()}


def normalise_dtype(text: str) -> str:
    """Return the one spelling used here for a type, or ``unknown``.

    Accepts a bare type (``Half``) and an 8.x or 10.x text that holds one (``Row major linear
    FP16 format``).  ``N/A due to dynamic shapes`` is unknown.
    """
    for word in re.findall(r"\w+", text):
        if dtype := _DTYPES.get(word.lower()):
            return dtype
    return UNKNOWN


def parse_metadata(text: str) -> tuple[str, ...]:
    """Return the ONNX node names of a ``Metadata`` value, in order, each once.

    Entries look like ``[ONNX Layer: name]`` and follow one another directly or with 0x1e or
    0x1f between them; TensorRT may append a remark (``__gemm_from_conv1x1``).  Names may hold
    brackets, so that an entry ends at the last one before the next entry.

    Raises ValueError when an entry is not closed.
    """
    names: dict[str, None] = {}
    for entry in text.split("[ONNX Layer: ")[1:]:
        end = entry.rfind("]")
        if end < 0:
            raise ValueError(f"metadata entry {entry[:60]!r} is not closed")
        names[entry[:end]] = None
    return tuple(names)


MAX_BYTES: Final = 512 << 20
"""Of a layer dump or build log; the verbose log of the medium model's build has some tens of MB."""


def load_layers(path: Path) -> EngineLayers:
    """Read a layer dump of any known spelling.

    Raises SourceModelError when the file is missing, cut short or not a layer dump, and
    NotDetailed when it lists bare layer names.
    """
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8")
    except FileNotFoundError as error:
        raise SourceModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise _foreign(str(path)) from error
    if text.lstrip()[:1] in ("{", "["):
        return parse_inspector_json(text, where=str(path))
    return parse_build_log(text, where=str(path))


# --- the builder's text table ---------------------------------------------------------------

_LAYER_LINE: Final = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<type>[^,]*)")
_SECTION: Final = re.compile(r", (?P<key>Inputs|Outputs|Constants): \[ ?")
_TENSOR: Final = re.compile(
    r"\{ Name: (?P<name>.*?), (?:Location: \w+, )?Dimensions: \[(?P<shape>[-\d, ]*)\]"
    r"(?:, Strides: \[[^]]*\], StrideOrder: \[[^]]*\])?"
    r"(?:, Datatype: (?P<dtype>[^,{}]*), Format: |, Format/Datatype: )(?P<format>[^{}]*?) ?\}(?:, )?"
)
_METADATA: Final = ", Metadata: "
"""Before the last entry of a layer's line; one without it, among others that have it, was cut short."""
_TACTIC: Final = re.compile(r", TacticName: (?P<tactic>[^,]*)")
_IO_LINE: Final = re.compile(
    r"\s*Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>[^,]*), "
    r"Dimensions: \[(?P<shape>[-\d, ]*)\]"
)
_IO_RANGE: Final = re.compile(
    r"MinShape: \[(?P<min>[-\d, ]*)\], OptShape: \[(?P<opt>[-\d, ]*)\], MaxShape: \[(?P<max>[-\d, ]*)\]"
)
_SECTION_TITLES: Final = ("I/O Tensors:", "Bindings:", "Engine Metadata:")


def parse_build_log(text: str, *, where: str | None = None) -> EngineLayers:
    """Read the layer table out of the builder's message, of a whole log, or of a bare table.

    In a log with several tables the last one counts.  Raises as :func:`load_layers` does.
    """
    _, title, table = text.rpartition("Layers:\n")
    lines = (table if title else text).splitlines()
    layers: list[LayerRecord] = []
    io: list[EngineIO] = []
    ended: list[bool] = []
    bare = 0
    section = "Layers:"
    for line in lines:
        if line.strip() in _SECTION_TITLES:
            section = line.strip()
        elif section == "I/O Tensors:" and (entry := _IO_LINE.match(line)):
            io.append(_io_from_line(entry, line))
        elif section == "Layers:" and line.startswith("Name: "):
            layers.append(_layer_from_line(line, len(layers), where))
            ended.append(_METADATA in line)
        elif section == "Layers:" and not line.strip():
            if layers or bare:
                section = ""
        elif section == "Layers:" and title and not layers:
            bare += 1
    if not layers and bare:
        raise _not_detailed(where)
    if not layers:
        raise _foreign(where)
    if any(ended) and not all(ended):
        raise _damaged(f"layer {ended.index(False)} ends early", where)
    return EngineLayers(tuple(layers), tuple(io), "builder log")


def _layer_from_line(line: str, index: int, where: str | None) -> LayerRecord:
    head = _LAYER_LINE.match(line)
    if head is None:
        raise _damaged(f"layer {index} ends early", where)
    position = head.end()
    tensors: dict[str, tuple[TensorRecord, ...]] = {}
    while section := _SECTION.match(line, position):
        position = section.end()
        found: list[TensorRecord] = []
        while tensor := _TENSOR.match(line, position):
            found.append(_tensor_from_match(tensor))
            position = tensor.end()
        if line[position : position + 1] != "]":
            raise _damaged(f"layer {index} ({head['name']}) has an unreadable {section['key']} list", where)
        position += 1
        tensors[section["key"]] = tuple(found)
    rest, _, metadata = line[position:].partition(_METADATA)
    tactic = _TACTIC.search(rest)
    try:
        nodes = parse_metadata(metadata)
    except ValueError as error:
        raise _damaged(f"layer {index} ({head['name']}): {error}", where) from error
    if "Inputs" not in tensors or "Outputs" not in tensors:
        raise _damaged(f"layer {index} ({head['name']}) lacks its inputs or outputs", where)
    return LayerRecord(
        name=head["name"],
        layer_type=head["type"],
        inputs=tensors["Inputs"],
        outputs=tensors["Outputs"],
        constants=tensors.get("Constants", ()),
        tactic=tactic["tactic"] if tactic else "",
        onnx_nodes=nodes,
    )


def _tensor_from_match(match: re.Match[str]) -> TensorRecord:
    dtype = normalise_dtype(match["dtype"] or match["format"])
    return TensorRecord(match["name"], dtype, _shape(match["shape"]), match["format"])


def _io_from_line(match: re.Match[str], line: str) -> EngineIO:
    ranges = tuple(
        ProfileRange(_shape(r["min"]), _shape(r["opt"]), _shape(r["max"])) for r in _IO_RANGE.finditer(line)
    )
    return EngineIO(
        name=match["name"],
        mode=_mode(match["mode"]),
        dtype=normalise_dtype(match["dtype"]),
        shape=_shape(match["shape"]),
        profiles=ranges,
    )


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(",") if d.strip())


# --- the inspector's JSON -------------------------------------------------------------------


def parse_inspector_json(text: str, *, where: str | None = None) -> EngineLayers:
    """Read the engine inspector's JSON of TensorRT 8.x to 11.x.

    Raises as :func:`load_layers` does.
    """
    try:
        # TensorRT leaves the separators 0x1e and 0x1f unescaped inside strings.
        document = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise _damaged(f"not valid JSON at {at} ({error.msg}): it may be cut short", where) from error
    except (ValueError, RecursionError) as error:  # a number of too many digits; nested too deeply
        raise _damaged(f"JSON that no inspector writes ({error})", where) from error
    entries = document.get("Layers") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise _foreign(where)
    if any(isinstance(entry, str) for entry in entries):
        raise _not_detailed(where)
    try:
        layers = tuple(_layer_from_json(entry, index, where) for index, entry in enumerate(entries))
        io = _io_from_json(document, layers)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise _damaged(f"JSON of an unknown layout ({type(error).__name__}: {error})", where) from error
    return EngineLayers(layers, io, "inspector JSON")


def _layer_from_json(entry: Mapping[str, Any], index: int, where: str | None) -> LayerRecord:
    missing = [key for key in ("Name", "LayerType", "Inputs", "Outputs") if key not in entry]
    if missing:
        raise _damaged(f"layer {index} has no {' and no '.join(missing)}", where)
    # Layers outside Myelin describe their weights by type and count only.
    weights = [
        TensorRecord(key, normalise_dtype(entry[key]["Type"]), (int(entry[key]["Count"]),))
        for key in ("Weights", "Bias")
        if isinstance(entry.get(key), dict)
    ]
    return LayerRecord(
        name=str(entry["Name"]),
        layer_type=str(entry["LayerType"]),
        inputs=tuple(map(_tensor_from_json, entry["Inputs"])),
        outputs=tuple(map(_tensor_from_json, entry["Outputs"])),
        constants=tuple(map(_tensor_from_json, entry.get("Constants", ()))) + tuple(weights),
        tactic=str(entry.get("TacticName", "")),
        onnx_nodes=parse_metadata(str(entry.get("Metadata", ""))),
    )


def _tensor_from_json(entry: Mapping[str, Any]) -> TensorRecord:
    combined = str(entry.get("Format/Datatype", ""))
    return TensorRecord(
        name=str(entry["Name"]),
        dtype=normalise_dtype(str(entry.get("Datatype", combined))),
        shape=tuple(int(d) for d in entry.get("Dimensions", ())),
        format=str(entry.get("Format", combined)),
    )


def _io_from_json(document: Mapping[str, Any], layers: tuple[LayerRecord, ...]) -> tuple[EngineIO, ...]:
    if "I/O Tensors" in document:
        return tuple(
            EngineIO(
                name=str(entry["Name"]),
                mode=_mode(str(entry["IOMode"])),
                dtype=normalise_dtype(str(entry["DataType"])),
                shape=tuple(int(d) for d in entry["Dimensions"]),
                profiles=tuple(
                    ProfileRange(tuple(p["MinShape"]), tuple(p["OptShape"]), tuple(p["MaxShape"]))
                    for p in entry.get("ProfileInfo", ())
                    if "MinShape" in p
                ),
            )
            for entry in document["I/O Tensors"]
        )
    # Bindings are names only, repeated for every further profile as "x [profile 1]".
    names = [n for n in document.get("Bindings", ()) if not re.search(r" \[profile \d+\]$", n)]
    read = {t.name: t for layer in reversed(layers) for t in layer.inputs}
    written = {t.name: t for layer in layers for t in layer.outputs}
    return tuple(_io_from_binding(name, read, written) for name in names)


def _io_from_binding(
    name: str, read: Mapping[str, TensorRecord], written: Mapping[str, TensorRecord]
) -> EngineIO:
    tensor = written.get(name) or read.get(name)
    if tensor is None:
        return EngineIO(name, UNKNOWN, UNKNOWN, ())
    return EngineIO(name, "output" if name in written else "input", tensor.dtype, tensor.shape)


def _mode(text: str) -> str:
    mode = text.lower()
    return mode if mode in ("input", "output") else UNKNOWN


# --- outcomes -------------------------------------------------------------------------------


def _damaged(message: str, where: str | None) -> SourceModelError:
    return SourceModelError(f"damaged layer dump: {message}", where=where)


def _foreign(where: str | None) -> SourceModelError:
    return SourceModelError(
        "this is no TensorRT layer dump: no layer was found in it",
        where=where,
        hint="expected the engine inspector's JSON, or a builder log with a 'Layers:' table",
    )


def _not_detailed(where: str | None) -> NotDetailed:
    return NotDetailed(
        "the layers are bare names: the engine was built without detailed profiling verbosity",
        where=where,
        hint="build it again with ProfilingVerbosity.DETAILED, which costs nothing at run time",
    )
