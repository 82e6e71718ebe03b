"""What a chat template makes of roles and of tool calls, found out by trial, and conversations arranged accordingly.

Families differ: some know no system role, take one system message at the front only, or call it developer; some write the
arguments of a call as JSON themselves, others add them to a text. `Traits` asks the template, by rendering short conversations
and looking whether their texts appear; `arrange` rewrites what was read by `halfbyte.entrypoints.chat_messages` so that nothing
of it is lost. Knows no Jinja: a trial is a function. Called by `halfbyte.entrypoints.chat_template`.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

Message = dict[str, Any]
Trial = Callable[[Sequence[Message]], str | None]

INSTRUCTING = ("system", "developer")
BETWEEN_INSTRUCTIONS = "\n\n"
SHORT_ID_CHARS = 9

# Words that no template writes by itself.
_NAME, _KEY, _VALUE = "qzname", "qzkey", "qzvalue"
_ARGUMENTS = json.dumps({_KEY: _VALUE})
_CALL_ID = "call_qz0123456789abcdef"


class CallForm(NamedTuple):
    """How calls are given to a template. empty_content: of a message that only calls. short_ids: nine letters and digits."""

    short_ids: bool = False
    empty_content: str | None = ""
    arguments_are_text: bool = False


class Traits:
    """What one template does. Each question is put to it once, when the first conversation depends on the answer.

    trial: the text of a conversation as `arrange` returns it, None where the template refuses it. names_developer: whether the
    template says the word at all; one that writes any role's name would otherwise seem to know it.
    """

    def __init__(self, trial: Trial, names_developer: bool) -> None:
        self._trial = trial
        self._names_developer = names_developer

    @cached_property
    def takes_developer(self) -> bool:
        return self._names_developer and self._shows("developer", "user")

    @cached_property
    def takes_system(self) -> bool:
        return self._shows("system", "user")

    @cached_property
    def takes_several(self) -> bool:
        """Whether it shows system messages wherever they stand, and not only one at the front."""
        second = "developer" if self.takes_developer else "system"
        return self._shows("system", second, "user", "assistant", "system", "user")

    @cached_property
    def call_form(self) -> CallForm:
        """The first form in which it shows a call; the plain one where it shows none.

        Of the two contents the one that makes the shorter text: some templates write an empty turn for the other.
        """
        for short_ids, as_text in product((False, True), repeat=2):
            forms = [CallForm(short_ids, content, as_text) for content in ("", None)]
            shown = [(len(text), index) for index, form in enumerate(forms) if (text := self._show_call(form)) is not None]
            if shown:
                return forms[min(shown)[1]]
        return CallForm()

    def _shows(self, *roles: str) -> bool:
        """Whether every text appears. Yes if not even a question alone is taken: then the template's own words say more."""
        words = [f"qz{index}word" for index in range(len(roles))]
        text = self._trial([{"role": role, "content": [word]} for role, word in zip(roles, words, strict=True)])
        if text is not None and all(word in text for word in words):
            return True
        return self._trial([{"role": "user", "content": words[:1]}]) is None

    def _show_call(self, form: CallForm) -> str | None:
        """The text of a conversation with a call, None where its name or its arguments, as JSON or in pieces, do not appear."""
        call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
        conversation: list[Message] = [
            {"role": "user", "content": ["qzquestion"]},
            {"role": "assistant", "content": [], "tool_calls": [call]},
            {"role": "tool", "content": ["qzresult"], "tool_call_id": _CALL_ID, "name": _NAME},
        ]
        text = self._trial(_write_calls(conversation, form))
        if text is None or _NAME not in text:
            return None
        in_pieces = _KEY in text and _VALUE in text and repr({_KEY: _VALUE}) not in text
        return text if (_ARGUMENTS in text if form.arguments_are_text else in_pieces) else None


def arrange(messages: Sequence[Message], traits: Traits) -> list[Message]:
    """The messages, in the roles, the order and the form of calls that the template takes. What was given is not changed.

    A developer message becomes a system message where the template knows no developer. Where it takes one system message at
    the front only, all become that one, with blank lines between. Where it takes none, the text goes in front of the first
    user message. A content stays a list of texts, or is None where a message only calls and the template wants it so.
    """
    arranged = list(messages)
    if any(m["role"] == "developer" for m in arranged) and not traits.takes_developer:
        arranged = [{**m, "role": "system"} if m["role"] == "developer" else m for m in arranged]
    arranged = _place_instructions(arranged, traits)
    if any(m["role"] == "tool" or "tool_calls" in m for m in arranged):
        arranged = _write_calls(_link_calls(arranged), traits.call_form)
    return arranged


def _place_instructions(messages: list[Message], traits: Traits) -> list[Message]:
    instructions = [m for m in messages if m["role"] in INSTRUCTING]
    if not instructions:
        return messages
    first = instructions[0]
    is_taken = first["role"] == "developer" or traits.takes_system
    if is_taken and ((len(instructions) == 1 and messages[0] is first) or traits.takes_several):
        return messages
    text = BETWEEN_INSTRUCTIONS.join(filter(None, ("\n".join(m["content"]) for m in instructions)))
    others = [m for m in messages if m["role"] not in INSTRUCTING]
    if is_taken:
        return [{**first, "content": [text]}, *others]
    if not others or others[0]["role"] != "user":
        return [{**first, "role": "user", "content": [text]}, *others]
    question = others[0]["content"]
    opening = BETWEEN_INSTRUCTIONS.join(filter(None, (text, *question[:1])))
    return [{**others[0], "content": [opening, *question[1:]]}, *others[1:]]


def _link_calls(messages: list[Message]) -> list[Message]:
    """Give each call an id, and each result the id of its call: the next open one, where it has none itself."""
    linked: list[Message] = []
    open_ids: OrderedDict[str, Any] = OrderedDict()
    num_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": call.get("id") or f"call{num_calls + i:05d}"} for i, call in enumerate(calls)]
            num_calls += len(calls)
            open_ids = OrderedDict((str(call["id"]), call["id"]) for call in calls)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            if call_id := message.get("tool_call_id"):
                open_ids.pop(str(call_id), None)
            elif open_ids:
                message = {**message, "tool_call_id": open_ids.popitem(last=False)[1]}
        linked.append(message)
    return linked


def _write_calls(messages: Sequence[Message], form: CallForm) -> list[Message]:
    written = []
    for message in messages:
        changed = dict(message)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = [_write_call(call, form) for call in calls]
            if form.empty_content is None and not any(message["content"]):
                changed["content"] = None
        if form.short_ids and "tool_call_id" in message:
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        written.append(changed)
    return written


def _write_call(call: dict[str, Any], form: CallForm) -> dict[str, Any]:
    written = {**call, "id": _short_id(call["id"])} if form.short_ids else dict(call)
    if isinstance(function := call.get("function"), dict):
        as_form = _text_of if form.arguments_are_text else _object_of
        written["function"] = {**function, "arguments": as_form(function.get("arguments"))}
    return written


def _object_of(arguments: Any) -> Any:
    """Arguments as an object. What the model once wrote and is no JSON object stays as it was."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _text_of(arguments: Any) -> str:
    """Arguments as JSON text: to the letter as the model wrote them, where they are still a text."""
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


def _short_id(call_id: object) -> str:
    """A call's id for templates that take nine letters and digits; equal ids stay equal."""
    text = str(call_id)
    is_short = len(text) == SHORT_ID_CHARS and text.isascii() and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:SHORT_ID_CHARS]
