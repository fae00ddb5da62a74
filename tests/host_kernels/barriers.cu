// Barriers and warp collectives: kernels that do it right.

// Every thread adds its neighbour's value of the round before; wrong without a barrier per round.
extern "C" __global__ void ring(int* out, int rounds) {
  int* values = (int*)ptx::shared_memory();
  int t = threadIdx.x, n = blockDim.x;
  values[t] = t;
  __syncthreads();
  for (int i = 0; i < rounds; i++) {
    int v = values[(t + 1) % n] + 1;
    __syncthreads();
    values[t] = v;
    __syncthreads();
  }
  out[blockIdx.x * n + t] = values[t];
}

// Two pairs of warps, each with its own named barrier, exchange values; the pairs never meet.
extern "C" __global__ void pairs(int* out) {
  int* values = (int*)ptx::shared_memory();
  int t = threadIdx.x, pair = t / 64;
  for (int i = 0; i < 10 + 5 * pair; i++) {
    values[t] = t + i;
    ptx::bar_sync(1 + pair, 64);
    int v = values[t ^ 32];
    ptx::bar_sync(1 + pair, 64);
    out[t] = v;
  }
}

// Indices and dimensions, one int per coordinate.
extern "C" __global__ void indices(int* out) {
  int threads = blockDim.x * blockDim.y * blockDim.z;
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * threads + thread] = block * 1000 + thread;
}

extern "C" __global__ void shuffles(float* xor_sum, unsigned long long* from, unsigned* votes,
                                    double* pair) {
  int t = threadIdx.x, lane = t & 31;
  float v = (float)(t * t);
  for (int x = 16; x > 0; x >>= 1) v += __shfl_xor_sync(0xffffffffu, v, x);
  xor_sum[t] = v;
  from[t] = __shfl_sync(0xffffffffu, (unsigned long long)t << 33 | 1u, (lane * 7) & 31);
  pair[t] = __shfl_xor_sync(0xffffffffu, (double)t, 1);
  votes[t] = __ballot_sync(0xffffffffu, t % 3 == 0);
}

// The first warp leaves at once; the others still meet at __syncthreads.
extern "C" __global__ void early_exit(int* out) {
  if (threadIdx.x < 32) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

struct Mixed {
  int n;
  float scale;
  float* y;
};
extern "C" __global__ void __launch_bounds__(64, 1)
    mixed(const __grid_constant__ Mixed p, const float* x, double bias) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.y[i] = p.scale * x[i] + (float)bias;
}

// How far a thread's stack reaches: recursion over 512 bytes a level.
__device__ __noinline__ int deep(int level, int seed) {
  volatile int frame[120];
  for (int i = 0; i < 120; i++) frame[i] = seed + i;
  if (level == 0) return frame[seed & 63];
  return deep(level - 1, frame[7]) + frame[level & 63];
}
extern "C" __global__ void recurse(int* out, int levels) {
  out[threadIdx.x] = deep(levels, threadIdx.x);
}

// The order in which threads run, as they draw tickets.
extern "C" __global__ void tickets(int* next, int* out, int rounds) {
  for (int i = 0; i < rounds; i++) {
    int mine = ptx::ld_relaxed(next);
    while (ptx::atomic_cas(next, mine, mine + 1) != mine) mine = ptx::ld_relaxed(next);
    out[mine] = threadIdx.x;
    __syncwarp();
  }
}
