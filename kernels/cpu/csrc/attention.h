// Attention of one kv head over the paged cache: tiles of keys, an online softmax, and the heads that share the kv head.
//
// The bits of a row do not depend on what is computed beside it: keys are visited in tiles of kKeys and parts of kPartKeys whose
// borders are absolute positions; within a tile each score is one chain over the head's dimensions and each output one chain over
// the keys; a key that a row must not see adds zero times a finite value; parts are merged in order by one rule, whether one item
// walked through all of them (prefill) or each had its own (a long context spread over the threads).
#pragma once
#include "kv_dense.h"
#include "matmul.h"
#include "rows.h"

namespace HB_ISA {

constexpr int kKeys = 64;          // keys of a tile
constexpr int kMaxRows = 64;       // queries times heads per kv head; as MAX_HEADS_PER_KV_HEAD of abi.py
constexpr int kMaxHeadDim = 512;   // as MAX_HEAD_DIM of abi.py
static_assert(kKeys % kPanel == 0 && kPartKeys % kKeys == 0, "tiles must fill panels, parts must hold whole tiles");

HB_INLINE int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// State of a softmax over some of the keys: greatest score, sum and weighted values (rows of width `ld`), relative to it.
struct Softmax {
  float *most, *total, *out;
  int64_t ld;
  float* sums;  // of each row, kLanes of them while the total is being summed up
};

// Where the keys and values of a tile lie.
struct Tile {
  const uint8_t *k[kKeys], *v[kKeys];
  int count;
};

struct Scratch {
  float *q, *keys, *values, *scores;
  Softmax part, all;
  Tile tiles[2];
  int turn = 0;

  explicit Scratch(uint8_t* memory, int dim, int dim_v) {
    float* at = (float*)memory;
    auto take = [&](int64_t count) __attribute__((always_inline)) { float* had = at; at += (count + 15) / 16 * 16; return had; };
    int64_t wide_v = round_up(dim_v, kPanel);
    q = take((int64_t)kMaxRows * dim);
    keys = take((int64_t)kKeys * round_up(dim, kLanes));
    values = take(kKeys * wide_v);
    scores = take(kMaxRows * kKeys);
    part = {take(kMaxRows), take(kMaxRows), take(kMaxRows * wide_v), wide_v, take(kMaxRows * kLanes)};
    all = {take(kMaxRows), take(kMaxRows), take(kMaxRows * wide_v), wide_v, nullptr};
  }
};

// part is folded into all: the one rule for results over neighbouring ranges of keys. An empty range changes nothing.
HB_INLINE void merge(float most, float total, const float* out, float& all_most, float& all_total, float* all_out, int wide_v) {
  if (total == 0.0f) return;
  float greatest = most > all_most ? most : all_most;
  float part_scale = exponential(splat(most - greatest))[0];
  float all_scale = all_total == 0.0f ? 0.0f : exponential(splat(all_most - greatest))[0];
  all_total = all_total * all_scale + total * part_scale;
  for (int d = 0; d < wide_v; d += kLanes)
    store(all_out + d, load(all_out + d) * splat(all_scale) + load(out + d) * splat(part_scale));
  all_most = greatest;
}

// Finds keys start .. tile + count of the request, start >= tile. Places of the tile outside that range are given some key inside
// it: their weight is zero, and what another request or nobody wrote is never read.
HB_INLINE void find_tile(const Attention& a, const int32_t* table, int head, int tile, int start, int count, Tile& to) {
  const int size = a.cache.block_size;
  to.count = count;
  for (int i = start - tile; i < count;) {
    int position = tile + i, offset = position % size, end = i + size - offset < count ? i + size - offset : count;
    const uint8_t* k_at = slot_of(a.cache.k, table[position / size], head, offset);
    const uint8_t* v_at = slot_of(a.cache.v, table[position / size], head, offset);
    for (; i < end; i++, k_at += a.cache.k.token_stride, v_at += a.cache.v.token_stride) to.k[i] = k_at, to.v[i] = v_at;
  }
  for (int i = 0; i < start - tile; i++) to.k[i] = to.k[start - tile], to.v[i] = to.v[start - tile];
  for (int i = count; i < kKeys; i++) to.k[i] = to.k[count - 1], to.v[i] = to.v[count - 1];
}

// Decodes a tile: k turned (a panel of kPanel keys is [words of a key][kPanel]), v as panels of its columns, a word for each value
// or pair of values. Meanwhile the memory is asked for the tile `ahead`, a little at a time: a burst would be waited for.
template <class Format> HB_INLINE void load_tile(const Attention& a, const Tile& tile, const Tile& ahead, Scratch& s) {
  constexpr int kPerWord = Format::Product::kInputsPerWord;
  const int count = tile.count, wide_v = (int)s.part.ld, words = a.head_dim / kPerWord;
  const uint8_t *const *k = tile.k, *const *v = tile.v;
  for (int i = 0; i < count; i += kLanes) {
    float* panel = s.keys + (int64_t)(i / kPanel) * words * kPanel + i % kPanel;
    for (int w = 0; w < words; w += kLanes) {
      const int some = words - w < kLanes ? words - w : kLanes;
      V square[kLanes];
      if (Format::bytes(w) % kLineBytes < Format::bytes(kLanes))
        for (int r = 0; r < kLanes; r++) __builtin_prefetch(ahead.k[i + r] + Format::bytes(w));
      if (some == kLanes) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; r++) square[r] = Format::vector(k[i + r], w);
      } else {
        for (int r = 0; r < kLanes; r++) square[r] = Format::part(k[i + r], w, some);
      }
      transpose(square);
      if (some == kLanes) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; r++) store(panel + (int64_t)(w + r) * kPanel, square[r]);
      } else {
        for (int r = 0; r < some; r++) store(panel + (int64_t)(w + r) * kPanel, square[r]);
      }
    }
  }
  for (int d = 0; d < wide_v; d += kLanes) {
    float* column = s.values + (int64_t)(d / kPanel) * kKeys * kPanel + d % kPanel;
    const int dims = a.head_dim_v - d < kLanes ? a.head_dim_v - d : kLanes;
    if (dims == kLanes)
      for (int i = 0; i < count; i += kPerWord) {
        for (int j = 0; j < kPerWord; j++) __builtin_prefetch(ahead.v[i + j] + d * Format::kBytes);
        store(column + (int64_t)(i / kPerWord) * kPanel, Format::value(v + i, d));
      }
    else
      for (int i = 0; i < count; i += kPerWord)
        store(column + (int64_t)(i / kPerWord) * kPanel, dims > 0 ? Format::value_part(v + i, d, dims) : V{});
  }
}

// A product over panels of K words that lie side by side: two at a time when the rows are few.
template <class Product>
HB_INLINE void multiply_panels(
    const float* panels, int64_t panel_floats, int num_panels, int K, int M, const float* x, int64_t ldx, float* y, int64_t ldy, bool resumes) {
  for (int p = 0; p < num_panels;) {
    const uint8_t* at = (const uint8_t*)(panels + p * panel_floats);
    if (M <= kPairRows && p + 2 <= num_panels) {
      tile_of<Product, kPairRows, 2>(M, at, panel_floats * 4, {at, 0}, K, x, ldx, y + p * kPanel, ldy, resumes);
      p += 2;
    } else {
      multiply_dense<Product>(at, 0, K, M, x, ldx, y + p * kPanel, ldy, resumes);
      p += 1;
    }
  }
}

// Scores of one row for keys from .. to of a tile become weights relative to the greatest so far (zero elsewhere, up to `count`);
// what was summed up before is rescaled.
HB_INLINE void soften(float* scores, int from, int to, int count, float soft_cap, Softmax& part, int row) {
  float most = part.most[row];
  V greatest = splat(-INFINITY), index = {};
  for (int i = 0; i < kLanes; i++) index[i] = (float)i;
  for (int i = 0; i < count; i += kLanes) {
    V value = load(scores + i);
    if (soft_cap != 0.0f) value = hyperbolic_tangent(value / splat(soft_cap)) * splat(soft_cap);
    if (i < from || i + kLanes > to) {
      V at = index + splat((float)i);
      value = at < splat((float)from) ? splat(-INFINITY) : value;
      value = at < splat((float)to) ? value : splat(-INFINITY);
    }
    store(scores + i, value);
    greatest = maximum(greatest, value);
  }
  V total = load(part.sums + row * kLanes);
  if (any_above(greatest, splat(most))) {  // a NaN goes on into the sums: the row is then found to be no number
    const float tile_most = maximum(greatest);
    const V scale = most == -INFINITY ? V{} : exponential(splat(most - tile_most));
    total *= scale;
    float* out = part.out + row * part.ld;
    for (int d = 0; d < part.ld; d += kLanes) store(out + d, load(out + d) * scale);
    part.most[row] = most = tile_most;
  }
  for (int i = 0; i < count; i += kLanes) {
    V weight = exponential(load(scores + i) - splat(most));
    store(scores + i, weight);
    total += weight;
  }
  store(part.sums + row * kLanes, total);
}

// Keys first .. end of one kv head, inside one part of the context. end 0: none.
struct Range {
  int head, first, end;
};

HB_INLINE void find_first(const Attention& a, const int32_t* table, Range range, Tile& to) {
  int tile = range.first / kKeys * kKeys, count = range.end - tile < kKeys ? range.end - tile : kKeys;
  find_tile(a, table, range.head, tile, range.first, count, to);
}

// The softmax over one range, for `num_queries` queries from `position` with `heads` heads each, in s.part. Its first tile is
// found already (s.tiles[s.turn]); on its last one it finds the first of `next`, so that the memory is never waited for idly.
template <class Format>
static void attend_range(const Attention& a, const Work& work, const int32_t* table, Range range, Range next, Scratch& s) {
  using Product = typename Format::Product;
  constexpr int kPerWord = Product::kInputsPerWord;
  const int heads = a.num_heads / a.num_kv_heads, num_rows = work.num_queries * heads, wide_v = (int)s.part.ld;
  const int words = a.head_dim / kPerWord;
  for (int row = 0; row < num_rows; row++) s.part.most[row] = -INFINITY;
  memset(s.part.sums, 0, (int64_t)num_rows * kLanes * 4);
  memset(s.part.out, 0, (int64_t)num_rows * wide_v * 4);
  for (int tile = range.first / kKeys * kKeys; tile < range.end; tile += kKeys) {
    const int start = tile < range.first ? range.first : tile, count = s.tiles[s.turn].count;
    const bool is_last = tile + kKeys >= range.end;
    if (!is_last) find_first(a, table, {range.head, tile + kKeys, range.end}, s.tiles[s.turn ^ 1]);
    else if (next.end) find_first(a, table, next, s.tiles[s.turn ^ 1]);
    load_tile<Format>(a, s.tiles[s.turn], is_last && !next.end ? s.tiles[s.turn] : s.tiles[s.turn ^ 1], s);
    s.turn ^= 1;
    multiply_panels<Product>(s.keys, (int64_t)words * kPanel, (count + kPanel - 1) / kPanel, words, num_rows, s.q, a.head_dim,
                             s.scores, kKeys, false);
    for (int row = 0; row < num_rows; row++) {
      int position = work.position + row / heads;
      int from = a.window && position - a.window + 1 > start ? position - a.window + 1 : start;
      int to = position + 1 < tile + count ? position + 1 : tile + count;
      float* scores = s.scores + (int64_t)row * kKeys;
      if (from < to) soften(scores, from - tile, to - tile, count, a.soft_cap, s.part, row);
      else memset(scores, 0, kKeys * 4);
      if (kPerWord == 2) put_bf16(scores, round_up(count, kLanes), (uint16_t*)scores);  // each store lies behind the loads
    }
    multiply_panels<Product>(s.values, kKeys * kPanel, wide_v / kPanel, (count + kPerWord - 1) / kPerWord, num_rows, s.scores,
                             kKeys, s.part.out, wide_v, true);
  }
  for (int row = 0; row < num_rows; row++) s.part.total[row] = sum(load(s.part.sums + row * kLanes));
}

// The finished row, in place: the sum divided out, a sink counting as one more key without a value.
HB_INLINE void finish(const Attention& a, int head, float most, float total, float* sums) {
  float* out = sums;
  if (a.sinks) {
    float sink = a.sinks[head], greatest = sink > most ? sink : most;
    float scale = exponential(splat(most - greatest))[0];
    total = total * scale + exponential(splat(sink - greatest))[0];
    for (int d = 0; d < a.head_dim_v; d++) out[d] = sums[d] * scale / total;
    return;
  }
  for (int d = 0; d < a.head_dim_v; d++) out[d] = sums[d] / total;
}

HB_INLINE void put_head(const Op& op, const Slice& slice, int row, int head, const float* values) {
  const int dim = op.attention->head_dim_v;
  float* out = row_of(slice, op.out, row);
  if (op.out_type == kBF16Rows) put_bf16(values, dim, (uint16_t*)out + head * dim);
  else memcpy(out + head * dim, values, dim * 4);
}

// kv heads that one item takes: more than one lets it fetch the next head's keys while it computes, as long as all threads have
// enough items.
HB_INLINE int heads_per_item(const Attention& a, const Slice& slice) {
  int heads = a.num_kv_heads;
  while (heads > 1 && (a.num_kv_heads % heads || (int64_t)slice.num_work[a.group] * (a.num_kv_heads / heads) < 4 * slice.num_threads)) heads--;
  return heads;
}

// The range after `range` of an item that goes up to kv head `last`.
HB_INLINE Range after(Range range, const Work& work, int last) {
  int head = range.end < work.end_key ? range.head : range.head + 1, first = range.end < work.end_key ? range.end : work.first_key;
  if (head >= last) return {0, 0, 0};
  int end = (first / kPartKeys + 1) * kPartKeys;
  return {head, first, end < work.end_key ? end : work.end_key};
}

// The rows' results, or what is to become a part of them.
HB_INLINE void put_result(const Op& op, const Slice& slice, const Work& work, int kv_head, const Softmax& result) {
  const Attention& a = *op.attention;
  const int heads = a.num_heads / a.num_kv_heads;
  for (int row = 0; row < work.num_queries * heads; row++) {
    int head = kv_head * heads + row % heads;
    float* sums = result.out + row * result.ld;
    if (work.partial < 0) {
      finish(a, head, result.most[row], result.total[row], sums);
      put_head(op, slice, work.row + row / heads, head, sums);
    } else {  // one query
      float* to = slice.partials + ((int64_t)work.partial * a.num_heads + head) * slice.partial_stride;
      to[0] = result.most[row], to[1] = result.total[row];
      memcpy(to + 2, sums, a.head_dim_v * 4);
    }
  }
}

// Item (work, some kv heads). The queries lie in buffer `in`, rotated; results go to `out`, or to the partials.
template <class Format> static void attend_as(const Op& op, const Slice& slice, int64_t item, uint8_t* memory) {
  const Attention& a = *op.attention;
  const int per_item = heads_per_item(a, slice), items_per_work = a.num_kv_heads / per_item;
  const Work& work = slice.work[a.group][item / items_per_work];
  const int head = (int)(item % items_per_work) * per_item, last = head + per_item;
  const int heads = a.num_heads / a.num_kv_heads, num_rows = work.num_queries * heads;
  const Group& group = slice.step->groups[a.group];
  const int32_t* table = group.block_table + work.request * group.table_width;
  Scratch s(memory, a.head_dim, a.head_dim_v);
  const int wide_v = (int)s.part.ld;
  Range range = after({head - 1, 0, work.end_key}, work, last);
  find_first(a, table, range, s.tiles[0]);
  while (range.end) {
    if (range.first == work.first_key) {
      for (int row = 0; row < num_rows; row++) {
        const float* from = row_of(slice, op.in, work.row + row / heads) + (range.head * heads + row % heads) * a.head_dim;
        Format::put_query(from, a.scale, a.head_dim, s.q + (int64_t)row * a.head_dim);
        s.all.most[row] = -INFINITY, s.all.total[row] = 0.0f;
      }
      memset(s.all.out, 0, (int64_t)num_rows * wide_v * 4);
    }
    const Range next = after(range, work, last);
    attend_range<Format>(a, work, table, range, next, s);
    const bool is_alone = range.first == work.first_key && range.end == work.end_key;
    for (int row = 0; row < num_rows && !is_alone; row++)
      merge(s.part.most[row], s.part.total[row], s.part.out + row * wide_v, s.all.most[row], s.all.total[row],
            s.all.out + row * wide_v, wide_v);
    if (range.end == work.end_key) put_result(op, slice, work, range.head, is_alone ? s.part : s.all);
    range = next;
  }
}

// Item (work with the first part of a row, head): puts a row together from its parts, in order.
static void combine(const Op& op, const Slice& slice, int64_t item, uint8_t* memory) {
  const Attention& a = *op.attention;
  const Work& work = slice.work[a.group][item / a.num_heads];
  if (work.partial < 0 || work.num_parts == 0) return;
  const int head = (int)(item % a.num_heads);
  Scratch s(memory, a.head_dim, a.head_dim_v);
  const int wide_v = (int)s.part.ld;
  float most = -INFINITY, total = 0.0f, *sums = s.all.out, *values = s.part.out;
  memset(sums, 0, wide_v * 4);
  memset(values, 0, wide_v * 4);
  for (int part = 0; part < work.num_parts; part++) {
    const float* from = slice.partials + ((int64_t)(work.partial + part) * a.num_heads + head) * slice.partial_stride;
    memcpy(values, from + 2, a.head_dim_v * 4);
    merge(from[0], from[1], values, most, total, sums, wide_v);
  }
  finish(a, head, most, total, sums);
  put_head(op, slice, work.row, head, sums);
}

}  // namespace HB_ISA
