#!/usr/bin/env python3
"""``python entrypoint.py recipe.yaml``: the command line of sa3-builder."""

from engine_builder.cli.app import main

if __name__ == "__main__":
    main()
