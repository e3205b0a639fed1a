"""Judges a machine, alone or for one recipe: each finding says what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine_builder.compile.backend import Backend, build_files, sm_list
from engine_builder.doctor.machine import Library, Machine
from engine_builder.durable import free_bytes
from engine_builder.errors import BuilderError, PlatformError
from engine_builder.fleet.resources import LARGEST_KNOWN, needs, source_size
from engine_builder.recipe import Recipe

SCHEMA: Literal["sa3-builder/doctor/1"] = "sa3-builder/doctor/1"

_GIB: Final = 2**30

Level = Literal["ok", "warning", "problem"]


class Finding(BaseModel):
    """One thing found: a problem keeps a build from succeeding, a warning may."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Level
    subject: str
    text: str
    fix: str | None = None


class Diagnosis(BaseModel):
    """What a machine is and what was found; ``able`` is False when there is a problem."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: Annotated[Literal["sa3-builder/doctor/1"], Field(alias="schema")] = SCHEMA
    able: bool
    recipe: str | None
    machine: Machine
    findings: tuple[Finding, ...]

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def diagnose(machine: Machine, findings: tuple[Finding, ...], recipe: str | None = None) -> Diagnosis:
    """The diagnosis that the findings amount to."""
    able = all(finding.level != "problem" for finding in findings)
    return Diagnosis(able=able, recipe=recipe, machine=machine, findings=findings)


def examine_machine(machine: Machine) -> tuple[Finding, ...]:
    """What can be done on this machine; without a recipe nothing is a problem."""
    return tuple(_machine(machine))


def _machine(machine: Machine) -> Iterator[Finding]:
    yield from _gpus(machine)
    if machine.tensorrt.version is None:
        yield _missing("tensorrt", machine.tensorrt)
    elif machine.visible_sm is None:
        yield Finding(
            level="warning",
            subject="tensorrt",
            text=f"TensorRT {machine.tensorrt.version} needs the GPU that it builds for, and CUDA shows none",
            fix="run with --gpus all, or build ahead of time with target.backend: tensorrt_rtx",
        )
    else:
        text = f"TensorRT {machine.tensorrt.version} builds for sm_{machine.visible_sm}"
        yield Finding(level="ok", subject="tensorrt", text=text)
    if machine.tensorrt_rtx.version is None:
        yield _missing("tensorrt_rtx", machine.tensorrt_rtx)
    else:
        text = f"TensorRT-RTX {machine.tensorrt_rtx.version} builds for {sm_list(machine.rtx_sms)}"
        yield Finding(level="ok", subject="tensorrt_rtx", text=f"{text}, without a GPU")
    yield from _running(machine)
    if machine.modelopt.version is None:
        yield _missing("calibration", machine.modelopt)
    else:
        text = f"ModelOpt {machine.modelopt.version} calibrates fp8"
        yield Finding(level="ok", subject="calibration", text=text)
    if machine.onnxruntime.version is None:
        yield _missing("fidelity", machine.onnxruntime)


def _gpus(machine: Machine) -> Iterator[Finding]:
    if machine.driver is None:
        text = machine.driver_problem or "no NVIDIA driver"
        yield Finding(
            level="warning",
            subject="driver",
            text=text,
            fix="to build for a GPU of this machine install its driver, or run with --gpus all",
        )
        return
    text = f"driver {machine.driver}, which runs CUDA up to {machine.driver_cuda}"
    yield Finding(level="ok", subject="driver", text=text)
    for gpu in machine.gpus:
        text = f"{gpu.name}, sm_{gpu.sm}, {_gib(gpu.free_bytes)} of {_gib(gpu.memory_bytes)} free"
        yield Finding(level="ok", subject=f"gpu {gpu.index}", text=text)
    if machine.gpus and machine.visible_sm is None:
        yield Finding(
            level="warning",
            subject="cuda",
            text="CUDA shows none of these GPUs",
            fix="unset CUDA_VISIBLE_DEVICES, or give the container the compute capability of the driver",
        )
    elif len({gpu.sm for gpu in machine.gpus}) > 1:
        yield Finding(
            level="warning",
            subject="cuda",
            text=f"the GPUs differ, and CUDA would use the one of sm_{machine.visible_sm}",
            fix="choose another with CUDA_VISIBLE_DEVICES",
        )


def _running(machine: Machine) -> Iterator[Finding]:
    if machine.visible_sm is None:
        return
    if machine.cuda_bindings.version is None:
        yield _missing("execution", machine.cuda_bindings)
    else:
        text = f"cuda-bindings {machine.cuda_bindings.version} runs engines for sm_{machine.visible_sm}"
        yield Finding(level="ok", subject="execution", text=text)


def _missing(subject: str, library: Library) -> Finding:
    return Finding(level="warning", subject=subject, text=library.problem or "", fix=library.fix)


def examine_recipe(
    machine: Machine, recipe: Recipe, backend: Backend, cache: Path, *, allow_plugins: bool = False
) -> tuple[Finding, ...]:
    """What keeps the recipe from being built here.

    The backend answers as it would answer the build, so that both refuse the same.
    """
    # Without a GPU a backend that cross-compiles lacks nothing.
    gpus = () if backend.cross_compiles and machine.driver is None else _gpus(machine)
    return (
        *gpus,
        *_targets(machine, recipe, backend),
        *_options(recipe, backend, allow_plugins),
        *_files(machine, recipe),
        *_room(machine, recipe, cache),
    )


def _targets(machine: Machine, recipe: Recipe, backend: Backend) -> Iterator[Finding]:
    try:
        version = backend.version()
    except PlatformError as error:
        yield _problem(backend.name, error)
        return
    for sm in recipe.target.sm:
        subject = f"{backend.name} {version}, sm_{sm}"
        reason = backend.check_support(recipe.precision.recipe, sm)
        if reason is not None:
            fix = "choose another precision or another target.sm"
            yield Finding(level="problem", subject=subject, text=reason, fix=fix)
            continue
        try:
            backend.check_target(sm)
        except PlatformError as error:
            yield _problem(subject, error)
            continue
        runs = backend.can_execute(sm)
        text = f"builds {recipe.precision.recipe}" + ("" if runs else ", and does not run it here")
        yield Finding(level="ok", subject=subject, text=text)
        if runs:
            yield from (finding for finding in _running(machine) if finding.level != "ok")


def _options(recipe: Recipe, backend: Backend, allow_plugins: bool) -> Iterator[Finding]:
    for key, reason in backend.refused_options(recipe.build, recipe.target.sm).items():
        yield Finding(level="problem", subject=f"build.{key}", text=reason, fix=f"leave build.{key} out")
    if recipe.build.plugins and not allow_plugins:
        yield Finding(
            level="problem",
            subject="build.plugins",
            text="plugins are code that the build runs, and are not allowed by default",
            fix="build with --allow-plugins if you trust them",
        )
    for path in build_files(recipe.build):
        if not path.is_file():
            fix = "correct the recipe's build section"
            yield Finding(level="problem", subject="build", text=f"no such file: {path}", fix=fix)


def _files(machine: Machine, recipe: Recipe) -> Iterator[Finding]:
    if recipe.verify.fidelity is not None and machine.onnxruntime.version is None:
        yield Finding(
            level="problem",
            subject="fidelity",
            text=machine.onnxruntime.problem or "",
            fix=machine.onnxruntime.fix,
        )
    if recipe.precision.recipe != "fp8":
        return
    scales = recipe.precision.scales
    if scales is None or not scales.is_file():
        able = machine.modelopt.version is not None
        yield Finding(
            level="problem",
            subject="precision.scales",
            text="fp8 needs calibrated scales, and "
            + ("the recipe names none" if scales is None else f"{scales} does not exist"),
            fix=f"entrypoint.py calibrate {recipe.path} --out scales.json"
            + ("" if able else f", after this: {machine.modelopt.fix}"),
        )


def _room(machine: Machine, recipe: Recipe, cache: Path) -> Iterator[Finding]:
    try:
        size = source_size(recipe)
    except BuilderError as error:
        yield _problem("model", error)
        return
    if size is None:
        text = f"no such model: {recipe.model.onnx}"
        yield Finding(
            level="problem", subject="model", text=text, fix="correct model.onnx or mount the models"
        )
    need = needs(recipe, LARGEST_KNOWN if size is None else size)
    memory, disk = need.memory * _GIB, need.scratch * _GIB
    if machine.memory_bytes < memory:
        yield Finding(
            level="problem",
            subject="memory",
            text=f"{_gib(machine.memory_bytes)} in all, and the build may take {_gib(memory)}",
            fix="raise the container's limit, or build on a larger machine",
        )
    elif machine.available_bytes < memory:
        yield Finding(
            level="warning",
            subject="memory",
            text=f"{_gib(machine.available_bytes)} free, and the build may take {_gib(memory)}",
            fix="stop what else uses memory here",
        )
    else:
        text = f"{_gib(machine.available_bytes)} free, for at most {_gib(memory)}"
        yield Finding(level="ok", subject="memory", text=text)
    yield from (_disk(name, folder, disk) for name, folder in _folders(recipe, cache))


def _folders(recipe: Recipe, cache: Path) -> tuple[tuple[str, Path], ...]:
    return ("cache", cache), ("output", recipe.output.dir)


def _disk(name: str, folder: Path, needed: int) -> Finding:
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fix = "make it writable for this user, or choose another folder"
        return Finding(level="problem", subject=name, text=f"{there} cannot be written to", fix=fix)
    free = free_bytes(folder)
    if free is not None and free < needed:
        return Finding(
            level="problem",
            subject=name,
            text=f"{_gib(free)} free at {there}, and the build may write {_gib(needed)}",
            fix="free space there, or choose another folder",
        )
    room = "unknown room" if free is None else f"{_gib(free)} free"
    return Finding(level="ok", subject=name, text=f"{room} at {there}, for at most {_gib(needed)}")


def _problem(subject: str, error: BuilderError) -> Finding:
    text = f"{error.where}: {error.message}" if isinstance(error.where, str) else error.message
    return Finding(level="problem", subject=subject, text=text, fix=error.hint)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
