// Choosing tokens from rows of logits: the largest, the largest with noise, the best few in order, sums, ranks.
//
// Twins of the laws in kernels/sampling.py. A result is a function of its row alone: rows are cut into parts of fixed size, and
// every sum has one order. Rows with NaN give some token of the vocabulary; only `best` says that they are no numbers.
#pragma once
#include "program.h"
#include "simd.h"

namespace HB_ISA {

constexpr int kBlock = 16 * kLanes;    // tokens whose maximum is taken before anyone looks at it
constexpr int kSumBlock = 64 * kLanes;  // tokens of a sum that are read twice, the second time from the nearest cache

HB_INLINE bool any(I mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint64_t words[kLanes / 2], all = 0;
  memcpy(words, &mask, sizeof words);
  for (uint64_t word : words) all |= word;
  return all != 0;
#endif
}

HB_INLINE I lane_numbers() {
  I numbers = {};
  for (int i = 0; i < kLanes; i++) numbers[i] = i;
  return numbers;
}

// The first `count` floats, -inf in the lanes beyond them.
HB_INLINE V load_up_to(const float* from, int count) {
  if (count >= kLanes) return load(from);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = i < count ? from[i] : -INFINITY;
  return load(lanes);
}

HB_INLINE const float* row_of(const LogitRows& rows, int row) { return rows.logits + (rows.at ? rows.at[row] : row) * rows.stride; }
HB_INLINE float divisor_of(const LogitRows& rows, int row) { return rows.temperatures ? rows.temperatures[row] : 1.0f; }

// The largest of a part of a row, the first of equals.
static Best best(const LogitRows& rows, int row, int part) {
  const float* x = row_of(rows, row);
  const int first = part * kPartTokens, end = first + kPartTokens < rows.width ? first + kPartTokens : rows.width;
  Best found{-INFINITY, first, 0};
  I is_nan = {};
  int block = first;
  for (int i = first; i < end; i += kBlock) {
    V most = splat(-INFINITY);
#pragma GCC unroll 16
    for (int j = i; j < i + kBlock; j += kLanes) {
      if (j >= end) break;
      V v = load_up_to(x + j, end - j);
      is_nan |= v != v;
      most = maximum(v, most);
    }
    if (any(most > splat(found.value))) found.value = maximum(most), block = i;
  }
  for (int i = block; i < end; i++) {
    if (x[i] != found.value) continue;
    found.token = i;
    break;
  }
  found.has_nan = any(is_nan);
  return found;
}

HB_INLINE uint64_t mix_64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

HB_INLINE U mix_32(U x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

HB_INLINE uint64_t noise_key(int64_t seed, int64_t position) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
  return mix_64(mix_64((uint64_t)seed + golden) + (uint64_t)position * golden);
}

HB_INLINE V uniform(uint64_t key, U token) {
  U bits = mix_32(mix_32(token ^ (uint32_t)key) ^ (uint32_t)(key >> 32)) & 0x7FFFFFFFu;
  V number = (to_float((I)bits) + 0.5f) * 0x1p-31f;
  const V most = splat(1.0f - 0x1p-24f);
  return number < most ? number : most;
}

// log x of normal positive numbers, within 1 ulp or so. Polynomial of Cephes' logf.
HB_INLINE V logarithm(V x) {
  I exponent = ((I)x - 0x3F3504F3) >> 23;  // the mantissa lies between the roots of 1/2 and 2
  V n = to_float(exponent), f = (V)((I)x - (exponent << 23)) - 1.0f, square = f * f;
  V p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  V tail = fma(n, splat(-2.12194440e-4f), p * f * square);
  tail = fma(square, splat(-0.5f), tail);
  return fma(n, splat(0.693359375f), f + tail);
}

// -log(-log(1 - u)). What 1 - u rounds away comes back through the first term of the series.
HB_INLINE V gumbel(V u) {
  V rest = 1.0f - u;
  V exponential_noise = -(logarithm(rest) + ((1.0f - rest) - u) / rest);
  return -logarithm(exponential_noise);
}

// No less than gumbel(u), at most 0.07 more where it is above 3: -log(u) with the line between powers of two for its logarithm.
HB_INLINE V gumbel_at_most(V u) {
  constexpr float log_2 = 0.69314718f, slack = 1e-3f;
  return fma(to_float((I)u), splat(-log_2 * 0x1p-23f), splat(127 * log_2 + slack));
}

// The largest sum of a logit and its noise in a part of a row. Logarithms are taken only where the sum may exceed the best one.
template <bool kDivides> HB_INLINE Best noisy_best_of(const LogitRows& rows, int row, int part) {
  constexpr float most_noise = 22.2f;
  const float* x = row_of(rows, row);
  const int first = part * kPartTokens, end = first + kPartTokens < rows.width ? first + kPartTokens : rows.width;
  const uint64_t key = noise_key(rows.seeds[row], rows.positions[row]);
  const V divisor = splat(divisor_of(rows, row));
  Best found{-INFINITY, first, 0};
  U token = (U)(lane_numbers() + first);
  for (int i = first; i < end; i += kLanes, token += kLanes) {
    V scaled = load_up_to(x + i, end - i);
    if (kDivides) scaled /= divisor;
    if (!any(scaled + most_noise > splat(found.value))) continue;
    V u = uniform(key, token);
    if (!any(scaled + gumbel_at_most(u) > splat(found.value))) continue;
    float sums[kLanes];
    store(sums, scaled + gumbel(u));
    for (int lane = 0; lane < kLanes; lane++)
      if (sums[lane] > found.value) found.value = sums[lane], found.token = i + lane;
  }
  return found;
}

static Best noisy_best(const LogitRows& rows, int row, int part) {
  return divisor_of(rows, row) == 1.0f ? noisy_best_of<false>(rows, row, part) : noisy_best_of<true>(rows, row, part);
}

// The noise of some tokens.
static void gumbel_noise(int64_t seed, int64_t position, const int64_t* tokens, int32_t count, float* to) {
  const uint64_t key = noise_key(seed, position);
  for (int i = 0; i < count; i += kLanes) {
    const int here = count - i < kLanes ? count - i : kLanes;
    U token = {};
    for (int lane = 0; lane < here; lane++) token[lane] = (uint32_t)tokens[i + lane];
    const V values = gumbel(uniform(key, token));
    memcpy(to + i, &values, sizeof(float) * here);
  }
}

// Integers in the order of the floats: all of them, NaN at the ends. -0.0 has the place of 0.0.
HB_INLINE I place(V x) {
  I bits = (I)(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
HB_INLINE int32_t place(float x) {
  x += 0.0f;
  const int32_t bits = read<int32_t>(&x);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
HB_INLINE float value_at(int32_t place) {
  place ^= (place >> 31) & 0x7FFFFFFF;
  return read<float>(&place);
}

// The largest place that `holds`, which holds for all below one that it holds for; INT32_MIN if it holds nowhere else.
template <class Condition> HB_INLINE int32_t largest_place(const Condition& holds) {
  uint32_t found = 0;  // places counted from the least
  for (uint32_t bit = 1u << 31; bit; bit >>= 1)
    if (holds((int32_t)((found + bit) ^ 1u << 31))) found += bit;
  return (int32_t)(found ^ 1u << 31);
}

// A place that at least `count` tokens reach, and not many more: of sets of 16 tokens, the count-th largest maximum.
HB_INLINE int32_t threshold(const float* x, int width, int count, int32_t* maxima) {
  int num_maxima = 0;
  for (int i = 0; i < width; i += kBlock, num_maxima += kLanes) {
    I most = I{} + INT32_MIN;
#pragma GCC unroll 16
    for (int j = i; j < i + kBlock; j += kLanes) {
      if (j >= width) break;
      I places = place(load_up_to(x + j, width - j));
      most = places > most ? places : most;
    }
    memcpy(maxima + num_maxima, &most, sizeof most);
  }
  return largest_place([&](int32_t place) {
    I reached = {};
    for (int i = 0; i < num_maxima; i += kLanes) reached -= read<I>(maxima + i) >= place;
    int total = 0;
    for (int lane = 0; lane < kLanes; lane++) total += reached[lane];
    return total >= count;
  });
}

// Tokens at `least` or above, by id.
HB_INLINE int collect(const float* x, int width, float divisor, int32_t least, Candidate* to) {
  int count = 0;
  for (int i = 0; i < width; i += kLanes) {
    I reaches = place(load_up_to(x + i, width - i)) >= least;
    if (!any(reaches)) continue;
    for (int lane = 0; lane < kLanes && i + lane < width; lane++)
      if (reaches[lane]) to[count++] = {~((uint32_t)place(x[i + lane] / divisor) ^ 1u << 31), i + lane};
  }
  return count;
}

// By order, stable, digit by digit. Both arrays are overwritten; returns the one with the result.
static Candidate* sort(Candidate* from, Candidate* to, int count) {
  int32_t counts[4][256] = {};
  for (int i = 0; i < count; i++)
    for (int digit = 0; digit < 4; digit++) counts[digit][from[i].order >> 8 * digit & 255]++;
  for (int digit = 0; digit < 4; digit++) {
    int32_t next = 0, ends[256];
    for (int value = 0; value < 256; value++) ends[value] = next, next += counts[digit][value];
    if (counts[digit][from[0].order >> 8 * digit & 255] == count) continue;
    for (int i = 0; i < count; i++) to[ends[from[i].order >> 8 * digit & 255]++] = from[i];
    Candidate* other = from;
    from = to, to = other;
  }
  return from;
}

// The `count` largest, equal ones by id. workspace: top_workspace_bytes(width).
static void ordered_top(const LogitRows& rows, int row, int count, float* values, int64_t* tokens, uint8_t* workspace) {
  const float *x = row_of(rows, row), divisor = divisor_of(rows, row);
  const int width = rows.width;
  Candidate *candidates = (Candidate*)workspace, *other = candidates + width;
  int32_t least = INT32_MIN;
  if (count < width / 16) {
    // Of different logits, division may make equal ones, which go by id: all that divide to the threshold's value come along.
    const int32_t scaled = place(value_at(threshold(x, width, count, (int32_t*)(other + width))) / divisor);
    least = largest_place([&](int32_t at) { return place(value_at(at) / divisor) < scaled; }) + 1;
  }
  int found = collect(x, width, divisor, least, candidates);
  if (found < count) found = collect(x, width, divisor, INT32_MIN, candidates);  // a row with NaN
  const Candidate* sorted = sort(candidates, other, found);
  for (int i = 0; i < count; i++) tokens[i] = sorted[i].token, values[i] = x[sorted[i].token] / divisor;
}

// log of the sum of e^x. Blocks are summed in float32, their sums in float64; a new maximum rescales what was summed before it.
static double log_normaliser(const LogitRows& rows, int row) {
  const float* x = row_of(rows, row);
  const V divisor = splat(divisor_of(rows, row));
  float most = -INFINITY;
  double total = 0.0;
  for (int i = 0; i < rows.width; i += kSumBlock) {
    const int count = rows.width - i < kSumBlock ? rows.width - i : kSumBlock;
    V scaled[64], most_here = splat(-INFINITY), sums[4] = {};
    for (int j = 0; j < 64; j++) {
      scaled[j] = load_up_to(x + i + j * kLanes, count - j * kLanes) / divisor;
      most_here = maximum(scaled[j], most_here);
    }
    const float block_most = maximum(most_here);
    if (block_most > most) total *= exp((double)most - (double)block_most), most = block_most;
    if (most == -INFINITY) continue;
    for (int j = 0; j < 64; j += 4)
      for (int k = 0; k < 4; k++) sums[k] += exponential(scaled[j + k] - most);
    total += (double)sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return log(total) + (double)most;
}

// 1 and how many are larger than `token`.
static int64_t rank(const LogitRows& rows, int row, int64_t token) {
  const float* x = row_of(rows, row);
  const V value = splat(x[token]);
  I larger = {};
  for (int i = 0; i < rows.width; i += kLanes) larger -= load_up_to(x + i, rows.width - i) > value;
  int64_t total = 1;
  for (int lane = 0; lane < kLanes; lane++) total += larger[lane];
  return total;
}

}  // namespace HB_ISA
