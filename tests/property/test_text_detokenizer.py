"""Detokenising: any cut of the ids gives the whole text, for byte-level and for byte-fallback vocabularies, and U+FFFD
appears only where bytes form no character."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from halfbyte.engine.detokenizer import IncrementalDetokenizer
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import SamplingParams

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there",
    "čeština ďábel 漢字 👋🏽 👩‍👩‍👧 and\nmore  spaces",
] * 3
SPECIAL = ["<s>", "</s>", "<|end|>"]
CLUSTERS = ["👩‍👩‍👧‍👦", "👋🏽", "🏳️‍🌈", "ďábel", "漢", "é", "\ufffd", " ", "\n", "the", "\x00"]


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> Tokenizer:
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz,", "th", "the", "▁the", "lo", "hel", "hello", "▁hello", "č", "漢"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("l", "o"), ("h", "e"), ("hel", "lo"), ("▁", "hello")]
    tokens.insert(tokens.index("hel"), "he")
    merges.insert(5, ("he", "l"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)

texts = st.lists(st.one_of(st.sampled_from(CLUSTERS), st.text(max_size=6)), max_size=12).map("".join)
ids_of = {kind: st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40) for kind, tokenizer in TOKENIZERS.items()}
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=10)


def params(skip: bool = True) -> SamplingParams:
    return SamplingParams(skip_special_tokens=skip)


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """The pieces that come out when `ids` go in by groups of `sizes`, round and round; the last is finish()'s."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params(skip))
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.feed(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, detokenizer.finish()]


@kinds
@given(data=st.data(), sizes=cuts, skip=st.booleans())
def test_any_split_equals_whole(kind: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, ids = data.draw(ids_of[kind]), data.draw(ids_of[kind])
    whole = stream(tokenizer, prompt, ids, [max(1, len(ids))], skip)
    assert "".join(stream(tokenizer, prompt, ids, sizes, skip)) == "".join(whole)


@kinds
@given(text=texts, prompt=texts, sizes=cuts)
def test_text_comes_back_without_replacement(kind: str, text: str, prompt: str, sizes: list[int]) -> None:
    """The output's text is what it adds to the prompt's, and no piece of it has a broken character."""
    tokenizer = TOKENIZERS[kind]
    prompt_ids = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, prompt_ids, ids, sizes)
    whole, before = tokenizer.decode([*prompt_ids, *ids]), tokenizer.decode(prompt_ids)
    assert before + "".join(pieces) == whole
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@kinds
@given(text=texts, cut=st.integers(0, 60))
def test_only_the_end_may_be_inside_a_character(kind: str, text: str, cut: int) -> None:
    """Cut by max_tokens anywhere: U+FFFD comes from finish() alone, once, and only if a character was open."""
    tokenizer = TOKENIZERS[kind]
    text = text.replace("\ufffd", "x")
    ids = tokenizer.encode(text, add_special_tokens=False)
    *pieces, end = stream(tokenizer, tokenizer.encode("the "), ids[:cut], [1])
    assert "\ufffd" not in "".join(pieces)
    assert end in ("", "\ufffd")
    if cut >= len(ids):
        assert end == ""


@given(ids=ids_of["byte-level"], skip=st.booleans())
def test_byte_level_equals_the_library_for_any_ids(ids: list[int], skip: bool) -> None:
    """Invalid bytes too: each maximal broken part becomes one U+FFFD."""
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(stream(tokenizer, [], ids, [1], skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=ids_of["byte-fallback"], skip=st.booleans())
def test_byte_fallback_decodes_each_run_of_bytes(ids: list[int], skip: bool) -> None:
    """As the bytes say. The library replaces every byte of a run that has one wrong byte, so it agrees when there is none."""
    tokenizer = TOKENIZERS["byte-fallback"]
    shown = [token_id for token_id in ids if not (skip and token_id in tokenizer.special_ids)]
    expected = b"".join(tokenizer.token_bytes(token_id) for token_id in shown).decode("utf-8", "replace").removeprefix(" ")
    streamed = "".join(stream(tokenizer, [], ids, [1], skip))
    assert streamed == expected
    library = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in library:
        assert streamed == library


@kinds
@given(data=st.data())
@settings(max_examples=50)
def test_state_is_at_most_three_bytes(kind: str, data: st.DataObject) -> None:
    """A run of broken bytes comes out as it goes in: at most one open character is ever held back."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(ids_of[kind])
    detokenizer = IncrementalDetokenizer(tokenizer, [], params())
    text, given_bytes = "", b""
    for token_id in ids:
        text += detokenizer.feed([token_id])
        if token_id not in tokenizer.special_ids:
            given_bytes += tokenizer.token_bytes(token_id)
        whole = given_bytes.decode("utf-8", "replace")
        if kind == "byte-fallback":
            whole = whole.removeprefix(" ")
        held_back = whole.removeprefix(text)  # half a surrogate counts as two broken bytes once it is over
        assert whole.startswith(text) and held_back in ("", "\ufffd", "\ufffd" * 2)
