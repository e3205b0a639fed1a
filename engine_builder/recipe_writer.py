"""Writes a recipe for an ONNX model from what the model itself says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_builder.errors import RecipeError
from engine_builder.recipe import BackendName, PrecisionName
from engine_builder.source import TensorSpec

SA3_INPUTS = frozenset({"x", "t", "t5_hidden", "t5_mask", "seconds_total", "local_add_cond"})
"""The inputs by which an SA3 DiT is known (upstream export)."""

SA3_RANGE = (1, 1292, 4096)
"""Latent frames of SA3's standard profile: least, typical (120 s of audio), greatest."""

PLAIN_RANGE = (1, 64, 512)
"""What a dynamic dimension of another model is given to start from."""


@dataclass(frozen=True)
class RecipeAnswers:
    """What a recipe needs to know beyond the model: asked for, or given as flags."""

    name: str
    precision: PrecisionName = "fp16"
    backend: BackendName = "tensorrt_rtx"
    sm: int = 89
    ranges: Mapping[str, tuple[int, int, int]] | None = None
    """(min, opt, max) by the name of a symbolic dimension."""
    scales: str = "scales.json"
    output: str = "out"


def is_dit(inputs: Sequence[TensorSpec]) -> bool:
    """Whether the model has the inputs of an SA3 DiT."""
    return {spec.name for spec in inputs} == SA3_INPUTS


def dynamic_dimensions(inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """The symbolic dimensions of the inputs, each once; an unnamed one goes by its place."""
    return tuple(dict.fromkeys(dim for spec in inputs for dim in _names(spec) if isinstance(dim, str)))


def write_recipe_text(model: Path, recipe: Path, inputs: Sequence[TensorSpec], answers: RecipeAnswers) -> str:
    """The text of a recipe at ``recipe`` for the ONNX file ``model``.

    Raises:
        RecipeError: A range names no dimension of the model, or is not min <= opt <= max.
    """
    dit = is_dit(inputs)
    dims = dynamic_dimensions(inputs)
    ranges = dict(answers.ranges or {})
    unknown = [name for name in ranges if name not in dims]
    if unknown:
        raise RecipeError(
            f"the model has no dynamic dimension {unknown[0]!r}",
            hint=f"it has {', '.join(dims) or 'none'}",
        )
    for name, (low, middle, high) in ranges.items():
        if not 1 <= low <= middle <= high:
            raise RecipeError(f"the range of {name} must be 1 <= min <= opt <= max")
    default = SA3_RANGE if dit else PLAIN_RANGE
    lines = [
        f"# {'An SA3 DiT' if dit else 'A model'} in {answers.precision}; every key: docs/recipe.md",
        "schema: sa3-builder/1",
        "model:",
        f"  name: {answers.name}",
    ]
    if not dit:
        lines.append("  kind: generic")
    relative = os.path.relpath(model.resolve(), recipe.resolve().parent)
    lines.append(f"  onnx: {_quoted(relative)}")
    if answers.precision == "fp8":
        lines += ["precision:", "  recipe: fp8", f"  scales: {_quoted(answers.scales)}"]
    else:
        lines.append(f"precision: {answers.precision}")
    shaped = [spec for spec in inputs if any(not isinstance(d, int) for d in spec.shape)]
    if shaped:
        lines.append("profiles:                         # for each dynamic input its shapes [min, opt, max]")
        width = max(len(_quoted(spec.name)) for spec in shaped) + 1
        for number, spec in enumerate(shaped):
            shapes = [
                [d if isinstance(d, int) else ranges.get(d, default)[i] for d in _names(spec)]
                for i in range(3)
            ]
            lead = "  - " if number == 0 else "    "
            lines.append(f"{lead}{_quoted(spec.name) + ':':<{width}} {shapes}")
    lines.append(f"target: {{backend: {answers.backend}, sm: {answers.sm}}}")
    if not dit:
        longest = max((ranges.get(d, default)[2] for d in dims), default=1)
        typical = max((ranges.get(d, default)[1] for d in dims), default=1)
        lengths = sorted({typical, longest})
        lines += [
            "verify:                           # lengths set the dynamic dimensions of drawn inputs",
            f"  fidelity: {{lengths: {lengths}, t: [0.0]}}",
        ]
    lines.append(f"output: {{dir: {_quoted(answers.output)}}}")
    return "\n".join(lines) + "\n"


def _names(spec: TensorSpec) -> list[int | str]:
    return [f"{spec.name}[{i}]" if d is None else d for i, d in enumerate(spec.shape)]


def _quoted(text: str) -> str:
    """``text`` as a YAML scalar: plain where it is one beyond doubt, else in double quotes."""
    plain = all(c.isalnum() or c in "._-/" for c in text) and text[:1].isalpha()
    plain = plain or (text.startswith(("../", "./", "/")) and all(c.isalnum() or c in "._-/" for c in text))
    if plain and text.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
