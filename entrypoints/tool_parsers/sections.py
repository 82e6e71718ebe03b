"""Calls between marks of their own, which stand between marks of all calls. Used by the families that write them so."""

from __future__ import annotations

from collections.abc import Callable

from halfbyte.entrypoints.answers.reading import Steps, Text


def read_sections(
    text: Text, section: tuple[str, str], call: tuple[str, str], read_call: Callable[[Text], Steps[None]]
) -> Steps[None]:
    """Read an answer. section, call: the marks before and behind; those of a section may be missing.

    read_call: reads one call behind its mark, up to its end mark.
    """
    while True:
        mark = yield from text.until(section[0], call[0], sink=text.content)
        text.open_call(mark)
        if mark == section[0]:
            yield from text.skip_space()
            yield from text.expect(call[0])
        yield from read_call(text)
        text.end_call()
        yield from text.skip_space()
        yield from text.accepts(call[1], drops_cut=True)
        yield from text.skip_space(text.content)
        yield from text.accepts(section[1], drops_cut=True)
