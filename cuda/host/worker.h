// What a worker owns: its blocks with all their threads, made at the start and dropped at the end.
#pragma once

#include "barrier.h"
#include "stacks.h"

namespace host {

struct Shape {
  dim3 grid, block;
  size_t shared_bytes = 0;

  uint64_t n_blocks() const { return uint64_t{grid.x} * grid.y * grid.z; }
  uint64_t threads() const { return uint64_t{block.x} * block.y * block.z; }  // of a block
};

// Blocks are dealt in turn: worker `number` owns blocks number, number + n_workers, ...
inline size_t blocks_of(const Shape& shape, int number, int n_workers) {
  return size_t(shape.n_blocks() - uint64_t(number) + uint64_t(n_workers) - 1) / n_workers;
}

// Where every CUDA thread starts and ends.
[[noreturn]] HOST_RUNTIME inline void fiber_main() {
#if HOST_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  Worker* worker = worker_of(current);
  worker->entry(worker->arguments);
  Fiber* self = current;
  sync_release(&worker->finished);
  leave_block(self);
#if HOST_ASAN
  self->fake_stack = nullptr;
#endif
  resume(self, worker->pick());
  __builtin_trap();
}

inline void build_block(Worker& worker, Block& b, const Shape& shape, unsigned index,
                        Stacks& stacks, size_t first_stack) {
  unsigned threads = unsigned(shape.threads());
  b.index = {index % shape.grid.x, index / shape.grid.x % shape.grid.y,
             index / (shape.grid.x * shape.grid.y)};
  b.dim = shape.block;
  b.grid = shape.grid;
  b.live = threads;
  b.worker = &worker;
  b.shared_bytes = shape.shared_bytes;
  b.shared = allocate_shared(shape.shared_bytes);
  for (unsigned t = 0; t < threads; t++) {
    Warp& w = b.warps[t / WARP_SIZE];
    w.block = &b;
    w.shuffle = worker.shuffle;
    w.index = int(&w - worker.warps);
    w.fibers = &worker.fibers[size_t(w.index) * WARP_SIZE];
    w.members |= uint32_t{1} << (t % WARP_SIZE);
    Fiber& f = w.fibers[t % WARP_SIZE];
    f.warp = &w;
    f.block = &b;
    f.lane = int(t % WARP_SIZE);
    f.thread = {t % shape.block.x, t / shape.block.x % shape.block.y,
                t / (shape.block.x * shape.block.y)};
    f.stack = stacks.bottom(first_stack + t);
    f.stack_top = stacks.top(first_stack + t);
    prepare(f.context, f.stack, f.stack_top, fiber_main);
  }
}

// The blocks of worker `number` with all their threads ready to start.
inline void build(Worker& worker, const Shape& shape, int number, int n_workers, Stacks& stacks) {
  int warps_per_block = int(shape.threads() + WARP_SIZE - 1) / WARP_SIZE;
  worker.n_blocks = int(blocks_of(shape, number, n_workers));
  worker.n_warps = worker.n_blocks * warps_per_block;
  worker.tsan_per_warp = shape.n_blocks() * shape.threads() > HOST_TSAN_THREADS;
  worker.blocks = new Block[worker.n_blocks];
  worker.warps = new Warp[worker.n_warps];
  worker.fibers = new Fiber[size_t(worker.n_warps) * WARP_SIZE];
  for (WarpSet* set : {&worker.ready, &worker.waiting}) {
    set->n_words = (worker.n_warps + 63) / 64;
    set->words = new uint64_t[set->n_words]();
  }
  for (int i = 0; i < worker.n_blocks; i++) {
    Block& b = worker.blocks[i];
    b.warps = &worker.warps[i * warps_per_block];
    b.n_warps = warps_per_block;
    build_block(worker, b, shape, unsigned(number + i * n_workers), stacks, i * shape.threads());
  }
  // Last: what is written above happens before everything that these threads do.
  for (int i = 0; i < worker.n_warps * WARP_SIZE; i++) {
    Fiber& f = worker.fibers[i];
    if (!f.warp) continue;  // the last warp of a block may be partial
    if (f.lane == 0 || !worker.tsan_per_warp) {
      f.sanitizer.create();
    } else {
      f.sanitizer = f.warp->fibers[0].sanitizer;
    }
  }
  for (int i = 0; i < worker.n_warps; i++) wake(&worker.warps[i], worker.warps[i].members);
  worker.live = unsigned(shape.threads()) * unsigned(worker.n_blocks);
  worker.at = worker.n_warps - 1;
}

inline void tear_down(Worker& worker) {
  int step = worker.tsan_per_warp ? WARP_SIZE : 1;
  for (int i = 0; i < worker.n_warps * WARP_SIZE; i += step) worker.fibers[i].sanitizer.destroy();
  for (int i = 0; i < worker.n_blocks; i++) free(worker.blocks[i].shared);
  worker.copies.release();
  delete[] worker.ready.words;
  delete[] worker.waiting.words;
  delete[] worker.fibers;
  delete[] worker.warps;
  delete[] worker.blocks;
}

// From the first thread's start to the last one's end, or to the stop of the launch.
HOST_RUNTIME __attribute__((noinline)) inline void run_fibers(Worker& worker) {
  adopt_stack(worker.self);
  current = &worker.self;
  resume(&worker.self, worker.pick());
  sync_acquire(&worker.finished);
  current = nullptr;
}

}  // namespace host
