"""The runner on a device that is as strict as a GPU (`fake_device`): nothing waits inside a step, graphs give the bits of eager
steps, tokens stay on the device between steps.

The runner and its arithmetic are those of `device_runner`. Shape letters: T tokens, H heads, G kv heads, D head dim, N
positions, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.engine.build import _share
from halfbyte.errors import CapacityError, UnsupportedError
from halfbyte.model_runner.device import DeviceMemory
from halfbyte.model_runner.graph_plan import default_sizes, plan_graphs
from halfbyte.model_runner.memory_profile import MemoryProfile, profile_memory
from halfbyte.model_runner.runner import ModelRunner
from halfbyte.platform import platform_named
from halfbyte.types import ModelRunnerOutput, NewRow, PendingOutput, SamplingParams, SchedulerOutput
from tests.numerics.device_runner import (
    MAX_LEN,
    POISON,
    DecodeBackend,
    Driver,
    EagerBackend,
    TableBackend,
    configuration,
    make_runner,
    own_arithmetic,
)
from tests.numerics.random_adapters import write_adapter

GREEDY = SamplingParams(temperature=0.0)
HEAVY = SamplingParams(
    seed=5,
    top_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    logit_bias={1: 2.0},
    min_tokens=4,
    logprobs=3,
    prompt_logprobs=2,
)
PROMPT = [5, 17, 3, 48, 41, 2, 30, 9, 9, 31, 7, 12, 50]


@pytest.fixture(scope="module", autouse=True)
def arithmetic() -> Iterator[None]:
    with own_arithmetic():
        yield


@pytest.fixture(scope="module")
def make(arithmetic: None, fake_device: Any) -> Callable[..., ModelRunner]:
    return lambda *given, **options: make_runner(fake_device.FakeDevice(), *given, **options)


def everything(driver: Driver) -> list[ModelRunnerOutput]:
    """Prompts whole and in chunks, mixed batches, decodes of 1 to 9 requests, each kind of sampling."""
    params = [GREEDY, SamplingParams(seed=1), HEAVY, SamplingParams(seed=2, top_k=3, logprobs=2)]
    outputs = [driver.step({"0": 13}, {"0": (PROMPT, params[0])})]
    for i in range(1, 9):
        prompt = PROMPT[: 13 - i]
        counts = {str(j): 1 for j in range(i)}
        outputs.append(driver.step({str(i): 3, **counts}, {str(i): (prompt, params[i % 4])}))
        outputs.append(driver.step({**counts, str(i): len(prompt) - 3}))
        outputs.append(driver.step({**counts, str(i): 1}))
    return outputs


@pytest.fixture(scope="module")
def expected(make: Callable[..., ModelRunner]) -> list[ModelRunnerOutput]:
    return everything(Driver(make(enforce_eager=True)))


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        ("full_and_piecewise", None),
        ("full_and_piecewise", [1, 2, 4, 8]),
        ("full_decode_only", [1, 2, 4, 8]),
        ("piecewise", [1, 2, 4, 8, 16]),
        ("full", [4, 24]),
    ],
)
def test_graphs_give_the_bits_of_eager_steps(
    make: Callable[..., ModelRunner], expected: list[ModelRunnerOutput], mode: str, sizes: list[int] | None
) -> None:
    """Sizes are padded up to; batches that none holds run as they are."""
    driver = Driver(make(cudagraph_mode=mode, cudagraph_capture_sizes=sizes))
    captured = dict(driver.device.count)
    outputs = everything(driver)
    assert outputs == expected
    assert driver.device.count["replays"] > 0 and driver.device.count["captures"] == captured["captures"]


def test_graphs_read_each_rows_adapter(
    make: Callable[..., ModelRunner], tmp_path: Path, expected: list[ModelRunnerOutput]
) -> None:
    """Whole ones and pieces, captured before there were any; rows then have one of two, or none."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **heads}
    found = []
    for is_eager in (True, False):
        driver = Driver(make(DecodeBackend, enable_lora=True, max_loras=2, max_lora_rank=3, enforce_eager=is_eager))
        for number in (1, 2):
            folder = write_adapter(tmp_path / str(number), sizes, seed=number, rank=3, strength=2.0)
            driver.runner.add_adapter(number, str(folder))
        driver.adapter_of = {str(i): i % 3 for i in range(9)}
        found.append(everything(driver))
        assert (driver.device.count["replays"] > 0) is not is_eager
    assert found[0] == found[1] != expected


def test_each_batch_takes_the_smallest_graph_that_holds_it(make: Callable[..., ModelRunner]) -> None:
    """Decodes of 1 to 9 requests over graphs of 1, 2, 4 and 8, the ninth without one: one replay each, or none."""
    driver = Driver(make(cudagraph_mode="full_decode_only", cudagraph_capture_sizes=[1, 2, 4, 8]))
    names = [str(i) for i in range(9)]
    for name in names:
        driver.step({name: 2}, {name: ([1, 2], GREEDY)})
    assert driver.device.count["captures"] == 4 and driver.device.count["replays"] == 0
    for count in range(1, 10):
        before = driver.device.count["replays"]
        driver.step(dict.fromkeys(names[:count], 1))
        assert driver.device.count["replays"] - before == (count <= 8)


def test_a_graph_in_pieces_has_one_more_than_layers(make: Callable[..., ModelRunner]) -> None:
    driver = Driver(make(EagerBackend, cudagraph_capture_sizes=[4, 8]))  # auto: this back end can be captured in no other way
    assert driver.device.count["captures"] == 2 and driver.device.count["graphs"] == 2 * 3
    driver.step({"a": 5}, {"a": (PROMPT, GREEDY)})
    driver.step({"a": 8})
    assert driver.device.count["replays"] == 2 * 3


def test_tokens_stay_on_the_device_between_steps(make: Callable[..., ModelRunner], expected: list[ModelRunnerOutput]) -> None:
    """Each step is launched before the result of the one before it is read; the results are the same."""

    class Ahead(Driver):
        pending: PendingOutput | None = None
        results: list[ModelRunnerOutput]

        def step(self, *args: Any) -> ModelRunnerOutput:
            launched = self.launch(*args)
            if self.pending is not None:
                self.results.append(self.pending.result())
            self.pending = launched
            return ModelRunnerOutput([], [], [])

    for options in ({"enforce_eager": True}, {}):
        driver = Ahead(make(**options))
        driver.results = []
        everything(driver)
        assert driver.pending is not None
        assert [*driver.results, driver.pending.result()] == expected


def test_a_decode_uploads_little_and_downloads_once(make: Callable[..., ModelRunner]) -> None:
    driver = Driver(make())
    driver.step({"a": 5, "b": 2}, {"a": (PROMPT[:5], GREEDY), "b": ([1, 2], GREEDY)})
    driver.step({"a": 1, "b": 1})
    before = dict(driver.device.count)
    driver.step({"a": 1, "b": 1})
    # the table, the places of the logits, the places of the new tokens; and nothing else
    assert driver.device.count["uploads"] - before["uploads"] == 3
    assert driver.device.count["downloads"] - before["downloads"] == 1
    assert driver.device.count["replays"] - before["replays"] == 1


def test_a_bad_row_fails_alone_and_a_full_one_stops(make: Callable[..., ModelRunner]) -> None:
    driver = Driver(make())
    first = driver.launch({"bad": 3, "good": 13}, {"bad": ([1, POISON, 2], GREEDY), "good": (PROMPT, GREEDY)})
    second = driver.launch({"bad": 1, "good": 1})
    alone = Driver(make())
    expected = [*alone.step({"good": 13}, {"good": (PROMPT, GREEDY)}).token_ids, *alone.step({"good": 1}).token_ids]
    for output, tokens in zip((first.result(), second.result()), expected, strict=True):
        assert output.bad_rows == {"bad"} and output.token_ids == [[], tokens]
    full = [7] * MAX_LEN
    for start in range(0, MAX_LEN, 16):
        output = driver.step({"full": 16}, {} if start else {"full": (full, GREEDY)})
    assert len(output.token_ids[0]) == 1


def test_masks_and_word_lists_wait_for_nothing(make: Callable[..., ModelRunner]) -> None:
    params = SamplingParams(seed=1, min_p=0.01, allowed_token_ids=[3, 7, 9], bad_words=["x"])
    driver = Driver(make())
    row = NewRow("a", PROMPT, 13, 0, driver._grow("a", 13), params, frozenset({3}), [[9], [50, 7]])
    mask = np.full((1, 2), -1, dtype=np.int32)
    mask[0, 0] = ~np.int32(1 << 3)
    assert driver.run(SchedulerOutput([row], [], {"a": 13}), mask).result().token_ids == [[7]]


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logits"])
def test_every_logprobs_mode_waits_for_nothing(make: Callable[..., ModelRunner], mode: str) -> None:
    params = SamplingParams(seed=1, top_p=0.5, logprobs=2, logprob_token_ids=[4, 99])
    [[entry]] = Driver(make(logprobs_mode=mode)).step({"a": 13}, {"a": (PROMPT, params)}).logprobs
    assert entry is not None and entry.top_token_ids == [4, 99] and entry.top_logprobs[1] == -torch.inf


READS: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: bool(x.any()),
    lambda x: int(x[0, 0]),
    lambda x: x[x > 0],
    lambda x: x.__setitem__(x > 0, x[0, 0]),
    lambda x: x.__setitem__(0, 1.0),
    lambda x: x.nonzero(),
    lambda x: x.cpu(),
    lambda x: x.to("cpu"),
    lambda x: x.numpy(),
    lambda x: torch.tensor([1]),
    lambda x: torch.from_numpy(np.ones(1)),
    lambda x: torch.repeat_interleave(x[0].long().clamp(0, 1)),
]


@pytest.mark.parametrize("read", READS)
def test_a_planted_wait_is_found(make: Callable[..., ModelRunner], fake_device: Any, read: Callable[[Tensor], Any]) -> None:
    driver = Driver(make(enforce_eager=True))
    model = driver.runner.model
    plain = model.compute_logits

    def planted(hidden_NE: Tensor) -> Tensor:
        read(hidden_NE)
        return plain(hidden_NE)

    model.compute_logits = planted  # type: ignore[method-assign]
    with pytest.raises(fake_device.Synchronised):
        driver.step({"a": 2}, {"a": ([1, 2], GREEDY)})


def test_a_number_that_is_baked_into_a_graph_is_found(make: Callable[..., ModelRunner]) -> None:
    """The fake's own test: attention that takes a length from the host's list gives other tokens once captured."""

    class Baking(TableBackend):
        def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cache: Any, metadata: Any, *rest: Any) -> Tensor:
            metadata.seq_lens = torch.full_like(metadata.seq_lens, metadata.max_seq_len)
            return super().forward(q_THD, k_TGD, v_TGD, cache, metadata, *rest)

    def run(**options: Any) -> list[ModelRunnerOutput]:
        driver = Driver(make(Baking, **options))
        outputs = [driver.step({"a": 13}, {"a": (PROMPT, GREEDY)})]
        return outputs + [driver.step({"a": 1}) for _ in range(4)]

    assert run() != run(enforce_eager=True)


def test_an_uploaded_array_is_given_away(fake_device: Any) -> None:
    device, array = fake_device.FakeDevice(), np.ones(3)
    tensor = device.upload(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
    assert tensor.tolist() == [1, 1, 1]
    copy = device.download([tensor])
    tensor.zero_()
    assert copy.wait()[0].tolist() == [1, 1, 1], "as it was when it was sent"


def test_what_a_back_end_cannot_is_refused(make: Callable[..., ModelRunner]) -> None:
    with pytest.raises(
        UnsupportedError, match="full_decode_only captures batches of single tokens whole, which attention by eager"
    ):
        make(EagerBackend, cudagraph_mode="full_decode_only")
    with pytest.raises(UnsupportedError, match="captures mixed batches whole, which attention by decode"):
        make(DecodeBackend, cudagraph_mode="full")


def test_graph_sizes_follow_the_number_of_requests() -> None:
    assert default_sizes(9, 24) == (1, 2, 4, 8, 16)
    assert default_sizes(256, 8192)[:5] == (1, 2, 4, 8, 16) and default_sizes(256, 8192)[-3:] == (480, 496, 512)
    assert 248 in default_sizes(256, 8192) and 264 not in default_sizes(256, 8192) and default_sizes(1, 64) == (1, 2)
    plan = plan_graphs(configuration(max_num_seqs=9).execution, "table", "decode", 9, 24)
    assert (plan.decode, plan.mixed) == ("full", "piecewise")
    assert plan.decode_sizes == (1, 2, 4, 8, 9) and plan.mixed_sizes == (1, 2, 4, 8, 16)
    assert "attention by table can be captured: decode" in plan.line()


def test_memory_adds_up(make: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that had 100 bytes in use, of which torch held 60 around 50; the step peaks at 75; graphs take 7, then 2 each."""
    runner = make(cudagraph_capture_sizes=[1, 2, 4, 8])
    device: Any = runner.device
    small_bytes = 2 * runner.layout.block_bytes
    reports = [DeviceMemory(1000, 900, 60, 50 + small_bytes, 60), DeviceMemory(1000, 880, 80, 55, 75 + small_bytes)]
    free, used = 880, iter([0, 7, 0, 2, 0, 9, 0, 1])  # two kinds of graphs

    def memory() -> DeviceMemory:
        nonlocal free
        if reports:
            return reports.pop(0)
        free -= next(used)
        return DeviceMemory(1000, free, 80, 55, 75)

    monkeypatch.setattr(device, "memory", memory)
    steps = device.count["downloads"]
    profile = profile_memory(runner, MAX_LEN)
    assert device.count["downloads"] - steps == 2, "few long requests, and as many as there can be"
    graphs = 7 + 3 * 2 + 9 + 3 * 1
    assert profile == MemoryProfile(total=1000, outside=40, kept=50, step=25, graphs=graphs, num_graphs=8)
    assert profile.cache_bytes(0.9) == 900 - 40 - 50 - 25 - graphs
    assert profile.line(0.9) == (
        "GPU memory: 0.9 x 1,000 bytes = 900 bytes - 40 outside torch - 50 weights and rows - 25 largest step"
        " - 25 graphs (8, estimated) = 760 bytes of KV cache"
    )
    with pytest.raises(CapacityError, match=r"0.1 x 1,000 .* = -40 bytes of KV cache; raise --gpu-memory-utilization"):
        profile.cache_bytes(0.1)


def test_a_share_of_a_gpu_must_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its whole memory, before anything is loaded; what the profile leaves of it, after."""
    gpu = replace(platform_named("sm90"), memory_limit_bytes=1000)
    monkeypatch.setattr("halfbyte.engine.build.available_memory_bytes", lambda platform: 910)
    assert _share(0.9, gpu, None) == (900, "--gpu-memory-utilization 0.9 of 1,000 bytes")
    with pytest.raises(CapacityError, match=r"0.92 x 1000 bytes = 920 bytes, but only 910 bytes are free on sm90; end what"):
        _share(0.92, gpu, None)
    profile = MemoryProfile(total=1000, outside=40, kept=50, step=25, graphs=0, num_graphs=0)
    assert _share(0.9, gpu, profile) == (785, "--gpu-memory-utilization 0.9 of 1,000 bytes")
    assert _share(0.5, platform_named("cpu"), None) == (455, "--gpu-memory-utilization 0.5 of 910 free bytes")
