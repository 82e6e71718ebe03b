// What crosses from Python: weights, the cache, a program of operations, and a step. Plain C structures of fixed layout;
// `kernels/cpu/abi.py` mirrors them field by field, and checks their sizes when the library is loaded.
//
// A program is the list of operations of one model, made once. Running it on a step is one call: a team of threads goes
// through the operations, each cut into items that any thread can take. Activations are float32 rows of numbered buffers.
#pragma once
#include <cstdint>

enum WeightKind : int32_t { kF32, kBF16, kF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kBF16Pairs, kNumWeightKinds };
enum OpCode : int32_t {
  kEmbed, kRotary, kNorm, kLinear, kGated, kHeads, kAttend, kCombine, kBest, kBestOfPanels, kRound, kTurn, kStore, kTap, kShrink, kNumOpCodes
};
enum RowType : int32_t { kFloats, kBF16Rows, kInt8Rows, kInt16Rows };  // see rows.h
enum Activation : int32_t { kSilu, kGeluTanh };
enum CacheFormat : int32_t { kCacheF32, kCacheBF16, kCacheF16, kCacheBF16Pairs, kCacheCoded, kNumCacheFormats };
enum Codec : int32_t {
  kPlainF32, kPlainBF16, kPlainF16, kE4M3, kE5M2, kE4M3PerToken, kInt8PerToken, kInt4PerToken, kE2M1, kE2M1FourOverSix, kInt4, kInt5, kInt6,
  kUltraquant, kTurboKey, kTurboValue, kNumCodecs
};

// Panels of weights, see weights.h. Its outputs go to columns first_column .. of the operation's output.
struct Matrix {
  const void* data;
  const float* bias;  // [num_outputs] or null
  int64_t panel_bytes;
  int32_t kind, num_outputs, num_inputs, first_column;
};

// An adapter at one product, which adds B (scales * (A x)) to it. a: the A of its parts one below the other; data null: it leaves the
// product alone. b: one for each matrix of the product, whose inputs are A's outputs from first_column on; data null: none.
constexpr int kMaxParts = 3;
struct Lora {
  Matrix a;
  const float* scales;  // [outputs of a]
  Matrix b[kMaxParts];
};

// A plane of the cache: row `row` of (block, kv head) lies at data + block * block_stride + head * head_stride + row * row_stride
// (strides in bytes). A row is the vector of a token, or whatever the format has in its place.
struct Plane {
  uint8_t* data;
  int64_t block_stride, head_stride, row_stride;
};

// K or V of a layer. Plain numbers have `codes` alone. A coded side has its planes in the order of kvcache/formats/tiles.py, and static
// scales [num_kv_heads], or null; table: the levels of a codebook, or null.
struct Side {
  Plane codes, high, extra;
  const float *scales, *table;
  int32_t codec, reserved;
};

struct Cache {
  Side k, v;
  int32_t format, block_size;
};

// first: where the first_tokens of a sequence lie, plain numbers in blocks of their own size; entry_shift: by how much later tokens'
// entries in the block table lie behind position / block_size.
struct Attention {
  Cache cache, first;
  int32_t first_tokens, entry_shift;
  const float* sinks;  // [num_heads] or null
  int32_t group, num_heads, num_kv_heads, head_dim, head_dim_v, window;  // window 0: none
  float scale, soft_cap;                                                 // soft_cap 0: none
};

// One operation. in, out, aux: buffers; kOutput and kInput are the step's own. What each code reads stands beside it in ops.h.
struct Op {
  int32_t code, in, out, aux;
  int32_t width, num_matrices, activation, adds;  // adds: the result is added to what `out` holds
  int32_t in_type, out_type;                      // RowType of what products read, and of the rows of `out`
  float eps, scale;
  const float *weight, *weight2;
  const Matrix* matrices;
  const Attention* attention;
  float* tap;  // [tokens of the step, width]
  const Lora* loras;  // by seat, where products have adapters; null: they have none
};

constexpr int32_t kOutput = -1, kInput = -2;
constexpr int kPartKeys = 512;  // keys of a part of a context, whose borders are absolute positions

struct Buffer {
  float* data;
  int64_t stride;  // floats from row to row
};

struct Rotary {
  const float* inv_freq;
  int64_t stride;  // floats from token to token; 0 when all tokens share the frequencies
  int32_t num_freqs;
  float factor;
};

// The batch as one KV group sees it, see AttentionMetadata.
struct Group {
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const int64_t *slot_mapping, *first_slots;  // first_slots: of the first tokens, -1 for others; null: none are kept apart
  int64_t table_width;
};

struct Step {
  const int64_t *token_ids, *positions;
  const int32_t* seats;  // of each token's adapter, 0: none; null: no token has one
  const float* input;
  float* output;
  int64_t input_stride, output_stride;
  const Rotary* rotaries;
  const Group* groups;
  int32_t num_tokens, num_requests, num_groups, num_rotaries;
};

// Consecutive queries of one request against a range of its context, made by the driver for each slice of a step.
// partial: where the unfinished result goes when the context is shared out among items, -1 when the item finishes it.
struct Work {
  int32_t request, row, num_queries, position, first_key, end_key, partial, num_parts;
};

struct Slice {
  const Step* step;
  const Buffer* buffers;
  const Work* const* work;  // per group
  const int32_t* num_work;
  float* partials;
  int64_t partial_stride;
  int32_t first, num_rows, num_threads;
};

// Rows of logits to choose tokens from: row i lies at logits + at[i] * stride and is divided by temperatures[i]. A null `at` is
// the rows in their order, null temperatures are 1. Seeds and positions are those of the noise, where there is any.
struct LogitRows {
  const float* logits;
  int64_t stride;  // floats from row to row
  const int64_t* at;
  const float* temperatures;
  const int64_t *seeds, *positions;
  int32_t num_rows, width;
};

constexpr int32_t kPartTokens = 16384;  // a row is searched for its best token in parts of this many

// The best token of a part of a row; the first one if none is above -inf.
struct Best {
  float value;
  int32_t token, has_nan;
};

// A token that is being sorted; the lowest order comes first.
struct Candidate {
  uint32_t order;
  int32_t token;
};

// Of `ordered_top`: twice the row as candidates, and maxima of 16 tokens.
static inline int64_t top_workspace_bytes(int32_t width) { return (int64_t)sizeof(Candidate) * 2 * width + width / 4 + 1024; }

// What one instruction set offers.
struct Kernels {
  const char* name;
  int32_t panel;
  int64_t scratch_bytes;
  int64_t (*num_items)(const Op&, const Slice&);
  void (*run_item)(const Op&, const Slice&, int64_t item, uint8_t* scratch);
  int64_t (*panel_bytes)(int32_t kind, int32_t num_inputs);
  void (*pack_panel)(int32_t kind, const uint8_t* rows, int64_t row_bytes, int32_t num_rows, int32_t num_inputs, uint8_t* panel);
  void (*quantize_q8_0)(const float* row, int32_t num_inputs, uint8_t* to);
  Best (*best)(const LogitRows&, int32_t row, int32_t part);
  Best (*noisy_best)(const LogitRows&, int32_t row, int32_t part);
  void (*gumbel_noise)(int64_t seed, int64_t position, const int64_t* tokens, int32_t count, float* to);
  void (*ordered_top)(const LogitRows&, int32_t row, int32_t count, float* values, int64_t* tokens, uint8_t* workspace);
  double (*log_normaliser)(const LogitRows&, int32_t row);
  int64_t (*rank)(const LogitRows&, int32_t row, int64_t token);
  double (*multiply_adds)(int64_t rounds);
};
