"""Norms, rotations, activations and adapters, in the sizes of small and of large models.

Shape letters: T tokens, E hidden, O outputs, N query and key heads, D head dim, J = 2 * intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.kernels.lora import StackedLora
from halfbyte.kernels.norm import HeadNorms
from halfbyte.kernels.triton.layers import TritonLayers
from halfbyte.platform import Platform
from scripts.gpu.cases.case import Case, numbers

NUM_TOKENS = 48
_EPS = 1e-6


def layer_cases() -> Iterator[Case]:
    yield from (_norm(hidden, torch.bfloat16) for hidden in (576, 4096, 8192))
    yield _norm(4096, torch.float16)
    yield _norm(1152, torch.bfloat16, add_unit_offset=True)
    yield _add_norm(4096)
    yield from (_rotate(32, 8, dim) for dim in (64, 128))
    yield _rotate(32, 8, 128, has_norms=True)
    yield _rotate(4, 1, 256, has_norms=True, add_unit_offset=True)
    yield _gated("silu", 14336)
    yield _gated("gelu_pytorch_tanh", 6912)
    yield _lora("qkv", 4096, (4096, 1024, 1024), 16)
    yield _lora("down", 14336, (4096,), 64)
    yield _lora("qkv float16", 4096, (4096, 1024, 1024), 16, torch.float16)


def _norm(hidden: int, dtype: torch.dtype, add_unit_offset: bool = False) -> Case:
    def launch(platform: Platform) -> None:
        TritonLayers().rms_norm(numbers(NUM_TOKENS, hidden, dtype=dtype), numbers(hidden, dtype=dtype), _EPS, add_unit_offset)

    kind = f"{str(dtype).removeprefix('torch.')}{' unit offset' if add_unit_offset else ''}"
    return Case(f"layers norm {hidden} {kind}", launch, is_sampled=(hidden, dtype) == (4096, torch.bfloat16))


def _add_norm(hidden: int) -> Case:
    def launch(platform: Platform) -> None:
        TritonLayers().add_rms_norm(numbers(NUM_TOKENS, hidden), numbers(NUM_TOKENS, hidden), numbers(hidden), _EPS)

    return Case(f"layers add and norm {hidden} bfloat16", launch)


def _rotate(num_heads: int, num_kv_heads: int, dim: int, has_norms: bool = False, add_unit_offset: bool = False) -> Case:
    def launch(platform: Platform) -> None:
        qkv = numbers(NUM_TOKENS, num_heads + 2 * num_kv_heads, dim)
        norms = HeadNorms(numbers(dim), numbers(dim), num_heads, _EPS, add_unit_offset) if has_norms else None
        TritonLayers().rotate(qkv[:, :-num_kv_heads], numbers(NUM_TOKENS, 1, dim), numbers(NUM_TOKENS, 1, dim), norms)

    kind = f"{' norms' if has_norms else ''}{' unit offset' if add_unit_offset else ''}"
    return Case(f"layers rotate {num_heads}+{num_kv_heads} heads D{dim}{kind}", launch)


def _gated(name: str, inner: int) -> Case:
    return Case(f"layers {name} {inner}", lambda platform: _call_gated(name, inner))


def _call_gated(name: str, inner: int) -> None:
    TritonLayers().gated(name, numbers(NUM_TOKENS, 2 * inner))


def _lora(name: str, num_inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    def launch(platform: Platform) -> None:
        y_TO, x_TE = (numbers(NUM_TOKENS, width, dtype=dtype) for width in (sum(outputs), num_inputs))
        adapters = StackedLora(outputs, num_inputs, 4, rank, dtype, y_TO.device)
        TritonLayers().add_lora(y_TO, x_TE, adapters, numbers(NUM_TOKENS, dtype=torch.int32))

    return Case(f"layers adapters {name} rank {rank}", launch, is_sampled=dtype == torch.bfloat16 and rank == 16)
