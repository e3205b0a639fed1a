"""What the processes that do heavy work for a build have in common."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

from engine_builder.errors import Interrupted

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its ``parent`` dies, even by SIGKILL.

    Without it a killed build leaves TensorRT or ModelOpt running for minutes, with gigabytes of
    memory, beside the build that is started in its place.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Interrupted.exit_code)
