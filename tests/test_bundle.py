"""Air-gap bundles: made, signed, split, carried, damaged, verified, loaded."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_builder.airgap import verify_bundle as site
from engine_builder.airgap.make import BundleRequest, make_bundle
from engine_builder.airgap.split import parse_size, split_bundle
from engine_builder.airgap.verify_bundle import (
    SiteError,
    ed25519_verifies,
    join_parts,
    read_keys,
    verify_bundle,
)
from engine_builder.cli.app import app
from engine_builder.errors import BuilderError, PlatformError, RecipeError, SourceModelError
from engine_builder.fleet.container import place_recipes
from tests.images import archive_layout, write_docker, write_layout
from tests.namespaces import REPOSITORY, require_namespaces
from tests.pages import checkout, run_blocks, shell_blocks

RECIPE = """schema: sa3-builder/1
model: {{name: tiny, onnx: ../models/{model}}}
precision: {precision}
profiles:
  - x: [[1, 256, 1], [1, 256, 64], [1, 256, 128]]
    local_add_cond: [[1, 257, 1], [1, 257, 64], [1, 257, 128]]
target: {{backend: tensorrt_rtx, sm: 89}}
verify: {{fidelity: off}}
output: {{dir: ../out}}
"""


def ssh_keygen(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("ssh-keygen")
    if tool is None:
        reason = "ssh-keygen, which signs bundles, is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return subprocess.run([tool, *arguments], input=text, capture_output=True, text=True, check=False)


def make_key(path: Path, kind: str = "ed25519") -> Path:
    made = ssh_keygen("-q", "-t", kind, "-N", "", "-C", "site", "-f", str(path))
    assert made.returncode == 0, made.stderr
    return path


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Path:
    """Everything that goes into a bundle, and two keys, in one folder."""
    folder = tmp_path_factory.mktemp("workshop")
    make_key(folder / "key")
    make_key(folder / "other")
    (folder / "recipes/scales").mkdir(parents=True)
    model = tiny_models["sm_torchscript17"]
    (folder / "recipes/fp16.yaml").write_text(RECIPE.format(precision="fp16", model=model.name))
    fp8 = RECIPE.format(precision="{recipe: fp8, scales: scales/tiny.json}", model=model.name)
    (folder / "recipes/fp8.yaml").write_text(fp8)
    (folder / "recipes/scales/tiny.json").write_text('{"scales": {}}\n')
    (folder / "models").mkdir()
    for path in model.parent.glob(f"{model.name}*"):
        shutil.copy(path, folder / "models" / path.name)
    (folder / "docs").mkdir()
    (folder / "docs/airgap.md").write_text("# Closed sites\n")
    (folder / "sbom.cdx.json").write_text('{"bomFormat": "CycloneDX"}\n')
    write_layout(folder / "layout")
    archive_layout(folder / "layout", folder / "image.tar")
    return folder


def request_for(workshop: Path, **changes: object) -> BundleRequest:
    fields: dict[str, object] = {
        "recipes": place_recipes([workshop / "recipes/fp16.yaml", workshop / "recipes/fp8.yaml"]),
        "image": workshop / "image.tar",
        "key": workshop / "key",
        "documents": (workshop / "docs",),
        "sbom": workshop / "sbom.cdx.json",
        "with_models": True,
    }
    return BundleRequest(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(workshop: Path) -> Path:
    """A bundle that no test changes."""
    make_bundle(request_for(workshop), workshop / "sa3")
    return workshop / "sa3"


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return shutil.copytree(made, tmp_path / "sa3")


@pytest.fixture(scope="module")
def keys(workshop: Path) -> list[bytes]:
    return read_keys(workshop / "key.pub")


def image_digest(workshop: Path) -> str:
    return str(json.loads((workshop / "layout/index.json").read_text())["manifests"][0]["digest"])


# --- making -------------------------------------------------------------------------------------


def test_a_bundle_holds_what_a_site_needs(made: Path, workshop: Path, keys: list[bytes]) -> None:
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    blobs = {name for name in names if name.startswith("image/blobs/sha256/")}
    assert len(blobs) == 3  # manifest, config, layer
    models = {f"models/{path.name}" for path in (workshop / "models").iterdir()}
    assert names - blobs - models == {
        "SHA256SUMS",
        "SHA256SUMS.sig",
        "bundle.json",
        "docs/docs/airgap.md",
        "image/index.json",
        "image/oci-layout",
        "recipes/fp16.yaml",
        "recipes/fp8.yaml",
        "recipes/scales/tiny.json",
        "sbom/sbom.cdx.json",
        "schemas/manifest.schema.json",
        "schemas/recipe.schema.json",
        "schemas/scales.schema.json",
        "schemas/verify.schema.json",
        "verify-bundle",
    }
    checked = verify_bundle(made, keys)
    assert (checked.name, checked.digest) == ("sa3-builder:0.1.0", image_digest(workshop))
    assert checked.files == len(names) - 2


def test_the_same_things_and_key_give_the_same_bundle(made: Path, workshop: Path, tmp_path: Path) -> None:
    make_bundle(request_for(workshop, image=workshop / "layout"), tmp_path / "again")
    assert (tmp_path / "again/SHA256SUMS").read_bytes() == (made / "SHA256SUMS").read_bytes()
    assert (tmp_path / "again/SHA256SUMS.sig").read_bytes() == (made / "SHA256SUMS.sig").read_bytes()


def test_ordinary_tools_agree(made: Path, workshop: Path) -> None:
    """A site can also check a bundle without any of our code."""
    signers = workshop / "allowed_signers"
    signers.write_text(f"site {(workshop / 'key.pub').read_text()}")
    signed = ssh_keygen(
        *("-Y", "verify", "-f", str(signers), "-I", "site", "-n", "sa3-builder-bundle"),
        *("-s", str(made / "SHA256SUMS.sig")),
        text=(made / "SHA256SUMS").read_text(),
    )
    assert signed.returncode == 0, signed.stderr
    assert read_keys(signers) == read_keys(workshop / "key.pub")
    sums = subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=made, check=False
    )
    assert sums.returncode == 0


def test_models_stay_behind_unless_asked_for(workshop: Path, tmp_path: Path, keys: list[bytes]) -> None:
    make_bundle(request_for(workshop, with_models=False), tmp_path / "sa3")
    assert not (tmp_path / "sa3/models").exists()
    assert verify_bundle(tmp_path / "sa3", keys).files > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: {"image": w / "absent.tar"}, RecipeError, r"absent\.tar: no such image"),
        (lambda w: {"image": w / "sbom.cdx.json"}, RecipeError, "is no image archive"),
        (lambda w: {"image": w / "docs"}, RecipeError, r"has no index\.json: it is no OCI layout"),
        (lambda w: {"key": w / "absent"}, PlatformError, "ssh-keygen does not sign"),
        (lambda w: {"key": make_key(w / "rsa", "rsa")}, PlatformError, "was not made by an Ed25519 key"),
        (lambda w: {"sbom": w / "absent.json"}, RecipeError, "no such file"),
    ],
)
def test_what_cannot_be_bundled_is_refused(
    workshop: Path,
    tmp_path: Path,
    change: Callable[[Path], Mapping[str, object]],
    error: type[BuilderError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        make_bundle(request_for(workshop, **change(workshop)), tmp_path / "sa3")
    assert list(tmp_path.iterdir()) == []  # nothing half-made is left


def test_an_existing_folder_is_not_overwritten(made: Path, workshop: Path) -> None:
    with pytest.raises(RecipeError, match="exists already"):
        make_bundle(request_for(workshop), made)


def test_a_missing_model_is_refused(workshop: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipes/x.yaml"
    recipe.parent.mkdir()
    recipe.write_text(RECIPE.format(precision="fp16", model="absent.onnx"))
    with pytest.raises(SourceModelError, match="no such model"):
        make_bundle(request_for(workshop, recipes=place_recipes([recipe])), tmp_path / "sa3")


def test_an_image_with_a_damaged_blob_is_refused(workshop: Path, tmp_path: Path) -> None:
    for blob in (workshop / "layout/blobs/sha256").iterdir():
        layout = shutil.copytree(workshop / "layout", tmp_path / blob.name)
        flip(layout / "blobs/sha256" / blob.name)
        with pytest.raises(RecipeError, match=f"blob sha256:{blob.name} is damaged"):
            make_bundle(request_for(workshop, image=layout), tmp_path / "sa3")


def test_an_archive_of_two_images_is_refused(workshop: Path, tmp_path: Path) -> None:
    layout = shutil.copytree(workshop / "layout", tmp_path / "layout")
    index = json.loads((layout / "index.json").read_text())
    index["manifests"] *= 2
    (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises(RecipeError, match="holds 2 images, and a bundle takes one"):
        make_bundle(request_for(workshop, image=layout), tmp_path / "sa3")


def test_attestations_beside_an_image_are_no_second_image(
    workshop: Path, tmp_path: Path, keys: list[bytes]
) -> None:
    """Build tools wrap an image and what they attest about it in an index of their own."""
    layout = shutil.copytree(workshop / "layout", tmp_path / "layout")
    index = json.loads((layout / "index.json").read_text())
    (image,) = index["manifests"]
    attestation = {**image, "platform": {"architecture": "unknown", "os": "unknown"}}
    nested = json.dumps({"schemaVersion": 2, "manifests": [image, attestation]}).encode()
    digest = hashlib.sha256(nested).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(nested)
    outer = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": f"sha256:{digest}",
        "size": len(nested),
    }
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [outer]}))
    made = make_bundle(request_for(workshop, image=layout, name="b:1"), tmp_path / "sa3")
    assert made == image["digest"]
    assert verify_bundle(tmp_path / "sa3", keys).name == "b:1"


# --- damage -------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def kinds_of_file(bundle: Path) -> Iterator[str]:
    blobs = sorted(path.relative_to(bundle).as_posix() for path in (bundle / "image/blobs/sha256").iterdir())
    yield from blobs
    yield from sorted(path.relative_to(bundle).as_posix() for path in (bundle / "models").iterdir())
    yield from (
        "bundle.json",
        "docs/docs/airgap.md",
        "image/index.json",
        "image/oci-layout",
        "recipes/fp16.yaml",
        "recipes/scales/tiny.json",
        "sbom/sbom.cdx.json",
        "schemas/recipe.schema.json",
        "verify-bundle",
    )


def test_a_flipped_bit_in_any_file_is_caught_by_name(bundle: Path, keys: list[bytes]) -> None:
    for name in kinds_of_file(bundle):
        before = (bundle / name).read_bytes()
        flip(bundle / name)
        with pytest.raises(SiteError) as caught:
            verify_bundle(bundle, keys)
        assert caught.value.message == f"altered: {name}"
        assert caught.value.exit_code == 7
        (bundle / name).write_bytes(before)
    verify_bundle(bundle, keys)


def test_a_flipped_bit_in_the_list_or_its_signature_is_caught_by_name(
    bundle: Path, keys: list[bytes]
) -> None:
    for name in ("SHA256SUMS", "SHA256SUMS.sig"):
        before = (bundle / name).read_bytes()
        for position in range(0, len(before), 37):
            damaged = bytearray(before)
            damaged[position] ^= 4
            (bundle / name).write_bytes(damaged)
            with pytest.raises(SiteError, match=r"SHA256SUMS(\.sig)? (or|is|was|uses)"):
                verify_bundle(bundle, keys)
        (bundle / name).write_bytes(before)
    verify_bundle(bundle, keys)


def test_a_missing_file_of_any_kind_is_caught_by_name(bundle: Path, keys: list[bytes]) -> None:
    for name in kinds_of_file(bundle):
        (bundle / name).rename(bundle.parent / "aside")
        with pytest.raises(SiteError) as caught:
            verify_bundle(bundle, keys)
        assert caught.value.message == f"missing: {name}"
        (bundle.parent / "aside").rename(bundle / name)


def _link_folder(bundle: Path) -> None:
    (bundle / "docs/more").symlink_to("/etc")


def _link_file(bundle: Path) -> None:
    """A link to the right content is still not the file that was signed."""
    (bundle / "recipes/fp16.yaml").rename(bundle.parent / "fp16.yaml")
    (bundle / "recipes/fp16.yaml").symlink_to(bundle.parent / "fp16.yaml")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: (b / "recipes/extra.yaml").write_text(""), "added: recipes/extra.yaml"),
        (lambda b: (b / ".hidden").touch(), "added: .hidden"),
        (_link_folder, "added: docs/more"),
        (_link_file, "altered: recipes/fp16.yaml is no regular file"),
        (lambda b: (b / "SHA256SUMS.sig").unlink(), "unsigned: SHA256SUMS.sig is missing"),
        (lambda b: (b / "SHA256SUMS").unlink(), "missing: SHA256SUMS: "),
        (lambda b: (b / "SHA256SUMS.sig").write_text("none"), "SHA256SUMS.sig is damaged: no SSH signature"),
    ],
)
def test_anything_but_what_was_signed_is_refused(
    bundle: Path, keys: list[bytes], damage: Callable[[Path], object], message: str
) -> None:
    damage(bundle)
    with pytest.raises(SiteError) as caught:
        verify_bundle(bundle, keys)
    assert caught.value.message.startswith(message)


def test_every_fault_is_told(bundle: Path, keys: list[bytes]) -> None:
    flip(bundle / "bundle.json")
    (bundle / "recipes/fp8.yaml").unlink()
    (bundle / "added.txt").touch()
    with pytest.raises(SiteError) as caught:
        verify_bundle(bundle, keys)
    assert caught.value.message == "missing: recipes/fp8.yaml; added: added.txt; altered: bundle.json"


def _resign(bundle: Path, key: Path, namespace: str = "sa3-builder-bundle") -> None:
    (bundle / "SHA256SUMS.sig").unlink(missing_ok=True)
    signed = ssh_keygen("-Y", "sign", "-n", namespace, "-f", str(key), str(bundle / "SHA256SUMS"))
    assert signed.returncode == 0, signed.stderr


def test_another_key_is_refused_by_its_fingerprint(bundle: Path, workshop: Path, keys: list[bytes]) -> None:
    _resign(bundle, workshop / "other")
    printed = ssh_keygen("-l", "-f", str(workshop / "other.pub")).stdout.split()[1]
    with pytest.raises(SiteError) as caught:
        verify_bundle(bundle, keys)
    assert caught.value.message == f"SHA256SUMS.sig was made by another key, {printed}"


def test_a_signature_for_another_purpose_is_refused(bundle: Path, workshop: Path, keys: list[bytes]) -> None:
    _resign(bundle, workshop / "key", "git")
    with pytest.raises(SiteError, match="was made for another purpose"):
        verify_bundle(bundle, keys)


def test_a_signed_image_that_contradicts_itself_is_refused(
    bundle: Path, workshop: Path, keys: list[bytes]
) -> None:
    """Signed or not: a blob under another blob's name is no image."""
    first, second = sorted((bundle / "image/blobs/sha256").iterdir())[:2]
    first.write_bytes(second.read_bytes())
    lines = (bundle / "SHA256SUMS").read_text().replace(f"{first.name}  ", f"{second.name}  ")
    (bundle / "SHA256SUMS").write_text(lines)
    _resign(bundle, workshop / "key")
    with pytest.raises(SiteError, match=f"image/blobs/sha256/{first.name} does not hold what its name says"):
        verify_bundle(bundle, keys)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b", "./a", "a\\b", "a\tb", ""])
def test_a_list_that_names_files_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(SiteError, match="SHA256SUMS is damaged"):
        site.parse_sums(f"{'0' * 64}  {name}\n")


# --- the signature ------------------------------------------------------------------------------

RFC_8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
"""Public key, message and signature of tests 1 to 3 in section 7.1 of RFC 8032."""


@pytest.mark.parametrize(("key", "message", "signature"), RFC_8032, ids=["1", "2", "3"])
def test_the_vectors_of_the_standard(key: str, message: str, signature: str) -> None:
    public, text, signed = bytes.fromhex(key), bytes.fromhex(message), bytes.fromhex(signature)
    assert ed25519_verifies(public, signed, text)
    assert not ed25519_verifies(public, signed, text + b"!")
    for position in (0, 31, 32, 63):
        altered = bytearray(signed)
        altered[position] ^= 1
        assert not ed25519_verifies(public, bytes(altered), text)
    assert not ed25519_verifies(bytes.fromhex(RFC_8032[0][0])[::-1], signed, text)
    # The same scalar plus the group's order satisfies the equation, and the standard forbids it.
    order = 2**252 + 27742317777372353535851937790883648493
    doubled = signed[:32] + (int.from_bytes(signed[32:], "little") + order).to_bytes(32, "little")
    assert not ed25519_verifies(public, doubled, text)
    assert not ed25519_verifies(public, signed[:63], text)


def test_a_file_without_a_key_is_refused(workshop: Path, tmp_path: Path) -> None:
    for text in ("", "ssh-rsa AAAA x\n", "ssh-ed25519 AAAA x\n"):
        (tmp_path / "k.pub").write_text(text)
        with pytest.raises(SiteError, match="holds no Ed25519 public key"):
            read_keys(tmp_path / "k.pub")
    with pytest.raises(SiteError, match="No such file"):
        read_keys(tmp_path / "absent")


# --- the tool on its own --------------------------------------------------------------------------


def tool(bundle: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """verify-bundle as a closed site runs it: nothing but Python's standard library."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(bundle / "verify-bundle"), *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_tool_needs_nothing_but_the_standard_library(made: Path) -> None:
    # Python 3.9 is what enterprise distributions of 2022 still ship.
    tree = ast.parse((made / "verify-bundle").read_text(), feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= sys.stdlib_module_names


def test_the_tool_verifies_and_says_what_is_wrong(bundle: Path, workshop: Path) -> None:
    key = str(workshop / "key.pub")
    good = tool(bundle, "verify", str(bundle), "--key", key)
    assert (good.returncode, good.stderr) == (0, "")
    assert "files as signed by SHA256:" in good.stdout
    flip(bundle / "recipes/fp16.yaml")
    bad = tool(bundle, "verify", str(bundle), "--key", key)
    assert bad.returncode == 7
    assert bad.stderr.startswith("error: altered: recipes/fp16.yaml (")
    assert tool(bundle, "verify", str(bundle), "--key", "/absent").returncode == 2
    assert tool(bundle, "verify", str(bundle)).returncode == 2


def test_the_command_line_verifies_with_the_builders_exit_codes(bundle: Path, workshop: Path) -> None:
    run = CliRunner()
    arguments = ["bundle", "verify", str(bundle), "--key", str(workshop / "key.pub")]
    assert run.invoke(app, arguments).exit_code == 0
    (bundle / "verify-bundle").unlink()
    with pytest.raises(BuilderError, match="missing: verify-bundle") as caught:
        run.invoke(app, arguments, catch_exceptions=False)
    assert caught.value.exit_code == 7


# --- parts ----------------------------------------------------------------------------------------


def same_files(a: Path, b: Path) -> bool:
    def read(folder: Path) -> dict[str, bytes]:
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    return read(a) == read(b)


def test_parts_of_any_size_make_the_bundle_again(made: Path, tmp_path: Path, keys: list[bytes]) -> None:
    total = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    for size in (total + 1, total, total - 1, 700_001):
        media, out = tmp_path / f"m{size}", tmp_path / f"b{size}"
        parts = split_bundle(made, media, size)
        assert len(parts) == -(-total // size)
        assert [part.stat().st_size for part in parts[:-1]] == [size] * (len(parts) - 1)
        assert join_parts([media], out) == out
        assert same_files(made, out)
        verify_bundle(out, keys)


def test_media_may_come_one_by_one_and_in_any_order(made: Path, tmp_path: Path) -> None:
    parts = split_bundle(made, tmp_path / "all", 1_500_000)
    assert len(parts) >= 3
    out = tmp_path / "sa3"
    for position, part in enumerate(reversed(parts)):
        medium = tmp_path / f"medium{position}"
        medium.mkdir()
        shutil.copy(part, medium)
        shutil.copy(tmp_path / "all/sa3.parts.json", medium)
        if position < len(parts) - 1:
            with pytest.raises(SiteError) as caught:
                join_parts([medium], out)
            assert caught.value.exit_code == 8
            assert caught.value.message.startswith(
                f"{position + 1} of {len(parts)} parts are here, missing: sa3.part001"
            )
            assert not out.exists()
        else:
            join_parts([medium], out)
    assert same_files(made, out)
    assert not list(tmp_path.glob(".sa3*"))


def test_a_damaged_part_is_caught_by_name_and_can_be_copied_again(made: Path, tmp_path: Path) -> None:
    media = tmp_path / "media"
    parts = split_bundle(made, media, 1_500_000)
    good = parts[1].read_bytes()
    flip(parts[1])
    with pytest.raises(SiteError) as caught:
        join_parts([media], tmp_path / "sa3")
    assert (caught.value.message, caught.value.exit_code) == (f"altered: {parts[1]}", 7)
    parts[1].write_bytes(good[:-1])
    with pytest.raises(SiteError, match=r"altered: .*part002"):
        join_parts([media], tmp_path / "sa3")
    parts[1].write_bytes(good)
    parts[0].unlink()  # it arrived before
    join_parts([media], tmp_path / "sa3")
    assert same_files(made, tmp_path / "sa3")


def test_splitting_again_writes_only_what_is_not_right(made: Path, tmp_path: Path) -> None:
    media = tmp_path / "media"
    parts = split_bundle(made, media, 1_500_000)
    kept = parts[0].stat().st_mtime_ns
    flip(parts[1])
    parts[2].unlink()
    (media / "sa3.parts.json").unlink()
    assert split_bundle(made, media, 1_500_000) == parts
    assert parts[0].stat().st_mtime_ns == kept
    join_parts([media], tmp_path / "sa3")
    assert same_files(made, tmp_path / "sa3")


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ([["../../evil", 1]], [["p", 1, "0"]]),
        ([["/evil", 1]], [["p", 1, "0"]]),
        ([["a", 2]], [["p", 1, "0"]]),
        ([["a", 2], ["b", -1]], [["p", 1, "0"]]),
        ([["a", 1]], [["../p", 1, "0"]]),
        ([["a"]], [["p", 1, "0"]]),
        (None, [["p", 1, "0"]]),
    ],
)
def test_a_table_that_cannot_be_is_refused(files: object, parts: object, tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    table = {"schema": "sa3-builder/parts/1", "bundle": "b", "files": files, "parts": parts}
    (tmp_path / "media/b.parts.json").write_text(json.dumps(table))
    (tmp_path / "media/p").write_bytes(b"x")
    with pytest.raises(SiteError, match=r"b\.parts\.json is damaged"):
        join_parts([tmp_path / "media"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["media"]


def test_parts_of_another_bundle_are_not_mixed_in(made: Path, tmp_path: Path) -> None:
    first = split_bundle(made, tmp_path / "first", 1_500_000)
    first[0].unlink()
    with pytest.raises(SiteError, match="missing"):
        join_parts([tmp_path / "first"], tmp_path / "sa3")
    split_bundle(made, tmp_path / "second", 1_400_000)
    with pytest.raises(SiteError, match="belongs to another bundle"):
        join_parts([tmp_path / "second"], tmp_path / "sa3")
    with pytest.raises(SiteError, match="parts of several bundles"):
        join_parts([tmp_path / "first", tmp_path / "second"], tmp_path / "sa3")


def test_sizes() -> None:
    assert parse_size("4GB") == 4_000_000_000
    assert parse_size("700 MiB") == 734_003_200
    assert parse_size("1.5kb") == 1500
    assert parse_size("12") == 12
    for text in ("", "0", "-1", "4 XB", "1e9", "GB"):
        with pytest.raises(RecipeError, match="--size must be"):
            parse_size(text)


def test_only_a_signed_bundle_is_split(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is no signed bundle"):
        split_bundle(tmp_path, tmp_path / "out", 100)


# --- loading --------------------------------------------------------------------------------------


def test_docker_gets_an_image_that_it_can_read(made: Path, workshop: Path, tmp_path: Path) -> None:
    write_docker(tmp_path / "bin")
    key = str(workshop / "key.pub")
    loaded = tool(
        made, "load", str(made), "--key", key, "--into", "docker", PATH=f"{tmp_path}/bin:{os.environ['PATH']}"
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.splitlines()[-1] == f"loaded sa3-builder:0.1.0, {image_digest(workshop)}"


def test_an_altered_bundle_is_never_loaded(bundle: Path, workshop: Path, tmp_path: Path) -> None:
    write_docker(tmp_path / "bin")
    flip(bundle / "recipes/fp16.yaml")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    refused = tool(bundle, "load", str(bundle), "--key", str(workshop / "key.pub"), PATH=path)
    assert refused.returncode == 7
    assert not (tmp_path / "bin/images.json").exists()


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("exit 1", 3, "docker load failed: exit code 1"),
        ("echo no daemon; exit 1", 3, "docker load failed: no daemon"),
        ("cat > /dev/null; echo sha256:" + "0" * 64, 7, "docker holds another image than the bundle's"),
    ],
)
def test_a_runtime_that_fails_is_told(
    made: Path, workshop: Path, tmp_path: Path, script: str, code: int, message: str
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    failed = tool(made, "load", str(made), "--key", str(workshop / "key.pub"), "--into", "docker", PATH=path)
    assert failed.returncode == code
    assert failed.stderr.startswith(f"error: {message}")


def test_without_a_runtime_there_is_nothing_to_load_into(made: Path, workshop: Path, tmp_path: Path) -> None:
    missing = tool(made, "load", str(made), "--key", str(workshop / "key.pub"), PATH=str(tmp_path))
    assert missing.returncode == 3
    assert missing.stderr.startswith("error: docker, podman or ctr is not installed")


def test_podman_loads_the_image(made: Path, workshop: Path, tmp_path: Path) -> None:
    if shutil.which("podman") is None or os.geteuid() != 0:
        pytest.skip("podman is not installed, or this user is not root")
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    configuration = {"CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"), "HOME": str(tmp_path)}
    key = str(workshop / "key.pub")
    loaded = tool(made, "load", str(made), "--key", key, "--into", "podman", **configuration)
    assert loaded.returncode == 0, loaded.stderr


@contextlib.contextmanager
def daemon(command: Sequence[str], ready: Sequence[str], log: Path) -> Iterator[None]:
    """Runs a daemon until the block ends; skips the test where it does not come up."""
    if shutil.which(command[0]) is None or os.geteuid() != 0:
        pytest.skip(f"{command[0]} is not installed, or this user is not root")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 30
        while subprocess.run(ready, capture_output=True, check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"{command[0]} does not run here: {log.read_text()[-300:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def test_containerd_loads_the_image(made: Path, workshop: Path, tmp_path: Path) -> None:
    socket = str(tmp_path / "c.sock")
    folders = ("--root", str(tmp_path / "root"), "--state", str(tmp_path / "state"))
    with daemon(
        ["containerd", *folders, "--address", socket],
        ["ctr", "--address", socket, "version"],
        tmp_path / "log",
    ):
        arguments = ("load", str(made), "--key", str(workshop / "key.pub"), "--into", "containerd")
        loaded = tool(made, *arguments, "--namespace", "k8s.io", CONTAINERD_ADDRESS=socket)
        assert loaded.returncode == 0, loaded.stderr


def test_docker_itself_loads_the_image(made: Path, workshop: Path, tmp_path: Path) -> None:
    socket = f"unix://{tmp_path}/d.sock"
    folders = [f"--data-root={tmp_path}/data", f"--exec-root={tmp_path}/exec", f"--pidfile={tmp_path}/pid"]
    isolated = ["--iptables=false", "--bridge=none", "--storage-driver=vfs"]
    with daemon(
        ["dockerd", f"--host={socket}", *folders, *isolated],
        ["docker", "--host", socket, "version"],
        tmp_path / "log",
    ):
        arguments = ("load", str(made), "--key", str(workshop / "key.pub"), "--into", "docker")
        loaded = tool(made, *arguments, DOCKER_HOST=socket)
        assert loaded.returncode == 0, loaded.stderr


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("sa3-builder:1", "docker.io/library/sa3-builder:1"),
        ("team/sa3-builder:1", "docker.io/team/sa3-builder:1"),
        ("registry.example/sa3-builder:1", "registry.example/sa3-builder:1"),
        ("host:5000/sa3-builder:1", "host:5000/sa3-builder:1"),
        ("localhost/sa3-builder:1", "localhost/sa3-builder:1"),
    ],
)
def test_names_as_kubernetes_knows_them(short: str, full: str) -> None:
    assert site.qualified(short) == full


# --- the page of the closed site ----------------------------------------------------------------


def test_the_commands_of_the_page_end_with_a_verified_engine(tmp_path: Path) -> None:
    """Docker is a stand-in that runs the builder of this checkout without a network."""
    require_namespaces()
    page = REPOSITORY / "docs/airgap.md"
    blocks = shell_blocks(page)
    carry = next(n for n, block in enumerate(blocks) if block.startswith("python3 verify-bundle join"))
    folder = checkout(tmp_path / "connected")
    write_docker(tmp_path / "connected-tools")
    run_blocks(blocks[:carry], folder, tmp_path / "connected-tools")
    closed = tmp_path / "closed"
    closed.mkdir()
    shutil.move(folder / "media", closed / "media")
    shutil.copy(folder / "site-key.pub", closed)
    shutil.copy(REPOSITORY / "engine_builder/airgap/verify_bundle.py", closed / "verify-bundle")
    write_docker(tmp_path / "closed-tools")
    printed = run_blocks(blocks[carry:], closed, tmp_path / "closed-tools")
    assert "files as signed by SHA256:" in printed[1]
    assert printed[-1] in page.read_text()
    assert "1 verified" in printed[-1]
    assert (closed / "out/sm_89/smoke/dit_fp16.trt").stat().st_size > 1_000_000
