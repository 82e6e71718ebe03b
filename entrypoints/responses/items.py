"""Input items as clients write them, read into one form, and a conversation of items as chat messages.

What the assistant did in a row (thoughts, text, calls) is one message with its calls in order, as templates want it. Knows no
store: `find` looks up what is only referred to. A UserError names the item that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from halfbyte.entrypoints.chat_messages import TEXT_PARTS
from halfbyte.entrypoints.chat_roles import INSTRUCTING
from halfbyte.entrypoints.responses.tools import INPUT, offered_name, short
from halfbyte.entrypoints.responses.wire import (
    CallItem,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from halfbyte.errors import UserError

ROLES = ("user", "assistant", "system", "developer")
CALLS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
KINDS = ("message", *CALLS, "reasoning", "item_reference")
PREFIXES = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    CustomToolCallItem: "ctc",
    CustomToolCallOutputItem: "ctco",
    ReasoningItem: "rs",
}
_GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_OWN_ID = re.compile(f"(?:{'|'.join(PREFIXES.values())})_([0-9a-f]{{32}})[0-9a-f]{{4,}}")

ChatMessage = dict[str, Any]


class ItemIds:
    """Names the items of one response. Each name tells the response, so that a reference needs no table."""

    def __init__(self, response_id: str) -> None:
        self._name = response_id.removeprefix("resp_")
        self._count = 0

    def new(self, kind: type[Item]) -> str:
        self._count += 1
        return f"{PREFIXES[kind]}_{self._name}{self._count:04x}"


def response_of(item_id: str) -> str | None:
    """The response that named this item; None when it was named elsewhere."""
    match = _OWN_ID.fullmatch(item_id)
    return match and f"resp_{match[1]}"


def read_input(given: str | Sequence[Mapping[str, Any]], ids: ItemIds, find: Callable[[str], Item]) -> list[Item]:
    """The items of a request's `input`; a text is one message of the user."""
    if isinstance(given, str):
        return [MessageItem(id=ids.new(MessageItem), role="user", content=[InputText(given)])]
    return [_read_item(item, f"input[{index}]", ids, find) for index, item in enumerate(given)]


def _read_item(given: Mapping[str, Any], place: str, ids: ItemIds, find: Callable[[str], Item]) -> Item:
    kind = given.get("type")
    if kind is None:  # the two that may leave it out
        kind = "message" if "role" in given else "item_reference"
    match kind:
        case "message":
            role = given.get("role")
            if role not in ROLES:
                raise _wrong(f"{place}.role must be one of {', '.join(ROLES)}, got {short(role)}")
            make = OutputText if role == "assistant" else InputText
            content = [make(text) for text in _texts(given.get("content"), f"{place}.content")]
            return MessageItem(id=_id(given, place, ids, MessageItem), role=role, content=content)
        case "function_call" | "custom_tool_call":
            return _read_call(given, place, ids)
        case "function_call_output" | "custom_tool_call_output":
            output = given.get("output")
            if not isinstance(output, str):
                output = [InputText(text) for text in _texts(output, f"{place}.output")]
            made = FunctionCallOutputItem if kind == "function_call_output" else CustomToolCallOutputItem
            return made(id=_id(given, place, ids, made), call_id=_text(given, "call_id", place), output=output)
        case "reasoning":
            return _read_reasoning(given, place, ids)
        case "item_reference":
            return find(_text(given, "id", place))
    raise _wrong(f"{place} has type {short(kind)}; this server takes {', '.join(KINDS)}")


def _read_call(given: Mapping[str, Any], place: str, ids: ItemIds) -> CallItem:
    call_id, name = _text(given, "call_id", place), _text(given, "name", place)
    namespace = msgspec.UNSET if given.get("namespace") is None else _text(given, "namespace", place)
    if given["type"] == "function_call":
        item_id, arguments = _id(given, place, ids, FunctionCallItem), _text(given, "arguments", place)
        return FunctionCallItem(id=item_id, call_id=call_id, name=name, arguments=arguments, namespace=namespace)
    item_id, told = _id(given, place, ids, CustomToolCallItem), _text(given, "input", place)
    return CustomToolCallItem(id=item_id, call_id=call_id, name=name, input=told, namespace=namespace)


def _read_reasoning(given: Mapping[str, Any], place: str, ids: ItemIds) -> ReasoningItem:
    content = _texts(given.get("content"), f"{place}.content", ("reasoning_text",))
    summary = _texts(given.get("summary"), f"{place}.summary", ("summary_text",))
    if given.get("encrypted_content") and not content:
        raise _wrong(f"{place}.encrypted_content was made elsewhere and cannot be read here; send the thoughts as content")
    return ReasoningItem(
        id=_id(given, place, ids, ReasoningItem),
        content=[ReasoningText(text) for text in content],
        summary=[SummaryText(text) for text in summary],
    )


def _id(given: Mapping[str, Any], place: str, ids: ItemIds, kind: type[Item]) -> str:
    """The client's own name for an item, which is only shown, or one of ours."""
    name = given.get("id")
    if name is None:
        return ids.new(kind)
    if not isinstance(name, str) or not _GIVEN_ID.fullmatch(name):
        raise _wrong(f"{place}.id must have 1 to 128 letters, digits or any of _ . : -, got {short(name)}")
    return name


def _text(given: Mapping[str, Any], field: str, place: str) -> str:
    value = given.get(field)
    if not isinstance(value, str) or (not value and field not in ("arguments", "input")):
        raise _wrong(f"{place}.{field} must be a text, got {short(value)}")
    return value


def _texts(content: object, place: str, kinds: Sequence[str] = TEXT_PARTS) -> list[str]:
    """The texts of a content: null, a text, or parts of some kinds."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _wrong(f"{place} must be a text or a list of parts, got {short(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds:
            raise _wrong(f"{place}[{index}] has type {short(kind)}; this model takes parts of type {', '.join(kinds)}")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise _wrong(f"{place}[{index}] needs a text")
        texts.append(text)
    return texts


def _wrong(message: str) -> UserError:
    return UserError(message, param="input")


def to_messages(instructions: str | None, items: Iterable[Item]) -> list[ChatMessage]:
    """The chat messages that say the same. UserError when a result belongs to no call."""
    messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
    turn: ChatMessage | None = None
    names: dict[str, str] = {}
    for item in items:
        if isinstance(item, (ReasoningItem, CallItem)) or (isinstance(item, MessageItem) and item.role == "assistant"):
            if turn is None:
                turn = {"role": "assistant", "content": []}
                messages.append(turn)
            _grow(turn, item)
            if isinstance(item, CallItem):
                names[item.call_id] = _offered(item)
            continue
        turn = None
        if isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _parts(item.content)})
            continue
        name = names.get(item.call_id)
        if name is None:
            kind = "function_call" if isinstance(item, FunctionCallOutputItem) else "custom_tool_call"
            raise _wrong(f"no {kind} in this conversation has the call_id {short(item.call_id)} of a {kind}_output")
        output = item.output if isinstance(item.output, str) else _parts(item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "name": name, "content": output})
    return messages


def _grow(turn: ChatMessage, item: OutputItem) -> None:
    """Add what the assistant did next."""
    match item:
        case MessageItem():
            turn["content"] += _parts(item.content)
        case ReasoningItem():
            thoughts = [part.text for part in item.content or item.summary]
            turn["reasoning"] = "\n".join([*([turn["reasoning"]] if "reasoning" in turn else ()), *thoughts])
        case FunctionCallItem() | CustomToolCallItem():
            written = (
                item.arguments if isinstance(item, FunctionCallItem) else json.dumps({INPUT: item.input}, ensure_ascii=False)
            )
            function = {"name": _offered(item), "arguments": written}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _offered(item: CallItem) -> str:
    return offered_name(item.name, item.namespace or None)


def _parts(content: Iterable[InputText | OutputText]) -> list[dict[str, str]]:
    return [{"type": "text", "text": part.text} for part in content]


def num_turns(messages: Iterable[ChatMessage]) -> int:
    """A turn begins with what the user says."""
    return sum(message["role"] == "user" for message in messages)


def without_oldest(messages: list[ChatMessage], num_dropped: int) -> list[ChatMessage]:
    """The conversation without its first turns, fewer than it has. Instructions stay, wherever they stand."""
    if not num_dropped:
        return messages
    kept_from = [index for index, message in enumerate(messages) if message["role"] == "user"][num_dropped]
    kept = [m for i, m in enumerate(messages) if i >= kept_from or m["role"] in INSTRUCTING]
    known = {call["id"] for message in kept for call in message.get("tool_calls", ())}
    return [m for m in kept if m["role"] != "tool" or m["tool_call_id"] in known]
