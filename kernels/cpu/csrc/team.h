// A team of threads that works through lists of items, in order.
//
// Each thread has a share of neighbouring items (their weights stream past it in the order of memory), and helps the others when
// its own are taken. A phase is done when its items are done, not when every thread has come by: a thread that the system put aside holds up nobody
// unless it holds an item. Threads sleep between runs; within a run they spin shortly, then give the core away between looks.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

class Team {
 public:
  // One phase: how many items, and what an item is. `scratch` is the thread's own.
  struct Phase {
    int64_t num_items;
    void (*run)(const void* context, int phase, int64_t item, uint8_t* scratch);
  };

  Team(int num_threads, int64_t scratch_bytes);
  ~Team();
  // Returns when every item of every phase is done. Only one thread may call it at a time.
  void run(const std::vector<Phase>& phases, const void* context);
  int num_threads() const { return num_threads_; }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  void work(int thread);
  void go_through(int thread);
  int64_t take_share(size_t phase, int share, uint8_t* scratch);

  const int num_threads_;
  std::vector<uint8_t*> scratch_;
  std::vector<std::thread> threads_;
  std::vector<Counter> taken_;  // of each share of each phase
  std::vector<Counter> done_;   // of each phase
  std::vector<Phase> phases_;  // a copy: a late thread looks at it after the run has returned
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};   // odd number of the run that is open, even: none
  alignas(64) std::atomic<int32_t> inside_{0};   // threads that may be looking at the phases
  std::atomic<bool> ends_{false};
};
