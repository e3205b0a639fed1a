"""Carries the builder to a site without a network: one signed folder, in parts that fit the media."""
