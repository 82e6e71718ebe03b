"""`halfbyte fetch NAME`: a model of the catalogue into the user's cache; prints its path. Without a name: the catalogue."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from halfbyte.entrypoints.flag_table import LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, parse

FLAGS = (Flag(name="name", help="a name of the catalogue; none lists it", positional=True), LOG_LEVEL)


def run(argv: Sequence[str]) -> int:
    parsed = parse("fetch", "Download a model of the catalogue (once) and print its path.", FLAGS, argv)
    from halfbyte.model_runner.catalogue import CATALOGUE, fetch

    name = parsed.command.get("name")
    if name is not None:
        print(fetch(name, report=lambda line: print(line, file=sys.stderr)))
        return 0
    for model in CATALOGUE.values():
        print(f"{model.name:<16} {model.title} ({model.num_bytes / 1e6:.0f} MB; {model.note})")
    return 0
