"""Choosing tokens on a device that is as strict as a GPU (`fake_device`), by the Triton kernels and by the laws: equal tokens,
through the runner and without, and nothing waits.

Kernels run in the interpreter, whose launches alone may read tensors. Shape letters: R requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.model_runner.device import HOST
from halfbyte.model_runner.input_kernels import TORCH_INPUTS
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import Sampler
from halfbyte.model_runner.sampling_kernels import TORCH_SAMPLING, SamplingKernels, TorchSampling
from halfbyte.types import ModelRunnerOutput, NewRow, SamplingParams, SchedulerOutput
from tests.kernels.triton_interpreter import interpreted
from tests.numerics.device_runner import Driver, make_runner, own_arithmetic

launch, sampling = interpreted("halfbyte.kernels.triton.launch", "halfbyte.kernels.triton.sampling")
VOCAB_SIZE = 700
NUM_STEPS = 3
FLATTEN = 0.3
STOP = frozenset({3})

# Each kind of choice; what is called wide keeps more of the vocabulary than the first candidates hold.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"logprobs": 2},
    "top-k": {"top_k": 7},
    "wide top-k": {"top_k": 500, "temperature": 2.0},
    "top-p": {"top_p": 0.9, "logprobs": 0},
    "wide top-p": {"top_p": 0.95, "temperature": 2.0, "logprobs": 3},
    "min-p": {"min_p": 0.2},
    "wide min-p": {"min_p": 0.01, "temperature": 2.0, "top_p": 0.9},
    "all filters": {"min_p": 0.001, "top_k": 600, "top_p": 0.8, "temperature": 2.0},
    "penalties": {"repetition_penalty": 1.8, "frequency_penalty": 0.5, "presence_penalty": 0.4, "temperature": 0.0},
    "penalties, top-p": {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "top_p": 0.9, "temperature": 1.5},
    "bias": {"logit_bias": {1: 8.0, 699: 9.5}, "temperature": 1.2},
    "bad words": {"temperature": 0.0, "bad_words": ["x"]},
    "min_tokens": {"temperature": 0.0, "min_tokens": 2, "prompt_logprobs": 1, "logprobs": 5},
}
PROMPT = [5, 17, 3, 48, 41, 2, 30, 9, 9, 31, 7, 12, 50]
BAD = [[9], [50, 7]]


class WatchedLaws(TorchSampling):
    """settled: which rows their candidates settled, of each step."""

    def __init__(self, *, is_host: bool) -> None:
        super().__init__(is_host=is_host)
        self.settled: list[Tensor] = []

    def count_kept(self, *given: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        count_N, settled_N = TorchSampling.count_kept(*given)
        self.settled.append(settled_N)
        return count_N, settled_N


class OpenLaunches:
    """Kernels of a device that is none: in the interpreter a launch reads what it likes, and is no wait for all that."""

    def __init__(self, device: Any, patch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        plain = launch.Launch.run

        def run(launched: Any) -> None:
            self.names.add(launched.kernel.__name__)
            with device.open():
                plain(launched)

        patch.setattr(launch.Launch, "run", run)


@pytest.fixture(scope="module", autouse=True)
def arithmetic() -> Iterator[None]:
    with own_arithmetic():
        yield


def steps(device: Any, kernels: SamplingKernels, patch: pytest.MonkeyPatch, **options: Any) -> list[ModelRunnerOutput]:
    """All of `ASKED` in one batch: the prompts, then single tokens."""
    patch.setattr("halfbyte.model_runner.runner._kernels_of", lambda model, device: (kernels, TORCH_INPUTS))
    wide = {"max_num_seqs": len(ASKED), "max_num_batched_tokens": 256, "enforce_eager": True, **options}
    driver = Driver(make_runner(device, vocab_size=VOCAB_SIZE, **wide))
    plain = driver.runner.model.compute_logits
    # As flat as those of a language model are where many tokens may follow.
    driver.runner.model.compute_logits = lambda hidden_NE: plain(hidden_NE) * FLATTEN  # type: ignore[method-assign]
    scheduled = SchedulerOutput(num_scheduled_tokens={name: len(PROMPT) for name in ASKED})
    for i, (name, asked) in enumerate(ASKED.items()):
        prompt, params = [*PROMPT[i % 5 :], *PROMPT[: i % 5]], SamplingParams(**{"seed": 7 * i, **asked})
        blocks = driver._grow(name, len(prompt))
        scheduled.new_rows.append(NewRow(name, prompt, len(prompt), 0, blocks, params, STOP, BAD if params.bad_words else []))
        driver.computed[name] = len(prompt)
    outputs = [driver.run(scheduled).result()]
    return outputs + [driver.step(dict.fromkeys(ASKED, 1)) for _ in range(NUM_STEPS)]


def test_the_kernels_choose_what_the_laws_choose(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token; log probabilities but for the last bits of logarithms (float32, values up to some tens)."""
    watched = WatchedLaws(is_host=False)
    laws = steps(fake_device.FakeDevice(), watched, monkeypatch)
    device = fake_device.FakeDevice()
    launched = OpenLaunches(device, monkeypatch)
    found = steps(device, sampling.TritonSampling(), monkeypatch)
    for ours, theirs in zip(found, laws, strict=True):
        assert ours.token_ids == theirs.token_ids and not ours.bad_rows
        for a, b in zip(entries(ours), entries(theirs), strict=True):
            assert (a.token_id, a.rank, a.top_token_ids) == (b.token_id, b.rank, b.top_token_ids)
            assert [a.logprob, *a.top_logprobs] == pytest.approx([b.logprob, *b.top_logprobs], abs=1e-5)
    assert sum(len(entries(output)) for output in found) > NUM_STEPS
    assert len(watched.settled) == 1 + NUM_STEPS
    for settled_N in watched.settled:
        assert settled_N.any() and (~settled_N).sum() >= 4, "both ways to a token are taken"
    assert {"count_row", "choose_row", "count_tokens", "edit_logits", "best_of_part", "make_noise"} <= launched.names


def entries(output: ModelRunnerOutput) -> list[Any]:
    whole = [*output.logprobs, *output.prompt_logprobs.values()]
    return [entry for some in whole for entry in some or []]


@pytest.mark.parametrize("keep", [False, True], ids=["tokens", "processed"])
@pytest.mark.parametrize("kind", ["laws", "triton"])
def test_who_may_not_look_keeps_what_others_keep(
    fake_device: Any, kind: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of many candidates: the host looks whether 257 settle a row; a device is not asked."""
    options: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.001}, {"top_k": 7}, {"top_k": 900}, {}]
    logits = torch.randn(24, 5000, generator=torch.Generator().manual_seed(1)) * 2
    strict = fake_device.FakeDevice()
    OpenLaunches(strict, monkeypatch)
    unseen = sampling.TritonSampling() if kind == "triton" else TorchSampling(is_host=False)
    found = []
    for device, kernels in ((HOST, TORCH_SAMPLING), (strict, unseen)):
        rows = RequestRows(24, 4, 5000, device)
        params = [SamplingParams(seed=i, **options[i % 6]) for i in range(24)]
        row_R = np.array([rows.add(NewRow(str(i), [1], 1, 0, [[]], p, frozenset())) for i, p in enumerate(params)])
        rows.apply()
        with nullcontext() if device is HOST else device.step():
            sampled = Sampler(rows, keep_processed=keep, kernels=kernels).sample(logits.clone(), row_R)
        found.append((sampled.token_R.tolist(), None if sampled.processed_RV is None else sampled.processed_RV.tolist()))
    assert found[0] == found[1]
