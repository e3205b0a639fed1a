"""YAML as plain values plus the line of every key, read with fixed bounds on time and memory.

Only what a recipe needs is understood: mappings with text keys, sequences, text, integers,
floats, booleans and null.  Anchors, aliases, merge keys, tags of any other kind and several
documents in one file are refused, so that a small file cannot grow into a large value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import yaml

from engine_builder.errors import RecipeError
from engine_builder.one_line import one_line

MAX_BYTES: Final = 1_000_000
"""Bytes in a recipe file; a real one has about a thousand."""
MAX_DEPTH: Final = 16
"""Nested collections; the deepest key of a recipe (a profile's shape) sits at depth 5."""
MAX_VALUES: Final = 10_000
"""Scalars and collections in one file, keys included."""
MAX_TEXT: Final = 4096
"""Characters in one scalar: PATH_MAX on Linux."""

Scalar = str | int | float | bool | None
Value = Scalar | tuple["Value", ...] | dict[str, "Value"]
KeyPath = tuple[str | int, ...]

_TRUE = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_PREFIX = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """A parsed file: its values (sequences as tuples) and the 1-based line of each key path."""

    value: Value
    lines: dict[KeyPath, int]

    def line(self, key: KeyPath) -> int:
        """Line of the key, or of its nearest ancestor that the file holds."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)


class _Loader(yaml.SafeLoader):
    """SafeLoader that composes bounded, alias-free trees and knows JSON's scalars plus on/off.

    YAML 1.1's other implicit types stay text: a sexagesimal like ``1:30:00`` or a long chain of
    them would otherwise become a number, and ``1e-3`` would not.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where = where
        self._depth = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        at = f"{self._where}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise RecipeError("anchors and aliases are not allowed", where=at, hint="write the value out")
        self._values += 1
        if self._values > MAX_VALUES:
            raise RecipeError(f"more than {MAX_VALUES} values in one recipe", where=at)
        if self._depth >= MAX_DEPTH:
            raise RecipeError(f"nested deeper than {MAX_DEPTH} levels", where=at)
        self._depth += 1
        try:
            node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[arg-type]
        finally:
            self._depth -= 1
        return node


for _tag, _pattern, _first in (
    ("bool", "|".join(sorted(_TRUE | _FALSE)), [*"tTyYfFnNoO"]),
    ("null", "|".join(sorted(_NULL, reverse=True)), ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|nan)",
        [*"-+.0123456789"],
    ),
):
    _Loader.add_implicit_resolver(_PREFIX + _tag, re.compile(f"(?:{_pattern})\\Z"), _first)


def read_yaml(data: bytes, where: str) -> Document:
    """Parse the bytes of one recipe file; ``where`` is its name for messages.

    Raises RecipeError (``where:line``) for text that is no UTF-8, no YAML, or outside the bounds
    of this module, and for a duplicate key.
    """
    if len(data) > MAX_BYTES:
        raise RecipeError(f"larger than {MAX_BYTES} bytes", where=where, hint="is this really a recipe?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"not UTF-8: byte 0x{data[error.start]:02x}",
            where=f"{where}:{line}",
            hint="save it as UTF-8 text",
        ) from None
    lines: dict[KeyPath, int] = {(): 1}
    try:
        loader = _Loader(text, where)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"character U+{ord(text[error.position]):04X} is not allowed in YAML", where=f"{where}:{line}"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = " ".join(filter(None, (error.context, error.problem))) or "cannot be parsed"
        raise RecipeError(f"not valid YAML: {one_line(problem, 160)}", where=f"{where}:{line}") from None
    except (ValueError, OverflowError):
        # An escape such as "\\UFFFFFFFF" or a directive's number beyond what Python converts.
        raise RecipeError("not valid YAML: a number is out of range", where=where) from None
    if node is None:
        raise RecipeError("the file is empty", where=f"{where}:1", hint="see recipes/smoke.yaml")
    return Document(_value(node, (), lines, where), lines)


def key_path(path: KeyPath) -> str:
    """``("profiles", 0, "x")`` as people write it: ``profiles[0].x``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{one_line(part)}" if text else one_line(part)
    return text


def _subject(path: KeyPath) -> str:
    return f"{key_path(path)}: " if path else ""


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], where: str) -> Value:
    at = f"{where}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
        result: dict[str, Value] = {}
        for key_node, value_node in node.value:
            key = _key(key_node, path, where)
            child = (*path, key)
            line = key_node.start_mark.line + 1
            if key in result:
                raise RecipeError(
                    f"{key_path(child)}: duplicate key, first given in line {lines[child]}",
                    where=f"{where}:{line}",
                )
            lines[child] = line
            result[key] = _value(value_node, child, lines, where)
        return result
    if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
        return tuple(_value(item, (*path, index), lines, where) for index, item in enumerate(node.value))
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, at)
    raise RecipeError(f"{_subject(path)}YAML tag {one_line(node.tag)} is not allowed", where=at)


def _key(node: yaml.Node, parent: KeyPath, where: str) -> str:
    at = f"{where}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.ScalarNode):
        raise RecipeError(f"{_subject(parent)}a list or mapping cannot be a key", where=at)
    key = _scalar(node, parent, at)
    if not isinstance(key, str):
        raise RecipeError(
            f"{_subject(parent)}key {one_line(node.value)} is not text",
            where=at,
            hint=f'write "{one_line(node.value)}"',
        )
    return key


def _scalar(node: yaml.ScalarNode, path: KeyPath, at: str) -> Scalar:
    text: str = node.value
    kind = node.tag.removeprefix(_PREFIX)
    if len(text) > MAX_TEXT:
        raise RecipeError(f"{_subject(path)}longer than {MAX_TEXT} characters", where=at)
    if kind == "str" or node.tag == "!":
        for character in text:
            if not character.isprintable():
                raise RecipeError(
                    f"{_subject(path)}character U+{ord(character):04X} is not allowed", where=at
                )
        return text
    try:
        if kind == "null" and text in _NULL:
            return None
        if kind == "bool" and text in _TRUE | _FALSE:
            return text in _TRUE
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        pass
    else:
        if kind not in {"null", "bool"}:
            raise RecipeError(f"{_subject(path)}YAML tag {one_line(node.tag)} is not allowed", where=at)
    raise RecipeError(f"{_subject(path)}{one_line(text)!r} is not a YAML {kind}", where=at)
