"""The errors a user can meet, each with the process exit code it ends in.

Exit codes are part of the interface: Kubernetes' ``podFailurePolicy`` decides by them
whether a job is retried.  An error message says what is wrong, ``where`` says in which
file, line, node or path, and ``hint`` says what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class BuilderError(Exception):
    """Base of every expected error; printed in one line, without a traceback."""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text


class RecipeError(BuilderError):
    """The recipe or the command line asks for something that cannot be (exit code 2)."""

    exit_code = 2
    kind = "recipe"


class PlatformError(BuilderError):
    """This machine lacks what the build needs: GPU, architecture, TensorRT (exit code 3)."""

    exit_code = 3
    kind = "environment"


class SourceModelError(BuilderError):
    """The ONNX model, its sidecar or its scales are missing, damaged or foreign (exit code 4)."""

    exit_code = 4
    kind = "source model"


class ConversionError(BuilderError):
    """The graph could not be converted, or lacks what it must have (exit code 5)."""

    exit_code = 5
    kind = "conversion"


class CompileError(BuilderError):
    """TensorRT refused or failed to compile the converted graph (exit code 6)."""

    exit_code = 6
    kind = "compile"


class VerificationError(BuilderError):
    """The result is not what the recipe promises (exit code 7)."""

    exit_code = 7
    kind = "verification"


class ResourceError(BuilderError):
    """Memory, disk or a lock ran out; the same command may succeed later (exit code 8)."""

    exit_code = 8
    kind = "resources"


class Interrupted(BuilderError):
    """The build was told to stop, by the keyboard or by SIGTERM (exit code 130)."""

    exit_code = 130
    kind = "interrupted"
