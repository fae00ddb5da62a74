// The host meaning of the `ptx::` functions that kernels use instead of inline PTX.
//
// Functions that touch the kernel's own memory are instrumented in sanitizer builds like the kernel
// itself; what they do to the emulator's state is in the functions they call.
#pragma once

#include <chrono>

#include "barrier.h"
#include "mbarrier.h"
#include "mma.h"

namespace host {

// The thread looked at a word that is not yet what it wants, or asked for a pause.
HOST_RUNTIME __attribute__((noinline)) inline void poll(const void* address, Site site) {
  Fiber* self = current;
  self->waiting = {site, address, 0};
  Warp* w = self->warp;
  w->ready &= ~bit_of(self);
  w->polling |= bit_of(self);
  worker_of(self)->waiting.set(w->index);
  suspend(self, w, w->ready);
  self->waiting.site = {};
  self->paused = true;
}

// Loading the same value from the same place again is a polling loop without a pause.
HOST_RUNTIME inline void note_load(const int* p, int value, Site site) {
  Fiber* self = current;
  bool again = self->last_load == p && self->last_value == value && !self->paused;
  self->last_load = p;
  self->last_value = value;
  self->paused = false;
  if (again) poll(p, site);
}

// A word that others may poll has changed.
HOST_RUNTIME inline void ring() {
  if (!HOST_TSAN) worker_of(current)->doorbell->ring();
}

HOST_RUNTIME inline void bar_sync(int id, int n_threads, Site site) {
  if (id < 1 || id >= N_BARRIERS || n_threads < WARP_SIZE || n_threads % WARP_SIZE ||
      n_threads > current->block->n_warps * WARP_SIZE) {
    fail(worker_of(current), MISUSE,
         "bar_sync(%d, %d) (%s:%d): the id must be in 1..%d and the threads whole warps of the "
         "block's %d",
         id, n_threads, site.file, site.line, N_BARRIERS - 1, current->block->n_warps);
  }
  barrier_wait(id, static_cast<unsigned>(n_threads), site);
}

// All lanes call it with the same arguments; lane 0 does it, the others are counted.
HOST_RUNTIME inline void copy_async(void* shared, const void* global, unsigned bytes, uint64_t* bar,
                                    Site site) {
  Fiber* self = current;
  self->copies_issued++;
  if (self->lane == 0) start_copy(shared, global, bytes, bar, site);
}

}  // namespace host

namespace ptx {

// Dynamic shared memory of the block, aligned to 1024 bytes, filled with 0xFF (NaN) at launch.
HOST_RUNTIME inline unsigned char* shared_memory() {
  return host::current->block->shared;
}

// A place in it as one word.
HOST_RUNTIME inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - shared_memory());
}
HOST_RUNTIME inline void* shared_pointer(uint32_t address) {
  return shared_memory() + address;
}

// Arrivals that `copy_async` makes on the mbarrier of a stage.
constexpr int FULL_ARRIVALS = 1;

inline int ld_acquire(const int* p, HOST_SITE) {
  int v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  host::note_load(p, v, site);
  return v;
}
inline int ld_relaxed(const int* p, HOST_SITE) {
  int v = __atomic_load_n(p, __ATOMIC_RELAXED);
  host::note_load(p, v, site);
  return v;
}
inline uint64_t ld_relaxed(const uint64_t* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline uint4 ld_relaxed(const uint4* p) {
  return uint4{__atomic_load_n(&p->x, __ATOMIC_RELAXED), __atomic_load_n(&p->y, __ATOMIC_RELAXED),
               __atomic_load_n(&p->z, __ATOMIC_RELAXED), __atomic_load_n(&p->w, __ATOMIC_RELAXED)};
}
template <typename T>
inline void st_relaxed(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
  host::ring();
}
inline void red_relaxed_add(int* p, int v) {
  __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  host::ring();
}
inline void st_release(int* p, int v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
  host::ring();
}
inline void st_release_host(int* p, int v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
  host::ring();
}
inline int ld_relaxed_host(const int* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline int ld_relaxed_shared(const int* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void st_relaxed_shared(int* p, int v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
  host::ring();
}
inline void red_release_add(int* p, int v) {
  __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
  host::ring();
}
inline int add_acq_rel(int* p, int v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
inline int atomic_cas(int* p, int compare, int value) {
  __atomic_compare_exchange_n(p, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return compare;  // the old value either way
}

inline void mbar_init(uint64_t* bar, unsigned count, HOST_SITE) {
  host::mbarrier_init(bar, count, site);
}
inline void mbar_fence_init() {}  // orders the initialisation before bulk copies; see __tsan_read8
inline void mbar_arrive(uint64_t* bar, HOST_SITE) {
  host::mbarrier_arrive(bar, 0, "mbar_arrive", site);
}
inline bool mbar_try_wait(uint64_t* bar, unsigned parity, HOST_SITE) {
  return host::mbarrier_try_wait(bar, parity, site);
}
inline void copy_async(void* shared, const void* global, unsigned bytes, uint64_t* bar, HOST_SITE) {
  host::copy_async(shared, global, bytes, bar, site);
}

inline void mma_m16n8k16(float (&c)[4], const uint4& a, const uint2& b, HOST_SITE) {
  host::Quad sums = host::mma(host::Quad{c[0], c[1], c[2], c[3]}, &a.x, &b.x, site);
  for (int i = 0; i < 4; i++) c[i] = sums[i];
}

inline void bar_sync(int id, int n_threads, HOST_SITE) {
  host::bar_sync(id, n_threads, site);
}
inline void fence_copies() {}
inline void launch_next() {}
inline void wait_for_previous() {}
inline void pause(HOST_SITE) {
  host::poll(nullptr, site);
}
inline unsigned long long now_ns() {
  return static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch() /
                                         std::chrono::nanoseconds(1));
}

}  // namespace ptx
