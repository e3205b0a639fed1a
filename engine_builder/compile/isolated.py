"""Runs a build, or an engine, in a process of its own.

TensorRT spends nearly all of a build in one step that no progress monitor can stop (53 of 56
seconds for the small model, measured), and it takes its process along when it crashes or when
memory runs out.  In a process of its own a build can be stopped at once, and its death is an
error with an exit code instead of the builder's own death.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Final

from engine_builder.child_process import die_with_parent
from engine_builder.compile.backend import CompiledEngine, CompileRequest, Plan, load_backend
from engine_builder.compile.log import MESSAGES, is_out_of_memory, out_of_memory
from engine_builder.errors import BuilderError, CompileError, Interrupted
from engine_builder.execute.request import ExecuteRequest, Execution
from engine_builder.recipe import BackendName
from verify.layers import EngineLayers, parse_build_log, parse_inspector_json

_POLL_SECONDS: Final = 0.2
_CHILD: Final = "from engine_builder.compile.isolated import main; main()"


@dataclass(frozen=True)
class Progress:
    """Where a build or an execution stands: the phase's name, and seconds since the start."""

    phase: str
    seconds: float


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class _Job:
    backend: BackendName
    request: CompileRequest | ExecuteRequest
    level: int


@dataclass(frozen=True)
class _Message:
    level: int
    text: str


def compile_engine(
    backend: BackendName,
    request: CompileRequest,
    *,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> CompiledEngine:
    """Build the engine in a child process and read its layers.

    ``on_progress`` is called several times a second, also while TensorRT reports nothing.  When
    ``cancel`` is set the child is killed within a second.  In every failure the file
    ``request.engine`` is removed.

    Raises CompileError, PlatformError, SourceModelError, RecipeError, ResourceError, and
    Interrupted after ``cancel``.
    """
    try:
        plan = _run(backend, request, cancel, on_progress)
        assert isinstance(plan, Plan)
        layers = read_layer_table(plan.layer_table)
    except BaseException:
        request.engine.unlink(missing_ok=True)
        raise
    return CompiledEngine(
        path=request.engine,
        plan=plan,
        backend=backend,
        sm=request.sm,
        layers=layers.layers,
        io=layers.io,
        layer_source=layers.source,
    )


def execute_engine(
    backend: BackendName,
    request: ExecuteRequest,
    *,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> Execution:
    """Run the engine in a child process, which takes the GPU's memory back with it.

    ``on_progress`` and ``cancel`` work as for :func:`compile_engine`.

    Raises CompileError, PlatformError, SourceModelError, RecipeError, ResourceError, and
    Interrupted after ``cancel``.
    """
    execution = _run(backend, request, cancel, on_progress)
    assert isinstance(execution, Execution)
    return execution


def read_layer_table(text: str) -> EngineLayers:
    """Read a :attr:`Plan.layer_table`, whichever backend printed it."""
    return parse_inspector_json(text) if text.lstrip().startswith("{") else parse_build_log(text)


def _ignore(progress: Progress) -> None:
    """Progress that nobody asked for."""


def _run(
    backend: BackendName,
    request: CompileRequest | ExecuteRequest,
    cancel: threading.Event | None,
    on_progress: OnProgress | None,
) -> Plan | Execution:
    cancel = cancel or threading.Event()
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile() as output:
        with theirs:
            process = _start(theirs, output)
        try:
            ours.send(_Job(backend, request, MESSAGES.getEffectiveLevel()))
            return _wait(ours, cancel, on_progress or _ignore)
        except (EOFError, ConnectionError) as error:
            code = process.wait()
            if cancel.is_set() or -code in (signal.SIGINT, signal.SIGTERM):
                raise Interrupted("the build was stopped") from error
            raise _death(code, output, isinstance(request, CompileRequest)) from error
        finally:
            process.kill()
            process.wait()


def _start(connection: Connection, output: IO[bytes]) -> subprocess.Popen[bytes]:
    # The packages may lie beside entrypoint.py rather than in site-packages; -P keeps the working
    # folder, which is the user's, from being searched for modules.
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD, str(connection.fileno()), str(os.getpid())],
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=(connection.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def _wait(connection: Connection, cancel: threading.Event, on_progress: OnProgress) -> Plan | Execution:
    started = time.monotonic()
    phase = "Starting"
    while True:
        if cancel.is_set():
            raise Interrupted("the build was stopped")
        received: Any = connection.recv() if connection.poll(_POLL_SECONDS) else None
        if isinstance(received, Plan | Execution):
            return received
        if isinstance(received, BuilderError):
            raise received
        if isinstance(received, _Message):
            MESSAGES.log(received.level, "%s", received.text)
        elif isinstance(received, str):
            phase = received
        on_progress(Progress(phase, time.monotonic() - started))


def _death(code: int, output: IO[bytes], compiling: bool) -> BuilderError:
    """The error for a child that ended without an answer."""
    output.seek(0)
    text = output.read().decode(errors="replace").strip()
    who, doing = ("compiler", "building") if compiling else ("engine's process", "running")
    if code == -signal.SIGKILL:
        return out_of_memory(f"the {who} was killed, most likely because memory ran out")
    if is_out_of_memory(text):
        return out_of_memory(f"memory ran out while TensorRT was {doing} the engine")
    lines = text.splitlines()
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    last = f": {lines[-1][:200]}" if lines else ""
    return CompileError(f"the {who} ended unexpectedly with {how}{last}")


# --- in the child ---------------------------------------------------------------------------


class _Parent:
    """The way to the parent; TensorRT calls back from threads of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            # The parent is gone.  The caller may be C++, which an exception must not cross.
            os._exit(Interrupted.exit_code)


class _SendingHandler(logging.Handler):
    def __init__(self, parent: _Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        self._parent.send(_Message(record.levelno, record.getMessage()))


def main() -> None:
    """Receive one job over the file descriptor named on the command line and answer it.

    The command line names the parent's process id too.
    """
    die_with_parent(int(sys.argv[2]))
    # An interrupt from the keyboard reaches the whole process group; the parent decides about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        job: _Job = connection.recv()
        parent = _Parent(connection)
        MESSAGES.setLevel(job.level)
        MESSAGES.addHandler(_SendingHandler(parent))
        backend = load_backend(job.backend)
        try:
            if isinstance(job.request, CompileRequest):
                parent.send(backend.build(job.request, parent.send))
            else:
                parent.send(backend.execute(job.request, parent.send))
        except BuilderError as error:
            parent.send(error)
