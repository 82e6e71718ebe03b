"""Requests that nobody thought of, to the routes of operators, one after the other: an engine that sleeps lets others wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ServerProcess
from tests.e2e.schema_session import Session, check_answers, check_refusals, check_server, talk_to, told
from tests.e2e.test_lora import SIZES
from tests.numerics.random_adapters import write_adapter

KEY = "ADMIN_KEY"
# What chance does not make: the path of an adapter, and names: there is room for one, and it is gone when it was unloaded once.
EXCUSED = {
    ("taken", "/v1/load_lora_adapter", "lora_name"),
    ("taken", "/v1/load_lora_adapter", "lora_path"),
    ("taken", "/v1/unload_lora_adapter", "lora_name"),
    ("taken", "/v1/unload_lora_adapter", "lora_int_id"),
}


@pytest.fixture(scope="module")
def session(admin_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = write_adapter(tmp_path_factory.mktemp("adapter") / "x", SIZES, seed=1, rank=2, modules=("q_proj",))
    right: dict[str, dict[str, Any]] = {
        "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": str(folder), "load_inplace": True},
        "/v1/unload_lora_adapter": {"lora_name": "x"},
    }
    for card in httpx.get(f"{admin_server.url}/v1/models").json()["data"]:
        if card["parent"] is not None:  # of whoever used the server before: there is room for one
            _post(admin_server, "/v1/unload_lora_adapter", {"lora_name": card["id"]})
    yield talk_to(admin_server, right, {}, key=KEY, at_once=1)
    for path in ("/wake_up", "/resume"):
        _post(admin_server, path)


def _post(server: ServerProcess, path: str, body: object = None) -> None:
    httpx.post(server.url + path, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60).raise_for_status()


def test_every_route_and_parameter_is_reached_and_none_fails(session: Session) -> None:
    assert session.missed_routes() == set()
    paths = [path for path, methods in session.document["paths"].items() if any("requestBody" in op for op in methods.values())]
    assert session.missed_fields(paths) - EXCUSED == set()
    for sent, answer in session.talks:
        assert answer.status_code in (200, 400, 404), told(sent, answer)


def test_answers_are_as_the_document_says(session: Session) -> None:
    check_answers(session)


def test_refusals_have_the_standard_form_and_the_server_lives(session: Session) -> None:
    check_refusals(session)
    check_server(session)
