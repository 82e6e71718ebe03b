"""Measured cuts of the attention kernels: candidates, the choice among them by a fake clock, the file, its log line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.config import EngineOptions
from halfbyte.engine import preload
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.kernels.triton.targets import SHARED_BYTES, Cut, Cuts, prompt_cut
from halfbyte.kernels.triton.tiles import (
    BUILT_IN,
    Choice,
    LayerKind,
    Measured,
    Table,
    Version,
    keep_table,
    read_tiles,
    tiles_path,
)
from halfbyte.kernels.triton.tuning import (
    Load,
    choose,
    decode_candidates,
    make_load,
    measure,
    prompt_candidates,
    shared_bytes,
)
from halfbyte.platform import platform_named

KIND = LayerKind(4, 128, 128, "kv4", "bfloat16")
DECODE, PROMPT = Cut(16, 32, 1, 3), Cut(128, 64, 8, 3)
VERSION = Version(1, "0123456789abcdef", "3.7.1")
LOAD = Load(8, 1024, 512, 1024, 1024)


@dataclass
class FakeTimer:
    """decode, prompt: seconds of a cut."""

    decode_seconds: Callable[[Cut], float | None]
    prompt_seconds: Callable[[Cut], float | None]
    built_in: Cuts = Cuts(DECODE, PROMPT)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def table(*kinds: LayerKind, device: str = "NVIDIA H200", date: str = "2026-11-30", tile: int = 64) -> Table:
    decode = Choice(replace(DECODE, tile=tile), 1e-5, DECODE, 2e-5)
    found = tuple(Measured(kind, decode, Choice(PROMPT, 1e-4, PROMPT, 1e-4), 8, 1024, 512, 1024) for kind in kinds)
    return Table(VERSION, "sm90", device, date, found)


@pytest.mark.parametrize("vector_bytes", [36, 256, 512, 2048])
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_candidates_fit(architecture: str, vector_bytes: int) -> None:
    kind = replace(KIND, heads=6)
    decode = list(decode_candidates(architecture, DECODE, vector_bytes))
    prompt = list(prompt_candidates(architecture, kind, vector_bytes))
    assert len(set(decode)) == len(decode) > 1 and len(set(prompt)) == len(prompt) > 1
    assert all(shared_bytes(cut, vector_bytes) <= SHARED_BYTES[architecture] for cut in decode + prompt)
    assert {cut.rows for cut in decode} == {DECODE.rows} and min(cut.rows for cut in prompt) >= kind.heads


def test_less_memory_leaves_fewer_candidates() -> None:
    counts = [len(list(prompt_candidates(name, KIND, 512))) for name in ("sm86", "sm80", "sm90")]
    assert counts == sorted(set(counts))


def test_the_tiles_of_a_prompt_hold_all_heads_of_a_query() -> None:
    assert {cut.rows for cut in prompt_candidates("sm90", replace(KIND, heads=71), 72)} == {128}


def test_the_fastest_wins() -> None:
    times = {DECODE: 3.0, Cut(16, 16, 1, 2): 2.0, Cut(16, 64, 2, 2): 1.0, Cut(16, 64, 4, 2): 1.5}
    assert choose(DECODE, times, times.__getitem__) == Choice(Cut(16, 64, 2, 2), 1.0, DECODE, 3.0)


def test_a_tie_keeps_the_built_in_cut() -> None:
    """Also what is faster by less than measurements differ."""
    for seconds in (1.0, 0.985):
        times = {Cut(16, 64, 2, 2): seconds, DECODE: 1.0}
        assert choose(DECODE, times, times.__getitem__) == Choice(DECODE, 1.0, DECODE, 1.0)


def test_a_cut_that_cannot_run_is_left_out() -> None:
    times = {DECODE: 2.0, Cut(16, 64, 2, 2): None, Cut(16, 16, 2, 2): 1.0}
    assert choose(DECODE, times, times.__getitem__).cut == Cut(16, 16, 2, 2)
    assert choose(DECODE, times, lambda cut: 2.0 if cut == DECODE else None).cut == DECODE


def test_measuring_tries_every_candidate_once_and_keeps_the_load() -> None:
    seen: list[Cut] = []

    def seconds(cut: Cut) -> float:
        seen.append(cut)
        return 1 / (cut.tile * cut.num_warps)

    found = measure(KIND, FakeTimer(seconds, seconds), LOAD, "sm90", 144)
    assert (found.decode.cut.tile, found.decode.cut.num_warps) == (64, 4)
    assert (found.prompt.cut.tile, found.prompt.cut.num_warps) == (128, 8)
    assert (found.requests, found.context, found.prompt_queries, found.prompt_context) == (8, 1024, 512, 1024)
    assert set(seen) >= {*decode_candidates("sm90", DECODE, 144), *prompt_candidates("sm90", KIND, 144)}
    assert len(seen) == len(set(seen))


def test_the_load_follows_the_engine_up_to_a_limit() -> None:
    assert make_load(4, 512, 256, 4096) == Load(4, 512, 256, 512, 512)
    large = make_load(1024, 1 << 20, 1 << 16, 4096)
    assert (large.requests, large.queries, large.prompt_context, large.longest) == (64, 2048, 16384, 1 << 20)
    assert large.requests * large.context * 4096 <= 1 << 30


def test_what_was_kept_is_what_a_start_uses() -> None:
    path = keep_table(table(KIND))
    first, second = read_tiles("sm90", VERSION), read_tiles("sm90", VERSION)
    assert first == second and path == tiles_path("sm90")
    assert first.cuts == {KIND: Cuts(Cut(16, 64, 1, 3), PROMPT)}
    assert read_tiles("sm80", VERSION) == BUILT_IN


def test_a_file_keeps_other_kinds_of_the_same_kernels_and_gpu() -> None:
    other = replace(KIND, kv_format="bfloat16")
    keep_table(table(KIND, other))
    keep_table(table(other, date="2026-12-01", tile=16))
    tiles = read_tiles("sm90", VERSION)
    assert {kind.kv_format: cuts.decode.tile for kind, cuts in tiles.cuts.items()} == {"kv4": 64, "bfloat16": 16}
    assert tiles.date == "2026-12-01"
    keep_table(table(other, device="NVIDIA H100"))
    assert list(read_tiles("sm90", VERSION).cuts) == [other]


@pytest.mark.parametrize(
    "version", [replace(VERSION, kernels="f" * 16), replace(VERSION, triton="3.8.0")], ids=["kernels", "triton"]
)
def test_a_file_of_other_kernels_is_not_used(version: Version) -> None:
    path = keep_table(table(KIND))
    tiles = read_tiles("sm90", version)
    assert not tiles.cuts
    line = tiles.line([KIND])
    assert line == (f"attention tiles: built in: {path} is of other kernels and is not used: run halfbyte preload --autotune")
    keep_table(replace(table(replace(KIND, heads=8)), made_for=version))
    assert [kind.heads for kind in read_tiles("sm90", version).cuts] == [8]


def test_the_log_says_which_are_used() -> None:
    assert BUILT_IN.line([KIND]) == "attention tiles: built in"
    path = keep_table(table(KIND))
    tiles, other = read_tiles("sm90", VERSION), replace(KIND, heads=8)
    assert tiles.line([KIND]) == f"attention tiles: tuned on 2026-11-30 by {path}"
    assert tiles.line([KIND, other]).endswith(f"by {path}, for 1 of 2 kinds of layer; built in for the rest")
    assert tiles.line([other]) == (
        f"attention tiles: built in: {path} has no layers like this model's: run halfbyte preload --autotune"
    )


def damage(found: dict[str, Any], name: str) -> str:
    decode = found["measured"][0]["decode"]["cut"]
    if name == "no cut":
        del found["measured"][0]["decode"]["cut"]
    elif name == "text for a number":
        decode["tile"] = "64"
    elif name in decode:
        decode[name] = {"rows": 8, "tile": 48, "num_warps": 3, "stages": 0}[name]
    elif name == "few rows":
        found["measured"][0]["kind"]["heads"] = 17
    elif name == "another GPU":
        found["architecture"] = "sm80"
    text = json.dumps(found)
    return text[: len(text) // 2] if name == "cut off" else "[]" if name == "a list" else text


NAMES = ["no cut", "text for a number", "rows", "tile", "num_warps", "stages", "few rows", "another GPU", "cut off", "a list"]


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_named(name: str) -> None:
    path = keep_table(table(KIND))
    path.write_text(damage(json.loads(path.read_text()), name))
    with pytest.raises(UserError, match="cannot be used.*delete the file, or run halfbyte preload --autotune") as caught:
        read_tiles("sm90", VERSION)
    assert str(path) in str(caught.value)
    keep_table(table(KIND))  # as the message says
    assert list(read_tiles("sm90", VERSION).cuts) == [KIND]


def test_a_cpu_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the model is not looked for")

    monkeypatch.setattr(preload, "find_model", never)
    with pytest.raises(UnsupportedError, match="--autotune is for GPUs: the CPU kernels are cut by instruction set"):
        preload.autotune(EngineOptions(model="nobody/has-this", device="cpu"), lambda _: None)
    assert preload.refuse_autotune(platform_named("gfx942")) is None


def test_the_built_in_cuts_are_cuts_that_a_file_may_have() -> None:
    for heads in (1, 6, 16, 71):
        prompt = prompt_cut("sm90", heads, 128)
        kind = replace(KIND, heads=heads)
        decode = Choice(Cut(max(16, 1 << (heads - 1).bit_length()), 32, 1, 3), 1.0, DECODE, 1.0)
        keep_table(replace(table(), measured=(Measured(kind, decode, Choice(prompt, 1.0, prompt, 1.0), 1, 1, 1, 1),)))
        assert read_tiles("sm90", VERSION).cuts[kind].prompt == prompt
