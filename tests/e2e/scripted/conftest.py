"""A whole server around a scripted engine: real HTTP, tokenizer, limits and AsyncEngine; only the model is a script.

The script decides each token, so that tests know the text, and steps can be held back, so that nothing sleeps.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from halfbyte.config import ServerConfig
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.messages import CacheWasReset, EngineState, Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.server import Server, build_app
from halfbyte.errors import EngineDeadError
from halfbyte.types import EngineInfo, EngineOutput, EngineRequest, SchedulerStats, StepOutput, TokenLogprobs

MODEL = "scripted"
SPECIAL = ("<bos>", "<eos>", "<|start|>", "<|end|>")
BEYOND_THE_LOGITS = ("<extra0>", "<extra1>")
VOCAB_SIZE = 256 + len(SPECIAL)  # of the logits; the tokenizer is longer
BOS, EOS = 256, 257
OTHERS_LIKED = 0.01  # the probability of a token in a read that the script does not name
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if enable_thinking is defined %}[think={{ enable_thinking }} {{ reasoning_effort }}]{% endif %}"
    "{% if verbosity is defined %}[verbosity={{ verbosity }}]{% endif %}"
    "{% if tone is defined %}[tone={{ tone }}]{% endif %}"
    "{% for d in documents or [] %}[doc={{ d.text }}]{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    marks: Sequence[str] = (), special: bool = False, response_template: dict[str, Any] | None = None
) -> Tokenizer:
    """One token per byte, a BOS in front of plain text, two tokens that the model's logits do not have.

    marks: texts that are tokens of their own, behind all others; special: whether the tokenizer calls them so.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL + BEYOND_THE_LOGITS))
    backend.add_tokens([tokenizers.AddedToken(text, special=special) for text in marks])
    return Tokenizer(
        backend,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        chat_template=TEMPLATE,
        affixes=((BOS,), ()),
        response_template=response_template,
    )


TOKENIZER = byte_tokenizer()


@dataclass
class Run:
    """One live request and how far it is."""

    request: EngineRequest
    tokens: list[int] | None
    position: int = 0


class ScriptedClient:
    """An EngineClient whose steps give every live request one token.

    `says`: texts or token ids that are answered to prompts (by exact token ids), followed by EOS; other prompts get letters that
    depend on prompt, seed and position, without end. `hold`, then `allow(n)`: let n steps happen. `fails`: error text by
    position. `likes`: text of a token -> its probability, for reads; others have OTHERS_LIKED.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.says: dict[tuple[int, ...], str | list[int]] = {}
        self.fails: dict[int, str] = {}
        self.likes: dict[str, float] = {}
        self.aborted: list[str] = []
        self.requests: list[EngineRequest] = []
        self.actions: list[Any] = []
        self.state = EngineState()
        self._live: dict[str, Run] = {}
        self._ended: list[EngineOutput] = []
        self._seen: set[tuple[object, ...]] = set()
        self._changed = threading.Condition()
        self._allowed: int | None = None
        self._dead: str | None = None

    def add(self, requests: list[EngineRequest]) -> None:
        with self._changed:
            self.requests += requests
            for request in requests:
                answer = self.says.get(tuple(request.prompt_token_ids))
                tokens = self.tokenizer.encode(answer, False) if isinstance(answer, str) else answer
                tokens = None if tokens is None else [*tokens, EOS]
                self._live[request.request_id] = Run(request, tokens)
            self._changed.notify_all()

    def abort(self, request_ids: list[str]) -> None:
        with self._changed:
            for request_id in request_ids:
                if self._live.pop(request_id, None) is not None:
                    self.aborted.append(request_id)
                    self._ended.append(EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="abort"))
            self._changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        with self._changed:
            if not self._changed.wait_for(self._can_step, timeout_s):
                return None
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            outputs, self._ended = self._ended, []
            if self._live and self.computes:  # an end alone is told without a step, which a test may have allowed for another
                outputs += [self._advance(run) for run in list(self._live.values())]
                self._allowed = None if self._allowed is None else self._allowed - 1
            stats = SchedulerStats(num_running=len(self._live))
            return StepOutput(outputs=outputs, stats=stats)

    def control(self, action: Any) -> Future[Any]:
        """Answered at once: what sleeps or is paused makes no steps; there is no cache and there are no weights."""
        with self._changed:
            self.actions.append(action)
            answer: Future[Any] = Future()
            match action:
                case ResetPrefixCache():
                    answer.set_result(CacheWasReset(action.reset_running_requests or not self._live))
                case Pause() | Resume():
                    self.state = EngineState(isinstance(action, Pause), self.state.sleep_level)
                case Sleep():
                    self.state = EngineState(self.state.is_paused, action.level)
                case WakeUp():
                    is_awake = action.tags != ["weights"]
                    self.state = EngineState(self.state.is_paused, None if is_awake else self.state.sleep_level)
            if not answer.done():
                answer.set_result(self.state)
            self._changed.notify_all()
            return answer

    @property
    def computes(self) -> bool:
        return not self.state.is_paused and self.state.sleep_level is None and self._allowed != 0

    def close(self) -> None: ...

    def hold(self) -> None:
        with self._changed:
            self._allowed = 0

    def allow(self, steps: int | None) -> None:
        """Let some more steps happen; None for no limit."""
        with self._changed:
            self._allowed = None if steps is None else (self._allowed or 0) + steps
            self._changed.notify_all()

    def die(self, reason: str) -> None:
        with self._changed:
            self._dead = reason
            self._changed.notify_all()

    def wait(self, condition: Callable[[ScriptedClient], bool]) -> None:
        """Until `condition(self)` holds; requests and aborts wake it."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), 20), "the engine did not see it"

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _can_step(self) -> bool:
        return bool(self._dead is not None or self._ended or (self._live and self.computes))

    def _advance(self, run: Run) -> EngineOutput:
        request, sampling = run.request, run.request.sampling
        if run.position in self.fails:
            del self._live[request.request_id]
            return EngineOutput.failed(request.request_id, self.fails[run.position])
        if request.pooling is not None:
            del self._live[request.request_id]
            return EngineOutput(
                request.request_id,
                [],
                finish_reason="stop",
                pooled=self._pooled(request),
                num_cached_tokens=self._cached(request),
            )
        token = run.tokens[min(run.position, len(run.tokens) - 1)] if run.tokens else _letter(request, run.position)
        output = EngineOutput(request_id=request.request_id, new_token_ids=[token])
        if request.is_read:
            output.logprobs = [self._read(sampling.logprob_token_ids or [])]
        elif sampling.logprobs is not None:
            output.logprobs = [_logprobs(token, sampling.logprobs)]
        if run.position == 0:
            output.num_cached_tokens = self._cached(request)
            if sampling.prompt_logprobs is not None:
                output.prompt_logprobs = [_logprobs(t, sampling.prompt_logprobs) for t in request.prompt_token_ids[1:]]
        run.position += 1
        if token in request.stop_token_ids and run.position > sampling.min_tokens:
            output.finish_reason = "stop"
            output.stop_token_id = token if token in (sampling.stop_token_ids or ()) else None
        elif run.position >= request.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            del self._live[request.request_id]
        return output

    def _read(self, token_ids: list[int]) -> TokenLogprobs:
        """What a read finds; the most likely token is one of those that it asks for, if the script likes one, else EOS."""
        liked = [self.likes.get(self.tokenizer.decode([token]), OTHERS_LIKED) for token in token_ids]
        best = token_ids[liked.index(max(liked))] if max(liked) > OTHERS_LIKED else EOS
        return TokenLogprobs(best, math.log(max(liked)), 1, token_ids, [math.log(p) for p in liked])

    def _pooled(self, request: EngineRequest) -> bytes:
        """Numbers that follow from the tokens; those of a classifier are probabilities."""
        pooling, info = request.pooling, self.info.pooling
        assert pooling is not None and info is not None
        rows = len(request.prompt_token_ids) if pooling.task == "token_embed" else 1
        size = pooling.dimensions or info.size
        digest = hashlib.shake_128(repr((request.prompt_token_ids, pooling.activates, pooling.second_from)).encode())
        return struct.pack(f"{rows * size}f", *(byte / 256 for byte in digest.digest(rows * size)))

    def _cached(self, request: EngineRequest) -> int:
        key = (request.cache_salt, tuple(request.prompt_token_ids))
        hit = key in self._seen
        self._seen.add(key)
        return (len(request.prompt_token_ids) - 1) // 16 * 16 if hit else 0


def _letter(request: EngineRequest, position: int) -> int:
    seed = 0 if request.sampling.greedy else request.sampling.seed
    digest = hashlib.sha256(repr((request.prompt_token_ids, seed, position)).encode()).digest()
    return TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz ,.!"[digest[0] % 30], False)[0]


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The token itself at -0.5, rank 1; below it others, the last at -inf."""
    others = [token, *[(token + i) % 256 for i in range(1, max(count, 1))]][:count]
    values = [-0.5 - i for i in range(len(others))]
    if len(values) > 1:
        values[-1] = float("-inf")
    return TokenLogprobs(token, -0.5, 1, others, values)


def engine_info(**changes: Any) -> EngineInfo:
    facts: dict[str, Any] = {
        "model": "/models/scripted",
        "architecture": "Scripted",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 64,
        "eos_token_ids": [EOS],
        "max_logprobs": 5,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "num_blocks": 100,
        "kv_cache_bytes": 1 << 20,
        "kv_cache_tokens": 1600,
        "max_concurrency": 25.0,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
    }
    return EngineInfo(**facts | changes)


class ScriptedServer:
    """`halfbyte serve` in a thread of this process, on a free loopback port. `model` is the script."""

    def __init__(
        self, config: ServerConfig, info: EngineInfo, default_sampling: dict[str, Any], tokenizer: Tokenizer = TOKENIZER
    ) -> None:
        self.config = replace(config, served_model_names=config.served_model_names or (MODEL, "alias"))
        self.model = ScriptedClient(info, tokenizer)
        self.tokenizer = tokenizer
        self.engine: AsyncEngine
        self.exit_code: int | None = None
        self._stopping = False
        self._clients: list[openai.OpenAI] = []
        self._default_sampling = default_sampling
        self._server: Server
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = AsyncEngine(self.model, self.tokenizer, default_sampling=self._default_sampling, served_name=MODEL)
        app = build_app(self.engine, self.config)
        self.frontend = app.state.frontend
        self.routes = app.routes
        self._server = Server(app, self.config, self._ready.set)
        self.exit_code = await self._server.run_on(self._socket)
        await self.engine.close()

    def signal(self) -> None:
        """What SIGTERM does."""
        self._loop.call_soon_threadsafe(self._server.stop)

    def begin_stop(self) -> None:
        if self._thread.is_alive() and not self._stopping:
            self._stopping = True
            self.model.allow(None)
            self.signal()

    def stop(self) -> None:
        self.begin_stop()
        self.join()
        for client in (self.http, *self._clients):
            client.close()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    def client(self, **options: Any) -> openai.OpenAI:
        self._clients.append(openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options))
        return self._clients[-1]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of each event of a stream."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.text.split("\n\n")
        assert parts.pop() == ""
        return [part.removeprefix("data: ") for part in parts if part.startswith("data: ")]

    def say(self, prompt: str, text: str) -> str:
        """Answer `text`, then EOS, to the completion prompt `prompt`. Returns the prompt."""
        self.model.says[tuple(self.tokenizer.encode(prompt))] = text
        return prompt

    def say_chat(self, question: str, answer: str | list[int]) -> list[dict[str, str]]:
        """Answer this text, or these tokens, then EOS, to this question. Returns the messages."""
        prompt = f"<|start|>user\n{question}<|end|>\n<|start|>assistant\n"
        self.model.says[tuple(self.tokenizer.encode(prompt, False))] = answer
        return [{"role": "user", "content": question}]

    def tokens(self, text: str, special: bool = True) -> list[int]:
        return self.tokenizer.encode(text, special)


@pytest.fixture(scope="session")
def start_scripted() -> Iterator[Callable[..., ScriptedServer]]:
    """Start a server: keywords are fields of ServerConfig, `info` of EngineInfo, `default_sampling` the model's.

    marks, special, response_template: as `byte_tokenizer` has them; the model can write these tokens.
    """
    started: list[ScriptedServer] = []

    def start(
        info: dict[str, Any] | None = None,
        default_sampling: dict[str, Any] | None = None,
        marks: Sequence[str] = (),
        special: bool = False,
        response_template: dict[str, Any] | None = None,
        **config: Any,
    ) -> ScriptedServer:
        tokenizer = byte_tokenizer(marks, special, response_template) if marks or response_template else TOKENIZER
        facts = ({"vocab_size": len(tokenizer)} if marks else {}) | (info or {})
        started.append(ScriptedServer(ServerConfig(**config), engine_info(**facts), default_sampling or {}, tokenizer))
        return started[-1]

    yield start
    for server in started:
        server.begin_stop()
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def shared(start_scripted: Callable[..., ScriptedServer]) -> ScriptedServer:
    """One server with default settings and a context of 64 tokens, for all tests that leave it as it is."""
    return start_scripted(enable_prompt_tokens_details=True)
