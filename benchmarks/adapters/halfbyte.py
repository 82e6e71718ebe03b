"""Halfbyte for `compare.py`: `LLM` over an engine in this process, with any field of EngineOptions as an option.

The call is `LLM.generate` as users make it. A client in between notes when each step comes back, which is the moment at which
a token can be seen; that costs microseconds per step. What runs is the checkout that this file lies in: a spec that names
the file of two checkouts compares two versions. `worker.py` loads this file.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from halfbyte import LLM, SamplingParams, __version__  # noqa: E402
from halfbyte.config import EngineOptions  # noqa: E402
from halfbyte.engine.build import build_engine  # noqa: E402
from halfbyte.engine.client import InProcessClient  # noqa: E402
from halfbyte.types import EngineRequest, StepOutput  # noqa: E402


class _NotingClient(InProcessClient):
    """Remembers the tokens of each request, in the order in which requests came, with the time at which their step ended."""

    streams: dict[str, list[tuple[int, float]]]

    def add(self, requests: list[EngineRequest]) -> None:
        self.streams = {request.request_id: [] for request in requests}
        super().add(requests)

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        step = super().receive(timeout_s)
        seen_s = time.perf_counter()
        for output in step.outputs if step is not None else ():
            self.streams[output.request_id] += [(token_id, seen_s) for token_id in output.new_token_ids]
        return step


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        options = EngineOptions(
            model=settings["model"],
            dtype=settings["dtype"],
            num_threads=settings["num_threads"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=False,
            **settings["options"],
        )
        self._client = _NotingClient(*build_engine(options))
        self._llm = LLM.from_client(self._client, options)

    def versions(self) -> dict[str, str]:
        return {"halfbyte": __version__, "torch": version("torch")}

    def generate(self, prompts: list[Any], output_len: int) -> list[list[tuple[int, float]]]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        self._llm.generate(prompts, params, use_tqdm=False)
        return list(self._client.streams.values())
