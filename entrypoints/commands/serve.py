"""`halfbyte serve`: the flags of the engine and of the HTTP front end, then `halfbyte.entrypoints.launch` does the rest."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, SERVER_FLAGS, engine_options, server_config
from halfbyte.entrypoints.flags import Flag, parse

FLAGS = (
    Flag(name="model", help="the same as --model", owner="engine", positional=True),
    LOG_LEVEL,
    *ENGINE_FLAGS,
    *SERVER_FLAGS,
)


def run(argv: Sequence[str]) -> int:
    parsed = parse("serve", "Serve a model over HTTP, OpenAI-compatible.", FLAGS, argv, REFUSED_FLAGS)
    options, server = engine_options(parsed), server_config(parsed)
    from halfbyte.entrypoints.launch import serve

    return serve(options, server)
