// 03_tasks.cu - the calling convention in small: a persistent kernel with two kinds of tasks.
//
// What runs.  One block per SM walks its list of tasks, `n_steps` times. Ten warps: eight consumers
//             compute; the waiter fetches records and waits for their inputs; the signaller says
//             when their outputs are there. The same roles as in cuda/megakernel.cu, with what is
//             not needed here left out: loader, helper, ring.
// Tasks.      ADD   x[row] += delta          the residual stream moves on
//             NORM  y[row] = rmsnorm(x[row])  the port of cuda/ops/03_rmsnorm.cu
// Launch.     tasks<<<n_sm, 320, 1024>>>
// Arguments.  y        bf16     [rows, hidden]   out
//             x        float32  [rows, hidden]   in and out
//             gamma    bf16     [hidden]
//             delta    float32  [hidden]
//             list     int32    [n_tasks, 5]     records of `struct Task`, SM after SM
//             offsets  int32    [n_sm + 1]       first record of each SM, and one past the last
//             counters int32    [n]              0 at the start; monotonic
//             hidden, eps, n_steps
//             late     pauses of warps on SM 0 after each arrival and before each task: 0, but for
//                      trials of an answer that may rely on nobody being fast

#ifdef __CUDACC__  // no headers
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

// USE megakernel.cu: section 1
// USE megakernel.cu: bf16_to_float pack_bf16 float_to_bf16

constexpr int CONSUMERS = 8;
enum Warps { WAITER = CONSUMERS, SIGNALLER, N_WARPS };
constexpr int SLOTS = 2;  // records that the waiter may be ahead
constexpr uint64_t PATIENCE_NS = 5000000000ull;
enum Op { ADD, NORM };

// Wait until `counters[wait]` has `count` arrivals of this step, compute, arrive at `signal`.
struct Task {
  int op, row, wait, count, signal;
};

struct Params {
  uint16_t* y;
  float* x;
  const uint16_t* gamma;
  const float* delta;
  const Task* list;
  int* counters;
  int hidden;
  float eps;
  int n_steps, late;
};

struct Shared {
  alignas(8) uint64_t ready[SLOTS];  // waiter -> all: the record is here, its inputs are there
  uint64_t done[SLOTS];              // consumers -> signaller: their outputs are stored
  uint64_t free[SLOTS];              // signaller -> waiter: the record may be overwritten
  Task tasks[SLOTS];
  float squares[CONSUMERS];
  int late;  // pauses of this SM's warps; 0 but in trials
};

// A place in the ring of records, and the parity of its barriers.
struct Position {
  int slot = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      phase ^= 1;
    }
  }
};

__device__ float warp_sum(float v) {
  for (int x = 16; x > 0; x >>= 1) v = v + __shfl_xor_sync(0xffffffffu, v, x);
  return v;
}

// Barrier 1 joins the 256 consumers; waiter and signaller are never held up by it.
__device__ void consumers_sync() {
  ptx::bar_sync(1, CONSUMERS * 32);
}

// Both waits end after five seconds at the latest, with what there is.
__device__ void wait_barrier(uint64_t* bar, uint32_t parity) {
  const uint64_t deadline = ptx::now_ns() + PATIENCE_NS;
  while (!ptx::mbar_try_wait(bar, parity) && ptx::now_ns() < deadline) ptx::pause();
}
__device__ void wait_counter(const int* at, int want) {
  const uint64_t deadline = ptx::now_ns() + PATIENCE_NS;
  while (ptx::ld_acquire(at) < want && ptx::now_ns() < deadline) ptx::pause();
}

// In trials of exercise 03.2 the warps of SM 0 are late; else this is nothing.
__device__ void be_late() {
  const Shared& s = *(const Shared*)ptx::shared_memory();
  for (int i = 0; i < s.late; i++) ptx::pause();
}

// One arrival of a warp whose lanes have all come this far.
__device__ void warp_arrive(uint64_t* bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbar_arrive(bar);
  be_late();
}

__device__ void add_task(const Params& p, const Task& task, int thread) {
  float* x = p.x + (long long)task.row * p.hidden;
  for (int i = thread; i < p.hidden; i += CONSUMERS * 32) x[i] = x[i] + p.delta[i];
}

// BEGIN EXERCISE 03.1
// y[task.row] = rmsnorm(x[task.row]), by the 256 consumers; `thread` is 0 to 255.
__device__ void norm_task(Shared& s, const Params& p, const Task& task, int thread) {
  // BEGIN SOLUTION
  const float* x = p.x + (long long)task.row * p.hidden;
  uint16_t* y = p.y + (long long)task.row * p.hidden;
  constexpr int THREADS = CONSUMERS * 32;

  float squares = 0.0f;
  for (int first = 4 * thread; first < p.hidden; first += 4 * THREADS)
    for (int i = first; i < first + 4 && i < p.hidden; i++)
      squares = squares + x[i] * x[i];
  squares = warp_sum(squares);
  if (thread % 32 == 0) s.squares[thread / 32] = squares;
  consumers_sync();  // writers above, readers below

  float total = s.squares[0];
  for (int w = 1; w < CONSUMERS; w++) total = total + s.squares[w];
  const float r = 1.0f / sqrtf(total / (float)p.hidden + p.eps);
  for (int i = thread; i < p.hidden; i += THREADS)
    y[i] = float_to_bf16((x[i] * r) * bf16_to_float(p.gamma[i]));
  consumers_sync();  // the next task may write `squares` again
  // END SOLUTION
}
// END EXERCISE 03.1

__device__ void consumer(Shared& s, const Params& p, int n_records) {
  Position at;
  for (int i = 0; i < n_records; i++, at.advance()) {
    wait_barrier(&s.ready[at.slot], at.phase);
    be_late();  // does nothing, but in some trials of exercise 03.2
    const Task task = s.tasks[at.slot];
    if (task.op == ADD) add_task(p, task, threadIdx.x);
    if (task.op == NORM) norm_task(s, p, task, threadIdx.x);
    warp_arrive(&s.done[at.slot]);
  }
}

// One warp. It is at most SLOTS records ahead of the signaller.
__device__ void waiter(Shared& s, const Params& p, int begin, int end) {
  Position at;
  for (int step = 0; step < p.n_steps; step++)
    for (int i = begin; i < end; i++, at.advance()) {
      wait_barrier(&s.free[at.slot], at.phase ^ 1);
      if (threadIdx.x % 32 == 0) {
        const Task task = p.list[i];
        s.tasks[at.slot] = task;
        if (task.wait >= 0) wait_counter(p.counters + task.wait, task.count * (step + 1));
      }
      warp_arrive(&s.ready[at.slot]);
    }
}

// BEGIN EXERCISE 03.2
// One warp: for each record, tell other SMs that its outputs are there, and give its
// place back to the waiter.
__device__ void signaller(Shared& s, const Params& p, int n_records) {
  Position at;
  for (int i = 0; i < n_records; i++, at.advance()) {
    // BEGIN SOLUTION
    wait_barrier(&s.ready[at.slot], at.phase);  // the record is here
    const int signal = s.tasks[at.slot].signal;
    wait_barrier(&s.done[at.slot], at.phase);  // eight warps have stored their outputs
    if (threadIdx.x % 32 == 0 && signal >= 0)
      ptx::red_release_add(p.counters + signal, 1);
    warp_arrive(&s.free[at.slot]);
    // END SOLUTION
  }
}
// END EXERCISE 03.2

extern "C" __global__ void tasks(uint16_t* y, float* x, const uint16_t* gamma, const float* delta,
                                 const int* list, const int* offsets, int* counters, int hidden,
                                 float eps, int n_steps, int late) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const Params p{y, x, gamma, delta, (const Task*)list, counters, hidden, eps, n_steps, late};
  if (threadIdx.x == 0) {
    s.late = blockIdx.x == 0 ? p.late : 0;
    for (int i = 0; i < SLOTS; i++) {
      ptx::mbar_init(&s.ready[i], 1);
      ptx::mbar_init(&s.done[i], CONSUMERS);
      ptx::mbar_init(&s.free[i], 1);
    }
    ptx::mbar_fence_init();
  }
  __syncthreads();  // barriers are initialised; from here on every warp goes its own way
  const int begin = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
  const int n_records = (end - begin) * n_steps, warp = threadIdx.x / 32;
  if (warp < CONSUMERS)
    consumer(s, p, n_records);
  else if (warp == WAITER)
    waiter(s, p, begin, end);
  else
    signaller(s, p, n_records);
}
