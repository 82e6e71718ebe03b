"""docs/api.md against the code: fields, routes, metrics, limits and refusals, each way round; docs/serve.md is generated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from halfbyte.config import ServerConfig
from halfbyte.engine.limits import Limits
from halfbyte.engine.metrics import EngineMetrics
from halfbyte.entrypoints import chat_template, server
from halfbyte.entrypoints.anthropic import protocol as anthropic
from halfbyte.entrypoints.http_metrics import HttpMetrics
from halfbyte.entrypoints.openai import adapters, admin, body, decision_protocol, frontend, pooling_protocol, protocol, tokenize
from halfbyte.entrypoints.openai.refused import NEUTRAL
from halfbyte.entrypoints.openai.routes import add_routes
from halfbyte.entrypoints.page.files import add_pages
from halfbyte.entrypoints.responses import protocol as responses_protocol
from halfbyte.entrypoints.scrub import MAX_MESSAGE_CHARS
from halfbyte.resolve import DEFAULT_MAX_LOGPROBS
from halfbyte.types import EngineInfo, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SHARED = "Options of both generation routes"
MODELS: dict[str, type[BaseModel]] = {
    SHARED: protocol.GenerationFields,
    "`POST /v1/chat/completions`": protocol.ChatRequest,
    "`POST /v1/chat/completions/batch`": protocol.BatchChatRequest,
    "`POST /v1/completions`": protocol.CompletionRequest,
    "`POST /v1/responses`": responses_protocol.ResponsesRequest,
    "`POST /v1/messages`": anthropic.MessagesRequest,
    "`POST /v1/messages/count_tokens`": anthropic.CountTokensRequest,
    "`POST /v1/systemone`": decision_protocol.SystemOneRequest,
    "`POST /v1/decisions`": decision_protocol.DecisionsRequest,
    "Options of all routes that pool": pooling_protocol.PoolingFields,
    "Prompts to pool": pooling_protocol.PromptFields,
    "Pairs of texts": pooling_protocol.PairFields,
    "`POST /v1/embeddings`": pooling_protocol.EmbeddingRequest,
    "`POST /pooling`": pooling_protocol.PoolingRequest,
    "`POST /score`, `POST /v1/score`": pooling_protocol.ScoreRequest,
    "`POST /rerank`, `POST /v1/rerank`, `POST /v2/rerank`": pooling_protocol.RerankRequest,
    "`POST /tokenize`": protocol.TokenizeRequest,
    "`POST /detokenize`": protocol.DetokenizeRequest,
    **{f"`{route.method} {route.path}`": route.query for route in admin.ROUTES if route.query.model_fields},
    "`POST /v1/load_lora_adapter`": adapters.LoadAdapterRequest,
    "`POST /v1/unload_lora_adapter`": adapters.UnloadAdapterRequest,
}
JSON_TYPES = ("integer", "number", "boolean", "string", "array", "object")

Row = list[str]


def section(title: str) -> str:
    """The text under a heading, up to the next heading of any level."""
    found = re.search(rf"^#{{2,3}} {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    assert found, f"docs/api.md has no section {title!r}"
    return found.group(1)


def table(title: str, first_column: str) -> list[Row]:
    """The rows of the table in a section whose first column has this header."""
    lines = section(title).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(f"| {first_column} ")), None)
    assert start is not None, f"{title}: no table of {first_column}"
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    assert len({len(row) for row in rows}) == 1, f"{title}: rows of different lengths"
    return rows


def code_spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def expected_fields(model: type[BaseModel]) -> dict[str, set[str]]:
    """Field -> its JSON types, nested ones as `outer.inner`; what routes share stands in the table of one of them, or its own."""
    parts = [protocol.GenerationFields, *(getattr(pooling_protocol, f"{name}Fields") for name in ("Pooling", "Prompt", "Pair"))]
    parts += [protocol.ChatFields] if model is protocol.BatchChatRequest else []
    tables = [part for part in parts if issubclass(model, part) and part is not model]
    shared = {name for part in tables for name in part.model_fields}
    schema = model.model_json_schema()
    found: dict[str, set[str]] = {}
    for name, node in schema["properties"].items():
        if name in shared:
            continue
        found[name] = set(json_types(node, schema))
        for inner, inner_node in nested(node, schema):
            found[f"{name}.{inner}"] = set(json_types(inner_node, schema))
    return found


def alternatives(node: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for option in node.get("anyOf", [node]):
        yield schema["$defs"][option["$ref"].removeprefix("#/$defs/")] if "$ref" in option else option


def json_types(node: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    return (option["type"] for option in alternatives(node, schema) if option.get("type", "null") != "null")


def nested(node: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for option in alternatives(node, schema):
        yield from option.get("properties", {}).items()


@pytest.mark.parametrize("title", MODELS)
def test_fields_are_those_of_the_request_model(title: str) -> None:
    expected = expected_fields(MODELS[title])
    documented = {row[0].strip("`"): row[1] for row in table(title, "field")}
    assert set(documented) == set(expected)
    for name, types in expected.items():
        if types:  # `prompt` is checked by hand and has none
            assert set(re.findall(rf"\b({'|'.join(JSON_TYPES)})\b", documented[name])) == types, name


def test_required_fields_say_so() -> None:
    for title, model in MODELS.items():
        said = {row[0].strip("`") for row in table(title, "field") if row[2] == "required"}
        assert said - {"prompt"} == {name for name, field in model.model_fields.items() if field.is_required()}


def test_sampling_defaults_are_those_of_sampling_params() -> None:
    neutral = SamplingParams()
    checked = 0
    for name, _, default, _ in table(SHARED, "field"):
        literals = code_spans(default)
        name = name.strip("`")
        if literals and hasattr(neutral, name):
            assert json.loads(literals[-1]) == getattr(neutral, name), name
            checked += 1
    assert checked > 15


def test_refused_fields_and_their_neutral_values() -> None:
    documented: set[str] = set()
    for names, values in table("Not supported yet", "refused field"):
        for name in code_spans(names):
            assert name not in documented
            documented.add(name)
            # a cell that names its fields says what passes for each of them; of the others only the values stand there
            said = [json.loads(value) for value in code_spans(values) if value not in NEUTRAL]
            passing = [value for value in NEUTRAL[name] if value is not None]
            assert all(value in said for value in passing), name
    assert documented == set(NEUTRAL)


def test_routes_exist_and_are_documented() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)
    served = SimpleNamespace(config=ServerConfig(enable_admin=True), refuse_route=lambda *uses: None)
    add_routes(app, cast(frontend.Frontend, served))
    add_pages(app, ServerConfig())
    routes = {(method, route.path) for route in app.routes for method in cast(Any, route).methods - {"HEAD"}}  # type: ignore[attr-defined]
    routes = {(method, path) for method, path in routes if not path.startswith("/page/")}
    headings = re.findall(r"^### (`.*)$", PAGE, re.M)
    documented = [tuple(span.split(" ", 1)) for heading in headings for span in code_spans(heading)]
    assert len(documented) == len(set(documented))
    assert set(documented) == routes


def test_metrics_exist_and_are_documented() -> None:
    sizes = dict.fromkeys(
        ("vocab_size", "max_model_len", "max_logprobs", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"), 16
    )
    words = dict.fromkeys(("model", "architecture", "dtype", "kv_cache_dtype"), "x")
    others: dict[str, Any] = {"eos_token_ids": [], "max_concurrency": 1.0, "enable_prefix_caching": True}
    info = EngineInfo(**sizes, **words, **others, kv_cache_bytes=1, kv_cache_tokens=1, max_loras=1)
    http = HttpMetrics()
    http.record("/tokenize", "POST", 200, 0.1)
    text = (EngineMetrics(info, "served").render() + http.render()).decode()
    names = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    labels = {
        sample.name: set(sample.labels) - {"le"} for family in text_string_to_metric_families(text) for sample in family.samples
    }
    expected = {(name, kind, frozenset(labels[f"{name}_count" if kind == "histogram" else name])) for name, kind in names.items()}
    documented = {(row[0].strip("`"), row[1], frozenset(code_spans(row[2]))) for row in table("Metrics", "metric")}
    assert documented == expected


def test_limits_are_those_of_the_code() -> None:
    numbers = {
        "body": ServerConfig().max_body_bytes,
        "objects and arrays in a body": body.MAX_JSON_CONTAINERS,
        "commas in a body": body.MAX_JSON_ITEMS,
        "bytes of headers": server.MAX_HEADER_BYTES,
        "number of headers": server.MAX_HEADER_COUNT,
        "seconds for a request's headers to arrive": int(server.HEADER_TIMEOUT_S),
        "seconds that an idle connection is kept": server.KEEP_ALIVE_S,
        "prompts of a completion request": Limits.MAX_PROMPTS,
        "`n`, and prompts times `n`": Limits.MAX_N,
        "`stop` strings": Limits.MAX_STOP_STRINGS,
        "`bad_words` token sequences": Limits.MAX_BAD_WORDS,
        "`bad_words` tokens": Limits.MAX_BAD_WORDS_TOKENS,
        "`logprobs`, `top_logprobs`, `prompt_logprobs`": DEFAULT_MAX_LOGPROBS,
        "`logprob_token_ids`": Limits.MAX_LOGPROB_TOKEN_IDS,
        "`cache_salt` characters": Limits.MAX_CACHE_SALT_CHARS,
        "characters of a request's name": frontend.MAX_LABEL_CHARS,
        "seconds to render the chat template": int(chat_template.RENDER_LIMIT_S),
        "seconds to render a request's own template": int(chat_template.REQUEST_TEMPLATE_LIMIT_S),
        "characters of a request's own template": chat_template.MAX_TEMPLATE_CHARS,
        "memory of a request's own template, bytes": chat_template.REQUEST_TEMPLATE_MEMORY_BYTES,
        "requests' own templates that run at once": frontend.MAX_FOREIGN_TEMPLATES,
        "characters of a rendered prompt": chat_template.MAX_PROMPT_CHARS,
        "`/detokenize` ids": tokenize.MIN_DETOKENIZE_LIMIT,
    }
    documented = {row[0]: row[1] for row in table("Limits", "what")}
    assert set(numbers) <= set(documented)
    for what, number in numbers.items():
        assert re.match(rf"{number}\b", documented[what]), f"{what}: the code says {number}"
    assert f"{MAX_MESSAGE_CHARS} characters" in section("Errors")


def test_links_inside_the_page_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", PAGE, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors


def test_serve_page_is_the_generated_one() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "docs", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
