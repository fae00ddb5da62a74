// Start a kernel on a grid, watch the clock, and end with a code and a text.
//
// A launch always ends: when all threads have exited, when a worker finds a deadlock, a divergence,
// a fault or a misuse, or when its time is up. In the last cases the fibers are dropped where they
// stand. A thread that never reaches a scheduling point is pulled out of its loop by a signal; if
// even that fails, its memory is left to it and the launch returns anyway.
#pragma once

#include <cfenv>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "report.h"
#include "signals.h"
#include "worker.h"

namespace host {

struct Options {
  int workers = 0;  // OS threads; 0: one per core. Never more than blocks.
  uint64_t seed = 0;
  double timeout_s = 60;
  size_t stack_bytes = DEFAULT_STACK_BYTES;
};

// Shared by the launching thread and the workers, and outlives whichever is last.
struct LaunchState {
  Shape shape;
  Options options;
  void (*entry)(void*) = nullptr;
  std::shared_ptr<void> arguments;
  int n_workers = 0;
  StopFlag stop;
  Doorbell doorbell;
  std::mutex mutex;
  std::condition_variable done;
  int running = 0;  // workers; guarded by mutex, like the next ones
  int code = OK;
  std::string cause;
  std::map<int, std::string> unfinished;  // block number -> who waits where
  std::vector<pthread_t> threads;
  std::vector<char> ended;
};

inline void run_blocks(LaunchState& state, int number) {
  auto worker = std::make_unique<Worker>();
  Stacks stacks(blocks_of(state.shape, number, state.n_workers) * state.shape.threads(),
                state.options.stack_bytes);
  worker->random = Random(state.options.seed * 1000003 + uint64_t(number));
  worker->shuffle = state.options.seed != 0;
  worker->stop = &state.stop;
  worker->doorbell = &state.doorbell;
  worker->entry = state.entry;
  worker->arguments = state.arguments.get();
  build(*worker, state.shape, number, state.n_workers, stacks);
  run_fibers(*worker);
  {
    std::lock_guard lock(state.mutex);
    if (worker->code != OK && state.code == OK) {
      state.code = worker->code;
      state.cause = worker->message;
    }
    for (int i = 0; i < worker->n_blocks; i++) {
      if (worker->blocks[i].live == 0) continue;
      state.unfinished[number + i * state.n_workers] = describe(worker->blocks[i]);
    }
  }
  tear_down(*worker);
}

// An OS thread of the launch.
inline void run_worker(std::shared_ptr<LaunchState> state, int number) {
  std::fesetenv(
      FE_DFL_ENV);  // denormals kept, round to nearest: a new thread inherits its parent's
  try {
    AlternateStack for_handlers;
    run_blocks(*state, number);
  } catch (const std::bad_alloc&) {
    std::lock_guard lock(state->mutex);
    state->code = BAD_LAUNCH;
    state->cause = "not enough memory for the stacks and shared memory of the launch";
    state->stop.set();
  }
  std::lock_guard lock(state->mutex);
  state->ended[number] = 1;
  --state->running;
  state->done.notify_all();
}

inline void interrupt_workers(LaunchState& state) {
  with_interrupt_handler([&] {
    std::unique_lock lock(state.mutex);
    for (int i = 0; i < state.n_workers; i++) {
      if (!state.ended[i]) pthread_kill(state.threads[i], SIGURG);
    }
    state.done.wait_for(lock, std::chrono::seconds(2), [&] { return state.running == 0; });
  });
}

// The cause, then who waits where in the first few unfinished blocks.
inline std::string report_of(const LaunchState& state) {
  constexpr int SHOWN = 8;
  std::string text = state.cause + "\n";
  int shown = 0;
  for (const auto& [number, description] : state.unfinished) {
    if (shown++ < SHOWN) text += description;
  }
  if (shown > SHOWN) text += format("... and %d more unfinished blocks\n", shown - SHOWN);
  for (int i = 0; i < state.n_workers; i++) {
    if (!state.ended[i]) text += "an OS thread did not come back; it is left running\n";
  }
  return text;
}

// Wait for the workers; when time is up or one of them has given up, make the others stop.
inline void await_end(LaunchState& state) {
  std::unique_lock lock(state.mutex);
  auto all_done = [&] { return state.running == 0; };
  double seconds = std::min(state.options.timeout_s, 1e9);
  auto limit =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
  state.done.wait_until(lock, limit, [&] { return all_done() || state.stop.is_set(); });
  if (all_done()) return;
  if (!state.stop.is_set()) {
    state.code = TIMEOUT;
    state.cause = format("timeout: the kernel still ran after %g s", seconds);
    state.stop.set();
  }
  state.doorbell.ring();
  if (state.done.wait_for(lock, std::chrono::seconds(1), all_done)) return;
  lock.unlock();
  interrupt_workers(state);
}

// Run `entry(arguments)` in every thread of the grid. Returns a Code and sets `report` if it is not
// OK.
inline int launch(const Shape& shape, const Options& options, void (*entry)(void*),
                  std::shared_ptr<void> arguments, std::string& report) {
  unsigned long long threads = shape.threads(), n_blocks = shape.n_blocks();
  if (threads < 1 || threads > 1024 || n_blocks < 1 || n_blocks > 65535) {
    report = format("a launch has 1..65535 blocks of 1..1024 threads, not %llu of %llu", n_blocks,
                    threads);
    return BAD_LAUNCH;
  }
  auto state = std::make_shared<LaunchState>();
  state->shape = shape;
  state->options = options;
  state->entry = entry;
  state->arguments = std::move(arguments);
  int workers = options.workers > 0 ? options.workers : cores();
  state->n_workers = state->running = int(std::min<uint64_t>(uint64_t(workers), n_blocks));
  state->ended.resize(size_t(state->n_workers));
  FaultGuard guard;
  std::vector<std::thread> pool;
  {
    std::lock_guard lock(state->mutex);
    for (int i = 0; i < state->n_workers; i++) {
      pool.emplace_back(run_worker, state, i);
      state->threads.push_back(pool.back().native_handle());
    }
  }
  await_end(*state);
  std::unique_lock lock(state->mutex);
  int code = state->code;
  if (code != OK) report = report_of(*state);
  std::vector<char> ended = state->ended;
  lock.unlock();
  for (int i = 0; i < int(pool.size()); i++) ended[i] ? pool[i].join() : pool[i].detach();
  return code;
}

// A kernel with its arguments as an array of pointers to values, as cuLaunchKernel takes them.
template <class... P>
int launch_kernel(void (*kernel)(P...), const Shape& shape, const Options& options, void** values,
                  std::string& report) {
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
  return launch(shape, options, entry, call, report);
}

}  // namespace host
