// K and V as plain numbers in the cache: float32, bfloat16 or float16.
//
// A KV format says how a stored vector (of one token and kv head) is read and written. Attention takes it as a template argument.
// `Product` is the format of its tiles, whose words hold one number or two. `bytes` is the length of some words; `vector` decodes
// kLanes neighbouring words of a key, `part` fewer (the rest are zero); `value` and `value_part` decode columns of the next one or
// two values; `put_query` writes a query as words; `write` stores a whole vector.
#pragma once
#include "program.h"
#include "rows.h"
#include "simd.h"
#include "weights.h"

namespace HB_ISA {

HB_INLINE uint8_t* slot_of(const Plane& plane, int64_t block, int head, int offset) {
  return plane.data + block * plane.block_stride + head * plane.head_stride + offset * plane.token_stride;
}

template <int FORMAT> struct DenseKV {
  using Product = F32;
  static constexpr int kBytes = FORMAT == kCacheF32 ? 4 : 2;

  HB_INLINE int bytes(int dim) { return dim * kBytes; }

  HB_INLINE V vector(const uint8_t* token, int d) {
    const uint8_t* at = token + d * kBytes;
    return FORMAT == kCacheF32 ? load((const float*)at) : FORMAT == kCacheBF16 ? from_bf16(at) : from_f16(at);
  }

  HB_INLINE V part(const uint8_t* token, int d, int count) {
    uint8_t padded[kLanes * kBytes] = {};
    memcpy(padded, token + d * kBytes, count * kBytes);
    return vector(padded, 0);
  }

  HB_INLINE V value(const uint8_t* const* tokens, int d) { return vector(tokens[0], d); }
  HB_INLINE V value_part(const uint8_t* const* tokens, int d, int count) { return part(tokens[0], d, count); }

  HB_INLINE void put_query(const float* query, float scale, int dim, float* to) {
    for (int d = 0; d < dim; d++) to[d] = query[d] * scale;
  }

  HB_INLINE void write(uint8_t* to, int dim, const float* row) {
    if (FORMAT == kCacheBF16) return put_bf16(row, dim, (uint16_t*)to);
    for (int d = 0; d < dim; d++, to += kBytes) {
      if (FORMAT == kCacheF32) memcpy(to, row + d, 4);
      else {
        uint16_t half = to_f16(row[d]);
        memcpy(to, &half, 2);
      }
    }
  }
};

// bfloat16 keys and values against queries and weights rounded to bfloat16, in pairs: for programs whose products are such.
struct PairKV : DenseKV<kCacheBF16> {
  using Product = BF16Pairs;

  HB_INLINE int bytes(int words) { return words * 4; }
  HB_INLINE V vector(const uint8_t* token, int word) { return load((const float*)token + word); }

  HB_INLINE V part(const uint8_t* token, int word, int count) {
    float padded[kLanes] = {};
    memcpy(padded, (const float*)token + word, count * 4);
    return load(padded);
  }

  HB_INLINE V value(const uint8_t* const* tokens, int d) {
    return (V)(from_u16(tokens[0] + d * 2) | (from_u16(tokens[1] + d * 2) << 16));
  }

  HB_INLINE V value_part(const uint8_t* const* tokens, int d, int count) {
    uint16_t padded[2][kLanes] = {};
    for (int i = 0; i < 2; i++) memcpy(padded[i], tokens[i] + d * 2, count * 2);
    return (V)(from_u16(padded[0]) | (from_u16(padded[1]) << 16));
  }

  HB_INLINE void put_query(const float* query, float scale, int dim, float* to) {
    uint16_t* halves = (uint16_t*)to;
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store_bf16(halves + d, load(query + d) * splat(scale));
    for (; d < dim; d++) halves[d] = to_bf16(query[d] * scale);
  }
};

}  // namespace HB_ISA
