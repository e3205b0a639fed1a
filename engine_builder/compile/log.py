"""TensorRT's messages: kept, forwarded to Python's logging, and turned into errors with advice."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_builder.errors import (
    BuilderError,
    CompileError,
    PlatformError,
    RecipeError,
    ResourceError,
    SourceModelError,
)
from verify.layers import normalise_dtype

if TYPE_CHECKING:
    import tensorrt as trt

MESSAGES: Final = logging.getLogger("engine_builder.tensorrt")
"""TensorRT's own messages at their own severity, apart from those of the builder."""

_LEVELS: Final = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}
_LAYER_TABLE: Final = "Layers:\n"

# Cross-compiling on a machine without a driver, every real error draws this one after it.
_NO_DRIVER: Final = "catchCudaError"


class MessageLog:
    """What TensorRT said during one build."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.layer_table = ""

    def add(self, severity: str, text: str) -> None:
        """Keep and forward one message; never raises, as its caller is C++."""
        level = _LEVELS.get(severity, logging.INFO)
        if text.startswith(_LAYER_TABLE):
            self.layer_table = text
            return
        if _NO_DRIVER in text:
            level = logging.DEBUG
        elif level >= logging.ERROR:
            self.errors.append(text)
        elif level == logging.WARNING:
            self.warnings.append(text)
        MESSAGES.log(level, "%s", text)

    def warn(self, text: str) -> None:
        """Keep and forward a warning of the builder's own."""
        self.add("WARNING", text)


def attach_logger(trt: Any, messages: MessageLog) -> trt.ILogger:
    """Return the TensorRT logger of the given module, which from now on fills ``messages``.

    TensorRT knows one logger per process and ignores every other while any builder is alive, even
    one that only a traceback holds; so there is one, and the builds follow one another.
    """
    logger = _process_logger(trt)
    logger.messages = messages
    return logger


@functools.cache
def _process_logger(trt: Any) -> Any:
    class ForwardingLogger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages = MessageLog()

        def log(self, severity: Any, msg: str) -> None:
            self.messages.add(severity.name, msg)

    return ForwardingLogger()


def parse_error(parser: trt.OnnxParser, messages: MessageLog) -> BuilderError:
    """Return the error for a model that the ONNX parser rejected."""
    for index in range(parser.num_errors):
        native = parser.get_error(index)
        text = "\n".join((native.code().name, native.desc(), *messages.errors))
        return translate(text, node=native.node_name(), operator=native.node_operator())
    return build_error(messages)


def build_error(messages: MessageLog) -> BuilderError:
    """Return the error for a build that gave no engine."""
    if not messages.errors:
        return CompileError("TensorRT gave no engine and no reason")
    return translate("\n".join((*messages.errors, *messages.warnings)))


def load_error(messages: MessageLog, engine: Path) -> BuilderError:
    """Return the error for an engine file that TensorRT did not deserialize.

    In TensorRT's words what it "expects" is this machine's, and what it "got" the engine's.
    """
    text = "\n".join(messages.errors)
    where = str(engine)
    if is_out_of_memory(text):
        return ResourceError("memory ran out while the engine was loaded", where=where)
    if re.search(r"CUDA driver version is insufficient|no CUDA-capable device", text):
        return PlatformError(
            "an engine is loaded on a GPU, and CUDA shows none here",
            where=where,
            hint="run with --gpus all; without a GPU the layer table of the build log can be verified",
        )
    if match := re.search(r"expecting library version (\S+) got (\S+?),", text):
        return PlatformError(
            f"the engine was built by TensorRT {match[2]}, and this is {match[1]}",
            where=where,
            hint="an engine runs on the version that built it: use that image, or build it anew",
        )
    if match := re.search(r"expecting compute (\d+)\.(\d+) got compute (\d+)\.(\d+)", text):
        return PlatformError(
            f"the engine was built for sm_{match[3]}{match[4]}, and this GPU is sm_{match[1]}{match[2]}",
            where=where,
            hint="build it anew on this GPU",
        )
    if match := re.search(
        r"this GPU, which has compute capability (\S+?)\. Supported compute capabilities: (.+?)\. ", text
    ):
        here, built = (capability.replace(".", "") for capability in match.groups())
        if "TensorRT-RTX does not support" in text:
            return PlatformError(
                f"TensorRT-RTX does not run on this GPU, which is sm_{here}",
                where=where,
                hint=f"build for sm_{here} with target.backend: tensorrt",
            )
        return PlatformError(
            f"the engine was built for sm_{built}, and this GPU is sm_{here}",
            where=where,
            hint=f"build it for sm_{here}",
        )
    if match := re.search(r"Current Version: (\d+), Serialized Engine Version: (\d+)", text):
        return PlatformError(
            f"the engine was built by another TensorRT: its format is {match[2]}, and here it is {match[1]}",
            where=where,
            hint="an engine runs on the version that built it: use that image, or build it anew",
        )
    if re.search(r"magic ?tag", text, re.IGNORECASE):
        return SourceModelError("this is no engine of this TensorRT version", where=where)
    if "header.size == blobSize" in text:
        return SourceModelError("the engine is cut short", where=where)
    if re.search(r"host ?code|lean runtime", text, re.IGNORECASE):
        return PlatformError("the engine brings a runtime of its own, which is not allowed here", where=where)
    return CompileError(_essence(text) or "TensorRT does not load it and gives no reason", where=where)


def out_of_memory(message: str) -> ResourceError:
    """The error for a build that needed more memory than there was.

    The advice is measured: 3.7 GB at the peak for an engine of 0.94 GB, 10.2 GB for 2.94 GB.
    """
    return ResourceError(
        message, hint="a build takes about four times the engine's size; free memory or raise the limit"
    )


def is_out_of_memory(text: str) -> bool:
    """True when TensorRT, C++ or Python says in ``text`` that an allocation failed."""
    return bool(_OUT_OF_MEMORY.search(text))


def translate(text: str, *, node: str = "", operator: str = "") -> BuilderError:
    """Turn TensorRT's words into an error that says which node is at fault and what to do.

    ``node`` and ``operator`` are what the ONNX parser reports beside the text.
    """
    where = f"node {node}" if node else None
    if is_out_of_memory(text):
        return out_of_memory("memory ran out while TensorRT was building the engine")
    if match := re.search(r"Failed to open file: (.+)", text):
        return SourceModelError("the file with the weights cannot be opened", where=match[1].strip())
    if "MODEL_DESERIALIZE_FAILED" in text or "Failed to parse the ONNX model" in text:
        return SourceModelError("TensorRT cannot read it as an ONNX model")
    if match := re.search(r"Input file cannot be found, or is not a regular file: (.+)", text):
        return SourceModelError("no such ONNX file", where=match[1].strip())
    if match := _MIXED_TYPES.search(text):
        types = [normalise_dtype(t) for t in match.group("a", "b", "c", "d") if t]
        mixed = f" ({' and '.join(types)})" if types else ""
        return CompileError(
            f"its inputs have different types{mixed}",
            where=where or f"node {match['node'].strip()}",
            hint="a strongly typed network casts nothing by itself: the graph lacks a Cast before this node",
        )
    if match := re.search(r"Cannot compile operation '([^']*)' for Turing \(SM75\): FP32 GEMM", text):
        return CompileError(
            "sm_75 has no fp32 matrix product",
            where=f"node {match[1]}",
            hint="give this node fp16 operands, bake the rotary angles, or build for a newer sm",
        )
    if match := re.search(r"for target\(s\) (\w+), because .* HW-specific datatypes: (\w+)", text):
        kinds = {"b16": "bf16", "fp8_e4m3": "fp8"}
        return CompileError(
            f"{match[1].replace('sm', 'sm_')} cannot compute in {kinds.get(match[2], match[2])}",
            hint="choose another precision, or another target.sm",
        )
    if "Attention operation was not supported by a dedicated kernel" in text:
        return CompileError(
            "an Attention operator has no fused kernel for its types and shapes",
            where=where,
            hint="fp32 Attention has none: cast q, k and v to fp16 or bf16, or decompose the operator",
        )
    if "violate shape constraints" in text:
        return CompileError(
            _essence(text), hint="the model must work at every shape of the recipe's profiles"
        )
    if re.search(r"timing cache.*miss|miss.*timing cache", text, re.IGNORECASE):
        return CompileError(
            "the strict timing cache lacks a tactic that the build needs",
            hint="build once without strict_timing_cache on this GPU to complete it",
        )
    if re.search(r"no optimization profile|Invalid optimization profile|profile \d+", text):
        return RecipeError(_essence(text), where="profiles", hint="correct the recipe's profiles")
    reason = _essence(text)
    if "Plugin not found" in text or reason == "false":
        name = f"operator {operator}" if operator else "an operator"
        return CompileError(f"TensorRT does not know {name}", where=where, hint="replace it in the model")
    return CompileError(f"{operator}: {reason}" if operator else reason, where=where)


# The third is what Myelin says when an allocation of its own fails, the last what C++ says when there is
# no memory left for the stack of another thread (both measured under a limit).
_OUT_OF_MEMORY: Final = re.compile(
    r"OutOfMemory|bad_alloc|MemoryError|myelin_tensor\.h:\d+: CHECK\(p\)|Failed to map file to memory"
    r"|Resource temporarily unavailable"
)
_MIXED_TYPES: Final = re.compile(
    r"\((?P<node>[^\n]*?): (?:"
    r"\w+ must have same input types\. `A` is of type (?P<a>\w+) and `B` is of type (?P<b>\w+)"
    r"|\w+ \w+ must have same input types\. But they are of types (?P<c>\w+) and (?P<d>\w+)"
    r"|\w+ input and scale must have identical types)"
)


def _essence(text: str) -> str:
    """The first message without the names of TensorRT's functions and source files."""
    first = next(iter(_sentences(text.splitlines())), text.strip())
    return first if len(first) <= 300 else first[:297] + "..."


# The parser's error codes, and headings that only repeat the node's name.
_EMPTY_WORDS: Final = re.compile(r"[A-Z_]+$|Invalid Node - ")


def _sentences(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        plain = re.sub(r"\.? +In \S+ at /\S+:\d+\)*", "", line)
        plain = re.sub(r"^\S+: Error Code \d+: [\w ]+ \((.*?)\)?$", r"\1", plain)
        plain = re.sub(r"^Assertion failed: .*: (?=[A-Z])", "", plain)
        plain = re.sub(r"\[\S+\.(?:cpp|h):\d+: \w+\] ?", "", plain).strip()
        if plain and not _EMPTY_WORDS.match(plain):
            yield plain
