"""ModelOpt AutoCast to the type named by the third argument, with its defaults."""

import sys
from pathlib import Path

import onnx
from modelopt.onnx.autocast import convert_to_mixed_precision

source, destination, dtype = sys.argv[1:4]
model = convert_to_mixed_precision(source, low_precision_type=dtype, keep_io_types=True)
large = model.ByteSize() > 1 << 30 if all(t.HasField("raw_data") for t in model.graph.initializer) else True
onnx.save(
    model,
    destination,
    save_as_external_data=large,
    all_tensors_to_one_file=True,
    location=f"{Path(destination).name}.data",
)
