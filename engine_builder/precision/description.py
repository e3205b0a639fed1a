"""What a converted model says of itself in its metadata, so that the file alone can be verified.

``sa3_builder.precision`` is the recipe's name for it, ``sa3_builder.options`` every resolved option and
``sa3_builder.fp8_linears`` the nodes that were quantized, both as JSON with sorted keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from engine_builder.errors import SourceModelError
from engine_builder.precision.options import ConversionOptions

DESCRIPTION_VERSION: Final = 1
"""Raised when the same conversion describes itself otherwise."""

_PRECISION: Final = "sa3_builder.precision"
_OPTIONS: Final = "sa3_builder.options"
_LINEARS: Final = "sa3_builder.fp8_linears"


@dataclass(frozen=True)
class Description:
    """The options of a conversion, and the names of the linears that it quantized to fp8."""

    options: ConversionOptions
    fp8_linears: tuple[str, ...]


def description(options: ConversionOptions, fp8_linears: Sequence[str]) -> dict[str, str]:
    """The metadata entries of a converted model; equal arguments give equal text."""
    return {
        _PRECISION: options.recipe,
        _OPTIONS: json.dumps(options.canonical(), sort_keys=True),
        _LINEARS: json.dumps(list(fp8_linears)),
    }


def read_description(metadata: Mapping[str, str], where: str) -> Description | None:
    """What a model's metadata says of its conversion; None for a model that was not converted here.

    Raises:
        SourceModelError: The entries cannot be understood, as when a newer version wrote them.
    """
    if _OPTIONS not in metadata:
        return None
    try:
        options = _OPTIONS_TYPE.validate_json(metadata[_OPTIONS])
        # An option that is not known here may be one that changes what is promised.
        unknown = set(json.loads(metadata[_OPTIONS])) - {field.name for field in fields(options)}
        if unknown:
            raise ValueError(f"the option {min(unknown)} is not known")
        linears: Any = json.loads(metadata.get(_LINEARS, "[]"))
        if not isinstance(linears, list) or not all(isinstance(name, str) for name in linears):
            raise ValueError(f"{_LINEARS} is no list of names")
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise _unreadable(f"{place}: {fault['msg']}" if place else fault["msg"], where) from None
    except ValueError as error:
        raise _unreadable(str(error), where) from None
    return Description(options, tuple(linears))


def _unreadable(reason: str, where: str) -> SourceModelError:
    return SourceModelError(
        f"its metadata of the conversion cannot be understood: {reason}",
        where=where,
        hint="convert the model again with this version",
    )


_OPTIONS_TYPE: Final = TypeAdapter(ConversionOptions)
