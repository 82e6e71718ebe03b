"""Attention over the cache: decoding and prompts in every KV format, and what models ask for beside (windows, caps, sinks).

The launches are those of one layer in a step; the writer's are left to the cases of `kv`. Wide loads are asked of heads of 128
numbers, whose codes are at least 64 bytes in any format.

Shape letters: T tokens, R requests, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec, FirstTokens
from halfbyte.kernels.attention.triton import TritonBackend
from halfbyte.kernels.triton.attention import GPU, Attention
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.formats.coded import RecordsFormat
from halfbyte.kvcache.spec import KVGroup
from halfbyte.platform import Platform
from scripts.gpu.cases.case import Case, indices, numbers
from scripts.gpu.cases.kv import HEADS, HELD, KV_HEADS, layer_cache
from scripts.gpu.rules import Expect

REQUESTS, CONTEXT, ENTRIES = 24, 4096, 512
_MULTIPROCESSORS = 132  # only grids depend on it
_ALL = ("plan_batch", "turn_rows", "attend_parts", "merge_parts", "attend_prompts")


@dataclass(frozen=True, slots=True)
class Layer:
    """What a case varies. queries: of each request; max_queries: up to so many are decoded together."""

    kv_format: str
    queries: int
    dim: int = 128
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    max_queries: int = 1
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    first_tokens: int = 0
    dtype: torch.dtype = torch.bfloat16


def attention_cases() -> Iterator[Case]:
    for name in HELD:
        yield _case(f"decode {name} D128", Layer(name, 1), "attend_parts", is_sampled=name == "nvfp4")
        yield _case(f"prompt {name} D128", Layer(name, 256), "attend_prompts", is_sampled=name == "nvfp4")
    for name in ("bfloat16", "fp8_e4m3", "nvfp4", "kv4"):
        for dim, heads, kv_heads in ((64, 32, 8), (256, 4, 1)):
            yield _case(f"decode {name} D{dim}", Layer(name, 1, dim, heads, kv_heads), "attend_parts")
            yield _case(f"prompt {name} D{dim}", Layer(name, 256, dim, heads, kv_heads), "attend_prompts")
    for step, queries in (("decode", 1), ("prompt", 256)):
        yield _case(f"{step} kv4 D128 turned", Layer("kv4", queries), "turn_rows", "merge_parts", "plan_batch")
        yield _case(f"{step} kv4 D128 first tokens", Layer("kv4", queries, first_tokens=64), "attend_parts", "attend_prompts")
        yield _case(f"{step} bfloat16 D64 window sinks", Layer("bfloat16", queries, 64, 64, window=128, sinks=True), *_ALL)
        yield _case(f"{step} bfloat16 D128 soft cap", Layer("bfloat16", queries, soft_cap=50.0), *_ALL[2:])
        yield _case(f"{step} float16 D128 float16", Layer("float16", queries, dtype=torch.float16), *_ALL[2:])
    yield _case("decode bfloat16 D128 16 heads", Layer("bfloat16", 1, heads=16 * KV_HEADS), "attend_parts", "merge_parts")
    yield _case("decode bfloat16 D128 8 queries", Layer("bfloat16", 8, max_queries=8), "attend_parts", "merge_parts")


def _case(name: str, layer: Layer, *kernels: str, is_sampled: bool = False) -> Case:
    def launch(platform: Platform) -> None:
        _launch(layer, platform, kernels)

    # Records of codes and scales are of odd lengths: their vectors do not begin where 16 bytes do.
    is_wide = layer.dim == 128 and not isinstance(get_format(layer.kv_format), RecordsFormat)
    rows = 16 if layer.queries <= layer.max_queries else 128
    expects = {kernel: Expect(product_rows=rows, has_wide_loads=is_wide) for kernel in ("attend_parts", "attend_prompts")}
    return Case(name, launch, expects, is_sampled)


def _launch(layer: Layer, platform: Platform, kernels: tuple[str, ...]) -> None:
    """The launches of these kernels."""
    cache, group = layer_cache(layer.kv_format, layer.dim, layer.first_tokens, layer.kv_heads)
    num_tokens = REQUESTS * layer.queries
    metadata = _metadata(layer, group, num_tokens)
    TritonBackend(layer.max_queries).prepare(metadata, layer.window)
    spec = AttentionSpec(
        layer.heads, layer.kv_heads, layer.dim, layer.dim, layer.dim**-0.5, layer.window, layer.soft_cap, layer.sinks
    )
    sinks_H = numbers(layer.heads, dtype=torch.float32) if layer.sinks else None
    qkv = numbers(num_tokens, layer.heads + 2 * layer.kv_heads, layer.dim, dtype=layer.dtype)
    q_THD, k_TGD, v_TGD = qkv.split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
    attention = Attention(cache, metadata, spec, sinks_H, GPU(platform.architecture, _MULTIPROCESSORS))
    for launch in attention.launches(q_THD, k_TGD, v_TGD, numbers(*q_THD.shape, dtype=layer.dtype)):
        if launch.kernel.__name__ in kernels:
            launch.run()


def _metadata(layer: Layer, group: KVGroup, num_tokens: int) -> AttentionMetadata:
    first = FirstTokens(group.first_tokens, group.first_block_size, indices(num_tokens)) if group.first_tokens else None
    return AttentionMetadata(
        query_start_loc=numbers(REQUESTS + 1, dtype=torch.int32),
        seq_lens=numbers(REQUESTS, dtype=torch.int32),
        block_table=numbers(REQUESTS, ENTRIES, dtype=torch.int32),
        slot_mapping=indices(num_tokens),
        block_size=group.block_size,
        query_lens_host=[layer.queries] * REQUESTS,
        seq_lens_host=[CONTEXT] * REQUESTS,
        max_query_len=layer.queries,
        max_seq_len=CONTEXT,
        num_decodes=REQUESTS if layer.queries == 1 else 0,
        first=first,
    )
