"""TensorRT for RTX: builds without a GPU for a named compute capability, ahead of time."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from engine_builder.compile.backend import CompileRequest, OnPhase, Plan, refuse_target
from engine_builder.compile.device import visible_sm
from engine_builder.compile.strongly_typed import build_plan
from engine_builder.compile.versions import member
from engine_builder.errors import PlatformError
from engine_builder.execute.loading import inspect_engine
from engine_builder.execute.request import ExecuteRequest, Execution, LoadOptions
from engine_builder.execute.run import execute
from engine_builder.recipe import Build, PrecisionName

if TYPE_CHECKING:
    import tensorrt_rtx as trt

# What the compiler of 1.7.1 refuses, measured on each architecture with small graphs.
_REFUSED: Final[Mapping[tuple[PrecisionName, int], str]] = {
    ("fp8", 75): "TensorRT-RTX compiles fp8 for sm_89, sm_120 and sm_121 only",
    ("fp8", 80): "TensorRT-RTX compiles fp8 for sm_89, sm_120 and sm_121 only",
    ("fp8", 86): "TensorRT-RTX compiles fp8 for sm_89, sm_120 and sm_121 only",
    ("bf16", 75): "sm_75 has no bf16 arithmetic",
    ("fp32", 75): "TensorRT-RTX has no fp32 matrix product for sm_75",
}


class TensorRTRTX:
    """The backend ``tensorrt_rtx``.  Its engines run on RTX GPUs; data-centre Hopper is refused."""

    name: Literal["tensorrt_rtx"] = "tensorrt_rtx"
    cross_compiles = True

    def version(self) -> str:
        """See :meth:`Backend.version`."""
        return str(_module().__version__)

    def supported_sms(self) -> tuple[int, ...]:
        """See :meth:`Backend.supported_sms`."""
        names = dir(_module().ComputeCapability)
        return tuple(sorted(int(match[1]) for name in names if (match := re.fullmatch(r"SM(\d+)", name))))

    def can_execute(self, sm: int) -> bool:
        """See :meth:`Backend.can_execute`."""
        return visible_sm() == sm

    def check_target(self, sm: int) -> None:
        """See :meth:`Backend.check_target`."""
        supported = self.supported_sms()
        if sm not in supported:
            hint = "H100 and H200 need target.backend: tensorrt" if sm == 90 else None
            raise refuse_target(sm, f"TensorRT-RTX {self.version()}", supported, hint)

    def check_support(self, precision: PrecisionName, sm: int) -> str | None:
        """See :meth:`Backend.check_support`.

        An fp16 graph still needs no fp32 matrix product left for sm_75, which only the compiler
        can tell: a rotary Einsum in fp32 is one.
        """
        return _REFUSED.get((precision, sm))

    def refused_options(self, build: Build, sms: Sequence[int] = ()) -> Mapping[str, str]:
        """See :meth:`Backend.refused_options`.  Reasons as measured with 1.7.1, without a GPU and on an
        H200, whose architecture it does not build for.

        ``REFIT_INDIVIDUAL`` builds there as long as no weight is marked, which makes nothing
        refittable.
        """
        refused: dict[str, str] = {}
        if build.timing_cache is not None:
            refused["timing_cache"] = "TensorRT-RTX times no tactics, so that it has nothing to cache"
        if build.hardware_compatibility != "none":
            refused["hardware_compatibility"] = "TensorRT-RTX ignores it: build one engine per sm"
        if build.version_compatible:
            refused["version_compatible"] = (
                "TensorRT-RTX comes without the lean runtime that goes into such an engine"
            )
        if build.refit is not None:
            refused["refit"] = "TensorRT-RTX makes refittable engines on a GPU of their own architecture only"
        if build.strip_plan:
            refused["strip_plan"] = "TensorRT-RTX strips plans on a GPU of their own architecture only"
        if build.plugins:
            refused["plugins"] = "TensorRT-RTX loads no plugin libraries"
        return refused

    def build(self, request: CompileRequest, on_phase: OnPhase) -> Plan:
        """See :meth:`Backend.build`.  The layer table is the builder's own VERBOSE message, because
        an engine cannot be deserialized without a driver."""
        self.check_target(request.sm)
        return build_plan(_module(), request, on_phase, set_target=_set_target)

    def inspect(self, engine: Path, load: LoadOptions) -> str:
        """See :meth:`Backend.inspect`."""
        return inspect_engine(_module(), engine, load)

    def execute(self, request: ExecuteRequest, on_phase: OnPhase) -> Execution:
        """See :meth:`Backend.execute`."""
        return execute(_module(), request, on_phase)


def _set_target(trt: Any, config: trt.IBuilderConfig, sm: int) -> None:
    config.num_compute_capabilities = 1
    config.set_compute_capability(member(trt, "ComputeCapability", f"SM{sm}"), 0)


def _module() -> Any:
    try:
        return importlib.import_module("tensorrt_rtx")
    except ImportError as error:
        raise PlatformError(
            f"TensorRT-RTX cannot be imported: {error}", hint="pip install tensorrt-rtx-cu13"
        ) from error
