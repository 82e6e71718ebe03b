"""Answers with calls in Python's syntax: Llama 3.2 and 4, LFM2, Olmo 3."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.pythonic import Lfm2, Llama4Pythonic, Olmo3, Pythonic
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Meaning, Recorded, read
from tests.unit.tool_parsers.token_marks import tokenizer_with

TOOLS = [Tool("get_weather"), Tool("f"), Tool("g"), Tool("maps.find-route")]
BARE = [
    Recorded(
        "one call",
        '[get_weather(city="Oslo", days=3)]',
        calls=[("get_weather", '{"city": "Oslo", "days": 3}')],
        tools=TOOLS,
    ),
    Recorded(
        "several, one without arguments, one with a dotted name",
        "[f(), maps.find-route(to='Bergen'), g(x=True)]",
        calls=[("f", "{}"), ("maps.find-route", '{"to": "Bergen"}'), ("g", '{"x": true}')],
        tools=TOOLS,
    ),
    Recorded(
        "nested values of every kind",
        "[f(a=[1, -2.5, [], ()], b={'k': None, 2: {\"n\": (1, 'x')}}, c=(7), d=(7,), e=1_000, g=1e-5,)]",
        calls=[
            (
                "f",
                '{"a": [1, -2.5, [], []], "b": {"k": null, "2": {"n": [1, "x"]}}, "c": 7, "d": [7], "e": 1000, "g": 1e-5}',
            )
        ],
        tools=TOOLS,
    ),
    Recorded(
        "strings with quotes, brackets, escapes and emoji",
        "[f(a=\"it's ]) [g()]\", b='say \"hi\"', c='a\\n\\tb\\\\ \\x41\\u00e9\\033 \\d', d='''two\n'lines' ''', e='🌧 é', g='')]",
        calls=[
            (
                "f",
                '{"a": "it\'s ]) [g()]", "b": "say \\"hi\\"", "c": "a\\n\\tb\\\\ A\\u00e9\\u001b \\\\d",'
                ' "d": "two\\n\'lines\' ", "e": "🌧 é", "g": ""}',
            )
        ],
        tools=TOOLS,
    ),
    Recorded(
        "spaces, lines, no comma, no bracket at the end",
        ' \n[ f ( a = "  x\\n" ,\n b = [\n1,\n2\n] ) \n g()',
        calls=[("f", '{"a": "  x\\n", "b": [1, 2]}'), ("g", "{}")],
        tools=TOOLS,
    ),
    Recorded("text behind the calls", "[f(a=1)]\nDone.", content="Done.", calls=[("f", '{"a": 1}')], tools=TOOLS),
    Recorded(
        "JSON's words, words without quotes",
        "[f(a=true, b=null, c=Oslo)]",
        calls=[("f", '{"a": true, "b": null, "c": "Oslo"}')],
        tools=TOOLS,
    ),
    Recorded("a list of numbers", "[1, 2] is a list, [f()] is none.", content="[1, 2] is a list, [f()] is none.", tools=TOOLS),
    Recorded("a name that no tool has", "[see(a=1)] there", content="[see(a=1)] there", tools=TOOLS),
    Recorded("no names of parameters", "[f(1)](url)", content="[f(1)](url)", tools=TOOLS),
    Recorded("text before", "Sure: [f()]", content="Sure: [f()]", tools=TOOLS),
]
LFM2 = [
    Recorded(
        "one call, text behind it",
        '<|tool_call_start|>[get_candidate_status(candidate_id="12345")]<|tool_call_end|>Checking.',
        content="Checking.",
        calls=[("get_candidate_status", '{"candidate_id": "12345"}')],
    ),
    Recorded(
        "text, two calls, marks inside a string",
        'Wait.\n<|tool_call_start|>[f(a="<|tool_call_end|>"), g()]<|tool_call_end|>',
        content="Wait.",
        calls=[("f", '{"a": "<|tool_call_end|>"}'), ("g", "{}")],
    ),
    Recorded(
        "two sections, brackets and marks forgotten",
        "<|tool_call_start|>f(a=1)<|tool_call_end|><|tool_call_start|>[g(b=[1.50]",
        calls=[("f", '{"a": 1}'), ("g", '{"b": [1.50]')],
    ),
    Recorded("no call", "I have <|tool_call", content="I have <|tool_call"),
    Recorded("what is no call", "<|tool_call_start|>[] none", content="<|tool_call_start|>[] none"),
]
OLMO3 = [
    Recorded(
        "one call on a line",
        '<function_calls>\nget_weather(city="Oslo", days=3)\n</function_calls>',
        calls=[("get_weather", '{"city": "Oslo", "days": 3}')],
    ),
    Recorded(
        "text, several lines, JSON's words",
        'I look.\n<function_calls>f(a=true, b="x\\ny")\ng()\nf(c={"k": null})</function_calls>\nDone.',
        content="I look.\nDone.",
        calls=[("f", '{"a": true, "b": "x\\ny"}'), ("g", "{}"), ("f", '{"c": {"k": null}}')],
    ),
    Recorded("a list in brackets", "<function_calls>[f(a=1), g()]</function_calls>", calls=[("f", '{"a": 1}'), ("g", "{}")]),
    Recorded(
        "no end mark, text behind", "<function_calls>\nf(a=1)\nThat was it", content="That was it", calls=[("f", '{"a": 1}')]
    ),
    Recorded("no call", "Use <function_calls> like that", content="Use <function_calls> like that"),
]
LLAMA4 = [
    *BARE,
    Recorded(
        "in marks, after text",
        "Let me see. <|python_start|>[f(a=1), g()]<|python_end|>",
        content="Let me see.",
        calls=[("f", '{"a": 1}'), ("g", "{}")],
    ),
    Recorded("in marks, without brackets", "<|python_start|>f(a='b')<|python_end|>", calls=[("f", '{"a": "b"}')]),
]
PARSERS = ["pythonic", "llama4_pythonic", "lfm2", "olmo3"]
RECORDED = {"pythonic": BARE, "llama4_pythonic": LLAMA4, "lfm2": LFM2, "olmo3": OLMO3}


def meant(text: str) -> Meaning:
    return read(Olmo3(Marks()).reader([]), ["<function_calls>" + text])


def value_of(literal: str) -> str:
    """The JSON that is told of a literal."""
    ((name, arguments),) = meant(f"f(a={literal})").calls
    assert name == "f" and arguments.startswith('{"a": ') and arguments.endswith("}")
    return arguments.removeprefix('{"a": ')[:-1]


@pytest.mark.parametrize(
    ("literal", "told"),
    [
        ("007", "7"),
        ("+5", "5"),
        ("-0", "-0"),
        ("0x1F", "31"),
        ("-0b1_01", "-5"),
        ("1.", "1.0"),
        (".5", "0.5"),
        ("-01.50e+3", "-1.50e+3"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("2024-01-31", '"2024-01-31"'),
        ("'\\ud83d\\ude00 \\U0001F600 \\N{DASH} \\x4'", '"\\ud83d\\ude00 \\ud83d\\ude00 \\\\N{DASH} \\\\x4"'),
        ("'a\\\nb'", '"ab"'),
        ('""" "quoted" """', '" \\"quoted\\" "'),
        ("{True: 1, 2.5: 2}", '{"true": 1, "2.5": 2}'),
        ("((1, 2), (3))", "[[1, 2], 3]"),
    ],
)
def test_a_literal_is_told_as_json(literal: str, told: str) -> None:
    assert value_of(literal) == told
    json.loads(told)


@pytest.mark.parametrize(
    "literal", ["1 + 2", "r'x'", "b'x'", "g(1)", "x[0]", "1j", "{1, 2}", "[1 2]", "0x" + "f" * 4000, "--1", "1__0"]
)
def test_what_is_no_literal_ends_the_call_and_the_reader_goes_on(literal: str) -> None:
    meaning = meant(f"f(a={literal})</function_calls><function_calls>g(b=2)")
    assert meaning.calls[0][0] == "f" and meaning.calls[-1] == ["g", '{"b": 2}']


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=8,
)


@given(literals)
def test_every_literal_that_python_writes_means_to_json_what_it_means_to_python(value: object) -> None:
    written = repr(value)
    assert ast.literal_eval(written) == value
    assert json.loads(value_of(written)) == json.loads(json.dumps(value))


def test_strings_stream_and_other_scalars_wait() -> None:
    reader = Olmo3(Marks()).reader([])
    told = [Meaning().add(reader.feed(piece)).calls or piece for piece in ["<function_calls>f("]]
    assert told == ["<function_calls>f("]
    meaning = Meaning()
    seen = []
    for piece in ["a=", "'x", "y", "'", ", b=1", "2", ")"]:
        meaning.add(reader.feed(piece))
        seen.append(meaning.calls[0][1])
    quoted = '{"a": "xy"'
    assert seen == ['{"a": ', '{"a": "x', '{"a": "xy', quoted, quoted + ', "b": ', quoted + ', "b": ', quoted + ', "b": 12}']


def test_lists_may_be_as_deep_as_a_model_writes_them() -> None:
    assert value_of("[" * 5000 + "]" * 5000) == "[" * 5000 + "]" * 5000


def test_a_mark_that_is_a_token_counts_only_as_that_token() -> None:
    marks = Marks(tokenizer_with("<|tool_call_start|>", "<|tool_call_end|>"))
    syntax = Lfm2(marks)
    opened, closed = marks.mark("<|tool_call_start|>"), marks.mark("<|tool_call_end|>")
    spelled = "<|tool_call_start|>[f()]<|tool_call_end|>"
    meaning = read(syntax.reader([]), f"{spelled} {opened}[g(a='{spelled}')]{closed}")
    assert (meaning.content, meaning.calls) == (spelled, [["g", json.dumps({"a": spelled})]])


@pytest.mark.parametrize("syntax", [Lfm2, Llama4Pythonic])
def test_a_vocabulary_without_the_familys_tokens_is_refused(syntax: type[Lfm2]) -> None:
    with pytest.raises(UserError, match="--tool-call-parser"):
        syntax(Marks(tokenizer_with()))


def test_a_bare_list_needs_no_token_of_the_vocabulary() -> None:
    assert read(Pythonic(Marks(tokenizer_with())).reader(TOOLS), ["[f()]"]).calls == [["f", "{}"]]
