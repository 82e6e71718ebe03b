"""Rotation of query and key heads in Triton, with the norms that some families have before it, in one pass.

The twin of `kernels.rope.rotate` and `kernels.norm.norm_heads`; heads may lie in a view of the product that made them. Each
step is rounded to the dtype of the heads, as PyTorch rounds it. Knows tensors only. Called through `TritonLayers`.

Shape letters: T tokens, N query and key heads, D head dim; in kernels R rows (heads of tokens), C numbers with padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.norm import HeadNorms
from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.norm import inverse_rms, program_size, scale_channels


def rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, norms: HeadNorms | None = None) -> Tensor:
    """The heads, normalised if so asked, with their pairs (d, d + D/2) rotated by the token's angles; contiguous.

    The tables are those of `kernels.rope.rotary_tables`, in the dtype of the heads.
    """
    out_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    if out_TND.numel():
        launch_of(x_TND, cos_T1D, sin_T1D, norms, out_TND).run()
    return out_TND


def launch_of(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, norms: HeadNorms | None, out_TND: Tensor) -> Launch:
    num_tokens, num_heads, dim = x_TND.shape
    assert x_TND.stride(2) == 1 and cos_T1D.is_contiguous() and sin_T1D.is_contiguous(), "numbers of a head lie side by side"
    assert cos_T1D.dtype == sin_T1D.dtype == x_TND.dtype
    width, rows, num_warps = program_size(dim)
    weights = (None, None, 0, 0.0) if norms is None else (norms.q_weight_D, norms.k_weight_D, norms.num_heads, norms.eps)
    arguments = (
        *(x_TND, cos_T1D, sin_T1D, out_TND, *weights),
        *(num_tokens * num_heads, num_heads, x_TND.stride(0), x_TND.stride(1)),
        *(dim, width, rows, norms is not None and norms.add_unit_offset),
    )
    return Launch((triton.cdiv(num_tokens * num_heads, rows),), rotate_rows, arguments, num_warps)


@triton.jit(do_not_specialize=["num_rows"])  # which is another in each step
def rotate_rows(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    num_q_heads: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    """Grid: groups of ROWS rows. The weights are None where nothing is normalised; the first num_q_heads heads are queries."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_R, head_R = row_R // num_heads, row_R % num_heads
    number_C = tl.arange(0, WIDTH)
    other_C = (number_C + DIM // 2) % DIM  # the other of the pair
    is_number_RC = (row_R < num_rows)[:, None] & (number_C < DIM)[None, :]
    from_R1 = x + (token_R.to(tl.int64) * token_stride + head_R * head_stride)[:, None]
    x_RC = tl.load(from_R1 + number_C[None, :], mask=is_number_RC, other=0.0)
    other_RC = tl.load(from_R1 + other_C[None, :], mask=is_number_RC, other=0.0)
    kind = x.dtype.element_ty
    if q_weight is not None:
        x_RC, other_RC = x_RC.to(tl.float32), other_RC.to(tl.float32)
        factor_R1 = inverse_rms(x_RC, eps, DIM)
        is_query_R = head_R < num_q_heads
        weight_RC = _weights(q_weight, k_weight, is_query_R, number_C, is_number_RC)
        x_RC = scale_channels(x_RC * factor_R1, weight_RC, kind, UNIT_OFFSET)
        weight_RC = _weights(q_weight, k_weight, is_query_R, other_C, is_number_RC)
        other_RC = scale_channels(other_RC * factor_R1, weight_RC, kind, UNIT_OFFSET)
    angle_RC = token_R.to(tl.int64)[:, None] * DIM + number_C[None, :]
    cos_RC = tl.load(cos + angle_RC, mask=is_number_RC, other=0.0)
    sin_RC = tl.load(sin + angle_RC, mask=is_number_RC, other=0.0)
    rotated_RC = _product(x_RC, cos_RC, kind) + _product(other_RC, sin_RC, kind)
    tl.store(out + row_R.to(tl.int64)[:, None] * DIM + number_C[None, :], rotated_RC.to(kind), mask=is_number_RC)


@triton.jit
def _weights(
    q_weight: tl.tensor, k_weight: tl.tensor, is_query_R: tl.tensor, channel_C: tl.tensor, is_number_RC: tl.tensor
) -> tl.tensor:
    """[R, C]: those of the norm of each row's kind of head."""
    is_query_RC = is_number_RC & is_query_R[:, None]
    is_key_RC = is_number_RC & (is_query_R == 0)[:, None]
    q_RC = tl.load(q_weight + channel_C[None, :], mask=is_query_RC, other=0.0)
    k_RC = tl.load(k_weight + channel_C[None, :], mask=is_key_RC, other=0.0)
    return tl.where(is_query_RC, q_RC, k_RC)


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Rounded to `kind`, as float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(kind).to(tl.float32)
