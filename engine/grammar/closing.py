"""How an answer is brought to its end while there is room: short ways from any state of a grammar to one in which it may end.

Knows matchers, the bytes of tokens and what JSON looks like; knows no requests, no devices and no clocks: the same tokens get
the same masks on every machine. `Vocabulary` is made once per engine, `Closing` once per request for `constraint`.

Letter W: words of a mask row, see `rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from halfbyte.engine.grammar.rows import allow, ids_of, num_words, row_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from halfbyte.engine.grammar.compile import GrammarCompiler
    from halfbyte.engine.tokenizer import Tokenizer

MAX_PATH_TOKENS = 512
# How many tokens are looked at one by one, where few are left. Of others only those that keep an answer as it is are allowed.
MAX_LOOKED_AT = 16
MAX_TRIED = 24
# What one token may add to the way to the end beyond what was seen when the grammar was walked through.
SPARE_TOKENS = 4
_MAX_STATES = 200
# JSON takes this nowhere outside of a text, and in a text almost always.
_TEXT = ("Z", "~")
# What ends JSON soonest, the best first: within a text, and elsewhere, where it must not begin a text that it means to end.
_IN_TEXT = ('"}]}', '"]}', '"}}', '"}]', '"}', '"]', '":"",', '","', '"')
_ELSEWHERE = ("}]}", "}}", "]}", "}]", "]]", "}", "]", ":", ',"', ",", '""', '"', "{}", "[]", "0", "null", "n", "{", "[")
_SIGNS = frozenset(bytes([byte]) for byte in range(0x21, 0x7F) if not chr(byte).isalnum())
_STRUCTURAL = frozenset(b'"\\{}[],:')


class Vocabulary:
    """What closing knows of the tokens. plain_W: those of whole characters without JSON's signs, as a mask row."""

    def __init__(self, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
        self._library = compiler.library_tokenizer
        self._num_words = num_words(compiler.vocab_size)
        wanted = {text.encode() for text in (*_TEXT, *_IN_TEXT, *_ELSEWHERE)}
        known: dict[bytes, int] = {}
        plain: list[int] = []
        signs: list[int] = []
        by_length: dict[int, list[int]] = {}
        for token_id in range(min(tokenizer.vocab_size, compiler.vocab_size)):
            text = b"" if token_id in tokenizer.special_ids else tokenizer.token_bytes(token_id)
            if not text:
                continue
            by_length.setdefault(0 if text.isspace() else len(text), []).append(token_id)
            if _is_plain(text):
                plain.append(token_id)
            if text in _SIGNS:
                signs.append(token_id)
            if text in wanted:
                known.setdefault(text, token_id)
        self._text, self._in_text, self._elsewhere = (
            [known[text.encode()] for text in texts if text.encode() in known] for texts in (_TEXT, _IN_TEXT, _ELSEWHERE)
        )
        self.plain_W, self._signs_W = (row_of(ids, compiler.vocab_size) for ids in (plain, signs))
        blank_W = row_of(by_length.pop(0, []), compiler.vocab_size)
        lengths = [row_of(by_length[length], compiler.vocab_size) for length in sorted(by_length)]
        self._shortest_first = np.stack([*lengths, blank_W])
        self._longest_first = np.stack([*reversed(lengths), blank_W])

    def path(self, matcher: LLMatcher, limit: int = MAX_PATH_TOKENS, *, tries_all: bool = False) -> list[int] | None:
        """At most `limit` tokens after which the answer may end; [] where it may already, None when none were found.

        The first that leads on, of: what must come, what would end JSON, what could not have come one token before, and the
        token of the most bytes. tries_all: where first there is a choice between few, the best of all. Not always the shortest.
        """
        matcher = matcher.deep_copy()
        path: list[int] = []
        before_W: np.ndarray | None = None
        while not matcher.is_accepting():
            if len(path) >= limit or matcher.is_stopped():
                return None
            tokens = self._forced(matcher) or self._closer(matcher, path)
            if not tokens:
                allowed_W = self.allowed(matcher)
                if tries_all and before_W is None and len(ids := ids_of(allowed_W, MAX_TRIED + 1)) <= MAX_TRIED:
                    ways = [way for token in ids if (way := self._path_by(matcher, token, limit - len(path)))]
                    return path + min(ways, key=len) if ways else None
                better_W = self._signs_W if before_W is None else ~before_W
                tokens = self.shortest(allowed_W & better_W) or self.longest(allowed_W)
                before_W = allowed_W
            if not tokens or not matcher.consume_tokens(tokens):
                return None
            path += tokens
        return path if len(path) <= limit else None

    def longest_way(self, matcher: LLMatcher, path: list[int]) -> tuple[int | None, list[int]]:
        """Of some tokens that may come next, the one with the longest way to the end, and that; `path`: the way without it."""
        row_W = self.allowed(matcher)
        tokens = ids_of(row_W, MAX_TRIED + 1)
        if len(tokens) > MAX_TRIED:
            tokens = ids_of(row_W & self._signs_W) + self.shortest(row_W) + self.longest(row_W)
        longest: tuple[int | None, list[int]] = None, []
        for token in tokens:
            after = matcher.deep_copy()
            if not after.consume_token(token):
                continue
            way = path if self.leads_to_end(after, path) else self.path(after, tries_all=True)
            if way is not None and (longest[0] is None or len(way) > len(longest[1])):
                longest = token, way
        return longest

    def leads_to_end(self, matcher: LLMatcher, path: list[int]) -> bool:
        """Whether the answer may end after these tokens. Changes nothing."""
        if matcher.validate_tokens(path) < len(path):
            return False
        after = matcher.deep_copy()
        return after.consume_tokens(path) and after.is_accepting()

    def allowed(self, matcher: LLMatcher) -> np.ndarray:
        """The mask row of what may come next."""
        row_W = np.zeros(self._num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(row_W.ctypes.data, row_W.nbytes)
        return row_W

    def shortest(self, row_W: np.ndarray) -> list[int]:
        """A token of the fewest bytes, if there is any; blanks last."""
        return _first(row_W, self._shortest_first)

    def longest(self, row_W: np.ndarray) -> list[int]:
        """A token of the most bytes, if there is any; blanks last."""
        return _first(row_W, self._longest_first)

    def _path_by(self, matcher: LLMatcher, token_id: int, limit: int) -> list[int] | None:
        after = matcher.deep_copy()
        rest = self.path(after, limit - 1) if after.consume_token(token_id) else None
        return None if rest is None else [token_id, *rest]

    def _forced(self, matcher: LLMatcher) -> list[int]:
        """Tokens for what must come, if anything must."""
        text = matcher.compute_ff_bytes().decode(errors="ignore")
        tokens = self._library.greedy_tokenize(text) if text else []
        return tokens if matcher.validate_tokens(tokens) == len(tokens) else []

    def _closer(self, matcher: LLMatcher, path: list[int]) -> list[int]:
        """The token that JSON would end with; none again that the path ends with, which might go on for ever."""
        in_text = any(matcher.validate_tokens([token]) for token in self._text)
        closers = self._in_text if in_text else self._elsewhere
        return next(([token] for token in closers if [token] != path[-1:] and matcher.validate_tokens([token])), [])


class Closing:
    """The way to the end of one request's answer. reach: by how much one token can make it longer, as far as is known."""

    def __init__(self, vocabulary: Vocabulary, reach: int) -> None:
        self._vocabulary = vocabulary
        self._margin = reach + SPARE_TOKENS
        self._path: list[int] | None = None
        self._look_at: int | None = None  # look again when no more tokens than this are left; None: at once

    def num_needed(self, matcher: LLMatcher) -> int:
        """How many tokens an answer needs from here, with something to spare."""
        return len(self._vocabulary.path(matcher, tries_all=True) or ()) + self._margin

    def advance(self, token_id: int) -> None:
        """A token was appended to the answer."""
        if self._path and self._path[0] == token_id:
            self._path = self._path[1:]

    def restrict(self, matcher: LLMatcher, row_W: np.ndarray, num_left: int) -> None:
        """Take out of a row what would leave no room to come to an end with the `num_left` tokens that may follow.

        Looks only now and then while there is room: each token adds at most the margin, so nothing can happen before.
        """
        if self._look_at is not None and num_left > self._look_at:
            return
        limit = min(num_left, MAX_PATH_TOKENS)
        known, found = self._path, self._vocabulary.path(matcher, limit)
        if known is not None and (found is None or len(known) < len(found)) and self._vocabulary.leads_to_end(matcher, known):
            found = known
        if found is None:
            found = self._vocabulary.path(matcher, limit, tries_all=True)
        self._path = found
        if found is None or len(found) > num_left:
            self._look_at = num_left // 2  # it cannot end in time, or nobody knows how: perhaps later
        elif (room := num_left - len(found)) > self._margin:
            self._look_at = num_left - max(1, (room - self._margin) // (self._margin + 1))
        else:
            self._look_at = num_left
            self._keep_safe(matcher, row_W, found, num_left - 1)

    def _keep_safe(self, matcher: LLMatcher, row_W: np.ndarray, path: list[int], num_left: int) -> None:
        """Leave the tokens after which at most `num_left` more are needed."""
        allowed_W = row_W.copy()
        row_W[:] = 0
        if path:
            allow(row_W, path[0])
        one_by_one = ids_of(allowed_W, MAX_LOOKED_AT + 1)
        if len(one_by_one) > MAX_LOOKED_AT:
            plain_W = allowed_W & self._vocabulary.plain_W
            samples = self._vocabulary.shortest(plain_W) + self._vocabulary.longest(plain_W)
            if len(path) <= num_left and samples and all(self._is_safe(matcher, token, path, num_left) for token in samples):
                row_W |= plain_W
            one_by_one = ids_of(allowed_W & ~plain_W, MAX_LOOKED_AT)
        for token in one_by_one:
            if self._is_safe(matcher, token, path, num_left):
                allow(row_W, token)

    def _is_safe(self, matcher: LLMatcher, token_id: int, path: list[int], num_left: int) -> bool:
        after = matcher.deep_copy()
        if not after.consume_token(token_id):
            return False
        if len(path) <= num_left and self._vocabulary.leads_to_end(after, path):
            return True
        return self._vocabulary.path(after, num_left) is not None


def reach_of(vocabulary: Vocabulary, start: LLMatcher) -> int:
    """By how many tokens one token can lengthen the way to the end, as far as some walks through the grammar show.

    A walk goes the short way to the end, and looks at each step what could be opened there. What opens most is where the next
    walk begins.
    """
    most, num_states = 1, 0
    walks = [(0, start.deep_copy(), vocabulary.path(start, tries_all=True))]
    while walks:
        _, matcher, path = walks.pop(max(range(len(walks)), key=lambda i: walks[i][0]))
        while path is not None and num_states < _MAX_STATES:
            num_states += 1
            token, way = vocabulary.longest_way(matcher, path)
            longer = len(way) - len(path) + 1
            if token is not None and longer > 1:
                most = max(most, longer)
                opened = matcher.deep_copy()
                opened.consume_token(token)
                walks.append((longer, opened, way))
            if not path or not matcher.consume_token(path[0]):
                break
            path = path[1:]
    return most


def _first(row_W: np.ndarray, groups_GW: np.ndarray) -> list[int]:
    """The first token of the first of G groups that the row has any of."""
    common_GW = groups_GW & row_W
    return ids_of(common_GW[common_GW.any(1).argmax()], 1)


def _is_plain(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return min(text) >= 0x20 and not _STRUCTURAL.intersection(text)
