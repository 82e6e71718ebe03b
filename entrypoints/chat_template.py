"""Conversations to prompt text, through a Jinja chat template in a sandbox.

Knows templates, messages and what templates expect of them; knows no HTTP, no tokens and no model. Called by `LLM.chat` and by
the routes that take messages. Every error of a template is a UserError. The text already holds BOS where the template wants
it, so it is encoded with `add_special_tokens=ChatTemplate.add_special_tokens` (False).

Trust: a model's or operator's template runs in this process, with a budget of time and size against runaway loops. A template
that came with a request is a stranger's program: it is compiled and run in a process of its own, with limits that the kernel
enforces, and killed when its time is over. `render` may take as long as its limit: call it beside the event loop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from halfbyte.entrypoints.chat_messages import content_maker, mark_end, quote_all, quote_message, read_message, read_tools
from halfbyte.entrypoints.chat_roles import INSTRUCTING, Traits, arrange
from halfbyte.entrypoints.scrub import scrub
from halfbyte.errors import UserError

if TYPE_CHECKING:
    from halfbyte.engine.tokenizer import Tokenizer

RENDER_LIMIT_S = 30.0
REQUEST_TEMPLATE_LIMIT_S = 5.0
REQUEST_TEMPLATE_MEMORY_BYTES = 2**30
MAX_TEMPLATE_CHARS = 256 * 1024
MAX_PROMPT_CHARS = 16 * 2**20
MAX_ERROR_CHARS = 1000
_MAX_POWER_BITS = 4096

Message = Mapping[str, Any]

# What belongs to the renderer or to the template's environment: no variable of a request may take its place.
RESERVED_VARIABLES = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages", "tools"),
        *("max_length", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("tokenize", "tokenizer_kwargs", "truncation", "bos_token", "eos_token", "raise_exception", "strftime_now"),
        *("cycler", "dict", "joiner", "namespace", "range"),
    }
)


class ChatTemplate:
    """One template, compiled once. `special_tokens`: its variables bos_token and eos_token. tool_source: what takes its place
    when there are tools.

    from_request=True: the source came with a request and is not trusted. UserError if the source cannot be compiled (of a
    request's template only `render` finds that out). quote: sets control tokens that clients spell apart, see `quote_message`.
    """

    add_special_tokens: ClassVar[bool] = False

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        from_request: bool = False,
        quote: Callable[[str], str] = str,
    ) -> None:
        if from_request and len(source) > MAX_TEMPLATE_CHARS:
            raise UserError(
                f"chat_template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed", param="chat_template"
            )
        self._source = source
        self._quote = quote
        self._special_tokens = dict(special_tokens or {})
        self._compiled = None if from_request else _compile(source)
        self._compiled_for_tools = _compile(tool_source) if tool_source else self._compiled

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, source: str | None = None, *, from_request: bool = False) -> ChatTemplate:
        """`source`, or else the model's own templates, with the tokenizer's special tokens. UserError when there is neither."""
        tool_source = None if source else tokenizer.tool_template
        source = source or tokenizer.chat_template or tool_source
        if not source:
            raise UserError(
                "this model has no chat template; give one with --chat-template FILE (LLM: chat_template=), or use completions",
                param="chat_template",
            )
        tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        return cls(
            source,
            {name: token for name, token in tokens.items() if token is not None},
            tool_source=tool_source,
            from_request=from_request,
            quote=tokenizer.quote_special,
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        add_generation_prompt: end with the start of an answer. continue_final_message: end inside the last message instead, so
        that the answer continues it. chat_template_kwargs: more variables for the template. What messages, tools and documents
        spell of control tokens is text; the tokenizer's seams tell. UserError says what is wrong with the messages, or what the
        template says about them.
        """
        if add_generation_prompt and continue_final_message:
            raise UserError("add_generation_prompt and continue_final_message exclude each other", param="continue_final_message")
        if reserved := sorted(RESERVED_VARIABLES & set(chat_template_kwargs or ())):
            raise UserError(f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs")
        if not messages:
            raise UserError("messages must not be empty", param="messages")
        try:
            messages = [quote_message(message, self._quote) for message in messages]
            variables = {
                **(chat_template_kwargs or {}),
                **self._special_tokens,
                "tools": quote_all(read_tools(tools), self._quote),
                "documents": quote_all(list(documents), self._quote) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError:
            raise UserError("messages, tools and documents must not be nested too deeply", param="messages") from None
        compiled = self._compiled_for_tools if tools else self._compiled
        if compiled is None:
            return _render_in_child(self._source, messages, variables, continue_final_message)
        return compiled.render(messages, variables, continue_final_message)


def read_template(file_or_text: str) -> str:
    """The source that the flag --chat-template names: a file, or the template itself. Never for what a request sends."""
    if "{" in file_or_text or "\n" in file_or_text:
        return file_or_text
    try:
        return Path(file_or_text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--chat-template {file_or_text}: cannot read this file: {reason}", param="chat_template") from None


# --- the sandbox -----------------------------------------------------------------------------------------------------------

_deadline_s: ContextVar[float] = ContextVar("_deadline_s", default=float("inf"))


class _OverBudget(Exception):
    """The template takes too long or makes too much."""


class _Refusal(TemplateError):
    """The template called raise_exception: its own words about the messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with a deadline in every loop and macro and a cap on what grows."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplication and power are the operators whose result may be far larger than what they are given."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            raise _OverBudget("it computes too large a number")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(times, int) and len(sequence) * times > MAX_PROMPT_CHARS:
                raise _OverBudget(f"it makes a text of more than {MAX_PROMPT_CHARS} characters")
        return super().call_binop(context, operator, left, right)

    def tick(self) -> None:
        if time.monotonic() > _deadline_s.get():
            raise _OverBudget("it takes too long")

    def bounded(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)) and len(value) > MAX_PROMPT_CHARS:
            raise _OverBudget(f"it makes a text of more than {MAX_PROMPT_CHARS} characters")
        return value


class _AddBudget(NodeTransformer):
    """Puts a tick into everything that can repeat (loops, macros, blocks), and a bound around every concatenation."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self._bounded(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        return self._bounded(node)

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return node

    def _bounded(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call("bounded", [node], node.lineno)


def _call(method: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=lineno), arguments, [], None, None, lineno=lineno)


def _make_sandbox() -> _Sandbox:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    del sandbox.globals["lipsum"]
    return sandbox


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Compiled:
    """A template in this process. loops_over_parts, accepts_texts: what it expects a message's content to be."""

    def __init__(self, template: Template, loops_over_parts: bool, accepts_texts: bool, names_developer: bool) -> None:
        self._template = template
        self._to_content = content_maker(loops_over_parts, accepts_texts)
        self._traits = Traits(self._trial, names_developer)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any], continue_final_message: bool) -> str:
        read = [read_message(message, index) for index, message in enumerate(messages)]
        arranged = arrange(read, self._traits)
        if not continue_final_message:
            return self._run(arranged, variables)
        if read[-1]["role"] in INSTRUCTING and arranged[-1]["content"] is not read[-1]["content"]:
            raise UserError(
                "the chat template takes system messages at the front only, so that the last message cannot be continued",
                param="continue_final_message",
            )
        marker = f"<{uuid.uuid4().hex}>"
        return _cut_at(marker, self._run(arranged, variables, marker))

    def _trial(self, arranged: Sequence[dict[str, Any]]) -> str | None:
        """The text of a conversation made to learn what the template does, None where it refuses it."""
        variables = {"tools": None, "documents": None, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
        try:
            return self._run(arranged, variables)
        except UserError as error:
            if error.param == "chat_template":  # stopped, which says nothing about what it takes
                raise
            return None

    def _run(self, arranged: Sequence[dict[str, Any]], variables: Mapping[str, Any], end_marker: str | None = None) -> str:
        prepared = [
            {**message, "content": None if message["content"] is None else self._to_content(message["content"])}
            for message in arranged
        ]
        if end_marker is not None:
            mark_end(prepared[-1], end_marker)
        return self._generate({**variables, "messages": prepared})

    def _generate(self, variables: dict[str, Any]) -> str:
        token = _deadline_s.set(time.monotonic() + RENDER_LIMIT_S)
        chunks: list[str] = []
        num_chars = 0
        try:
            for chunk in self._template.generate(variables):
                num_chars += len(chunk)
                if num_chars > MAX_PROMPT_CHARS:
                    raise _OverBudget(f"it makes a text of more than {MAX_PROMPT_CHARS} characters")
                chunks.append(chunk)
        except _Refusal as error:
            raise UserError(f"the chat template refuses the messages: {_clean(str(error))}", param="messages") from None
        except _OverBudget as error:
            raise UserError(f"the chat template was stopped: {error}", param="chat_template") from None
        except MemoryError:
            raise UserError("the chat template was stopped: it needs too much memory", param="chat_template") from None
        except Exception as error:  # whatever a template does wrong is this one request's error
            raise UserError(f"the chat template failed: {_clean(_describe(error))}", param="messages") from None
        finally:
            _deadline_s.reset(token)
        return "".join(chunks)


@lru_cache(maxsize=8)
def _compile(source: str) -> _Compiled:
    sandbox = _make_sandbox()
    try:
        tree = sandbox.parse(source)
        loops_over_parts, accepts_texts = _content_expectations(tree)
        names_developer = any(constant.value == "developer" for constant in tree.find_all(nodes.Const))
        tree = _AddBudget().visit(tree)
        tree.set_environment(sandbox)
        code = sandbox.compile(tree)
        template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
    except TemplateSyntaxError as error:
        reason = _clean(error.message or "syntax error")
        raise UserError(f"the chat template is not valid Jinja: line {error.lineno}: {reason}", param="chat_template") from None
    except Exception as error:
        raise UserError(f"the chat template cannot be compiled: {_clean(_describe(error))}", param="chat_template") from None
    return _Compiled(template, loops_over_parts, accepts_texts, names_developer)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _clean(message: str) -> str:
    """One line without addresses and paths of this machine."""
    return scrub(" ".join(message[: 4 * MAX_ERROR_CHARS].split()))[:MAX_ERROR_CHARS]


# --- what a template expects of `content` ------------------------------------------------------------------------------------


def _content_expectations(tree: nodes.Template) -> tuple[bool, bool]:
    """(whether the template loops over the parts of a content, whether it also takes a content that is a text)."""
    names: set[str] = set()  # variables that hold a content

    def is_content(node: nodes.Node | None) -> bool:
        match node:
            case nodes.Getattr():
                return node.attr == "content"
            case nodes.Getitem():
                return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
            case nodes.Name():
                return node.name in names
            case nodes.Filter():
                return node.name in ("list", "selectattr", "rejectattr") and is_content(node.node)
            case nodes.CondExpr():
                return is_content(node.expr1) or is_content(node.expr2)
            case nodes.Or():
                return is_content(node.left)
        return False

    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for _ in range(3):  # a content may pass through a variable and a macro
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and is_content(assign.node):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            for argument, parameter in zip(call.args, macro.args if macro else (), strict=False):
                if is_content(argument):
                    names.add(parameter.name)
    loops = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests = any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test))
    return loops, tests or not loops


def _cut_at(marker: str, text: str) -> str:
    end = text.rfind(marker)
    if end < 0:
        raise UserError(
            "the chat template does not show the last message's content, so it cannot be continued",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(" ", end + len(marker))
    return text[:end].rstrip() if is_trimmed else text[:end]


# --- templates of requests ---------------------------------------------------------------------------------------------------

_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from halfbyte.entrypoints.chat_template import child_main; child_main()"


def _render_in_child(source: str, messages: list[Any], variables: dict[str, Any], continue_final_message: bool) -> str:
    """Render an untrusted template in a process of its own; files instead of pipes, so that neither side can block the other."""
    task = {"source": source, "messages": messages, "variables": variables, "continue_final_message": continue_final_message}
    try:
        task_bytes = json.dumps(task).encode()
    except (TypeError, ValueError, RecursionError):
        raise UserError("messages and chat_template_kwargs must be JSON, not nested too deeply", param="messages") from None
    path = [os.path.abspath(entry) for entry in sys.path]
    with tempfile.TemporaryFile() as task_file, tempfile.TemporaryFile() as answer_file:
        task_file.write(task_bytes)
        task_file.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _CHILD, *path],
            stdin=task_file,
            stdout=answer_file,
            stderr=subprocess.DEVNULL,
            env={},  # no keys and tokens for a stranger
            cwd="/",
        )
        try:
            child.wait(REQUEST_TEMPLATE_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"the chat template was stopped: it takes longer than {REQUEST_TEMPLATE_LIMIT_S:g} s", param="chat_template"
            ) from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        answer_file.seek(0)
        answer = answer_file.read()
    if child.returncode != 0:
        raise UserError("the chat template was stopped: it needs too much memory or makes too much text", param="chat_template")
    kind, _, text = answer.decode("utf-8", "surrogatepass").partition("\n")
    if kind != "ok":
        raise UserError(text, param=kind)
    return text


def child_main() -> None:
    """The child's whole life: limits first, then one task from standard input, one answer to standard output."""
    import resource

    most_seconds = int(REQUEST_TEMPLATE_LIMIT_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (REQUEST_TEMPLATE_MEMORY_BYTES, REQUEST_TEMPLATE_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MAX_PROMPT_CHARS, 5 * MAX_PROMPT_CHARS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    task = json.loads(sys.stdin.buffer.read())
    try:
        text = _compile(task["source"]).render(task["messages"], task["variables"], task["continue_final_message"])
        answer = f"ok\n{text}"
    except UserError as error:
        answer = f"{error.param}\n{error}"
    sys.stdout.buffer.write(answer.encode("utf-8", "surrogatepass"))
    sys.stdout.buffer.flush()
