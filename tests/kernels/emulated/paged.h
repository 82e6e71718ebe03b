// Attention over the paged cache: heads are normed, rotated and written, and queries look at one sequence in many ways.
#pragma once
#include <map>

#include "formats.h"

namespace {

struct Heads {
  int num_heads, num_kv_heads, dim, dim_v, window = 0;
  float soft_cap = 0.0f;
  bool has_sinks = false;

  int q_width() const { return num_heads * dim; }
  int width() const { return q_width() + num_kv_heads * (dim + dim_v); }
};

// A cache of `num_blocks` blocks of 16 tokens, full of NaN. k lies head by head within a block, v token by token; the strides say so.
// In pairs, both lie head by head: [dim / 2][16][2] and [8][dim_v][2].
struct PagedCache {
  static constexpr int kBlock = 16;
  Heads heads;
  int format;
  Bytes k, v;

  PagedCache(const Heads& h, int cache_format, int num_blocks)
      : heads(h),
        format(cache_format),
        k(num_blocks * h.num_kv_heads * kBlock * h.dim * item_bytes(), 0xff),
        v(num_blocks * h.num_kv_heads * kBlock * h.dim_v * item_bytes(), 0xff) {}

  bool is_paired() const { return format == kCacheBF16Pairs; }
  int64_t item_bytes() const { return format == kCacheF32 ? 4 : 2; }
  Cache planes() {
    const int64_t n = heads.num_kv_heads, k_bytes = heads.dim * item_bytes(), v_bytes = heads.dim_v * item_bytes();
    const Plane k_plane = {k.data(), n * kBlock * k_bytes, kBlock * k_bytes, is_paired() ? kBlock * 4 : k_bytes};
    Plane v_plane = {v.data(), n * kBlock * v_bytes, v_bytes, n * v_bytes};
    if (is_paired()) v_plane.head_stride = kBlock * v_bytes, v_plane.row_stride = 2 * v_bytes;
    return {{.codes = k_plane}, {.codes = v_plane}, format, kBlock};
  }
  double number(const Bytes& plane, int64_t at) const {
    if (format != kCacheF32) return (format == kCacheF16 ? from_f16 : from_bf16)(read16(&plane[at * 2]));
    float value;
    std::memcpy(&value, &plane[at * 4], 4);
    return value;
  }
  int64_t k_place(int64_t slot, int head, int d) const {
    const int64_t first = (slot / kBlock * heads.num_kv_heads + head) * kBlock * heads.dim, token = slot % kBlock;
    return first + (is_paired() ? (d / 2 * kBlock + token) * 2 + d % 2 : token * heads.dim + d);
  }
  int64_t v_place(int64_t slot, int head, int d) const {
    if (!is_paired()) return (slot * heads.num_kv_heads + head) * heads.dim_v + d;
    const int64_t token = slot % kBlock;
    return (slot / kBlock * heads.num_kv_heads + head) * kBlock * heads.dim_v + (token / 2 * heads.dim_v + d) * 2 + token % 2;
  }
  double k_at(int64_t slot, int head, int d) const { return number(k, k_place(slot, head, d)); }
  double v_at(int64_t slot, int head, int d) const { return number(v, v_place(slot, head, d)); }
  double stored(double value) const {
    return format == kCacheF32 ? value : format == kCacheF16 ? rounded(value, 10, -14) : as_bf16(value);
  }
};

Attention attention_of(const Heads& h, PagedCache& cache, const Floats& sinks) {
  return {.cache = cache.planes(), .sinks = sinks.empty() ? nullptr : sinks.data(), .num_heads = h.num_heads, .num_kv_heads = h.num_kv_heads,
          .head_dim = h.dim, .head_dim_v = h.dim_v, .window = h.window, .scale = 1.0f / std::sqrt((float)h.dim), .soft_cap = h.soft_cap};
}

// Heads that are normed and rotated, or left alone, and what the cache then holds: their nearest numbers of its format.
void test_heads(int format, bool is_plain) {
  const Heads h{6, 2, 22, format == kCacheBF16Pairs ? 32 : 13};  // no multiple of any vector where that can be
  const int num_tokens = 45, half = h.dim / 2, num_normed = h.num_heads + h.num_kv_heads, k_at = h.q_width(), v_at = k_at + h.num_kv_heads * h.dim;
  Floats table = normals((size_t)num_tokens * h.width()), q_weight = normals(h.dim), k_weight = normals(h.dim), freqs = normals(half);
  const float hard[] = {1 + 0x3p-11f, 1 + 0x3p-8f, 0x1.8p-24f, 0x1p-25f, 65504.0f, -0.0f, 0x1.004p-15f, 1 + 0x1p-11f, 1 + 0x1p-8f};
  for (int at : {0, 13}) std::copy(std::begin(hard), std::end(hard), &table[k_at + at]);  // ties and denormals, in vectors and after them
  std::vector<int64_t> tokens(num_tokens), positions(num_tokens), slots(num_tokens);
  for (int i = 0; i < num_tokens; i++) tokens[i] = i, positions[i] = 37 * i, slots[i] = i % 9 == 8 ? -1 : (i * 7) % 48;
  const Weights embedding(table, h.width());
  const Matrix matrix = embedding.matrix();
  PagedCache cache(h, format, 3);
  const Attention attention = attention_of(h, cache, {});
  const Rotary rotary{freqs.data(), 0, half, 1.25f};
  const Group group{.slot_mapping = slots.data()};
  Floats qkv(table.size()), rotation(num_tokens * h.dim);
  std::vector<Op> ops = {{.code = kEmbed, .out = 0, .scale = 1.0f, .matrices = &matrix},
                         {.code = kRotary, .out = 1, .aux = 0},
                         {.code = kHeads, .in = 0, .aux = is_plain ? -1 : 1, .eps = 1e-6f, .attention = &attention}};
  if (!is_plain) ops[2].weight = q_weight.data(), ops[2].weight2 = k_weight.data();
  const Step step{.token_ids = tokens.data(), .positions = positions.data(), .rotaries = &rotary, .groups = &group, .num_tokens = num_tokens,
                  .num_groups = 1, .num_rotaries = 1};
  run(ops, step, 0, {{qkv.data(), h.width()}, {rotation.data(), h.dim}});
  std::vector<double> expected, tolerance;
  for (int row = 0; row < num_tokens; row++) {
    const float* x = &table[(size_t)row * h.width()];
    for (int i = 0; i < h.width(); i++) expected.push_back(x[i]), tolerance.push_back(0);
    for (int head = 0; !is_plain && head < num_normed; head++) {
      std::vector<double> normed;
      norm_into(x + head * h.dim, (head < h.num_heads ? q_weight : k_weight).data(), h.dim, 1e-6f, normed);
      for (int i = 0; i < h.dim; i++) {
        const float angle = (float)positions[row] * freqs[i % half];  // in float32, as the law has it
        const double partner = normed[(i + half) % h.dim], sine = (i < half ? -1 : 1) * std::sin((double)angle);
        const size_t at = (size_t)row * h.width() + head * h.dim + i;
        expected[at] = 1.25 * (normed[i] * std::cos((double)angle) + partner * sine);
        tolerance[at] = 40 * kRounding * (std::fabs(normed[i]) + std::fabs(partner));
      }
    }
  }
  check_close(qkv.data(), expected, tolerance);
  for (int row = 0; row < num_tokens; row++)
    for (int head = 0; slots[row] >= 0 && head < h.num_kv_heads; head++) {
      const float* x = &qkv[(size_t)row * h.width()];
      for (int d = 0; d < h.dim; d++) {
        const double found = cache.k_at(slots[row], head, d), wanted = cache.stored(x[k_at + head * h.dim + d]);
        check(found == wanted, "k of token %d in the cache is %.9g, expected %.9g", row, found, wanted);
      }
      for (int d = 0; d < h.dim_v; d++)
        check(cache.v_at(slots[row], head, d) == cache.stored(x[v_at + head * h.dim_v + d]), "v of token %d in the cache is wrong", row);
    }
  for (int row = 0; row < 48; row++)
    if (std::find(slots.begin(), slots.end(), row) == slots.end())
      for (int d = 0; d < h.dim_v; d++) check(read16(&cache.v[cache.v_place(row, 1, d) * cache.item_bytes()]) == 0xffff, "slot %d is written", row);
}

// One sequence in the cache, and queries at any of its positions.
class Sequence {
 public:
  Sequence(const Heads& h, int format, int length)
      : heads_(h),
        num_blocks_((length + 15) / 16),
        table_(normals((size_t)length * h.width())),
        sinks_(h.has_sinks ? normals(h.num_heads) : Floats()),
        cache_(h, format, num_blocks_),
        embedding_(table_, h.width()),
        qkv_((size_t)hb_slice_rows() * h.width()) {
    for (int i = 0; i < num_blocks_; i++) blocks_.push_back((i * 31 + 5) % num_blocks_);  // 31 divides no count of blocks here
    std::vector<int64_t> tokens, slots;
    for (int i = 0; i < length; i++) tokens.push_back(i), slots.push_back(slot(i));
    const Matrix matrix = embedding_.matrix();
    const Attention attention = attention_of(heads_, cache_, sinks_);
    const Group group{.slot_mapping = slots.data()};
    const Step step{.token_ids = tokens.data(), .groups = &group, .num_tokens = length, .num_groups = 1};
    run({{.code = kEmbed, .out = 0, .scale = 1.0f, .matrices = &matrix}, {.code = kHeads, .in = 0, .aux = -1, .attention = &attention}}, step, 0,
        {{qkv_.data(), h.width()}});
  }

  // Requests (context, how many of its last tokens are queries) in one batch. A position has the same bits in every batch.
  void attend(const std::vector<std::pair<int, int>>& requests, RowType type) {
    std::vector<int64_t> tokens;
    std::vector<int32_t> starts = {0}, contexts, blocks;
    for (auto [context, num_queries] : requests) {
      for (int i = context - num_queries; i < context; i++) tokens.push_back(i);
      starts.push_back((int)tokens.size()), contexts.push_back(context);
      blocks.insert(blocks.end(), blocks_.begin(), blocks_.end());
    }
    const Matrix matrix = embedding_.matrix();
    const Attention attention = attention_of(heads_, cache_, sinks_);
    const Group group{.query_start_loc = starts.data(), .seq_lens = contexts.data(), .block_table = blocks.data(), .table_width = num_blocks_};
    const Step step{.token_ids = tokens.data(), .groups = &group, .num_tokens = (int)tokens.size(), .num_requests = (int)requests.size(), .num_groups = 1};
    const int width = heads_.num_heads * heads_.dim_v;
    const Floats found = run({{.code = kEmbed, .out = 0, .scale = 1.0f, .matrices = &matrix},
                              {.code = kAttend, .in = 0, .out = kOutput, .in_type = type, .out_type = type, .attention = &attention},
                              {.code = kCombine, .out = kOutput, .out_type = type, .attention = &attention}},
                             step, type == kFloats ? width : width / 2, {{qkv_.data(), heads_.width()}});
    for (size_t row = 0; row < tokens.size(); row++) {
      const int position = (int)tokens[row];
      Floats values, known;
      for (int i = 0; i < width; i++) {
        const auto* halves = (const uint8_t*)found.data() + (row * width + i) * 2;
        values.push_back(type == kFloats ? found[row * width + i] : (float)from_bf16(read16(halves)));
      }
      if (type == kFloats || is_paired(type)) known = known_[type].try_emplace(position, values).first->second;
      else
        for (float value : known_[kFloats].at(position)) known.push_back((float)as_bf16(value));
      check_same(values.data(), known.data(), width * 4, "position %d has other bits in another batch", position);
    }
  }

  // Rows of bfloat16 over a cache of pairs are the outcome of products in pairs, else they are the rounded floats.
  bool is_paired(RowType type) const { return type == kBF16Rows && cache_.is_paired(); }

  // In pairs, queries are rounded before and weights after the softmax.
  void check_position(int position, RowType type) const {
    const Heads& h = heads_;
    const int first = h.window ? std::max(0, position - h.window + 1) : 0;
    const float scale = 1.0f / std::sqrt((float)h.dim);
    std::vector<double> expected, tolerance;
    for (int head = 0; head < h.num_heads; head++) {
      const int kv_head = head / (h.num_heads / h.num_kv_heads);
      double total = h.has_sinks ? std::exp((double)sinks_[head]) : 0.0;
      std::vector<double> sums(h.dim_v), magnitudes(h.dim_v);
      for (int key = first; key <= position; key++) {
        double score = 0;
        for (int d = 0; d < h.dim; d++) {
          const float query = table_[(size_t)position * h.width() + head * h.dim + d] * scale;
          score += (type == kFloats ? query : as_bf16(query)) * cache_.k_at(slot(key), kv_head, d);
        }
        if (h.soft_cap != 0) score = std::tanh(score / h.soft_cap) * h.soft_cap;
        total += std::exp(score);
        for (int d = 0; d < h.dim_v; d++) {
          const double term = std::exp(score) * cache_.v_at(slot(key), kv_head, d);
          sums[d] += term, magnitudes[d] += std::fabs(term);
        }
      }
      for (int d = 0; d < h.dim_v; d++) {
        expected.push_back(sums[d] / total);
        // A score of at most 10 is off by about 64 roundings of it, a weight by as much, and values are below 6. In bfloat16,
        // each weight and the result are rounded to 8 digits.
        const double of_pairs = 0x1p-9 * (magnitudes[d] / total + std::fabs(expected.back()));
        tolerance.push_back(2e-5 + (type == kFloats ? 0.0 : of_pairs));
      }
    }
    check_close(known_[type].at(position).data(), expected, tolerance);
  }

 private:
  int64_t slot(int position) const { return blocks_[position / 16] * 16 + position % 16; }

  const Heads heads_;
  const int num_blocks_;
  std::vector<int32_t> blocks_;
  const Floats table_, sinks_;
  PagedCache cache_;
  const Weights embedding_;
  Floats qkv_;
  std::map<int, Floats> known_[2];  // by RowType
};

void test_attention(const Heads& heads, int format) {
  Sequence sequence(heads, format, 1100);
  for (RowType type : {kFloats, kBF16Rows}) {
    sequence.attend({{1100, 40}, {700, 1}, {65, 65}, {64, 1}, {63, 63}, {1, 1}}, type);
    if (type != kFloats && !sequence.is_paired(type)) break;
    for (int context : {1, 63, 64, 65, 700, 1100}) {
      sequence.check_position(context - 1, type);
      sequence.attend({{context, 1}}, type);
    }
    sequence.attend({{1099, 7}, {1080, 3}, {64, 2}}, type);
    if (heads.dim < 32) sequence.attend({{1000, hb_slice_rows() + 13}, {65, 2}}, type);  // more than go through at a time
  }
}

}  // namespace
