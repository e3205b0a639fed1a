"""A bill of materials, in CycloneDX 1.6, of the Python part of an image or an environment.

It lists what is installed, as the packages' own metadata tells, and says of each package whether it is the
version that a lock file pins, and with which hashes.  It is the same for the same environment.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Final

from engine_builder import __version__

SPEC_VERSION: Final = "1.6"
_NAMESPACE: Final = uuid.UUID("6ff9ce3c-a9ae-5a17-9f0c-2f5f4ef9a3a1")
_PROPERTY: Final = "sa3-builder"

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)")
_HASH = re.compile(r"--hash=sha256:(?P<sha256>[0-9a-f]{64})")
_REQUIRED = re.compile(r"^\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)")


def canonical_name(name: str) -> str:
    """A package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The pins of a lock file: version and SHA-256 hashes of the release's files, by name."""
    pins: dict[str, tuple[str, tuple[str, ...]]] = {}
    current = ""
    for line in text.splitlines():
        if match := _PIN.match(line):
            current = canonical_name(match["name"])
            pins[current] = (match["version"].rstrip("\\"), ())
        if current and (match := _HASH.search(line)):
            version, hashes = pins[current]
            pins[current] = (version, (*hashes, match["sha256"]))
    return pins


def bill_of_materials(
    installed: Iterable[metadata.Distribution],
    lock: Mapping[str, tuple[str, tuple[str, ...]]],
    *,
    base: Mapping[str, str] | None = None,
    timestamp: int | None = None,
) -> dict[str, Any]:
    """The bill of materials of ``installed``.

    ``lock`` holds the pins (see ``read_lock``); ``base`` the image's base by ``name`` and ``digest``;
    ``timestamp`` is in seconds since 1970 and left out when None, so that the bill depends on its content
    alone.
    """
    packages = {canonical_name(d.metadata["Name"]): d for d in installed if d.metadata["Name"]}
    components = [_component(name, packages[name], lock.get(name)) for name in sorted(packages)]
    components.append(_python())
    if base is not None:
        components.append(_base(base))
    root = f"sa3-builder@{__version__}"
    edges = {
        _reference(d): sorted(_reference(packages[n]) for n in _needs(d) if n in packages)
        for d in packages.values()
    }
    needed = {child for children in edges.values() for child in children}
    top = sorted({c["bom-ref"] for c in components} - needed)
    described: dict[str, Any] = {
        "component": {
            "type": "application",
            "bom-ref": root,
            "name": "sa3-builder",
            "version": __version__,
        }
    }
    if timestamp is not None:
        described["timestamp"] = datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    bill: dict[str, Any] = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": described,
        "components": components,
        "dependencies": [
            {"ref": root, "dependsOn": top},
            *({"ref": ref, "dependsOn": edges[ref]} for ref in sorted(edges)),
        ],
    }
    digest = hashlib.sha256(json.dumps(bill, sort_keys=True).encode()).hexdigest()
    return {**bill, "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, digest)}"}


def to_text(bill: Mapping[str, Any]) -> str:
    return json.dumps(bill, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def _reference(distribution: metadata.Distribution) -> str:
    return f"pkg:pypi/{canonical_name(distribution.metadata['Name'])}@{distribution.version}"


def _component(
    name: str, distribution: metadata.Distribution, pin: tuple[str, tuple[str, ...]] | None
) -> dict[str, Any]:
    purl = _reference(distribution)
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": distribution.version,
        "purl": purl,
    }
    summary = _field(distribution, "Summary")
    if summary and summary != "UNKNOWN":
        found["description"] = summary
    licence = _licence(distribution)
    archive = _archive_hash(distribution)
    if archive is not None:
        found["hashes"] = [{"alg": "SHA-256", "content": archive}]
    locked = pin is not None and pin[0] == distribution.version
    properties = [{"name": f"{_PROPERTY}:locked", "value": "true" if locked else "false"}]
    if pin is not None and locked:
        properties += [{"name": f"{_PROPERTY}:lock-sha256", "value": sha256} for sha256 in pin[1]]
    record = distribution.read_text("RECORD")
    if record is not None:
        # It lists the hash of every file of the package, so that its own hash stands for all of them.
        value = hashlib.sha256("\n".join(sorted(record.splitlines())).encode()).hexdigest()
        properties.append({"name": f"{_PROPERTY}:record-sha256", "value": value})
    return {**found, **({"licenses": licence} if licence else {}), "properties": properties}


def _archive_hash(distribution: metadata.Distribution) -> str | None:
    """The hash of the wheel that it was installed from, where the installer noted it (PEP 610)."""
    noted = distribution.read_text("direct_url.json")
    if noted is None:
        return None
    archive = json.loads(noted).get("archive_info", {})
    value = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
    return str(value) if value else None


def _field(distribution: metadata.Distribution, name: str) -> str | None:
    values = distribution.metadata.get_all(name)
    return str(values[0]) if values else None


def _licence(distribution: metadata.Distribution) -> list[dict[str, Any]]:
    """The package's licence in its own words: an SPDX expression where it gives one, else a name."""
    expression = _field(distribution, "License-Expression")
    if expression:
        return [{"expression": expression}]
    classified = [
        value.rpartition(" :: ")[2]
        for value in distribution.metadata.get_all("Classifier") or ()
        if value.startswith("License :: ")
    ]
    text = _field(distribution, "License") or ""
    # Some put the licence's whole text there.
    named = classified or ([text.strip()] if text.strip() and len(text) < 80 else [])
    return [{"license": {"name": name}} for name in sorted(set(named))]


def _needs(distribution: metadata.Distribution) -> set[str]:
    """The packages that it needs, without those of extras."""
    found = set()
    for requirement in distribution.requires or ():
        match = _REQUIRED.match(requirement)
        if match and not re.search(r"\bextra\s*==", requirement):
            found.add(canonical_name(match["name"]))
    return found


def _python() -> dict[str, Any]:
    version = platform.python_version()
    purl = f"pkg:generic/python@{version}"
    return {"type": "platform", "bom-ref": purl, "name": "python", "version": version, "purl": purl}


def _base(base: Mapping[str, str]) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "container", "bom-ref": base["name"], "name": base["name"]}
    digest = base["digest"].removeprefix("sha256:")
    if re.fullmatch(r"[0-9a-f]{64}", digest):
        return {**component, "hashes": [{"alg": "SHA-256", "content": digest}]}
    return {**component, "properties": [{"name": f"{_PROPERTY}:digest", "value": base["digest"]}]}
