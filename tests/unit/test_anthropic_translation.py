"""A request of the Messages API as the chat request that means the same, and what is refused on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfbyte.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from halfbyte.entrypoints.anthropic.translation import in_anthropics_terms, to_chat
from halfbyte.entrypoints.anthropic.turns import BILLING_HEADER, num_blocks
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.errors import UserError
from halfbyte.types import Thinking

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def frontend(thinking: Thinking | None = None, parser: str | None = None) -> Frontend:
    answers = SimpleNamespace(thinking=lambda prompt, continues: thinking)
    engine = SimpleNamespace(limits=SimpleNamespace(max_model_len=4096))
    return cast(Frontend, SimpleNamespace(answers=answers, config=SimpleNamespace(reasoning_parser=parser), engine=engine))


def translate(server: Frontend | None = None, **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 5, "messages": [USER]} | fields
    return to_chat(server or frontend(), MessagesRequest.model_validate(body))


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


def use(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **({} if content is None else {"content": content}), **more}


def test_a_conversation_with_tools() -> None:
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": text("Hi", "there")},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                *text("Let me look."),
                use("look", "toolu_1", at="a"),
                use("go", "toolu_2"),
                {"type": "thinking", "thinking": "ah"},
            ],
        },
        {"role": "user", "content": [*text("So?"), result("toolu_1", "1"), result("toolu_2", text("2", "3")), *text("And?")]},
        {"role": "system", "content": "Hurry."},
    ]
    calls = [
        {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"at": "a"}}},
        {"id": "toolu_2", "type": "function", "function": {"name": "go", "arguments": {}}},
    ]
    assert translate(system=[cached], messages=messages).messages == [
        {"role": "system", "content": text("Be brief.")},
        {"role": "user", "content": text("Hi", "there")},
        {"role": "assistant", "content": text("Let me look."), "reasoning": "hm\n\nah", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": text("1"), "name": "look"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": text("2", "3"), "name": "go"},
        {"role": "user", "content": text("So?", "And?")},
        {"role": "system", "content": text("Hurry.")},
    ]


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (result("a"), []),
        (result("a", ""), []),
        (result("a", []), []),
        (result("a", "No file", is_error=True), text("Error: No file")),
        (result("a", "<error>No file</error>", is_error=True), text("<error>No file</error>")),
        (result("a", is_error=True), text("Error")),
        (result("a", "fine", is_error=False), text("fine")),
    ],
)
def test_results(block: dict[str, Any], told: list[dict[str, str]]) -> None:
    assert translate(messages=[{"role": "user", "content": [block]}]).messages == [
        {"role": "tool", "tool_call_id": "a", "content": told}
    ]


def test_turns_of_one_role_are_one_and_the_last_words_of_the_assistant_are_continued() -> None:
    messages = [USER, {"role": "user", "content": "you"}, {"role": "assistant", "content": "I"}]
    chat = translate(messages=messages)
    assert chat.messages == [{"role": "user", "content": text("Hi", "you")}, {"role": "assistant", "content": text("I")}]
    assert chat.continue_final_message is True and translate().continue_final_message is None


def test_the_block_that_only_another_server_reads_is_left_out() -> None:
    system = text(f"{BILLING_HEADER} v=1; h=0f3a;", "You are an agent.")
    assert translate(system=system).messages[0] == {"role": "system", "content": text("You are an agent.")}
    assert translate(system=system[:1]).messages == translate(system="").messages == [{"role": "user", "content": text("Hi")}]


@pytest.mark.parametrize(
    ("choice", "asked", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}, True),
    ],
)
def test_tools_and_choices(choice: Any, asked: Any, parallel: bool | None) -> None:
    chat = translate(
        tools=[TOOL | {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}], tool_choice=choice
    )
    parameters = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": parameters}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == (asked, parallel)
    assert translate(tools=[], tool_choice={"type": "auto"}).tools is None  # as agents send it where they need none


KNOWN, UNKNOWN = Thinking([1], [2], [2]), Thinking([1], [], [])


@pytest.mark.parametrize(
    ("server", "thinking", "kwargs", "effort", "budget"),
    [
        (frontend(KNOWN), {"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}, None, 2048),
        (frontend(UNKNOWN), {"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}, None, None),
        (frontend(), {"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}, None, None),
        (frontend(KNOWN), {"type": "adaptive"}, None, "high", None),
        (frontend(KNOWN), {"type": "disabled"}, {"enable_thinking": False}, "none", None),
        (frontend(KNOWN, "openai_gptoss"), {"type": "disabled"}, {"enable_thinking": False}, "low", None),
    ],
)
def test_thinking(server: Frontend, thinking: Any, kwargs: Any, effort: str | None, budget: int | None) -> None:
    config = {"effort": "high"} if thinking["type"] == "adaptive" else None
    chat = translate(server, thinking=thinking, output_config=config)
    assert (chat.chat_template_kwargs, chat.reasoning_effort, chat.thinking_token_budget) == (kwargs, effort, budget)
    assert chat.include_reasoning is None
    hidden = translate(server, thinking=thinking | {"display": "omitted"}, chat_template_kwargs={"enable_thinking": 7})
    assert hidden.include_reasoning is False and hidden.chat_template_kwargs == {"enable_thinking": 7}


def test_formats_stops_and_plain_fields() -> None:
    asked = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}}
    assert translate(output_config={"format": asked}).response_format == expected
    assert translate(output_format=asked).response_format == expected
    plain = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "priority": 1, "cache_salt": "s", "stream": True}
    chat = translate(**plain, stop_sequences=["a", "b"], service_tier="auto", metadata={"user_id": "u"})
    assert {name: getattr(chat, name) for name in plain} == plain and chat.stop == ["a", "b"] and chat.max_tokens == 5
    assert translate(stop_sequences=[]).stop is None


def thought(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": words}, *text(words)]}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("all", ["a", None, "c"]),
        ({"type": "all"}, ["a", None, "c"]),
        ({"type": "thinking_turns", "value": 1}, [None, None, "c"]),
        ({"type": "thinking_turns", "value": 2}, ["a", None, "c"]),
        (None, [None, None, "c"]),
    ],
)
def test_thoughts_are_cleared_as_asked(keep: Any, kept: list[str | None]) -> None:
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    messages = [USER, thought("a"), USER, {"role": "assistant", "content": "b"}, USER, thought("c"), USER]
    told = translate(messages=messages, context_management={"edits": [edit]}).messages
    assert [m.get("reasoning") for m in told if m["role"] == "assistant"] == kept


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


SERVER_TOOLS = ("web_search_20250305", "bash_20250124", "text_editor_20250728", "computer_20250124", "code_execution_20250825")
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (block(type="image", source={"type": "base64", "data": ""}), "messages", "messages[0].content[0] has type 'image'"),
    (block(type="document", source={"type": "url", "url": "http://x"}), "messages", "has type 'document'"),
    (block(**result("a", [{"type": "image"}])), "messages", "messages[0].content[0].content[0] has type 'image'"),
    (block(**result("")), "messages", "tool_use_id is empty"),
    (block(**result("a", is_error="yes")), "messages", "is_error must be true or false"),
    (block(type="tool_use", id="a", name="b", input={}), "messages", "has type 'tool_use'"),
    (block(type=5), "messages", "must be a block"),
    (block(type="text"), "messages", "text must be a text"),
    ({"messages": [{"role": "user"}]}, "messages", "must be a text or a list of blocks"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages[0] must be an object with the role"),
    ({"messages": [USER, {"role": "assistant", "content": [use("f", "a")]}]}, "messages", "its tool_result must follow"),
    ({"messages": [USER, {"role": "assistant", "content": [{**use("f", "a"), "input": "{}"}]}, USER]}, "messages", "an object"),
    ({"system": [{"type": "image"}]}, "system", "system[0] has type 'image'"),
    *(({"tools": [{"type": kind, "name": "x"}]}, "tools", f"tools[0] is {kind!r}") for kind in SERVER_TOOLS),
    ({"tools": [{"name": "x"}]}, "tools", "needs an input_schema"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools", "defer_loading"),
    ({"tools": [TOOL | {"allowed_callers": ["code_execution_20250825"]}]}, "tools", "allowed_callers"),
    ({"tool_choice": {"type": "required"}}, "tool_choice", "auto, any, tool or none"),
    ({"tool_choice": {"type": ["auto"]}}, "tool_choice", "auto, any, tool or none"),
    ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice", "true or false"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking", "at least 1024"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking", "at least 1024"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10**5000}}, "thinking", "at least 1024 and below"),
    ({"thinking": {"type": "between_tools"}}, "thinking", "enabled, adaptive or disabled"),
    ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking", "display"),
    ({"output_config": {"effort": "none"}}, "output_config", "effort"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config", "json_schema"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config", "task_budget"),
    ({"output_format": {"type": "json_schema"}}, "output_format", "json_schema"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", "clear_tool_uses_20250919"),
    ({"context_management": {"edits": {"type": "x"}}}, "context_management", "a list"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 0}]}}, "context_management", "keep"),
    ({"stop_sequences": list("abcde")}, "stop_sequences", "at most 4"),
    ({"container": "c"}, "container", "not supported"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers", "not supported"),
    ({"speed": "fast"}, "speed", "not supported"),
    ({"stop": ["a"]}, "stop", "called stop_sequences"),
    ({"response_format": {"type": "text"}}, "response_format", "called output_config.format"),
    ({"n": 2}, "n", "no such field"),
    ({"guided_json": {}}, "guided_json", "no such field"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=range(len(REFUSED)))
def test_refused(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        translate(**fields)
    assert refusal.value.param == param and said in str(refusal.value)


def test_what_nobody_knows_passes() -> None:
    translate(unknown=1, user="me", speed="standard", mcp_servers=[], betas=["x"], diagnostics={"previous_message_id": None})


def test_chats_complaints_name_the_fields_of_this_api() -> None:
    with pytest.raises(UserError, match=r"^stop_sequences holds an empty text$") as renamed, in_anthropics_terms():
        raise UserError("stop holds an empty text", param="stop")
    assert renamed.value.param == "stop_sequences"
    with pytest.raises(UserError, match="top_p") as same, in_anthropics_terms():
        raise UserError("top_p must stop", param="top_p")
    assert same.value.param == "top_p"


def test_counting_asks_for_the_same_prompt() -> None:
    body = {"model": "m", "messages": [USER], "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = to_chat(frontend(), CountTokensRequest.model_validate(body | {"max_tokens": 5, "stream": True}))
    asked = translate(**body)
    of_prompt = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
    assert all(getattr(counted, name) == getattr(asked, name) for name in of_prompt)


def test_blocks_are_counted_in_results_too() -> None:
    nested = {"role": "user", "content": [result("a", text("1", "2")), result("b", "3"), *text("4")]}
    assert num_blocks([USER, nested, {"role": "user", "content": 5}]) == 5
