"""Stop strings: any cut of the text gives what a search through the whole text gives, and nothing is held back needlessly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.engine.stop import StopStrings

letters = st.text(alphabet="abc", max_size=30)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)
pieces = st.lists(st.tuples(st.text(alphabet="abc👋", max_size=6), st.booleans()), max_size=12)


def law(text: str, stops: list[str], include: bool, searched: list[bool]) -> tuple[str, str | None]:
    """(text that is shown, match): the first character that ends a match, and the longest one that it ends."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and searched[end - 1]:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def longest_prefix_at_end(text: str, stops: list[str]) -> int:
    return max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


@given(stops=stops, pieces=pieces, include=st.booleans())
def test_any_split_equals_whole(stops: list[str], pieces: list[tuple[str, bool]], include: bool) -> None:
    text = "".join(piece for piece, _ in pieces)
    searched = [may_stop for piece, may_stop in pieces for _ in piece]
    watcher = StopStrings(stops, include)
    shown, match = "", None
    for piece, may_stop in pieces:
        emitted, found = watcher.feed(piece, may_stop)
        shown += emitted
        match = match or found
    shown += watcher.finish()
    assert (shown, match) == law(text, stops, include, searched)


@given(stops=stops, pieces=pieces)
def test_held_back_is_exactly_what_could_still_become_a_match(stops: list[str], pieces: list[tuple[str, bool]]) -> None:
    watcher = StopStrings(stops)
    seen, shown = "", ""
    for piece, may_stop in pieces:
        emitted, match = watcher.feed(piece, may_stop)
        if match is not None:
            break
        seen, shown = seen + piece, shown + emitted
        assert shown == seen[: len(seen) - longest_prefix_at_end(seen, stops)]


@given(stops=stops, text=letters)
def test_without_a_match_nothing_is_lost(stops: list[str], text: str) -> None:
    watcher = StopStrings(stops)
    emitted, match = watcher.feed(text)
    if not any(stop in text for stop in stops):
        assert match is None and emitted + watcher.finish() == text
    else:
        assert match is not None and text.startswith(emitted + match)
