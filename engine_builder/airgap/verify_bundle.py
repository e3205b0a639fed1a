#!/usr/bin/env python3
"""Joins, verifies and loads an sa3-builder bundle.  Needs Python 3.9 or later and nothing else.

A closed site runs this file by itself, before anything of the bundle is trusted: it is one file,
so that it can be read, and imports the standard library only.  Take it from a place that you
trust rather than from the bundle that it is to verify.

A bundle is a folder.  SHA256SUMS lists every file in it but itself and SHA256SUMS.sig, which is
an SSH signature (``ssh-keygen -Y sign``) of SHA256SUMS by an Ed25519 key.

Exit codes: 0 done, 2 usage, 3 no container runtime, 7 the bundle is not what was signed,
8 parts are still missing or the disk is full.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

BUNDLE_SCHEMA = "sa3-builder/bundle/1"
PARTS_SCHEMA = "sa3-builder/parts/1"
NAMESPACE = "sa3-builder-bundle"
"""What the key signs for, so that a signature made for another purpose is worth nothing here."""

CONTENTS = "bundle.json"
SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
TOOL = "verify-bundle"
IMAGE = "image"

_CHUNK = 1 << 22
_MAX_TEXT = 64 << 20


class SiteError(Exception):
    """Something that the operator has to know: what, and what to do next."""

    def __init__(self, message: str, *, exit_code: int = 7, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


# --- Ed25519, as RFC 8032 defines it: verification only, which handles no secret ------------------

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, _P - 2, _P) % _P


def _add(p: Any, q: Any) -> Any:
    a = (p[1] - p[0]) * (q[1] - q[0]) % _P
    b = (p[1] + p[0]) * (q[1] + q[0]) % _P
    c = 2 * _D * p[3] * q[3] % _P
    d = 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _multiply(scalar: int, point: Any) -> Any:
    result: Any = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point = _add(point, point)
        scalar >>= 1
    return result


def _decode_point(data: bytes) -> Any:
    """The point that 32 bytes stand for, or None."""
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, _P - 2, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    if x * x % _P != square or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


def _encode_point(point: Any) -> bytes:
    inverse = pow(point[2], _P - 2, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return int(y | (x & 1) << 255).to_bytes(32, "little")


_BASE = _decode_point(int(4 * pow(5, _P - 2, _P) % _P).to_bytes(32, "little"))


def ed25519_verifies(key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` (64 bytes) is that of ``message`` by ``key`` (32 bytes)."""
    if len(key) != 32 or len(signature) != 64:
        return False
    point = _decode_point(key)
    scalar = int.from_bytes(signature[32:], "little")
    if point is None or scalar >= _ORDER:
        return False
    digest = hashlib.sha512(signature[:32] + key + message).digest()
    challenge = int.from_bytes(digest, "little") % _ORDER
    negative = (_P - point[0], point[1], 1, _P - point[3])
    return _encode_point(_add(_multiply(scalar, _BASE), _multiply(challenge, negative))) == signature[:32]


# --- SSH keys and signatures ----------------------------------------------------------------------


def _pack(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _unpack(data: bytes, count: int) -> list[bytes]:
    """``count`` length-prefixed strings, which must be all there is."""
    parts = []
    for _ in range(count):
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 + size:
            raise ValueError("cut short")
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    if data:
        raise ValueError("too long")
    return parts


def read_keys(path: Path) -> list[bytes]:
    """The Ed25519 keys in an OpenSSH public key or allowed_signers file, 32 bytes each.

    Raises SiteError: it cannot be read or holds none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SiteError(f"{path}: {_reason(error)}", exit_code=2) from None
    keys = []
    for encoded in re.findall(r"(?:^|\s)ssh-ed25519\s+([A-Za-z0-9+/=]+)", text, re.MULTILINE):
        try:
            kind, key = _unpack(base64.b64decode(encoded, validate=True), 2)
        except (ValueError, binascii.Error):
            continue
        if kind == b"ssh-ed25519" and len(key) == 32:
            keys.append(key)
    if not keys:
        raise SiteError(
            f"{path} holds no Ed25519 public key",
            exit_code=2,
            hint="it is the file that ends in .pub; ssh-keygen -t ed25519 makes a pair",
        )
    return keys


@dataclass(frozen=True)
class SshSignature:
    """An SSH signature by an Ed25519 key, taken apart."""

    key: bytes
    namespace: bytes
    reserved: bytes
    hash_name: bytes
    signature: bytes


def parse_signature(armored: str) -> SshSignature:
    """Raises SiteError: it is damaged, or not made by an Ed25519 key."""
    match = re.fullmatch(
        r"\s*-----BEGIN SSH SIGNATURE-----\s+([A-Za-z0-9+/=\s]+)-----END SSH SIGNATURE-----\s*", armored
    )
    try:
        if match is None:
            raise ValueError("no SSH signature")
        data = base64.b64decode("".join(match[1].split()), validate=True)
        if data[:10] != b"SSHSIG\x00\x00\x00\x01":
            raise ValueError("not version 1")
        public, namespace, reserved, hash_name, blob = _unpack(data[10:], 5)
        if not public.startswith(_pack(b"ssh-ed25519")):
            raise SiteError(f"{SIGNATURE} was not made by an Ed25519 key")
        _, key = _unpack(public, 2)
        _, signature = _unpack(blob, 2)
    except (ValueError, binascii.Error) as error:
        raise SiteError(f"{SIGNATURE} is damaged: {error}") from None
    return SshSignature(key, namespace, reserved, hash_name, signature)


def signer(message: bytes, armored: str, keys: Sequence[bytes]) -> bytes:
    """The key of ``keys`` that signed ``message``.

    Raises SiteError: none of them did, or the signature is damaged.
    """
    made = parse_signature(armored)
    if made.namespace != NAMESPACE.encode():
        raise SiteError(f"{SIGNATURE} was made for another purpose")
    if made.key not in keys:
        raise SiteError(f"{SIGNATURE} was made by another key, {fingerprint(made.key)}")
    if made.hash_name not in (b"sha256", b"sha512"):
        raise SiteError(f"{SIGNATURE} uses an unknown hash")
    digest = hashlib.new(made.hash_name.decode(), message).digest()
    signed = b"SSHSIG" + _pack(made.namespace, made.reserved, made.hash_name, digest)
    if not ed25519_verifies(made.key, made.signature, signed):
        raise SiteError(f"{SUMS} or {SIGNATURE} is altered: the signature is not that of {SUMS}")
    return made.key


def fingerprint(key: bytes) -> str:
    """As ``ssh-keygen -l`` prints it."""
    digest = hashlib.sha256(_pack(b"ssh-ed25519", key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


# --- the bundle -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bundle:
    """A verified bundle: the image's name and digests, the signing key, and the number of files."""

    folder: Path
    name: str
    digest: str
    config: str
    key: bytes
    files: int


def verify_bundle(folder: Path, keys: Sequence[bytes]) -> Bundle:
    """Checks that ``folder`` is exactly what one of ``keys`` signed.

    Raises SiteError that names every file that is missing, added or altered.
    """
    if not folder.is_dir():
        raise SiteError(f"{folder} is no folder", exit_code=2)
    if not (folder / SUMS).is_file():
        raise SiteError(f"missing: {SUMS}: {folder} is no bundle")
    if not (folder / SIGNATURE).is_file():
        raise SiteError(f"unsigned: {SIGNATURE} is missing")
    message = _small(folder / SUMS)
    key = signer(message, _small(folder / SIGNATURE).decode("utf-8", "replace"), keys)
    sums = parse_sums(message.decode("utf-8", "replace"))
    present = set(_files(folder)) - {SUMS, SIGNATURE}
    faults = [f"missing: {name}" for name in sorted(sums.keys() - present)]
    faults += [f"added: {name}" for name in sorted(present - sums.keys())]
    for name in sorted(sums.keys() & present):
        path = folder / name
        if not stat.S_ISREG(path.lstat().st_mode):
            faults.append(f"altered: {name} is no regular file")
        elif _sha256(path) != sums[name]:
            faults.append(f"altered: {name}")
    if faults:
        raise SiteError("; ".join(faults), hint="fetch the bundle again, or ask who made it")
    return _described(folder, sums, key)


def parse_sums(text: str) -> dict[str, str]:
    """Digest by file name from ``sha256sum``'s format.

    Raises SiteError: a line is none, or names a file outside the folder.
    """
    sums: dict[str, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match is None or not is_safe(match[2]) or match[2] in sums:
            raise SiteError(f"{SUMS} is damaged at {line[:80]!r}")
        sums[match[2]] = match[1]
    return sums


def is_safe(name: str) -> bool:
    """Whether ``name`` is the plain relative path of a file below a folder."""
    path = PurePosixPath(name)
    plain = str(path) == name and not path.is_absolute() and ".." not in path.parts and name != "."
    return plain and all(character.isprintable() and character != "\\" for character in name)


def _described(folder: Path, sums: Mapping[str, str], key: bytes) -> Bundle:
    """What the bundle says of its image, held against the image itself."""
    contents = json.loads(_small(folder / CONTENTS))
    if contents.get("schema") != BUNDLE_SCHEMA:
        raise SiteError(f"{CONTENTS} is of another version: {contents.get('schema')}")
    for name, digest in sums.items():
        if name.startswith(f"{IMAGE}/blobs/") and name != f"{IMAGE}/blobs/sha256/{digest}":
            raise SiteError(f"{name} does not hold what its name says")
    image = contents["image"]
    manifest = read_blob(folder / IMAGE, image["digest"])
    for descriptor in [manifest["config"], *manifest["layers"]]:
        if not _blob(folder / IMAGE, descriptor["digest"]).is_file():
            raise SiteError(f"missing: blob {descriptor['digest']} of the image")
    return Bundle(folder, image["name"], image["digest"], manifest["config"]["digest"], key, len(sums))


def _blob(layout: Path, digest: str) -> Path:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise SiteError(f"{digest[:80]!r} is no SHA-256 digest")
    return layout / "blobs" / "sha256" / digest[7:]


def read_blob(layout: Path, digest: str) -> Any:
    """The JSON blob of this digest in an OCI layout."""
    path = _blob(layout, digest)
    if not path.is_file():
        raise SiteError(f"missing: blob {digest} of the image")
    return json.loads(_small(path))


def _files(folder: Path) -> Iterator[str]:
    """Everything below ``folder`` that is no folder, links to folders included."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in [*names, *links]:
            yield (Path(parent) / name).relative_to(folder).as_posix()


def _small(path: Path) -> bytes:
    if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > _MAX_TEXT:
        raise SiteError(f"altered: {path.name} is no text file")
    return path.read_bytes()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(_CHUNK), b""):
            digest.update(block)
    return digest.hexdigest()


# --- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """The table of a split bundle: its files by size, in order, and its parts by size and digest.

    The parts are the files' contents one after another, cut every so many bytes.
    """

    name: str
    files: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, int, str], ...]

    def pieces(self, index: int) -> Iterator[tuple[str, int, int]]:
        """The pieces of part ``index``: file, offset in the file, length."""
        start = sum(size for _, size, _ in self.parts[:index])
        end = start + self.parts[index][1]
        position = 0
        for name, size in self.files:
            low, high = max(start, position), min(end, position + size)
            if low < high:
                yield name, low - position, high - low
            position += size

    def to_json(self) -> str:
        table = {"schema": PARTS_SCHEMA, "bundle": self.name, "files": self.files, "parts": self.parts}
        return json.dumps(table, indent=1) + "\n"


def parse_parts(text: str, where: Path) -> Parts:
    """Raises SiteError: the table is damaged or names files outside the bundle's folder."""
    try:
        table = json.loads(text)
        if table["schema"] != PARTS_SCHEMA:
            raise ValueError("another version")
        files = tuple((str(name), int(size)) for name, size in table["files"])
        parts = tuple((str(name), int(size), str(digest)) for name, size, digest in table["parts"])
        names = [str(table["bundle"]), *(name for name, *_ in files), *(name for name, *_ in parts)]
        sizes = [size for _, size in files], [size for _, size, _ in parts]
        if not all(map(is_safe, names)) or min(*sizes[0], *sizes[1], 0) < 0 or sum(sizes[0]) != sum(sizes[1]):
            raise ValueError("its names or sizes cannot be")
    except (ValueError, KeyError, TypeError) as error:
        raise SiteError(f"{where} is damaged: {error}") from None
    return Parts(str(table["bundle"]), files, parts)


def join_parts(media: Sequence[Path], out: Path) -> Path:
    """Puts the parts that lie in the folders ``media`` into the bundle ``out``; returns it.

    Parts may come in any order and on one medium after another: what arrived stays in a folder
    beside ``out`` until the last part is there.  Each part is checked as it is read.

    Raises SiteError: a part is altered (7), or parts are still missing (8).
    """
    if out.exists():
        raise SiteError(f"{out} exists already", exit_code=2, hint="remove it, or choose another folder")
    partial = out.with_name(f".{out.name}.partial")
    ledger = partial.with_name(f".{out.name}.parts.json")
    table = _find_table(media, ledger)
    done = _done(ledger, table) if partial.is_dir() else set()
    partial.mkdir(parents=True, exist_ok=True)
    for index, (name, size, digest) in enumerate(table.parts):
        found = next((folder / name for folder in media if (folder / name).is_file()), None)
        if name in done or found is None:
            continue
        if found.stat().st_size != size or _take(found, table.pieces(index), partial) != digest:
            raise SiteError(f"altered: {found}", hint="copy this part again")
        done.add(name)
        _write(ledger, json.dumps({"table": table.to_json(), "done": sorted(done)}))
    missing = [name for name, *_ in table.parts if name not in done]
    if missing:
        raise SiteError(
            f"{len(done)} of {len(table.parts)} parts are here, missing: {', '.join(missing)}",
            exit_code=8,
            hint="insert the next medium and run the same command again",
        )
    for name, size in table.files:
        if size == 0:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).touch()
    partial.rename(out)
    ledger.unlink()
    return out


def _find_table(media: Sequence[Path], ledger: Path) -> Parts:
    found = sorted({path for folder in media for path in folder.glob("*.parts.json")})
    tables = {path.read_text(encoding="utf-8"): path for path in found}
    if len(tables) > 1:
        raise SiteError(
            f"parts of several bundles: {', '.join(str(path) for path in tables.values())}", exit_code=2
        )
    for text, path in tables.items():
        return parse_parts(text, path)
    if ledger.is_file():
        return parse_parts(json.loads(ledger.read_text(encoding="utf-8"))["table"], ledger)
    raise SiteError(f"no *.parts.json in {', '.join(map(str, media))}", exit_code=2)


def _done(ledger: Path, table: Parts) -> set[str]:
    if not ledger.is_file():
        return set()
    kept = json.loads(ledger.read_text(encoding="utf-8"))
    if kept["table"] != table.to_json():
        raise SiteError(
            f"{ledger} belongs to another bundle", exit_code=2, hint="join into another folder, or remove it"
        )
    return set(kept["done"])


def _take(part: Path, pieces: Iterable[tuple[str, int, int]], folder: Path) -> str:
    """Writes a part's pieces into their files; returns the part's digest."""
    digest = hashlib.sha256()
    with part.open("rb") as source:
        for name, offset, length in pieces:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            with os.fdopen(handle, "wb") as target:
                target.seek(offset)
                while length:
                    block = source.read(min(length, _CHUNK))
                    if not block:
                        return "cut short"
                    digest.update(block)
                    target.write(block)
                    length -= len(block)
                target.flush()
                os.fsync(target.fileno())
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# --- container runtimes ---------------------------------------------------------------------------

RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "docker": ("docker", "load"),
    "podman": ("podman", "load"),
    "containerd": ("ctr", "--namespace", "{namespace}", "images", "import", "-"),
}


def load_image(bundle: Bundle, into: str, namespace: str = "default") -> str:
    """Loads the image of a verified bundle into a container runtime; returns its name there.

    ``into`` is docker, podman, containerd, or auto for the first that is installed.

    Raises SiteError: there is none (3), it refuses the image, or it then holds another one (7).
    """
    if into == "auto":
        into = next((name for name, command in RUNTIMES.items() if shutil.which(command[0])), "")
    if into not in RUNTIMES or shutil.which(RUNTIMES[into][0]) is None:
        wanted = RUNTIMES[into][0] if into in RUNTIMES else "docker, podman or ctr"
        raise SiteError(f"{wanted} is not installed", exit_code=3, hint="name another with --into")
    command = [part.format(namespace=namespace) for part in RUNTIMES[into]]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdin is not None
    # A runtime that gives up closes the pipe; its own words are the better message.
    with contextlib.suppress(BrokenPipeError), process.stdin:
        write_image_archive(bundle, process.stdin)
    process.stdin = None
    output = process.communicate()[0].decode("utf-8", "replace").strip()
    if process.returncode != 0:
        last = output.splitlines()[-1] if output else f"exit code {process.returncode}"
        raise SiteError(f"{' '.join(command)} failed: {last}", exit_code=3)
    held = _held(bundle, into, namespace)
    if not {bundle.digest, bundle.config} & set(re.findall(r"sha256:[0-9a-f]{64}", held)):
        raise SiteError(f"{into} holds another image than the bundle's as {bundle.name}: {held}")
    return bundle.name


def _held(bundle: Bundle, into: str, namespace: str) -> str:
    """What the runtime says of the image: its id is the digest of its manifest or of its config."""
    query = [into, "image", "inspect", "--format", "sha256:{{.Id}}", bundle.name]
    if into == "containerd":
        query = ["ctr", "--namespace", namespace, "images", "list", f"name=={qualified(bundle.name)}"]
    result = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    # Docker writes the algorithm into the id, podman does not.
    return result.stdout.decode("utf-8", "replace").replace("sha256:sha256:", "sha256:").strip()


def qualified(name: str) -> str:
    """The full name that containerd and Kubernetes know a short image name by."""
    first = name.split("/")[0]
    if "/" not in name:
        return f"docker.io/library/{name}"
    return name if "." in first or ":" in first or first == "localhost" else f"docker.io/{name}"


def write_image_archive(bundle: Bundle, target: IO[bytes]) -> None:
    """Writes the image as an archive that every runtime takes: an OCI layout that is also what
    ``docker load`` has always read."""
    layout = bundle.folder / IMAGE
    manifest_path = _blob(layout, bundle.digest)
    manifest = read_blob(layout, bundle.digest)
    descriptor = {
        "mediaType": manifest.get("mediaType", "application/vnd.oci.image.manifest.v1+json"),
        "digest": bundle.digest,
        "size": manifest_path.stat().st_size,
        "annotations": {
            "io.containerd.image.name": qualified(bundle.name),
            "org.opencontainers.image.ref.name": bundle.name,
        },
    }
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [descriptor],
    }
    blobs = [digest["digest"] for digest in (manifest["config"], *manifest["layers"])]
    names = [f"blobs/sha256/{digest[7:]}" for digest in blobs]
    docker = [{"Config": names[0], "RepoTags": [bundle.name], "Layers": names[1:]}]
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, value in (
            ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
            ("index.json", index),
            ("manifest.json", docker),
        ):
            data = json.dumps(value).encode()
            archive.addfile(_member(name, len(data)), io.BytesIO(data))
        for digest in dict.fromkeys([bundle.digest, *blobs]):
            path = _blob(layout, digest)
            with path.open("rb") as file:
                archive.addfile(_member(f"blobs/sha256/{digest[7:]}", path.stat().st_size), file)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member


# --- the command line -----------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=TOOL, description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="check that a bundle is exactly what was signed")
    load = commands.add_parser("load", help="verify a bundle and load its image into a container runtime")
    for command in (verify, load):
        command.add_argument("bundle", type=Path)
        command.add_argument("--key", type=Path, required=True, help="public key of who made the bundle")
    load.add_argument("--into", choices=("auto", *RUNTIMES), default="auto")
    load.add_argument("--namespace", default="default", help="of containerd; Kubernetes uses k8s.io")
    join = commands.add_parser("join", help="put a bundle together from its parts, medium by medium")
    join.add_argument("media", type=Path, nargs="+", help="folders that hold parts")
    join.add_argument("--out", type=Path, required=True, help="the bundle's folder, made when all are there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    try:
        if asked.command == "join":
            told = f"{join_parts(asked.media, asked.out)}: joined; verify it before use"
        else:
            bundle = verify_bundle(asked.bundle, read_keys(asked.key))
            told = f"{bundle.folder}: {bundle.files} files as signed by {fingerprint(bundle.key)}"
            if asked.command == "load":
                name = load_image(bundle, asked.into, asked.namespace)
                told += f"\nloaded {name}, {bundle.digest}"
    except SiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or ''}: {_reason(error)}\n")
        return 8
    sys.stdout.write(f"{told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
