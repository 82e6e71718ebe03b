// How K and V become codes: the laws of `kvcache/formats`, bit for bit.
//
// An encoder takes one vector (float32, `dim` numbers, a multiple of 16) and what is fixed for it, and fills in a code per number and the
// extra bytes in the order of the law.
#pragma once
#include "program.h"
#include "kv_codecs.h"
#include "rows.h"
#include "simd.h"

namespace HB_ISA {

constexpr int kMaxVector = 512;  // as MAX_HEAD_DIM of abi.py
constexpr float kFloatMax = 0x1p126f;  // as GREATEST of numbers.py

// scale: the static one of the kv head. table: 16 levels for vectors of this length, or null.
struct Constants {
  float scale;
  const float* table;
};

HB_INLINE float finite(float x) { return x != x ? 0.0f : x > kFloatMax ? kFloatMax : x < -kFloatMax ? -kFloatMax : x; }
HB_INLINE float magnitude(float x) { return x < 0.0f ? -x : x; }
HB_INLINE uint32_t bits_of(float x) { return read<uint32_t>(&x); }
HB_INLINE float of_bits(uint32_t bits) { return read<float>(&bits); }

// To nearest even, for |x| < 2^22: adding 1.5 * 2^23 rounds.
HB_INLINE float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }
HB_INLINE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

HB_INLINE uint8_t to_e4m3(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  const float a = magnitude(x);
  if (a >= 448.0f) return sign | 0x7e;
  if (a < 0x1p-6f) return sign | (uint32_t)nearest(a * 512.0f);  // denormal, or the first number above
  const uint32_t bits = bits_of(a);
  return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

HB_INLINE float from_e4m3(uint8_t code) {
  const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  const float a = exponent ? of_bits((exponent + 120) << 23 | mantissa << 20) : (float)mantissa * 0x1p-9f;
  return code & 0x80 ? -a : a;
}

// The sum in halves; `count` is a power of two. The numbers are used up.
HB_INLINE float fold(float* x, int count) {
  for (int half = count / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}

template <int ITEM> static void encode_plain(const float* x, int dim, Constants, uint8_t* codes, uint8_t*) {
  for (int d = 0; d < dim; d++) {
    if (ITEM == kCacheF32) memcpy(codes + 4 * d, x + d, 4);
    else {
      const uint16_t half = ITEM == kCacheBF16 ? to_bf16(x[d]) : to_f16(x[d]);
      memcpy(codes + 2 * d, &half, 2);
    }
  }
}

// The same for vectors. x is finite.
HB_INLINE V magnitude(V x) { return (V)((U)x & 0x7fffffff); }
HB_INLINE V finite(V x) {
  x = x != x ? V{} : x;
  return x > splat(kFloatMax) ? splat(kFloatMax) : x < splat(-kFloatMax) ? splat(-kFloatMax) : x;
}
HB_INLINE V nearest(V x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }
HB_INLINE V clamp(V x, float low, float high) { return x < splat(low) ? splat(low) : x > splat(high) ? splat(high) : x; }

// 8-bit floats: DIGITS of the fraction, a bias, the greatest finite number and its code.
template <int DIGITS> HB_INLINE I to_fp8(V x, int bias, float most, int most_code) {
  const V a = magnitude(x);
  const U bits = (U)a;
  const I code = (I)((bits + ((1u << (22 - DIGITS)) - 1) + (bits >> (23 - DIGITS) & 1)) >> (23 - DIGITS)) - ((127 - bias) << DIGITS);
  const float least = of_bits((uint32_t)(128 - bias) << 23), unit = of_bits((uint32_t)(126 + bias + DIGITS) << 23);
  const I denormal = __builtin_convertvector(nearest(a < splat(least) ? a * splat(unit) : V{}), I);
  const I magnitude_code = a >= splat(most) ? I{} + most_code : a < splat(least) ? denormal : code;
  return magnitude_code | (I)((U)x >> 24 & 0x80);
}

template <bool IS_E5M2> static void encode_fp8(const float* x, int dim, Constants c, uint8_t* codes, uint8_t*) {
  for (int d = 0; d < dim; d += kLanes) {
    const V y = finite(load(x + d)) / splat(c.scale);
    store_bytes((int8_t*)codes + d, IS_E5M2 ? to_fp8<2>(y, 15, 57344.0f, 0x7b) : to_fp8<3>(y, 7, 448.0f, 0x7e));
  }
}

HB_INLINE float greatest(const float* x, int count) {
  V most = {};
  for (int i = 0; i < count; i += kLanes) most = maximum(most, magnitude(load(x + i)));
  return maximum(most);
}

template <bool IS_INT> static void encode_8_per_token(const float* from, int dim, Constants, uint8_t* codes, uint8_t* extra) {
  float x[kMaxVector];
  for (int d = 0; d < dim; d += kLanes) store(x + d, finite(load(from + d)));
  const float most = greatest(x, dim) / (IS_INT ? 127.0f : 448.0f), scale = most > 1e-6f ? most : 1e-6f;
  for (int d = 0; d < dim; d += kLanes) {
    const V y = load(x + d) / splat(scale), away = clamp(y + (V)((U)splat(0.5f) | ((U)y & 0x80000000u)), -128.0f, 127.0f);
    store_bytes((int8_t*)codes + d, IS_INT ? __builtin_convertvector(away, I) : to_fp8<3>(y, 7, 448.0f, 0x7e));
  }
  memcpy(extra, &scale, 4);
}

static void encode_int4_per_token(const float* from, int dim, Constants, uint8_t* codes, uint8_t* extra) {
  float x[kMaxVector], least = kFloatMax, most = -kFloatMax;
  for (int d = 0; d < dim; d++) {
    x[d] = finite(from[d]);
    least = x[d] < least ? x[d] : least, most = x[d] > most ? x[d] : most;
  }
  const uint32_t word = bits_of(clamp((most - least) / 15.0f, 1e-6f, kFloatMax)) & ~15u;
  const float scale = of_bits(word), zero = nearest(clamp(-least / scale, -1.0f, 16.0f));
  const float kept = clamp(zero, 0.0f, 15.0f);
  for (int d = 0; d < dim; d++) codes[d] = (uint8_t)nearest(clamp(x[d] / scale + kept, 0.0f, 15.0f));
  const uint32_t both = word | (uint32_t)kept;
  memcpy(extra, &both, 4);
}

// 16 numbers, and codes for them.
constexpr int kBlockVectors = 16 / kLanes;
struct Block {
  V x[kBlockVectors];

  HB_INLINE Block of(const float* from) {
    Block block;
    for (int v = 0; v < kBlockVectors; v++) block.x[v] = finite(load(from + v * kLanes));
    return block;
  }
  inline __attribute__((always_inline)) float most() const {
    V most = {};
    for (int v = 0; v < kBlockVectors; v++) most = maximum(most, magnitude(x[v]));
    return maximum(most);
  }
  inline __attribute__((always_inline)) float least() const {
    V most = -x[0];
    for (int v = 1; v < kBlockVectors; v++) most = maximum(most, -x[v]);
    return -maximum(most);
  }
};
struct Codes {
  I at[kBlockVectors];
  float error;  // squared, summed in halves

  inline __attribute__((always_inline)) void put(uint8_t* to) const {
    for (int v = 0; v < kBlockVectors; v++) store_bytes((int8_t*)to + v * kLanes, at[v]);
  }
};

// Over one candidate scale. code(y, number): the code of the nearest number.
template <class Code> HB_INLINE Codes try_block(const Block& block, float unit, const Code& code) {
  const V inverse = splat(unit == 0.0f ? 0.0f : 1.0f / unit);
  Codes found;
  V error[kBlockVectors];
  for (int v = 0; v < kBlockVectors; v++) {
    V number;
    found.at[v] = code(block.x[v] * inverse, number);
    const V difference = block.x[v] - number * splat(unit);
    error[v] = difference * difference;
  }
  for (int half = kBlockVectors / 2; half; half /= 2)
    for (int v = 0; v < half; v++) error[v] += error[v + half];
  found.error = sum(error[0]);
  return found;
}

// E2M1 to nearest, ties to the even code.
HB_INLINE I to_e2m1(V y, V& number) {
  const V a = magnitude(y);
  const I below = (I)(a > splat(0.25f)) + (I)(a >= splat(0.75f)) + (I)(a > splat(1.25f)) + (I)(a >= splat(1.75f)) + (I)(a > splat(2.5f)) +
                  (I)(a >= splat(3.5f)) + (I)(a > splat(5.0f));  // true is -1
  const I code = -below | (I)((U)y >> 28 & 8);
  number = from_e2m1((U)code);
  return code;
}

template <int NUM_PEAKS> static void encode_e2m1_blocks(const float* from, int dim, Constants c, uint8_t* codes, uint8_t* extra) {
  for (int at = 0; at < dim; at += 16) {
    const Block block = Block::of(from + at);
    const float most = block.most();
    uint8_t scale = to_e4m3(most / (6.0f * c.scale));
    Codes best = try_block(block, from_e4m3(scale) * c.scale, to_e2m1);
    if (NUM_PEAKS == 2) {
      const uint8_t other = to_e4m3(most / (4.0f * c.scale));
      const Codes tried = try_block(block, from_e4m3(other) * c.scale, to_e2m1);
      if (tried.error < best.error) best = tried, scale = other;
    }
    best.put(codes + at);
    extra[at / 16] = scale;
  }
}

template <int BITS> static void encode_int_blocks(const float* from, int dim, Constants c, uint8_t* codes, uint8_t* extra) {
  constexpr float kHalf = 1 << (BITS - 1);
  const auto code = [](V y, V& number) __attribute__((always_inline)) {
    number = nearest(clamp(y, -kHalf, kHalf - 1.0f));
    return __builtin_convertvector(number + splat(kHalf), I);
  };
  for (int at = 0; at < dim; at += 16) {
    const Block block = Block::of(from + at);
    const float most = block.most(), signed_most = block.least() == -most ? most : -most;
    uint8_t scale = to_e4m3(most / ((kHalf - 1.0f) * c.scale));
    const uint8_t longer = to_e4m3(signed_most / (kHalf * c.scale));
    Codes best = try_block(block, from_e4m3(scale) * c.scale, code);
    const Codes tried = try_block(block, from_e4m3(longer) * c.scale, code);
    if (tried.error < best.error) best = tried, scale = longer;
    best.put(codes + at);
    extra[at / 16] = scale;
  }
}

static void encode_ultraquant(const float* from, int dim, Constants, uint8_t* codes, uint8_t* extra) {
  for (int block = 0; block < dim / 32; block++, from += 32, codes += 32) {
    float x[32];
    for (int i = 0; i < 32; i++) x[i] = finite(from[i]);
    int exponent;
    const float mantissa = frexpf(greatest(x, 32) * 0.156f, &exponent);
    const int biased = exponent - (mantissa < 0.70710678118654752f) + 127;
    const int byte = mantissa == 0.0f || biased < 0 ? 0 : biased > 254 ? 254 : biased;
    const float unit = of_bits((uint32_t)byte << 23);
    for (int i = 0; i < 32; i++) {
      const float a = byte ? magnitude(x[i] / unit) : 0.0f;
      const int code = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5.0f);
      codes[i] = byte ? (uint8_t)(code | (bits_of(x[i]) >> 31) << 3) : 0;
    }
    extra[block] = (uint8_t)byte;
  }
}

constexpr float kHalfMax = 65504.0f;

static void encode_levels(const float* from, int dim, Constants c, uint8_t* codes, uint8_t* extra) {
  float x[kMaxVector], squares[kMaxVector];
  for (int d = 0; d < dim; d++) x[d] = clamp(finite(from[d]), -kHalfMax, kHalfMax), squares[d] = x[d] * x[d];
  const float length = sqrtf(fold(squares, dim)), around = length + 1e-8f;
  for (int d = 0; d < dim; d++) {
    const float unit = x[d] / around;
    int code = 0;
    for (int level = 0; level < 15; level++) code += unit > (c.table[level + 1] + c.table[level]) / 2.0f;
    codes[d] = (uint8_t)code, squares[d] = c.table[code] * c.table[code];
  }
  const float norm = length / sqrtf(fold(squares, dim));
  const uint16_t half = to_f16(norm > kHalfMax ? kHalfMax : norm);
  memcpy(extra, &half, 2);
}

static void encode_steps(const float* from, int dim, Constants, uint8_t* codes, uint8_t* extra) {
  float x[kMaxVector], lowest = kHalfMax, most = -kHalfMax;
  for (int d = 0; d < dim; d++) {
    x[d] = clamp(finite(from[d]), -kHalfMax, kHalfMax);
    lowest = x[d] < lowest ? x[d] : lowest, most = x[d] > most ? x[d] : most;
  }
  const uint16_t least = to_f16(lowest), step = to_f16((most - from_f16_bits(least)) / 15.0f);
  const float first = from_f16_bits(least), width = step ? from_f16_bits(step) : 1.0f;
  for (int d = 0; d < dim; d++) codes[d] = (uint8_t)clamp(floorf((x[d] - first) / width + 0.5f), 0.0f, 15.0f);
  memcpy(extra, &step, 2);
  memcpy(extra + 2, &least, 2);
}

}  // namespace HB_ISA
