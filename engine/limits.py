"""What one model can serve, as one object: the limits that every front end checks its requests against.

Made from the engine's own facts (EngineInfo). Token ids are compared with the width of the logits, never with the tokenizer's
length: an id between the two would reach another row's memory. Knows no HTTP; each refusal is a UserError that says what was
asked, what is possible, and names the field.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import PromptTooLongError, UserError
from halfbyte.types import EngineInfo, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """vocab_size: the width of the logits. max_logprobs: -1 allows the whole vocabulary."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int

    MAX_STOP_STRINGS: ClassVar[int] = 4
    MAX_N: ClassVar[int] = 16384
    MAX_PROMPTS: ClassVar[int] = 1024
    MAX_BAD_WORDS: ClassVar[int] = 128
    MAX_BAD_WORDS_TOKENS: ClassVar[int] = 1024
    MAX_LOGPROB_TOKEN_IDS: ClassVar[int] = 128
    MAX_CACHE_SALT_CHARS: ClassVar[int] = 128
    FORBIDDEN_IN_CACHE_SALT: ClassVar[str] = "@/\\\0"

    @classmethod
    def from_info(cls, info: EngineInfo) -> Limits:
        return cls(vocab_size=info.vocab_size, max_model_len=info.max_model_len, max_logprobs=info.max_logprobs)

    def check_text(self, text: str, max_chars_per_token: int, param: str = "input_text") -> None:
        """Refuse a text that is too long for the context whatever its tokens are, before it is tokenised."""
        most = self.max_model_len * max_chars_per_token
        if len(text) > most:
            raise PromptTooLongError(
                f"the input has {len(text)} characters; max_model_len={self.max_model_len} tokens hold at most {most}",
                param=param,
            )

    def check_prompt(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        """Refuse a prompt that is empty, too long, or has ids that the model does not know."""
        if not token_ids:
            raise UserError("the prompt is empty; at least one token is needed", param=param)
        self._check_length(len(token_ids))
        self.check_ids(token_ids, param)

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse parameters that this model cannot serve. What depends on the prompt is `effective_max_tokens`' matter."""
        if params.n > self.MAX_N:
            raise UserError(f"n={params.n} is too large, at most {self.MAX_N} sequences are possible", param="n")
        self.check_ids(params.stop_token_ids or (), "stop_token_ids")
        self.check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self.check_ids(params.logit_bias or (), "logit_bias")
        ids = params.logprob_token_ids or ()
        if len(ids) > self.MAX_LOGPROB_TOKEN_IDS:
            raise UserError(
                f"logprob_token_ids has {len(ids)} ids, at most {self.MAX_LOGPROB_TOKEN_IDS} are possible",
                param="logprob_token_ids",
            )
        self.check_ids(ids, "logprob_token_ids")
        self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        for text in params.stop_strings:
            _check_unicode(text, "stop")
        for text in params.bad_words or ():
            _check_unicode(text, "bad_words")

    def check_cache_salt(self, salt: str) -> None:
        """A salt is short and plain: it is hashed for every prompt, and cache tiers put it into their keys."""
        if not isinstance(salt, str) or not 0 < len(salt) <= self.MAX_CACHE_SALT_CHARS:
            got = f"{len(salt)} characters" if isinstance(salt, str) else type(salt).__name__
            raise UserError(f"cache_salt must have 1 to {self.MAX_CACHE_SALT_CHARS} characters, got {got}", param="cache_salt")
        if any(char in salt for char in self.FORBIDDEN_IN_CACHE_SALT):
            raise UserError("cache_salt must not contain @, /, \\ or NUL", param="cache_salt")
        _check_unicode(salt, "cache_salt")

    def effective_max_tokens(
        self, requested: int | None, num_prompt_tokens: int, param: str = "max_tokens", default_cap: int | None = None
    ) -> int:
        """How many tokens may be generated, at least 1: an upper bound, never a reservation.

        requested: by the request, None when it leaves that open; then `default_cap` bounds it. param: how the request calls
        the field. What does not fit behind the prompt is cut off silently; what could not fit without a prompt is refused.
        """
        if requested is not None and requested > self.max_model_len:
            raise UserError(
                f"{param}={requested} cannot be greater than max_model_len={self.max_model_len}; ask for fewer tokens",
                param=param,
            )
        if requested is not None and requested < 1:
            raise UserError(f"{param} must be at least 1, got {requested}", param=param)
        self._check_length(num_prompt_tokens)
        fitting = self.max_model_len - num_prompt_tokens
        if fitting < 1:
            raise PromptTooLongError(
                f"{param} must be at least 1, got 0: the prompt's {num_prompt_tokens} tokens fill"
                f" max_model_len={self.max_model_len}; shorten the prompt",
                param=param,
            )
        asked = requested if requested is not None else default_cap
        return fitting if asked is None else max(1, min(fitting, asked))

    def truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The prompt cut as `truncate_prompt_tokens` and `truncation_side` ask: "left" (the default) keeps the last tokens.

        -1 keeps what the context holds: one token less when an output budget is given.
        """
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep > self.max_model_len:
            raise UserError(
                f"truncate_prompt_tokens={keep} cannot be greater than max_model_len={self.max_model_len}",
                param="truncate_prompt_tokens",
            )
        if keep == -1:
            keep = self.max_model_len - (1 if params.max_tokens else 0)
        if len(token_ids) <= keep:
            return token_ids
        return token_ids[:keep] if params.truncation_side == "right" else token_ids[len(token_ids) - keep :]

    def bad_words_token_ids(self, params: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
        """The token sequences that `bad_words` forbids: each word as it begins a text and as it follows a space."""
        words = params.bad_words or []
        num_chars = sum(len(word) for word in words)
        if len(words) > self.MAX_BAD_WORDS or num_chars > self.MAX_BAD_WORDS_TOKENS * tokenizer.max_chars_per_token:
            raise self._too_many_bad_words(f"{len(words)} words of {num_chars} characters")
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for form in _spaced_forms(word):
                token_ids = tokenizer.encode(form, add_special_tokens=False)
                if not token_ids:
                    raise UserError(f"bad_words: {word[:40]!r} has no tokens in this model's vocabulary", param="bad_words")
                self.check_ids(token_ids, "bad_words")
                sequences[tuple(token_ids)] = None
        num_tokens = sum(len(sequence) for sequence in sequences)
        if len(sequences) > self.MAX_BAD_WORDS or num_tokens > self.MAX_BAD_WORDS_TOKENS:
            raise self._too_many_bad_words(f"{len(sequences)} token sequences of {num_tokens} tokens")
        return [list(sequence) for sequence in sequences]

    def _too_many_bad_words(self, got: str) -> UserError:
        return UserError(
            f"bad_words come to {got}; at most {self.MAX_BAD_WORDS} token sequences (a word has two: with and without a space"
            f" before it) of {self.MAX_BAD_WORDS_TOKENS} tokens are possible",
            param="bad_words",
        )

    def _check_length(self, num_prompt_tokens: int) -> None:
        if num_prompt_tokens > self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len={self.max_model_len}; shorten the prompt",
                param="input_tokens",
            )

    def check_ids(self, token_ids: Collection[int], param: str) -> None:
        """Refuse ids that the model does not know."""
        if set(map(type, token_ids)) <= {int} and (not token_ids or 0 <= min(token_ids) <= max(token_ids) < self.vocab_size):
            return  # the common case, without a loop in Python
        for index, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                place = "" if isinstance(token_ids, dict) else f"[{index}]"
                raise UserError(
                    f"{param}{place} is {_short(token_id)}; token ids are integers from 0 to {self.vocab_size - 1}", param=param
                )

    def _check_logprobs(self, name: str, count: int | None) -> None:
        if count is None:
            return
        most = self.vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, self.vocab_size)
        if (self.vocab_size if count == -1 else count) > most:
            asked = f"{name}=-1 (the whole vocabulary of {self.vocab_size})" if count == -1 else f"{name}={count}"
            hint = "" if most == self.vocab_size else " (--max-logprobs)"
            raise UserError(f"{asked} is too large, at most {most} are possible{hint}", param=name)


def _spaced_forms(word: str) -> list[str]:
    """A word at the beginning and inside of a text: many vocabularies have separate tokens for the two."""
    bare = word.lstrip(" ")
    return [bare, f" {bare}"] if bare else [word]


def _check_unicode(text: str, param: str) -> None:
    """JSON can carry half of a surrogate pair, which no tokenizer and no message between processes takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{param} is not valid Unicode: character {error.start} is half of a surrogate pair", param=param
        ) from None


def _short(value: object) -> str:
    """A wrong value as a message may quote it, at a price that does not grow with its size."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "an integer of more than 64 bits"
    return repr(value) if isinstance(value, (int, float)) else f"a {type(value).__name__}"
