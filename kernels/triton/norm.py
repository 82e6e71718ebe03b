"""RMS normalisation in Triton, alone or after a sum: the twins of `kernels.norm` and of the residual sum before it.

A program takes whole rows, of short ones many, and how many depends on nothing but their width: so a row is summed in the same
order in any batch. Rows may lie in a view (heads of a product's output). Knows tensors only. Called through `TritonLayers`.

Shape letters: T tokens, N rows of a token, E channels; in kernels R rows, C channels with padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch

_NUMBERS_PER_PROGRAM = 2048
_NUMBERS_PER_WARP = 512
_MAX_WARPS = 16


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False) -> Tensor:
    """As the law: any leading shape, of which the last dimension lies side by side; the result is contiguous."""
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    if out_TE.numel():
        launch_of(x_TE, weight_E, eps, add_unit_offset, out_TE).run()
    return out_TE


def add_rms_norm(
    x_TE: Tensor, added_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + added in their dtype, its norm); both inputs lie alike."""
    sum_TE, out_TE = (torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device) for _ in range(2))
    if out_TE.numel():
        launch_of(x_TE, weight_E, eps, add_unit_offset, out_TE, added_TE, sum_TE).run()
    return sum_TE, out_TE


def launch_of(
    x_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    add_unit_offset: bool,
    out_TE: Tensor,
    added_TE: Tensor | None = None,
    sum_TE: Tensor | None = None,
) -> Launch:
    """added, sum: both or neither."""
    x_TNE, added_TNE = _rows(x_TE), None if added_TE is None else _rows(added_TE)
    assert x_TNE.stride(2) == 1 and weight_E.is_contiguous(), "channels lie side by side"
    assert added_TNE is None or (added_TNE.shape, added_TNE.stride()) == (x_TNE.shape, x_TNE.stride()), "both lie alike"
    num_tokens, rows_per_token, num_channels = x_TNE.shape
    num_rows = num_tokens * rows_per_token
    width, rows, num_warps = program_size(num_channels)
    arguments = (
        *(x_TNE, added_TNE, weight_E, out_TE, sum_TE),
        *(num_rows, rows_per_token, x_TNE.stride(0), x_TNE.stride(1), eps),
        *(num_channels, width, rows, add_unit_offset),
    )
    return Launch((triton.cdiv(num_rows, rows),), norm_rows, arguments, num_warps)


def _rows(x_TE: Tensor) -> Tensor:
    """[T, N, E]: a view wherever two strides can say where the rows lie."""
    return x_TE.view(-1, 1, x_TE.shape[-1]) if x_TE.ndim < 3 else x_TE.flatten(0, -3)


def program_size(num_channels: int) -> tuple[int, int, int]:
    """(numbers of a padded row, rows, warps) of one program."""
    width = triton.next_power_of_2(num_channels)
    rows = max(1, _NUMBERS_PER_PROGRAM // width)
    return width, rows, min(_MAX_WARPS, rows * width // _NUMBERS_PER_WARP)


@triton.jit(do_not_specialize=["num_rows"])  # which is another in each step
def norm_rows(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    rows_per_token: tl.tensor,
    token_stride: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    """Grid: groups of ROWS rows. added and sums are None for a plain norm."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel_C = tl.arange(0, WIDTH)
    is_channel_C = channel_C < CHANNELS
    is_number_RC = (row_R < num_rows)[:, None] & is_channel_C[None, :]
    from_R = (row_R // rows_per_token).to(tl.int64) * token_stride + (row_R % rows_per_token) * row_stride
    from_RC = from_R[:, None] + channel_C[None, :]
    to_RC = row_R.to(tl.int64)[:, None] * CHANNELS + channel_C[None, :]
    kind = x.dtype.element_ty
    x_RC = tl.load(x + from_RC, mask=is_number_RC, other=0.0).to(tl.float32)
    if added is not None:
        x_RC = (x_RC + tl.load(added + from_RC, mask=is_number_RC, other=0.0).to(tl.float32)).to(kind)
        tl.store(sums + to_RC, x_RC, mask=is_number_RC)
        x_RC = x_RC.to(tl.float32)
    weight_1C = tl.load(weight + channel_C, mask=is_channel_C, other=0.0)[None, :]
    normed_RC = x_RC * inverse_rms(x_RC, eps, CHANNELS)
    tl.store(out + to_RC, scale_channels(normed_RC, weight_1C, kind, UNIT_OFFSET), mask=is_number_RC)


@triton.jit
def inverse_rms(x_RC: tl.tensor, eps: tl.tensor, CHANNELS: tl.constexpr) -> tl.tensor:
    """1 / sqrt(mean(x^2) + eps) of rows with zeros beyond their channels, float32 [R, 1]. Roots and quotients are IEEE's."""
    mean_R1 = tl.div_rn(tl.sum(x_RC * x_RC, 1, keep_dims=True), CHANNELS + 0.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean_R1 + eps))


@triton.jit
def scale_channels(normed_RC: tl.tensor, weight_RC: tl.tensor, kind: tl.constexpr, UNIT_OFFSET: tl.constexpr) -> tl.tensor:
    """float32 rows times the weight, as `kind`, with the casts in the family's order; weight: [R, C] or [1, C]."""
    if UNIT_OFFSET:
        return (normed_RC * (1.0 + weight_RC.to(tl.float32))).to(kind)
    return (weight_RC.to(tl.float32) * normed_RC.to(kind).to(tl.float32)).to(kind)
