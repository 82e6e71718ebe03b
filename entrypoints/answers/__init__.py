"""What a model's text means: reasoning, content and tool calls, told apart while it is being written."""
