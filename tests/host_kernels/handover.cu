// Blocks hand partial sums to block 0 through global counters, and get the total back. `bug` leaves
// one step of the protocol out; on x86 the numbers stay right all the same, except for NO_BARRIER.
// This file deliberately contains what a sanitizer must find.

enum Bug {
  NONE,
  NO_RELEASE,
  NO_ACQUIRE,
  NO_BARRIER,
  NO_FULL_WAIT,
  NO_EMPTY_WAIT,
  LANES_RACE,  // races
  PAST_GLOBAL,
  PAST_SHARED,
  PAST_SOURCE,
  MISALIGNED  // addresses
};

struct Arguments {
  float *x, *part, *total;
  int *arrived, *flag;
  int per_block, rounds, bug;
};

struct Shared {
  float stage[64];
  float sums[64];
  uint64_t full, empty;
};

__device__ void add_relaxed(int* p) {
  int seen = ptx::ld_relaxed(p);
  for (int old; (old = ptx::atomic_cas(p, seen, seen + 1)) != seen;) seen = old;
}

// Sum over a tree in shared memory, one barrier per level.
__device__ float block_sum(Shared& s, float v, int bug) {
  int t = threadIdx.x;
  s.sums[t] = v;
  if (bug != NO_BARRIER) __syncthreads();
  for (int half = 32; half > 0; half >>= 1) {
    if (t < half) s.sums[t] += s.sums[t + half];
    __syncthreads();
  }
  return s.sums[0];
}

extern "C" __global__ void handover(Arguments a) {
  Shared& s = *(Shared*)ptx::shared_memory();
  int t = threadIdx.x, b = blockIdx.x, blocks = gridDim.x;
  if (t == 0) {
    ptx::mbar_init(&s.full, ptx::FULL_ARRIVALS);
    ptx::mbar_init(&s.empty, 64);
  }
  __syncthreads();
  float* mine = a.x + b * a.per_block;
  for (int r = 0; r < a.rounds; r++) {
    float v = 0;
    for (int i = 0; i < a.per_block; i += 64) {  // warp 0 copies, all threads read
      int k = r * (a.per_block / 64) + i / 64;
      if (t < 32) {
        if (a.bug != NO_EMPTY_WAIT)
          while (!ptx::mbar_try_wait(&s.empty, (k & 1) ^ 1)) ptx::pause();
        __syncwarp();
        int past = a.bug == PAST_SOURCE && b == blocks - 1 && i + 64 >= a.per_block ? 4 : 0;
        ptx::copy_async(s.stage, mine + i + past, sizeof(s.stage), &s.full);
      }
      if (a.bug != NO_FULL_WAIT)
        while (!ptx::mbar_try_wait(&s.full, k & 1)) ptx::pause();
      v += s.stage[t];
      ptx::mbar_arrive(&s.empty);
    }
    float sum = block_sum(s, v, a.bug);
    if (a.bug == LANES_RACE && t < 32) s.sums[t & 1] = 1.0f;
    if (t == 0) {
      a.part[b] = sum;
      if (a.bug == NO_RELEASE)
        add_relaxed(a.arrived);
      else
        ptx::red_release_add(a.arrived, 1);
      if (b == 0) {
        int want = blocks * (r + 1);
        if (a.bug == NO_ACQUIRE)
          while (ptx::ld_relaxed(a.arrived) < want) ptx::pause();
        else
          while (ptx::ld_acquire(a.arrived) < want) ptx::pause();
        float total = 0;
        for (int i = 0; i < blocks; i++) total += a.part[i];
        a.total[r] = total;
        ptx::st_release(a.flag, r + 1);
      }
      while (ptx::ld_acquire(a.flag) < r + 1) ptx::pause();
    }
    __syncthreads();
    float mean = a.total[r] / (blocks * a.per_block);
    for (int i = t; i < a.per_block; i += 64) mine[i] = mine[i] * 0.5f + mean;
    __syncthreads();
  }
  if (t != 5) return;
  if (a.bug == PAST_GLOBAL && b == blocks - 1) mine[a.per_block] = 1;
  if (a.bug == PAST_SHARED) ((float*)ptx::shared_memory())[sizeof(Shared) / 4] = 1;
  if (a.bug == MISALIGNED) mine[0] = (float)((uint4*)(mine + 1))->x;
}
