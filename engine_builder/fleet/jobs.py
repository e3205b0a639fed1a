"""The Jobs of a fleet: what every architecture has in common, and what an architecture adds.

``base_documents`` and ``for_architecture`` correspond to a kustomize base and its overlays;
:mod:`engine_builder.fleet.kustomize` writes them as such.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Literal

from engine_builder.compile.backend import load_backend
from engine_builder.errors import PlatformError, RecipeError
from engine_builder.fleet.container import CACHE, MODELS, OUT, RECIPES, SCALES, PlacedRecipe
from engine_builder.fleet.exit_policy import ADVICE, CONTAINER, pod_failure_policy
from engine_builder.fleet.resources import LARGEST_KNOWN, Needs, largest, needs, source_size
from engine_builder.fleet.storage import Storage

Document = dict[str, Any]

NAME_LABEL: Final = "app.kubernetes.io/name"
APP: Final = "sa3-builder"
MODEL_LABEL: Final = "sa3-builder/model"
PRECISION_LABEL: Final = "sa3-builder/precision"
BACKEND_LABEL: Final = "sa3-builder/backend"
SM_LABEL: Final = "sa3-builder/sm"

GPU: Final = "nvidia.com/gpu"
GPU_MAJOR: Final = "nvidia.com/gpu.compute.major"
GPU_MINOR: Final = "nvidia.com/gpu.compute.minor"
GPU_PRESENT: Final = "nvidia.com/gpu.present"
"""Labels that GPU Feature Discovery gives to nodes."""

USER: Final = 10001
"""The builder's user and group in the container; any other without privileges would do."""

LONG_LIST: Final = 20
"""More recipes than this become one Indexed Job per backend."""

_CONFIG_MAP_BYTES: Final = 1_000_000
"""A ConfigMap holds 1 MiB at most, its own fields included."""

_NAME_LENGTH: Final = 50
"""Of 63 that a Job may have: room for the architecture and for a pod's index."""

_TMP_GIB: Final = 2


@dataclass(frozen=True)
class FleetOptions:
    """What the Jobs have in common.  Times are in seconds; ``cpu`` is a Kubernetes quantity.

    ``deadline`` is for one try of a build, ``queue`` for what a job may wait for nodes besides.
    ``source_bytes`` is assumed of every model file instead of measuring it.
    """

    image: str
    models: Storage
    outputs: Storage
    cache: Storage
    retries: int = 3
    deadline: int = 4 * 3600
    queue: int = 24 * 3600
    keep: int = 7 * 24 * 3600
    cpu: str = "2"
    source_bytes: int | None = None
    runtime_class: str | None = None
    indexed: Literal["auto", "always", "never"] = "auto"
    parallelism: int | None = None
    allow_plugins: bool = False


@dataclass(frozen=True)
class _Work:
    """A recipe and what building it needs."""

    placed: PlacedRecipe
    needs: Needs

    @property
    def backend(self) -> str:
        return self.placed.recipe.target.backend


def check_image(reference: str) -> str:
    """``reference``, if it names one image for good.

    Raises:
        RecipeError: It is malformed, or has neither tag nor digest.
    """
    name = re.compile(
        r"[a-z0-9][a-zA-Z0-9._:-]*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
        r"(@sha256:[0-9a-f]{64})?"
    )
    if not name.fullmatch(reference):
        raise RecipeError(f"--image {reference!r} is no image reference")
    if "@" not in reference and ":" not in reference.rpartition("/")[2]:
        raise RecipeError(
            f"--image {reference} has neither tag nor digest, so that nodes may run different builders",
            hint=f"write {reference}@sha256:..., or a tag that never moves",
        )
    return reference


def check_targets(placed: Sequence[PlacedRecipe], sms: Sequence[int]) -> None:
    """Refuses pairs of recipe and architecture that no node can build.

    Raises:
        RecipeError: The backend has no such precision on that architecture.
        PlatformError: The backend's library, where it is installed, knows no such architecture.
    """
    for item in placed:
        recipe = item.recipe
        backend = load_backend(recipe.target.backend)
        try:
            supported = backend.supported_sms() if backend.cross_compiles else None
        except PlatformError:
            supported = None  # Not installed where manifests are written; the job itself checks.
        for sm in sms:
            reason = backend.check_support(recipe.precision.recipe, sm)
            if reason is not None:
                raise recipe.error(("precision",), reason, hint=f"leave {sm} out of --sm for this recipe")
            if supported is not None and sm not in supported:
                backend.check_target(sm)


def base_documents(placed: Sequence[PlacedRecipe], options: FleetOptions) -> list[Document]:
    """What every architecture has in common: recipes, a network policy, and the Jobs.

    Raises:
        RecipeError: The recipes do not fit into a ConfigMap.
        SourceModelError: A model that is on this machine cannot be built from.
    """
    check_image(options.image)
    work = [_work(item, options) for item in placed]
    documents = [_network_policy()]
    if options.indexed == "always" or (options.indexed == "auto" and len(work) > LONG_LIST):
        for backend in sorted({item.backend for item in work}):
            documents.extend(_indexed([item for item in work if item.backend == backend], backend, options))
    else:
        for item in work:
            documents.extend(_single(item, options))
    return documents


def for_architecture(documents: Sequence[Mapping[str, Any]], sm: int) -> list[Document]:
    """The base made into what builds for one architecture: names, labels, and the choice of nodes."""
    result: list[Document] = []
    for document in documents:
        changed = copy.deepcopy(dict(document))
        changed["metadata"]["name"] += suffix(sm)
        changed["metadata"]["labels"][SM_LABEL] = str(sm)
        if changed["kind"] == "Job":
            template = changed["spec"]["template"]
            template["metadata"]["labels"][SM_LABEL] = str(sm)
            for volume in template["spec"]["volumes"]:
                if "configMap" in volume:
                    volume["configMap"]["name"] += suffix(sm)
            if changed["metadata"]["labels"][BACKEND_LABEL] == "tensorrt":
                template["spec"]["nodeSelector"] = gpu_labels(sm)
        result.append(changed)
    return result


def suffix(sm: int) -> str:
    return f"-sm-{sm}"


def gpu_labels(sm: int) -> dict[str, str]:
    """The node labels of a GPU of this compute capability: 89 is 8.9, 120 is 12.0."""
    return {GPU_MAJOR: str(sm // 10), GPU_MINOR: str(sm % 10)}


def object_name(*parts: str) -> str:
    """A DNS label from free text; what had to be changed is told apart by a digest."""
    text = "-".join(parts)
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if name == text and len(name) <= _NAME_LENGTH:
        return name
    return f"{name[: _NAME_LENGTH - 9].rstrip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _work(placed: PlacedRecipe, options: FleetOptions) -> _Work:
    if placed.recipe.build.plugins and not options.allow_plugins:
        raise placed.recipe.error(
            ("build", "plugins"),
            "plugin libraries run only where that is allowed",
            hint="add --allow-plugins",
        )
    assumed = None if placed.recipe.model.sample is not None else options.source_bytes
    size = assumed or source_size(placed.recipe) or LARGEST_KNOWN
    return _Work(placed, needs(placed.recipe, size))


def _network_policy() -> Document:
    """A build talks to nobody."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "sa3-offline", "labels": {NAME_LABEL: APP}},
        "spec": {
            "podSelector": {"matchLabels": {NAME_LABEL: APP}},
            "policyTypes": ["Ingress", "Egress"],
        },
    }


def _single(work: _Work, options: FleetOptions) -> list[Document]:
    recipe = work.placed.recipe
    name = object_name("sa3", *(part for part in work.placed.identity if part))
    labels = _labels(work.backend)
    labels[MODEL_LABEL] = object_name(recipe.model.name)
    labels[PRECISION_LABEL] = recipe.precision.recipe
    config = _config_map(name, [work], labels)
    items = {path: _file_key(path) for path in _files(work)}
    spec = {
        "backoffLimit": options.retries,
        "activeDeadlineSeconds": options.queue + options.deadline * (options.retries + 1),
        "ttlSecondsAfterFinished": options.keep,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": pod_failure_policy(indexed=False),
    }
    pod = _pod(
        work.backend,
        work.needs,
        _arguments([work], str(work.placed.path), options),
        config["metadata"]["name"],
        items,
        options,
        indexed=False,
    )
    return [config, _job(name, labels, spec, pod)]


def _indexed(work: Sequence[_Work], backend: str, options: FleetOptions) -> list[Document]:
    """One Job whose pod number N builds the Nth recipe; the cluster's scheduler runs them."""
    name = object_name("sa3-fleet", backend.replace("_", "-"))
    labels = _labels(backend)
    config = _config_map(name, work, labels)
    items = {RECIPES / f"{index}.yaml": _file_key(item.placed.path) for index, item in enumerate(work)}
    companions = sorted({path for item in work for path in _files(item) if path != item.placed.path})
    items.update({path: _file_key(path) for path in companions})
    at_once = options.parallelism or len(work)
    rounds = -(-len(work) // at_once)
    spec = {
        "completionMode": "Indexed",
        "completions": len(work),
        "parallelism": at_once,
        "backoffLimitPerIndex": options.retries,
        "activeDeadlineSeconds": options.queue + options.deadline * (options.retries + 1) * rounds,
        "ttlSecondsAfterFinished": options.keep,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": pod_failure_policy(indexed=True),
    }
    pod = _pod(
        backend,
        largest([item.needs for item in work]),
        _arguments(work, f"{RECIPES}/$(BUILD_INDEX).yaml", options),
        config["metadata"]["name"],
        items,
        options,
        indexed=True,
    )
    return [config, _job(name, labels, spec, pod)]


def _labels(backend: str) -> dict[str, str]:
    return {NAME_LABEL: APP, BACKEND_LABEL: backend}


def _job(name: str, labels: Mapping[str, str], spec: Mapping[str, Any], pod: Mapping[str, Any]) -> Document:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": dict(labels), "annotations": {"sa3-builder/exit-3": ADVICE}},
        "spec": {**spec, "template": {"metadata": {"labels": dict(labels)}, "spec": dict(pod)}},
    }


def _files(work: _Work) -> dict[PurePosixPath, str]:
    """The text of the recipe and of the small files that it reads, by path in the container."""
    recipe = work.placed.recipe
    texts = {work.placed.path: recipe.path.read_bytes().decode()}
    for file in work.placed.files:
        if not file.is_in(MODELS):
            try:
                texts[file.container] = file.file.read_bytes().decode()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "is no text"
                raise recipe.error(file.key, f"{file.file}: {reason}") from None
    return texts


def _file_key(path: PurePosixPath) -> str:
    """The key of a file in a ConfigMap, which allows letters, digits, '-', '_' and '.'."""
    name = path.relative_to(RECIPES).as_posix() if path.is_relative_to(RECIPES) else path.as_posix()[1:]
    key = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    return key if key == name else f"{key[:200]}.{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _config_map(name: str, work: Sequence[_Work], labels: Mapping[str, str]) -> Document:
    """The recipes and the files beside them; its name holds its content, which never changes."""
    data: dict[str, str] = {}
    for item in work:
        for path, text in _files(item).items():
            if data.setdefault(_file_key(path), text) != text:
                raise item.placed.recipe.error((), f"its {path} differs from another recipe's {path}")
    size = sum(len(key.encode()) + len(text.encode()) for key, text in data.items())
    if size > _CONFIG_MAP_BYTES:
        raise work[0].placed.recipe.error(
            ("precision", "scales") if len(work) == 1 else (),
            f"{size} bytes of recipes and scales are more than a ConfigMap holds ({_CONFIG_MAP_BYTES})",
            hint=f"put scales files under ..{MODELS}, or render fewer recipes at a time",
        )
    digest = hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()[:8]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-{digest}", "labels": dict(labels)},
        "immutable": True,
        "data": data,
    }


def _arguments(work: Sequence[_Work], recipe: str, options: FleetOptions) -> list[str]:
    arguments = ["build", recipe, "--sm", "$(TARGET_SM)", "--log-format", "json"]
    if any(item.placed.recipe.build.plugins for item in work):
        arguments.append("--allow-plugins")
    shares = options.cache.kind != "scratch" and work[0].backend == "tensorrt"
    if shares and all(item.placed.recipe.build.timing_cache is None for item in work):
        # Of one TensorRT version only, which the image decides.
        image = hashlib.sha256(options.image.encode()).hexdigest()[:8]
        arguments += ["--timing-cache", f"{CACHE}/timing/{image}/sm_$(TARGET_SM).cache"]
    return arguments


def _pod(
    backend: str,
    need: Needs,
    arguments: Sequence[str],
    config: str,
    items: Mapping[PurePosixPath, str],
    options: FleetOptions,
    *,
    indexed: bool,
) -> dict[str, Any]:
    scratch = _TMP_GIB + (need.scratch if options.cache.kind == "scratch" else 0)
    reserved = {"cpu": options.cpu, "memory": f"{need.memory}Gi", "ephemeral-storage": f"{scratch}Gi"}
    limits = {"memory": f"{need.memory_limit}Gi", "ephemeral-storage": f"{scratch + 1}Gi"}
    if backend == "tensorrt":
        reserved[GPU] = limits[GPU] = "1"
    texts = [
        {"name": place.name, "configMap": {"name": config, "items": found}}
        for place in (RECIPES, SCALES)
        if (
            found := [
                {"key": key, "path": path.relative_to(place).as_posix()}
                for path, key in items.items()
                if path.is_relative_to(place)
            ]
        )
    ]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": options.deadline,
        "terminationGracePeriodSeconds": 30,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        **_placement(backend, options),
        "containers": [
            {
                "name": CONTAINER,
                "image": options.image,
                "imagePullPolicy": "IfNotPresent",
                "args": list(arguments),
                "env": _environment(options.image, indexed=indexed),
                "resources": {"requests": reserved, "limits": limits},
                # The last lines of the log, which say what was wrong and what to do.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": container_security(),
                "volumeMounts": [
                    *({"name": v["name"], "mountPath": f"/{v['name']}", "readOnly": True} for v in texts),
                    {"name": "models", "mountPath": str(MODELS), "readOnly": True},
                    {"name": "out", "mountPath": str(OUT)},
                    {"name": "cache", "mountPath": str(CACHE)},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [
            *texts,
            options.models.volume("models", scratch_gib=0),
            options.outputs.volume("out", scratch_gib=0),
            options.cache.volume("cache", scratch_gib=need.scratch),
            {"name": "tmp", "emptyDir": {"sizeLimit": f"{_TMP_GIB}Gi"}},
        ],
    }
    return pod


def pod_security() -> dict[str, Any]:
    """With ``container_security``, what the restricted Pod Security Standard asks for."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _placement(backend: str, options: FleetOptions) -> dict[str, Any]:
    """On nodes with a GPU, which the architecture narrows down, or away from them."""
    if backend == "tensorrt":
        placement: dict[str, Any] = {
            "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        }
        if options.runtime_class is not None:
            placement["runtimeClassName"] = options.runtime_class
        return placement
    away = {"matchExpressions": [{"key": GPU_PRESENT, "operator": "NotIn", "values": ["true"]}]}
    terms = {"nodeSelectorTerms": [away]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


def _environment(image: str, *, indexed: bool) -> list[dict[str, Any]]:
    def field(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    entries = [
        field("TARGET_SM", f"metadata.labels['{SM_LABEL}']"),
        field("JOB_NAME", "metadata.labels['batch.kubernetes.io/job-name']"),
    ]
    cache = f"{CACHE}/$(JOB_NAME)"
    if indexed:
        entries.append(
            field("BUILD_INDEX", "metadata.annotations['batch.kubernetes.io/job-completion-index']")
        )
        cache += "/$(BUILD_INDEX)"
    return [
        *entries,
        # A folder of its own for each build, kept for its retries: builds do not wait for each other.
        {"name": "SA3_BUILDER_CACHE", "value": cache},
        {"name": "SA3_BUILDER_IMAGE", "value": image},
        {"name": "HOME", "value": "/tmp"},
    ]
