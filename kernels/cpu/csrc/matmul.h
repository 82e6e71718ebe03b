// Products of activations with panels of weights: y[M, kPanel] = x[M, K] * panel.
//
// One order of arithmetic for every number of rows: each output is one chain of fused multiply-adds over the inputs in turn.
// Rows are cut into tiles only to share the loads of weights, so a row's bits do not depend on its neighbours. A chain may be
// put down in y and taken up again (the inputs of a long panel come in pieces), which changes no bit either. Of rows of whole numbers, the
// chain is over groups of inputs, whose own sums are whole numbers.
#pragma once
#include "program.h"
#include "rows.h"
#include "weights.h"

namespace HB_ISA {

constexpr int kPieceInputs = 256;   // inputs of a quantised panel that are decoded at a time
constexpr int kDirectRows = 4;      // up to so many rows, quantised weights are decoded in registers instead
constexpr int kPairRows = kRows / 4;  // up to so many rows, two panels share a tile: one alone would wait for its own chain
constexpr int kDotRows = 6;            // rows of the largest tile of whole numbers
constexpr int kBlockRows = 96;         // rows of an item's scratch; a multiple of every kRows

constexpr int kOwnRows = 64;           // from so many rows for each thread on, threads share out the rows and not the panels

constexpr int kLineBytes = 64;
constexpr int kAheadBytes = 8192;  // memory that a thread has asked for and not used yet

// Memory that a tile asks for while it computes, `bytes` of it with each group of inputs: the weights that come after.
struct Ahead {
  const uint8_t* at;
  int bytes;
};

// ROWS rows of K words against PANELS neighbouring panels. y continues the chains when `resumes`, else they start at zero.
template <class F, int ROWS, int PANELS>
static __attribute__((noinline)) void tile(
    const uint8_t* panel, int64_t panel_bytes, Ahead ahead, int K, const float* x, int64_t ldx, float* y, int64_t ldy, bool resumes) {
  V acc[ROWS][PANELS][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) acc[r][p][v] = resumes ? load(y + r * ldy + p * kPanel + v * kLanes) : V{};
  // Three row pointers with two strides reach 12 rows without running out of address registers.
  const float *x0 = x, *x4 = x + (ROWS > 4 ? 4 : 0) * ldx, *x8 = x + (ROWS > 8 ? 8 : 0) * ldx;
  typename F::Group group[PANELS];
  auto input = [&](int start, int step) __attribute__((always_inline)) {
    V w[PANELS][kVectors];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) w[p][v] = F::decode(group[p], start, step, v);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const float* four = r < 4 ? x0 : r < 8 ? x4 : x8;  // by itself: GCC 12 under sanitizers indexes the choice wrongly
      V value = splat(four[(r % 4) * ldx + step]);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) acc[r][p][v] = F::accumulate(w[p][v], value, acc[r][p][v]);
    }
  };
  int num_groups = K / F::kGroup;
  for (int g = 0; g < num_groups; g++) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) {
      group[p] = F::open(panel + p * panel_bytes, g);
      // Weights are read once a step: they are not to drive everything else out of the caches.
      for (int at = 0; at < ahead.bytes; at += kLineBytes) __builtin_prefetch(ahead.at + p * panel_bytes + at, 0, 0);
    }
    ahead.at += ahead.bytes;
    for (int start = 0; start < F::kGroup; start += 8) {
#pragma GCC unroll 8
      for (int step = 0; step < 8; step++) input(start, step);
      x0 += 8, x4 += 8, x8 += 8;
    }
  }
  if (F::kIsDense && K % F::kGroup) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) group[p] = F::open(panel + p * panel_bytes, num_groups);
    for (int step = 0; step < K % F::kGroup; step++) input(0, step);
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) store(y + r * ldy + p * kPanel + v * kLanes, acc[r][p][v]);
}

template <int N> struct Count {
  static constexpr int value = N;
};

// Calls body(Count<rows>) for 1 <= rows <= MOST: kernels are compiled for each number of rows.
template <int MOST, class Body> HB_INLINE void exactly(int rows, const Body& body) {
  if constexpr (MOST > 0) {
    if (rows == MOST) body(Count<MOST>{});
    else exactly<MOST - 1>(rows, body);
  }
}

// Calls each(index, first row, rows) for `num_rows` rows in parts of at most MOST, as equal as can be.
template <int MOST, class Each> HB_INLINE void cut_rows(int num_rows, const Each& each) {
  const int num_parts = (num_rows + MOST - 1) / MOST;
  for (int t = 0, row = 0, rows; t < num_parts; t++, row += rows) each(t, row, rows = (num_rows - row + num_parts - t - 1) / (num_parts - t));
}

// A tile of `rows` <= MOST rows.
template <class F, int MOST, int PANELS>
HB_INLINE void tile_of(
    int rows, const uint8_t* panel, int64_t panel_bytes, Ahead ahead, int K, const float* x, int64_t ldx, float* y, int64_t ldy, bool resumes) {
  exactly<MOST>(rows, [&](auto count) __attribute__((always_inline)) {
    tile<F, decltype(count)::value, PANELS>(panel, panel_bytes, ahead, K, x, ldx, y, ldy, resumes);
  });
}

// Any number of rows against one dense panel, in tiles as equal as can be. One tile streams the panel past it; of several, all but
// the first find it in a cache, and each asks for its share of the next panel (of `next_bytes`; 0: there is none to wait for).
template <class F>
static void multiply_dense(
    const uint8_t* panel, int64_t next_bytes, int K, int M, const float* x, int64_t ldx, float* y, int64_t ldy, bool resumes) {
  const int num_tiles = (M + kRows - 1) / kRows;
  const uint8_t* next = panel + (num_tiles == 1 ? kAheadBytes : next_bytes);
  const int64_t share = next_bytes / num_tiles, bytes = share * F::kGroup / K;
  cut_rows<kRows>(M, [&](int t, int row, int rows) __attribute__((always_inline)) {
    tile_of<F, kRows, 1>(rows, panel, 0, {next + t * share, (int)bytes}, K, x + row * ldx, ldx, y + row * ldy, ldy, resumes);
  });
}

// kPieceInputs inputs of a panel from group `first_group`, as an F32 panel.
template <class F> HB_INLINE void decode_piece(const uint8_t* panel, int first_group, int num_groups, float* to) {
  for (int g = 0; g < num_groups; g++) {
    typename F::Group group = F::open(panel, first_group + g);
    for (int start = 0; start < F::kGroup; start += 8)
#pragma GCC unroll 8
      for (int step = 0; step < 8; step++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++, to += kLanes) store(to, F::decode(group, start, step, v));
  }
}

template <class F>
static void multiply_packed(
    const uint8_t* panel, int K, int M, const float* x, int64_t ldx, float* y, int64_t ldy, float* piece) {
  if (M <= kDirectRows) return tile_of<F, kDirectRows, 1>(M, panel, 0, {panel + kAheadBytes, F::kGroupBytes}, K, x, ldx, y, ldy, false);
  for (int k = 0; k < K; k += kPieceInputs) {
    int inputs = K - k < kPieceInputs ? K - k : kPieceInputs;
    decode_piece<F>(panel, k / F::kGroup, inputs / F::kGroup, piece);
    multiply_dense<F32>((const uint8_t*)piece, 0, inputs, M, x + k, ldx, y, ldy, k > 0);
  }
}

// ROWS rows of whole numbers in PLANES planes against a panel of such weights: whole-numbered sums within each group, then one
// chain of multiply-adds over the groups. x: rows of WholeRow<PLANES>, `ldx` floats apart.
template <class F, int ROWS, int PLANES>
static __attribute__((noinline)) void dot_tile(const uint8_t* panel, Ahead ahead, int K, const float* x, int64_t ldx, float* y, int64_t ldy) {
  constexpr int kHalves = F::kGroup / 16;
  V acc[ROWS][kVectors] = {};
  const WholeRow<PLANES> first = WholeRow<PLANES>::at(x, K);
  const int8_t *x0 = first.numbers, *x3 = x0 + (ROWS > 3 ? 3 : 0) * ldx * 4;
  for (int g = 0; g < K / F::kGroup; g++) {
    I sums[PLANES][ROWS][kVectors] = {};
    const typename F::Group group = F::open(panel, g);
    for (int at = 0; at < ahead.bytes; at += kLineBytes) __builtin_prefetch(ahead.at + at, 0, 0);
    ahead.at += ahead.bytes;
#pragma GCC unroll 8
    for (int start = 0; start < F::kGroup; start += 4) {
      U w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) w[v] = F::quads(group, start, v);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int plane = 0; plane < PLANES; plane++) {
          const int8_t* three = r < 3 ? x0 : x3;
          const I word = splat_word(three + (r % 3) * ldx * 4 + start + plane * K);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; v++) sums[plane][r][v] = dot_bytes(w[v], word, sums[plane][r][v]);
        }
    }
    x0 += F::kGroup, x3 += F::kGroup;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const V scale = splat(first.scales[r * ldx + g / (kRoundGroup / F::kGroup)]);
      const float* halves = first.sums + r * ldx + g * kHalves;
      const V total = splat(kHalves == 2 ? halves[0] + halves[1] : halves[0]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        const I sum = PLANES == 1 ? sums[0][r][v] : (sums[0][r][v] << 8) + sums[PLANES - 1][r][v];
        acc[r][v] = fma(group.minimum[v], total, fma(to_float(sum), group.scale[v] * scale, acc[r][v]));
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) store(y + r * ldy + v * kLanes, acc[r][v]);
}

// y[M, num_panels * kPanel] for panels `panel` and, when num_panels is 2, the next. piece: scratch of kPieceInputs * kPanel.
template <class F>
static void multiply_as(
    const Matrix& w, int panel, int num_panels, int M, const float* x, int64_t ldx, float* y, int64_t ldy, float* piece) {
  const uint8_t* at = (const uint8_t*)w.data + panel * w.panel_bytes;
  const int K = w.num_inputs / F::kInputsPerWord;
  const Ahead ahead = {at + kAheadBytes / 2, F::kGroupBytes};
  if (num_panels == 2) return tile_of<F, kPairRows, 2>(M, at, w.panel_bytes, ahead, K, x, ldx, y, ldy, false);
  if constexpr (F::kIsDense) multiply_dense<F>(at, w.panel_bytes, K, M, x, ldx, y, ldy, false);
  else multiply_packed<F>(at, K, M, x, ldx, y, ldy, piece);
}

// The same for rows of whole numbers, panel by panel.
template <class F, int PLANES>
static void multiply_whole_as(const Matrix& w, int panel, int num_panels, int M, const float* x, int64_t ldx, float* y, int64_t ldy, float*) {
  constexpr int kTileRows = kDotRows / PLANES + PLANES / 2;  // 6 and 4: a row has a sum and PLANES whole-numbered ones
  const int num_tiles = (M + kTileRows - 1) / kTileRows, K = w.num_inputs;
  const int64_t share = w.panel_bytes / num_tiles, bytes = share * F::kGroup / K;
  for (int p = 0; p < num_panels; p++) {
    const uint8_t *at = (const uint8_t*)w.data + (panel + p) * w.panel_bytes, *next = at + (num_tiles == 1 ? kAheadBytes : w.panel_bytes);
    cut_rows<kTileRows>(M, [&](int t, int row, int rows) __attribute__((always_inline)) {
      exactly<kTileRows>(rows, [&](auto count) __attribute__((always_inline)) {
        dot_tile<F, decltype(count)::value, PLANES>(at, {next + t * share, (int)bytes}, K, x + row * ldx, ldx, y + row * ldy + p * kPanel, ldy);
      });
    });
  }
}

using Multiply = void (*)(const Matrix&, int, int, int, const float*, int64_t, float*, int64_t, float*);
using Decode = void (*)(const uint8_t* panel, int first_group, int num_groups, float* to);

// One format of weights, in the order of `WeightKind`. multiply_int8, multiply_int16: by such rows, where weights are whole numbers.
struct WeightFormat {
  Multiply multiply, multiply_int8, multiply_int16;
  Decode decode;
  int group, groups_per_super, super_bytes;
};

template <class F> static void decode_as(const uint8_t* panel, int first_group, int num_groups, float* to) {
  decode_piece<F>(panel, first_group, num_groups, to);
}

#define HB_DENSE(F) {multiply_as<F>, nullptr, nullptr, decode_as<F>, F::kGroup, 1, F::kGroupBytes}
#define HB_BLOCKS(F) {multiply_as<F>, multiply_whole_as<F, 1>, multiply_whole_as<F, 2>, decode_as<F>, F::kGroup, 1, F::kGroupBytes}
#define HB_SUPER(F) {multiply_as<F>, multiply_whole_as<F, 1>, multiply_whole_as<F, 2>, decode_as<F>, F::kGroup, F::kGroups, F::kSuperBytes}
static const WeightFormat kFormats[] = {
    HB_DENSE(F32),
    HB_DENSE(BF16),
    HB_DENSE(F16),
    HB_BLOCKS(Q8_0),
    HB_BLOCKS(Q4_0),
    HB_BLOCKS(Q4_1),
    HB_BLOCKS(Q5_0),
    HB_BLOCKS(Q5_1),
    HB_SUPER(SuperBlocks<4>),
    HB_SUPER(SuperBlocks<5>),
    HB_SUPER(Q6K),
    HB_DENSE(BF16Pairs),
};

// y (+)= x * panel of plain float32 numbers x and a matrix of a dense kind: a chain is taken up where `resumes`.
HB_INLINE void multiply_plain(
    int kind, const uint8_t* panel, int K, int M, const float* x, int64_t ldx, float* y, int64_t ldy, bool resumes) {
  if (kind == kF32) multiply_dense<F32>(panel, 0, K, M, x, ldx, y, ldy, resumes);
  else if (kind == kBF16) multiply_dense<BF16>(panel, 0, K, M, x, ldx, y, ldy, resumes);
  else multiply_dense<F16>(panel, 0, K, M, x, ldx, y, ldy, resumes);
}

// By rows of `in_type`.
HB_INLINE Multiply multiply_of(const Matrix& w, int in_type) {
  const WeightFormat& format = kFormats[w.kind];
  return in_type == kInt8Rows ? format.multiply_int8 : in_type == kInt16Rows ? format.multiply_int16 : format.multiply;
}

}  // namespace HB_ISA
