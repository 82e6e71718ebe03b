"""The Triton norms, rotation and activations against their laws, in the interpreter.

Equal to the bit where each number is made of few operations; where rows are summed or exponentials taken, the last place may
differ: by few units in float32, and so by one where a 16-bit type is rounded to.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.errors import UnsupportedError
from halfbyte.kernels import layers as laws
from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.layers import TORCH_LAYERS, layer_kernels
from halfbyte.kernels.norm import HeadNorms
from halfbyte.kernels.rope import inverse_frequencies, rotary_tables
from halfbyte.model_runner.decoder_config import DecoderConfig, RopeConfig
from halfbyte.model_runner.layers import weights
from halfbyte.model_runner.layers.context import AttentionLayer, ForwardContext
from halfbyte.model_runner.models import get_model_class
from tests.kernels.triton_interpreter import interpreted

layers, norm, rope, activation = interpreted(
    *(f"halfbyte.kernels.triton.{name}" for name in ("layers", "norm", "rope", "activation"))
)
TRITON = layers.TritonLayers()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Units in the last place. float32: sums of squares in another order, exponentials of another library.
ULPS = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}
MOST_THAT_DIFFER = {torch.float32: 1.0, torch.bfloat16: 0.01, torch.float16: 0.02}  # 16 bits: roundings that were near a tie


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Of several sizes by row, as hidden states are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 6, (*shape[:-1], 1), generator=generator).float())).to(dtype)


def places(x: Tensor) -> Tensor:
    """Numbers as whole ones, neighbours next to each other."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).long()
    return torch.where(bits < 0, -(bits & (0x7FFFFFFF if x.dtype == torch.float32 else 0x7FFF)), bits)


def assert_close(found: Tensor, want: Tensor) -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape) and found.is_contiguous()
    apart = (places(found) - places(want)).abs()
    assert apart.max() <= ULPS[want.dtype]
    assert (apart > 0).float().mean() <= MOST_THAT_DIFFER[want.dtype]


@every_dtype
@pytest.mark.parametrize("add_unit_offset", [False, True])
@pytest.mark.parametrize("shape", [(1, 576), (5, 576), (3, 2048), (2, 5120), (37, 64), (7, 3, 80), (2, 3, 2, 96), (256,)])
def test_rms_norm(shape: tuple[int, ...], add_unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = numbers(*shape, dtype=dtype), numbers(1, shape[-1], dtype=dtype, seed=1)[0]
    found = TRITON.rms_norm(x, weight, 1e-5, add_unit_offset)
    assert_close(found, TORCH_LAYERS.rms_norm(x, weight, 1e-5, add_unit_offset))


@every_dtype
def test_the_last_cast_is_in_the_familys_order(dtype: torch.dtype) -> None:
    """A row whose mean square is 1 exactly: no sum can differ, so the bits are the law's."""
    x = torch.where(torch.arange(512) % 3 == 0, -1.0, 1.0).to(dtype).expand(4, 512).contiguous()
    weight = numbers(1, 512, dtype=dtype)[0]
    found = [TRITON.rms_norm(x, weight, 0.25, offset) for offset in (False, True)]
    want = [TORCH_LAYERS.rms_norm(x, weight, 0.25, offset) for offset in (False, True)]
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    assert dtype == torch.float32 or not torch.equal(found[0], ((x.float() / 1.25**0.5) * weight.float()).to(dtype))


def test_rows_of_zeros_and_rows_without_numbers() -> None:
    x = numbers(4, 96)
    x[1], x[2, 5] = 0.0, torch.nan
    found = TRITON.rms_norm(x, torch.ones(96), 1e-6)
    assert not found[1].any() and found[2].isnan().all() and found[[0, 3]].isfinite().all()
    assert TRITON.rms_norm(x[:0], torch.ones(96), 1e-6).shape == (0, 96)


@every_dtype
def test_a_norm_after_a_sum(dtype: torch.dtype) -> None:
    x, added, weight = numbers(5, 576, dtype=dtype), numbers(5, 576, dtype=dtype, seed=2), numbers(1, 576, dtype=dtype, seed=1)[0]
    total, normed = TRITON.add_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(total, x + added)
    assert torch.equal(normed, TRITON.rms_norm(total, weight, 1e-5))


@every_dtype
def test_norms_read_heads_where_they_lie(dtype: torch.dtype) -> None:
    """Query heads within the product of queries, keys and values."""
    qkv_TND, weight_D = numbers(6, 11, 64, dtype=dtype), numbers(1, 64, dtype=dtype)[0]
    heads_THD = qkv_TND[:, 2:7]
    found = TRITON.rms_norm(heads_THD, weight_D, 1e-6)
    assert torch.equal(found, TRITON.rms_norm(heads_THD.contiguous(), weight_D, 1e-6))


@pytest.mark.parametrize("shape", [(19, 576), (37, 80), (23, 3, 128)])
def test_a_row_knows_nothing_of_its_batch(shape: tuple[int, ...]) -> None:
    x, weight = numbers(*shape, dtype=torch.bfloat16), numbers(1, shape[-1], dtype=torch.bfloat16)[0]
    whole = TRITON.rms_norm(x, weight, 1e-6)
    for row in range(0, shape[0], 6):
        assert torch.equal(TRITON.rms_norm(x[row : row + 1], weight, 1e-6), whole[row : row + 1])


def tables(num_tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions_T = torch.arange(num_tokens) ** 3 * 17
    return rotary_tables(positions_T, *inverse_frequencies(dim, 1e4), dtype)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 12, 64), (9, 5, 80), (3, 40, 128), (2, 3, 256), (33, 2, 96)])
def test_rotation_is_the_law_to_the_bit(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_heads, dim = shape
    qkv_TND = numbers(num_tokens, num_heads + 2, dim, dtype=dtype)
    qk_TND = qkv_TND[:, :num_heads]
    cos, sin = tables(num_tokens, dim, dtype)
    assert torch.equal(TRITON.rotate(qk_TND, cos, sin), TORCH_LAYERS.rotate(qk_TND, cos, sin))
    assert TRITON.rotate(qk_TND[:0], cos[:0], sin[:0]).shape == (0, num_heads, dim)


@every_dtype
@pytest.mark.parametrize("add_unit_offset", [False, True])
@pytest.mark.parametrize("dim", [80, 128])
def test_heads_are_normalised_and_then_rotated(dim: int, add_unit_offset: bool, dtype: torch.dtype) -> None:
    """The rotation adds numbers of one head, so that what their norm differs by is compared with the greatest of them."""
    qk_TND = numbers(7, 9, dim, dtype=dtype)[:, :6]
    q_weight_D, k_weight_D = (numbers(1, dim, dtype=dtype, seed=seed)[0] for seed in (3, 4))
    norms = HeadNorms(q_weight_D, k_weight_D, 4, 1e-6, add_unit_offset)
    cos, sin = tables(7, dim, dtype)
    found, want = TRITON.rotate(qk_TND, cos, sin, norms), TORCH_LAYERS.rotate(qk_TND, cos, sin, norms)
    two_steps = torch.cat(
        [
            TRITON.rms_norm(heads, weight, 1e-6, add_unit_offset)
            for heads, weight in ((qk_TND[:, :4], q_weight_D), (qk_TND[:, 4:], k_weight_D))
        ],
        1,
    )
    assert torch.equal(found, TRITON.rotate(two_steps, cos, sin))
    most_TN1 = want.float().abs().amax(-1, keepdim=True)
    assert ((found.float() - want.float()).abs() <= ULPS[dtype] * torch.finfo(dtype).eps * most_TN1).all()


def test_every_activation_has_a_kernel() -> None:
    assert activation.GATED_ACTIVATIONS.keys() == laws.GATED_ACTIVATIONS.keys()


@every_dtype
@pytest.mark.parametrize("name", sorted(laws.GATED_ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 1536), (5, 100), (3, 1025)])
def test_gated_activations(shape: tuple[int, int], name: str, dtype: torch.dtype) -> None:
    """Two roundings from the truth, which the law is not: it loses what 1 + tanh cancels, at most a few units of 1."""
    num_tokens, num_inner = shape
    gate_up_TJ = numbers(num_tokens, 2 * num_inner + 3, dtype=dtype)[:, : 2 * num_inner]
    found, by_law = TRITON.gated(name, gate_up_TJ), TORCH_LAYERS.gated(name, gate_up_TJ)
    assert (found.dtype, found.shape) == (by_law.dtype, by_law.shape)
    gate, up = gate_up_TJ.double().chunk(2, -1)
    twice_z = gate if name == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    truth = gate * twice_z.sigmoid() * up
    # Exponents are made of rounded steps: an error that grows with them.
    roundings = torch.finfo(dtype).eps + 2**-23 * (2 + 3 * twice_z.abs().clamp(max=100))
    denormals = torch.finfo(dtype).smallest_normal * (1 + gate.abs()) * (1 + up.abs())
    assert ((found.double() - truth).abs() <= roundings * truth.abs() + denormals).all()
    lost = 2**-22 * (gate * up).abs()
    assert ((found.double() - by_law.double()).abs() <= 2 * roundings * truth.abs() + lost + denormals).all()


@pytest.mark.parametrize("name", sorted(laws.GATED_ACTIVATIONS))
def test_activations_of_what_is_no_number(name: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 100.0, -100.0, -1000.0]])
    found, want = (kernels.gated(name, torch.cat((gate, torch.ones_like(gate)), 1)) for kernels in (TRITON, TORCH_LAYERS))
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-36, equal_nan=True)


def test_each_device_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layer_kernels("cpu") is layer_kernels(torch.device("cpu")) is TORCH_LAYERS
    assert isinstance(layer_kernels("cuda:1"), layers.TritonLayers)
    monkeypatch.setattr(laws, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'halfbyte\[gpu\]'"):
        layer_kernels("cuda")


class _PlainContext(ForwardContext):
    """Something of all heads instead of attention."""

    def attend(self, layer: AttentionLayer, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        return q_THD + (k_TGD * v_TGD).sum(1, keepdim=True)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_models_compute_with_the_kernels_of_their_device(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where what each of some ten kernels differs by stays far below 1e-5."""
    is_gemma = architecture.startswith("Gemma3")
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=50,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        layer_windows=(None, None),
        qk_norm=not architecture.startswith("Llama"),
        norm_unit_offset=is_gemma,
        hidden_act="gelu_pytorch_tanh" if is_gemma else "silu",
        tie_embeddings=True,
    )
    found = []
    for kernels in (TRITON, TORCH_LAYERS):
        monkeypatch.setattr(weights, "layer_kernels", lambda device, kernels=kernels: kernels)
        model = get_model_class(architecture)(config, get_backend("reference"))
        weights.materialise(model, torch.float32, "cpu")
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.3, generator=generator)
        users = [module.kernels for module in model.modules() if isinstance(module, weights.KernelModule)]
        assert len(users) > 6 and all(used is kernels for used in users)
        with torch.inference_mode():
            found.append(model(torch.arange(11), torch.arange(11) * 5, _PlainContext([], [], [0, 0])))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
