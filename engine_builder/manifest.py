"""The manifest beside each engine: what it was made from, by hash and version."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Literal["sa3-builder/manifest/1"] = "sa3-builder/manifest/1"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class ManifestFile(_Section):
    """A file by name, size and content."""

    name: str
    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class ManifestStage(_Section):
    """One stage of the build: its content key, whether the cache had its result, and its time."""

    name: str
    key: str
    cached: bool
    reason: str
    seconds: Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Origin:
    """What a build was made from: the fields of a manifest but for the published files."""

    model: str
    kind: str
    precision: str
    sm: int
    backend: str
    recipe: ManifestFile
    recipe_digest: str
    source: tuple[ManifestFile, ...]
    source_sha256: str
    converted: tuple[ManifestFile, ...]
    scales: ManifestFile | None
    versions: dict[str, str]
    image: dict[str, str] | None
    stages: tuple[ManifestStage, ...]
    total_seconds: float


class Manifest(_Section):
    """What an engine was made from, so that a fleet can tell which engines are stale."""

    schema_version: Annotated[Literal["sa3-builder/manifest/1"], Field(alias="schema")] = SCHEMA
    engine: ManifestFile
    report: ManifestFile
    model: str
    kind: str
    precision: str
    sm: int
    backend: str
    recipe: ManifestFile
    recipe_digest: Annotated[
        Sha256,
        Field(description="Of what the recipe asks for on this architecture, whatever the file's layout."),
    ]
    source: Annotated[tuple[ManifestFile, ...], Field(description="The source model, then its sidecars.")]
    source_sha256: Sha256
    converted: Annotated[tuple[ManifestFile, ...], Field(description="The converted graph and its sidecar.")]
    scales: ManifestFile | None
    versions: Annotated[dict[str, str], Field(description="Everything whose version shapes the result.")]
    image: Annotated[dict[str, str] | None, Field(description="The container image, if built in one.")]
    stages: tuple[ManifestStage, ...]
    total_seconds: Annotated[float, Field(ge=0)]

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def origin_of(manifest: Manifest) -> Origin:
    """What the engine of ``manifest`` was made from."""
    return Origin(**{field.name: getattr(manifest, field.name) for field in fields(Origin)})


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema of ``.manifest.json``."""
    schema = Manifest.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}
