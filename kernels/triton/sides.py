"""K or V of a layer's cache as the Triton kernels take it: one argument that holds addresses, strides and the codec.

Planes and records differ in strides alone, so that one writer and one reader serve all formats, and pairs of formats. Knows the
formats' orders of bytes; made from a `LayerCache` by whoever launches a kernel.

Shape letters: G kv heads, B blocks, S block size, N numbers or bytes of a vector, E extra bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.codecs import codec_kernels
from halfbyte.kernels.triton.packed import NOT_PACKED, packed_kernels
from halfbyte.kvcache.formats.base import Codec
from halfbyte.kvcache.formats.coded import CodedFormat
from halfbyte.kvcache.formats.dense import DenseFormat
from halfbyte.kvcache.formats.numbers import packed_bytes
from halfbyte.kvcache.formats.swizzled import GROUP, SwizzledFormat
from halfbyte.kvcache.tensors import LayerCache

_WIDE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class KVSide(NamedTuple):
    """codes: [B, G, S, N], numbers of a dense codec, else bytes. extra: bytes [B, G, S, E]; the codes again where there are none.

    All but the tensors is constant, a kernel is compiled for it. width: the head dim's next power of two, as tiles have it.
    extra_step: how far apart a token's extra bytes lie: 1, or as many tokens as lie interleaved (`kvcache.formats.swizzled`),
    which only the writer knows. uses_scale: whether the codec's numbers are to be multiplied with `scale`. is_packed: whether
    vectors are read by the word, as the fields of `PackedKernels` from `pairs` on say. num_parts: into how many tiles V's numbers
    fall apart.
    """

    codes: Tensor
    extra: Tensor
    scale: Tensor  # float32 [G]
    codes_block_stride: Any
    codes_head_stride: Any
    codes_token_stride: Any
    extra_block_stride: Any
    extra_head_stride: Any
    extra_token_stride: Any
    dim: Any
    width: Any
    bits: Any
    num_extra: Any
    encode: Any
    decode: Any
    parameter: Any
    extra_step: Any
    uses_scale: Any
    num_parts: Any
    is_packed: Any
    pairs: Any
    unit: Any
    offset: Any
    factor: Any
    power: Any


def view_sides(cache: LayerCache, *, by_word: bool = True) -> tuple[KVSide, KVSide]:
    """K and V of a cache that `limits.refuse` lets pass. by_word: whether codes may be read as float16, where `packed` can."""
    kv_format, spec = cache.format, cache.spec
    assert isinstance(kv_format, CodedFormat | DenseFormat)
    k, v = (side.codec for side in kv_format.sides)
    k_codes, k_extra, v_codes, v_extra = _views(cache, k, v)
    extra_step = GROUP if isinstance(kv_format, SwizzledFormat) else 1
    return (
        _side(k, spec.head_dim, k_codes, k_extra, cache.scales.k_G, by_word),
        _side(v, spec.head_dim_v, v_codes, v_extra, cache.scales.v_G, by_word, extra_step),
    )


def _views(cache: LayerCache, k: Codec, v: Codec) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Codes and extra bytes of K and of V as [B, G, S, bytes or numbers]."""
    planes, spec = cache.planes, cache.spec
    if "kv" not in planes:
        return planes["k"], planes.get("k_extra"), planes["v"], planes.get("v_extra")
    sizes = [packed_bytes(k.bits, spec.head_dim), k.extra_bytes(spec.head_dim)]
    sizes += [packed_bytes(v.bits, spec.head_dim_v), v.extra_bytes(spec.head_dim_v)]
    records_BGSN = planes["kv"].transpose(1, 2)
    k_codes, k_extra, v_codes, v_extra, _ = records_BGSN.split([*sizes, records_BGSN.shape[-1] - sum(sizes)], -1)
    return k_codes, k_extra, v_codes, v_extra


def _side(
    codec: Codec, dim: int, codes: Tensor, extra: Tensor | None, scale_G: Tensor, by_word: bool, extra_step: int = 1
) -> KVSide:
    if codec.bits > 8:
        codes = codes.view(_WIDE[codec.name])
    num_extra = codec.extra_bytes(dim)
    if extra is None or not num_extra:
        extra = codes
    kernels = codec_kernels(codec, dim)
    packed = packed_kernels(codec, dim) if by_word and _lies_in_words(codes) else None
    constants = (
        *codes.stride()[:3],
        *extra.stride()[:3],
        dim,
        triton.next_power_of_2(dim),
        codec.bits,
        num_extra,
        kernels.encode,
        kernels.decode,
        kernels.parameter,
        extra_step,
        codec.uses_scale,
        packed.num if packed else 2 if codec.bits < 8 else 1,
        packed is not None,
        *(packed or NOT_PACKED)[:-1],
    )
    return KVSide(codes, extra, scale_G, *map(tl.constexpr, constants))


def _lies_in_words(codes: Tensor) -> bool:
    """Whether each vector begins at a multiple of 4 bytes."""
    return codes.element_size() == 1 and not any(number % 4 for number in (codes.data_ptr(), *codes.stride()[:3]))
