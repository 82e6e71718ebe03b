"""Conversations as clients write them, through templates with the traits of the families that are served."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest

from halfbyte.entrypoints import chat_template
from halfbyte.entrypoints.chat_messages import read_message, read_tools
from halfbyte.entrypoints.chat_roles import SHORT_ID_CHARS, CallForm, Traits, arrange
from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.errors import UserError

# Any role by its name; arguments as JSON, which it writes itself.
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)
# One system message, at the front, where the template itself puts it; it says so of others.
ONE_SYSTEM = (
    "{% if messages[0].role == 'system' %}<sys>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}{% else %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call {{ c.function.name }}>"
    "{% for k, v in c.function.arguments.items() %}<arg {{ k }}>{{ v }}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
# The first message may be a system message; any other one is silently not shown.
DROPS_SYSTEM = (
    "{% if messages[0].role == 'system' %}<sys>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# No system role at all, strict alternation.
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# The system message goes into the user message; alternation; ids of nine characters.
STRICT = (
    "{% set ns = namespace(system='', turn=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}{% set ns.system = m.content + '|' %}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "<result {{ m.tool_call_id }}>{{ m.content }}"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}<call {{ c.id }}>{{ c.function | tojson }}{% endfor %}"
    "{% else %}{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}<{{ m.role }}>{{ ns.system if m.role == 'user' and ns.turn == 1 }}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
# Arguments are added to a text; a call is seen by the content that is none.
CONCATENATES = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# Calls are shown whatever the content, but a content that is a text is a turn of its own, be it empty.
TURN_OF_ITS_OWN = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<call>{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% if m.content is not none %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# It writes the arguments as they come, so that an object would be Python's own notation.
PRINTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"
)
# The developer is a role of its own; only the first message may be one.
DEVELOPER = (
    "{% if messages[0].role in ['system', 'developer'] %}<dev>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role not in ['system', 'developer'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
REFUSES_DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('who?') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"


def say(*turns: str) -> list[dict[str, Any]]:
    """'role text' each."""
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in turns]


def render(source: str, messages: list[Any], **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **{"add_generation_prompt": False} | options)


def calling(arguments: Any, content: Any = None, **call: Any) -> list[dict[str, Any]]:
    """A question, a call of `f`, its result."""
    made = {"id": "call_abc", "type": "function", "function": {"name": "f", "arguments": arguments}} | call
    return [
        *say("user q"),
        {"role": "assistant", "content": content, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_abc", "content": "r"},
    ]


# --- roles


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (CHATML, "<system>D<user>q"),
        (ONE_SYSTEM, "<sys>D<user>q"),
        (DROPS_SYSTEM, "<sys>D<user>q"),
        (NO_SYSTEM, "<s><user>D\n\nq"),
        (STRICT, "<user>D|q"),
        (DEVELOPER, "<dev>D<user>q"),
        (REFUSES_DEVELOPER, "<system>D<user>q"),
        (PARTS, "<system>(D)<user>(q)"),
    ],
)
def test_a_developer_is_a_system_where_the_template_knows_none(source: str, rendered: str) -> None:
    assert render(source, say("developer D", "user q")) == rendered


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (CHATML, "<system>A<system>B<user>q<assistant>a<system>C<user>p"),
        (ONE_SYSTEM, "<sys>A\n\nB\n\nC<user>q<assistant>a<user>p"),
        (DROPS_SYSTEM, "<sys>A\n\nB\n\nC<user>q<assistant>a<user>p"),
        (NO_SYSTEM, "<s><user>A\n\nB\n\nC\n\nq<assistant>a<user>p"),
        (STRICT, "<user>A\n\nB\n\nC|q<assistant>a<user>p"),
        (DEVELOPER, "<dev>A\n\nB\n\nC<user>q<assistant>a<user>p"),
    ],
)
def test_no_system_message_is_lost(source: str, rendered: str) -> None:
    messages = say("system A", "developer B", "user q", "assistant a", "system C", "user p")
    before = copy.deepcopy(messages)
    assert render(source, messages) == rendered
    assert messages == before, "what the caller gave is not changed"


def test_one_system_message_behind_a_question_goes_to_the_front_only_where_it_must() -> None:
    messages = say("user q", "system S")
    assert render(CHATML, messages) == "<user>q<system>S"
    assert render(DROPS_SYSTEM, messages) == "<sys>S<user>q"


def test_a_system_message_without_a_question_becomes_one_where_there_is_no_system_role() -> None:
    assert render(NO_SYSTEM, say("system S")) == "<s><user>S"
    assert render(NO_SYSTEM, say("system S", "assistant a")) == "<s><user>S<assistant>a"
    assert render(NO_SYSTEM, [{"role": "system", "content": None}, *say("user q")]) == "<s><user>q"


def test_the_templates_own_rules_still_reach_the_client() -> None:
    with pytest.raises(UserError, match="roles must alternate user/assistant"):
        render(NO_SYSTEM, say("system S", "user q", "user p"))
    with pytest.raises(UserError, match="'lang' is undefined"):
        render("{{ lang.x }}{% for m in messages %}{{ m.content }}{% endfor %}", say("developer D", "user q"))


def test_a_template_that_needs_more_variables_is_taken_at_its_word() -> None:
    source = "{{ lang.x }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    rendered = render(source, say("system A", "system B", "user q"), chat_template_kwargs={"lang": {"x": "en"}})
    assert rendered == "en<system>A<system>B<user>q"


def test_a_system_message_that_was_moved_cannot_be_continued() -> None:
    messages = say("user q", "system S")
    assert render(CHATML, messages, continue_final_message=True) == "<user>q<system>S"
    with pytest.raises(UserError) as caught:
        render(DROPS_SYSTEM, messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    assert render(NO_SYSTEM, say("system S", "user q"), continue_final_message=True) == "<s><user>S\n\nq"


def test_a_template_is_asked_once_and_only_what_matters() -> None:
    asked: list[list[str]] = []

    def trial(messages: Any) -> str | None:
        asked.append([m["role"] for m in messages])
        return "".join(m["content"][0] for m in messages if m["content"])

    traits = Traits(trial, names_developer=False)
    question = [read_message(m, 0) for m in say("user q")]
    assert arrange(question, traits) == question and asked == []
    for _ in range(2):
        arrange([read_message(m, 0) for m in say("system s", "user q")], traits)
        assert asked == [["system", "user"]]


def test_a_trial_that_was_stopped_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{# stopped #}" + DROPS_SYSTEM
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", -1.0)
    with pytest.raises(UserError, match="takes too long"):
        render(source, say("user q", "system S"))
    monkeypatch.undo()
    assert render(source, say("user q", "system S")) == "<sys>S<user>q"


# --- tool calls


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("arguments", ['{"city": "Prag"}', {"city": "Prag"}])
@pytest.mark.parametrize(
    ("source", "call"),
    [
        (CHATML, '[f {"city": "Prag"}]'),
        (ONE_SYSTEM, "<call f><arg city>Prag"),
        (STRICT, '{"name": "f", "arguments": {"city": "Prag"}}'),
        (CONCATENATES, '<call>f({"city": "Prag"})'),
        (PRINTS, 'f{"city": "Prag"}'),
    ],
)
def test_calls_are_shown_in_the_form_that_the_template_takes(source: str, call: str, arguments: Any, content: Any) -> None:
    assert call in render(source, calling(arguments, content))


def test_a_template_that_takes_either_form_of_arguments_is_given_the_object() -> None:
    pieces = "{% for k, v in a.items() %}<name of the argument {{ k }}>{{ v }}{% endfor %}"
    each = "{% set a = c.function.arguments %}{{ c.function.name }}{% if a is string %}{{ a }}{% else %}" + pieces + "{% endif %}"
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + each + "{% endfor %}{% endfor %}"
    assert render(source, calling('{"a": 1}')) == "f<name of the argument a>1"
    assert render(source, calling("{broken")) == "f{broken"


def test_a_message_that_only_calls_adds_no_empty_turn() -> None:
    for content in (None, "", []):
        assert render(TURN_OF_ITS_OWN, calling('{"a": 1}', content)) == '<user>q<call>f{"a": 1}<tool>r'
    assert render(TURN_OF_ITS_OWN, calling('{"a": 1}', "so")) == '<user>q<call>f{"a": 1}<assistant>so<tool>r'
    assert "None" not in render(CHATML, calling('{"a": 1}', None))


def test_arguments_that_are_text_stay_to_the_letter() -> None:
    written = '{"a":1,  "b": "\\u00e9"}'
    assert f"f({written})" in render(CONCATENATES, calling(written))
    assert 'f({"a": "é"})' in render(CONCATENATES, calling({"a": "é"}))
    for nothing in ("", None, {}):
        assert "f({})" in render(CONCATENATES, calling(nothing))


@pytest.mark.parametrize("source", [CHATML, CONCATENATES, PRINTS, STRICT])
def test_broken_arguments_stay_text(source: str) -> None:
    assert "{broken" in render(source, calling("{broken"))


def test_ids_are_shortened_only_for_templates_that_want_nine_characters() -> None:
    shown = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function | tojson }}]{% endfor %}{% endfor %}"
    )
    assert "[call_abc" in render(shown, calling('{"a": 1}'))
    rendered = render(STRICT, calling("{}"))
    of_call, of_result = (rendered.partition(mark)[2][:SHORT_ID_CHARS] for mark in ("<call ", "<result "))
    assert of_call == of_result and of_call.isalnum()
    kept = calling("{}", id="abcDEF123")
    kept[-1]["tool_call_id"] = "abcDEF123"
    assert "<call abcDEF123>" in render(STRICT, kept) and "<result abcDEF123>" in render(STRICT, kept)


def test_calls_and_results_without_ids_find_each_other() -> None:
    shown = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.type }} {{ c.id }}]{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }}={{ m.content }}){% endif %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": "{}"}}, {"id": None, "function": {"name": "g"}}]
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    turn = [{"role": "assistant", "tool_calls": calls}, *results]
    first = "[function call00000][function call00001](call00000=1)(call00001=2)"
    assert render(shown, [*say("user q"), *turn]) == first
    assert render(shown, [*say("user q"), *turn, *turn]).startswith(first + "[function call00002]")
    mixed = [
        {"role": "assistant", "tool_calls": [{"id": "a", **calls[0]}, {**calls[1], "id": "b"}]},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "?"},
    ]
    assert render(shown, mixed) == "[function a][function b](b=2)(a=1)(=?)"


def test_many_calls_and_results_are_linked_in_seconds() -> None:
    """A search through 30,000 open calls for each result would take ten times as long as is allowed here."""
    count = 30_000
    messages = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * count},
        *[{"role": "tool", "content": "r"}] * count,
    ]
    read = [read_message(message, index) for index, message in enumerate(messages)]
    started_s = time.process_time()
    arranged = arrange(read, Traits(lambda messages: None, names_developer=False))
    assert time.process_time() - started_s < 3
    assert [m["tool_call_id"] for m in arranged[1:]] == [call["id"] for call in arranged[0]["tool_calls"]]


def test_the_older_spelling_of_calls() -> None:
    messages = [
        *say("user q"),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "r"},
    ]
    assert render(CHATML, messages) == '<user>q<assistant>[f {"a": 1}]<tool>r'


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("r", "r"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", "b"], "a\nb"),
        ({"temp": 5, "unit": "°"}, '{"temp": 5, "unit": "°"}'),
        ({"type": "text", "text": "t"}, '{"type": "text", "text": "t"}'),
        ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]'),
        ([1, 2], "[1, 2]"),
        (5, "5"),
        (False, "false"),
    ],
)
def test_results_of_tools_in_every_form(content: Any, shown: str) -> None:
    messages = [{"role": "tool", "tool_call_id": "x", "content": content}]
    assert render(CHATML, messages) == f"<tool>{shown}"


def test_results_that_are_no_content() -> None:
    for content in ({"x": object()}, [{"type": "image_url", "image_url": {"url": "x"}}]):
        with pytest.raises(UserError) as caught:
            read_message({"role": "tool", "content": content}, 0)
        assert caught.value.param == "messages"


def test_names_and_reasoning_reach_the_template() -> None:
    source = "{% for m in messages %}{{ m.name }}:{{ m.reasoning }}{{ m.reasoning_content }};{% endfor %}"
    messages = [{"role": "user", "name": "Ann", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]
    assert render(source, messages) == "Ann:;:rr;"
    assert render(source, [{**messages[0], "name": None}, {"role": "assistant", "content": "a", "reasoning": "r"}]) == ":;:rr;"


def test_the_default_form_is_the_plain_one() -> None:
    assert Traits(lambda messages: None, names_developer=True).call_form == CallForm()
    assert CallForm() == (False, "", False)


# --- tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "given",
    [
        WEATHER,
        {"function": WEATHER["function"]},
        WEATHER["function"],
        {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA},
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": None}},
    ],
)
def test_tools_in_every_form_are_one(given: Any) -> None:
    assert read_tools([given]) == [WEATHER]
    assert render("{{ tools | tojson }}", say("user q"), tools=[given]) == json.dumps([WEATHER])


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    assert read_tools([{"type": "function", "function": {"name": "now"}}]) == [
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    ]


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_tools(nothing: Any) -> None:
    assert read_tools(nothing) is None


@pytest.mark.parametrize(
    "tool",
    ["f", {}, {"a": 1}, {"type": "web_search"}, {"function": "f"}, {"function": {}}, {"function": {"name": ""}}, {"name": 5}],
)
def test_tools_that_are_wrong(tool: Any) -> None:
    with pytest.raises(UserError, match=r"tools\[1\]") as caught:
        read_tools([WEATHER, tool])
    assert caught.value.param == "tools"


def test_control_tokens_in_tools_and_documents_are_text() -> None:
    template = ChatTemplate(
        "{{ tools | tojson }}{{ documents[0].text }}<end>", quote=lambda text: text.replace("<end>", "<e|nd>")
    )
    tool = {"name": "f", "description": "<end>", "parameters": {"properties": {"<end>": {}}}}
    rendered = template.render(say("user q"), tools=[tool], documents=[{"text": "<end>"}])
    assert rendered.count("<e|nd>") == 3 and rendered.count("<end>") == 1


def test_tools_choose_the_models_template_for_tools() -> None:
    template = ChatTemplate("plain", tool_source="{{ tools | length }} tools")
    assert template.render(say("user q")) == template.render(say("user q"), tools=[]) == "plain"
    assert template.render(say("user q"), tools=[WEATHER]) == "1 tools"


def test_a_requests_template_arranges_in_its_own_process() -> None:
    template = ChatTemplate(DROPS_SYSTEM, from_request=True)
    assert template.render(say("system A", "developer B", "user q"), tools=[WEATHER]) == "<sys>A\n\nB<user>q"
