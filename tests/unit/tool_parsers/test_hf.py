"""Answers read by response templates: worked examples, templates of checkpoints, and shapes that cannot stream."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.reasoning_parsers.protocol import ThoughtMarks
from halfbyte.entrypoints.tool_parsers import hf_delimiters
from halfbyte.entrypoints.tool_parsers.hf import ResponseTemplateSyntax
from halfbyte.errors import UserError
from tests.unit.growth import is_linear
from tests.unit.tool_parsers.recorded import Meaning, Recorded, read
from tests.unit.tool_parsers.token_marks import tokenizer_with

PARSER = "hf"
CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}}
JSON_CALLS: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": CALL},
        "content": {"close_pattern": r"\s*<\|end\|>"},
    },
}
NAMED = {"type": "function", "function": {"name": "{fn}", "arguments": "{content}"}}
TAG_CALLS: dict[str, Any] = {
    "start_anchor": ["<|bot|>\n", "<|tool_result_end|>"],
    "fields": {
        "thinking": {"open": "[[plan]]", "close": ["[[/plan]]", "[[answer]]"]},
        "tool_calls": {
            "open_pattern": r"\[\[use (?P<fn>[\w.-]+)\]\]",
            "close": "[[/use]]",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": NAMED,
        },
        "content": {"close": "<|eos|>"},
    },
}
SPACED_CALLS: dict[str, Any] = {
    "start_anchor": "<|assistant|>\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<fn>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": NAMED,
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}


def with_calls(**field: Any) -> dict[str, Any]:
    """JSON_CALLS with another field for calls."""
    return {**JSON_CALLS, "fields": {**JSON_CALLS["fields"], "tool_calls": {"open": "<call>", "close": "</call>", **field}}}


LIST_CALLS = with_calls(
    open="[CALLS]",
    close="[/CALLS]",
    content="json",
    transform_each=True,
    transform={"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
)
DIALECT_CALLS = with_calls(
    **{"open": None, "open_pattern": r"<\|call>call:(?P<fn>\w+)", "close": "<call|>", "repeats": True, "content": "json"},
    content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    transform=NAMED,
)
LINE_CALLS = with_calls(
    **{"open": None, "open_pattern": r"<call (?P<fn>\w+)>", "content": "kv-lines", "repeats": True, "transform": NAMED}
)
TYPED_TAGS = with_calls(
    **{"open": None, "open_pattern": r"<call (?P<fn>\w+)>", "content": "xml-inline", "repeats": True, "transform": NAMED},
    content_args={
        "tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>",
        "merge_duplicates": True,
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
)
OPEN_END = with_calls(open="<|python_tag|>", close=None, content="json", transform={"type": "function", "function": "{content}"})
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}})

ANSWERS: list[tuple[Mapping[str, Any], Recorded]] = [
    (
        JSON_CALLS,
        Recorded("content", "Just text, a <cal and a \U0001f600.<|end|>", content="Just text, a <cal and a \U0001f600."),
    ),
    (
        JSON_CALLS,
        Recorded(
            "reasoning and content", "<think>\nLook it up.\n</think>\n\nSure.<|end|>", content="Sure.", reasoning="Look it up."
        ),
    ),
    (
        JSON_CALLS,
        Recorded(
            "worked example A",
            'Sure.<call>{"name":"w","args":{"city":"Oslo"}}</call><|end|>',
            content="Sure.",
            calls=[("w", '{"city":"Oslo"}')],
        ),
    ),
    (
        JSON_CALLS,
        Recorded(
            "parallel calls, one without arguments",
            '<think>Two.</think><call>{"name": "f", "args": {}}</call>\n'
            '<call>{"name": "g", "args": {"x": [1, {"y": null}]}}</call>',
            calls=[("f", "{}"), ("g", '{"x": [1, {"y": null}]}')],
            reasoning="Two.",
        ),
    ),
    (JSON_CALLS, Recorded("truncated call", '<call>{"name": "f", "args": {"x": "a b', calls=[("f", '{"x": "a b')])),
    (JSON_CALLS, Recorded("truncated before the name", 'Hm <call>{"na', content='Hm <call>{"na')),
    (JSON_CALLS, Recorded("truncated thought", "<think>I wond", reasoning="I wond")),
    (
        JSON_CALLS,
        Recorded(
            "arguments before the name, a delimiter in a string",
            '<call> {"args": {"t": "</call> \\"<call>"}, "name": "f"} </call>done',
            content="done",
            calls=[("f", '{"t": "</call> \\"<call>"}')],
        ),
    ),
    (JSON_CALLS, Recorded("what is no call is content", "a <call>junk</call> b", content="a <call>junk</call> b")),
    (JSON_CALLS, Recorded("no arguments, no closer", '<call>{"name": "f"}<|end|>', calls=[("f", "{}")])),
    (
        TAG_CALLS,
        Recorded(
            "worked example B", "[[use add]]<a>2</a><b>3.5</b>[[/use]]<|eos|>", calls=[("add", '{"a": 2, "b": 3.5}')], tools=[ADD]
        ),
    ),
    (
        TAG_CALLS,
        Recorded(
            "worked example B, no tools", "[[use add]]<a>2</a><b>3.5</b>[[/use]]", calls=[("add", '{"a": "2", "b": "3.5"}')]
        ),
    ),
    (
        TAG_CALLS,
        Recorded(
            "strings byte for byte",
            '[[plan]]p[[answer]]x [[use edit.v2]]<old>  x\n</old><new>"</a>\u00e9</new>[[/use]]\n[[use now]][[/use]]',
            content="x",
            calls=[("edit.v2", '{"old": "  x\\n", "new": "\\"</a>\u00e9"}'), ("now", "{}")],
            reasoning="p",
        ),
    ),
    (TAG_CALLS, Recorded("tags cut short", "[[use f]]<a>one tw", calls=[("f", '{"a": "one tw')])),
    (TAG_CALLS, Recorded("a value without its closer", "[[use f]]<a>one[[/use]]ok", content="ok", calls=[("f", '{"a": "one"}')])),
    (TAG_CALLS, Recorded("nearly an opener", "[[use it, he said]] [[plan", content="[[use it, he said]] [[plan")),
    (
        SPACED_CALLS,
        Recorded(
            "spaces in patterns",
            "<think>\nhm\n</think>\n\nHi\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=c>\nx\n y\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n<|endoftext|>",
            content="Hi",
            calls=[("add", '{"a": 1, "c": "x\\n y"}'), ("now", "{}")],
            tools=[ADD],
            reasoning="hm",
        ),
    ),
    (
        LIST_CALLS,
        Recorded(
            "a list of calls",
            'So: [CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}][/CALLS]',
            content="So:",
            calls=[("f", '{"a": 1}'), ("g", "{}")],
        ),
    ),
    (LIST_CALLS, Recorded("a list that is cut", '[CALLS][{"name": "f", "arguments": {"a"', calls=[("f", '{"a"')])),
    (
        DIALECT_CALLS,
        Recorded(
            "a dialect of JSON",
            '<think>a</think><|call>call:f{a:<|"|>x "y", b:<|"|>,n:{c:[1,true]}}<call|><|call>call:g{}<call|>',
            calls=[("f", '{"a": "x \\"y\\", b:", "n": {"c": [1, true]}}'), ("g", "{}")],
            reasoning="a",
        ),
    ),
    (
        DIALECT_CALLS,
        Recorded(
            "a region that cannot be read is content", "<|call>call:f{a:<call|> then", content="<|call>call:f{a:<call|> then"
        ),
    ),
    (DIALECT_CALLS, Recorded("a region that is whole but open", "<|call>call:f{a:1}", calls=[("f", '{"a": 1}')])),
    (
        LINE_CALLS,
        Recorded(
            "lines", "<call add>\na: 2\nb : x: y\n</call>ok", content="ok", calls=[("add", '{"a": 2, "b": "x: y"}')], tools=[ADD]
        ),
    ),
    (
        TYPED_TAGS,
        Recorded("tags that merge", "<call f><a>1</a><b>x y</b><a>[2]</a></call>", calls=[("f", '{"a": [1, [2]], "b": "x y"}')]),
    ),
    (
        OPEN_END,
        Recorded(
            "calls up to the end", 'x<|python_tag|>{"name": "f", "arguments": {"a": 1}}', content="x", calls=[("f", '{"a": 1}')]
        ),
    ),
]
RECORDED = [case for _, case in ANSWERS]
SYNTAX = {case.name: ResponseTemplateSyntax(Marks(), template) for template, case in ANSWERS}
MARKS = {"json": ("<think>", "</think>", "<call>", "</call>", "<|end|>"), "tags": ("<tool_call>", "</tool_call>", "<|im_end|>")}


def meaning(template: Mapping[str, Any], text: str, **options: Any) -> Meaning:
    """What the template makes of a text, letter by letter."""
    return read(ResponseTemplateSyntax(Marks(), template, needs=()).reader([], **options), text)


def test_names_of_recorded_answers_are_unique() -> None:
    assert len(SYNTAX) == len(ANSWERS)


def test_a_thought_that_the_prompt_opened_is_one() -> None:
    template = ResponseTemplateSyntax(Marks(), JSON_CALLS).template
    prompt = "<|user|>say <think><|assistant|>no</think><|user|>again<|assistant|><think>\n"
    prefix = template.prefix_of(prompt)
    told = meaning(JSON_CALLS, 'Look it up.</think>Sure.<call>{"name":"w","args":{"city":"Oslo"}}</call><|end|>', prefix=prefix)
    assert prefix == "<think>\n"
    assert told == Meaning("Sure.", "Look it up.", [["w", '{"city":"Oslo"}']], [None])


def test_nothing_of_the_prefix_is_told_and_its_calls_do_not_count() -> None:
    prefix = '<think>old</think>Old text<call>{"name": "old", "args": {}}</call>more'
    told = meaning(JSON_CALLS, ' new<call>{"name": "f", "args": {}}</call>', prefix=prefix)
    assert told == Meaning(" new", "", [["f", "{}"]], [None])


def test_a_delimiter_can_begin_in_the_prefix() -> None:
    assert meaning(JSON_CALLS, "nk>b", prefix="<think>a</thi") == Meaning(content="b")


def test_calls_that_are_not_to_be_read_are_content_with_their_delimiters() -> None:
    text = '<think>a</think>b <call>{"name": "f"}</call> c'
    assert meaning(JSON_CALLS, text, calls=False) == Meaning('b <call>{"name": "f"}</call> c', "a")


def test_thoughts_that_are_not_to_be_read_are_content_without_delimiters() -> None:
    assert meaning(JSON_CALLS, "<think>a\n</think>\nb", reasoning=False) == Meaning("a\n\nb")


def test_white_space_stays_where_the_template_says_so() -> None:
    fields = {
        "thinking": {"open": "<t>", "close": "</t>", "content_args": {"strip": False}},
        "content": {"content_args": {"strip": False}},
    }
    assert meaning({"start_anchor": "x", "fields": fields}, "<t> a </t> b ") == Meaning(" b ", " a ")


def test_text_outside_of_regions_is_dropped_where_the_template_has_no_field_for_it() -> None:
    fields = {"content": {"open": "<final>", "close": "</final>"}, "thinking": {"open": "<t>", "close": "</t>"}}
    assert meaning({"start_anchor": "x", "fields": fields}, "a<t>b</t>c<final>d</final>e") == Meaning("d", "b")


def test_a_template_without_content_has_it_outside() -> None:
    assert meaning({"start_anchor": "x", "fields": {"thinking": {"open": "<t>", "close": "</t>"}}}, "<t>b</t>c") == Meaning(
        "c", "b"
    )


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|assistant|>", None),
        ("<|assistant|><think>\n", True),
        ("<|assistant|><think>\n\n</think>\n\n", False),
        ("<|assistant|>Hi", False),
    ],
)
def test_the_prompt_tells_whether_the_answer_begins_in_a_thought(prompt: str, is_open: bool | None) -> None:
    assert ResponseTemplateSyntax(Marks(), JSON_CALLS).is_open(prompt) is is_open


def test_the_texts_around_a_thought_are_known() -> None:
    assert ResponseTemplateSyntax(Marks(), JSON_CALLS).marks == ThoughtMarks("<think>", "</think>", "</think>")
    assert ResponseTemplateSyntax(Marks(), TAG_CALLS).marks == ThoughtMarks("[[plan]]", "", ""), "there are two that close it"


def test_a_mark_that_is_a_token_counts_only_as_that_token() -> None:
    marks = Marks(tokenizer_with(*MARKS["json"]))
    syntax = ResponseTemplateSyntax(marks, JSON_CALLS)
    assert set(marks.by_token) == {marks.token_id(text) for text in MARKS["json"]}
    opening, close, end = marks.mark("<call>"), marks.mark("</call>"), marks.mark("<|end|>")
    spelled = 'Write <call>{"name": "f"}</call>, <|end|>'
    call = f'{opening}{{"name": "f", "args": {{"t": "</call>"}}}}{close}{end}'
    assert read(syntax.reader([]), spelled + call) == Meaning(spelled, "", [["f", '{"t": "</call>"}']], [None])


def test_tokens_inside_of_patterns_count_as_tokens() -> None:
    marks = Marks(tokenizer_with(*MARKS["tags"]))
    syntax = ResponseTemplateSyntax(marks, SPACED_CALLS)
    opening, close = marks.mark("<tool_call>"), marks.mark("</tool_call>")
    answer = f"<tool_call>\n<function=f>\n{opening}\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n{close}"
    assert read(syntax.reader([]), answer) == Meaning("<tool_call>\n<function=f>", "", [["f", '{"a": "1"}']], [None])


def test_a_prefix_of_spelled_marks_is_understood_where_they_are_tokens() -> None:
    marks = Marks(tokenizer_with(*MARKS["json"]))
    syntax = ResponseTemplateSyntax(marks, JSON_CALLS)
    assert read(syntax.reader([], prefix="<think>\n"), f"a{marks.mark('</think>')}b") == Meaning("b", "a")


def test_long_texts_that_nearly_are_delimiters_cost_little() -> None:
    for beginning in (" ", "[[use ", "\n<tool_call>\n", "<call>{"):
        for template in (JSON_CALLS, TAG_CALLS, SPACED_CALLS, DIALECT_CALLS):

            def tell(length: int, beginning: str = beginning, template: dict[str, Any] = template) -> None:
                text = beginning * (length // len(beginning))
                pieces = [text[at : at + 40] for at in range(0, len(text), 40)]
                assert read(ResponseTemplateSyntax(Marks(), template).reader([]), pieces).content == text.strip()

            assert is_linear(tell, 20_000), (beginning, template)


def test_a_pattern_with_an_optional_end_is_matched_the_same_however_the_answer_is_cut() -> None:
    template = with_calls(
        **{"open": "<f>", "close": None, "close_pattern": r"</f>(?:\s*</t>)?", "content": "json", "transform": CALL}
    )
    text = '<f>{"name": "g", "args": {}}</f>\n</t>x'
    assert meaning(template, text) == Meaning("x", "", [["g", "{}"]], [None])
    assert read(ResponseTemplateSyntax(Marks(), template).reader([]), [text]) == meaning(template, text)


def test_a_pattern_that_takes_for_ever_ends_the_reading_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_delimiters, "_TIMEOUT_S", 0.05)
    template = {**JSON_CALLS, "fields": {"thinking": {"open": "<t>", "close_pattern": r"(?:(?:a|aa)+)+!"}, "content": {}}}
    text = "<t>" + "a" * 60 + " b"
    told = read(ResponseTemplateSyntax(Marks(), template, needs=()).reader([]), [text])
    assert told.content + told.reasoning == text.removeprefix("<t>")


def test_delimiters_in_any_order_mean_the_same_however_the_answer_is_cut() -> None:
    draw = random.Random(1)
    pieces = sorted({piece for _, case in ANSWERS for piece in re.findall(r"\s+|\w+|[<\[]+\W*\w+[^\w\s]*|[^\w\s]+", case.text)})
    for _ in range(300):
        template, case = draw.choice(ANSWERS)
        own = re.findall(r"\s+|\w+|[<\[]+\W*\w+[^\w\s]*|[^\w\s]+", case.text)
        text = "".join(draw.choice(own if draw.random() < 0.9 else pieces) for _ in range(draw.randint(1, 14)))
        syntax = ResponseTemplateSyntax(Marks(), template)
        whole = read(syntax.reader([]), [text])
        at = draw.randint(0, len(text))
        assert read(syntax.reader([]), text) == whole == read(syntax.reader([]), [text[:at], text[at:]]), text


def test_fields_that_the_server_was_told_to_read_must_be_there() -> None:
    fields = {"content": {}}
    with pytest.raises(UserError, match="--reasoning-parser hf needs the field thinking"):
        ResponseTemplateSyntax(Marks(), {"start_anchor": "x", "fields": fields}, needs=("thinking",))
    with pytest.raises(UserError, match="--tool-call-parser hf needs the field tool_calls"):
        ResponseTemplateSyntax(Marks(), {"start_anchor": "x", "fields": fields})
