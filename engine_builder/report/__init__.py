"""The page beside an engine, for people: what it is, what was proven, where its bytes and time went."""
