"""The words that all floors share: what a request asks, what a step schedules, what a step returns.

Structs cross the process boundary (msgpack); dataclasses stay inside the engine process. Nothing here imports torch,
reads files or knows a model. Token positions count from 0; token counts are plain ints; times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

import msgspec

from halfbyte.adapters import LoadedAdapter
from halfbyte.errors import UserError
from halfbyte.pooling import Pooling, PoolingInfo

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 0.01
# Beyond these it changes no token, and numbers leave the range of float32.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-20, 1e20


class RequestOutputKind(IntEnum):
    """vLLM's name for how an engine reports progress. `LLM` returns finished answers, which are the same in each kind."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an answer must look like: exactly one of the first six. Field names are vLLM's.

    json: a JSON schema, as an object or as text. grammar: Lark, or EBNF with `::=`. structural_tag: JSON text. The rest changes
    how JSON is written: whitespace_pattern is a regular expression of what may stand between its tokens.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        param = "structured_outputs"
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise UserError(f"{param} takes exactly one of {', '.join(CONSTRAINTS)}; got {got}", param=param)
        kind, value = given[0], getattr(self, given[0])
        is_text = isinstance(value, str) and bool(value.strip())
        match kind:
            case "choice":
                is_right = isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
                wanted = "a list of non-empty strings, and not empty"
            case "json_object":
                is_right, wanted = value is True, "true, or left out"
            case "json":
                is_right, wanted = isinstance(value, (dict, bool)) or is_text, "a JSON schema: an object, or its text"
            case _:
                is_right, wanted = is_text, "a text, and not blank"
        if not is_right:
            raise UserError(f"{param}.{kind} must be {wanted}", param=param)
        if kind == "regex" and "\0" in value:
            raise UserError(f"{param}.regex must not contain NUL", param=param)


CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Thinking(msgspec.Struct, omit_defaults=True):
    """How the engine sees that the model thinks: a grammar applies to what comes after.

    start_ids open a thought; end_ids close it, or where they are several, any tokens that spell the same; force_ids close it when
    `budget` tokens of it are out (None: no limit).
    is_open: the prompt ends inside a thought (True), behind one or where there is none (False), or the model may begin with one
    (None).
    """

    start_ids: list[int]
    end_ids: list[int]
    force_ids: list[int]
    is_open: bool | None = None
    budget: int | None = None


class Constraint(msgspec.Struct, omit_defaults=True):
    """What bounds the tokens of a request. grammar: Lark, as `engine.grammar.compile` makes it."""

    grammar: str | None = None
    thinking: Thinking | None = None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a generation ends. Field names and defaults are vLLM's.

    Ranges are checked when an instance is made (UserError names the field); what depends on the model (vocabulary width,
    context length, maximum logprobs) is checked by `halfbyte.engine.limits.Limits`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | str | None = msgspec.field(default_factory=list)
    stop_token_ids: list[int] | None = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = msgspec.field(default_factory=list)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, whatever form the user gave."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or self.stop is None:
            self.stop = self.stop_strings
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.bad_words = list(self.bad_words or ())
        if self.seed == -1:
            self.seed = None
        _check_sampling(self)
        if self.greedy:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        self.repetition_penalty = min(MAX_REPETITION_PENALTY, max(MIN_REPETITION_PENALTY, self.repetition_penalty))
        if self.top_k == -1:
            self.top_k = 0
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)


def _check_sampling(p: SamplingParams) -> None:
    """Raise UserError for a value outside its range. Types are checked too: these arrive from Python callers as they are."""
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        _number(name, getattr(p, name))
    for name, low in (("n", 1), ("top_k", -1), ("min_tokens", 0)):
        _integer(name, getattr(p, name), low, 2**31 - 1)
    for name, low, high in (
        ("seed", -(2**63), 2**63 - 1),
        ("max_tokens", 1, 2**31 - 1),
        ("logprobs", -1, 2**31 - 1),
        ("prompt_logprobs", -1, 2**31 - 1),
        ("truncate_prompt_tokens", -1, 2**31 - 1),
        ("thinking_token_budget", -1, 2**31 - 1),
    ):
        if (value := getattr(p, name)) is not None:
            _integer(name, value, low, high)
    _in_range("n", p.n, 1, 16384)
    _in_range("temperature", p.temperature, 0.0, 2.0)
    _in_range("min_p", p.min_p, 0.0, 1.0)
    _in_range("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    if not 0.0 < p.top_p <= 1.0:
        raise UserError(f"top_p must be in (0, 1], got {p.top_p}", param="top_p")
    if p.repetition_penalty <= 0.0:
        raise UserError(f"repetition_penalty must be greater than 0, got {p.repetition_penalty}", param="repetition_penalty")
    if p.n > 1 and p.greedy:
        raise UserError(f"n={p.n} needs temperature > 0: greedy sampling gives the same text every time", param="n")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise UserError(f"min_tokens={p.min_tokens} is larger than max_tokens={p.max_tokens}", param="min_tokens")
    for text in p.stop_strings:
        if not isinstance(text, str) or not text:
            raise UserError(f"stop must hold non-empty strings, got {text!r}", param="stop")
    for word in p.bad_words or ():
        if not isinstance(word, str) or not word:
            raise UserError(f"bad_words must hold non-empty strings, got {word!r}", param="bad_words")
    if p.stop_strings and not p.detokenize:
        raise UserError("stop strings need detokenize=True", param="stop")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise UserError("allowed_token_ids must not be empty", param="allowed_token_ids")
    for bias in (p.logit_bias or {}).values():
        _number("logit_bias", bias)
    if p.logit_bias:
        p.logit_bias = {token: min(100.0, max(-100.0, float(bias))) for token, bias in p.logit_bias.items()}
    if p.logprob_token_ids is not None and p.logprobs is None:
        raise UserError("logprob_token_ids needs logprobs", param="logprob_token_ids")


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value!r}", param=name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} must be an integer in [{low}, {high}], got {value!r}", param=name)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UserError(f"{name} must be in [{low}, {high}], got {value}", param=name)


class EngineRequest(msgspec.Struct, omit_defaults=True):
    """One generation on its way to the engine. `sampling.n` is 1 and `sampling.seed` is set: n > 1 became n requests.

    max_tokens: 0 for a read, which asks what comes next and nothing more: one token is reported, with its log probabilities, and
    takes no place in the context. adapter_id: of a `LoadedAdapter`; 0 for the model as it is. pooling: a read of hidden states in
    place of a token.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: list[int]
    arrival_s: float
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    adapter_id: int = 0
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    constraint: Constraint | None = None
    pooling: Pooling | None = None

    @property
    def is_read(self) -> bool:
        return self.max_tokens == 0

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end the generation: the request's own, and EOS unless it is ignored."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset(self.sampling.stop_token_ids or ()) | frozenset(eos)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probability (natural log) and rank (1 = most likely) of one token, and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(msgspec.Struct, omit_defaults=True):
    """What one step did for one request. `finish_reason` is set exactly once per request, on its last output.

    ends_in_text: it stopped because its grammar came to an end: the last token is part of the answer, no stop token.
    pooled: float32 numbers of a request that asked for pooling, on its last output: one vector, or one per token.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    ends_in_text: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    error: str | None = None
    pooled: bytes | None = None

    @classmethod
    def failed(cls, request_id: str, error: str) -> EngineOutput:
        """The terminal output of a request that failed alone. `error` is safe to show to the client."""
        return cls(request_id=request_id, new_token_ids=[], finish_reason="error", error=error)


class SchedulerStats(msgspec.Struct):
    """Gauges after a step, and counters since the last report (so that a lost report loses nothing but itself)."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries_tokens: int = 0
    prefix_cache_hits_tokens: int = 0
    num_scheduled_tokens: int = 0


class StepOutput(msgspec.Struct):
    """The one message that a step sends to the API process."""

    outputs: list[EngineOutput]
    stats: SchedulerStats
    timestamp_s: float = 0.0


@dataclass(slots=True)
class NewRow:
    """A request that enters the runner (new, or resumed after preemption: then `token_ids` holds its outputs too).

    block_ids: one list per KV group. num_computed_tokens: KV already present (prefix cache), < len(token_ids).
    adapter_id: 0 for the model as it is.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    adapter_id: int = 0
    pooling: Pooling | None = None


@dataclass(slots=True)
class GrownRow:
    """A request that the runner holds already: `new_block_ids` (one list per KV group) are appended to its block tables."""

    request_id: str
    num_computed_tokens: int
    new_block_ids: list[list[int]]


@dataclass(slots=True)
class SchedulerOutput:
    """One step's batch as a difference to the last: who enters, who grew, who left.

    num_scheduled_tokens: request_id -> tokens to compute this step (>= 1); its order is the order of the batch. A request
    samples when computed + scheduled reaches all of its tokens, those that a step before sampled included, whether or not that
    one's result is there yet. Finished and preempted rows are released before new rows enter. drafts: speculative tokens per
    request, not counted as known.
    """

    new_rows: list[NewRow] = field(default_factory=list)
    grown_rows: list[GrownRow] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_request_ids: list[str] = field(default_factory=list)
    preempted_request_ids: list[str] = field(default_factory=list)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    needs_grammar_mask: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def is_empty(self) -> bool:
        """Nothing is to be computed, and no row to be released."""
        return not (self.num_scheduled_tokens or self.finished_request_ids or self.preempted_request_ids)


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step computed, in batch order.

    token_ids[i]: tokens sampled for request_ids[i] ([] while its prompt is not done). logprobs[i]: one entry per sampled
    token, or None. prompt_logprobs: request_id -> entries for the prompt positions whose *next* token became known this
    step (so a prompt of P tokens yields P - 1 in all). bad_rows: requests with non-finite numbers; they fail alone.
    pooled: request_id -> what this step gives of its vectors, float32: all of one vector with the prompt's last token, those of
    single tokens as they are computed.
    """

    request_ids: list[str]
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    bad_rows: frozenset[str] = frozenset()
    pooled: dict[str, bytes] = field(default_factory=dict)

    def result(self) -> ModelRunnerOutput:
        """An output that is there already is a `PendingOutput`, too."""
        return self


class PendingOutput(Protocol):
    """The output of a step that the device may still be computing."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what went wrong on the device; called once, at a time when rows may have changed hands."""
        ...


MemoryPart = Literal["weights", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")  # in the order in which they come back


class Runner(Protocol):
    """All that the engine knows of a device. `execute` then `sample`, once each per step; one thread.

    missing: what `sleep` gave back and `wake_up` did not fetch yet; steps need all of it.

    Neither waits for the device, and steps take effect in their order: a step may be launched before the result of the one
    before it is there, and reads that one's tokens where they are, on the device. A step without tokens is not sampled.
    """

    def execute(self, scheduled: SchedulerOutput) -> None: ...

    def sample(self, grammar_mask: Any | None = None) -> PendingOutput: ...

    @property
    def missing(self) -> tuple[MemoryPart, ...]: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, part: MemoryPart) -> None: ...

    def close(self) -> None: ...


class AdapterRunner(Protocol):
    """What a runner does beside that where it has room for adapters."""

    def add_adapter(self, adapter_id: int, path: str) -> None:
        """Load one for rows that enter from now on. HalfbyteError, and nothing changed, when it cannot be applied."""
        ...

    def remove_adapter(self, adapter_id: int) -> None:
        """No row uses it, and none will."""
        ...


class KVLayers(msgspec.Struct, kw_only=True):
    """Layers whose KV is kept in one way. bytes_per_token: of one token in all of them."""

    format: str
    num_layers: int
    sliding_window: int | None
    bytes_per_token: float


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the engine process tells the API process when it is ready: the model's facts and the exact capacity.

    vocab_size is the width of the logits: token ids of requests are checked against it, never against the tokenizer.
    batch_invariant: a request's bits depend on nothing beside it. logprobs_mode: one of `LOGPROBS_MODES`.
    max_loras: how many adapters may be loaded, 0: none. adapters: those that are. pooling: None for a model that generates; one
    that pools does nothing else. phases: (name, seconds) of the start-up, in order.
    """

    model: str
    architecture: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    max_logprobs: int
    logprobs_mode: str = "raw_logprobs"
    batch_invariant: bool = False
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    max_concurrency: float
    kv_layers: list[KVLayers] = msgspec.field(default_factory=list)
    enable_prefix_caching: bool
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    max_loras: int = 0
    adapters: list[LoadedAdapter] = msgspec.field(default_factory=list)
    pooling: PoolingInfo | None = None
    phases: list[tuple[str, float]] = msgspec.field(default_factory=list)
    report: list[str] = msgspec.field(default_factory=list)
