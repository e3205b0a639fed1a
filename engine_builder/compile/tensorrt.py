"""TensorRT 10.15 to 11.x: builds for the GPU that it runs on."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from engine_builder.compile.backend import CompileRequest, OnPhase, Plan, refuse_target, sm_list
from engine_builder.compile.device import visible_sm
from engine_builder.compile.strongly_typed import build_plan
from engine_builder.compile.versions import is_supported
from engine_builder.errors import PlatformError
from engine_builder.execute.loading import inspect_engine
from engine_builder.execute.request import ExecuteRequest, Execution, LoadOptions
from engine_builder.execute.run import execute
from engine_builder.recipe import FIRST_SM, Build, PrecisionName

_FIRST_SM_OF_LEVEL: Final[Mapping[str, int]] = {"ampere_plus": 80, "same_compute_capability": 75}
"""The first architecture whose engines can have the level, by TensorRT's own documentation."""


class TensorRT:
    """The backend ``tensorrt``, as in NVIDIA's containers."""

    name: Literal["tensorrt"] = "tensorrt"
    cross_compiles = False

    def version(self) -> str:
        """See :meth:`Backend.version`."""
        return str(_module().__version__)

    def supported_sms(self) -> tuple[int, ...]:
        """See :meth:`Backend.supported_sms`: that of the first visible GPU."""
        sm = visible_sm()
        return () if sm is None else (sm,)

    def can_execute(self, sm: int) -> bool:
        """See :meth:`Backend.can_execute`."""
        return visible_sm() == sm

    def check_target(self, sm: int) -> None:
        """See :meth:`Backend.check_target`."""
        _module()
        here = visible_sm()
        if here is None:
            raise PlatformError(
                "TensorRT needs the GPU that it builds for, and CUDA shows none",
                where="target.backend",
                hint="run with --gpus all, or build ahead of time with target.backend: tensorrt_rtx",
            )
        if sm != here:
            raise refuse_target(sm, "TensorRT", (here,), f"build on a GPU of sm_{sm}, or write sm: {here}")

    def check_support(self, precision: PrecisionName, sm: int) -> str | None:
        """See :meth:`Backend.check_support`."""
        if sm >= FIRST_SM[precision]:
            return None
        return f"sm_{sm} has no {precision} tensor cores; the first with them is sm_{FIRST_SM[precision]}"

    def refused_options(self, build: Build, sms: Sequence[int] = ()) -> Mapping[str, str]:
        """See :meth:`Backend.refused_options`."""
        refused: dict[str, str] = {}
        if build.timing_cache is not None and build.optimization_level == 0:
            refused["timing_cache"] = "optimization_level 0 uses no timing cache"
        level = build.hardware_compatibility
        older = tuple(sm for sm in sms if sm < _FIRST_SM_OF_LEVEL.get(level, 0))
        if older:
            refused["hardware_compatibility"] = f"{sm_list(older)} has no engines that are {level}"
        return refused

    def build(self, request: CompileRequest, on_phase: OnPhase) -> Plan:
        """See :meth:`Backend.build`.  The layer table is the inspector's JSON of the finished engine."""
        self.check_target(request.sm)
        trt = _module()
        # The plugins of the build are loaded already, and none may be registered twice.
        load = LoadOptions(host_code="VERSION_COMPATIBLE" in request.options.flags)
        return build_plan(
            trt, request, on_phase, read_layers=lambda engine: inspect_engine(trt, engine, load)
        )

    def inspect(self, engine: Path, load: LoadOptions) -> str:
        """See :meth:`Backend.inspect`."""
        return inspect_engine(_module(), engine, load)

    def execute(self, request: ExecuteRequest, on_phase: OnPhase) -> Execution:
        """See :meth:`Backend.execute`."""
        return execute(_module(), request, on_phase)


def _module() -> Any:
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError as error:
        raise PlatformError(
            f"TensorRT cannot be imported: {error}",
            hint="use the container image, or target.backend: tensorrt_rtx without a GPU",
        ) from error
    if not is_supported(str(trt.__version__)):
        raise PlatformError(
            f"TensorRT {trt.__version__} is not supported", hint="10.15 to 11.x are supported"
        )
    return trt
