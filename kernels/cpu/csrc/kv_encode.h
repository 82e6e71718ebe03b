// How K and V become codes: the laws of `kvcache/formats`, bit for bit.
//
// An encoder takes one vector (float32, `dim` numbers, a multiple of 16) and what is fixed for it, and fills in a code per number and the
// extra bytes in the order of the law.
#pragma once
#include "program.h"
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

HB_INLINE uint8_t to_e5m2(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  const float a = magnitude(x);
  if (a >= 57344.0f) return sign | 0x7b;
  if (a < 0x1p-14f) return sign | (uint32_t)nearest(a * 65536.0f);
  const uint32_t bits = bits_of(a);
  return sign | (((bits + 0xfffff + (bits >> 21 & 1)) >> 21) - (112 << 2));
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

template <bool IS_E5M2> static void encode_fp8(const float* x, int dim, Constants c, uint8_t* codes, uint8_t*) {
  for (int d = 0; d < dim; d++) codes[d] = IS_E5M2 ? to_e5m2(finite(x[d]) / c.scale) : to_e4m3(finite(x[d]) / c.scale);
}

HB_INLINE float greatest(const float* x, int count) {
  float most = 0.0f;
  for (int i = 0; i < count; i++) most = magnitude(x[i]) > most ? magnitude(x[i]) : most;
  return most;
}

template <bool IS_INT> static void encode_8_per_token(const float* from, int dim, Constants, uint8_t* codes, uint8_t* extra) {
  float x[kMaxVector];
  for (int d = 0; d < dim; d++) x[d] = finite(from[d]);
  const float most = greatest(x, dim) / (IS_INT ? 127.0f : 448.0f), scale = most > 1e-6f ? most : 1e-6f;
  for (int d = 0; d < dim; d++) {
    const float y = x[d] / scale;
    if (!IS_INT) codes[d] = to_e4m3(y);
    else codes[d] = (uint8_t)(int8_t)(int)clamp(truncf(y + (y < 0.0f ? -0.5f : 0.5f)), -128.0f, 127.0f);
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

// A block of 16 over one candidate scale; returns the squared error.
template <class Code> HB_INLINE float try_block(const float* x, float unit, const Code& code, uint8_t* codes) {
  const float inverse = unit == 0.0f ? 0.0f : 1.0f / unit;
  float error[16];
  for (int i = 0; i < 16; i++) {
    float number;
    codes[i] = code(x[i] * inverse, number);
    const float difference = x[i] - number * unit;
    error[i] = difference * difference;
  }
  return fold(error, 16);
}

// E2M1 to nearest, ties to the even code.
HB_INLINE uint8_t to_e2m1(float y, float& number) {
  constexpr float kNumbers[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const float a = magnitude(y);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  const uint32_t sign = bits_of(y) >> 31;
  number = sign ? -kNumbers[code] : kNumbers[code];
  return (uint8_t)(code | sign << 3);
}

template <int NUM_PEAKS> static void encode_e2m1_blocks(const float* from, int dim, Constants c, uint8_t* codes, uint8_t* extra) {
  for (int block = 0; block < dim / 16; block++, from += 16, codes += 16) {
    float x[16], least = 0;
    for (int i = 0; i < 16; i++) x[i] = finite(from[i]);
    const float most = greatest(x, 16);
    for (int peak = 0; peak < NUM_PEAKS; peak++) {
      const uint8_t byte = to_e4m3(most / ((peak ? 4.0f : 6.0f) * c.scale));
      uint8_t tried[16];
      const float error = try_block(x, from_e4m3(byte) * c.scale, to_e2m1, tried);
      if (peak && !(error < least)) break;
      least = error, extra[block] = byte;
      memcpy(codes, tried, 16);
    }
  }
}

template <int BITS> static void encode_int_blocks(const float* from, int dim, Constants c, uint8_t* codes, uint8_t* extra) {
  constexpr float kHalf = 1 << (BITS - 1);
  const auto code = [](float y, float& number) __attribute__((always_inline)) {
    number = nearest(clamp(y, -kHalf, kHalf - 1.0f));
    return (uint8_t)(int)(number + kHalf);
  };
  for (int block = 0; block < dim / 16; block++, from += 16, codes += 16) {
    float x[16], lowest = 0.0f;
    for (int i = 0; i < 16; i++) x[i] = finite(from[i]), lowest = x[i] < lowest ? x[i] : lowest;
    const float most = greatest(x, 16), signed_most = lowest == -most ? most : -most;
    const uint8_t plain = to_e4m3(most / ((kHalf - 1.0f) * c.scale)), longer = to_e4m3(signed_most / (kHalf * c.scale));
    uint8_t tried[16];
    const float error = try_block(x, from_e4m3(plain) * c.scale, code, codes);
    const bool is_better = try_block(x, from_e4m3(longer) * c.scale, code, tried) < error;
    extra[block] = is_better ? longer : plain;
    if (is_better) memcpy(codes, tried, 16);
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
