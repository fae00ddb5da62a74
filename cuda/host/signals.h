// Faults and endless loops inside a kernel end the launch, not the process.
//
// While a launch runs, SIGSEGV and SIGBUS have a handler of ours: if the thread that faulted runs a
// kernel, the launch ends with a message; any other fault goes to whoever handled it before. SIGURG
// pulls a thread out of a loop that meets no scheduling point. Sanitizers have handlers of their
// own and keep them.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <mutex>
#include <vector>

#include "scheduler.h"

namespace host {

// A stack for the handler: the fiber's own may be what is exhausted.
class AlternateStack {
 public:
  AlternateStack() : memory_(64 * 1024) {
    stack_t stack{};
    stack.ss_sp = memory_.data();
    stack.ss_size = memory_.size();
    if (!HOST_SANITIZED) sigaltstack(&stack, nullptr);
  }
  ~AlternateStack() {
    stack_t off{};
    off.ss_flags = SS_DISABLE;
    if (!HOST_SANITIZED) sigaltstack(&off, nullptr);
  }
  AlternateStack(const AlternateStack&) = delete;
  AlternateStack& operator=(const AlternateStack&) = delete;

 private:
  std::vector<char> memory_;
};

// Whether this OS thread executes a CUDA thread now.
inline bool in_kernel() {
  return current && current->block;
}

struct FaultHandlers {
  std::mutex mutex;
  int launches = 0;
  struct sigaction segv{}, bus{};  // what was there before
};
inline FaultHandlers fault_handlers;

inline void on_fault(int signal, siginfo_t* info, void*) {
  if (!in_kernel()) {
    // Not ours: put the old handler back and let the instruction fault again.
    sigaction(signal, signal == SIGBUS ? &fault_handlers.bus : &fault_handlers.segv, nullptr);
    return;
  }
  Fiber* self = current;
  char* address = static_cast<char*>(info->si_addr);
  if (address < self->stack && self->stack - address <= 65536) {
    fail(worker_of(self), MISUSE,
         "thread %u of block %u needs more than its %zu bytes of stack (set stack_bytes)",
         thread_number(self), self->block->index.x,
         static_cast<size_t>(self->stack_top - self->stack));
  }
  fail(worker_of(self), MISUSE, "thread %u of block %u accessed memory that is not there: %p",
       thread_number(self), self->block->index.x, static_cast<void*>(address));
}

// Handlers are there as long as at least one of these exists.
class FaultGuard {
 public:
  FaultGuard() {
    std::lock_guard lock(fault_handlers.mutex);
    if (HOST_SANITIZED || fault_handlers.launches++ > 0) return;
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &fault_handlers.segv);
    sigaction(SIGBUS, &action, &fault_handlers.bus);
  }
  ~FaultGuard() {
    std::lock_guard lock(fault_handlers.mutex);
    if (HOST_SANITIZED || --fault_handlers.launches > 0) return;
    sigaction(SIGSEGV, &fault_handlers.segv, nullptr);
    sigaction(SIGBUS, &fault_handlers.bus, nullptr);
  }
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;
};

// The launch is over, but this thread has not noticed for a long time.
HOST_RUNTIME inline void on_interrupt(int) {
  if (!in_kernel()) return;
  Fiber* self = current;
  Worker* worker = worker_of(self);
  if (!worker->stop->is_set()) return;
  self->in_loop = true;
  resume(self, &worker->self);
}

// Call `interrupt` with the handler in place. SIGURG, because nobody misses one: it is ignored by
// default.
template <class Interrupt>
void with_interrupt_handler(Interrupt interrupt) {
  static std::mutex one_at_a_time;
  std::lock_guard turn(one_at_a_time);
  struct sigaction action{}, before{};
  action.sa_handler = on_interrupt;
  sigaction(SIGURG, &action, &before);
  interrupt();
  sigaction(SIGURG, &before, nullptr);
}

}  // namespace host
