// Memory of a launch: fiber stacks with guard pages, and dynamic shared memory.
//
// Stacks are kept between launches, because mapping and touching 288 of them costs about a
// millisecond a block. Their tops are spread over the cache sets: equal offsets would make the hot
// lines of all threads compete for the same few places.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "fiber.h"

namespace host {

#ifdef HOST_STACK_BYTES
constexpr size_t DEFAULT_STACK_BYTES = HOST_STACK_BYTES;
#else
constexpr size_t DEFAULT_STACK_BYTES = HOST_SANITIZED ? 256 * 1024 : 64 * 1024;
#endif

struct Mapping {
  char* base = nullptr;
  size_t count = 0, stride = 0;
};

// One launch's worth of stacks per core waits here for the next launch. Each stack takes two of the
// 65530 mappings that Linux allows a process, so the cache is bounded in all.
struct MappingCache {
  static constexpr int KEPT = 16;
  static constexpr size_t MOST_STACKS = 8192;
  std::mutex mutex;
  Mapping kept[KEPT];
  size_t n_stacks = 0;

  bool take(size_t count, size_t stride, Mapping& out) {
    std::lock_guard lock(mutex);
    for (Mapping& m : kept) {
      if (m.base && m.count >= count && m.stride == stride && m.count <= 2 * count) {
        out = m;
        n_stacks -= m.count;
        m = {};
        return true;
      }
    }
    return false;
  }
  bool give(const Mapping& mapping) {
    std::lock_guard lock(mutex);
    if (n_stacks + mapping.count > MOST_STACKS) return false;
    for (Mapping& m : kept) {
      if (m.base) continue;
      m = mapping;
      n_stacks += m.count;
      return true;
    }
    return false;
  }
};
inline MappingCache mapping_cache;

class Stacks {
 public:
  Stacks(size_t count, size_t bytes) : page_(size_t(sysconf(_SC_PAGESIZE))) {
    size_t stride = (bytes + page_ - 1) / page_ * page_ + page_;
    if (mapping_cache.take(count, stride, mapping_)) return;
    void* base = mmap(nullptr, count * stride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    mapping_ = {static_cast<char*>(base), count, stride};
    // Very large grids exceed the number of mappings that Linux allows; the rest goes unguarded.
    for (size_t i = 0; i < count; i++) {
      if (mprotect(mapping_.base + i * stride, page_, PROT_NONE) != 0) break;
    }
  }
  ~Stacks() {
#if HOST_ASAN
    __asan_unpoison_memory_region(mapping_.base, mapping_.count * mapping_.stride);
#endif
    // A sanitizer keeps a shadow of old stacks that only unmapping clears.
    if (HOST_SANITIZED || !mapping_cache.give(mapping_)) {
      munmap(mapping_.base, mapping_.count * mapping_.stride);
    }
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* bottom(size_t i) const { return mapping_.base + i * mapping_.stride + page_; }
  char* top(size_t i) const {
    size_t colour = i * 5 % 64 * 64;  // 5: neighbours are five cache lines apart
    return mapping_.base + (i + 1) * mapping_.stride - colour;
  }

 private:
  size_t page_;
  Mapping mapping_;
};

// Exactly `bytes`, so that AddressSanitizer sees the first byte beyond; 0xFF is NaN as a float.
inline unsigned char* allocate_shared(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, bytes) != 0) throw std::bad_alloc();
  memset(memory, 0xFF, bytes);
  return static_cast<unsigned char*>(memory);
}

// Fill in what a switch back to this OS thread needs.
inline void adopt_stack(Fiber& self) {
  self.sanitizer.adopt_current();
#if HOST_ASAN
  pthread_attr_t attributes;
  void* bottom = nullptr;
  size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &bytes);
  pthread_attr_destroy(&attributes);
  self.stack = static_cast<char*>(bottom);
  self.stack_top = self.stack + bytes;
#endif
}

// Cores that this process may use.
inline int cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, int(std::thread::hardware_concurrency()));
}

}  // namespace host
