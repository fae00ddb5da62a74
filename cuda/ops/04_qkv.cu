// 04_qkv.cu - q, k, v of the new token: projection, rotary positions, write into the paged cache.
//
//   [q; k; v] = W y      pairs (2i, 2i + 1) of q and k turned by the token's position
//
// Lesson 4. The pattern of all projections: one warp computes one output, its lanes walk along the
// row of W. Here a warp takes two neighbouring rows, because rotation mixes the two. One launch.
//
// Launch.     qkv<<<(ceil(pairs / 8), rows), 256>>>: a warp per pair of outputs and per row of the
//             batch, pairs = (n_heads + 2 * n_kv_heads) * head_dim / 2. With fewer blocks in x a
//             warp takes several pairs; on a CPU every thread costs a stack. No shared memory.
// Arguments.  q            bf16     [rows, n_heads, head_dim]                     out
//             k_cache      bf16     [pages, 64, n_kv_heads, head_dim]             one token written
//             v_cache      bf16     [pages, 64, n_kv_heads, head_dim]             one token written
//             y            bf16     [rows, hidden]                                normed x
//             weight       bf16     [(n_heads + 2 * n_kv_heads) * head_dim, hidden]   q, k, v rows
//             rope         float32  [positions, head_dim / 2, 2]                  cos, sin
//             positions    int32    [rows]                                        of the new token
//             page_table   int32    [rows, max_pages]     which page holds tokens 64 i .. 64 i + 63
//             max_pages, hidden, n_heads, n_kv_heads, head_dim (even); rotate: 0 leaves q, k as is
// Build.      mkref.machine.nvrtc for a GPU, mkref.machine.hostcc for a CPU; tests/test_ops.py.
//
// The port into megakernel.cu: task `qkv`, with `project` and `chain_tiles`.
//   - W is cut into 16 x 16 tiles in the order of an mma's operand. A tile serves all rows of the
//     batch at once; here every row of the batch reads the whole of W again.
//   - The loader warp streams the tiles through the ring, before y exists. A warp here cannot even
//     ask for its weights before its kernel starts, and that is after rmsnorm has ended.
//   - Eight warps share the depth of 16 outputs and add their sums in shared memory: the ring
//     brings W in order, and so all eight find work in the stage that has just landed.
//   - The loop over `out` with its stride becomes a run of 16-row blocks: what an SM streams is
//     contiguous, and as much as what any other SM streams.
//   - k and v do not go into the cache here: another SM may be copying that very page. They wait in
//     a buffer until `merge`, which begins when all copies have landed, appends them.
//   - The cache holds tiles, values transposed, because attention uses the mma as well.
//
// Left out.   Wide loads; y in shared memory; prompts (several new tokens of one sequence).

#ifdef __CUDACC__  // a CPU build has these from cuda/host/
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
#endif

constexpr int PAGE = 64;  // tokens of a page of the cache

__device__ float bf16_to_float(uint16_t v) {
  return __uint_as_float((uint32_t)v << 16);
}

__device__ uint16_t float_to_bf16(float v) {
  const uint32_t u = __float_as_uint(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

__device__ float warp_sum(float v) {
  for (int x = 16; x > 0; x >>= 1) v = v + __shfl_xor_sync(0xffffffffu, v, x);
  return v;
}

// One output of a projection, by one warp; every lane gets it. A product of two bf16 is exact in
// float32, so only the additions round.
__device__ float dot(const uint16_t* w, const uint16_t* y, int depth) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < depth; i += 32)
    sum = sum + bf16_to_float(w[i]) * bf16_to_float(y[i]);
  return warp_sum(sum);
}

extern "C" __global__ void qkv(uint16_t* q, uint16_t* k_cache, uint16_t* v_cache, const uint16_t* y,
                               const uint16_t* weight, const float* rope, const int* positions,
                               const int* page_table, int max_pages, int hidden, int n_heads,
                               int n_kv_heads, int head_dim, int rotate) {
  const int q_width = n_heads * head_dim, kv_width = n_kv_heads * head_dim, row = blockIdx.y;
  const int n_warps = blockDim.x / 32, warp = blockIdx.x * n_warps + threadIdx.x / 32;
  const int position = positions[row];
  const long long page = page_table[row * max_pages + position / PAGE];
  const long long token = (page * PAGE + position % PAGE) * kv_width;  // in both caches
  y += (long long)row * hidden;

  // `out` and `out + 1` are the warp's rows of [q; k; v].
  for (int out = 2 * warp; out < q_width + 2 * kv_width; out += 2 * gridDim.x * n_warps) {
    const uint16_t* w = weight + (long long)out * hidden;
    float a = dot(w, y, hidden), b = dot(w + hidden, y, hidden);
    if (threadIdx.x % 32 != 0) continue;  // all lanes hold the sums, one of them finishes

    if (rotate && out < q_width + kv_width) {
      const float* angle = rope + ((long long)position * (head_dim / 2) + out % head_dim / 2) * 2;
      const float turned = a * angle[0] - b * angle[1];
      b = b * angle[0] + a * angle[1];
      a = turned;
    }

    uint16_t* to = q + (long long)row * q_width + out;
    const int at = out - q_width;  // in [k; v]
    if (at >= 0) to = at < kv_width ? k_cache + token + at : v_cache + token + at - kv_width;
    to[0] = float_to_bf16(a);
    to[1] = float_to_bf16(b);
  }
}
