"""Pooling on a device as strict as a GPU: nothing waits inside a step; graphs and chunks give what eager, whole prompts give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from halfbyte.model_runner.pooling_head import PoolingHead
from halfbyte.model_runner.pooling_plan import PoolingPlan
from halfbyte.pooling import Pooling, PoolingMode
from halfbyte.types import GrownRow, NewRow, SamplingParams, SchedulerOutput
from tests.numerics.device_runner import BLOCK_SIZE, MAX_LEN, POISON, Driver, make_runner, own_arithmetic

PROMPTS = {"a": [5, 17, 3, 48, 41, 2, 30, 9, 9, 31, 7, 12, 50], "b": [1, 2, 3], "c": [7] * 9}
ASKED = {
    "a": Pooling("embed", True, True),
    "b": Pooling("embed", False, True, dimensions=5),
    "c": Pooling("token_embed", True, True),
}


@pytest.fixture(scope="module", autouse=True)
def arithmetic() -> Iterator[None]:
    with own_arithmetic():
        yield


def driver_of(fake_device: Any, plan: PoolingPlan, **options: Any) -> Driver:
    runner = make_runner(fake_device.FakeDevice(), **options)
    runner.head = PoolingHead(plan, None, 16, "cpu", class_ids=[4, 9] if plan.classes else [])  # type: ignore[arg-type]
    runner.allocate_cache(200, MAX_LEN)
    runner.capture_graphs()
    return Driver(runner)


def pooled(driver: Driver, prompts: dict[str, list[int]], asked: dict[str, Pooling], chunk: int) -> dict[str, Any]:
    """What each prompt's request ends with, computed `chunk` tokens at a time; None for a bad one."""
    found: dict[str, bytes] = dict.fromkeys(prompts, b"")
    bad: set[str] = set()
    done = dict.fromkeys(prompts, 0)
    while any(done[name] < len(ids) for name, ids in prompts.items()):
        step = SchedulerOutput()
        for name, ids in prompts.items():
            if (count := min(chunk, len(ids) - done[name])) == 0:
                continue
            step.num_scheduled_tokens[name] = count
            blocks = driver._grow(name, done[name] + count)
            if done[name]:
                step.grown_rows.append(GrownRow(name, done[name], blocks))
            else:
                params = SamplingParams(temperature=0.0)
                step.new_rows.append(NewRow(name, ids, len(ids), 0, blocks, params, frozenset(), pooling=asked[name]))
            done[name] += count
        output = driver.run(step).result()
        bad |= output.bad_rows
        for name, piece in output.pooled.items():
            found[name] += piece
    driver.run(SchedulerOutput(finished_request_ids=list(prompts)))
    driver.held.clear()
    return {name: None if name in bad else np.frombuffer(found[name], np.float32) for name in prompts}


@pytest.mark.parametrize("mode", ["last", "cls", "mean"])
def test_graphs_and_chunks_give_what_whole_prompts_give(fake_device: Any, mode: PoolingMode) -> None:
    plan = PoolingPlan(task="embed", mode=mode, normalizes=True)
    eager = driver_of(fake_device, plan, enforce_eager=True)
    whole = pooled(eager, {"a": PROMPTS["a"]}, ASKED, 24) | pooled(eager, {"b": PROMPTS["b"]}, ASKED, 24)
    whole |= pooled(eager, {"c": PROMPTS["c"]}, ASKED, 24)
    assert {name: len(vector) for name, vector in whole.items()} == {"a": 16, "b": 5, "c": 9 * 16}
    assert np.linalg.norm(whole["a"]) == pytest.approx(1.0, abs=1e-6) != np.linalg.norm(whole["b"])
    graphs = driver_of(fake_device, plan, cudagraph_mode="full", cudagraph_capture_sizes=[4, 24])
    for driver, chunk in ((eager, BLOCK_SIZE + 1), (graphs, 24 // len(PROMPTS)), (graphs, 3)):
        found = pooled(driver, PROMPTS, ASKED, chunk)
        for name, vector in whole.items():
            if mode == "mean" and name != "c":  # a sum of sums is rounded elsewhere
                np.testing.assert_allclose(found[name], vector, rtol=1e-5, atol=1e-6)
            else:
                assert (found[name] == vector).all(), (name, chunk)
    assert graphs.device.count["replays"] > 0


def test_a_row_without_numbers_fails_alone_and_leaves_nothing(fake_device: Any) -> None:
    driver = driver_of(fake_device, PoolingPlan(task="embed", mode="mean", normalizes=True), enforce_eager=True)
    asked = dict.fromkeys(("good", "bad"), Pooling("embed", True, True))
    found = pooled(driver, {"bad": [1, POISON, 2], "good": [1, 2]}, asked, 2)
    assert found["bad"] is None and np.isfinite(found["good"]).all()
    again = pooled(driver, {"bad": [1, 2]}, asked, 2)
    assert (again["bad"] == found["good"]).all()


def test_classes_are_read_off_the_logits(fake_device: Any) -> None:
    plan = PoolingPlan(
        task="classify", mode="last", activation="sigmoid", labels=("yes",), classes=("no", "yes"), difference=True
    )
    driver = driver_of(fake_device, plan, enforce_eager=True)
    raw, activated = (
        pooled(driver, {"a": PROMPTS["a"]}, {"a": Pooling("classify", activates, False)}, 24)["a"] for activates in (False, True)
    )
    assert raw.shape == (1,) and activated == pytest.approx(1 / (1 + np.exp(-raw)), abs=1e-6)
