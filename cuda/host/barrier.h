// __syncthreads and named barriers (bar.sync).
//
// A thread that exits stops being expected by __syncthreads, as on the GPU. But the GPU's barriers
// are met by whole warps: a barrier that some lanes of a warp never reach, because they exited or
// went another way, is undefined there and an error here, whatever the schedule.
#pragma once

#include "scheduler.h"

namespace host {

HOST_RUNTIME inline void open_barrier(Block* block, int id) {
  Barrier& bar = block->barriers[id];
  bar.arrived = 0;
  bar.turn++;
  block->worker->progress++;
  for (int i = 0; i < block->n_warps; i++) {
    Warp* w = &block->warps[i];
    if (w->at_barrier && w->barrier == id) {
      uint32_t lanes = w->at_barrier;
      w->at_barrier = 0;
      wake(w, lanes);
    }
  }
}

// What is wrong with this thread's arrival, if anything; ends the launch.
HOST_RUNTIME __attribute__((noinline)) inline void check_arrival(Fiber* self, int id,
                                                                 unsigned expected, Site site) {
  Warp* w = self->warp;
  Block* block = self->block;
  Barrier& bar = block->barriers[id];
  Worker* worker = block->worker;
  unsigned me = thread_number(self);
  if (w->at_barrier && (w->barrier != id || w->barrier_site.line != site.line)) {
    fail(worker, DIVERGENCE,
         "divergence: lanes %08x of warp %u wait at barrier %d (%s:%d), thread %u of the same warp "
         "at barrier %d (%s:%d)",
         w->at_barrier, me / WARP_SIZE, w->barrier, w->barrier_site.file, w->barrier_site.line, me,
         id, site.file, site.line);
  }
  if (w->exited) {
    fail(
        worker, DIVERGENCE,
        "divergence: thread %u waits at barrier %d (%s:%d), but lanes %08x of its warp have exited",
        me, id, site.file, site.line, w->exited);
  }
  if (bar.arrived && bar.expected != expected) {
    fail(worker, DIVERGENCE,
         "divergence: barrier %d expects %u threads at %s:%d and %u threads at %s:%d", id,
         bar.expected, bar.site.file, bar.site.line, expected, site.file, site.line);
  }
  if (bar.arrived && id == 0 && bar.site.line != site.line) {
    fail(worker, DIVERGENCE,
         "divergence: %u threads of block %u wait in __syncthreads at %s:%d, thread %u at %s:%d",
         bar.arrived, block->index.x, bar.site.file, bar.site.line, me, site.file, site.line);
  }
}

// Wait until `expected` threads (0: all that have not exited) are at barrier `id`.
HOST_RUNTIME __attribute__((noinline)) inline void barrier_wait(int id, unsigned expected,
                                                                Site site) {
  Fiber* self = current;
  Warp* w = self->warp;
  Block* block = self->block;
  Barrier& bar = block->barriers[id];
  bool first = bar.arrived == 0;
  bool strange = w->exited |
                 (w->at_barrier && (w->barrier != id || w->barrier_site.line != site.line)) |
                 (!first && (bar.expected != expected || (id == 0 && bar.site.line != site.line)));
  if (strange) [[unlikely]]
    check_arrival(self, id, expected, site);
  if (first) {
    bar.expected = expected;
    bar.site = site;
  }
  if (w->at_barrier == 0) {
    w->barrier = id;
    w->barrier_site = site;
  }
  const char* sync = &bar.sync[bar.turn & 1];
  sync_release(sync);
  w->at_barrier |= bit_of(self);
  uint32_t ready = w->ready &= ~bit_of(self);
  if (++bar.arrived == (expected ? expected : block->live)) {
    open_barrier(block, id);
    if (w->shuffle) yield_warp(self);
  } else {
    suspend(self, w, ready);
  }
  sync_acquire(sync);
}

// The end of a thread: it no longer counts, which may open a barrier for the others.
HOST_RUNTIME inline void leave_block(Fiber* self) {
  Warp* w = self->warp;
  Block* block = self->block;
  Worker* worker = block->worker;
  if (w->at_barrier) {
    fail(worker, DIVERGENCE,
         "divergence: thread %u exits while lanes %08x of its warp wait at barrier %d (%s:%d)",
         thread_number(self), w->at_barrier, w->barrier, w->barrier_site.file,
         w->barrier_site.line);
  }
  if (w->arrived) {
    fail(worker, DIVERGENCE,
         "divergence: thread %u exits while lanes %08x of its warp wait in %s (%s:%d)",
         thread_number(self), w->arrived, name_of(w->kind), w->collective_site.file,
         w->collective_site.line);
  }
  if (w->exited && w->fibers[std::countr_zero(w->exited)].copies_issued != self->copies_issued) {
    fail(worker, DIVERGENCE,
         "divergence: lane %d called copy_async %u times and lane %d of the same warp %u times",
         std::countr_zero(w->exited), w->fibers[std::countr_zero(w->exited)].copies_issued,
         self->lane, self->copies_issued);
  }
  w->ready &= ~bit_of(self);
  w->exited |= bit_of(self);
  block->live--;
  worker->live--;
  Barrier& bar = block->barriers[0];
  if (bar.arrived && bar.arrived == block->live) open_barrier(block, 0);
}

}  // namespace host
