"""Inputs of custom tools out of their arguments: however these are cut, whatever they are."""

from __future__ import annotations

import json

import pytest

from halfbyte.entrypoints.responses.custom_input import CustomInput

TEXTS = ("", "ls -la", 'a "b" \\ c\n\t/', "é 日本 😀", "\x00\x1f\x7f", "\\u0041", "ends in \\")


def read(pieces: list[str]) -> str:
    reader = CustomInput()
    told = "".join(reader.feed(piece) for piece in pieces)
    return told + reader.finish()


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_every_cut(text: str, ascii_only: bool) -> None:
    for written in (json.dumps({"input": text}, ensure_ascii=ascii_only), f'\n{{ "input" :{json.dumps(text)}, "more": "x"}}'):
        assert read(list(written)) == read([written]) == text
        assert all(read([written[:at], written[at:]]) == text for at in range(len(written)))


def test_what_was_told_stays_told_where_an_input_is_cut() -> None:
    text = 'say "😀\n" é'
    written = json.dumps({"input": text})
    for at in range(len('{"input": "'), len(written)):
        assert text.startswith(read([written[:at]]))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (r'{"input": "\ud83d"}', "\ufffd"),
        (r'{"input": "\ud83dx\ude00"}', "\ufffdx\ufffd"),
        (r'{"input": "\q \u12 \uzzzz"}', r"\q \u12 \uzzzz"),
        ('{"input": "a\nb"}', "a\nb"),
    ],
)
def test_what_is_no_json_becomes_text(written: str, told: str) -> None:
    assert read([written]) == read(list(written)) == told
    told.encode()


@pytest.mark.parametrize(
    "written", ["", "{}", '{"input": 5}', '{"patch": "x"}', "ls -la", '{"input', " " * 1000 + '{"input": "x"}']
)
def test_other_arguments_are_the_input_themselves(written: str) -> None:
    assert read([written]) == read(list(written)) == written
