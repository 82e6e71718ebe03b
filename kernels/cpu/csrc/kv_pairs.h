// K and V as bfloat16, in the cache as products read them: a block is its keys [words][tokens] and its values [pairs of tokens][dims].
// Nothing is turned or widened when they are read. Blocks hold a multiple of kGroupKeys tokens; head dims are even, those of
// values multiples of kPairDims.
#pragma once
#include "kv_tiles.h"

namespace HB_ISA {

constexpr int kPairDims = 32;  // as PAIR_DIMS of abi.py
static_assert(kPairDims % kPanel == 0, "values must fill panels");

struct PairTile {
  const float *k[kGroups], *v[kGroups];
  int first, count;
};

// What both readers share.
struct PairCache {
  using Tile = PairTile;

  // Groups outside of the range are given the keys of one inside it, which will not count.
  HB_INLINE Tile find(const Attention& a, const int32_t* table, int head, Place place) {
    Tile to;
    const int first = (place.start - place.tile) / kGroupKeys, last = (place.count - 1) / kGroupKeys;
    to.first = first, to.count = place.count;
    for (int g = 0; g < kGroups; g++) {
      const int inside = g < first ? first : g > last ? last : g, position = place.tile + inside * kGroupKeys;
      const int offset = position % a.cache.block_size;
      const int64_t block = table[position / a.cache.block_size];
      to.k[g] = (const float*)slot_of(a.cache.k.codes, block, head, 0) + offset;
      to.v[g] = (const float*)slot_of(a.cache.v.codes, block, head, offset / 2);
    }
    return to;
  }

  HB_INLINE void write_key(const Attention& a, int64_t block, int head, int offset, const float* key) {
    alignas(64) uint16_t halves[kMaxHeadDim];
    put_bf16(key, a.head_dim, halves);
    uint8_t* to = slot_of(a.cache.k.codes, block, head, 0) + offset * 4;
    for (int d = 0; d < a.head_dim; d += 2, to += a.cache.k.codes.row_stride) memcpy(to, halves + d, 4);
  }
  HB_INLINE void write_value(const Attention& a, int64_t block, int head, int offset, const float* value) {
    alignas(64) uint16_t halves[kMaxHeadDim];
    put_bf16(value, a.head_dim_v, halves);
    uint16_t* to = (uint16_t*)slot_of(a.cache.v.codes, block, head, offset / 2) + offset % 2;
    for (int d = 0; d < a.head_dim_v; d++) to[2 * d] = halves[d];
  }
};

// Read in place, against queries and weights rounded to bfloat16: for programs whose products are in pairs.
struct PairKV : PairCache {
  using Product = BF16Pairs;

  HB_INLINE Panels panels(const Attention& a, const Tile& tile, const Tile& ahead, const TileBuffers& to) {
    Panels p = {};
    p.k_stride = a.cache.k.codes.row_stride / 4, p.v_stride = a.cache.v.codes.row_stride / 4, p.odd = to.values, p.first = tile.first;
    for (int g = 0; g < kGroups; g++) p.k[g] = tile.k[g], p.v[g] = tile.v[g], p.k_next[g] = ahead.k[g], p.v_next[g] = ahead.v[g];
    const int last = tile.count - 1;
    const float* words = tile.v[last / kGroupKeys] + last % kGroupKeys / 2 * p.v_stride;
    for (int d = 0; last % 2 == 0 && d < a.head_dim_v; d += kLanes) store(to.values + d, (V)(read<U>(words + d) & 0xffffu));
    return p;
  }

  HB_INLINE void put_query(const float* query, float scale, int dim, float* to) {
    uint16_t* halves = (uint16_t*)to;
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store_bf16(halves + d, load(query + d) * splat(scale));
    for (; d < dim; d++) halves[d] = to_bf16(query[d] * scale);
  }
};

// Widened, against float32.
struct WidePairKV : PairCache {
  using Product = F32;

  HB_INLINE Panels panels(const Attention& a, const Tile& tile, const Tile& ahead, const TileBuffers& to) {
    const int64_t k_stride = a.cache.k.codes.row_stride / 4, v_stride = a.cache.v.codes.row_stride / 4;
    for (int g = tile.first; g * kGroupKeys < tile.count; g++) {
      float *keys = to.keys + (int64_t)g * a.head_dim * kGroupKeys, *values = to.values + (int64_t)g * kGroupKeys * to.wide_v;
      for (int w = 0; w < a.head_dim / 2; w++)
        for (int i = 0; i < kGroupKeys; i += kLanes) {
          __builtin_prefetch(ahead.k[g] + w * k_stride + i);
          widen(tile.k[g] + w * k_stride + i, keys + 2 * w * kGroupKeys + i, kGroupKeys);
        }
      for (int w = 0; w < kGroupKeys / 2 && g * kGroupKeys + 2 * w < tile.count; w++)
        for (int d = 0; d < a.head_dim_v; d += kLanes) {
          __builtin_prefetch(ahead.v[g] + w * v_stride + d);
          widen(tile.v[g] + w * v_stride + d, values + (int64_t)2 * w * to.wide_v + d, to.wide_v);
        }
    }
    Panels p = to.panels(a.head_dim);
    p.first = tile.first;
    return p;
  }

  HB_INLINE void widen(const float* words, float* to, int64_t stride) {
    const U pair = read<U>(words);
    store(to, (V)(pair << 16));
    store(to + stride, (V)(pair & 0xffff0000u));
  }

  HB_INLINE void put_query(const float* query, float scale, int dim, float* to) {
    for (int d = 0; d < dim; d++) to[d] = query[d] * scale;
  }
};

}  // namespace HB_ISA
