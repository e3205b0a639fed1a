"""Provenance of an engine: an in-toto statement that says what was built, from what, and by what.

The statement is derived from the engine's manifest and names the manifest's digest, so that it can be made
again at any time and checked against the files.  It is not signed: signing is the site's, which has the keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_builder.errors import SourceModelError, VerificationError
from engine_builder.manifest import Manifest, ManifestFile
from engine_builder.source import file_sha256

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "urn:sa3-builder:build:1"

Digest = Annotated[
    dict[Literal["sha256"], Annotated[str, Field(pattern="^[0-9a-f]{64}$")]], Field(min_length=1)
]


class _Part(BaseModel):
    # The formats allow further fields; other tools may add them.
    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Resource(_Part):
    """A file or image by name and content; an image of which only the tag was known has no digest."""

    name: str
    digest: Digest | None = None
    annotations: dict[str, str] | None = None


class BuildDefinition(_Part):
    """What was asked for, and everything that went in."""

    build_type: Annotated[str, Field(alias="buildType")]
    external_parameters: Annotated[dict[str, Any], Field(alias="externalParameters")]
    internal_parameters: Annotated[dict[str, Any], Field(alias="internalParameters")]
    resolved_dependencies: Annotated[tuple[Resource, ...], Field(alias="resolvedDependencies")]


class Builder(_Part):
    """The image that built it, and the versions in it."""

    id: str
    version: dict[str, str]


class RunDetails(_Part):
    """Who built it, and what else came of it."""

    builder: Builder
    byproducts: tuple[Resource, ...]


class Predicate(_Part):
    """SLSA provenance, version 1."""

    build_definition: Annotated[BuildDefinition, Field(alias="buildDefinition")]
    run_details: Annotated[RunDetails, Field(alias="runDetails")]


class Statement(_Part):
    """An in-toto statement, version 1, about one engine."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")] = STATEMENT
    subject: Annotated[tuple[Resource, ...], Field(min_length=1)]
    predicate_type: Annotated[Literal["https://slsa.dev/provenance/v1"], Field(alias="predicateType")] = (
        PREDICATE
    )
    predicate: Predicate

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n"


def statement_for(manifest: Manifest, manifest_bytes: bytes, manifest_name: str) -> Statement:
    """The provenance of the engine that ``manifest`` describes; ``manifest_bytes`` are the file's."""
    image = manifest.image or {}
    return Statement(
        subject=(_file(manifest.engine),),
        predicate=Predicate(
            build_definition=BuildDefinition(
                build_type=BUILD_TYPE,
                external_parameters={
                    "recipe": manifest.recipe.name,
                    "recipe_digest": manifest.recipe_digest,
                    "model": manifest.model,
                    "precision": manifest.precision,
                    "sm": manifest.sm,
                    "backend": manifest.backend,
                },
                internal_parameters={"stages": {stage.name: stage.key for stage in manifest.stages}},
                resolved_dependencies=_dependencies(manifest, image),
            ),
            run_details=RunDetails(
                builder=Builder(id=_builder(image, manifest.versions), version=manifest.versions),
                byproducts=(
                    _file(manifest.report),
                    Resource(
                        name=manifest_name, digest={"sha256": hashlib.sha256(manifest_bytes).hexdigest()}
                    ),
                    *(_file(file, {"role": "converted model"}) for file in manifest.converted),
                ),
            ),
        ),
    )


def _dependencies(manifest: Manifest, image: Mapping[str, str]) -> tuple[Resource, ...]:
    found = [_file(manifest.recipe, {"role": "recipe"})]
    found += [_file(file, {"role": "source model"}) for file in manifest.source]
    if manifest.scales is not None:
        found.append(_file(manifest.scales, {"role": "scales"}))
    for role, name, digest in (
        ("builder image", image.get("reference"), image.get("digest")),
        ("base image", image.get("base"), image.get("base_digest")),
    ):
        if name is not None:
            found.append(
                Resource(name=name, digest=_image_digest(digest), annotations={"role": role, **_why(digest)})
            )
    if "sbom_sha256" in image:
        found.append(
            Resource(
                name="sbom.cdx.json",
                digest={"sha256": image["sbom_sha256"]},
                annotations={"role": "bill of materials"},
            )
        )
    return tuple(found)


def _image_digest(text: str | None) -> Digest | None:
    return {"sha256": text.removeprefix("sha256:")} if text and text.startswith("sha256:") else None


def _why(digest: str | None) -> dict[str, str]:
    return {} if _image_digest(digest) else {"digest": "unresolved: only the tag was known"}


def _builder(image: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """What names the builder: its image where its digest is known, else its version."""
    if "digest" in image:
        return f"pkg:oci/sa3-builder@{image['digest']}"
    return f"urn:sa3-builder:builder:{versions['sa3-builder']}"


def _file(file: ManifestFile, annotations: dict[str, str] | None = None) -> Resource:
    return Resource(name=file.name, digest={"sha256": file.sha256}, annotations=annotations)


def read_manifest(engine: Path) -> tuple[Manifest, bytes, Path]:
    """The manifest beside ``engine``: parsed, as bytes, and where it is.

    Raises:
        SourceModelError: There is none, or it is not one.
    """
    path = engine.with_name(f"{engine.name.removesuffix('.trt')}.manifest.json")
    try:
        data = path.read_bytes()
        return Manifest.model_validate_json(data), data, path
    except (OSError, ValidationError) as error:
        raise SourceModelError(f"no manifest of {engine.name}: {_first(error)}", where=str(path)) from error


def check(statement: bytes, engine: Path, files: Sequence[Path] = ()) -> Statement:
    """Checks a provenance statement against the engine, its manifest and report, and ``files``.

    ``files`` are materials at hand (the recipe, the source model, scales): each must be one that the
    statement names, by content.

    Raises:
        SourceModelError: It is no such statement, or a file is missing.
        VerificationError: It does not fit the files; the message says which.
    """
    try:
        given = Statement.model_validate_json(statement)
    except ValidationError as error:
        raise SourceModelError(f"no provenance statement: {_first(error)}") from error
    manifest, manifest_bytes, manifest_path = read_manifest(engine)
    expected = statement_for(manifest, manifest_bytes, manifest_path.name)
    if given != expected:
        raise VerificationError(
            f"it is not about the engine that {manifest_path.name} describes: {_difference(given, expected)}",
            where=str(engine),
        )
    named = {r.digest["sha256"] for r in given.predicate.build_definition.resolved_dependencies if r.digest}
    report = engine.with_name(manifest.report.name)
    for path, wanted in (
        (engine, {manifest.engine.sha256}),
        (report, {manifest.report.sha256}),
        *((path, named) for path in files),
    ):
        if not path.is_file():
            raise SourceModelError("no such file", where=str(path))
        if file_sha256(path) not in wanted:
            raise VerificationError("its content is not what the statement names", where=str(path))
    return given


def _difference(given: Statement, expected: Statement) -> str:
    """The first place where two statements differ."""
    return _differing(given.model_dump(by_alias=True), expected.model_dump(by_alias=True), "")


def _differing(one: object, other: object, place: str) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key):
                return _differing(one.get(key), other.get(key), f"{place}.{key}" if place else str(key))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            if pair[0] != pair[1]:
                return _differing(*pair, f"{place}[{index}]")
    return f"{place} differs"


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
