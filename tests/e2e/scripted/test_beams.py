"""Beam search over HTTP: `use_beam_search` on both generation routes, around a script that likes one letter best at each place.

The script gives the token that it likes -0.5 and the next ones -1.5, -2.5, ...: the best beam is the chain of what it likes, and
the second differs from it in one token. What is found with a real model is shown by tests/numerics/test_beam_search.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

EOS = 257
Server = Any

ROUTES = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(enable_prompt_tokens_details=True)


def body(path: str, **changes: Any) -> dict[str, Any]:
    asked = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    return asked | {"max_tokens": 4, "use_beam_search": True, "n": 2, "return_token_ids": True} | changes


def test_beams_of_both_routes(server: Server) -> None:
    for path in ROUTES:
        told = {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 1}
        answer = server.http.post(path, json=body(path, **told))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        prompt = found["prompt_token_ids"] if "prompt_token_ids" in found else found["choices"][0]["prompt_token_ids"]
        best, second = (choice["token_ids"] for choice in found["choices"])
        for place in range(4):
            step = {"prompt": prompt + best[:place], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
            assert server.http.post(ROUTES[0], json=step).json()["choices"][0]["token_ids"] == best[place : place + 1]
        assert len(second) == 4 and second != best
        assert [choice["index"] for choice in found["choices"]] == [0, 1]
        assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 2
        assert (found["usage"]["completion_tokens"], found["usage"]["prompt_tokens"]) == (8, len(prompt))
        sums = []
        for choice in found["choices"]:
            logprobs = choice["logprobs"]
            if path == "/v1/completions":
                sums.append(sum(logprobs["token_logprobs"]))
                assert "".join(logprobs["tokens"]) == choice["text"]
            else:
                sums.append(sum(token["logprob"] for token in logprobs["content"]))
                assert [len(token["top_logprobs"]) for token in logprobs["content"]] == [1] * 4
        assert sums == [-2.0, -3.0]
        assert server.http.post(path, json=body(path, **told)).json()["choices"] == found["choices"]


def test_a_beam_that_ends(server: Server) -> None:
    prompt = server.tokenizer.encode("an end")
    first = server.http.post("/v1/completions", json=body(ROUTES[0], prompt="an end", max_tokens=1, n=1)).json()["choices"][0]
    server.model.says[(*prompt, *first["token_ids"])] = []
    for shown in (False, True):
        changes = {"prompt": "an end", "skip_special_tokens": False, "include_stop_str_in_output": shown}
        choices = server.http.post(ROUTES[0], json=body(ROUTES[0], **changes)).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
        assert choices[0]["token_ids"] == [*first["token_ids"], EOS]
        assert choices[0]["text"] == first["text"] + ("<eos>" if shown else "") and choices[0]["stop_reason"] is None
    ignoring = server.http.post(ROUTES[0], json=body(ROUTES[0], prompt="an end", ignore_eos=True)).json()["choices"]
    assert [choice["finish_reason"] for choice in ignoring] == ["length"] * 2
    assert all(len(choice["token_ids"]) == 4 for choice in ignoring)


def test_several_prompts_have_their_beams_side_by_side(server: Server) -> None:
    many = server.http.post(ROUTES[0], json=body(ROUTES[0], prompt=["abc", "xyz"])).json()["choices"]
    alone = [server.http.post(ROUTES[0], json=body(ROUTES[0], prompt=text)).json()["choices"] for text in ("abc", "xyz")]
    assert [choice["text"] for choice in many] == [choice["text"] for choices in alone for choice in choices]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"stream": True}, "stream", "stream goes not with use_beam_search: leave it out or send false"),
        ({"temperature": 0.7}, "temperature", "temperature goes not with use_beam_search: leave it out or send 0"),
        ({"stop": ["x"]}, "stop", "stop goes not with"),
        ({"min_tokens": 1}, "min_tokens", "min_tokens goes not with"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "leave it out"),
        ({"n": 3}, "n", "n=3 needs the 6 best log probabilities of each step, at most 5 are possible (--max-logprobs)"),
        ({"length_penalty": 33}, "length_penalty", "length_penalty must be from -32 to 32, got 33"),
        ({"use_beam_search": False, "length_penalty": 2, "n": 1}, "length_penalty", "length_penalty needs use_beam_search=true"),
        ({"structured_outputs": {"choice": ["a"]}}, "use_beam_search", "cannot keep to a structure"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
def test_what_beams_cannot_have(server: Server, path: str, changes: dict[str, Any], param: str, message: str) -> None:
    num_before = len(server.model.requests)
    answer = server.http.post(path, json=body(path, **changes))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and message in error["message"]
    assert len(server.model.requests) == num_before, "nothing was asked of the engine"


def test_values_that_ask_for_nothing_pass(server: Server) -> None:
    off = {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0, "stop": [], "seed": 3, "stream": False, "length_penalty": 1}
    assert server.http.post(ROUTES[0], json=body(ROUTES[0], **off)).status_code == 200


def test_beams_are_admitted_together(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(info={"max_num_seqs": 1, "max_num_queued_reqs": 0})
    answer = server.http.post(ROUTES[0], json=body(ROUTES[0]))
    assert answer.status_code == 503 and "--max-num-queued-reqs" in answer.text and not server.model.requests
    assert server.http.post(ROUTES[0], json=body(ROUTES[0], n=1)).status_code == 200


def test_a_client_that_leaves_ends_all_beams(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted()
    server.model.hold()
    content = json.dumps(body(ROUTES[0], prompt=["left", "alone"])).encode()
    head = f"POST {ROUTES[0]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head.encode() + content)
        server.model.wait(lambda model: model.num_live == 2)
        server.model.allow(1)
        server.model.wait(lambda model: model.num_live == 4)
    server.model.wait(lambda model: len(model.aborted) == 4 and model.num_live == 0)
    assert len(server.model.requests) == 6
