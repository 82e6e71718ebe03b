"""Anthropic's messages as chat messages: turns of content blocks, made into what chat templates take.

Results of tools go in front of the text of their turn, thoughts become the message's reasoning. What cannot be told to the model
is refused by the name of its block and its place. Knows no template and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import UserError

# A block of instructions with which one client begins every request: for the billing of another server. It differs each time, so
# that no two prompts would begin alike.
BILLING_HEADER = "x-anthropic-billing-header:"
BETWEEN_THOUGHTS = "\n\n"

ChatMessage = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """What one side said before the other spoke. blocks: each with its place in the request."""

    role: str
    blocks: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)


def instructions(system: str | Sequence[object] | None) -> list[ChatMessage]:
    """The system message that `system` makes, if it makes one."""
    texts = [text for _, text in _texts(system or [], "system", param="system") if not text.startswith(BILLING_HEADER)]
    return [{"role": "system", "content": _parts(texts)}] if any(texts) else []


def read_turns(messages: Sequence[object]) -> list[Turn]:
    """Messages as turns: those of one role in a row are one, as on Anthropic's own server. UserError names the place."""
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or role not in ("user", "assistant", "system"):
            raise UserError(f"{place} must be an object with the role user, assistant or system, and content", param="messages")
        if not turns or turns[-1].role != role:
            turns.append(Turn(role))
        turns[-1].blocks += _blocks(message.get("content"), f"{place}.content", "messages")
    return turns


def num_blocks(messages: Sequence[Mapping[str, Any]]) -> int:
    """About how many blocks there are, those in results of tools included."""
    outer = [content for message in messages if isinstance(content := message.get("content"), list)]
    inner = [block["content"] for blocks in outer for block in blocks if isinstance(block, Mapping) and "content" in block]
    return sum(len(blocks) for blocks in (*outer, *inner) if isinstance(blocks, list))


def keep_thoughts(turns: Sequence[Turn], num_turns: int) -> None:
    """Take the thoughts out of all turns but the last `num_turns` that have any."""
    for turn in reversed(turns):
        others = [(place, block) for place, block in turn.blocks if block["type"] not in ("thinking", "redacted_thinking")]
        if len(others) < len(turn.blocks):
            num_turns -= 1
            turn.blocks = turn.blocks if num_turns >= 0 else others


def chat_messages(turns: Sequence[Turn]) -> list[ChatMessage]:
    """The turns as a chat route takes them. UserError names the block that is wrong."""
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    told: list[ChatMessage] = []
    for turn in turns:
        if turn.role == "user":
            told += _user(turn, names)
        elif turn.role == "assistant":
            told.append(_assistant(turn, names))
        else:
            told.append({"role": "system", "content": _parts([_text(block, place) for place, block in turn.blocks])})
    return told


def _user(turn: Turn, names: Mapping[str, str]) -> list[ChatMessage]:
    results: list[ChatMessage] = []
    texts: list[str] = []
    for place, block in turn.blocks:
        if block["type"] == "tool_result":
            results.append(_result(block, place, names))
        else:
            texts.append(_text(block, place, "text and tool_result"))
    return results + ([{"role": "user", "content": _parts(texts)}] if texts or not results else [])


def _result(block: Mapping[str, Any], place: str, names: Mapping[str, str]) -> ChatMessage:
    call_id = _name(block, "tool_use_id", place)
    texts = [text for _, text in _texts(block.get("content") or [], f"{place}.content")]
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise UserError(f"{place}.is_error must be true or false", param="messages")
    if is_error and not any("error" in text.lower() for text in texts):  # templates have the text only to say so
        texts = [f"Error: {texts[0]}" if texts else "Error", *texts[1:]]
    message = {"role": "tool", "tool_call_id": call_id, "content": _parts(texts)}
    return message | ({"name": names[call_id]} if call_id in names else {})


def _assistant(turn: Turn, names: dict[str, str]) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in turn.blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                pass  # only who wrote it can read it
            case "tool_use":
                call_id, name, arguments = _name(block, "id", place), _name(block, "name", place), block.get("input")
                if not isinstance(arguments, dict):
                    raise UserError(f"{place}.input must be an object", param="messages")
                names[call_id] = name
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case _:
                texts.append(_text(block, place, "text, thinking, redacted_thinking and tool_use"))
    message: ChatMessage = {"role": "assistant", "content": _parts(texts)}
    if any(thoughts):
        message["reasoning"] = BETWEEN_THOUGHTS.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: object, place: str, param: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each block with its place; a text is one block."""
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise UserError(f"{place} must be a text or a list of blocks, got {type(content).__name__}", param=param)
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise UserError(f'{place}[{index}] must be a block such as {{"type": "text", "text": "..."}}', param=param)
        yield f"{place}[{index}]", block


def _texts(content: object, place: str, param: str = "messages") -> Iterator[tuple[str, str]]:
    """Each text of a content that holds only such, with its place."""
    return ((where, _text(block, where, param=param)) for where, block in _blocks(content, place, param))


def _text(block: Mapping[str, Any], place: str, taken: str = "text", param: str = "messages") -> str:
    if block["type"] != "text":
        raise UserError(f"{place} has type {block['type'][:40]!r}; what this server takes there is {taken}", param=param)
    return _string(block, "text", place, param)


def _string(block: Mapping[str, Any], name: str, place: str, param: str = "messages") -> str:
    if not isinstance(value := block.get(name), str):
        raise UserError(f"{place}.{name} must be a text", param=param)
    return value


def _name(block: Mapping[str, Any], name: str, place: str) -> str:
    if not (value := _string(block, name, place)):
        raise UserError(f"{place}.{name} is empty", param="messages")
    return value


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
