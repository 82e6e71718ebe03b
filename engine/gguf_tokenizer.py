"""A tokenizer from the vocabulary inside a GGUF file: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Knows how llama.cpp's converters store vocabularies, and how the original tokenizers cut text before merging. Building is a
matter of a second or two even for 262144 tokens; the derived merge list is kept in the cache folder. Called by `load_tokenizer`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from halfbyte.engine.tokenizer import SPM_SPACE, Tokenizer
from halfbyte.errors import HalfbyteError, ModelFileError, Refusal, UnsupportedError
from halfbyte.model_runner.gguf import GGUFFile
from halfbyte.platform import cache_folder

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How byte-level BPE cuts a text into words. split: a regular expression, None for GPT-2's own.

    ignore_merges: a whole word that is a token stays one. add_bos: what files mean that do not say. nfc: normalise first.
    """

    split: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(single_digits=True)
_LLAMA3 = _PreTokenizer(_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer(_QWEN2_SPLIT, nfc=True)
_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _PreTokenizer(_TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """The tokenizer that the file describes. UnsupportedError for a kind that this build does not know."""
    with GGUFFile(path) as file:
        vocabulary = _Vocabulary(path, file.metadata, file.architecture)
    return vocabulary.tokenizer()


class _Vocabulary:
    """The `tokenizer.*` metadata of one file, checked."""

    def __init__(self, path: Path, metadata: dict[str, Any], architecture: str) -> None:
        self.path = path
        self.architecture = architecture
        self._metadata = metadata
        self.model = self.get("model", str)
        builders: dict[str, Callable[[], Backend]] = {"gpt2": self.byte_level, "llama": self.sentencepiece}
        if self.model not in builders:
            raise self.refuse(f"tokenizer.ggml.model {self.model!r} is not supported", f"supported are {', '.join(builders)}")
        self._build = builders[self.model]
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise self.fail("tokenizer.ggml.tokens is missing or not an array of strings")
        self.tokens: list[str] = tokens
        self.kinds: list[int] = self.numbers("token_type", np.full(len(tokens), _NORMAL)).tolist()

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def refuse(self, reason: str, fix: str) -> UnsupportedError:
        return UnsupportedError(Refusal(f"{self.path}: {reason}", fix))

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not isinstance(value, kind):
            raise self.fail(f"tokenizer.ggml.{key} must be of type {kind.__name__}, got {value!r}")
        return value

    def numbers(self, key: str, default: np.ndarray | None = None) -> np.ndarray:
        """A number for each token."""
        values = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            found = f"{len(values)} entries" if isinstance(values, np.ndarray) else "no array"
            raise self.fail(f"tokenizer.ggml.{key} must have an entry for each of {len(self.tokens)} tokens, it has {found}")
        return values

    def special_id(self, key: str) -> int | None:
        token_id = self.get(f"{key}_token_id", int)
        if token_id is None or 0 <= token_id < len(self.tokens):
            return token_id
        raise self.fail(f"tokenizer.ggml.{key}_token_id is {token_id}, the vocabulary has {len(self.tokens)} tokens")

    def tokenizer(self) -> Tokenizer:
        try:
            backend = self._build()
            self._add_whole_tokens(backend)
        except HalfbyteError:
            raise
        except Exception as error:  # the library raises plain Exception for whatever it cannot use
            raise self.fail(f"its vocabulary cannot be used: {' '.join(str(error).split())[:300]}") from None
        bos, eos = self.special_id("bos"), self.special_id("eos")
        add_bos = self.get("add_bos_token", bool, self.model == "llama" or self.pre_tokenizer().add_bos)
        add_eos = self.get("add_eos_token", bool, False)
        template, tool_template = (self._metadata.get(f"tokenizer.chat_template{use}") for use in ("", ".tool_use"))
        return Tokenizer(
            backend,
            bos_token=None if bos is None else self.tokens[bos],
            eos_token=None if eos is None else self.tokens[eos],
            chat_template=template if isinstance(template, str) and template else None,
            tool_template=tool_template if isinstance(tool_template, str) and tool_template else None,
            affixes=((bos,) if add_bos and bos is not None else (), (eos,) if add_eos and eos is not None else ()),
        )

    def _add_whole_tokens(self, backend: Backend) -> None:
        """Tokens that a text matches whole: control tokens (special), and those that users of the vocabulary defined."""
        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            found = [token for token, token_kind in zip(self.tokens, self.kinds, strict=True) if token_kind == kind and token]
            if self.model == "llama":
                found = [token for token in found if not _is_space_run(token)]
            backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in found])

    def pre_tokenizer(self) -> _PreTokenizer:
        name = self.get("pre", str, "default")
        if name not in _PRE_TOKENIZERS:
            raise self.refuse(f"tokenizer.ggml.pre {name!r} is not supported", f"supported are {', '.join(_PRE_TOKENIZERS)}")
        return _PRE_TOKENIZERS[name]

    def byte_level(self) -> Backend:
        pre = self.pre_tokenizer()
        merges = self._metadata.get("tokenizer.ggml.merges")
        if not isinstance(merges, list):
            raise self.fail("tokenizer.ggml.merges is missing, which a byte-level vocabulary needs")
        vocabulary = {token: i for i, token in enumerate(self.tokens) if self.kinds[i] != _UNUSED}
        pairs = [self._merge(merge, vocabulary) for merge in merges]
        backend = Backend(BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=pre.ignore_merges))
        if pre.nfc:
            backend.normalizer = normalizers.NFC()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)
        if pre.split is not None:
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pre.split), "isolated"), byte_level])
        elif pre.single_digits:
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        else:
            backend.pre_tokenizer = byte_level
        backend.decoder = decoders.ByteLevel()
        return backend

    def _merge(self, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
        """Both halves of "left right". They and the token they make must exist: the library does not bear it otherwise."""
        left, _, right = merge.partition(" ")
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            return left, right
        raise self.fail(f"tokenizer.ggml.merges holds {merge[:100]!r}, which does not make one token of two")

    def sentencepiece(self) -> Backend:
        spelled = [SPM_SPACE * len(token) if _is_space_run(token) else token for token in self.tokens]
        unknown = self.special_id("unknown")
        backend = Backend(
            BPE(
                {token: i for i, token in enumerate(spelled)},
                self._merges(spelled),
                unk_token=None if unknown is None else spelled[unknown],
                fuse_unk=True,
                byte_fallback=_BYTE in self.kinds,
            )
        )
        with_prefix = self.get("add_space_prefix", bool, True)
        replace = normalizers.Replace(" ", SPM_SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPM_SPACE), replace]) if with_prefix else replace
        steps = [decoders.Replace(SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if with_prefix else steps)
        return backend

    def _merges(self, spelled: list[str]) -> list[tuple[str, str]]:
        """The merge list behind the vocabulary: every way to cut a token into two, the best token first.

        The best token has the highest score; Gemma's scores do not follow its merges, the order of the ids does.
        """
        order = np.arange(len(spelled))
        if not self.architecture.startswith("gemma"):
            scores = self.numbers("scores").astype(np.float64)
            scores[np.array(self.kinds) == _USER_DEFINED] = np.inf
            order = np.lexsort((order, -scores))
        mergeable = [i for i in order.tolist() if self.kinds[i] in (_NORMAL, _USER_DEFINED)]
        digest = hashlib.sha256("\0".join(spelled).encode())
        digest.update(np.array(mergeable, dtype=np.int64).tobytes())
        pairs = _cached_pairs(digest.hexdigest(), lambda: _cut_pairs(spelled, mergeable), len(spelled))
        left, right = ([spelled[i] for i in column.tolist()] for column in pairs.T)
        return list(zip(left, right, strict=True))


def _is_space_run(token: str) -> bool:
    """Whether a token is stored as spaces where the vocabulary means as many of its space characters."""
    return token.startswith(" ") and not token.strip(" ")


def _cut_pairs(tokens: list[str], mergeable: list[int]) -> np.ndarray:
    """[n, 2] ids of the halves of each token in `mergeable`, at each cut where both are tokens, the longest left half first."""
    id_of = {token: i for i, token in enumerate(tokens)}
    lefts: list[int] = []
    rights: list[int] = []
    for i in mergeable:
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            if (head := token[:cut]) in id_of and (tail := token[cut:]) in id_of:
                lefts.append(id_of[head])
                rights.append(id_of[tail])
    return np.array([lefts, rights], dtype=np.int32).T


def _cached_pairs(key: str, make: Callable[[], np.ndarray], num_tokens: int) -> np.ndarray:
    """`make()`, kept in the cache folder under `key`. A cache that cannot be read or written costs time, nothing else."""
    path = cache_folder() / "merges" / f"{key}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        pairs = np.load(path, allow_pickle=False)
        shaped = pairs.ndim == 2 and pairs.shape[1] == 2 and pairs.dtype == np.int32 and pairs.size > 0
        if shaped and pairs.min() >= 0 and pairs.max() < num_tokens:
            return pairs
    pairs = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{key}.{os.getpid()}")
        with scratch.open("wb") as file:
            np.save(file, pairs, allow_pickle=False)
        scratch.replace(path)
    return pairs
