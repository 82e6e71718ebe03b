"""Mixture of experts: routing, the order of experts, products of tiles, in the sizes of Mixtral and of Qwen3-30B-A3B.

Shape letters: T tokens, X experts, E hidden, I intermediate, J = 2 * I, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.kernels.moe import Routing
from halfbyte.kernels.triton.moe import mix_experts, route
from halfbyte.platform import Platform
from scripts.gpu.cases.case import Case, numbers
from scripts.gpu.rules import Expect

NUM_TOKENS, TILE_ROWS = 48, 64


def moe_cases() -> Iterator[Case]:
    yield _case(num_experts=8, num_chosen=2, hidden=4096, inner=14336)
    yield _case(num_experts=128, num_chosen=8, hidden=2048, inner=768)
    yield Case("moe sigmoid routing 256 experts", _route_by_sigmoid)


def _case(num_experts: int, num_chosen: int, hidden: int, inner: int) -> Case:
    def launch(platform: Platform) -> None:
        routing = Routing(num_chosen, by_sigmoid=False, renormalises=True, scale=1.0)
        weights_TK, experts_TK = route(numbers(NUM_TOKENS, num_experts), routing)
        gate_up_XJE, down_XEI = numbers(num_experts, 2 * inner, hidden), numbers(num_experts, hidden, inner)
        mix_experts(numbers(NUM_TOKENS, hidden), gate_up_XJE, down_XEI, weights_TK, experts_TK, "silu")

    name = f"moe {num_experts} experts E{hidden} I{inner}"
    return Case(name, launch, {"multiply_tile": Expect(product_rows=TILE_ROWS)}, is_sampled=num_experts == 8)


def _route_by_sigmoid(platform: Platform) -> None:
    routing = Routing(8, by_sigmoid=True, renormalises=True, scale=2.5)
    route(numbers(NUM_TOKENS, 256, dtype=torch.float32), routing, numbers(256, dtype=torch.float32))
