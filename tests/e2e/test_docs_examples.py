"""Every curl line of docs/api.md, docs/structured_outputs.md and docs/decisions.md, as a reader would run it: the status is the
documented one, and the keys shown exist. The Python blocks of docs/decisions.md and docs/responses.md run as they stand.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.e2e.clients.decision_shapes import Decision

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, STRUCTURE_PAGE, DECISIONS_PAGE, RESPONSES_PAGE = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("api.md", "structured_outputs.md", "decisions.md", "responses.md")
)
DOCUMENTED_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Example:
    """A command, and what the page shows of its answer: "" where there is nothing to show, None where nothing is shown."""

    title: str
    command: str
    status: int
    kind: str
    answer: str | None


def examples(page: str, unseen: str | None = "") -> Iterator[Example]:
    """Each `sh` block that is a curl command, with the block behind it if nothing but a status stands between, else `unseen`."""
    blocks = list(re.finditer(r"^```(\w+)\n(.*?)^```$|^#+ ([^\n]+)$", page, re.M | re.S))
    title = ""
    for index, block in enumerate(blocks):
        title = block.group(3) or title
        if block.group(1) != "sh" or not block.group(2).startswith("curl "):
            continue
        status, kind, answer = 200, "", unseen
        behind = blocks[index + 1] if index + 1 < len(blocks) else None
        if behind is not None and behind.group(1) in ("json", "text"):
            between = page[block.end() : behind.start()].strip()
            said = re.fullmatch(r"(?:Answered with status (\d+):)?", between)
            assert said, f"{title}: {between!r} stands between a command and its answer"
            status, kind, answer = int(said.group(1) or 200), behind.group(1), behind.group(2)
        yield Example(title, block.group(2), status, kind, answer)


EXAMPLES = [*examples(PAGE), *examples(STRUCTURE_PAGE, unseen=None), *examples(DECISIONS_PAGE)]
PROGRAMS = [
    (program, printed)
    for page, printed in (
        (DECISIONS_PAGE, r"0\.\d+"),
        (RESPONSES_PAGE, r" \d+\n|\d response\.completed|\d response\.incomplete"),
    )
    for program in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
]
MESSAGES_PROGRAMS = re.findall(r"^```python\n(import anthropic\n.*?)^```$", PAGE, re.M | re.S)


def test_the_page_has_an_example_of_every_route_but_static_pages() -> None:
    called = {
        word.removeprefix(DOCUMENTED_URL).partition("?")[0] for example in EXAMPLES for word in shlex.split(example.command)
    }
    routes = re.findall(r"^### `(?:GET|POST) (\S+)`", PAGE, re.M)
    shown = re.sub(r"/resp_[0-9a-f]+", "/{response_id}", " ".join(called)).split()
    assert [route for route in routes if route not in shown] == ["/"]
    assert len(EXAMPLES) == sum(page.count("\ncurl ") for page in (PAGE, STRUCTURE_PAGE, DECISIONS_PAGE))


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{i}-{example.title}" for i, example in enumerate(EXAMPLES)])
def test_example(request: pytest.FixtureRequest, example: Example) -> None:
    server = request.getfixturevalue(server_of(example))
    command = shlex.split(example.command.replace(DOCUMENTED_URL, server.url))
    command = [word for word in command if word != "-i"]  # shows the headers; here the body is read
    done = subprocess.run([*command, "-sS", "-w", "\n%{http_code}"], capture_output=True, text=True, check=True, timeout=60)
    answer, _, status = done.stdout.rpartition("\n")
    assert int(status) == example.status, answer
    if example.answer is None:
        assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "length")
    elif example.kind == "json":
        compare(json.loads(example.answer), json.loads(answer), "$")
    elif example.answer.startswith(("data: ", "event: ")):
        compare_streams(example.answer, answer)
    elif example.kind == "text":
        names = set(re.findall(r"^(?:# TYPE )?(\w[\w:]*)", answer, re.M))  # a metric without values has at least a type
        assert set(re.findall(r"^\w[\w:]*", example.answer, re.M)) <= names
    else:
        assert answer == ""


def server_of(example: Example) -> str:
    """The fixture of a server whose model is for what is asked."""
    path = example.command.split(DOCUMENTED_URL, 1)[1].split()[0]
    if path in ("/v1/embeddings", "/pooling"):
        return "embedding_server"
    is_of_pairs = path in ("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
    return "reranking_server" if is_of_pairs else "admin_server"


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_program(
    admin_server: Any, program: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not hasattr(openai.OpenAI, "decisions"):  # of SDKs before 3.26: the same call through the client's own transport
        monkeypatch.setattr(openai.OpenAI, "decisions", property(_decisions), raising=False)
    exec(compile(program.replace(DOCUMENTED_URL, admin_server.url), "docs", "exec"), {})
    assert re.search(printed, capsys.readouterr().out)


def test_the_program_with_anthropics_client(demo_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = MESSAGES_PROGRAMS
    exec(compile(program.replace(DOCUMENTED_URL, demo_server.url), "docs/api.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def _decisions(client: openai.OpenAI) -> Any:
    return SimpleNamespace(create=lambda **body: client.post("/decisions", cast_to=Decision, body=body))


def compare(shown: Any, actual: Any, place: str) -> None:
    """What is shown exists and is of the same kind. Lists are abridged: entries are compared with those at their places."""
    if isinstance(shown, dict):
        assert isinstance(actual, dict) and shown.keys() <= actual.keys(), f"{place} has no {shown.keys() - actual.keys()}"
        for key, value in shown.items():
            compare(value, actual[key], f"{place}.{key}")
    elif isinstance(shown, list):
        assert isinstance(actual, list) and (actual or not shown), place
        for index, (value, found) in enumerate(zip(shown, actual, strict=False)):
            compare(value, found, f"{place}[{index}]")
    else:
        assert isinstance(actual, (int, float) if isinstance(shown, (int, float)) else type(shown)), f"{place} is {actual!r}"


def compare_streams(shown: str, actual: str) -> None:
    """The same number of events in the same order, and the end mark, or the same names of events."""
    shown_events, events = (re.findall(r"^data: (.*)$", text, re.M) for text in (shown, actual))
    assert len(shown_events) == len(events)
    if names := re.findall(r"^event: (.*)$", shown, re.M):
        assert names == re.findall(r"^event: (.*)$", actual, re.M)
        for index, (wanted, event) in enumerate(zip(shown_events, events, strict=True)):
            compare(json.loads(wanted), json.loads(event), f"event {index}")
        return
    assert shown_events[-1] == events[-1] == "[DONE]"
    for index, (wanted, event) in enumerate(zip(shown_events[:-1], events[:-1], strict=True)):
        wanted_choices, choices = json.loads(wanted), json.loads(event)
        compare(wanted_choices, choices, f"event {index}")
        assert bool(wanted_choices["choices"]) == bool(choices["choices"])
