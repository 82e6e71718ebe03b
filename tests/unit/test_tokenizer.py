"""Tokenizers: the real models' ids equal the reference's, and each kind of vocabulary follows its own rules.

`tokenizer_ids.json` holds what transformers' tokenizers give for the same texts, built once from the same GGUF files (for
SmolLM2 with the pre-tokenizer of its published tokenizer.json: single digits, then GPT-2's words).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from halfbyte.engine import gguf_tokenizer
from halfbyte.engine.tokenizer import SEAM, Tokenizer, load_tokenizer, tokenizer_from_folder
from halfbyte.errors import ModelFileError, UnsupportedError, UserError
from halfbyte.model_runner.source import ModelFiles, locate

EXPECTED = json.loads((Path(__file__).parent / "tokenizer_ids.json").read_text())
REAL = ("smollm2-135m", "gemma3-270m")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ALPHABET = [*map(chr, (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))), *(chr(256 + i) for i in range(68))]


def load_real(name: str) -> Tokenizer:
    try:
        return load_tokenizer(locate(name))
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def real() -> Iterator[dict[str, Tokenizer]]:
    yield {name: load_real(name) for name in REAL}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: dict[str, Tokenizer]) -> None:
    monkeypatch.setattr(gguf_tokenizer, "cache_folder", lambda: tmp_path / "cache")


def write_gguf(path: Path, tokens: list[str], kinds: list[int], architecture: str = "llama", **values: Any) -> ModelFiles:
    writer = gguf.GGUFWriter(path, architecture)
    values = {"model": "gpt2", "pre": "gpt-2", **values}
    writer.add_token_list(tokens)
    if kinds:
        writer.add_token_types(kinds)
    for name, value in values.items():
        if value is None:
            continue
        key = name.replace("__", ".") if "__" in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelFiles("m", "gguf", path)


def byte_level(path: Path, extra: list[str] | None = None, kinds: list[int] | None = None, **values: Any) -> Tokenizer:
    """A byte-level vocabulary of all bytes, three merged tokens, and `extra`."""
    tokens = [*ALPHABET, "ab", "abc", "Ġa", *(extra or [])]
    all_kinds = [NORMAL] * (len(ALPHABET) + 3) + (kinds or [NORMAL] * len(extra or []))
    return load_tokenizer(write_gguf(path / "v.gguf", tokens, all_kinds, merges=["a b", "ab c", "Ġ a"], **values))


def sentencepiece(path: Path, pieces: dict[str, float], **values: Any) -> Tokenizer:
    """A SentencePiece vocabulary: <unk> <s> </s>, the bytes, then `pieces` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [USER_DEFINED if score > 0 else NORMAL for score in pieces.values()]
    scores = [0.0] * 259 + list(pieces.values())
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return load_tokenizer(
        write_gguf(path / "v.gguf", tokens, kinds, scores=scores, **{"model": "llama", "pre": "default", **ids, **values})
    )


# The real models


@pytest.mark.parametrize("name", REAL)
def test_ids_equal_the_reference(name: str, real: dict[str, Tokenizer]) -> None:
    tokenizer = real[name]
    for text, ids in zip(EXPECTED["texts"], EXPECTED[name], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("name", REAL)
def test_decoding_gives_the_text_back(name: str, real: dict[str, Tokenizer]) -> None:
    tokenizer = real[name]
    for text, ids in zip(EXPECTED["texts"], EXPECTED[name], strict=True):
        expected = text.replace("\u2581", " ") if name == "gemma3-270m" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
        assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()
        assert len(text) <= len(ids) * tokenizer.max_chars_per_token


def test_smollm2_facts(real: dict[str, Tokenizer]) -> None:
    tokenizer = real["smollm2-135m"]
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token, tokenizer.eos_token_id) == (
        "<|im_start|>",
        1,
        "<|im_end|>",
        2,
    )
    assert tokenizer.vocab_size == len(tokenizer) == 49152
    assert tokenizer.special_ids == tokenizer.added_ids == frozenset(range(17))
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.encode("") == []
    assert tokenizer.token_text(2) == "<|im_end|>" and tokenizer.token_text(10**6) == ""
    assert tokenizer.decode([28120, 2], skip_special_tokens=True) == tokenizer.token_text(28120)


def test_gemma_facts(real: dict[str, Tokenizer]) -> None:
    tokenizer = real["gemma3-270m"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (2, 1, 262144)
    assert tokenizer.chat_template is None
    assert tokenizer.encode("Hello") == [2, *tokenizer.encode("Hello", add_special_tokens=False)]
    assert tokenizer.encode("") == [2]
    assert tokenizer.token_id("<end_of_turn>") == 106 in tokenizer.special_ids
    assert tokenizer.token_text(tokenizer.encode(" the", add_special_tokens=False)[0]) == " the"


@pytest.mark.parametrize("name", REAL)
def test_quoted_special_spellings_are_text(name: str, real: dict[str, Tokenizer]) -> None:
    tokenizer = real[name]
    for special_id in sorted(tokenizer.special_ids)[:20]:
        spelled = tokenizer.token_text(special_id)
        assert tokenizer.encode(spelled, add_special_tokens=False) == [special_id]
        quoted = tokenizer.quote_special(f"a {spelled}{spelled[:-1]}{spelled} b{spelled}")
        ids = tokenizer.encode(quoted, add_special_tokens=False, seams=True)
        assert not tokenizer.special_ids.intersection(ids)
        assert tokenizer.decode(ids) == f"a {spelled}{spelled[:-1]}{spelled} b{spelled}"


@pytest.mark.parametrize("name", REAL)
def test_quoting_leaves_other_text_alone(name: str, real: dict[str, Tokenizer]) -> None:
    tokenizer = real[name]
    for text in ("", "<", "a", "<|im_en", "ordinary <b>text</b> |> <| \n", "x" * 1000):
        assert tokenizer.quote_special(text) == text
        assert tokenizer.encode(text, seams=True) == tokenizer.encode(text)
    assert SEAM not in tokenizer.quote_special(f"forged {SEAM} seam")
    quoted = tokenizer.quote_special(tokenizer.token_text(min(tokenizer.special_ids)))
    bare = tokenizer.encode(quoted, add_special_tokens=False, seams=True)
    assert tokenizer.encode(quoted, seams=True) == [*tokenizer.encode(""), *bare]


def test_threads_do_not_disturb_each_other(real: dict[str, Tokenizer]) -> None:
    tokenizer = real["smollm2-135m"]
    text = "a <|im_end|> b"
    quoted = tokenizer.quote_special(text)
    plain = tokenizer.encode(quoted, seams=True)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: tokenizer.encode(text) if i % 2 else tokenizer.encode(quoted, seams=True), range(200)))
    assert all((2 in ids) if i % 2 else ids == plain for i, ids in enumerate(found))


def test_quoting_takes_linear_time(real: dict[str, Tokenizer]) -> None:
    for tokenizer in real.values():
        started = time.process_time()
        tokenizer.quote_special("<" * 200_000 + "<|im_end|>" * 20_000 + "<start_of_turn>" * 20_000)
        assert time.process_time() - started < 3


def test_long_runs_take_linear_time(real: dict[str, Tokenizer]) -> None:
    for tokenizer in real.values():
        for text in ("a" * 200_000, " " * 200_000, "\n" * 200_000, "a1 " * 60_000, "é" * 100_000):
            assert tokenizer.encode(text)  # a quadratic rule would take minutes


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from halfbyte.engine.tokenizer import load_tokenizer; from halfbyte.model_runner.source import locate; "
        "load_tokenizer(locate('smollm2-135m')); print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.stdout.strip() == "False", done.stderr


def test_half_a_surrogate_pair_is_the_users_mistake(real: dict[str, Tokenizer]) -> None:
    for tokenizer in real.values():
        with pytest.raises(UserError, match="character 1 is half"):
            tokenizer.encode("a\ud800b")


# Byte-level vocabularies


def test_byte_level_merges_and_every_byte(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abc ab a")] == ["abc", " ", "ab", " a"]
    for text in ("".join(map(chr, range(256))), "€😀", "\ufffd"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_text(tokenizer.encode("€")[0]) == "\ufffd"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "x12345 y's", ["x", "12345", " y", "'s"]),
        ("default", "x12345", ["x", "12345"]),
        ("smollm", "x123 45", ["x", "1", "2", "3", " ", "4", "5"]),
        ("llama-bpe", "x12345 Y'S", ["x", "123", "45", " Y", "'S"]),
        ("llama-bpe", "a\n\n b", ["a", "\n\n", " b"]),
        ("qwen2", "x123 y'LL", ["x", "1", "2", "3", " y", "'LL"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, pre=pre)
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [b"".join(tokenizer.token_bytes(ALPHABET.index(c)) for c in piece).decode() for piece, _ in pieces] == expected


def test_whole_words_win_where_merges_are_ignored(tmp_path: Path) -> None:
    for pre, expected in (("llama-bpe", 1), ("gpt-2", 4)):
        assert len(byte_level(tmp_path, ["wxyz"], pre=pre).encode("wxyz", add_special_tokens=False)) == expected


def test_qwen_normalises_to_composed_letters(tmp_path: Path) -> None:
    assert byte_level(tmp_path, pre="qwen2").encode("e\u0301") == byte_level(tmp_path, pre="qwen2").encode("\u00e9")


@pytest.mark.parametrize(
    ("values", "prefix", "suffix"),
    [
        ({}, 0, 0),
        ({"add_bos_token": True}, 1, 0),
        ({"add_eos_token": True}, 0, 1),
        ({"add_bos_token": True, "add_eos_token": True}, 1, 1),
        ({"pre": "llama-bpe"}, 1, 0),
        ({"pre": "llama-bpe", "add_bos_token": False}, 0, 0),
        ({"add_bos_token": True, "bos_token_id": None}, 0, 0),
    ],
)
def test_flags_decide_what_goes_around_a_text(values: dict[str, Any], prefix: int, suffix: int, tmp_path: Path) -> None:
    first = len(ALPHABET) + 3
    values = {"bos_token_id": first, "eos_token_id": first + 1, **values}
    tokenizer = byte_level(tmp_path, ["<bos>", "<eos>"], [CONTROL, CONTROL], **values)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [first] * prefix + plain + [first + 1] * suffix


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    first = len(ALPHABET) + 3
    tokenizer = byte_level(tmp_path, ["<c>", "<u>", "[PAD7]"], [CONTROL, USER_DEFINED, UNUSED])
    assert tokenizer.encode("<c>a<u>") == [first, ALPHABET.index("a"), first + 1]
    assert tokenizer.decode([first, first + 1]) == "<u>"
    assert tokenizer.special_ids == {first} and tokenizer.added_ids == {first, first + 1}
    assert tokenizer.decode([first + 2]) == "" and len(tokenizer.encode("[PAD7]")) == 6


# SentencePiece vocabularies


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "bc": -1.0, "ab": -2.0, "abc": -3.0, "▁a": -4.0}
    tokenizer = sentencepiece(tmp_path, pieces, add_space_prefix=False)
    id_of = {piece: 259 + i for i, piece in enumerate(pieces)}
    assert tokenizer.encode("abc") == [1, id_of["abc"]]
    assert tokenizer.encode("ab a", add_special_tokens=False) == [id_of["ab"], id_of["▁a"]]
    assert tokenizer.encode("é", add_special_tokens=False) == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([3 + 0xC3, 3 + 0xA9]) == "é" and tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


def test_the_space_prefix_is_added_and_taken_away(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, {"▁": -1.0, "a": -2.0, "▁a": -3.0})
    assert tokenizer.encode("a") == [1, 261] and tokenizer.decode([1, 261]) == "a"
    assert tokenizer.encode(" a", add_special_tokens=False) == [259, 261] and tokenizer.decode([259, 261]) == " a"
    assert tokenizer.token_text(261) == " a"


def test_runs_of_spaces_stored_as_spaces(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, {"▁": -1.0, "a": -2.0, "  ": 1.0, "   ": 1.0, "▁a": -3.0}, add_space_prefix=False)
    assert tokenizer.encode("a   a", add_special_tokens=False) == [260, 262, 260]
    assert tokenizer.decode([260, 262, 260]) == "a   a"


def test_the_merge_cache_changes_nothing(tmp_path: Path) -> None:
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "ab": -1.0}
    first = sentencepiece(tmp_path, pieces)
    (cached,) = (tmp_path / "cache" / "merges").iterdir()
    assert sentencepiece(tmp_path, pieces).encode("abab") == first.encode("abab")
    for damage in (b"", b"\x93NUMPY garbage", cached.read_bytes()[:-3]):
        cached.write_bytes(damage)
        assert sentencepiece(tmp_path, pieces).encode("abab") == first.encode("abab")


# Files that cannot be used


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"pre": "martian"}, "'martian' is not supported; supported are default, gpt-2, smollm"),
        ({"model": "bert"}, "'bert' is not supported; supported are gpt2, llama"),
    ],
)
def test_unknown_kinds_are_refused(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        byte_level(tmp_path, **values)
    assert expected in str(caught.value)


def test_broken_vocabularies_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    for tokens, kinds, values, expected in (
        (["a"], [1, 1], {}, "entry for each of 1 tokens"),
        (["a"], [1], {"merges": ["a b"]}, "merges holds 'a b'"),
        (["a", "b"], [1, 1], {"merges": ["a b"]}, "merges holds 'a b'"),
        (["a"], [1], {"merges": ["aa"]}, "merges holds 'aa'"),
        (["a"], [1], {}, "merges is missing"),
        (["a"], [1], {"model": "llama"}, "scores"),
        (["a", "aa"], [1, 1], {"merges": ["a a"], "bos_token_id": 5}, "bos_token_id is 5"),
        (["a", "aa"], [1, 1], {"merges": ["a a"], "add_bos_token": "yes"}, "add_bos_token must be"),
        (["a"], [1], {"model": 7}, "model must be"),
    ):
        files = write_gguf(path, tokens, kinds, **values)
        with pytest.raises(ModelFileError, match=expected) as caught:
            load_tokenizer(files)
        assert "\n" not in str(caught.value) and "v.gguf" in str(caught.value)


# Hugging Face folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A `tokenizer.json` with truncation, padding and a BOS of its own."""
    backend = byte_level(tmp_path, ["<s>", "</s>"], [CONTROL, CONTROL])._backend
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", len(ALPHABET) + 3)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    made = tmp_path / "hf"
    made.mkdir()
    backend.save(str(made / "tokenizer.json"))
    return made


def configure(folder: Path, **values: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return tokenizer_from_folder(folder)


def test_a_folder_without_companions(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelFiles("m", "hf", folder))
    assert tokenizer.encode("aaaa", add_special_tokens=False) == [ALPHABET.index("a")] * 4
    assert tokenizer.encode("aaaa")[0] == len(ALPHABET) + 3 and len(tokenizer.encode("aaaa")) == 5
    assert tokenizer.bos_token is tokenizer.eos_token is tokenizer.eos_token_id is tokenizer.chat_template is None


def test_explicit_flags_override_the_post_processor(folder: Path) -> None:
    bos, eos, a = len(ALPHABET) + 3, len(ALPHABET) + 4, ALPHABET.index("a")
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    assert configure(folder, **tokens).encode("a") == [bos, a]
    assert configure(folder, add_bos_token=False, **tokens).encode("a") == [a]
    assert configure(folder, add_bos_token=True, add_eos_token=True, **tokens).encode("a") == [bos, a, eos]
    assert configure(folder, **tokens).eos_token_id == eos


def test_chat_templates_by_priority(folder: Path) -> None:
    assert configure(folder, chat_template="from config").chat_template == "from config"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert configure(folder, chat_template=named).chat_template == "d"
    assert configure(folder, chat_template=named[:1]).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert configure(folder, chat_template="from config").chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from file")
    assert configure(folder, chat_template="from config").chat_template == "from file"


def test_tokens_that_only_the_configuration_declares(folder: Path) -> None:
    size = tokenizer_from_folder(folder).vocab_size
    tokenizer = configure(folder, added_tokens_decoder={str(size): {"content": "<new>", "special": True}})
    assert tokenizer.encode("<new>", add_special_tokens=False) == [size] and size in tokenizer.special_ids
    with pytest.raises(ModelFileError, match="declares '<new>'"):
        configure(folder, added_tokens_decoder={str(size + 5): {"content": "<new>"}})


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json cannot be used"):
        tokenizer_from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing$"):
        tokenizer_from_folder(folder)
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"is missing; tokenizer\.model alone"):
        tokenizer_from_folder(folder)


@pytest.fixture
def pairing(tmp_path: Path) -> Path:
    from tests.pooling_checkpoints import write_tokenizer

    write_tokenizer(tmp_path, "bert")
    return tmp_path


def test_pairs_are_put_together_and_cut_as_the_library_does(pairing: Path) -> None:
    """`longest_first`: the longer text gives way, at its end; both keep what stands around them, and their types."""
    ours, library = tokenizer_from_folder(pairing), tokenizers.Tokenizer.from_file(str(pairing / "tokenizer.json"))
    for room in (None, *range(4, 12)):
        library.no_truncation()
        if room is not None:
            library.enable_truncation(room, strategy="longest_first")
        for first, second in (("a" * i, "b" * j) for i in range(1, 8) for j in range(1, 8)):
            theirs = library.encode(first, second)
            ids, second_from = ours.encode_pair(first, second, None if room is None else room - ours.num_around_pair)
            assert ids == theirs.ids and [int(at >= (second_from or 99)) for at in range(len(ids))] == theirs.type_ids


def test_the_first_tokens_of_a_text(pairing: Path) -> None:
    tokenizer = tokenizer_from_folder(pairing)
    assert [tokenizer.first_tokens("abcdef", count) for count in (1, 4, 6, 9)] == ["a", "abcd", "abcdef", "abcdef"]
    assert tokenizer.first_tokens("", 3) == ""


def test_a_flag_for_one_end_leaves_the_other_to_the_post_processor(folder: Path) -> None:
    """Embedding models end texts in `tokenizer.json`, and say of BOS alone that there is none."""
    from tests.pooling_checkpoints import write_tokenizer

    write_tokenizer(folder, "qwen")
    ids = tokenizer_from_folder(folder).encode("a")
    assert len(ids) == 2 and ids[-1] == 0
