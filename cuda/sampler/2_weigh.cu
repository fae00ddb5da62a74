// 2_weigh.cu - a row's settings, its adjusted logits, and how its probability is spread.
//
// draw_adjust leaves the largest logit of every slice, draw_weigh the mass and the number of tokens
// per bin, draw_tops the most likely tokens of every slice. See 1_common.cu.

// ---- a row --------------------------------------------------------------------------------------

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

// ---- draw_adjust --------------------------------------------------------------------------------

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

// ---- draw_weigh ---------------------------------------------------------------------------------

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

// ---- draw_tops ----------------------------------------------------------------------------------

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
