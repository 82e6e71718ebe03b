"""Thoughts told apart from answers: every family's marks, every cut, every end."""

from __future__ import annotations

import itertools

import pytest

from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.reasoning_parsers import REASONING_PARSERS
from halfbyte.entrypoints.reasoning_parsers.think_tags import Tags, ThinkTags

FAMILIES = {name: tags for name, tags in REASONING_PARSERS.items() if isinstance(tags, Tags)}
families = pytest.mark.parametrize("tags", FAMILIES.values(), ids=FAMILIES)


def read(syntax: ThinkTags, is_open: bool | None, pieces: list[str], *, finish: bool = True) -> tuple[str, str]:
    reader = syntax.reader(is_open)
    told = [reader.feed(piece) for piece in pieces] + ([reader.finish()] if finish else [])
    return "".join(thought for thought, _ in told), "".join(answer for _, answer in told)


@families
def test_a_thought_and_its_answer(tags: Tags) -> None:
    syntax = ThinkTags(Marks(), tags)
    for opening, closing in itertools.product(tags.opening, tags.closing):
        assert read(syntax, None, [f"{opening}\nLook it up.\n{closing}\n\nOslo."]) == ("Look it up.", "Oslo.")
        assert read(syntax, True, [f"Look it up.{closing}Oslo."]) == ("Look it up.", "Oslo.")
        assert read(syntax, True, [f"{opening}\nLook it up.{closing} Oslo."]) == ("Look it up.", "Oslo.")


@families
def test_an_answer_without_a_thought_is_whole(tags: Tags) -> None:
    syntax = ThinkTags(Marks(), tags)
    for text in ("Oslo.", "  Oslo.\n", "", " ", tags.opening[0][:-1], f"a {tags.opening[0]} b {tags.closing[0]}"):
        assert read(syntax, False, [text]) == ("", text)
        assert read(syntax, None, [text]) == ("", text)


@families
@pytest.mark.parametrize("is_open", [True, None, False])
def test_every_cut_and_every_end(tags: Tags, is_open: bool | None) -> None:
    syntax = ThinkTags(Marks(), tags)
    opening, closing = tags.opening[0], tags.closing[0]
    for text in (
        f"{opening}\nab  c\n{closing}\n\nd {closing} e ",
        f" \n{opening}{closing}x",
        f"a {closing[:-1]} b {closing}{closing} c",
        f"{opening} a {closing[:2]}",
    ):
        whole = read(syntax, is_open, [text])
        for at in range(len(text) + 1):
            assert read(syntax, is_open, [text[:at], text[at:]]) == whole
            ended = read(syntax, is_open, [text[:at]])
            assert read(syntax, is_open, list(text[:at])) == ended
            told = read(syntax, is_open, list(text[:at]), finish=False)
            assert whole[0].startswith(told[0]) and whole[1].startswith(told[1])


def test_whether_the_answer_begins_inside_a_thought() -> None:
    asked = "<|user|>What is <think>?<|assistant|>"
    qwen, r1 = ThinkTags(Marks(), FAMILIES["qwen3"]), ThinkTags(Marks(), FAMILIES["deepseek_r1"])
    for prompt, expected in {
        asked: None,
        f"{asked}<think>\n": True,
        f"{asked}<think>\n\n</think>\n\n": False,
        f"<|assistant|><think>a</think>b{asked}": None,
    }.items():
        assert qwen.is_open(prompt, continues=False) is expected, prompt
        assert r1.is_open(prompt, continues=False) is (True if expected is None else expected), prompt
    for prompt, expected in {
        f"{asked}<think>I should": True,
        f"{asked}<think>I did</think>So": False,
        f"{asked}So": True,  # what was asked spells the mark: nothing after it closes that
        "<|user|>Why?<|assistant|>So": False,
    }.items():
        assert qwen.is_open(prompt, continues=True) is expected, prompt


def test_a_call_may_end_a_thought_where_that_is_configured() -> None:
    tags = FAMILIES["qwen3"]
    text = "<think>I call it. <tool_call>x"
    assert read(ThinkTags(Marks(), tags), None, [text]) == ("I call it. <tool_call>x", "")
    assert read(ThinkTags(Marks(), tags, ("<tool_call>",)), None, [text]) == ("I call it.", "<tool_call>x")
