"""Says what a machine can build, and what keeps it from building a recipe."""
