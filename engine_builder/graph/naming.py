"""Names for the values and nodes that passes add."""

from __future__ import annotations

import onnx_ir as ir


class Names:
    """Every name in use in a graph and its subgraphs; hands out others.

    Values and nodes share one set, so that a Cast may carry one name for itself and its output.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._counts: dict[str, int] = {}
        self._used: set[str] = {v.name for v in (*graph.inputs, *graph.outputs) if v.name}
        self._used.update(graph.initializers)
        for node in graph.all_nodes():
            self._used.update(v.name for v in node.outputs if v.name)
            self._used.update(v.name for v in node.inputs if v is not None and v.name)
            if node.name:
                self._used.add(node.name)
            if node.graph is not None and node.graph is not graph:
                self._used.update(v.name for v in node.graph.inputs if v.name)
                self._used.update(node.graph.initializers)

    def fresh(self, base: str) -> str:
        """``base``, or the first of ``base_1``, ``base_2``... that is free; it is taken from now on."""
        name, count = base, self._counts.get(base, 0)
        while name in self._used:
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count  # where to go on: many nodes may ask for the same base
        self._used.add(name)
        return name
