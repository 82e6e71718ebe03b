"""Wrong input on every route that takes a body: 400 with the standard error, a live engine, and an untouched neighbour.

The rows follow published advisories of such servers (empty prompts, ids outside the vocabulary, unbounded counts, hostile
salts, client templates, huge integers). A greedy neighbour runs all the while; its tokens must equal a run alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.source import locate
from tests.e2e.error_shapes import standard_error

V = config_from_files(locate("smollm2-135m"), {}).vocab_size
INT_EDGES = [-(2**63) - 1, 2**63, 1e309, 1.5, True, "7", [], {}]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
NOUL: dict[str, Any] = {"type": "noul"}
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "It is."}
COMPLETION = {"prompt": "Hi", "max_tokens": 2}
GENERATE = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

# field -> values that no generating route may accept
SAMPLING: dict[str, list[Any]] = {
    "n": [0, -1, 16385, 10**9, *INT_EDGES],
    "temperature": [-0.1, 2.1, "hot", True],
    "top_p": [0, -1, 1.1, "x"],
    "top_k": [-2, 2**31, 1.5, "x", True],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1, "x"],
    "repetition_penalty": [0, -1],
    "max_tokens": [0, -1, 10**6, *INT_EDGES],
    "min_tokens": [-1, 10**6, 2**63, 1.5, True],
    "seed": [2**63, -(2**63) - 1, 1.5, "x"],
    "stop": [["a"] * 5, [""], [1], {"a": 1}],
    "stop_token_ids": [[V], [-1], [2**31], [2**63], ["a"], 5],
    "allowed_token_ids": [[], [V], [-1], [2**31], ["a"]],
    "logit_bias": [{str(V): 1}, {"-1": 5}, {"99999999": 5}, {"x": 1}, {"1": "y"}],
    "bad_words": [[""], ["w"] * 129, ["word " * 1100], [5]],
    "prompt_logprobs": [-2, 21, 2**32 + 1, V + 1],
    "logprob_token_ids": [list(range(129)), [V], [-1]],
    "cache_salt": ["", "a/b", "a\\b", "a@b", "a\x00b", "x" * 129, "x" * 10_000, 5],
    "truncate_prompt_tokens": [-2, 10**6, 2**63, 1.5],
    "priority": [2**63, 1.5, "x"],
    "prompt_embeds": ["AAAA"],
    "use_beam_search": [1, "yes"],
    "length_penalty": [2, "x"],
    "structured_outputs": [{"json": []}],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "stream_options": [{"include_usage": True}],
}
PER_ROUTE: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {
        "prompt": [
            "",
            [],
            [[]],
            [""],
            [V],
            [-1],
            [2**31 - 1],
            [[1, 2], [3, 10**12]],
            [1, "a"],
            None,
            5,
            {"a": 1},
            [2**63],
            [[1]] * 1025,
        ],
        "logprobs": [-2, 21, V + 1, 2**32 + 1],
        "suffix": ["tail"],
    },
    "/v1/chat/completions": {
        "messages": [[], None, "hi", [{"content": "x"}], [{"role": "user", "content": 5}], [5]],
        "top_logprobs": [1, -2, 21, 2**32 + 1],
        "chat_template": ["{{ messages }}", "{% for i in range(10**9) %}x{% endfor %}"],
        "chat_template_kwargs": [
            {name: 1} for name in ("tokenize", "chat_template", "return_tensors", "conversation", "messages", "tools")
        ],
        "max_completion_tokens": [0, -1, 10**6],
        "tools": [[], [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]],
        "response_format": [{"type": "json_schema"}, {"type": "nonsense"}],
    },
    "/v1/chat/completions/batch": {
        "messages": [[], CHAT["messages"], [[]], [CHAT["messages"]] * 1025, [CHAT["messages"], [{"role": "user", "content": 5}]]],
        "n": [2],
        "stream": [True],
    },
    "/v1/responses": {
        "input": [[], "", None, 5, "x" * 1_000_000, [{}], [5], [{"type": "computer_call"}], [{"role": "user", "content": 5}]],
        "max_output_tokens": [0, -1, 10**6, *INT_EDGES],
        "top_logprobs": [1, -1, 2**63],
        "previous_response_id": [5, ["x"]],
        "tools": [[{"type": "web_search"}], [{"type": "function", "name": "f", "parameters": {"type": "nonsense"}}]],
        "text": [{"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}, {"format": 5}],
        "metadata": [{"k": "v" * 513}, {str(i): "" for i in range(17)}],
        "chat_template": ["{{ input }}"],
        **{
            field: SAMPLING[field] for field in ("temperature", "top_k", "seed", "stop", "logit_bias", "cache_salt", "min_tokens")
        },
    },
    "/v1/messages": {
        "messages": [[], None, "hi", [{"content": "x"}], [{"role": "user", "content": [{"type": "image"}]}], [5]],
        "max_tokens": [None, 0, -1, *INT_EDGES],
        "temperature": [-0.1, 2.1, "hot", True],
        "top_k": [-2, 2**31, 1.5, "x", True],
        "stop_sequences": [["a"] * 5, [""], [1], {"a": 1}],
        "cache_salt": ["", "a/b", "x" * 129, 5],
        "tools": [[{"name": "f"}], [{"type": "bash_20250124", "name": "bash"}]],
        "thinking": [{"type": "enabled", "budget_tokens": edge} for edge in INT_EDGES],
        "output_config": [{"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}],
        "chat_template": ["{% for i in range(10**9) %}x{% endfor %}"],
        "logit_bias": [{"1": 1}],
    },
    "/v1/messages/count_tokens": {"messages": [[], "x", 5], "model": [None, 5], "chat_template": ["{{ messages }}"]},
    "/v1/systemone": {
        "questions": [
            {},
            [],
            None,
            {"": NOUL},
            {"q": {"type": "rank"}},
            {"q": NOUL | {"n": 1}},
            {"q": {"type": "choice", "criteria": {str(i): None for i in range(256)}}},
            {"q": {"type": "score", "criteria": ["a", "a"]}},
            {str(i): NOUL for i in range(65)},
        ],
        "state": ["x" * 1_000_000],
        "images": [["data:image/png;base64,AAAA"]],
        "min_label_mass": [-1, 2, "x"],
        "priority": [1, *INT_EDGES],
        "cache_salt": ["", "a/b", "x" * 129, 5],
        "chat_template_kwargs": [{"tokenize": 1}, {"enable_thinking": True}],
    },
    "/v1/decisions": {
        "questions": [[], {}, None, [PREDICATE | {"name": None}], [PREDICATE | {"x": 1}], [PREDICATE] * 65],
        "input": ["x" * 1_000_000, [], 5, [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]],
        "unknown": [1],
    },
    "/tokenize": {"prompt": [None, 5, ["a"]], "messages": [[], "x", 5]},
    "/detokenize": {"tokens": [[-1], [2**63], [2**64], ["a"], "abc", None, [1.5], [V + 10**6]]},
}
BODIES: dict[str, dict[str, Any]] = {
    **GENERATE,
    "/v1/chat/completions/batch": CHAT | {"messages": [CHAT["messages"]] * 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "smollm2-135m"} | CHAT,
    "/v1/messages/count_tokens": {"model": "smollm2-135m", "messages": CHAT["messages"]},
    "/v1/systemone": {"state": "Hi", "questions": {"q": NOUL}},
    "/v1/decisions": {"model": "", "input": "Hi", "questions": [PREDICATE]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}


def cases() -> Iterator[tuple[str, str, Any]]:
    for route in BODIES:
        fields = (SAMPLING if route in GENERATE else {}) | PER_ROUTE[route]
        for field, values in fields.items():
            for value in values:
                yield route, field, value


def test_the_matrix_covers_every_route_with_a_body(demo_server: Any) -> None:
    paths = httpx.get(f"{demo_server.url}/openapi.json").json()["paths"]
    with_body = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert with_body == set(BODIES)


@pytest.mark.parametrize("route", list(BODIES))
def test_unusable_bodies(demo_server: Any, route: str) -> None:
    url = f"{demo_server.url}{route}"
    for content, media_type in [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b'{"a": NaN}', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": "Hi"}', "text/plain"),
    ]:
        answer = httpx.post(url, content=content, headers={"content-type": media_type})
        check_error(answer, f"{route} {content[:20]!r}")


def test_wrong_fields_are_refused_and_the_neighbour_does_not_notice(demo_server: Any) -> None:
    neighbour = {
        "prompt": "Tell me a story about a fox.",
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": "n",
    }
    url = f"{demo_server.url}/v1/completions"
    alone = httpx.post(url, json=neighbour, timeout=120).json()["choices"][0]["text"]
    together: list[str] = []
    running = threading.Thread(
        target=lambda: together.append(httpx.post(url, json=neighbour, timeout=240).json()["choices"][0]["text"])
    )
    running.start()
    wrong = []
    with httpx.Client(timeout=60) as client:
        for route, field, value in cases():
            body = BODIES[route] | {field: value}
            if field == "messages" and "model" not in body or field == "prompt" and value is None:
                body = {field: value}
            answer = client.post(f"{demo_server.url}{route}", content=dumps(body), headers={"content-type": "application/json"})
            wrong += complaints(answer, f"{route} {field}={str(value)[:60]}")
    running.join()
    assert not wrong, "\n".join(wrong)
    assert together == [alone]
    assert httpx.get(f"{demo_server.url}/health").status_code == 200


def test_the_largest_ids_are_accepted(demo_server: Any) -> None:
    good = {"prompt": [1, V - 1], "max_tokens": 1, "stop_token_ids": [V - 1], "logit_bias": {str(V - 1): -1}, "min_tokens": 1}
    assert httpx.post(f"{demo_server.url}/v1/completions", json=good, timeout=60).status_code == 200


def test_many_ids_are_served(demo_server: Any) -> None:
    for extra in (
        {"allowed_token_ids": list(range(2000))},
        {"logit_bias": {str(i): 1 for i in range(1500)}},
        {"stop_token_ids": list(range(200))},
    ):
        answer = httpx.post(f"{demo_server.url}/v1/completions", json=COMPLETION | extra, timeout=60)
        assert answer.status_code == 200, answer.text


def test_streams_refuse_before_they_start(demo_server: Any) -> None:
    answer = httpx.post(f"{demo_server.url}/v1/completions", json=COMPLETION | {"stream": True, "temperature": 9})
    check_error(answer, "stream")


@pytest.fixture(scope="module")
def short_server(start_server: Callable[..., Any]) -> Any:
    return start_server("--max-model-len", "256", "--kv-cache-memory-bytes", "64M").ready()


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param"),
    [(200, 257, "max_tokens"), (254, 256, None), (255, 1, None), (256, 1, ""), (257, 1, "input_tokens"), (200, 100, None)],
)
def test_max_tokens_is_an_upper_bound(short_server: Any, prompt_tokens: int, max_tokens: int, param: str | None) -> None:
    """max_tokens never reserves room: the prompt and one token must fit. `param` is None where the request is served."""
    body = {"prompt": [5] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx.post(f"{short_server.url}/v1/completions", json=body, timeout=60)
    if param is None:
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == min(max_tokens, 256 - prompt_tokens)
    else:
        check_error(answer, str(body))
        assert param in (answer.json()["error"]["param"] or "")


def dumps(body: dict[str, Any]) -> bytes:
    """JSON as a hostile client writes it: infinities as overflowing numbers."""
    return json.dumps(body).replace("Infinity", "1e309").encode()


def complaints(answer: httpx.Response, what: str) -> list[str]:
    if answer.status_code != 400:
        return [f"{what}: {answer.status_code} {answer.text[:160]}"]
    if standard_error(answer) is None:
        return [f"{what}: not the standard error: {answer.text[:160]}"]
    if "Traceback" in answer.text or "0x" in answer.text or "/site-packages/" in answer.text:
        return [f"{what}: internals in the message: {answer.text[:300]}"]
    return []


def check_error(answer: httpx.Response, what: str) -> None:
    assert not complaints(answer, what)
