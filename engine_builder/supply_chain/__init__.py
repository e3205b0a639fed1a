"""What an engine and its builder were made of: the image, the bill of materials, the provenance."""
