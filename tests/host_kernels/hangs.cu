// Kernels that are wrong, one way each; every launch must end and say what is wrong.

extern "C" __global__ void deadlock(int* out) {  // 64 threads: warp 1 waits at another barrier
  if (threadIdx.x < 32)
    ptx::bar_sync(1, 64);
  else
    ptx::bar_sync(2, 64);
  out[0] = 1;
}

extern "C" __global__ void two_sites(int* out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[0] = 1;
}

extern "C" __global__ void half_warp_barrier(int* out) {
  if (threadIdx.x < 16)
    __syncthreads();
  else
    __syncwarp();
  out[0] = 1;
}

extern "C" __global__ void half_warp_exit(int* out) {
  if (threadIdx.x >= 48) return;
  __syncthreads();
  out[0] = 1;
}

extern "C" __global__ void two_collectives(int* out) {
  int v = threadIdx.x;
  if (threadIdx.x & 1)
    v = __shfl_xor_sync(0xffffffffu, v, 2);
  else
    v = __shfl_sync(0xffffffffu, v, 0);
  out[threadIdx.x] = v;
}

extern "C" __global__ void wrong_count(int* out) {
  ptx::bar_sync(3, threadIdx.x < 32 ? 64 : 96);  // of 96 threads
  out[0] = 1;
}

extern "C" __global__ void never_signalled(int* flag) {
  if (threadIdx.x == 0)
    while (ptx::ld_acquire(flag) == 0) ptx::pause();
  __syncthreads();
}

extern "C" __global__ void never_paused(int* flag) {
  if (threadIdx.x == 0)
    while (ptx::ld_acquire(flag) == 0) {
    }
  __syncthreads();
}

extern "C" __global__ void blind_loop(volatile int* flag) {
  if (threadIdx.x == 5)
    while (*flag == 0) {
    }
  __syncthreads();
}

extern "C" __global__ void no_copy_comes(int* out) {
  uint64_t* bar = (uint64_t*)ptx::shared_memory();
  if (threadIdx.x == 0) ptx::mbar_init(bar, 1);
  __syncthreads();
  while (!ptx::mbar_try_wait(bar, 0)) {
  }
  out[0] = 1;
}

extern "C" __global__ void misaligned(const char* source, int bytes, int to, int from) {
  unsigned char* shared = ptx::shared_memory();
  uint64_t* bar = (uint64_t*)shared;
  if (threadIdx.x == 0) ptx::mbar_init(bar, 1);
  __syncthreads();
  ptx::copy_async(shared + 64 + to, source + from, bytes, bar);
  while (!ptx::mbar_try_wait(bar, 0)) {
  }
}

extern "C" __global__ void uninitialised(int* out) {
  ptx::mbar_arrive((uint64_t*)ptx::shared_memory());
  out[0] = 1;
}

extern "C" __global__ void too_many_arrivals(const char* source) {
  unsigned char* shared = ptx::shared_memory();
  uint64_t* bar = (uint64_t*)shared;
  if (threadIdx.x == 0) ptx::mbar_init(bar, 1);
  __syncthreads();
  ptx::copy_async(shared + 64, source, 16, bar);
  ptx::mbar_arrive(bar);
}

// Faults.

extern "C" __global__ void null_pointer(int* out) {
  if (threadIdx.x == 37) *(volatile int*)(out == nullptr ? nullptr : (int*)16) = 1;
  __syncthreads();
}

__device__ __noinline__ int deep(volatile int* frame_above, int level) {
  volatile int frame[64];
  frame[level & 63] = frame_above[0] + level;
  return level == 0 ? frame[0] : deep(frame, level - 1) + frame[1];
}
extern "C" __global__ void deep_recursion(int* out, int levels) {
  volatile int start[1] = {1};
  out[threadIdx.x] = deep(start, levels);
}

extern "C" __global__ void large_frame(int* out, int n) {
  volatile char frame[200000];
  for (int i = 0; i < n; i++) frame[i * 997 % 200000] = (char)i;
  out[threadIdx.x] = frame[n];
}
