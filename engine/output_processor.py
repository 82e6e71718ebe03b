"""What a step did for a request, as text: detokenised, searched for stop strings, with its one end.

Synchronous, no I/O. Knows tokens and text; knows no HTTP and no engine process. Used by `AsyncEngine` and by `LLM`, from one
thread. A sequence's cost per token does not depend on its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.engine.detokenizer import IncrementalDetokenizer
from halfbyte.engine.stop import StopStrings
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import EngineOutput, FinishReason, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class SequenceDelta:
    """One step's news of one of a request's n sequences.

    text: what may be shown now; held back is only an incomplete character, and what may become a stop string.
    token_texts: one per token id; over a generation they join to its text, unless a stop string cut that. A token that only
    begins a character has "", the one that completes it has the character; tokens that are not shown have "".
    prompt_logprobs: complete, on the sequence's first delta. stop_reason: the stop string, or the user's stop token; None for
    EOS. error: safe to show to the client.
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


@dataclass(slots=True)
class _Sequence:
    """One sequence in the making. detokenizer: None when the request wants no text. stops: None when it has none."""

    index: int
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    stops: StopStrings | None
    num_tokens: int = 0
    has_ended: bool = False

    def grow(self, token_id: int, is_shown: bool) -> tuple[str, str, str | None]:
        """(the token's own text, what may be given out now, the stop string that it completed)."""
        self.num_tokens += 1
        if self.detokenizer is None or not is_shown:
            return "", "", None
        own = self.detokenizer.feed_token(token_id)
        if self.stops is None:
            return own, own, None
        # text of the first min_tokens tokens is not searched; a match may begin there and end later
        emitted, match = self.stops.feed(own, may_stop=self.num_tokens > self.params.min_tokens)
        return own, emitted, match

    def flush(self) -> tuple[str, str]:
        """(the last token's late text, all that was held back): the sequence gets no more tokens."""
        own = self.detokenizer.finish() if self.detokenizer is not None else ""
        if self.stops is None:
            return own, own
        # only U+FFFD can come this late; it ends no match, since the token that began it was not complete either
        emitted, _ = self.stops.feed(own, may_stop=False)
        return own, emitted + self.stops.finish()


class OutputProcessor:
    """The sequences that are being generated, by the engine's request id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, request_id: str, index: int, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Announce sequence `index` of a request before its first output can come."""
        self._sequences[request_id] = _Sequence(
            index=index,
            params=params,
            detokenizer=IncrementalDetokenizer(self._tokenizer, prompt_token_ids, params) if params.detokenize else None,
            stops=StopStrings(params.stop_strings, params.include_stop_str_in_output) if params.stop_strings else None,
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
    """The engine itself stops at tokens only."""
    return output.finish_reason == "stop" and bool(output.new_token_ids)
