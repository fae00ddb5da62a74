// Start a kernel on a grid, watch the clock, and end with a code and a text.
//
// Blocks are dealt to the workers in turn. A launch always ends: when all threads have exited, when a
// worker finds a deadlock, a divergence or a misuse, or when its time is up. In the last cases the
// fibers are dropped where they stand. A thread that never reaches a scheduling point is pulled out of
// its loop by a signal; if even that fails, its memory is left to it and the launch returns anyway.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cfenv>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "barrier.h"
#include "report.h"
#include "stacks.h"

namespace host {

struct Options {
  int workers = 0;  // OS threads; 0: one per core. Never more than blocks.
  uint64_t seed = 0;
  double timeout_s = 60;
  size_t stack_bytes = DEFAULT_STACK_BYTES;
};

// Shared by the launching thread and the workers, and outlives whichever is last.
struct LaunchState {
  dim3 grid, block;
  size_t shared_bytes = 0;
  Options options;
  void (*entry)(void*) = nullptr;
  std::shared_ptr<void> arguments;
  int n_workers = 0;
  StopFlag stop;
  std::mutex mutex;
  std::condition_variable done;
  int running = 0;  // workers; guarded by mutex, like the next ones
  int code = OK;
  std::string cause, details;
  int unfinished = 0;
  std::vector<pthread_t> threads;
  std::vector<char> ended;
};

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

// The blocks of one worker with all their threads ready to start.
inline void build(Worker& worker, const LaunchState& state, int number, Stacks& stacks) {
  unsigned threads = state.block.x * state.block.y * state.block.z;
  unsigned n_blocks = state.grid.x * state.grid.y * state.grid.z;
  int warps_per_block = int(threads + WARP_SIZE - 1) / WARP_SIZE;
  worker.n_blocks = int((n_blocks - number + state.n_workers - 1) / state.n_workers);
  worker.n_warps = worker.n_blocks * warps_per_block;
  worker.tsan_per_warp = n_blocks * threads > TSAN_THREADS;
  worker.blocks = new Block[worker.n_blocks];
  worker.warps = new Warp[worker.n_warps];
  worker.fibers = new Fiber[size_t(worker.n_warps) * WARP_SIZE];
  for (WarpSet* set : {&worker.ready, &worker.waiting}) {
    set->n_words = (worker.n_warps + 63) / 64;
    set->words = new uint64_t[set->n_words]();
  }
  size_t n_fibers = 0;
  for (int i = 0; i < worker.n_blocks; i++) {
    Block& b = worker.blocks[i];
    unsigned index = number + unsigned(i) * state.n_workers;
    b.index = {index % state.grid.x, index / state.grid.x % state.grid.y,
               index / (state.grid.x * state.grid.y)};
    b.dim = state.block;
    b.grid = state.grid;
    b.live = threads;
    b.n_warps = warps_per_block;
    b.warps = &worker.warps[i * warps_per_block];
    b.worker = &worker;
    b.shared_bytes = state.shared_bytes;
    b.shared = allocate_shared(state.shared_bytes);
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
      f.thread = {t % state.block.x, t / state.block.x % state.block.y,
                  t / (state.block.x * state.block.y)};
      f.stack = stacks.bottom(n_fibers);
      f.stack_top = stacks.top(n_fibers++);
      prepare(f.context, f.stack, f.stack_top, fiber_main);
    }
  }
  // Last: what is written above happens before everything that these threads do.
  for (int i = 0; i < worker.n_warps * WARP_SIZE; i++) {
    Fiber& f = worker.fibers[i];
    if (!f.warp) continue;  // a last warp may be partial
    if (f.lane == 0 || !worker.tsan_per_warp) {
      f.sanitizer.create();
    } else {
      f.sanitizer = f.warp->fibers[0].sanitizer;
    }
  }
  for (int i = 0; i < worker.n_warps; i++) wake(&worker.warps[i], worker.warps[i].members);
  worker.live = threads * unsigned(worker.n_blocks);
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

inline void run_worker(std::shared_ptr<LaunchState> state, int number) {
  std::fesetenv(FE_DFL_ENV);  // denormals kept, round to nearest: a new thread inherits its parent's
  auto worker = std::make_unique<Worker>();
  unsigned threads = state->block.x * state->block.y * state->block.z;
  unsigned n_blocks = state->grid.x * state->grid.y * state->grid.z;
  size_t mine = (n_blocks - unsigned(number) + unsigned(state->n_workers) - 1) / state->n_workers;
  Stacks stacks(mine * threads, state->options.stack_bytes);
  worker->random = Random(state->options.seed * 1000003 + uint64_t(number));
  worker->shuffle = state->options.seed != 0;
  worker->stop = &state->stop;
  worker->entry = state->entry;
  worker->arguments = state->arguments.get();
  build(*worker, *state, number, stacks);
  run_fibers(*worker);
  {
    std::lock_guard lock(state->mutex);
    if (worker->code != OK && state->code == OK) {
      state->code = worker->code;
      state->cause = worker->message;
    }
    for (int i = 0; i < worker->n_blocks; i++) {
      if (worker->blocks[i].live == 0) continue;
      if (state->unfinished++ < 8) state->details += describe(worker->blocks[i]);
    }
  }
  tear_down(*worker);
  worker.reset();
  std::lock_guard lock(state->mutex);
  state->ended[number] = 1;
  if (--state->running == 0) state->done.notify_all();
}

// Pull a thread that does not come to a scheduling point out of the kernel.
HOST_RUNTIME inline void leave_kernel(int) {
  Fiber* self = current;
  if (!self || !self->block) return;
  Worker* worker = worker_of(self);
  self->waiting.site = {"a loop without a scheduling point", 1};
  if (worker->stop->is_set()) resume(self, &worker->self);
}

inline void interrupt_workers(LaunchState& state) {
  struct sigaction action {}, before {};
  action.sa_handler = leave_kernel;
  sigaction(SIGURG, &action, &before);
  std::unique_lock lock(state.mutex);
  for (int i = 0; i < state.n_workers; i++) {
    if (!state.ended[i]) pthread_kill(state.threads[i], SIGURG);
  }
  state.done.wait_for(lock, std::chrono::seconds(2), [&] { return state.running == 0; });
  lock.unlock();
  sigaction(SIGURG, &before, nullptr);
}

// Run `entry(arguments)` in every thread of the grid. Returns a Code and sets `report` if it is not OK.
inline int launch(dim3 grid, dim3 block, size_t shared_bytes, const Options& options,
                  void (*entry)(void*), std::shared_ptr<void> arguments, std::string& report) {
  uint64_t threads = uint64_t{block.x} * block.y * block.z;
  uint64_t n_blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (threads < 1 || threads > 1024 || n_blocks < 1 || n_blocks > 65535) {
    report = format("launch of %llu blocks of %llu threads: 1..65535 blocks of 1..1024 threads",
                    static_cast<unsigned long long>(n_blocks),
                    static_cast<unsigned long long>(threads));
    return BAD_LAUNCH;
  }
  auto state = std::make_shared<LaunchState>();
  state->grid = grid;
  state->block = block;
  state->shared_bytes = shared_bytes;
  state->options = options;
  state->entry = entry;
  state->arguments = std::move(arguments);
  int workers = options.workers > 0 ? options.workers : cores();
  state->n_workers = state->running = int(std::min<uint64_t>(uint64_t(workers), n_blocks));
  state->ended.resize(size_t(state->n_workers));
  std::vector<std::thread> pool;
  {
    std::lock_guard lock(state->mutex);
    for (int i = 0; i < state->n_workers; i++) {
      pool.emplace_back(run_worker, state, i);
      state->threads.push_back(pool.back().native_handle());
    }
  }
  std::unique_lock lock(state->mutex);
  auto all_done = [&] { return state->running == 0; };
  auto over = [&] { return state->running == 0 || state->stop.is_set(); };
  auto limit = std::chrono::steady_clock::now() +
               std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::duration<double>(options.timeout_s));
  bool in_time = true;
  while (!over() && in_time) {
    in_time = state->done.wait_until(lock, limit) != std::cv_status::timeout;
  }
  if (!all_done()) {
    if (!state->stop.is_set()) {
      state->code = TIMEOUT;
      state->cause = format("timeout: the kernel still ran after %g s", options.timeout_s);
      state->stop.set();
    }
    if (!state->done.wait_for(lock, std::chrono::seconds(1), all_done)) {
      lock.unlock();
      interrupt_workers(*state);
      lock.lock();
    }
  }
  for (int i = 0; i < state->n_workers; i++) {
    if (state->ended[i]) continue;
    state->details += "an OS thread did not come back and is left running\n";
  }
  int code = state->code;
  if (code != OK) {
    report = state->cause + "\n" + state->details;
    if (state->unfinished > 8) {
      report += format("... and %d more unfinished blocks\n", state->unfinished - 8);
    }
  }
  std::vector<char> ended = state->ended;
  lock.unlock();
  for (int i = 0; i < int(pool.size()); i++) ended[i] ? pool[i].join() : pool[i].detach();
  return code;
}

// A kernel with its arguments as an array of pointers to values, as cuLaunchKernel takes them.
template <class... P>
int launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                  const Options& options, void** values, std::string& report) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<std::remove_cv_t<P>...> arguments;
  };
  auto call = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::make_shared<Call>(
        Call{kernel, {*static_cast<const std::remove_cv_t<P>*>(values[I])...}});
  }(std::index_sequence_for<P...>{});
  auto entry = +[](void* pointer) {
    Call* c = static_cast<Call*>(pointer);
    std::apply(c->kernel, c->arguments);
  };
  return launch(grid, block, shared_bytes, options, entry, call, report);
}

}  // namespace host
