"""The routes of models that pool: shapes, exact counts, what is refused, and that nobody else suffers. The model is a script.

The rows of refused values follow published advisories of such servers (docs/security.md): token ids below zero or outside the
vocabulary, empty inputs, unbounded lists, equal request ids, templates out of a checkpoint.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from halfbyte.pooling import PoolingInfo

Server = Any
V, LONGEST = 260, 64  # width of the model, max_model_len
EMBEDDER = PoolingInfo(task="embed", mode="last", size=4, activates=True, matryoshka=[2, 4])
RERANKER = PoolingInfo(task="classify", mode="cls", size=1, activates=True, labels=["relevant"], pairs="tokenizer")
SORTER = PoolingInfo(task="classify", mode="cls", size=3, activates=True, labels=["a", "b", "c"], pairs="tokenizer")
POOLING_ROUTES = {
    *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
}
PAIR: dict[str, Any] = {"queries": "q", "documents": ["a", "b"]}
RANK: dict[str, Any] = {"query": "q", "documents": ["a", "b", "c"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/classify": {"input": "Hi"},
    **dict.fromkeys(("/score", "/v1/score"), PAIR),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RANK),
}
WRONG: dict[str, list[Any]] = {
    "truncate_prompt_tokens": [-2, LONGEST + 1, 2**31, 2**63, 1.5, True],
    "truncation_side": ["middle", 1],
    "padding": ["max_length"],
    "use_activation": [1, "yes"],
    "priority": [2**63, 1.5],
    "cache_salt": ["", "a/b", "x" * 129, 5],
    "request_id": [5],
    "user": [5],
    "model": [5],
    "normalize": [True, False],
    "mm_processor_kwargs": [{"a": 1}],
    "prompt_embeds": ["AAAA"],
}
WRONG_PROMPTS: dict[str, list[Any]] = {
    "input": [
        *(None, "", [], [[]], [""], ["a", ""], 5, {"a": 1}, [True], [1.5], [1, "a"], ["a", 1], [["a"]], [[1], "a"]),
        *([-1], [-V], [[1, -1]], [V], [[1], [V]], [2**31 - 1], [2**63], [2**64]),
        *([[1]] * 1025, ["a"] * 1025, "x" * 100_000, [1] * 10_000, "x" * LONGEST, "\ud800"),
    ],
    "messages": [[], "x", [5], [{"content": "x"}]],
    "add_special_tokens": [1],
    "add_generation_prompt": [1],
    "continue_final_message": [1],
    "chat_template": ["{{ messages }}", 5],
    "chat_template_kwargs": [5, []],
}
WRONG_VECTORS: dict[str, list[Any]] = {
    "encoding_format": ["bytes", "bytes_only", "x", 5],
    "embed_dtype": ["float16"],
    "endianness": ["big"],
    "dimensions": [0, -1, 3, 5, 2**63, 1.5, True],
}
WRONG_PAIRS: dict[str, list[Any]] = {
    "max_tokens_per_query": [-1, 1.5, 2**63],
    "max_tokens_per_doc": [-1, "1"],
    "instruction": ["do", 5],
    "chat_template_kwargs": [{"a": 1}, 5],
}
TEXTS: list[Any] = [
    "",
    [],
    [""],
    5,
    [5],
    [[1]],
    [1, 2],
    [-1],
    [{"type": "image_url"}],
    ["a"] * 1025,
    "x" * 100_000,
    "x" * LONGEST,
]
PER_ROUTE: dict[str, dict[str, list[Any]]] = {
    "/v1/embeddings": WRONG_PROMPTS | WRONG_VECTORS,
    "/pooling": WRONG_PROMPTS | WRONG_VECTORS | {"task": ["classify2", 5, "score"]},
    "/classify": WRONG_PROMPTS,
    "/score": WRONG_PAIRS | {"queries": [*TEXTS, ["a", "b", "c"]], "documents": TEXTS, "text_1": ["a"], "data_2": ["a"]},
    "/rerank": WRONG_PAIRS
    | {"query": [*TEXTS[4:10], "", 5, None, "x" * LONGEST], "documents": [*TEXTS, "a", None], "top_n": [-1, 1.5]},
}
PER_ROUTE |= {"/v1/score": PER_ROUTE["/score"], "/v1/rerank": PER_ROUTE["/rerank"], "/v2/rerank": PER_ROUTE["/rerank"]}


@pytest.fixture(scope="module")
def embedder(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info={"pooling": EMBEDDER, "max_model_len": LONGEST}, enable_prompt_tokens_details=True)


@pytest.fixture(scope="module")
def reranker(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info={"pooling": RERANKER, "max_model_len": LONGEST})


@pytest.fixture(scope="module")
def sorter(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info={"pooling": SORTER, "max_model_len": LONGEST})


def post(server: Server, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = server.post(path, body, **options)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complaint(answer: Any, status: int = 400) -> str:
    error = answer.json().get("error", {})
    right = answer.status_code == status and set(error) == {"message", "type", "param", "code"} and error["message"]
    return "" if right else f"{answer.status_code} {answer.text[:300]}"


# --- shapes ------------------------------------------------------------------------------------------------------------


def test_embeddings(embedder: Server) -> None:
    body = post(
        embedder, "/v1/embeddings", {"input": ["Hi", "there"], "model": "alias", "user": "me"}, headers={"x-request-id": "r1"}
    )
    assert body["id"] == "embd-r1" and (body["object"], body["model"]) == ("list", "alias") and isinstance(body["created"], int)
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    assert {entry["object"] for entry in body["data"]} == {"embedding"}
    assert all(len(entry["embedding"]) == 4 for entry in body["data"])
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"]) == (3 + 6, 9, 0)
    as_text = post(embedder, "/v1/embeddings", {"input": ["Hi", "there"], "encoding_format": "base64"})
    assert [list(struct.unpack("<4f", base64.b64decode(entry["embedding"]))) for entry in as_text["data"]] == [
        entry["embedding"] for entry in body["data"]
    ]


def test_the_forms_of_input_are_one(embedder: Server) -> None:
    ids = embedder.tokens("Hi")
    forms: list[Any] = ["Hi", ["Hi"], ids, [ids]]
    found = [post(embedder, "/v1/embeddings", {"input": form})["data"] for form in forms]
    assert all(data == found[0] for data in found)
    bare = post(embedder, "/v1/embeddings", {"input": "Hi", "add_special_tokens": False})
    assert bare["data"] == post(embedder, "/v1/embeddings", {"input": ids[1:]})["data"] != found[0]
    chat = post(embedder, "/v1/embeddings", {"messages": [{"role": "user", "content": "Hi"}]})
    assert chat["usage"]["prompt_tokens"] == len(embedder.tokens("<|start|>user\nHi<|end|>\n", special=False))


def test_options_reach_the_engine(embedder: Server) -> None:
    body = {"input": "Hi", "dimensions": 2, "use_activation": False, "priority": 3, "cache_salt": "s"}
    assert len(post(embedder, "/v1/embeddings", body)["data"][0]["embedding"]) == 2
    request = embedder.model.requests[-1]
    assert (request.priority, request.cache_salt, request.is_read) == (3, "s", True)
    assert (request.pooling.activates, request.pooling.dimensions, request.pooling.reads_all) == (False, 2, False)
    cut = post(embedder, "/v1/embeddings", {"input": "abcdef", "truncate_prompt_tokens": 4})
    assert cut["usage"]["prompt_tokens"] == 4 and embedder.model.requests[-1].prompt_token_ids == embedder.tokens("abc")
    post(embedder, "/v1/embeddings", {"input": "abcdef", "truncate_prompt_tokens": 4, "truncation_side": "left"})
    assert embedder.model.requests[-1].prompt_token_ids == embedder.tokens("def")
    post(embedder, "/v1/embeddings", {"input": "x" * 100_000, "truncate_prompt_tokens": -1})
    assert len(embedder.model.requests[-1].prompt_token_ids) == LONGEST


def test_pooling(embedder: Server, sorter: Server) -> None:
    vector = post(embedder, "/pooling", {"input": "Hi"})
    assert vector["data"][0]["object"] == "pooling" and len(vector["data"][0]["data"]) == 4
    tokens = post(embedder, "/pooling", {"input": "Hi", "task": "token_embed"})["data"][0]["data"]
    assert [len(row) for row in tokens] == [4, 4, 4]
    assert embedder.model.requests[-1].pooling.reads_all
    assert len(post(sorter, "/pooling", {"input": "Hi"})["data"][0]["data"]) == 3
    assert not complaint(sorter.post("/pooling", {"input": "Hi", "task": "embed"}), 501)


def test_classify(sorter: Server) -> None:
    body = post(sorter, "/classify", {"input": ["Hi", "you"]})
    assert body["id"].startswith("classify-") and body["usage"]["prompt_tokens"] == 3 + 4
    for entry in body["data"]:
        assert entry["num_classes"] == len(entry["probs"]) == 3
        assert entry["label"] == "abc"[entry["probs"].index(max(entry["probs"]))]


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")])
def test_scores_of_a_classifier(reranker: Server, names: tuple[str, str]) -> None:
    first, second = names
    body = post(reranker, "/v1/score", {first: "q", second: ["a", "b"]})
    assert body["id"].startswith("score-") and body["object"] == "list"
    assert [(entry["index"], entry["object"]) for entry in body["data"]] == [(0, "score"), (1, "score")]
    pairs = post(reranker, "/score", {first: ["q", "q"], second: ["a", "b"]})
    assert [entry["score"] for entry in pairs["data"]] == [entry["score"] for entry in body["data"]]
    assert body["usage"]["prompt_tokens"] == 2 * len(reranker.tokens("qa"))


def test_scores_of_embeddings_are_cosines(embedder: Server) -> None:
    vectors = [entry["embedding"] for entry in post(embedder, "/v1/embeddings", {"input": ["q", "a", "b"]})["data"]]

    def cosine(a: list[float], b: list[float]) -> float:
        product = sum(x * y for x, y in zip(a, b, strict=True))
        return float(product / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5)

    body = post(embedder, "/score", {"text_1": "q", "text_2": ["a", "b"]})
    assert [entry["score"] for entry in body["data"]] == pytest.approx([cosine(vectors[0], v) for v in vectors[1:]])
    assert body["usage"]["prompt_tokens"] == 6, "the query is computed once"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(reranker: Server, path: str) -> None:
    documents = ["a", "b", "c", "d"]
    body = post(reranker, path, {"query": "q", "documents": documents})
    scores = [entry["score"] for entry in post(reranker, "/score", {"queries": "q", "documents": documents})["data"]]
    found = [(entry["relevance_score"], entry["document"]["text"], entry["index"]) for entry in body["results"]]
    assert found == sorted(zip(scores, documents, range(4), strict=True), key=lambda entry: -entry[0])
    assert set(body) == {"id", "model", "usage", "results"}
    top = post(reranker, path, {"query": "q", "documents": documents, "top_n": 2})
    assert top["results"] == body["results"][:2] and top["usage"] == body["usage"]


def test_pairs_are_cut_where_they_are_long(reranker: Server) -> None:
    body = {"queries": "query", "documents": "a longer document"}
    post(reranker, "/score", body | {"truncate_prompt_tokens": 9})
    assert reranker.model.requests[-1].prompt_token_ids == reranker.tokens("quera lo")
    for wrong in ({"truncate_prompt_tokens": 1}, {"truncate_prompt_tokens": 9, "truncation_side": "left"}):
        assert not complaint(reranker.post("/score", body | wrong))


def test_texts_of_pairs_are_cut_as_asked(reranker: Server) -> None:
    post(reranker, "/score", {"queries": "query", "documents": "document", "max_tokens_per_query": 2, "max_tokens_per_doc": 3})
    assert reranker.model.requests[-1].prompt_token_ids == reranker.tokens("qudoc")


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(POOLING_ROUTES))
def test_wrong_fields_are_400_and_the_next_call_works(embedder: Server, reranker: Server, path: str) -> None:
    """GHSA-25q3-v2hm-8vpf (ids below zero), CVE-2026-116174 (ids past the vocabulary), CVE-2024-8768 (nothing to compute),
    CVE-2026-73559 (more than 1024 prompts in a call)."""
    server = reranker if path == "/classify" else embedder
    right = post(server, path, BODIES[path])
    wrong = []
    num_before = len(server.model.requests)
    for field, values in (WRONG | PER_ROUTE[path]).items():
        for value in values:
            body = {field: value} if field == "messages" else BODIES[path] | {field: value}
            content = json.dumps(body).encode()
            answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
            if problem := complaint(answer):
                wrong.append(f"{field}={str(value)[:60]}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert len(server.model.requests) == num_before, "nothing of a refused call reaches the engine"
    again = post(server, path, BODIES[path])
    assert {k: v for k, v in again.items() if k in ("data", "results")} == {
        k: v for k, v in right.items() if k in ("data", "results")
    }


def test_the_largest_call_is_served_some_at_a_time(embedder: Server) -> None:
    """1024 prompts never hold more than 64 places of the engine, so that others get theirs."""
    seen: list[int] = []
    add = embedder.model.add

    def counting(requests: list[Any]) -> None:
        add(requests)
        seen.append(embedder.model.num_live)

    embedder.model.add = counting
    try:
        ids = [[index % V] for index in range(1024)]
        assert len(post(embedder, "/v1/embeddings", {"input": ids})["data"]) == 1024
    finally:
        embedder.model.add = add
    assert 0 < max(seen) <= 64


def test_the_last_id_is_accepted(embedder: Server) -> None:
    for ids in ([V - 1], [0, V - 1], [[V - 1]]):
        assert post(embedder, "/v1/embeddings", {"input": ids})["data"]


def test_one_failed_prompt_fails_its_call_alone(embedder: Server) -> None:
    embedder.model.fails = {0: "the model computed non-finite numbers for this request"}
    try:
        answer = embedder.post("/v1/embeddings", {"input": ["a", "b"]})
        assert not complaint(answer, 500) and "non-finite" in answer.json()["error"]["message"]
    finally:
        embedder.model.fails = {}
    assert post(embedder, "/v1/embeddings", {"input": "a"})["data"]
    embedder.model.wait(lambda model: model.num_live == 0)


def test_pysec_2026_4198_calls_with_one_request_id_do_not_meet(reranker: Server) -> None:
    bodies = [{"queries": f"query {i}", "documents": [f"a{i}", f"b{i}"]} for i in range(8)]
    alone = [post(reranker, "/score", body)["data"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: post(reranker, "/score", body, headers={"x-request-id": "same"}), bodies))
    assert [body["data"] for body in together] == alone
    assert {body["id"] for body in together} == {"score-same"}
    assert len({request.request_id for request in reranker.model.requests}) == len(reranker.model.requests)


def test_a_full_queue_is_503(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(info={"pooling": EMBEDDER, "max_num_seqs": 2, "max_num_queued_reqs": 1})
    answer = server.post("/v1/embeddings", {"input": ["a"] * 4})
    assert not complaint(answer, 503) and server.model.requests == []
    assert post(server, "/v1/embeddings", {"input": ["a"] * 3})["data"]


# --- templates ---------------------------------------------------------------------------------------------------------

PAIR_TEMPLATE = (
    "Q:{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
    " D:{{ (messages | selectattr('role', 'eq', 'document') | first).content }} {{ instruction or '-' }}"
)


def test_a_template_for_pairs_goes_first(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(info={"pooling": RERANKER}, chat_template=PAIR_TEMPLATE)
    post(server, "/rerank", {"query": "x", "documents": ["<|end|>"]})
    ids = server.model.requests[-1].prompt_token_ids
    assert server.tokenizer.decode(ids, skip_special_tokens=False) == "Q:x D:<|end|> -"
    assert ids == server.tokenizer.encode("Q:x D:<\ufdd0|end|> -", False, seams=True), "what a client spells is text"
    post(server, "/rerank", {"query": "x", "documents": ["y"], "instruction": "find"})
    assert server.tokenizer.decode(server.model.requests[-1].prompt_token_ids) == "Q:x D:y find"


def test_cve_2026_5760_templates_of_pairs_run_in_the_sandbox(start_scripted: Callable[..., Server]) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }} 'query' 'document' {% if 'query' == 'document' %}{% endif %}"
    server = start_scripted(info={"pooling": RERANKER}, chat_template=escape)
    answer = server.post("/rerank", RANK)
    assert not complaint(answer) and "__class__" in answer.json()["error"]["message"] and server.model.requests == []
    assert server.get("/health").status_code == 200


# --- what a model is not for -------------------------------------------------------------------------------------------


def test_routes_that_the_model_cannot_serve_are_501_and_not_documented(shared: Server, embedder: Server, sorter: Server) -> None:
    generating = {"/v1/completions", "/v1/chat/completions", "/v1/systemone", "/v1/decisions"}
    served = {
        shared: generating,
        embedder: POOLING_ROUTES - {"/classify"},
        sorter: {"/pooling", "/classify"},
    }
    for server, routes in served.items():
        document = server.get("/openapi.json").json()["paths"]
        for path in generating | POOLING_ROUTES:
            assert (path in document) == (path in routes)
            if path not in routes:
                answer = server.post(path, {})
                assert not complaint(answer, 501) and answer.json()["error"]["type"] == "NotImplementedError", path
    assert "--runner pooling" in shared.post("/v1/embeddings", {}).json()["error"]["message"]
    assert "embed, token_embed, score" in embedder.post("/v1/completions", {}).json()["error"]["message"]
    [card, _] = embedder.get("/v1/models").json()["data"]
    assert card["decisions"]["noul"]["max_options"] == 0
    assert post(embedder, "/tokenize", {"prompt": "Hi"})["count"] == 3
