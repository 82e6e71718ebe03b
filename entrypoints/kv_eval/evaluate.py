"""`evaluate`: runs the engine once per KV format, beside the baseline's, and measures what differs.

Two engines are in memory at a time: the baseline's, which stays, and that of the format in turn. Texts are scored through both
step by step, so that no log probabilities have to be kept. Every prompt is made, and every file read, before weights are.
Knows engines and tests; knows no flags. Called by `halfbyte kv-eval` and by code that chooses or checks a format; torch is
imported when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from halfbyte.config import EngineOptions
from halfbyte.engine.front import load_front
from halfbyte.entrypoints.kv_eval import gsm8k, retrieval, structured
from halfbyte.entrypoints.kv_eval.metrics import Share, TextResult, WindowScores
from halfbyte.entrypoints.kv_eval.questions import Question, ask
from halfbyte.entrypoints.kv_eval.results import FormatResult, Report
from halfbyte.entrypoints.kv_eval.settings import Settings
from halfbyte.entrypoints.kv_eval.windows import Window, cut_windows
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.kvcache.formats import page_bytes
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.texts import sample_files
from halfbyte.resolve import AUTO_FIT

if TYPE_CHECKING:
    from halfbyte.engine.core import EngineCore
    from halfbyte.engine.tokenizer import Tokenizer
    from halfbyte.entrypoints.llm import LLM
    from halfbyte.model_runner.runner import ModelRunner

# Requests at once, unless the options say so: the cache is sized for as many, and there are two of them.
_MAX_NUM_SEQS = 8

# Any platform's default token budget holds as many.
MAX_STEP_TOKENS = 512

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, as tokens. options: the engine's, without a KV format."""

    options: EngineOptions
    windows: list[Window]
    questions: dict[str, list[Question]]


def evaluate(options: EngineOptions, formats: Sequence[str], settings: Settings, tell: Tell = lambda line: None) -> Report:
    """Measure KV formats, whatever `options.kv_cache_dtype` is. `tell` hears a line about each part as it begins.

    A format that cannot hold this model here is reported as refused. UserError says which setting or file is wrong, before
    weights are read; other HalfbyteErrors are those of an engine's start.
    """
    plan = make_plan(options, settings)
    tell(f"baseline {settings.baseline}: loading {options.model}")
    with closing(_Engine(plan.options, settings.baseline)) as baseline:
        base_result = _measure(baseline, plan, settings, tell)
        results = [_measure_format(name, baseline, plan, settings, tell) for name in formats]
        info = baseline.info
    return Report(
        model=options.model,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        texts=tuple(dict.fromkeys(window.name for window in plan.windows)),
        settings=settings,
        baseline=base_result,
        formats=tuple(results),
    )


def make_plan(options: EngineOptions, settings: Settings) -> Plan:
    """Windows and questions that fit the model, and the options of an engine that has room for them and little more."""
    front = load_front(options)
    longest = config_from_files(front.files, options.hf_overrides or {}).max_position
    if options.max_model_len not in (None, AUTO_FIT):
        longest = min(longest, options.max_model_len or longest)
    windows = _windows(settings, front.tokenizer, longest) if "text" in settings.tests else []
    questions = {test: _questions(test, settings, front.tokenizer, longest) for test in settings.tests if test != "text"}
    needs = [len(window.token_ids) for window in windows] + [q.num_tokens for each in questions.values() for q in each]
    if not needs:
        raise UserError("there is nothing to measure: name tests, and at least one text or question of each", param="tests")
    if settings.step_tokens > (options.max_num_batched_tokens or MAX_STEP_TOKENS):
        raise UserError(
            f"--step-tokens {settings.step_tokens} is more than a step of the engine may have; use at most {MAX_STEP_TOKENS}, "
            "or --max-num-batched-tokens if that is less",
            param="step_tokens",
        )
    if max(needs) > longest:
        raise UserError(
            f"the longest prompt and its answer have {max(needs)} tokens, more than the {longest} of this model; "
            "ask for shorter ones or raise --max-model-len",
            param="max_model_len",
        )
    fitted = replace(
        options,
        max_model_len=longest if options.max_model_len not in (None, AUTO_FIT) else max(needs),
        max_num_seqs=options.max_num_seqs or _MAX_NUM_SEQS,
    )
    return Plan(fitted, windows, questions)


def _windows(settings: Settings, tokenizer: Tokenizer, longest: int) -> list[Window]:
    files = [*sample_files(), *settings.text_files]
    return cut_windows(files, tokenizer, [min(length, longest) for length in settings.lengths])


def _questions(test: str, settings: Settings, tokenizer: Tokenizer, longest: int) -> list[Question]:
    if test == "retrieval":
        most = retrieval.longest_prompt(longest)
        lengths = sorted({min(length, most) for length in settings.retrieval_lengths})
        return retrieval.make_questions(tokenizer, lengths, settings.num_retrieval_queries, settings.seed)
    if test == "format":
        return structured.make_questions(tokenizer, settings.num_format_prompts, settings.seed)
    if settings.gsm8k_file is None:
        raise UserError("the gsm8k test needs --gsm8k FILE", param="gsm8k")
    return gsm8k.make_questions(tokenizer, settings.gsm8k_file, settings.num_gsm8k_questions, settings.num_gsm8k_shots)


class _Engine:
    """An engine with one KV format, in this process."""

    def __init__(self, options: EngineOptions, kv_cache_dtype: str) -> None:
        from halfbyte.engine.build import build_engine
        from halfbyte.engine.client import InProcessClient
        from halfbyte.entrypoints.llm import LLM

        options = replace(options, kv_cache_dtype=kv_cache_dtype)
        self.core: EngineCore
        self.core, self.info = build_engine(options)
        self.llm: LLM = LLM.from_client(InProcessClient(self.core, self.info), options)

    @property
    def runner(self) -> ModelRunner:
        return cast("ModelRunner", self.core.runner)

    def close(self) -> None:
        self.llm.close()


def _measure_format(name: str, baseline: _Engine, plan: Plan, settings: Settings, tell: Tell) -> FormatResult:
    """All tests of one format. Its engine is gone when this returns."""
    tell(f"{name}: loading")
    try:
        engine = _Engine(plan.options, name)
    except UnsupportedError as error:
        return FormatResult(name=name, refusal=str(error))
    with closing(engine):
        result = replace(_measure(engine, plan, settings, tell), name=name)
        if not plan.windows:
            return result
        tell(f"{name}: text, {len(plan.windows)} windows")
        scores = [_score_window(window, baseline, engine, settings.step_tokens) for window in plan.windows]
    lengths = dict.fromkeys(window.length for window in plan.windows)
    by_length = {
        length: TextResult.of([s for s, w in zip(scores, plan.windows, strict=True) if w.length == length], settings.seed)
        for length in lengths
    }
    return replace(result, text=TextResult.of(scores, settings.seed), text_by_length=by_length)


def _measure(engine: _Engine, plan: Plan, settings: Settings, tell: Tell) -> FormatResult:
    """What a format shows without another one beside it: its size and its answers."""
    specs = engine.runner.kv_specs
    bytes_per_token = sum(page_bytes(spec) / spec.block_size for spec in specs)
    num_elements = sum(spec.num_kv_heads * (spec.head_dim + spec.head_dim_v) for spec in specs)
    name = engine.info.kv_cache_dtype
    shares, by_kind = {}, {}
    for test, questions in plan.questions.items():
        tell(f"{name}: {test}, {len(questions)} questions")
        answers = ask(engine.llm, questions)
        kinds = dict.fromkeys(question.kind for question in questions)
        shares[test] = Share.of(answers)
        by_kind[test] = {kind: Share.of(_of_kind(kind, questions, answers)) for kind in kinds}
    return FormatResult(
        name=name,
        bits_per_element=8 * bytes_per_token / num_elements,
        bytes_per_token=bytes_per_token,
        shares=shares,
        shares_by_kind=by_kind,
    )


def _of_kind(kind: str, questions: Sequence[Question], answers: Iterable[bool]) -> list[bool]:
    return [answer for question, answer in zip(questions, answers, strict=True) if question.kind == kind]


def _score_window(window: Window, baseline: _Engine, engine: _Engine, step_tokens: int) -> WindowScores:
    """Both engines over the same tokens, a step of each in turn."""
    import numpy as np
    import torch

    from halfbyte.model_runner.scoring import compare, score

    inputs, next_tokens = window.token_ids[:-1], torch.tensor(window.token_ids[1:]).split(step_tokens)
    steps = (score(one.runner, one.core.scheduler.manager, inputs, step_tokens) for one in (baseline, engine))
    parts = [compare(base_NV, other_NV, next_N) for base_NV, other_NV, next_N in zip(*steps, next_tokens, strict=True)]
    columns = ("kl_N", "base_nll_N", "other_nll_N", "agrees_N")
    return WindowScores(*(np.concatenate([getattr(part, column).numpy() for part in parts]) for column in columns))
