"""Datasets: exact token counts in both forms, the same prompts for the same seed, and one line for what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfbyte.engine.tokenizer import Tokenizer, load_tokenizer
from halfbyte.entrypoints.bench.datasets import DATASET_FLAGS, DATASETS, DEFAULTS, Sample, fresh_seed, load_requests, prefix_share
from halfbyte.entrypoints.flags import UsageError, parse
from halfbyte.errors import HalfbyteError, ModelFileError, UserError
from halfbyte.model_runner.source import locate

MakeTokenizer = Callable[[bool], Tokenizer]


@pytest.fixture(params=[False, True], ids=["plain", "with a BOS"])
def tokenizer(request: pytest.FixtureRequest, word_tokenizer: MakeTokenizer) -> Tokenizer:
    return word_tokenizer(request.param)


def load(name: str, tokenizer: Tokenizer, *words: str, num_prompts: int = 20, seed: int = 1) -> Sample:
    settings = parse("bench", "", DATASET_FLAGS, words).command
    return load_requests(name, settings, tokenizer, num_prompts, seed)


def check_exact(sample: Sample, tokenizer: Tokenizer) -> None:
    for request in sample.requests:
        assert request.prompt_token_ids == tokenizer.encode(request.prompt), "both forms are one prompt"
        assert len(request.prompt_token_ids) == request.num_prompt_tokens


def test_random_has_exact_counts(tokenizer: Tokenizer) -> None:
    sample = load("random", tokenizer, "--random-input-len", "17", "--random-output-len", "5", "--random-prefix-len", "8")
    check_exact(sample, tokenizer)
    assert {(request.num_prompt_tokens, request.output_len) for request in sample.requests} == {(25, 5)}
    num_bos = len(tokenizer.encode(""))
    shared = {tuple(request.prompt_token_ids or ())[: 8 + num_bos] for request in sample.requests}
    assert len(shared) == 1, "one prefix"
    expected = (8 + num_bos) * 19 / (25 * 20)
    assert sample.prefix_share == pytest.approx(expected, abs=0.01), "a few prompts share their first word by chance"


def test_random_lengths_vary_within_the_ratio(tokenizer: Tokenizer) -> None:
    words = ("--random-input-len", "10", "--random-output-len", "4", "--random-range-ratio", "0.5")
    sample = load("random", tokenizer, *words, num_prompts=300)
    check_exact(sample, tokenizer)
    assert {request.num_prompt_tokens for request in sample.requests} == set(range(5, 16))
    assert {request.output_len for request in sample.requests} == {2, 3, 4, 5, 6}


def test_random_defaults_are_vllms(word_tokenizer: MakeTokenizer) -> None:
    [request] = load("random", word_tokenizer(False), num_prompts=1).requests
    assert (request.num_prompt_tokens, request.output_len) == (1024, 128)


def test_prompts_are_fresh_and_repeatable(tokenizer: Tokenizer) -> None:
    for name in ("random", "prefix_repetition"):
        first, again, other = (load(name, tokenizer, seed=seed).requests for seed in (5, 5, 6))
        assert first == again
        assert not {request.prompt for request in first} & {request.prompt for request in other}
    assert len({fresh_seed() for _ in range(10)}) == 10


def test_prefix_repetition(tokenizer: Tokenizer) -> None:
    flags = ("prefix-len", "6"), ("suffix-len", "4"), ("num-prefixes", "3"), ("output-len", "7")
    words = [word for name, value in flags for word in (f"--prefix-repetition-{name}", value)]
    sample = load("prefix_repetition", tokenizer, *words, num_prompts=11)
    check_exact(sample, tokenizer)
    assert {(request.num_prompt_tokens, request.output_len) for request in sample.requests} == {(10, 7)}
    num_bos = len(tokenizer.encode(""))
    prefixes = Counter(tuple(request.prompt_token_ids or ())[: 6 + num_bos] for request in sample.requests)
    assert sorted(prefixes.values()) == [3, 4, 4]
    assert sample.prefix_share >= 6 * 8 / 110
    with pytest.raises(UsageError, match="--num-prompts 2 cannot use --prefix-repetition-num-prefixes 3; lower it"):
        load("prefix_repetition", tokenizer, *words, num_prompts=2)


@pytest.mark.parametrize(
    ("prompts", "share"),
    [
        ([], 0.0),
        ([[1, 2, 3]], 0.0),
        ([[1, 2, 3, 4], [1, 2, 9, 9]], 2 / 8),
        ([[1, 2], [1, 2], [1, 2]], 4 / 6),
        ([[1, 2, 3], [9, 9, 9], [1, 2]], 2 / 8),
        ([[1, 2, 3], [1, 2, 4], [1, 5, 6]], 3 / 9),
    ],
)
def test_prefix_share(prompts: list[list[int]], share: float) -> None:
    assert prefix_share(prompts) == share


def conversations(*lengths: tuple[int, int]) -> list[dict[str, Any]]:
    """One conversation per pair of word counts, each with words of its own."""
    texts = [
        (" ".join(["aa"] * (asked - 1) + [f"b{chr(97 + i)}"]), " ".join(["cc"] * said)) for i, (asked, said) in enumerate(lengths)
    ]
    return [{"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]} for asked, said in texts]


def test_sharegpt(word_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    tokenizer, path = word_tokenizer(False), tmp_path / "chats.json"
    short_turns, long_turns, fine = [(3, 9), (9, 3)], [(1025, 9), (1000, 1049)], [(4, 4), (1024, 1024), (20, 30)]
    one_turn = [{"conversations": [{"from": "human", "value": "aa aa aa aa"}]}]
    path.write_text(json.dumps(conversations(*short_turns, *long_turns, *fine) + one_turn))
    sample = load("sharegpt", tokenizer, "--dataset-path", str(path), num_prompts=3)
    assert sorted((request.num_prompt_tokens, request.output_len) for request in sample.requests) == sorted(fine)
    assert all(request.prompt_token_ids is None for request in sample.requests), "a client sends text"
    fixed = load("sharegpt", tokenizer, "--dataset-path", str(path), "--sharegpt-output-len", "6", num_prompts=3)
    assert {request.output_len for request in fixed.requests} == {6}
    with pytest.raises(UserError, match="has 3 prompts that can be used and 4 are needed; lower --num-prompts"):
        load("sharegpt", tokenizer, "--dataset-path", str(path), num_prompts=4)


def test_custom(word_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "aa bb", "output_tokens": 3}\n\n{"prompt": "aa bb cc", "note": 1}\n')
    sample = load("custom", word_tokenizer(True), "--dataset-path", str(path), "--custom-output-len", "9", num_prompts=2)
    assert {(r.prompt, r.num_prompt_tokens, r.output_len) for r in sample.requests} == {("aa bb", 3, 3), ("aa bb cc", 4, 9)}
    assert sample.prefix_share == 3 / 7
    orders = {
        load("custom", word_tokenizer(True), "--dataset-path", str(path), num_prompts=1, seed=s).requests[0].prompt
        for s in range(20)
    }
    assert orders == {"aa bb", "aa bb cc"}, "the seed chooses"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", '{"prompt": "a"}\n{"text": "a"}', r':2 is not {"prompt": text}'),
        ("custom", '{"prompt": "a", "output_tokens": 0}', ":1 is not"),
        ("custom", '{"prompt": "a", "output_tokens": true}', ":1 is not"),
        ("custom", "[1]", ":1 is not"),
        ("custom", "no json", ":1 is not"),
        ("custom", "", "has 0 prompts that can be used and 1 are needed"),
        ("sharegpt", "no json", "is not a sharegpt file"),
        ("sharegpt", '{"conversations": []}', "is not a sharegpt file"),
        ("sharegpt", '[{"conversations": [{"text": "a"}, {"text": "b"}]}]', "is not a sharegpt file"),
        ("sharegpt", "[]", "has 0 prompts"),
    ],
)
def test_broken_files_are_one_line(name: str, text: str, message: str, word_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load(name, word_tokenizer(False), "--dataset-path", str(path), num_prompts=1)
    assert "\n" not in str(caught.value)


def test_unreadable_files(word_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dataset-path: cannot read .*: No such file or directory"):
        load("custom", word_tokenizer(False), "--dataset-path", str(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load("custom", word_tokenizer(False), "--dataset-path", str(tmp_path / "latin"))
    with pytest.raises(UsageError, match="--dataset-name sharegpt needs a file: --dataset-path FILE"):
        load("sharegpt", word_tokenizer(False))


def test_flags_of_other_datasets_are_refused(word_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(UsageError, match="--custom-output-len is not for --dataset-name random; it takes --random-input-len, "):
        load("random", word_tokenizer(False), "--custom-output-len", "3")
    with pytest.raises(UsageError, match="--dataset-path is not for --dataset-name prefix_repetition"):
        load("prefix_repetition", word_tokenizer(False), "--dataset-path", "x")
    targets = {flag.target for flag in DATASET_FLAGS}
    assert set(DEFAULTS) <= targets and all(any(target.startswith(name) for target in targets) for name in DATASETS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--random-input-len", "0"], "--random-input-len must be at least 1, got 0"),
        (["--random-prefix-len", "-1"], "--random-prefix-len must be at least 0, got -1"),
        (["--random-range-ratio", "1"], r"--random-range-ratio must be in \[0, 1\), got 1"),
        (["--random-range-ratio", "nan"], r"--random-range-ratio must be in \[0, 1\), got nan"),
        (["--dataset-name", "sonnet"], "'sonnet' is not one of random, sharegpt, prefix_repetition, custom"),
    ],
)
def test_wrong_values(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse("bench", "", DATASET_FLAGS, words)


def test_too_short_for_the_special_tokens(word_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(UserError, match=r"prompts of 1 tokens are too short: this tokenizer needs 2 \(1 special\)"):
        load("random", word_tokenizer(True), "--random-input-len", "1")
    assert load("random", word_tokenizer(False), "--random-input-len", "1", num_prompts=1).requests[0].num_prompt_tokens == 1


def test_tokenizers_without_stable_words(word_tokenizer: MakeTokenizer) -> None:
    class Letters:
        vocab_size = 26

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(char) - 97 for char in text]

        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return "".join(chr(97 + i) for i in token_ids)

    class Merging:
        """Pairs stay as they are, longer texts do not."""

        def __init__(self) -> None:
            self._words = word_tokenizer(False)
            self.vocab_size = self._words.vocab_size

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return self._words.encode(text)[:2]

        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return self._words.decode(token_ids)

    with pytest.raises(HalfbyteError, match="no token that is a word by itself"):
        load_requests("random", {}, Letters(), 1, 0)
    with pytest.raises(HalfbyteError, match="reads its own words differently"):
        load_requests("random", {}, Merging(), 1, 0)


def test_a_real_tokenizer() -> None:
    try:
        tokenizer = load_tokenizer(locate("smollm2-135m"))
    except ModelFileError as error:
        pytest.skip(str(error))
    sample = load("random", tokenizer, "--random-input-len", "300", "--random-prefix-len", "50", num_prompts=5)
    check_exact(sample, tokenizer)
    assert {request.num_prompt_tokens for request in sample.requests} == {350}
