"""What an execution takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Bound = Literal["min", "opt", "max"]


@dataclass(frozen=True)
class LoadOptions:
    """How an engine has to be loaded, which follows from how it was built.

    ``host_code`` lets the engine bring its own runtime along, as a version-compatible one does;
    ``refit`` is the ONNX model whose weights a stripped engine gets back; ``plugins`` are the
    libraries that its layers come from.
    """

    host_code: bool = False
    refit: Path | None = None
    plugins: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ExecuteRequest:
    """An engine to run on every set of inputs and on every profile that holds their shapes.

    ``inputs`` are ``.npz`` files by input name; the outputs of ``inputs[i]`` on profile ``p`` go
    to ``<outputs>/<i>.<p>.npz`` by output name.
    """

    engine: Path
    inputs: tuple[Path, ...]
    outputs: Path
    load: LoadOptions = LoadOptions()


@dataclass(frozen=True)
class Latency:
    """Times of one inference at one bound of one profile, in milliseconds of the GPU's own clock.

    ``low_ms`` and ``high_ms`` are the 5th and the 95th percentile of ``runs`` warm inferences.
    """

    profile: int
    bound: Bound
    shapes: Mapping[str, tuple[int, ...]]
    median_ms: float
    low_ms: float
    high_ms: float
    runs: int


@dataclass(frozen=True)
class Run:
    """The outputs of one set of inputs on one profile."""

    sample: int
    profile: int
    outputs: Path


@dataclass(frozen=True)
class Execution:
    """What running an engine showed.

    ``context_bytes`` is the scratch memory that each profile needs, ``weights_bytes`` that of the
    weights, as TensorRT states them; ``loaded_bytes`` is what the GPU had less of once the engine
    and a context for its largest profile were loaded.
    """

    device: str
    runs: tuple[Run, ...]
    latencies: tuple[Latency, ...]
    context_bytes: tuple[int, ...]
    weights_bytes: int
    loaded_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the information section of ``.verify.json`` holds them."""
        return {
            "device": self.device,
            "weights_bytes": self.weights_bytes,
            "context_bytes": list(self.context_bytes),
            "loaded_bytes": self.loaded_bytes,
            "latency": [
                {
                    "profile": x.profile,
                    "bound": x.bound,
                    "shapes": {name: list(shape) for name, shape in x.shapes.items()},
                    "median_ms": round(x.median_ms, 4),
                    "p05_ms": round(x.low_ms, 4),
                    "p95_ms": round(x.high_ms, 4),
                    "runs": x.runs,
                }
                for x in self.latencies
            ],
        }
