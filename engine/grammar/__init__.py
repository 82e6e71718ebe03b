"""Grammars: what an answer may look like, and how the engine holds it to that."""
