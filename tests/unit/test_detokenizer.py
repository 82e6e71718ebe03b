"""Single facts about the incremental detokeniser: prompt edges, special tokens, leading spaces, flat cost."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from halfbyte.engine.detokenizer import IncrementalDetokenizer, token_pieces
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import SamplingParams


def bytes_tokenizer() -> Tokenizer:
    """Byte-level with a token per byte, then two words and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate([*alphabet, "Ġt", "th"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<think>"])
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


def sentencepiece_tokenizer(*, metaspace: bool = False) -> Tokenizer:
    words = ["▁hi", "▁the", "re", "▁", "a", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(() if metaspace else (f"<0x{byte:02X}>" for byte in range(256))), *words]
    scores = [(token, -float(index)) for index, token in enumerate(tokens)]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=not metaspace))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return bytes_tokenizer()


def ids(tokenizer: Tokenizer, *pieces: str | bytes | int) -> list[int]:
    """Ids of tokens by spelling; bytes stand for one byte token each."""
    found: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
            found += [by_bytes[bytes([byte])] for byte in piece]
        elif isinstance(piece, int):
            found.append(piece)
        else:
            token_id = tokenizer.token_id(piece)
            assert token_id is not None
            found.append(token_id)
    return found


def generate(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(skip_special_tokens=skip))
    return [*(detokenizer.feed([token_id]) for token_id in output), detokenizer.finish()]


def test_a_character_comes_out_with_its_last_byte(plain: Tokenizer) -> None:
    assert generate(plain, [], ids(plain, "👋".encode())) == ["", "", "", "👋", ""]


def test_invalid_bytes_are_replaced_as_soon_as_they_are_known_to_be(plain: Tokenizer) -> None:
    assert generate(plain, [], ids(plain, b"\xff\xffa\xe2\x82a")) == ["\ufffd", "\ufffd", "a", "", "", "\ufffda", ""]


def test_generation_that_ends_inside_a_character(plain: Tokenizer) -> None:
    assert generate(plain, [], ids(plain, b"a", "漢".encode()[:2])) == ["a", "", "", "\ufffd"]


def test_a_character_that_the_model_wrote_as_replacement_is_kept(plain: Tokenizer) -> None:
    assert "".join(generate(plain, [], ids(plain, "\ufffd".encode()))) == "\ufffd"


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("漢".encode()[:1], "漢".encode()[1:], "漢"),  # the prompt began it, the output completes it
        (b"x" + "漢".encode()[:2], "漢".encode()[2:] + b"y", "漢y"),
        ("漢".encode()[:2], b"ab", "ab"),  # broken, and broken by the prompt
        ("漢".encode()[:1], "漢".encode()[1:2], ""),
        ("漢".encode()[:1], b"", ""),
        ("漢".encode(), b"a", "a"),
        (b"\x82\x82\x82\x82", b"a", "a"),
        (b"\xe2", b"\xff\xff", "\ufffd\ufffd"),
    ],
)
def test_a_prompt_that_ends_inside_a_character(plain: Tokenizer, prompt: bytes, output: bytes, expected: str) -> None:
    assert "".join(generate(plain, ids(plain, prompt), ids(plain, output))) == expected


def test_special_tokens_are_skipped_even_inside_a_character(plain: Tokenizer) -> None:
    output = ids(plain, "漢".encode()[:1], "</s>", "漢".encode()[1:], "</s>", "th")
    assert "".join(generate(plain, [], output)) == "漢th"
    assert "".join(generate(plain, [], ids(plain, "th", "</s>", "th"), skip=False)) == "th</s>th"


def test_added_tokens_that_are_not_special_are_text(plain: Tokenizer) -> None:
    assert "".join(generate(plain, [], ids(plain, "<think>", "th"))) == "<think>th"


def test_ids_beyond_the_vocabulary_add_nothing(plain: Tokenizer) -> None:
    """The logits may be wider than the tokenizer."""
    assert "".join(generate(plain, [], ids(plain, "th", 10_000, b"x"))) == "thx"


@pytest.mark.parametrize("metaspace", [False, True])
def test_leading_spaces_of_sentencepiece(metaspace: bool) -> None:
    """A word's space belongs to the text unless nothing stands before it."""
    tokenizer = sentencepiece_tokenizer(metaspace=metaspace)
    hi_there = ids(tokenizer, "▁hi", "▁the", "re")
    bos = ids(tokenizer, "<s>")
    assert "".join(generate(tokenizer, ids(tokenizer, "▁a"), hi_there)) == " hi there"
    assert "".join(generate(tokenizer, [*ids(tokenizer, "▁a"), *bos], hi_there)) == " hi there"
    assert "".join(generate(tokenizer, [], hi_there)) == tokenizer.decode(hi_there) == "hi there"
    assert "".join(generate(tokenizer, bos, hi_there)) == tokenizer.decode([*bos, *hi_there]) == "hi there"
    assert "".join(generate(tokenizer, bos, [*bos, *hi_there])) == "hi there"


def test_a_first_token_that_is_only_a_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    output = ids(tokenizer, "▁", "▁hi")
    assert "".join(generate(tokenizer, [], output)) == tokenizer.decode(output) == " hi"


def test_whole_output_equals_decode_for_the_text_of_eight_interleaved_streams(plain: Tokenizer) -> None:
    texts = [f"👋🏽 ďábel 漢 {index} the" for index in range(8)]
    queues = [plain.encode(text) for text in texts]
    streams = [IncrementalDetokenizer(plain, [], SamplingParams()) for _ in texts]
    seen = [""] * 8
    for step in range(max(map(len, queues))):
        for index, queue in enumerate(queues):
            if step < len(queue):
                piece = streams[index].feed([queue[step]])
                assert "\ufffd" not in piece
                seen[index] += piece
    assert seen == texts


def test_cost_per_token_is_flat(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a token is known, feeding it asks the tokenizer nothing, at any length of prompt and output."""
    output = ids(plain, "th", "漢".encode(), b"\xff")
    detokenizer = IncrementalDetokenizer(plain, output * 5_000, SamplingParams())
    detokenizer.feed(output)
    calls: list[str] = []
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: calls.append("decode"))
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda *_: calls.append("token_bytes"))
    for _ in range(2_000):
        assert len(detokenizer.feed(output)) == 4
        assert detokenizer._num_pending <= 3
    assert not calls


def test_tables_are_shared_by_the_sequences_of_a_tokenizer(plain: Tokenizer) -> None:
    assert token_pieces(plain) is token_pieces(plain)
    assert token_pieces(plain) is not token_pieces(sentencepiece_tokenizer())
