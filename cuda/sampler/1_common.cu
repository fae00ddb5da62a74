// The sampler: the next token of every row, drawn from its logits with every setting of a request.
//
//   logits -> + bias -> penalties -> bans -> / temperature -> top_k -> top_p -> min_p -> + noise
//          -> largest
//
// What runs.  Small kernels behind a step of megakernel.cu, in the same stream:
//               draw_adjust  bias, penalties, bans; the largest logit of each row
//               draw_weigh   how much probability lies how far below the largest logit
//               draw_tops    the most likely tokens, if somebody asks for their probabilities
//               draw_choose  where top_k and top_p end; noise; the largest. Its last block writes
//                            the tokens into the inputs of the next step and tells the host.
//             So several steps can be queued at once, and the host stands between none of them.
//             megakernel.cu draws greedily and with a temperature by itself, with the same noise;
//             a row that asks for no more than that gets the same token here.
// Files.      One translation unit in three: 1_common.cu is what the kernels share, 2_weigh.cu has
//             the first three, 3_choose.cu the last.
// Numbers.    mkref/reference/drawing.py states them; these files give the same bits. Probabilities
//             are whole numbers in units of 2^-40: their sums do not depend on the order in which
//             they are added, nor do tokens on the number of blocks. Compile with --fmad=false.
// Launch.     draw_*<<<(blocks, rows), threads, sizeof(Shared)>>>, up to MAX_BLOCKS blocks, whole
//             warps. A block has its slice of the vocabulary in all kernels.
// Arguments.  struct Draw, made from its Python definition (mkref/machine/sampler.py) and put in
//             front of these files with the limits in capitals. R is the number of rows that the
//             buffers have, V the vocabulary.
//   Step.     logits [R, V]; tokens, positions [R]; temperatures [R]; seeds [R, 2];
//             stop_ids [R, 8]; status [8], a copy of it for the host; tokens_out [256, R];
//             progress: steps done, ended
//   Settings. top_k, top_p, min_p, presence, frequency, repetition, ban_until, n_logprobs, n_bias
//             [R]; bias_ids, bias_values [R, 300]; mask [R, ceil(V / 32)] or null
//   State.    counts [R, V]: how often the answer has the token, and IN_PROMPT; state: see `State`
//   Scratch.  adjusted [R, V]; largest, raw_largest, drawn, list_sizes [R, MAX_BLOCKS];
//             masses, numbers [R, BINS]; raw_sums, tickets, next [R], one more ticket; list [R, V
//             rounded up to 4]; tops [R, MAX_BLOCKS, 20]; told, told_ids, told_tops: [R], [R, 20]
//   Host.     logprobs [256, R]; logprob_ids, logprob_tops [256, R, 20]
//   Scalars.  rows (active), row_stride (R), vocab, step (of the launch), stop_after
// Build.      mkref.machine.nvrtc for a GPU, mkref.machine.hostcc for a CPU; tests/test_sampler.py.

#ifdef __CUDACC__  // a CPU build has these from cuda/host/
#define UNROLL _Pragma("unroll")
#define ROLL _Pragma("unroll 1")
namespace ptx {
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return bytes;
}
// What this thread has seen written is visible to whoever sees the sum later.
__device__ __forceinline__ int add_acq_rel(int* p, int v) {
  int old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
__device__ __forceinline__ void st_release_host(int* p, int v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
}  // namespace ptx
#endif

constexpr int MAX_THREADS = 512;
constexpr int MAX_LISTED = 4096;  // so many tokens of a list fit in shared memory
// Bins count how far below the largest logit a logit is; the last has the rest.
constexpr float BINS_PER_UNIT = 64;       // so they reach 32 below it, where e^-32 < 2^-40
constexpr float UNIT = 1099511627776.0f;  // 2^40: probability 1 of the most likely token
constexpr uint32_t IN_PROMPT = 0x8000, MOST = 0x7fff;  // of a count
constexpr uint32_t ALL = 0xffffffffu;
constexpr float LARGEST = 3.402823466e38f;

enum State { ENDED, STOPPED };  // has the launch ended; then [R] has the row drawn a stop id

// A place in a list of numbers, and the sum of those before it.
struct Found {
  int at;
  uint64_t before;
};

struct Shared {
  union {
    struct {
      uint32_t low[BINS], high[BINS];  // halves of masses: 32-bit atomics are fast
      uint32_t numbers[BINS];
    };
    uint64_t masses[BINS];           // of a row
    uint64_t measures[MAX_THREADS];  // of listed tokens, if they are few
    uint64_t keys[MAX_BLOCKS * TOP_LOGPROBS];
  };
  uint2 listed[MAX_LISTED];  // key and token
  int offsets[MAX_BLOCKS];   // of the blocks' lists in it
  uint64_t partial[32];      // a value per warp
  uint64_t bound;
  Found found;
  int n_listed, arrived;
};
static_assert(sizeof(Shared) <= SHARED_BYTES && BINS == 2048,
              "mkref/machine/sampler.py computes the launch's shared memory");

// ---- arithmetic ---------------------------------------------------------------------------------
// exp2_, exp_, log_ and the noise are those of megakernel.cu.

__device__ __forceinline__ float negative_infinity() {
  return __uint_as_float(0xff800000u);
}

__device__ float exp2_(float x) {
  if (x < -126.0f) return 0.0f;
  x = fminf(x, 127.0f);
  const float n = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: adding it rounds x to an integer
  const float f = x - n;
  float p = 0.000154034632f;
  p = p * f + 0.00133953290f;
  p = p * f + 0.00961813703f;
  p = p * f + 0.0555028692f;
  p = p * f + 0.240226462f;
  p = p * f + 0.693147182f;
  p = p * f + 1.0f;
  return p * __uint_as_float((uint32_t)((int)n + 127) << 23);
}

__device__ __forceinline__ float exp_(float x) {
  return exp2_(x * 1.44269502f);
}

__device__ float log_(float x) {
  const uint32_t u = __float_as_uint(x);
  int e = (int)(u >> 23) - 126;
  float m = __uint_as_float((u & 0x7fffffu) | 0x3f000000u);  // [0.5, 1)
  if (m < 0.707106781f) {
    m = m + m;
    e = e - 1;
  }
  const float f = m - 1.0f, z = f * f;
  float y = 0.0703768358f;
  y = y * f + -0.115146101f;
  y = y * f + 0.116769984f;
  y = y * f + -0.124201410f;
  y = y * f + 0.142493233f;
  y = y * f + -0.166680574f;
  y = y * f + 0.200007141f;
  y = y * f + -0.249999940f;
  y = y * f + 0.333333313f;
  y = y * f * z;
  y = y - 0.5f * z;
  return (f + y) + (float)e * 0.693147182f;
}

// Four words of noise, for tokens 4 quad .. 4 quad + 3.
__device__ uint4 philox(uint32_t quad, uint32_t position, uint32_t key0, uint32_t key1) {
  uint4 c = {quad, position, 0, 0};
  ROLL for (int round = 0; round < 10; round++) {
    const uint64_t a = (uint64_t)0xD2511F53u * c.x, b = (uint64_t)0xCD9E8D57u * c.z;
    c = uint4{(uint32_t)(b >> 32) ^ c.y ^ key0, (uint32_t)b, (uint32_t)(a >> 32) ^ c.w ^ key1,
              (uint32_t)a};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

__device__ __noinline__ float gumbel(uint32_t word) {
  const float u = ((float)(word >> 8) + 0.5f) * 5.9604644775390625e-8f;  // 2^-24
  return -log_(-log_(fminf(u, 0.99999994f)));  // the largest word would round up to 1
}

// Floats as unsigned integers of the same order; -0 is +0.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The largest key is the largest value, of equal ones the lowest token. 0 is none.
__device__ __forceinline__ uint64_t key_of(float v, int token) {
  return (uint64_t)ordered(v) << 32 | (0xffffffffu - (uint32_t)token);
}

__device__ __forceinline__ float value_of(uint64_t key) {
  return from_ordered((uint32_t)(key >> 32));
}

__device__ __forceinline__ int token_of(uint64_t key) {
  return (int)(0xffffffffu - (uint32_t)key);
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

// A logit divided by the temperature, finite.
__device__ __forceinline__ float scaled(float v, float temperature) {
  const float z = temperature == 1.0f ? v : v / temperature;
  return fmaxf(fminf(z, LARGEST), -LARGEST);
}

// 0 <= weight <= 1 as a whole number.
__device__ __forceinline__ uint64_t mass_of(float weight) {
  return (uint64_t)(weight * UNIT);
}

// The bin of a value that is `gap` below the largest: equal values share one, larger ones are not
// behind.
__device__ __forceinline__ int bin_of(float gap) {
  return (int)fminf(gap * BINS_PER_UNIT, (float)(BINS - 1));
}

// `part` of a sum, rounded down; at least 1, so that one token reaches it.
__device__ __forceinline__ uint64_t share(uint64_t sum, float part) {
  const uint64_t p = (uint64_t)(part * 4294967296.0f);  // < 2^32
  const uint64_t of = (sum >> 32) * p + ((sum & 0xffffffffu) * p >> 32);
  return of ? of : 1;
}

// ---- a block ------------------------------------------------------------------------------------

// `combine` over all threads of a block, for each of them; 0 changes nothing.
template <class Combine>
__device__ uint64_t over_block(uint64_t v, Shared& s, Combine combine) {
  const int lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  ROLL for (int x = 16; x > 0; x >>= 1) v = combine(v, __shfl_xor_sync(ALL, v, x));
  if (lane == 0) s.partial[threadIdx.x / 32] = v;
  __syncthreads();  // partial values of all warps
  v = lane < n_warps ? s.partial[lane] : 0;
  ROLL for (int x = 16; x > 0; x >>= 1) v = combine(v, __shfl_xor_sync(ALL, v, x));
  __syncthreads();  // all have read them
  return v;
}

__device__ uint64_t largest_of_block(uint64_t v, Shared& s) {
  return over_block(v, s, [](uint64_t a, uint64_t b) { return larger(a, b); });
}

__device__ uint64_t sum_of_block(uint64_t v, Shared& s) {
  return over_block(v, s, [](uint64_t a, uint64_t b) { return a + b; });
}

// Sum over this thread and those before it.
__device__ uint64_t running_sum(uint64_t v, Shared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ROLL for (int x = 1; x < 32; x <<= 1) {
    const uint64_t before = __shfl_up_sync(ALL, v, x);
    if (lane >= x) v += before;
  }
  if (lane == 31) s.partial[warp] = v;
  __syncthreads();  // sums of all warps
  ROLL for (int w = 0; w < warp; w++) v += s.partial[w];
  __syncthreads();  // all have read them
  return v;
}

// The first of n numbers at which their running sum reaches `target`, and the sum before it; n and
// the sum of all if it never does. For all threads of a block.
template <class Value>
__device__ Found find(int n, uint64_t target, Shared& s, Value value) {
  const int each = (n + (int)blockDim.x - 1) / (int)blockDim.x;
  const int first = (int)threadIdx.x * each, end = first + each < n ? first + each : n;
  uint64_t own = 0;
  ROLL for (int i = first; i < end; i++) own += value(i);
  const uint64_t sum = running_sum(own, s);
  if (threadIdx.x == blockDim.x - 1) s.found = Found{n, sum};
  __syncthreads();  // before somebody finds it
  uint64_t before = sum - own;
  ROLL for (int i = first; i < end; i++) {
    const uint64_t with = before + value(i);
    if (before < target && with >= target) s.found = Found{i, before};
    before = with;
  }
  __syncthreads();  // found
  const Found found = s.found;
  __syncthreads();  // all have read it
  return found;
}

// Is this block the last of n to come here? Then all its threads see what the others have written.
__device__ bool last_to_arrive(int* ticket, int n, Shared& s) {
  __syncthreads();  // what this block has written
  if (threadIdx.x == 0) s.arrived = ptx::add_acq_rel(ticket, 1);
  __syncthreads();  // thread 0 knows
  return s.arrived == n - 1;
}

__device__ void add_mass(Shared& s, int bin, uint64_t mass) {
  const uint32_t low = (uint32_t)mass, old = atomicAdd(&s.low[bin], low);
  const uint32_t high = (uint32_t)(mass >> 32) + (uint32_t)(old + low < old);
  if (high) atomicAdd(&s.high[bin], high);
}

__device__ __forceinline__ uint64_t mass_in(const Shared& s, int bin) {
  return (uint64_t)s.high[bin] << 32 | s.low[bin];
}

__device__ void clear_bins(Shared& s) {
  for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.low[i] = s.high[i] = s.numbers[i] = 0;
  __syncthreads();  // no bin is cleared after it has been used
}
