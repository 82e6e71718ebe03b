"""Chat templates: what reaches the model, what messages may look like, and what a template may not do."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from halfbyte.engine.tokenizer import Tokenizer, tokenizer_from_folder
from halfbyte.entrypoints import chat_template
from halfbyte.entrypoints.chat_template import RESERVED_VARIABLES, ChatTemplate, read_template
from halfbyte.errors import UserError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS_ONLY = "{% for m in messages %}[{{ m.role }}:{% for p in m.content %}({{ p.text }}){% endfor %}]{% endfor %}"
EITHER = (
    "{%- for message in messages -%}{{ message['role'] }}:"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for item in message['content'] -%}{{ '(' + item['text'] + ')' }}{%- endfor -%}{%- endif -%};{%- endfor -%}"
)
MACRO = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}<{{ p.text }}>{% endfor %}"
    "{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)
VARIABLE = (
    "{% for m in messages %}{% set c = m['content'] %}{% for p in c if p.type == 'text' %}<{{ p.text }}>{% endfor %}{% endfor %}"
)
TOOLS = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endif %};{% endfor %}"
)
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **kwargs)


def refused(source: str, messages: Any = USER, *, from_request: bool = False, **kwargs: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        ChatTemplate(source, from_request=from_request).render(messages, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value


# --- rendering


def test_a_conversation() -> None:
    messages = [{"role": "developer", "content": "be brief"}, *USER]
    assert render(CHATML, messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, add_generation_prompt=False).endswith("hi<|im_end|>\n")


def test_blocks_are_trimmed_as_models_expect() -> None:
    assert render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n") == "hi\n"


def test_special_tokens_tools_and_documents_are_variables() -> None:
    source = "{{ bos_token }}{{ tools is none }}{{ documents }}{{ unk_token }}{{ eos_token }}"
    assert render(source) == "<s>TrueNone</s>"
    assert render("{{ tools | length }}{{ documents[0].t }}", tools=[{"name": "f"}], documents=[{"t": "x"}]) == "1x"
    assert ChatTemplate.add_special_tokens is False


def test_json_is_written_as_models_were_trained_on_it() -> None:
    assert render("{{ messages[0].content | tojson }}", [{"role": "user", "content": "<é'&漢>"}]) == '"<é\'&漢>"'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=true) }}") == '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'


def test_extras_that_templates_use() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}") == "1"


def test_variables_of_the_request() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quiet{% else %}loud{% endif %}"
    assert render(source) == "loud"
    assert render(source, chat_template_kwargs={"enable_thinking": False, "unknown": 1}) == "quiet"


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_reserved_variables(name: str) -> None:
    error = refused(CHATML, chat_template_kwargs={name: 1})
    assert error.param == "chat_template_kwargs" and name in str(error)


def test_the_named_reserved_variables() -> None:
    names = {"tokenize", "chat_template", "return_tensors", "conversation", "messages", "tools", "documents"}
    assert names | {"add_generation_prompt", "continue_final_message"} <= RESERVED_VARIABLES


# --- continuing the last message


@pytest.mark.parametrize("text", ["Sure, ", "Sure,", " x ", "", "a<|im_end|>b\n"])
def test_continuing_the_last_message(text: str) -> None:
    messages = [*USER, {"role": "assistant", "content": text}]
    rendered = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{text}"


def test_continuing_where_the_template_trims() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": " Sure, "}]
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == "[hi][Sure,"


def test_continuing_parts() -> None:
    messages = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS_ONLY, messages, add_generation_prompt=False, continue_final_message=True) == "[user:(hi)][assistant:(a)(b"
    none = [*USER, {"role": "assistant", "content": None}]
    assert render(PARTS_ONLY, none, add_generation_prompt=False, continue_final_message=True) == "[user:(hi)][assistant:("


def test_continuing_and_beginning_exclude_each_other() -> None:
    assert refused(CHATML, continue_final_message=True).param == "continue_final_message"
    hidden = refused("{{ messages | length }}", add_generation_prompt=False, continue_final_message=True)
    assert hidden.param == "continue_final_message"


# --- contents


TWO = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize(
    ("content", "chatml", "parts", "either"),
    [
        ("x", "x", "(x)", "x"),
        (TWO, "a\nb", "(a)(b)", "(a)(b)"),
        (TWO[:1], "a", "(a)", "a"),
        (["a", {"text": "b"}], "a\nb", "(a)(b)", "(a)(b)"),
        ([{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno", "(a)(no)", "(a)(no)"),
        ([], "", "", ""),
        ("", "", "", ""),
        (None, "", "", ""),
    ],
)
def test_forms_of_content(role: str, content: Any, chatml: str, parts: str, either: str) -> None:
    messages = [{"role": role, "content": content}]
    assert render(CHATML, messages, add_generation_prompt=False) == f"<|im_start|>{role}\n{chatml}<|im_end|>\n"
    assert render(PARTS_ONLY, messages) == f"[{role}:{parts}]"
    assert render(EITHER, messages) == f"{role}:{either};"


def test_absent_content() -> None:
    assert render(CHATML, [{"role": "assistant"}], add_generation_prompt=False) == "<|im_start|>assistant\n<|im_end|>\n"


def test_content_through_macros_and_variables() -> None:
    two = [{"role": "user", "content": TWO}]
    assert render(MACRO, two) == "<a><b>" and render(MACRO) == "hi"
    assert render(VARIABLE, two) == "<a><b>" and render(VARIABLE) == "<hi>"


def test_a_loop_over_something_else_is_no_loop_over_content() -> None:
    source = "{% for m in messages %}{% for w in m.content.split('/') %}{{ w }},{% endfor %}{% endfor %}"
    assert render(source, [{"role": "user", "content": "a/b"}]) == "a,b,"


@pytest.mark.parametrize("content", ["absent", None, "", []])
@pytest.mark.parametrize("arguments", ['{"city": "Prag"}', {"city": "Prag"}])
def test_tool_calls_are_kept_whatever_the_content(content: Any, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    assistant: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if content != "absent":
        assistant["content"] = content
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]}
    rendered = render(TOOLS, [*USER, assistant, result])
    assert rendered == 'user=hi;assistant=[weather {"city": "Prag"}];tool=sunny;'
    assert assistant["tool_calls"] == [call], "what the caller gave is not changed"


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", "{}"), (None, "{}"), ("{broken", '"{broken"'), ("[1]", '"[1]"'), ("[" * 99999, None)]
)
def test_arguments_that_are_no_object(arguments: Any, shown: str | None) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    rendered = render(TOOLS, [{"role": "assistant", "tool_calls": [call]}])
    assert shown is None or rendered == f"assistant=[f {shown}];"


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls(calls: Any) -> None:
    assert render("{{ 'tool_calls' in messages[0] }}", [{"role": "assistant", "content": "x", "tool_calls": calls}]) == "False"


def test_reasoning_has_both_of_its_names() -> None:
    source = "{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}"
    for name in ("reasoning", "reasoning_content"):
        assert render(source, [{"role": "assistant", "content": "x", name: "r"}]) == "rr"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "assistant", "tool_calls": ["x"]}],
    ],
)
def test_messages_that_are_wrong(messages: Any) -> None:
    assert refused(CHATML, messages).param == "messages"


# --- what templates do wrong


def test_the_templates_own_words_reach_the_client() -> None:
    error = refused("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in str(error) and error.param == "messages"


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{{ messages[5].content }}", "UndefinedError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "chat template failed"),
        ("{{ range(10**9) | list }}", "range"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'role': 'x'}) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_errors_of_templates(source: str, part: str) -> None:
    assert part in str(refused(source))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('{0.__class__}' | attr('format'))('x') }}",
        "{{ '{0.__class__}'.format('x') }}",
        "{% set f = '{0.__class__}'.format %}{{ f('x') }}",
        "{{ messages[0] | attr('__class__') }}",
        "{{ 'x'['__class__'] }}",
    ],
)
def test_known_ways_out_of_the_sandbox_lead_nowhere(source: str) -> None:
    try:
        assert "class" not in render(source)
    except UserError as error:
        assert "unsafe" in str(error)


def test_errors_say_nothing_about_this_machine() -> None:
    message = str(refused("{{ raise_exception('see /usr/lib/x.py, File \"/a/b.py\", line 3, <f at 0x7f00aabbccdd>, and/or') }}"))
    assert "/usr" not in message and "0x7f" not in message and "line 3" not in message and "and/or" in message
    assert len(str(refused("{{ raise_exception('x' * 100000) }}"))) < 1100


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nosuch %}", "{{ x | nosuch }}", "{{ " + "(" * 5000])
def test_a_template_that_is_no_template(source: str) -> None:
    with pytest.raises(UserError) as caught:
        ChatTemplate(source)
    assert caught.value.param == "chat_template"


LOOPS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "blocks": "{% block a %}{% for i in range(9) %}{{ self.a() if messages|length }}{% endfor %}{% endblock %}",
}


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_runaway_loops_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.05)
    started_s = time.monotonic()
    refused(source)
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ 2 ** (10 ** 10) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_growth_is_stopped(source: str) -> None:
    error = refused(source)
    assert error.param == "chat_template" and "stopped" in str(error)


# --- templates of requests


def test_a_requests_template_is_rendered_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[dict[str, Any]] = []
    original = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        spawned.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen)
    template = ChatTemplate(CHATML, from_request=True)
    messages = [{"role": "user", "content": "漢👋\ud800\r\n"}]
    assert template.render(messages) == "<|im_start|>user\n漢👋\ud800\r\n<|im_end|>\n<|im_start|>assistant\n"
    assert len(spawned) == 1 and spawned[0]["env"] == {}
    assert render(CHATML, messages) == template.render(messages)


def test_errors_of_a_requests_template() -> None:
    error = refused("{{ raise_exception('no\nway') }}", from_request=True)
    assert "no way" in str(error) and error.param == "messages"
    assert refused("{% for %}", from_request=True).param == "chat_template"
    assert refused("x" * 300_000, from_request=True).param == "chat_template"
    assert refused("x", [{"role": "user", "content": "x", "extra": object()}], from_request=True).param == "messages"
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert refused("x", chat_template_kwargs={"deep": deep}, from_request=True).param == "messages"


def test_a_requests_template_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is killed from outside; nothing in there has to cooperate."""
    monkeypatch.setattr(chat_template, "REQUEST_TEMPLATE_LIMIT_S", 0.6)
    children: list[Any] = []
    original = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        children.append(original(*args, **kwargs))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    error = refused(LOOPS["nested loops"], from_request=True)
    assert "takes longer than 0.6 s" in str(error)
    assert children[0].returncode == -signal.SIGKILL


def test_a_requests_template_that_wants_all_memory() -> None:
    for source in ("{{ messages[0].content | center(10**11) }}", "{{ '%099999999999d' | format(1) }}"):
        assert "emory" in str(refused(source, from_request=True))


# --- where a template comes from


def tokenizer(template: str | None) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, bos_token="<s>", chat_template=template)


def test_the_models_template_or_the_given_one() -> None:
    assert ChatTemplate.for_tokenizer(tokenizer("{{ bos_token }}model")).render(USER) == "<s>model"
    assert ChatTemplate.for_tokenizer(tokenizer("model"), "{{ bos_token }}given").render(USER) == "<s>given"


@pytest.mark.parametrize("place", ["config", "file"])
def test_a_models_template_for_tools_is_used_when_there_are_tools(place: str, tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    if place == "config":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    else:
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named[1]["template"])
    loaded = tokenizer_from_folder(tmp_path)
    template = ChatTemplate.for_tokenizer(loaded)
    assert template.render(USER) == "plain" and template.render(USER, tools=[{"name": "f"}]) == "f"
    assert ChatTemplate.for_tokenizer(loaded, "given").render(USER, tools=[{"name": "f"}]) == "given"


def test_no_template_at_all() -> None:
    with pytest.raises(UserError, match="--chat-template"):
        ChatTemplate.for_tokenizer(tokenizer(None))


def test_one_bos() -> None:
    """The template writes it, so the encoder must not."""
    model = tokenizer("{{ bos_token }}a")
    text = ChatTemplate.for_tokenizer(model).render(USER)
    assert model.encode(text, add_special_tokens=ChatTemplate.add_special_tokens) == [1, 0]


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ChatTemplate("{{ 'once' }}")
    assert ChatTemplate("{{ 'once' }}")._compiled is first._compiled


def test_reading_a_template(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_template(str(path)) == "{{ 'é' }}"
    assert read_template("{{ x }}") == "{{ x }}"
    (tmp_path / "bad").write_bytes(b"\xff")
    for name in ("none.jinja", "bad", "."):
        with pytest.raises(UserError, match="--chat-template") as caught:
            read_template(str(tmp_path / name))
        assert caught.value.param == "chat_template"
