// What adapters add to products: out = scales * (A x) for the tokens that have one, as an operation of its own before the product; B
// times that is added by the product itself, whose chains of multiply-adds go on over B's inputs.
//
// Tokens of one adapter that are neighbours share the loads of its weights; no row's bits depend on which those are. Tokens without
// an adapter are passed over.
#pragma once
#include "matmul.h"

namespace HB_ISA {

constexpr int kShrinkRows = 2 * kRows;  // of an item

// Calls each(adapter, first row, rows) for the neighbours that share one among `num_rows` rows from `first` on.
template <class Each> HB_INLINE void each_adapter(const Op& op, const Slice& slice, int first, int num_rows, const Each& each) {
  const int32_t* seats = slice.step->seats + slice.first + first;
  for (int row = 0, count; row < num_rows; row += count) {
    for (count = 1; row + count < num_rows && seats[row + count] == seats[row];) count++;
    if (seats[row]) each(op.loras[seats[row]], first + row, count);
  }
}

static int64_t num_shrink_items(const Op& op, const Slice& slice) {
  if (!slice.step->seats) return 0;
  return (int64_t)((slice.num_rows + kShrinkRows - 1) / kShrinkRows) * (op.width / kPanel);
}

// out = scales * (in A^T), with `width` columns for the adapter of the highest rank. Item: a panel of A, a block of rows.
static void shrink(const Op& op, const Slice& slice, int64_t item, uint8_t* scratch) {
  const int num_panels = op.width / kPanel, panel = (int)(item % num_panels), first = (int)(item / num_panels) * kShrinkRows;
  const int num_rows = slice.num_rows - first < kShrinkRows ? slice.num_rows - first : kShrinkRows;
  float* piece = (float*)scratch;
  each_adapter(op, slice, first, num_rows, [&](const Lora& lora, int row, int rows) {
    const Matrix& a = lora.a;
    const int column = panel * kPanel, width = a.num_outputs - column < kPanel ? a.num_outputs - column : kPanel;
    if (!a.data || width <= 0) return;
    const int64_t ldx = stride_of(slice, op.in), ldy = stride_of(slice, op.out);
    float *x = row_of(slice, op.in, row), *y = row_of(slice, op.out, row) + column;
    if (op.in_type != kInt8Rows && op.in_type != kInt16Rows) {
      kFormats[a.kind].multiply(a, panel, 1, rows, x, ldx, y, ldy, nullptr);
    } else {
      const uint8_t* at = (const uint8_t*)a.data + panel * a.panel_bytes;
      for (int k = 0; k < a.num_inputs; k += kPieceInputs) {
        const int inputs = a.num_inputs - k < kPieceInputs ? a.num_inputs - k : kPieceInputs;
        for (int r = 0; r < rows; r++) {
          if (op.in_type == kInt8Rows) widen_whole<1>(x + r * ldx, a.num_inputs, k, inputs, piece + r * kPieceInputs);
          else widen_whole<2>(x + r * ldx, a.num_inputs, k, inputs, piece + r * kPieceInputs);
        }
        multiply_plain(a.kind, at + a.panel_bytes / a.num_inputs * k, inputs, rows, piece, kPieceInputs, y, ldy, k > 0);
      }
    }
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < width; i++) y[r * ldy + i] *= lora.scales[column + i];
  });
}

// y += B h for `rows` rows from `row` on and `panels` panels of the product's matrix number `part`; h: buffer aux, as `shrink` left it.
static void expand(const Op& op, const Slice& slice, int64_t part, int panel, int panels, int row, int rows, float* y, int64_t ldy) {
  if (!op.loras || !slice.step->seats) return;
  each_adapter(op, slice, row, rows, [&](const Lora& lora, int first, int count) {
    const Matrix& b = lora.b[part];
    if (!b.data) return;
    for (int p = 0; p < panels; p++)
      multiply_plain(b.kind, (const uint8_t*)b.data + (panel + p) * b.panel_bytes, b.num_inputs, count,
                     row_of(slice, op.aux, first) + b.first_column, stride_of(slice, op.aux), y + (first - row) * ldy + p * kPanel, ldy, true);
  });
}

}  // namespace HB_ISA
