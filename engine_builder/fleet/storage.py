"""Where the files of a mount are kept on the cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from engine_builder.errors import RecipeError

_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class Storage:
    """A PersistentVolumeClaim by name, a folder of the node, or scratch space that ends with the pod."""

    kind: Literal["claim", "host", "scratch"]
    name: str = ""

    def volume(self, name: str, *, scratch_gib: int) -> dict[str, Any]:
        """The pod's volume called ``name``."""
        if self.kind == "claim":
            return {"name": name, "persistentVolumeClaim": {"claimName": self.name}}
        if self.kind == "host":
            return {"name": name, "hostPath": {"path": self.name, "type": "Directory"}}
        return {"name": name, "emptyDir": {"sizeLimit": f"{scratch_gib}Gi"}}


def parse_storage(text: str, option: str, *, scratch: bool = False) -> Storage:
    """``pvc:NAME``, ``host:/FOLDER`` or, where ``scratch`` is allowed, ``scratch``.

    Raises:
        RecipeError: It is none of them; ``option`` is where it was given.
    """
    kind, _, name = text.partition(":")
    if kind == "pvc" and _CLAIM.fullmatch(name):
        return Storage("claim", name)
    if kind == "host" and name.startswith("/") and ".." not in name.split("/"):
        return Storage("host", name)
    if scratch and text == "scratch":
        return Storage("scratch")
    forms = "pvc:NAME, host:/FOLDER or scratch" if scratch else "pvc:NAME or host:/FOLDER"
    raise RecipeError(f"{option} must be {forms}, not {text!r}")
