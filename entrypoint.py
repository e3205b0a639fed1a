#!/usr/bin/env python3
"""``python entrypoint.py recipe.yaml``: the command line of sa3-builder."""

import sys

try:
    from engine_builder.cli.app import main
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] in ("engine_builder", "verify"):
        raise
    hint = "make venv, then .venv/bin/python entrypoint.py"
    print(f"error: {sys.executable}: has no module {error.name} ({hint})", file=sys.stderr)
    sys.exit(3)

if __name__ == "__main__":
    main()
