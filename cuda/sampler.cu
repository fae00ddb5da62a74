// sampler.cu - the next token of every row, drawn from its logits with every setting of a request.
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
// Numbers.    mkref/reference/drawing.py states them; this file gives the same bits. Probabilities
//             are whole numbers in units of 2^-40: their sums do not depend on the order in which
//             they are added, nor do tokens on the number of blocks. Compile with --fmad=false.
// Launch.     draw_*<<<(blocks, rows), threads, sizeof(Shared)>>>, up to MAX_BLOCKS blocks, whole
//             warps. A block has its slice of the vocabulary in all kernels.
// Arguments.  struct Draw, made from its Python definition (mkref/machine/sampler.py) and put in
//             front of this file, as are STOP_IDS, BIAS_IDS and TOP_LOGPROBS. [R] is the number of
//             rows that the buffers have, V the vocabulary.
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
    uint64_t keys[MAX_BLOCKS * TOP_LOGPROBS];
  };
  uint64_t partial[32];  // a value per warp
  Found found;
  int n_listed, arrived;
};
static_assert(sizeof(Shared) <= SHARED_BYTES && BINS == 2048,
              "mkref/machine/sampler.py computes the launch's shared memory");

// ---- 1 arithmetic ------------------------------------------------------------------------------
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

// ---- 2 a block ---------------------------------------------------------------------------------

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

// ---- 3 a row -----------------------------------------------------------------------------------

// The settings of this block's row.
struct Row {
  int row, top_k, n_logprobs;
  float temperature, top_p, min_p;
  bool penalized, banned, adjusted;
  const float* raw;     // logits as the model gave them
  const float* logits;  // as draw_adjust left them
  __device__ bool filters() const { return temperature > 0.0f && (top_k > 0 || top_p < 1.0f); }
};

__device__ Row row_of(const Draw& d) {
  Row r;
  r.row = blockIdx.y;
  r.top_k = d.top_k[r.row];
  r.n_logprobs = d.n_logprobs[r.row];
  r.temperature = d.temperatures[r.row];
  r.top_p = d.top_p[r.row];
  r.min_p = d.min_p[r.row];
  r.penalized =
      d.presence[r.row] != 0.0f || d.frequency[r.row] != 0.0f || d.repetition[r.row] != 1.0f;
  r.banned = d.positions[r.row] < d.ban_until[r.row];
  r.adjusted = r.penalized || r.banned || d.n_bias[r.row] > 0 || d.mask;
  r.raw = d.logits + r.row * d.vocab;
  r.logits = r.adjusted ? d.adjusted + r.row * d.vocab : r.raw;
  return r;
}

// Nothing more is drawn: the step before this one has ended the launch, or the kernel has failed.
// The steps that are still queued then repeat one that is done, which changes nothing.
__device__ bool over(const Draw& d) {
  return d.status[0] != 0 || (d.step > 0 && d.state[ENDED]);
}

// First token of a block's slice; slices are whole quads.
__device__ __forceinline__ int slice(const Draw& d, int block) {
  const int quads = ((int)d.vocab + 3) / 4;
  return (int)((long long)quads * block / gridDim.x) * 4;
}

// Calls body(first token of a quad) for the quads of this block's slice.
template <class Body>
__device__ __forceinline__ void each_quad(const Draw& d, Body body) {
  const int end = slice(d, blockIdx.x + 1);
  for (int i = slice(d, blockIdx.x) + (int)threadIdx.x * 4; i < end; i += blockDim.x * 4) body(i);
}

// Logits of a quad; what is beyond the vocabulary is as if banned.
__device__ __forceinline__ void load_quad(const Draw& d, const float* logits, int first,
                                          float (&v)[4]) {
  if (d.vocab % 4 == 0) {
    const float4 all = *(const float4*)(logits + first);
    v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
  } else {
    UNROLL for (int j = 0; j < 4; j++) v[j] =
        first + j < d.vocab ? logits[first + j] : negative_infinity();
  }
}

// The largest of a key per block.
__device__ uint64_t largest_of(const uint64_t* keys, const Row& r, Shared& s) {
  uint64_t key = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x)
    key = larger(key, keys[r.row * MAX_BLOCKS + i]);
  return largest_of_block(key, s);
}

// ---- 4 draw_adjust -----------------------------------------------------------------------------

__device__ __forceinline__ float adjust(const Draw& d, const Row& r, int token, float v) {
  if (r.penalized) {
    const uint32_t count = d.counts[r.row * d.vocab + token];
    if (count) {
      const float repetition = d.repetition[r.row];
      v = v > 0.0f ? v / repetition : v * repetition;
      v = v - d.frequency[r.row] * (float)(count & MOST);
      if (count & MOST) v = v - d.presence[r.row];
    }
  }
  if (r.banned) {
    UNROLL for (int i = 0; i < STOP_IDS; i++) {
      if (d.stop_ids[r.row * STOP_IDS + i] == token) v = negative_infinity();
    }
  }
  if (d.mask) {
    const int words = ((int)d.vocab + 31) / 32;
    if (!(d.mask[r.row * words + token / 32] >> (token % 32) & 1)) v = negative_infinity();
  }
  return v;
}

// Copies this block's slice and adds what is to be added to some of its tokens.
__device__ void add_bias(const Draw& d, const Row& r) {
  float* adjusted = d.adjusted + r.row * d.vocab;
  const int begin = slice(d, blockIdx.x), end = slice(d, blockIdx.x + 1);
  for (int i = begin + threadIdx.x; i < end && i < d.vocab; i += blockDim.x) adjusted[i] = r.raw[i];
  __syncthreads();  // the copy
  for (int i = threadIdx.x; i < d.n_bias[r.row]; i += blockDim.x) {
    const int token = d.bias_ids[r.row * BIAS_IDS + i];
    if (begin <= token && token < end) adjusted[token] += d.bias_values[r.row * BIAS_IDS + i];
  }
  __syncthreads();  // sums
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
    draw_adjust(const __grid_constant__ Draw d) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const Row r = row_of(d);
  // What the kernels behind this one add to.
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, n_threads = gridDim.x * blockDim.x;
  for (int i = thread; i < BINS; i += n_threads)
    d.masses[r.row * BINS + i] = d.numbers[r.row * BINS + i] = 0;
  if (thread == 0) {
    d.raw_sums[r.row] = 0;
    d.tickets[r.row] = 0;
    if (r.row == 0) d.tickets[d.row_stride] = 0;
  }
  if (d.status[0] != 0 && thread < STATUS_WORDS && r.row == 0)
    d.status_out[thread] = d.status[thread];
  if (over(d)) return;
  const bool biased = d.n_bias[r.row] > 0;
  if (biased) add_bias(d, r);
  float* adjusted = d.adjusted + r.row * d.vocab;
  float best = negative_infinity(), raw_best = negative_infinity();
  int token = -1;
  each_quad(d, [&](int first) {
    float v[4];
    load_quad(d, biased ? adjusted : r.raw, first, v);
    UNROLL for (int j = 0; j < 4; j++) {
      const int at = first + j;
      if (r.adjusted && at < d.vocab) {
        v[j] = adjust(d, r, at, v[j]);
        adjusted[at] = v[j];
      }
      if (v[j] > best) {  // tokens come in ascending order: of equal ones the first stays
        best = v[j];
        token = at;
      }
      if (r.adjusted && at < d.vocab) raw_best = fmaxf(raw_best, r.raw[at]);
    }
  });
  const uint64_t key = largest_of_block(token >= 0 ? key_of(best, token) : 0, s);
  const uint64_t raw = largest_of_block(key_of(r.adjusted ? raw_best : best, 0), s);
  if (threadIdx.x == 0) {
    d.largest[r.row * MAX_BLOCKS + blockIdx.x] = key;
    d.raw_largest[r.row * MAX_BLOCKS + blockIdx.x] = raw;
  }
}

// ---- 5 draw_weigh ------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
    draw_weigh(const __grid_constant__ Draw d) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const Row r = row_of(d);
  const bool told = r.n_logprobs >= 0;
  if (over(d) || !(r.filters() || told)) return;
  if (r.filters()) {
    clear_bins(s);
    const float top = scaled(value_of(largest_of(d.largest, r, s)), r.temperature);
    each_quad(d, [&](int first) {
      float v[4];
      load_quad(d, r.logits, first, v);
      UNROLL for (int j = 0; j < 4; j++) {
        if (v[j] == negative_infinity()) continue;
        const float gap = top - scaled(v[j], r.temperature);
        const int bin = bin_of(gap);
        const uint64_t mass = mass_of(exp_(-gap));
        if (mass) add_mass(s, bin, mass);
        // Nobody asks how many are in the last bin, where most are.
        if (r.top_k > 0 && bin < BINS - 1) atomicAdd(&s.numbers[bin], 1u);
      }
    });
    __syncthreads();  // sums of this block
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) {
      if (const uint64_t mass = mass_in(s, i)) atomicAdd(&d.masses[r.row * BINS + i], mass);
      if (s.numbers[i]) atomicAdd(&d.numbers[r.row * BINS + i], s.numbers[i]);
    }
  }
  if (told) {
    const float top = value_of(largest_of(d.raw_largest, r, s));
    uint64_t sum = 0;
    each_quad(d, [&](int first) {
      float v[4];
      load_quad(d, r.raw, first, v);
      UNROLL for (int j = 0; j < 4; j++) sum += mass_of(exp_(v[j] - top));
    });
    sum = sum_of_block(sum, s);
    if (threadIdx.x == 0) atomicAdd(&d.raw_sums[r.row], sum);
  }
}

// ---- 6 draw_tops -------------------------------------------------------------------------------

// This thread's largest key below `bound`.
__device__ uint64_t largest_below(const Draw& d, const Row& r, uint64_t bound) {
  uint64_t best = 0;
  each_quad(d, [&](int first) {
    float v[4];
    load_quad(d, r.raw, first, v);
    UNROLL for (int j = 0; j < 4; j++) {
      const uint64_t key = key_of(v[j], first + j);
      if (first + j < d.vocab && key < bound) best = larger(best, key);
    }
  });
  return best;
}

// Each block finds the most likely tokens of its slice; draw_choose takes those of all.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
    draw_tops(const __grid_constant__ Draw d) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const Row r = row_of(d);
  if (over(d) || r.n_logprobs < 1) return;
  uint64_t* tops = d.tops + (r.row * MAX_BLOCKS + blockIdx.x) * TOP_LOGPROBS;
  uint64_t own = largest_below(d, r, ~(uint64_t)0);
  ROLL for (int i = 0; i < r.n_logprobs; i++) {
    const uint64_t best = largest_of_block(own, s);
    if (threadIdx.x == 0) tops[i] = best;
    if (best && own == best) own = largest_below(d, r, best);  // one thread has it
  }
}

// ---- 7 draw_choose -----------------------------------------------------------------------------

// Where top_k and top_p end, as far as bins tell. What is in a bin where one may end goes into a
// list; the rest is kept or not as a whole.
struct Cut {
  int sure;         // what is in the bins before this one is kept
  int low, high;    // top_p ends in one of these, in one only if there is no top_k as well
  int k_bin;        // top_k ends here
  uint64_t k_left;  // so many of this bin's tokens are kept
  uint64_t k_mass;  // mass in the bins before it
  uint64_t p_mass;  // mass in the bins before `low`
  __device__ bool lists(int bin) const { return bin == k_bin || (low <= bin && bin <= high); }
};

__device__ Cut find_cut(const Draw& d, const Row& r, Shared& s) {
  constexpr int NONE = BINS;
  Cut c = {NONE, NONE, NONE - 1, NONE, 0, 0, 0};
  if (!r.filters()) return c;
  const uint64_t* masses = d.masses + r.row * BINS;
  const uint32_t* numbers = d.numbers + r.row * BINS;
  auto mass = [&](int i) { return masses[i]; };
  if (r.top_k > 0) {
    const Found k = find(BINS - 1, r.top_k, s, [&](int i) { return (uint64_t)numbers[i]; });
    c.sure = c.k_bin = k.at;
    c.k_left = r.top_k - k.before;
  }
  if (r.top_p >= 1.0f) return c;
  uint64_t sum = 0;
  for (int i = threadIdx.x; i < c.k_bin && i < BINS; i += blockDim.x) sum += masses[i];
  c.k_mass = sum_of_block(sum, s);
  const Found low = find(BINS, share(c.k_mass, r.top_p), s, mass);
  c.sure = c.low = c.high = low.at;
  c.p_mass = low.before;
  if (r.top_k > 0) {
    const uint64_t most = c.k_mass + masses[c.k_bin];
    const int high = find(BINS, share(most, r.top_p), s, mass).at;
    c.high = high < c.k_bin ? high : c.k_bin;
  }
  return c;
}

// Calls body(key of the scaled logit, token) for all that the blocks of this row have listed.
template <class Body>
__device__ __forceinline__ void each_listed(const Draw& d, const Row& r, Body body) {
  const int stride = ((int)d.vocab + 3) / 4 * 4, n_warps = blockDim.x / 32;
  for (int block = threadIdx.x / 32; block < gridDim.x; block += n_warps) {
    const uint2* list = d.list + (long long)r.row * stride + slice(d, block);
    const int n = d.list_sizes[r.row * MAX_BLOCKS + block];
    for (int i = threadIdx.x % 32; i < n; i += 32) body(list[i].x, (int)list[i].y);
  }
}

// The largest key such that the listed keys from it upwards measure `target` in total; 0 if all do
// not. A radix search: 11 bits, 11 bits, 10 bits.
template <class Measure>
__device__ uint32_t lowest_kept(const Draw& d, const Row& r, uint64_t target, Shared& s,
                                Measure measure) {
  uint32_t prefix = 0;
  ROLL for (int digit = 0; digit < 3; digit++) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, n = digit < 2 ? 2048 : 1024;
    clear_bins(s);
    each_listed(d, r, [&](uint32_t key, int) {
      if ((key ^ prefix) >> shift >= n) return;  // not that prefix
      if (const uint64_t m = measure(key)) add_mass(s, key >> shift & (n - 1), m);
    });
    __syncthreads();  // sums of all digits
    const Found found = find(n, target, s, [&](int i) { return mass_in(s, n - 1 - i); });
    if (found.at == n) return 0;
    prefix |= (uint32_t)(n - 1 - found.at) << shift;
    target -= found.before;
  }
  return prefix;
}

// The key from which on listed tokens are kept.
__device__ uint32_t exact_cut(const Draw& d, const Row& r, const Cut& cut, float top, Shared& s) {
  auto bin = [&](uint32_t key) { return bin_of(top - from_ordered(key)); };
  auto mass = [&](uint32_t key) { return mass_of(exp_(from_ordered(key) - top)); };
  uint32_t k_key = 0;
  uint64_t sum = cut.k_mass;
  if (r.top_k > 0) {
    k_key = lowest_kept(d, r, cut.k_left, s,
                        [&](uint32_t key) { return (uint64_t)(bin(key) == cut.k_bin); });
  }
  if (r.top_p >= 1.0f) return k_key;
  if (r.top_k > 0) {
    uint64_t own = 0;
    each_listed(d, r, [&](uint32_t key, int) {
      if (bin(key) == cut.k_bin && key >= k_key) own += mass(key);
    });
    sum += sum_of_block(own, s);
  }
  // The sum is of what top_k keeps, so this key is not below k_key.
  const uint64_t target = share(sum, r.top_p) - cut.p_mass;
  return lowest_kept(d, r, target, s, [&](uint32_t key) {
    const int at = bin(key);
    return cut.low <= at && at <= cut.high ? mass(key) : 0;
  });
}

// Log probabilities of the drawn token and of the most likely ones, by the raw logits.
__device__ void tell_logprobs(const Draw& d, const Row& r, int token, Shared& s) {
  const float top = value_of(largest_of(d.raw_largest, r, s));
  const float log_sum = log_((float)d.raw_sums[r.row] * (1.0f / UNIT));
  int* ids = d.told_ids + r.row * TOP_LOGPROBS;
  float* tops = d.told_tops + r.row * TOP_LOGPROBS;
  if (threadIdx.x == 0) d.told[r.row] = (r.raw[token] - top) - log_sum;
  if (threadIdx.x < TOP_LOGPROBS) {
    ids[threadIdx.x] = -1;
    tops[threadIdx.x] = __uint_as_float(0x7fc00000u);
  }
  const int n = r.n_logprobs * (int)gridDim.x;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const int block = i / r.n_logprobs, at = i % r.n_logprobs;
    s.keys[i] = d.tops[(r.row * MAX_BLOCKS + block) * TOP_LOGPROBS + at];
  }
  __syncthreads();  // keys of all blocks
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const uint64_t key = s.keys[i];
    int rank = 0;
    for (int other = 0; other < n; other++) rank += s.keys[other] > key;
    if (key && rank < r.n_logprobs) {
      ids[rank] = token_of(key);
      tops[rank] = (value_of(key) - top) - log_sum;
    }
  }
}

// By the last block of a row: its token.
__device__ void finish_row(const Draw& d, const Row& r, const Cut& cut, float top, Shared& s) {
  uint64_t winner = largest_of(r.temperature > 0.0f ? d.drawn : d.largest, r, s);
  if (r.filters()) {
    const uint32_t floor = exact_cut(d, r, cut, top, s);
    uint64_t own = 0;
    each_listed(d, r, [&](uint32_t key, int token) {
      const float z = from_ordered(key);
      if (key < floor || exp_(z - top) < r.min_p) return;
      const uint4 words =
          philox(token / 4, d.positions[r.row], d.seeds[2 * r.row], d.seeds[2 * r.row + 1]);
      const int j = token % 4;
      const uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
      own = larger(own, key_of(z + gumbel(word), token));
    });
    winner = larger(winner, largest_of_block(own, s));
  }
  const int token = token_of(winner);
  if (threadIdx.x == 0) d.next[r.row] = token;
  if (r.n_logprobs >= 0) tell_logprobs(d, r, token, s);
}

// By the last block of all: counts, inputs of the next step, news for the host.
__device__ void finish_step(const Draw& d, Shared& s) {
  const int row = threadIdx.x;
  bool stops = false;
  if (row < d.rows) {
    const int token = d.next[row];
    const bool penalized =
        d.presence[row] != 0.0f || d.frequency[row] != 0.0f || d.repetition[row] != 1.0f;
    uint16_t& count = d.counts[row * d.vocab + token];
    if (penalized && (count & MOST) < MOST) count = count + 1;
    for (int i = 0; i < STOP_IDS; i++) stops = stops || d.stop_ids[row * STOP_IDS + i] == token;
    stops = stops || (d.step > 0 && d.state[STOPPED + row]);
    d.state[STOPPED + row] = stops;
    d.tokens_out[d.step * d.row_stride + row] = token;
    if (d.n_logprobs[row] >= 0) d.logprobs[d.step * d.row_stride + row] = d.told[row];
  }
  const long long told_at = d.step * d.row_stride * TOP_LOGPROBS;
  for (int i = threadIdx.x; i < d.rows * TOP_LOGPROBS; i += blockDim.x) {
    if (d.n_logprobs[i / TOP_LOGPROBS] < 1) continue;
    d.logprob_ids[told_at + i] = d.told_ids[i];
    d.logprob_tops[told_at + i] = d.told_tops[i];
  }
  const uint64_t n_stopped = sum_of_block(stops, s);
  const bool ended = d.stop_after > 0 && n_stopped >= d.stop_after;
  if (row < d.rows && !ended) {
    d.tokens[row] = d.next[row];
    d.positions[row] += 1;
  }
  if (threadIdx.x == 0) {
    d.state[ENDED] = ended;
    if (ended) d.progress[1] = 1;
  }
  __syncthreads();  // all that the host may read once it sees the step
  if (threadIdx.x == 0) ptx::st_release_host(d.progress, d.step + 1);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2)
    draw_choose(const __grid_constant__ Draw d) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const Row r = row_of(d);
  if (over(d)) return;
  if (threadIdx.x == 0) s.n_listed = 0;
  __syncthreads();  // before somebody lists
  Cut cut = {};
  float top = 0.0f;
  if (r.temperature > 0.0f) {
    cut = find_cut(d, r, s);
    top = scaled(value_of(largest_of(d.largest, r, s)), r.temperature);
    const uint32_t position = d.positions[r.row], *seed = d.seeds + 2 * r.row;
    uint2* list = d.list + (long long)r.row * (((int)d.vocab + 3) / 4 * 4) + slice(d, blockIdx.x);
    float best = negative_infinity();
    int token = -1;
    each_quad(d, [&](int first) {
      float z[4];
      load_quad(d, r.logits, first, z);
      uint32_t kept = 0;
      UNROLL for (int j = 0; j < 4; j++) {
        if (z[j] == negative_infinity()) continue;
        z[j] = scaled(z[j], r.temperature);
        const int bin = bin_of(top - z[j]);
        if (bin < cut.sure) {
          if (r.min_p <= 0.0f || exp_(z[j] - top) >= r.min_p) kept |= 1u << j;
        } else if (cut.lists(bin)) {
          list[atomicAdd(&s.n_listed, 1)] = uint2{ordered(z[j]), (uint32_t)(first + j)};
        }
      }
      if (!kept) return;
      const uint4 words = philox(first / 4, position, seed[0], seed[1]);
      UNROLL for (int j = 0; j < 4; j++) {
        if (!(kept >> j & 1)) continue;
        const uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
        const float value = z[j] + gumbel(word);
        if (value > best) {
          best = value;
          token = first + j;
        }
      }
    });
    const uint64_t key = largest_of_block(token >= 0 ? key_of(best, token) : 0, s);
    if (threadIdx.x == 0) {
      d.drawn[r.row * MAX_BLOCKS + blockIdx.x] = key;
      d.list_sizes[r.row * MAX_BLOCKS + blockIdx.x] = s.n_listed;
    }
  }
  if (!last_to_arrive(d.tickets + r.row, gridDim.x, s)) return;
  finish_row(d, r, cut, top, s);
  if (!last_to_arrive(d.tickets + d.row_stride, gridDim.y, s)) return;
  finish_step(d, s);
}
