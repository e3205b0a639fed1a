"""The container image that a build runs in, as it is told and as a manifest keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine_builder.manifest import Manifest

VARIABLE: Final = "SA3_BUILDER_IMAGE"
"""The environment variable in which a container is told the reference that it was started from."""


@dataclass(frozen=True)
class Image:
    """An image reference such as ``sa3-builder:0.1.0`` or ``sa3-builder@sha256:...``."""

    reference: str

    @property
    def digest(self) -> str | None:
        """``sha256:...`` when the reference names its content."""
        return self.reference.partition("@")[2] or None

    def to_manifest(self) -> dict[str, str]:
        """The manifest's ``image``."""
        named = {"reference": self.reference}
        return named if self.digest is None else {**named, "digest": self.digest}

    def built(self, manifest: Manifest) -> bool:
        """Whether the engine of ``manifest`` was built in this image."""
        known = manifest.image or {}
        if self.digest is not None and "digest" in known:
            return known["digest"] == self.digest
        return known.get("reference") == self.reference

    def __str__(self) -> str:
        return self.reference


def image_of(environment: Mapping[str, str]) -> Image | None:
    """The image that this process was told it runs in."""
    reference = environment.get(VARIABLE, "")
    return Image(reference) if reference else None
