"""Adapters without a model: names, paths and flags, who may use which load, and the prefixes that each has to itself."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.adapters import LoraModule, LoRARequest, check_adapter_name, check_adapter_path, parse_lora_module
from halfbyte.config import EngineOptions
from halfbyte.engine.adapters import EngineAdapters
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.kvcache.prefix_hash import extend_hashes
from halfbyte.platform import platform_named
from halfbyte.resolve import ModelFacts, config_lines, resolve
from halfbyte.types import EngineRequest, SamplingParams

FACTS = ModelFacts(architecture="LlamaForCausalLM", dtype="bfloat16", max_position=2048, vocab_size=100)


def resolved(**options: Any) -> Any:
    return resolve(EngineOptions(**options), FACTS, platform_named("cpu"))


def test_flags() -> None:
    assert resolved().lora is None
    config = resolved(enable_lora=True, lora_modules=["a=/x", '{"name": "b", "path": "/y", "base_model_name": "m"}'])
    assert config.lora.modules == (LoraModule("a", "/x"), LoraModule("b", "/y", "m"))
    assert (config.lora.max_loras, config.lora.max_lora_rank) == (4, 16)
    assert "adapters: max_loras=4 max_lora_rank=16; at start: a, b" in config_lines(config)
    assert resolved(enable_lora=True, lora_modules=[f"{i}=/x" for i in range(6)]).lora.max_loras == 6


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_loras": 2}, "--max-loras needs --enable-lora"),
        ({"max_lora_rank": 8}, "--max-lora-rank needs --enable-lora"),
        ({"lora_modules": ["a=/x"]}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": True, "compile": "native"}, "--compile native does not compile adapters"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        resolved(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_loras": 0}, "--max-loras must be an integer"),
        ({"max_lora_rank": 513}, "--max-lora-rank must be an integer"),
        ({"lora_modules": ["a=/x", "a=/y"]}, "names 'a' twice"),
        ({"lora_modules": ["a=/x", "b=/y"], "max_loras": 1}, "names 2 adapters, --max-loras is 1"),
        ({"enable_lora": "yes"}, "--enable-lora must be true or false"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        resolved(**({"enable_lora": True} | options))


@pytest.mark.parametrize(
    "given", ["a", "=x", "a=", '{"name": "a"}', "{", {"name": "a", "path": "x", "rank": 1}, 7, "a/b=x", "a=../x"]
)
def test_modules_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(UserError):
        parse_lora_module(given)


def test_names_are_labels_and_paths_are_paths() -> None:
    for name in ("a", "my adapter", "ünïcode-7", "a..b", "x" * 128):
        assert check_adapter_name(name, "lora_name") == name
    for wrong in ("", " a", "a/b", "a\\b", ".", "..", "a\n", "\0", "x" * 129, "\u202eabc", None, 7, "\ud800"):
        with pytest.raises(UserError, match="lora_name must be 1 to 128"):
            check_adapter_name(wrong, "lora_name")
    for path in ("/x/y", "x", "~/x", "/x/a..b"):
        assert check_adapter_path(path, "lora_path") == path
    for wrong in ("", " ", "..", "a/../b", "a\0", "x" * 4097, None, 7):
        with pytest.raises(UserError, match="lora_path must"):
            check_adapter_path(wrong, "lora_path")
    for number in (0, -1, True, "1"):
        with pytest.raises(UserError, match="lora_int_id"):
            LoRARequest("a", number, "/x")  # type: ignore[arg-type]


class Holder:
    """A runner that only remembers which adapters it holds."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def add_adapter(self, adapter_id: int, path: str) -> None:
        if path == "wrong":
            raise UserError("wrong")
        self.held[adapter_id] = path

    def remove_adapter(self, adapter_id: int) -> None:
        del self.held[adapter_id]


def request(name: str, adapter_id: int) -> EngineRequest:
    return EngineRequest(name, [1], SamplingParams(), [], 0.0, 1, adapter_id=adapter_id)


def test_an_adapter_goes_when_its_last_request_has_ended() -> None:
    runner = Holder()
    adapters = EngineAdapters(runner, 2)  # type: ignore[arg-type]
    one, two = adapters.load("one"), adapters.load("two")
    with pytest.raises(UserError, match="--max-loras"):
        adapters.load("three")
    assert adapters.begin(request("a", one)) is None and adapters.begin(request("b", one)) is None
    adapters.unload(one)
    adapters.unload(one)
    assert "unloaded" in (adapters.begin(request("late", one)) or "")
    adapters.end("a")
    adapters.end("late")
    assert runner.held == {one: "one", two: "two"}
    adapters.end("b")
    adapters.end("b")
    assert runner.held == {two: "two"}
    with pytest.raises(UserError, match="wrong"):
        adapters.load("wrong", replaces=two)
    adapters.load("three")
    new = adapters.load("two again", replaces=two)
    adapters.unload(two)
    assert runner.held == {new - 1: "three", new: "two again"}
    assert new > max(one, two), "an id is never given twice"


def test_c27_every_load_has_prefixes_of_its_own() -> None:
    found = []
    for salt, content, adapter_id in [
        (None, b"", 0),
        (None, b"", 1),
        (None, b"", 2),
        ("s", b"", 1),
        ("s", b"", 0),
        (None, b"c", 1),
    ]:
        hashes: list[bytes] = []
        extend_hashes(hashes, list(range(8)), 4, salt, content, adapter_id)
        found.append(tuple(hashes))
        again: list[bytes] = []
        extend_hashes(again, list(range(4)), 4, salt, content, adapter_id)
        extend_hashes(again, list(range(8)), 4, salt, content, adapter_id)
        assert again == hashes
    assert len(set(found)) == len(found)
