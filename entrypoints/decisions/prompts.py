"""Conversations to the prompts that decisions are read behind: rendered without thoughts, up to the first token of an answer.

Knows chat templates, the tokenizer and the marks of thoughts; knows no question. Called by the readers, beside the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from halfbyte.engine.limits import Limits
from halfbyte.engine.tokenizer import SEAM, Tokenizer
from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.entrypoints.reasoning_parsers import REASONING_PARSERS
from halfbyte.entrypoints.reasoning_parsers.protocol import ReasoningSyntax
from halfbyte.entrypoints.reasoning_parsers.think_tags import Tags
from halfbyte.errors import UserError

# A long text that several prompts have in common is tokenised once, but for its end, where what follows may matter.
LONG_CHARS = 4096
_END_CHARS = 1024
_BETWEEN_WORDS = re.compile(r"[a-z](?= [a-z])")  # no vocabulary has a token that spans this
_NUM_KEPT = 4

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    token_ids: list[int]


class PromptMaker:
    """For one model. template: gives the chat template, or raises why there is none. reasoning: the operator's parser.

    limits: None where prompts are made to be looked at only.
    """

    def __init__(
        self,
        template: Callable[[], ChatTemplate],
        tokenizer: Tokenizer,
        limits: Limits | None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: ReasoningSyntax | None = None,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._limits = limits
        self._kwargs = {**(template_kwargs or {}), "enable_thinking": False}
        self._reasoning = reasoning
        self._encode_long = lru_cache(_NUM_KEPT)(self._encode)

    def make(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None, shared: str = "") -> Prompt:
        """shared: a text at the beginning of a message, which many prompts have in common.

        UserError when the template refuses the messages, or the text could not fit into the context.
        """
        given = template_kwargs or {}
        if given.get("enable_thinking"):
            raise UserError(
                "chat_template_kwargs: enable_thinking must not be true; a decision is read at the first token of the answer",
                param="chat_template_kwargs",
            )
        marked = self._template().render(messages, chat_template_kwargs={**self._kwargs, **given})
        marked = self._without_thought(marked)
        if self._limits is not None:
            self._limits.check_text(marked, self._tokenizer.max_chars_per_token)
        end = self._end_of(shared, marked)
        return Prompt(marked.replace(SEAM, ""), [*self._encode_long(marked[:end]), *self._encode(marked[end:])])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, seams=True) if text else []

    def _end_of(self, shared: str, text: str) -> int:
        """Where `text` may be cut behind most of the shared text; 0 where that is short, or has no place to cut."""
        if len(shared) < LONG_CHARS:
            return 0
        places = list(_BETWEEN_WORDS.finditer(shared, len(shared) - 2 * _END_CHARS, len(shared) - _END_CHARS))
        if not places:
            return 0
        part = self._tokenizer.quote_special(shared[: places[-1].end()])
        start = text.find(part)
        return 0 if start < 0 else start + len(part)

    def _without_thought(self, text: str) -> str:
        """The prompt with an empty thought where the template opens one, or the model would."""
        bare = text.rstrip()
        if self._reasoning is not None:
            marks = self._reasoning.marks
            if bare.endswith(marks.opening):
                return f"{bare}\n\n{marks.closing}\n\n"
            if self._reasoning.is_open(text, continues=False):
                return f"{text}{marks.opening}\n\n{marks.closing}\n\n"
        for tags in REASONING_PARSERS.values():
            if isinstance(tags, Tags) and bare.endswith(tags.opening):
                return f"{bare}\n\n{tags.closing[0]}\n\n"
        return text
