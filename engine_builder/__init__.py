"""Turns a model and a YAML recipe into a TensorRT engine that is proven to be what the recipe says."""

__version__ = "0.1.0"
