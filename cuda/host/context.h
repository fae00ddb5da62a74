// Leave one stack and continue on another: the only machine-dependent part of the emulator.
//
// x86-64 and arm64 switch with a few instructions, written as inline assembly that tells the
// compiler "every register is gone" instead of saving them all: what is live is spilled, nothing
// else. It jumps instead of returning, because a return to another stack is mispredicted every time
// (about 5 ns). Every other machine uses ucontext; -DHOST_UCONTEXT selects it anywhere, so that it
// can be tested.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "sanitize.h"

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(HOST_UCONTEXT)
#define HOST_UCONTEXT 1
#endif
#ifdef HOST_UCONTEXT
#include <ucontext.h>
#endif

namespace host {

#ifdef HOST_UCONTEXT

struct Context {
  ucontext_t saved;
};

HOST_RUNTIME inline void prepare(Context& c, char* stack, char* top, void (*entry)()) {
  if (getcontext(&c.saved) != 0) std::abort();
  c.saved.uc_stack.ss_sp = stack;
  c.saved.uc_stack.ss_size = static_cast<size_t>(top - stack);
  c.saved.uc_link = nullptr;
  makecontext(&c.saved, entry, 0);
}

HOST_RUNTIME inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
  swapcontext(&from.saved, &to.saved);
}

#else

struct Context {
  void* stack_pointer = nullptr;
  void* frame_pointer = nullptr;  // kept by hand: the compiler refuses it in a clobber list
  void* resume_at = nullptr;
};

// The first switch to `c` enters `entry` with the stack alignment that a call would leave.
HOST_RUNTIME inline void prepare(Context& c, char* /*stack*/, char* top, void (*entry)()) {
  uintptr_t sp = reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15};
#if defined(__x86_64__)
  sp -= 8;  // the return address that a call would have pushed
  *reinterpret_cast<void**>(sp) = nullptr;
#endif
  c = {reinterpret_cast<void*>(sp), nullptr, reinterpret_cast<void*>(entry)};
}

HOST_RUNTIME inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
  Context* old_context = &from;
  Context* new_context = &to;
#if defined(__x86_64__)
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, 0(%%rdi)\n\t"
      "movq %%rbp, 8(%%rdi)\n\t"
      "movq %%rax, 16(%%rdi)\n\t"
      "movq 0(%%rsi), %%rsp\n\t"
      "movq 8(%%rsi), %%rbp\n\t"
      "jmpq *16(%%rsi)\n"
      "1:\n\t"
      : "+D"(old_context), "+S"(new_context)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15",
#ifdef __AVX512F__
        "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",
        "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6",
        "k7",
#endif
        "memory", "cc");
#else
  register Context* x0 asm("x0") = old_context;
  register Context* x1 asm("x1") = new_context;
  // x16 is the register through which a jump may enter a function or pass "bti j" (hint 36) when
  // branch targets are enforced. On some systems x18 belongs to the platform and nobody changes it.
  asm volatile(
      "adr x16, 1f\n\t"
      "mov x17, sp\n\t"
      "stp x17, x29, [x0]\n\t"
      "str x16, [x0, #16]\n\t"
      "ldp x17, x29, [x1]\n\t"
      "ldr x16, [x1, #16]\n\t"
      "mov sp, x17\n\t"
      "br x16\n"
      "1:\n\t"
      "hint #36\n\t"
      : "+r"(x0), "+r"(x1)
      :
      : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
        "x16", "x17",
#if !defined(__APPLE__) && !defined(__ANDROID__)
        "x18",
#endif
        "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v0", "v1",
        "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",
        "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28",
        "v29", "v30", "v31", "memory", "cc");
#endif
}

#endif  // HOST_UCONTEXT

}  // namespace host
