"""Adapters in the engine: each request has the numbers of its own, in any batch, cut and state of the cache, to its last token.

A tiny random model with four random adapters; on the compiled CPU kernels, equal to the bit, and on the torch laws.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from halfbyte import LLM, BeamSearchParams, LoRARequest, SamplingParams
from halfbyte.config import EngineOptions
from halfbyte.engine.build import build_engine
from halfbyte.engine.client import InProcessClient
from halfbyte.engine.front import load_front
from halfbyte.engine.messages import LoadAdapter, UnloadAdapter
from halfbyte.engine.requests import RequestMaker
from halfbyte.errors import ModelFileError, NotFoundError, OverloadedError, UnsupportedError, UserError
from halfbyte.types import SchedulerStats, StepOutput
from tests.numerics.random_adapters import write_adapter
from tests.numerics.random_models import SHAPES, VOCAB, checkpoint

ASK = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
SHARED = [(7 * i) % 250 + 3 for i in range(40)]
PROMPTS = [SHARED + [5], SHARED[:33], SHARED, SHARED + [9, 11, 13], SHARED[:17]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 8,
    "kv_cache_memory_bytes": 4 << 20,
    "num_threads": 2,
    "enable_lora": True,
}
# Prompts in pieces beside decodes; too few blocks for all, so that some are computed twice; what was computed before.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 19, "enable_prefix_caching": False, "kv_cache_memory_bytes": None},
    "prefixes": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint's folder, and its configuration."""
    folder = tmp_path_factory.mktemp("model")
    config = checkpoint(folder, "LlamaForCausalLM", SHAPES["gqa3"]).config.to_dict()
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder, config


@pytest.fixture(scope="module")
def adapters(model: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Four, and None."""
    folder = tmp_path_factory.mktemp("adapters")
    found: list[LoRARequest | None] = []
    for number, rank in enumerate((4, 8, 16, 1), 1):
        found.append(
            LoRARequest(f"a{number}", number, str(write_adapter(folder / f"{number}", model[1], seed=number, rank=rank)))
        )
    return [*found, None]


@pytest.fixture(scope="module")
def open_llm(model: tuple[Path, dict[str, Any]]) -> Callable[..., closing[LLM]]:
    return lambda **more: closing(LLM(str(model[0]), **(OPTIONS | more)))


def backend_options(backend: str) -> dict[str, Any]:
    """torch on one thread: its others would wait for a core in vain where tests share the machine."""
    return {"attention_backend": backend} | ({"num_threads": 1} if backend == "reference" else {})


def generate(llm: LLM, prompts: list[list[int]], lora_request: Any) -> list[tuple[list[int], Any]]:
    """Tokens, and the log probability of each."""
    outputs = llm.generate(prompts, ASK, lora_request=lora_request, use_tqdm=False)
    assert [output.lora_request for output in outputs] == lora_request
    found = []
    for output in outputs:
        [answer] = output.outputs
        assert answer.finish_reason == "length" and answer.logprobs is not None
        found.append((answer.token_ids, [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)]))
    return found


@pytest.fixture(scope="module")
def alone(open_llm: Callable[..., closing[LLM]], adapters: list[LoRARequest | None]) -> Callable[[str], list[Any]]:
    """Of a back end: each prompt with its adapter, in an engine that had no other."""

    @cache
    def answers(backend: str) -> list[Any]:
        with open_llm(enable_prefix_caching=False, **backend_options(backend)) as llm:
            return [generate(llm, [prompt], [adapter])[0] for prompt, adapter in zip(PROMPTS, adapters, strict=True)]

    return answers


@pytest.mark.parametrize(("backend", "way"), [*(("cpu", way) for way in WAYS), ("reference", "chunks")])
def test_four_adapters_and_none_in_one_batch_are_each_alone(
    open_llm: Callable[..., closing[LLM]],
    adapters: list[LoRARequest | None],
    alone: Callable[[str], list[Any]],
    backend: str,
    way: str,
) -> None:
    expected = alone(backend)
    with open_llm(**backend_options(backend), **WAYS[way]) as llm:
        rounds = [generate(llm, PROMPTS, adapters) for _ in range(2)]
        assert (llm.num_preemptions > 0) is (way == "preempted")
    assert len({tuple(tokens) for tokens, _ in expected}) == len(PROMPTS)
    for found in rounds:
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        if backend == "cpu":
            assert found == expected


def test_c27_prefixes_are_not_shared_between_adapters_nor_loads(
    open_llm: Callable[..., closing[LLM]], model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    def ask(llm: LLM, adapter: LoRARequest | None) -> tuple[list[int], int | None]:
        [output] = llm.generate([SHARED], ASK, lora_request=adapter, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    folder = tmp_path / "reloaded"
    one, two = (str(write_adapter(tmp_path / name, model[1], seed=seed)) for name, seed in (("one", 1), ("two", 2)))
    shutil.copytree(one, folder)
    first, second = LoRARequest("first", 1, str(folder)), LoRARequest("second", 2, two)
    with open_llm() as llm:
        base, of_one, of_two = (ask(llm, adapter) for adapter in (None, first, second))
        assert base[1] == of_one[1] == of_two[1] == 0
        assert len({tuple(tokens) for tokens, _ in (base, of_one, of_two)}) == 3
        for adapter, expected in ((None, base), (first, of_one), (second, of_two)):
            tokens, num_cached = ask(llm, adapter)
            assert tokens == expected[0] and num_cached == 32
        shutil.rmtree(folder)
        shutil.copytree(two, folder)
        assert ask(llm, first) == (of_one[0], 32), "what is loaded does not change with its folder"
        assert ask(llm, LoRARequest("first", 1, str(folder), load_inplace=True)) == (of_two[0], 0)
        assert ask(llm, first) == (of_two[0], 32)


def test_requests_finish_with_the_weights_they_began_with(
    model: tuple[Path, dict[str, Any]], adapters: list[LoRARequest | None]
) -> None:
    """One adapter at a time: what is replaced keeps its seat while a request uses it, and there is one seat to spare."""
    paths = [adapter.lora_path for adapter in adapters if adapter is not None]
    options = EngineOptions(model=str(model[0]), **OPTIONS, max_loras=1)
    core, info = build_engine(options)
    client, tokens = InProcessClient(core, info), {}

    def begin(name: str, adapter_id: int) -> None:
        [request] = maker.make(list(SHARED), ASK, adapter_id=adapter_id)
        request.request_id = name
        tokens[name] = []
        client.add([request])

    def run(steps: int) -> None:
        for _ in range(steps):
            for output in (client.receive(0.0) or empty).outputs:
                tokens[output.request_id] += output.new_token_ids

    def order(action: Any) -> Any:
        answered = client.control(action)
        while not answered.done():
            run(1)
        return answered.result()

    empty = StepOutput([], SchedulerStats())
    maker = RequestMaker(info, load_front(options).tokenizer)
    with closing(client):
        whole = {}
        for name, path in (("one", paths[0]), ("two", paths[1])):
            adapter_id = order(LoadAdapter(path)).adapter_id
            begin(name, adapter_id)
            run(20)
            whole[name] = tokens.pop(name)
            order(UnloadAdapter(adapter_id))
        old = order(LoadAdapter(paths[0])).adapter_id
        with pytest.raises(UserError, match="--max-loras"):
            order(LoadAdapter(paths[1]))
        begin("one", old)
        run(4)
        new = order(LoadAdapter(paths[1], replaces=old)).adapter_id
        order(UnloadAdapter(old))
        begin("two", new)
        with pytest.raises(OverloadedError, match="try again"):
            order(LoadAdapter(paths[2], replaces=new))
        begin("late", old)
        run(30)
        assert {name: tokens[name] for name in whole} == whole and whole["one"] != whole["two"]
        assert tokens["late"] == [], "it failed alone: the adapter was gone when it came"
        assert order(LoadAdapter(paths[2], replaces=new)).adapter_id > new


def test_adapters_work_over_weights_in_8_bit_blocks(
    model: tuple[Path, dict[str, Any]], adapters: list[LoRARequest | None]
) -> None:
    options = OPTIONS | {"attention_backend": "cpu", "quantization": "int8", "enable_prefix_caching": False}
    with closing(LLM(str(model[0]), **options)) as llm:
        together = generate(llm, PROMPTS, adapters)
        assert together == [generate(llm, [prompt], [adapter])[0] for prompt, adapter in zip(PROMPTS, adapters, strict=True)]
        without = generate(llm, PROMPTS, [None] * len(PROMPTS))
    assert [a == b for a, b in zip(together, without, strict=True)] == [False] * 4 + [True]


@pytest.fixture(scope="module")
def llm(model: tuple[Path, dict[str, Any]]) -> Iterator[LLM]:
    with closing(LLM(str(model[0]), **OPTIONS, max_loras=2, max_lora_rank=8)) as llm:
        yield llm


def test_c28_an_adapter_whose_modules_have_other_names_is_refused_by_name(
    llm: LLM, model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, model[1], seed=1, prefix="base_model.model.transformer.h")
    with pytest.raises(
        UnsupportedError, match=r"no modules for base_model\.model\.transformer\.h\.0\.mlp\.down_proj\.lora_A"
    ) as e:
        llm.generate([SHARED], ASK, lora_request=LoRARequest("renamed", 1, str(folder)), use_tqdm=False)
    assert "adapters of this model have names like base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in str(e.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rank": 9}, "has rank 9, --max-lora-rank is 8; raise --max-lora-rank"),
        ({"use_dora": True}, "asks for use_dora"),
        ({"bias": "all"}, "asks for bias"),
        ({"modules_to_save": ["lm_head"]}, "asks for modules_to_save"),
        ({"peft_type": "IA3"}, "a peft_type that is not LORA"),
        ({"rank_pattern": {"q_.*": 2}}, "more than a module's name"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(
    llm: LLM, model: tuple[Path, dict[str, Any]], tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    folder = write_adapter(tmp_path, model[1], seed=1, **settings)
    with pytest.raises(UnsupportedError, match=reason.replace("(", r"\(")):
        llm.generate([SHARED], ASK, lora_request=LoRARequest("wrong", 1, str(folder)), use_tqdm=False)


def test_damaged_and_absent_adapters_are_refused_and_change_nothing(
    llm: LLM, model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    config = model[1]

    def load(name: str) -> None:
        llm.generate([SHARED], ASK, lora_request=LoRARequest(name, 1, str(tmp_path / name)), use_tqdm=False)

    before = llm.generate([SHARED], ASK, use_tqdm=False)[0].outputs[0].token_ids
    weights = write_adapter(tmp_path / "cut", config, seed=1) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    write_adapter(tmp_path / "wide", config | {"hidden_size": 128}, seed=1)
    pickle = write_adapter(tmp_path / "pickle", config, seed=1)
    (pickle / "adapter_model.safetensors").rename(pickle / "adapter_model.bin")
    write_adapter(tmp_path / "promise", config, seed=1, modules=("q_proj",), target_modules=["q_proj", "up_proj"])
    write_adapter(tmp_path / "other-rank", config, seed=1, rank=4, r=8)
    for name, kind, reason in (
        ("cut", ModelFileError, "is cut off"),
        ("wide", UnsupportedError, "do not fit model.layers.0.mlp.down_proj, which has 160 inputs"),
        ("pickle", UnsupportedError, "is a pickle"),
        ("promise", ModelFileError, "up_proj, for which there are no tensors"),
        ("other-rank", ModelFileError, "says rank 8"),
        ("absent", NotFoundError, "no adapter at"),
    ):
        with pytest.raises(kind, match=reason):
            load(name)
    for name in ("one", "two", "three"):  # room for two: the least recently used makes way
        write_adapter(tmp_path / name, config, seed=len(name))
        load(name)
    with pytest.raises(UserError, match="--max-loras"):
        names = [LoRARequest(name, 1, str(tmp_path / name)) for name in ("one", "two", "three")]
        llm.generate([SHARED] * 3, ASK, lora_request=names, use_tqdm=False)
    assert llm.generate([SHARED], ASK, use_tqdm=False)[0].outputs[0].token_ids == before


def test_a_start_with_an_adapter_that_is_not_there_stops(open_llm: Callable[..., closing[LLM]], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no adapter at"):
        open_llm(lora_modules=[{"name": "absent", "path": str(tmp_path)}])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_adapters_outlast_a_sleep(
    open_llm: Callable[..., closing[LLM]], model: tuple[Path, dict[str, Any]], tmp_path: Path, backend: str
) -> None:
    """At level 2 the weights are read again; adapters are those that were loaded, whatever has become of their folders."""
    path = write_adapter(tmp_path / "a", model[1], seed=1)
    adapter = LoRARequest("a", 1, str(path))
    with open_llm(**backend_options(backend)) as llm:
        before = generate(llm, [SHARED], [adapter])
        assert before != generate(llm, [SHARED], [None])
        shutil.rmtree(path)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert generate(llm, [SHARED], [adapter]) == before
        write_adapter(tmp_path / "b", model[1], seed=2)
        again = generate(llm, [SHARED] * 2, [adapter, LoRARequest("b", 2, str(tmp_path / "b"))])
        assert again[0][0] == before[0][0] != again[1][0]


def test_beams_have_the_adapter(llm: LLM, model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    adapter = LoRARequest("beams", 1, str(write_adapter(tmp_path, model[1], seed=1)))
    params = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
    [found, base] = llm.beam_search([SHARED] * 2, params, [adapter, None])
    assert [found.sequences[0].tokens[-12:], base.sequences[0].tokens[-12:]] == [
        tokens for tokens, _ in generate(llm, [SHARED] * 2, [adapter, None])
    ]
    assert found != base


def test_memory_is_counted(llm: LLM, model: tuple[Path, dict[str, Any]]) -> None:
    """Room for two adapters and one that is being replaced, in the report, whatever is loaded."""
    [line] = [line for line in llm.info.report if line.startswith("adapters: room")]
    assert "room for 2 and one that is being replaced, up to rank 8, float32" in line
    num_bytes = int(line.rpartition(": ")[2].removesuffix(" bytes").replace(",", ""))
    hidden, inner, query, key, layers = 96, 160, 6 * 64, 2 * 64, 2
    ranks = 8 * layers * (3 * hidden + query + 2 * key + query + hidden + 2 * hidden + 2 * inner + inner + hidden)
    assert 3 * 4 * ranks <= num_bytes < 3 * 4 * ranks * 2.5  # panels of 16 or 32 outputs, of which some are padding
