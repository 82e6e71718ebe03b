"""The Responses API: items in, items out, kept for the next turn. The routes are in `handlers`; generation is the chat's own."""
