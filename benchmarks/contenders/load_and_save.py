"""The floor: what onnx-ir needs to load a model and save it again, unchanged."""

import sys
from pathlib import Path

import onnx_ir as ir

source, destination = map(Path, sys.argv[1:3])
ir.save(ir.load(source), destination, external_data=f"{destination.name}.data")
