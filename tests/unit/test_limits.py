"""The limits of a model: every boundary from both sides, and messages that say what is possible."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from halfbyte.engine.limits import Limits
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import UserError
from halfbyte.types import EngineInfo, SamplingParams

V, L = 100, 64
LIMITS = Limits(vocab_size=V, max_model_len=L, max_logprobs=20)
OUTSIDE = [V, -1, -V, 2**31 - 1, 2**31, 2**70, True, 1.0, "5", None]


def refused(param: str, call: Any, *args: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert caught.value.param == param
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    return message


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level, with "Ġw" and one added token whose id lies beyond V."""
    alphabet = [chr(code) for code in range(33, 33 + V - 2)]
    vocabulary = {char: index for index, char in enumerate([*alphabet, "Ġ", "Ġw"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "w")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<wide>"])
    return Tokenizer(backend)


def test_from_info() -> None:
    info = EngineInfo(
        model="m",
        architecture="a",
        dtype="float32",
        kv_cache_dtype="float32",
        vocab_size=V,
        max_model_len=L,
        eos_token_ids=[2],
        max_logprobs=20,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        block_size=16,
        num_blocks=9,
        kv_cache_bytes=1,
        kv_cache_tokens=128,
        max_concurrency=2.0,
        enable_prefix_caching=True,
    )
    assert Limits.from_info(info) == LIMITS


# --- prompts


def test_prompt_ids_are_checked_against_the_logits_width() -> None:
    LIMITS.check_prompt([0, V - 1])
    for token_id in OUTSIDE:
        assert f"0 to {V - 1}" in refused("prompt", LIMITS.check_prompt, [1, token_id, 2])
    assert "prompt[1] is 100" in refused("prompt", LIMITS.check_prompt, [1, V, 2])
    refused("tokens", LIMITS.check_prompt, [V], "tokens")


def test_prompt_length() -> None:
    LIMITS.check_prompt([1] * L)
    refused("prompt", LIMITS.check_prompt, [])
    message = refused("input_tokens", LIMITS.check_prompt, [1] * (L + 1))
    assert "65" in message and "64" in message


def test_text_length_before_tokenising() -> None:
    LIMITS.check_text("x" * L * 3, 3)
    assert "192" in refused("input_text", LIMITS.check_text, "x" * (L * 3 + 1), 3)


# --- max_tokens


@pytest.mark.parametrize(
    ("requested", "prompt", "default", "expected"),
    [
        (30, 60, None, 4),
        (3, 60, None, 3),
        (64, 1, None, 63),
        (None, 60, None, 4),
        (None, 10, 20, 20),
        (None, 60, 20, 4),
        (30, 10, 20, 30),
        (1, 63, None, 1),
        (None, 10, 0, 1),
    ],
)
def test_max_tokens_is_an_upper_bound(requested: int | None, prompt: int, default: int | None, expected: int) -> None:
    assert LIMITS.effective_max_tokens(requested, prompt, "max_tokens", default) == expected


def test_max_tokens_that_cannot_fit() -> None:
    for param in ("max_tokens", "max_completion_tokens"):
        message = refused(param, LIMITS.effective_max_tokens, 65, 1, param)
        assert f"{param}=65 cannot be greater than max_model_len=64" in message
        assert "must be at least 1, got 0" in refused(param, LIMITS.effective_max_tokens, None, 64, param)
        assert "must be at least 1, got 0" in refused(param, LIMITS.effective_max_tokens, 0, 1, param)
    refused("input_tokens", LIMITS.effective_max_tokens, 1, 65)


@pytest.mark.parametrize(
    ("keep", "side", "max_tokens", "expected"),
    [
        (None, None, 16, range(100)),
        (3, None, 16, [97, 98, 99]),
        (3, "left", 16, [97, 98, 99]),
        (3, "right", 16, [0, 1, 2]),
        (-1, "right", 16, range(63)),
        (-1, "right", None, range(64)),
        (64, "right", 16, range(64)),
        (0, None, 16, []),
    ],
)
def test_truncation(keep: int | None, side: Any, max_tokens: int | None, expected: Any) -> None:
    params = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side, max_tokens=max_tokens)
    assert LIMITS.truncate(list(range(100)), params) == list(expected)


def test_truncation_to_more_than_the_context() -> None:
    refused("truncate_prompt_tokens", LIMITS.truncate, [1], SamplingParams(truncate_prompt_tokens=65))


# --- sampling parameters


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_ids_of_parameters(field: str) -> None:
    LIMITS.check_sampling(SamplingParams(**{field: [0, V - 1]}, logprobs=1))
    for token_id in OUTSIDE:
        params = SamplingParams(**{field: [token_id]}, logprobs=1, min_tokens=1)
        assert f"0 to {V - 1}" in refused(field, LIMITS.check_sampling, params)


def test_ids_of_logit_bias() -> None:
    LIMITS.check_sampling(SamplingParams(logit_bias={0: 1.0, V - 1: -1.0}))
    for token_id in OUTSIDE:
        refused("logit_bias", LIMITS.check_sampling, SamplingParams(logit_bias={token_id: 1.0}))


def test_number_of_logprob_token_ids() -> None:
    wide = Limits(vocab_size=1000, max_model_len=L, max_logprobs=20)
    wide.check_sampling(SamplingParams(logprob_token_ids=list(range(128)), logprobs=1))
    refused("logprob_token_ids", wide.check_sampling, SamplingParams(logprob_token_ids=list(range(129)), logprobs=1))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("max_logprobs", "count", "allowed"),
    [
        *((20, 20, True), (20, 21, False), (20, -1, False), (20, V + 1, False), (20, 2**31 - 1, False), (20, 0, True)),
        *((-1, -1, True), (-1, V, True), (-1, V + 1, False), (V, -1, True), (V - 1, -1, False), (2 * V, V, True)),
        *((2 * V, V + 1, False), (0, 0, True), (0, 1, False)),
    ],
)
def test_logprobs(field: str, max_logprobs: int, count: int, allowed: bool) -> None:
    limits = Limits(vocab_size=V, max_model_len=L, max_logprobs=max_logprobs)
    params = SamplingParams(**{field: count})
    if allowed:
        limits.check_sampling(params)
    else:
        assert "at most" in refused(field, limits.check_sampling, params)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_half_of_a_surrogate_pair(field: str) -> None:
    refused(field, LIMITS.check_sampling, SamplingParams(**{field: ["a\ud800"]}))


def test_cache_salt() -> None:
    for salt in ("a", "x" * 128, "Grüße-👋_1.2:3"):
        LIMITS.check_cache_salt(salt)
    for salt in ("", "x" * 129, "a/b", "a\\b", "a@b", "a\0b", "\ud800", "x" * 5_000_000):
        refused("cache_salt", LIMITS.check_cache_salt, salt)
    refused("cache_salt", LIMITS.check_cache_salt, 7)


# --- bad words


def test_bad_words_have_both_spaced_forms(tokenizer: Tokenizer) -> None:
    ids = LIMITS.bad_words_token_ids(SamplingParams(bad_words=["w", " w", "  w"]), tokenizer)
    assert ids == [tokenizer.encode("w"), tokenizer.encode(" w")] and len(ids[1]) == 1
    assert LIMITS.bad_words_token_ids(SamplingParams(bad_words=[" "]), tokenizer) == [tokenizer.encode(" ")]
    assert LIMITS.bad_words_token_ids(SamplingParams(), tokenizer) == []


def test_bad_words_beyond_the_logits_width(tokenizer: Tokenizer) -> None:
    """The tokenizer is longer than the model's head."""
    assert tokenizer.token_id("<wide>") == V
    message = refused("bad_words", LIMITS.bad_words_token_ids, SamplingParams(bad_words=["<wide>"]), tokenizer)
    assert f"0 to {V - 1}" in message


def test_bad_words_without_tokens(tokenizer: Tokenizer) -> None:
    refused("bad_words", LIMITS.bad_words_token_ids, SamplingParams(bad_words=["\n"]), tokenizer)


def test_number_of_bad_words(tokenizer: Tokenizer) -> None:
    words = [chr(33 + i // 90) + chr(33 + i % 90) for i in range(65)]
    assert len(LIMITS.bad_words_token_ids(SamplingParams(bad_words=words[:64]), tokenizer)) == 128
    refused("bad_words", LIMITS.bad_words_token_ids, SamplingParams(bad_words=words), tokenizer)
    refused("bad_words", LIMITS.bad_words_token_ids, SamplingParams(bad_words=["w"] * 129), tokenizer)
    fits = "a" * 511  # 511 + 512 tokens
    LIMITS.bad_words_token_ids(SamplingParams(bad_words=[fits]), tokenizer)
    refused("bad_words", LIMITS.bad_words_token_ids, SamplingParams(bad_words=[fits + "a"]), tokenizer)


def test_huge_bad_words_are_refused_before_they_are_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    refused("bad_words", LIMITS.bad_words_token_ids, SamplingParams(bad_words=["a" * 30_000_000]), tokenizer)


@pytest.mark.parametrize("given", [5e-324, 1e-50, 1e50, 1.7e308])
def test_no_repetition_penalty_takes_logits_out_of_float32(given: float) -> None:
    penalty = SamplingParams(repetition_penalty=given).repetition_penalty
    largest, logit = 3e38, 1e6
    assert logit / penalty < largest and logit * penalty < largest
    assert (penalty < 1e-9) == (given < 1) and (penalty > 1e9) == (given > 1)
