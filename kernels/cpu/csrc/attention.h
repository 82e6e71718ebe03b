// Attention of one kv head over the paged cache: tiles of keys, an online softmax, and the heads that share the kv head.
//
// The bits of a row do not depend on what is computed beside it: keys are visited in tiles of kKeys and parts of kPartKeys whose
// borders are absolute positions; within a tile each score is one chain over the head's dimensions and each output one chain over
// the keys; a key that a row must not see adds zero times a finite value; parts are merged in order by one rule, whether one item
// walked through all of them (prefill) or each had its own (a long context spread over the threads).
#pragma once
#include "kv_tiles.h"
#include "matmul.h"
#include "rows.h"

namespace HB_ISA {

constexpr int kMaxRows = 64;  // queries times heads per kv head; as MAX_HEADS_PER_KV_HEAD of abi.py
constexpr int kManyVectors = 4;                            // vectors of a tile of few rows,
constexpr int kFewRows = kRows * kVectors / kManyVectors;  // which are so many

HB_INLINE int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// State of a softmax over some of the keys: greatest score, sum and weighted values (rows of width `ld`), relative to it.
struct Softmax {
  float *most, *total, *out;
  int64_t ld;
  float* sums;  // of each row, kLanes of them while the total is being summed up
};

struct Scratch {
  float *q, *scores;
  TileBuffers tile;
  Softmax part, all;

  explicit Scratch(uint8_t* memory, int dim, int dim_v) {
    float* at = (float*)memory;
    auto take = [&](int64_t count) __attribute__((always_inline)) { float* had = at; at += (count + 15) / 16 * 16; return had; };
    int64_t wide_v = round_up(dim_v, kPanel);
    q = take((int64_t)kMaxRows * dim);
    tile = {take((int64_t)kKeys * dim), take(kKeys * wide_v), take(kKeys * dim / 16), (int)wide_v};
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

// acc += x * words, for ROWS rows and N vectors whose words lie apart. The memory at `next` is asked for at the same pace.
template <class Product, int ROWS, int N>
HB_INLINE void chain(
    V (&acc)[ROWS][N], const float* const (&words)[N], const float* const (&next)[N], int64_t stride, int num_words, const float* x, int64_t ldx) {
  const float *x0 = x, *x4 = x + (ROWS > 4 ? 4 : 0) * ldx, *x8 = x + (ROWS > 8 ? 8 : 0) * ldx;
  int64_t at = 0;
  for (int word = 0; word < num_words; word++, at += stride) {
    V w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) w[n] = load(words[n] + at);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) __builtin_prefetch(next[n] + at);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const float* four = r < 4 ? x0 : r < 8 ? x4 : x8;
      V value = splat(four[(r % 4) * ldx + word]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) acc[r][n] = Product::accumulate(w[n], value, acc[r][n]);
    }
  }
}

// Scores of ROWS queries for N vectors of keys from `key`; with factors, unit after unit.
template <class Product, int ROWS, int N>
static __attribute__((noinline)) void score(const Panels& p, int key, int num_words, const float* q, int64_t ldq, float* scores) {
  const float *words[N], *next[N];
  V acc[ROWS][N] = {};
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) {
    const int group = (key + n * kLanes) / kGroupKeys, at = (key + n * kLanes) % kGroupKeys;
    words[n] = p.k[group] + at, next[n] = p.k_next[group] + at;
  }
  if (p.k_factors[0] == nullptr) {
    chain<Product, ROWS, N>(acc, words, next, p.k_stride, num_words, q, ldq);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) store(scores + r * kKeys + key + n * kLanes, acc[r][n]);
    return;
  }
  for (int unit = 0; unit * p.unit_words < num_words; unit++) {
    V part[ROWS][N] = {};
    chain<Product, ROWS, N>(part, words, next, p.k_stride, p.unit_words, q + unit * p.unit_words, ldq);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const int group = (key + n * kLanes) / kGroupKeys, at = (key + n * kLanes) % kGroupKeys;
      const V factor = load(p.k_factors[group] + unit * kGroupKeys + at);
      words[n] += p.unit_words * p.k_stride, next[n] += p.unit_words * p.k_stride;
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        float* to = scores + r * kKeys + key + n * kLanes;
        store(to, unit ? fma(part[r][n], factor, load(to)) : part[r][n] * factor);
      }
    }
  }
}

// out += weights * values, for ROWS rows and N vectors of the values' dims from `dim`, over `num_keys` keys.
template <class Product, int ROWS, int N>
static __attribute__((noinline)) void add_values(const Panels& p, int dim, int num_keys, const float* weights, float* out, int64_t ldo) {
  constexpr int kPerWord = Product::kInputsPerWord, kWords = kGroupKeys / kPerWord;
  const float *words[N], *next[N];
  V acc[ROWS][N];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) acc[r][n] = load(out + r * ldo + dim + n * kLanes);
  const int num_words = num_keys / kPerWord;
  for (int group = p.first; group * kWords < num_words; group++) {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) words[n] = p.v[group] + dim + n * kLanes, next[n] = p.v_next[group] + dim + n * kLanes;
    const int some = num_words - group * kWords < kWords ? num_words - group * kWords : kWords;
    chain<Product, ROWS, N>(acc, words, next, p.v_stride, some, weights + group * kWords, kKeys);
  }
  if (kPerWord == 2 && num_keys % 2) {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) words[n] = p.odd + dim + n * kLanes;
    chain<Product, ROWS, N>(acc, words, words, 0, 1, weights + num_words, kKeys);
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(out + r * ldo + dim + n * kLanes, acc[r][n]);
}

template <class Product, int MOST, int N>
HB_INLINE void score_rows(int rows, const Panels& p, int key, int num_words, const float* q, int64_t ldq, float* scores) {
  exactly<MOST>(rows, [&](auto count) __attribute__((always_inline)) {
    score<Product, decltype(count)::value, N>(p, key, num_words, q, ldq, scores);
  });
}

template <class Product, int MOST, int N>
HB_INLINE void add_rows(int rows, const Panels& p, int dim, int num_keys, const float* weights, float* out, int64_t ldo) {
  exactly<MOST>(rows, [&](auto count) __attribute__((always_inline)) {
    add_values<Product, decltype(count)::value, N>(p, dim, num_keys, weights, out, ldo);
  });
}

// All queries against the keys of a tile: few rows take more vectors at a time, for one alone would wait for its own chain.
template <class Product> HB_INLINE void score_tile(const Panels& p, int count, int num_words, int num_rows, const float* q, int64_t ldq, float* scores) {
  if (num_rows <= kFewRows)
    for (int key = 0; key < count; key += kManyVectors * kLanes)
      score_rows<Product, kFewRows, kManyVectors>(num_rows, p, key, num_words, q, ldq, scores);
  else
    for (int key = 0; key < count; key += kVectors * kLanes)
      cut_rows<kRows>(num_rows, [&](int, int row, int rows) __attribute__((always_inline)) {
        score_rows<Product, kRows, kVectors>(rows, p, key, num_words, q + row * ldq, ldq, scores + row * kKeys);
      });
}

template <class Product> HB_INLINE void add_tile(const Panels& p, int count, int wide_v, int num_rows, const float* weights, float* out) {
  int dim = 0;
  if (num_rows <= kFewRows)
    for (; dim + kManyVectors * kLanes <= wide_v; dim += kManyVectors * kLanes)
      add_rows<Product, kFewRows, kManyVectors>(num_rows, p, dim, count, weights, out, wide_v);
  for (; dim < wide_v; dim += kPanel)
    cut_rows<kRows>(num_rows, [&](int, int row, int rows) __attribute__((always_inline)) {
      add_rows<Product, kRows, kVectors>(rows, p, dim, count, weights + row * kKeys, out + row * wide_v, wide_v);
    });
}

// A greater score than all before, if there is one: what was summed up is rescaled to it. Returns the greatest.
HB_INLINE float raise(V greatest, V& total, Softmax& part, int row) {
  const float most = part.most[row];
  if (!any_above(greatest, splat(most))) return most;  // a NaN goes on into the sums: the row is then found to be no number
  const float tile_most = maximum(greatest);
  const V scale = most == -INFINITY ? V{} : exponential(splat(most - tile_most));
  total *= scale;
  float* out = part.out + row * part.ld;
  for (int d = 0; d < part.ld; d += kLanes) store(out + d, load(out + d) * scale);
  return part.most[row] = tile_most;
}

// Weights take the place of their scores, as words of the product: each store lies behind the loads. Returns them, before rounding.
template <class Product> HB_INLINE V put_weights(float* scores, int i, V below_most) {
  const V weights = Product::kInputsPerWord == 2 ? exponential_to_bf16(below_most) : exponential(below_most);
  if (Product::kInputsPerWord == 2) store_bf16_normal((uint16_t*)scores + i, weights);
  else store(scores + i, weights);
  return weights;
}

// Scores of one row for keys from .. to of a tile become weights relative to the greatest so far (zero elsewhere, up to `count`).
template <class Product> HB_INLINE void soften(float* scores, int from, int to, int count, float soft_cap, Softmax& part, int row) {
  constexpr int kTileVectors = kKeys / kLanes;
  V total = load(part.sums + row * kLanes), greatest = splat(-INFINITY);
  if (from <= 0 && to >= kKeys && soft_cap == 0.0f) {  // most tiles: every key counts
    V values[kTileVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; i++) values[i] = load(scores + i * kLanes), greatest = maximum(greatest, values[i]);
    const V most = splat(raise(greatest, total, part, row));
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; i++) total += put_weights<Product>(scores, i * kLanes, values[i] - most);
    return store(part.sums + row * kLanes, total);
  }
  V index = {};
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
  const V most = splat(raise(greatest, total, part, row));
  for (int i = 0; i < count; i += kLanes) total += put_weights<Product>(scores, i, load(scores + i) - most);
  store(part.sums + row * kLanes, total);
}

// Keys first .. end of one kv head, inside one part of the context. end 0: none.
struct Range {
  int head, first, end;
};

HB_INLINE Place place_of(Range range, int tile) {
  return {tile, tile < range.first ? range.first : tile, range.end - tile < kKeys ? range.end - tile : kKeys};
}

// The first tile of a range.
HB_INLINE Place first_place(Range range) { return place_of(range, range.first / kKeys * kKeys); }

// The softmax over one range, for `num_queries` queries from `position` with `heads` heads each, in s.part. `tile` is its first one;
// on its last one it takes `next` as the tile that comes after, so that the memory is never waited for idly.
template <class Format>
static void attend_range(
    const Attention& a, const Work& work, const int32_t* table, Range range, typename Format::Tile tile, const typename Format::Tile& next, Scratch& s) {
  using Product = typename Format::Product;
  constexpr int kPerWord = Product::kInputsPerWord;
  const int heads = a.num_heads / a.num_kv_heads, num_rows = work.num_queries * heads, wide_v = (int)s.part.ld;
  for (int row = 0; row < num_rows; row++) s.part.most[row] = -INFINITY;
  memset(s.part.sums, 0, (int64_t)num_rows * kLanes * 4);
  memset(s.part.out, 0, (int64_t)num_rows * wide_v * 4);
  for (Place place = first_place(range); place.tile < range.end; place = place_of(range, place.tile + kKeys)) {
    const int count = place.count;
    const bool is_last = place.tile + kKeys >= range.end;
    const typename Format::Tile ahead = is_last ? next : Format::find(a, table, range.head, place_of(range, place.tile + kKeys));
    const Panels panels = Format::panels(a, tile, ahead, s.tile);
    score_tile<Product>(panels, count, a.head_dim / kPerWord, num_rows, s.q, a.head_dim, s.scores);
    for (int row = 0; row < num_rows; row++) {
      int position = work.position + row / heads;
      int from = a.window && position - a.window + 1 > place.start ? position - a.window + 1 : place.start;
      int to = position + 1 < place.tile + count ? position + 1 : place.tile + count;
      float* scores = s.scores + (int64_t)row * kKeys;
      if (from < to) soften<Product>(scores, from - place.tile, to - place.tile, count, a.soft_cap, s.part, row);
      else memset(scores, 0, kKeys * 4);  // zeros of either type
    }
    add_tile<Product>(panels, count, wide_v, num_rows, s.scores, s.part.out);
    tile = ahead;
  }
  for (int row = 0; row < num_rows; row++) s.part.total[row] = sum(load(s.part.sums + row * kLanes));
}

// The finished row, in place: the sum divided out, a sink counting as one more key without a value.
HB_INLINE void finish(const Attention& a, int head, float most, float total, float* sums) {
  float* out = sums;
  const float value_scale = scale_of(a.cache.v, head / (a.num_heads / a.num_kv_heads));
  if (a.sinks) {
    float sink = a.sinks[head], greatest = sink > most ? sink : most;
    float scale = exponential(splat(most - greatest))[0];
    total = total * scale + exponential(splat(sink - greatest))[0];
    for (int d = 0; d < a.head_dim_v; d++) out[d] = sums[d] * scale / total * value_scale;
    return;
  }
  for (int d = 0; d < a.head_dim_v; d++) out[d] = sums[d] / total * value_scale;
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

HB_INLINE int64_t num_attend_items(const Attention& a, const Slice& slice) {
  return (int64_t)slice.num_work[a.group] * (a.num_kv_heads / heads_per_item(a, slice));
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

// What an item of attention is: some kv heads of one work. range: the first keys of its first head.
struct AttendItem {
  const Work& work;
  const int32_t* table;
  int last;  // kv head, not included
  Range range;

  HB_INLINE AttendItem of(const Attention& a, const Slice& slice, int64_t item) {
    const int per_item = heads_per_item(a, slice), items_per_work = a.num_kv_heads / per_item;
    const Work& work = slice.work[a.group][item / items_per_work];
    const Group& group = slice.step->groups[a.group];
    const int head = (int)(item % items_per_work) * per_item;
    return {work, group.block_table + work.request * group.table_width, head + per_item, after({head - 1, 0, work.end_key}, work, head + per_item)};
  }
};

// Item (work, some kv heads). The queries lie in buffer `in`, rotated; results go to `out`, or to the partials.
template <class Format> static void attend_as(const Op& op, const Slice& slice, int64_t item, uint8_t* memory) {
  const Attention& a = *op.attention;
  const AttendItem mine = AttendItem::of(a, slice, item);
  const Work& work = mine.work;
  const int heads = a.num_heads / a.num_kv_heads, num_rows = work.num_queries * heads;
  Scratch s(memory, a.head_dim, a.head_dim_v);
  const int wide_v = (int)s.part.ld;
  typename Format::Tile tile = Format::find(a, mine.table, mine.range.head, first_place(mine.range));
  for (Range range = mine.range; range.end;) {
    if (range.first == work.first_key) {
      for (int row = 0; row < num_rows; row++) {
        const float* from = row_of(slice, op.in, work.row + row / heads) + (range.head * heads + row % heads) * a.head_dim;
        Format::put_query(from, a.scale * scale_of(a.cache.k, range.head), a.head_dim, s.q + (int64_t)row * a.head_dim);
        s.all.most[row] = -INFINITY, s.all.total[row] = 0.0f;
      }
      memset(s.all.out, 0, (int64_t)num_rows * wide_v * 4);
    }
    const Range next = after(range, work, mine.last);
    typename Format::Tile ahead = tile;
    if (next.end) ahead = Format::find(a, mine.table, next.head, first_place(next));
    else if (item + 1 < num_attend_items(a, slice)) {  // most likely this thread's next one
      const AttendItem other = AttendItem::of(a, slice, item + 1);
      ahead = Format::find(a, other.table, other.range.head, first_place(other.range));
    }
    attend_range<Format>(a, work, mine.table, range, tile, ahead, s);
    const bool is_alone = range.first == work.first_key && range.end == work.end_key;
    for (int row = 0; row < num_rows && !is_alone; row++)
      merge(s.part.most[row], s.part.total[row], s.part.out + row * wide_v, s.all.most[row], s.all.total[row],
            s.all.out + row * wide_v, wide_v);
    if (range.end == work.end_key) put_result(op, slice, work, range.head, is_alone ? s.part : s.all);
    range = next, tile = ahead;
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
