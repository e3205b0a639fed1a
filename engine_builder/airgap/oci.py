"""Reads a container image from an OCI layout, in a folder or in a tar archive, and copies it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from engine_builder.errors import RecipeError

_CHUNK: Final = 1 << 22
_MAX_JSON: Final = 16 << 20
_BLOBS: Final = "blobs/sha256/"


@dataclass(frozen=True)
class OciImage:
    """One image: its manifest's digest, the blobs it is made of, and the name it was stored under."""

    digest: str
    blobs: tuple[str, ...]
    name: str | None
    architecture: str


class Layout(Protocol):
    """An OCI layout as a set of named files."""

    def open(self, name: str) -> IO[bytes] | None:
        """The file, or None where there is none."""
        ...


@dataclass(frozen=True)
class _Folder:
    path: Path

    def open(self, name: str) -> IO[bytes] | None:
        file = self.path / name
        return file.open("rb") if file.is_file() else None


@dataclass(frozen=True)
class _Archive:
    tar: tarfile.TarFile
    members: Mapping[str, tarfile.TarInfo]

    def open(self, name: str) -> IO[bytes] | None:
        member = self.members.get(name)
        return None if member is None else self.tar.extractfile(member)


@contextlib.contextmanager
def open_layout(path: Path) -> Iterator[Layout]:
    """The OCI layout at ``path``, a folder or a tar archive (``docker save``, ``buildah push oci-archive:``).

    Raises:
        RecipeError: There is none.
    """
    if path.is_dir():
        yield _Folder(path)
        return
    try:
        with tarfile.open(path) as tar:
            yield _Archive(tar, {m.name.removeprefix("./"): m for m in tar.getmembers() if m.isreg()})
    except FileNotFoundError:
        raise RecipeError("no such image", where=str(path)) from None
    except tarfile.TarError as error:
        raise RecipeError(f"is no image archive: {error}", where=str(path)) from None


def read_image(layout: Layout, where: str) -> OciImage:
    """The one image of the layout, for one architecture.

    Raises:
        RecipeError: There is none, or several; ``where`` says of which file.
    """
    index = _json(layout, "index.json", where)
    descriptor = _only(index, where)
    name = (descriptor.get("annotations") or {}).get("io.containerd.image.name") or (
        descriptor.get("annotations") or {}
    ).get("org.opencontainers.image.ref.name")
    manifest = _json(layout, _blob(descriptor["digest"]), where)
    if "manifests" in manifest:
        descriptor = _only(manifest, where)
        manifest = _json(layout, _blob(descriptor["digest"]), where)
    blobs = (manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"]))
    config = _json(layout, _blob(blobs[0]), where)
    # A name without a tag is what some tools leave behind: the tag alone says nothing.
    named = name if name and ":" in name else None
    return OciImage(descriptor["digest"], blobs, named, str(config.get("architecture", "")))


def copy_image(layout: Layout, image: OciImage, folder: Path, where: str) -> None:
    """Writes ``image`` to ``folder`` as an OCI layout that holds nothing else.

    Raises:
        RecipeError: A blob is missing or damaged.
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for digest in dict.fromkeys([image.digest, *image.blobs]):
        source = layout.open(_blob(digest))
        if source is None:
            raise RecipeError(f"blob {digest} is missing", where=where)
        seen = hashlib.sha256()
        with source, (blobs / digest.removeprefix("sha256:")).open("wb") as target:
            while block := source.read(_CHUNK):
                seen.update(block)
                target.write(block)
        if f"sha256:{seen.hexdigest()}" != digest:
            raise _damaged(digest.removeprefix("sha256:"), where)
    manifest = (blobs / image.digest.removeprefix("sha256:")).read_bytes()
    descriptor = {
        "mediaType": json.loads(manifest).get("mediaType", "application/vnd.oci.image.manifest.v1+json"),
        "digest": image.digest,
        "size": len(manifest),
    }
    index = {"schemaVersion": 2, "manifests": [descriptor]}
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')


def _only(index: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The index's image; what build tools attest about it is no image."""
    images: list[Mapping[str, Any]] = [
        entry
        for entry in index.get("manifests", ())
        if (entry.get("platform") or {}).get("architecture") != "unknown"
    ]
    if len(images) != 1:
        raise RecipeError(
            f"holds {len(images)} images, and a bundle takes one",
            where=where,
            hint="save one tag for one platform",
        )
    return images[0]


def _json(layout: Layout, name: str, where: str) -> Mapping[str, Any]:
    file = layout.open(name)
    if file is None:
        raise RecipeError(
            f"has no {name}: it is no OCI layout", where=where, hint="docker save 25 and later write one"
        )
    with file:
        data = file.read(_MAX_JSON)
        if name.startswith(_BLOBS) and hashlib.sha256(data).hexdigest() != name.removeprefix(_BLOBS):
            raise _damaged(name.removeprefix(_BLOBS), where)
        try:
            value = json.loads(data)
        except ValueError as error:
            raise RecipeError(f"{name} is damaged: {error}", where=where) from None
    if not isinstance(value, dict):
        raise RecipeError(f"{name} is damaged", where=where)
    return value


def _blob(digest: object) -> str:
    text = str(digest)
    if not text.startswith("sha256:") or len(text) != 71 or not text[7:].isalnum():
        raise RecipeError(f"{text[:80]!r} is no SHA-256 digest")
    return f"{_BLOBS}{text[7:]}"


def _damaged(digest: str, where: str) -> RecipeError:
    return RecipeError(f"blob sha256:{digest} is damaged", where=where, hint="save the image again")
