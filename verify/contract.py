"""The engine's inputs and outputs against those of the source graph: what the runtime relies on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_builder.recipe import Profile
from engine_builder.source_graph import TensorSpec
from verify.identity import Check, Failure, Status
from verify.layers import UNKNOWN, EngineIO


def check_contract(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    engine: Sequence[EngineIO],
    profiles: Sequence[Profile],
) -> Check:
    """Names, types and shapes of every input and output, and the shapes each profile allows.

    The source graph is the reference: an engine has the same names and types in every precision.
    Without a record of the engine's inputs and outputs the check is not verifiable.
    """
    if not engine:
        return Check(
            "contract",
            Status.NOT_VERIFIABLE,
            len(inputs) + len(outputs),
            0,
            note="the layer table does not list the engine's inputs and outputs",
        )
    actual = {io.name: io for io in engine}
    failures: list[Failure] = []
    unknown: list[str] = []
    expected = [(spec, "input") for spec in inputs] + [(spec, "output") for spec in outputs]
    for spec, mode in expected:
        io = actual.pop(spec.name, None)
        reason = f"the engine has no such {mode}" if io is None else _differs(spec, mode, io, profiles)
        if reason:
            failures.append(Failure(spec.name, reason, (spec.name,), ()))
        elif io is not None and UNKNOWN in (io.dtype, io.mode):
            unknown.append(spec.name)
    kept = len(expected) - len(failures) - len(unknown)
    failures.extend(
        Failure(name, f"the engine has this {io.mode}, the source graph does not", (name,), ())
        for name, io in actual.items()
    )
    if failures:
        return Check("contract", Status.FAILED, len(expected), kept, tuple(failures))
    if unknown:
        note = f"the layer table does not tell the type of {', '.join(unknown)}"
        return Check("contract", Status.NOT_VERIFIABLE, len(expected), kept, note=note)
    return Check("contract", Status.PASSED, len(expected), kept)


def _differs(spec: TensorSpec, mode: str, io: EngineIO, profiles: Sequence[Profile]) -> str:
    if io.mode not in (mode, UNKNOWN):
        return f"it is an {io.mode} of the engine, not an {mode}"
    if io.mode == UNKNOWN:
        return ""
    dtype = spelled(spec)
    if io.dtype not in (dtype, UNKNOWN):
        return f"it is {io.dtype} in the engine, {dtype} in the source graph"
    dims = spec.shape
    if dims is not None and len(dims) != len(io.shape):
        return f"it has {len(io.shape)} dimensions in the engine, {len(dims)} in the source graph"
    for axis, (declared, built) in enumerate(zip(dims or (), io.shape, strict=False)):
        # An exporter may leave an output dimension symbolic that the engine knows to be fixed.
        if isinstance(declared, int) and built not in (declared, -1):
            return f"its dimension {axis} is {built} in the engine, {declared} in the source graph"
        if mode == "input" and isinstance(declared, int) and built == -1:
            return f"its dimension {axis} is dynamic in the engine, {declared} in the source graph"
    if mode == "input" and io.profiles and profiles:
        if len(io.profiles) != len(profiles):
            return f"the engine has {len(io.profiles)} profiles, the recipe {len(profiles)}"
        for index, (built_range, asked) in enumerate(zip(io.profiles, profiles, strict=True)):
            wanted = asked.shapes.get(spec.name)
            if wanted is None:
                continue  # a fixed shape, which was compared above
            for bound in ("min", "opt", "max"):
                have, want = getattr(built_range, bound), getattr(wanted, bound)
                if tuple(have) != tuple(want):
                    return (
                        f"profile {index} has {bound} {list(have)} in the engine, {list(want)} in the recipe"
                    )
    return ""


def spelled(spec: TensorSpec) -> str:
    """The type of a tensor as the layer records spell it."""
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(spec.dtype, spec.dtype)


def contract_json(engine: Sequence[EngineIO]) -> dict[str, Any]:
    """The engine's inputs and outputs, for the report."""

    def entry(io: EngineIO) -> Mapping[str, Any]:
        return {
            "name": io.name,
            "dtype": io.dtype,
            "shape": list(io.shape),
            "profiles": [{"min": list(r.min), "opt": list(r.opt), "max": list(r.max)} for r in io.profiles],
        }

    return {
        "inputs": [entry(io) for io in engine if io.mode == "input"],
        "outputs": [entry(io) for io in engine if io.mode == "output"],
        "unknown": [entry(io) for io in engine if io.mode not in ("input", "output")],
    }
