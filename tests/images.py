"""A small container image, and a stand-in for docker that holds and runs it on this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.namespaces import REPOSITORY


def write_layout(folder: Path, *, name: str | None = "sa3-builder:0.1.0", text: str = "hello\n") -> str:
    """Writes an OCI layout with an image of one file; returns the digest of its manifest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {
            "mediaType": f"application/vnd.oci.image.{media}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("hello.txt")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
    diff = hashlib.sha256(archive.getvalue()).hexdigest()
    layer = put(gzip.compress(archive.getvalue(), mtime=0), "layer.v1.tar+gzip")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/hello"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "config.v1+json"),
        "layers": [layer],
    }
    descriptor = put(json.dumps(manifest).encode(), "manifest.v1+json")
    if name is not None:
        descriptor["annotations"] = {"org.opencontainers.image.ref.name": name}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(descriptor["digest"])


def archive_layout(folder: Path, target: Path) -> Path:
    """The layout as a tar archive, as image tools write it."""
    with tarfile.open(target, "w") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, f"./{path.relative_to(folder)}", recursive=False)
    return target


_DOCKER = """#!{python}
# docker save, load, image inspect and run, for one image that stands for the builder on this machine.
import hashlib, json, os, pathlib, sys, tarfile
sys.path.insert(0, {repository!r})
store = pathlib.Path({store!r})
command = sys.argv[1:]
if command == ["load"]:
    files = {{}}
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        for member in tar:
            files[member.name] = tar.extractfile(member).read()
    for name, data in files.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(data).hexdigest() == name[13:], name
    [image] = json.loads(files["manifest.json"])
    config = json.loads(files[image["Config"]])
    assert len(config["rootfs"]["diff_ids"]) == len(image["Layers"])
    assert all(layer in files for layer in image["Layers"])
    [tag] = image["RepoTags"]
    store.write_text(json.dumps({{tag: "sha256:" + image["Config"][13:]}}))
    print("Loaded image:", tag)
elif command[0] == "save":
    from tests.images import archive_layout, write_layout
    _, name, _, target = command
    layout = pathlib.Path(str(store) + ".saved")
    write_layout(layout, name=name)
    archive_layout(layout, pathlib.Path(target))
elif command[:2] == ["image", "inspect"]:
    held = json.loads(store.read_text()) if store.exists() else {{}}
    if command[-1] not in held:
        sys.exit("Error: No such image: " + command[-1])
    print(command[3].replace("{{{{.Id}}}}", held[command[-1]]))
elif command[0] == "run":
    from tests.namespaces import Mount, container_command, container_environment, entrypoint
    held, mounts, rest, user = json.loads(store.read_text()), [], command[1:], None
    environment = {{"HOME": "/tmp", "SA3_BUILDER_CACHE": "/cache"}}
    scratch = pathlib.Path(str(store) + ".run." + str(os.getpid()))
    for target in ("tmp", "cache"):
        (scratch / target).mkdir(parents=True)
        (scratch / target).chmod(0o777)
        mounts.append(Mount(scratch / target, "/" + target))
    while rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("--rm", "--read-only") or "=" in option:
            continue
        value = rest.pop(0)
        if option == "-v":
            source, target, *mode = value.split(":")
            mounts = [m for m in mounts if m.target != target]
            pathlib.Path(source).mkdir(parents=True, exist_ok=True)
            mounts.append(Mount(pathlib.Path(source).absolute(), target, read_only=mode == ["ro"]))
        elif option == "-e":
            name, _, text = value.partition("=")
            environment[name] = text
        elif option == "--user":
            user = int(value.split(":")[0])
    if rest[0] not in held:
        sys.exit("Unable to find image " + rest[0])
    arguments = container_command(entrypoint(*rest[1:]), mounts, scratch / "root", user=user)
    os.execvpe(arguments[0], arguments, container_environment(environment))
else:
    sys.exit("docker: unknown command " + " ".join(command))
"""


def write_docker(folder: Path) -> Path:
    """Writes the stand-in, an executable called docker, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    docker = folder / "docker"
    docker.write_text(
        _DOCKER.format(python=sys.executable, repository=str(REPOSITORY), store=str(folder / "images.json"))
    )
    docker.chmod(0o755)
    return docker
