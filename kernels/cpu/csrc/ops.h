// The operations of a program, each as a number of items and the work of one item.
//
// Items write disjoint memory and do not depend on who computes them. A row of tokens is computed in the same order of arithmetic
// whatever stands beside it.
#pragma once
#include "attention.h"
#include "kv_coded.h"
#include "kv_dense.h"
#include "kv_pairs.h"
#include "lora.h"

namespace HB_ISA {

// out = scale * row of the one matrix. Item: a token.
static void embed(const Op& op, const Slice& slice, int64_t row, uint8_t* scratch) {
  const Matrix& w = op.matrices[0];
  const WeightFormat& format = kFormats[w.kind];
  int64_t token = slice.step->token_ids[slice.first + row];
  if (token < 0 || token >= w.num_outputs) token = 0;
  const uint8_t* panel = (const uint8_t*)w.data + token / kPanel * w.panel_bytes;
  const int column = (int)(token % kPanel);
  float *out = row_of(slice, op.out, (int)row), *piece = (float*)scratch;
  if (w.kind == kF32 || w.kind == kBF16 || w.kind == kF16 || w.kind == kBF16Pairs) {  // one number of each input: no need to decode its neighbours
    for (int k = 0; k < w.num_inputs; k++) {
      const int64_t at = dense_place(w.kind, k, column);
      uint32_t wide = w.kind == kBF16 || w.kind == kBF16Pairs ? (uint32_t)((const uint16_t*)panel)[at] << 16 : 0;
      float value = w.kind == kF32   ? ((const float*)panel)[at]
                    : w.kind == kF16 ? from_f16_bits(((const uint16_t*)panel)[at])
                                     : read<float>(&wide);
      out[k] = value * op.scale;
    }
    return;
  }
  for (int k = 0; k < w.num_inputs; k += kPieceInputs) {
    int inputs = w.num_inputs - k < kPieceInputs ? w.num_inputs - k : kPieceInputs;
    format.decode(panel, k / format.group, inputs / format.group, piece);
    for (int i = 0; i < inputs; i++) out[k + i] = piece[i * kPanel + column] * op.scale;
  }
}

// out = cos | sin of the token's angles, in float32 as the law has them. aux: which rotary. Item: a token.
static void rotary(const Op& op, const Slice& slice, int64_t row) {
  const Rotary& r = slice.step->rotaries[op.aux];
  const float* inv_freq = r.inv_freq + (slice.first + row) * r.stride;
  float position = (float)slice.step->positions[slice.first + row], *out = row_of(slice, op.out, (int)row);
  for (int f = 0; f < r.num_freqs; f++) {
    float angle = position * inv_freq[f];
    out[f] = cosf(angle) * r.factor;
    out[r.num_freqs + f] = sinf(angle) * r.factor;
  }
}

// to (+)= x / sqrt(mean(x^2) + eps) * weight
HB_INLINE void norm_row(const float* x, const float* weight, int width, float eps, bool adds, float* to) {
  V squares = {};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total += x[i] * x[i];
  float scale = 1.0f / sqrtf(total / (float)width + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) {
    V value = load(x + i) * splat(scale) * load(weight + i);
    store(to + i, adds ? load(to + i) + value : value);
  }
  for (; i < width; i++) {
    float value = x[i] * scale * weight[i];
    to[i] = adds ? to[i] + value : value;
  }
}

// RMS norm of rows of `width`. Item: a token.
static void norm(const Op& op, const Slice& slice, int64_t row, uint8_t* scratch) {
  float* out = row_of(slice, op.out, (int)row);
  float* to = op.out_type == kFloats ? out : (float*)scratch;
  norm_row(row_of(slice, op.in, (int)row), op.weight, op.width, op.eps, op.adds, to);
  if (op.out_type != kFloats) put_row(op.out_type, to, op.width, out);
}

// out = rows of `in` as products want them; both may be the same buffer. Item: a token.
static void round_row(const Op& op, const Slice& slice, int64_t row, uint8_t* scratch) {
  const float* from = row_of(slice, op.in, (int)row);
  if (op.in == op.out) from = (const float*)memcpy(scratch, from, op.width * 4);
  put_row(op.out_type, from, op.width, row_of(slice, op.out, (int)row));
}

HB_INLINE int panels_of(const Matrix& w) { return (w.num_outputs + kPanel - 1) / kPanel; }

// How the panels of neighbouring matrices and the rows of a product are cut into items: all panels of some rows come before the
// next rows.
struct Cut {
  int panels_per_item, rows_per_item, row_items, panel_items;

  HB_INLINE Cut of(const Matrix* w, int num_matrices, const Slice& slice) {
    const int num_rows = slice.num_rows;
    Cut cut = {num_rows <= kPairRows ? 2 : 1, num_rows, 1, 0};
    for (int i = 0; i < num_matrices; i++) cut.panel_items += cut.panel_items_of(w[i]);
    // Many rows hide the reading of the weights: each thread then takes all panels of rows of its own, which do not leave its core.
    if (num_rows >= kOwnRows * slice.num_threads) cut.rows_per_item = round_up((num_rows + slice.num_threads - 1) / slice.num_threads, kRows);
    else if (cut.panel_items < 4 * slice.num_threads && num_rows > kBlockRows) cut.rows_per_item = kBlockRows;
    cut.row_items = (num_rows + cut.rows_per_item - 1) / cut.rows_per_item;
    return cut;
  }
  inline __attribute__((always_inline)) int panel_items_of(const Matrix& w) const { return (panels_of(w) + panels_per_item - 1) / panels_per_item; }
};

HB_INLINE int64_t items_of(const Matrix* w, int num_matrices, const Slice& slice) {
  const Cut cut = Cut::of(w, num_matrices, slice);
  return (int64_t)cut.panel_items * cut.row_items;
}

// What an item of a product covers: panels of one of the matrices, and rows.
struct Part {
  const Matrix& w;
  int panel, panels, first_row, end_row;

  HB_INLINE Part of(int64_t item, const Matrix* w, int num_matrices, const Slice& slice) {
    const Cut cut = Cut::of(w, num_matrices, slice);
    const int first = (int)(item / cut.panel_items) * cut.rows_per_item, end = first + cut.rows_per_item;
    int at = (int)(item % cut.panel_items);
    for (int count; at >= (count = cut.panel_items_of(*w)); w++) at -= count;
    const int panel = at * cut.panels_per_item, left = panels_of(*w) - panel;
    return {*w, panel, cut.panels_per_item < left ? cut.panels_per_item : left, first, end < slice.num_rows ? end : slice.num_rows};
  }
};

// to[width] (+)= from + bias
HB_INLINE void put(const float* from, const float* bias, int width, bool adds, float* to) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    V value = load(from + i);
    if (bias) value += load(bias + i);
    store(to + i, adds ? load(to + i) + value : value);
  }
  for (; i < width; i++) {
    float value = bias ? from[i] + bias[i] : from[i];
    to[i] = adds ? to[i] + value : value;
  }
}

// out (+)= in * W^T + bias, for matrices that lie side by side in the output. Item: panels of one matrix, a block of rows.
static void linear(const Op& op, const Slice& slice, int64_t item, uint8_t* scratch) {
  const auto [w, panel, panels, start, end] = Part::of(item, op.matrices, op.num_matrices, slice);
  const int column = panel * kPanel, width = w.num_outputs - column < panels * kPanel ? w.num_outputs - column : panels * kPanel;
  float *piece = (float*)scratch, *y = piece + kPieceInputs * kPanel;
  const int64_t ldx = stride_of(slice, op.in);
  for (int row = start; row < end; row += kBlockRows) {
    int rows = end - row < kBlockRows ? end - row : kBlockRows;
    multiply_of(w, op.in_type)(w, panel, panels, rows, row_of(slice, op.in, row), ldx, y, panels * kPanel, piece);
    expand(op, slice, &w - op.matrices, panel, panels, row, rows, y, panels * kPanel);
    for (int r = 0; r < rows; r++)
      put(y + r * panels * kPanel, w.bias ? w.bias + column : nullptr, width, op.adds,
          row_of(slice, op.out, row + r) + w.first_column + column);
  }
}

// The greatest of in * W^T over the panels of an item, without writing the product: pairs (value, output's number) in buffer `out`,
// at twice the panel. The first of equals counts; a NaN makes the value a NaN.
static void best(const Op& op, const Slice& slice, int64_t item, uint8_t* scratch) {
  const Part part = Part::of(item, op.matrices, 1, slice);
  const Matrix& w = part.w;
  const int column = part.panel * kPanel, wide = part.panels * kPanel;
  const int width = w.num_outputs - column < wide ? w.num_outputs - column : wide;
  float *piece = (float*)scratch, *y = piece + kPieceInputs * kPanel;
  for (int row = part.first_row; row < part.end_row; row += kBlockRows) {
    int rows = part.end_row - row < kBlockRows ? part.end_row - row : kBlockRows;
    multiply_of(w, op.in_type)(w, part.panel, part.panels, rows, row_of(slice, op.in, row), stride_of(slice, op.in), y, wide, piece);
    for (int r = 0; r < rows; r++) {
      float *scores = y + r * wide, *to = row_of(slice, op.out, row + r) + 2 * part.panel;
      V nan = {};  // a number minus itself is 0, anything else is none
      for (int i = 0; i < wide; i += kLanes) nan += load(scores + i) - load(scores + i);
      for (int i = width; i < wide; i++) scores[i] = -INFINITY;
      V greatest = load(scores);
      for (int i = kLanes; i < wide; i += kLanes) greatest = maximum(greatest, load(scores + i));
      const float most = maximum(greatest);
      int32_t at = column;
      for (int i = 0, lane; i < wide; i += kLanes, at += kLanes)
        if ((lane = first_lane(load(scores + i), most)) < kLanes) {
          at += lane;
          break;
        }
      to[0] = most + sum(nan);
      memcpy(to + 1, &at, 4);
    }
  }
}

// The best of all panels: (value, number as an integer's bits) from the pairs in buffer `in`. Item: a row.
static void best_of_panels(const Op& op, const Slice& slice, int64_t row) {
  const Matrix& w = op.matrices[0];
  const int step = Cut::of(op.matrices, 1, slice).panels_per_item;
  const float* pairs = row_of(slice, op.in, (int)row);
  float* to = row_of(slice, op.out, (int)row);
  to[0] = pairs[0], to[1] = pairs[1];
  for (int panel = step; panel < panels_of(w); panel += step)
    if (pairs[2 * panel] > to[0] || pairs[2 * panel] != pairs[2 * panel]) to[0] = pairs[2 * panel], to[1] = pairs[2 * panel + 1];
}

HB_INLINE V activate(V gate, int activation) {
  if (activation == kSilu) return gate / (splat(1.0f) + exponential(-gate));
  V inner = gate * fma(gate * gate, splat(0.7978845608f * 0.044715f), splat(0.7978845608f));
  return splat(0.5f) * gate * (splat(1.0f) + hyperbolic_tangent(inner));
}

// out = activation(in * gate^T) * (in * up^T); matrices: gate, up. Item: a panel of both, a block of rows.
static void gated(const Op& op, const Slice& slice, int64_t item, uint8_t* scratch) {
  const auto [gate, panel, panels, start, end] = Part::of(item, op.matrices, 1, slice);
  const Matrix& up = op.matrices[1];
  const int column = panel * kPanel, wide = panels * kPanel;
  const int width = gate.num_outputs - column < wide ? gate.num_outputs - column : wide;
  float *piece = (float*)scratch, *g = piece + kPieceInputs * kPanel, *u = g + kBlockRows * kPanel * 2;
  const int64_t ldx = stride_of(slice, op.in);
  for (int row = start; row < end; row += kBlockRows) {
    int rows = end - row < kBlockRows ? end - row : kBlockRows;
    const float* x = row_of(slice, op.in, row);
    multiply_of(gate, op.in_type)(gate, panel, panels, rows, x, ldx, g, wide, piece);
    multiply_of(up, op.in_type)(up, panel, panels, rows, x, ldx, u, wide, piece);
    expand(op, slice, 0, panel, panels, row, rows, g, wide);
    expand(op, slice, 1, panel, panels, row, rows, u, wide);
    for (int r = 0; r < rows; r++) {
      float *gr = g + r * wide, *ur = u + r * wide;
      if (gate.bias) put(gr, gate.bias + column, width, false, gr);
      if (up.bias) put(ur, up.bias + column, width, false, ur);
      for (int i = 0; i < wide; i += kLanes) store(gr + i, activate(load(gr + i), op.activation) * load(ur + i));
      float* out = row_of(slice, op.out, row + r);
      if (op.out_type == kBF16Rows) put_bf16(gr, width, (uint16_t*)out + column);
      else put(gr, nullptr, width, false, out + column);
    }
  }
}

HB_INLINE void rotate(float* x, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    V low = load(x + i), high = load(x + i + half), c = load(cosine + i), s = load(sine + i);
    store(x + i, low * c - high * s);
    store(x + i + half, high * c + low * s);
  }
  for (; i < half; i++) {
    float low = x[i], high = x[i + half];
    x[i] = low * cosine[i] - high * sine[i];
    x[i + half] = high * cosine[i] + low * sine[i];
  }
}

// q, k and v lie side by side in `in`, in place: norms of q's and k's heads (weight, weight2; null: none), rotation by buffer
// `aux` (-1: none), then, unless the cache is coded, k and v into it. Item: a token.
template <class Format> static void heads_as(const Op& op, const Slice& slice, int64_t row) {
  const Attention& a = *op.attention;
  float *x = row_of(slice, op.in, (int)row), *cosine = op.aux < 0 ? nullptr : row_of(slice, op.aux, (int)row);
  const int half = a.head_dim / 2;
  for (int head = 0; head < a.num_heads + a.num_kv_heads; head++) {
    float* at = x + head * a.head_dim;
    const float* weight = head < a.num_heads ? op.weight : op.weight2;
    if (weight) norm_row(at, weight, a.head_dim, op.eps, false, at);
    if (cosine) rotate(at, cosine, cosine + half, half);
  }
  int64_t slot = a.cache.format == kCacheCoded ? -1 : slice.step->groups[a.group].slot_mapping[slice.first + row];
  if (slot < 0) return;
  const float *k = x + a.num_heads * a.head_dim, *v = k + a.num_kv_heads * a.head_dim;
  const int64_t block = slot / a.cache.block_size;
  const int offset = (int)(slot % a.cache.block_size);
  for (int head = 0; head < a.num_kv_heads; head++) {
    Format::write_key(a, block, head, offset, k + head * a.head_dim);
    Format::write_value(a, block, head, offset, v + head * a.head_dim_v);
  }
}

// Each head's vector in `in`, in place, by its own matrix. Item: a head, a block of rows.
static void turn(const Op& op, const Slice& slice, int64_t item, uint8_t* scratch) {
  const int row_items = (slice.num_rows + kBlockRows - 1) / kBlockRows, first = (int)(item % row_items) * kBlockRows;
  const Matrix& w = op.matrices[item / row_items];
  const int rows = slice.num_rows - first < kBlockRows ? slice.num_rows - first : kBlockRows, num_panels = panels_of(w), wide = num_panels * kPanel;
  float *piece = (float*)scratch, *y = piece + kPieceInputs * kPanel, *x = row_of(slice, op.in, first) + w.first_column;
  const int64_t ldx = stride_of(slice, op.in);
  for (int panel = 0; panel < num_panels; panel++) multiply_of(w, kFloats)(w, panel, 1, rows, x, ldx, y + panel * kPanel, wide, piece);
  for (int r = 0; r < rows; r++) put(y + r * wide, w.bias, w.num_outputs, false, x + r * ldx);
}

// The first `width` columns of `in`, for whoever wants to see them. Item: a token.
static void tap_row(const Op& op, const Slice& slice, int64_t row) {
  memcpy(op.tap + (slice.first + row) * op.width, row_of(slice, op.in, (int)row), op.width * 4);
}

// k and v, which lie behind q in `in`, into a coded cache. Item: all keys, or all values, of a kv head.
static void store_coded(const Op& op, const Slice& slice, int64_t item) {
  const Attention& a = *op.attention;
  const Group& group = slice.step->groups[a.group];
  const bool is_key = item % 2 == 0;
  const int head = (int)(item / 2), dim = is_key ? a.head_dim : a.head_dim_v;
  const int column = a.num_heads * a.head_dim + (is_key ? 0 : a.num_kv_heads * a.head_dim) + head * dim;
  for (int row = 0; row < slice.num_rows; row++) {
    const float* from = row_of(slice, op.in, row) + column;
    const int64_t slot = group.slot_mapping[slice.first + row], first_slot = group.first_slots ? group.first_slots[slice.first + row] : -1;
    if (slot >= 0) write_coded(a, is_key, slot / a.cache.block_size, head, (int)(slot % a.cache.block_size), from);
    if (first_slot < 0) continue;
    const Cache& first = a.first;
    uint8_t* to = slot_of(is_key ? first.k.codes : first.v.codes, first_slot / first.block_size, head, (int)(first_slot % first.block_size));
    kCodecs[first.k.codec].encode(from, dim, {1.0f, nullptr}, to, nullptr);
  }
}

struct CacheKernels {
  void (*heads)(const Op&, const Slice&, int64_t);
  void (*attend)(const Op&, const Slice&, int64_t, uint8_t*);
};
#define HB_CACHE(F) {heads_as<F>, attend_as<F>}
static const CacheKernels kCaches[] = {HB_CACHE(DenseKV<kCacheF32>), HB_CACHE(DenseKV<kCacheBF16>), HB_CACHE(DenseKV<kCacheF16>),
                                       HB_CACHE(WidePairKV), {heads_as<DenseKV<kCacheF32>>, attend_as<CodedKV<F32>>}};
static const CacheKernels kPairCache = HB_CACHE(PairKV), kCodedPairs = {heads_as<DenseKV<kCacheF32>>, attend_as<CodedKV<PairWords>>};

// Those of the operation's cache; pairs are multiplied as such where the operation rounds its queries and weights to bfloat16.
HB_INLINE const CacheKernels& cache_of(const Op& op) {
  const int format = op.attention->cache.format;
  if (op.in_type != kBF16Rows) return kCaches[format];
  return format == kCacheBF16Pairs ? kPairCache : format == kCacheCoded ? kCodedPairs : kCaches[format];
}

static int64_t num_items(const Op& op, const Slice& slice) {
  int64_t count = 0;
  switch (op.code) {
    case kLinear: return items_of(op.matrices, op.num_matrices, slice);
    case kGated:
    case kBest: return items_of(op.matrices, 1, slice);
    case kAttend: return num_attend_items(*op.attention, slice);
    case kCombine:
      for (int i = 0; i < slice.num_work[op.attention->group]; i++) count += slice.work[op.attention->group][i].partial >= 0;
      return count ? (int64_t)slice.num_work[op.attention->group] * op.attention->num_heads : 0;
    case kTurn: return (int64_t)op.num_matrices * ((slice.num_rows + kBlockRows - 1) / kBlockRows);
    case kStore: return 2 * op.attention->num_kv_heads;
    case kShrink: return num_shrink_items(op, slice);
    default: return slice.num_rows;
  }
}

static void run_item(const Op& op, const Slice& slice, int64_t item, uint8_t* scratch) {
  switch (op.code) {
    case kEmbed: return embed(op, slice, item, scratch);
    case kRotary: return rotary(op, slice, item);
    case kNorm: return norm(op, slice, item, scratch);
    case kLinear: return linear(op, slice, item, scratch);
    case kGated: return gated(op, slice, item, scratch);
    case kHeads: return cache_of(op).heads(op, slice, item);
    case kAttend: return cache_of(op).attend(op, slice, item, scratch);
    case kCombine: return combine(op, slice, item, scratch);
    case kBest: return best(op, slice, item, scratch);
    case kBestOfPanels: return best_of_panels(op, slice, item);
    case kRound: return round_row(op, slice, item, scratch);
    case kTurn: return turn(op, slice, item, scratch);
    case kStore: return store_coded(op, slice, item);
    case kTap: return tap_row(op, slice, item);
    case kShrink: return shrink(op, slice, item, scratch);
  }
}

}  // namespace HB_ISA
