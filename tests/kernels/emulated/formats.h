// Weights of every kind: random bytes as a file has them, and the numbers that the public description of the format gives them.
#pragma once
#include "harness.h"

namespace {

struct Format {
  const char* name;
  int kind, inputs, bytes;  // of a block
  int num_scales;           // float16 numbers at its start; Q6_K has one at its end
};
const Format kFormats[] = {{"F32", kF32, 1, 4, 0},       {"BF16", kBF16, 1, 2, 0},       {"F16", kF16, 1, 2, 0},
                           {"Q8_0", kQ8_0, 32, 34, 1},   {"Q4_0", kQ4_0, 32, 18, 1},     {"Q4_1", kQ4_1, 32, 20, 2},
                           {"Q5_0", kQ5_0, 32, 22, 1},   {"Q5_1", kQ5_1, 32, 24, 2},     {"Q4_K", kQ4_K, 256, 144, 2},
                           {"Q5_K", kQ5_K, 256, 176, 2}, {"Q6_K", kQ6_K, 256, 210, 0},   {"BF16Pairs", kBF16Pairs, 1, 2, 0}};

uint16_t read16(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }

void put_f16(uint8_t* at) {  // some are denormal
  const uint16_t bits = (uint16_t)((noise() & 0x83ff) | (noise() % 8 ? 8 + noise() % 5 : 0) << 10);
  at[0] = bits & 255, at[1] = bits >> 8;
}

void put_block(const Format& format, uint8_t* at) {
  for (int i = 0; i < format.bytes; i++) at[i] = noise() & 255;
  for (int i = 0; i < format.num_scales; i++) put_f16(at + 2 * i);
  if (format.kind == kQ6_K) put_f16(at + 208);
  if (format.kind == kF16) put_f16(at);
  const float number = normals(1)[0];
  if (format.kind == kF32) std::memcpy(at, &number, 4);
  if (format.kind == kBF16 || format.kind == kBF16Pairs) std::memcpy(at, (const uint8_t*)&number + 2, 2);
}

int nibble(const uint8_t* bytes, int i, int half) { return i % (2 * half) < half ? bytes[i % half] & 15 : bytes[i % half] >> 4; }

double k_block_value(const Format& format, const uint8_t* at, int i) {
  const uint8_t *packed = at + 4, *high = at + 16, *low = at + (format.kind == kQ4_K ? 16 : 48);
  const int group = i / 32;
  const int factor = group < 4 ? packed[group] & 63 : (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
  const int minimum = group < 4 ? packed[group + 4] & 63 : packed[group + 4] >> 4 | packed[group] >> 6 << 4;
  int quant = nibble(low + i / 64 * 32, i, 32);
  if (format.kind == kQ5_K) quant += (high[i % 32] >> group & 1) * 16;
  return from_f16(read16(at)) * factor * quant - from_f16(read16(at + 2)) * minimum;
}

// Input `i` of a block, as the public description of its format has it.
double block_value(const Format& format, const uint8_t* at, int i) {
  const double scale = from_f16(read16(at));
  const auto fifth = [&](const uint8_t* bits) { return (bits[i / 8] >> i % 8 & 1) * 16; };
  switch (format.kind) {
    case kF32: {
      float value;
      std::memcpy(&value, at, 4);
      return value;
    }
    case kF16: return scale;
    case kQ8_0: return scale * (int8_t)at[2 + i];
    case kQ4_0: return scale * (nibble(at + 2, i, 16) - 8);
    case kQ4_1: return scale * nibble(at + 4, i, 16) + from_f16(read16(at + 2));
    case kQ5_0: return scale * (nibble(at + 6, i, 16) + fifth(at + 2) - 16);
    case kQ5_1: return scale * (nibble(at + 8, i, 16) + fifth(at + 4)) + from_f16(read16(at + 2));
    case kQ4_K:
    case kQ5_K: return k_block_value(format, at, i);
    case kQ6_K: {
      const int part = i / 128, quarter = i % 128 / 32, column = i % 32;
      const int low = at[part * 64 + quarter % 2 * 32 + column] >> (quarter < 2 ? 0 : 4) & 15;
      const int quant = low + (at[128 + part * 32 + column] >> 2 * quarter & 3) * 16;
      return from_f16(read16(at + 208)) * (int8_t)at[192 + i / 16] * (quant - 32);
    }
    default: return from_bf16(read16(at));
  }
}

// A random matrix: its rows as a file has them, the numbers that they mean, and its panels.
struct Weights {
  Format format;
  int num_outputs, num_inputs;
  Bytes rows, panels;
  std::vector<double> values;
  Floats bias;

  Weights(const Format& f, int outputs, int inputs, bool has_bias = false) : format(f), num_outputs(outputs), num_inputs(inputs) {
    for (int block = 0; block < outputs * inputs / f.inputs; block++) {
      rows.resize(rows.size() + f.bytes);
      put_block(f, &rows[rows.size() - f.bytes]);
    }
    take(rows);
    if (has_bias) bias = normals(outputs);
  }
  Weights(const Floats& numbers, int inputs) : format(kFormats[0]), num_outputs((int)numbers.size() / inputs), num_inputs(inputs) {
    take(Bytes((const uint8_t*)numbers.data(), (const uint8_t*)(numbers.data() + numbers.size())));
  }

  void take(Bytes bytes) {
    rows = std::move(bytes);
    for (size_t at = 0; at < rows.size(); at += format.bytes)
      for (int i = 0; i < format.inputs; i++) values.push_back(block_value(format, &rows[at], i));
    panels.resize((num_outputs + panel - 1) / panel * hb_panel_bytes(engines[0], format.kind, num_inputs));
    hb_pack(engines[1], format.kind, rows.data(), (int64_t)rows.size() / num_outputs, num_outputs, num_inputs, panels.data());
  }
  Matrix matrix(int first_column = 0) const {
    const int64_t panel_bytes = hb_panel_bytes(engines[0], format.kind, num_inputs);
    return {panels.data(), bias.empty() ? nullptr : bias.data(), panel_bytes, format.kind, num_outputs, num_inputs, first_column};
  }
};

// Activations for products with a format; `values` is what the kernels read.
struct Inputs {
  int num_rows, width;
  bool is_pairs;
  Floats values;
  std::vector<uint16_t> pairs;

  Inputs(const Format& format, int rows, int columns)
      : num_rows(rows), width(columns), is_pairs(format.kind == kBF16Pairs), values(normals((size_t)rows * columns)) {
    pairs = bf16_rows(values);
    if (is_pairs)
      for (float& value : values) value = (float)as_bf16(value);
  }
  Step step(int first, int count) const {
    const int64_t stride = is_pairs ? width / 2 : width;
    const float* input = is_pairs ? (const float*)(pairs.data() + first * width) : &values[(size_t)first * width];
    return {.input = input, .input_stride = stride, .num_tokens = count};
  }
};

}  // namespace
