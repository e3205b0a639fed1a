"""Builds a strongly typed network from an ONNX file: the one code path of every backend."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from engine_builder.compile.backend import BuildOptions, CompileRequest, OnPhase, Plan
from engine_builder.compile.log import MessageLog, attach_logger, build_error, parse_error
from engine_builder.compile.profiles import add_profiles
from engine_builder.compile.refit import mark_linear_weights
from engine_builder.compile.timing import attach_cache, keep_cache
from engine_builder.compile.versions import member
from engine_builder.durable import disk_error
from engine_builder.errors import CompileError
from engine_builder.execute.loading import load_plugins

if TYPE_CHECKING:
    import tensorrt as trt

# TensorRT-RTX compiles every kernel, nearly the whole build, under a name that says otherwise.
_PHASES: Final = {"Determining refit engines": "Compiling kernels"}

SetTarget = Callable[[Any, Any, int], None]
ReadLayers = Callable[[Path], str]


def build_plan(
    trt: Any,
    request: CompileRequest,
    on_phase: OnPhase,
    *,
    set_target: SetTarget | None = None,
    read_layers: ReadLayers | None = None,
) -> Plan:
    """Parse ``request.onnx``, build it and stream the engine to ``request.engine``.

    ``trt`` is the module tensorrt or tensorrt_rtx.  ``set_target(trt, config, sm)`` names the
    architecture where it is not the machine's own; ``read_layers(engine)`` fetches the layer table
    from the finished engine, without it the builder's own message is taken.
    ``on_phase`` is called with the name of each phase that the builder enters.

    The engine goes to the file in chunks of 64 MiB, which spares the copy that the builder
    otherwise holds (1.8 GB less at the peak for an engine of 2.3 GB, measured).

    Raises CompileError, SourceModelError, RecipeError, PlatformError or ResourceError.
    """
    started = time.monotonic()
    messages = MessageLog()
    logger = attach_logger(trt, messages)
    load_plugins(trt, request.options.plugins)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    on_phase("Parsing ONNX")
    if not parser.parse_from_file(str(request.onnx)):
        raise parse_error(parser, messages)
    if "REFIT_INDIVIDUAL" in request.options.flags:
        mark_linear_weights(network, request.onnx)
    config = builder.create_builder_config()
    configure(trt, config, request.options)
    cache = None
    if request.options.timing_cache is not None:
        cache = attach_cache(trt, config, request.options.timing_cache, messages.warn)
        # What it says of a cache that it cannot read is no reason for a build to fail.
        messages.errors.clear()
    if set_target is not None:
        set_target(trt, config, request.sm)
    add_profiles(builder, config, request.profiles)
    monitor = _make_monitor(trt, on_phase)
    config.progress_monitor = monitor
    try:
        with request.engine.open("wb") as file:
            writer = _make_writer(trt, file)
            built = builder.build_serialized_network_to_stream(network, config, writer)
            if writer.error is not None:
                raise writer.error
    except OSError as error:
        # An engine is about as large as the converted model.
        needed = sum(file.stat().st_size for file in request.onnx.parent.glob(f"{request.onnx.name}*"))
        raise disk_error(error, request.engine, needed) from error
    if not built:
        raise build_error(messages)
    if cache is not None:
        keep_cache(config, cache, messages.warn)
    warnings = tuple(messages.warnings)
    table = messages.layer_table if read_layers is None else read_layers(request.engine)
    if not table:
        raise CompileError("TensorRT printed no layer table, so that the engine cannot be verified")
    return Plan(
        sha256=writer.sha256.hexdigest(),
        size=writer.size,
        layer_table=table,
        version=str(trt.__version__),
        seconds=time.monotonic() - started,
        messages=warnings,
    )


def configure(trt: Any, config: trt.IBuilderConfig, options: BuildOptions) -> None:
    """Set the builder's options: always DETAILED, and TF32 (on by default) only where asked for.

    Raises PlatformError for an option that this version of TensorRT does not have.
    """
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    for flag in options.flags:
        config.set_flag(member(trt, "BuilderFlag", flag))
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.aux_streams is not None:
        config.max_aux_streams = options.aux_streams
    if options.hardware_compatibility is not None:
        level = member(trt, "HardwareCompatibilityLevel", options.hardware_compatibility)
        config.hardware_compatibility_level = level
    if options.plugins and "VERSION_COMPATIBLE" in options.flags:
        # Another version's runtime does not have these libraries: they go into the engine.
        config.plugins_to_serialize = [str(library) for library in options.plugins]


def _make_monitor(trt: Any, on_phase: OnPhase) -> Any:
    class PhaseMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            on_phase(_PHASES.get(phase_name, phase_name))

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

        def phase_finish(self, phase_name: str) -> None:
            """Only entering a phase is reported."""

    return PhaseMonitor()


def _make_writer(trt: Any, file: IO[bytes]) -> Any:
    class HashingWriter(trt.IStreamWriter):  # type: ignore[misc]
        """Writes and hashes; an error is kept, because an exception must not cross C++."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.sha256 = hashlib.sha256()
            self.size = 0
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                file.write(data)
            except OSError as error:
                self.error = error
                return 0
            self.sha256.update(data)
            self.size += len(data)
            return len(data)

    return HashingWriter()
