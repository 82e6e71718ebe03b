"""vLLM's CPU wheel for `compare.py`: `LLM`'s engine driven step by step; options go to `LLM`.

`LLM.generate` is the same loop over `step()` with its outputs held back until the end; here each step hands over what is new, so
that tokens can be timed as the front end sees them. Threads are bound to the first `num_threads` cores that this process may
use: the wheel's own choice keeps one core free. `worker.py` loads this file.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: settings["num_threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        llm = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            **settings["options"],
        )
        self._engine = llm.llm_engine
        self._params = lambda output_len: SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[tuple[int, float]]]:
        streams: list[list[tuple[int, float]]] = [[] for _ in prompts]
        for index, prompt in enumerate(prompts):
            self._engine.add_request(str(index), {"prompt_token_ids": prompt}, self._params(output_len))
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            seen_s = time.perf_counter()
            for output in outputs:
                streams[int(output.request_id)] += [(token_id, seen_s) for token_id in output.outputs[0].token_ids]
        return streams
