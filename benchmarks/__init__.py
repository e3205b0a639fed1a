"""Programs that measure the builder and try to fool it; see each program's own description."""
