// Self test of the compiled kernels, through their C interface alone: it also runs where Python does not, such as in an emulator.
//
//   selftest [ISA ...]     the named instruction sets, or all that run here
//
// Programs are compared with loops in double precision that know the public formats and nothing of the kernels. Tolerances are
// bounds of float32 rounding, not guesses. Prints a line per failure and exits with 1 if there is any.
#include <numeric>

#include "whole.h"
#include "paged.h"
#include "formats.h"
#include "harness.h"

namespace {

// Rows of bfloat16, of an even `width`, from an operation that gave `floats` as float32.
void check_bf16_rows(Op op, const Step& step, int width, const Floats& floats) {
  op.out_type = kBF16Rows;
  const Floats found = run({op}, step, width / 2);
  check_same(found.data(), bf16_rows(floats).data(), floats.size() * 2, "%d rows of bfloat16 are not the rounded floats", step.num_tokens);
}

// x * w^T + bias for some rows, with the bound of any order of `num_inputs` roundings.
struct Product {
  std::vector<double> values, tolerance;

  Product(const Weights& w, const Inputs& x, int num_rows) {
    for (int row = 0; row < num_rows; row++)
      for (int output = 0; output < w.num_outputs; output++) {
        double value = w.bias.empty() ? 0.0 : w.bias[output], magnitude = std::fabs(value);
        for (int k = 0; k < w.num_inputs; k++) {
          const double term = x.values[(size_t)row * x.width + k] * w.values[(size_t)output * w.num_inputs + k];
          value += term, magnitude += std::fabs(term);
        }
        values.push_back(value), tolerance.push_back((w.num_inputs + 8) * kRounding * magnitude + 1e-37);
      }
  }
};

void test_linear(const Format& format, int num_inputs, bool is_long) {
  const Weights first(format, 45, num_inputs), second(format, 64, num_inputs, true);
  const Matrix matrices[] = {first.matrix(0), second.matrix(45)};
  const Op op{.code = kLinear, .in = kInput, .out = kOutput, .num_matrices = 2, .matrices = matrices};
  const int width = 109, num_rows = 97;
  const Inputs x(format, is_long ? hb_slice_rows() + 13 : num_rows, num_inputs);  // more than go through at a time
  const Floats all = run({op}, x.step(0, num_rows), width);
  const Product products[] = {{first, x, num_rows}, {second, x, num_rows}};
  std::vector<double> expected, tolerance;
  for (int row = 0; row < num_rows; row++)
    for (int i = 0; i < width; i++) {
      const int at = i < 45 ? row * 45 + i : row * 64 + i - 45;
      expected.push_back(products[i >= 45].values[at]), tolerance.push_back(products[i >= 45].tolerance[at]);
    }
  check_close(all.data(), expected, tolerance);
  for (int count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 33}) {
    const Floats some = run({op}, x.step(0, count), width);
    check_same(some.data(), all.data(), some.size() * 4, "%d rows have other bits than 97", count);
  }
  const Floats most = is_long ? run({op}, x.step(0, x.num_rows), width) : all;
  check_same(most.data(), all.data(), all.size() * 4, "%d rows have other bits than 97", x.num_rows);
  for (int row : {1, 50, 96, x.num_rows - 1})
    check_same(run({op}, x.step(row, 1), width).data(), &most[(size_t)row * width], width * 4, "row %d has other bits alone", row);
  Op adding = op;
  adding.adds = 1;
  Floats sum = all;
  for (float& value : sum) value += 0.5f;
  check_same(run({adding}, x.step(0, num_rows), width, {}, 0.5f).data(), sum.data(), sum.size() * 4, "%d rows are not added", num_rows);
}

void test_embed(const Format& format, int num_inputs) {
  const Weights table(format, 45, num_inputs);
  const Matrix matrix = table.matrix();
  const std::vector<int64_t> tokens = {0, 44, 7, -1, 45, 31};
  const Op op{.code = kEmbed, .out = kOutput, .scale = 1.5f, .matrices = &matrix};
  std::vector<double> expected, tolerance;
  for (int64_t token : tokens)
    for (int k = 0; k < num_inputs; k++) {
      expected.push_back(1.5 * table.values[(token < 0 || token > 44 ? 0 : token) * num_inputs + k]);
      tolerance.push_back(2 * kRounding * std::fabs(expected.back()));
    }
  check_close(run({op}, {.token_ids = tokens.data(), .num_tokens = (int)tokens.size()}, num_inputs).data(), expected, tolerance);
}

void test_best(const Format& format, int num_inputs) {
  const Weights w(format, 77, num_inputs);
  const Matrix matrix = w.matrix();
  Floats memory(13 * 400);
  for (int count : {1, 2, 13}) {
    const Inputs x(format, count, num_inputs);
    const Floats product = run({{.code = kLinear, .in = kInput, .out = kOutput, .num_matrices = 1, .matrices = &matrix}}, x.step(0, count), 77);
    const std::vector<Op> ops = {{.code = kBest, .in = kInput, .out = 0, .matrices = &matrix},
                                 {.code = kBestOfPanels, .in = 0, .out = kOutput, .matrices = &matrix}};
    const Floats found = run(ops, x.step(0, count), 2, {{memory.data(), 400}});
    for (int row = 0; row < count; row++) {
      const auto most = std::max_element(&product[row * 77], &product[row * 77] + 77);
      int32_t at;
      std::memcpy(&at, &found[2 * row + 1], 4);
      check(found[2 * row] == *most && at == most - &product[row * 77], "row %d of %d: the best is %d", row, count, at);
    }
  }
}

void test_gated(const Format& format, int num_inputs, int activation) {
  const Weights gate(format, 46, num_inputs, true), up(format, 46, num_inputs);
  const Matrix matrices[] = {gate.matrix(), up.matrix()};
  const Op op{.code = kGated, .in = kInput, .out = kOutput, .activation = activation, .matrices = matrices};
  const Inputs x(format, 33, num_inputs);
  const Product g(gate, x, 33), u(up, x, 33);
  std::vector<double> expected, tolerance;
  for (size_t i = 0; i < g.values.size(); i++) {
    const double z = g.values[i], inner = std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z);
    const double active = activation == kSilu ? z / (1 + std::exp(-z)) : 0.5 * z * (1 + std::tanh(inner));
    const double active_tolerance = 1.2 * g.tolerance[i] + 8 * kRounding * (std::fabs(z) + 1);  // the slope is below 1.2
    expected.push_back(active * u.values[i]);
    tolerance.push_back(active_tolerance * (std::fabs(u.values[i]) + u.tolerance[i]) + std::fabs(active) * u.tolerance[i]);
  }
  const Floats all = run({op}, x.step(0, 33), 46);
  check_close(all.data(), expected, tolerance);
  for (int row : {0, 32}) check_same(run({op}, x.step(row, 1), 46).data(), &all[row * 46], 46 * 4, "row %d has other bits alone", row);
  check_bf16_rows(op, x.step(0, 33), 46, all);
}

void test_norm(int width) {
  const Inputs x(kFormats[0], 5, width);
  const Floats weight = normals(width);
  Op op{.code = kNorm, .in = kInput, .out = kOutput, .width = width, .eps = 1e-5f, .weight = weight.data()};
  std::vector<double> expected, tolerance;
  for (int row = 0; row < 5; row++) norm_into(&x.values[row * width], weight.data(), width, 1e-5f, expected);
  for (double value : expected) tolerance.push_back((width + 8) * kRounding * std::fabs(value));
  Floats found = run({op}, x.step(0, 5), width);
  check_close(found.data(), expected, tolerance);
  check_same(run({op}, x.step(3, 1), width).data(), &found[3 * width], width * 4, "row %d has other bits alone", 3);
  if (width % 2 == 0) check_bf16_rows(op, x.step(0, 5), width, found);
  op.adds = 1;
  for (float& value : found) value += 2.0f;
  check_same(run({op}, x.step(0, 5), width, {}, 2.0f).data(), found.data(), found.size() * 4, "%d rows are not added", 5);
}

void test_sampling(int width) {
  Floats logits = normals(3 * width);
  logits[width / 2] = logits[width - 1] = 9.0f;  // the first of equals wins
  const std::vector<int64_t> at = {2, 0, 1}, seeds = {1, -5, 1LL << 40}, positions = {0, 17, 100000};
  const Floats temperatures = {1.0f, 0.7f, 1.9f};
  const LogitRows rows{logits.data(), width, at.data(), temperatures.data(), seeds.data(), positions.data(), 3, width};
  std::vector<int64_t> all(3 * width), best(3), noisy(3), ranks(3), top(3 * 5), ordered(width);
  for (int i = 0; i < 3 * width; i++) all[i] = i % width;
  Bytes is_finite(3);
  Floats gumbel(3 * width), values(3 * 5);
  std::vector<double> normaliser(3);
  hb_best(engines[1], &rows, best.data(), is_finite.data());
  hb_gumbel_noise(engines[1], &rows, all.data(), width, gumbel.data());
  hb_noisy_best(engines[1], &rows, noisy.data());
  hb_ordered_top(engines[1], &rows, 5, values.data(), top.data());
  hb_log_normaliser(engines[1], &rows, normaliser.data());
  hb_rank(engines[1], &rows, noisy.data(), ranks.data());
  for (int row = 0; row < 3; row++) {
    Floats x(&logits[at[row] * width], &logits[at[row] * width] + width), sums(width);
    double total = 0;
    for (int i = 0; i < width; i++) x[i] /= temperatures[row], sums[i] = x[i] + gumbel[row * width + i], total += std::exp((double)x[i]);
    std::iota(ordered.begin(), ordered.end(), 0);
    std::stable_sort(ordered.begin(), ordered.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
    check(best[row] == ordered[0] && is_finite[row], "row %d: the best is %lld", row, (long long)best[row]);
    check(std::equal(ordered.begin(), ordered.begin() + std::min(5, width), &top[row * 5]), "row %d: the top is out of order", row);
    check(noisy[row] == std::max_element(sums.begin(), sums.end()) - sums.begin(), "row %d: the noisy best is %lld", row, (long long)noisy[row]);
    check(ranks[row] == 1 + std::count_if(x.begin(), x.end(), [&](float y) { return y > x[noisy[row]]; }), "row %d: rank %lld", row, (long long)ranks[row]);
    check(std::fabs(normaliser[row] - std::log(total)) < 1e-5, "row %d: the normaliser is %.9g", row, normaliser[row]);
  }
}

void test_quantize() {
  Floats x = normals(3 * 64);
  std::fill(x.begin() + 64, x.begin() + 96, 0.0f);
  Bytes blocks(6 * 34);
  hb_quantize_q8_0(engines[1], x.data(), 3, 64, blocks.data());
  for (int i = 0; i < 3 * 64; i++) {
    const uint8_t* block = &blocks[i / 32 * 34];
    const double found = block_value(kFormats[kQ8_0], block, i % 32), scale = from_f16(read16(block));
    check(std::fabs(found - x[i]) <= scale * 0.57, "number %d is %.9g, expected %.9g", i, found, x[i]);  // 127 half ulps of the scale
  }
}

void test_products() {
  for (const Format& format : kFormats) {
    const bool is_dense = format.inputs == 1;
    const int is_even = format.kind == kBF16Pairs, few = is_dense ? 37 + is_even : format.inputs == 32 ? 96 : 256;
    subject = prefix + format.name;
    test_linear(format, few, true);
    test_linear(format, is_dense ? 300 : format.inputs == 32 ? 288 : 768, false);
    test_embed(format, few);
    test_best(format, few);
    for (int activation : {kSilu, kGeluTanh}) test_gated(format, few, activation);
    for (RowType type : {kInt8Rows, kInt16Rows})
      for (int num_inputs : {few, format.inputs == 32 ? 288 : 768})
        if (!is_dense) test_dots(type, format, num_inputs);
  }
}

void test_rows() {
  subject = prefix + "norm";
  for (int width : {1, 37, 64, 578}) test_norm(width);
  subject = prefix + "rounding";
  for (int width : {32, 576})
    for (RowType type : {kInt8Rows, kInt16Rows}) test_rounding(type, width);
  subject = prefix + "sampling";
  for (int width : {5, 1000, 49153}) test_sampling(width);
  subject = prefix + "quantize_q8_0";
  test_quantize();
}

void test_caches() {
  const char* names[] = {"float32", "bfloat16", "float16", "bfloat16 in pairs"};
  const Heads all[] = {{2, 2, 64, 64}, {6, 2, 22, 14, 100}, {8, 1, 64, 96, 0, 5.0f}, {8, 1, 32, 32, 600, 0.0f, true}};
  for (int format = 0; format < kCacheCoded; format++) {
    subject = prefix + names[format] + " heads";
    for (bool is_plain : {false, true}) test_heads(format, is_plain);
    for (Heads heads : all) {
      if (format == kCacheBF16Pairs && heads.dim_v % 32) heads.dim_v = 64;
      subject = prefix + names[format] + " attention of " + std::to_string(heads.num_heads) + " heads of " + std::to_string(heads.dim);
      test_attention(heads, format);
    }
  }
}

void test_isa(const std::string& isa) {
  prefix = isa + ", ";
  noise.seed(1);
  panel = hb_panel(isa.c_str());
  for (int i = 0; i < 2; i++) engines[i] = hb_engine_new(isa.c_str(), i ? 3 : 1);
  test_products();
  test_rows();
  test_caches();
  for (Engine* engine : engines) hb_engine_free(engine);
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::string> names(arguments + 1, arguments + count);
  if (names.empty()) names = {"avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "portable"};
  for (const std::string& isa : names) {
    const bool runs = hb_runs_here(isa.c_str());
    if (runs) test_isa(isa);
    else if (count > 1) subject = isa, check(false, "does not run here");
    std::printf("%s: %s\n", isa.c_str(), runs ? "tested" : "does not run here");
  }
  return num_failures > 0;
}
