"""Mixture of experts: the law against transformers, the Triton twins in the interpreter against the law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from halfbyte.kernels import moe as law
from halfbyte.kernels.moe import Routing
from tests.kernels.triton_interpreter import interpreted

(kernels,) = interpreted("halfbyte.kernels.triton.moe")


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("renormalises", [True, False])
def test_the_law_is_a_block_of_transformers(renormalises: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=24, moe_intermediate_size=16, num_experts=10, num_experts_per_tok=3, norm_topk_prob=renormalises
    )
    block = Qwen3MoeSparseMoeBlock(config)
    for i, parameter in enumerate(block.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i, scale=0.5)
    x_TE = numbers(7, 24, seed=9)
    with torch.no_grad():
        weights_TK, experts_TK = law.route(x_TE @ block.gate.weight.T, Routing(3, renormalises=renormalises))
        found = law.mix_experts(x_TE, block.experts.gate_up_proj, block.experts.down_proj, weights_TK, experts_TK, "silu")
        torch.testing.assert_close(found, block(x_TE[None])[0])


def test_sigmoid_scores_are_those_of_transformers() -> None:
    config = DeepseekV3Config(
        hidden_size=24, n_routed_experts=12, num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=2.5
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data, router.e_score_correction_bias = numbers(12, 24), numbers(12, seed=1, scale=0.3)
    x_TE = numbers(9, 24, seed=2)
    with torch.no_grad():
        _, expected, chosen = router(x_TE)
        logits_TX = x_TE @ router.weight.T
        found, experts_TK = law.route(logits_TX, Routing(4, by_sigmoid=True, scale=2.5), router.e_score_correction_bias)
    assert torch.equal(experts_TK.sort(1).values, chosen.sort(1).values)
    torch.testing.assert_close(found, expected.gather(1, (experts_TK[:, :, None] == chosen[:, None, :]).int().argmax(2)))
    assert not torch.equal(experts_TK, law.route(logits_TX, Routing(4, by_sigmoid=True))[1]), "the bias matters"


ROUTINGS = [Routing(2), Routing(1, renormalises=False), Routing(8, by_sigmoid=True, scale=2.5), Routing(5, False, False, 0.5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (13, 60), (5, 128), (70, 9)])
def test_routing(shape: tuple[int, int], routing: Routing, dtype: torch.dtype) -> None:
    """The same experts; weights but for the last places of exponentials and sums."""
    num_experts = shape[1]
    logits_TX = numbers(*shape).to(dtype)
    for bias_X in (None, numbers(num_experts, seed=1)):
        weights_TK, experts_TK = kernels.route(logits_TX, routing, bias_X)
        expected, chosen = law.route(logits_TX, routing, bias_X)
        assert torch.equal(experts_TK, chosen)
        torch.testing.assert_close(weights_TK, expected, rtol=2e-6, atol=0)
        alone = kernels.route(logits_TX[-1:], routing, bias_X)
        assert torch.equal(alone[0], weights_TK[-1:]) and torch.equal(alone[1], experts_TK[-1:])


def test_equal_scores_go_to_the_first_experts() -> None:
    logits_TX = torch.zeros(3, 20)
    logits_TX[1, [4, 17]] = 1.0
    logits_TX[2, 7:] = -torch.inf
    _, experts_TK = kernels.route(logits_TX, Routing(3))
    assert experts_TK.tolist() == [[0, 1, 2], [4, 17, 0], [0, 1, 2]]
    assert kernels.route(logits_TX[:0], Routing(3))[1].shape == (0, 3)


@pytest.mark.parametrize(("num_tokens", "num_chosen", "num_experts"), [(1, 1, 4), (1, 3, 9), (50, 2, 4), (100, 4, 33)])
def test_pairs_are_sorted_into_whole_tiles(
    num_tokens: int, num_chosen: int, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_TILE", 16)
    monkeypatch.setattr(kernels, "_PAIRS_AT_A_TIME", 128)
    experts_TK = numbers(num_tokens, num_experts).topk(num_chosen, 1).indices
    order = kernels.sort_by_expert(experts_TK, num_experts)
    num_pairs, expected, tiles = num_tokens * num_chosen, [], []
    for expert in range(num_experts):
        pairs = (experts_TK.flatten() == expert).nonzero()[:, 0].tolist()
        num_tiles = -(-len(pairs) // 16)
        expected += pairs + [num_pairs] * (16 * num_tiles - len(pairs))
        tiles += [expert] * num_tiles
    assert order.expert_M.tolist() == tiles + [-1] * (len(order.expert_M) - len(tiles))
    assert order.pair_S.tolist()[: len(expected)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(1, 2), (9, 3), (70, 2)])
def test_experts(num_tokens: int, num_chosen: int, dtype: torch.dtype) -> None:
    """Sums in another order, and from there on roundings to the dtype that fall to the other side: a few of its units."""
    num_experts, hidden, inner = 5, 72, 40
    x_TE = numbers(num_tokens, hidden, seed=1).to(dtype)
    gate_up_XJE = numbers(num_experts, 2 * inner, hidden, seed=2, scale=0.2).to(dtype)
    down_XEI = numbers(num_experts, hidden, inner, seed=3, scale=0.2).to(dtype)
    weights_TK, experts_TK = law.route(numbers(num_tokens, num_experts, seed=4), Routing(num_chosen))
    asked = x_TE, gate_up_XJE, down_XEI, weights_TK, experts_TK, "silu"
    found, expected = kernels.mix_experts(*asked), law.mix_experts(*asked)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= 4 * torch.finfo(dtype).eps
    assert kernels.mix_experts(x_TE[:0], gate_up_XJE, down_XEI, weights_TK[:0], experts_TK[:0], "silu").shape == (0, hidden)


def test_a_token_knows_nothing_of_its_company() -> None:
    """Whole numbers, so that no product can tell how it was summed, and gates so large that their SiLU is themselves."""
    generator = torch.Generator().manual_seed(5)
    x_TE = torch.randint(1, 4, (9, 72), generator=generator).float()
    gate_up_XJE = torch.randint(1, 3, (5, 80, 72), generator=generator).float()
    down_XEI = torch.randint(-2, 3, (5, 72, 40), generator=generator).float()
    weights_TK, experts_TK = law.route(numbers(9, 5, seed=4), Routing(3))
    found = kernels.mix_experts(x_TE, gate_up_XJE, down_XEI, weights_TK, experts_TK, "silu")
    torch.testing.assert_close(
        found, law.mix_experts(x_TE, gate_up_XJE, down_XEI, weights_TK, experts_TK, "silu"), rtol=1e-6, atol=1
    )
    for t in range(0, 9, 4):
        one = slice(t, t + 1)
        alone = kernels.mix_experts(x_TE[one], gate_up_XJE, down_XEI, weights_TK[one], experts_TK[one], "silu")
        assert torch.equal(alone, found[one])
