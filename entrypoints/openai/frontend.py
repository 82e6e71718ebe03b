"""What all routes share: the engine, the served names, the templates, and the calls that are open.

`Call` is one inference request with its label, its public id and its one line in the log; client strings are labels, never
keys. `Frontend` admits calls, starts generations and drains when the server stops. Knows no wire format.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from starlette.types import Scope

from halfbyte import __version__
from halfbyte.adapters import LoadedAdapter
from halfbyte.config import ServerConfig
from halfbyte.engine.limits import Limits
from halfbyte.engine.messages import Answer, EngineState, Order
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.engine.totals import Totals
from halfbyte.entrypoints.answers.parser import AnswerSyntax
from halfbyte.entrypoints.beside import Beside
from halfbyte.entrypoints.chat_template import ChatTemplate, read_template
from halfbyte.entrypoints.decisions.decider import Decider
from halfbyte.entrypoints.decisions.reading import Read
from halfbyte.entrypoints.decisions.settings import DecisionSettings
from halfbyte.entrypoints.decisions.temperatures import Temperatures
from halfbyte.entrypoints.http_metrics import HttpMetrics
from halfbyte.entrypoints.openai.errors import ApiError, GenerationError, explain, unavailable
from halfbyte.entrypoints.openai.served_adapters import ServedAdapters
from halfbyte.entrypoints.openai.settings import StructureSettings
from halfbyte.entrypoints.openai.streaming import Closeable
from halfbyte.entrypoints.pooling.prompts import (
    GENERATION,
    PoolingJob,
    PoolingPrompts,
    pair_template,
    refuse_use,
    require_pooling,
)
from halfbyte.entrypoints.responses.store import ResponseStore
from halfbyte.errors import EngineDeadError, NotFoundError, Refusal
from halfbyte.pooling import Pooling
from halfbyte.types import EngineInfo, SamplingParams, Thinking

LABEL_KEY = "halfbyte.request_label"  # in the ASGI scope: the valid X-Request-Id of a request, absent without one
OWNER_KEY = "halfbyte.owner"  # in the ASGI scope: the digest of the API key that a request came with, absent without one
MAX_LABEL_CHARS = 128
MAX_FOREIGN_TEMPLATES = 2  # templates of requests that run at once, each in a process of its own
ABORT_GRACE_S = 5.0
ASLEEP_RETRY_S = 5
STOPPING = "the server is shutting down"
ASLEEP = "the engine is asleep until an operator sends POST /wake_up"

log = logging.getLogger(__name__)


class Metrics(Protocol):
    def render(self) -> bytes: ...


class Engine(Protocol):
    """The part of AsyncEngine that the routes use. Every error of `generate` is raised by the call itself."""

    info: EngineInfo
    limits: Limits
    totals: Totals
    tokenizer: Tokenizer
    default_sampling: dict[str, Any]
    dead: str | None
    died: asyncio.Event
    state: EngineState

    @property
    def metrics(self) -> Metrics: ...

    async def encode(self, text: str, add_special_tokens: bool = True, *, seams: bool = False) -> list[int]: ...

    async def compile_grammar(self, make: Callable[[], str], param: str) -> str: ...

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: LoadedAdapter | None = None,
        grammar: str | None = None,
        thinking: Thinking | None = None,
        marks: Mapping[int, str] | None = None,
        is_admitted: bool = False,
    ) -> Closeable: ...

    def read(
        self,
        prompt_token_ids: list[int],
        token_ids: list[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> Closeable: ...

    def pool(
        self, prompt_token_ids: list[int], pooling: Pooling, *, priority: int = 0, cache_salt: str | None = None
    ) -> Closeable: ...

    def admit(self, num_sequences: int, num_prompt_tokens: int) -> None: ...

    def abort_all(self, error: Exception) -> None: ...

    async def control(self, action: Order[Answer]) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a generation is asked for. grammar, thinking, marks: as `AsyncEngine.generate` has them."""

    prompt_token_ids: list[int]
    params: SamplingParams
    grammar: str | None = None
    thinking: Thinking | None = None
    marks: Mapping[int, str] | None = None


def request_label(candidate: object) -> str | None:
    """A client's name for its request if it can be one (short, printable ASCII), else None."""
    if isinstance(candidate, str) and 0 < len(candidate) <= MAX_LABEL_CHARS and candidate.isascii() and candidate.isprintable():
        return candidate
    return None


def owner_of(scope: Scope) -> bytes:
    """Whose request this is: equal for requests with the same API key, and for all where there are no keys."""
    owner: bytes = scope.get(OWNER_KEY, b"")
    return owner


@dataclass(slots=True, eq=False)
class Call:
    """One inference request. `end` writes its terminal line, once, whoever calls it first.

    detached: it goes on behind its answer, and ends itself.
    """

    frontend: Frontend
    route: str
    prefix: str
    label: str
    named_by_header: bool = False
    owner: bytes = b""
    detached: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reasons: set[str] = field(default_factory=set)
    ended: bool = False

    def use_body_label(self, request_id: str | None) -> None:
        """The body's request_id names the call unless a header did."""
        if not self.named_by_header and (label := request_label(request_id)) is not None:
            self.label = label

    @property
    def public_id(self) -> str:
        return self.prefix + self.label

    def end(self, error: Exception | None = None, gone: bool = False) -> ApiError | None:
        """Close the call and log how it ended. Returns what to tell the client of `error`."""
        problem = None if error is None else self.frontend.explain(error)
        if self.ended:
            return problem
        self.ended = True
        self.frontend.forget(self)
        if gone:
            self._line(logging.INFO, "abort")
        elif problem is not None:
            level = logging.ERROR if problem.status == 500 else logging.INFO  # 501 and 503 are no faults
            self._line(level, f"error {problem.status} {problem.type} param={problem.param}", error)
        elif self.frontend.config.enable_log_requests:
            self._line(logging.INFO, ",".join(sorted(self.finish_reasons)) or "done")
        return problem

    def _line(self, level: int, reason: str, error: Exception | None = None) -> None:
        """A 4xx's message is the client's matter (it may quote the prompt); logged are an engine's cause and a bug's trace."""
        known = isinstance(error, EngineDeadError | GenerationError)
        log.log(
            level,
            "request %s %s ended: %s, %d prompt tokens, %d completion tokens%s",
            self.label,
            self.route,
            reason,
            self.num_prompt_tokens,
            self.num_completion_tokens,
            f": {error}" if known else "",
            exc_info=error if level == logging.ERROR and not known else None,
        )


class Frontend:
    """The routes' shared state. UserError if the operator's chat template cannot be used.

    draining: no new calls are taken. stopping: open ones are being ended too. closing: why new calls are refused for a while.
    cuts_calls: while the engine sleeps, open calls get no more generations. order: held while an operator's order is carried out.
    """

    def __init__(self, engine: Engine, config: ServerConfig, temperatures: Temperatures | None = None) -> None:
        self.engine = engine
        self.config = config
        self.model_names = config.served_model_names or (engine.info.model,)
        self.adapters = ServedAdapters(engine, engine.info.adapters, self.model_names, engine.info.max_loras)
        self.sampling_defaults = sampling_defaults(engine, config)
        self.fingerprint = fingerprint(engine.info)
        self.http_metrics = HttpMetrics()
        self.foreign_templates = asyncio.Semaphore(MAX_FOREIGN_TEMPLATES)
        self.beside = Beside()
        self.answers = AnswerSyntax(config, engine.tokenizer)
        self.structure = StructureSettings.from_config(config.structured_outputs_config)
        self._chat_template: ChatTemplate | None = None
        if config.chat_template is not None:
            self._chat_template = ChatTemplate.for_tokenizer(engine.tokenizer, read_template(config.chat_template))
        self.responses = ResponseStore(config.responses_store_bytes, config.responses_store_ttl_s)
        self.decider = self._make_decider(temperatures or Temperatures())
        self.started_s = time.monotonic()
        self.draining = False
        self.stopping = False
        self.closing: str | None = None
        self.cuts_calls = False
        self.order = asyncio.Lock()
        self._open: set[Call] = set()
        self._ended = asyncio.Event()  # a call has ended; whoever waits for that clears it

    @property
    def healthy(self) -> bool:
        return self.engine.dead is None and not self.draining

    @property
    def num_open_calls(self) -> int:
        return len(self._open)

    def open_call(self, scope: Scope, prefix: str) -> Call:
        label = scope.get(LABEL_KEY)
        call = Call(self, scope["path"], prefix, label or uuid.uuid4().hex, label is not None, owner_of(scope))
        self._open.add(call)
        return call

    def forget(self, call: Call) -> None:
        self._open.discard(call)
        self._ended.set()

    def served_model(self, name: str | None) -> str:
        """The name to answer with, the model's or an adapter's. An absent or empty name means the first one; NotFoundError for
        one that is not served."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names and name not in self.adapters:
            served = ", ".join([*self.model_names, *(adapter.name for adapter in self.adapters.all())])
            raise NotFoundError(f"model {name[:200]!r} does not exist; served: {served}", param="model")
        return name

    @property
    def chat_template(self) -> ChatTemplate:
        """The operator's or the model's template. UserError when there is none."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate.for_tokenizer(self.engine.tokenizer)
        return self._chat_template

    def _make_decider(self, temperatures: Temperatures) -> Decider:
        engine, config = self.engine, self.config
        return Decider(
            engine.tokenizer,
            lambda: self.chat_template,
            engine.limits,
            engine.info,
            DecisionSettings.from_config(config.decisions_config),
            temperatures,
            template_kwargs=config.default_chat_template_kwargs,
            reasoning=self.answers.reasoning,
            refusal=self.refuse_route(GENERATION),
        )

    @cached_property
    def pooling_prompts(self) -> PoolingPrompts:
        """What makes prompts of texts. UnsupportedError for a model that generates."""
        engine = self.engine
        info = require_pooling(engine.info.pooling)
        given = self.config.chat_template
        template = None
        if info.pairs:
            template = pair_template(engine.tokenizer, None if given is None else read_template(given))
        return PoolingPrompts(engine.tokenizer, engine.limits, info, template)

    def refuse_route(self, *uses: str) -> Refusal | None:
        """Why the model cannot serve a route that is for one of these uses, see `refuse_use`."""
        return refuse_use(self.engine.info.pooling, *uses)

    def require_alive(self) -> None:
        """HttpError 503 when the server stops, or the engine is gone."""
        if self.draining:
            raise unavailable(STOPPING)
        if self.engine.dead is not None:
            raise unavailable(f"the engine is gone: {self.engine.dead}", retry_after_s=5)

    def require_serving(self) -> None:
        """HttpError 503 when no new calls for the engine are taken."""
        self.require_alive()
        if self.closing is not None or self.engine.state.sleep_level is not None:
            raise unavailable(self.closing or ASLEEP, ASLEEP_RETRY_S)

    def _require_going(self) -> None:
        """HttpError 503 when calls that are open get nothing more of the engine."""
        if self.stopping:
            raise unavailable(STOPPING)
        if self.cuts_calls and (self.closing is not None or self.engine.state.sleep_level is not None):
            raise unavailable(ASLEEP, ASLEEP_RETRY_S)

    async def generate(
        self,
        asked: Sequence[Asked],
        adapter: LoadedAdapter | None,
        *,
        priority: int,
        cache_salt: str | None,
        is_admitted: bool = False,
    ) -> list[Closeable]:
        """Start one generation per prompt: all, or none and the error of the one that could not start.

        adapter: from `adapters.of` the served name, at once before the first generation of a call.
        """
        self._require_going()
        generations: list[Closeable] = []
        try:
            of_call: dict[str, Any] = {
                "priority": priority,
                "cache_salt": cache_salt,
                "adapter": adapter,
                "is_admitted": is_admitted,
            }
            for one in asked:
                bounds: dict[str, Any] = {"grammar": one.grammar, "thinking": one.thinking, "marks": one.marks}
                generations.append(self.engine.generate(one.prompt_token_ids, one.params, **of_call, **bounds))
        except Exception as error:
            for generation in generations:
                await generation.aclose()
            if isinstance(error, EngineDeadError):
                raise unavailable(f"the engine is gone: {error}", retry_after_s=5) from None
            raise
        return generations

    def read(self, read: Read, adapter: LoadedAdapter | None, *, priority: int, cache_salt: str | None) -> Closeable:
        """Start one read of a decision that was admitted."""
        self._require_going()
        try:
            of_call: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "adapter": adapter}
            return self.engine.read(read.prompt_token_ids, read.token_ids, **of_call)
        except EngineDeadError as error:
            raise unavailable(f"the engine is gone: {error}", retry_after_s=5) from None

    def pool(self, job: PoolingJob, *, priority: int, cache_salt: str | None) -> Closeable:
        """Start one job of a call that was admitted."""
        self._require_going()
        try:
            return self.engine.pool(job.token_ids, job.pooling, priority=priority, cache_salt=cache_salt)
        except EngineDeadError as error:
            raise unavailable(f"the engine is gone: {error}", retry_after_s=5) from None

    def explain(self, error: Exception) -> ApiError:
        """As `errors.explain`, but a generation that ends because the server stops is a 503."""
        if self.stopping and isinstance(error, EngineDeadError):
            return unavailable(STOPPING).error
        return explain(error)

    async def drain(self, timeout_s: float) -> None:
        """Take no new calls, let open ones finish for at most `timeout_s`, then end the rest with an error answer."""
        self.draining = True
        log.info("stopping: %d open requests, waiting at most %g s for them", len(self._open), timeout_s)
        await self._wait_idle(timeout_s)
        self.stopping = True
        if self._open:
            log.info("stopping: %d requests are aborted", len(self._open))
            self.engine.abort_all(EngineDeadError(STOPPING))
            await self._wait_idle(ABORT_GRACE_S)

    async def wait_for_open_calls(self) -> None:
        """Until all calls that are open now have ended."""
        calls = set(self._open)
        while calls & self._open:
            self._ended.clear()
            await self._ended.wait()

    async def _wait_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait_for_open_calls()


def sampling_defaults(engine: Engine, config: ServerConfig) -> dict[str, Any]:
    """What a request gets for a sampling field it leaves out: the operator's values over the model's.

    `engine.default_sampling` is empty where the operator wants nothing of the model's. `max_tokens` (generation_config's
    max_new_tokens) is among the defaults: the default for chat, and a cap where the operator set it.
    """
    defaults = dict(engine.default_sampling)
    for name, value in config.override_generation_config.items():
        defaults["max_tokens" if name == "max_new_tokens" else name] = value
    return defaults


def fingerprint(info: EngineInfo) -> str:
    """Changes when a change of model, precision or capacity may change tokens."""
    facts = (info.model, info.architecture, info.dtype, info.kv_cache_dtype, info.vocab_size, info.max_model_len)
    return f"halfbyte-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
