// One worker: the OS thread that owns some blocks and decides which of their threads runs next.
//
// Order: the lanes of a warp one after another, then the next warp that can run; threads in a
// polling loop only when nobody else can, or now and then. A seed other than 0 shuffles lanes and
// warps. With one worker everything is a function of the seed. Nothing here preempts a thread: it
// runs until it meets a barrier, a collective, a wait or a poll.
#pragma once

#include <sched.h>

#include <cstdarg>
#include <cstdio>

#include "copies.h"
#include "doorbell.h"
#include "fiber.h"

namespace host {

enum Code { OK = 0, DEADLOCK = 1, DIVERGENCE = 2, TIMEOUT = 3, MISUSE = 4, BAD_LAUNCH = 5 };

// Someone failed, or time is up. Set once, by anybody; seeing it late does no harm. Not
// std::atomic, because ThreadSanitizer would take its loads for actions of the kernel's threads.
struct StopFlag {
  volatile bool value = false;

  HOST_RUNTIME bool is_set() const { return value; }
  HOST_RUNTIME void set() { value = true; }
};

struct Worker {
  Fiber self;  // the OS thread's own stack
  Block* blocks = nullptr;
  Warp* warps = nullptr;
  Fiber* fibers = nullptr;
  int n_blocks = 0, n_warps = 0;
  WarpSet ready, waiting;  // warps with a lane that can run; with a parked or polling lane
  int at = 0;              // warp that runs
  unsigned live = 0;       // threads that have not exited
  bool shuffle = false;
  bool tsan_per_warp = false;  // sanitize.h
  Random random;
  Copies copies;
  uint64_t picks = 0;
  uint64_t progress = 0;       // barriers, collectives and phases completed
  uint64_t progress_seen = 0;  // when nobody could run the last time
  uint64_t idle_passes = 0;    // looks of those who poll since then
  int64_t idle_since_ns = 0;
  unsigned rings_seen = 0;  // when those who poll last looked
  Doorbell* doorbell = nullptr;
  StopFlag* stop = nullptr;
  void (*entry)(void*) = nullptr;
  void* arguments = nullptr;
  char finished = 0;  // address for the sanitizer: all of a kernel before the end of the launch
  int code = OK;      // why this worker stopped, if it was the one to find out
  char message[512] = {};

  Fiber* pick();
  bool idle();
  void wake_waiting();
  void check_stuck_blocks();
  void wait_for_others();
};

HOST_RUNTIME inline Worker* worker_of(const Fiber* f) {
  return f->block->worker;
}

// Continue with `to`. Returns when somebody continues with `from`.
HOST_RUNTIME inline __attribute__((always_inline)) void resume(Fiber* from, Fiber* to) {
  current = to;
#if HOST_TSAN
  if (to->sanitizer.handle != from->sanitizer.handle) to->sanitizer.enter();
#endif
#if HOST_ASAN
  __sanitizer_start_switch_fiber(&from->fake_stack, to->stack,
                                 static_cast<size_t>(to->stack_top - to->stack));
#endif
  switch_context(from->context, to->context);
#if HOST_ASAN
  __sanitizer_finish_switch_fiber(current->fake_stack, nullptr, nullptr);
#endif
}

HOST_RUNTIME inline uint32_t bit_of(const Fiber* f) {
  return uint32_t{1} << f->lane;
}

HOST_RUNTIME inline void wake(Warp* w, uint32_t lanes) {
  if (lanes == 0) return;  // a warp in `ready` must have a lane that can run
  w->ready |= lanes;
  w->block->worker->ready.set(w->index);
}

// The calling thread cannot go on (its bit in `ready` is cleared) or will not (the bit is set). The
// caller passes what it has at hand: this is the hottest path of all.
HOST_RUNTIME inline __attribute__((always_inline)) void suspend(Fiber* self, Warp* w,
                                                                uint32_t ready) {
  Fiber* next;
  if (ready && !w->shuffle) [[likely]] {
    uint32_t later = ready & (~uint32_t{1} << self->lane);
    next = &w->fibers[std::countr_zero(later ? later : ready)];
  } else {
    next = w->block->worker->pick();
  }
  if (next != self) resume(self, next);
}

// Let other warps run although this thread could go on.
HOST_RUNTIME inline void yield_warp(Fiber* self) {
  Fiber* next = worker_of(self)->pick();
  if (next != self) resume(self, next);
}

// End the launch with an explanation. The fibers of the launch never run again.
[[noreturn]] HOST_RUNTIME __attribute__((noinline, format(printf, 3, 4))) inline void fail(
    Worker* worker, int code, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(worker->message, sizeof worker->message, format, list);
  va_end(list);
  worker->code = code;
  sync_release(&worker->finished);  // the worker reads the message
  worker->stop->set();
  Fiber* self = current;
  if (self != &worker->self) resume(self, &worker->self);
  __builtin_trap();
}

// A waiting lane in words, for messages.
HOST_RUNTIME inline unsigned thread_number(const Fiber* f) {
  return static_cast<unsigned>(f - f->block->warps[0].fibers);
}

// The next fiber to run, or the worker's own stack when all is done or the launch is over.
HOST_RUNTIME __attribute__((noinline)) inline Fiber* Worker::pick() {
  Warp* left = &warps[at];
  if (left->ready == 0) {
    ready.clear(at);
    if (left->arrived && !(left->parked | left->polling)) {
      fail(this, DIVERGENCE,
           "divergence: lanes %08x of block %u, warp %d wait in %s (%s:%d), its other lanes %08x "
           "never come: they wait at a barrier of the block",
           left->arrived, left->block->index.x, static_cast<int>(left - left->block->warps),
           name_of(left->kind), left->collective_site.file, left->collective_site.line,
           left->members & ~left->arrived);
    }
  }
  for (;;) {
    if (stop->is_set()) return &self;
    // A copy lands now and then; a shuffled schedule comes by here for every lane, not every warp.
    if (copies.pending && random.below(shuffle ? 64 : 4) == 0) {
      copies.deliver(random.below(copies.pending));
    }
    if ((++picks & 63) == 0) wake_waiting();  // nobody polls in vain for ever
    if (shuffle) {
      if (warps[at].ready == 0 || random.below(8) == 0) at = random.below(n_warps);
      if (warps[at].ready == 0) at = ready.next_after(at);
    } else {
      at = ready.next_after(at);
    }
    if (at >= 0) {
      uint32_t lanes = warps[at].ready;
      int first = shuffle ? random.below(WARP_SIZE) : 0;
      uint32_t later = lanes & (~uint32_t{0} << first);
      return &warps[at].fibers[std::countr_zero(later ? later : lanes)];
    }
    at = 0;
    if (!idle()) return &self;
  }
}

// Nobody can run. Let time pass: a copy lands, or those who poll look again. False: all have
// exited.
HOST_RUNTIME inline bool Worker::idle() {
  if (copies.pending) {
    copies.deliver(random.below(copies.pending));
    if (shuffle && random.below(2)) wake_waiting();  // let them see one copy without the next
    return true;
  }
  if (live == 0) return false;
  if (progress != progress_seen) idle_passes = 0;
  progress_seen = progress;
  idle_passes++;
  if (waiting.next_after(0) < 0 || (idle_passes & 255) == 0) check_stuck_blocks();
  wait_for_others();
  wake_waiting();
  return true;
}

// Stay on the core for a moment, offering it to others, then sleep.
HOST_RUNTIME inline void Worker::wait_for_others() {
  constexpr int64_t SPIN_NS = 30000;
  int64_t now = nanoseconds();
  if (idle_passes == 1) idle_since_ns = now;
  if (HOST_TSAN || now - idle_since_ns < SPIN_NS) {
    if (idle_passes > 8) sched_yield();
  } else {
    doorbell->sleep(rings_seen);
  }
  // Nobody rings under ThreadSanitizer, which would take this load for the kernel thread's own.
  if (!HOST_TSAN) rings_seen = doorbell->rings.load(std::memory_order_relaxed);
}

HOST_RUNTIME inline void Worker::wake_waiting() {
  for (int i = 0; i < waiting.n_words; i++) {
    for (uint64_t bits = waiting.words[i]; bits; bits &= bits - 1) {
      Warp* w = &warps[i * 64 + std::countr_zero(bits)];
      wake(w, w->parked | w->polling);
      w->parked = w->polling = 0;
    }
    waiting.words[i] = 0;
  }
}

// Only threads of a block can release its barriers: a block in which everybody waits at one is
// lost.
HOST_RUNTIME __attribute__((noinline)) inline void Worker::check_stuck_blocks() {
  for (int i = 0; i < n_blocks; i++) {
    Block& b = blocks[i];
    uint32_t can_go_on = 0;
    for (int j = 0; j < b.n_warps; j++) {
      can_go_on |= b.warps[j].ready | b.warps[j].parked | b.warps[j].polling;
    }
    if (b.live && !can_go_on) {
      fail(this, DEADLOCK, "deadlock: every thread of block %u waits at a barrier", b.index.x);
    }
  }
}

}  // namespace host
