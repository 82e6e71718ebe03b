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

}  // namespace HB_ISA
