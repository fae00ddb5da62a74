// 07_head.cu - the residual stream and its two ends: embedding, output projection, head, argmax.
//
//   x = E[token]      x += W attn      logits = scale * E norm(x)      next = argmax(logits)
//
// Lesson 7. Four launches: the first of the step, one in each layer, the last two.
// E is used at both ends: embedding and head are tied.
//
// Launch.     embed<<<(ceil(hidden / 256), rows), 256>>>                a thread per element
//             o_proj<<<(ceil(hidden / 8), rows), 256>>>                 a warp per element of x
//             head<<<(ceil(vocab / 8), rows), 256>>>                    a warp per logit
//             argmax<<<rows, 256, 8 * sizeof(Best)>>>                   a block per row
//             With fewer blocks in x a thread of the first, a warp of the next two takes several.
// Arguments.  x         float32  [rows, hidden]     residual stream; o_proj adds to it in place
//             table     bf16     [vocab, hidden]    embedding = head
//             tokens    int32    [rows]             each in 0 .. vocab - 1
//             attn      bf16     [rows, q_width]    output of attention, all heads of a row
//             weight    bf16     [hidden, q_width]
//             y         bf16     [rows, hidden]     x after the last norm
//             logits    float32  [rows, vocab]
//             next      int32    [rows]             largest logit, of equal ones the lowest id
//             hidden, q_width, vocab, scale
// Build.      mkref.machine.nvrtc for a GPU, mkref.machine.hostcc for a CPU; tests/test_ops.py.
//
// The port into megakernel.cu: tasks `embed`, `o_proj`, `head`, `sample`.
//   - Products as in lesson 4: tiles, ring, mma, all rows at once.
//   - `o_proj` and `down` of a layer give an SM the same elements of x, so x + attention + experts
//     is a local sum, and one counter per layer tells that x is complete.
//   - `o_proj` writes x_mid, and `down` the other one of two x: SMs that are behind still read the
//     old x. Here a launch has ended before the next one writes, so one x is enough.
//   - The winner is found where the logits are made: each SM keeps its best token, and `sample`
//     compares one candidate per SM. `argmax` here reads back all that `head` wrote. Every SM runs
//     `sample` for itself: its next `embed` needs no word from another SM.
//   - (value, lower id) is a total order, so the winner does not depend on who compares first.
//
// Left out.   Temperature. A logit that is NaN never wins; if all are, next is INT_MAX, no token.

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

__device__ float bf16_to_float(uint16_t v) {
  return __uint_as_float((uint32_t)v << 16);
}

// One output of a projection, by one warp; every lane gets it (lesson 4).
__device__ float dot(const uint16_t* w, const uint16_t* y, int depth) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < depth; i += 32)
    sum = sum + bf16_to_float(w[i]) * bf16_to_float(y[i]);
  for (int x = 16; x > 0; x >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, x);
  return sum;
}

extern "C" __global__ void embed(float* x, const uint16_t* table, const int* tokens, int hidden) {
  x += (long long)blockIdx.y * hidden;
  table += (long long)tokens[blockIdx.y] * hidden;
  const int stride = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < hidden; i += stride)
    x[i] = bf16_to_float(table[i]);
}

extern "C" __global__ void o_proj(float* x, const uint16_t* attn, const uint16_t* weight,
                                  int hidden, int q_width) {
  const int n_warps = blockDim.x / 32, warp = blockIdx.x * n_warps + threadIdx.x / 32;
  x += (long long)blockIdx.y * hidden;
  attn += (long long)blockIdx.y * q_width;
  for (int out = warp; out < hidden; out += gridDim.x * n_warps) {
    const float sum = dot(weight + (long long)out * q_width, attn, q_width);
    // x stays float32: every layer adds to it, and a rounding to bf16 would stay in it.
    if (threadIdx.x % 32 == 0) x[out] += sum;
  }
}

extern "C" __global__ void head(float* logits, const uint16_t* y, const uint16_t* table, int hidden,
                                int vocab, float scale) {
  const int n_warps = blockDim.x / 32, warp = blockIdx.x * n_warps + threadIdx.x / 32;
  logits += (long long)blockIdx.y * vocab;
  y += (long long)blockIdx.y * hidden;
  for (int token = warp; token < vocab; token += gridDim.x * n_warps) {
    const float sum = dot(table + (long long)token * hidden, y, hidden);
    if (threadIdx.x % 32 == 0) logits[token] = sum * scale;
  }
}

// A candidate for the next token.
struct Best {
  float value;
  int token;
  __device__ void offer(float v, int t) {
    if (v > value || (v == value && t < token)) {
      value = v;
      token = t;
    }
  }
};

extern "C" __global__ void argmax(int* next, const float* logits, int vocab) {
  Best* warp_best = (Best*)ptx::shared_memory();  // [warps]
  logits += (long long)blockIdx.x * vocab;
  Best best = {__uint_as_float(0xff800000u), 0x7fffffff};  // -infinity: any logit wins
  for (int t = threadIdx.x; t < vocab; t += blockDim.x) best.offer(logits[t], t);
  for (int x = 16; x > 0; x >>= 1) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, x);
    const int token = __shfl_xor_sync(0xffffffffu, best.token, x);
    best.offer(value, token);
  }
  if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
  __syncthreads();  // candidates of all warps
  if (threadIdx.x != 0) return;
  for (int w = 1; w < blockDim.x / 32; w++) best.offer(warp_best[w].value, warp_best[w].token);
  next[blockIdx.x] = best.token;
}
