"""TensorRT 10.15 to 11.x: builds for the GPU that it runs on."""

from __future__ import annotations

import importlib
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from engine_builder.compile.backend import CompileRequest, OnPhase, Plan, refuse_target
from engine_builder.compile.device import visible_sm
from engine_builder.compile.strongly_typed import build_plan
from engine_builder.errors import CompileError, PlatformError
from engine_builder.recipe import FIRST_SM, Build, PrecisionName

# From 10.15 on the names used here are the same.  11 dropped the type flags of BuilderFlag, the
# calibrators and EXPLICIT_BATCH, none of which a strongly typed network needs, and accepts
# STRONGLY_TYPED without effect.
_OLDEST: Final = (10, 15)
_BEFORE: Final = (12, 0)


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

    def refused_options(self, build: Build) -> Mapping[str, str]:
        """See :meth:`Backend.refused_options`."""
        refused: dict[str, str] = {}
        if build.timing_cache is not None:
            refused["timing_cache"] = "timing caches are not read or written"
        if build.plugins:
            refused["plugins"] = "plugin libraries are not loaded"
        return refused

    def build(self, request: CompileRequest, on_phase: OnPhase) -> Plan:
        """See :meth:`Backend.build`.  The layer table is the inspector's JSON of the finished engine."""
        self.check_target(request.sm)
        trt = _module()

        def read_layers(logger: Any, engine: Path) -> str:
            return inspect_engine(trt, logger, engine)

        return build_plan(trt, request, on_phase, read_layers=read_layers)


def inspect_engine(trt: Any, logger: Any, engine: Path) -> str:
    """Return the inspector's JSON of an engine file.

    Raises CompileError when the engine does not load on this machine.
    """
    with engine.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        loaded = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if loaded is None:
        raise CompileError("the engine does not load on the GPU that built it", where=str(engine))
    inspector = loaded.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def _module() -> Any:
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError as error:
        raise PlatformError(
            f"TensorRT cannot be imported: {error}",
            hint="use the container image, or target.backend: tensorrt_rtx without a GPU",
        ) from error
    version = tuple(int(part) for part in re.findall(r"\d+", str(trt.__version__))[:2])
    if not _OLDEST <= version < _BEFORE:
        raise PlatformError(
            f"TensorRT {trt.__version__} is not supported", hint="10.15 to 11.x are supported"
        )
    return trt
