// What ThreadSanitizer and AddressSanitizer must be told about fibers; empty in an ordinary build.
//
// To ThreadSanitizer every CUDA thread is a thread of its own, and a switch between two of them
// orders nothing: only barriers, mbarriers, bulk copies and real atomics do. AddressSanitizer must
// know which stack it is on. The emulator's own bookkeeping is plain data shared by all fibers of a
// worker (only one of them runs at a time), so its functions are kept out of the instrumentation
// with HOST_RUNTIME; they use raw arrays, because a std:: template would be instrumented again.
#pragma once

#include <cstddef>

#ifndef __has_feature
#define __has_feature(x) 0
#endif

#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define HOST_TSAN 1
#else
#define HOST_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define HOST_ASAN 1
#else
#define HOST_ASAN 0
#endif
#define HOST_SANITIZED (HOST_TSAN || HOST_ASAN)

#define HOST_RUNTIME __attribute__((no_sanitize("thread", "address", "undefined")))

#if HOST_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read8(void* address);
void __tsan_write8(void* address);
}
#endif
#if HOST_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_old, size_t* size_old);
void __asan_unpoison_memory_region(void const volatile* address, size_t size);
void* __asan_region_is_poisoned(void* address, size_t size);
}
#endif

namespace host {

// One side of an ordering: everything before a release happens before everything after an acquire
// of the same address that comes later.
HOST_RUNTIME inline void sync_release([[maybe_unused]] const void* address) {
#if HOST_TSAN
  __tsan_release(const_cast<void*>(address));
#endif
}
HOST_RUNTIME inline void sync_acquire([[maybe_unused]] const void* address) {
#if HOST_TSAN
  __tsan_acquire(const_cast<void*>(address));
#endif
}

// ThreadSanitizer tells at most 255 threads apart; with more it forgets orderings and misses races.
// A larger launch is therefore shown to it as one thread per warp, which hides races within a warp
// only. The limit lets one block of 288 threads through, where misses are still rare.
// -DHOST_TSAN_THREADS=n moves it.
#ifndef HOST_TSAN_THREADS
#define HOST_TSAN_THREADS 300
#endif

// A fiber as ThreadSanitizer sees it.
struct SanitizerThread {
  void* handle = nullptr;

  HOST_RUNTIME void create() {
#if HOST_TSAN
    handle = __tsan_create_fiber(0);
#endif
  }
  HOST_RUNTIME void adopt_current() {
#if HOST_TSAN
    handle = __tsan_get_current_fiber();
#endif
  }
  HOST_RUNTIME void destroy() {
#if HOST_TSAN
    if (handle) __tsan_destroy_fiber(handle);
#endif
    handle = nullptr;
  }
  // Inlined, since clang counts calls and returns: a call that returns on another fiber's shadow
  // stack would unbalance both.
  HOST_RUNTIME __attribute__((always_inline)) void enter() const {
#if HOST_TSAN
    __tsan_switch_to_fiber(handle, 1);  // 1: the switch itself orders nothing
#endif
  }
};

// Does a range touch memory that AddressSanitizer knows to be out of bounds?
HOST_RUNTIME inline bool out_of_bounds([[maybe_unused]] const void* address,
                                       [[maybe_unused]] size_t bytes) {
#if HOST_ASAN
  return __asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr;
#else
  return false;
#endif
}

}  // namespace host
