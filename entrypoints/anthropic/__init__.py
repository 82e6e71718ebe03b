"""Anthropic's Messages API: another wire form of the conversations that `halfbyte.entrypoints.openai.conversation` answers."""
