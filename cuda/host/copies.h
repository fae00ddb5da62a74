// Bulk copies that land late, and the mbarrier word that counts their bytes.
//
// On the GPU cp.async.bulk returns at once and its bytes appear some time later, in any order. Here
// a copy is queued and performed at a random later scheduling point; it reads its source then, too.
// A kernel that does not wait for the mbarrier therefore sees poison or old bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "fiber.h"

namespace host {

struct Random {  // splitmix64
  uint64_t state;

  explicit Random(uint64_t seed = 0) : state(seed) {}
  HOST_RUNTIME int below(int n) {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return static_cast<int>(((z ^ z >> 31) >> 40) * static_cast<uint64_t>(n) >> 24);
  }
};

// The 64 bits of an mbarrier. As on the GPU a phase ends when no arrival and no byte is
// outstanding, and then the next one begins with the same number of expected arrivals.
struct MbarrierWord {
  static constexpr uint64_t LIMIT =
      (1u << 20) - 1;  // PTX: of the counts and of the bytes of a phase
  uint64_t pending : 20;
  uint64_t count : 20;
  uint64_t bytes : 21;
  uint64_t phase : 1;
  uint64_t mark : 2;  // MARK once initialised; poisoned shared memory reads 3

  static constexpr uint64_t MARK = 1;

  // True if that was the end of the phase.
  HOST_RUNTIME bool end_phase_if_complete() {
    if (pending || bytes) return false;
    pending = count;
    phase ^= 1;
    return true;
  }
};
static_assert(sizeof(MbarrierWord) == sizeof(uint64_t));

HOST_RUNTIME inline MbarrierWord* word_of(const uint64_t* bar) {
  return reinterpret_cast<MbarrierWord*>(const_cast<uint64_t*>(bar));
}

// What the end of phase `phase` orders, as an address for the sanitizer.
HOST_RUNTIME inline const void* sync_of(const uint64_t* bar, unsigned phase) {
  return reinterpret_cast<const char*>(bar) + phase;
}

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
  uint64_t* bar;
  Block* block;
  SanitizerThread engine;  // the copy is a thread of its own to ThreadSanitizer
};

struct Copies {
  Copy* queue = nullptr;
  int pending = 0, capacity = 0;

  HOST_RUNTIME void add(const Copy& copy) {
    if (pending == capacity) {
      int larger = capacity ? 2 * capacity : 64;
      Copy* fresh = static_cast<Copy*>(::operator new(sizeof(Copy) * larger));
      for (int i = 0; i < larger; i++) {
        fresh[i].engine.handle = nullptr;
        if (i < capacity) fresh[i] = queue[i];
      }
      ::operator delete(queue);
      queue = fresh;
      capacity = larger;
    }
    Copy& slot = queue[pending++];
    SanitizerThread engine = slot.engine;
    slot = copy;
    slot.engine = engine;
    if (HOST_TSAN && !slot.engine.handle) slot.engine.create();
  }

  void deliver(int i);  // mbarrier.h: it may wake threads

  HOST_RUNTIME void release() {
    for (int i = 0; i < capacity; i++) queue[i].engine.destroy();
    ::operator delete(queue);
    queue = nullptr;
    pending = capacity = 0;
  }
};

}  // namespace host
