// From the rows of a checkpoint (dense, or GGUF's blocks) to the panels of weights.h. Done once, when a model is loaded.
//
// Quants stay the integers they are in the file, at the same number of bits; only Q4_K's and Q5_K's 6-bit factors take a byte.
// Outputs beyond the last row are zero.
#pragma once
#include "weights.h"
#include "program.h"

namespace HB_ISA {

// A block of the file taken apart: its quants as bytes, the bytes of its scales, and each group's factors.
struct Unpacked {
  uint8_t quants[256];
  const uint8_t *scale, *minimum;  // float16
  uint8_t factors[16], minimum_factors[16];
};

struct FileBlock {
  int inputs, bytes;
};
static const FileBlock kFileBlocks[] = {{1, 4},   {1, 2},   {1, 2},   {32, 34},   {32, 18},  {32, 20},
                                        {32, 22}, {32, 24}, {256, 144}, {256, 176}, {256, 210}, {1, 2}};

HB_INLINE void nibbles_of_32(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 16; i++) to[i] = from[i] & 15, to[i + 16] = from[i] >> 4;
}

HB_INLINE void factors_of_k(const uint8_t* packed, Unpacked& block) {
  for (int i = 0; i < 4; i++) {
    block.factors[i] = packed[i] & 63, block.minimum_factors[i] = packed[i + 4] & 63;
    block.factors[i + 4] = (packed[i + 8] & 15) | packed[i] >> 6 << 4;
    block.minimum_factors[i + 4] = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
  }
}

static void unpack(int kind, const uint8_t* at, Unpacked& block) {
  block.scale = at, block.minimum = at + 2;
  if (kind == kQ8_0) memcpy(block.quants, at + 2, 32);
  if (kind == kQ4_0) nibbles_of_32(at + 2, block.quants);
  if (kind == kQ4_1) nibbles_of_32(at + 4, block.quants);
  if (kind == kQ5_0 || kind == kQ5_1) {
    const uint8_t* bits = at + (kind == kQ5_0 ? 2 : 4);
    nibbles_of_32(bits + 4, block.quants);
    for (int i = 0; i < 32; i++) block.quants[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
  }
  if (kind == kQ4_K || kind == kQ5_K) {
    factors_of_k(at + 4, block);
    const uint8_t *high = at + 16, *low = at + (kind == kQ4_K ? 16 : 48);
    for (int i = 0; i < 256; i++) {
      int part = i / 32, byte = low[part / 2 * 32 + i % 32];
      block.quants[i] = part & 1 ? byte >> 4 : byte & 15;
      if (kind == kQ5_K) block.quants[i] |= (high[i % 32] >> part & 1) << 4;
    }
  }
  if (kind == kQ6_K) {
    block.scale = at + 208;
    memcpy(block.factors, at + 192, 16);
    for (int i = 0; i < 256; i++) {
      int half = i / 128, quarter = i % 128 / 32, l = i % 32;
      int low = at[half * 64 + (quarter & 1) * 32 + l], high = at[128 + half * 32 + l];
      block.quants[i] = (quarter < 2 ? low & 15 : low >> 4) | (high >> (2 * quarter) & 3) << 4;
    }
  }
}

// Puts input `i` of group's output `column` where `quads` looks for it. low, high: the group's nibbles and upper bits.
HB_INLINE void put_quant(int kind, uint8_t quant, int i, int column, uint8_t* low, uint8_t* high) {
  if (kind == kQ8_0) {
    low[(i / 4 * kPanel + column) * 4 + i % 4] = quant ^ 0x80;
    return;
  }
  low[(i / 8 * kPanel + column) * 4 + i % 4] |= (quant & 15) << (i & 4);
  if (kind == kQ6_K) high[i / 4 * kPanel + column] |= (quant >> 4) << (2 * (i & 3));
  else if (kind == kQ5_0 || kind == kQ5_1 || kind == kQ5_K) high[i / 8 * kPanel + column] |= (quant >> 4) << (i & 7);
}

static int64_t panel_bytes(int32_t kind, int32_t num_inputs) {
  if (kFileBlocks[kind].inputs == 1) return (int64_t)num_inputs * kPanel * kFileBlocks[kind].bytes;
  const WeightFormat& format = kFormats[kind];
  return (int64_t)num_inputs / (format.group * format.groups_per_super) * format.super_bytes;
}

HB_INLINE void pack_block(int kind, const Unpacked& block, int column, uint8_t* at) {
  if (kind == kQ6_K) {
    memcpy(at + column * 2, block.scale, 2);
    for (int g = 0; g < Q6K::kGroups; g++) {
      uint8_t* group = at + Q6K::kHeadBytes + g * Q6K::kGroupBytes;
      group[column] = block.factors[g];
      uint8_t* low = group + kPanel;
      for (int i = 0; i < 16; i++) put_quant(kind, block.quants[g * 16 + i], i, column, low, low + Q6K::kLowBytes);
    }
    return;
  }
  bool is_super = kind == kQ4_K || kind == kQ5_K, has_min = is_super || kind == kQ4_1 || kind == kQ5_1;
  memcpy(at + column * 2, block.scale, 2);
  if (has_min) memcpy(at + (kPanel + column) * 2, block.minimum, 2);
  uint8_t* group = at + kPanel * (has_min ? 4 : 2);
  for (int g = 0; g < (is_super ? 8 : 1); g++) {
    uint8_t* low = group + (is_super ? kPanel * 2 : 0);
    if (is_super) group[column] = block.factors[g], group[kPanel + column] = block.minimum_factors[g];
    for (int i = 0; i < 32; i++) put_quant(kind, block.quants[g * 32 + i], i, column, low, low + kPanel * 16);
    group += kind == kQ4_K ? SuperBlocks<4>::kGroupBytes : SuperBlocks<5>::kGroupBytes;
  }
}

// A row as Q8_0 blocks: a float16 scale, the greatest magnitude over 127, and 32 whole numbers.
static void quantize_q8_0(const float* row, int32_t num_inputs, uint8_t* to) {
  for (int k = 0; k < num_inputs; k += 32, to += 34) {
    float most = 0.0f;
    for (int i = 0; i < 32; i++) most = fabsf(row[k + i]) > most ? fabsf(row[k + i]) : most;
    uint16_t half = to_f16(most / 127.0f);
    float scale = from_f16_bits(half), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    memcpy(to, &half, 2);
    for (int i = 0; i < 32; i++) {
      float value = rintf(row[k + i] * inverse);
      to[2 + i] = (uint8_t)(int8_t)(value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value);
    }
  }
}

// rows: num_rows <= kPanel rows of the file, row_bytes apart. panel: panel_bytes(kind, num_inputs) bytes.
static void pack_panel(int32_t kind, const uint8_t* rows, int64_t row_bytes, int32_t num_rows, int32_t num_inputs, uint8_t* panel) {
  memset(panel, 0, panel_bytes(kind, num_inputs));
  const FileBlock file = kFileBlocks[kind];
  for (int column = 0; column < num_rows; column++) {
    const uint8_t* at = rows + column * row_bytes;
    if (file.inputs == 1) {
      for (int k = 0; k < num_inputs; k++) {
        memcpy(panel + dense_place(kind, k, column) * file.bytes, at + (int64_t)k * file.bytes, file.bytes);
      }
      continue;
    }
    for (int k = 0, b = 0; k < num_inputs; k += file.inputs, b++, at += file.bytes) {
      Unpacked block;
      unpack(kind, at, block);
      pack_block(kind, block, column, panel + (int64_t)b * kFormats[kind].super_bytes);
    }
  }
}

}  // namespace HB_ISA
