// K and V as plain numbers in the cache: float32, bfloat16 or float16.
//
// A KV format offers four functions on the stored vector of one token and kv head: `bytes` is its length, `vector` decodes kLanes
// neighbouring numbers of it, `part` fewer (the rest are zero), and `write` stores a whole one. Attention takes the format as a template argument.
#pragma once
#include "program.h"
#include "rows.h"
#include "simd.h"

namespace HB_ISA {

HB_INLINE uint8_t* slot_of(const Plane& plane, int64_t block, int head, int offset) {
  return plane.data + block * plane.block_stride + head * plane.head_stride + offset * plane.token_stride;
}

template <int FORMAT> struct DenseKV {
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

}  // namespace HB_ISA
