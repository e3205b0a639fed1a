"""Good builds of small models, made once and kept in a folder, for the fault and matrix tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import onnx_ir as ir
import onnxruntime

from engine_builder.compile.backend import BuildOptions, CompileRequest
from engine_builder.compile.isolated import compile_engine
from engine_builder.graph.find.linears import find_linears
from engine_builder.onnx_file import read_onnx
from engine_builder.opening import table_lengths
from engine_builder.precision.convert import convert
from engine_builder.precision.options import ConversionOptions, resolve_options
from engine_builder.quantize.activations import activation_amax
from engine_builder.quantize.samples import DataDigest, SyntheticData
from engine_builder.quantize.scales import (
    ZERO_FLOOR,
    Calibration,
    LinearRange,
    Scales,
    ScalesData,
    ScalesSample,
    ScalesSource,
    load_scales,
    save_scales,
    single,
)
from engine_builder.quantize.weight_amax import weight_amax
from engine_builder.recipe import Precision, Profile, ShapeRange
from engine_builder.sample import SampleSpec, Size, Spelling, write_sample
from engine_builder.source import Source, load_graph, open_source
from verify.evidence import EngineEvidence, GraphEvidence, judge
from verify.inputs import input_specs
from verify.layers import EngineLayers, load_layers
from verify.report import VerifyReport

PROFILES: Final = (
    Profile(
        {
            "x": ShapeRange((1, 256, 1), (1, 256, 1292), (1, 256, 4096)),
            "local_add_cond": ShapeRange((1, 257, 1), (1, 257, 1292), (1, 257, 4096)),
        }
    ),
)
"""The standard profile of SA3's runtime: 1 to 4096 latent frames, usually 1292."""

Kind = Literal["fp32", "fp16", "bf16", "fp8"]


def measured_scales(source: Source, path: Path, lengths: Sequence[int] = (64, 256)) -> Path:
    """A scales file of ``source`` whose ranges onnxruntime measured on drawn inputs, as ModelOpt would."""
    samples = SyntheticData(tuple(lengths)).samples(input_specs(read_onnx(source.path).model.graph))
    digest = DataDigest()
    for sample in samples:
        digest.update(sample.load())
    activations = activation_amax(source, samples)
    linears, _ = find_linears(load_graph(source).graph)
    save_scales(
        Scales(
            source=ScalesSource(name=source.path.name, sha256=source.sha256),
            calibration=Calibration(
                tool="onnxruntime",
                method="max",
                provider="cpu",
                versions={"onnxruntime": onnxruntime.__version__},
            ),
            data=ScalesData(synthetic=True, sha256=digest.hexdigest()),
            samples=tuple(ScalesSample(name=s.name, length=s.length, t=s.t) for s in samples),
            floored=(),
            missing={},
            linears={
                linear.name: LinearRange(
                    activation_amax=single(activations[linear.name] or ZERO_FLOOR),
                    weight_amax=single(weight_amax(linear).tensor or ZERO_FLOOR),
                )
                for linear in linears
            },
        ),
        path,
    )
    return path


@dataclass(frozen=True)
class Converted:
    """A good conversion: its file, what it was converted to, and its fp8 linears."""

    path: Path
    options: ConversionOptions
    fp8_linears: tuple[str, ...]


class Workshop:
    """One sample model with everything that is made of it; ``folder`` keeps it from run to run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._converted: dict[str, Converted] = {}

    @cached_property
    def source(self) -> Source:
        """The sample: two blocks of 128 channels with standard attention, in TorchScript's spelling."""
        return open_source(self.sample("source"))

    def sample(self, name: str, spec: SampleSpec | None = None) -> Path:
        path = self.folder / f"{name}.onnx"
        if not path.exists():
            write_sample(spec or SampleSpec(Size.TINY, Spelling.TORCHSCRIPT17, False), path)
        return path

    @cached_property
    def scales(self) -> Path:
        path = self.folder / "scales.json"
        return path if path.exists() else measured_scales(self.source, path)

    def convert(
        self, kind: Kind, name: str | None = None, source: Source | None = None, **options: Any
    ) -> Converted:
        """``source``, by default the sample, as ``kind`` with the precision's ``options``."""
        label = name or kind
        if label not in self._converted:
            resolved = resolve_options(Precision(recipe=kind, **options), generic=False)
            path = self.folder / f"{label}.converted.onnx"
            given = source or self.source
            ranges = load_scales(self.scales).ranges("per_tensor") if kind == "fp8" else None
            made = convert(load_graph(given), path, resolved, table_lengths(given, PROFILES), ranges)
            self._converted[label] = Converted(path, resolved, made.fp8_linears)
        return self._converted[label]

    def engine(self, onnx: Path, name: str, profiles: tuple[Profile, ...] = PROFILES, sm: int = 89) -> Path:
        """The engine of ``onnx`` by TensorRT-RTX; its layer table is ``<name>.layers.txt`` beside it."""
        engine = self.folder / f"{name}.trt"
        table = self.folder / f"{name}.layers.txt"
        if not (engine.exists() and table.exists()):
            compiled = compile_engine(
                "tensorrt_rtx", CompileRequest(onnx, engine, sm, BuildOptions(1 << 34), profiles)
            )
            table.write_text(compiled.plan.layer_table)
            facts = {"sha256": compiled.plan.sha256, "bytes": compiled.plan.size, "sm": sm}
            engine.with_suffix(".json").write_text(json.dumps({**facts, "version": compiled.plan.version}))
        return engine

    def layers(self, onnx: Path, name: str, profiles: tuple[Profile, ...] = PROFILES) -> EngineLayers:
        """The layers of the engine of ``onnx``."""
        self.engine(onnx, name, profiles)
        return load_layers(self.folder / f"{name}.layers.txt")

    def good_layers(self, kind: Kind) -> EngineLayers:
        return self.layers(self.convert(kind).path, kind)


def judge_graph(
    onnx: Path,
    promised: Converted,
    layers: EngineLayers | None,
    *,
    profiles: tuple[Profile, ...] = PROFILES,
    contract: Source | None = None,
    counts: Mapping[str, int] | None = None,
) -> VerifyReport:
    """The report on an engine with ``layers`` (None: on the graph alone) that ``onnx`` is said to be of."""
    return judge(
        label=onnx.name,
        engine=None if layers is None else EngineEvidence(layers.layers, layers.io, layers.source),
        graph=GraphEvidence(ir.load(onnx), promised.options, promised.fp8_linears),
        inputs=None if contract is None else contract.inputs,
        outputs=None if contract is None else contract.outputs,
        profiles=profiles,
        source_counts=counts,
    )
