"""Texts, token ids and pairs of texts to what the engine is asked for.

Cuts what a request wants cut, keeping what the tokenizer puts around a text, and checks all against the model's limits before
anything starts. Tokenising takes its time: call it beside the event loop. Knows no HTTP and no engine. Called by the routes and
by `LLM`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.engine.limits import Limits
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.pooling import Pooling, PoolingInfo, PoolingParams, PoolingTask

# The words of Qwen3-Reranker, of which a query, a document and an instruction are parts.
QWEN3_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class PoolingJob:
    """One request of the engine."""

    token_ids: list[int]
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How two texts become a prompt. max_query, max_document: most tokens of each, 0 for no limit. instruction, template_kwargs:
    for models whose prompt has a place for them."""

    max_query: int = 0
    max_document: int = 0
    instruction: str | None = None
    template_kwargs: Mapping[str, Any] | None = None


ANY, GENERATION = "any", "generation"
GENERATES = Refusal(
    "this model generates text and does not pool",
    "start it with --runner pooling for embeddings, or serve a model that is made for what is asked",
)


def require_pooling(info: PoolingInfo | None) -> PoolingInfo:
    """UnsupportedError unless the model pools."""
    if info is None:
        raise UnsupportedError(GENERATES)
    return info


def refuse_use(info: PoolingInfo | None, *uses: str) -> Refusal | None:
    """Why the model is of none of these uses: ANY, GENERATION, or of `PoolingInfo.offers`. None when it is of one."""
    offers = (GENERATION,) if info is None else info.offers
    if set(uses) & {ANY, *offers}:
        return None
    asked, served = " or ".join(uses), ", ".join(offers)
    return GENERATES if info is None else Refusal(f"this model does not serve {asked}", f"it serves {served}")


def pair_template(tokenizer: Tokenizer, given: str | None) -> ChatTemplate | None:
    """The operator's or the model's template if it is written for pairs: one that names the roles `query` and `document`."""
    source = given or tokenizer.chat_template or ""
    if not all(re.search(rf"(['\"]){role}\1", source) for role in ("query", "document")):
        return None
    return ChatTemplate.for_tokenizer(tokenizer, source)


class PoolingPrompts:
    """Makes jobs for one model. template: for pairs, see `pair_template`."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, info: PoolingInfo, template: ChatTemplate | None = None) -> None:
        self.info = info
        self._tokenizer = tokenizer
        self._limits = limits
        self._template = template

    def of_text(
        self,
        text: str,
        params: PoolingParams,
        task: PoolingTask,
        *,
        special: bool = True,
        seams: bool = False,
        param: str = "input",
    ) -> PoolingJob:
        """seams: the text is a rendered conversation, see `Tokenizer.encode`. param: how the request calls the text."""
        text = self._readable(text, params, param)
        ids = self._tokenizer.encode(text, add_special_tokens=False, seams=seams)
        around = len(self._tokenizer.wrap([])) if special else 0
        ids = _cut(ids, self._room(params, around), params)
        return self._job(self._tokenizer.wrap(ids) if special else ids, self.info.ask(params, task), param)

    def of_ids(self, token_ids: list[int], params: PoolingParams, task: PoolingTask, param: str = "input") -> PoolingJob:
        return self._job(_cut(token_ids, self._room(params, 0), params), self.info.ask(params, task), param)

    def of_pair(self, query: str, document: str, params: PoolingParams, options: PairOptions) -> PoolingJob:
        """A classifier's prompt for a query and a document."""
        query, document = self.shortened(query, options.max_query), self.shortened(document, options.max_document)
        if self._template is not None:
            return self._templated(self._template, query, document, params, options)
        if options.template_kwargs:
            raise UserError("chat_template_kwargs: this model has no template for pairs", param="chat_template_kwargs")
        if params.truncation_side == "left":
            raise UserError("truncation_side: pairs are cut at the right; leave it out", param="truncation_side")
        query, document = (self._readable(text, params, "input_text") for text in (query, document))
        if self.info.pairs == "qwen3_reranker":
            return self._qwen3(query, document, params, options)
        if options.instruction is not None:
            raise UserError("instruction: this model's prompt has no place for one; leave it out", param="instruction")
        room = self._room(params, self._tokenizer.num_around_pair)
        ids, second_from = self._tokenizer.encode_pair(query, document, room)
        return self._job(ids, self.info.ask(params, "classify", second_from), "input_text")

    def shortened(self, text: str, max_tokens: int) -> str:
        """The text of its first `max_tokens` tokens; 0: all of it."""
        if not max_tokens:
            return text
        return self._tokenizer.first_tokens(text[: 2 * max_tokens * self._tokenizer.max_chars_per_token], max_tokens)

    def _templated(
        self, template: ChatTemplate, query: str, document: str, params: PoolingParams, options: PairOptions
    ) -> PoolingJob:
        variables = dict(options.template_kwargs or {})
        if options.instruction is not None:
            variables["instruction"] = options.instruction
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        text = template.render(messages, add_generation_prompt=False, chat_template_kwargs=variables)
        return self.of_text(text, params, "classify", special=False, seams=True, param="input_text")

    def _qwen3(self, query: str, document: str, params: PoolingParams, options: PairOptions) -> PoolingJob:
        """Its words are kept whole; what is cut is the end of the document."""
        quote = self._tokenizer.quote_special
        instruction = QWEN3_INSTRUCTION if options.instruction is None else options.instruction
        middle = f"<Instruct>: {quote(instruction)}\n<Query>: {quote(query)}\n<Document>: {quote(document)}"
        middle = self._readable(middle, params, "input_text")
        begin, end = (self._tokenizer.encode(text, add_special_tokens=False) for text in (QWEN3_BEGIN, QWEN3_END))
        ids = self._tokenizer.encode(middle, add_special_tokens=False, seams=True)
        ids = _cut(ids, self._room(params, len(begin) + len(end)), params)
        return self._job([*begin, *ids, *end], self.info.ask(params, "classify"), "input_text")

    def _readable(self, text: str, params: PoolingParams, param: str) -> str:
        """As much of the text as can matter, where it is cut anyway; else a text that could never fit is refused."""
        if params.truncate_prompt_tokens is None:
            self._limits.check_text(text, self._tokenizer.max_chars_per_token, param)
            return text
        most = 2 * self._limits.max_model_len * self._tokenizer.max_chars_per_token
        return text[-most:] if params.truncation_side == "left" else text[:most]

    def _room(self, params: PoolingParams, around: int) -> int | None:
        """How many tokens of a text are kept, None for all. around: those that come with every text."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return None
        longest = self._limits.max_model_len
        if keep > longest:
            raise UserError(
                f"truncate_prompt_tokens={keep} cannot be greater than max_model_len={longest}", param="truncate_prompt_tokens"
            )
        room = (longest if keep == -1 else keep) - around
        if room < 1:
            raise UserError(
                f"truncate_prompt_tokens={keep} leaves no room for text: {around} tokens come with each",
                param="truncate_prompt_tokens",
            )
        return room

    def _job(self, token_ids: list[int], pooling: Pooling, param: str) -> PoolingJob:
        self._limits.check_prompt(token_ids, param)
        return PoolingJob(token_ids, pooling)


def _cut(token_ids: list[int], room: int | None, params: PoolingParams) -> list[int]:
    if room is None or len(token_ids) <= room:
        return token_ids
    return token_ids[len(token_ids) - room :] if params.truncation_side == "left" else token_ids[:room]


def check_texts(texts: Sequence[str], param: str) -> None:
    """UserError for a text that is empty."""
    for index, text in enumerate(texts):
        if not text:
            raise UserError(f"{param}[{index}] is empty" if len(texts) > 1 else f"{param} is empty", param=param)
