"""The image's files fit each other; `make image-test` builds and runs it for real."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine_builder import __version__
from engine_builder.errors import PlatformError
from engine_builder.fleet.jobs import USER
from engine_builder.supply_chain.image import ImageFacts, image_facts, recorded_image
from tests.conftest import REPOSITORY

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def base_images() -> Any:
    """The script that keeps the lock file of the base images, as a module."""
    path = REPOSITORY / "docker" / "base_images.py"
    spec = importlib.util.spec_from_file_location("base_images", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def default_of(argument: str) -> str:
    found = re.findall(rf"^ARG {argument}=(.*)$", DOCKERFILE, re.MULTILINE)
    assert len(set(found)) == 1, (argument, found)
    return str(found[0])


# --- the Dockerfile ---------------------------------------------------------------------------


def test_a_plain_docker_build_takes_the_locked_default_base(base_images: Any) -> None:
    default, bases = base_images.load(base_images.LOCK)
    for argument, value in bases[default].arguments().items():
        if bases[default].digest is None or argument == "TENSORRT_VERSION":
            assert default_of(argument) == value


def test_the_default_base_has_the_tensorrt_that_the_runtime_loads(base_images: Any) -> None:
    """SA3's runtime pins 10.15.1.29, and 10.16 does not load its engines."""
    default, bases = base_images.load(base_images.LOCK)
    assert bases[default].tensorrt == "10.15.1.29"
    assert {name: base.tensorrt for name, base in bases.items()} == {
        "26.02": "10.15.1.29",
        "26.08": "11.2.1.2",
    }


def test_the_version_is_the_packages(base_images: Any) -> None:
    assert default_of("VERSION") == __version__


def test_the_user_is_the_one_that_the_jobs_run_as() -> None:
    assert f"\nUSER {USER}:{USER}\n" in DOCKERFILE
    last = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert last.index("\nUSER ") > last.rindex("\nRUN ")  # nothing runs as root after that


def test_only_hashed_requirements_are_fetched() -> None:
    fetching = [
        line for line in DOCKERFILE.splitlines() if re.search(r"-m pip .*\b(install|wheel|download)\b", line)
    ]
    assert len(fetching) == 3
    for line in fetching:
        assert "--require-hashes" in line or "--no-index" in line
    stages = DOCKERFILE.split("\nFROM ")
    assert ["--require-hashes" in stage for stage in stages] == [False, True, False, False]


def test_no_secret_is_copied_into_a_layer() -> None:
    """What tells where the package index is comes by secret mounts, which leave no layer."""
    assert not re.search(r"^(COPY|ADD|ENV|ARG) .*(pip\.conf|INDEX|ca\.pem|PROXY)", DOCKERFILE, re.MULTILINE)


def test_what_is_copied_is_not_ignored() -> None:
    kept = {
        line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = set(re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE))
    assert copied == kept == {"engine_builder", "verify", "recipes", "requirements", "entrypoint.py"}
    assert all((REPOSITORY / name).exists() for name in copied)


def test_the_command_and_the_mount_points() -> None:
    app = "/opt/sa3-builder/app/entrypoint.py"
    assert f'ENTRYPOINT ["/opt/sa3-builder/env/bin/python", "{app}"]' in DOCKERFILE
    assert "mkdir -p /models /out /cache;" in DOCKERFILE
    assert "COPY recipes /recipes" in DOCKERFILE
    assert "WORKDIR /recipes" in DOCKERFILE


@pytest.mark.parametrize("script", ["image.sh", "image-test.sh"])
def test_scripts_are_sound_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(REPOSITORY / "docker" / script)], check=True)


# --- the lock of the base images --------------------------------------------------------------


class Registry(BaseHTTPRequestHandler):
    """A registry that hands out a token before it answers, as public ones do."""

    asked: list[str]
    kind = "application/vnd.oci.image.index.v1+json"
    digest: str | None = DIGEST

    def do_HEAD(self) -> None:
        type(self).asked.append(self.path)
        if self.headers.get("Authorization") != "Bearer t0ken":
            host = self.headers["Host"]
            self.send_response(401)
            self.send_header(
                "WWW-Authenticate",
                f'Bearer realm="http://{host}/token",service="r",scope="repository:nvidia/tensorrt:pull"',
            )
            self.end_headers()
            return
        self.send_response(200 if "25.00" not in self.path else 404)
        self.send_header("Content-Type", self.kind)
        if self.digest is not None:
            self.send_header("Docker-Content-Digest", self.digest)
        self.end_headers()

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        body = b'{"token": "t0ken"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps standard error clean."""


@pytest.fixture
def registry() -> Iterator[tuple[str, type[Registry]]]:
    class Handler(Registry):
        asked: list[str] = []  # noqa: RUF012  (one list per test)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", Handler
    server.shutdown()


def write_lock(path: Path, image: str, digest: str | None = None) -> Path:
    entry = {"image": image, "tensorrt": "10.15.1.29", "python": "3.12"}
    lock = {"default": "a", "bases": {"a": {**entry, "digest": digest, "digest_kind": None}}}
    path.write_text(json.dumps(lock))
    return path


def test_locking_writes_the_registrys_digest_and_its_kind(
    base_images: Any, registry: tuple[str, type[Registry]], tmp_path: Path
) -> None:
    host, handler = registry
    path = write_lock(tmp_path / "lock.json", f"{host}/nvidia/tensorrt:26.02-py3")
    assert base_images.lock(path) == {"a": f"unresolved -> {DIGEST}"}
    assert handler.asked == [
        "/v2/nvidia/tensorrt/manifests/26.02-py3",
        "/token?service=r&scope=repository%3Anvidia%2Ftensorrt%3Apull",
        "/v2/nvidia/tensorrt/manifests/26.02-py3",
    ]
    _, bases = base_images.load(path)
    assert bases["a"].digest_kind == "index"
    assert bases["a"].arguments() == {
        "BASE_IMAGE": f"{host}/nvidia/tensorrt:26.02-py3@{DIGEST}",
        "BASE_DIGEST": DIGEST,
        "TENSORRT_VERSION": "10.15.1.29",
    }
    handler.kind = "application/vnd.docker.distribution.manifest.v2+json"
    assert base_images.lock(path) == {"a": "unchanged"}
    assert base_images.load(path)[1]["a"].digest_kind == "manifest"


@pytest.mark.parametrize(
    ("tag", "kind", "digest"),
    [
        ("25.00", None, DIGEST),
        ("26.02", "text/html", DIGEST),
        ("26.02", None, None),
        ("26.02", None, "sha256:12"),
    ],
)
def test_an_answer_that_names_no_image_changes_nothing(
    base_images: Any,
    registry: tuple[str, type[Registry]],
    tmp_path: Path,
    tag: str,
    kind: str | None,
    digest: str | None,
) -> None:
    host, handler = registry
    handler.kind, handler.digest = kind or handler.kind, digest
    path = write_lock(tmp_path / "lock.json", f"{host}/nvidia/tensorrt:{tag}")
    before = path.read_text()
    with pytest.raises(base_images.LockError, match=re.escape(host)):
        base_images.lock(path)
    assert path.read_text() == before


def test_an_unresolved_digest_is_said_aloud(base_images: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, bases = base_images.load(base_images.LOCK)
    code = base_images.main(["args", "26.02"])
    out, err = capsys.readouterr()
    assert code == 0
    assert "TENSORRT_VERSION=10.15.1.29" in out.splitlines()
    assert ("is unresolved" in err) == (bases["26.02"].digest is None)
    assert base_images.main(["args", "1.0"]) == 1
    assert base_images.main(["nonsense"]) == 2


@pytest.mark.parametrize("reference", ["tensorrt:1", "nvcr.io/nvidia/tensorrt", "nvcr.io/a:b@sha256:00", ""])
def test_a_reference_without_registry_or_tag_is_refused(base_images: Any, reference: str) -> None:
    with pytest.raises(base_images.LockError):
        base_images.Reference.parse(reference)


# --- what the image knows of itself -----------------------------------------------------------


def facts(expected: str, found: str = "10.15.1.29") -> ImageFacts:
    return image_facts(
        base="nvcr.io/nvidia/tensorrt:26.02-py3",
        base_digest="unresolved",
        backend="tensorrt",
        tensorrt=found,
        expected=expected,
        revision="0123",
        sbom_sha256="ab" * 32,
    )


@pytest.mark.parametrize("expected", ["", "10", "10.15.1", "10.15.1.29"])
def test_the_expected_tensorrt(expected: str) -> None:
    assert facts(expected).tensorrt == "10.15.1.29"


@pytest.mark.parametrize("expected", ["10.16", "10.15.1.2", "10.15.1.29.1", "1"])
def test_another_tensorrt_stops_the_build(expected: str) -> None:
    with pytest.raises(
        PlatformError, match=rf"holds tensorrt 10\.15\.1\.29, and {re.escape(expected)} was to"
    ):
        facts(expected)


def test_the_manifest_tells_of_image_and_base(tmp_path: Path) -> None:
    assert recorded_image({}, tmp_path) is None
    started = {"SA3_BUILDER_IMAGE": f"sa3-builder@{DIGEST}"}
    assert recorded_image(started, tmp_path) == {"reference": f"sa3-builder@{DIGEST}", "digest": DIGEST}
    (tmp_path / "image.json").write_text(facts("10.15").to_json())
    found = recorded_image(started, tmp_path)
    assert found is not None
    assert found["base"] == "nvcr.io/nvidia/tensorrt:26.02-py3"
    assert found["base_digest"] == "unresolved"
    assert found["digest"] == DIGEST
    assert found["sbom_sha256"] == "ab" * 32


@pytest.mark.parametrize("text", ["", "[]", '{"base": 1}', "\x00"])
def test_damaged_facts_are_an_error_of_the_environment(tmp_path: Path, text: str) -> None:
    (tmp_path / "image.json").write_text(text)
    with pytest.raises(PlatformError):
        recorded_image({}, tmp_path)
