"""What the image knows of itself, written into it when it is built and into every manifest after that."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from engine_builder import __version__
from engine_builder.errors import PlatformError
from engine_builder.fleet.image import image_of

FOLDER: Final = Path("/etc/sa3-builder")
"""Where the image keeps its facts."""

FACTS: Final = "image.json"
SBOM: Final = "sbom.cdx.json"
UNRESOLVED: Final = "unresolved"


@dataclass(frozen=True)
class ImageFacts:
    """An image's make, by text; ``base_digest`` is ``unresolved`` when only the base's tag was known."""

    base: str
    base_digest: str
    backend: str
    tensorrt: str
    python: str
    version: str
    revision: str
    sbom_sha256: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def image_facts(
    *,
    base: str,
    base_digest: str,
    backend: str,
    tensorrt: str,
    expected: str,
    revision: str,
    sbom_sha256: str,
) -> ImageFacts:
    """The facts of an image with TensorRT version ``tensorrt``, if that is the ``expected`` one.

    An empty ``expected`` stands for bases that have no TensorRT; a shorter version, such as 10.15.1,
    for every one that begins so.

    Raises:
        PlatformError: It is another version, whose engines the runtime would not load.
    """
    if expected and tensorrt.split(".")[: len(expected.split("."))] != expected.split("."):
        raise PlatformError(
            f"the base image holds {backend} {tensorrt}, and {expected} was to be in it",
            where=base,
            hint="correct docker/base-images.json, or take the base image that has that version",
        )
    return ImageFacts(
        base=base,
        base_digest=base_digest,
        backend=backend,
        tensorrt=tensorrt,
        python=platform.python_version(),
        version=__version__,
        revision=revision,
        sbom_sha256=sbom_sha256,
    )


def recorded_image(environment: Mapping[str, str], folder: Path = FOLDER) -> dict[str, str] | None:
    """The manifest's ``image``: what the image holds of itself and the reference it was started by.

    None outside an image.

    Raises:
        PlatformError: The image's own facts are damaged.
    """
    named = image_of(environment)
    path = folder / FACTS
    try:
        facts = json.loads(path.read_text())
    except FileNotFoundError:
        facts = {}
    except (OSError, ValueError) as error:
        raise PlatformError(f"the image's facts cannot be read: {error}", where=str(path)) from error
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise PlatformError("the image's facts are damaged", where=str(path), hint="build the image again")
    found = {**facts, **({} if named is None else named.to_manifest())}
    return found or None
