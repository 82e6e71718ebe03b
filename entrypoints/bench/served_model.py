"""The server that `bench serve` measures, as it is asked before the run: is it ready, what does it serve, how does it tokenise.

Knows the public routes of an OpenAI-compatible server and nothing of the run. `find_tokenizer` prefers a tokenizer of this
machine and falls back on the server's own. Called by `bench serve`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from halfbyte.config import EngineOptions
from halfbyte.engine.front import find_model
from halfbyte.engine.tokenizer import Tokenizer, load_tokenizer
from halfbyte.entrypoints.http_client import Server
from halfbyte.errors import HalfbyteError
from halfbyte.model_runner.catalogue import CATALOGUE

_TIMEOUT_S = 60.0
_POLL_S = 0.5
_RESET_PATH = "/reset_prefix_cache"
# Letters of several scripts, digits and signs: their tokens lie far apart in any vocabulary.
_SAMPLE_TEXT = "".join(map(chr, range(0x20, 0x250))) + "the quick brown fox jumps over the lazy dog 0123456789"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: what requests call it. root: where its server found it, "" when the server does not say."""

    name: str
    root: str = ""


class MeasuredServer(Server):
    """The server of a run. Everything that fails is a HalfbyteError of one line."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        super().__init__(base_url, headers, _TIMEOUT_S, "set --base-url, or --host and --port")

    def model(self, name: str | None) -> ServedModel:
        """The served model of that name, or the first one. A server that lists none can still be asked by name."""
        try:
            cards = self.call("GET", "/v1/models")["data"]
            found = [ServedModel(str(card["id"]), str(card.get("root") or "")) for card in cards]
        except HalfbyteError:
            if name is None:
                raise
            found = []
        except (LookupError, TypeError, AttributeError):
            found = []
        for model in found:
            if name in (None, model.name):
                return model
        if name is None:
            raise HalfbyteError(f"{self.url}/v1/models lists no model; name one with --model")
        return ServedModel(name)

    def wait_until_ready(
        self,
        probe: Callable[[], object],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Call `probe` until it raises no HalfbyteError."""
        deadline_s = clock() + timeout_s
        while True:
            try:
                probe()
                return
            except HalfbyteError as error:
                if clock() >= deadline_s:
                    raise HalfbyteError(f"not ready within --ready-check-timeout-sec {timeout_s:g}: {error}") from None
            sleep(_POLL_S)

    def ask(self, path: str, body: bytes) -> None:
        """Send one request and wait for its whole answer."""
        self.send("POST", path, content=body, headers={"Content-Type": "application/json"})

    def reset_prefix_cache(self, headers: Mapping[str, str]) -> None:
        """Have the server forget its prefixes; vLLM's answers nothing when it has. `headers` bring the key of operators."""
        body = self.send("POST", _RESET_PATH, headers=dict(headers))
        try:
            success = not body or msgspec.json.decode(body)["success"] is True
        except (msgspec.DecodeError, LookupError, TypeError):
            success = False
        if not success:
            raise HalfbyteError(f"{self.url}{_RESET_PATH} did not empty the cache, which other requests may hold")

    def tokenizer_call(self, path: str, body: Mapping[str, Any], key: str) -> Any:
        """`key` of what the server's /tokenize or /detokenize answers."""
        try:
            return self.call("POST", path, json=body)[key]
        except (LookupError, TypeError):
            raise HalfbyteError(f"{self.url}{path} answers without {key!r}") from None


class ServerTokenizer:
    """A tokenizer behind /tokenize and /detokenize, with the part of `engine.tokenizer.Tokenizer` that datasets use.

    vocab_size: a lower bound; every id below it exists.
    """

    def __init__(self, server: MeasuredServer, model: str) -> None:
        self._server = server
        self._model = model

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": add_special_tokens}
        return [int(token_id) for token_id in self._server.tokenizer_call("/tokenize", body, "tokens")]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._server.tokenizer_call("/detokenize", {"model": self._model, "tokens": list(token_ids)}, "prompt"))

    @cached_property
    def vocab_size(self) -> int:
        return max(self.encode(_SAMPLE_TEXT, add_special_tokens=False)) + 1


def find_tokenizer(name: str | None, model: ServedModel, server: MeasuredServer) -> tuple[str, Tokenizer | ServerTokenizer]:
    """A name and a tokenizer: the one asked for, else the served model's if that is on this machine, else the server's own."""
    if name is not None:
        return name, load_tokenizer(find_model(name, EngineOptions()))
    for place in (model.root, model.name):
        if place in CATALOGUE or (place and os.path.exists(place)):
            return place, load_tokenizer(find_model(place, EngineOptions()))
    tokenizer = ServerTokenizer(server, model.name)
    try:
        tokenizer.vocab_size  # noqa: B018 - asks the server
    except (HalfbyteError, ValueError) as error:
        raise HalfbyteError(
            f"there is no tokenizer for {model.name!r}: it is no model on this machine, and "
            f"its server has none for us ({error}); name one with --tokenizer"
        ) from None
    return f"{server.url}/tokenize", tokenizer
