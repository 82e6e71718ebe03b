"""Which KV format each layer gets: what each layer's K and V cost in few bits, measured, and the choice that costs least.

To first order the KL of a model over a quantised cache is the sum of what each layer's K and each layer's V cause alone, and each
grows with the square of the noise. So one pass per layer and side, with a coarse format there and the model's dtype everywhere
else, finds how sensitive it is; other formats follow from how much less noise they make on the same heads. Bytes are those of
blocks as they are allocated (`make_layout`). What was chosen is then judged on other texts, beside simpler rules of equal bytes.

Knows the runner, scoring and calibrations; knows no flag. Called by `halfbyte kv-tune`.

Shape letters: T tokens, H heads, G kv heads, M queries of a kv head, D head dim, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import ceil, gcd
from typing import TYPE_CHECKING, Literal, cast

from halfbyte.config import EngineConfig, EngineOptions
from halfbyte.engine.build import build_engine
from halfbyte.engine.front import Front, load_front
from halfbyte.engine.kv_calibration import STEP_TOKENS, new_manager, plain_runner, prepare_parts, token_windows
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.sizing import blocks_for_request
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, Plane
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.texts import calibration_files, sample_files
from halfbyte.platform import Platform, detect_platform

if TYPE_CHECKING:
    from torch import Tensor

    from halfbyte.kvcache.formats.base import Side
    from halfbyte.kvcache.tensors import LayerParts
    from halfbyte.model_runner.head_taps import Heads
    from halfbyte.model_runner.runner import ModelRunner

SideName = Literal["k", "v"]
Costs = Mapping[SideName, Mapping[str, float]]  # of a layer: the KL that a side in a format is expected to cause
Tell = Callable[[str], None]

# What is tried, the coarsest first; after them comes the model's own dtype. A side in one of these is as that format has it.
SIDES: Mapping[SideName, tuple[str, ...]] = {
    "k": ("kv4", "kv5", "kv6", "fp8_e4m3", "int8_per_token_head"),
    "v": ("kv4", "kv6", "fp8_e4m3"),
}
COARSEST = "kv4"
UNIFORM = ("kv4", "kv5", "kv6", "fp8_e4m3")
NUM_EDGE_LAYERS = 2  # at each end, of the rule that the plan is compared with
TUNE_WINDOW_TOKENS = 128  # many kinds of text say more than long ones
MAX_TUNE_TOKENS = 1024
JUDGE_WINDOW_TOKENS = 1024
MAX_JUDGE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Bits:
    """A budget: at most so many bits per cached number, see `bits_of`.

    Of both kinds of budgets, narrow and wide are the layouts of all layers in the coarsest format, and in the model's dtype.
    """

    bits: Fraction

    def block_bytes(self, narrow: KVLayout, wide: KVLayout) -> int:
        """The most bytes of a block, while blocks hold as many tokens as those of `narrow`."""
        return int(narrow.block_bytes * self.bits / bits_of(narrow, wide))

    def fits(self, layout: KVLayout, wide: KVLayout) -> bool:
        return bits_of(layout, wide) <= self.bits

    def least(self, narrow: KVLayout, wide: KVLayout) -> str:
        """What would have to be asked for, for `narrow` to fit."""
        return f"--bits {ceil(bits_of(narrow, wide) * 1000) / 1000}"


@dataclass(frozen=True, slots=True)
class Room:
    """A budget: at least so many tokens in so many bytes, as `size_cache` counts them for requests of `max_model_len` tokens."""

    num_tokens: int
    memory_bytes: int
    max_model_len: int
    max_num_batched_tokens: int

    def block_bytes(self, narrow: KVLayout, wide: KVLayout) -> int:
        return self.memory_bytes // self._num_blocks(narrow)

    def fits(self, layout: KVLayout, wide: KVLayout) -> bool:
        return self.memory_bytes // layout.block_bytes >= self._num_blocks(layout)

    def least(self, narrow: KVLayout, wide: KVLayout) -> str:
        return f"--memory {self._num_blocks(narrow) * narrow.block_bytes} for --tokens {self.num_tokens}"

    def _num_blocks(self, layout: KVLayout) -> int:
        """The fewest that hold a request of full length, and the tokens. First tokens take the most blocks in narrow layouts."""
        per_request = blocks_for_request(layout, self.max_model_len, self.max_num_batched_tokens)
        return 1 + max(per_request, -(-self.num_tokens * per_request // self.max_model_len))


Budget = Bits | Room


@dataclass(frozen=True, slots=True)
class Option:
    """Formats for the layers that share a cache position. num_bytes: of a block there. kl: what they are expected to cause."""

    names: tuple[str, ...]
    num_bytes: int
    kl: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A format for every layer, measured on texts that nothing was fitted to. kl: per token, in nats; kl_p99: its percentile."""

    title: str
    layers: tuple[str, ...]
    bits: float
    block_bytes: int
    kl: float
    kl_p99: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """rows: what was judged, the tuned plan first. costs: of each layer."""

    dtype: str
    rows: tuple[Judged, ...]
    costs: tuple[Costs, ...]
    num_tune_tokens: int
    num_judge_tokens: int

    @property
    def best(self) -> Judged:
        """What is to be served: the row with the least KL."""
        return min(self.rows, key=lambda row: row.kl)


def tune(options: EngineOptions, budget: Budget, tell: Tell = lambda line: None) -> Tuning:
    """Measure, choose and judge. `tell` hears of each part of the work as it begins.

    UserError for a budget into which nothing, or everything, fits; other HalfbyteErrors are those of an engine's start.
    """
    front = load_front(options)
    longest = config_from_files(front.files, options.hf_overrides or {}).max_position
    judge_tokens = min(JUDGE_WINDOW_TOKENS, longest)
    tell(f"loading {options.model}")
    small = replace(options, kv_cache_dtype=COARSEST, kv_check="off", max_model_len=judge_tokens, max_num_seqs=1)
    core, _ = build_engine(small)
    with closing(core):
        bench = Bench(cast("ModelRunner", core.runner), front, detect_platform(options.device), tell)
        bench.check(budget)
        tune_tokens = min(TUNE_WINDOW_TOKENS, longest)
        windows = token_windows(front.tokenizer, calibration_files(), tune_tokens, MAX_TUNE_TOKENS)
        costs = bench.measure(windows)
        judged_by = token_windows(front.tokenizer, sample_files(), judge_tokens, MAX_JUDGE_TOKENS)
        rows = bench.judge(bench.contenders(costs, budget), judged_by)
        return Tuning(bench.dtype, tuple(rows), tuple(costs), sum(map(len, windows)), sum(map(len, judged_by)))


class Bench:
    """A loaded model over small caches, in any formats."""

    def __init__(self, runner: ModelRunner, front: Front, platform: Platform, tell: Tell) -> None:
        from halfbyte.model_runner.runner import first_tokens

        self._runner = runner
        self._front = front
        self._tell = tell
        self._parts: dict[str, list[LayerParts]] = {}
        self._first_tokens = first_tokens(runner.config)
        self.dtype = runner.config.model.dtype
        self.num_layers = len(runner.kv_specs)
        self.names = {side: tuple(name for name in SIDES[side] if self._reads(side, name, platform)) for side in SIDES}
        self.narrow, self.wide = self.layout((COARSEST,) * self.num_layers), self.layout((self.dtype,) * self.num_layers)

    def check(self, budget: Budget) -> None:
        """UserError unless the least that is possible fits, and the model's own dtype does not."""
        if not budget.fits(self.narrow, self.wide):
            least = budget.least(self.narrow, self.wide)
            raise UserError(f"{COARSEST} in all layers is the least that is possible, and needs {least}")
        if budget.fits(self.wide, self.wide):
            raise UserError(f"all layers fit in {self.dtype}: there is nothing to tune, leave --kv-cache-dtype out")

    def layout(self, names: Sequence[str]) -> KVLayout:
        """As the engine would allocate a cache of these formats."""
        return self._make_runner(names, None).layout

    def measure(self, windows: Sequence[list[int]]) -> list[Costs]:
        """What each side of each layer costs in each format: in the coarsest by scoring, in others as their noise is less."""
        import torch

        sides = [(layer, side) for layer in range(self.num_layers) for side in SIDES]
        kl_sum = dict.fromkeys(sides, 0.0)
        noise = {each: dict.fromkeys(self.names[each[1]], 0.0) for each in sides}
        for number, window in enumerate(windows, start=1):
            self._tell(f"measuring layers: text {number} of {len(windows)}")
            expected_NV, heads = self._watch(window)
            for layer, side in sides:
                for name in self.names[side]:
                    noise[layer, side][name] += self._noise(heads[layer], side, name, layer)
                names: list[str] = [self.dtype] * self.num_layers
                names[layer] = self._lone(side, self.names[side][0])
                found_NV = torch.cat(list(self._score(self._scorer(names, len(window), self._first_tokens), window)))
                kl_sum[layer, side] += float(_kl(expected_NV, found_NV).sum())
        total = sum(map(len, windows))
        return [
            {side: scaled(max(0.0, kl_sum[layer, side]) / total, noise[layer, side]) | {self.dtype: 0.0} for side in SIDES}
            for layer in range(self.num_layers)
        ]

    def contenders(self, costs: Sequence[Costs], budget: Budget) -> dict[str, tuple[str, ...]]:
        """The tuned plan, and what it has to beat: uniform formats, and the best of first and last layers that are wide."""
        uniform = [name for name in UNIFORM if budget.fits(self.layout((name,) * self.num_layers), self.wide)]
        found = {"tuned": self._tuned(costs, budget)}
        found |= {f"uniform {name}": (name,) * self.num_layers for name in dict.fromkeys((COARSEST, uniform[-1]))}
        if edges := self._edge_rule(costs, budget):
            found["first and last layers wide"] = edges
        return {title: names for names, title in {names: title for title, names in found.items()}.items()}  # each once

    def judge(self, contenders: Mapping[str, tuple[str, ...]], windows: Sequence[list[int]]) -> list[Judged]:
        """Each against the model's own dtype, as it would be served, over the same tokens, a step of each in turn."""
        import torch

        num_tokens = max(map(len, windows))
        plain = plain_runner(self._runner.config, self._runner, num_tokens)
        runners = [self._scorer(names, num_tokens, None) for names in contenders.values()]
        kl: list[list[Tensor]] = [[] for _ in runners]
        for number, window in enumerate(windows, start=1):
            self._tell(f"judging {len(runners)} plans: text {number} of {len(windows)}")
            for base_NV, *others in zip(*(self._score(each, window) for each in (plain, *runners)), strict=True):
                for seen, other_NV in zip(kl, others, strict=True):
                    seen.append(_kl(base_NV, other_NV))
        rows = []
        for (title, names), runner, seen in zip(contenders.items(), runners, kl, strict=True):
            kl_N, layout = torch.cat(seen), runner.layout
            p99 = float(kl_N.quantile(0.99))
            rows.append(Judged(title, names, float(bits_of(layout, self.wide)), layout.block_bytes, float(kl_N.mean()), p99))
        return rows

    def _tuned(self, costs: Sequence[Costs], budget: Budget) -> tuple[str, ...]:
        """The best plan that fits. A plan whose blocks hold other numbers of tokens than expected may not: then the next best."""
        places = self._places(costs)
        limit = budget.block_bytes(self.narrow, self.wide)
        while True:
            chosen = choose([options for _, options in places], limit)
            found = {
                layer: name
                for (layers, _), option in zip(places, chosen, strict=True)
                for layer, name in zip(layers, option.names, strict=True)
            }
            names = tuple(found[layer] for layer in range(self.num_layers))
            if budget.fits(self.layout(names), self.wide):
                return names
            limit = sum(option.num_bytes for option in chosen) - 1

    def _places(self, costs: Sequence[Costs]) -> list[tuple[tuple[int, ...], list[Option]]]:
        """The layers that share a cache position, and their options.

        A block is as wide there as the widest of them. Of layers of several kinds, like shares with like: each kind is dealt
        out with its most sensitive layers first, as `make_layout` deals out the widest.
        """
        sensitivity = [sum(max(side.values()) for side in layer.values()) for layer in costs]
        positions: list[list[int]] = [[] for _ in self.narrow.position_bytes]
        for window in dict.fromkeys(group.sliding_window for group in self.narrow.groups):
            groups = [group for group in self.narrow.groups if group.sliding_window == window]
            ranked = sorted((layer for group in groups for layer in group.layers), key=lambda layer: -sensitivity[layer])
            for rank, layer in enumerate(ranked):
                positions[rank // len(groups)].append(layer)
        by_layer = [self._layer_options(cost, spec) for cost, spec in zip(costs, self.narrow.specs, strict=True)]
        return [(tuple(layers), shared([by_layer[layer] for layer in layers])) for layers in positions]

    def _layer_options(self, cost: Costs, spec: KVCacheSpec) -> list[Option]:
        """Every pair of formats for one layer."""
        found = []
        for k_name, v_name in product(cost["k"], cost["v"]):
            name = pair_name(k_name, v_name)
            arranged = self._runner.backend.arrange(replace(spec, format=name))
            num_bytes = sum(plane.bytes for plane in get_format(arranged).planes(replace(spec, format=arranged)))
            found.append(Option((name,), num_bytes, cost["k"][k_name] + cost["v"][v_name]))
        return found

    def _edge_rule(self, costs: Sequence[Costs], budget: Budget) -> tuple[str, ...] | None:
        """First and last layers in the widest format that fits (of equals, that of least KL to expect), others in `COARSEST`."""
        ends = {*range(NUM_EDGE_LAYERS), *range(self.num_layers - NUM_EDGE_LAYERS, self.num_layers)} & {*range(self.num_layers)}
        best: tuple[int, float, tuple[str, ...]] | None = None
        for k_name, v_name in product(costs[0]["k"], costs[0]["v"]):
            wide = pair_name(k_name, v_name)
            names = tuple(wide if layer in ends else COARSEST for layer in range(self.num_layers))
            layout = self.layout(names)
            expected = sum(costs[layer]["k"][k_name] + costs[layer]["v"][v_name] for layer in ends)
            if wide != COARSEST and budget.fits(layout, self.wide):
                best = max(best or (0, 0.0, names), (layout.block_bytes, -expected, names))
        return None if best is None else best[2]

    def _watch(self, window: list[int]) -> tuple[Tensor, list[Heads]]:
        """The model in its own dtype: logits [N, V] of a text of one step, and each layer's heads."""
        from halfbyte.model_runner.head_taps import tap_heads

        plain = self._scorer([self.dtype] * self.num_layers, len(window), self._first_tokens)
        coded = slice(self._first_tokens, None)
        with tap_heads(self._runner.model, STEP_TOKENS) as heads:
            [logits_NV] = self._score(plain, window)
            return logits_NV, [(q[coded].clone(), k[coded].clone(), v[coded].clone()) for q, k, v in heads(len(window))]

    def _noise(self, heads: Heads, side: SideName, name: str, layer: int) -> float:
        """Of a format, the squared error of all logits of the text, or of the values."""
        from halfbyte.kvcache.turns import all_turns

        sides, (scales, turns) = get_format(name).sides, self._parts_of(name)[layer]
        assert sides is not None and scales is not None, "the formats that are tried have a codec for each side"
        turns = all_turns(turns, get_format(name).rotations, self._runner.kv_specs[layer])
        q_THD, k_TGD, v_TGD = turns.turn(*heads) if turns is not None else heads
        if side == "v":
            return float((_error(sides[1], v_TGD, scales.v_G) ** 2).sum())
        error_GTD = _error(sides[0], k_TGD, scales.k_G).transpose(0, 1)
        q_GMD = q_THD.float().unflatten(1, (k_TGD.shape[1], -1)).permute(1, 0, 2, 3).flatten(1, 2)
        return float(((error_GTD @ q_GMD.mT) ** 2).sum())

    def _score(self, runner: ModelRunner, window: list[int]) -> Iterator[Tensor]:
        from halfbyte.model_runner.scoring import score

        return score(runner, new_manager(runner), window, STEP_TOKENS)

    def _scorer(self, names: Sequence[str], num_tokens: int, first_tokens: int | None) -> ModelRunner:
        """The model over a cache of these formats, with room for one text."""
        runner = self._make_runner(names, first_tokens)
        runner.set_parts([self._parts_of(name)[layer] for layer, name in enumerate(names)])
        runner.allocate_for(num_tokens)
        return runner

    def _make_runner(self, names: Sequence[str], first_tokens: int | None) -> ModelRunner:
        return type(self._runner)(self._config(names, first_tokens), self._runner.model, self._runner.backend)

    def _config(self, names: Sequence[str], first_tokens: int | None) -> EngineConfig:
        config = self._runner.config
        return replace(config, cache=replace(config.cache, layer_dtypes=tuple(names), first_tokens=first_tokens))

    def _parts_of(self, name: str) -> list[LayerParts]:
        """Scales and turns for a format, layer by layer."""
        if name not in self._parts:
            config = self._config((name,) * self.num_layers, None)
            tokenizer = self._front.tokenizer
            self._parts[name] = prepare_parts(config, self._front.files, self._runner, lambda: tokenizer, self._tell).layers
        return self._parts[name]

    def _lone(self, side: SideName, name: str) -> str:
        """The format with one side so, and the other in the model's dtype."""
        return pair_name(name, self.dtype) if side == "k" else pair_name(self.dtype, name)

    def _reads(self, side: SideName, name: str, platform: Platform) -> bool:
        """Whether format and back end hold all layers so."""
        try:
            self._make_runner((self._lone(side, name),) * self.num_layers, None).refuse(platform)
        except UnsupportedError:
            return False
        return True


def choose(places: Sequence[Sequence[Option]], budget_bytes: int) -> list[Option]:
    """An option for each place, in at most `budget_bytes` together, of the least KL together; of equals the one of fewer bytes.

    Exact: dynamic programming over bytes. The least options of all places fit.
    """
    import numpy as np

    unit = gcd(*(option.num_bytes for place in places for option in place))
    most = sum(max(option.num_bytes for option in place) for place in places)
    size = min(budget_bytes, most) // unit + 1
    best, picks = np.zeros(size), []  # best[n]: the least KL of the places so far, in at most n units
    for place in places:
        kl = np.full((len(place), size), np.inf)
        for row, option in zip(kl, place, strict=True):
            units = option.num_bytes // unit
            row[units:] = best[: max(0, size - units)] + option.kl
        picks.append(kl.argmin(0))
        best = kl.min(0)
    assert np.isfinite(best[-1]), "the least of all places fits"
    chosen, left = [], size - 1
    for place, pick in zip(reversed(places), reversed(picks), strict=True):
        chosen.append(place[pick[left]])
        left -= chosen[-1].num_bytes // unit
    return chosen[::-1]


def shared(layers: Sequence[Sequence[Option]]) -> list[Option]:
    """Options of layers that share a position, rising in bytes and falling in KL: each layer has the best of what fits there."""
    found: list[Option] = []
    for num_bytes in sorted({option.num_bytes for options in layers for option in options}):
        fitting = [[option for option in options if option.num_bytes <= num_bytes] for options in layers]
        if not all(fitting):
            continue
        best = [min(options, key=lambda option: (option.kl, option.num_bytes)) for options in fitting]
        made = Option(tuple(name for option in best for name in option.names), num_bytes, sum(option.kl for option in best))
        if not found or made.kl < found[-1].kl:
            found.append(made)
    return found


def scaled(kl: float, noise: Mapping[str, float]) -> dict[str, float]:
    """`kl` was measured with the first format; of the others it is to noise as it is of the first."""
    first = next(iter(noise.values()))
    return {name: kl * squared / first if first else 0.0 for name, squared in noise.items()}


def pair_name(k_name: str, v_name: str) -> str:
    """K as one format has it and V as another does; a format that is both has one name."""
    return k_name if k_name == v_name else f"k:{k_name},v:{v_name}"


def bits_of(layout: KVLayout, wide: KVLayout) -> Fraction:
    """Bits per cached number, scales and padding included: those of the model's dtype, times the share of the bytes of `wide`."""
    wide_bits = 8 * Plane("k", wide.specs[0].first_format, (1,)).bytes
    return wide_bits * _token_bytes(layout) / _token_bytes(wide)


def _token_bytes(layout: KVLayout) -> Fraction:
    """What a token takes in all groups."""
    return sum((Fraction(layout.block_bytes, group.block_size) for group in layout.groups), Fraction())


def _error(side: Side, x_TGD: Tensor, scale_G: Tensor) -> Tensor:
    """What is read back less what was written."""
    x_TGD, scale_G1 = x_TGD.float(), scale_G[:, None].to(x_TGD.device)
    return side.codec.decode(*side.codec.encode(x_TGD, scale_G1), scale_G1) - x_TGD


def _kl(base_NV: Tensor, other_NV: Tensor) -> Tensor:
    """KL(base || other) of each position."""
    import torch

    from halfbyte.model_runner.scoring import compare

    return compare(base_NV, other_NV, torch.zeros(base_NV.shape[0], dtype=torch.int64)).kl_N
