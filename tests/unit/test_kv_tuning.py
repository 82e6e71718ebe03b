"""Tuning without a model: the choice against brute force, what budgets mean, and the command's flags, notes and table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.config import EngineOptions
from halfbyte.engine import kv_tuning
from halfbyte.engine.kv_plan import read_plan
from halfbyte.engine.kv_tuning import Bits, Judged, Option, Room, Tuning, bits_of, choose, pair_name, scaled, shared
from halfbyte.entrypoints import cli
from halfbyte.entrypoints.commands import kv_tune
from halfbyte.entrypoints.flags import UsageError
from halfbyte.errors import CapacityError
from halfbyte.kvcache.sizing import size_cache
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout

# Powers of two: their sums are exact, so that equals are equal in any order.
COSTS = st.sampled_from([0.0, *(2.0**-n for n in range(12))])
OPTIONS = st.lists(st.builds(Option, st.just(("a",)), st.integers(1, 9).map(lambda n: 48 * n), COSTS), min_size=1, max_size=5)
PLACES = st.lists(OPTIONS, min_size=1, max_size=5)


def least(places: Sequence[Sequence[Option]]) -> int:
    return sum(min(option.num_bytes for option in place) for place in places)


def totals(options: Sequence[Option]) -> tuple[float, int]:
    return sum(option.kl for option in options), sum(option.num_bytes for option in options)


@settings(deadline=None)  # the first call imports numpy
@given(PLACES, st.integers(0, 2000))
def test_the_choice_is_that_of_brute_force(places: list[list[Option]], spare_bytes: int) -> None:
    budget = least(places) + spare_bytes
    every = (totals(options) for options in product(*places))
    best_kl = min(kl for kl, num_bytes in every if num_bytes <= budget)
    chosen = choose(places, budget)
    assert all(option in place for option, place in zip(chosen, places, strict=True))
    kl, num_bytes = totals(chosen)
    assert num_bytes <= budget and kl == best_kl


@settings(deadline=None)  # the first call imports numpy
@given(PLACES, st.integers(0, 2000), st.integers(0, 2000))
def test_more_bytes_never_cost_more(places: list[list[Option]], spare_bytes: int, more_bytes: int) -> None:
    budget = least(places) + spare_bytes
    assert totals(choose(places, budget + more_bytes))[0] <= totals(choose(places, budget))[0]


def test_a_budget_below_the_least_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        choose([[Option(("a",), 96, 0.5)], [Option(("a",), 48, 0.5)]], 96)


def test_layers_of_one_position_have_the_best_that_fits_there() -> None:
    first = [Option(("a",), 16, 8.0), Option(("b",), 32, 2.0), Option(("c",), 64, 1.0)]
    second = [Option(("d",), 32, 4.0), Option(("e",), 32, 3.0), Option(("f",), 48, 5.0)]
    assert shared([first, second]) == [Option(("b", "e"), 32, 5.0), Option(("c", "e"), 64, 4.0)]


def test_other_formats_cost_as_their_noise() -> None:
    assert scaled(0.5, {"kv4": 8.0, "kv5": 2.0}) == {"kv4": 0.5, "kv5": 0.125}
    assert scaled(0.0, {"kv4": 0.0, "kv5": 0.0}) == {"kv4": 0.0, "kv5": 0.0}


def test_pairs_have_the_name_of_a_format_that_is_both() -> None:
    assert [pair_name("kv4", "kv4"), pair_name("kv5", "kv4")] == ["kv4", "k:kv5,v:kv4"]


def layout(formats: Sequence[int], windows: Sequence[int | None], first_tokens: int = 0) -> KVLayout:
    """Layers of 2 heads of 16 numbers in so many bits each."""
    specs = [
        KVCacheSpec(2, 16, 16, block_size=16, sliding_window=window, format=str(bits), first_tokens=first_tokens)
        for bits, window in zip(formats, windows, strict=True)
    ]
    return make_layout(specs, lambda spec: spec.block_size * 8 * int(spec.format.removeprefix("bfloat")))


def test_bits_are_those_of_the_block() -> None:
    plain, hybrid = layout([16] * 4, [None] * 4), layout([16] * 4, [None, None, 8, 8])
    assert bits_of(plain, plain) == 16
    assert bits_of(layout([4, 8, 4, 16], [None] * 4), plain) == 8
    assert bits_of(layout([4, 4, 4, 5], [None, None, 8, 8]), hybrid) == Fraction(9, 2), "the layer beside the wide one is padded"


def test_longer_blocks_of_narrow_layers_are_counted() -> None:
    """Two kinds of layers: the narrow ones get blocks of 32 tokens as soon as that makes blocks more alike."""
    hybrid, found = layout([16] * 4, [None, None, 8, 8]), layout([8, 8, 4, 4], [None, None, 8, 8])
    assert [group.block_size for group in found.groups] == [16, 32]
    assert bits_of(found, hybrid) == 6


@pytest.mark.parametrize("bits", [[4, 4, 4], [4, 4, 8], [8, 16, 8]])
def test_a_budget_of_bits(bits: list[int]) -> None:
    found, wide = layout(bits, [None] * 3), layout([16] * 3, [None] * 3)
    exact = bits_of(found, wide)
    assert Bits(exact).fits(found, wide) and not Bits(exact - Fraction(1, 1000)).fits(found, wide)
    assert Bits(exact).block_bytes(layout([4] * 3, [None] * 3), wide) == found.block_bytes
    assert Bits(exact).least(found, wide) == f"--bits {ceil(exact * 1000) / 1000}"


@pytest.mark.parametrize("windows", [[None] * 4, [None, 24, 24, 24]])
@pytest.mark.parametrize("num_tokens", [1, 100, 999, 5000])
def test_a_budget_of_tokens(windows: list[int | None], num_tokens: int) -> None:
    """It fits when the engine's own count of tokens says so; what stays within the bytes of a block does."""
    room, wide = Room(num_tokens, 1 << 18, 128, 64), layout([16] * 4, windows, 16)
    narrow = layout([4] * 4, windows, 16)
    limit = room.block_bytes(narrow, wide)
    for formats in product((4, 5, 8, 16), repeat=4):
        found = layout(formats, windows, 16)
        assert room.fits(found, wide) == (capacity(found, room) >= num_tokens), formats
        if found.block_bytes <= limit and block_sizes(found) == block_sizes(narrow):
            assert room.fits(found, wide), formats


def test_the_least_memory_for_tokens_is_enough() -> None:
    narrow = layout([4] * 4, [None] * 4, 16)
    words = Room(999, 1, 128, 64).least(narrow, narrow).split()
    assert (words[0], words[2:]) == ("--memory", ["for", "--tokens", "999"])
    assert Room(999, int(words[1]), 128, 64).fits(narrow, narrow)
    assert not Room(999, int(words[1]) - 1, 128, 64).fits(narrow, narrow)


def capacity(found: KVLayout, room: Room) -> int:
    try:
        return size_cache(
            found, room.memory_bytes, room.max_model_len, room.max_model_len, room.max_num_batched_tokens
        ).num_tokens
    except CapacityError:
        return 0


def block_sizes(found: KVLayout) -> list[int]:
    return [group.block_size for group in found.groups]


def options() -> EngineOptions:
    return EngineOptions(model="some/model")


@pytest.mark.parametrize(
    ("given_flags", "message"),
    [
        ({"bits": 4.7, "tokens": 100}, "--bits and --tokens both say"),
        ({"bits": 4.7, "memory": "1GiB"}, "--bits and --memory both say"),
        ({"tokens": 100}, "give --bits, or --tokens and --memory"),
        ({"memory": "1GiB"}, "give --bits, or --tokens and --memory"),
        ({}, "give --bits, or --tokens and --memory"),
    ],
)
def test_one_budget_is_asked_for(given_flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kv_tune.make_budget(given_flags, options())


def test_bits_are_taken_as_they_are_written() -> None:
    assert kv_tune.make_budget({"bits": 4.7}, options()) == Bits(Fraction(47, 10))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bits", "40"], "--bits must be in"),
        (["--bits", "many"], "--bits: 'many' is not a number"),
        (["--tokens", "0", "--memory", "1GiB"], "--tokens must be at least 1"),
        (["--tokens", "10", "--memory", "much"], "--memory: 'much' is not an amount of memory"),
        (["--bits", "5", "--output", "no/such/folder/plan.json"], "--output: 'no/such/folder/plan.json' must be a file"),
        (["--bits", "5", "--kv-cache-dtype", "kv4"], "unknown flag --kv-cache-dtype"),
    ],
)
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kv-tune", "some/model", *words]) == 2
    assert message in capsys.readouterr().err


def tuning(kl: float) -> Tuning:
    """A tuned plan of this KL beside a uniform one of 0.25."""
    tuned = Judged("tuned", ("kv4", "k:kv5,v:kv4"), 4.75, 1216, kl, 2.0)
    uniform = Judged("uniform kv4", ("kv4", "kv4"), 4.5, 1152, 0.25, 2.0)
    return Tuning("bfloat16", (tuned, uniform), ({"k": {"kv4": 0.5}, "v": {"kv4": 0.25}},) * 2, 100, 200)


@pytest.mark.parametrize(("kl", "best"), [(0.125, ["kv4", "k:kv5,v:kv4"]), (0.5, ["kv4", "kv4"])])
def test_the_command_writes_what_does_best(
    kl: float, best: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kv_tune, "tune", lambda options, budget, tell: asked.append((options.model, budget)) or tuning(kl))
    monkeypatch.setattr(kv_tune, "environment", lambda: {"command": ["halfbyte", "kv-tune"]})
    path = tmp_path / "plan.json"
    assert cli.main(["kv-tune", "some/model", "--bits", "4.75", "--output", str(path)]) == 0
    assert asked == [("some/model", Bits(Fraction(19, 4)))]
    assert read_plan(path) == best
    written, shown = json.loads(path.read_text()), capsys.readouterr().out
    assert [row["kl"] for row in written["judged"]] == [kl, 0.25]
    assert (written["asked"], written["environment"]) == ({"bits": 4.75}, {"command": ["halfbyte", "kv-tune"]})
    assert ("does better than what was tuned" in shown) == (kl > 0.25)
    assert f"halfbyte serve some/model --kv-cache-plan {path}" in shown


def test_a_plan_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_tune, "tune", lambda *rest: tuning(0.125))
    monkeypatch.setattr(kv_tune, "environment", dict)
    monkeypatch.setattr(kv_tune, "_check_output", lambda name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / kv_tune.DEFAULT_OUTPUT).mkdir()
    assert cli.main(["kv-tune", "some/model", "--bits", "5"]) == 1
    assert f"cannot write {kv_tune.DEFAULT_OUTPUT}: " in capsys.readouterr().err


def test_the_candidates_exist() -> None:
    from halfbyte.kvcache.formats import FORMATS

    assert {name for names in kv_tuning.SIDES.values() for name in names} | set(kv_tuning.UNIFORM) <= set(FORMATS)
    assert all(names[0] == kv_tuning.COARSEST for names in kv_tuning.SIDES.values())
