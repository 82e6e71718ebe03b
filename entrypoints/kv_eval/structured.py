"""Answers in a form: a small JSON object with given keys, or a tool call as Hermes models write it, through the chat template.

A program reads such answers, and one wrong character loses them. Only the form is judged, not what the values say. Called by
`evaluate`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.entrypoints.kv_eval.questions import Question
from halfbyte.errors import UserError

_MAX_ANSWER_TOKENS = 160

_NAMES = ("Mara Lindqvist", "Tomas Okafor", "Ines Carvalho", "Jun Watanabe", "Leila Haddad", "Piotr Zielinski")
_PLACES = ("Bergen", "Lagos", "Porto", "Sapporo", "Tunis", "Gdansk", "Quito", "Galway")
# keys -> a note that holds their values
_NOTES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("name", "age", "city"), "{name}, {number} years old, has moved to {place}."),
    (("item", "quantity", "price"), "{name} ordered {number} desk lamps from a shop in {place}, 19.50 each."),
    (("title", "author", "year"), "'The Lighthouse of {place}' by {name} came out in 19{number}."),
    (("from", "to", "passengers"), "The ferry from Oslo to {place} took {number} passengers, among them {name}."),
    (("room", "guest", "nights", "breakfast"), "Room {number} in {place} is booked by {name} for 3 nights, with breakfast."),
)
# function -> (what it does, its arguments, a request that needs it)
_TOOLS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "get_weather": ("Current weather of a city", ("city",), "{name} asks how warm it is in {place}. Was it {number} degrees?"),
    "send_message": (
        "Send a text to a person",
        ("recipient", "text"),
        "Tell {name} that I arrive in {place} at {number} past nine.",
    ),
    "create_event": (
        "Add an event to the calendar",
        ("title", "day"),
        "Dinner with {name} in {place}, {number} days from now: put it down.",
    ),
    "convert_units": ("Convert a length", ("value", "from", "to"), "{name} of {place} asks: what are {number} miles in km?"),
    "search_flights": (
        "Find flights",
        ("origin", "destination"),
        "{name} must fly from {place} to Rome, with {number} others.",
    ),
}


def make_questions(tokenizer: Tokenizer, num_questions: int, seed: int) -> list[Question]:
    """JSON objects and tool calls in turn. UserError when the model has no chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            "the format test needs a chat template, which this model has not; leave format out of --tests", param="tests"
        )
    template = ChatTemplate.for_tokenizer(tokenizer)
    rng = random.Random(seed)
    questions = []
    for number in range(num_questions):
        kind, request, is_right = (_json_request if number % 2 == 0 else _tool_request)(rng, number // 2)
        # of templates that know thinking: the answer itself is wanted
        text = template.render([{"role": "user", "content": request}], chat_template_kwargs={"enable_thinking": False})
        ids = tokenizer.encode(text, add_special_tokens=False, seams=True)
        questions.append(Question(kind=kind, prompt_token_ids=ids, max_tokens=_MAX_ANSWER_TOKENS, is_right=is_right))
    return questions


def has_keys(text: str, keys: Sequence[str]) -> bool:
    """Whether the first `{` of an answer begins a JSON object that has these keys and no other."""
    found = _first_object(text)
    return found is not None and set(found) == set(keys)


def calls_tool(text: str, name: str, arguments: Sequence[str]) -> bool:
    """Whether an answer holds one `<tool_call>` that calls this function with these arguments."""
    bodies = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    if len(bodies) != 1:
        return False
    try:
        call = json.loads(bodies[0])
    except json.JSONDecodeError:
        return False
    if not isinstance(call, dict) or call.get("name") != name:
        return False
    given = call.get("arguments")
    return isinstance(given, dict) and set(given) == set(arguments)


def _first_object(text: str) -> dict[str, Any] | None:
    start = text.find("{")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


Request = tuple[str, str, Callable[[str], bool]]


def _json_request(rng: random.Random, number: int) -> Request:
    keys, note = _NOTES[number % len(_NOTES)]
    request = (
        f"Write the facts of this note as one JSON object with the keys {', '.join(keys)}. "
        f"Answer with the JSON object only.\n\nNote: {_fill(note, rng)}"
    )
    return "json", request, lambda text: has_keys(text, keys)


def _tool_request(rng: random.Random, number: int) -> Request:
    name = list(_TOOLS)[number % len(_TOOLS)]
    _, arguments, wish = _TOOLS[name]
    request = (
        f"You can call functions. These are their signatures:\n<tools>\n{_signatures()}\n</tools>\n"
        "To call one, answer with its name and arguments as one JSON object between tags:\n"
        '<tool_call>\n{"name": "function", "arguments": {"argument": "value"}}\n</tool_call>\n\n'
        f"Give every argument. Answer with the call only.\n\n{_fill(wish, rng)}"
    )
    return "tool call", request, lambda text: calls_tool(text, name, arguments)


def _signatures() -> str:
    """One function per line, in the form of the OpenAI API."""
    return "\n".join(
        json.dumps({"type": "function", "function": {"name": name, "description": what, "parameters": _schema(arguments)}})
        for name, (what, arguments, _) in _TOOLS.items()
    )


def _schema(arguments: Sequence[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"} for name in arguments}, "required": list(arguments)}


def _fill(pattern: str, rng: random.Random) -> str:
    return pattern.format(name=rng.choice(_NAMES), place=rng.choice(_PLACES), number=rng.randint(11, 97))
