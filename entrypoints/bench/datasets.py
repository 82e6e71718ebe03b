"""What the benchmarks ask: prompts and answer lengths, drawn from a seed. Flags and defaults are vLLM's.

Synthetic prompts have exact token counts in either form: the text encodes to just the ids that stand beside it. Prompts of
files travel as text, as a client sends them. Knows tokenizers and no engine. Called by `bench throughput`, `latency` and `serve`.
"""

from __future__ import annotations

import json
import math
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halfbyte.entrypoints.bench.shared_flags import count_flag, range_check
from halfbyte.entrypoints.flags import Flag, UsageError
from halfbyte.errors import HalfbyteError, UserError

DEFAULT_DATASET = "random"
DEFAULTS: Mapping[str, Any] = {
    "random_input_len": 1024,
    "random_output_len": 128,
    "random_range_ratio": 0.0,
    "random_prefix_len": 0,
    "prefix_repetition_prefix_len": 256,
    "prefix_repetition_suffix_len": 256,
    "prefix_repetition_num_prefixes": 10,
    "prefix_repetition_output_len": 128,
    "custom_output_len": 256,
}
# Conversations that vLLM leaves out of a sharegpt file too: shorter than this, or longer than these.
_SHAREGPT_MIN_TOKENS, _SHAREGPT_MAX_PROMPT_TOKENS, _SHAREGPT_MAX_TOKENS = 4, 1024, 2048
_MAX_WORDS = 1024
_NUM_ATTEMPTS = 20


class TextTokenizer(Protocol):
    """The part of `halfbyte.engine.tokenizer.Tokenizer` that datasets use."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt and the tokens that are asked for. prompt_token_ids: None where the prompt travels as text.

    num_prompt_tokens counts the special tokens that encoding adds.
    """

    prompt_token_ids: list[int] | None
    prompt: str
    num_prompt_tokens: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Sample:
    """prefix_share: the part of all prompt tokens that stand in a prefix of another prompt before them (0 to 1).

    It is what an unlimited prefix cache could answer.
    """

    requests: list[BenchRequest]
    prefix_share: float


Settings = Mapping[str, Any]
Builder = Callable[[Settings, TextTokenizer, int, random.Random], list[BenchRequest]]


def load_requests(name: str, settings: Settings, tokenizer: TextTokenizer, num_prompts: int, seed: int) -> Sample:
    """`num_prompts` requests of a dataset; `settings` are the given flags by field, those of other commands are not looked at.

    The same seed gives the same requests. UsageError for a flag that the dataset does not have, or lacks.
    """
    for flag in DATASET_FLAGS:
        if flag.target in settings and not _belongs(flag, name):
            raise UsageError(f"--{flag.name} is not for --dataset-name {name}; it takes {_flags_of(name)}")
    requests = DATASETS[name]({**DEFAULTS, **settings}, tokenizer, num_prompts, random.Random(seed))
    return Sample(requests, prefix_share([r.prompt_token_ids or tokenizer.encode(r.prompt) for r in requests]))


def fresh_seed() -> int:
    """A seed that no run before had, so that no cache of an earlier run holds its prompts."""
    return secrets.randbits(32)


def prefix_share(prompts: Sequence[list[int]]) -> float:
    """The part of all tokens that a prompt before has had at the same place after the same tokens."""
    ordered = sorted(prompts)  # the longest common prefix is now with a neighbour, and each is counted once
    num_shared = sum(_num_equal(first, second) for first, second in zip(ordered, ordered[1:], strict=False))
    return num_shared / max(1, sum(map(len, prompts)))


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class WordPrompts:
    """Prompts of random words, each of them one token whatever stands around it."""

    def __init__(self, tokenizer: TextTokenizer, rng: random.Random) -> None:
        self._tokenizer, self._rng = tokenizer, rng
        self._words = _whole_words(tokenizer, rng)
        around = tokenizer.encode(tokenizer.decode(self._words[:1]))
        at = around.index(self._words[0]) if self._words[0] in around else len(around)
        self._before, self._after = around[:at], around[at + 1 :]

    def words(self, count: int) -> list[int]:
        return self._rng.choices(self._words, k=count)

    def draw(self, num_tokens: int, output_len: int, prefix: Sequence[int] = ()) -> BenchRequest:
        """A prompt of exactly `num_tokens`, special tokens included, whose words begin with `prefix`."""
        num_special = len(self._before) + len(self._after)
        num_words = num_tokens - num_special - len(prefix)
        if num_words < 0 or num_words + len(prefix) < 1:
            least = len(prefix) + num_special + (not prefix)
            raise UserError(f"prompts of {num_tokens} tokens are too short: this tokenizer needs {least} ({num_special} special)")
        for _ in range(_NUM_ATTEMPTS):
            words = [*prefix, *self.words(num_words)]
            text, token_ids = self._tokenizer.decode(words), [*self._before, *words, *self._after]
            if self._tokenizer.encode(text) == token_ids:
                return BenchRequest(token_ids, text, num_tokens, output_len)
        raise HalfbyteError("this tokenizer reads its own words differently each time they are joined; use --dataset-name custom")


def _whole_words(tokenizer: TextTokenizer, rng: random.Random) -> list[int]:
    """Up to _MAX_WORDS tokens that are ASCII words, and stay one token when words stand beside them."""
    found: list[int] = []
    for token_id in rng.sample(range(tokenizer.vocab_size), tokenizer.vocab_size):
        text = tokenizer.decode([token_id, token_id])
        first, *others = text.split() or [""]
        if others == [first] and first.isascii() and first.isalpha() and tokenizer.encode(text, False) == [token_id, token_id]:
            found.append(token_id)
            if len(found) == _MAX_WORDS:
                break
    if not found:
        raise HalfbyteError("this tokenizer has no token that is a word by itself; use --dataset-name custom")
    return found


def _random(settings: Settings, tokenizer: TextTokenizer, num_prompts: int, rng: random.Random) -> list[BenchRequest]:
    """A common prefix, then words of its own: lengths uniform within --random-range-ratio of the given ones."""
    ratio = settings["random_range_ratio"]
    inputs, outputs = (_around(settings[name], ratio) for name in ("random_input_len", "random_output_len"))
    prompts = WordPrompts(tokenizer, rng)
    prefix = prompts.words(settings["random_prefix_len"])
    return [prompts.draw(len(prefix) + rng.choice(inputs), rng.choice(outputs), prefix) for _ in range(num_prompts)]


def _around(length: int, ratio: float) -> range:
    return range(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)) + 1)


def _prefix_repetition(settings: Settings, tokenizer: TextTokenizer, num_prompts: int, rng: random.Random) -> list[BenchRequest]:
    """Each prefix begins an equal number of prompts (give or take one), in random order."""
    prefix_len, suffix_len, num_prefixes, output_len = (
        settings[f"prefix_repetition_{name}"] for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len")
    )
    if num_prompts < num_prefixes:
        raise UsageError(f"--num-prompts {num_prompts} cannot use --prefix-repetition-num-prefixes {num_prefixes}; lower it")
    prompts = WordPrompts(tokenizer, rng)
    prefixes = [prompts.words(prefix_len) for _ in range(num_prefixes)]
    requests = [prompts.draw(prefix_len + suffix_len, output_len, prefixes[i % num_prefixes]) for i in range(num_prompts)]
    rng.shuffle(requests)
    return requests


def _sharegpt(settings: Settings, tokenizer: TextTokenizer, num_prompts: int, rng: random.Random) -> list[BenchRequest]:
    """First turns of conversations, in random order; the second turn says how long the answer is."""
    path = _path(settings, "sharegpt")
    try:
        conversations = [item["conversations"] for item in json.loads(_read(path))]
        turns = [(str(turns[0]["value"]), str(turns[1]["value"])) for turns in conversations if len(turns) >= 2]
    except (ValueError, TypeError, LookupError):
        raise UserError(f"{path} is not a sharegpt file: a JSON list of {{'conversations': [{{'value': text}}, ...]}}") from None

    def usable() -> Iterator[BenchRequest]:
        for prompt, answer in rng.sample(turns, len(turns)):
            num_prompt, num_answer = len(tokenizer.encode(prompt)), len(tokenizer.encode(answer, False))
            output_len = settings.get("sharegpt_output_len", num_answer)
            is_long = num_prompt > _SHAREGPT_MAX_PROMPT_TOKENS or num_prompt + output_len > _SHAREGPT_MAX_TOKENS
            if min(num_prompt, num_answer) >= _SHAREGPT_MIN_TOKENS and not is_long:
                yield BenchRequest(None, prompt, num_prompt, output_len)

    return _take(usable(), num_prompts, path)


def _custom(settings: Settings, tokenizer: TextTokenizer, num_prompts: int, rng: random.Random) -> list[BenchRequest]:
    """Lines of {"prompt": text} in random order; `output_tokens` of a line goes before --custom-output-len."""
    path = _path(settings, "custom")
    entries: list[tuple[str, int]] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, output_len = entry["prompt"], entry.get("output_tokens", settings["custom_output_len"])
        except (ValueError, TypeError, LookupError, AttributeError):
            prompt, output_len = None, None
        if not isinstance(prompt, str) or type(output_len) is not int or output_len < 1:
            raise UserError(f'{path}:{number} is not {{"prompt": text}}, with "output_tokens" of 1 or more if it has them')
        entries.append((prompt, output_len))
    drawn = rng.sample(entries, min(num_prompts, len(entries)))
    return _take((BenchRequest(None, text, len(tokenizer.encode(text)), length) for text, length in drawn), num_prompts, path)


def _take(requests: Iterator[BenchRequest], num_prompts: int, path: Path) -> list[BenchRequest]:
    taken = [request for request, _ in zip(requests, range(num_prompts), strict=False)]
    if len(taken) < num_prompts:
        # the second time a prompt comes, it is answered from the prefix cache
        raise UserError(f"{path} has {len(taken)} prompts that can be used and {num_prompts} are needed; lower --num-prompts")
    return taken


def _path(settings: Settings, name: str) -> Path:
    if "dataset_path" not in settings:
        raise UsageError(f"--dataset-name {name} needs a file: --dataset-path FILE")
    return Path(settings["dataset_path"])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--dataset-path: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--dataset-path: {path} is not UTF-8 text") from None


DATASETS: dict[str, Builder] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
}
_FROM_FILES = ("sharegpt", "custom")


def _belongs(flag: Flag, name: str) -> bool:
    return (
        flag.target == "dataset_name" or (flag.target == "dataset_path" and name in _FROM_FILES) or flag.target.startswith(name)
    )


def _flags_of(name: str) -> str:
    return ", ".join(f"--{flag.name}" for flag in DATASET_FLAGS if _belongs(flag, name) and flag.target != "dataset_name")


def _length(name: str, meaning: str, least: int = 1) -> Flag:
    return count_flag(name, meaning, DEFAULTS[name.replace("-", "_")], least, group="dataset")


DATASET_FLAGS: tuple[Flag, ...] = (
    Flag(
        name="dataset-name",
        help=f"where prompts come from (default: {DEFAULT_DATASET})",
        choices=lambda: tuple(DATASETS),
        group="dataset",
    ),
    Flag(name="dataset-path", help="file of sharegpt (JSON) or custom (JSONL)", group="dataset"),
    _length("random-input-len", "prompt tokens after the common prefix"),
    _length("random-output-len", "tokens of each answer"),
    Flag(
        name="random-range-ratio",
        help="lengths lie between 1 - this and 1 + this times the given ones (default: 0)",
        kind="number",
        check=range_check("random-range-ratio", 0, 1, below=True),
        group="dataset",
    ),
    _length("random-prefix-len", "tokens of a prefix that all prompts share, before the others", least=0),
    count_flag("sharegpt-output-len", "tokens of each answer", "as in the file", group="dataset"),
    _length("prefix-repetition-prefix-len", "tokens of each prefix", least=0),
    _length("prefix-repetition-suffix-len", "tokens after the prefix"),
    _length("prefix-repetition-num-prefixes", "how many different prefixes"),
    _length("prefix-repetition-output-len", "tokens of each answer"),
    _length("custom-output-len", "tokens of an answer whose line has no output_tokens"),
)
