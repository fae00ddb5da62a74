// 12_message.cu - a message between two SMs, with nothing else around it.
//
// What runs.  Block 0 writes `n` words and arrives at a counter; block 1 waits for the arrival and
//             copies the words. One warp each.
// Launch.     message<<<2, 32>>>
// Arguments.  out      int32 [n]   what block 1 has read
//             data     int32 [n]   what block 0 writes: n, n + 1, ...
//             counter  int32 [1]   0 at the start
//             n

#ifdef __CUDACC__  // no headers
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

// USE megakernel.cu: section 1

__device__ void producer(int* data, int* counter, int n) {
  for (int i = threadIdx.x; i < n; i += 32) data[i] = n + i;
  __syncwarp();  // all 32 lanes have stored
  if (threadIdx.x == 0) ptx::red_release_add(counter, 1);
}

__device__ void reader(int* out, const int* data, const int* counter, int n) {
  const uint64_t deadline = ptx::now_ns() + 5000000000ull;
  if (threadIdx.x == 0)
    while (ptx::ld_acquire(counter) < 1 && ptx::now_ns() < deadline) ptx::pause();
  __syncwarp();  // lane 0 has seen it; the others may go on
  for (int i = threadIdx.x; i < n; i += 32) out[i] = data[i];
}

extern "C" __global__ void message(int* out, int* data, int* counter, int n) {
  if (blockIdx.x == 0)
    producer(data, counter, n);
  else
    reader(out, data, counter, n);
}
