"""Text to token ids and back, around one `tokenizers.Tokenizer`, whatever file it came from.

Knows `tokenizer.json` and its companions in a Hugging Face folder. It must not know requests, templates' rendering, torch or
transformers: it is loaded in the API process. Called by the front ends, the detokeniser and the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from halfbyte.errors import ModelFileError, UserError
from halfbyte.model_runner.source import ModelFiles, read_json, read_optional_json

# A noncharacter, which no text has a use for: marks a place that no token may span.
SEAM = "\ufdd0"
SPM_SPACE = "\u2581"
# Normalisation can shorten a text (NFC joins a letter and its marks): the bound on characters per token allows for that.
_NORMALISER_SLACK = 4
_PIECES_AT_ONCE = 1000

Affixes = tuple[tuple[int, ...] | None, tuple[int, ...] | None]


class Tokenizer:
    """A vocabulary with its rules. Safe to use from several threads.

    bos_token, eos_token: strings and ids, None where the model has none. affixes: what `encode` puts before and behind a text;
    None leaves either, or both, to the backend's own post-processor. added_ids: tokens that are matched whole in a text;
    special_ids: those of them that `decode` leaves out. chat_template: Jinja source, None for a base model; tool_template: what
    it is when a request has tools, None where that is the same one. response_template: how the model's answers are read, as the
    checkpoint has it, unchecked.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        response_template: dict[str, Any] | None = None,
        affixes: Affixes | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._own_affixes = affixes or (None, None)
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.chat_template, self.tool_template = chat_template, tool_template
        self.response_template = response_template
        added = backend.get_added_tokens_decoder()
        self._added_texts = {token_id: token.content for token_id, token in added.items()}
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True, *, seams: bool = False) -> list[int]:
        """The ids of `text`. add_special_tokens: with the model's beginning (and end) of text; no second one where it begins so.

        seams=True: `text` holds SEAM characters (see `quote_special`), which no token spans and which add nothing themselves.
        UserError for a string that is no Unicode text: JSON can carry half of a surrogate pair.
        """
        _require_unicode(text)
        pieces = [piece for piece in (text.split(SEAM) if seams else [text]) if piece]
        # Other threads of Python run during `encode_batch_fast`, unlike `encode`, but not while it hands over its results.
        ids: list[int] = []
        for start in range(0, len(pieces), _PIECES_AT_ONCE):
            group = pieces[start : start + _PIECES_AT_ONCE]
            ids += [i for piece in self._backend.encode_batch_fast(group, add_special_tokens=False) for i in piece.ids]
        return self.wrap(ids) if add_special_tokens else ids

    def wrap(self, ids: list[int]) -> list[int]:
        """`ids` of a text with the model's beginning and end; no second beginning where there is one."""
        prefix, suffix = self.affixes
        return [*(() if tuple(ids[: len(prefix)]) == prefix else prefix), *ids, *suffix]

    def encode_pair(self, first: str, second: str, room: int | None = None) -> tuple[list[int], int | None]:
        """(ids of two texts in one prompt, where those begin that the model tells apart as the second's; None: it does not).

        room: for tokens of both, beside `num_around_pair`: the longer text is cut at its end, then both.
        """
        for text in (first, second):
            _require_unicode(text)
        a, b = self._backend.encode_batch_fast([first, second], add_special_tokens=False)
        if room is not None:
            lengths = share_tokens(len(a.ids), len(b.ids), room)
            a.truncate(lengths[0])
            b.truncate(lengths[1])
        if self._own_affixes != (None, None):
            return self.wrap([*a.ids, *b.ids]), None
        whole = self._backend.post_process(a, b, True)
        return list(whole.ids), next((at for at, kind in enumerate(whole.type_ids) if kind), None)

    @cached_property
    def num_around_pair(self) -> int:
        """How many tokens stand around and between the two texts of a pair."""
        if self._own_affixes != (None, None):
            return sum(map(len, self.affixes))
        return int(self._backend.num_special_tokens_to_add(True))

    def first_tokens(self, text: str, count: int) -> str:
        """The beginning of `text` that its first `count` tokens stand for."""
        _require_unicode(text)
        offsets = self._backend.encode_batch([text], add_special_tokens=False)[0].offsets
        return text if len(offsets) <= count else text[: offsets[count - 1][1]]

    def quote_special(self, text: str) -> str:
        """`text` with a SEAM inside each spelling of a special token: `encode(seams=True)` then reads it as ordinary text."""
        text = text.replace(SEAM, "\N{REPLACEMENT CHARACTER}")
        by_length, pairs = self._special_spellings
        candidates = () if pairs is None else (match.start() for match in pairs.finditer(text))
        starts = [at for at in candidates if any(text[at : at + length] in group for length, group in by_length.items())]
        pieces = [text[start + 1 : end + 1] for start, end in zip([-1, *starts], [*starts, len(text)], strict=True)]
        return SEAM.join(pieces)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids that the vocabulary lacks add nothing, bytes that are no character become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones too, with the space it begins with; U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for an id that the vocabulary lacks."""
        if (content := self._added_texts.get(token_id)) is not None:
            return content.encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in piece)
            except KeyError:
                return piece.encode()
        if not self._byte_fallback:
            return self.decode([token_id], skip_special_tokens=False).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPM_SPACE, " ").encode()

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled `text` in the vocabulary."""
        found: int | None = self._backend.token_to_id(text)
        return found

    @cached_property
    def max_chars_per_token(self) -> int:
        """No token stands for more characters than this, so a text of more than n times as many has more than n tokens."""
        longest = max((len(piece) for piece in self._backend.get_vocab(with_added_tokens=True)), default=1)
        return longest * (1 if self._backend.normalizer is None else _NORMALISER_SLACK)

    @cached_property
    def _special_spellings(self) -> tuple[dict[int, set[str]], re.Pattern[str] | None]:
        """Special tokens' texts by length, and what finds a pair that one begins with; None where there are none."""
        by_length: dict[int, set[str]] = {}
        for text in (self._added_texts[token_id] for token_id in self.special_ids):
            if len(text) > 1:
                by_length.setdefault(len(text), set()).add(text)
        second_of: dict[str, set[str]] = {}
        for text in (text for group in by_length.values() for text in group):
            second_of.setdefault(re.escape(text[0]), set()).add(re.escape(text[1]))
        starts = [f"{first}(?=[{''.join(sorted(seconds))}])" for first, seconds in sorted(second_of.items())]
        return by_length, re.compile("|".join(starts)) if starts else None

    @cached_property
    def affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What `wrap` puts before and behind a text."""
        before, behind = self._own_affixes
        if before is not None and behind is not None:
            return before, behind
        prefix, suffix = self._affixes_of_backend
        return prefix if before is None else before, suffix if behind is None else behind

    @cached_property
    def _affixes_of_backend(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the backend's own post-processor puts around a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return tuple(whole[:at]), tuple(whole[at + len(bare) :])

    @cached_property
    def _decoder_types(self) -> frozenset[str]:
        if self._backend.decoder is None:
            return frozenset()
        state = json.loads(self._backend.decoder.__getstate__())
        return frozenset(step["type"] for step in state.get("decoders", [state]))

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in self._decoder_types

    @cached_property
    def _byte_fallback(self) -> bool:
        return "ByteFallback" in self._decoder_types


def share_tokens(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept where both have to fit: the longer one gives way to the shorter, at most to half."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not valid Unicode: character {error.start} is half of a surrogate pair") from None


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a located model. ModelFileError says what is missing or broken."""
    if files.kind == "gguf":
        from halfbyte.engine.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(files.path)
    return tokenizer_from_folder(files.path)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """From `tokenizer.json`, with the special tokens and the chat template that the files beside it name."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        hint = f"; {others[0]} alone is not enough, convert it with transformers first" if others else ""
        raise ModelFileError(f"{path} is missing{hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # for a wrong file the library raises plain Exception, or panics, which is a BaseException
        raise ModelFileError(f"{path} cannot be used: {' '.join(str(error).split())[:300]}") from None
    config_path = folder / "tokenizer_config.json"
    config = read_optional_json(config_path)
    _add_declared_tokens(backend, config, config_path)
    bos, eos = _token_string(config.get("bos_token")), _token_string(config.get("eos_token"))
    templates = _chat_templates(folder, config)
    return Tokenizer(
        backend,
        bos_token=bos,
        eos_token=eos,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        response_template=config.get("response_template"),
        affixes=_affixes(backend, config, bos, eos),
    )


def _token_string(value: Any) -> str | None:
    """A token as `tokenizer_config.json` writes it: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Tokens that only `tokenizer_config.json` declares. Each must get the id that is declared for it."""
    declared = config.get("added_tokens_decoder")
    for key, entry in sorted(declared.items(), key=lambda item: (len(item[0]), item[0])) if isinstance(declared, Mapping) else ():
        content = _token_string(entry)
        if content is None or backend.token_to_id(content) is not None:
            continue
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        if str(backend.token_to_id(content)) != key:
            raise ModelFileError(
                f"{path} declares {content!r} as token {key}, tokenizer.json makes it {backend.token_to_id(content)}"
            )


def _affixes(backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos: str | None, eos: str | None) -> Affixes:
    """What goes around a text where the configuration says so; on that side it overrides the post-processor of `tokenizer.json`.

    The other side keeps what that adds: embedding models have an end of text there, and say nothing of it in their configuration.
    """

    def ids(flag: str, token: str | None) -> tuple[int, ...] | None:
        if flag not in config:
            return None
        token_id = backend.token_to_id(token) if config.get(flag) and token is not None else None
        return () if token_id is None else (token_id,)

    return ids("add_bos_token", bos), ids("add_eos_token", eos)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: the configuration's, `chat_template.json`'s, those in files of their own; the later win."""
    found = _named_templates(config.get("chat_template"))
    if (folder / "chat_template.json").is_file():
        found |= _named_templates(read_json(folder / "chat_template.json").get("chat_template"))
    others = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    for name, path in {**others, "default": folder / "chat_template.jinja"}.items():
        if not path.is_file():
            continue
        try:
            found[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path} cannot be read: {error}") from None
    return {name: template for name, template in found.items() if template}


def _named_templates(value: Any) -> dict[str, str]:
    """One template is the default one; a list holds objects with `name` and `template`."""
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, Mapping)]
    return {name: template for name, template in pairs if isinstance(name, str) and isinstance(template, str)}


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character: itself where it is one, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
