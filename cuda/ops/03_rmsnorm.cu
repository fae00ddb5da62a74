// 03_rmsnorm.cu - RMSNorm: the norm in front of every layer, and in front of the head.
//
//   r = 1 / sqrt(mean(x^2) + eps)        y = bf16((x * r) * gamma)
//
// Lesson 3. One launch is the whole operation: the simplest kernel of the step, and the first port.
//
// Launch.     rmsnorm<<<rows, 256, 8 * sizeof(float)>>>: one block per row, one float of shared
//             memory per warp. Any multiple of 32 threads works; 256 add as in the megakernel.
// Arguments.  y       bf16     [rows, hidden]   out
//             x       float32  [rows, hidden]   the residual stream
//             gamma   bf16     [hidden]
//             hidden, eps                       any hidden > 0
// Build.      No headers, no toolkit: mkref.machine.nvrtc compiles this file for a GPU and
//             mkref.machine.hostcc for a CPU. tests/test_ops.py runs it.
//
// The port into megakernel.cu: `load_normed`. Not a task of its own, but how four tasks begin.
//   - Nobody hands y over. Every SM that needs y computes all rows of it for itself: reading 8 KB
//     of x from L2 is cheaper than one more wait for another SM, and y stays in shared memory.
//   - All rows in one block, one after another, because the block is there anyway.
//   - y is stored in the order in which an mma reads it (`b_order`), not row after row.
//   - __syncthreads() becomes a barrier of the 256 consumers: the loader warp must not stop.
//   - `hidden` and `eps` become constants, so that loops have known ends.
//   What stays: which thread adds which squares, in which order. The port has the same bits.
//
// Left out.   Loading a thread's four neighbours of x at once (16 bytes a lane), and keeping x in
//             registers between the two passes.

#ifdef __CUDACC__  // a CPU build has these from cuda/host/
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;

namespace ptx {
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return bytes;
}
}  // namespace ptx
#endif

// A bf16 is the upper half of a float32: widening is a shift, and exact.
__device__ float bf16_to_float(uint16_t v) {
  return __uint_as_float((uint32_t)v << 16);
}

// Round to nearest even: add half a unit, or just less where the kept part is already even.
__device__ uint16_t float_to_bf16(float v) {
  const uint32_t u = __float_as_uint(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN, which the addition might carry away
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Sum over the 32 lanes of a warp; every lane gets it. In each round a lane adds the partial sum of
// the lane that differs in one bit of its number.
__device__ float warp_sum(float v) {
  for (int x = 16; x > 0; x >>= 1) v = v + __shfl_xor_sync(0xffffffffu, v, x);
  return v;
}

extern "C" __global__ void rmsnorm(uint16_t* y, const float* x, const uint16_t* gamma, int hidden,
                                   float eps) {
  float* warp_squares = (float*)ptx::shared_memory();  // [warps]
  const int warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  x += (long long)blockIdx.x * hidden;  // this block's row
  y += (long long)blockIdx.x * hidden;

  // Four neighbours per thread, so that a port may load them with one instruction; a warp's loads
  // are one contiguous piece of 512 bytes.
  float squares = 0.0f;
  for (int first = 4 * threadIdx.x; first < hidden; first += 4 * blockDim.x)
    for (int i = first; i < first + 4 && i < hidden; i++) squares = squares + x[i] * x[i];
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) warp_squares[warp] = squares;
  __syncthreads();  // writers above, readers below

  // Every thread adds the few sums: if one did it, the others would wait at a second barrier.
  float total = warp_squares[0];
  for (int w = 1; w < n_warps; w++) total = total + warp_squares[w];
  const float r = 1.0f / sqrtf(total / (float)hidden + eps);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    y[i] = float_to_bf16((x[i] * r) * bf16_to_float(gamma[i]));
}
