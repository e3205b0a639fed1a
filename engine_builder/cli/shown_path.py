"""How paths are shown to people."""

from __future__ import annotations

import os
from pathlib import Path


def plain_path(path: Path) -> Path:
    """``path``, absolute and without ``..``, by the names it was given where these lead to it."""
    named = Path(os.path.normpath(path.absolute()))
    if ".." not in path.parts or (named.exists() and path.exists() and named.samefile(path)):
        return named
    return path.resolve()  # behind a symbolic link, .. is not the folder that its name lies in


def shown_path(path: Path) -> str:
    """``path`` from the working directory when it lies below it, else absolute."""
    plain = plain_path(path)
    try:
        return str(plain.relative_to(Path.cwd()))
    except ValueError:
        return str(plain)
