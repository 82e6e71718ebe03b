// How the numbers of a coded KV cache are read: `kvcache/formats` has the laws.
//
// A codec makes a number of a code, and a factor of what lies beside the codes: one for kUnitDims numbers of a vector, or for the
// whole vector (0). Both come as vectors: of keys side by side, or of one value's dimensions. Static scales are left out: attention
// multiplies queries and outputs with them. kIsExact: numbers without their factor are bfloat16; kIsExactScaled: with it, too.
// kNumbers: the bfloat16 of each code, where a code alone says the number.
#pragma once
#include "program.h"
#include "simd.h"

namespace HB_ISA {

HB_INLINE U splat_u(uint32_t value) { return U{} + value; }

// Lanes that hold float16 bits.
HB_INLINE V from_f16_lanes(U bits) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits, (__m256i)bits), 0x08);
  return (V)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
#else
  const V magnitude = (V)((bits & 0x7fff) << 13) * splat(0x1p112f);
  return (V)((U)magnitude | (bits & 0x8000) << 16);
#endif
}

// Lanes that hold E4M3: its bits, moved, are a float16 of 2^-8 times the number.
HB_INLINE V from_e4m3(U code) { return from_f16_lanes((code & 0x80) << 8 | (code & 0x7f) << 7) * splat(256.0f); }

// One of 16 floats per lane.
HB_INLINE V lookup(const float* table, U index) {
#if defined(__AVX512F__)
  return (V)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#else
  V found;
  for (int i = 0; i < kLanes; i++) found[i] = table[index[i] & 15];
  return found;
#endif
}

// Twice E2M1's magnitudes are whole numbers: of codes above 3, the last bit behind a leading one, moved.
HB_INLINE V from_e2m1(U code) {
  const I magnitude = (I)(code & 7), moved = (2 | (magnitude & 1)) << (((magnitude >> 1) - 1) & 3);
  const V number = to_float(magnitude > 3 ? moved : magnitude) * splat(0.5f);
  return (V)((U)number | (code & 8) << 28);
}

constexpr uint16_t bf16_of(float number) { return (uint16_t)(__builtin_bit_cast(uint32_t, number) >> 16); }

// bfloat16 numbers by code; 32 for codes of 4 bits, each twice: an index may have a fifth bit of something else.
template <int COUNT> struct Numbers {
  uint16_t at[COUNT];
};
constexpr Numbers<32> e2m1_numbers() {
  Numbers<32> found = {};
  constexpr float kMagnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int i = 0; i < 32; i++) found.at[i] = bf16_of(i & 8 ? -kMagnitudes[i & 7] : kMagnitudes[i & 7]);
  return found;
}
template <int BITS> constexpr Numbers<BITS == 6 ? 64 : 32> int_numbers() {
  Numbers<BITS == 6 ? 64 : 32> found = {};
  for (int i = 0; i < (BITS == 6 ? 64 : 32); i++) found.at[i] = bf16_of((float)((i & ((1 << BITS) - 1)) - (1 << (BITS - 1))));
  return found;
}
constexpr Numbers<128> e4m3_numbers() {  // of magnitudes
  Numbers<128> found = {};
  for (int i = 0; i < 128; i++) {
    float number = i < 8 ? (float)i / 512.0f : (float)(8 + i % 8) / 1024.0f;
    for (int exponent = i / 8; exponent > 0; exponent--) number *= 2.0f;
    found.at[i] = bf16_of(number);
  }
  return found;
}

struct NoUnit {};
struct ScaleUnit {
  V scale;
};
struct AffineUnit {
  V scale, offset;
};

// What most codecs have: nothing beside the codes, and numbers that are bfloat16.
struct Plain {
  static constexpr int kUnitDims = 0;
  static constexpr bool kIsExact = true, kIsExactScaled = true, kHasScale = false;
  using Unit = NoUnit;
  HB_INLINE Unit unit(U, U) { return {}; }
  HB_INLINE V scale(Unit) { return splat(1.0f); }
};
struct F32Number : Plain {
  static constexpr int kBits = 32;
  static constexpr bool kIsExact = false, kIsExactScaled = false;
  HB_INLINE V number(U code, Unit, const float*) { return (V)code; }
};
struct BF16Number : Plain {
  static constexpr int kBits = 16;
  HB_INLINE V number(U code, Unit, const float*) { return (V)(code << 16); }
};
struct F16Number : Plain {
  static constexpr int kBits = 16;
  static constexpr bool kIsExact = false, kIsExactScaled = false;
  HB_INLINE V number(U code, Unit, const float*) { return from_f16_lanes(code); }
};
struct E4M3Number : Plain {
  static constexpr int kBits = 8;
  static constexpr auto kNumbers = e4m3_numbers();
  HB_INLINE V number(U code, Unit, const float*) { return from_e4m3(code); }
};
struct E5M2Number : Plain {
  static constexpr int kBits = 8;
  HB_INLINE V number(U code, Unit, const float*) { return from_f16_lanes(code << 8); }
};

struct Scaled {
  static constexpr bool kIsExact = true, kIsExactScaled = false, kHasScale = true;
  using Unit = ScaleUnit;
  HB_INLINE V scale(Unit unit) { return unit.scale; }
};

// A float32 beside each vector.
struct PerToken : Scaled {
  static constexpr int kUnitDims = 0, kBits = 8, kUnitBytes = 4;
  HB_INLINE Unit unit(U word, U) { return {(V)word}; }
};
struct E4M3PerToken : PerToken {
  static constexpr auto kNumbers = e4m3_numbers();
  HB_INLINE V number(U code, Unit, const float*) { return from_e4m3(code); }
};
struct Int8PerToken : PerToken {
  HB_INLINE V number(U code, Unit, const float*) { return to_float((I)(code << 24) >> 24); }
};
struct Int4PerToken : Scaled {
  static constexpr int kUnitDims = 0, kBits = 4, kUnitBytes = 4;
  using Unit = AffineUnit;
  HB_INLINE Unit unit(U word, U) { return {(V)(word & ~15u), to_float((I)(word & 15))}; }
  HB_INLINE V scale(Unit unit) { return unit.scale; }
  HB_INLINE V number(U code, Unit unit, const float*) { return to_float((I)code) - unit.offset; }
};

// An E4M3 scale for 16 numbers.
template <int BITS> struct Block16 : Scaled {
  static constexpr int kUnitDims = 16, kBits = BITS, kUnitBytes = 1;
  static constexpr bool kIsExactScaled = BITS < 6;
  HB_INLINE Unit unit(U byte, U) { return {from_e4m3(byte)}; }
};
struct E2M1Blocks : Block16<4> {
  static constexpr auto kNumbers = e2m1_numbers();
  HB_INLINE V number(U code, Unit, const float*) { return from_e2m1(code); }
};
template <int BITS> struct IntBlocks : Block16<BITS> {
  static constexpr auto kNumbers = int_numbers<BITS>();
  HB_INLINE V number(U code, ScaleUnit, const float*) { return to_float((I)code) - splat((float)(1 << (BITS - 1))); }
};

// A power of two for 32 numbers; byte 0: zeros.
struct E2M1Powers : Scaled {
  static constexpr int kUnitDims = 32, kBits = 4, kUnitBytes = 1;
  static constexpr bool kIsExactScaled = true;
  static constexpr auto kNumbers = e2m1_numbers();
  HB_INLINE Unit unit(U byte, U) { return {(V)(byte << 23)}; }
  HB_INLINE V number(U code, Unit, const float*) { return from_e2m1(code); }
};

// A codebook, and a float16 beside each vector.
struct LevelsPerToken : Scaled {
  static constexpr int kUnitDims = 0, kBits = 4, kUnitBytes = 2;
  static constexpr bool kIsExact = false;
  HB_INLINE Unit unit(U half, U) { return {from_f16_lanes(half)}; }
  HB_INLINE V number(U code, Unit, const float* table) { return lookup(table, code); }
};

// A step and the least number, float16: the number is whole.
struct StepsPerToken : Plain {
  static constexpr int kBits = 4, kUnitBytes = 2, kUnitParts = 2;
  static constexpr bool kIsExact = false, kIsExactScaled = false;
  using Unit = AffineUnit;
  HB_INLINE Unit unit(U step, U least) { return {from_f16_lanes(step), from_f16_lanes(least)}; }
  HB_INLINE V scale(Unit) { return splat(1.0f); }
  HB_INLINE V number(U code, Unit unit, const float*) { return to_float((I)code) * unit.scale + unit.offset; }
};

}  // namespace HB_ISA
