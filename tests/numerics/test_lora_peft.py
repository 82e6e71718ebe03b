"""Adapters beside random checkpoints of each architecture: the logits and the greedy tokens of PEFT, all in one batch.

Adapters of several kinds and the model as it is share every step; each agrees with PEFT, which sees one whole prompt at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from halfbyte.config import LoraConfig
from halfbyte.model_runner.adapters import attach_adapters
from halfbyte.model_runner.cpu_model import CpuModel
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.source import locate
from tests.numerics.random_adapters import ATTENTION, write_adapter
from tests.numerics.random_models import FAMILIES, FAMILY_DEFAULTS, SHAPES, VOCAB, checkpoint

# Names of requests, and what their adapters are like; the last one has none.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 8, "lora_alpha": 16},
    "rank stabilised": {"rank": 16, "use_rslora": True, "modules": ("q_proj", "v_proj", "down_proj")},
    "patterns": {
        "rank": 4,
        "rank_pattern": {"up_proj": 12, "q_proj": 1},
        "alpha_pattern": {"layers.1.mlp.up_proj": 3, "o_proj": 7},
    },
    "bfloat16": {"rank": 3, "modules": ATTENTION, "dtype": torch.bfloat16},
}
PROMPT_LENS = {"plain": 37, "rank stabilised": 21, "patterns": 5, "bfloat16": 1, "none": 16}
NUM_TOKENS = 12


def prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(3, VOCAB, (n,), generator=generator).tolist() for name, n in PROMPT_LENS.items()}


def save_adapters(folder: Path, reference: Any) -> dict[str, Path]:
    config = reference.config.to_dict()
    return {
        name: write_adapter(folder / f"adapter {index}", config, seed=index, strength=0.3, **kind)
        for index, (name, kind) in enumerate(KINDS.items())
    }


@torch.inference_mode()
def expected(reference: Any, adapters: dict[str, Path]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Logits of every prompt, and its greedy continuation, as PEFT has them."""
    logits, tokens = {}, {}
    first, *others = adapters.items()
    model = peft.PeftModel.from_pretrained(reference, first[1], adapter_name="0")
    for index, (_, path) in enumerate(others, 1):
        model.load_adapter(path, adapter_name=str(index))
    for index, (name, ids) in enumerate(prompts().items()):
        with model.disable_adapter() if name == "none" else torch.no_grad():
            if name != "none":
                model.set_adapter(str(index))
            known = list(ids)
            for _ in range(NUM_TOKENS):
                found = model(torch.tensor([known]), use_cache=False).logits[0].float()
                logits.setdefault(name, found)
                known.append(int(found[-1].argmax()))
            tokens[name] = known[len(ids) :]
    return logits, tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", ["gqa3", "untied"])
def test_logits_and_tokens_equal_peft(
    family: str, shape: str, tmp_path: Path, tolerances: dict[str, float], paged_model: Any, load: Callable[..., Any]
) -> None:
    reference = checkpoint(tmp_path, family, {**FAMILY_DEFAULTS.get(family, {}), **SHAPES[shape]})
    adapters = save_adapters(tmp_path, reference)
    files = locate(str(tmp_path))
    model = load(files, config_from_files(files, {}), "float32")
    loaded = attach_adapters(model, LoraConfig(max_loras=len(KINDS), max_lora_rank=16), "float32")
    paged = paged_model(model)
    for number, (name, path) in enumerate(adapters.items(), 1):
        loaded.add(number, str(path))
        paged.seats[name] = loaded.seat_of(number)

    wanted_logits, wanted_tokens = expected(reference, adapters)
    whole = paged.step(prompts())
    for name in prompts():
        paged.release(name)
    scale = max(float(x.abs().max()) for x in wanted_logits.values())
    errors = {name: float((whole[name] - x).abs().max()) / scale for name, x in wanted_logits.items()}
    assert max(errors.values()) <= tolerances["random_model_fp32"], errors
    together = paged.greedy(prompts(), NUM_TOKENS)
    assert together == wanted_tokens
    assert len({tuple(tokens) for tokens in together.values()}) == len(together)
    if isinstance(model, CpuModel):  # the same bits alone
        for name, ids in prompts().items():
            assert torch.equal(paged.step({name: ids})[name], whole[name]), name
            paged.release(name)
