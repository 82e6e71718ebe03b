"""Requests that nobody thought of, to servers whose models pool: an encoder that makes embeddings, a cross-encoder."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.schema_session import Session, check_answers, check_refusals, check_server, talk_to, told

PAIR = {"queries": "a", "documents": ["b", "c"]}
RANKED = {"query": "a", "documents": ["b", "c"]}
TOKENS: dict[str, dict[str, Any]] = {"/tokenize": {"prompt": "Hi"}, "/detokenize": {"tokens": [1, 2]}}
RIGHT: dict[str, dict[str, dict[str, Any]]] = {
    "embedding_server": {"/v1/embeddings": {"input": "Hi"}, "/pooling": {"input": "Hi"}},
    "reranking_server": {"/classify": {"input": "Hi"}, "/pooling": {"input": "Hi"}},
}
RIGHT["reranking_server"] |= dict.fromkeys(("/score", "/v1/score"), PAIR)
RIGHT["reranking_server"] |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RANKED)
RIGHT["embedding_server"] |= dict.fromkeys(("/score", "/v1/score"), PAIR)
RIGHT["embedding_server"] |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RANKED)


@pytest.fixture(scope="module", params=list(RIGHT))
def session(request: pytest.FixtureRequest) -> Session:
    return talk_to(request.getfixturevalue(request.param), RIGHT[request.param] | TOKENS, {})


def test_every_route_is_reached_and_none_fails(session: Session) -> None:
    assert session.missed_routes() == set()
    for sent, answer in session.talks:
        tasks = (501,) if sent.path == "/pooling" else ()  # one that is not this model's
        assert answer.status_code in (200, 400, 404, *tasks), told(sent, answer)


def test_answers_are_as_the_document_says(session: Session) -> None:
    check_answers(session)


def test_refusals_have_the_standard_form_and_the_server_lives(session: Session) -> None:
    check_refusals(session)
    check_server(session)
