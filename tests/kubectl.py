"""A stand-in for kubectl: the commands of the operator's page, on a cluster of namespaces.

``apply`` runs a Job to its end before it returns.  The real kubectl builds the kustomize trees.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import Cluster
from tests.namespaces import REPOSITORY

Document = dict[str, Any]


def write_kubectl(folder: Path, real: str) -> Path:
    """Writes the stand-in, an executable called kubectl, into ``folder``; ``real`` is the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "kubectl"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        f"from tests.kubectl import main\nmain({str(folder / 'state')!r}, {real!r}, sys.argv[1:])\n"
    )
    script.chmod(0o755)
    return script


class Kubectl:
    """What was applied, kept in a folder between calls."""

    def __init__(self, root: Path, real: str) -> None:
        self._root = root
        self._real = real
        self._state = root / "objects.json"
        self._objects: dict[str, Document] = (
            json.loads(self._state.read_text()) if self._state.exists() else {}
        )

    def apply(self, documents: list[Document]) -> None:
        cluster = Cluster(self._root, documents)
        for document in documents:
            name = f"{document['kind']}/{document['metadata']['name']}"
            existing = self._objects.get(name)
            if existing is not None and document["kind"] == "Job" and existing["spec"] != document["spec"]:
                sys.exit(f"The Job {name} is invalid: spec.template: field is immutable")
            if document["kind"] == "PersistentVolumeClaim":
                cluster.claim(document["metadata"]["name"])
            entry = dict(document)
            if document["kind"] == "Job" and existing is None:
                result = cluster.run(document)
                entry["attempts"] = [attempt.exit_code for attempt in result.attempts]
                entry["condition"] = result.condition
                entry["cached"] = [
                    event["stage"]
                    for event in result.attempts[-1].events
                    if event["event"] == "finished" and event["fields"]["cached"]
                ]
            elif existing is not None:
                entry = existing
            self._objects[name] = entry
            sys.stdout.write(f"{name} {'unchanged' if existing else 'created'}\n")
        self._save()

    def delete(self, documents: list[Document]) -> None:
        for document in documents:
            del self._objects[f"{document['kind']}/{document['metadata']['name']}"]
        self._save()

    def jobs(self) -> list[Document]:
        return [entry for entry in self._objects.values() if entry["kind"] == "Job"]

    def copy(self, source: str, target: str) -> None:
        origin, destination = self._path(source), self._path(target)
        if origin.is_dir():
            shutil.copytree(origin, destination)
        else:
            shutil.copyfile(origin, destination)

    def _path(self, place: str) -> Path:
        """A local path, or POD:/MOUNT/... in the folder of the claim that is mounted there."""
        pod, separator, path = place.partition(":")
        if not separator:
            return Path(place)
        spec = self._objects[f"Pod/{pod}"]["spec"]
        (container,) = spec["containers"]
        for mount in container["volumeMounts"]:
            if path == mount["mountPath"] or path.startswith(f"{mount['mountPath']}/"):
                (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
                claim = Cluster(self._root, ()).claim(volume["persistentVolumeClaim"]["claimName"])
                return claim / path[len(mount["mountPath"]) + 1 :]
        sys.exit(f"{path}: Read-only file system")

    def read(self, flag: str, path: str) -> list[Document]:
        text = Path(path).read_text() if flag == "-f" else self._kustomize(path)
        return list(yaml.safe_load_all(text))

    def _kustomize(self, folder: str) -> str:
        return subprocess.run(
            [self._real, "kustomize", folder], stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def _save(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._state.write_text(json.dumps(self._objects))


def main(state: str, real: str, arguments: list[str]) -> None:
    kubectl = Kubectl(Path(state), real)
    match arguments:
        case ["apply", flag, path]:
            kubectl.apply(kubectl.read(flag, path))
        case ["delete", "-k" as flag, path]:
            kubectl.delete(kubectl.read(flag, path))
        case ["delete", "pod", name]:
            kubectl.delete([{"kind": "Pod", "metadata": {"name": name}}])
        case ["wait", "--for=condition=complete", "job", *_]:
            for job in kubectl.jobs():
                if job["condition"] != "Complete":
                    sys.exit(f"timed out waiting for {job['metadata']['name']}")
        case ["wait", "--for=condition=Ready", *_]:
            pass
        case ["get", "jobs", *_]:
            for job in kubectl.jobs():
                sys.stdout.write(f"{job['metadata']['name']} {job['condition']} cached: {job['cached']}\n")
        case ["get", "pods", *_]:
            for job in kubectl.jobs():
                sys.stdout.write(f"{job['metadata']['name']} {job['attempts'][-1]}\n")
        case ["cp", source, target]:
            kubectl.copy(source, target)
        case ["create", "namespace", _] | ["config", "set-context", "--current", "--namespace", _]:
            pass
        case _:
            sys.exit(f"kubectl: unknown command {' '.join(arguments)}")
