"""How each kind of fault goes through a build or through ``verify``, and what stops it there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir
import yaml
from onnx import TensorProto, numpy_helper

from benchmarks import damage
from benchmarks.workshop import PROFILES, Converted, Kind, Workshop, judge_graph
from engine_builder.errors import BuilderError, VerificationError
from engine_builder.graph.find import find_structures
from engine_builder.pipeline import build
from engine_builder.precision.convert import convert
from engine_builder.quantize.scales import load_scales
from engine_builder.recipe import Expect, load_recipe
from engine_builder.sample import SampleSpec, Size, Spelling
from engine_builder.sample.spec import Dimensions
from engine_builder.sample.torchscript import draft
from engine_builder.sample.write import write_draft
from engine_builder.source import load_graph, open_source
from engine_builder.stage_runner import Settings
from verify.evidence import judge_build
from verify.examine import Subject, examine
from verify.fidelity import sweep
from verify.layers import EngineLayers, LayerRecord, TensorRecord
from verify.report import BuilderEntry, EngineEntry, VerifyReport


@dataclass(frozen=True)
class Caught:
    """What stopped a fault: a check of the report or an error, what it named, and the exit code.

    ``named`` holds the subjects and nodes of what failed; for an error it is its whole text.
    """

    by: tuple[str, ...]
    named: tuple[str, ...]
    exit_code: int
    text: str
    innocent: tuple[str, ...] = ()
    """Failed promises about nodes that were not damaged, where the damage is known node by node."""


@dataclass(frozen=True)
class Fault:
    """A way to break a build: what it is, what must catch it, and what must be named.

    ``by`` is a check's name or an error's kind; ``names`` is one of the names or part of the text.
    ``fast`` is False for one that needs an engine or the full length.
    """

    name: str
    group: str
    by: str
    names: str
    exit_code: int
    make: Callable[[Workshop], Caught]
    fast: bool = True


# --- how damage goes through a build -----------------------------------------------------------


def _from_report(report: VerifyReport, damaged: Sequence[str] = ()) -> Caught:
    failed = [check for check in report.checks if check.status in ("failed", "not verifiable")]
    known = set(damaged)
    innocent = [
        f"{check.name}: {failure.subject}"
        for check in failed
        for failure in check.failures
        if damaged and not known & {failure.subject, *failure.nodes}
    ]
    return Caught(
        by=tuple(check.name for check in failed),
        named=tuple(
            dict.fromkeys(n for check in failed for f in check.failures for n in (f.subject, *f.nodes))
        ),
        exit_code=0 if report.verdict == "passed" else VerificationError.exit_code,
        text="; ".join(report.reasons),
        innocent=tuple(innocent),
    )


def _from_error(action: Callable[[], object]) -> Caught:
    try:
        action()
    except BuilderError as error:
        return Caught((error.kind,), (), error.exit_code, str(error))
    return Caught((), (), 0, "nothing was said")


def in_graph(kind: Kind, function: damage.Damage, **options: Any) -> Callable[[Workshop], Caught]:
    """A converter's fault: the graph's own types break the promises of its precision."""

    def make(shop: Workshop) -> Caught:
        good = shop.convert(kind, **options)
        out = shop.folder / "damaged.onnx"
        names = function(good.path, out)
        return _from_report(judge_graph(out, good, None), names)

    return make


def in_engine(kind: Kind, function: damage.Damage, name: str) -> Callable[[Workshop], Caught]:
    """An engine built from a damaged graph, presented with the good one."""

    def make(shop: Workshop) -> Caught:
        good = shop.convert(kind)
        out = shop.folder / f"{name}.onnx"
        function(good.path, out)
        return _from_report(judge_graph(good.path, good, shop.layers(out, name)))

    return make


def at_gate(
    kind: Kind, function: damage.Damage, min_cosine: float, length: int = 64
) -> Callable[[Workshop], Caught]:
    """A converter's fault that no type shows: the sweep against fp32 fails and the node is looked for."""

    def make(shop: Workshop) -> Caught:
        good = shop.convert(kind)
        out = shop.folder / "damaged.onnx"
        function(good.path, out)
        found = sweep(shop.source.path, out, lengths=[length], t=[1.0], min_cosine=min_cosine)
        report = judge_build(
            label=out.name,
            sm=89,
            converted=out,
            options=good.options,
            fp8_linears=good.fp8_linears,
            source=shop.source,
            profiles=PROFILES,
            expect=Expect(),
            backend="tensorrt_rtx",
            engine=None,
            layer_table=None,
            fidelity=found.to_json(),
            conversion={},
        )
        return _from_report(report)

    return make


def of_other(
    presented: Kind, built: Callable[[Workshop], tuple[Path, str]], **options: Any
) -> Callable[[Workshop], Caught]:
    """An engine of another graph, presented with a good conversion to ``presented``."""

    def make(shop: Workshop) -> Caught:
        good = shop.convert(presented, **options)
        onnx, name = built(shop)
        return _from_report(judge_graph(good.path, good, shop.layers(onnx, name), contract=shop.source))

    return make


def same_model(kind: Kind, name: str, **options: Any) -> Callable[[Workshop], tuple[Path, str]]:
    return lambda shop: (shop.convert(kind, name, **options).path, name)


def another_model(name: str, spec: SampleSpec) -> Callable[[Workshop], tuple[Path, str]]:
    def built(shop: Workshop) -> tuple[Path, str]:
        return shop.convert("fp16", name, open_source(shop.sample(f"{name}.source", spec))).path, name

    return built


def of_depth(depth: int) -> Callable[[Workshop], tuple[Path, str]]:
    def built(shop: Workshop) -> tuple[Path, str]:
        name = f"depth_{depth}"
        path = shop.folder / f"{name}.source.onnx"
        if not path.exists():
            write_draft(draft(Dimensions(128, depth, 2, False)), 0, path)
        return shop.convert("fp16", name, open_source(path)).path, name

    return built


# --- layers and reports ------------------------------------------------------------------------


def in_layers(
    kind: Kind, change: Callable[[EngineLayers], EngineLayers], **options: Any
) -> Callable[[Workshop], Caught]:
    """An engine whose layer table differs from what the graph promises in one place."""

    def make(shop: Workshop) -> Caught:
        good = shop.convert(kind)
        layers = change(shop.good_layers(kind))
        return _from_report(judge_graph(good.path, good, layers, contract=shop.source, **options))

    return make


def io_changed(change: Callable[[Any], Any], name: str) -> Callable[[EngineLayers], EngineLayers]:
    def edit(table: EngineLayers) -> EngineLayers:
        return replace(table, io=tuple(change(io) if io.name == name else io for io in table.io))

    return edit


def io_missing(name: str) -> Callable[[EngineLayers], EngineLayers]:
    return lambda table: replace(table, io=tuple(io for io in table.io if io.name != name))


def layer_changed(
    change: Callable[[LayerRecord], LayerRecord], chosen: Callable[[LayerRecord], bool]
) -> Callable[[EngineLayers], EngineLayers]:
    """Changes the first layer that is ``chosen``."""

    def edit(table: EngineLayers) -> EngineLayers:
        index = next(i for i, layer in enumerate(table.layers) if chosen(layer))
        layers = list(table.layers)
        layers[index] = change(layers[index])
        return replace(table, layers=tuple(layers))

    return edit


def retyped(tensors: tuple[TensorRecord, ...], index: int, dtype: str) -> tuple[TensorRecord, ...]:
    return tuple(replace(t, dtype=dtype) if i == index else t for i, t in enumerate(tensors))


def _good_report(shop: Workshop) -> tuple[Path, Path]:
    """The fp16 engine and the report that a build writes beside it."""
    good = shop.convert("fp16")
    engine = shop.engine(good.path, "fp16")
    facts = json.loads(engine.with_suffix(".json").read_text())
    report = judge_graph(good.path, good, shop.good_layers("fp16"), contract=shop.source)
    report = report.model_copy(
        update={
            "engine_file": EngineEntry(file=engine.name, sha256=facts["sha256"], bytes=facts["bytes"]),
            "builder": BuilderEntry(backend="tensorrt_rtx", version=facts["version"], sm=facts["sm"]),
        }
    )
    path = shop.folder / "fp16.verify.json"
    path.write_text(report.to_json())
    return engine, path


def by_report(
    change_engine: Callable[[Path, Path], object] | None = None,
    change_report: Callable[[str], str] | None = None,
    recipe: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[[Workshop], Caught]:
    """``verify ENGINE --report R [--recipe]`` on a machine without a GPU."""

    def make(shop: Workshop) -> Caught:
        engine, report = _good_report(shop)
        if change_engine is not None:
            changed = shop.folder / "changed.trt"
            change_engine(engine, changed)
            engine = changed
        if change_report is not None:
            other = shop.folder / "changed.verify.json"
            other.write_text(change_report(report.read_text()))
            report = other
        asked = None if recipe is None else _recipe(shop, recipe)
        return _examined(Subject(engine=engine, report=report, recipe=asked))

    return make


def by_layers(
    write: Callable[[Workshop, Path], object], *, onnx: bool = True, report: bool = False
) -> Callable[[Workshop], Caught]:
    """``verify --layers FILE [--onnx ...] [--report ...]``."""

    def make(shop: Workshop) -> Caught:
        path = shop.folder / "given.layers"
        write(shop, path)
        recorded = _good_report(shop)[1] if report else None
        converted = shop.convert("fp16").path if onnx else None
        return _examined(Subject(layers=path, onnx=converted, report=recorded))

    return make


def _examined(subject: Subject) -> Caught:
    try:
        return _from_report(examine(subject))
    except BuilderError as error:
        return _from_error(partial(_raise, error))


def _raise(error: BuilderError) -> None:
    raise error


def _recipe(shop: Workshop, change: Callable[[dict[str, Any]], None]) -> Path:
    """A recipe of the fp16 engine, changed."""
    recipe: dict[str, Any] = {
        "schema": "sa3-builder/1",
        "model": {"name": "dit", "onnx": str(shop.source.path)},
        "precision": "fp16",
        "profiles": [
            {name: [list(s) for s in (r.min, r.opt, r.max)] for name, r in PROFILES[0].shapes.items()}
        ],
        "target": {"backend": "tensorrt_rtx", "sm": 89},
        "output": {"dir": str(shop.folder / "out")},
    }
    change(recipe)
    path = shop.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def _table(shop: Workshop) -> str:
    shop.good_layers("fp16")
    return (shop.folder / "fp16.layers.txt").read_text()


def as_json(shop: Workshop) -> str:
    """The fp16 engine's layers in the spelling of the 11.x inspector."""
    table = shop.good_layers("fp16")

    def tensor(t: TensorRecord) -> dict[str, Any]:
        return {"Name": t.name, "Dimensions": list(t.shape), "Datatype": t.dtype, "Format": t.format}

    return json.dumps(
        {
            "Layers": [
                {
                    "Name": layer.name,
                    "LayerType": layer.layer_type,
                    "Inputs": [tensor(t) for t in layer.inputs],
                    "Outputs": [tensor(t) for t in layer.outputs],
                    "Constants": [tensor(t) for t in layer.constants],
                    "TacticName": layer.tactic,
                    "Metadata": "\x1f".join(f"[ONNX Layer: {node}]" for node in layer.onnx_nodes),
                }
                for layer in table.layers
            ],
            "I/O Tensors": [
                {
                    "Name": io.name,
                    "IOMode": io.mode,
                    "DataType": io.dtype,
                    "Dimensions": list(io.shape),
                    "ProfileInfo": [
                        {"MinShape": list(p.min), "OptShape": list(p.opt), "MaxShape": list(p.max)}
                        for p in io.profiles
                    ],
                }
                for io in table.io
            ],
        }
    )


def cut_line(shop: Workshop, path: Path) -> None:
    text = _table(shop)
    path.write_text(text[: text.index(", Metadata", len(text) // 2) - 40])


def cut_table(shop: Workshop, path: Path) -> None:
    lines = _table(shop).splitlines()
    path.write_text("\n".join(lines[: len(lines) // 2]))


def bare_names(shop: Workshop, path: Path) -> None:
    names = [layer["Name"] for layer in json.loads(as_json(shop))["Layers"]]
    path.write_text(json.dumps({"Layers": names, "Bindings": ["x", "velocity"]}))


def bare_table(shop: Workshop, path: Path) -> None:
    names = re.findall(r"^Name: (.*?), LayerType", _table(shop), re.MULTILINE)
    path.write_text("Layers:\n" + "\n".join(names) + "\n\n")


def other_layers(shop: Workshop, path: Path) -> None:
    shop.good_layers("bf16")
    path.write_text((shop.folder / "bf16.layers.txt").read_text())


def flip_byte(engine: Path, out: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    out.write_bytes(data)


def version_2(text: str) -> str:
    return text.replace("sa3-builder/verify/1", "sa3-builder/verify/2")


# --- scales, sources, recipes ------------------------------------------------------------------


def by_scales(change: Callable[[str], str]) -> Callable[[Workshop], Caught]:
    """A scales file that is wrong in itself."""

    def make(shop: Workshop) -> Caught:
        path = shop.folder / "changed.scales.json"
        path.write_text(change(shop.scales.read_text()))
        return _from_error(partial(load_scales, path))

    return make


def first_range(number: str) -> Callable[[str], str]:
    return lambda text: re.sub(r'("activation_amax": )[\d.e+-]+', rf"\g<1>{number}", text, count=1)


def stale_scales(shop: Workshop) -> Caught:
    """The model was trained on; the scales were measured before."""
    model = onnx.load(shop.source.path)
    weight = next(t for t in model.graph.initializer if t.name == "dit.transformer.memory_tokens")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    path = shop.folder / "retrained.onnx"
    onnx.save(model, path)
    return _from_error(lambda: load_scales(shop.scales).require_source(open_source(path).sha256))


def foreign_scales(shop: Workshop) -> Caught:
    other = open_source(shop.sample("other", SampleSpec(Size.TINY, Spelling.DYNAMO20, True)))
    return _from_error(lambda: load_scales(shop.scales).require_source(other.sha256))


def missing_scale(shop: Workshop) -> Caught:
    text = shop.scales.read_text()
    path = shop.folder / "changed.scales.json"
    path.write_text(re.sub(rf'\n *"{re.escape(damage.TO_OUT)}": .*', "", text, count=1))
    ranges = load_scales(path).ranges("per_tensor")
    good = shop.convert("fp8")

    def go() -> None:
        convert(load_graph(shop.source), shop.folder / "unscaled.onnx", good.options, [_SHAPES], ranges)

    return _from_error(go)


_SHAPES: Final = {name: shape.max for name, shape in PROFILES[0].shapes.items()}


def by_source(change: Callable[[onnx.ModelProto], None], kind: Kind = "fp16") -> Callable[[Workshop], Caught]:
    """A source model that is opened, checked and converted."""

    def make(shop: Workshop) -> Caught:
        model = onnx.load(shop.source.path)
        change(model)
        path = shop.folder / "changed.onnx"
        onnx.save(model, path)
        options = shop.convert(kind).options

        def go() -> None:
            convert(load_graph(open_source(path)), shop.folder / "changed.converted.onnx", options, [_SHAPES])

        return _from_error(go)

    return make


def in_weight(number: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        weight = next(t for t in model.graph.initializer if t.name == "dit.preprocess_conv.weight")
        array = numpy_helper.to_array(weight).copy()
        array[0, 0, 0] = number
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))

    return change


def fp16_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16


def without_norms(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Pow":
            node.op_type = "Add"


def truncated_source(shop: Workshop) -> Caught:
    path = shop.folder / "cut.onnx"
    data = shop.source.path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return _from_error(lambda: open_source(path))


def foreign_source(shop: Workshop) -> Caught:
    return _from_error(lambda: open_source(shop.source.path, sha256="0" * 64))


def by_recipe(change: Callable[[dict[str, Any]], None]) -> Callable[[Workshop], Caught]:
    """A recipe that asks for what cannot be; refused before any work."""

    def make(shop: Workshop) -> Caught:
        return _from_error(lambda: build(load_recipe(_recipe(shop, change)), Settings(shop.folder / "cache")))

    return make


def fp8_on_86(recipe: dict[str, Any]) -> None:
    recipe["precision"] = {"recipe": "fp8", "scales": "scales.json"}
    recipe["target"]["sm"] = 86


def fp8_unscaled(recipe: dict[str, Any]) -> None:
    recipe["precision"] = "fp8"


def hopper(recipe: dict[str, Any]) -> None:
    recipe["target"]["sm"] = 90


def expecting(**expect: Any) -> Callable[[Workshop], Caught]:
    """Counts that a recipe asks for and the engine does not have."""

    def change(recipe: dict[str, Any]) -> None:
        recipe["verify"] = {"fidelity": False, "expect": expect}

    return by_report(recipe=change)


def unbaked(shop: Workshop) -> Caught:
    """A graph that computes its rotary angles, where the recipe bakes them."""
    computed = shop.convert("bf16", "bf16_computed", rotary="computed")
    promised = Converted(computed.path, shop.convert("bf16").options, ())
    structures = find_structures(ir.load(computed.path))
    trigs = [node.name or "" for rotation in structures.rotary for node in rotation.trig]
    return _from_report(judge_graph(computed.path, promised, None), trigs)


def linear_excluded(shop: Workshop) -> Caught:
    """A graph converted without one linear, verified by a recipe that does not exclude it."""
    converted = shop.convert("fp8", "fp8_excluded", exclude=(damage.TO_OUT,))
    layers = shop.layers(converted.path, "fp8_excluded")
    table = shop.folder / "fp8_excluded.layers.txt"
    assert layers.layers

    def asked(recipe: dict[str, Any]) -> None:
        recipe["precision"] = {"recipe": "fp8", "scales": str(shop.scales)}

    return _examined(Subject(layers=table, onnx=converted.path, recipe=_recipe(shop, asked)))
