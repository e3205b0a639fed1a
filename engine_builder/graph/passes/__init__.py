"""Graph edits: one class a file, named ``VerbNounPass``, returning whether it changed anything."""
