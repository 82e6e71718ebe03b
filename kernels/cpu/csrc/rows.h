// Where the rows of an operation's inputs and outputs lie.
#pragma once
#include "program.h"
#include "simd.h"

namespace HB_ISA {

HB_INLINE int64_t stride_of(const Slice& slice, int buffer) {
  if (buffer == kInput) return slice.step->input_stride;
  return buffer == kOutput ? slice.step->output_stride : slice.buffers[buffer].stride;
}

HB_INLINE float* row_of(const Slice& slice, int buffer, int row) {
  const int64_t stride = stride_of(slice, buffer);
  if (buffer == kInput) return (float*)slice.step->input + (slice.first + row) * stride;
  return buffer == kOutput ? slice.step->output + (slice.first + row) * stride : slice.buffers[buffer].data + row * stride;
}

// to[width] = from, rounded
HB_INLINE void put_bf16(const float* from, int width, uint16_t* to) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store_bf16(to + i, load(from + i));
  for (; i < width; i++) to[i] = to_bf16(from[i]);
}

// A row of signed bytes, a multiple of kRoundGroup: the numbers of each group over its scale, which is the greatest magnitude over 127.
// Behind them lie the scales, and for each half of a group the sum of its bytes times the scale.
constexpr int kRoundGroup = 32;
struct Int8Row {
  int8_t* numbers;
  float *scales, *sums;

  HB_INLINE Int8Row at(const void* row, int width) {
    int8_t* numbers = (int8_t*)row;
    return {numbers, (float*)(numbers + width), (float*)(numbers + width) + width / kRoundGroup};
  }
};

// One group. A number that is not finite makes the scale a NaN, and so everything that comes of the row.
HB_INLINE void put_int8_group(const float* from, int8_t* to, float* scale, float* sums) {
  V greatest = {}, not_finite = {};
  for (int i = 0; i < kRoundGroup; i += kLanes) {
    const V value = load(from + i);
    greatest = maximum(greatest, maximum(value, -value));
    not_finite += value - value;
  }
  const float most = maximum(greatest) / 127.0f;
  const V inverse = splat(most > 0.0f ? 1.0f / most : 0.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds
  *scale = most + sum(not_finite);
  for (int half = 0; half < 2; half++) {
    V total = {};
    for (int i = half * kRoundGroup / 2; i < (half + 1) * kRoundGroup / 2; i += kLanes) {
      const V whole = (load(from + i) * inverse + magic) - magic;
      total += whole;
      const S bytes = __builtin_convertvector(__builtin_convertvector(whole, I), S);
      memcpy(to + i, &bytes, sizeof bytes);
    }
    sums[half] = sum(total) * *scale;
  }
}

HB_INLINE void put_int8(const float* from, int width, void* row) {
  const Int8Row to = Int8Row::at(row, width);
  for (int group = 0; group < width / kRoundGroup; group++)
    put_int8_group(from + group * kRoundGroup, to.numbers + group * kRoundGroup, to.scales + group, to.sums + 2 * group);
}

// to = from, as products want them. The two do not overlap.
HB_INLINE void put_row(int type, const float* from, int width, void* to) {
  if (type == kBF16Rows) put_bf16(from, width, (uint16_t*)to);
  else if (type == kInt8Rows) put_int8(from, width, to);
  else memcpy(to, from, width * 4);
}

}  // namespace HB_ISA
