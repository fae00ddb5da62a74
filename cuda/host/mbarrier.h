// mbarriers: arrivals, bytes, phases, and threads that wait for them.
//
// try_wait on the GPU suspends the thread for a bounded time. Here it parks the thread until the
// phase ends; if nothing else can run, it returns false after all, so that a kernel's own bounded
// wait works.
#pragma once

#include "scheduler.h"

namespace host {

HOST_RUNTIME inline MbarrierWord* checked_word(const uint64_t* bar, const char* what, Site site) {
  Fiber* self = current;
  Block* block = self->block;
  auto offset = reinterpret_cast<const unsigned char*>(bar) - block->shared;
  if (offset < 0 || offset + 8 > static_cast<ptrdiff_t>(block->shared_bytes) || offset % 8) {
    fail(block->worker, MISUSE,
         "%s (%s:%d): mbarrier at %p is not an aligned 8-byte word of the block's shared memory",
         what, site.file, site.line, static_cast<const void*>(bar));
  }
  return word_of(bar);
}

HOST_RUNTIME inline MbarrierWord* initialised_word(const uint64_t* bar, const char* what,
                                                   Site site) {
  MbarrierWord* word = checked_word(bar, what, site);
#if HOST_TSAN
  __tsan_read8(word);  // races with an initialisation that no barrier separates from this use
#endif
  if (word->mark != MbarrierWord::MARK) {
    fail(worker_of(current), MISUSE,
         "%s (%s:%d): the mbarrier at shared memory offset %d was never "
         "initialised",
         what, site.file, site.line,
         static_cast<int>(reinterpret_cast<const unsigned char*>(bar) - current->block->shared));
  }
  return word;
}

// Wake every thread of the block that waits for this mbarrier; it looks at the phase itself.
HOST_RUNTIME inline void wake_parked(Block* block, const uint64_t* bar) {
  for (int i = 0; i < block->n_warps; i++) {
    Warp* w = &block->warps[i];
    if (w->parked && w->parked_on == bar) {
      uint32_t lanes = w->parked;
      w->parked = 0;
      wake(w, lanes);
    }
  }
}

HOST_RUNTIME inline void end_phase_if_complete(Block* block, uint64_t* bar) {
  if (!word_of(bar)->end_phase_if_complete()) return;
  block->worker->progress++;
  wake_parked(block, bar);
}

HOST_RUNTIME inline void mbarrier_init(uint64_t* bar, unsigned count, Site site) {
  MbarrierWord* word = checked_word(bar, "mbar_init", site);
  if (count < 1 || count > MbarrierWord::LIMIT) {
    fail(worker_of(current), MISUSE, "mbar_init (%s:%d): count %u is not in 1..%u", site.file,
         site.line, count, static_cast<unsigned>(MbarrierWord::LIMIT));
  }
#if HOST_TSAN
  __tsan_write8(word);
#endif
  *word = MbarrierWord{count, count, 0, 0, MbarrierWord::MARK};
}

HOST_RUNTIME inline void mbarrier_arrive(uint64_t* bar, uint32_t bytes, const char* what,
                                         Site site) {
  MbarrierWord* word = initialised_word(bar, what, site);
  if (word->pending == 0) {
    fail(worker_of(current), MISUSE,
         "%s (%s:%d): more arrivals in one phase than the mbarrier's "
         "count of %u",
         what, site.file, site.line, static_cast<unsigned>(word->count));
  }
  if (word->bytes + bytes > MbarrierWord::LIMIT) {
    fail(worker_of(current), MISUSE, "%s (%s:%d): %u bytes in one phase, at most %u are counted",
         what, site.file, site.line, static_cast<unsigned>(word->bytes + bytes),
         static_cast<unsigned>(MbarrierWord::LIMIT));
  }
  sync_release(sync_of(bar, word->phase));
  word->bytes += bytes;
  word->pending -= 1;
  end_phase_if_complete(current->block, bar);
}

// The phase has not ended: give up the processor until it does, or until nobody else can run.
HOST_RUNTIME __attribute__((noinline)) inline bool park(const uint64_t* bar, unsigned parity,
                                                        Site site) {
  MbarrierWord* word = initialised_word(bar, "mbar_try_wait", site);
  Fiber* self = current;
  Warp* w = self->warp;
  self->waiting = {site, bar, parity};
  w->ready &= ~bit_of(self);
  if (w->parked == 0) w->parked_on = bar;
  if (w->parked_on == bar) {
    w->parked |= bit_of(self);
  } else {
    w->polling |= bit_of(self);  // lanes of one warp wait for different mbarriers: rare, no list
  }
  worker_of(self)->waiting.set(w->index);
  suspend(self, w, w->ready);
  self->waiting.site = {};
  return word->phase != parity;
}

// True once the phase of this parity has ended.
HOST_RUNTIME inline bool mbarrier_try_wait(const uint64_t* bar, unsigned parity, Site site) {
  MbarrierWord* word = word_of(bar);
  parity &= 1;
#if HOST_TSAN
  __tsan_read8(word);
#endif
  bool ended = word->mark == MbarrierWord::MARK && word->phase != parity;
  if (!ended && !park(bar, parity, site)) return false;
  sync_acquire(sync_of(bar, parity));
  return true;
}

HOST_RUNTIME inline void Copies::deliver(int i) {
  Copy copy = queue[i];
#if HOST_TSAN
  copy.engine.enter();
#endif
  memcpy(copy.to, copy.from, copy.bytes);
  sync_release(sync_of(copy.bar, word_of(copy.bar)->phase));
#if HOST_TSAN
  current->sanitizer.enter();
#endif
  queue[i] = queue[--pending];
  queue[pending].engine = copy.engine;  // engines stay with the queue and are used again
  word_of(copy.bar)->bytes -= copy.bytes;
  end_phase_if_complete(copy.block, copy.bar);
}

// One arrival that announces `bytes`, and a copy that will bring them.
HOST_RUNTIME inline void start_copy(void* to, const void* from, uint32_t bytes, uint64_t* bar,
                                    Site site) {
  Fiber* self = current;
  Worker* worker = worker_of(self);
  Block* block = self->block;
  if (bytes == 0 || bytes % 16) {
    fail(worker, MISUSE, "copy_async (%s:%d): size %u is not a positive multiple of 16 bytes",
         site.file, site.line, bytes);
  }
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
    fail(worker, MISUSE, "copy_async (%s:%d): %s address %p is not aligned to 16 bytes", site.file,
         site.line, reinterpret_cast<uintptr_t>(to) % 16 ? "shared" : "global",
         reinterpret_cast<uintptr_t>(to) % 16 ? to : from);
  }
  auto offset = static_cast<unsigned char*>(to) - block->shared;
  if (offset < 0 || offset + bytes > static_cast<ptrdiff_t>(block->shared_bytes)) {
    fail(worker, MISUSE,
         "copy_async (%s:%d): %u bytes at %p are not inside the block's %zu bytes of "
         "shared memory",
         site.file, site.line, bytes, to, block->shared_bytes);
  }
  if (out_of_bounds(from, bytes)) {
    fail(worker, MISUSE,
         "copy_async (%s:%d): AddressSanitizer: %u bytes at %p leave the source "
         "buffer",
         site.file, site.line, bytes, from);
  }
  mbarrier_arrive(bar, bytes, "copy_async", site);
  worker->copies.add({to, from, bytes, bar, block, {}});
#if HOST_TSAN
  char order;  // what this thread did so far happens before the copy
  sync_release(&order);
  worker->copies.queue[worker->copies.pending - 1].engine.enter();
  sync_acquire(&order);
  self->sanitizer.enter();
#endif
}

}  // namespace host
