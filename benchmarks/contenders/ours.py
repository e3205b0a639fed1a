"""Our conversion with the options in the JSON of the third argument; fp8 takes its scales file too."""

import json
import sys
from pathlib import Path

import onnx_ir as ir

from engine_builder.precision.convert import convert
from engine_builder.precision.options import ConversionOptions, Fp8Options
from engine_builder.quantize.scales import load_scales

source, destination, text = sys.argv[1:4]
options = json.loads(text)
lengths = [{"x": (1, 256, length), "local_add_cond": (1, 257, length)} for length in (1, 1292, 4096)]
scales = options.pop("scales", None)
fp8 = Fp8Options(**options.pop("fp8")) if "fp8" in options else None
ranges = None
if scales is not None and fp8 is not None:
    ranges = load_scales(Path(scales)).ranges(fp8.weights)
convert(ir.load(source), Path(destination), ConversionOptions(fp8=fp8, **options), lengths, ranges)
