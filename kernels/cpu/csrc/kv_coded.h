// K and V in codes of 4 to 32 bits, in the order of `kvcache/formats/tiles.py`: decoded tile by tile into the words of products.
//
// K and V may be coded differently, and the first tokens of a sequence may lie in another cache, of plain numbers: what decodes a
// group of keys is looked up by codec, once for 16 keys. Head dims are multiples of kGroupKeys.
#pragma once
#include "kv_codecs.h"
#include "kv_dense.h"
#include "kv_encode.h"
#include "kv_tiles.h"

namespace HB_ISA {

// Two rows of numbers as words of products: float32 each, or a row of pairs of bfloat16.
template <class Product, bool IS_EXACT> HB_INLINE void put_words(float* to, int64_t stride, V even, V odd) {
  if (Product::kInputsPerWord == 1) {
    store(to, even);
    store(to + stride, odd);
    return;
  }
  const U half = splat_u(IS_EXACT ? 0 : 0x8000);
  store(to, (V)(((U)even + half) >> 16 | (((U)odd + half) & 0xffff0000u)));
}

// One kv head's side of a block, from some token on. Strides in bytes, from row to row.
struct Coded {
  const uint8_t *codes, *high, *extra;
  int64_t codes_stride, high_stride, extra_stride;
  const float* table;
};

// Where in its word the code number `at` of `count` begins: even ones lie in the lower half, odd ones in the upper.
constexpr int place_of_code(int at, int count, int bits) { return at % count / 2 * bits + at % 2 * (count * bits / 2); }

// The code of number (or token) `at` among those that share words, for kLanes neighbours from `lane` on.
template <int BITS> HB_INLINE U code_at(const Coded& from, int at, int lane) {
  constexpr int kPerWord = BITS < 8 ? 8 : 32 / BITS, kLowBits = BITS < 8 ? 4 : BITS;
  const U low = read<U>(from.codes + at / kPerWord * from.codes_stride + lane * 4);
  if constexpr (BITS == 32) return low;
  const U code = low >> place_of_code(at, kPerWord, kLowBits) & (uint32_t)((1ull << kLowBits) - 1);
  if (BITS == 5) return code | ((U)from_u8(from.high + at / 8 * from.high_stride + lane) >> place_of_code(at, 8, 1) & 1) << 4;
  if (BITS == 6) return code | (from_u16(from.high + at / 8 * from.high_stride + lane * 2) >> place_of_code(at, 8, 2) & 3) << 4;
  return code;
}

// Numbers `at` (even) and at + 1 as pairs of bfloat16, without their factors, where the machine looks 16-bit numbers up.
#if defined(__AVX512BW__)
template <class C> constexpr bool kHasPairs = requires { C::kNumbers; } || (C::kBits == 16 && C::kIsExact);

template <int COUNT> HB_INLINE U lookup_halves(const Numbers<COUNT>& numbers, U index) {
  const __m512i *table = (const __m512i*)numbers.at, at = (__m512i)index;
  if constexpr (COUNT == 32) return (U)_mm512_permutexvar_epi16(at, _mm512_loadu_si512(table));
  const __m512i low = _mm512_permutex2var_epi16(_mm512_loadu_si512(table), at, _mm512_loadu_si512(table + 1));
  if constexpr (COUNT == 64) return (U)low;
  const __m512i high = _mm512_permutex2var_epi16(_mm512_loadu_si512(table + 2), at, _mm512_loadu_si512(table + 3));
  return (U)_mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(at, _mm512_set1_epi16(64)), high);
}

template <class C> HB_INLINE U pair_at(const Coded& from, int at, int lane) {
  constexpr int kPerWord = C::kBits < 8 ? 8 : 32 / C::kBits, kLowBits = C::kBits < 8 ? 4 : C::kBits;
  const U words = read<U>(from.codes + at / kPerWord * from.codes_stride + lane * 4), low = words >> at % kPerWord / 2 * kLowBits;
  if constexpr (C::kBits == 16) return words;
  else if constexpr (C::kBits == 8) return lookup_halves(C::kNumbers, low & 0x00ff00ff) | (low & 0x00800080) << 8;
  else if constexpr (C::kBits == 4) return lookup_halves(C::kNumbers, low);
  else {
    constexpr int kHighBits = C::kBits - 4, kHalf = 4 * kHighBits;
    const uint8_t* at_high = from.high + at / 8 * from.high_stride + lane * kHighBits;
    const U high = kHighBits == 1 ? (U)from_u8(at_high) : from_u16(at_high), halves = high | high << (16 - kHalf);  // above: of no meaning
    const U moved = halves << 4 >> at % 8 / 2 * kHighBits;
    return lookup_halves(C::kNumbers, (low & 0x000f000f) | (moved & (kHighBits == 1 ? 0x00100010 : 0x00300030)));
  }
}
#else
template <class C> constexpr bool kHasPairs = false;
template <class C> HB_INLINE U pair_at(const Coded&, int, int) { return U{}; }
#endif

template <int BYTES> HB_INLINE U extra_at(const uint8_t* at) {
  if constexpr (BYTES == 4) return read<U>(at);
  else if constexpr (BYTES == 2) return from_u16(at);
  else return (U)from_u8(at);
}
template <int BYTES> HB_INLINE U extra_splat(const uint8_t* at) {
  uint32_t value = 0;
  memcpy(&value, at, BYTES);
  return splat_u(value);
}

// The unit of numbers `dim` .. of keys side by side, or of one value.
template <class C> HB_INLINE typename C::Unit key_unit(const Coded& from, int dim, int lane) {
  if constexpr (requires { C::kUnitBytes; }) {
    const int at = C::kUnitDims ? dim / C::kUnitDims : 0;
    const uint8_t* first = from.extra + at * from.extra_stride + lane * C::kUnitBytes;
    return C::unit(extra_at<C::kUnitBytes>(first), extra_at<C::kUnitBytes>(requires { C::kUnitParts; } ? first + from.extra_stride : first));
  } else return {};
}
template <class C> HB_INLINE typename C::Unit value_unit(const Coded& from, int token, int dim) {
  if constexpr (requires { C::kUnitBytes; }) {
    const uint8_t* first = from.extra + token * from.extra_stride + (C::kUnitDims ? dim / C::kUnitDims : 0) * C::kUnitBytes;
    return C::unit(extra_splat<C::kUnitBytes>(first), extra_splat<C::kUnitBytes>(requires { C::kUnitParts; } ? first + C::kUnitBytes : first));
  } else return {};
}

// Ask the memory for rows of `bytes`, line by line; rows that follow each other share lines.
HB_INLINE void ask_for(const uint8_t* first, int rows, int64_t stride, int bytes) {
  if (stride <= bytes) bytes += (int)stride * (rows - 1), rows = 1;
  for (int row = 0; row < rows; row++)
    for (int at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(first + row * stride + at);
}

// kGroupKeys keys as [words][kGroupKeys] without their factors, and these as [units][kGroupKeys]. The memory at `ahead` is asked for.
template <class C, class Product> static void decode_keys(const Coded& from, const Coded& ahead, int dim, float* to, float* factors) {
  constexpr int kPerWord = Product::kInputsPerWord, kUnit = C::kUnitDims ? C::kUnitDims : kMaxHeadDim;
  ask_for(ahead.codes, dim * (C::kBits < 8 ? 4 : C::kBits) / 32, ahead.codes_stride, kGroupKeys * 4);
  if (C::kBits == 5 || C::kBits == 6) ask_for(ahead.high, dim / 8, ahead.high_stride, kGroupKeys * (C::kBits - 4));
  if constexpr (requires { C::kUnitBytes; }) ask_for(ahead.extra, C::kUnitDims ? dim / C::kUnitDims : 1, ahead.extra_stride, kGroupKeys * C::kUnitBytes);
  for (int lane = 0; lane < kGroupKeys; lane += kLanes)
    for (int start = 0; start < dim; start += 16) {
      const typename C::Unit unit = key_unit<C>(from, start, lane);
      if (C::kHasScale && start % kUnit == 0) store(factors + start / kUnit * kGroupKeys + lane, C::scale(unit));
#pragma GCC unroll 8
      for (int d = start; d < start + 16; d += 2) {
        float* words = to + d / kPerWord * kGroupKeys + lane;
        if constexpr (kPerWord == 2 && kHasPairs<C>) store(words, (V)pair_at<C>(from, d, lane));
        else put_words<Product, C::kIsExact>(words, kGroupKeys, C::number(code_at<C::kBits>(from, d, lane), unit, from.table),
                                             C::number(code_at<C::kBits>(from, d + 1, lane), unit, from.table));
      }
    }
}

// Factors of kGroupKeys values, unit after unit of each, from bytes that lie side by side.
template <class C> HB_INLINE void value_factors(const Coded& from, int units, float* to) {
  for (int i = 0; i < kGroupKeys * units; i += kLanes) store(to + i, C::scale(C::unit(extra_at<C::kUnitBytes>(from.extra + i * C::kUnitBytes), U{})));
}

// `count` values as [words][wide]. The last word of an odd number of keys has zeros in its other half.
template <class C, class Product> static void decode_values(const Coded& from, const Coded& ahead, int count, int dim, int wide, float* to) {
  constexpr int kPerWord = Product::kInputsPerWord, kRowsOfCodes = kGroupKeys * (C::kBits < 8 ? 4 : C::kBits) / 32;
  constexpr bool kPairs = kPerWord == 2 && kHasPairs<C>;
  const int unit_dims = C::kUnitDims ? C::kUnitDims : dim, units = dim / unit_dims;
  ask_for(ahead.codes, kRowsOfCodes, ahead.codes_stride, dim * 4);
  if (C::kBits == 5 || C::kBits == 6) ask_for(ahead.high, 2, ahead.high_stride, dim * (C::kBits - 4));
  if constexpr (requires { C::kUnitBytes; }) ask_for(ahead.extra, 1, 0, kGroupKeys * (int)ahead.extra_stride);
  float factors[kGroupKeys * kMaxHeadDim / 16];
  if constexpr (C::kHasScale) value_factors<C>(from, units, factors);
  for (int d = 0; d < wide; d += kLanes) {
    if (d >= dim) {
      for (int word = 0; word * kPerWord < count; word++) store(to + (int64_t)word * wide + d, V{});
      continue;
    }
    const float* factor = factors + d / unit_dims;
#pragma GCC unroll 8
    for (int token = 0; token < kGroupKeys; token += 2) {
      if (token >= count) break;
      const bool is_last = token + 1 == count;
      V even, odd;
      if constexpr (kPairs) {
        const U pair = pair_at<C>(from, token, d);
        even = (V)(pair << 16), odd = (V)(pair & 0xffff0000u);
      } else {
        even = C::number(code_at<C::kBits>(from, token, d), value_unit<C>(from, token, d), from.table);
        odd = C::number(code_at<C::kBits>(from, token + 1, d), value_unit<C>(from, token + 1, d), from.table);
      }
      if (C::kHasScale) even *= splat(factor[token * units]), odd *= splat(factor[(token + 1) * units]);
      if (is_last) odd = V{};
      float* row = to + (int64_t)(token / kPerWord) * wide + d;
      if (kPerWord == 1 && is_last) store(row, even);
      else put_words<Product, C::kIsExactScaled>(row, wide, even, odd);
    }
  }
}

typedef void (*DecodeKeys)(const Coded&, const Coded&, int dim, float* words, float* factors);
typedef void (*DecodeValues)(const Coded&, const Coded&, int count, int dim, int wide, float*);
struct Decoders {
  DecodeKeys keys[2];  // by words: float32, pairs of bfloat16
  DecodeValues values[2];
  void (*encode)(const float*, int dim, Constants, uint8_t* codes, uint8_t* extra);
  int bits, extra_dims, extra_bytes;  // extra_bytes for each extra_dims numbers (0: for all)
  int extra_unit;
  bool has_factors;
};
// Programs whose rows are bfloat16 run only where there are instructions for pairs of them.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
using PairWords = BF16Pairs;
#else
using PairWords = F32;
#endif
#define HB_CODEC(C, ENCODE, DIMS, BYTES, UNIT) \
  {{decode_keys<C, F32>, decode_keys<C, PairWords>}, {decode_values<C, F32>, decode_values<C, PairWords>}, ENCODE, C::kBits, DIMS, BYTES, UNIT, C::kHasScale}

// In the order of Codec in program.h.
static const Decoders kCodecs[] = {
    HB_CODEC(F32Number, encode_plain<kCacheF32>, 0, 0, 1),
    HB_CODEC(BF16Number, encode_plain<kCacheBF16>, 0, 0, 1),
    HB_CODEC(F16Number, encode_plain<kCacheF16>, 0, 0, 1),
    HB_CODEC(E4M3Number, encode_fp8<false>, 0, 0, 1),
    HB_CODEC(E5M2Number, encode_fp8<true>, 0, 0, 1),
    HB_CODEC(E4M3PerToken, encode_8_per_token<false>, 0, 4, 4),
    HB_CODEC(Int8PerToken, encode_8_per_token<true>, 0, 4, 4),
    HB_CODEC(Int4PerToken, encode_int4_per_token, 0, 4, 4),
    HB_CODEC(E2M1Blocks, encode_e2m1_blocks<1>, 16, 1, 1),
    HB_CODEC(E2M1Blocks, encode_e2m1_blocks<2>, 16, 1, 1),
    HB_CODEC(IntBlocks<4>, encode_int_blocks<4>, 16, 1, 1),
    HB_CODEC(IntBlocks<5>, encode_int_blocks<5>, 16, 1, 1),
    HB_CODEC(IntBlocks<6>, encode_int_blocks<6>, 16, 1, 1),
    HB_CODEC(E2M1Powers, encode_ultraquant, 32, 1, 1),
    HB_CODEC(LevelsPerToken, encode_levels, 0, 2, 2),
    HB_CODEC(StepsPerToken, encode_steps, 0, 4, 2),
};

HB_INLINE Coded coded_at(const Side& side, int64_t block, int head, int64_t codes, int64_t high, int64_t extra) {
  return {slot_of(side.codes, block, head, 0) + codes, side.high.data ? slot_of(side.high, block, head, 0) + high : nullptr,
          side.extra.data ? slot_of(side.extra, block, head, 0) + extra : nullptr,
          side.codes.row_stride, side.high.row_stride, side.extra.row_stride, side.table};
}

template <class WORDS> struct CodedKV {
  using Product = WORDS;
  static constexpr int kWords = WORDS::kInputsPerWord == 2;

  // Where each group of keys lies; those outside of the range are not looked at. table: of the request, for the first tokens.
  struct Tile {
    const int32_t* table;
    int64_t block[kGroups];
    int offset[kGroups];
    int tile, head, first, count;
  };

  HB_INLINE Tile find(const Attention& a, const int32_t* table, int head, Place place) {
    Tile to;
    to.table = table, to.tile = place.tile, to.head = head, to.first = (place.start - place.tile) / kGroupKeys, to.count = place.count;
    const int last = (place.count - 1) / kGroupKeys;
    for (int g = 0; g < kGroups; g++) {
      const int inside = g < to.first ? to.first : g > last ? last : g, position = place.tile + inside * kGroupKeys;
      const bool is_first = position < a.first_tokens;
      to.block[g] = is_first ? -1 : table[a.entry_shift + position / a.cache.block_size];
      to.offset[g] = position % a.cache.block_size;
    }
    return to;
  }

  HB_INLINE Coded key_of(const Attention& a, const Tile& tile, int g) {
    const int at = tile.offset[g], bits = kCodecs[a.cache.k.codec].bits;
    return coded_at(a.cache.k, tile.block[g], tile.head, at * 4, at * (bits - 4), at * kCodecs[a.cache.k.codec].extra_unit);
  }
  HB_INLINE Coded value_of(const Attention& a, const Tile& tile, int g) {
    const Side& v = a.cache.v;
    const int at = tile.offset[g], bits = kCodecs[v.codec].bits;
    const int per_word = bits < 8 ? 8 : 32 / bits;
    return coded_at(v, tile.block[g], tile.head, at / per_word * v.codes.row_stride, at / 8 * v.high.row_stride, at * v.extra.row_stride);
  }

  HB_INLINE Panels panels(const Attention& a, const Tile& tile, const Tile& ahead, const TileBuffers& to) {
    const Decoders &key = kCodecs[a.cache.k.codec], &value = kCodecs[a.cache.v.codec];
    constexpr int kPerWord = Product::kInputsPerWord;
    const int unit_dims = key.has_factors && key.extra_dims ? key.extra_dims : a.head_dim, units = a.head_dim / unit_dims;
    for (int g = tile.first; g * kGroupKeys < tile.count; g++) {
      float *keys = to.keys + (int64_t)g * a.head_dim / kPerWord * kGroupKeys, *values = to.values + (int64_t)g * kGroupKeys * to.wide_v;
      float* factors = to.factors + (int64_t)g * units * kGroupKeys;
      const int left = tile.count - g * kGroupKeys, count = left < kGroupKeys ? left : kGroupKeys;
      if (tile.block[g] < 0) {
        put_first(a, tile, g, count, to.wide_v, keys, values);
        for (int i = 0; i < units * kGroupKeys; i++) factors[i] = 1.0f;
        continue;
      }
      const int next = ahead.block[g] < 0 ? kGroups - 1 : g;  // what lies in another cache is not asked for
      const bool has_next = ahead.block[next] >= 0;
      const Coded k = key_of(a, tile, g), v = value_of(a, tile, g);
      key.keys[kWords](k, has_next ? key_of(a, ahead, next) : k, a.head_dim, keys, factors);
      value.values[kWords](v, has_next ? value_of(a, ahead, next) : v, count, a.head_dim_v, to.wide_v, values);
    }
    Panels p = to.panels(a.head_dim / kPerWord);
    for (int g = 0; g < kGroups && key.has_factors; g++) p.k_factors[g] = to.factors + (int64_t)g * units * kGroupKeys;
    p.unit_words = unit_dims / kPerWord;
    p.first = tile.first, p.odd = to.values + (int64_t)((tile.count - 1) / kGroupKeys) * kGroupKeys * to.wide_v +
                                  (int64_t)((tile.count - 1) % kGroupKeys / kPerWord) * to.wide_v;
    return p;
  }

  // A group of the first tokens: plain numbers, over the scales that queries and outputs will bring in.
  HB_INLINE void put_first(const Attention& a, const Tile& tile, int g, int count, int wide, float* keys, float* values) {
    const float k_inverse = 1.0f / scale_of(a.cache.k, tile.head), v_inverse = 1.0f / scale_of(a.cache.v, tile.head);
    const int first = tile.tile + g * kGroupKeys;
    constexpr int kPerWord = Product::kInputsPerWord;
    float rows[2][kMaxHeadDim];
    for (int i = 0; i < kGroupKeys; i += 2) {
      for (int j = 0; j < 2; j++) read_first(a, a.first.k.codes, tile, first + (i + j < count ? i + j : count - 1), a.head_dim, k_inverse, rows[j]);
      for (int d = 0; d < a.head_dim; d++)
        for (int j = 0; j < 2; j++) {
          if (kPerWord == 1) keys[d * kGroupKeys + i + j] = rows[j][d];
          else ((uint16_t*)keys)[(d / 2 * kGroupKeys + i + j) * 2 + d % 2] = to_bf16(rows[j][d]);
        }
    }
    for (int i = 0; i < count; i += 2) {
      for (int j = 0; j < 2; j++) {
        if (i + j < count) read_first(a, a.first.v.codes, tile, first + i + j, a.head_dim_v, v_inverse, rows[j]);
        else memset(rows[j], 0, sizeof rows[j]);
        memset(rows[j] + a.head_dim_v, 0, (wide - a.head_dim_v) * 4);
        if (kPerWord == 1 && i + j < count) memcpy(values + (int64_t)(i + j) * wide, rows[j], wide * 4);
      }
      for (int d = 0; kPerWord == 2 && d < wide; d += kLanes)
        put_words<Product, false>(values + (int64_t)(i / 2) * wide + d, 0, load(rows[0] + d), load(rows[1] + d));
    }
  }

  HB_INLINE void read_first(const Attention& a, const Plane& plane, const Tile& tile, int position, int dim, float factor, float* to) {
    const uint8_t* at = slot_of(plane, tile.table[position / a.first.block_size], tile.head, position % a.first.block_size);
    for (int d = 0; d < dim; d += kLanes) {
      const V number = a.first.format == kCacheF32 ? load((const float*)at + d) : a.first.format == kCacheBF16 ? from_bf16(at + 2 * d) : from_f16(at + 2 * d);
      store(to + d, number * splat(factor));
    }
  }

  HB_INLINE void put_query(const float* query, float scale, int dim, float* to) {
    if (kWords == 0) {
      for (int d = 0; d < dim; d++) to[d] = query[d] * scale;
      return;
    }
    for (int d = 0; d < dim; d += kLanes) store_bf16((uint16_t*)to + d, load(query + d) * splat(scale));
  }
};

// A key's codes as words: so many numbers of the token side by side.
HB_INLINE void put_key(const Side& side, int bits, int64_t block, int head, int offset, int dim, const uint8_t* codes) {
  uint8_t* to = slot_of(side.codes, block, head, 0) + offset * 4;
  if (bits > 8) {
    for (int at = 0; at < dim * bits / 8; at += 4, to += side.codes.row_stride) memcpy(to, codes + at, 4);
    return;
  }
  const int per_word = bits == 8 ? 4 : 8, low_bits = bits == 8 ? 8 : 4, high_bits = bits - low_bits;
  uint8_t* high = high_bits ? slot_of(side.high, block, head, 0) + offset * high_bits : nullptr;
  for (int d = 0; d < dim; d += per_word, to += side.codes.row_stride) {
    uint32_t low = 0, upper = 0;
    for (int i = 0; i < per_word; i++) {
      low |= (uint32_t)(codes[d + i] & ((1 << low_bits) - 1)) << place_of_code(i, per_word, low_bits);
      upper |= (uint32_t)(codes[d + i] >> low_bits) << place_of_code(i, per_word, high_bits);
    }
    memcpy(to, &low, 4);
    if (high) memcpy(high + d / 8 * side.high.row_stride, &upper, high_bits);
  }
}

// A value's codes among those of the tokens that share its words.
HB_INLINE void put_value(const Side& side, int bits, int64_t block, int head, int offset, int dim, const uint8_t* codes) {
  if (bits >= 8) {
    const int item = bits / 8, per_word = 4 / item, byte = bits == 32 ? 0 : place_of_code(offset, per_word, bits) / 8;
    uint8_t* to = slot_of(side.codes, block, head, offset / per_word) + byte;
    for (int d = 0; d < dim; d++) memcpy(to + 4 * d, codes + item * d, item);
    return;
  }
  uint32_t* to = (uint32_t*)slot_of(side.codes, block, head, offset / 8);
  const int shift = place_of_code(offset, 8, 4), high_bits = bits - 4, high_shift = place_of_code(offset, 8, high_bits);
  for (int d = 0; d < dim; d++) to[d] = (to[d] & ~(15u << shift)) | (uint32_t)(codes[d] & 15) << shift;
  if (high_bits == 0) return;
  uint8_t* high = slot_of(side.high, block, head, offset / 8);
  const uint32_t mask = ~(((1u << high_bits) - 1) << high_shift);
  for (int d = 0; d < dim; d++) {
    uint32_t word = 0;
    memcpy(&word, high + d * high_bits, high_bits);
    word = (word & mask) | (uint32_t)(codes[d] >> 4) << high_shift;
    memcpy(high + d * high_bits, &word, high_bits);
  }
}

// One vector of a token into the cache. Neighbouring tokens share words of values: one thread writes all values of a kv head.
HB_INLINE void write_coded(const Attention& a, bool is_key, int64_t block, int head, int offset, const float* from) {
  const Side& side = is_key ? a.cache.k : a.cache.v;
  const Decoders& codec = kCodecs[side.codec];
  const int dim = is_key ? a.head_dim : a.head_dim_v;
  alignas(64) uint8_t codes[4 * kMaxHeadDim], extra[kMaxHeadDim / 16 + 4];
  codec.encode(from, dim, {scale_of(side, head), side.table}, codes, extra);
  if (is_key) put_key(side, codec.bits, block, head, offset, dim, codes);
  else put_value(side, codec.bits, block, head, offset, dim, codes);
  const int extra_bytes = codec.extra_dims ? dim / codec.extra_dims * codec.extra_bytes : codec.extra_bytes, unit = codec.extra_unit;
  if (!is_key && extra_bytes) memcpy(slot_of(side.extra, block, head, offset), extra, extra_bytes);
  for (int at = 0; is_key && at < extra_bytes; at += unit) memcpy(slot_of(side.extra, block, head, at / unit) + offset * unit, extra + at, unit);
}

}  // namespace HB_ISA
