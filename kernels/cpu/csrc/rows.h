// Where the rows of an operation's inputs and outputs lie, and what they hold where products read them.
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

// A row of whole numbers: each number of a group over the group's scale, which makes the greatest of them kMost. PLANES 1: signed
// bytes. PLANES 2: 256 times a signed byte of the first plane and one of the second, together as exact as 15 bits. Behind the
// planes lie the scales, and for each half of a group the sum of its numbers times the scale.
constexpr int kRoundGroup = 32;
template <int PLANES> struct WholeRow {
  static constexpr float kMost = PLANES == 1 ? 127.0f : 127.0f * 256 + 127;
  int8_t* numbers;
  float *scales, *sums;

  HB_INLINE WholeRow at(const void* row, int width) {
    int8_t* numbers = (int8_t*)row;
    return {numbers, (float*)(numbers + PLANES * width), (float*)(numbers + PLANES * width) + width / kRoundGroup};
  }
};

HB_INLINE void store_bytes(int8_t* to, I value) {
  const S bytes = __builtin_convertvector(value, S);
  memcpy(to, &bytes, sizeof bytes);
}

// One group. A number that is not finite makes the scale a NaN, and so everything that comes of the row.
template <int PLANES> HB_INLINE void put_whole_group(const float* from, int width, int8_t* to, float* scale, float* sums) {
  V greatest = {}, not_finite = {};
  for (int i = 0; i < kRoundGroup; i += kLanes) {
    const V value = load(from + i);
    greatest = maximum(greatest, maximum(value, -value));
    not_finite += value - value;
  }
  const float most = maximum(greatest);
  const V inverse = splat(most > 0.0f ? WholeRow<PLANES>::kMost / most : 0.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds
  *scale = most / WholeRow<PLANES>::kMost + sum(not_finite);
  for (int half = 0; half < 2; half++) {
    V total = {};
    for (int i = half * kRoundGroup / 2; i < (half + 1) * kRoundGroup / 2; i += kLanes) {
      const V whole = (load(from + i) * inverse + magic) - magic;
      const I number = __builtin_convertvector(whole, I), upper = (number + 128) >> 8;
      total += whole;
      store_bytes(to + i, PLANES == 1 ? number : upper);
      if (PLANES == 2) store_bytes(to + width + i, number - (upper << 8));
    }
    sums[half] = sum(total) * *scale;
  }
}

template <int PLANES> HB_INLINE void put_whole(const float* from, int width, void* row) {
  const WholeRow<PLANES> to = WholeRow<PLANES>::at(row, width);
  for (int group = 0; group < width / kRoundGroup; group++)
    put_whole_group<PLANES>(from + group * kRoundGroup, width, to.numbers + group * kRoundGroup, to.scales + group, to.sums + 2 * group);
}

// Numbers `start` .. of a row of whole numbers, as float32; start and count are multiples of a group.
template <int PLANES> HB_INLINE void widen_whole(const void* row, int width, int start, int count, float* to) {
  const WholeRow<PLANES> from = WholeRow<PLANES>::at(row, width);
  for (int i = start; i < start + count; i++) {
    const int number = PLANES == 1 ? from.numbers[i] : from.numbers[i] * 256 + from.numbers[width + i];
    *to++ = (float)number * from.scales[i / kRoundGroup];
  }
}

// to = from, as products want them. The two do not overlap.
HB_INLINE void put_row(int type, const float* from, int width, void* to) {
  if (type == kBF16Rows) put_bf16(from, width, (uint16_t*)to);
  else if (type == kInt8Rows) put_whole<1>(from, width, to);
  else if (type == kInt16Rows) put_whole<2>(from, width, to);
  else memcpy(to, from, width * 4);
}

}  // namespace HB_ISA
