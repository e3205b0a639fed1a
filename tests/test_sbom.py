"""Bills of materials against CycloneDX's own schema, and provenance against the files it is about."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource
from typer.testing import CliRunner

from engine_builder.cli.app import app
from engine_builder.errors import SourceModelError, VerificationError
from engine_builder.manifest import Manifest, ManifestFile, ManifestStage
from engine_builder.supply_chain.provenance import Statement, check, read_manifest, statement_for
from engine_builder.supply_chain.sbom import SPEC_VERSION, bill_of_materials, read_lock, to_text
from tests.conftest import REPOSITORY

LOCK = read_lock((REPOSITORY / "requirements" / "rtx.txt").read_text())


def cyclonedx_validator() -> jsonschema.Draft7Validator:
    """CycloneDX's strict schema, with the two that it refers to, from the cyclonedx-python-lib package."""
    folder = resources.files("cyclonedx.schema") / "_res"
    found = {}
    for name in (f"bom-{SPEC_VERSION}", "spdx", "jsf-0.82"):
        schema = json.loads((folder / f"{name}.SNAPSHOT.schema.json").read_text())
        found[f"{name}.SNAPSHOT.schema.json"] = schema
        found[f"{name}.schema.json"] = schema
    registry: Registry[Any] = Registry()
    for name, schema in found.items():
        entry = Resource.from_contents(schema)
        registry = registry.with_resource(f"http://cyclonedx.org/schema/{name}", entry)
    schema = found[f"bom-{SPEC_VERSION}.schema.json"]
    return jsonschema.Draft7Validator({**schema, "additionalProperties": False}, registry=registry)


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    base = {"name": "nvcr.io/nvidia/tensorrt:26.02-py3", "digest": "sha256:" + "ab" * 32}
    return bill_of_materials(metadata.distributions(), LOCK, base=base, timestamp=0)


def test_the_bill_follows_the_schema(bill: dict[str, Any]) -> None:
    errors = [f"{list(error.path)}: {error.message}" for error in cyclonedx_validator().iter_errors(bill)]
    assert errors == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b.pop("bomFormat"),
        lambda b: b["components"][0].pop("name"),
        lambda b: b["components"][0].update(hashes=[{"alg": "SHA-256", "content": "short"}]),
        lambda b: b.update(serialNumber="urn:uuid:none"),
        lambda b: b["components"].append(b["components"][0]),
    ],
)
def test_the_validator_finds_faults(bill: dict[str, Any], spoil: Callable[[dict[str, Any]], object]) -> None:
    spoilt = json.loads(json.dumps(bill))
    spoil(spoilt)
    assert not cyclonedx_validator().is_valid(spoilt)


def test_the_bill_lists_what_is_installed_and_locked(bill: dict[str, Any]) -> None:
    components = {c["name"]: c for c in bill["components"]}
    onnx = components["onnx"]
    assert onnx["version"] == metadata.version("onnx")
    assert onnx["purl"] == f"pkg:pypi/onnx@{metadata.version('onnx')}"
    assert {"name": "sa3-builder:locked", "value": "true"} in onnx["properties"]
    hashes = [p["value"] for p in onnx["properties"] if p["name"] == "sa3-builder:lock-sha256"]
    assert set(hashes) == set(LOCK["onnx"][1])
    # An installed package that no lock pins is listed all the same, and told apart.
    assert {"name": "sa3-builder:locked", "value": "false"} in components["pytest"]["properties"]
    assert components["nvcr.io/nvidia/tensorrt:26.02-py3"]["hashes"][0]["content"] == "ab" * 32
    assert bill["metadata"]["timestamp"] == "1970-01-01T00:00:00Z"


def test_every_reference_leads_somewhere(bill: dict[str, Any]) -> None:
    known = {bill["metadata"]["component"]["bom-ref"], *(c["bom-ref"] for c in bill["components"])}
    assert {d["ref"] for d in bill["dependencies"]} <= known
    assert {ref for d in bill["dependencies"] for ref in d["dependsOn"]} <= known
    needs = {d["ref"]: d["dependsOn"] for d in bill["dependencies"]}
    assert f"pkg:pypi/numpy@{metadata.version('numpy')}" in needs[f"pkg:pypi/onnx@{metadata.version('onnx')}"]


def test_the_same_environment_gives_the_same_bill(bill: dict[str, Any]) -> None:
    base = {"name": "nvcr.io/nvidia/tensorrt:26.02-py3", "digest": "sha256:" + "ab" * 32}
    shuffled = sorted(metadata.distributions(), key=lambda d: d.version)
    assert to_text(bill_of_materials(shuffled, LOCK, base=base, timestamp=0)) == to_text(bill)
    other = bill_of_materials(shuffled, LOCK, base={**base, "digest": "unresolved"}, timestamp=0)
    assert other["serialNumber"] != bill["serialNumber"]
    assert cyclonedx_validator().is_valid(other)


def test_locks_are_read_with_every_hash() -> None:
    pins = read_lock(
        "# comment\n"
        "Some_Package==1.2.3 ; sys_platform == 'linux' \\\n"
        f"    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n    # via other\n"
        f"other==2 \\\n    --hash=sha256:{'c' * 64}\n"
    )
    assert pins == {"some-package": ("1.2.3", ("a" * 64, "b" * 64)), "other": ("2", ("c" * 64,))}


def test_the_command_writes_a_valid_bill(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "sbom.cdx.json"
    done = subprocess.run(
        [sys.executable, "entrypoint.py", "sbom", "--lock", "requirements/rtx.txt", "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": "86400"},
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    assert cyclonedx_validator().is_valid(written)
    assert written["metadata"]["timestamp"] == "1970-01-02T00:00:00Z"


# --- provenance -------------------------------------------------------------------------------


def described(path: Path) -> ManifestFile:
    data = path.read_bytes()
    return ManifestFile(name=path.name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """An engine with report and manifest, and the recipe and source model that it names."""
    files = {}
    for name in ("dit_fp16.trt", "dit_fp16.verify.json", "recipe.yaml", "model.onnx", "model.onnx.data"):
        (tmp_path / name).write_bytes(f"content of {name}".encode())
        files[name] = described(tmp_path / name)
    manifest = Manifest(
        engine=files["dit_fp16.trt"],
        report=files["dit_fp16.verify.json"],
        model="sa3-m",
        kind="sa3-dit",
        precision="fp16",
        sm=89,
        backend="tensorrt_rtx",
        recipe=files["recipe.yaml"],
        recipe_digest="12" * 32,
        source=(files["model.onnx"], files["model.onnx.data"]),
        source_sha256="34" * 32,
        converted=(ManifestFile(name="converted.onnx", bytes=3, sha256="56" * 32),),
        scales=None,
        versions={"sa3-builder": "0.1.0", "tensorrt_rtx": "1.7.1.116"},
        image={
            "reference": "sa3-builder@sha256:" + "ab" * 32,
            "digest": "sha256:" + "ab" * 32,
            "base": "nvcr.io/nvidia/tensorrt:26.02-py3",
            "base_digest": "unresolved",
            "sbom_sha256": "78" * 32,
        },
        stages=(ManifestStage(name="convert", key="convert-1", cached=False, reason="", seconds=1.0),),
        total_seconds=2.0,
    )
    (tmp_path / "dit_fp16.manifest.json").write_text(manifest.to_json())
    return tmp_path / "dit_fp16.trt"


def statement(engine: Path) -> bytes:
    manifest, data, path = read_manifest(engine)
    return statement_for(manifest, data, path.name).to_json().encode()


def test_the_statement_names_recipe_source_image_and_engine(published: Path) -> None:
    text = json.loads(statement(published))
    assert text["_type"] == "https://in-toto.io/Statement/v1"
    assert text["predicateType"] == "https://slsa.dev/provenance/v1"
    engine = hashlib.sha256(b"content of dit_fp16.trt").hexdigest()
    assert text["subject"] == [{"name": "dit_fp16.trt", "digest": {"sha256": engine}}]
    build = text["predicate"]["buildDefinition"]
    digests = {r["name"]: r.get("digest", {}).get("sha256") for r in build["resolvedDependencies"]}
    assert digests == {
        "recipe.yaml": hashlib.sha256(b"content of recipe.yaml").hexdigest(),
        "model.onnx": hashlib.sha256(b"content of model.onnx").hexdigest(),
        "model.onnx.data": hashlib.sha256(b"content of model.onnx.data").hexdigest(),
        "sa3-builder@sha256:" + "ab" * 32: "ab" * 32,
        "nvcr.io/nvidia/tensorrt:26.02-py3": None,
        "sbom.cdx.json": "78" * 32,
    }
    base = next(r for r in build["resolvedDependencies"] if r["annotations"]["role"] == "base image")
    assert base["annotations"]["digest"] == "unresolved: only the tag was known"
    run = text["predicate"]["runDetails"]
    assert run["builder"]["id"] == "pkg:oci/sa3-builder@sha256:" + "ab" * 32
    manifest = hashlib.sha256((published.parent / "dit_fp16.manifest.json").read_bytes()).hexdigest()
    assert {"name": "dit_fp16.manifest.json", "digest": {"sha256": manifest}} in run["byproducts"]


def test_it_verifies_with_its_materials(published: Path) -> None:
    folder = published.parent
    materials = [folder / name for name in ("recipe.yaml", "model.onnx", "model.onnx.data")]
    assert isinstance(check(statement(published), published, materials), Statement)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dit_fp16.trt", r"dit_fp16\.trt: its content is not what the statement names"),
        ("dit_fp16.verify.json", r"verify\.json: its content is not"),
        ("model.onnx.data", r"model\.onnx\.data: its content is not"),
        ("recipe.yaml", r"recipe\.yaml: its content is not"),
    ],
)
def test_a_changed_file_is_found(published: Path, name: str, message: str) -> None:
    text = statement(published)
    folder = published.parent
    (folder / name).write_text("changed")
    materials = [folder / "recipe.yaml", folder / "model.onnx.data"]
    with pytest.raises(VerificationError, match=message):
        check(text, published, materials)


def test_a_changed_manifest_is_found(published: Path) -> None:
    text = statement(published)
    path = published.parent / "dit_fp16.manifest.json"
    path.write_text(path.read_text().replace('"sa3-m"', '"sa3-x"'))
    with pytest.raises(VerificationError, match=r"buildDefinition\.externalParameters\.model differs"):
        check(text, published)


def test_a_changed_statement_is_found(published: Path) -> None:
    text = json.loads(statement(published))
    text["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"]["sha256"] = "00" * 32
    with pytest.raises(VerificationError, match=r"resolvedDependencies\[0\]\.digest\.sha256 differs"):
        check(json.dumps(text).encode(), published)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"\xff", b'{"_type": "https://in-toto.io/Statement/v1"}']
)
def test_what_is_no_statement_is_refused(published: Path, text: bytes) -> None:
    with pytest.raises(SourceModelError):
        check(text, published)


def test_without_a_manifest_there_is_no_provenance(published: Path) -> None:
    (published.parent / "dit_fp16.manifest.json").unlink()
    with pytest.raises(SourceModelError, match="no manifest"):
        read_manifest(published)


def test_the_commands(published: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["provenance", str(published)]).exit_code == 0
    written = published.parent / "dit_fp16.provenance.json"
    arguments = ["verify-provenance", str(written), "--engine", str(published)]
    fits = runner.invoke(app, [*arguments, "--material", str(published.parent / "model.onnx")])
    assert fits.exit_code == 0
    assert "the statement fits" in fits.output
    assert "unresolved" in fits.output
    shutil.copy(published.parent / "recipe.yaml", published)
    failed = subprocess.run(
        [sys.executable, "entrypoint.py", *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert failed.returncode == 7
    assert "its content is not what the statement names" in failed.stderr
