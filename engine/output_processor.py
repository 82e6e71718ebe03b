"""What a step did for a request, as text: detokenised, searched for stop strings, with its one end.

Synchronous, no I/O. Knows tokens and text; knows no HTTP and no engine process. Used by `AsyncEngine` and by `LLM`, from one
thread. A sequence's cost per token does not depend on its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from halfbyte.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer
from halfbyte.engine.stop import StopStrings
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import EngineOutput, FinishReason, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class SequenceDelta:
    """One step's news of one of a request's n sequences.

    text: what may be shown now; held back is only an incomplete character, and what may become a stop string. It holds the
    characters of the request's marks, whole ones always, where the model wrote those tokens.
    token_texts: one per token id; over a generation they join to its text, unless a stop string cut that. A token that only
    begins a character has "", the one that completes it has the character; tokens that are not shown have "".
    prompt_logprobs: complete, on the sequence's first delta. stop_reason: the stop string, or the user's stop token; None for
    EOS. error: safe to show to the client. pooled: as `EngineOutput` has it.
    """

    index: int
    text: str
    token_ids: list[int]
    token_texts: list[str]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    pooled: bytes | None = None


@dataclass(slots=True)
class _Marked:
    """Text that stop strings may hold back, where some tokens show as marks: these are given out whole or not at all."""

    pieces: deque[tuple[str, str]] = field(default_factory=deque)  # (plain, as it shows) of what was not given out
    num_allowed: int = 0  # plain characters that may be, and were not

    def add(self, plain: str, shown: str) -> None:
        self.pieces.append((plain, shown))

    def take(self, num_chars: int, *, is_last: bool = False) -> str:
        """As it shows: what `num_chars` more plain characters allow; at the end a mark may be cut as plain text."""
        self.num_allowed += num_chars
        taken: list[str] = []
        while self.pieces and len(self.pieces[0][0]) <= self.num_allowed:
            plain, shown = self.pieces.popleft()
            self.num_allowed -= len(plain)
            taken.append(shown)
        if self.pieces and self.num_allowed and (is_last or self.pieces[0][0] == self.pieces[0][1]):
            plain = self.pieces[0][0]
            taken.append(plain[: self.num_allowed])
            rest = plain[self.num_allowed :]
            self.pieces[0], self.num_allowed = (rest, rest), 0
        return "".join(taken)


@dataclass(slots=True)
class _Sequence:
    """One sequence in the making. detokenizer: None when the request wants no text. stops: None when it has none."""

    index: int
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    stops: StopStrings | None
    marks: Mapping[int, str]
    held: _Marked = field(default_factory=_Marked)
    num_tokens: int = 0
    has_ended: bool = False

    def grow(self, token_id: int, is_shown: bool) -> tuple[str, str, str | None]:
        """(the token's own text, what may be given out now, the stop string that it completed)."""
        self.num_tokens += 1
        if self.detokenizer is None or not is_shown:
            return "", "", None
        own = self.detokenizer.feed_token(token_id)
        shown = own
        if (mark := self.marks.get(token_id)) is not None:
            shown = own[: len(own) - len(own.lstrip(REPLACEMENT))] + mark  # behind a character that it leaves incomplete
        if self.stops is None:
            return own, shown, None
        # text of the first min_tokens tokens is not searched; a match may begin there and end later
        emitted, match = self.stops.feed(own, may_stop=self.num_tokens > self.params.min_tokens)
        if not self.marks:
            return own, emitted, match
        self.held.add(own, shown)
        return own, self.held.take(len(emitted), is_last=match is not None), match

    def flush(self) -> tuple[str, str]:
        """(the last token's late text, all that was held back): the sequence gets no more tokens."""
        own = self.detokenizer.finish() if self.detokenizer is not None else ""
        if self.stops is None:
            return own, own
        # only U+FFFD can come this late; it ends no match, since the token that began it was not complete either
        emitted, _ = self.stops.feed(own, may_stop=False)
        emitted += self.stops.finish()
        if not self.marks:
            return own, emitted
        self.held.add(own, own)
        return own, self.held.take(len(emitted))


class OutputProcessor:
    """The sequences that are being generated, by the engine's request id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """Announce sequence `index` of a request before its first output can come.

        marks: tokens that show as a character of their own in the deltas' `text`, special ones too. Stop strings see their text.
        """
        self._sequences[request_id] = _Sequence(
            index=index,
            params=params,
            detokenizer=IncrementalDetokenizer(self._tokenizer, prompt_token_ids, params) if params.detokenize else None,
            stops=StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None,
            marks=marks or {},
        )

    def remove(self, request_id: str) -> None:
        """Forget a sequence; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def process(self, output: EngineOutput) -> tuple[SequenceDelta | None, bool]:
        """(the sequence's news, whether the engine must be told to abort it because a stop string ended it).

        (None, False) for ids that are unknown or have ended, and when there is no news.
        """
        sequence = self._sequences.get(output.request_id)
        if sequence is None or sequence.has_ended:
            return None, False
        if not output.new_token_ids and output.finish_reason is None and output.prompt_logprobs is None:
            return None, False
        delta = SequenceDelta(
            index=sequence.index,
            text="",
            token_ids=output.new_token_ids,
            token_texts=[],
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            pooled=output.pooled,
        )
        match = _grow(
            sequence, delta, hides_last=_ends_with_stop_token(output) and not sequence.params.include_stop_str_in_output
        )
        if match is not None:
            sequence.has_ended = True
            delta.finish_reason, delta.stop_reason = "stop", match
            return delta, output.finish_reason is None
        if output.finish_reason is not None:
            sequence.has_ended = True
            late, held = sequence.flush()
            delta.text += held
            if late and delta.token_texts:  # else the token that began the character is out already
                delta.token_texts[-1] += late
            delta.finish_reason, delta.stop_reason, delta.error = output.finish_reason, output.stop_token_id, output.error
        return delta, False


def _grow(sequence: _Sequence, delta: SequenceDelta, hides_last: bool) -> str | None:
    """Add the delta's tokens to its sequence, up to the one that completes a stop string; that string, or None."""
    num_shown = len(delta.token_ids) - hides_last
    texts: list[str] = []
    for position, token_id in enumerate(delta.token_ids):
        own, emitted, match = sequence.grow(token_id, is_shown=position < num_shown)
        delta.token_texts.append(own)
        texts.append(emitted)
        if match is not None:
            delta.token_ids = delta.token_ids[: position + 1]
            if delta.logprobs is not None:
                delta.logprobs = delta.logprobs[: position + 1]
            delta.text = "".join(texts)
            return match
    delta.text = "".join(texts)
    return None


def _ends_with_stop_token(output: EngineOutput) -> bool:
    """The engine itself stops at tokens, and where a grammar ends."""
    return output.finish_reason == "stop" and bool(output.new_token_ids) and not output.ends_in_text
