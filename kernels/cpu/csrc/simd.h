// Vectors of floats, one width per instruction set, on the compiler's own vector types.
//
// Every other kernel header is written against this one: V holds kLanes floats, I as many 32-bit integers. Only what the
// compiler cannot express is an intrinsic. A file that includes it is compiled once per instruction set, in a namespace of
// its own (HB_ISA), and must not use templates of the C++ library: the linker would keep one copy for all machines.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__aarch64__) && !defined(HB_PORTABLE)  // every machine of it has NEON; HB_PORTABLE compiles the rest for tests
#define HB_NEON
#endif

#define HB_INLINE static inline __attribute__((always_inline))

namespace HB_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 2, kRows = 12;  // kVectors: vectors of a panel; kRows: rows of the largest tile
#elif defined(__AVX2__)
constexpr int kLanes = 8, kVectors = 2, kRows = 6;
#elif defined(HB_NEON)
constexpr int kLanes = 4, kVectors = 4, kRows = 6;
#else
constexpr int kLanes = 4, kVectors = 2, kRows = 4;
#endif
constexpr int kPanel = kLanes * kVectors;  // outputs of a panel

typedef float V __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U __attribute__((vector_size(kLanes * 4)));
typedef uint16_t H __attribute__((vector_size(kLanes * 2)));
typedef uint8_t B __attribute__((vector_size(kLanes)));
typedef int8_t S __attribute__((vector_size(kLanes)));
typedef int32_t I4 __attribute__((vector_size(16)));

template <class T> HB_INLINE T read(const void* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}
HB_INLINE V load(const float* from) { return read<V>(from); }
HB_INLINE void store(float* to, V value) { memcpy(to, &value, sizeof value); }

HB_INLINE V splat(float value) {
#if defined(__AVX512F__)
  return (V)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (V)_mm256_set1_ps(value);
#else
  return V{value, value, value, value};
#endif
}

HB_INLINE V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(HB_NEON)
  V result = c;
  __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(result) : "w"(a), "w"(b));
  return result;
#else
  return a * b + c;
#endif
}

HB_INLINE V maximum(V a, V b) { return a > b ? a : b; }
HB_INLINE V to_float(I value) { return __builtin_convertvector(value, V); }

// Widening loads. The compiler knows the conversions, but takes the wide ones apart.
#if defined(__AVX512F__)
HB_INLINE U from_u16(const void* from) { return (U)_mm512_cvtepu16_epi32(read<__m256i>(from)); }
HB_INLINE I from_u8(const void* from) { return (I)_mm512_cvtepu8_epi32(read<__m128i>(from)); }
HB_INLINE I from_i8(const void* from) { return (I)_mm512_cvtepi8_epi32(read<__m128i>(from)); }
#elif defined(__AVX2__)
HB_INLINE U from_u16(const void* from) { return (U)_mm256_cvtepu16_epi32(read<__m128i>(from)); }
HB_INLINE I from_u8(const void* from) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
HB_INLINE I from_i8(const void* from) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
#else
HB_INLINE U from_u16(const void* from) { return __builtin_convertvector(read<H>(from), U); }
HB_INLINE I from_u8(const void* from) { return __builtin_convertvector(read<B>(from), I); }
HB_INLINE I from_i8(const void* from) { return __builtin_convertvector(read<S>(from), I); }
#endif
HB_INLINE V from_bf16(const void* from) { return (V)(from_u16(from) << 16); }

// float16 by bits: the widened exponent and mantissa, rescaled; exact, denormals included. Infinity and NaN keep their meaning.
HB_INLINE float from_f16_bits(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
  float value;
  memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  memcpy(&bits, &value, 4);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= (uint32_t)(half & 0x8000) << 16;
  memcpy(&value, &bits, 4);
  return value;
}

HB_INLINE V from_f16(const void* from) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__AVX2__)
  return (V)_mm256_cvtph_ps(read<__m128i>(from));
#else
  V value;
  for (int i = 0; i < kLanes; i++) value[i] = from_f16_bits(read<uint16_t>((const uint8_t*)from + 2 * i));
  return value;
#endif
}

// acc + the products of two pairs of bfloat16 in each 32-bit lane, summed in float32.
HB_INLINE V fma_pairs(V a, V b, V acc) {
#if defined(__AVX512BF16__)
  return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (V)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  const U upper = U{} + 0xffff0000u;
  return fma((V)((U)a & upper), (V)((U)b & upper), fma((V)((U)a << 16), (V)((U)b << 16), acc));
#endif
}

// acc + the products of unsigned bytes with signed ones, four to a lane. No sum of four needs more than 17 bits.
HB_INLINE I dot_bytes(U a, I b, I acc) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)a, (int8x16_t)b);
#else
  for (int shift = 0; shift < 32; shift += 8) acc += (I)(a >> shift & 255) * (b << (24 - shift) >> 24);
  return acc;
#endif
}

HB_INLINE I splat_word(const void* word) { return (I)splat(read<float>(word)); }

// Rounds to bfloat16, to nearest even. A NaN stays one.
HB_INLINE void store_bf16(uint16_t* to, V value) {
  U bits = (U)value;
  U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = (I)(value != value) ? U{} + 0x7fc0 : rounded;
  H narrow = __builtin_convertvector(rounded, H);
  memcpy(to, &narrow, sizeof narrow);
}

// The same for numbers whose denormals do not matter: they may become zero.
HB_INLINE void store_bf16_normal(uint16_t* to, V value) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
  memcpy(to, &narrow, sizeof narrow);
#else
  store_bf16(to, value);
#endif
}

// Round to nearest even. A NaN stays one.
HB_INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

HB_INLINE uint16_t to_f16(float value) {
#if defined(__AVX2__)
  return (uint16_t)_cvtss_sh(value, 0);
#elif defined(HB_NEON)
  __fp16 half = (__fp16)value;
  return read<uint16_t>(&half);
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  float magnitude;
  memcpy(&magnitude, &bits, 4);
  if (bits < 0x38800000) {  // denormal: the float adder rounds to multiples of 2^-24
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
#endif
}

// Lanes are folded in halves, so that the order of a sum depends on the width alone.
#if defined(__AVX512F__)
HB_INLINE float sum(V value) { return _mm512_reduce_add_ps((__m512)value); }
HB_INLINE float maximum(V value) { return _mm512_reduce_max_ps((__m512)value); }
#else
typedef float Quad __attribute__((vector_size(16)));
template <class Fold> HB_INLINE float fold_lanes(V value, const Fold& fold) {
#if defined(__AVX2__)
  const Quad quad = fold((Quad)_mm256_castps256_ps128((__m256)value), (Quad)_mm256_extractf128_ps((__m256)value, 1));
#else
  const Quad quad = value;
#endif
  const Quad two = fold(quad, __builtin_shuffle(quad, (I4){2, 3, 0, 1}));
  return fold(two, __builtin_shuffle(two, (I4){1, 0, 3, 2}))[0];
}
HB_INLINE float sum(V value) {
  return fold_lanes(value, [](Quad a, Quad b) __attribute__((always_inline)) { return a + b; });
}
HB_INLINE float maximum(V value) {
  return fold_lanes(value, [](Quad a, Quad b) __attribute__((always_inline)) { return a > b ? a : b; });
}
#endif

// Whether any lane of a is not at most that of b: greater, or no number.
HB_INLINE bool any_above(V a, V b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NLE_UQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_NLE_UQ)) != 0;
#else
  bool found = false;
  for (int i = 0; i < kLanes; i++) found |= !(a[i] <= b[i]);
  return found;
#endif
}

// The first lane that holds `number`, or kLanes.
HB_INLINE int first_lane(V value, float number) {
#if defined(__AVX512F__)
  const uint32_t found = _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(number), _CMP_EQ_OQ);
  return found ? __builtin_ctz(found) : kLanes;
#elif defined(__AVX2__)
  const int found = _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, _mm256_set1_ps(number), _CMP_EQ_OQ));
  return found ? __builtin_ctz(found) : kLanes;
#else
  int lane = 0;
  while (lane < kLanes && value[lane] != number) lane++;
  return lane;
#endif
}

// e^x within 2 ulp for x <= 88; 0 below -87 (where float32 ends), so that a masked score counts nothing. Polynomial of Cephes' expf.
HB_INLINE V exponential(V x) {
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
#if defined(__AVX512F__)
  const V clamped = x;
#else
  V clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
  clamped = clamped > splat(88.0f) ? splat(88.0f) : clamped;
#endif
  V shifted = fma(clamped, splat(1.44269504f), magic);
  V n = shifted - magic;
  V f = fma(n, splat(-0.693359375f), clamped);
  f = fma(n, splat(2.12194440e-4f), f);
  V p = splat(1.9875691500e-4f);
  p = fma(p, f, splat(1.3981999507e-3f));
  p = fma(p, f, splat(8.3334519073e-3f));
  p = fma(p, f, splat(4.1665795894e-2f));
  p = fma(p, f, splat(1.6666665459e-1f));
  p = fma(p, f, splat(5.0000001201e-1f));
  p = fma(p, f * f, f + splat(1.0f));
#if defined(__AVX512F__)  // not less: a NaN stays one
  return (V)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
  V scaled = (V)((I)p + (((I)shifted - (I)magic) << 23));
  return x < splat(-87.0f) ? V{} : scaled;
#endif
}

// The same within 2e-5 of its value, for what is rounded to bfloat16 after it. Polynomial of 2^f through Chebyshev's nodes.
HB_INLINE V exponential_to_bf16(V x) {
#if defined(__AVX512F__)
  const __m512 exponent = _mm512_mul_ps((__m512)x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(exponent, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const V f = (V)_mm512_sub_ps(exponent, whole);
  V p = fma(splat(9.666368515e-3f), f, splat(5.592197584e-2f));
  p = fma(p, f, splat(2.402234904e-1f));
  p = fma(p, f, splat(6.931210452e-1f));
  p = fma(p, f, splat(1.0f));
  return (V)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), (__m512)p, whole);
#else
  return exponential(x);
#endif
}

HB_INLINE V hyperbolic_tangent(V x) {
  V twice = x + x;
  twice = twice > splat(40.0f) ? splat(40.0f) : twice;
  return splat(1.0f) - splat(2.0f) / (exponential(twice) + splat(1.0f));
}

// kLanes rows of kLanes columns, turned in registers: each stage exchanges the off-diagonal halves of ever smaller squares.
HB_INLINE void transpose(V (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half; half /= 2) {
    I low = {}, high = {};
    for (int i = 0; i < kLanes; i++) {
      low[i] = i & half ? kLanes + (i - half) : i;
      high[i] = i & half ? kLanes + i : i + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i & half) continue;
      V a = rows[i], b = rows[i + half];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + half] = __builtin_shuffle(a, b, high);
    }
  }
}

}  // namespace HB_ISA
