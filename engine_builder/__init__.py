"""Turns a model and a YAML recipe into a TensorRT engine that is proven to be what the recipe says."""

import os

__version__ = "0.1.0"

# Read when onnxruntime is loaded: without it, 1.32 keeps a device id in the user's cache folder and
# reports its use over the network.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
