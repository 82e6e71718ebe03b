"""Texts to embeddings and scores: prompts for the engine, and what its vectors mean. Shared by the routes and by `LLM`."""
