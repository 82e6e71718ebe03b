"""Writing K and V into the cache, in every format that the Triton kernels hold, as codes alone and turned on the way.

Caches are larger than 2 GiB, as they are on a GPU: AMD's compiler addresses smaller tensors in another way.

Shape letters: T tokens, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from halfbyte.kernels.triton.kv_write import write
from halfbyte.kvcache.formats import FORMATS, get_format, page_bytes
from halfbyte.kvcache.formats.coded import CodedFormat
from halfbyte.kvcache.formats.dense import DenseFormat
from halfbyte.kvcache.spec import KVCacheSpec, KVGroup, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerCache
from halfbyte.kvcache.turns import LayerTurns
from halfbyte.platform import Platform
from scripts.gpu.cases.case import Case, indices, numbers
from scripts.gpu.rules import Expect

PAIRS = ("k:bfloat16,v:kv4", "k:kv6,v:fp8_e5m2")
HELD = (*(name for name in FORMATS if isinstance(get_format(name), CodedFormat | DenseFormat)), *PAIRS)
TURNED = tuple(name for name in HELD if get_format(name).rotations != ("none", "none"))
KV_HEADS, HEADS, BLOCK_SIZE, NUM_TOKENS = 8, 32, 16, 48
_CACHE_BYTES = 4 << 30


@cache
def layer_cache(kv_format: str, dim: int, first_tokens: int = 0, num_kv_heads: int = KV_HEADS) -> tuple[LayerCache, KVGroup]:
    """A layer's cache with all turns that its format can have, as the runner allocates it, and its group."""
    spec = KVCacheSpec(num_kv_heads, dim, dim, BLOCK_SIZE, None, kv_format, first_tokens)
    layout = make_layout([spec], page_bytes)
    matrices = numbers(num_kv_heads, dim, dim, dtype=torch.float32)
    turns = LayerTurns(matrices, numbers(num_kv_heads, dim, dtype=torch.float32), matrices)
    parts = [(None, turns if get_format(kv_format).rotations[0] == "calibrated" else None)]
    return KVTensors(layout, _CACHE_BYTES // page_bytes(spec), "meta", parts).layer(0), layout.groups[0]


def write_cases() -> Iterator[Case]:
    yield from (_write(name, 128, turns=False) for name in HELD)
    yield from (_write(name, dim, turns=False) for name in ("bfloat16", "fp8_e4m3", "nvfp4", "kv4") for dim in (64, 256))
    yield from (_write(name, 128, turns=True) for name in TURNED)
    yield from (_write("kv4", dim, turns=True) for dim in (64, 256))


def _write(kv_format: str, dim: int, turns: bool) -> Case:
    def launch(platform: Platform) -> None:
        qkv = numbers(NUM_TOKENS, HEADS + 2 * KV_HEADS, dim)  # K and V are views of the product that made them
        k_TGD, v_TGD = qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]
        layer, _ = layer_cache(kv_format, dim)
        write(k_TGD, v_TGD, layer, indices(NUM_TOKENS), layer.turns if turns else None)

    # A turned vector is the law's up to rounding, what is written of it is not compared bit by bit.
    expects = {"write_rows": Expect(is_exact=not turns)}
    name = f"kv_write {kv_format} D{dim}{' turned' if turns else ''}"
    return Case(name, launch, expects, is_sampled=(kv_format, dim, turns) == ("nvfp4", 128, False))
