"""A chat answer on the wire: what was read out of each choice's text, whole or in chunks.

Order of a stream: a role chunk per choice, deltas, an empty chunk that ends each choice, usage if asked. What a text means is its
parser's to say (`halfbyte.entrypoints.answers`); whole answers and streams are read by the same one, so that they agree.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from halfbyte.entrypoints.openai import templates
from halfbyte.entrypoints.openai.choices import GrowingChoice, Tally
from halfbyte.entrypoints.openai.chunks import chunk_events
from halfbyte.entrypoints.openai.conversation import AnswerReader, Conversation
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.streaming import Closeable
from halfbyte.entrypoints.openai.wire import (
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
    ToolCallDelta,
)
from halfbyte.types import TokenLogprobs


class ChatWriter:
    """Turns deltas into the answer to one request."""

    def __init__(self, frontend: Frontend, call: Call, conversation: Conversation, tally: Tally) -> None:
        request = conversation.request
        self.n = request.n or 1
        self._frontend = frontend
        self._call = call
        self._request = request
        self._model = conversation.model
        self._prompt = conversation.prompt
        self._plan = conversation.plan
        self._tally = tally
        self._role = frontend.config.response_role if templates.adds_generation_prompt(request) else _last_role(request)
        self._echo = _echoed_content(request, self._role) if request.echo else ""
        self._names = TokenNames(frontend.engine.tokenizer, bool(request.return_tokens_as_token_ids))
        # Hidden thoughts are not told token by token either.
        self._shows_tokens = request.include_reasoning is not False or self._plan.thinking is None
        self._started = False
        self._readers = [AnswerReader(conversation, tally) for _ in range(self.n)]

    def whole(self, choices: Sequence[GrowingChoice]) -> ChatCompletion:
        request, tokenizer = self._request, self._frontend.engine.tokenizer
        of_prompt = choices[0].prompt_logprobs if request.prompt_logprobs is not None else None
        return ChatCompletion(
            id=self._call.public_id,
            created=self._call.created,
            model=self._model,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            system_fingerprint=self._frontend.fingerprint,
            usage=self._tally.usage(),
            prompt_logprobs=None if request.prompt_logprobs is None else prompt_logprobs(tokenizer, of_prompt or ()),
            prompt_token_ids=self._prompt.token_ids if request.return_token_ids else None,
            prompt_text=self._prompt.text if request.return_prompt_text else None,
        )

    def _choice(self, index: int, choice: GrowingChoice) -> ChatChoice:
        reader = self._readers[index]
        message = self._message(reader.read(choice.text, choice.token_ids, choice.finish_reason))
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(choice.token_ids, choice.token_texts, choice.logprobs),
            finish_reason=self._finish_reason(reader, choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._request.return_token_ids and self._shows_tokens else None,
        )

    def _message(self, events: Iterable[Event]) -> ChatMessage:
        contents, thoughts, calls = [self._echo], [], list[ToolCall]()
        for event in events:
            match event:
                case Content():
                    contents.append(event.text)
                case Reasoning():
                    thoughts.append(event.text)
                case CallStart():
                    calls.append(ToolCall(id=event.call_id or "", function=CalledFunction("", event.name)))
                case CallArguments():
                    calls[event.index].function.arguments += event.text
        message = ChatMessage(role=self._role, content="".join(contents))
        if thoughts:
            message.reasoning = "".join(thoughts)
        if calls:
            message.tool_calls = calls
        if not message.content and (calls or thoughts):
            message.content = None
        return message

    def events(self, generations: Sequence[Closeable]) -> AsyncGenerator[bytes, None]:
        """The stream's events up to, not including, [DONE]."""
        return chunk_events(self._frontend, self._request, generations, self._tally, self._news, self._chunk)

    def _news(self, prompt_index: int, delta: SequenceDelta) -> list[ChatChunk]:
        first = [] if self._started else self._first()
        self._started = True
        return first + self._next(delta)

    def _first(self) -> list[ChatChunk]:
        """A role chunk per choice, and the echo where it was asked for."""
        chunks = [self._chunk(ChatChunkChoice(index=i, delta=ChatDelta(role=self._role, content=""))) for i in range(self.n)]
        for chunk in chunks:
            if self._request.return_token_ids:
                chunk.prompt_token_ids = self._prompt.token_ids
            if self._request.return_prompt_text and self._prompt.text is not None:
                chunk.prompt_text = self._prompt.text
        if self._echo:
            chunks += [self._chunk(ChatChunkChoice(index=i, delta=ChatDelta(content=self._echo))) for i in range(self.n)]
        return chunks

    def _next(self, delta: SequenceDelta) -> list[ChatChunk]:
        request, reader = self._request, self._readers[delta.index]
        deltas = self._deltas(reader.read(delta.text, delta.token_ids, delta.finish_reason))
        tells_tokens = bool(delta.token_ids) and self._shows_tokens and (request.logprobs or request.return_token_ids)
        if tells_tokens and not deltas:
            deltas = [ChatDelta() if reader.parser is not None else ChatDelta(content="")]
        choices = [ChatChunkChoice(index=delta.index, delta=piece) for piece in deltas]
        if tells_tokens:
            choices[0].logprobs = self._logprobs(delta.token_ids, delta.token_texts, delta.logprobs)
            if request.return_token_ids:
                choices[0].token_ids = delta.token_ids
        if delta.finish_reason is not None:
            last = ChatChunkChoice(index=delta.index, delta=ChatDelta())
            last.finish_reason, last.stop_reason = self._finish_reason(reader, delta.finish_reason), delta.stop_reason
            choices.append(last)
        return [self._chunk(choice) for choice in choices]

    def _deltas(self, events: Iterable[Event]) -> list[ChatDelta]:
        """As few as can be: thoughts, content and calls share one where they come in this order."""
        deltas: list[ChatDelta] = []
        at = len(_KINDS)
        for event in events:
            kind = _KINDS[type(event)]
            if kind < at or not deltas:
                deltas.append(ChatDelta())
            at = kind
            delta = deltas[-1]
            match event:
                case Reasoning():
                    delta.reasoning = (delta.reasoning or "") + event.text
                case Content():
                    delta.content = (delta.content or "") + event.text
                case CallStart():
                    function = CalledFunctionDelta("", event.name)
                    begun = ToolCallDelta(index=event.index, id=event.call_id or "", type="function", function=function)
                    delta.tool_calls = [*(delta.tool_calls or ()), begun]
                case CallArguments():
                    delta.tool_calls = _grown(delta.tool_calls or [], event)
        return deltas

    def _finish_reason(self, reader: AnswerReader, engines: str | None) -> str | None:
        """As OpenAI has it: the model stopped to have tools called, except where it had no choice of the tool."""
        calls = reader.has_calls and self._plan.use.mode != "named"
        return "tool_calls" if engines == "stop" and calls else engines

    def _logprobs(
        self, token_ids: Sequence[int], texts: Sequence[str], entries: Sequence[TokenLogprobs] | None
    ) -> ChatLogprobs | None:
        if not self._request.logprobs or entries is None or not self._shows_tokens:
            return None
        return chat_logprobs(self._names, token_ids, texts, entries)

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(id=self._call.public_id, created=self._call.created, model=self._model, choices=list(choices))


_KINDS: dict[type, int] = {Reasoning: 0, Content: 1, CallStart: 2, CallArguments: 2}


def _grown(calls: list[ToolCallDelta], event: CallArguments) -> list[ToolCallDelta]:
    """The calls of a delta with more arguments for one of them."""
    if calls and calls[-1].index == event.index:
        calls[-1].function.arguments += event.text
        return calls
    return [*calls, ToolCallDelta(index=event.index, function=CalledFunctionDelta(event.text))]


def _last_role(request: ChatRequest) -> str:
    return str(request.messages[-1]["role"])


def _echoed_content(request: ChatRequest, role: str) -> str:
    """The last message's text, if it is the answering role's: the answer continues it."""
    content = request.messages[-1].get("content")
    if _last_role(request) != role:
        return ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
