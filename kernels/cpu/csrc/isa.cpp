// One instruction set's kernels. Compiled once for each, with -DHB_ISA=<name> and that set's flags; see kernels/cpu/build.py.
#include "matmul.h"
#include "ops.h"
#include "pack.h"
#include "sampling.h"

#define HB_TEXT_OF(name) #name
#define HB_TEXT(name) HB_TEXT_OF(name)
#define HB_TABLE_OF(name) hb_kernels_##name
#define HB_TABLE(name) HB_TABLE_OF(name)

namespace HB_ISA {

static_assert(sizeof(kFormats) / sizeof(kFormats[0]) == kNumWeightKinds, "one format for each kind");
static_assert(sizeof(kCaches) / sizeof(kCaches[0]) == kNumCacheFormats, "one reader for each cache format");
static_assert(sizeof(kCodecs) / sizeof(kCodecs[0]) == kNumCodecs, "one codec of each");
static_assert(kShrinkRows * kPieceInputs <= 4 * kBlockRows * kPanel + kPieceInputs * kPanel, "a block of widened rows fits into the scratch of products");
static_assert(kBlockRows % kRows == 0 && kMaxRows <= kBlockRows, "blocks of rows are cut into whole tiles");

// Floating-point operations of `rounds` rounds of independent fused multiply-adds: what the machine can do at most.
static double multiply_adds(int64_t rounds) {
  V acc[12];
  for (int i = 0; i < 12; i++) acc[i] = splat(1.0f + (float)i);
  V x = splat(0.999999f), y = splat(1e-7f);
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) acc[i] = fma(acc[i], x, y);
  }
  V total = {};
  for (int i = 0; i < 12; i++) total += acc[i];
  volatile float sink = sum(total);
  (void)sink;
  return (double)rounds * 12 * kLanes * 2;
}

static constexpr int64_t kScratchBytes =
    (int64_t)sizeof(float) * (kPieceInputs * kPanel + 4 * kBlockRows * kPanel + 2 * kMaxRows * kMaxHeadDim +
                              5 * (kMaxHeadDim + kPanel) * kKeys + kMaxRows * kKeys + 2 * kMaxRows * (kMaxHeadDim + kPanel + kLanes) + 2048);
static_assert(4 * kKeys >= kBlockRows, "a block of rows of a head fits into the scratch of attention");

}  // namespace HB_ISA

extern "C" const Kernels HB_TABLE(HB_ISA) = {
    HB_TEXT(HB_ISA),     HB_ISA::kPanel,      HB_ISA::kScratchBytes, HB_ISA::num_items,
    HB_ISA::run_item,    HB_ISA::panel_bytes, HB_ISA::pack_panel, HB_ISA::quantize_q8_0,
    HB_ISA::best,        HB_ISA::noisy_best,  HB_ISA::gumbel_noise, HB_ISA::ordered_top, HB_ISA::log_normaliser,
    HB_ISA::rank,        HB_ISA::multiply_adds,
};
