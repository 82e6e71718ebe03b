"""transformers for `compare.py`: `generate()` on one static batch, left-padded; options go to `from_pretrained`.

Tokens are timed by a streamer, which `generate()` hands the new token of every row after each step; that costs microseconds
per step. `worker.py` loads this file.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402  (the line above must come first)
import transformers  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402


class _NotingStreamer(BaseStreamer):
    """Rows of tokens with the time at which each came. The first call hands over the prompts."""

    def __init__(self, batch_size: int) -> None:
        self.streams: list[list[tuple[int, float]]] = [[] for _ in range(batch_size)]
        self._has_seen_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_seen_prompts:
            seen_s = time.perf_counter()
            for stream, token_id in zip(self.streams, value.tolist(), strict=True):
                stream.append((token_id, seen_s))
        self._has_seen_prompts = True

    def end(self) -> None:
        pass


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["num_threads"])
        transformers.logging.set_verbosity_error()
        dtype = getattr(torch, settings["dtype"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype, **settings["options"])
        self._model.eval()

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("transformers", "torch")}

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[tuple[int, float]]]:
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        streamer = _NotingStreamer(len(prompts))
        length = {"min_new_tokens": output_len, "max_new_tokens": output_len, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            self._model.generate(input_ids=input_ids, attention_mask=mask, do_sample=False, streamer=streamer, **length)
        return streamer.streams
