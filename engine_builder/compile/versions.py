"""What differs between the versions of TensorRT that are supported: all of it in this one table.

From 10.15 to 11.x the classes, methods and arguments that the builder uses are the same.  What
changed are members of enumerations: 11.0 dropped everything that chose types by flag.  Integers
were renumbered too, so that members are only ever looked up by name.

``NetworkDefinitionCreationFlag.STRONGLY_TYPED`` is there in all of them; 11.x accepts it without
effect, because it builds nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from engine_builder.errors import PlatformError

Version = tuple[int, int]

OLDEST: Final[Version] = (10, 15)
"""The first version that is supported, which is the one that SA3's runtime loads engines of."""
BEFORE: Final[Version] = (12, 0)

GONE: Final[Mapping[str, Mapping[str, Version]]] = {
    "BuilderFlag": dict.fromkeys(
        (
            "BF16",
            "FP16",
            "FP4",
            "FP8",
            "INT4",
            "INT8",
            "OBEY_PRECISION_CONSTRAINTS",
            "PREFER_PRECISION_CONSTRAINTS",
            "REJECT_EMPTY_ALGORITHMS",
            "WEIGHTLESS",
        ),
        (11, 0),
    ),
    "NetworkDefinitionCreationFlag": {"EXPLICIT_BATCH": (11, 0)},
}
"""Members of the enumerations in use that some supported version lacks, and since when."""


def is_supported(version: str) -> bool:
    """Whether ``version``, such as ``10.15.1.29``, is one that the builder works with."""
    return OLDEST <= major_minor(version) < BEFORE


def major_minor(version: str) -> Version:
    """``(10, 15)`` of ``10.15.1.29``; ``(0, 0)`` where there is no version in the text."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def member(trt: Any, enumeration: str, name: str) -> Any:
    """Return ``trt.<enumeration>.<name>``.

    Raises PlatformError, with what the table knows of it, when this version has no such member.
    """
    found = getattr(getattr(trt, enumeration), name, None)
    if found is not None:
        return found
    gone = GONE.get(enumeration, {}).get(name)
    raise PlatformError(
        f"{trt.__name__} {trt.__version__} has no {enumeration}.{name}",
        hint=None if gone is None else f"it went with TensorRT {gone[0]}.{gone[1]}",
    )
