"""The JSON Schemas of the files that the builder reads and writes, by the name of their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

from engine_builder.manifest import manifest_schema
from engine_builder.quantize.scales import scales_schema
from engine_builder.recipe import recipe_schema
from verify.report import verify_schema


class SchemaName(StrEnum):
    """The kinds of files that have a schema."""

    VERIFY = "verify"
    RECIPE = "recipe"
    SCALES = "scales"
    MANIFEST = "manifest"


SCHEMAS: Final[Mapping[SchemaName, Callable[[], dict[str, Any]]]] = {
    SchemaName.VERIFY: verify_schema,
    SchemaName.RECIPE: recipe_schema,
    SchemaName.SCALES: scales_schema,
    SchemaName.MANIFEST: manifest_schema,
}
