"""Kubernetes jobs: their properties, their schemas, and the jobs themselves, run in namespaces."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from engine_builder.cli.app import app
from engine_builder.errors import (
    BuilderError,
    CompileError,
    ConversionError,
    Interrupted,
    PlatformError,
    RecipeError,
    ResourceError,
    SourceModelError,
    VerificationError,
)
from engine_builder.fleet.collect import collect, expected_slots
from engine_builder.fleet.container import place_recipes
from engine_builder.fleet.exit_policy import pod_failure_policy
from engine_builder.fleet.image import Image
from engine_builder.fleet.jobs import FleetOptions, check_image, object_name
from engine_builder.fleet.kustomize import kustomize_files, plain_yaml, write_tree
from engine_builder.fleet.resources import needs
from engine_builder.fleet.storage import Storage, parse_storage
from engine_builder.fleet.yaml_text import to_yaml
from engine_builder.recipe import load_recipe
from tests.cluster import Cluster, Pod, decide, expand
from tests.kubectl import write_kubectl
from tests.namespaces import REPOSITORY, Mount, container_command, entrypoint, require_namespaces
from tests.pages import checkout, run_blocks, shell_blocks

Document = dict[str, Any]

IMAGE = "registry.example/sa3-builder:0.1.0"
KUBERNETES = ("1.35", "1.36", "1.37")
"""The three minor versions before 2027, newest last."""


def recipe_text(
    *,
    name: str = "tiny",
    precision: str = "fp16",
    backend: str = "tensorrt_rtx",
    sm: str = "89",
    model: str = "sample: {size: tiny}",
    out: str = "../out",
    build: str = "{}",
    fidelity: str = "off",
) -> str:
    return f"""schema: sa3-builder/1
model: {{name: {name}, {model}}}
precision: {precision}
profiles:
  - x: [[1, 256, 1], [1, 256, 64], [1, 256, 128]]
    local_add_cond: [[1, 257, 1], [1, 257, 64], [1, 257, 128]]
target: {{backend: {backend}, sm: {sm}}}
build: {build}
verify: {{fidelity: {fidelity}}}
output: {{dir: {out}}}
"""


def options(**changes: Any) -> FleetOptions:
    """The command line's defaults."""
    storage = {
        "models": Storage("claim", "sa3-models"),
        "outputs": Storage("claim", "sa3-out"),
        "cache": Storage("claim", "sa3-cache"),
    }
    return FleetOptions(**{"image": IMAGE, **storage, **changes})


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe file, from the arguments of ``recipe_text``, into a folder called recipes."""

    def write_recipe(file: str = "tiny.yaml", **asked: str) -> Path:
        path = tmp_path / "recipes" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe_text(**asked))
        return path

    return write_recipe


def rendered(paths: Sequence[Path], sms: Sequence[int], chosen: FleetOptions) -> list[Document]:
    return list(yaml.safe_load_all(plain_yaml(place_recipes(paths), sms, chosen)))


def jobs_of(documents: Sequence[Document]) -> list[Document]:
    return [document for document in documents if document["kind"] == "Job"]


def pod_of(job: Document) -> Document:
    pod: Document = job["spec"]["template"]["spec"]
    return pod


def build_of(job: Document) -> Document:
    (container,) = pod_of(job)["containers"]
    assert isinstance(container, dict)
    return container


@pytest.fixture
def variety(write: Callable[..., Path]) -> dict[str, list[Document]]:
    """Renderings of both backends, every kind of storage, single and Indexed Jobs."""
    rtx = [write("a.yaml", precision="fp16"), write("b.yaml", precision="bf16")]
    gpu = [
        write("c.yaml", name="sa3-m", backend="tensorrt", model="onnx: ../models/sa3-m.onnx"),
        write(
            "d.yaml", name="sa3-m", backend="tensorrt", model="onnx: ../models/sa3-m.onnx", precision="bf16"
        ),
    ]
    host = {name: Storage("host", f"/srv/{name}") for name in ("models", "outputs", "cache")}
    return {
        "rtx": rendered(rtx, (89, 120), options()),
        "gpu": rendered(gpu, (89, 90, 120), options(runtime_class="nvidia")),
        "host": rendered([*rtx, *gpu], (120,), options(**host)),
        "scratch": rendered([*rtx, *gpu], (120,), options(cache=Storage("scratch"))),
        "indexed": rendered([*rtx, *gpu], (89, 120), options(indexed="always", parallelism=1)),
    }


# --- what is written --------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_satisfy_the_schemas_of_three_kubernetes_versions(
    variety: Mapping[str, Sequence[Document]], version: str
) -> None:
    kubernetes_validate = _kubernetes_validate()
    committed = [
        document
        for path in (REPOSITORY / "deploy/kubernetes").rglob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] != "Kustomization"
    ]
    kinds = set()
    for documents in (*variety.values(), committed):
        for document in documents:
            assert kubernetes_validate.validate(document, version, strict=True) == version
            kinds.add(document["kind"])
    assert kinds == {"ConfigMap", "Job", "NetworkPolicy", "PersistentVolumeClaim", "Pod"}
    broken = copy.deepcopy(jobs_of(variety["rtx"])[0])
    broken["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] = ["2"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def _kubernetes_validate() -> Any:
    try:
        return importlib.import_module("kubernetes_validate")
    except ImportError:
        reason = "the package kubernetes-validate, which holds the schemas, is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def test_the_same_input_gives_the_same_bytes(write: Callable[..., Path]) -> None:
    paths = [write("a.yaml"), write("b.yaml", precision="bf16")]
    command = entrypoint("k8s", *map(str, paths), "--sm", "89,120", "--image", IMAGE)
    texts = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert texts[0].decode() == plain_yaml(place_recipes(paths), (89, 120), options())


OUTCOMES = {
    RecipeError: "FailJob",
    PlatformError: "FailJob",
    SourceModelError: "FailJob",
    ConversionError: "FailJob",
    CompileError: "Count",
    VerificationError: "FailJob",
    ResourceError: "Count",
    Interrupted: "Count",
}
"""What is to become of a Job whose pod ends so: hopeless builds end it, the rest is tried again."""


def test_every_error_has_an_outcome() -> None:
    assert set(OUTCOMES) == set(BuilderError.__subclasses__())


@pytest.mark.parametrize("error", OUTCOMES, ids=lambda error: error.__name__)
def test_exit_codes_decide_about_the_job(error: type[BuilderError]) -> None:
    single, indexed = pod_failure_policy(indexed=False), pod_failure_policy(indexed=True)
    assert decide(single, error.exit_code) == OUTCOMES[error]
    assert decide(indexed, error.exit_code) == OUTCOMES[error].replace("FailJob", "FailIndex")
    # Kubernetes took the node away: that is nobody's fault, whatever the process then ended with.
    assert decide(single, error.exit_code, ["DisruptionTarget"]) == "Ignore"


@pytest.mark.parametrize("code", [1, 137, 139, 143])
def test_a_process_that_was_killed_or_crashed_is_tried_again(code: int) -> None:
    assert decide(pod_failure_policy(indexed=False), code) == "Count"


def test_the_rules_name_the_exit_codes_of_the_interface() -> None:
    rules = pod_failure_policy(indexed=False)["rules"]
    by_action = [(r["action"], r.get("onExitCodes", {}).get("values")) for r in rules]
    assert by_action == [("Ignore", None), ("FailJob", [2, 4, 5, 7]), ("FailJob", [3]), ("Count", [8])]


def test_gpu_jobs_have_their_gpu_and_cross_builds_ask_for_none(
    variety: Mapping[str, Sequence[Document]],
) -> None:
    seen = set()
    for documents in variety.values():
        for job in jobs_of(documents):
            backend = job["metadata"]["labels"]["sa3-builder/backend"]
            resources = build_of(job)["resources"]
            counts = {resources[kind].get("nvidia.com/gpu") for kind in ("requests", "limits")}
            assert counts == ({"1"} if backend == "tensorrt" else {None})
            seen.add(backend)
    assert seen == {"tensorrt", "tensorrt_rtx"}


NODES = {
    "ada": {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.compute.major": "8",
        "nvidia.com/gpu.compute.minor": "9",
    },
    "hopper": {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
    },
    "blackwell": {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.compute.major": "12",
        "nvidia.com/gpu.compute.minor": "0",
    },
    "cpu": {},
}
"""Nodes as GPU Feature Discovery labels them: compute capabilities 8.9, 9.0, 12.0, and no GPU."""


def _fits(pod: Document, labels: Mapping[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in pod.get("nodeSelector", {}).items()):
        return False
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return terms is None or any(
        all(
            labels.get(e["key"]) not in e["values"]
            for e in term["matchExpressions"]
            if e["operator"] == "NotIn"
        )
        for term in terms
    )


def test_each_job_lands_on_the_node_of_its_architecture(variety: Mapping[str, Sequence[Document]]) -> None:
    home = {"89": {"ada"}, "90": {"hopper"}, "120": {"blackwell"}}
    for name in ("gpu", "rtx", "indexed"):
        for job in jobs_of(variety[name]):
            labels = job["metadata"]["labels"]
            nodes = {node for node, has in NODES.items() if _fits(pod_of(job), has)}
            gpu = labels["sa3-builder/backend"] == "tensorrt"
            assert nodes == (home[labels["sa3-builder/sm"]] if gpu else {"cpu"}), job["metadata"]["name"]


def test_pods_meet_the_restricted_security_standard(variety: Mapping[str, Sequence[Document]]) -> None:
    for documents in variety.values():
        for job in jobs_of(documents):
            pod, container = pod_of(job), build_of(job)
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert pod["automountServiceAccountToken"] is False
            assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
            writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
            assert writable == {"/out", "/cache", "/tmp"}
            scratch = [v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v]
            assert scratch
            assert all("sizeLimit" in volume for volume in scratch)


def test_jobs_end_by_themselves(write: Callable[..., Path]) -> None:
    (job,) = jobs_of(rendered([write()], (89,), options(retries=2, deadline=600, keep=60, queue=100)))
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (2, 60)
    assert pod_of(job)["activeDeadlineSeconds"] == 600
    assert spec["activeDeadlineSeconds"] == 1900  # a wait of 100, a first try and two more


def test_builds_for_one_architecture_share_a_timing_cache(variety: Mapping[str, Sequence[Document]]) -> None:
    caches: dict[str, set[str]] = {}
    for job in jobs_of(variety["gpu"]):
        arguments = build_of(job)["args"]
        path = arguments[arguments.index("--timing-cache") + 1]
        sm = job["metadata"]["labels"]["sa3-builder/sm"]
        caches.setdefault(sm, set()).add(expand(path, {"TARGET_SM": sm}))
    # printf registry.example/sa3-builder:0.1.0 | sha256sum | cut -c-8
    assert caches == {sm: {f"/cache/timing/53a948f0/sm_{sm}.cache"} for sm in ("89", "90", "120")}
    for name, backend in (("rtx", "tensorrt_rtx"), ("scratch", "tensorrt"), ("scratch", "tensorrt_rtx")):
        for job in jobs_of(variety[name]):
            if job["metadata"]["labels"]["sa3-builder/backend"] == backend:
                assert "--timing-cache" not in build_of(job)["args"]


def test_memory_follows_the_models_size(tmp_path: Path, write: Callable[..., Path]) -> None:
    medium = load_recipe(write(model="onnx: ../models/m.onnx"))
    swept = load_recipe(write(model="onnx: ../models/m.onnx", fidelity="{lengths: [64]}"))
    # 5.8 GB are 5.40 GiB: 2 + 2.0 * 5.40 = 12.8, 2 + 3.5 * 5.40 = 20.9, 2 + 3 * 5.40 = 18.2.
    assert needs(medium, 5_800_000_000).memory == 13
    assert needs(swept, 5_800_000_000).memory == 21
    assert needs(swept, 5_800_000_000).scratch == 19
    assert needs(medium, 5_800_000_000).memory_limit == 20  # half as much again, of 13

    (job,) = jobs_of(rendered([medium.path], (89,), options()))
    assert build_of(job)["resources"]["requests"]["memory"] == "21Gi"  # not here: as for the largest known
    (job,) = jobs_of(rendered([medium.path], (89,), options(source_bytes=2**30)))
    assert build_of(job)["resources"]["requests"]["memory"] == "6Gi"  # 2 + 3.5


def test_a_model_on_this_machine_is_measured_with_its_sidecar(
    tmp_path: Path, write: Callable[..., Path], tiny_models: Mapping[str, Path]
) -> None:
    model = tiny_models["sm_torchscript17"]
    (tmp_path / "models").mkdir()
    for path in model.parent.glob(f"{model.name}*"):
        shutil.copy(path, tmp_path / "models" / path.name)
    recipe = write(model=f"onnx: ../models/{model.name}")
    (job,) = jobs_of(rendered([recipe], (89,), options()))
    assert build_of(job)["resources"]["requests"]["memory"] == "3Gi"  # some megabytes on top of 2 GiB


@pytest.mark.parametrize(
    ("named", "place"), [("../scales/m.json", "/scales/m.json"), ("near/m.json", "/recipes/near/m.json")]
)
def test_the_recipe_and_its_scales_travel_in_the_config_map(
    write: Callable[..., Path], named: str, place: str
) -> None:
    recipe = write(precision=f"{{recipe: fp8, scales: {named}}}", model="onnx: ../models/m.onnx")
    scales = recipe.parent / named
    scales.parent.mkdir()
    scales.write_text('{"a": 1}\n')
    documents = rendered([recipe], (89,), options())
    assert files_of(documents) == {"/recipes/tiny.yaml": recipe.read_text(), place: '{"a": 1}\n'}

    (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
    scales.write_text('{"a": 2}\n')
    (changed,) = [d for d in rendered([recipe], (89,), options()) if d["kind"] == "ConfigMap"]
    assert changed["metadata"]["name"] != config["metadata"]["name"]

    scales.write_text("x" * 1_100_000)
    with pytest.raises(RecipeError, match=r"tiny\.yaml:3: precision\.scales: .* more than a ConfigMap holds"):
        rendered([recipe], (89,), options())
    scales.unlink()
    with pytest.raises(RecipeError, match=r"tiny\.yaml:3: precision\.scales: .*No such file"):
        rendered([recipe], (89,), options())


def files_of(documents: Sequence[Document]) -> dict[str, str]:
    """What the first Job's pod finds in the folders that come from ConfigMaps, by path."""
    job = jobs_of(documents)[0]
    folders = {mount["name"]: mount["mountPath"] for mount in build_of(job)["volumeMounts"]}
    configs = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    return {
        f"{folders[volume['name']]}/{item['path']}": configs[volume["configMap"]["name"]][item["key"]]
        for volume in pod_of(job)["volumes"]
        if "configMap" in volume
        for item in volume["configMap"]["items"]
    }


def test_a_recipe_of_any_text_arrives_byte_for_byte(tmp_path: Path) -> None:
    text = recipe_text().replace("\n", "\r\n") + "# ünïcode, a tab\t, trailing space \r\n#  \n"
    path = tmp_path / "odd name.yaml"
    path.write_bytes(text.encode())
    assert files_of(rendered([path], (89,), options())) == {"/recipes/odd name.yaml": text}


def test_a_long_list_becomes_one_indexed_job_per_backend(write: Callable[..., Path]) -> None:
    paths = [write(f"r{n}.yaml", name=f"m{n}") for n in range(21)]
    assert len(jobs_of(rendered(paths[:20], (89,), options()))) == 20
    documents = rendered(paths, (89, 120), options(parallelism=4))
    jobs = jobs_of(documents)
    assert [job["metadata"]["name"] for job in jobs] == [
        f"sa3-fleet-tensorrt-rtx-sm-{sm}" for sm in (89, 120)
    ]
    spec = jobs[0]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 21, 4)
    assert spec["backoffLimitPerIndex"] == 3
    assert "backoffLimit" not in spec
    assert files_of(documents) == {f"/recipes/{n}.yaml": path.read_text() for n, path in enumerate(paths)}
    # A day in the queue; 21 builds, 4 at once, are 6 rounds of 4 tries of 4 hours.
    assert spec["activeDeadlineSeconds"] == 86400 + 6 * 4 * 14400


def test_plugins_run_only_where_the_operator_allows_them(write: Callable[..., Path]) -> None:
    recipe = write(backend="tensorrt", build="{plugins: [../models/p.so]}", model="onnx: ../models/m.onnx")
    with pytest.raises(RecipeError, match=r"build\.plugins: plugin libraries run only .*--allow-plugins"):
        rendered([recipe], (89,), options())
    (job,) = jobs_of(rendered([recipe], (89,), options(allow_plugins=True)))
    assert "--allow-plugins" in build_of(job)["args"]


def test_names_are_dns_labels_and_distinct() -> None:
    assert object_name("sa3", "sa3-m", "fp16") == "sa3-sa3-m-fp16"
    odd = [object_name("sa3", name, "fp16") for name in ("My_Model", "my-model", "my.model", "m" * 100)]
    assert len(set(odd)) == 4
    assert all(len(name) <= 50 and name == name.lower() and "_" not in name for name in odd)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"out": "out"}, r"tiny\.yaml:10: output\.dir: is /recipes/out in the container, .* in /out"),
        ({"out": "/srv/out"}, r"output\.dir: is /srv/out in the container, .*write \.\./out"),
        ({"model": "onnx: m.onnx"}, r"model\.onnx: is /recipes/m\.onnx .*write \.\./models/m\.onnx"),
        (
            {"precision": "{recipe: fp8, scales: ../m.json}"},
            r"scales: is /m\.json .* in /scales or /recipes or /models .*write \.\./scales/m\.json",
        ),
        ({"model": "onnx: ../../data/m.onnx"}, r"model\.onnx: is /data/m\.onnx"),
        (
            {"build": "{timing_cache: t.cache}", "backend": "tensorrt"},
            r"build\.timing_cache: is /recipes/t\.cache",
        ),
        ({"backend": "tensorrt", "build": "{plugins: [p.so]}"}, r"build\.plugins\[0\]: is /recipes/p\.so"),
    ],
)
def test_a_path_that_the_container_lacks_is_refused(
    write: Callable[..., Path], asked: Mapping[str, str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        place_recipes([write(**asked)])


def test_recipes_that_would_overwrite_each_other_are_refused(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    with pytest.raises(RecipeError, match=r"b\.yaml:2: model\.name: tiny in fp16 is also the engine of"):
        place_recipes([write("a.yaml"), write("b.yaml")])
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "a.yaml"
    other.write_text(recipe_text(name="other"))
    with pytest.raises(RecipeError, match="has the same file name as"):
        place_recipes([write("a.yaml"), other])


@pytest.mark.parametrize(
    ("sm", "precision", "error", "message"),
    [
        (60, "fp16", RecipeError, "sm 60 has no fp16|cannot build for sm_60"),
        (86, "fp8", RecipeError, r"precision: TensorRT-RTX compiles fp8 for sm_89.*leave 86 out of --sm"),
        (90, "fp16", PlatformError, "cannot build for sm_90.*H100 and H200 need target.backend: tensorrt"),
    ],
)
def test_a_pair_that_no_node_can_build_is_refused(
    write: Callable[..., Path], sm: int, precision: str, error: type[BuilderError], message: str
) -> None:
    with pytest.raises((error, PlatformError), match=message):
        rendered([write(precision=precision)], (sm,), options())


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("sa3-builder", "neither tag nor digest"),
        ("host:5000/sa3-builder", "neither tag"),
        ("A b:1", "is no image"),
    ],
)
def test_an_image_must_name_one_builder(reference: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_image(reference)


def test_image_references_that_name_one_builder() -> None:
    for reference in ("sa3-builder:0.1.0", "host:5000/a/sa3-builder:1", f"h.example/b@sha256:{'0' * 64}"):
        assert check_image(reference) == reference


@pytest.mark.parametrize("text", ["pvc:", "pvc:A_b", "host:relative", "host:/a/../b", "nfs:/x", "scratch"])
def test_storage_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--models must be"):
        parse_storage(text, "--models")


def test_yaml_has_no_anchors_and_keeps_order() -> None:
    shared = {"b": 1, "a": "x\ny\n"}
    assert to_yaml([{"one": shared, "two": shared}]) == (
        "one:\n  b: 1\n  a: |\n    x\n    y\ntwo:\n  b: 1\n  a: |\n    x\n    y\n"
    )


# --- the kustomize tree -----------------------------------------------------------------------


def test_overlays_give_what_plain_yaml_holds(tmp_path: Path, write: Callable[..., Path]) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    placed = place_recipes(
        [
            write("a.yaml"),
            write("b.yaml", name="g", backend="tensorrt"),
            write("c.yaml", name="h", precision="bf16"),
        ]
    )
    sms = (89, 120)
    tree = tmp_path / "tree"
    write_tree(kustomize_files(placed, sms, options(), "sa3-builder k8s"), tree)
    plain = list(yaml.safe_load_all(plain_yaml(placed, sms, options())))
    for sm in sms:
        text = subprocess.run(
            [kubectl, "kustomize", str(tree / f"overlays/sm_{sm}")],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        expected = [d for d in plain if d["metadata"]["labels"]["sa3-builder/sm"] == str(sm)]
        assert _by_name(yaml.safe_load_all(text)) == _by_name(expected)


def _by_name(documents: Any) -> dict[tuple[str, str], Document]:
    return {(d["kind"], d["metadata"]["name"]): d for d in documents}


def test_writing_a_tree_again_removes_what_it_no_longer_holds(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    placed = place_recipes([write()])
    write_tree(kustomize_files(placed, (89, 120), options(), "x"), tmp_path / "tree")
    own = tmp_path / "tree/overlays/site/kustomization.yaml"
    own.parent.mkdir()
    own.write_text("resources: [../sm_89]\n")
    removed = write_tree(kustomize_files(placed, (89,), options(), "x"), tmp_path / "tree")
    assert removed == (tmp_path / "tree/overlays/sm_120/kustomization.yaml",)
    assert own.exists()
    assert not (tmp_path / "tree/overlays/sm_120").exists()


def test_the_committed_tree_is_what_its_own_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = REPOSITORY / "deploy" / "kubernetes"
    command = shlex.split(
        (committed / "base/kustomization.yaml").read_text().splitlines()[0].partition(": ")[2]
    )
    assert command[:2] == ["sa3-builder", "k8s"]
    out = command.index("--out")
    assert command[out + 1] == "deploy/kubernetes"
    fresh = tmp_path / "kubernetes"
    arguments = [*command[1 : out + 1], str(fresh), *command[out + 2 :]]
    # The tree holds the command that wrote it, in the words of the process's own arguments.
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(REPOSITORY)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert _texts(fresh) == _texts(committed)


def _texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


# --- the jobs, run ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, list[Path]]:
    """A cluster, and three recipes for it."""
    require_namespaces()
    folder = tmp_path_factory.mktemp("fleet")
    asked = {
        "fp16.yaml": recipe_text(fidelity="{lengths: [64], t: [0.5]}"),
        "bf16.yaml": recipe_text(precision="bf16"),
        "fp32.yaml": recipe_text(precision="fp32"),
    }
    (folder / "recipes").mkdir()
    for name, text in asked.items():
        (folder / "recipes" / name).write_text(text)
    return Cluster(folder / "cluster", ()), [folder / "recipes" / name for name in asked]


def test_a_fleet_fills_the_matrix(fleet: tuple[Cluster, list[Path]]) -> None:
    """Three recipes for two architectures: one Job each for sm_89, an Indexed Job for sm_120; the
    first pod is killed while it compiles, and its Job runs to the end all the same."""
    cluster, paths = fleet
    single = rendered(paths, (89,), options())
    indexed = rendered(paths, (120,), options(indexed="always"))
    cluster.documents = [*single, *indexed]
    killed: list[Pod] = []

    def kill_the_first(pod: Pod) -> Sequence[str]:
        if not killed:
            pod.wait_for("compile", "started")
            pod.kill()
            killed.append(pod)
        return ()

    cluster.interfere = kill_the_first
    results = [cluster.run(job) for job in cluster.jobs()]
    assert [(r.condition, r.reason) for r in results] == [("Complete", "")] * 4

    first = results[0].attempts
    assert [(a.exit_code, a.action) for a in first] == [(137, "Count"), (0, "")]
    resumed = {e["stage"]: e["fields"]["cached"] for e in first[1].events if e["event"] == "finished"}
    # What the killed pod had finished is not done again: its cache outlived it.
    assert resumed == {"source": False, "convert": True, "fidelity": True, "compile": False, "verify": False}
    assert [len(r.attempts) for r in results] == [2, 1, 1, 3]
    # onnxruntime, which did the sweep of the first, was kept from reporting its use: it leaves an id.
    assert not list((cluster.root / "pods").rglob("deviceid"))

    recipes = [load_recipe(path) for path in paths]
    matrix = collect(
        cluster.claim("sa3-out"), expected_slots(recipes, (89, 120), lambda _: None), image=Image(IMAGE)
    )
    assert {(c.slot.precision, c.slot.sm): (c.state, c.reason) for c in matrix.cells} == {
        (precision, sm): ("verified", "") for precision in ("fp32", "fp16", "bf16") for sm in (89, 120)
    }
    printed = CliRunner().invoke(app, ["collect", str(cluster.claim("sa3-out"))])
    assert printed.exit_code == 0
    assert printed.output.splitlines() == [
        "model  precision  sm_89     sm_120",
        "tiny   fp32       verified  verified",
        "tiny   fp16       verified  verified",
        "tiny   bf16       verified  verified",
        "6 verified",
    ]


def test_a_bad_recipe_fails_its_job_at_once(
    fleet: tuple[Cluster, list[Path]], tmp_path: Path, write: Callable[..., Path]
) -> None:
    require_namespaces()
    documents = rendered([write(name="bad")], (89,), options())
    (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
    config["data"]["tiny.yaml"] = config["data"]["tiny.yaml"].replace("precision: fp16", "precision: fp61")
    cluster = Cluster(tmp_path / "cluster", documents)
    result = cluster.run(cluster.jobs()[0])
    assert (result.condition, result.reason) == ("Failed", "PodFailurePolicy")
    (attempt,) = result.attempts
    assert (attempt.exit_code, attempt.action) == (2, "FailJob")
    fault = attempt.events[-1]["fields"]
    assert fault["where"] == "/recipes/tiny.yaml:3"
    assert "fp61" in fault["message"]

    matrix = collect(
        cluster.claim("sa3-out"), expected_slots([load_recipe(write(name="bad"))], (), lambda _: None)
    )
    assert [(c.state, c.reason) for c in matrix.cells] == [("missing", "nothing was published")]


def test_a_bad_recipe_of_a_long_list_fails_alone_and_a_lack_of_space_is_tried_again(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    """Of two builds that end before any work, one is hopeless, and one finds its output read-only."""
    require_namespaces()
    paths = [write("a.yaml", name="a"), write("b.yaml", name="b")]
    documents = rendered(paths, (89,), options(indexed="always", retries=1))
    (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
    config["data"]["a.yaml"] = "schema: sa3-builder/1\n"
    (job,) = jobs_of(documents)
    for mount in build_of(job)["volumeMounts"]:
        if mount["mountPath"] == "/cache":
            mount["readOnly"] = True
    cluster = Cluster(tmp_path / "cluster", documents)
    result = cluster.run(job)
    assert (result.condition, result.failed_indexes) == ("Failed", (0, 1))
    assert [(a.index, a.exit_code, a.action) for a in result.attempts] == [
        (0, 2, "FailIndex"),
        (1, 8, "Count"),
        (1, 8, "Count"),
    ]
    assert "/cache" in json.dumps(result.attempts[1].events[-1])


def test_pods_have_no_network(tmp_path: Path) -> None:
    require_namespaces()
    (tmp_path / "out").mkdir()
    script = (
        "import pathlib; lines = pathlib.Path('/proc/net/dev').read_text().splitlines()[2:];"
        "pathlib.Path('/out/devices').write_text(' '.join(line.split(':')[0].strip() for line in lines));"
        "pathlib.Path('/usr/forbidden').write_text('')"
    )
    result = subprocess.run(
        container_command(
            [sys.executable, "-c", script], [Mount(tmp_path / "out", "/out")], tmp_path / "root"
        ),
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "out/devices").read_text() == "lo"
    assert "Read-only file system" in result.stderr


# --- the operator's page --------------------------------------------------------------------------


def test_the_commands_of_the_page_end_with_a_verified_matrix(tmp_path: Path) -> None:
    """The cluster is a stand-in whose pods are processes in namespaces."""
    require_namespaces()
    real = shutil.which("kubectl")
    if real is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    page = REPOSITORY / "docs/kubernetes.md"
    blocks = shell_blocks(page)
    folder = checkout(tmp_path / "checkout")
    (folder / "models").mkdir()
    (folder / "models/own.onnx").write_bytes(b"a model")
    write_kubectl(tmp_path / "tools", real)
    printed = run_blocks([*blocks, "kubectl get jobs"], folder, tmp_path / "tools")
    (collected,) = [text for text in printed if text.startswith("model ")]
    assert collected in page.read_text()
    assert (tmp_path / "tools/state/claims/sa3-models/own.onnx").read_bytes() == b"a model"
    # Built again after its job was removed: everything came from the cache.
    assert "sa3-smoke-fp16-sm-89 Complete cached: ['convert', 'fidelity', 'compile', 'verify']" in printed[-1]
