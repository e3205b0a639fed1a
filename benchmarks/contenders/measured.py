"""Runs a program and then writes its peak resident memory, in kB, to the file named first.

``ru_maxrss`` of a child starts at its parent's size; the kernel's high-water mark of the process does not.
"""

import runpy
import sys
from pathlib import Path

result, program = Path(sys.argv[1]), sys.argv[2]
sys.argv[:] = sys.argv[2:]
runpy.run_path(program, run_name="__main__")
lines = Path("/proc/self/status").read_text().splitlines()
result.write_text(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
