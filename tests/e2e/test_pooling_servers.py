"""Embeddings, scores and reranking on real servers, through the clients that people have: openai's and litellm's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ROOT
from tests.pooling_checkpoints import make_decoder, write_modules

Server = Any
TEXTS = ["A cat sat.", "Water boils at a hundred degrees.", "x"]


@pytest.fixture(scope="module")
def decoder_server(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = make_decoder(tmp_path_factory.mktemp("decoder"), "Qwen3")
    write_modules(folder, "lasttoken", normalize=True)
    return start_server(str(folder), "--kv-cache-memory-bytes", "4M", "--dtype", "float32").ready()


@pytest.fixture(params=["embedding_server", "decoder_server"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


def test_the_openai_client_reads_numbers_and_base64(server: Server) -> None:
    client = server.client()
    as_numbers = client.embeddings.create(model="", input=TEXTS, encoding_format="float")
    as_text = client.embeddings.create(model="", input=TEXTS)  # the client asks for base64, and decodes it
    assert [entry.index for entry in as_numbers.data] == [0, 1, 2]
    for numbers, text in zip(as_numbers.data, as_text.data, strict=True):
        assert numbers.embedding == pytest.approx(text.embedding, abs=1e-6) and len(numbers.embedding) == 32
        assert math.hypot(*numbers.embedding) == pytest.approx(1.0, abs=1e-5)
    num_tokens = sum(httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=60).json()["count"] for text in TEXTS)
    assert as_numbers.usage.prompt_tokens == as_numbers.usage.total_tokens == num_tokens


def test_a_server_that_pools_says_so(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 501 and "embed" in answer.json()["error"]["message"]
    assert any(line.startswith("try: curl") or "try: curl" in line and "/v1/embeddings" in line for line in server.lines)
    assert server.metric("vllm:request_success_total") >= 0 and server.metric("vllm:generation_tokens_total") == 0


def test_metrics_count_prompts(embedding_server: Server, wait_until: Callable[..., None]) -> None:
    before = embedding_server.metric("vllm:prompt_tokens_total")
    used = embedding_server.client().embeddings.create(model="", input=TEXTS).usage.prompt_tokens
    wait_until(lambda: embedding_server.metric("vllm:prompt_tokens_total") == before + used)


@pytest.mark.parametrize("ids", [[-1], [-264], [264], [2**31 - 1]])
def test_ids_that_the_model_does_not_know_reach_no_device(server: Server, ids: list[int]) -> None:
    """GHSA-25q3-v2hm-8vpf, CVE-2026-116174"""
    for path in ("/v1/embeddings", "/pooling"):
        answer = httpx.post(f"{server.url}{path}", json={"input": ids}, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "input"
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": [263, 0]}, timeout=60).status_code == 200


def test_litellm_embeds_and_reranks(embedding_server: Server, reranking_server: Server) -> None:
    """In a process of its own: the library leaves warnings and threads behind."""
    program = f"""
import json, warnings
warnings.simplefilter("ignore")
import litellm
base = {embedding_server.url + "/v1"!r}
found = litellm.embedding(model="openai/bge-small-en-v1.5", input={TEXTS!r}, api_base=base, api_key="x")
ranked = litellm.rerank(model="hosted_vllm/bge-reranker-base", query="q", documents={TEXTS!r}, top_n=2,
                        api_base={reranking_server.url!r}, api_key="x")
print(json.dumps([[len(entry["embedding"]) for entry in found.data], [r["index"] for r in ranked.results]]))
"""
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes, order = json.loads(done.stdout.strip().splitlines()[-1])
    whole = httpx.post(f"{reranking_server.url}/rerank", json={"query": "q", "documents": TEXTS}, timeout=60).json()["results"]
    assert sizes == [32] * 3 and order == [entry["index"] for entry in whole[:2]]


def test_the_startup_names_a_wrong_flag(tmp_path: Path) -> None:
    from tests.pooling_checkpoints import make_encoder

    folder = make_encoder(tmp_path, "Bert")
    for flags, words in (
        (("--kv-cache-dtype", "fp8"), "--kv-cache-dtype is for models with a KV cache"),
        (("--runner", "generate"), "--runner generate: BertModel does not generate text"),
        (("--max-num-batched-tokens", "16", "--max-num-seqs", "4"), "--max-num-batched-tokens 16 is less than"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "halfbyte", "serve", str(folder), "--port", "0", *flags],
            capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and words in done.stderr + done.stdout, done.stderr[-1000:]
