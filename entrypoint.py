#!/usr/bin/env python3
"""The command line: parses, prints and sets the exit code; the work is done by the packages."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperGroup

from engine_builder.errors import BuilderError, ConversionError, Interrupted, RecipeError, ResourceError

if TYPE_CHECKING:
    from engine_builder.console import Screen


class DefaultToBuild(TyperGroup):
    """``sa3-builder recipe.yaml`` is short for ``sa3-builder build recipe.yaml``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((a for a in args if not a.startswith("-")), None)
        if first is not None and first not in self.commands:
            args = ["build", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=DefaultToBuild,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Turns an fp32 ONNX model and a recipe into a TensorRT engine that is proven to be "
    "what the recipe says.",
    epilog="Exit codes: 0 done, 2 recipe or usage, 3 environment, 4 source model, 5 conversion, 6 compile, "
    "7 verification failed, 8 out of memory or disk, 130 interrupted.",
)


@dataclass
class Session:
    """What the options that every command shares were set to."""

    debug: bool = False
    quiet: bool = False
    log_format: str = "text"
    cancel: threading.Event = field(default_factory=threading.Event)

    def screen(self) -> Screen:
        import logging

        from engine_builder.console import Screen

        screen = Screen(quiet=self.quiet, log_format="json" if self.log_format == "json" else "text")
        root = logging.getLogger()
        root.handlers[:] = [screen.logging_handler()]
        # Libraries are heard from WARNING on; the builder's own records go deeper with --debug.
        root.setLevel(logging.ERROR if self.quiet else logging.WARNING)
        for package in ("engine_builder", "verify"):
            logging.getLogger(package).setLevel(logging.INFO if self.debug else logging.NOTSET)
        return screen


SESSION = Session()


def _set_debug(value: bool) -> bool:
    SESSION.debug = SESSION.debug or value
    return value


def _set_quiet(value: bool) -> bool:
    SESSION.quiet = SESSION.quiet or value
    return value


def _set_log_format(value: str) -> str:
    if value not in ("text", "json"):
        raise typer.BadParameter("must be text or json")
    SESSION.log_format = value
    return value


Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks and debug messages.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="Show errors only.")]
LogFormat = Annotated[
    str, typer.Option("--log-format", callback=_set_log_format, help="text, or json: one object per line.")
]
CacheDir = Annotated[
    Optional[Path],  # noqa: UP045  (typer reads the annotation at run time)
    typer.Option(
        "--cache",
        envvar="SA3_BUILDER_CACHE",
        help="Where results of stages are kept [default: the user's cache folder].",
    ),
]


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/sa3-builder``, by default ``~/.cache/sa3-builder``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sa3-builder"


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    cache: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Build, verify and publish the engines of a recipe (the default command)."""
    from engine_builder.console import summary
    from engine_builder.pipeline import Settings
    from engine_builder.pipeline import build as run_recipe
    from engine_builder.recipe import load_recipe

    screen = SESSION.screen()
    settings = Settings(cache or default_cache(), screen.watch, SESSION.cancel)
    outcomes = run_recipe(load_recipe(recipe), settings)
    if as_json:
        typer.echo(json.dumps([summary(o) for o in outcomes], indent=1))
    else:
        screen.closing(outcomes)
    if any(o.verdict != "passed" for o in outcomes):
        raise typer.Exit(7)


@app.command()
def convert(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    out: Annotated[Path, typer.Option("--out", help="The converted ONNX file to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found and done as JSON.")] = False,
    cache: CacheDir = None,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Convert the recipe's model to its precision, without compiling it."""
    from engine_builder.pipeline import Settings, convert_only
    from engine_builder.recipe import load_recipe

    screen = SESSION.screen()
    facts = convert_only(
        load_recipe(recipe), out, Settings(cache or default_cache(), screen.watch, SESSION.cancel)
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    elif not quiet:
        counts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in facts["counts"].items())
        typer.echo(f"{out}: {counts}")


@app.command()
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
    from verify.fidelity import sweep

    from engine_builder.events import Event
    from engine_builder.source import open_source

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
        lengths=_numbers(lengths, int, "--lengths"),
        t=_numbers(t, float, "--t"),
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


@app.command()
def sample(
    out: Annotated[Path, typer.Option("--out", help="The ONNX file to write.")],
    size: Annotated[str, typer.Option(help="tiny, small or medium.")] = "tiny",
    spelling: Annotated[str, typer.Option(help="torchscript17, dynamo20 or dynamo23.")] = "torchscript17",
    differential: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--differential/--standard", help="Kind of attention [default: as the size's model]."),
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
        _choice(Size, size, "--size"), _choice(Spelling, spelling, "--spelling"), differential, seed
    )
    write_sample(spec, out)
    if not quiet:
        typer.echo(
            f"{out}: {size}, {spelling}, {'differential' if spec.dimensions.differential else 'standard'}"
        )


@app.command()
def structures(
    model: Annotated[Path, typer.Argument(help="An ONNX model, fp32 or converted.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every structure with its nodes.")] = False,
    debug: Debug = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
) -> None:
    """Show what a model is made of; exit code 5 when it lacks what an SA3 DiT must have."""
    from engine_builder.graph.find import find_structures, require_dit
    from engine_builder.source import load_graph, open_source

    SESSION.screen()
    found = find_structures(load_graph(open_source(model, float_input=False)))
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


def _numbers(text: str, kind: Any, option: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise RecipeError(f"{option} must be numbers separated by commas, not {text!r}") from None


def _choice(kind: Any, text: str, option: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        names = ", ".join(member.value for member in kind)
        raise RecipeError(f"{option} must be one of {names}, not {text!r}") from None


def _stop(signum: int, frame: object) -> None:
    if SESSION.cancel.is_set():
        # Asked twice: the temporary files are swept by the next run.
        os._exit(Interrupted.exit_code)
    SESSION.cancel.set()


def main() -> None:
    """Runs the command line; an expected error is one line and its exit code."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        app(standalone_mode=True, prog_name="sa3-builder")
    except BuilderError as error:
        failure = error
    except KeyboardInterrupt:
        failure = Interrupted("stopped")
    except MemoryError:
        failure = ResourceError("memory ran out", hint="free memory or raise the limit, then run it again")
    except OSError as error:
        if SESSION.debug:
            raise
        failure = ResourceError(
            f"{error.strerror or error}", where=str(error.filename) if error.filename else None
        )
    if SESSION.debug:
        import traceback

        traceback.print_exception(failure)
    SESSION.screen().fail(failure)
    sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()
