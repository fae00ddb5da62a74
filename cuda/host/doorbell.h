// How an OS thread whose fibers all poll goes to sleep, and how a release by another one wakes it.
//
// Spinning is fastest while every worker has a core. When it has not, a spinning worker keeps the
// one it waits for from running: with one busy process beside two workers on two cores a step took
// ten times as long. So a worker spins for some microseconds and then sleeps until somebody
// releases a word. Under ThreadSanitizer nobody rings, because ringing would order the kernel's
// threads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "sanitize.h"

namespace host {

struct Doorbell {
  std::atomic<unsigned> rings{0};
  std::atomic<int> sleepers{0};
  std::mutex mutex;
  std::condition_variable changed;

  void ring() {
    rings.fetch_add(1);
    if (sleepers.load() == 0) return;
    std::lock_guard lock(mutex);  // after this the sleeper either waits or has seen the ring
    changed.notify_all();
  }

  // Sleep until somebody has rung since `seen` was read, at most a millisecond: words may also
  // change without a ring. The order (sleepers, then rings) is opposite to the ringer's, so one
  // sees the other.
  void sleep(unsigned seen) {
    std::unique_lock lock(mutex);
    sleepers.fetch_add(1);
    if (rings.load() == seen) changed.wait_for(lock, std::chrono::milliseconds(1));
    sleepers.fetch_sub(1);
  }
};

inline int64_t nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace host
