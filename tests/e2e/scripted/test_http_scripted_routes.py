"""Completions and chat as the official client and plain HTTP see them, over a scripted model: shapes, streams, limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

Server = Any
CHAT = [{"role": "user", "content": "Hi"}]
CHAT_TEXT = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"


def completion_text(events: list[str], index: int = 0) -> str:
    chunks = [json.loads(e) for e in events if e != "[DONE]"]
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def choices_of(events: list[str]) -> list[dict[str, Any]]:
    return [c for e in events if e != "[DONE]" for c in json.loads(e)["choices"]]


# --- whole answers -----------------------------------------------------------------------------------------------------


def test_completion_object(shared: Server) -> None:
    prompt = shared.say("The capital of France is", " Paris.")
    answer = shared.post(
        "/v1/completions", {"model": "scripted", "prompt": prompt, "max_tokens": 30, "cache_salt": "object"}
    ).json()
    assert answer.pop("id").startswith("cmpl-") and answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("halfbyte-")
    assert answer == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "text": " Paris.",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 25,
            "total_tokens": 33,
            "completion_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
    }


def test_chat_object(shared: Server) -> None:
    messages = shared.say_chat("q1", "Hello!")
    answer = shared.post("/v1/chat/completions", {"messages": messages}).json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion" and answer["model"] == "scripted"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello!",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }
    ]
    for field in ("service_tier", "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "metrics"):
        assert answer[field] is None


def test_openai_client_reads_both(shared: Server) -> None:
    client = shared.client()
    whole = client.chat.completions.create(model="scripted", messages=CHAT, max_completion_tokens=5, temperature=0)
    streamed = client.chat.completions.create(model="alias", messages=CHAT, max_tokens=5, temperature=0, stream=True)
    chunks = list(streamed)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.id for c in client.models.list()] == ["scripted", "alias"]
    text = client.completions.create(model="scripted", prompt="x", max_tokens=3).choices[0].text
    assert len(text) == 3


def test_prompt_forms_and_choice_order(shared: Server) -> None:
    """Choice i of prompt p is at p * n + i, whatever the form of the prompts."""
    ids = [shared.tokens("aa"), shared.tokens("bb")]
    body = {"max_tokens": 4, "n": 2, "seed": 3}
    texts = [c["text"] for c in shared.post("/v1/completions", body | {"prompt": ["aa", "bb"]}).json()["choices"]]
    from_ids = shared.post("/v1/completions", body | {"prompt": ids}).json()
    assert [c["text"] for c in from_ids["choices"]] == texts
    assert [c["index"] for c in from_ids["choices"]] == [0, 1, 2, 3] and len(set(texts)) == 4
    assert from_ids["usage"]["prompt_tokens"] == 6 and from_ids["usage"]["completion_tokens"] == 16
    for prompt, n_texts in ((ids[1], texts[2:]), ("bb", texts[2:])):
        alone = shared.post("/v1/completions", body | {"prompt": prompt}).json()["choices"]
        assert [c["text"] for c in alone] == n_texts
    events = shared.events("/v1/completions", body | {"prompt": ids})
    assert [completion_text(events, i) for i in range(4)] == texts
    finishes = [c["index"] for c in choices_of(events) if c["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2, 3]


def test_cached_tokens_are_told_also_when_zero(shared: Server, start_scripted: Callable[..., Server]) -> None:
    body = {"prompt": "b" * 40, "max_tokens": 1, "cache_salt": "cached"}
    counts = [shared.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in "ab"]
    assert counts == [0, 32]
    for expected, salt in ((32, "cached"), (0, "other")):
        options = {"stream_options": {"include_usage": True}, "cache_salt": salt}
        last = json.loads(shared.events("/v1/completions", body | options)[-2])
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    silent = start_scripted()
    assert silent.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"] is None


# --- streams -----------------------------------------------------------------------------------------------------------


def test_chat_stream_events(shared: Server) -> None:
    messages = shared.say_chat("q2", "Héy")
    events = shared.events("/v1/chat/completions", {"messages": messages})
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    assert all(c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Héy"
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert chunks[-1]["system_fingerprint"].startswith("halfbyte-")
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_chat_stream_of_several_choices(shared: Server) -> None:
    body = {"messages": CHAT, "n": 3, "seed": 1, "max_tokens": 6}
    whole = shared.post("/v1/chat/completions", body).json()
    choices = choices_of(shared.events("/v1/chat/completions", body))
    for index in range(3):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "length"
        assert "".join(c["delta"].get("content", "") for c in own) == whole["choices"][index]["message"]["content"]


def test_completion_finish_chunk_is_empty(shared: Server) -> None:
    choices = choices_of(shared.events("/v1/completions", {"prompt": "x", "max_tokens": 3}))
    assert choices[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert all(c["finish_reason"] is None and c["text"] for c in choices[:-1])


def test_usage_in_streams(shared: Server, start_scripted: Callable[..., Server]) -> None:
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 3}
    events = shared.events("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    usage = json.loads(events[-2])
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3 and "system_fingerprint" in usage
    assert all("usage" not in json.loads(e) for e in events[:-2])
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    always = [
        json.loads(e)["usage"]["completion_tokens"] for e in shared.events("/v1/completions", {"prompt": "x"} | options)[:-1]
    ]
    assert always == sorted(always) and always[0] == 1 and always[-1] == 16
    forced = start_scripted(enable_force_include_usage=True)
    assert all("usage" in json.loads(e) for e in forced.events("/v1/chat/completions", body)[:-1])


def test_stop_strings(shared: Server) -> None:
    prompt = shared.say("stop here", "one two three four")
    for include, text in ((False, "one two "), (True, "one two three")):
        body = {"prompt": prompt, "max_tokens": 30, "stop": ["three"], "include_stop_str_in_output": include}
        whole = shared.post("/v1/completions", body).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (text, "stop", "three")
        choices = choices_of(shared.events("/v1/completions", body))
        assert "".join(c["text"] for c in choices) == text
        assert choices[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": "three"}
    by_id = shared.post("/v1/completions", {"prompt": prompt, "stop_token_ids": shared.tokens("w", False)}).json()["choices"][0]
    assert by_id["finish_reason"] == "stop" and by_id["stop_reason"] == shared.tokens("w", False)[0]


def test_ignore_eos_and_min_tokens(shared: Server) -> None:
    prompt = shared.say("short", "a")
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12}
    assert shared.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 2
    assert shared.post("/v1/completions", body | {"ignore_eos": True}).json()["usage"]["completion_tokens"] == 12
    assert shared.post("/v1/completions", body | {"min_tokens": 5}).json()["usage"]["completion_tokens"] == 6


# --- echo and logprobs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", "Grüße", "two <|end|> marks"])
def test_echo_with_logprobs(shared: Server, prompt: str, max_tokens: int) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    answer = shared.post("/v1/completions", body).json()
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    num_prompt = len(shared.tokens(prompt))
    assert len(logprobs["tokens"]) == num_prompt + max_tokens == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    assert "".join(logprobs["tokens"]) == choice["text"] and choice["text"].startswith(prompt)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert set(logprobs["token_logprobs"][1:]) == {-0.5}
    offsets = [len("".join(logprobs["tokens"][:i])) for i in range(num_prompt + max_tokens)]
    assert logprobs["text_offset"] == offsets
    assert choice["finish_reason"] == "length"
    events = shared.events("/v1/completions", body)
    assert completion_text(events) == choice["text"]
    streamed = [c["logprobs"] for c in choices_of(events) if c["logprobs"]]
    for field in logprobs:
        assert [x for part in streamed for x in part[field]] == logprobs[field]


def test_echo_without_logprobs(shared: Server) -> None:
    assert shared.post("/v1/completions", {"prompt": "abc", "echo": True, "max_tokens": 0}).json()["choices"][0]["text"] == "abc"
    ids = shared.tokens("abc", False)
    whole = shared.post("/v1/completions", {"prompt": ids, "echo": True, "max_tokens": 2, "temperature": 0}).json()
    assert whole["choices"][0]["text"].startswith("abc") and len(whole["choices"][0]["text"]) == 5
    messages = [*CHAT, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "max_tokens": 2, "temperature": 0}
    chat = shared.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert chat["role"] == "assistant" and chat["content"].startswith("Well, ") and len(chat["content"]) == 8


def test_completion_logprobs(shared: Server) -> None:
    prompt = shared.say("lp", "ab")
    logprobs = shared.post("/v1/completions", {"prompt": prompt, "logprobs": 3}).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["a", "b"] and logprobs["text_offset"][:2] == [0, 1]
    assert logprobs["top_logprobs"][0]["a"] == -0.5 and len(logprobs["top_logprobs"][0]) == 3
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0
    named = shared.post("/v1/completions", {"prompt": prompt, "logprobs": 0, "return_tokens_as_token_ids": True}).json()
    token = shared.tokens("a", False)[0]
    assert named["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{token}"
    assert named["choices"][0]["logprobs"]["top_logprobs"][0] == {f"token_id:{token}": -0.5}


def test_chat_logprobs(shared: Server) -> None:
    messages = shared.say_chat("q3", "é")
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2}
    content = shared.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for item in content[:2] for b in item["bytes"]).decode() == "é"
    assert [len(item["top_logprobs"]) for item in content] == [2] * len(content)
    assert content[0]["logprob"] == -0.5 and content[0]["top_logprobs"][1]["logprob"] == -9999.0
    streamed = [c["logprobs"]["content"] for c in choices_of(shared.events("/v1/chat/completions", body)) if c["logprobs"]]
    assert [item for part in streamed for item in part] == content
    bare = shared.post("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "max_tokens": 1}).json()
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_prompt_logprobs(shared: Server) -> None:
    ids = shared.tokens("xyz")
    answer = shared.post("/v1/completions", {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1}).json()["choices"][0]
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 4
    assert answer["prompt_logprobs"][1][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": "x"}
    chat = shared.post("/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 0, "max_tokens": 1}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and len(chat["prompt_logprobs"][1]) == 1


def test_token_ids_and_prompt_text(shared: Server) -> None:
    ids = shared.tokens("xyz")
    body: dict[str, Any] = {"prompt": "xyz", "max_tokens": 3, "return_token_ids": True, "temperature": 0}
    whole = shared.post("/v1/completions", body).json()["choices"][0]
    assert whole["prompt_token_ids"] == ids and len(whole["token_ids"]) == 3
    choices = choices_of(shared.events("/v1/completions", body))
    assert choices[0]["prompt_token_ids"] == ids
    assert [t for c in choices for t in c.get("token_ids", [])] == whole["token_ids"]
    body = {"messages": CHAT, "max_tokens": 2, "return_token_ids": True, "return_prompt_text": True}
    chat = shared.post("/v1/chat/completions", body).json()
    assert chat["prompt_text"] == CHAT_TEXT and chat["prompt_token_ids"] == shared.tokens(CHAT_TEXT, False)
    first = json.loads(shared.events("/v1/chat/completions", body)[0])
    assert first["prompt_text"] == CHAT_TEXT and first["prompt_token_ids"] == chat["prompt_token_ids"]


# --- max_tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(60, 30, 4), (60, 64, 4), (63, 1, 1), (60, 65, "max_tokens"), (64, 1, ""), (65, 1, "input_tokens"), (40, None, 16)],
)
def test_max_tokens_is_an_upper_bound(shared: Server, num_prompt: int, max_tokens: int | None, expected: int | str) -> None:
    for stream in (False, True):
        body = {"prompt": [5] * num_prompt, "max_tokens": max_tokens, "stream": stream}
        answer = shared.post("/v1/completions", body)
        if isinstance(expected, int):
            assert answer.status_code == 200
            if not stream:
                assert answer.json()["usage"]["completion_tokens"] == expected
                assert answer.json()["choices"][0]["finish_reason"] == "length"
        else:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == expected or not expected


def test_chat_max_tokens(shared: Server, start_scripted: Callable[..., Server]) -> None:
    num_prompt = len(shared.tokens(CHAT_TEXT, False))

    def used(server: Server, **fields: Any) -> int:
        count: int = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Ho"}]} | fields).json()[
            "usage"
        ]["completion_tokens"]
        return count

    assert used(shared) == 64 - num_prompt
    assert used(shared, max_tokens=9, max_completion_tokens=4) == 4
    refused = shared.post("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 65}).json()["error"]
    assert refused["param"] == "max_completion_tokens"
    advised = start_scripted(default_sampling={"max_tokens": 7})
    assert used(advised) == 7 and used(advised, max_tokens=9) == 9
    capped = start_scripted(override_generation_config={"max_new_tokens": 6})
    assert used(capped) == 6 and used(capped, max_tokens=9) == 6
    assert capped.post("/v1/completions", {"prompt": "x"}).json()["usage"]["completion_tokens"] == 6


# --- sampling ----------------------------------------------------------------------------------------------------------


def test_sampling_fields_reach_the_engine(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(
        default_sampling={"temperature": 0.2, "top_p": 0.9, "top_k": 40}, override_generation_config={"top_k": 7}
    )
    server.post(
        "/v1/completions", {"prompt": "x", "temperature": None, "top_p": 0.5, "logit_bias": {"5": 200}, "bad_words": ["q"]}
    )
    sampling = server.model.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.2, 0.5, 7)
    assert sampling.logit_bias == {5: 100.0} and sampling.bad_words == ["q"]
    server.post("/v1/chat/completions", {"messages": CHAT, "seed": 9, "priority": -3, "cache_salt": "s", "max_tokens": 2})
    request = server.model.requests[-1]
    assert (request.sampling.seed, request.priority, request.cache_salt) == (9, -3, "s")
    neutral = start_scripted(default_sampling={})
    neutral.post("/v1/completions", {"prompt": "x"})
    assert neutral.model.requests[-1].sampling.temperature == 1.0


def test_seeds_differ_unless_given(shared: Server) -> None:
    def text(**fields: Any) -> str:
        answer: str = shared.post("/v1/completions", {"prompt": "dice", "temperature": 0.8} | fields).json()["choices"][0]["text"]
        return answer

    assert len({text() for _ in range(4)}) > 1
    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text(temperature=0) == text(temperature=0)


def test_request_ids_are_never_internal(shared: Server) -> None:
    for headers in ({"X-Request-Id": "mine"}, {"X-Request-Id": "x" * 129}, {"X-Request-Id": "bad\tvalue"}):
        answer = shared.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers).json()
        name = headers["X-Request-Id"]
        assert (answer["id"] == f"cmpl-{name}") == (name == "mine")
        assert name not in shared.model.requests[-1].request_id
    assert shared.post("/v1/completions", {"prompt": "x", "request_id": "body"}).json()["id"] == "cmpl-body"
    first, second = (shared.post("/v1/completions", {"prompt": "x"}).json()["id"] for _ in "ab")
    assert first != second


# --- templates ---------------------------------------------------------------------------------------------------------


def prompt_of(server: Server, **fields: Any) -> str:
    body = {"messages": CHAT, "max_tokens": 1, "return_prompt_text": True} | fields
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["prompt_text"]
    return text


def test_template_arguments(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(info={"max_model_len": 256}, default_chat_template_kwargs={"tone": "dry"})
    assert "[tone=dry]" in prompt_of(server)
    assert "[tone=kind]" in prompt_of(server, chat_template_kwargs={"tone": "kind"})
    assert "[think=True high]" in prompt_of(server, reasoning_effort="high")
    assert "[think=False none]" in prompt_of(server, reasoning_effort="none")
    assert "[think=True none]" in prompt_of(server, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert "[verbosity=low]" in prompt_of(server, verbosity="low") and "[verbosity" not in prompt_of(server)
    assert not prompt_of(server, add_generation_prompt=False).endswith("assistant\n")
    assert "[doc=d1]" in prompt_of(server, documents=[{"text": "d1"}])


def test_operator_template(start_scripted: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("Q: {{ messages[-1].content }} A:")
    assert prompt_of(start_scripted(chat_template=str(tmp_path / "own.jinja"))) == "Q: Hi A:"
    assert prompt_of(start_scripted(chat_template="<{{ messages[0].content }}>")) == "<Hi>"


def test_own_template_only_when_trusted(shared: Server, start_scripted: Callable[..., Server]) -> None:
    for fields in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}):
        for path in ("/v1/chat/completions", "/tokenize"):
            assert shared.post(path, {"messages": CHAT} | fields).status_code == 400
    trusting = start_scripted(trust_request_chat_template=True)
    assert trusting.post("/v1/chat/completions", {"messages": CHAT, "chat_template": "{{ 1"}).status_code == 400
    assert prompt_of(trusting, chat_template="T {{ messages[0].content }}") == "T Hi"


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_assistant_content_forms(shared: Server, content: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    assert shared.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).status_code == 200


# --- tokenizer routes --------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(shared: Server) -> None:
    answer = shared.post("/tokenize", {"prompt": "Grüße", "return_token_strs": True}).json()
    assert answer["count"] == 8 and answer["max_model_len"] == 64 and answer["tokens"] == shared.tokens("Grüße")
    assert answer["token_strs"][:3] == ["<bos>", "G", "r"]
    assert shared.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["count"] == 1
    assert shared.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "<bos>Grüße"}
    chat = shared.post("/tokenize", {"messages": CHAT}).json()
    assert chat["tokens"] == shared.tokens(CHAT_TEXT, False) and chat["token_strs"] is None


# --- the small routes --------------------------------------------------------------------------------------------------


def test_models(shared: Server) -> None:
    models = shared.get("/v1/models").json()
    assert models["object"] == "list" and [card["id"] for card in models["data"]] == ["scripted", "alias"]
    card = models["data"][0]
    assert card["root"] == "/models/scripted" and card["max_model_len"] == 64 and card["parent"] is None
    assert card["permission"][0]["id"].startswith("modelperm-") and card["permission"][0]["allow_sampling"] is True


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/version", "/v1/models", "/openapi.json", "/docs", "/nowhere"])
def test_head_is_answered_like_get_without_a_body(shared: Server, path: str) -> None:
    get, head = shared.get(path), shared.http.head(path)
    assert head.status_code == get.status_code and head.content == b""
    for name in ("content-type", "content-length"):  # a probe's answer has neither body nor type
        assert head.headers.get(name) == get.headers.get(name)


def test_head_of_what_is_not_read_is_405(shared: Server) -> None:
    assert shared.http.head("/v1/completions").status_code == 405


def test_health_version_metrics(shared: Server) -> None:
    for answer in (shared.get("/health"), shared.get("/ping"), shared.post("/ping", None)):
        assert answer.status_code == 200 and answer.content == b""
    assert set(shared.get("/version").json()) == {"version"}
    assert shared.get("/metrics").headers["content-type"].startswith("text/plain")
    paths = shared.get("/openapi.json").json()["paths"]
    assert "requestBody" in paths["/v1/completions"]["post"] and shared.get("/docs").status_code == 200


def test_http_metrics(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(api_keys=("k",))
    key = {"authorization": "Bearer k"}
    server.post("/v1/completions", {"prompt": "x"}, headers=key)
    server.post("/v1/completions", {"prompt": "x", "n": -1}, headers=key)
    server.post("/v1/completions", {"prompt": "x"})
    for path in ("/health", "/nothing-1", "/nothing-2"):
        server.get(path, headers=key)
    text = server.get("/metrics").text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 2.0' in text
    assert 'http_request_duration_seconds_count{handler="/v1/completions",method="POST"} 2.0' in text
    assert "nothing-1" not in text and 'handler="/health"' not in text and "vllm:num_requests_running" in text


def test_openai_client_sees_typed_errors(shared: Server) -> None:
    client = shared.client()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.param == "model" and "scripted, alias" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model="scripted", prompt="x", temperature=2.1, stream=True)
    assert hot.value.param == "temperature" and hot.value.type == "BadRequestError"
