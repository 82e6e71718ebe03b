"""The built-in page and /docs in a real browser: what they show, what they ask for, and what foreign pages get.

The browser is Chromium, from the environment variable CHROMIUM or the path. Without one the tests are skipped, by name; with
HALFBYTE_NEEDS_CHROMIUM set, as in CI, they fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from halfbyte.types import KVLayers
from tests.e2e.scripted.conftest import ScriptedServer

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP rebound.test 127.0.0.1"),
)
KINDS = [
    KVLayers(format="kv4", num_layers=5, sliding_window=128, bytes_per_token=90.0),
    KVLayers(format="bfloat16", num_layers=1, sliding_window=None, bytes_per_token=64.0),
]
LIMIT_MS = 30_000  # Swagger UI takes its time on a busy machine
MARKUP = '<script>window.hit = 1</script><img src="x" onerror="window.hit = 1"><b>bold</b>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        message = "needs Chromium: install it, or name it with CHROMIUM"
        if os.environ.get("HALFBYTE_NEEDS_CHROMIUM"):
            pytest.fail(message)
        pytest.skip(message)
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=FLAGS) as launched:
        yield launched


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., ScriptedServer]) -> ScriptedServer:
    return start_scripted(info={"max_model_len": 256, "kv_layers": KINDS})


class Visit:
    """A page in a session of its own. urls, complaints: all that it asked for, and what its console says is wrong."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.urls: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def stays_at(self, server: ScriptedServer) -> bool:
        return bool(self.urls) and all(url.startswith((f"{server.url}/", "data:")) for url in self.urls)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    with browser.new_context() as context:
        context.set_default_timeout(LIMIT_MS)
        yield Visit(context.new_page())


def open_page(visit: Visit, server: ScriptedServer) -> Page:
    visit.page.goto(server.url)
    expect(visit.page.locator("#models option")).to_have_text(["scripted", "alias"])
    return visit.page


def ask(page: Page, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def answered(page: Page) -> Any:
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    return page.locator(".assistant").last


def test_it_shows_the_server_and_asks_nobody_else(visit: Visit, server: ScriptedServer) -> None:
    page = open_page(visit, server)
    for place, text in {"#model": "scripted", "#context": "256 tokens", "#dtype": "float32", "#running": "0"}.items():
        expect(page.locator(place)).to_have_text(text)
    expect(page.locator("#kv-used")).to_have_text("0.0% of 1.0 MiB used: 0 of 1,600 tokens")
    expect(page.locator("#kv-layers tr")).to_have_text(["kv4, window 128590", "bfloat16164"])
    expect(page.get_by_role("link", name="API")).to_be_visible()
    assert visit.stays_at(server) and not visit.complaints
    unlabelled = "() => [...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).length"
    assert page.evaluate(unlabelled) == 0


def test_a_chat_goes_on_with_what_was_said(visit: Visit, server: ScriptedServer) -> None:
    server.say_chat("Hello", "Good day.")
    page = open_page(visit, server)
    ask(page, "Hello")
    expect(answered(page)).to_have_text("Good day.")
    page.locator(".settings summary").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Model").select_option("alias")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "More")
    said = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Good day."), ("user", "More")]
    body = sent.value.post_data_json
    assert [(message["role"], message["content"]) for message in body.pop("messages")] == said
    assert body == {"model": "alias", "stream": True, "temperature": 0, "max_tokens": 3}
    expect(answered(page).locator(".end")).to_contain_text("longest length")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    assert not visit.complaints


def test_an_answer_grows_and_stopping_ends_its_request(visit: Visit, server: ScriptedServer) -> None:
    page = open_page(visit, server)
    aborted = len(server.model.aborted)
    server.model.hold()
    try:
        ask(page, "Count")
        server.model.allow(2)
        text = page.locator(".assistant .text")
        expect(text).to_have_text(re.compile(r"^.{2}$", re.S), use_inner_text=False)
        server.model.allow(3)
        expect(text).to_have_text(re.compile(r"^.{5}$", re.S), use_inner_text=False)
        page.get_by_role("button", name="Stop").click()
        server.model.wait(lambda model: len(model.aborted) == aborted + 1 and model.num_live == 0)
    finally:
        server.model.allow(None)
    expect(answered(page).locator(".end")).to_have_text("Stopped.")
    assert not visit.complaints


def test_what_a_model_writes_is_text(visit: Visit, server: ScriptedServer) -> None:
    server.say_chat("Write", MARKUP)
    page = open_page(visit, server)
    ask(page, "Write")
    expect(answered(page).locator(".text")).to_have_text(MARKUP)
    assert page.locator(".log img, .log script, .log b").count() == 0
    assert page.evaluate("() => window.hit") is None and not visit.complaints


def test_thoughts_and_calls_stand_apart(visit: Visit, server: ScriptedServer) -> None:
    deltas: list[dict[str, Any]] = [
        {"reasoning": "Let me "},
        {"reasoning": f"see {MARKUP}", "content": "I look."},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": f"look{MARKUP}", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": 1}'}}]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    page = open_page(visit, server)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body="".join(events)))
    ask(page, "Look")
    answer = answered(page)
    expect(answer.locator(".thoughts")).to_have_text(f"Let me see {MARKUP}")
    expect(answer.locator(".text")).to_have_text("I look.")
    expect(answer.locator(".call")).to_have_text(f'look{MARKUP} {{"at": 1}}')
    assert page.evaluate("() => window.hit") is None and not visit.complaints


def test_what_goes_wrong_is_said(visit: Visit, server: ScriptedServer) -> None:
    page = open_page(visit, server)
    ask(page, "x" * 300)
    expect(page.locator(".wrong")).to_contain_text("256")
    expect(page.get_by_label("Message")).to_have_value("x" * 300)
    server.model.fails[2] = "the logits of this request are not finite"
    try:
        ask(page, "Fail")
        expect(page.locator(".wrong").last).to_have_text("the logits of this request are not finite")
    finally:
        server.model.fails.clear()


@pytest.fixture(scope="module")
def locked(start_scripted: Callable[..., ScriptedServer]) -> ScriptedServer:
    return start_scripted(api_keys=("right",))


def test_a_key_is_asked_for_and_kept_in_the_tab_only(visit: Visit, locked: ScriptedServer) -> None:
    page = visit.page
    page.goto(locked.url)
    expect(page.get_by_role("alert")).to_have_text("This server needs an API key.")
    for key in ("wrong", "right"):
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Use").click()
        if key == "wrong":
            expect(page.get_by_role("alert")).to_contain_text("The key was refused")
    expect(page.locator("#model")).to_have_text("scripted")
    kept = "() => [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
    assert page.evaluate(kept) == ['{"halfbyte.key":"right"}', "{}", ""]
    assert locked.get("/status").status_code == locked.get("/openapi.json").status_code == 401


def test_docs_show_every_route_without_the_network(visit: Visit, locked: ScriptedServer) -> None:
    page = visit.page
    page.goto(f"{locked.url}/docs")
    page.get_by_label("API key").fill("right")
    page.get_by_role("button", name="Use").click()
    paths = locked.get("/openapi.json", headers={"authorization": "Bearer right"}).json()["paths"]
    expect(page.locator(".opblock")).to_have_count(sum(map(len, paths.values())))
    page.locator("#operations-default-post_v1_completions .opblock-summary-control").click()
    expect(page.locator(".opblock-body")).to_contain_text("text/event-stream")
    assert visit.stays_at(locked) and all("401" in complaint for complaint in visit.complaints)


@pytest.fixture(scope="module")
def foreign_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page of another origin: another port of this machine."""
    folder: Path = tmp_path_factory.mktemp("foreign")
    (folder / "index.html").write_text("<!doctype html><title>foreign</title>")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    handler.func.log_message = lambda *_: None  # type: ignore[method-assign]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as foreign:
        thread = threading.Thread(target=foreign.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{foreign.server_port}"
        foreign.shutdown()
        thread.join()


def test_pages_of_other_origins_get_nothing(visit: Visit, server: ScriptedServer, foreign_url: str) -> None:
    page, asked = visit.page, len(server.model.requests)
    page.goto(foreign_url)
    attempt = """async ([url, options]) => {
        try { const answer = await fetch(url, options); return [answer.type, answer.status, await answer.text()]; }
        catch (error) { return error.name; }
    }"""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    as_json = {"method": "POST", "body": body, "headers": {"Content-Type": "application/json"}}
    for path in ("/status", "/v1/models", "/", "/page/page.js"):
        assert page.evaluate(attempt, [server.url + path, {}]) == "TypeError", path
    assert page.evaluate(attempt, [f"{server.url}/v1/chat/completions", as_json]) == "TypeError"
    # without asking first a page may send a form or plain text, and cannot read what comes of it
    blind = {"method": "POST", "body": body, "mode": "no-cors"}
    assert page.evaluate(attempt, [f"{server.url}/v1/chat/completions", blind]) in (["opaque", 0, ""], "TypeError")
    assert len(server.model.requests) == asked


def test_no_page_may_frame_it_and_no_other_name_leads_to_it(visit: Visit, server: ScriptedServer, foreign_url: str) -> None:
    page = visit.page
    page.goto(foreign_url)
    frame = """url => new Promise(done => {
        const frame = document.createElement("iframe");
        frame.onload = () => done();
        frame.src = url;
        document.body.append(frame);
    })"""
    page.evaluate(frame, server.url)
    assert [inner.url for inner in page.frames[1:]] == ["chrome-error://chromewebdata/"]
    answer = page.goto(f"http://rebound.test:{server.port}/")
    assert answer is not None and answer.status == 400 and "Host header" in answer.text()


def test_both_pages_can_be_left_out(start_scripted: Callable[..., ScriptedServer]) -> None:
    server = start_scripted(ui=False, disable_fastapi_docs=True)
    for path in ("/", "/page/page.js", "/page/stream.js", "/docs", "/redoc", "/openapi.json", "/page/swagger-ui-bundle.js"):
        assert server.get(path).status_code == 404, path
    assert server.get("/status").status_code == 200
