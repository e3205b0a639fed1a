"""The command line: which commands there are, and how an error ends the process."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from engine_builder import __version__
from engine_builder.cli.build import build, convert
from engine_builder.cli.bundle import bundle
from engine_builder.cli.calibrate import calibrate
from engine_builder.cli.doctor import doctor
from engine_builder.cli.explain import explain
from engine_builder.cli.fleet import collect, k8s
from engine_builder.cli.models import fidelity, sample, structures
from engine_builder.cli.recipes import init, plan
from engine_builder.cli.report import report
from engine_builder.cli.session import SESSION
from engine_builder.cli.stopping import stop_on_signals
from engine_builder.cli.supply_chain import image_facts, provenance, sbom, verify_provenance
from engine_builder.cli.verify import schema, verify
from engine_builder.errors import BuilderError, Interrupted, ResourceError


class DefaultToBuild(TyperGroup):
    """``sa3-builder recipe.yaml`` is short for ``sa3-builder build recipe.yaml``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((a for a in args if not a.startswith("-")), None)
        # The program's own options take values too, as --show-completion bash does.
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if first is not None and first not in self.commands and args[0].partition("=")[0] not in own:
            if first == args[0] and not Path(first).suffix and not Path(first).exists():
                known = [name for name, command in self.commands.items() if not command.hidden]
                near = difflib.get_close_matches(first, known, 1)
                closest = f" Did you mean {near[0]}?" if near else ""
                ctx.fail(f"No such command or recipe '{first}'.{closest}")
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


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sa3-builder {__version__}")
        raise typer.Exit


@app.callback()
def _shared(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The options of the program itself."""


for command in (
    build,
    calibrate,
    collect,
    convert,
    doctor,
    explain,
    fidelity,
    init,
    k8s,
    plan,
    provenance,
    report,
    sample,
    sbom,
    schema,
    structures,
    verify,
    verify_provenance,
):
    app.command()(command)
app.command(hidden=True)(image_facts)
app.add_typer(bundle, name="bundle")


def main() -> None:
    """Runs the command line; an expected error is one line and its exit code."""
    stop_on_signals(SESSION.cancel, lambda error: SESSION.screen().fail(error))
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
