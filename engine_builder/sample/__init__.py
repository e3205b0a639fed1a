"""Random-weight Stable Audio 3 diffusion transformers in ONNX, in three exporter spellings.

They stand in for real exports in smoke tests, demonstrations and benchmarks: same operators, names,
inputs and output, and weights scaled so that the same things go wrong in low precision.
"""

from engine_builder.sample.spec import SAMPLE_VERSION, Dimensions, SampleSpec, Size, Spelling
from engine_builder.sample.write import write_sample

__all__ = ["SAMPLE_VERSION", "Dimensions", "SampleSpec", "Size", "Spelling", "write_sample"]
