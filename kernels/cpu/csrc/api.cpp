// The library's entry points: which instruction set to use, packing, running programs, and the machine's limits.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "program.h"
#include "team.h"
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
extern "C" const Kernels hb_kernels_avx512_bf16, hb_kernels_avx512, hb_kernels_avx2;
#elif defined(__aarch64__)
extern "C" const Kernels hb_kernels_neon_bf16, hb_kernels_neon;
#endif
extern "C" const Kernels hb_kernels_portable;
#define HB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSliceRows = 512;         // tokens that go through a program at a time; bounds its buffers
#if defined(__aarch64__)
constexpr unsigned long kBF16AndI8MM = 1UL << 14 | 1UL << 13;  // HWCAP2_BF16, HWCAP2_I8MM of Linux
#endif
constexpr int kQueryRows = 24;          // rows of an item of prefill

const Kernels* find(const char* name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx512_bf16")) return &hb_kernels_avx512_bf16;
  if (!std::strcmp(name, "avx512")) return &hb_kernels_avx512;
  if (!std::strcmp(name, "avx2")) return &hb_kernels_avx2;
#elif defined(__aarch64__)
  if (!std::strcmp(name, "neon_bf16")) return &hb_kernels_neon_bf16;
  if (!std::strcmp(name, "neon")) return &hb_kernels_neon;
#endif
  return std::strcmp(name, "portable") ? nullptr : &hb_kernels_portable;
}

bool runs_here(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!std::strcmp(name, "avx512_bf16")) return runs_here("avx512") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (!std::strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c");
  if (!std::strcmp(name, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#elif defined(__aarch64__)
  if (!std::strcmp(name, "neon_bf16")) return (getauxval(AT_HWCAP2) & kBF16AndI8MM) == kBF16AndI8MM;
#endif
  return find(name) != nullptr;
}

// Everything that one thread may use at a time.
struct Engine {
  const Kernels* kernels;
  Team team;
  std::vector<float> partials;

  Engine(const Kernels* k, int num_threads) : kernels(k), team(num_threads, k->scratch_bytes) {}
};

struct Call {
  const Kernels* kernels;
  const Op* ops;
  Slice slice;
};

void run_phase(const void* context, int phase, int64_t item, uint8_t* scratch) {
  const Call& call = *(const Call*)context;
  call.kernels->run_item(call.ops[phase], call.slice, item, scratch);
}

// The attention of one group in one slice, as items: tiles of queries; a lone query over a long context is cut into its parts.
struct Plan {
  std::vector<Work> work;
  int64_t num_partials = 0;

  void make(const Attention& a, const Step& step, int first, int num_rows) {
    const Group& group = step.groups[a.group];
    const int heads = a.num_heads / a.num_kv_heads, queries = std::max(1, kQueryRows / heads);
    for (int request = 0; request < step.num_requests; request++) {
      const int start = group.query_start_loc[request], end = group.query_start_loc[request + 1];
      const int from = std::max(start, first), to = std::min(end, first + num_rows);
      for (int row = from; row < to; row += queries) {
        const int count = std::min(queries, to - row), position = group.seq_lens[request] - (end - row);
        const int first_key = a.window ? std::max(0, position - a.window + 1) : 0, end_key = position + count;
        if (count == 1) add_parts({request, row - first, 1, position, first_key, end_key, -1, 0});
        else work.push_back({request, row - first, count, position, first_key, end_key, -1, 0});
      }
    }
  }

  void add_parts(Work whole) {
    const int first_part = whole.first_key / kPartKeys, num_parts = (whole.end_key - 1) / kPartKeys - first_part + 1;
    if (num_parts == 1) return work.push_back(whole);
    for (int part = 0; part < num_parts; part++) {
      Work piece = whole;
      piece.first_key = std::max(whole.first_key, (first_part + part) * kPartKeys);
      piece.end_key = std::min(whole.end_key, (first_part + part + 1) * kPartKeys);
      piece.partial = (int)num_partials + part;
      piece.num_parts = part == 0 ? num_parts : 0;
      work.push_back(piece);
    }
    num_partials += num_parts;
  }
};

// Plans per group: the layers of a group have the same heads and window.
struct Plans {
  std::vector<Plan> plans;
  std::vector<const Work*> work;
  std::vector<int32_t> num_work;

  Plans(const Op* ops, int num_ops, const Step& step, int first, int num_rows)
      : plans(step.num_groups), work(step.num_groups), num_work(step.num_groups) {
    std::vector<bool> is_made(step.num_groups, false);
    for (int i = 0; i < num_ops; i++) {
      if (ops[i].code != kAttend || is_made[ops[i].attention->group]) continue;
      const int group = ops[i].attention->group;
      plans[group].make(*ops[i].attention, step, first, num_rows);
      is_made[group] = true;
      work[group] = plans[group].work.data();
      num_work[group] = (int32_t)plans[group].work.size();
    }
  }
};

// Floats of unfinished attention that this call may need: the largest of its groups, reused from layer to layer.
int64_t partials_of(const Plans& plans, const Op* ops, int num_ops, int64_t& stride) {
  int64_t most = 0;
  stride = 0;
  for (int i = 0; i < num_ops; i++)
    if (ops[i].code == kAttend) stride = std::max<int64_t>(stride, ops[i].attention->head_dim_v + 2);
  for (int i = 0; i < num_ops; i++)
    if (ops[i].code == kAttend)
      most = std::max(most, plans.plans[ops[i].attention->group].num_partials * ops[i].attention->num_heads * stride);
  return most;
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Packing {
  const Kernels* kernels;
  int32_t kind, num_rows, num_inputs;
  const uint8_t* rows;
  int64_t row_bytes, panel_bytes;
  uint8_t* panels;
};

void pack_item(const void* context, int, int64_t panel, uint8_t*) {
  const Packing& p = *(const Packing*)context;
  const int first = (int)panel * p.kernels->panel;
  p.kernels->pack_panel(p.kind, p.rows + first * p.row_bytes, p.row_bytes, std::min(p.kernels->panel, p.num_rows - first),
                        p.num_inputs, p.panels + panel * p.panel_bytes);
}

struct Quantizing {
  const Kernels* kernels;
  const float* rows;
  int32_t num_inputs;
  uint8_t* to;
};

void quantize_item(const void* context, int, int64_t row, uint8_t*) {
  const Quantizing& q = *(const Quantizing*)context;
  q.kernels->quantize_q8_0(q.rows + row * q.num_inputs, q.num_inputs, q.to + row * (q.num_inputs / 32 * 34));
}

// Rows to choose tokens from, and where each row's results go.
struct Choosing {
  const Kernels* kernels = nullptr;
  const LogitRows& rows;
  Best (*best)(const LogitRows&, int32_t row, int32_t part) = nullptr;
  Best* parts = nullptr;
  const int64_t* tokens = nullptr;
  int32_t count = 0;  // results of a row
  float* values = nullptr;
  double* sums = nullptr;
  int64_t* ids = nullptr;
};

int num_parts(const LogitRows& rows) { return (rows.width + kPartTokens - 1) / kPartTokens; }

void best_item(const void* context, int, int64_t item, uint8_t*) {
  const Choosing& c = *(const Choosing*)context;
  c.parts[item] = c.best(c.rows, (int)(item / num_parts(c.rows)), (int)(item % num_parts(c.rows)));
}

void noise_item(const void* context, int, int64_t row, uint8_t*) {
  const Choosing& c = *(const Choosing*)context;
  c.kernels->gumbel_noise(c.rows.seeds[row], c.rows.positions[row], c.tokens + row * c.count, c.count, c.values + row * c.count);
}

void top_item(const void* context, int, int64_t row, uint8_t*) {
  const Choosing& c = *(const Choosing*)context;
  thread_local std::vector<uint8_t> workspace;  // its size goes with the vocabulary, unlike the scratch of a thread
  workspace.resize(std::max<size_t>(workspace.size(), top_workspace_bytes(c.rows.width)));
  c.kernels->ordered_top(c.rows, (int)row, c.count, c.values + row * c.count, c.ids + row * c.count, workspace.data());
}

void normaliser_item(const void* context, int, int64_t row, uint8_t*) {
  const Choosing& c = *(const Choosing*)context;
  c.sums[row] = c.kernels->log_normaliser(c.rows, (int)row);
}

void rank_item(const void* context, int, int64_t row, uint8_t*) {
  const Choosing& c = *(const Choosing*)context;
  c.ids[row] = c.kernels->rank(c.rows, (int)row, c.tokens[row]);
}

// The best of every row's parts; of equals, the first.
std::vector<Best> best_of_rows(Team& team, Choosing choosing) {
  const int num = num_parts(choosing.rows);
  std::vector<Best> parts((size_t)choosing.rows.num_rows * num), found;
  choosing.parts = parts.data();
  team.run({{(int64_t)parts.size(), best_item}}, &choosing);
  for (size_t at = 0; at < parts.size(); at++) {
    if (at % num == 0) found.push_back(parts[at]);
    found.back().has_nan |= parts[at].has_nan;
    if (parts[at].value > found.back().value) found.back().value = parts[at].value, found.back().token = parts[at].token;
  }
  return found;
}

struct Reading {
  const uint64_t* words;
  int64_t words_per_item;
};

void read_item(const void* context, int, int64_t item, uint8_t* scratch) {
  const Reading& r = *(const Reading*)context;
  const uint64_t* at = r.words + item * r.words_per_item;
  uint64_t sums[16] = {};
  for (int64_t i = 0; i + 16 <= r.words_per_item; i += 16)
    for (int j = 0; j < 16; j++) sums[j] += at[i + j];
  for (int j = 1; j < 16; j++) sums[0] += sums[j];
  std::memcpy(scratch, sums, 8);
}

struct Computing {
  const Kernels* kernels;
  int64_t rounds;
};

void compute_item(const void* context, int, int64_t, uint8_t*) {
  const Computing& c = *(const Computing*)context;
  c.kernels->multiply_adds(c.rounds);
}

}  // namespace

// Sizes of the structures, in the order of program.h, so that a mirror of them can be checked.
HB_EXPORT void hb_struct_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(Matrix), sizeof(Lora), sizeof(Attention), sizeof(Op), sizeof(Buffer), sizeof(Rotary), sizeof(Group), sizeof(Step),
                         sizeof(LogitRows)};
  std::memcpy(sizes, all, sizeof all);
}

HB_EXPORT int hb_runs_here(const char* isa) { return runs_here(isa); }
HB_EXPORT int hb_panel(const char* isa) { return find(isa)->panel; }
HB_EXPORT int hb_slice_rows() { return kSliceRows; }

HB_EXPORT Engine* hb_engine_new(const char* isa, int num_threads) { return new Engine(find(isa), num_threads); }
HB_EXPORT void hb_engine_free(Engine* engine) { delete engine; }

HB_EXPORT int64_t hb_panel_bytes(const Engine* engine, int kind, int num_inputs) { return engine->kernels->panel_bytes(kind, num_inputs); }

HB_EXPORT void hb_pack(Engine* engine, int kind, const uint8_t* rows, int64_t row_bytes, int num_rows, int num_inputs, uint8_t* panels) {
  const int panel = engine->kernels->panel;
  Packing packing{engine->kernels, kind, num_rows, num_inputs, rows, row_bytes, engine->kernels->panel_bytes(kind, num_inputs), panels};
  engine->team.run({{(num_rows + panel - 1) / panel, pack_item}}, &packing);
}

HB_EXPORT void hb_quantize_q8_0(Engine* engine, const float* rows, int num_rows, int num_inputs, uint8_t* to) {
  Quantizing quantizing{engine->kernels, rows, num_inputs, to};
  engine->team.run({{num_rows, quantize_item}}, &quantizing);
}

HB_EXPORT void hb_run(Engine* engine, const Op* ops, int num_ops, const Buffer* buffers, const Step* step) {
  std::vector<Team::Phase> phases(num_ops);
  for (int first = 0; first < step->num_tokens; first += kSliceRows) {
    const int num_rows = std::min(kSliceRows, step->num_tokens - first);
    Plans plans(ops, num_ops, *step, first, num_rows);
    int64_t stride, floats = partials_of(plans, ops, num_ops, stride);
    if ((int64_t)engine->partials.size() < floats) engine->partials.resize(floats);
    Call call{engine->kernels, ops,
              Slice{step, buffers, plans.work.data(), plans.num_work.data(), engine->partials.data(), stride, first, num_rows,
                    engine->team.num_threads()}};
    for (int i = 0; i < num_ops; i++) phases[i] = {engine->kernels->num_items(ops[i], call.slice), run_phase};
    engine->team.run(phases, &call);
  }
}

// Each row's largest logit, the first of equals; is_finite: whether that is finite and no logit is NaN.
HB_EXPORT void hb_best(Engine* engine, const LogitRows* rows, int64_t* tokens, uint8_t* is_finite) {
  for (const Best& best : best_of_rows(engine->team, {.rows = *rows, .best = engine->kernels->best})) {
    *tokens++ = best.token;
    *is_finite++ = !best.has_nan && std::isfinite(best.value);
  }
}

// Each row's largest sum of a logit and its noise.
HB_EXPORT void hb_noisy_best(Engine* engine, const LogitRows* rows, int64_t* tokens) {
  for (const Best& best : best_of_rows(engine->team, {.rows = *rows, .best = engine->kernels->noisy_best})) *tokens++ = best.token;
}

// The noise of `count` tokens of each row.
HB_EXPORT void hb_gumbel_noise(Engine* engine, const LogitRows* rows, const int64_t* tokens, int count, float* to) {
  Choosing choosing{.kernels = engine->kernels, .rows = *rows, .tokens = tokens, .count = count, .values = to};
  engine->team.run({{rows->num_rows, noise_item}}, &choosing);
}

HB_EXPORT void hb_ordered_top(Engine* engine, const LogitRows* rows, int count, float* values, int64_t* tokens) {
  Choosing choosing{.kernels = engine->kernels, .rows = *rows, .count = count, .values = values, .ids = tokens};
  engine->team.run({{rows->num_rows, top_item}}, &choosing);
}

HB_EXPORT void hb_log_normaliser(Engine* engine, const LogitRows* rows, double* to) {
  Choosing choosing{.kernels = engine->kernels, .rows = *rows, .sums = to};
  engine->team.run({{rows->num_rows, normaliser_item}}, &choosing);
}

// 1 and how many logits of each row are larger than that of its token.
HB_EXPORT void hb_rank(Engine* engine, const LogitRows* rows, const int64_t* tokens, int64_t* ranks) {
  Choosing choosing{.kernels = engine->kernels, .rows = *rows, .tokens = tokens, .ids = ranks};
  engine->team.run({{rows->num_rows, rank_item}}, &choosing);
}

// Bytes per second at which all threads together read `num_bytes` of memory, the best of `rounds`.
HB_EXPORT double hb_read_bytes_per_s(Engine* engine, const uint8_t* memory, int64_t num_bytes, int rounds) {
  const int num_items = engine->team.num_threads() * 16;
  Reading reading{(const uint64_t*)memory, num_bytes / 8 / num_items / 16 * 16};
  double best = 0;
  for (int i = 0; i < rounds; i++) {
    const double start_s = now_s();
    engine->team.run({{num_items, read_item}}, &reading);
    best = std::max(best, (double)(reading.words_per_item * 8 * num_items) / (now_s() - start_s));
  }
  return best;
}

// Floating-point operations per second of float32 multiply-adds on all threads, the best of `rounds`.
HB_EXPORT double hb_flops_per_s(Engine* engine, int rounds) {
  const int num_items = engine->team.num_threads() * 8;
  Computing computing{engine->kernels, 1000000};
  const double each = engine->kernels->multiply_adds(1);
  double best = 0;
  for (int i = 0; i < rounds; i++) {
    const double start_s = now_s();
    engine->team.run({{num_items, compute_item}}, &computing);
    best = std::max(best, each * computing.rounds * num_items / (now_s() - start_s));
  }
  return best;
}
