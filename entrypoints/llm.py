"""`LLM`: offline batches in the caller's own process, with vLLM's method and field names.

Checks and makes requests, drives the engine client until all are finished, and assembles RequestOutputs. Knows no HTTP.
torch is imported when an instance is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

from tqdm import tqdm

from halfbyte.config import DEFAULT_MODEL, EngineOptions
from halfbyte.engine.client import EngineClient, InProcessClient, carry_out
from halfbyte.engine.messages import EngineState, ResetPrefixCache, Sleep, WakeUp
from halfbyte.engine.output_processor import OutputProcessor, SequenceDelta
from halfbyte.engine.requests import RequestMaker
from halfbyte.engine.tokenizer import SEAM, Tokenizer
from halfbyte.entrypoints.beam_search import Beam, BeamSearch, BeamSearchParams, step_params
from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.entrypoints.decisions.decider import Asking, Decider
from halfbyte.entrypoints.decisions.offline import decide_all
from halfbyte.entrypoints.decisions.orders import check_order
from halfbyte.entrypoints.decisions.questions import read_questions
from halfbyte.entrypoints.decisions.results import Decided, Decision, as_decision
from halfbyte.entrypoints.decisions.settings import DecisionSettings
from halfbyte.entrypoints.decisions.temperatures import find_temperatures
from halfbyte.entrypoints.offline import BeamJob, find_beams
from halfbyte.entrypoints.offline_adapters import LoRARequests, OfflineAdapters
from halfbyte.entrypoints.offline_prompts import Prompt, as_prompts, parse_prompt, parse_prompts
from halfbyte.entrypoints.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestOutput,
    ScoringRequestOutput,
)
from halfbyte.entrypoints.pooling.llm import OfflinePooling
from halfbyte.errors import UserError
from halfbyte.pooling import PoolingParams
from halfbyte.types import MEMORY_PARTS, MemoryPart, SamplingParams, TokenLogprobs

Message = dict[str, Any]

log = logging.getLogger(__name__)

__all__ = ["LLM", "BeamSearchOutput", "BeamSearchParams", "CompletionOutput", "Logprob", "RequestOutput"]

# Arguments of vLLM's LLM that mean nothing else here: accepted with exactly these values, refused with any other.
_NEUTRAL_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto",),
    "disable_log_stats": (True,),
}


@dataclass(slots=True)
class _Job:
    """A prompt on its way: what came in, and the output that grows."""

    prompt_token_ids: list[int]
    params: SamplingParams
    output: RequestOutput
    priority: int = 0
    cache_salt: str | None = None
    adapter_id: int = 0


class LLM:
    """A model for offline use: `LLM().generate("The capital of France is")`.

    model: a catalogue name, a `.gguf` file, a Hugging Face folder or hub id. decisions_config: as the flag --decisions-config has
    it. Other arguments: the fields of EngineOptions.
    Raises HalfbyteError (one line) when the model cannot be served here. Not thread-safe.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        chat_template: str | None = None,
        decisions_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from halfbyte.engine.build import build_engine

        engine_options = _engine_options(model, options)
        settings = DecisionSettings.from_config(decisions_config or {})
        core, info = build_engine(engine_options)
        self._connect(InProcessClient(core, info), engine_options, chat_template, settings)

    @classmethod
    def from_client(cls, client: EngineClient, options: EngineOptions, chat_template: str | None = None) -> LLM:
        """An LLM over an engine that runs already, for example in another process."""
        llm = cls.__new__(cls)
        llm._connect(client, options, chat_template)
        return llm

    def _connect(
        self,
        client: EngineClient,
        options: EngineOptions,
        chat_template: str | None,
        decisions: DecisionSettings = DecisionSettings(),  # noqa: B008 - frozen
    ) -> None:
        from halfbyte.engine.front import load_front

        front = load_front(options)
        self.info = client.info
        self._client = client
        self._adapters = OfflineAdapters(client)
        self._tokenizer = front.tokenizer
        self._default_sampling = front.default_sampling
        self._maker = RequestMaker(client.info, front.tokenizer, options.seed)
        self._chat_template = chat_template
        self._decisions = decisions
        self._files = front.files
        self._num_decisions = 0
        self._state = EngineState()
        self.num_preemptions = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids` (and `cache_salt`).

        lora_request: the adapter of all prompts, or one for each, None for the model as it is. Returns one RequestOutput per
        prompt, in the order of the prompts. UserError names a wrong argument before anything is computed.
        """
        listed = as_prompts(prompts)
        params = self._params_for(sampling_params, len(listed))
        if priority is not None and len(priority) != len(listed):
            raise UserError(f"{len(listed)} prompts but {len(priority)} priorities", param="priority")
        jobs = [self._job(prompt, p) for prompt, p in zip(listed, params, strict=True)]
        for job, value in zip(jobs, priority or [0] * len(jobs), strict=True):
            job.priority = value
        return self._run(jobs, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding per prompt. Prompts have the forms of `generate`, errors come before anything is computed, too."""
        return self._pooling.embed(parse_prompts(prompts), pooling_params, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's labels, per prompt."""
        return self._pooling.classify(parse_prompts(prompts), pooling_params, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt, as numpy arrays. pooling_task: embed, token_embed (one per token), classify."""
        return self._pooling.encode(parse_prompts(prompts), pooling_params, pooling_task, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` answers that of `data_1`, which may be one for all."""
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        return self._pooling.score(first, second, pooling_params, use_tqdm, chat_template)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        tools: described to the model; what it makes of them is in the answers' text. lora_request: as `generate`.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        params = self._params_for(sampling_params, len(conversations))
        template = self._template(chat_template)
        jobs = []
        for conversation, p in zip(conversations, params, strict=True):
            text = template.render(
                list(conversation),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False, seams=True)
            jobs.append(self._job({"prompt_token_ids": ids, "prompt": text.replace(SEAM, "")}, p))
        return self._run(jobs, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first. Prompts are as `generate` has them.

        lora_request: as `generate`. concurrency_limit: how many prompts are searched for at once (default: all). UserError names
        a wrong argument before anything is computed.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise UserError(f"concurrency_limit must be at least 1, got {concurrency_limit}", param="concurrency_limit")
        step = step_params(self.info, params.beam_width, "beam_width")
        ends = () if params.ignore_eos else self.info.eos_token_ids
        jobs = []
        listed = as_prompts(prompts)
        adapters = self._adapters.of_prompts(lora_request, len(listed))
        for prompt, (_, adapter_id) in zip(listed, adapters, strict=True):
            job = self._job(prompt, step)
            self._maker.limits.check_prompt(job.prompt_token_ids)
            num_tokens = self._maker.limits.effective_max_tokens(params.max_tokens, len(job.prompt_token_ids))
            search = BeamSearch(job.prompt_token_ids, params.beam_width, num_tokens, params.length_penalty, ends)
            jobs.append(BeamJob(search, job.cache_salt, adapter_id))
        with tqdm(total=len(jobs), desc="Searching", unit="prompt", disable=not use_tqdm) as progress:
            find_beams(self._maker, self._awake_client, jobs, step, concurrency_limit or len(jobs), progress.update)
        return [BeamSearchOutput([self._sequence(job.search, beam, params) for beam in job.search.best()]) for job in jobs]

    def _sequence(self, search: BeamSearch, beam: Beam, params: BeamSearchParams) -> BeamSearchSequence:
        tokens = search.tokens(beam)
        hidden = beam.has_ended and not params.include_stop_str_in_output
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=[self._position(entry) for entry in beam.logprobs],
            cum_logprob=beam.cum_logprob,
            text=self._tokenizer.decode(tokens[:-1] if hidden else tokens, skip_special_tokens=hidden or not beam.has_ended),
            finish_reason="stop" if beam.has_ended else "length",
        )

    def decide(
        self,
        state: Any,
        questions: Mapping[str, Any],
        *,
        instructions: str | None = None,
        order: str | None = None,
        min_label_mass: float = 0.0,
        return_prompt: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Decision:
        """Answer typed questions about `state` with probabilities: what POST /v1/systemone does, with the same object returned.

        questions: id -> {"type", "instructions", "criteria"}, see docs/decisions.md. UserError names a question that is wrong,
        UnsupportedError says why this model cannot answer.
        """
        asking = Asking(
            state=state,
            instructions=instructions or None,
            template_kwargs=chat_template_kwargs or {},
            order=check_order(order),
            min_label_mass=min_label_mass,
        )
        calls = [(read_questions(questions), asking)]
        self._num_decisions += 1
        [result] = decide_all(self.decider, self._maker, self._awake_client, calls, priority=priority, cache_salt=cache_salt)
        name = f"decision-{self._num_decisions}"
        return as_decision(result, id=name, created=int(time.time()), model=self.info.model, with_prompts=return_prompt)

    def decide_many(
        self, calls: Iterable[tuple[Any, Mapping[str, Any], str | None]], *, order: str | None = None
    ) -> list[Decided]:
        """`decide` for many (state, questions, instructions) in one batch: answers before they take the form of a route."""
        how = check_order(order)
        asked = [(read_questions(given), Asking(state=state, instructions=text, order=how)) for state, given, text in calls]
        return decide_all(self.decider, self._maker, self._awake_client, asked)

    @property
    def _pooling(self) -> OfflinePooling:
        return OfflinePooling(self._awake_client, self._maker, self._tokenizer, self._chat_template)

    @cached_property
    def decider(self) -> Decider:
        """What plans decisions, and knows which types of questions the model can answer."""
        temperatures = find_temperatures(self._files, self._decisions.temperatures)
        template = cache(self._template)
        return Decider(self._tokenizer, template, self._maker.limits, self.info, self._decisions, temperatures)

    @property
    def is_sleeping(self) -> bool:
        return self._state.sleep_level is not None

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`. Level 1: the KV cache, and on a GPU the weights, which the host keeps. Level 2: the
        cache and the weights, which are loaded again. Level 0: nothing.

        mode: abort, wait or keep, which are the same here: nothing runs between two calls.
        """
        if isinstance(level, bool) or level not in (0, 1, 2):
            raise UserError(f"level must be 0, 1 or 2, got {level!r}", param="level")
        if mode not in ("abort", "wait", "keep"):
            raise UserError(f"mode must be abort, wait or keep, got {mode!r}", param="mode")
        self._state = carry_out(self._client, Sleep(level))

    def wake_up(self, tags: Sequence[MemoryPart] | None = None) -> None:
        """Fetch back what `sleep` gave back, or parts of it: "weights", then "kv_cache". Nothing computes before all is there."""
        if unknown := set(tags or ()) - set(MEMORY_PARTS):
            raise UserError(f"tags must be of {', '.join(MEMORY_PARTS)}, got {sorted(map(str, unknown))}", param="tags")
        self._state = carry_out(self._client, WakeUp(list(tags or ())))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. Always True here, where nothing runs between two calls."""
        return carry_out(self._client, ResetPrefixCache(reset_running_requests)).success

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config asks for, else neutral defaults."""
        return SamplingParams(**self._default_sampling)

    def close(self) -> None:
        """Free the model and its cache. The instance cannot be used again."""
        self._client.close()

    @property
    def _awake_client(self) -> EngineClient:
        """Where requests go: nobody would answer them while the engine sleeps."""
        if self.is_sleeping:
            raise UserError("the engine is asleep; call wake_up() first")
        return self._client

    def _template(self, chat_template: str | None = None) -> ChatTemplate:
        return ChatTemplate.for_tokenizer(self._tokenizer, chat_template or self._chat_template)

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise UserError(f"{count} prompts but {len(params)} sampling_params", param="sampling_params")
        return list(params)

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text, ids, salt = parse_prompt(prompt)
        if ids is None:
            self._maker.limits.check_text(text or "", self._tokenizer.max_chars_per_token)
            ids = self._tokenizer.encode(text or "")
        ids = self._maker.limits.truncate(ids, params)
        output = RequestOutput("", text, ids, [CompletionOutput(index) for index in range(params.n)])
        return _Job(ids, params, output, cache_salt=salt)

    def _run(self, jobs: list[_Job], use_tqdm: bool, lora_request: LoRARequests) -> list[RequestOutput]:
        for job, found in zip(jobs, self._adapters.of_prompts(lora_request, len(jobs)), strict=True):
            job.output.lora_request, job.adapter_id = found
        processor = OutputProcessor(self._tokenizer)
        job_of: dict[str, _Job] = {}
        requests = []
        for number, job in enumerate(jobs):
            made = self._maker.make(
                job.prompt_token_ids,
                job.params,
                priority=job.priority,
                cache_salt=job.cache_salt,
                adapter_id=job.adapter_id,
            )
            job.output.request_id = str(number)
            requests += made
            for index, request in enumerate(made):
                processor.add(request.request_id, index, job.prompt_token_ids, job.params)
                job_of[request.request_id] = job
        self._awake_client.add(requests)
        try:
            with tqdm(total=len(jobs), desc="Generating", unit="request", disable=not use_tqdm) as progress:
                self._drain(processor, job_of, progress)
        finally:
            if job_of:
                self._client.abort(list(job_of))
        return [job.output for job in jobs]

    def _drain(self, processor: OutputProcessor, job_of: dict[str, _Job], progress: tqdm[Any]) -> None:
        """Receive until every sequence in `job_of` has ended; ended ones leave it."""
        num_tokens = 0
        while job_of:
            step = self._client.receive()
            if step is None:
                continue
            self.num_preemptions += step.stats.num_preemptions
            stopped = []
            for output in step.outputs:
                if output.request_id not in job_of:
                    continue
                job = job_of[output.request_id]
                delta, needs_abort = processor.process(output)
                stopped += [output.request_id] if needs_abort else []
                if delta is None:
                    continue
                num_tokens += len(delta.token_ids)
                self._grow(job, delta)
                if delta.finish_reason is not None:
                    processor.remove(output.request_id)
                    del job_of[output.request_id]
                if job.output.finished:
                    progress.update()
                    progress.set_postfix_str(f"{num_tokens} tokens", refresh=False)
            if stopped:
                self._client.abort(stopped)

    def _grow(self, job: _Job, delta: SequenceDelta) -> None:
        output, sequence = job.output, job.output.outputs[delta.index]
        if delta.error is not None:
            log.error("prompt %s failed: %s", output.request_id, delta.error)
        sequence.text += delta.text
        sequence.token_ids += delta.token_ids
        if delta.logprobs is not None:
            sequence.logprobs = (sequence.logprobs or []) + [self._position(entry) for entry in delta.logprobs]
            sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + sum(e.logprob for e in delta.logprobs)
        if delta.prompt_logprobs is not None and output.prompt_logprobs is None:
            output.prompt_logprobs = [None, *(self._position(entry) for entry in delta.prompt_logprobs)]
        if delta.index == 0:  # its siblings may have reused this one's prefix
            output.num_cached_tokens = max(output.num_cached_tokens or 0, delta.num_cached_tokens)
        sequence.finish_reason = delta.finish_reason
        sequence.stop_reason = delta.stop_reason
        output.finished = all(s.finished() for s in output.outputs)

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        """{token id: Logprob} of one position: the sampled token first, then the best ones in order."""
        text = self._tokenizer.token_text
        position = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1):
            position.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return position


def _engine_options(model: str, given: dict[str, Any]) -> EngineOptions:
    known = {f.name for f in fields(EngineOptions)}
    for name, value in list(given.items()):
        if name in known:
            continue
        if name not in _NEUTRAL_ARGUMENTS:
            raise UserError(
                f"LLM() has no argument {name!r}; it takes {', '.join(sorted(known | {'chat_template'}))}", param=name
            )
        if value not in _NEUTRAL_ARGUMENTS[name]:
            raise UserError(f"LLM({name}={value!r}) is not supported; leave it at {_NEUTRAL_ARGUMENTS[name][0]!r}", param=name)
    if given.get("quantization", "") is None:  # as vLLM spells "the file's own"
        del given["quantization"]
    return EngineOptions(model=model, **{name: value for name, value in given.items() if name in known})
