"""What Kubernetes does about each of the builder's exit codes."""

from __future__ import annotations

from typing import Any, Final

from engine_builder.errors import (
    BuilderError,
    ConversionError,
    PlatformError,
    RecipeError,
    ResourceError,
    SourceModelError,
    VerificationError,
)

CONTAINER: Final = "build"

_HOPELESS: Final[tuple[type[BuilderError], ...]] = (
    RecipeError,
    SourceModelError,
    ConversionError,
    VerificationError,
)
"""Errors that the same command on the same files meets again."""

ADVICE: Final = (
    "the node is not what the recipe needs: compare sa3-builder/sm with the node's labels "
    "nvidia.com/gpu.compute.major and .minor, and the image's TensorRT with the recipe's backend; "
    "the pod's termination message says which"
)
"""For exit code 3, which no retry on the same kind of node mends."""


def pod_failure_policy(*, indexed: bool) -> dict[str, Any]:
    """The ``podFailurePolicy`` of a Job; in an Indexed Job a hopeless build ends its own index alone.

    The first rule that matches decides.  A compile error (6), a kill by the kernel (137) and
    whatever else matches none is retried and counted, as is 8 by a rule of its own.
    """
    give_up = "FailIndex" if indexed else "FailJob"
    return {
        "rules": [
            # Preemption, eviction, a drained node: not the build's fault, whatever its exit code.
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            _on_exit(give_up, *_HOPELESS),
            _on_exit(give_up, PlatformError),
            _on_exit("Count", ResourceError),
        ]
    }


def _on_exit(action: str, *errors: type[BuilderError]) -> dict[str, Any]:
    codes = sorted(error.exit_code for error in errors)
    return {
        "action": action,
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes},
    }
