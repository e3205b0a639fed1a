"""The commands about what an image and an engine are made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, Debug, LogFormat, Quiet


def sbom(
    lock: Annotated[
        Optional[list[Path]],  # noqa: UP045  (typer reads the annotation at run time)
        typer.Option("--lock", help="A lock file to compare with; may be given again."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="File to write.", show_default="standard output"),
    ] = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Write the bill of materials (CycloneDX) of this Python environment."""
    from engine_builder.durable import disk_error, write_durably

    SESSION.screen()
    text = _bill(lock or [], None)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_durably(out, text.encode())
    except OSError as error:
        raise disk_error(error, out, len(text)) from error


def _bill(locks: list[Path], base: dict[str, str] | None) -> str:
    from importlib import metadata

    from engine_builder.errors import RecipeError
    from engine_builder.supply_chain.sbom import bill_of_materials, read_lock, to_text

    pins = {}
    for path in locks:
        try:
            pins.update(read_lock(path.read_text()))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"the lock file cannot be read: {error}", where=str(path)) from error
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return to_text(
        bill_of_materials(
            metadata.distributions(), pins, base=base, timestamp=int(epoch) if epoch.isdigit() else None
        )
    )


def provenance(
    engine: Annotated[Path, typer.Argument(help="A published engine, with its manifest beside it.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="File to write.", show_default="<engine>.provenance.json beside it"),
    ] = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Write an engine's provenance: an in-toto statement of recipe, source, image and engine digests."""
    from engine_builder.durable import disk_error, write_durably
    from engine_builder.supply_chain.provenance import check, read_manifest, statement_for

    SESSION.screen()
    manifest, data, path = read_manifest(engine)
    text = statement_for(manifest, data, path.name).to_json()
    check(text.encode(), engine)
    out = out or engine.with_name(f"{engine.name.removesuffix('.trt')}.provenance.json")
    try:
        write_durably(out, text.encode())
    except OSError as error:
        raise disk_error(error, out, len(text)) from error
    if not quiet:
        typer.echo(str(out))


def verify_provenance(
    statement: Annotated[Path, typer.Argument(help="A provenance statement.")],
    engine: Annotated[Path, typer.Option("--engine", help="The engine that it is about.")],
    material: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--material", help="A recipe, source model or scales file to check too."),
    ] = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Check a provenance statement against the files; exit code 7 when they do not fit."""
    from engine_builder.errors import BuilderError, SourceModelError
    from engine_builder.supply_chain.provenance import check

    SESSION.screen()
    try:
        checked = check(statement.read_bytes(), engine, material or ())
    except OSError as error:
        raise SourceModelError(f"cannot be read: {error.strerror}", where=str(statement)) from error
    except BuilderError as error:
        error.where = error.where or str(statement)
        raise
    if not quiet:
        for resource in checked.predicate.build_definition.resolved_dependencies:
            digest = "unresolved" if resource.digest is None else resource.digest["sha256"]
            role = (resource.annotations or {}).get("role", "material")
            typer.echo(f"{role:<18} {digest}  {resource.name}")
        typer.echo(f"{engine}: the statement fits")


def image_facts(
    base: Annotated[str, typer.Option(help="The base image's reference.")],
    base_digest: Annotated[str, typer.Option(help="Its digest, or 'unresolved'.")],
    backend: Annotated[str, typer.Option(help="tensorrt or tensorrt_rtx.")],
    revision: Annotated[str, typer.Option(help="The revision of the builder's source.")],
    out: Annotated[Path, typer.Option(help="The folder to write to.")],
    expect_tensorrt: Annotated[str, typer.Option(help="The TensorRT version that must be found.")] = "",
    lock: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--lock", help="A lock file that the environment was installed from."),
    ] = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Record what an image is made of, while it is built."""
    import hashlib

    from engine_builder.compile.backend import load_backend
    from engine_builder.errors import RecipeError
    from engine_builder.supply_chain import image as facts

    SESSION.screen()
    if backend not in ("tensorrt", "tensorrt_rtx"):
        raise RecipeError(f"--backend must be tensorrt or tensorrt_rtx, not {backend!r}")
    bill = _bill(lock or [], {"name": base, "digest": base_digest})
    found = facts.image_facts(
        base=base,
        base_digest=base_digest,
        backend=backend,
        tensorrt=load_backend("tensorrt" if backend == "tensorrt" else "tensorrt_rtx").version(),
        expected=expect_tensorrt,
        revision=revision,
        sbom_sha256=hashlib.sha256(bill.encode()).hexdigest(),
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / facts.SBOM).write_text(bill)
    (out / facts.FACTS).write_text(found.to_json())
    if base_digest == facts.UNRESOLVED:
        typer.echo(f"WARNING: the digest of the base image {base} is unresolved; every manifest will say so")
    typer.echo(found.to_json(), nl=False)
