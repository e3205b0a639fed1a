#!/usr/bin/env python3
"""The base images that the builder's image may stand on, pinned in ``base-images.json``.

    base_images.py args [BASE]    the build arguments for a base, one NAME=VALUE a line
    base_images.py lock           asks the registries which digests the tags have now, and writes them down

A tag can be moved; a digest cannot.  Until ``lock`` has been run where the registry can be reached, the
digest is unresolved: ``args`` says so on standard error, and the image and every manifest record it.  Needs
nothing but Python's standard library.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("base-images.json")

# What a tag may stand for.  An index lists one manifest per architecture; either is named by a digest of its
# own, and the same tag is seen with both, so the lock says which kind was pinned.
KINDS = {
    "application/vnd.oci.image.index.v1+json": "index",
    "application/vnd.docker.distribution.manifest.list.v2+json": "index",
    "application/vnd.oci.image.manifest.v1+json": "manifest",
    "application/vnd.docker.distribution.manifest.v2+json": "manifest",
}
TIMEOUT_SECONDS = 30


class LockError(Exception):
    """The lock file or a registry's answer is not what it should be."""


@dataclass(frozen=True)
class Base:
    """One base image: its tag, the TensorRT version it must hold, and the digest if it is resolved."""

    image: str
    tensorrt: str
    python: str
    digest: str | None
    digest_kind: str | None

    def arguments(self) -> dict[str, str]:
        """The Dockerfile's build arguments that depend on the base."""
        pinned = self.image if self.digest is None else f"{self.image}@{self.digest}"
        return {
            "BASE_IMAGE": pinned,
            "BASE_DIGEST": "unresolved" if self.digest is None else self.digest,
            "TENSORRT_VERSION": self.tensorrt,
        }


def load(path: Path) -> tuple[str, dict[str, Base]]:
    """The name of the default base, and every base by name.

    Raises:
        LockError: The file is not such a lock.
    """
    try:
        lock = json.loads(path.read_text())
        bases = {name: Base(**fields) for name, fields in lock["bases"].items()}
        default = lock["default"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LockError(f"{path}: {error}") from error
    for name, base in bases.items():
        if base.digest is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", base.digest):
            raise LockError(f"{path}: {name}: {base.digest!r} is no digest")
    if default not in bases:
        raise LockError(f"{path}: the default {default!r} is none of {', '.join(bases)}")
    return default, bases


@dataclass(frozen=True)
class Reference:
    """An image reference in its parts."""

    registry: str
    repository: str
    tag: str

    @staticmethod
    def parse(text: str) -> Reference:
        match = re.fullmatch(r"(?P<registry>[^/]+[.:][^/]*)/(?P<repository>[^:@]+):(?P<tag>[\w.-]+)", text)
        if match is None:
            raise LockError(f"{text!r} is not REGISTRY/REPOSITORY:TAG")
        return Reference(**match.groupdict())

    @property
    def url(self) -> str:
        # As container tools do: a registry on this machine is spoken to without TLS.
        scheme = "http" if re.match(r"(localhost|127\.0\.0\.1)(:|$)", self.registry) else "https"
        return f"{scheme}://{self.registry}/v2/{self.repository}/manifests/{self.tag}"


def resolve(reference: Reference) -> tuple[str, str]:
    """The digest that the tag has in its registry now, and what kind of thing that is.

    Speaks the registry protocol (OCI distribution specification), anonymously.

    Raises:
        LockError: The registry cannot be reached, refuses, or answers something else.
    """
    accept = {"Accept": ", ".join(KINDS)}
    try:
        try:
            answer = _head(reference.url, accept)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            token = _token(error.headers.get("WWW-Authenticate", ""))
            answer = _head(reference.url, {**accept, "Authorization": f"Bearer {token}"})
    except OSError as error:
        raise LockError(f"{reference.url}: {error}") from error
    digest = answer.get("Docker-Content-Digest", "")
    kind = KINDS.get(answer.get("Content-Type", "").partition(";")[0].strip())
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest) or kind is None:
        raise LockError(f"{reference.url}: the answer names no digest of an image")
    return digest, kind


def _head(url: str, headers: Mapping[str, str]) -> Any:
    request = urllib.request.Request(url, headers=dict(headers), method="HEAD")
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return answer.headers


def _token(challenge: str) -> str:
    scheme, _, rest = challenge.partition(" ")
    fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    if scheme.lower() != "bearer" or "realm" not in fields:
        raise LockError(f"the registry asks for a log-in of a kind that is not known: {challenge!r}")
    query = urllib.parse.urlencode({key: value for key, value in fields.items() if key != "realm"})
    with urllib.request.urlopen(f"{fields['realm']}?{query}", timeout=TIMEOUT_SECONDS) as answer:
        given = json.load(answer)
    token = given.get("token") or given.get("access_token")
    if not isinstance(token, str):
        raise LockError(f"{fields['realm']} gave no token")
    return token


def lock(path: Path) -> dict[str, str]:
    """Resolves every base of the lock file anew and writes it; returns what became of each."""
    default, bases = load(path)
    found: dict[str, str] = {}
    entries: dict[str, dict[str, str | None]] = {}
    for name, base in bases.items():
        digest, kind = resolve(Reference.parse(base.image))
        found[name] = "unchanged" if digest == base.digest else f"{base.digest or 'unresolved'} -> {digest}"
        entries[name] = {**vars(base), "digest": digest, "digest_kind": kind}
    path.write_text(json.dumps({"default": default, "bases": entries}, indent=1) + "\n")
    return found


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["lock"] and len(arguments) == 1:
            for name, change in lock(LOCK).items():
                print(f"{name}: {change}")
            return 0
        if arguments[:1] == ["args"] and len(arguments) <= 2:
            default, bases = load(LOCK)
            name = (arguments[1:] or [""])[0] or default
            if name not in bases:
                raise LockError(f"no base {name!r}; there are {', '.join(bases)}")
            base = bases[name]
            if base.digest is None:
                print(
                    f"WARNING: the digest of {base.image} is unresolved: whatever the tag names today is "
                    "used. Run `make lock-base` where the registry can be reached.",
                    file=sys.stderr,
                )
            for key, value in base.arguments().items():
                print(f"{key}={value}")
            return 0
    except LockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
