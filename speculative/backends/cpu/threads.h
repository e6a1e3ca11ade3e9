// Work shared among XLA's threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` takes no time on most CPUs: helpers would sleep too soon.
#endif
}

// Work that is handed out in chunks, so that no one waits for a late thread.
struct Job {
  const std::function<void(int64_t, int64_t)> chunk;
  const int64_t items, size, helpers;
  std::atomic<int64_t> next{0};

  void Help() {
    for (int64_t begin; (begin = next.fetch_add(size)) < items;) {
      chunk(begin, std::min(begin + size, items));
    }
  }
};

// Threads that wait actively for the next job before they sleep. A decoding step is about fifty
// products of a few microseconds each; waking a thread takes longer than most of them.
class Helpers {
 public:
  void Run(Job& job) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) return job.Help();  // The threads help another caller.
    for (auto i = static_cast<int64_t>(helpers_.size()); i < job.helpers; ++i) {
      helpers_.push_back(std::make_unique<Helper>());
      std::thread([this, i, self = helpers_.back().get()] { Serve(i, *self); }).detach();
    }
    job_ = &job;
    ++round_;
    for (int64_t i = 0; i < job.helpers; ++i) {
      if (!helpers_[i]->asleep) continue;
      const std::lock_guard<std::mutex> lock(helpers_[i]->mutex);
      helpers_[i]->asleep = false;
      helpers_[i]->wake.notify_one();
    }
    job.Help();
    // Threads that come now find no job; this waits for those that came before.
    job_ = nullptr;
    while (active_) Pause();
  }

 private:
  struct Helper {
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<bool> asleep{false};
  };

  // Times a helper looks for another round before it sleeps; about a tenth of a millisecond.
  static constexpr int kLooks = 4000;

  void Serve(int64_t index, Helper& self) {
    int64_t seen = 0;
    for (int looks = 0;; ++looks) {
      if (round_ == seen) {
        if (looks < kLooks) {
          Pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(self.mutex);
        self.asleep = true;
        if (round_ == seen) {  // Otherwise a round began before this sleep was known.
          self.wake.wait(lock, [&] { return !self.asleep; });
          looks = 0;
        }
        self.asleep = false;
      }
      seen = round_;
      ++active_;
      if (Job* job = job_; job && index < job->helpers) {
        job->Help();
        looks = 0;
      }
      --active_;
    }
  }

  std::mutex busy_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::atomic<Job*> job_{nullptr};
  std::atomic<int64_t> round_{0}, active_{0};
};

Helpers& helpers = *new Helpers;  // Never destroyed, because threads may outlive everything else.

constexpr int64_t kWorthAThread = 1 << 14;  // Floats read while another thread notices its work.

// Runs work(begin, end) over [0, items), where each item reads `floats`.
template <typename Work>
void Parallel(const ffi::ThreadPool& pool, int64_t items, int64_t floats, const Work& work) {
  const int64_t worth = 1 + items * floats / kWorthAThread;
  const int64_t threads = std::min({pool.num_threads(), worth, items});
  const std::function<void(int64_t, int64_t)> chunk = std::cref(work);
  if (threads <= 1) return chunk(0, items);
  Job job{chunk, items, std::max<int64_t>(1, items / (2 * threads)), threads - 1};
  helpers.Run(job);
}

}  // namespace
