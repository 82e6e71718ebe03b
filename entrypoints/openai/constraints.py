"""What bounds an answer, and what reads it: a request's tools, structure and thoughts, made into a plan for one chat call.

Brings the fields of a request, the server's syntax and the engine's grammars together. Refuses what cannot go together. Called by
the chat route before anything is generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from halfbyte.engine.grammar.compile import GrammarOptions, lark_of
from halfbyte.engine.grammar.json_schema import prepare
from halfbyte.engine.grammar.schema_reader import Work
from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.grammar import tools_grammar
from halfbyte.entrypoints.answers.parser import AnswerParser
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.structure import asked_structure
from halfbyte.entrypoints.openai.tools import ToolUse
from halfbyte.errors import UserError
from halfbyte.types import StructuredOutputsParams, Thinking

_ANY_OBJECT = {"type": "object"}
_SIMPLE = ("string", "integer", "number", "boolean")


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """thinking: None where no thoughts are looked for. grammar: for the engine. special: whether control tokens are shown."""

    frontend: Frontend
    use: ToolUse
    prompt: str
    special: bool
    thinking: Thinking | None
    grammar: str | None

    def parser(self) -> AnswerParser | None:
        """For one choice; None when all of its text is content."""
        tools = None if self.use.mode == "none" else self.use.tools
        return self.frontend.answers.parser(tools, self.thinking, self.prompt, special=self.special)

    @property
    def marks(self) -> Mapping[int, str] | None:
        """The tokens that the parser wants to see as marks."""
        return None if self.parser() is None else self.frontend.answers.marks.by_token


def check_tools(frontend: Frontend, use: ToolUse) -> None:
    """UserError when this server cannot do what the request wants of tools."""
    config = frontend.config
    if use.mode == "auto" and not config.enable_auto_tool_choice:
        raise UserError(
            '"auto" tool choice needs a server started with --enable-auto-tool-choice and --tool-call-parser;'
            ' send tool_choice="none" to have the tools described only',
            param="tool_choice",
        )
    if use.is_forced and frontend.answers.tools is None:
        raise UserError(f"tool_choice {use.mode!r} needs a server started with --tool-call-parser", param="tool_choice")


async def plan_answer(frontend: Frontend, request: ChatRequest, use: ToolUse, prompt: str) -> AnswerPlan:
    """UserError names the field that cannot be had, or not together with another."""
    asked, param = asked_structure(request)
    thinking = frontend.answers.thinking(prompt, continues=bool(request.continue_final_message))
    if asked is not None and use.is_forced:
        raise UserError(f"{param} and tool_choice {use.mode!r} ask for different answers; leave one out", param=param)
    if (asked is not None or use.needs_grammar) and frontend.structure.enable_in_reasoning:
        thinking = None
    grammar, options = None, frontend.structure.options
    if use.needs_grammar or (use.mode == "auto" and asked is not None):
        param = param or "tools"
        grammar = await frontend.engine.compile_grammar(partial(_calls, frontend, use, asked, param), param)
    elif asked is not None:
        inner = partial(lark_of, asked, options, param)
        begins = not request.continue_final_message and (thinking is None or thinking.is_open is not False)
        grammar = await frontend.engine.compile_grammar(lambda: frontend.answers.wrap(inner(), begins=begins), param)
    if thinking is not None and not thinking.end_ids and (grammar is not None or request.thinking_token_budget is not None):
        raise UserError(
            "this model's thoughts may end in several ways, which neither a grammar nor a budget can wait for",
            param=param or "thinking_token_budget",
        )
    if thinking is not None and grammar is not None:  # the grammar says how the answer goes on
        thinking = msgspec.structs.replace(thinking, force_ids=thinking.end_ids)
    special = request.skip_special_tokens is False
    return AnswerPlan(frontend, use, prompt, special, thinking, grammar)


def _calls(frontend: Frontend, use: ToolUse, asked: StructuredOutputsParams | None, param: str) -> str:
    """The grammar of an answer that may hold calls, or else is what was asked."""
    answers, options = frontend.answers, frontend.structure.options
    assert answers.tools is not None, "checked before"
    work = Work()  # bounds all schemas together
    or_else = None
    if asked is not None:
        if asked.json is None and not asked.json_object:
            raise UserError(f"{param}: beside tools only JSON can be asked for", param=param)
        or_else = _json_term(_ANY_OBJECT if asked.json is None else asked.json, options, param, work)
    tools = [tool if use.is_forced or tool.strict else Tool(tool.name, loose_schema(tool.parameters)) for tool in use.tools]
    terms = partial(_json_term, options=options, param="tools", work=work)
    shape = {"required": use.is_forced, "parallel": use.parallel}
    return tools_grammar(answers.tools, answers.marks, tools, terms, **shape, or_else=or_else)


def loose_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a tool that is not strict: any that have the parameters' names, of their types where these are simple."""
    properties = schema.get("properties")
    named = properties if isinstance(properties, Mapping) else {}
    kinds = {name: node.get("type") if isinstance(node, Mapping) else None for name, node in named.items()}
    return {
        "type": "object",
        "properties": {name: {"type": kind} if kind in _SIMPLE else {} for name, kind in kinds.items()},
    }


def _json_term(schema: Any, options: GrammarOptions, param: str, work: Work) -> str:
    return f"%json {json.dumps(prepare(schema, options=options, param=param, work=work))}"


def shown_tools(request: ChatRequest, use: ToolUse, frontend: Frontend) -> Sequence[dict[str, Any]] | None:
    """The tools that the prompt describes."""
    if use.mode == "none" and frontend.config.exclude_tools_when_tool_choice_none:
        return None
    return request.tools
