"""The commands that look at ONNX models, make them, or compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from engine_builder.cli.session import SESSION, Debug, LogFormat, Quiet, choice, numbers
from engine_builder.errors import ConversionError, Interrupted


def fidelity(
    reference: Annotated[Path, typer.Argument(help="The fp32 ONNX model.")],
    candidate: Annotated[Path, typer.Argument(help="The converted ONNX model.")],
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "64,1292,4092",
    t: Annotated[str, typer.Option(help="Diffusion times, separated by commas.")] = "1.0,0.5,0.02",
    min_cosine: Annotated[float, typer.Option(help="The least cosine that passes.")] = 0.9999,
    samples: Annotated[int, typer.Option(help="Input draws per length and time.")] = 1,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A folder of recorded inputs, one .npz by input name per sample."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the drawn inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Compare a converted model with its fp32 source, rounding every tensor as the hardware does."""
    from engine_builder.events import Event
    from engine_builder.source import open_source
    from verify.fidelity import sweep

    screen = SESSION.screen()
    for path in (reference, candidate):
        open_source(path, float_input=False)

    def progress(text: str) -> None:
        if SESSION.cancel.is_set():
            raise Interrupted("stopped")
        screen.watch(Event("fidelity", "progress", text))

    report = sweep(
        reference,
        candidate,
        lengths=numbers(lengths, int, "--lengths"),
        t=numbers(t, float, "--t"),
        min_cosine=min_cosine,
        seed=seed,
        samples=samples,
        recorded=data,
        progress=progress,
    )
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        typer.echo(f"{'L':>6} {'t':>6} {'cosine':>11} {'rel L2':>10} {'max abs':>10} {'non-finite':>10}")
        for p in report.points:
            figures = f"{p.cosine:>11.7f} {p.relative_l2:>10.2e} {p.max_abs:>10.2e} {p.nonfinite:>10}"
            typer.echo(f"{p.length:>6} {p.t:>6g} {figures}")
        verdict = "passed" if report.passed else "FAILED"
        typer.echo(f"{verdict}: worst cosine {report.worst:.7f}, asked {min_cosine:g}")
    if not report.passed:
        raise typer.Exit(7)


def sample(
    out: Annotated[Path, typer.Option("--out", help="The ONNX file to write.")],
    size: Annotated[str, typer.Option(help="tiny, small or medium.")] = "tiny",
    spelling: Annotated[str, typer.Option(help="torchscript17, dynamo20 or dynamo23.")] = "torchscript17",
    differential: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--differential/--standard", help="Kind of attention.", show_default="as the size's model"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Write a random-weight SA3 DiT, to try the builder on."""
    from engine_builder.sample import SampleSpec, Size, Spelling, write_sample

    SESSION.screen()
    spec = SampleSpec(
        choice(Size, size, "--size"), choice(Spelling, spelling, "--spelling"), differential, seed
    )
    write_sample(spec, out)
    if not quiet:
        typer.echo(
            f"{out}: {size}, {spelling}, {'differential' if spec.dimensions.differential else 'standard'}"
        )


def structures(
    model: Annotated[Path, typer.Argument(help="An ONNX model, fp32 or converted.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every structure with its nodes.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Show what a model is made of; exit code 5 when it lacks what an SA3 DiT must have."""
    from engine_builder.graph.find import find_structures, require_dit
    from engine_builder.precision.convert import annotate
    from engine_builder.source import load_graph, open_source

    SESSION.screen()
    graph = load_graph(open_source(model, float_input=False))
    annotate(graph)
    found = find_structures(graph)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        for name, count in found.counts().items():
            typer.echo(f"{count:>6}  {name.replace('_', ' ')}")
        for miss in found.near_misses:
            typer.echo(f"near miss: {miss.structure} at {miss.node}: {miss.reason}")
    try:
        require_dit(found)
    except ConversionError as error:
        error.where = str(model)
        raise
