"""What a page is about: one build, with everything that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from engine_builder.compile.isolated import read_layer_table
from engine_builder.manifest import Origin
from engine_builder.report.precision_map import MappedStructure, PrecisionMap, build_map
from verify.report import VerifyReport

GPUS: Final[Mapping[int, str]] = {
    75: "Turing: T4, RTX 20",
    80: "Ampere: A100, A30",
    86: "Ampere: A10, A40, RTX 30",
    89: "Ada: L4, L40S, RTX 40",
    90: "Hopper: H100, H200, GH200",
    100: "Blackwell: B200, GB200",
    103: "Blackwell: B300, GB300",
    120: "Blackwell: RTX 50, RTX PRO 6000",
    121: "Blackwell: GB10",
}
"""GPUs of each compute capability (NVIDIA's list, developer.nvidia.com/cuda/gpus)."""

_CHECKS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("fused_attention",),
    "linear": ("fp8_linear", "trunk_linear"),
    "norm": ("fp32_norm",),
    "rotation": ("fp32_rotation",),
    "angle": ("fp32_angle", "baked_rotary"),
}
"""The checks that are about each kind of structure."""


@dataclass(frozen=True)
class Subject:
    """A build: its report; where it came from and its precision map, as far as they are known."""

    report: VerifyReport
    origin: Origin | None
    map: PrecisionMap | None

    @property
    def name(self) -> str:
        """The engine's place below the output folder."""
        return self.report.label

    @property
    def sm(self) -> int | None:
        if self.origin is not None:
            return self.origin.sm
        return None if self.report.builder is None else self.report.builder.sm

    @property
    def precision(self) -> str:
        return str(self.report.precision.get("recipe", "unknown precision"))

    @property
    def worst_cosine(self) -> float | None:
        fidelity = self.report.fidelity
        return None if fidelity is None else fidelity.get("worst_cosine")

    @property
    def execution(self) -> Mapping[str, Any]:
        """What running the engine showed; empty when it was not run."""
        found = self.report.information.get("execution") or {}
        return {} if "skipped" in found else found

    @property
    def not_run(self) -> str:
        """Why the engine was not run on a GPU; empty when it was."""
        if self.report.engine_file is None:
            return "there is no engine"
        found = self.report.information.get("execution")
        return "" if self.execution else str((found or {}).get("skipped", "this build did not try"))

    @property
    def synthetic_scales(self) -> bool:
        """Whether the fp8 scales were measured on drawn and not on recorded inputs."""
        fp8 = (self.report.conversion or {}).get("fp8") or {}
        return bool(fp8.get("synthetic_data"))

    def fault(self, structure: MappedStructure) -> str:
        """Which promise about ``structure`` is broken, and how; empty when none is."""
        for check in self.report.checks:
            if check.name in _CHECKS[structure.kind]:
                for failure in check.failures:
                    if failure.subject == structure.name or failure.subject in structure.nodes:
                        return failure.reason
        return ""


def subject_of(
    report: VerifyReport, origin: Origin | None, converted: Path, layer_table: Path | None
) -> Subject:
    """A build with its precision map, made from its converted model and its engine's layer table."""
    layers = () if layer_table is None else read_layer_table(layer_table.read_text(encoding="utf-8")).layers
    return Subject(report, origin, build_map(ir.load(converted), layers))


def megabytes(size: float) -> str:
    """Bytes as the terminal shows them."""
    return f"{size / 1e6:,.1f} MB" if size < 1e10 else f"{size / 1e9:,.1f} GB"
