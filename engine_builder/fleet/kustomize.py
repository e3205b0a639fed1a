"""The same Jobs as one YAML stream, or as a kustomize base with an overlay per architecture."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from engine_builder.durable import disk_error, write_durably
from engine_builder.fleet.container import PlacedRecipe
from engine_builder.fleet.jobs import (
    APP,
    BACKEND_LABEL,
    NAME_LABEL,
    SM_LABEL,
    Document,
    FleetOptions,
    base_documents,
    check_targets,
    container_security,
    for_architecture,
    gpu_labels,
    pod_security,
    suffix,
)
from engine_builder.fleet.storage import Storage
from engine_builder.fleet.yaml_text import to_yaml

log = logging.getLogger(__name__)

_KUSTOMIZATION: Final = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_MARK: Final = "Written by sa3-builder"
_CLAIM_GIB: Final = {"models": 50, "out": 100, "cache": 100}


def plain_yaml(placed: Sequence[PlacedRecipe], sms: Sequence[int], options: FleetOptions) -> str:
    """Everything for every architecture as one YAML stream; equal arguments give equal text.

    Raises:
        BuilderError: A recipe is at fault, or cannot be built for an architecture.
    """
    check_targets(placed, sms)
    base = base_documents(placed, options)
    return to_yaml([document for sm in sms for document in for_architecture(base, sm)])


def kustomize_files(
    placed: Sequence[PlacedRecipe], sms: Sequence[int], options: FleetOptions, command: str
) -> dict[PurePosixPath, str]:
    """The files of a kustomize tree: ``base``, ``overlays/sm_XX``, and ``volumes`` for the claims.

    ``command`` is what writes the tree again; it is said in the base.

    Raises:
        BuilderError: A recipe is at fault, or cannot be built for an architecture.
    """
    check_targets(placed, sms)
    kinds = {"configmaps": "ConfigMap", "jobs": "Job", "network-policy": "NetworkPolicy"}
    documents = base_documents(placed, options)
    header = f"{_MARK}; to write it again: {command}"
    files = {
        PurePosixPath(f"base/{name}.yaml"): _text([d for d in documents if d["kind"] == kind])
        for name, kind in kinds.items()
    }
    resources = [f"{name}.yaml" for name in kinds]
    files[PurePosixPath("base/kustomization.yaml")] = _text(
        [{**_KUSTOMIZATION, "resources": resources}], header
    )
    gpu_jobs = any(
        d["kind"] == "Job" and d["metadata"]["labels"][BACKEND_LABEL] == "tensorrt" for d in documents
    )
    for sm in sms:
        overlay = _overlay(sm, gpu_jobs=gpu_jobs)
        files[PurePosixPath(f"overlays/sm_{sm}/kustomization.yaml")] = _text([overlay])
    claims = _claims({"models": options.models, "out": options.outputs, "cache": options.cache})
    if claims:
        files[PurePosixPath("volumes/claims.yaml")] = _text(claims)
        files[PurePosixPath("volumes/kustomization.yaml")] = _text(
            [{**_KUSTOMIZATION, "resources": ["claims.yaml"]}]
        )
        files[PurePosixPath("volumes/shelf.yaml")] = _text([_shelf(options)])
    return files


def write_tree(files: Mapping[PurePosixPath, str], folder: Path) -> tuple[Path, ...]:
    """Writes the files below ``folder`` and removes what an earlier call wrote there and this one
    does not; returns the removed.

    Raises:
        ResourceError: The folder cannot be written to.
    """
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text.encode())
        kept = {folder / name for name in files}
        stale = tuple(
            path
            for part in ("base", "overlays", "volumes")
            for path in sorted((folder / part).rglob("*.yaml"))
            if path not in kept and path.read_text(errors="replace").startswith(f"# {_MARK}")
        )
        for path in stale:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    except OSError as error:
        raise disk_error(error, folder) from error
    return stale


def _text(documents: Sequence[Mapping[str, Any]], header: str = _MARK) -> str:
    return to_yaml(documents, header)


def _overlay(sm: int, *, gpu_jobs: bool) -> Document:
    overlay: Document = {
        **_KUSTOMIZATION,
        "resources": ["../../base"],
        "nameSuffix": suffix(sm),
        "labels": [{"pairs": {SM_LABEL: str(sm)}, "includeTemplates": True}],
    }
    if gpu_jobs:
        patch = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "any"},
            "spec": {"template": {"spec": {"nodeSelector": gpu_labels(sm)}}},
        }
        target = {"kind": "Job", "labelSelector": f"{BACKEND_LABEL}=tensorrt"}
        overlay["patches"] = [{"target": target, "patch": to_yaml([patch])}]
    return overlay


def _shelf(options: FleetOptions) -> Document:
    """A pod that does nothing, through which ``kubectl cp`` reaches the volumes."""
    volumes = {"models": options.models, "out": options.outputs, "cache": options.cache}
    mounted = {name: storage for name, storage in volumes.items() if storage.kind != "scratch"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "sa3-shelf", "labels": {NAME_LABEL: APP}},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "containers": [
                {
                    "name": "shelf",
                    "image": options.image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "infinity"],
                    "resources": {
                        "requests": {"cpu": "100m", "memory": "64Mi"},
                        "limits": {"memory": "256Mi"},
                    },
                    "securityContext": container_security(),
                    "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in mounted],
                }
            ],
            "volumes": [storage.volume(name, scratch_gib=0) for name, storage in mounted.items()],
        },
    }


def _claims(volumes: Mapping[str, Storage]) -> list[Document]:
    """Claims that jobs on several nodes can share."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": storage.name, "labels": {NAME_LABEL: APP}},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": f"{_CLAIM_GIB[name]}Gi"}},
            },
        }
        for name, storage in volumes.items()
        if storage.kind == "claim"
    ]
