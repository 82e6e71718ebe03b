"""A session of generated requests with one server, and what holds of every answer in it. Used by the tests of schemathesis."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from tests.e2e.conftest import ROOT, ServerProcess
from tests.e2e.error_shapes import standard_error
from tests.e2e.schema_requests import JSON_TYPE, Answers, Schema, Sent, requests_of

LEAKS = re.compile(rf"0x[0-9a-f]{{4,}}|Traceback|site-packages|{re.escape(str(ROOT))}|{re.escape(sys.prefix)}", re.I)

Talk = tuple[Sent, httpx.Response]


@dataclass(frozen=True)
class Session:
    """All that was said to one server. pids: of the server and the engine, before and after."""

    server: ServerProcess
    document: Schema
    talks: Sequence[Talk]
    pids: tuple[tuple[int, int], tuple[int, int]]

    def refused(self) -> list[Talk]:
        return [(sent, answer) for sent, answer in self.talks if 400 <= answer.status_code < 500]

    def missed_routes(self) -> set[tuple[str, str]]:
        """(method, path) of the document that no request went to, or the other way round."""
        routes = {(method.upper(), path) for path, methods in self.document["paths"].items() for method in methods}
        return {(sent.method, sent.path) for sent, _ in self.talks} ^ routes

    def missed_fields(self, paths: Iterable[str]) -> set[tuple[str, str, str]]:
        """("taken" or "refused", path, field) of what never happened: fields of these paths, and parameters of all."""
        taken = {(sent.path, sent.field) for sent, answer in self.talks if answer.status_code == 200}
        refused = {(sent.path, sent.field) for sent, _ in self.refused()}
        fields = set()
        for path in paths:
            schema = self.document["paths"][path]["post"]["requestBody"]["content"][JSON_TYPE]["schema"]
            fields |= {(path, field) for field in schema["properties"]}
        fields |= {
            (path, parameter["name"])
            for path, methods in self.document["paths"].items()
            for operation in methods.values()
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query"
        }
        return {("taken", *place) for place in fields - taken} | {("refused", *place) for place in fields - refused}


def talk_to(
    server: ServerProcess,
    right: Mapping[str, Schema],
    beside: Mapping[str, Mapping[str, Schema]],
    *,
    name: Callable[[httpx.Client], Mapping[str, str]] = lambda client: {},
    key: str | None = None,
    at_once: int = 8,
) -> Session:
    """Send all requests for the server's document. right, beside: as `requests_of` has them.

    name: makes what the parameters in a path name, for each request anew. key: send this one, and only to routes that need one.
    """
    before = (server.process.pid, server.engine_pid())
    authorization = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, timeout=120, headers=authorization) as client:
        document = client.get("/openapi.json").json()
        if key is not None:
            document["paths"] = _guarded(document["paths"])

        def send(sent: Sent) -> Talk:
            headers = {} if sent.body is None else {"content-type": JSON_TYPE}
            path = sent.path.format(**name(client)) if "{" in sent.path else sent.path
            return sent, client.request(sent.method, f"{path}?{sent.query}", content=sent.body, headers=headers)

        with ThreadPoolExecutor(at_once) as pool:
            talks = list(pool.map(send, requests_of(document, right, beside)))
    return Session(server, document, talks, (before, (server.process.pid, server.engine_pid())))


def _guarded(paths: Schema) -> Schema:
    needs_key = {path: {method: op for method, op in methods.items() if op.get("security")} for path, methods in paths.items()}
    return {path: methods for path, methods in needs_key.items() if methods}


def told(sent: Sent, answer: httpx.Response) -> str:
    body = (sent.body or b"").decode(errors="replace")
    return f"{sent.method} {sent.path}?{sent.query} {sent.field} {body}\n{answer.status_code} {answer.text}"


def check_answers(session: Session) -> None:
    """Each is as the document says: its status, its media type, and its body, which holds what is required and listed.

    Every path has answered well, too.
    """
    answers = Answers(session.document)
    wrong = [f"{told(sent, answer)}\n{fault}" for sent, answer in session.talks if (fault := answers.fault(sent, answer))]
    assert not wrong, "\n\n".join(wrong[:5])
    assert {sent.path for sent, answer in session.talks if answer.status_code == 200} >= set(session.document["paths"])


def check_refusals(session: Session) -> None:
    """Each has the standard form, and tells nothing of the machine."""
    assert session.refused()
    for sent, answer in session.refused():
        error = standard_error(answer)
        assert error is not None and isinstance(error["message"], str) and isinstance(error["type"], str), told(sent, answer)
        assert error["param"] is None or isinstance(error["param"], str), told(sent, answer)
        assert not LEAKS.search(answer.text), told(sent, answer)


def check_server(session: Session) -> None:
    """Its processes are those that began, serve, and have logged no failure."""
    before, after = session.pids
    assert before == after and httpx.get(f"{session.server.url}/health").status_code == 200
    assert not [line for line in session.server.lines if "Traceback" in line or " ERROR " in line]
