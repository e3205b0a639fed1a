"""Optimization profiles of a recipe, handed to the builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_builder.errors import RecipeError
from engine_builder.recipe import Profile

if TYPE_CHECKING:
    import tensorrt as trt


def add_profiles(builder: trt.Builder, config: trt.IBuilderConfig, profiles: Sequence[Profile]) -> None:
    """Add each profile to the builder's configuration, in order.

    Raises RecipeError for one that TensorRT does not accept.
    """
    for index, profile in enumerate(profiles):
        native = builder.create_optimization_profile()
        for name, shapes in profile.shapes.items():
            native.set_shape(name, shapes.min, shapes.opt, shapes.max)
        if config.add_optimization_profile(native) < 0:
            raise RecipeError("TensorRT does not accept this profile", where=f"profiles[{index}]")
