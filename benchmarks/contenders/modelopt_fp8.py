"""ModelOpt's own fp8, end to end, with the trunk type named by the third argument.

Calibrated on the inputs of the .npz that the fourth argument names, one set per input name.
"""

import sys

import numpy as np
from modelopt.onnx.quantization import quantize

source, destination, trunk, data = sys.argv[1:5]
inputs = dict(np.load(data))
quantize(
    source,
    quantize_mode="fp8",
    calibration_data=inputs,
    calibration_method="max",
    calibration_eps=["cpu"],
    op_types_to_quantize=["MatMul", "Gemm"],
    disable_mha_qdq=True,
    calibration_shapes=",".join(f"{k}:{'x'.join(map(str, v.shape))}" for k, v in inputs.items()),
    high_precision_dtype=trunk,
    output_path=destination,
)
