"""POST /tokenize and /detokenize: the tokenizer as clients need it to count and to inspect.

The same limits as for generation: a text that could never fit is refused before it is tokenised, ids are checked before they
are decoded.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from halfbyte.entrypoints.openai import templates
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.tools import parse_tools
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.errors import UserError

# A text to inspect may be longer than the context, but decoding is not for free.
MIN_DETOKENIZE_LIMIT = 65_536


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


async def tokenize(frontend: Frontend, call: Call, request: TokenizeRequest) -> Response:
    """Token ids of a text or of a conversation."""
    frontend.served_model(request.model)
    refuse_unsupported(request.model_extra)
    if (request.prompt is None) == (request.messages is None):
        raise UserError("send either prompt or messages", param="prompt")
    engine = frontend.engine
    if request.tools is not None:
        parse_tools(request.tools)  # what chat refuses is refused here
    if request.messages is not None:
        hints = (request.reasoning_effort, request.verbosity)
        text = await templates.render(frontend, request, request.messages, *hints, tools=request.tools)
        token_ids = await engine.encode(text, bool(request.add_special_tokens), seams=True)
    else:
        token_ids = await engine.encode(request.prompt or "", request.add_special_tokens is not False)
    texts = None
    if request.return_token_strs:
        texts = await frontend.beside.run(lambda: [engine.tokenizer.token_text(i) for i in token_ids], 4 * len(token_ids))
    call.num_prompt_tokens = len(token_ids)
    return to_json(Tokens(len(token_ids), engine.limits.max_model_len, token_ids, texts))


async def detokenize(frontend: Frontend, call: Call, request: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included."""
    frontend.served_model(request.model)
    refuse_unsupported(request.model_extra)
    limits, tokenizer = frontend.engine.limits, frontend.engine.tokenizer
    most = max(limits.max_model_len, MIN_DETOKENIZE_LIMIT)
    if len(request.tokens) > most:
        raise UserError(f"tokens holds {len(request.tokens)} ids, at most {most} are decoded at once", param="tokens")
    vocab_size = max(limits.vocab_size, tokenizer.vocab_size)
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id < vocab_size:
            raise UserError(f"tokens[{index}] is {token_id}, the vocabulary has ids 0 to {vocab_size - 1}", param="tokens")
    call.num_prompt_tokens = len(request.tokens)
    text = await frontend.beside.run(lambda: tokenizer.decode(request.tokens, skip_special_tokens=False), 4 * len(request.tokens))
    return to_json(Text(text))
