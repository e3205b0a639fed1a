"""Counts that a recipe asks for, against the counts of an engine's layers."""

from __future__ import annotations

from engine_builder.recipe import CountBound, Expect
from verify.counts import LayerCounts
from verify.identity import Check, Failure, Status


def check_expectations(expect: Expect, counts: LayerCounts) -> tuple[Check, ...]:
    """One check per expectation of the recipe, in the order of its keys."""
    checks = [
        _check(f"expect.gemms.{dtype}", bound, counts.gemms.get(dtype, 0))
        for dtype, bound in expect.gemms.items()
    ]
    if expect.fused_attention is not None:
        wanted = expect.fused_attention
        types = wanted.type
        count = sum(n for dtype, n in counts.fused_attention.items() if not types or dtype in types)
        what = f" of type {' or '.join(types)}" if types else ""
        checks.append(_check("expect.fused_attention", wanted.count, count, what))
    if expect.runtime_trig is not None:
        checks.append(_check("expect.runtime_trig", expect.runtime_trig, counts.runtime_trig))
    return tuple(checks)


def _check(name: str, bound: CountBound, count: int, what: str = "") -> Check:
    if bound.holds(count):
        return Check(name, Status.PASSED, 1, 1, note=f"{count}{what}, asked for {bound}")
    return Check(
        name,
        Status.FAILED,
        1,
        0,
        (Failure(name, f"the engine has {count}{what}, the recipe asks for {bound}", (), ()),),
    )
