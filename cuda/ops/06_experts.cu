// 06_experts.cu - the mixture of experts of one layer: router, gate and up, down.
//
//   the k experts with the largest logits, score = sigmoid(logit)
//   h = silu(gate y) * (up y)        x += sum over chosen experts of score * (down h)
//
// Lesson 6. Three launches. A dense layer is the last two with top_k = 1, ids = 0, scores = 1.
//
// Launch.     router<<<rows, 256, n_experts * sizeof(float)>>>          a block per row
//             gate_up<<<(ceil(width / 8), rows * top_k), 256>>>         a warp per element of h
//             down<<<(ceil(hidden / 8), rows), 256>>>                   a warp per element of x
//             With fewer blocks in x a warp of the last two takes several elements.
// Arguments.  ids, scores  int32, float32  [rows, top_k]     chosen experts, largest logit first
//             h       bf16     [rows, top_k, width]
//             x       float32  [rows, hidden]                residual stream, added to in place
//             y       bf16     [rows, hidden]                normed x, the one that `qkv` reads
//             weight  bf16     router: [n_experts, hidden]; down: [n_experts, hidden, width];
//                              gate_up: [n_experts, 2 * width, hidden], gate rows, then up rows
//             norm_topk        1 divides a row's scores by their sum
// Build.      mkref.machine.nvrtc for a GPU, mkref.machine.hostcc for a CPU; tests/test_ops.py.
//
// The port into megakernel.cu: tasks `router`, `gate_up`, `down`, and `find_experts` in the helper.
//   - SMs share the logits only. Each chooses the top k again for itself: a little work of one warp
//     instead of one more wait. That warp is the helper, which then tells the loader what to fetch.
//   - Work goes by expert, not by row: an expert that three rows chose is read once, and all rows
//     pass through it as the columns of an mma. `down` adds only what was chosen, in ascending id
//     for every row. Here each row reads its own k experts.
//   - Gate and up rows are interleaved by eight: one tile gives both for eight elements of h.
//   - `down` writes a second x. In place is safe here, because nobody else reads x in this launch;
//     without launches, another SM may still norm the old one.
//
// Left out.   Logits that are NaN, shared experts, groups of experts.

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

__device__ uint16_t float_to_bf16(float v) {
  const uint32_t u = __float_as_uint(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// One output of a projection, by one warp; every lane gets it (lesson 4).
__device__ float dot(const uint16_t* w, const uint16_t* y, int depth) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < depth; i += 32)
    sum = sum + bf16_to_float(w[i]) * bf16_to_float(y[i]);
  for (int x = 16; x > 0; x >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, x);
  return sum;
}

extern "C" __global__ void router(int* ids, float* scores, const uint16_t* y,
                                  const uint16_t* weight, int hidden, int n_experts, int top_k,
                                  int norm_topk) {
  const float taken = __uint_as_float(0xff800000u);  // -infinity: nothing is smaller
  float* logits = (float*)ptx::shared_memory();      // [n_experts]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  y += (long long)blockIdx.x * hidden;
  ids += blockIdx.x * top_k;
  scores += blockIdx.x * top_k;
  for (int e = warp; e < n_experts; e += blockDim.x / 32) {
    const float logit = dot(weight + (long long)e * hidden, y, hidden);
    if (lane == 0) logits[e] = logit;
  }
  __syncthreads();        // logits of all warps
  if (warp != 0) return;  // no barrier of the block follows

  float sum = 0.0f;
  for (int k = 0; k < top_k; k++) {
    float best = taken;
    int id = n_experts;
    for (int e = lane; e < n_experts; e += 32) {
      if (logits[e] > best) {
        best = logits[e];
        id = e;
      }
    }
    for (int x = 16; x > 0; x >>= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, best, x);
      const int other_id = __shfl_xor_sync(0xffffffffu, id, x);
      // Equal logits: the lower id, whoever compares first. All lanes end with the same winner.
      if (other > best || (other == best && other_id < id)) {
        best = other;
        id = other_id;
      }
    }
    const float score = 1.0f / (1.0f + expf(-best));
    sum = sum + score;
    if (lane == id % 32) logits[id] = taken;  // nobody but this lane looks at it: no barrier
    if (lane == 0) {
      ids[k] = id;
      scores[k] = score;
    }
  }
  if (norm_topk && lane == 0)
    for (int k = 0; k < top_k; k++) scores[k] = scores[k] / sum;
}

extern "C" __global__ void gate_up(uint16_t* h, const uint16_t* y, const uint16_t* weight,
                                   const int* ids, int hidden, int width, int top_k) {
  const int n_warps = blockDim.x / 32, warp = blockIdx.x * n_warps + threadIdx.x / 32;
  const int choice = blockIdx.y;  // row * top_k + k
  y += (long long)(choice / top_k) * hidden;
  for (int out = warp; out < width; out += gridDim.x * n_warps) {
    const uint16_t* w = weight + ((long long)ids[choice] * 2 * width + out) * hidden;
    const float gate = dot(w, y, hidden), up = dot(w + (long long)width * hidden, y, hidden);
    if (threadIdx.x % 32 == 0)
      h[(long long)choice * width + out] = float_to_bf16(gate / (1.0f + expf(-gate)) * up);
  }
}

extern "C" __global__ void down(float* x, const uint16_t* h, const uint16_t* weight, const int* ids,
                                const float* scores, int hidden, int width, int top_k) {
  const int row = blockIdx.y, n_warps = blockDim.x / 32;
  const int warp = blockIdx.x * n_warps + threadIdx.x / 32;
  for (int out = warp; out < hidden; out += gridDim.x * n_warps) {
    float sum = 0.0f;
    for (int choice = row * top_k; choice < (row + 1) * top_k; choice++) {
      const uint16_t* w = weight + ((long long)ids[choice] * hidden + out) * width;
      sum = sum + scores[choice] * dot(w, h + (long long)choice * width, width);
    }
    // One warp owns this element: no atomic, and the same sum in every run.
    if (threadIdx.x % 32 == 0) x[(long long)row * hidden + out] += sum;
  }
}
