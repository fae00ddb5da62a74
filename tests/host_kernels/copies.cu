// Bulk copies and mbarriers, as the megakernel's ring uses them.

constexpr int STAGES = 4, STAGE_INTS = 64;

struct Ring {
  int data[STAGES][STAGE_INTS];
  uint64_t full[STAGES], empty[STAGES];
};

__device__ void start(Ring& s) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      ptx::mbar_init(&s.full[i], ptx::FULL_ARRIVALS);
      ptx::mbar_init(&s.empty[i], 2);
    }
    ptx::mbar_fence_init();
  }
  __syncthreads();
}

// Warp 2 streams n stages through the ring; warps 0 and 1 sum them. `forget` leaves one wait out.
enum Forget { NOTHING, FULL_WAIT, EMPTY_WAIT };
extern "C" __global__ void stream(long long* out, const int* source, int n, int forget) {
  Ring& s = *(Ring*)ptx::shared_memory();
  start(s);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  long long sum = 0;
  for (int i = 0; i < n; i++) {
    int slot = i % STAGES, phase = i / STAGES & 1;
    if (warp == 2) {
      if (forget != EMPTY_WAIT)
        while (!ptx::mbar_try_wait(&s.empty[slot], phase ^ 1)) ptx::pause();
      __syncwarp();  // or lane 0 runs ahead, and the parity that the others wait for passes twice
      ptx::copy_async(s.data[slot], source + i * STAGE_INTS, sizeof(s.data[slot]), &s.full[slot]);
    } else {
      if (forget != FULL_WAIT)
        while (!ptx::mbar_try_wait(&s.full[slot], phase)) ptx::pause();
      for (int k = lane; k < STAGE_INTS; k += 32) sum = sum * 3 + s.data[slot][k];
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(&s.empty[slot]);
    }
  }
  if (warp < 2) out[blockIdx.x * 64 + threadIdx.x] = sum;
}

// One warp starts STAGES copies and reports in which order they land.
extern "C" __global__ void landing_order(int* out, const int* source) {
  Ring& s = *(Ring*)ptx::shared_memory();
  start(s);
  for (int i = 0; i < STAGES; i++)
    ptx::copy_async(s.data[i], source, sizeof(s.data[i]), &s.full[i]);
  if (threadIdx.x == 0) {
    int seen = 0, landed = 0;
    while (landed < STAGES) {
      for (int i = 0; i < STAGES; i++)
        if (!(seen >> i & 1) && s.data[i][0] != -1) {  // poison until then
          seen |= 1 << i;
          out[landed++] = i;
        }
      ptx::pause();
    }
  }
  for (int i = 0; i < STAGES; i++)
    while (!ptx::mbar_try_wait(&s.full[i], 0)) {
    }
}

// Reads what a copy brings without waiting for it; 1 means poison was seen.
extern "C" __global__ void impatient(int* out, const int* source) {
  Ring& s = *(Ring*)ptx::shared_memory();
  start(s);
  ptx::copy_async(s.data[0], source, sizeof(s.data[0]), &s.full[0]);
  out[threadIdx.x] = s.data[0][threadIdx.x] == -1;
  while (!ptx::mbar_try_wait(&s.full[0], 0)) {
  }
}

// An mbarrier's life: results of single tries.
extern "C" __global__ void phases(int* out) {
  uint64_t* bar = (uint64_t*)ptx::shared_memory();
  int n = 0;
  ptx::mbar_init(bar, 2);
  out[n++] = ptx::mbar_try_wait(bar, 1);  // "the phase before the first" counts as complete
  out[n++] = ptx::mbar_try_wait(bar, 0);
  ptx::mbar_arrive(bar);
  out[n++] = ptx::mbar_try_wait(bar, 0);
  ptx::mbar_arrive(bar);
  out[n++] = ptx::mbar_try_wait(bar, 0);
  out[n++] = ptx::mbar_try_wait(bar, 1);
  ptx::mbar_arrive(bar);
  ptx::mbar_arrive(bar);
  out[n++] = ptx::mbar_try_wait(bar, 1);
  out[n++] = ptx::mbar_try_wait(bar, 0);
}

// Blocks hand a token round through global counters: block b waits for b, then signals b + 1.
extern "C" __global__ void relay(int* counter, int* order, int rounds) {
  int b = blockIdx.x, n = gridDim.x;
  for (int r = 0; r < rounds; r++) {
    if (threadIdx.x == 0) {
      while (ptx::ld_acquire(counter) < r * n + b) ptx::pause();
      order[r * n + b] = ptx::ld_relaxed(counter);
    }
    __syncthreads();
    if (threadIdx.x == 0) ptx::red_release_add(counter, 1);
  }
}
