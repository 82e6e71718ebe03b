"""`halfbyte generate PROMPT`: one completion through `halfbyte.LLM`, printed as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.types import SamplingParams

DEFAULT_MAX_TOKENS = 128

FLAGS = (
    Flag(name="prompt", help="the text to continue; - reads standard input", positional=True),
    Flag(name="max-tokens", help=f"longest answer in tokens (default: {DEFAULT_MAX_TOKENS})", kind="size"),
    Flag(name="temperature", help="0 takes the most likely token each time (default)", kind="number"),
    Flag(name="top-p", help="sample from the most likely tokens that make up this probability", kind="number"),
    Flag(name="stop", help="texts that end the answer", kind="texts"),
    LOG_LEVEL,
    *ENGINE_FLAGS,
)


def run(argv: Sequence[str]) -> int:
    parsed = parse("generate", "Complete one prompt and print the text.", FLAGS, argv, REFUSED_FLAGS)
    given = dict(parsed.command)
    given.pop("log_level", None)
    prompt = given.pop("prompt", None)
    if prompt is None:
        raise UsageError('generate needs a prompt: halfbyte generate "The capital of France is"')
    params = SamplingParams(**({"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0.0} | given))
    engine_options(parsed)  # wrong flags fail before torch is imported
    from halfbyte import LLM

    llm = LLM(**parsed.engine)
    try:
        [output] = llm.generate([sys.stdin.read() if prompt == "-" else prompt], params, use_tqdm=False)
    finally:
        llm.close()
    print(output.outputs[0].text)
    return 0
