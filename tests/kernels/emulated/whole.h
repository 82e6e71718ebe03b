// Rows rounded to whole numbers of 8 or 16 bits, and their products with whole-numbered weights.
#pragma once
#include "formats.h"

namespace {

// What a rounded row stands for: each number times the scale of its group.
std::vector<double> whole_row(RowType type, const float* row, int width) {
  const int planes = type == kInt8Rows ? 1 : 2;
  const auto* numbers = (const int8_t*)row;
  const float* scales = row + planes * width / 4;
  std::vector<double> values;
  for (int i = 0; i < width; i++)
    values.push_back((planes == 1 ? numbers[i] : numbers[i] * 256.0 + numbers[width + i]) * scales[i / 32]);
  return values;
}

void test_rounding(RowType type, int width) {
  Floats x = normals(3 * width), rows(3 * width);
  std::fill(x.begin() + width, x.begin() + width + 32, 0.0f);
  x[2 * width] = -1e30f;
  const Op op{.code = kRound, .in = kInput, .out = kOutput, .width = width, .out_type = type};
  const Floats found = run({op}, {.input = x.data(), .input_stride = width, .num_tokens = 3}, width);
  for (int row = 0; row < 3; row++) {
    const std::vector<double> values = whole_row(type, &found[row * width], width);
    for (int group = 0; group < width / 32; group++) {
      const float* from = &x[row * width + group * 32];
      double most = 0;
      for (int i = 0; i < 32; i++) most = std::max(most, std::fabs((double)from[i]));
      for (int i = 0; i < 32; i++)
        check(std::fabs(values[group * 32 + i] - from[i]) <= most / (type == kInt8Rows ? 127 : 32639) * 0.501, "number %d is %.9g, expected %.9g", i, values[group * 32 + i], from[i]);
    }
  }
  const Op in_place{.code = kRound, .in = 0, .out = 0, .width = width, .out_type = type};
  Floats memory = x;
  const Step step{.num_tokens = 3};
  hb_run(engines[0], &in_place, 1, std::vector<Buffer>{{memory.data(), width}}.data(), &step);
  const int num_bytes = (type == kInt8Rows ? width : 2 * width) + width / 32 * 12;
  for (int row = 0; row < 3; row++)
    check_same(&memory[row * width], &found[row * width], num_bytes, "row %d is rounded otherwise in place", row);
}

// The same bits in any number of rows, near the products of what the bytes stand for; what is no number stays none.
void test_dots(RowType type, const Format& format, int num_inputs) {
  constexpr int num_rows = 33, num_outputs = 77;
  const Weights w(format, num_outputs, num_inputs, true);
  const Matrix matrix = w.matrix();
  Floats x = normals((size_t)num_rows * num_inputs), memory((size_t)num_rows * num_inputs);
  const std::vector<Op> ops = {
      {.code = kRound, .in = kInput, .out = 0, .width = num_inputs, .out_type = type},
      {.code = kLinear, .in = 0, .out = kOutput, .num_matrices = 1, .in_type = type, .matrices = &matrix}};
  const auto product = [&](int first, int count) {
    const Step step{.input = &x[(size_t)first * num_inputs], .input_stride = num_inputs, .num_tokens = count};
    return run(ops, step, num_outputs, {{memory.data(), num_inputs}});
  };
  const Floats all = product(0, num_rows);
  double most = 0;
  for (double value : w.values) most = std::max(most, std::fabs(value));
  std::vector<double> expected, tolerance;
  for (int row = 0; row < num_rows; row++) {
    const std::vector<double> values = whole_row(type, &memory[(size_t)row * num_inputs], num_inputs);
    double magnitude = 0;
    for (double value : values) magnitude += std::fabs(value);
    for (int output = 0; output < num_outputs; output++) {
      double sum = w.bias[output];
      for (int k = 0; k < num_inputs; k++) sum += values[k] * w.values[(size_t)output * num_inputs + k];
      // Scales and minima are summed apart, in one or two roundings for each group; either is at most a few times the weights.
      expected.push_back(sum), tolerance.push_back((num_inputs / 16 + 8) * kRounding * 4 * most * magnitude + 1e-6);
    }
  }
  check_close(all.data(), expected, tolerance);
  for (int count : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13})
    check_same(product(0, count).data(), all.data(), (size_t)count * num_outputs * 4, "%d rows have other bits than 33", count);
  check_same(product(20, 1).data(), &all[20 * num_outputs], num_outputs * 4, "row %d has other bits alone", 20);
  x[5] = std::nanf(""), x[num_inputs + 6] = INFINITY;
  const Floats bad = product(0, 3);
  for (int i = 0; i < num_outputs; i++) check(std::isnan(bad[i]) && std::isnan(bad[num_outputs + i]), "output %d of no number is one", i);
  check_same(&bad[2 * num_outputs], &all[2 * num_outputs], num_outputs * 4, "row %d has other bits beside a bad one", 2);
}

}  // namespace
