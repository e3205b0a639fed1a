"""As much of Kubernetes as a Job needs, with processes in namespaces for pods.

Lays out volumes and ConfigMaps as the kubelet does, expands ``$(NAME)``, reads the downward API, and
decides about failed pods as the Job controller does by ``podFailurePolicy``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.namespaces import Mount, container_command, container_environment, entrypoint

Document = Mapping[str, Any]


@dataclass
class Pod:
    """A running pod: its process, which leads a process group, and its log."""

    process: subprocess.Popen[bytes]
    log: Path
    attempt: int

    def events(self) -> list[dict[str, Any]]:
        """The builder's own lines of the log, which are JSON, as far as they are complete."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def wait_for(self, stage: str, event: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not any((e["stage"], e["event"]) == (stage, event) for e in self.events()):
            assert self.process.poll() is None, f"ended before {stage} {event}: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {stage} {event} within {seconds} s"
            time.sleep(0.02)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Attempt:
    """One pod of a Job that has ended."""

    exit_code: int
    action: str
    events: tuple[dict[str, Any], ...]
    index: int | None = None


@dataclass(frozen=True)
class JobResult:
    """How a Job ended: ``Complete`` or ``Failed``, and why."""

    condition: str
    reason: str
    attempts: tuple[Attempt, ...]
    failed_indexes: tuple[int, ...] = ()


Interfere = Callable[[Pod], Sequence[str]]
"""Is called with each started pod; returns the conditions that the pod ends with."""


def decide(policy: Document, exit_code: int, conditions: Sequence[str] = ()) -> str:
    """The action of the first rule that matches a failed pod; Count where none does."""
    for rule in policy["rules"]:
        if "onPodConditions" in rule:
            if any(pattern["type"] in conditions for pattern in rule["onPodConditions"]):
                return str(rule["action"])
            continue
        on_exit = rule["onExitCodes"]
        listed = exit_code in on_exit["values"]
        if listed if on_exit["operator"] == "In" else not listed:
            return str(rule["action"])
    return "Count"


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` by its value; an unknown one and ``$$(NAME)`` stay as Kubernetes leaves them."""

    def replaced(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        return variables.get(match[1], match[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", replaced, text)


@dataclass
class Cluster:
    """A cluster whose volumes are folders below ``root``."""

    root: Path
    documents: Sequence[Document]
    interfere: Interfere | None = None

    def claim(self, name: str) -> Path:
        folder = self.root / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        return folder

    def jobs(self) -> list[Document]:
        return [d for d in self.documents if d["kind"] == "Job"]

    def run(self, job: Document) -> JobResult:
        """Runs a Job to its end, pod after pod."""
        spec = job["spec"]
        if spec.get("completionMode") != "Indexed":
            return self._run_index(job, None, spec["backoffLimit"])
        results = [
            self._run_index(job, index, spec["backoffLimitPerIndex"]) for index in range(spec["completions"])
        ]
        failed = tuple(index for index, result in enumerate(results) if result.condition == "Failed")
        attempts = tuple(attempt for result in results for attempt in result.attempts)
        if failed:
            return JobResult("Failed", "FailedIndexes", attempts, failed)
        return JobResult("Complete", "", attempts)

    def _run_index(self, job: Document, index: int | None, limit: int) -> JobResult:
        attempts: list[Attempt] = []
        counted = 0
        while True:
            attempt = self._run_pod(job, index, len(attempts))
            attempts.append(attempt)
            if attempt.exit_code == 0:
                return JobResult("Complete", "", tuple(attempts))
            if attempt.action in ("FailJob", "FailIndex"):
                return JobResult("Failed", "PodFailurePolicy", tuple(attempts))
            counted += attempt.action == "Count"
            if counted > limit:
                return JobResult("Failed", "BackoffLimitExceeded", tuple(attempts))

    def _run_pod(self, job: Document, index: int | None, attempt: int) -> Attempt:
        pods = self.root / "pods"
        pods.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=pods))
        template = job["spec"]["template"]
        (container,) = template["spec"]["containers"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": job["metadata"]["name"]}
        annotations = {} if index is None else {"batch.kubernetes.io/job-completion-index": str(index)}
        variables = _variables(container["env"], labels, annotations)
        command = container_command(
            entrypoint(*(expand(argument, variables) for argument in container["args"])),
            self._mounts(template["spec"], container, folder),
            folder / "root",
            user=template["spec"]["securityContext"]["runAsUser"],
        )
        folder.chmod(0o755)
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=container_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )
        pod = Pod(process, log, attempt)
        conditions = self.interfere(pod) if self.interfere is not None else ()
        code = process.wait()
        exit_code = 128 - code if code < 0 else code
        action = "" if exit_code == 0 else decide(job["spec"]["podFailurePolicy"], exit_code, conditions)
        return Attempt(exit_code, action, tuple(pod.events()), index)

    def _mounts(self, spec: Document, container: Document, folder: Path) -> list[Mount]:
        sources = {volume["name"]: self._volume(volume, folder) for volume in spec["volumes"]}
        return [
            Mount(sources[m["name"]], m["mountPath"], m.get("readOnly", False))
            for m in container["volumeMounts"]
        ]

    def _volume(self, volume: Document, folder: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.claim(volume["persistentVolumeClaim"]["claimName"])
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        path = folder / "volumes" / str(volume["name"])
        path.mkdir(parents=True)
        if "configMap" in volume:
            self._lay_out(volume["configMap"], path)
        else:
            path.chmod(0o777)
        return path

    def _lay_out(self, config: Document, path: Path) -> None:
        """As the kubelet does: the files in a folder of this version, and links to them."""
        (data,) = [
            d["data"]
            for d in self.documents
            if d["kind"] == "ConfigMap" and d["metadata"]["name"] == config["name"]
        ]
        version = path / "..2026_01_01"
        for item in config["items"]:
            file = version / item["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data[item["key"]].encode())
            top = item["path"].split("/")[0]
            if not (path / top).is_symlink():
                (path / top).symlink_to(f"..data/{top}")
        (path / "..data").symlink_to(version.name)


def _variables(
    entries: Sequence[Document], labels: Mapping[str, str], annotations: Mapping[str, str]
) -> dict[str, str]:
    variables: dict[str, str] = {}
    for entry in entries:
        if "value" in entry:
            variables[entry["name"]] = expand(entry["value"], variables)
            continue
        match = re.fullmatch(
            r"metadata\.(labels|annotations)\['(.+)'\]", entry["valueFrom"]["fieldRef"]["fieldPath"]
        )
        assert match is not None
        variables[entry["name"]] = (labels if match[1] == "labels" else annotations).get(match[2], "")
    return variables
