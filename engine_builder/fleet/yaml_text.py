"""YAML that comes out the same for the same values, on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Keeps the order of keys, writes texts of several lines as blocks, and has no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(documents: Sequence[Mapping[str, Any]], header: str = "") -> str:
    """The documents as one YAML text; ``header`` goes above them, each line as a comment."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    body = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
        explicit_start=len(documents) > 1,
    )
    return comment + body
