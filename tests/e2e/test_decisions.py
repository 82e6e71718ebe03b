"""Structured decisions on a real server with the demo model: repeatable, shared, and the same from every client."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import BaseModel

from tests.e2e.clients.decision_shapes import Decision

Server = Any
NOUL = {"type": "noul", "instructions": "Does the customer want the money back?"}
TEAMS = {"billing": "payments and refunds", "shipping": "parcels", "sales": None}
QUESTIONS: dict[str, Any] = {
    "refund": NOUL,
    "team": {"type": "choice", "instructions": "Which team should answer?", "criteria": TEAMS},
    "mood": {"type": "score", "instructions": "How content is the customer?", "criteria": ["not at all", "so so", "very"]},
    "topic": {"type": "choice", "instructions": "Which topic?", "criteria": {f"t{i}": None for i in range(30)}},
}
WORDS = (
    "order",
    "parcel",
    "broken",
    "late",
    "money",
    "back",
    "twice",
    "please",
    "refund",
    "colour",
    "box",
    "carrier",
    "street",
    "week",
)


def story(seed: int, num_words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/systemone", json={"questions": QUESTIONS} | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.fixture
def load(demo_server: Server) -> Iterator[Callable[[], None]]:
    """Start two clients that send chats and decisions of random length until the test ends."""
    stop = threading.Event()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        with httpx.Client(base_url=demo_server.url, timeout=120) as http:
            while not stop.is_set():
                text = story(draw.randint(0, 10**9), draw.randint(3, 40))
                if draw.random() < 0.5:
                    messages = [{"role": "user", "content": text}]
                    http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": draw.randint(1, 8)})
                else:
                    http.post("/v1/systemone", json={"state": text, "questions": {"q": NOUL}})

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(2)]
    yield lambda: [thread.start() for thread in threads] and None
    stop.set()
    for thread in threads:
        thread.join(60)


def test_f01_twenty_repeats_amid_load_are_one_response(demo_server: Server, load: Callable[[], None]) -> None:
    """Cold, warm, and beside others; whole answers and diagnostics, floats as they are written."""
    state = story(1, 40)
    cold = ask(demo_server, state=state, cache_salt="cold")
    load()
    told = [cold, *(ask(demo_server, state=state, cache_salt=f"{i}" if i % 3 == 0 else "warm") for i in range(20))]
    assert all(answer["repeatable"] for answer in told)
    distinct = {repr((answer["answers"], answer["diagnostics"])) for answer in told}
    assert len(distinct) == 1


def test_swapped_options_never_flip_an_average(demo_server: Server) -> None:
    """40 questions of two options, in both orders."""
    draw = random.Random(5)
    flips = given_flips = 0
    for start in range(0, 40, 20):
        pairs = [draw.sample(WORDS, 2) for _ in range(20)]
        told: dict[str, list[dict[str, Any]]] = {"average": [], "given": []}
        for order in told:
            for names in ([pair for pair in pairs], [pair[::-1] for pair in pairs]):
                questions = {
                    str(i): {"type": "choice", "instructions": "Which word fits?", "criteria": dict.fromkeys(pair)}
                    for i, pair in enumerate(names)
                }
                told[order].append(ask(demo_server, state=story(start, 12), questions=questions, order=order)["answers"])
        for name in told["average"][0]:
            first, second = (answers[name] for answers in told["average"])
            flips += first["choice"] != second["choice"]
            assert dict(sorted(first["probabilities"].items())) == dict(sorted(second["probabilities"].items()))
            given_flips += told["given"][0][name]["choice"] != told["given"][1][name]["choice"]
    assert flips == 0
    assert given_flips > 0, "this model does look at places"


def test_f12_a_state_is_computed_once(demo_server: Server) -> None:
    """400 tokens of state and 8 questions, cold: each further question computes its own text and less than a block."""
    url, state = demo_server.url, story(3, 400)
    num_state = httpx.post(f"{url}/tokenize", json={"prompt": state, "add_special_tokens": False}).json()["count"]
    assert num_state >= 400
    questions = {str(i): NOUL | {"instructions": f"Is this about {word}?"} for i, word in enumerate(WORDS[:8])}
    before = demo_server.metric("vllm:request_prefill_kv_computed_tokens_sum")
    hits = demo_server.metric("vllm:prefix_cache_hits_total")
    told = ask(demo_server, state=state, questions=questions, return_prompt=True)
    usage = told["usage"]
    computed = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    prompts = [entry["prompts"][0]["token_ids"] for entry in told["diagnostics"].values()]
    shared = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    own = sum(len(prompt) - shared for prompt in prompts)
    block = 16
    assert usage["input_tokens"] == sum(map(len, prompts)) and shared >= num_state
    print(f"state {num_state} tokens, shared prompt {shared}, 8 questions of their own {own}; computed {computed}")
    assert computed <= shared + own + 7 * (block - 1)
    assert demo_server.metric("vllm:request_prefill_kv_computed_tokens_sum") - before == computed
    assert demo_server.metric("vllm:prefix_cache_hits_total") - hits == usage["input_tokens_details"]["cached_tokens"]


def test_the_openai_client(demo_server: Server) -> None:
    """`client.decisions` where the SDK has it; the same call through its transport where it has not."""
    client = demo_server.client()
    choices = [{"value": True}, {"value": "true"}, {"value": "refund", "description": "wants the money back"}]
    body: dict[str, Any] = {
        "model": "smollm2-135m",
        "input": "I want my money back.",
        "questions": [
            {"type": "predicate", "instructions": "The customer wants a refund.", "name": "refund"},
            {"type": "choice", "instructions": "What is it about?", "choices": choices},
            {"type": "score", "instructions": "How urgent is it?", "levels": [{"label": "low"}, {"label": "high"}]},
        ],
    }
    if hasattr(client, "decisions"):
        decision: BaseModel = client.decisions.create(**body)
    else:
        decision = client.post("/decisions", cast_to=Decision, body=body)
    told = Decision.model_validate(decision.model_dump())
    predicate, choice, score = told.answers
    assert (predicate.type, predicate.name) == ("predicate", "refund") and 0 <= predicate.probability <= 1
    assert choice.type == "choice" and [entry.value for entry in choice.probabilities] == [True, "true", "refund"]
    assert choice.choice in [True, "true", "refund"] and sum(p.probability for p in choice.probabilities) == pytest.approx(1)
    assert score.type == "score" and 0 <= score.score <= 1 and [p.label for p in score.probabilities] == ["low", "high"]
    plain = httpx.post(f"{demo_server.url}/v1/decisions", json=body).json()
    assert Decision.model_validate(plain).answers == told.answers


def test_f03_temperatures_of_a_file_are_applied_and_named(demo_server: Server, start_server: Any, tmp_path: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"temperatures": {"noul": 4.0}}')
    flags = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--decisions-config", f'{{"temperatures": "{path}"}}')
    warm, plain = ask(start_server(*flags).ready(), state="x"), ask(demo_server, state="x")
    assert (warm["temperatures_from"], plain["temperatures_from"]) == ("mine.json", None)
    assert [entry["temperature"] for entry in warm["diagnostics"].values()] == [4.0, 1.0, 1.0, 1.0]
    tempered = [p**0.25 for p in plain["answers"]["refund"]["probabilities"].values()]
    assert warm["answers"]["refund"]["noul"] == pytest.approx(tempered[0] / sum(tempered))
    assert warm["answers"]["refund"]["confidence"] == pytest.approx(
        max(tempered) / sum(tempered) * plain["diagnostics"]["refund"]["label_mass"]
    )
    assert warm["answers"]["team"] == plain["answers"]["team"]
