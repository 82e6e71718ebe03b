// What attention asks of a KV format, and the tiles of keys in which it reads the cache.
//
// A tile is kKeys keys and their values, in groups of kGroupKeys; borders of both are absolute positions. A group is laid out as
// the right sides of two products: [words of a key][kGroupKeys], and [words of values][width of a value], where a word is a float32
// or a pair of bfloat16 (of neighbouring dimensions in a key, of neighbouring keys in a value). Keys may have factors apart.
//
// A format is a template argument and has:
//   Product                             the format of the words, of weights.h
//   Tile, find(a, table, head, place)   where a tile lies
//   panels(a, tile, ahead, buffers)     its words: where they lie in the cache, or decoded into `buffers`; meanwhile, or while the
//                                       words are used, the memory is asked for the tile `ahead`
//   put_query(query, scale, dim, to)    a query as words
//   write_key, write_value              one vector of a token, into the cache; coded formats have `write_coded` instead
#pragma once
#include "program.h"
#include "rows.h"
#include "simd.h"
#include "weights.h"

namespace HB_ISA {

constexpr int kMaxHeadDim = 512;  // as MAX_HEAD_DIM of abi.py
constexpr int kKeys = 64, kGroupKeys = 16, kGroups = kKeys / kGroupKeys;  // kGroupKeys: as PAIR_BLOCK of abi.py
static_assert(kGroupKeys % kLanes == 0 && kPartKeys % kKeys == 0, "vectors must fill groups, parts must hold whole tiles");

// Keys start .. tile + count of a request; tile is a multiple of kKeys and at most start.
struct Place {
  int tile, start, count;
};

// The words of a tile. first: the first group of v that holds values. odd: the last word of each value with nothing in its upper half,
// for an odd number of keys where a word holds two. k_next, v_next: memory to ask for meanwhile, as much and at the same strides.
struct Panels {
  const float *k[kGroups], *v[kGroups], *k_next[kGroups], *v_next[kGroups], *odd;
  const float* k_factors[kGroups];  // [units][kGroupKeys] of each key, for every unit_words words of it; null: none
  int64_t k_stride, v_stride;       // floats from word to word
  int first, unit_words;
};

// Room for the words of one tile: kKeys * dim and kKeys * wide_v floats, and for kKeys * dim / 16 factors.
struct TileBuffers {
  float *keys, *values, *factors;
  int wide_v;

  inline __attribute__((always_inline)) Panels panels(int words) const {
    Panels p = {};
    p.k_stride = kGroupKeys, p.v_stride = wide_v;
    for (int g = 0; g < kGroups; g++) {
      p.k[g] = p.k_next[g] = keys + (int64_t)g * words * kGroupKeys;
      p.v[g] = p.v_next[g] = values + (int64_t)g * kGroupKeys * wide_v;
    }
    return p;
  }
};

// The static scale of a kv head's keys or values.
HB_INLINE float scale_of(const Side& side, int kv_head) { return side.scales ? side.scales[kv_head] : 1.0f; }

HB_INLINE uint8_t* slot_of(const Plane& plane, int64_t block, int head, int row) {
  return plane.data + block * plane.block_stride + head * plane.head_stride + row * plane.row_stride;
}

}  // namespace HB_ISA
