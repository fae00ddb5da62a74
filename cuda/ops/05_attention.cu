// 05_attention.cu - attention of one new token per row over its paged keys and values.
//
//   out = sum over visible keys of softmax(q k / sqrt(D)) v
//
// Lesson 5. Online softmax: page after page, keeping the maximum `m`, the sum `l` and the output
// `o` of the keys so far, and rescaling l and o whenever the maximum grows. One launch, after
// `qkv`: the new token's own key is in the cache already.
//
// Launch.     attention<<<(n_heads, rows), head_dim, (head_dim + 64) * sizeof(float)>>>: a block
//             per query head and row of the batch. For the scores a warp takes a key at a time; for
//             the values a thread owns one dimension.
// Arguments.  out          bf16   [rows, n_heads, head_dim]
//             q            bf16   [rows, n_heads, head_dim]
//             k_cache      bf16   [pages, 64, n_kv_heads, head_dim]
//             v_cache      bf16   [pages, 64, n_kv_heads, head_dim]
//             positions    int32  [rows]              of the new token: the last key that it sees
//             page_table   int32  [rows, max_pages]   pages that nobody sees are never looked up
//             max_pages, n_kv_heads (a divisor of n_heads), head_dim (a multiple of 32)
//             window       keys that a token sees, itself included; 0: all
// Build.      mkref.machine.nvrtc for a GPU, mkref.machine.hostcc for a CPU; tests/test_ops.py.
//
// The port into megakernel.cu: tasks `attention` and `merge`.
//   - Work is cut into chunks of 128 keys, and up to 33 splits of them are spread over the SMs.
//     Here one row of 32 heads is 32 blocks however long the context: 100 of an H200's 132 SMs
//     have nothing to do.
//   - Each split leaves its own (m, l, o); `merge` combines them. Where splits begin depends on the
//     row's length alone, so a row's bits do not depend on its neighbours.
//   - A chunk has one maximum: all of its scores are there before its first exponential. Online
//     softmax, the rescaling of l and o, goes from chunk to chunk of a split.
//   - The query heads that share a KV head are the columns of one mma: every key is read once for
//     all of them. Here each head reads the keys and values of its group again.
//   - A page is a contiguous run of tiles that the loader copies ahead. Whole tiles also bring keys
//     that must not be seen, so the port masks them; a loop over visible keys needs no mask.
//   - exp becomes exp2 by the same polynomial everywhere, p becomes a bf16 operand of the mma.
//   - The new token's key comes from a buffer: its page was copied before it existed. `merge`
//     appends it when all copies have landed.
//
// Left out.   Sharing the exponentials: every thread computes all of a page, which saves a barrier.

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

extern "C" __global__ void attention(uint16_t* out, const uint16_t* q, const uint16_t* k_cache,
                                     const uint16_t* v_cache, const int* positions,
                                     const int* page_table, int max_pages, int n_kv_heads,
                                     int head_dim, int window) {
  float* query = (float*)ptx::shared_memory();  // [head_dim], scaled
  float* scores = query + head_dim;             // [PAGE]
  const int head = blockIdx.x, n_heads = gridDim.x, row = blockIdx.y;
  const int dim = threadIdx.x, lane = dim % 32, warp = dim / 32, n_warps = head_dim / 32;
  const int kv_head = head / (n_heads / n_kv_heads), kv_width = n_kv_heads * head_dim;
  const int last = positions[row];
  const int first = window > 0 && last >= window ? last - window + 1 : 0;
  const long long mine = ((long long)row * n_heads + head) * head_dim + dim;  // in q and out

  query[dim] = bf16_to_float(q[mine]) / sqrtf((float)head_dim);
  float m = __uint_as_float(0xff800000u), l = 0.0f, o = 0.0f;  // m = -infinity
  __syncthreads();                                             // query

  for (int page = first / PAGE; page <= last / PAGE; page++) {
    // Visible keys of this page, as positions within it. There is at least one.
    const int begin = page == first / PAGE ? first % PAGE : 0;
    const int end = page == last / PAGE ? last % PAGE + 1 : PAGE;
    const long long at = (long long)page_table[row * max_pages + page] * PAGE * kv_width;
    const uint16_t* keys = k_cache + at + kv_head * head_dim;  // key i is i * kv_width further
    const uint16_t* values = v_cache + at + kv_head * head_dim;

    for (int key = begin + warp; key < end; key += n_warps) {
      float score = 0.0f;
      for (int i = lane; i < head_dim; i += 32)
        score = score + query[i] * bf16_to_float(keys[key * kv_width + i]);
      score = warp_sum(score);
      if (lane == 0) scores[key] = score;
    }
    __syncthreads();  // scores: written by all warps, read by all threads

    float top = m;
    for (int key = begin; key < end; key++) top = fmaxf(top, scores[key]);
    const float rescale = expf(m - top);  // 0 at the first page, where m is -infinity
    m = top;
    l = l * rescale;
    o = o * rescale;
    for (int key = begin; key < end; key++) {
      const float p = expf(scores[key] - m);
      l = l + p;
      o = o + p * bf16_to_float(values[key * kv_width + dim]);
    }
    __syncthreads();  // all have read the scores; the next page overwrites them
  }
  out[mine] = float_to_bf16(o / l);
}
