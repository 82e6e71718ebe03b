"""The runner by itself, on a small random model: the same tokens however the scheduler cuts, shares, resumes or mixes.

Rows are driven by hand through SchedulerOutput, as the scheduler would, so that each situation is exact.
"""

from __future__ import annotations

from collections.abc import Callable
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
from halfbyte.types import GrownRow, ModelRunnerOutput, NewRow, SamplingParams, SchedulerOutput, TokenLogprobs

BLOCK_SIZE = 4
VOCAB_SIZE = 97
POISON = 96  # a token whose embedding is NaN
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 17, 3, 88, 41, 2, 60, 9, 9, 31, 7, 12, 50]


def decoder(windows: tuple[int | None, ...]) -> DecoderConfig:
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_layers=len(windows),
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_position=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        layer_windows=windows,
        attention_scale=8**-0.5,
    )


@pytest.fixture(params=[(None, None), (6, None)], ids=["full", "sliding"])
def make_runner(request: pytest.FixtureRequest) -> Callable[..., ModelRunner]:
    def make(**options: Any) -> ModelRunner:
        config = decoder(request.param)
        facts = ModelFacts(
            architecture=config.architecture,
            dtype="float32",
            max_position=128,
            vocab_size=VOCAB_SIZE,
            layer_windows=config.layer_windows,
        )
        resolved = resolve(
            EngineOptions(dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=4, **options), facts, detect_platform("cpu")
        )
        model, _ = load_model(None, config, "float32", "cpu", "dummy", get_backend("reference"))  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8)  # far from uniform logits, so that a wrong read changes the argmax
            model.embed_tokens.weight[POISON] = torch.nan
        runner = ModelRunner(resolved, model, model.backend)
        runner.allocate_cache(80, 128)
        return runner

    return make


class Driver:
    """A minimal scheduler: hands out fresh blocks, never reuses them unless told."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_groups = len(runner.layout.groups)
        self.next_block = 1
        self.tables: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}

    def grow(self, name: str, num_tokens: int) -> list[list[int]]:
        table = self.tables.setdefault(name, [[] for _ in range(self.num_groups)])
        missing = -(-num_tokens // BLOCK_SIZE) - len(table[0])
        new = [list(range(self.next_block + g * missing, self.next_block + (g + 1) * missing)) for g in range(self.num_groups)]
        self.next_block += self.num_groups * max(missing, 0)
        for blocks, ids in zip(table, new, strict=True):
            blocks += ids
        return new

    def enter(self, name: str, tokens: list[int], params: SamplingParams, num_prompt: int | None = None) -> NewRow:
        self.computed[name] = 0
        return NewRow(name, tokens, num_prompt or len(tokens), 0, [], params, frozenset())

    def step(self, counts: dict[str, int], new: list[NewRow] | None = None, **released: list[str]) -> ModelRunnerOutput:
        entering = {row.request_id: row for row in new or ()}
        grown = []
        for name, count in counts.items():
            blocks = self.grow(name, self.computed[name] + count)
            if name in entering:
                entering[name].block_ids = [list(b) for b in self.tables[name]]
                entering[name].num_computed_tokens = self.computed[name]
            else:
                grown.append(GrownRow(name, self.computed[name], blocks))
            self.computed[name] += count
        self.runner.execute(SchedulerOutput(list(entering.values()), grown, counts, **released))
        return self.runner.sample().result()

    def generate(self, name: str, tokens: list[int], params: SamplingParams, num_tokens: int, chunk: int = 100) -> list[int]:
        """Run one request alone, its prompt in chunks."""
        row, output = [self.enter(name, tokens, params)], []
        left = len(tokens)
        while len(output) < num_tokens:
            count = min(chunk, left) if left else 1
            left -= min(count, left)
            output += self.step({name: count}, row).token_ids[0]
            row = []
        return output


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(seed=4, top_p=0.8)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_equals_whole(make_runner: Callable[..., ModelRunner], params: SamplingParams, chunk: int) -> None:
    whole = Driver(make_runner()).generate("a", PROMPT, params, 6)
    assert Driver(make_runner()).generate("a", PROMPT, params, 6, chunk) == whole


def test_batched_equals_alone_with_mixed_phases(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner()
    params = {"a": GREEDY, "b": SamplingParams(seed=9), "c": SamplingParams(seed=9, min_p=0.01)}
    alone = {name: Driver(make_runner()).generate(name, PROMPT[i:], p, 5) for i, (name, p) in enumerate(params.items())}
    driver = Driver(runner)
    got: dict[str, list[int]] = {name: [] for name in params}

    def step(counts: dict[str, int], new: list[NewRow] | None = None) -> None:
        output = driver.step(counts, new)
        for name, tokens in zip(output.request_ids, output.token_ids, strict=True):
            got[name] += tokens

    step({"a": 13}, [driver.enter("a", PROMPT, params["a"])])
    step({"a": 1, "b": 5}, [driver.enter("b", PROMPT[1:], params["b"])])
    step({"b": 7, "a": 1, "c": 3}, [driver.enter("c", PROMPT[2:], params["c"])])
    step({"c": 8, "b": 1, "a": 1})
    for _ in range(4):
        step({"b": 1, "c": 1, "a": 1})
    for name, tokens in alone.items():
        assert got[name][:5] == tokens, name


def test_resumed_equals_not_preempted(make_runner: Callable[..., ModelRunner]) -> None:
    params = SamplingParams(seed=1)
    whole = Driver(make_runner()).generate("a", PROMPT, params, 8)
    driver = Driver(make_runner())
    first = driver.generate("a", PROMPT, params, 3)
    driver.tables.pop("a")
    again = driver.enter("a", PROMPT + first, params, num_prompt=len(PROMPT))
    tokens = driver.step({"a": len(PROMPT) + 3}, [again], preempted_request_ids=["a"]).token_ids[0]
    for _ in range(4):
        tokens += driver.step({"a": 1}).token_ids[0]
    assert first + tokens == whole


def test_shared_prefix_blocks_equal_computed_ones(make_runner: Callable[..., ModelRunner]) -> None:
    driver = Driver(make_runner())
    tail = [1, 2, 3]
    alone = Driver(make_runner()).generate("b", PROMPT[:12] + tail, GREEDY, 5)
    driver.generate("a", PROMPT, GREEDY, 2)
    driver.tables["b"] = [blocks[:3] for blocks in driver.tables["a"]]
    for group, table in zip(driver.runner.layout.groups, driver.tables["b"], strict=True):
        if group.sliding_window is not None:
            table[0] = 0  # slid out of the window: the null block stands in
    row = driver.enter("b", PROMPT[:12] + tail, GREEDY)
    driver.computed["b"] = 12
    tokens = driver.step({"b": 3}, [row]).token_ids[0]
    for _ in range(4):
        tokens += driver.step({"b": 1}).token_ids[0]
    assert tokens == alone


def test_blocks_that_slid_out_of_the_window_may_serve_others(make_runner: Callable[..., ModelRunner]) -> None:
    """The row still names them; it must not read them, whoever writes there now."""
    driver = Driver(make_runner())
    alone = Driver(make_runner()).generate("a", PROMPT, GREEDY, 8)
    tokens = driver.generate("a", PROMPT, GREEDY, 2)
    driver.tables["b"] = [
        [driver.next_block] if group.sliding_window is None else table[:1]
        for group, table in zip(driver.runner.layout.groups, driver.tables["a"], strict=True)
    ]
    driver.next_block += 1
    output = driver.step({"b": 4, "a": 1}, [driver.enter("b", [POISON] * 4, GREEDY)])
    assert output.bad_rows == {"b"}
    tokens += output.token_ids[1]
    for _ in range(5):
        tokens += driver.step({"a": 1}).token_ids[0]
    assert tokens == alone


def test_a_reused_row_keeps_nothing(make_runner: Callable[..., ModelRunner]) -> None:
    """Every option of the first owner of a row would change the second one's tokens if it stayed."""
    heavy = SamplingParams(
        seed=5, top_k=2, repetition_penalty=3.0, presence_penalty=2.0, logit_bias={1: 100.0}, logprobs=3, prompt_logprobs=1
    )
    alone = Driver(make_runner()).generate("b", [7, 8, 9], GREEDY, 6)
    driver = Driver(make_runner())
    for name in "vwxy":
        driver.generate(name, PROMPT, heavy, 3)
    row = [driver.enter("b", [7, 8, 9], GREEDY)]
    first = driver.step({"b": 3}, row, finished_request_ids=list("vwxy"))
    tokens = first.token_ids[0]
    assert first.logprobs == [None] and not first.prompt_logprobs
    for _ in range(5):
        tokens += driver.step({"b": 1}).token_ids[0]
    assert tokens == alone


def test_a_row_of_nan_fails_alone_and_leaves_no_trace(make_runner: Callable[..., ModelRunner]) -> None:
    alone = Driver(make_runner()).generate("good", PROMPT, GREEDY, 6)
    driver = Driver(make_runner())
    output = driver.step(
        {"bad": 3, "good": 13}, [driver.enter("bad", [1, POISON, 2], GREEDY), driver.enter("good", PROMPT, GREEDY)]
    )
    assert output.bad_rows == {"bad"} and output.token_ids[0] == []
    assert sorted(driver.runner._rows.num_tokens.tolist()) == [0, 0, 4, 14]  # the bad row got a token that nobody sees
    tokens = output.token_ids[1]
    # the next request gets the very blocks that hold NaN now, and writes fewer positions than they have
    driver.tables["next"] = driver.tables.pop("bad")
    output = driver.step(
        {"good": 1, "next": 2}, [driver.enter("next", [4, 5], SamplingParams(temperature=0.0))], finished_request_ids=["bad"]
    )
    assert not output.bad_rows
    tokens += output.token_ids[0]
    for _ in range(4):
        tokens += driver.step({"good": 1}).token_ids[0]
    assert tokens == alone
    assert output.token_ids[1] == Driver(make_runner()).generate("next", [4, 5], GREEDY, 1)


def test_finished_ids_that_never_entered_are_ignored(make_runner: Callable[..., ModelRunner]) -> None:
    driver = Driver(make_runner())
    tokens = driver.step({"a": 2}, [driver.enter("a", [1, 2], GREEDY)], finished_request_ids=["ghost"]).token_ids
    assert len(tokens[0]) == 1


def prompt_logprobs(driver: Driver, params: SamplingParams, chunk: int) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    row: list[NewRow] = [driver.enter("a", PROMPT, params)]
    for start in range(0, len(PROMPT), chunk):
        entries += driver.step({"a": min(chunk, len(PROMPT) - start)}, row).prompt_logprobs.get("a", [])
        row = []
    return entries


@pytest.mark.parametrize("chunk", [1, 4, 5, 100])
def test_prompt_logprobs_cover_each_prompt_token_but_the_first(make_runner: Callable[..., ModelRunner], chunk: int) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    entries = prompt_logprobs(Driver(make_runner()), params, chunk)
    assert [e.token_id for e in entries] == PROMPT[1:]
    whole = prompt_logprobs(Driver(make_runner()), params, 100)
    for ours, theirs in zip(entries, whole, strict=True):
        assert (ours.rank, ours.top_token_ids) == (theirs.rank, theirs.top_token_ids)
        # one query at a time and many at once sum in different orders; logits reach 60 here
        assert ours.logprob == pytest.approx(theirs.logprob, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_modes(make_runner: Callable[..., ModelRunner], mode: str) -> None:
    params = SamplingParams(seed=0, temperature=0.5, top_k=3, logprobs=4)
    driver = Driver(make_runner(logprobs_mode=mode))
    entry = (driver.step({"a": 13}, [driver.enter("a", PROMPT, params)]).logprobs[0] or [])[0]
    reference = Driver(make_runner(logprobs_mode="raw_logits"))
    everything = params.clone(logprobs=-1)
    raw = (reference.step({"a": 13}, [reference.enter("a", PROMPT, everything)]).logprobs[0] or [])[0]
    logits_V = torch.full((VOCAB_SIZE,), -torch.inf).scatter(0, torch.tensor(raw.top_token_ids), torch.tensor(raw.top_logprobs))
    if mode.startswith("processed"):
        logits_V = logits_V / 0.5
        logits_V[logits_V < logits_V.topk(3).values[-1]] = -torch.inf
    expected_V = logits_V if mode.endswith("logits") else logits_V.log_softmax(0)
    assert entry.token_id == raw.token_id
    assert entry.logprob == pytest.approx(float(expected_V[entry.token_id]), abs=1e-5)
    assert entry.top_logprobs == pytest.approx(expected_V.topk(4).values.tolist(), abs=1e-5)
    assert entry.rank == int((expected_V > expected_V[entry.token_id]).sum()) + 1


def test_listed_logprob_ids(make_runner: Callable[..., ModelRunner]) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1, logprob_token_ids=[90, 3])
    driver = Driver(make_runner())
    entry = (driver.step({"a": 13}, [driver.enter("a", PROMPT, params)]).logprobs[0] or [])[0]
    assert entry.top_token_ids == [90, 3] and entry.rank == 1


def test_resumed_requests_do_not_repeat_prompt_logprobs(make_runner: Callable[..., ModelRunner]) -> None:
    """They were delivered with the first token; a request that was preempted before it gets them all again."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    driver = Driver(make_runner())
    assert len(driver.step({"a": 5}, [driver.enter("a", PROMPT, params)]).prompt_logprobs["a"]) == 5
    driver.tables.pop("a")
    again = driver.step({"a": 13}, [driver.enter("a", PROMPT, params)], preempted_request_ids=["a"])
    assert len(again.prompt_logprobs["a"]) == 12
    driver.tables.pop("a")
    resumed = driver.enter("a", PROMPT + again.token_ids[0], params, num_prompt=13)
    output = driver.step({"a": 14}, [resumed], preempted_request_ids=["a"])
    assert not output.prompt_logprobs and len(output.token_ids[0]) == 1


def test_no_number_in_the_prompts_logits_fails_the_request(make_runner: Callable[..., ModelRunner]) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    driver = Driver(make_runner())
    rows = [driver.enter("bad", [1, POISON, 2, 3], params), driver.enter("good", PROMPT, params)]
    output = driver.step({"bad": 3, "good": 13}, rows)  # the bad prompt is not at its end yet
    assert output.bad_rows == {"bad"} and output.token_ids[0] == [] and len(output.prompt_logprobs["good"]) == 12


def test_logits_are_computed_for_few_positions_at_a_time(
    make_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rows that sample and prompt positions that were asked for, in chunks; the results are those of one chunk."""
    asked = {
        "a": SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=3),
        "b": SamplingParams(seed=4, logprobs=0),
        "c": GREEDY,
        "d": SamplingParams(seed=4, prompt_logprobs=1),
    }
    counts = {"a": 13, "b": 12, "c": 5, "d": 13}  # c's prompt is not done

    def run() -> tuple[ModelRunnerOutput, list[int]]:
        driver, heights = Driver(make_runner()), []
        compute = driver.runner.model.compute_logits

        def counted(hidden: torch.Tensor) -> torch.Tensor:
            heights.append(len(hidden))
            return compute(hidden)

        monkeypatch.setattr(driver.runner.model, "compute_logits", counted)
        rows = [driver.enter(name, PROMPT if name != "b" else PROMPT[1:], p) for name, p in asked.items()]
        return driver.step(counts, rows), heights

    whole, heights = run()
    assert heights == [24, 3]
    monkeypatch.setattr("halfbyte.model_runner.step_sampling._LOGITS_BYTES_HOST", 4 * VOCAB_SIZE * 2)
    parts, heights = run()
    assert heights == [2] * 12 + [2, 1]
    assert parts.token_ids == whole.token_ids and [len(t) for t in whole.token_ids] == [1, 1, 0, 1]
    for ours, theirs in zip(parts.prompt_logprobs["a"], whole.prompt_logprobs["a"], strict=True):
        assert ours.top_token_ids == theirs.top_token_ids and ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert [entry is None for entry in whole.logprobs] == [False, False, True, True]
    assert [len(e.top_token_ids) for e in (whole.logprobs[0] or []) + (whole.logprobs[1] or [])] == [2, 0]


def test_a_grammar_mask_is_in_the_order_of_the_step(make_runner: Callable[..., ModelRunner]) -> None:
    driver = Driver(make_runner())
    rows = [driver.enter(name, PROMPT, GREEDY) for name in "abc"]
    driver.grow("a", 13), driver.grow("b", 13), driver.grow("c", 13)
    for row in rows:
        row.block_ids = driver.tables[row.request_id]
    driver.runner.execute(SchedulerOutput(rows, [], {"a": 13, "b": 4, "c": 13}))
    mask = torch.full((3, 4), -1, dtype=torch.int32)
    mask[0], mask[1], mask[2] = 0, 0, 0
    mask[0, 0], mask[1, 0], mask[2, 1] = 1 << 7, 1 << 8, 1 << 9
    assert driver.runner.sample(mask.numpy()).result().token_ids == [[7], [], [32 + 9]]


def test_warming_up_leaves_no_trace(make_runner: Callable[..., ModelRunner]) -> None:
    alone = Driver(make_runner()).generate("a", PROMPT, GREEDY, 5)
    runner = make_runner()
    runner.warm_up()
    assert runner.weight_bytes == sum(p.nbytes for p in runner.model.parameters()) > 0
    driver = Driver(runner)
    assert driver.generate("a", PROMPT, GREEDY, 5) == alone
    rows = [driver.enter(name, PROMPT, GREEDY) for name in "bcd"]  # all four rows are free
    assert driver.step({"b": 13, "c": 13, "d": 13}, rows).token_ids == [alone[:1]] * 3


def test_a_step_that_raises_can_be_followed_by_another(
    make_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine then computes its requests again; rows that had entered are released as preempted ones."""
    alone = Driver(make_runner()).generate("a", PROMPT, SamplingParams(seed=2), 4)
    driver = Driver(make_runner())

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.backend, "prepare", fail)
        with pytest.raises(RuntimeError):
            driver.step({"a": 13}, [driver.enter("a", PROMPT, SamplingParams(seed=2, logit_bias={1: 100.0}))])
    assert driver.runner.sample().result().request_ids == []
    row = driver.enter("a", PROMPT, SamplingParams(seed=2))
    tokens = driver.step({"a": 13}, [row], preempted_request_ids=["a"]).token_ids[0]
    for _ in range(3):
        tokens += driver.step({"a": 1}).token_ids[0]
    assert tokens == alone
