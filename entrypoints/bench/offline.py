"""What `bench latency` and `bench throughput` share: how `LLM` is asked, and that it answered in full.

All answers have the length that was asked for: EOS is ignored. Sampling is vLLM's for its benchmarks. Knows no dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfbyte.entrypoints.bench.shared_flags import OUTPUT_JSON, count_flag, range_check
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS
from halfbyte.entrypoints.flags import Flag
from halfbyte.errors import HalfbyteError
from halfbyte.types import SamplingParams

if TYPE_CHECKING:
    from halfbyte.entrypoints.llm import LLM, RequestOutput

OFFLINE_FLAGS = (
    count_flag("n", "sequences per prompt", 1),
    Flag(
        name="temperature",
        help="1 samples, as vLLM's benchmarks do; 0 takes the most likely token (default: 1)",
        kind="number",
        check=range_check("temperature", 0, 2),
    ),
    Flag(name="disable-detokenize", help="leave the answers as token ids", kind="switch"),
    OUTPUT_JSON,
    LOG_LEVEL,
    *ENGINE_FLAGS,
)

# What vLLM's offline benchmarks have beyond the engine's flags.
REFUSED_OFFLINE: Mapping[str, str] = {**REFUSED_FLAGS, "--profile": "start the command under a profiler of your choice"}


def sampling(command: Mapping[str, Any]) -> SamplingParams:
    """What the flags say of all requests; the length of the answer is each request's own."""
    return SamplingParams(
        n=command.get("n", 1),
        temperature=command.get("temperature", 1.0),
        ignore_eos=True,
        detokenize=not command.get("disable_detokenize", False),
    )


def generate(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], use_tqdm: bool = False) -> list[RequestOutput]:
    """The answers, all of them as long as asked. HalfbyteError otherwise: a run that stopped early looks fast."""
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    for output, wanted in zip(outputs, params, strict=True):
        for sequence in output.outputs:
            if len(sequence.token_ids) != wanted.max_tokens:
                raise HalfbyteError(
                    f"a request ended after {len(sequence.token_ids)} of {wanted.max_tokens} tokens ({sequence.finish_reason}); "
                    "ask for fewer output tokens or raise --max-model-len"
                )
    return outputs
