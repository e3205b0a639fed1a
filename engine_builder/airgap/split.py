"""Cuts a bundle into parts that fit on media; ``verify_bundle.join_parts`` is the way back."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from engine_builder.airgap.verify_bundle import SIGNATURE, SUMS, TOOL, Parts
from engine_builder.cache import sha256_file
from engine_builder.durable import disk_error, write_durably
from engine_builder.errors import RecipeError

_CHUNK: Final = 1 << 22
_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_size(text: str) -> int:
    """``4GB``, ``700 MB``, ``2GiB`` or a number of bytes.

    Raises:
        RecipeError: It is none, or 0.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise RecipeError(f"--size must be a size such as 4GB or 700MiB, not {text!r}")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise RecipeError("--size must be at least one byte")
    return size


def split_bundle(bundle: Path, out: Path, part_bytes: int) -> tuple[Path, ...]:
    """Cuts ``bundle`` into parts of ``part_bytes`` in ``out``, with their table and the tool that joins
    them; returns the parts.

    Run again after an interruption it keeps the parts that are right and writes the rest.

    Raises:
        RecipeError: ``bundle`` is no signed bundle.
        ResourceError: ``out`` cannot be written to.
    """
    if not all((bundle / name).is_file() for name in (SUMS, SIGNATURE)):
        raise RecipeError("is no signed bundle", where=str(bundle), hint="make one with bundle make")
    names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    files = tuple((name, (bundle / name).stat().st_size) for name in names)
    total = sum(size for _, size in files)
    count = -(-total // part_bytes)
    sizes = [part_bytes] * (count - 1) + [total - part_bytes * (count - 1)]
    width = max(3, len(str(count)))
    planned = tuple((f"{bundle.name}.part{n:0{width}}", size, "") for n, size in enumerate(sizes, 1))
    plan = Parts(bundle.name, files, planned)
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = tuple(
            (name, size, _write_part(bundle, plan, index, out / name))
            for index, (name, size, _) in enumerate(planned)
        )
        shutil.copyfile(bundle / TOOL, out / TOOL)
        # Last: a folder without the table is not yet whole.
        table = Parts(bundle.name, files, written).to_json()
        write_durably(out / f"{bundle.name}.parts.json", table.encode())
    except OSError as error:
        raise disk_error(error, out) from error
    return tuple(out / name for name, _, _ in written)


def _write_part(bundle: Path, plan: Parts, index: int, target: Path) -> str:
    """Writes the part unless it is there already; returns its digest."""
    digest = hashlib.sha256()
    for block in _content(bundle, plan, index):
        digest.update(block)
    wanted = digest.hexdigest()
    if target.is_file() and target.stat().st_size == plan.parts[index][1] and sha256_file(target) == wanted:
        return wanted
    partial = target.with_name(f".{target.name}.partial")
    with partial.open("wb") as file:
        for block in _content(bundle, plan, index):
            file.write(block)
    partial.replace(target)
    return wanted


def _content(bundle: Path, plan: Parts, index: int) -> Iterator[bytes]:
    for name, offset, length in plan.pieces(index):
        with (bundle / name).open("rb") as file:
            file.seek(offset)
            while length:
                block = file.read(min(length, _CHUNK))
                if not block:
                    raise RecipeError("changed while it was split", where=str(bundle / name))
                yield block
                length -= len(block)
