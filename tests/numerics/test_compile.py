"""`--compile native`: a model through torch.compile says what it says without. Needs a C++ compiler, as torch.compile does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfbyte.config import EngineOptions
from halfbyte.kernels.attention import get_backend
from halfbyte.model_runner.decoder_config import DecoderConfig, RopeConfig
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.runner import ModelRunner
from halfbyte.platform import detect_platform
from halfbyte.resolve import ModelFacts, resolve
from halfbyte.types import GrownRow, NewRow, SamplingParams, SchedulerOutput, TokenLogprobs

# More than torch.compile makes versions of one function: layers must share what is compiled.
NUM_LAYERS = 12


def runner(**options: Any) -> ModelRunner:
    decoder = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_layers=NUM_LAYERS,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        layer_windows=(None,) * NUM_LAYERS,
        attention_scale=0.25,
    )
    facts = ModelFacts(
        architecture="LlamaForCausalLM", dtype="float32", max_position=64, vocab_size=97, layer_windows=decoder.layer_windows
    )
    config = resolve(EngineOptions(dtype="float32", max_num_seqs=2, **options), facts, detect_platform("cpu"))
    model, _ = load_model(None, decoder, "float32", "cpu", "dummy", get_backend("reference"))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    made = ModelRunner(config, model, model.backend)
    made.allocate_cache(9, 64)
    return made


def generate(made: ModelRunner) -> list[TokenLogprobs]:
    """Prompts and decodes of different lengths, so that a compiled shape does not do for all."""
    entries: list[TokenLogprobs] = []
    for length in (13, 9, 30):
        new = NewRow("a", list(range(length)), length, 0, [[1, 2, 3]], SamplingParams(temperature=0.0, logprobs=1), frozenset())
        made.execute(SchedulerOutput([new], [], {"a": length}))
        for step in range(3):
            [found] = made.sample().result().logprobs
            assert found is not None
            entries += found
            made.execute(SchedulerOutput([], [GrownRow("a", length + step, [[]])], {"a": 1}))
        made.sample().result()
        made.execute(SchedulerOutput(finished_request_ids=["a"]))
    return entries


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_a_compiled_model_says_the_same() -> None:
    from torch._dynamo.utils import counters

    plain = generate(runner())
    counters.clear()
    compiled = generate(runner(compile="native"))
    assert [entry.token_id for entry in compiled] == [entry.token_id for entry in plain]
    # fused operations round intermediate results differently
    assert [entry.logprob for entry in compiled] == pytest.approx([entry.logprob for entry in plain], abs=1e-3)
    assert 0 < counters["stats"]["unique_graphs"] < 2 * NUM_LAYERS
