// The machine as data: fibers (CUDA threads) in warps in blocks, and where each thread stands.
//
// Every existing lane of a warp is in exactly one of the warp's masks (`ready`, `arrived`,
// `at_barrier`, `parked`, `polling`, `exited`), so waking a whole warp is one OR and finding the
// next lane is one count-trailing-zeros. Nothing here is locked: a block belongs to one OS thread.
#pragma once

#include <bit>
#include <cstdint>

#include "context.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace host {

constexpr int WARP_SIZE = 32;
constexpr int N_BARRIERS = 16;  // number 0 is __syncthreads

struct Worker;
struct Warp;
struct Block;

// A place in the kernel's source, captured by a default argument at the call.
struct Site {
  const char* file = "";
  int line = 0;
};
#define HOST_SITE ::host::Site site = {__builtin_FILE(), __builtin_LINE()}

// What one lane waits for; reports only. `address` is the mbarrier or the polled word.
struct Waiting {
  Site site;
  const void* address = nullptr;
  unsigned parity = 0;
};

struct Fiber {
  // First cache line: all that a switch and threadIdx touch.
  alignas(64) Context context;
  Warp* warp = nullptr;
  Block* block = nullptr;
  uint3 thread{};
  int lane = 0;
  // Second line: used when a thread starts, polls or is reported.
  Waiting waiting;
  const int* last_load = nullptr;  // a second load of the same value is polling
  int last_value = 0;
  bool paused = false;   // since that load
  bool in_loop = false;  // had to be pulled out of a loop that never comes to a scheduling point
  unsigned copies_issued = 0;
  SanitizerThread sanitizer;
  char* stack = nullptr;
  char* stack_top = nullptr;
  void* fake_stack = nullptr;
};

enum class Collective : uint8_t { SyncWarp, Shuffle, Ballot, Mma };

inline const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::SyncWarp: return "__syncwarp";
    case Collective::Shuffle: return "__shfl_sync";
    case Collective::Ballot: return "__ballot_sync";
    case Collective::Mma: return "mma_m16n8k16";
  }
  return "?";
}

// Operands of one mma, written by the lanes in the order in which mma.h computes.
struct MmaBuffer {
  alignas(64) uint32_t a[8][16];  // [pair of k][row], the lower k in the low half
  alignas(64) uint32_t b[8][8];   // [column][pair of k]
  alignas(64) float c[8][16];     // [column][row]
};

// What lanes hand to each other. There are two per warp and collectives alternate between them: a
// lane that runs ahead into the next collective must not overwrite what a slower lane has yet to
// read.
struct Exchange {
  uint64_t value[WARP_SIZE];
  uint32_t ballot;
  MmaBuffer mma;
};

struct Warp {
  uint32_t members = 0;     // lanes that exist
  uint32_t ready = 0;       // can run
  uint32_t arrived = 0;     // wait in the collective `kind` at `collective_site`
  uint32_t at_barrier = 0;  // wait at barrier `barrier` at `barrier_site`
  uint32_t parked = 0;      // wait for the mbarrier `parked_on`
  uint32_t polling = 0;     // gave up the processor in a polling loop
  uint32_t exited = 0;
  uint32_t turn = 0;  // collectives completed; the low bit selects the exchange buffer
  Collective kind{};
  bool shuffle = false;  // the worker's; here, because every switch asks
  int barrier = 0;
  Site collective_site, barrier_site;
  const uint64_t* parked_on = nullptr;
  int index = 0;  // in the worker
  Block* block = nullptr;
  Fiber* fibers = nullptr;   // 32 of them
  char sync[2] = {};         // addresses for the sanitizer, by the parity of `turn`
  Exchange* now = exchange;  // the buffer of this turn
  Exchange exchange[2];
};

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;  // 0: all threads that have not exited
  unsigned turn = 0;
  Site site;
  char sync[2] = {};
};

struct Block {
  uint3 index{};
  dim3 dim, grid;
  unsigned live = 0;  // threads that have not exited
  Warp* warps = nullptr;
  int n_warps = 0;
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  Worker* worker = nullptr;
  Barrier barriers[N_BARRIERS];
};

// One bit per warp of a worker; a plain array, see sanitize.h.
struct WarpSet {
  uint64_t* words = nullptr;
  int n_words = 0;

  HOST_RUNTIME void set(int i) { words[i >> 6] |= uint64_t{1} << (i & 63); }
  HOST_RUNTIME void clear(int i) { words[i >> 6] &= ~(uint64_t{1} << (i & 63)); }
  // The first member after `i`, going round; -1 if the set is empty.
  HOST_RUNTIME int next_after(int i) const {
    int word = i >> 6;
    uint64_t bits = (i & 63) == 63 ? 0 : words[word] & (~uint64_t{0} << ((i & 63) + 1));
    for (int n = 0; n <= n_words; n++) {
      if (bits) return word * 64 + std::countr_zero(bits);
      if (++word == n_words) word = 0;
      bits = words[word];
    }
    return -1;
  }
};

// The CUDA thread that runs on this OS thread now. Fibers never move to another OS thread.
#if defined(__ELF__)
__attribute__((tls_model("initial-exec")))  // one load instead of a call, in a shared library too
#endif
inline constinit thread_local Fiber* current = nullptr;

}  // namespace host
