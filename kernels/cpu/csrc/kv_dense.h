// K and V as plain numbers, a vector after the other: float32, bfloat16 or float16.
#pragma once
#include "kv_tiles.h"

namespace HB_ISA {

template <int FORMAT> struct DenseKV {
  using Product = F32;
  static constexpr int kBytes = FORMAT == kCacheF32 ? 4 : 2;

  struct Tile {
    const uint8_t *k[kKeys], *v[kKeys];
    int count;
  };

  HB_INLINE V vector(const uint8_t* token, int d) {
    const uint8_t* at = token + d * kBytes;
    return FORMAT == kCacheF32 ? load((const float*)at) : FORMAT == kCacheBF16 ? from_bf16(at) : from_f16(at);
  }

  // `count` < kLanes numbers; the rest are zero.
  HB_INLINE V part(const uint8_t* token, int d, int count) {
    uint8_t padded[kLanes * kBytes] = {};
    if (count > 0) memcpy(padded, token + d * kBytes, count * kBytes);
    return vector(padded, 0);
  }

  // Places of the tile outside of the range are given some key inside it: their weight is zero, and what another request or
  // nobody wrote is never read.
  HB_INLINE Tile find(const Attention& a, const int32_t* table, int head, Place place) {
    const int size = a.cache.block_size, first = place.start - place.tile, count = place.count;
    Tile to;
    to.count = count;
    for (int i = first; i < count;) {
      int position = place.tile + i, offset = position % size, end = i + size - offset < count ? i + size - offset : count;
      const uint8_t* k_at = slot_of(a.cache.k.codes, table[position / size], head, offset);
      const uint8_t* v_at = slot_of(a.cache.v.codes, table[position / size], head, offset);
      for (; i < end; i++, k_at += a.cache.k.codes.row_stride, v_at += a.cache.v.codes.row_stride) to.k[i] = k_at, to.v[i] = v_at;
    }
    for (int i = 0; i < first; i++) to.k[i] = to.k[first], to.v[i] = to.v[first];
    for (int i = count; i < kKeys; i++) to.k[i] = to.k[count - 1], to.v[i] = to.v[count - 1];
    return to;
  }

  // Keys are turned in squares. The memory is asked for the next tile a little at a time: a burst would be waited for.
  HB_INLINE Panels panels(const Attention& a, const Tile& tile, const Tile& ahead, const TileBuffers& to) {
    for (int i = 0; i < tile.count; i += kLanes) {
      float* group = to.keys + (int64_t)(i / kGroupKeys) * a.head_dim * kGroupKeys + i % kGroupKeys;
      for (int d = 0; d < a.head_dim; d += kLanes) {
        const int some = a.head_dim - d < kLanes ? a.head_dim - d : kLanes;
        V square[kLanes];
        if (d * kBytes % kLineBytes < kLanes * kBytes)
          for (int r = 0; r < kLanes; r++) __builtin_prefetch(ahead.k[i + r] + d * kBytes);
        if (some == kLanes) {
#pragma GCC unroll 16
          for (int r = 0; r < kLanes; r++) square[r] = vector(tile.k[i + r], d);
        } else {
          for (int r = 0; r < kLanes; r++) square[r] = part(tile.k[i + r], d, some);
        }
        transpose(square);
        if (some == kLanes) {
#pragma GCC unroll 16
          for (int r = 0; r < kLanes; r++) store(group + (int64_t)(d + r) * kGroupKeys, square[r]);
        } else {
          for (int r = 0; r < some; r++) store(group + (int64_t)(d + r) * kGroupKeys, square[r]);
        }
      }
    }
    for (int i = 0; i < tile.count; i++)
      for (int d = 0; d < to.wide_v; d += kLanes) {
        if (d * kBytes % kLineBytes < kLanes * kBytes) __builtin_prefetch(ahead.v[i] + d * kBytes);
        const int dims = a.head_dim_v - d;
        store(to.values + (int64_t)i * to.wide_v + d, dims >= kLanes ? vector(tile.v[i], d) : part(tile.v[i], d, dims));
      }
    return to.panels(a.head_dim);
  }

  HB_INLINE void put_query(const float* query, float scale, int dim, float* to) {
    for (int d = 0; d < dim; d++) to[d] = query[d] * scale;
  }

  HB_INLINE void write_vector(uint8_t* to, int dim, const float* row) {
    if (FORMAT == kCacheBF16) return put_bf16(row, dim, (uint16_t*)to);
    for (int d = 0; d < dim; d++, to += kBytes) {
      if (FORMAT == kCacheF32) memcpy(to, row + d, 4);
      else {
        uint16_t half = to_f16(row[d]);
        memcpy(to, &half, 2);
      }
    }
  }
  HB_INLINE void write_key(const Attention& a, int64_t block, int head, int offset, const float* key) {
    write_vector(slot_of(a.cache.k.codes, block, head, offset), a.head_dim, key);
  }
  HB_INLINE void write_value(const Attention& a, int64_t block, int head, int offset, const float* value) {
    write_vector(slot_of(a.cache.v.codes, block, head, offset), a.head_dim_v, value);
  }
};

}  // namespace HB_ISA
