// How a weight matrix lies in memory, and how a kernel reads it.
//
// The outputs of a matrix are cut into panels of kPanel; a panel holds, input after input, the weights of its outputs side by
// side. Quantised panels are cut along the inputs into groups that share a scale. Each format opens a group (its scales, as
// vectors) and decodes one vector of weights at input `start + step` of it (start a multiple of 8, step below 8): in a kernel,
// or ahead of it into float32. What comes out are the very numbers that the law's dequantiser makes: of a product of a scale and a
// small integer, and its sum with the minimum, only the result is rounded.
#pragma once
#include "program.h"
#include "simd.h"

namespace HB_ISA {

// What a format says of its arithmetic unless it says otherwise: a 32-bit word of the activations is one float32.
struct InFloats {
  static constexpr int kInputsPerWord = 1;
  HB_INLINE V accumulate(V weight, V value, V acc) { return fma(weight, value, acc); }
};

// Plain numbers, of one of the first three kinds.
template <int KIND> struct Dense : InFloats {
  static constexpr int kBytes = KIND == kF32 ? 4 : 2;
  static constexpr int kGroup = 8, kGroupBytes = kGroup * kPanel * kBytes;
  static constexpr bool kIsDense = true;
  struct Group { const uint8_t* data; };
  HB_INLINE Group open(const uint8_t* panel, int group) { return {panel + (int64_t)group * kGroupBytes}; }
  HB_INLINE V decode(const Group& group, int start, int step, int v) {
    const uint8_t* at = group.data + ((start + step) * kPanel + v * kLanes) * kBytes;
    return KIND == kF32 ? load((const float*)at) : KIND == kBF16 ? from_bf16(at) : from_f16(at);
  }
};
using F32 = Dense<kF32>;
using BF16 = Dense<kBF16>;
using F16 = Dense<kF16>;

// Where the number of one input and column lies in a panel of plain numbers.
HB_INLINE int64_t dense_place(int kind, int64_t input, int column) {
  return kind == kBF16Pairs ? (input / 2 * kPanel + column) * 2 + input % 2 : input * kPanel + column;
}

// bfloat16 weights against activations rounded to bfloat16, two inputs to a word, for machines that multiply such pairs.
struct BF16Pairs : F32 {
  static constexpr int kInputsPerWord = 2;
  HB_INLINE V accumulate(V weight, V value, V acc) { return fma_pairs(weight, value, acc); }
};

// Whole-numbered weights: a group has, for each output, a scale and a minimum, and its quants are unsigned, at most a byte.
// Four inputs of an output lie side by side: `quads` gives them as the bytes of a word, for inputs start .. start + 3 of the group
// (start a multiple of 4). Formats whose quants are signed in the file have an offset in their minimum.
struct Whole : InFloats {
  static constexpr bool kIsDense = false;
  struct Group {
    const uint8_t* data;
    V scale[kVectors], minimum[kVectors];
  };
  template <class F> HB_INLINE V number(const Group& group, int start, int step, int v) {
    const U quant = F::quads(group, start + step / 4 * 4, v) >> (step % 4 * 8) & 255;
    return fma(to_float((I)quant), group.scale[v], group.minimum[v]);
  }
  // Nibbles of 8 inputs to a word: the low ones are the first four.
  HB_INLINE U nibbles(const uint8_t* low, int start, int v) {
    const U word = read<U>(low + (start / 8 * kPanel + v * kLanes) * 4);
    return (start & 4 ? word >> 4 : word) & 0x0f0f0f0f;
  }
  // The fifth bits of 4 inputs, from a byte of 8 inputs' bits.
  HB_INLINE U fifth_bits(const uint8_t* high, int start, int v) {
    const U byte = (U)from_u8(high + start / 8 * kPanel + v * kLanes), bits = (start & 4 ? byte >> 4 : byte) & 15;
    return ((bits | bits << 7 | bits << 14 | bits << 21) & 0x01010101) << 4;
  }
  // The upper two bits of 4 inputs, from a byte of theirs.
  HB_INLINE U upper_bits(const uint8_t* high, int start, int v) {
    const U byte = (U)from_u8(high + start / 4 * kPanel + v * kLanes);
    return ((byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303) << 4;
  }
};

// GGUF's types of one scale per 32 inputs. BITS 4, 5 or 8; with a minimum (x_1), or centred (x_0).
// A group: scales (float16), minima, then nibbles (8 inputs to a word) or bytes, then a byte of 8 inputs' fifth bits.
template <int BITS, bool HAS_MIN> struct Blocks : Whole {
  static constexpr int kGroup = 32;
  static constexpr int kScaleBytes = kPanel * (HAS_MIN ? 4 : 2);
  static constexpr int kLowBytes = kPanel * (BITS == 8 ? 32 : 16);
  static constexpr int kGroupBytes = kScaleBytes + kLowBytes + (BITS == 5 ? kPanel * 4 : 0);
  HB_INLINE Group open(const uint8_t* panel, int index) {
    const uint8_t* at = panel + (int64_t)index * kGroupBytes;
    Group group;
    group.data = at + kScaleBytes;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      group.scale[v] = from_f16(at + v * kLanes * 2);
      if (HAS_MIN) group.minimum[v] = from_f16(at + (kPanel + v * kLanes) * 2);
      else group.minimum[v] = group.scale[v] * splat((float)-(1 << (BITS - 1)));
    }
    return group;
  }
  HB_INLINE U quads(const Group& group, int start, int v) {
    if (BITS == 8) return read<U>(group.data + (start / 4 * kPanel + v * kLanes) * 4);
    const U low = nibbles(group.data, start, v);
    return BITS == 5 ? low | fifth_bits(group.data + kLowBytes, start, v) : low;
  }
  HB_INLINE V decode(const Group& group, int start, int step, int v) { return number<Blocks>(group, start, step, v); }
};

using Q4_0 = Blocks<4, false>;
using Q4_1 = Blocks<4, true>;
using Q5_0 = Blocks<5, false>;
using Q5_1 = Blocks<5, true>;
using Q8_0 = Blocks<8, false>;

// GGUF's Q4_K and Q5_K: 8 groups of 32 inputs share a float16 scale and minimum; each group has whole-numbered factors of them.
// A super-block: scales, minima (float16), then per group factors of the scale and of the minimum (a byte each), and the quants.
template <int BITS> struct SuperBlocks : Whole {
  static constexpr int kGroup = 32, kGroups = 8;
  static constexpr int kHeadBytes = kPanel * 4, kLowBytes = kPanel * 16;
  static constexpr int kGroupBytes = kPanel * 2 + kLowBytes + (BITS == 5 ? kPanel * 4 : 0);
  static constexpr int kSuperBytes = kHeadBytes + kGroups * kGroupBytes;
  HB_INLINE Group open(const uint8_t* panel, int index) {
    const uint8_t* super = panel + (int64_t)(index / kGroups) * kSuperBytes;
    const uint8_t* at = super + kHeadBytes + (index % kGroups) * kGroupBytes;
    Group group;
    group.data = at + kPanel * 2;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      group.scale[v] = from_f16(super + v * kLanes * 2) * to_float(from_u8(at + v * kLanes));
      group.minimum[v] = -(from_f16(super + (kPanel + v * kLanes) * 2) * to_float(from_u8(at + kPanel + v * kLanes)));
    }
    return group;
  }
  HB_INLINE U quads(const Group& group, int start, int v) {
    const U low = nibbles(group.data, start, v);
    return BITS == 5 ? low | fifth_bits(group.data + kLowBytes, start, v) : low;
  }
  HB_INLINE V decode(const Group& group, int start, int step, int v) { return number<SuperBlocks>(group, start, step, v); }
};

// GGUF's Q6_K: 16 groups of 16 inputs share a float16 scale; each group has a signed factor of it.
// A super-block: scales (float16), then per group a factor, nibbles, and bytes of 4 inputs' upper two bits.
struct Q6K : Whole {
  static constexpr int kGroup = 16, kGroups = 16;
  static constexpr int kHeadBytes = kPanel * 2, kLowBytes = kPanel * 8;
  static constexpr int kGroupBytes = kPanel + kLowBytes + kPanel * 4;
  static constexpr int kSuperBytes = kHeadBytes + kGroups * kGroupBytes;
  HB_INLINE Group open(const uint8_t* panel, int index) {
    const uint8_t* super = panel + (int64_t)(index / kGroups) * kSuperBytes;
    const uint8_t* at = super + kHeadBytes + (index % kGroups) * kGroupBytes;
    Group group;
    group.data = at + kPanel;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      group.scale[v] = from_f16(super + v * kLanes * 2) * to_float(from_i8(at + v * kLanes));
      group.minimum[v] = group.scale[v] * splat(-32.0f);
    }
    return group;
  }
  HB_INLINE U quads(const Group& group, int start, int v) {
    return nibbles(group.data, start, v) | upper_bits(group.data + kLowBytes, start, v);
  }
  HB_INLINE V decode(const Group& group, int start, int step, int v) { return number<Q6K>(group, start, step, v); }
};

}  // namespace HB_ISA
