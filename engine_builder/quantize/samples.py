"""The inputs that activations are measured on: recorded ones, or drawn ones for lack of them.

The built-in generator draws one set of inputs per length, time and draw, with ``verify.inputs``:
standard normal latents ``x`` and text embeddings ``t5_hidden``, 40 of 256 text tokens on, the length's
own duration in seconds, conditioning ``local_add_cond`` of standard deviation 0.1.  Such inputs have no
melody and no words, so a scales file made of them says ``synthetic``.  Its seeds lie apart from those of
the fidelity sweep, which must not measure a model on the very inputs that it was calibrated with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine_builder.source_graph import TensorSpec
from verify.inputs import Sample, recorded_samples, seeded_samples

FIRST_SEED: Final = 1 << 33
"""Seed of the first draw: the fidelity sweep uses seeds below 2**32 + 1000."""

DEFAULT_TIMES: Final = (1.0, 0.5, 0.02)
"""Diffusion times: pure noise, half way, and nearly done."""


@dataclass(frozen=True)
class SyntheticData:
    """``draws`` samples for each of the ``lengths`` (latent frames) and diffusion times ``t``."""

    lengths: tuple[int, ...]
    t: tuple[float, ...] = DEFAULT_TIMES
    draws: int = 1
    seed: int = 0

    def samples(self, specs: Sequence[TensorSpec]) -> tuple[Sample, ...]:
        """Raises SourceModelError for an input whose type cannot be drawn."""
        drawn = seeded_samples(
            specs, lengths=self.lengths, t=self.t, seed=FIRST_SEED + self.seed, samples=self.draws
        )
        return tuple(replace(sample, name=f"draw {n % self.draws + 1}") for n, sample in enumerate(drawn))


@dataclass(frozen=True)
class RecordedData:
    """One ``.npz`` file, or a folder of them: one array per graph input under its name."""

    path: Path

    def samples(self, specs: Sequence[TensorSpec]) -> tuple[Sample, ...]:
        """Raises SourceModelError that names the file and the array at fault."""
        return recorded_samples(specs, self.path)


CalibrationData = SyntheticData | RecordedData


class DataDigest:
    """SHA-256 over the samples in order: per input its name, type, shape and bytes, inputs by name."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def update(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        for name in sorted(inputs):
            array = np.ascontiguousarray(inputs[name])
            self._sha256.update(f"{name}\0{array.dtype.name}\0{list(array.shape)}\0".encode())
            self._sha256.update(array.tobytes())

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()
