"""Answers in the syntaxes that write calls and parameters as elements, and what is peculiar to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from halfbyte.engine.grammar.compile import GrammarCompiler
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.grammar import tools_grammar
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.elements import DeepseekV32, Elements, MiniMaxM2, Qwen3Coder, SeedOss, Step3
from halfbyte.entrypoints.tool_parsers.glm import TOKENS, Glm45, Glm47
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Meaning, Recorded, read
from tests.unit.tool_parsers.token_marks import tokenizer_with


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> Tool:
    return Tool(name, {"type": "object", "properties": properties, "required": list(required)})


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
WEATHER = tool("get_weather", ("city",), city=STRING, days=INTEGER)
WRITE = tool("write", ("path", "text"), path=STRING, text=STRING, mode=INTEGER)
NOW = tool("now")
PLAN = tool("plan", at={"type": "array"}, options={"type": "object"}, fast={"type": "boolean"}, note={"type": ["string", "null"]})
TOOLS = [WEATHER, WRITE, NOW, PLAN]

QWEN = [
    Recorded(
        "one call",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=[("get_weather", '{"city": "Oslo", "days": 3}')],
        tools=TOOLS,
    ),
    Recorded(
        "text before, between and after two calls, the first without parameters",
        "Let me look.\n<tool_call>\n<function=now>\n</function>\n</tool_call>\nAnd then\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nTromsø 🌨\n</parameter>\n</function>\n</tool_call>\nDone.\n",
        content="Let me look.\nAnd then\nDone.",
        calls=[("now", "{}"), ("get_weather", '{"city": "Tromsø 🌨"}')],
        tools=TOOLS,
    ),
    Recorded(
        "spaces and newlines of a value are its own, but for one newline on either side",
        "<tool_call>\n<function=write>\n<parameter=path>\n  x\n\n</parameter>\n<parameter=text>\n\n\tif a:\n\t\tb  \n"
        "</parameter>\n</function>\n</tool_call>",
        calls=[("write", '{"path": "  x\\n", "text": "\\n\\tif a:\\n\\t\\tb  "}')],
        tools=TOOLS,
    ),
    Recorded(
        "quotes, braces and marks inside a value",
        '<tool_call>\n<function=write>\n<parameter=path>\na "b" \\ {c}\n</parameter>\n<parameter=text>\n</parameter>, '
        "</function>, <parameter=x>\n</parameter> too\n</parameter>\n</function>\n</tool_call>",
        calls=[
            (
                "write",
                '{"path": "a \\"b\\" \\\\ {c}", "text": "</parameter>, </function>, <parameter=x>\\n</parameter> too"}',
            )
        ],
        tools=TOOLS,
    ),
    Recorded(
        "values by their types",
        "<tool_call>\n<function=plan>\n<parameter=at>\n[1, [2], {}]\n</parameter>\n<parameter=options>\n{'a': True}\n"
        "</parameter>\n<parameter=fast>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n<parameter=other>\n5\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=[("plan", '{"at": [1, [2], {}], "options": {"a": true}, "fast": true, "note": null, "other": "5"}')],
        tools=TOOLS,
    ),
    Recorded(
        "closing marks of values and functions forgotten",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</tool_call>\n"
        "<function=write>\n<parameter=path>\na\n</parameter>\n<function=now>\n</function>",
        calls=[
            ("get_weather", '{"city": "Oslo", "days": 3}'),
            ("get_weather", '{"city": "Rome"}'),
            ("write", '{"path": "a"}'),
            ("now", "{}"),
        ],
        tools=TOOLS,
    ),
    Recorded(
        "the mark of the section forgotten",
        "I call.\n\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        content="I call.",
        calls=[("get_weather", '{"city": "Oslo"}')],
        tools=TOOLS,
    ),
    Recorded(
        "the answer ends where the end marks belong, and nothing is missing",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n",
        calls=[("get_weather", '{"city": "Oslo"}')],
        tools=TOOLS,
    ),
    Recorded(
        "the answer ends before all that is required",
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</fun",
        calls=[("write", '{"path": "a"')],
        tools=TOOLS,
    ),
    Recorded(
        "the answer ends within a value's closing mark",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</param",
        calls=[("get_weather", '{"city": "Oslo')],
        tools=TOOLS,
    ),
    Recorded(
        "no call",
        "Write <function=NAME> or <function=f> behind <tool_call>, no <tool_cal",
        content="Write <function=NAME> or <function=f> behind <tool_call>, no <tool_cal",
        tools=TOOLS,
    ),
    Recorded(
        "an unknown function, without spaces",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b></parameter></function></tool_call>",
        calls=[("f", '{"a": "1", "b": ""}')],
    ),
]
SEED = [
    Recorded(
        "two calls, values without newlines of their own",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days> 3 </parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=write>\n<parameter=path>\n  x\n</parameter>\n"
        "<parameter=text></parameter>\n</function>\n</seed:tool_call>",
        calls=[("get_weather", '{"city": "Oslo", "days": 3}'), ("write", '{"path": "\\n  x\\n", "text": ""}')],
        tools=TOOLS,
    ),
    Recorded(
        "text and a call without parameters",
        "So.\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        content="So.",
        calls=[("now", "{}")],
        tools=TOOLS,
    ),
    Recorded(
        "marks inside a value, and a call without its end mark",
        "<seed:tool_call><function=write><parameter=path>a</parameter> b</parameter><parameter=text>{}</parameter></function>",
        calls=[("write", '{"path": "a</parameter> b", "text": "{}"}')],
        tools=TOOLS,
    ),
    Recorded("no call", "<seed:tool_call>junk", content="<seed:tool_call>junk"),
]
MINIMAX = [
    Recorded(
        "two calls in one section, text around it",
        'Now.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="f">\n<parameter name="a b"> x</parameter>\n</invoke>\n'
        "</minimax:tool_call>\nDone <",
        content="Now.\nDone <",
        calls=[("get_weather", '{"city": "Oslo", "days": 2}'), ("f", '{"a b": " x"}')],
        tools=TOOLS,
    ),
    Recorded(
        "no parameters, and no section",
        'Hm.\n<invoke name="now">\n</invoke>\n<invoke name="now"></invoke>\n</minimax:tool_call>',
        content="Hm.",
        calls=[("now", "{}"), ("now", "{}")],
        tools=TOOLS,
    ),
    Recorded(
        "text between the calls of a section, and its end mark cut",
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\nthen\n<invoke name="now">\n</invoke>\n</minimax:to',
        content="then",
        calls=[("now", "{}"), ("now", "{}")],
        tools=TOOLS,
    ),
    Recorded(
        "nested values and marks in a string",
        '<minimax:tool_call>\n<invoke name="plan">\n<parameter name="options">{"a": ["</parameter></invoke>"]}</parameter>\n'
        '<parameter name="note">say "</invoke>" 🙂</parameter>\n</invoke>\n</minimax:tool_call>',
        calls=[("plan", '{"options": {"a": ["</parameter></invoke>"]}, "note": "say \\"</invoke>\\" 🙂"}')],
        tools=TOOLS,
    ),
    Recorded(
        "what is no call",
        'Use <invoke name="x"> inside <minimax:tool_call>.',
        content='Use <invoke name="x"> inside <minimax:tool_call>.',
        tools=TOOLS,
    ),
    Recorded(
        "a quote forgotten in JSON",
        'Hm.\n<minimax:tool_call><invoke name="plan">\n<parameter name="at">["a]</parameter>\n</invoke>\n</minimax:tool_call>\nS',
        content="Hm.\nS",
        calls=[("plan", '{"at": "[\\"a]</parameter>"}')],
        tools=TOOLS,
    ),
]
STEP3 = [
    Recorded(
        "two calls in one section",
        'So: <｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Oslo</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        content="So:",
        calls=[("get_weather", '{"city": "Oslo"}'), ("now", "{}")],
        tools=TOOLS,
    ),
    Recorded(
        "cut in a value",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="write">\n'
        '<steptml:parameter name="path">a</steptml:parameter>\n<steptml:parameter name="text">one',
        calls=[("write", '{"path": "a", "text": "one')],
        tools=TOOLS,
    ),
    Recorded("no call", "<｜tool_calls_begin｜>\nnothing", content="<｜tool_calls_begin｜>\nnothing"),
]


def deepseek(block: str) -> list[Recorded]:
    head = f"<｜DSML｜{block}>\n"
    return [
        Recorded(
            "parameters say whether they are strings",
            f'Look.\n\n{head}<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="c" string="false">{"x": [true]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            f'<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜{block}>',
            content="Look.",
            calls=[("f", '{"a": "5", "b": 5, "c": {"x": [true]}}'), ("now", "{}")],
            tools=TOOLS,
        ),
        Recorded(
            "parameters that do not say it, and no end mark",
            f'{head}<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city">5</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days">5</｜DSML｜parameter>\n</｜DSML｜invoke>',
            calls=[("get_weather", '{"city": "5", "days": 5}')],
            tools=TOOLS,
        ),
        Recorded("no call", "<｜DSML｜function", content="<｜DSML｜function"),
    ]


def glm(gap: str) -> list[Recorded]:
    def call(name: str, *pairs: tuple[str, str]) -> str:
        written = "".join(f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}" for key, value in pairs)
        return f"<tool_call>{name}{gap}{written}</tool_call>"

    return [
        Recorded(
            "two calls, one without arguments",
            f"Look.\n{call('get_weather', ('city', 'Oslo'), ('days', '3'))}{gap}{call('now')}",
            content="Look.",
            calls=[("get_weather", '{"city": "Oslo", "days": 3}'), ("now", "{}")],
            tools=TOOLS,
        ),
        Recorded(
            "values are byte for byte",
            call("write", ("path", "  x\n"), ("text", '\n"é🙂" </arg_value> {[\n')),
            calls=[("write", '{"path": "  x\\n", "text": "\\n\\"é🙂\\" </arg_value> {[\\n"}')],
            tools=TOOLS,
        ),
        Recorded(
            "nested values",
            call("plan", ("at", '[{"a": null}]'), ("options", '{"b": {"c": [1.5]}}'), ("note", "None")),
            calls=[("plan", '{"at": [{"a": null}], "options": {"b": {"c": [1.5]}}, "note": null}')],
            tools=TOOLS,
        ),
        Recorded(
            "spaces between the elements, and marks forgotten",
            "<tool_call> get_weather <arg_key>city</arg_key> <arg_value>Oslo</arg_value> \n"
            "<tool_call>write\n<arg_key>path</arg_key>a\n<arg_key>text</arg_key>\n<arg_value>b</arg_value>",
            calls=[("get_weather", '{"city": "Oslo"}'), ("write", '{"path": "a", "text": "b"}')],
            tools=TOOLS,
        ),
        Recorded(
            "cut within a value",
            f"<tool_call>get_weather{gap}<arg_key>city</arg_key>{gap}<arg_value>Os</arg",
            calls=[("get_weather", '{"city": "Os')],
            tools=TOOLS,
        ),
        Recorded(
            "cut before the name is known to be one",
            f"<tool_call>get_weather{gap}",
            content=f"<tool_call>get_weather{gap}",
            tools=TOOLS,
        ),
        Recorded("no call", 'A <tool_call>{"name": 1}</tool_call>', content='A <tool_call>{"name": 1}</tool_call>'),
    ]


RECORDED = {
    "deepseek_v32": deepseek("function_calls"),
    "deepseek_v4": deepseek("tool_calls"),
    "glm45": glm("\n"),
    "glm47": glm(""),
    "minimax_m2": MINIMAX,
    "qwen3_coder": QWEN,
    "qwen3_xml": QWEN,
    "seed_oss": SEED,
    "step3": STEP3,
    "step3p5": QWEN,
}
PARSERS = list(RECORDED)

QWEN_MARKS = ("<tool_call>", "</tool_call>")
TOKENS_OF = {
    "glm47": TOKENS,
    "minimax_m2": MiniMaxM2.family.required,
    "qwen3_coder": QWEN_MARKS,
    "seed_oss": SeedOss.family.required,
    "step3": (*Step3.family.required, "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    "deepseek_v32": (),
}
CLASS_OF: dict[str, type[Elements] | type[Glm45]] = {
    "glm47": Glm47,
    "minimax_m2": MiniMaxM2,
    "qwen3_coder": Qwen3Coder,
    "seed_oss": SeedOss,
    "step3": Step3,
    "deepseek_v32": DeepseekV32,
}


def with_tokens(marks: Marks, text: str, tokens: tuple[str, ...]) -> str:
    """`text` as a reader gets it when the model wrote all its marks as tokens."""
    for token in tokens:
        text = text.replace(token, marks.mark(token))
    return text


@pytest.mark.parametrize("parser", TOKENS_OF)
def test_with_marks_as_tokens_answers_mean_the_same(parser: str) -> None:
    tokens = TOKENS_OF[parser]
    marks = Marks(tokenizer_with(*tokens))
    syntax = CLASS_OF[parser](marks)
    cases = [case for case in RECORDED[parser] if " cut" not in case.name and not case.name.startswith("cut")]  # tokens are whole
    assert len(cases) >= 2
    for case in cases:
        meaning = read(syntax.reader(case.tools), with_tokens(marks, case.text, tokens))
        content = marks.plain(meaning.content)
        calls = [(name, marks.plain_json(arguments)) for name, arguments in meaning.calls]
        assert (calls, content) == (list(case.calls), case.content), case.name


def test_a_mark_that_is_spelled_by_ordinary_characters_is_text_where_it_is_a_token() -> None:
    marks = Marks(tokenizer_with(*TOKENS))
    spelled = "<tool_call>now</tool_call>"
    reader = Glm47(marks).reader(TOOLS)
    call = "<tool_call>write<arg_key>path</arg_key><arg_value>\0</arg_value></tool_call>"
    value = "a</arg_value></tool_call>"
    text = spelled + with_tokens(marks, call, TOKENS).replace("\0", value)
    assert read(reader, text) == Meaning(spelled, "", [["write", json.dumps({"path": value})]], [None])


def test_a_vocabulary_of_another_family_is_refused() -> None:
    marks = Marks(tokenizer_with(*QWEN_MARKS))
    Qwen3Coder(marks)
    with pytest.raises(UserError, match="--tool-call-parser glm45 does not fit this model.*'<arg_key>'"):
        Glm45(marks)
    with pytest.raises(UserError, match="--tool-call-parser minimax_m2"):
        MiniMaxM2(marks)


# --- grammars ---

SHOP = Tool(
    "buy",
    {
        "type": "object",
        "properties": {
            "note": {"type": "string"},
            "size": {"enum": ["small", "very large", 7]},
            "item": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
            "count": {"type": "integer", "minimum": 1},
            "gift": {"anyOf": [{"$ref": "#/$defs/Gift"}, {"type": "null"}]},
        },
        "required": ["item", "count"],
        "$defs": {
            "Gift": {"type": "object", "properties": {"to": {"$ref": "#/$defs/Who"}}, "required": ["to"]},
            "Who": {"enum": ["me"]},
        },
    },
)


def json_term(schema: object) -> str:
    return f"%json {json.dumps(schema)}"


def accepts(
    parser: str, marks: Marks, tokenizer: Tokenizer, text: str, *, parallel: bool = True, tools: Sequence[Tool] = ()
) -> bool:
    """Whether an answer that must be calls of SHOP and NOW, or of other tools, can be `text`."""
    lark = tools_grammar(CLASS_OF[parser](marks), marks, tools or [SHOP, NOW], json_term, required=True, parallel=parallel)
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0]).matcher(lark)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def written(parser: str, name: str, **parameters: str) -> str:
    """One call as the family writes it."""
    if parser == "glm47":
        pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in parameters.items())
        return f"<tool_call>{name}{''.join(pairs)}</tool_call>"
    family = CLASS_OF[parser].family  # type: ignore[union-attr]
    before, head_end, end = family.call
    opening, close = family.parameter
    lines = []
    for key, value in parameters.items():
        is_text = key in ("note", "item") or value in ("small", "very large")
        key_end = next(e for e, types in family.key_ends.items() if types is None or ("string" in types) == is_text)
        lines.append(f"{opening}{key}{key_end}{family.pad}{value}{family.pad}{close}\n")
    return f"{family.section[0]}\n{''.join(before)}{name}{head_end}\n{''.join(lines)}{''.join(end)}\n{family.section[1]}"


@pytest.mark.parametrize("kind", ["texts", "tokens", "special tokens"])
@pytest.mark.parametrize("parser", TOKENS_OF)
def test_a_grammar_takes_what_the_schema_allows_and_nothing_else(parser: str, kind: str) -> None:
    tokens = () if kind == "texts" else TOKENS_OF[parser]
    tokenizer = tokenizer_with(*tokens, special=kind == "special tokens")
    marks = Marks() if kind == "texts" else Marks(tokenizer)

    def good(**parameters: str) -> bool:
        return accepts(parser, marks, tokenizer, written(parser, "buy", **parameters))

    assert good(item="tea", count="2")
    assert good(item="tea", count="2", note=' say "<b>"\n\n{', size="very large", gift='{"to": "me"}')
    assert good(item="tea", count="2", note="", size="7", gift="null")
    assert not good(item="tea")
    assert not good(count="2", item="tea")
    assert not good(item="tea", count="0")
    assert not good(item="tea", count="two")
    assert not good(item="Tea", count="2")
    assert not good(item="teapot", count="2")
    assert not good(item="tea", count="2", size="large")
    assert not good(item="tea", count="2", gift='{"to": "you"}')
    assert not good(item="tea", count="2", other="x")
    assert accepts(parser, marks, tokenizer, written(parser, "now"))
    assert not accepts(parser, marks, tokenizer, written(parser, "then"))


def test_several_calls_only_where_they_may_be_parallel() -> None:
    one = '<invoke name="now">\n</invoke>\n'
    for parser, two in (
        ("qwen3_coder", f"{written('qwen3_coder', 'now')}\n{written('qwen3_coder', 'now')}"),
        ("glm47", written("glm47", "now") * 2),
        ("minimax_m2", f"<minimax:tool_call>\n{one}{one}</minimax:tool_call>"),
    ):
        assert accepts(parser, Marks(), tokenizer_with(), two)
        assert not accepts(parser, Marks(), tokenizer_with(), two, parallel=False)
    assert not accepts("minimax_m2", Marks(), tokenizer_with(), "<minimax:tool_call>\n</minimax:tool_call>")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "object with properties"),
        ({"properties": {}, "required": [[]]}, "object with properties"),
        ({"anyOf": [{"properties": {}}]}, "'anyOf' of its parameters"),
        ({"properties": {}, "minProperties": 1}, "'minProperties'"),
        ({"properties": {"a>b": {}}}, "named 'a>b'"),
        ({"properties": {" a": {}}}, "named ' a'"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "a: 'not' of a string"),
        ({"properties": {"a": {"type": "string", "minLength": "x)/"}}}, "whole numbers"),
        ({"properties": {"a": {"const": "x</parameter>"}}}, "the value 'x</parameter>'"),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"tool 'f': .*{message}") as raised:
        Qwen3Coder(Marks()).grammar([Tool("f", parameters)], json_term, parallel=True)
    assert raised.value.param == "tools"


@pytest.mark.parametrize(
    ("pattern", "good", "bad"), [(r"\d/", "a1/b", "a1b"), ("^a", "ab", "ba"), ("a$", "ba", "ab"), (r"a\$", "xa$x", "xa")]
)
def test_a_pattern_holds_anywhere_in_a_text_unless_it_is_anchored(pattern: str, good: str, bad: str) -> None:
    tools = [Tool("f", {"properties": {"note": {"type": "string", "pattern": pattern}}})]
    for text, expected in ((good, True), (bad, False)):
        assert accepts("seed_oss", Marks(), tokenizer_with(), written("seed_oss", "f", note=text), tools=tools) is expected


@pytest.mark.parametrize("was_cut", [True, False])
def test_only_a_model_that_stopped_may_have_left_out_what_closes_a_call(was_cut: bool) -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a"]})
    reader = Qwen3Coder(Marks()).reader([tool])
    meaning = Meaning().add(reader.feed("<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n"))
    meaning.add(reader.finish(was_cut=was_cut))
    assert meaning.calls == [["f", '{"a": "x"' + ("" if was_cut else "}")]]
