"""A custom tool's input, out of the arguments in which a model writes it: {"input": "..."}, in pieces as they come."""

from __future__ import annotations

import codecs
import re

from halfbyte.entrypoints.responses.tools import INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MIGHT_OPEN = 256  # characters that are awaited before arguments are taken for something else
# A run of characters, an escape, or what looks like one and is none. An escape that may go on is left for the next piece.
_WRITTEN = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\(?:[^u]|u(?![0-9a-fA-F]{0,3}\Z))', re.DOTALL)
_ESCAPES = {'\\"': '"', "\\\\": "\\", "\\/": "/", "\\b": "\b", "\\f": "\f", "\\n": "\n", "\\r": "\r", "\\t": "\t"}


class CustomInput:
    """Arguments in, the text of `input` out. Arguments of another form are the input themselves, and told in the end.

    Half a pair of surrogates becomes U+FFFD; an escape that JSON does not have stands for itself.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._others: list[str] = []
        self._is_open = False
        self._is_over = False
        self._units = codecs.getincrementaldecoder("utf-16-le")("replace")  # puts pairs of surrogates together

    def feed(self, piece: str) -> str:
        if self._is_over:
            return ""
        if not self._is_open:
            return self._open(piece)
        return self._read(piece)

    def finish(self) -> str:
        """Of an input that was cut nothing more; of other arguments all."""
        return "" if self._is_open else self._rest + "".join(self._others)

    def _open(self, piece: str) -> str:
        if len(self._rest) >= _MIGHT_OPEN:
            self._others.append(piece)
            return ""
        self._rest += piece
        opening = _OPENING.match(self._rest, 0, _MIGHT_OPEN)
        if opening is None:
            return ""
        written, self._rest, self._is_open = self._rest[opening.end() :], "", True
        return self._read(written)

    def _read(self, piece: str) -> str:
        written, at, texts = self._rest + piece, 0, []
        while found := _WRITTEN.match(written, at):
            texts.append(_meaning(found[0]))
            at = found.end()
        self._rest = written[at:]
        self._is_over = self._rest.startswith('"')
        return self._units.decode("".join(texts).encode("utf-16-le", "surrogatepass"), self._is_over)


def _meaning(written: str) -> str:
    if written[0] != "\\":
        return written
    return chr(int(written[2:], 16)) if len(written) == 6 else _ESCAPES.get(written, written)
