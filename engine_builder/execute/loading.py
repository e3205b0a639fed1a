"""Loads an engine file into TensorRT, and says what is wrong where that fails."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_builder.compile.log import MessageLog, attach_logger, load_error
from engine_builder.errors import CompileError, PlatformError, SourceModelError
from engine_builder.execute.request import LoadOptions
from engine_builder.recipe import Profile, ShapeRange

if TYPE_CHECKING:
    import tensorrt as trt


def load_engine(trt: Any, path: Path, options: LoadOptions = LoadOptions()) -> trt.ICudaEngine:  # noqa: B008
    """Deserialize the engine at ``path``, refitted where its weights were stripped.

    Raises SourceModelError for a file that is no engine, PlatformError for one that this machine
    or this TensorRT cannot load, CompileError where TensorRT gives another reason.
    """
    messages = MessageLog()
    logger = attach_logger(trt, messages)
    load_plugins(trt, options.plugins)
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = options.host_code
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = runtime.deserialize_cuda_engine(plan)
    except ValueError:
        raise SourceModelError("the engine is empty", where=str(path)) from None
    except OSError as error:
        raise SourceModelError(f"the engine cannot be read: {error.strerror}", where=str(path)) from error
    if engine is None:
        raise load_error(messages, path)
    if options.refit is not None:
        _refit(trt, logger, engine, options.refit)
    return engine


def load_plugins(trt: Any, libraries: Sequence[Path]) -> None:
    """Load libraries of plugins into this process: this runs their code.

    Raises PlatformError for one that does not load.
    """
    for library in libraries:
        if trt.get_plugin_registry().load_library(str(library)) is None:
            raise PlatformError(
                "TensorRT cannot load this plugin library",
                where=str(library),
                hint="it must be built for this TensorRT, and its plugins may be registered only once",
            )


def inspect_engine(trt: Any, path: Path, options: LoadOptions = LoadOptions()) -> str:  # noqa: B008
    """Return the inspector's JSON of an engine file; raises what :func:`load_engine` raises.

    A stripped engine is inspected as it is, without its weights.
    """
    engine = load_engine(trt, path, LoadOptions(options.host_code, None, options.plugins))
    inspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def engine_profiles(trt: Any, engine: trt.ICudaEngine) -> tuple[Profile, ...]:
    """The engine's own profiles: the range of each dynamic input.

    An engine without dynamic inputs has one profile, which constrains nothing.
    """
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    dynamic = [
        name
        for name in names
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT and -1 in engine.get_tensor_shape(name)
    ]

    def read(name: str, profile: int) -> ShapeRange:
        low, usual, high = (
            tuple(int(size) for size in shape) for shape in engine.get_tensor_profile_shape(name, profile)
        )
        return ShapeRange(low, usual, high)

    return tuple(
        Profile({name: read(name, profile) for name in dynamic})
        for profile in range(engine.num_optimization_profiles)
    )


def _refit(trt: Any, logger: trt.ILogger, engine: trt.ICudaEngine, model: Path) -> None:
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(model)) or not refitter.refit_cuda_engine():
        raise CompileError("the stripped engine does not take its weights back", where=str(model))
