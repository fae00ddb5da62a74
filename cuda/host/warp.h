// Warp collectives: all lanes of the warp meet, the last one to arrive does the common work.
//
// Full warps only: the mask is not looked at, and a lane that exited is an error. As in CUDA, only
// __syncwarp orders memory; shuffles, ballots and mma just exchange registers.
#pragma once

#include <cstring>

#include "scheduler.h"

namespace host {

[[noreturn]] HOST_RUNTIME __attribute__((noinline)) inline void diverged(Fiber* self,
                                                                         Collective kind,
                                                                         Site site) {
  Warp* w = self->warp;
  unsigned warp = thread_number(self) / WARP_SIZE;
  if (w->exited) {
    fail(worker_of(self), DIVERGENCE,
         "divergence: lane %d of warp %u, block %u is in %s (%s:%d), but lanes %08x have exited",
         self->lane, warp, self->block->index.x, name_of(kind), site.file, site.line, w->exited);
  }
  fail(worker_of(self), DIVERGENCE,
       "divergence: lanes %08x of warp %u, block %u wait in %s (%s:%d), lane %d is in %s (%s:%d)",
       w->arrived, warp, self->block->index.x, name_of(w->kind), w->collective_site.file,
       w->collective_site.line, self->lane, name_of(kind), site.file, site.line);
}

// Wait for the other lanes. `last` runs once, in the lane that arrives last, before any lane goes
// on.
template <class Last>
HOST_RUNTIME inline __attribute__((always_inline)) void meet(Fiber* self, Warp* w, Collective kind,
                                                             Site site, Last last) {
  uint32_t before = w->arrived, bit = bit_of(self);
  if (before == 0) {
    w->kind = kind;
    w->collective_site = site;
    if (w->exited) [[unlikely]]
      diverged(self, kind, site);
  } else if (w->kind != kind || w->collective_site.line != site.line) [[unlikely]] {
    diverged(self, kind, site);
  }
  w->arrived = before | bit;
  uint32_t ready = w->ready &= ~bit;
  if ((before | bit) != w->members) {
    suspend(self, w, ready);
    return;
  }
  last();
  w->arrived = 0;
  w->ready |= w->members;
  w->turn++;
  w->now = &w->exchange[w->turn & 1];
  w->block->worker->progress++;
  // A warp that only ever meets itself must not keep the others from running.
  if ((w->turn & 255) == 0 || w->shuffle) [[unlikely]]
    yield_warp(self);
}

HOST_RUNTIME __attribute__((noinline)) inline void sync_warp(Site site) {
  Fiber* self = current;
  Warp* w = self->warp;
  const char* sync = &w->sync[w->turn & 1];
  sync_release(sync);
  meet(self, w, Collective::SyncWarp, site, [] {});
  sync_acquire(sync);
}

HOST_RUNTIME __attribute__((noinline)) inline uint64_t shuffle(uint64_t value, int source,
                                                               Site site) {
  Fiber* self = current;
  Exchange& x = *self->warp->now;
  x.value[self->lane] = value;
  meet(self, self->warp, Collective::Shuffle, site, [] {});
  return x.value[source & (WARP_SIZE - 1)];
}

HOST_RUNTIME __attribute__((noinline)) inline uint32_t ballot(bool predicate, Site site) {
  Fiber* self = current;
  Warp* w = self->warp;
  Exchange& x = *w->now;
  if (w->arrived == 0) x.ballot = 0;
  if (predicate) x.ballot |= bit_of(self);
  meet(self, w, Collective::Ballot, site, [] {});
  return x.ballot;
}

// `better` picks one of two values; every lane gets the best of all.
template <class Better>
HOST_RUNTIME __attribute__((noinline)) inline uint64_t reduce(uint64_t value, Better better,
                                                              Site site) {
  Fiber* self = current;
  Exchange& x = *self->warp->now;
  x.value[self->lane] = value;
  meet(self, self->warp, Collective::Shuffle, site, [] {});
  uint64_t best = x.value[0];
  for (int lane = 1; lane < WARP_SIZE; lane++) best = better(best, x.value[lane]);
  return best;
}

// A register of 4 or 8 bytes as it travels.
template <class T>
inline T shuffle_value(T value, int source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = shuffle(bits, source, site);
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace host
