"""Stop strings, case by case: which match counts, what is held back, what a huge string costs."""

from __future__ import annotations

import pytest

from halfbyte.engine.stop import StopStrings


def feed_all(stops: list[str], *pieces: str, include: bool = False) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops, include)
    shown = []
    for piece in pieces:
        emitted, match = watcher.feed(piece)
        shown.append(emitted)
        if match is not None:
            return shown, match
    return [*shown, watcher.finish()], None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "match"),
    [
        (["END"], "one END two", "one ", "END"),
        (["b", "abc"], "xabc", "xa", "b"),  # the one that is complete first
        (["abc", "bc"], "xabc", "x", "abc"),  # complete at the same character: the one that began first
        (["bc", "abc"], "xabc", "x", "abc"),  # whatever their order
        (["ab", "a"], "xab", "x", "a"),
        (["aab"], "aaab", "a", "aab"),  # a match that begins inside a failed one
        (["👋🏽"], "hi 👋👋🏽", "hi 👋", "👋🏽"),
        (["x"], "abc", "abc", None),
        (["a", "a"], "ba", "b", "a"),
    ],
)
def test_which_match_counts(stops: list[str], text: str, shown: str, match: str | None) -> None:
    for pieces in ([text], list(text)):
        emitted, found = feed_all(stops, *pieces)
        assert ("".join(emitted), found) == (shown, match)


def test_the_match_is_shown_when_asked_for() -> None:
    assert feed_all(["END"], "one E", "ND two", include=True) == (["one ", "END"], "END")


def test_a_long_stop_string_does_not_delay_other_text() -> None:
    assert feed_all(["zzzzzzzzzzzz"], "Hello", " world", "!") == (["Hello", " world", "!", ""], None)


def test_text_is_held_only_while_it_could_match() -> None:
    assert feed_all(["</think>x"], "a</thi", "nk>", "y") == (["a", "", "</think>y", ""], None)


def test_a_marker_is_not_cut_by_a_stop_string_that_it_cannot_begin() -> None:
    assert feed_all(["b,c"], "so</think>", "a") == (["so</think>", "a", ""], None)


def test_held_text_comes_out_at_the_end() -> None:
    assert feed_all(["END"], "the EN") == (["the ", "EN"], None)


def test_nothing_comes_out_after_a_match() -> None:
    watcher = StopStrings(["x"])
    assert watcher.feed("axb") == ("a", "x")
    assert watcher.feed("cx") == ("", None)
    assert watcher.finish() == ""


def test_a_match_counts_where_it_ends() -> None:
    """Text of the first min_tokens tokens is not searched, but a match may begin in it."""
    watcher = StopStrings(["ab"])
    assert watcher.feed("ab a", may_stop=False) == ("ab ", None)
    assert watcher.feed("b") == ("", "ab")


def test_a_match_that_does_not_count_goes_on_as_its_own_border() -> None:
    watcher = StopStrings(["aba"])
    assert watcher.feed("aba", may_stop=False) == ("ab", None)
    assert watcher.feed("ba") == ("", "aba")


def test_a_huge_stop_string_costs_nothing_until_it_matches() -> None:
    watcher = StopStrings(["b" + "a" * 5_000_000])
    for _ in range(100):
        watcher.feed("aaab")
    (matcher,) = watcher._matchers
    assert len(matcher._fallbacks) < 10
