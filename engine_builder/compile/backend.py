"""What a TensorRT backend is to the rest of the builder, and what a compilation takes and gives.

A backend module holds only what differs between TensorRT and TensorRT-RTX: the Python module,
the version, the choice of the target, what the target can do and where its layer table comes
from.  The build itself is one code path, :func:`strongly_typed.build_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_builder.compile.timing import TimingCache
from engine_builder.errors import PlatformError
from engine_builder.execute.request import ExecuteRequest, Execution, LoadOptions
from engine_builder.recipe import BackendName, Build, PrecisionName, Profile
from verify.layers import EngineIO, LayerRecord

OnPhase = Callable[[str], None]


@dataclass(frozen=True)
class BuildOptions:
    """Settings of the TensorRT builder, by TensorRT's own names.

    ``workspace`` is in bytes; ``flags`` are members of ``BuilderFlag``; ``hardware_compatibility``
    is a member of ``HardwareCompatibilityLevel``; None leaves a setting at its default.
    ``plugins`` are libraries whose code the build runs.
    """

    workspace: int
    tf32: bool = False
    optimization_level: int | None = None
    aux_streams: int | None = None
    hardware_compatibility: str | None = None
    flags: tuple[str, ...] = ()
    timing_cache: TimingCache | None = None
    plugins: tuple[Path, ...] = ()


@dataclass(frozen=True)
class CompileRequest:
    """One engine to build: the converted model, the file the engine goes to, and for which sm.

    ``engine`` is overwritten; publishing it under its final name is up to the caller.
    """

    onnx: Path
    engine: Path
    sm: int
    options: BuildOptions
    profiles: tuple[Profile, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a build leaves behind, the engine file apart.

    ``layer_table`` is the text of the engine's layers as TensorRT printed it; ``seconds`` covers
    parsing, building and writing; ``messages`` are the warnings.
    """

    sha256: str
    size: int
    layer_table: str
    version: str
    seconds: float
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompiledEngine:
    """A compiled engine and the evidence of what is in it."""

    path: Path
    plan: Plan
    backend: BackendName
    sm: int
    layers: tuple[LayerRecord, ...]
    io: tuple[EngineIO, ...]
    layer_source: str


class Backend(Protocol):
    """One of the TensorRT flavours.  Nothing but ``version``, ``supported_sms``, ``check_target``
    and ``build`` imports the TensorRT module."""

    @property
    def name(self) -> BackendName:
        """The name that a recipe uses."""
        ...

    @property
    def cross_compiles(self) -> bool:
        """True when an engine can be built for an sm that this machine does not have."""
        ...

    def version(self) -> str:
        """Version of the TensorRT library.

        Raises PlatformError when it is not installed or not a supported one.
        """
        ...

    def supported_sms(self) -> tuple[int, ...]:
        """The compute capabilities that can be built for here, ascending."""
        ...

    def can_execute(self, sm: int) -> bool:
        """True when this machine can run an engine built for ``sm``."""
        ...

    def check_target(self, sm: int) -> None:
        """Raise PlatformError unless an engine for ``sm`` can be built here."""
        ...

    def check_support(self, precision: PrecisionName, sm: int) -> str | None:
        """Return why ``precision`` cannot be compiled for ``sm``, or None when it can."""
        ...

    def refused_options(self, build: Build, sms: Sequence[int] = ()) -> Mapping[str, str]:
        """Return the keys of the recipe's ``build`` section that do not hold, with reasons.

        ``sms`` are the architectures that are built for; some options hold on newer ones only.
        """
        ...

    def build(self, request: CompileRequest, on_phase: OnPhase) -> Plan:
        """Build in this process and write ``request.engine``.

        Raises CompileError, SourceModelError, RecipeError, PlatformError or ResourceError.
        """
        ...

    def inspect(self, engine: Path, load: LoadOptions) -> str:
        """Return the inspector's JSON of an engine file; needs the GPU that it was built for.

        Raises PlatformError, SourceModelError or CompileError.
        """
        ...

    def execute(self, request: ExecuteRequest, on_phase: OnPhase) -> Execution:
        """Run an engine in this process, on its inputs and at the bounds of its profiles.

        Raises PlatformError, SourceModelError, RecipeError, CompileError or ResourceError.
        """
        ...


def load_backend(name: BackendName) -> Backend:
    """Return the backend that a recipe names; imports no TensorRT."""
    if name == "tensorrt":
        from engine_builder.compile.tensorrt import TensorRT

        return TensorRT()
    from engine_builder.compile.tensorrt_rtx import TensorRTRTX

    return TensorRTRTX()


def build_options(build: Build, *, tf32: bool = False) -> BuildOptions:
    """Translate the recipe's ``build`` section into TensorRT's names.

    Whether a backend takes them is answered by :meth:`Backend.refused_options`.
    """
    refit = {"all": "REFIT", "identical": "REFIT_IDENTICAL", "individual": "REFIT_INDIVIDUAL"}
    wanted = {
        "STRIP_PLAN": build.strip_plan,
        "VERSION_COMPATIBLE": build.version_compatible,
        "WEIGHT_STREAMING": build.weight_streaming,
    }
    flags = [flag for flag, on in wanted.items() if on]
    # Left open, a stripped plan is refitted with identical weights; 10.x and 11.x agree once it is said.
    mode = build.refit or ("identical" if build.strip_plan else None)
    if mode is not None:
        flags.append(refit[mode])
    level = build.hardware_compatibility
    return BuildOptions(
        workspace=int(build.workspace_gb * 2**30),
        tf32=tf32,
        optimization_level=build.optimization_level,
        aux_streams=build.aux_streams,
        hardware_compatibility=None if level == "none" else level.upper(),
        flags=tuple(sorted(flags)),
        timing_cache=None
        if build.timing_cache is None
        else TimingCache(build.timing_cache, build.strict_timing_cache),
        plugins=build.plugins,
    )


def build_files(build: Build) -> tuple[Path, ...]:
    """The files that decide what a build gives, beside the model: plugins, and a strict timing cache.

    Another timing cache only saves time, and the build itself adds to it.
    """
    strict = (build.timing_cache,) if build.strict_timing_cache and build.timing_cache else ()
    return (*build.plugins, *strict)


def load_options(build: Build, converted: Path) -> LoadOptions:
    """How an engine that was built so has to be loaded; ``converted`` is the graph it was built from."""
    return LoadOptions(
        host_code=build.version_compatible,
        refit=converted if build.strip_plan else None,
        plugins=build.plugins,
    )


def sm_list(sms: tuple[int, ...]) -> str:
    """``(75, 89)`` as ``sm_75, sm_89``."""
    return ", ".join(f"sm_{sm}" for sm in sms)


def refuse_target(
    sm: int, library: str, supported: tuple[int, ...], hint: str | None = None
) -> PlatformError:
    """The error for a target that cannot be built for, with those that can."""
    return PlatformError(
        f"{library} cannot build for sm_{sm} here; it can for {sm_list(supported) or 'none'}",
        where="target.sm",
        hint=hint,
    )
