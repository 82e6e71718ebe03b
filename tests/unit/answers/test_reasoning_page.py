"""docs/reasoning.md names every reasoning parser, with its marks."""

from __future__ import annotations

import re
from pathlib import Path

from halfbyte.entrypoints.reasoning_parsers import REASONING_PARSERS
from halfbyte.entrypoints.reasoning_parsers.think_tags import Tags

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reasoning.md").read_text(encoding="utf-8")


def test_every_parser_is_there_with_its_marks() -> None:
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    documented = {name: row[1] for row in rows for name in re.findall(r"`([^`]+)`", row[0]) if not name.startswith("-")}
    assert set(documented) == set(REASONING_PARSERS)
    for name, tags in REASONING_PARSERS.items():
        if isinstance(tags, Tags):
            assert re.findall(r"`([^`]+)`", documented[name]) == [tags.opening[0], tags.closing[0]], name
            assert ("without marks is a thought" in documented[name]) is tags.assumed, name
