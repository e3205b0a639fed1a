"""Writes the recipe reference page from the recipe's own schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine_builder.recipe import PRECISION_OPTIONS, recipe_schema

_HEAD = """# Recipe reference

Written by `make docs` from the schema that recipes are checked with; do not edit. Relative paths
are relative to the recipe. Unknown and repeated keys are errors. For completion and checks in an
editor, begin a recipe with

```yaml
# yaml-language-server: $schema=schema/recipe.schema.json
```

"""


def recipe_reference() -> str:
    """The page as Markdown: one table per section, one row per key."""
    schema = recipe_schema()
    definitions = schema.get("$defs", {})
    lines = [_HEAD.rstrip(), ""]
    for title, section in _sections("", schema, definitions, set()):
        lines += [f"## {title or 'Top level'}", ""]
        description = " ".join(str(section.get("description", "")).split())
        if description:
            lines += [description, ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        required = section.get("required", [])
        for key, value in section["properties"].items():
            default = "required" if key in required else _default(value)
            meaning = " ".join(str(value.get("description", "")).split())
            if title == "precision" and key in PRECISION_OPTIONS:
                meaning = f"{meaning} For {', '.join(PRECISION_OPTIONS[key])}.".strip()
            lines.append(f"| `{key}` | {_type(value, definitions)} | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _sections(
    title: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], seen: set[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield title, schema
    for key, value in schema.get("properties", {}).items():
        for name in _references(value):
            section = definitions[name]
            if name not in seen and "properties" in section:
                seen.add(name)
                yield from _sections(f"{title}.{key}".lstrip("."), section, definitions, seen)


def _references(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "$ref":
                yield str(item).rpartition("/")[2]
            else:
                yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _default(value: Mapping[str, Any]) -> str:
    if "default" not in value or value["default"] is None:
        return ""
    text = json.dumps(value["default"])
    return f"`{text}`" if len(text) <= 60 else "see its section"


def _type(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """The type of a key in a few words."""
    if "$ref" in value:
        target = definitions[str(value["$ref"]).rpartition("/")[2]]
        return "section" if "properties" in target else _type(target, definitions)
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    for union in ("anyOf", "oneOf", "allOf"):
        if union in value:
            parts = [_type(part, definitions) for part in value[union] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts))
    kind = value.get("type")
    if kind == "array":
        items = value.get("items") or (value.get("prefixItems") or [{}])[0]
        return f"list of {_type(items, definitions)}"
    if kind == "object":
        inner = value.get("additionalProperties")
        return f"mapping to {_type(inner, definitions)}" if isinstance(inner, Mapping) else "mapping"
    bounds = [f"{sign} {value[k]}" for k, sign in _BOUNDS.items() if k in value]
    name = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return " ".join([name.get(str(kind), str(kind or "any")), *bounds])


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
