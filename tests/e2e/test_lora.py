"""Adapters over HTTP: served by name beside the model, loaded, replaced and unloaded while requests run.

One server with the demo model, one adapter from its start, and the routes of operators.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.numerics.random_adapters import write_adapter

USER, ADMIN = "user-key", "admin-key"
# Of smollm2-135m.
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
}
PROMPT = "The harbour was quiet before dawn, and the boats lay in a row along the stone wall as they had for a hundred years."

Server = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters `one` and `two`, and `same`, which is a copy of `one`, at first."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(path / name, SIZES, seed=seed, rank=4, modules=("q_proj", "v_proj", "down_proj"), strength=0.3)
    shutil.copytree(path / "one", path / "same")
    return path


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], folder: Path) -> Server:
    keys = ("--api-key", USER, "--enable-admin", "--admin-api-key", ADMIN)
    limits = ("--max-loras", "2", "--max-model-len", "512", "--max-num-seqs", "8")
    return start_server("--enable-lora", "--lora-modules", f"one={folder}/one", *limits, *keys).ready()


def order(server: Server, path: str, key: str = ADMIN, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def load(server: Server, name: str, path: object, **more: Any) -> httpx.Response:
    return order(server, "load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def complete(server: Server, model: str, **more: Any) -> Any:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, **more}
    with server.client(api_key=USER) as client:
        found = client.completions.create(**asked)
    assert found.model == model
    return found


def text(server: Server, model: str) -> str:
    return str(complete(server, model).choices[0].text)


def test_two_adapters_and_the_model_answer_at_once(server: Server, folder: Path) -> None:
    loaded = load(server, "two", folder / "two")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    names = ["smollm2-135m", "one", "two"]
    alone = [text(server, name) for name in names]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(lambda name: text(server, name), names * 3)) == alone * 3

    with server.client(api_key=USER) as client:
        cards = {card.id: card.to_dict() for card in client.models.list()}
    assert list(cards) == names
    assert (cards["two"]["root"], cards["two"]["parent"]) == (str(folder / "two"), "smollm2-135m")
    assert (cards["two"]["max_model_len"], cards["smollm2-135m"]["max_model_len"]) == (None, 512)

    full = load(server, "three", folder / "two")
    assert full.status_code == 400 and "--max-loras" in full.json()["error"]["message"]
    unloaded = order(server, "unload_lora_adapter", lora_name="two")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'two' removed successfully.")
    with pytest.raises(Exception, match="model 'two' does not exist; served: smollm2-135m, one"):
        text(server, "two")


def test_every_route_knows_the_name(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "What lies in a row?"}]
    asked = {"messages": messages, "max_tokens": 8, "temperature": 0.0}
    with server.client(api_key=USER) as client:
        answers = {name: client.chat.completions.create(model=name, **asked) for name in ("smollm2-135m", "one")}
        streamed = [chunk for chunk in client.chat.completions.create(model="one", stream=True, **asked) if chunk.choices]
    assert answers["one"].model == "one" and answers["one"].choices != answers["smollm2-135m"].choices
    assert {chunk.model for chunk in streamed} == {"one"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == answers["one"].choices[0].message.content

    headers = {"authorization": f"Bearer {USER}"}
    question = {"calm": {"type": "noul", "instructions": "Is the harbour calm?"}}
    body = {"state": PROMPT, "questions": question}
    found = {}
    for name in ("smollm2-135m", "one"):
        said = httpx.post(f"{server.url}/v1/systemone", json={"model": name, **body}, headers=headers, timeout=60).json()
        assert said["model"] == name
        found[name] = said["answers"]["calm"]
    assert found["one"] != found["smollm2-135m"]
    assert httpx.post(f"{server.url}/tokenize", json={"model": "one", "prompt": "a"}, headers=headers).status_code == 200


def test_c27_a_reloaded_adapter_meets_no_cache_of_the_one_before(server: Server, folder: Path) -> None:
    def ask() -> tuple[str, int]:
        found = complete(server, "same", max_tokens=12)
        details = found.usage.prompt_tokens_details
        return found.choices[0].text, 0 if details is None else details.cached_tokens

    expected = text(server, "one")
    assert load(server, "same", folder / "same").status_code == 200
    assert ask()[0] == expected and ask()[0] == expected
    again = load(server, "same", folder / "same")
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    assert again.json()["error"]["type"] == "InvalidUserInput"
    shutil.rmtree(folder / "same")
    shutil.copytree(folder / "two", folder / "same")
    with server.client(api_key=USER) as client:
        stream = client.completions.create(model="same", prompt=PROMPT, max_tokens=200, temperature=0.0, stream=True)
        begun = next(iter(stream)).choices[0].text
        assert load(server, "same", folder / "same", load_inplace=True).status_code == 200
        changed, _ = ask()
        assert changed != expected
        whole = begun + "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert whole.startswith(expected), "it ends with the weights that it began with"
    assert order(server, "unload_lora_adapter", lora_name="same").status_code == 200


def test_metrics_name_the_adapters_in_use(server: Server) -> None:
    asked: Any = {"model": "one", "prompt": PROMPT, "max_tokens": 200}
    with server.client(api_key=USER) as client, client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
        text = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="one",waiting_lora_adapters=""}' in text


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter"])
def test_only_the_admin_key_opens_the_routes(server: Server, path: str) -> None:
    """CVE-2025-63389: a user's key manages nothing."""
    for key in (USER, "x"):
        refused = order(server, path, key, lora_name="one", lora_path="/")
        assert refused.status_code == 401 and "admin key" in refused.json()["error"]["message"]
    assert text(server, "one")


def test_names_and_paths_are_checked(server: Server, folder: Path) -> None:
    """CVE-2024-37032, CVE-2025-48887: a name is a label, a path is that of a folder; nothing of a file's contents is told."""
    secret = folder / "secret"
    secret.mkdir()
    (secret / "adapter_config.json").write_text("SECRET=1")
    long = "a" * 129
    for name, path, status, param in [
        ("../one", "/x", 400, "lora_name"),
        ("a/b", "/x", 400, "lora_name"),
        ("a\\b", "/x", 400, "lora_name"),
        ("a\0", "/x", 400, "lora_name"),
        ("a\nb", "/x", 400, "lora_name"),
        ("..", "/x", 400, "lora_name"),
        (long, "/x", 400, "lora_name"),
        ("smollm2-135m", folder / "one", 400, "lora_name"),
        ("", "/x", 400, "lora_name"),
        ("new", "", 400, "lora_path"),
        ("new", f"{folder}/one/../one", 400, "lora_path"),
        ("new", "/x\0", 400, "lora_path"),
        ("new", "/" + "a" * 5000, 400, "lora_path"),
        ("new", "/" + "a" * 3000, 404, "lora_path"),
        ("new", "/etc", 404, "lora_path"),
        ("new", folder / "absent", 404, "lora_path"),
        ("new", secret, 400, "lora_path"),
    ]:
        refused = load(server, name, path)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (status, param), (name, path, error)
        assert "SECRET" not in refused.text
    for body in ({}, {"lora_name": 1}, {"lora_path": "/x"}, {"lora_name": "x", "lora_path": "/x", "surprise": 1}):
        assert order(server, "load_lora_adapter", **body).status_code == 400
    gone = order(server, "unload_lora_adapter", lora_name="absent")
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")
    assert text(server, "one")


def test_c28_an_adapter_that_matches_nothing_is_refused_by_name(server: Server, folder: Path) -> None:
    write_adapter(folder / "renamed", SIZES, seed=1, rank=4, modules=("q_proj",), prefix="base_model.model.gpt.layers")
    refused = load(server, "renamed", folder / "renamed")
    assert refused.status_code == 400
    assert "no modules for base_model.model.gpt.layers.0.self_attn.q_proj.lora_A.weight" in refused.json()["error"]["message"]
    with pytest.raises(Exception, match="does not exist"):
        text(server, "renamed")
