// The library's C interface, checks that report one line each, and numbers: random ones, and the 16-bit formats in double precision.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "program.h"

struct Engine;
extern "C" {
int hb_runs_here(const char* isa);
int hb_panel(const char* isa);
int hb_slice_rows();
Engine* hb_engine_new(const char* isa, int num_threads);
void hb_engine_free(Engine*);
int64_t hb_panel_bytes(const Engine*, int kind, int num_inputs);
void hb_pack(Engine*, int kind, const uint8_t* rows, int64_t row_bytes, int num_rows, int num_inputs, uint8_t* panels);
void hb_quantize_q8_0(Engine*, const float* rows, int num_rows, int num_inputs, uint8_t* to);
void hb_run(Engine*, const Op* ops, int num_ops, const Buffer* buffers, const Step* step);
void hb_best(Engine*, const LogitRows*, int64_t* tokens, uint8_t* is_finite);
void hb_noisy_best(Engine*, const LogitRows*, int64_t* tokens);
void hb_gumbel_noise(Engine*, const LogitRows*, const int64_t* tokens, int count, float* to);
void hb_ordered_top(Engine*, const LogitRows*, int count, float* values, int64_t* tokens);
void hb_log_normaliser(Engine*, const LogitRows*, double* to);
void hb_rank(Engine*, const LogitRows*, const int64_t* tokens, int64_t* ranks);
}

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

constexpr double kRounding = 0x1p-24;  // greatest relative error of one rounding to float32
Engine* engines[2];                    // of one thread and of three
int panel, num_failures;
std::string prefix, subject;           // the instruction set; what is being tested
std::mt19937 noise;

void check(bool holds, const char* format, ...) {
  if (holds) return;
  va_list arguments;
  va_start(arguments, format);
  std::printf("%s: ", subject.c_str());
  std::vprintf(format, arguments);
  std::printf("\n");
  va_end(arguments);
  num_failures++;
}

// The first number beyond its tolerance is reported. A NaN is beyond any.
void check_close(const float* found, const std::vector<double>& expected, const std::vector<double>& tolerance) {
  for (size_t i = 0; i < expected.size(); i++)
    if (!(std::fabs(found[i] - expected[i]) <= tolerance[i]))
      return check(false, "number %zu of %zu is %.9g, expected %.9g within %.2g", i, expected.size(), found[i], expected[i], tolerance[i]);
}

void check_same(const void* found, const void* expected, size_t num_bytes, const char* claim, int which) {
  check(num_bytes == 0 || !std::memcmp(found, expected, num_bytes), claim, which);
}

Floats normals(size_t count) {
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(noise);
  return values;
}

double from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return bits >> 15 ? -magnitude : magnitude;
}

double from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Rounded to nearest even, to `digits` binary digits after the first one; smaller numbers than 2^lowest have fewer.
double rounded(double value, int digits, int lowest) {
  if (value == 0) return value;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(value), lowest) - digits);
  return std::nearbyint(value / unit) * unit;
}
double as_bf16(double value) { return rounded(value, 7, -126); }

uint16_t bf16_bits(double exact) {
  const float value = (float)exact;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (uint16_t)(bits >> 16);
}

std::vector<uint16_t> bf16_rows(const Floats& values) {
  std::vector<uint16_t> rows;
  for (float value : values) rows.push_back(bf16_bits(as_bf16(value)));
  return rows;
}

// The step's output [num_tokens, width], which starts as `fill`; one thread and three must give the same bits.
Floats run(const std::vector<Op>& ops, Step step, int width, std::vector<Buffer> buffers = {}, float fill = 0.0f) {
  Floats outputs[2];
  for (int i = 0; i < 2; i++) {
    outputs[i].assign((size_t)step.num_tokens * width, fill);
    step.output = outputs[i].data(), step.output_stride = width;
    hb_run(engines[i], ops.data(), (int)ops.size(), buffers.data(), &step);
  }
  check_same(outputs[0].data(), outputs[1].data(), outputs[0].size() * 4, "threads change bits of %d rows", step.num_tokens);
  return outputs[0];
}

// x / sqrt(mean(x^2) + eps) * weight
void norm_into(const float* x, const float* weight, int width, double eps, std::vector<double>& to) {
  double squares = 0;
  for (int i = 0; i < width; i++) squares += (double)x[i] * x[i];
  for (int i = 0; i < width; i++) to.push_back(x[i] / std::sqrt(squares / width + eps) * weight[i]);
}

}  // namespace
