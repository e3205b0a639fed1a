"""Where in its module tree a node was exported from, as far as the exporter said."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_NAMESPACE = "namespace"
"""The metadata key under which the dynamo exporter keeps a node's modules."""


def module_path(node: ir.Node) -> tuple[str, ...]:
    """The modules around ``node``, outermost first; empty when the exporter did not say.

    The TorchScript exporter spells them in the node's name (``/transformer/layers.0/ff_norm/Pow``), the
    dynamo exporter in its metadata (``: Root/transformer.layers.0.ff_norm: Norm/pow_1: aten.pow``).
    """
    name = node.name or ""
    if name.startswith("/"):
        return _scopes(name.split("/")[1:-1])
    modules = node.metadata_props.get(_NAMESPACE, "").split("/")
    # The first entry is the root, the last the operator itself.
    return tuple(modules[-2].partition(":")[0].strip().split(".")) if len(modules) > 2 else ()


def _scopes(scopes: Sequence[str]) -> tuple[str, ...]:
    """The parts of ``ff/ff.0/proj``: a member of a sequence repeats the sequence's name."""
    parts: list[str] = []
    for before, scope in zip(("", *scopes), scopes, strict=False):
        parts.extend((scope.removeprefix(f"{before}.") if before else scope).split("."))
    return tuple(parts)


def common_prefix(paths: Sequence[tuple[str, ...]]) -> int:
    """How many leading parts all ``paths`` share."""
    shared = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    return shared
