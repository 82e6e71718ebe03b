"""`halfbyte bench throughput`: all requests of a dataset at once through `LLM`; requests and tokens per second.

The engine is started and warmed up before the clock runs. Knows no HTTP: `bench serve` measures servers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfbyte.entrypoints.bench.datasets import DATASET_FLAGS, DEFAULT_DATASET, BenchRequest, fresh_seed, load_requests
from halfbyte.entrypoints.bench.offline import OFFLINE_FLAGS, REFUSED_OFFLINE, generate, sampling
from halfbyte.entrypoints.bench.results import environment, save
from halfbyte.entrypoints.bench.shared_flags import MODEL, count_flag
from halfbyte.entrypoints.flag_table import engine_options
from halfbyte.entrypoints.flags import UsageError, parse
from halfbyte.types import SamplingParams

if TYPE_CHECKING:
    from halfbyte.entrypoints.llm import LLM

DEFAULT_NUM_PROMPTS = 1000
# vLLM's short names, for whichever dataset is chosen.
SHORT_FLAGS = (
    count_flag("input-len", "prompt tokens", "the dataset's", group="dataset"),
    count_flag("output-len", "tokens of each answer", "the dataset's", group="dataset"),
    count_flag("prefix-len", "tokens of a common prefix", "the dataset's", least=0, group="dataset"),
)
FLAGS = (
    MODEL,
    count_flag("num-prompts", "requests that are measured", DEFAULT_NUM_PROMPTS),
    count_flag("num-warmups", "requests of the dataset before that", 0, least=0),
    *OFFLINE_FLAGS,
    *DATASET_FLAGS,
    *SHORT_FLAGS,
)
_NO_HUB = "datasets of the hub are not read; use --dataset-name custom"
_NO_ADAPTERS = "adapters cannot be loaded; merge them into the weights"
REFUSED: Mapping[str, str] = {
    **REFUSED_OFFLINE,
    "--backend": "this measures Halfbyte; `halfbyte bench serve` measures any server",
    "--async-engine": "use `halfbyte bench serve`",
    "--dataset": "use --dataset-name and --dataset-path",
    **dict.fromkeys(("--hf-subset", "--hf-split", "--hf-name"), _NO_HUB),
    "--hf-max-batch-size": "the engine makes its batches; use --max-num-seqs",
    **dict.fromkeys(("--lora-path", "--lora-assignment"), _NO_ADAPTERS),
}


def run(argv: Sequence[str]) -> int:
    parsed = parse("bench throughput", "Measure requests and tokens per second of a dataset.", FLAGS, argv, REFUSED)
    command = parsed.command
    dataset, params, options = command.get("dataset_name", DEFAULT_DATASET), sampling(command), engine_options(parsed)
    settings = _dataset_settings(dataset, command)
    seed = fresh_seed() if options.seed is None else options.seed
    num_prompts, num_warmups = command.get("num_prompts", DEFAULT_NUM_PROMPTS), command.get("num_warmups", 0)
    from halfbyte import LLM
    from halfbyte.engine.front import load_front

    # before the engine: what is wrong with the dataset is said before weights are read
    sample = load_requests(dataset, settings, load_front(options).tokenizer, num_warmups + num_prompts, seed)
    llm = LLM(**parsed.engine)
    try:
        if num_warmups:
            measure(llm, sample.requests[:num_warmups], params)
        result = measure(llm, sample.requests[num_warmups:], params)
    finally:
        llm.close()
    result |= {"prefix_share": sample.prefix_share, "dataset_name": dataset, "seed": seed}
    print("\n".join(report(result)), flush=True)
    if "output_json" in command:
        result |= {"model": options.model, "n": params.n, "temperature": params.temperature, "num_warmups": num_warmups}
        save(command["output_json"], result | {"environment": environment()})
    return 0


def _dataset_settings(dataset: str, command: Mapping[str, Any]) -> dict[str, Any]:
    """The command's flags with the short names written out, so that `load_requests` sees one name of each thing."""
    settings = dict(command)
    long_names = {flag.target: flag.name for flag in DATASET_FLAGS}
    for flag in SHORT_FLAGS:
        target = f"{dataset}_{flag.target}"
        if flag.target not in command:
            continue
        if target not in long_names:
            raise UsageError(f"--{flag.name} is not for --dataset-name {dataset}")
        if target in command:
            raise UsageError(f"--{flag.name} and --{long_names[target]} mean the same: give one of them")
        settings[target] = settings.pop(flag.target)
    return settings


def measure(
    llm: LLM, requests: Sequence[BenchRequest], params: SamplingParams, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """One call with all requests: vLLM's names, then ours."""
    prompts = [request.prompt if request.prompt_token_ids is None else request.prompt_token_ids for request in requests]
    each = [params.clone(max_tokens=request.output_len) for request in requests]
    num_preemptions = llm.num_preemptions
    started_s = clock()
    outputs = generate(llm, prompts, each, use_tqdm=sys.stderr.isatty())
    elapsed_s = clock() - started_s
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    num_tokens = num_prompt_tokens + num_output_tokens
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(requests),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(requests) / elapsed_s,
        "tokens_per_second": num_tokens / elapsed_s,
        "output_tokens_per_second": num_output_tokens / elapsed_s,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "num_cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "num_preemptions": llm.num_preemptions - num_preemptions,
    }


def report(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    yield f"Total num prompt tokens:  {result['num_prompt_tokens']}"
    yield f"Total num output tokens:  {result['num_output_tokens']}"
    yield (
        f"Prefix share: {result['prefix_share']:.1%} of the prompt tokens stand in a common prefix; "
        f"{result['num_cached_tokens']} were answered from the cache"
    )
