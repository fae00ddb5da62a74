"""Lesson 03: typical wrong answers of its exercises, and what to say to somebody who gave one."""

from __future__ import annotations

from mkref.lessons.cuda_exercise import Patch

__all__ = ["NORM_TASK", "SIGNALLER"]

NORM_TASK = (
    Patch(
        "  consumers_sync();  // writers above",
        "  __syncthreads();  // writers above",
        "__syncthreads() joins all warps of the block. Waiter and signaller have other work and "
        "never come: which barrier joins the 256 consumers only?",
        more=(("  consumers_sync();  // the next", "  __syncthreads();  // the next"),),
    ),
    Patch(
        "const float* x = p.x + (long long)task.row",
        "const float* x = p.x + (long long)blockIdx.x",
        "in an ordinary kernel the block's number is the row. A persistent block does one row "
        "after another: the record says which.",
        more=(
            (
                "uint16_t* y = p.y + (long long)task.row",
                "uint16_t* y = p.y + (long long)blockIdx.x",
            ),
        ),
    ),
    Patch(
        "constexpr int THREADS = CONSUMERS * 32;",
        "const int THREADS = blockDim.x;",
        "blockDim.x counts waiter and signaller, too. CONSUMERS * 32 threads run this function.",
    ),
    Patch(
        "  consumers_sync();  // the next task may write `squares` again\n",
        "",
        "a warp that is done goes on to the next task and overwrites s.squares while a slower warp "
        "still adds them up. What must all consumers have done before anybody leaves?",
    ),
    Patch(
        "  consumers_sync();  // writers above, readers below\n",
        "",
        "every warp reads the sums of the other warps: somebody must have written them.",
    ),
    Patch(
        "for (int w = 1; w < CONSUMERS; w++)",
        "for (int w = 1; w < N_WARPS; w++)",
        "eight warps have sums. N_WARPS counts waiter and signaller, too.",
    ),
    Patch(
        "  for (int first = 4 * thread; first < p.hidden; first += 4 * THREADS)\n"
        "    for (int i = first; i < first + 4 && i < p.hidden; i++)\n"
        "      squares",
        "  for (int i = thread; i < p.hidden; i += THREADS)\n      squares",
        "the sum is right but for its last bits. Which squares does a thread of the ordinary "
        "kernel add: every 256th, or four neighbours and then the next four 1,024 further on?",
    ),
    Patch(
        "  float total = s.squares[0];\n  for (int w = 1; w < CONSUMERS; w++) total",
        "  float total = s.squares[CONSUMERS - 1];\n"
        "  for (int w = CONSUMERS - 2; w >= 0; w--) total",
        "the sum is right but for its last bits. In which order does the ordinary kernel add the "
        "sums of its warps?",
    ),
    Patch(
        "(x[i] * r) * bf16_to_float(p.gamma[i])",
        "x[i] * (r * bf16_to_float(p.gamma[i]))",
        "x times r comes first, then gamma: a product of floats is rounded, so the order shows.",
    ),
    Patch(
        "total / (float)p.hidden + p.eps",
        "total / (float)p.hidden",
        "what keeps the root away from 0? `p.eps` is added to the mean of the squares.",
    ),
    Patch(
        "bf16_to_float(p.gamma[i])",
        "p.gamma[i]",
        "gamma holds bfloat16 as 16-bit words. An integer is what you multiply with; "
        "bf16_to_float makes the number of it.",
    ),
    Patch(
        "  float total = s.squares[0];\n"
        "  for (int w = 1; w < CONSUMERS; w++) total = total + s.squares[w];\n",
        "  if (thread == 0)\n"
        "    for (int w = 1; w < CONSUMERS; w++) s.squares[0] = s.squares[0] + s.squares[w];\n"
        "  const float total = s.squares[0];\n",
        "one thread adds the sums, and the others read the total at once. Either join them once "
        "more in between, or let every thread add for itself.",
    ),
    Patch(
        "i < first + 4 && i < p.hidden; i++",
        "i < first + 4; i++",
        "loads of four values (`float4`, or four in a loop) go beyond the end of a row whose width "
        "is no multiple of 4. The last values need a look at `p.hidden`.",
    ),
    Patch(
        "first < p.hidden; first += 4 * THREADS)",
        "first + 3 < p.hidden; first += 4 * THREADS)",
        "the last values of a row are left out where its width is no multiple of 4: p.hidden / 4 "
        "whole `float4` are not all of it.",
    ),
)

_READ = "    const int signal = s.tasks[at.slot].signal;\n"
_DONE = "    wait_barrier(&s.done[at.slot], at.phase);  // eight warps have stored their outputs\n"
_TELL = "    if (threadIdx.x % 32 == 0 && signal >= 0)\n"
_FREE = "    warp_arrive(&s.free[at.slot]);\n"
SIGNALLER = (
    Patch(
        _DONE,
        "",
        "the signal says that the outputs are there. Which barrier do the consumers arrive at when "
        "they have stored them?",
    ),
    Patch(
        "threadIdx.x % 32 == 0 && signal >= 0",
        "signal >= 0",
        "all 32 lanes arrive at the counter. A task is one arrival.",
    ),
    Patch(
        _FREE,
        "",
        "the waiter waits for the place of the record (`free`), and nobody gives it back.",
    ),
    Patch(
        "threadIdx.x % 32 == 0 && signal >= 0",
        "threadIdx.x % 32 == 0",
        "some tasks have nobody to tell: their signal is -1, and counters[-1] belongs to others.",
    ),
    Patch(
        "    wait_barrier(&s.ready[at.slot], at.phase);  // the record is here\n",
        "",
        "the record is read before it is there: at first the place holds whatever was in memory.",
    ),
    Patch(
        "threadIdx.x % 32 == 0 && signal >= 0",
        "threadIdx.x == 0 && signal >= 0",
        "thread 0 is a consumer. The first lane of this warp has threadIdx.x % 32 == 0.",
    ),
    Patch(
        _DONE,
        "",
        "the arrival comes before `done`: whoever sees it reads outputs that are not stored yet. "
        "First wait for `done`, then arrive.",
        more=((_FREE, _DONE + _FREE),),
    ),
    Patch(
        _DONE,
        "    warp_arrive(&s.free[at.slot]);  // too early\n" + _DONE,
        "the place is given back before `done`: a slow consumer may still have to read the record "
        "that the waiter now overwrites.",
        more=((f"signal, 1);\n{_FREE}", "signal, 1);\n"),),
    ),
    Patch(
        _READ,
        "",
        "`signal` is read after `free`, when the waiter may have written the next record there. "
        "Read it between `ready` and `free`.",
        more=((_FREE, ""), (_TELL, _FREE + _READ + _TELL)),
    ),
    Patch(
        "wait_barrier(&s.ready[at.slot], at.phase)",
        "wait_barrier(&s.ready[at.slot], at.phase ^ 1)",
        "`at.phase ^ 1` asks for the round before. That is right for who waits until a place is "
        "free, as the waiter does; who waits for a record asks for this round, `at.phase`.",
    ),
    Patch(
        "ptx::red_release_add(",
        "atomicAdd(",
        "atomicAdd counts, and orders nothing: another SM may see the counter before the outputs. "
        "Which addition is a release?",
    ),
    Patch(
        "ptx::red_release_add(",
        "ptx::red_relaxed_add(",
        "a relaxed addition counts, and orders nothing: another SM may see the counter before the "
        "outputs. Its sister `red_release_add` makes them visible first.",
    ),
    Patch(
        _DONE,
        "    if (signal < 0) continue;\n" + _DONE,
        "a task that signals nobody has a place in the ring, too. Leave out the addition only: "
        "its place must be given back (`free`) like every other, after `done`.",
    ),
    Patch(
        _FREE,
        "    if (threadIdx.x % 32 == 0) warp_arrive(&s.free[at.slot]);\n",
        "`warp_arrive` is called by all 32 lanes: it joins them, then one of them arrives. Only "
        "the addition to the counter is one lane's.",
    ),
)
