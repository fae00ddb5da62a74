// 08_loop.cu - a step in one launch, in small: lists of tasks, and a barrier of the whole grid.
//
// What runs.  One block per SM walks its list of tasks, phase by phase, `n_steps` times. A phase is
//             what used to be a launch: all blocks end it before any begins the next.
// Tasks.      MIX   y[i] = 3 x[i] + x[(7 i + 5 + phase) % n] + phase, for `count` values from
//             `first`: a stand-in for an operation that reads what other SMs have written. The
//             result is the x of the next phase; two buffers are used in turn.
// Launch.     steps<<<n_sm, threads>>>, not more blocks than run at the same time
// Arguments.  x        uint32   [2, n]           in and out
//             list     int32    [n_tasks, 3]     records of `struct Task`, SM after SM
//             offsets  int32    [n_sm + 1]       first record of each SM, and one past the last
//             arrivals int32    [1]              0 at the start; it only grows
//             n, n_phases, n_steps

#ifdef __CUDACC__  // no headers
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

// USE megakernel.cu: section 1

constexpr uint64_t PATIENCE_NS = 2000000000ull;

// In its phase, a block computes `count` values from `first`.
struct Task {
  int phase, first, count;
};

struct Params {
  uint32_t* x;
  int* arrivals;
  int n, n_phases, n_steps;
};

// Ends after two seconds at the latest, with what there is.
__device__ void wait_counter(const int* at, int want) {
  const uint64_t deadline = ptx::now_ns() + PATIENCE_NS;
  while (ptx::ld_acquire(at) < want && ptx::now_ns() < deadline) ptx::pause();
}

// `round` counts the phases of all steps: it says which of the two buffers is read.
__device__ void run_task(const Params& p, const Task& task, int round) {
  const uint32_t* x = p.x + (round % 2) * p.n;
  uint32_t* y = p.x + ((round + 1) % 2) * p.n;
  for (int i = task.first + threadIdx.x; i < task.first + task.count; i += blockDim.x)
    y[i] = 3 * x[i] + x[(7 * i + 5 + task.phase) % p.n] + task.phase;
}

// BEGIN EXERCISE 08.1
// All blocks wait here for each other. `round` is the number of this barrier, from 0;
// `arrivals` is a counter that only grows.
__device__ void grid_barrier(int* arrivals, int round) {
  // BEGIN SOLUTION
  __syncthreads();  // all threads of this block have stored
  if (threadIdx.x == 0) {
    ptx::red_release_add(arrivals, 1);
    wait_counter(arrivals, (int)gridDim.x * (round + 1));
  }
  __syncthreads();  // thread 0 has seen all blocks
  // END SOLUTION
}
// END EXERCISE 08.1

// BEGIN EXERCISE 08.2
// Walk the list of this block, `p.n_steps` times. The list is sorted by phase, 0 to
// `p.n_phases - 1`; a phase may have several tasks here, or none.
__device__ void walk(const Params& p, const Task* list, int n_tasks) {
  // BEGIN SOLUTION
  int round = 0;
  for (int step = 0; step < p.n_steps; step++) {
    int at = 0;
    for (int phase = 0; phase < p.n_phases; phase++) {
      for (; at < n_tasks && list[at].phase == phase; at++)
        run_task(p, list[at], round);
      grid_barrier(p.arrivals, round);
      round++;
    }
  }
  // END SOLUTION
}
// END EXERCISE 08.2

extern "C" __global__ void steps(uint32_t* x, const int* list, const int* offsets, int* arrivals,
                                 int n, int n_phases, int n_steps) {
  const Params p{x, arrivals, n, n_phases, n_steps};
  const int begin = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
  walk(p, (const Task*)list + begin, end - begin);
}
