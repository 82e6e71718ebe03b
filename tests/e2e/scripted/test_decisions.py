"""The wire of structured decisions: /v1/systemone and /v1/decisions over a model whose probabilities are a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

Server = Any
SYSTEMONE, DECISIONS = "/v1/systemone", "/v1/decisions"
NOUL: dict[str, Any] = {"type": "noul", "instructions": "Is it?"}
TEXT_PART = {"type": "input_text", "text": "one"}
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "It is."}


def choice(count: int) -> dict[str, Any]:
    return {"type": "choice", "criteria": {f"option {i}": None for i in range(count)}}


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Iterator[Server]:
    """A context of 8,192 tokens, which are bytes; labels of several letters are several tokens."""
    one = start_scripted(info={"max_model_len": 8192})
    one.model.likes = {
        "y": 0.6,
        "n": 0.2,
        "e": 0.5,
        "s": 1.0,
        "o": 0.5,
        "A": 0.1,
        "B": 0.4,
        "C": 0.3,
        "0": 0.1,
        "1": 0.2,
        "2": 0.6,
    }
    yield one


def ask(server: Server, questions: Any, **fields: Any) -> Any:
    return server.post(SYSTEMONE, {"state": "a state", "questions": questions} | fields)


def refusal(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_f04_each_type_has_its_answer(server: Server) -> None:
    """TypeSafe's clients read `noul` alone, vLLM's read a confidence beside it; a score is the expected level."""
    levels = {"type": "score", "criteria": ["bad", "fair", "good"]}
    questions = {"which": choice(3), "is it": NOUL, "how": levels}
    told = ask(server, questions).json()
    assert told["object"] == "structured_decision" and told["id"].startswith("decision-") and told["model"] == "scripted"
    assert list(told["answers"]) == list(told["diagnostics"]) == list(questions)
    which, is_it, how = told["answers"].values()
    assert (which["type"], which["choice"]) == ("choice", "option 1")
    assert which["probabilities"] == pytest.approx({"option 0": 0.125, "option 1": 0.5, "option 2": 0.375})
    assert which["confidence"] == pytest.approx(0.5 * 0.8)
    yes, no = (0.6 + 0.01) * 0.5 * 1.0, (0.2 + 0.01) * 0.5  # capitals are rare here, and count
    assert is_it["noul"] == is_it["probabilities"]["yes"] == pytest.approx(yes / (yes + no))
    assert sum(is_it["probabilities"].values()) == pytest.approx(1.0)
    assert is_it["confidence"] == pytest.approx(yes / (yes + no) * (yes + no))
    assert how["score"] == pytest.approx((0.2 + 2 * 0.6) / 0.9) and how["legend"] == {"0": "bad", "1": "fair", "2": "good"}
    assert how["probabilities"] == pytest.approx({"0": 1 / 9, "1": 2 / 9, "2": 6 / 9})
    assert not any(answer["abstained"] for answer in told["answers"].values())
    assert told["diagnostics"]["how"] == {
        "label_mass": pytest.approx(0.9),
        "argmax_is_label": True,
        "temperature": 1.0,
        "num_orders": 1,
    }
    usage = told["usage"]
    assert usage["output_tokens"] == 1 + 7 + 1, "yes and no are told apart behind y, ye, n, Y, Ye and N, too"
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_checklist_12_systemone(server: Server) -> None:
    told = ask(server, {"q": NOUL, "s": {"type": "score", "criteria": ["a", "b"]}}).json()
    answer, mass = told["answers"]["q"], told["diagnostics"]["q"]["label_mass"]
    assert sum(answer["probabilities"].values()) == pytest.approx(1.0) and answer["confidence"] <= mass
    assert 0 <= told["answers"]["s"]["score"] <= 1
    assert "question 'q'" in refusal(ask(server, {"q": NOUL | {"weight": 1}}))["message"]
    assert "64" in refusal(ask(server, {str(i): NOUL for i in range(65)}))["message"]
    assert "enable_thinking" in refusal(ask(server, {"q": NOUL}, chat_template_kwargs={"enable_thinking": True}))["message"]


@pytest.mark.parametrize(("count", "num_reads"), [(1, 1), (2, 1), (26, 1), (27, 4), (99, 11), (100, 14), (255, 30)])
def test_f05_up_to_255_options(server: Server, count: int, num_reads: int) -> None:
    told = ask(server, {"q": choice(count)}).json()
    probabilities = told["answers"]["q"]["probabilities"]
    assert list(probabilities) == [f"option {i}" for i in range(count)]
    assert sum(probabilities.values()) == pytest.approx(1.0) and told["usage"]["output_tokens"] == num_reads


def test_f05_more_options_are_refused_with_the_limit(server: Server) -> None:
    error = refusal(ask(server, {"mine": choice(256)}))
    assert error["param"] == "questions" and "'mine'" in error["message"] and "255" in error["message"]
    choices = [{"value": str(i)} for i in range(256)]
    body = {"model": "scripted", "input": "x", "questions": [{"type": "choice", "instructions": "?", "choices": choices}]}
    assert "255" in refusal(server.post(DECISIONS, body))["message"]
    body["questions"][0]["choices"] = choices[:255]
    assert len(server.post(DECISIONS, body).json()["answers"][0]["probabilities"]) == 255


def test_f07_a_prompt_may_fill_the_context(start_scripted: Callable[..., Server]) -> None:
    one = start_scripted(info={"max_model_len": 256})
    empty = ask(one, {"q": choice(2)}, state="", return_prompt=True).json()
    room = 256 - len(empty["diagnostics"]["q"]["prompts"][0]["token_ids"]) - 2  # two line breaks before the question
    full = ask(one, {"q": choice(2)}, state="x" * room).json()
    assert full["usage"]["input_tokens"] == 256
    error = refusal(ask(one, {"q": choice(2)}, state="x" * (room + 1)))
    assert error["param"] == "input_tokens" and "257" in error["message"] and "256" in error["message"]


def test_f07_a_read_without_numbers_fails_its_call_alone(start_scripted: Callable[..., Server]) -> None:
    one = start_scripted(info={"max_model_len": 8192})
    one.model.fails = {0: "the model computed non-finite numbers for this request"}
    error = refusal(ask(one, {str(i): NOUL for i in range(8)}), 500)
    assert "non-finite" in error["message"]
    one.model.fails = {}
    assert ask(one, {"q": NOUL}).status_code == 200


def test_f08_prompts_are_returned_where_asked(server: Server) -> None:
    told = ask(server, {"q": choice(2), "r": NOUL}, return_prompt=True, order="average").json()
    for name, count in (("q", 2), ("r", 2)):
        prompts = told["diagnostics"][name]["prompts"]
        assert len(prompts) == told["diagnostics"][name]["num_orders"] == count
        for prompt in prompts:
            assert "a state\n\n" in prompt["text"] and prompt["text"].endswith("<|start|>assistant\n")
            assert prompt["token_ids"] == server.tokens(prompt["text"], special=False)
    assert "prompts" not in ask(server, {"q": NOUL}).json()["diagnostics"]["q"]


def test_instructions_are_a_system_message_and_states_are_json(server: Server) -> None:
    told = ask(server, {"q": NOUL}, instructions="Be strict.", state={"a": [1, None]}, return_prompt=True).json()
    text = told["diagnostics"]["q"]["prompts"][0]["text"]
    assert "<|start|>system\nBe strict.<|end|>\n" in text and '{"a":[1,null]}\n\nQuestion: Is it?' in text
    assert (
        "system"
        not in ask(server, {"q": NOUL}, instructions="", return_prompt=True).json()["diagnostics"]["q"]["prompts"][0]["text"]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": []}, "body.questions"),
        ({"questions": {"": NOUL}}, "questions"),
        ({"images": ["data:image/png;base64,"]}, "images"),
        ({"audio": ["x"]}, "audio"),
        ({"order": "random"}, "order"),
        ({"min_label_mass": 1.5}, "body.min_label_mass"),
        ({"min_label_mass": "high"}, "body.min_label_mass"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"instructions": 5}, "body.instructions"),
    ],
)
def test_what_systemone_refuses(server: Server, fields: dict[str, Any], param: str) -> None:
    assert refusal(ask(server, **({"questions": {"q": NOUL}} | fields)))["param"] == param


def test_half_a_character_is_refused(server: Server) -> None:
    for text in (
        '{"state": "\\ud800", "questions": {"q": {"type": "noul"}}}',
        '{"state": {"\\ud800": 1}, "questions": {"q": {"type": "noul"}}}',
    ):
        answer = server.http.post(SYSTEMONE, content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text


def test_what_systemone_takes(server: Server) -> None:
    for fields in (
        {"unknown": 1},
        {"images": []},
        {"images": None},
        {"order": None},
        {"model": ""},
        {"priority": 3},
        {"cache_salt": "s"},
    ):
        assert ask(server, {"q": NOUL}, **fields).status_code == 200, fields
    assert "state" in refusal(server.post(SYSTEMONE, {"questions": {"q": NOUL}}))["message"]
    assert ask(server, {"q": NOUL}, state=None).status_code == 200
    assert refusal(ask(server, {"q": NOUL}, model="other"), 404)["param"] == "model"
    told = ask(server, {"q": NOUL}, request_id="mine", model="alias").json()
    assert (told["id"], told["model"]) == ("decision-mine", "alias")
    assert refusal(server.http.post(SYSTEMONE, content="{}", headers={"content-type": "text/plain"}))["param"] == "content-type"


def test_too_little_label_mass_abstains(server: Server) -> None:
    questions = {"q": NOUL, "c": choice(3), "s": {"type": "score", "criteria": ["a", "b"]}}
    told = ask(server, questions, min_label_mass=0.7).json()
    assert [answer["abstained"] for answer in told["answers"].values()] == [True, False, True]
    assert told["answers"]["q"] == {"type": "noul", "noul": None, "probabilities": None, "confidence": 0.0, "abstained": True}
    assert told["answers"]["s"]["score"] is None and told["answers"]["s"]["confidence"] == 0.0
    assert told["diagnostics"]["q"]["label_mass"] == pytest.approx(0.41)


def test_averages_do_not_depend_on_the_options_order(server: Server) -> None:
    """This model likes places, not options: B always, whatever stands there."""
    options = {"cat": "a", "dog": "b", "cow": "c"}
    told = []
    for names in (["cat", "dog", "cow"], ["dog", "cow", "cat"], ["cow", "dog", "cat"]):
        question = {"type": "choice", "criteria": {name: options[name] for name in names}}
        told.append(ask(server, {"q": question}, order="average").json())
        given = ask(server, {"q": question}).json()["answers"]["q"]
        assert given["choice"] == names[1]
    answers = [answer["answers"]["q"] for answer in told]
    assert answers[0]["choice"] == answers[1]["choice"] == answers[2]["choice"]
    assert dict(sorted(answers[0]["probabilities"].items())) == dict(sorted(answers[2]["probabilities"].items()))
    assert told[0]["diagnostics"]["q"]["spread"] == pytest.approx(0.5 - 0.125) and told[0]["diagnostics"]["q"]["num_orders"] == 3


def test_f11_values_keep_their_types_and_answers_their_order(server: Server) -> None:
    choices = [{"value": True}, {"value": "true", "description": "as a text"}, {"value": False}]
    questions = [
        {"type": "choice", "instructions": "Which?", "choices": choices, "name": "values"},
        PREDICATE,
        {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high", "description": "very"}]},
    ]
    told = server.post(DECISIONS, {"model": "scripted", "input": "x", "questions": questions, "return_prompt": True}).json()
    assert set(told) == {"model", "answers", "usage", "diagnostics", "repeatable", "temperatures_from"}
    which, is_it, how = told["answers"]
    assert (which["type"], which["name"]) == ("choice", "values") and which["choice"] == "true"
    assert [entry["value"] for entry in which["probabilities"]] == [True, "true", False]
    assert is_it == {"type": "predicate", "name": None, "probability": pytest.approx(0.4 / 0.5)}
    assert [(entry["value"], entry["label"]) for entry in how["probabilities"]] == [(0, "low"), (1, "high")]
    assert how["score"] == pytest.approx(0.8) and how["name"] is None
    texts = [entry["prompts"][0]["text"] for entry in told["diagnostics"]]
    assert (
        'A: true\nB: "true" - as a text\nC: false' in texts[0]
        and "A: false\nB: true" in texts[1]
        and "B: high - very" in texts[2]
    )


def test_f11_what_abstains_is_a_refusal_of_its_question(server: Server) -> None:
    questions = [PREDICATE | {"name": "mine"}, {"type": "choice", "instructions": "?", "choices": [{"value": c} for c in "abc"]}]
    told = server.post(DECISIONS, {"model": "scripted", "input": "x", "questions": questions, "min_label_mass": 0.6}).json()
    assert told["answers"][0] == {"type": "refusal", "name": "mine"} and told["answers"][1]["type"] == "choice"


@pytest.mark.parametrize(
    "change",
    [
        {"questions": [PREDICATE | {"name": None}]},
        {"questions": [PREDICATE | {"extra": 1}]},
        {"questions": [PREDICATE | {"instructions": None}]},
        {"questions": [{"type": "predicate"}]},
        {"questions": [{"type": "noul", "instructions": "?"}]},
        {"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}]}]},
        {"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": "a"}]}]},
        {"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": True}, {"value": True}]}]},
        {"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": 1}, {"value": 2}]}]},
        {"questions": [{"type": "score", "instructions": "?", "levels": [{"label": "a"}]}]},
        {"questions": [{"type": "score", "instructions": "?", "levels": [{"label": "a"}, {"label": "a"}]}]},
        {"questions": [{"type": "score", "instructions": "?", "levels": [{"label": str(i)} for i in range(11)]}]},
        {"questions": []},
        {"questions": [PREDICATE] * 65},
        {"input": []},
        {"input": 5},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]}]},
        {"input": [{"role": "user", "content": "x", "name": "y"}]},
        {"extra": 1},
        {"model": None},
        {"safety_identifier": "x" * 129},
        {"order": "random"},
    ],
)
def test_checklist_13_what_decisions_refuses(server: Server, change: dict[str, Any]) -> None:
    error = refusal(server.post(DECISIONS, {"model": "scripted", "input": "x", "questions": [PREDICATE]} | change))
    assert error["message"] and error["param"]


def test_checklist_13_what_decisions_takes(server: Server) -> None:
    conversation = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "one"}, {"type": "input_json", "data": {"a": 1}}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "user", "content": "three"},
    ]
    body = {
        "model": "scripted",
        "input": conversation,
        "questions": [PREDICATE],
        "return_prompt": True,
        "safety_identifier": "who",
    }
    told = server.post(DECISIONS, body | {"prompt_cache_key": "any text: @/\\"}).json()
    assert 'one\n{"a": 1}\n\nassistant: two\n\nthree\n\nQuestion: It is.' in told["diagnostics"][0]["prompts"][0]["text"]
    assert "id" not in told
    usage = told["usage"]
    assert set(usage) == {"input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"}
    assert set(usage["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_client_that_leaves_ends_all_reads(start_scripted: Callable[..., Server], wait_until: Callable[..., None]) -> None:
    one = start_scripted(info={"max_model_len": 8192})
    one.model.hold()
    with ThreadPoolExecutor() as pool:
        body = {"state": "x", "questions": {str(i): choice(2) for i in range(64)}, "order": "average"}
        with pytest.raises(Exception, match="timed out"):
            pool.submit(lambda: one.http.post(SYSTEMONE, json=body, timeout=0.5)).result()
    wait_until(lambda: len(one.model.aborted) == 64)
    one.model.allow(None)
    assert ask(one, {"q": NOUL}).status_code == 200
    assert len(one.model.requests) == 64 + 7, "the rest was never sent"


def test_a_full_queue_refuses_the_call_as_a_whole(start_scripted: Callable[..., Server], wait_until: Callable[..., None]) -> None:
    one = start_scripted(info={"max_model_len": 8192, "max_num_seqs": 2, "max_num_queued_reqs": 4})
    one.model.hold()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, one, {str(i): choice(2) for i in range(6)})
        wait_until(lambda: len(one.model.requests) == 6)
        assert "--max-num-queued-reqs" in refusal(ask(one, {"q": choice(2)}), 503)["message"]
        one.model.allow(None)
        assert first.result().status_code == 200
    assert ask(one, {str(i): choice(2) for i in range(6)}).status_code == 200


def test_a_model_without_a_template_answers_501_and_says_why(start_scripted: Callable[..., Server], server: Server) -> None:
    one = start_scripted(info={"logprobs_mode": "raw_logits"})
    for path, body in (
        (SYSTEMONE, {"state": "x", "questions": {"q": NOUL}}),
        (DECISIONS, {"model": "scripted", "input": "x", "questions": [PREDICATE]}),
    ):
        error = refusal(one.post(path, body), 501)
        assert error["type"] == "NotImplementedError" and "--logprobs-mode" in error["message"]
    told = one.get("/v1/models").json()["data"][0]["decisions"]
    assert told["noul"]["max_options"] == 0 and "--logprobs-mode" in told["noul"]["reason"]
    told = server.get("/v1/models").json()["data"][0]["decisions"]
    assert told == {
        "reader": "next_token",
        "repeatable": False,
        "choice": {"max_options": 255, "reason": None},
        "noul": {"max_options": 2, "reason": None},
        "score": {"max_options": 10, "reason": None},
    }


def test_priorities_and_salts_reach_the_engine(server: Server) -> None:
    ask(server, {"q": choice(2)}, priority=-4, cache_salt="mine")
    request = server.model.requests[-1]
    assert (request.priority, request.cache_salt, request.is_read) == (-4, "mine", True)
    server.post(DECISIONS, {"model": "scripted", "input": "x", "questions": [PREDICATE], "prompt_cache_key": "k"})
    salts = [server.model.requests[-1].cache_salt]
    server.post(DECISIONS, {"model": "scripted", "input": "x", "questions": [PREDICATE], "prompt_cache_key": "l"})
    assert salts[0] and salts[0] != server.model.requests[-1].cache_salt
