"""Structured decisions: typed questions about a state, answered by probabilities that are read off the model, not written."""
