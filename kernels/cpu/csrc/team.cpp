#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpins = 4000;  // looks at a counter before the core is given away: some tens of microseconds

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

template <class Condition> void wait_until(const Condition& holds) {
  for (int spin = 0; !holds(); spin++) {
    if (spin < kSpins) pause_briefly();
    else std::this_thread::yield();
  }
}

}  // namespace

Team::Team(int num_threads, int64_t scratch_bytes) : num_threads_(num_threads) {
  int64_t bytes = (scratch_bytes + 4095) / 4096 * 4096;
  for (int i = 0; i < num_threads; i++) scratch_.push_back((uint8_t*)std::aligned_alloc(4096, bytes));
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
}

Team::~Team() {
  ends_ = true;
  round_.fetch_add(2);
  round_.notify_all();
  for (auto& thread : threads_) thread.join();
  for (auto* memory : scratch_) std::free(memory);
}

void Team::run(const std::vector<Phase>& phases, const void* context) {
  wait_until([&] { return inside_.load() == 0; });  // a late thread of the last run may still look at its counters
  if (done_.size() < phases.size()) {
    done_ = std::vector<Counter>(phases.size());
    taken_ = std::vector<Counter>(phases.size() * num_threads_);
  }
  for (auto& counter : done_) counter.value.store(0, std::memory_order_relaxed);
  for (auto& counter : taken_) counter.value.store(0, std::memory_order_relaxed);
  phases_ = phases;
  context_ = context;
  round_.fetch_add(1);
  if (num_threads_ > 1) round_.notify_all();
  go_through(0);
  round_.fetch_add(1);
}

void Team::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t now = round_.load();
    for (int spin = 0; now == seen && spin < kSpins; spin++) pause_briefly(), now = round_.load();
    while (now == seen) {
      round_.wait(seen);
      now = round_.load();
    }
    seen = now;
    if (ends_) return;
    if (now % 2 == 0) continue;
    inside_.fetch_add(1);
    if (round_.load() == now) go_through(thread);
    inside_.fetch_sub(1);
  }
}

void Team::go_through(int thread) {
  for (size_t i = 0; i < phases_.size(); i++) {
    const int64_t num_items = phases_[i].num_items;
    if (num_items == 0) continue;
    std::atomic<int64_t>& done = done_[i].value;
    int64_t mine = 0;
    for (int other = 0; other < num_threads_; other++) mine += take_share(i, (thread + other) % num_threads_, scratch_[thread]);
    if (mine) done.fetch_add(mine, std::memory_order_acq_rel);
    wait_until([&] { return done.load(std::memory_order_acquire) == num_items; });
  }
}

int64_t Team::take_share(size_t phase, int share, uint8_t* scratch) {
  const Phase& p = phases_[phase];
  const int64_t first = p.num_items * share / num_threads_, count = p.num_items * (share + 1) / num_threads_ - first;
  std::atomic<int64_t>& taken = taken_[phase * num_threads_ + share].value;
  int64_t mine = 0;
  if (taken.load(std::memory_order_relaxed) >= count) return 0;
  for (int64_t item; (item = taken.fetch_add(1, std::memory_order_relaxed)) < count; mine++)
    p.run(context_, (int)phase, first + item, scratch);
  return mine;
}
