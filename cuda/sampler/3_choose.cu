// 3_choose.cu - draw_choose: where top_k and top_p end, the noise, the winner, and who is told.
//
// Every block goes through its slice. The last one of a row settles what lies where a filter ends;
// the last one of all hands the tokens on. See 1_common.cu.

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
  const uint32_t* numbers = d.numbers + r.row * BINS;
  if (r.top_k > 0) {
    const Found k = find(BINS - 1, r.top_k, s, [&](int i) { return (uint64_t)numbers[i]; });
    c.sure = c.k_bin = k.at;
    c.k_left = r.top_k - k.before;
  }
  if (r.top_p >= 1.0f) return c;
  uint64_t sum = 0;
  for (int i = threadIdx.x; i < BINS; i += blockDim.x) {  // one trip to L2 for all that follows
    s.masses[i] = d.masses[r.row * BINS + i];
    if (i < c.k_bin) sum += s.masses[i];
  }
  c.k_mass = sum_of_block(sum, s);  // and every thread sees the masses
  auto mass = [&](int i) { return s.masses[i]; };
  const Found low = find(BINS, share(c.k_mass, r.top_p), s, mass);
  c.sure = c.low = c.high = low.at;
  c.p_mass = low.before;
  if (r.top_k > 0) {
    const uint64_t most = c.k_mass + s.masses[c.k_bin];
    const int high = find(BINS, share(most, r.top_p), s, mass).at;
    c.high = high < c.k_bin ? high : c.k_bin;
  }
  return c;
}

// Brings what the blocks of this row have listed into shared memory. Returns how many that are; if
// they do not fit, they stay where they are.
__device__ int gather_listed(const Draw& d, const Row& r, Shared& s) {
  const int n_blocks = (int)gridDim.x, stride = ((int)d.vocab + 3) / 4 * 4;
  int before = 0;
  ROLL for (int first = 0; first < n_blocks; first += blockDim.x) {  // once, but for few threads
    const int block = first + (int)threadIdx.x;
    const int own = block < n_blocks ? d.list_sizes[r.row * MAX_BLOCKS + block] : 0;
    const int sum = before + (int)running_sum(own, s);
    if (block < n_blocks) s.offsets[block] = sum - own;
    if (threadIdx.x == blockDim.x - 1) s.n_listed = sum;
    __syncthreads();  // offsets and the sum
    before = s.n_listed;
    __syncthreads();  // all have read it
  }
  const int n = before;
  if (n > MAX_LISTED) return n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    int block = 0, beyond = n_blocks;  // the last block whose list begins at i or before it
    ROLL while (beyond - block > 1) {
      const int middle = (block + beyond) / 2;
      (s.offsets[middle] <= i ? block : beyond) = middle;
    }
    s.listed[i] =
        d.list[(long long)r.row * stride + slice(d, block) + (i - s.offsets[block])];
  }
  __syncthreads();  // what has been gathered
  return n;
}

// Calls body(key of the scaled logit, token) for the n that the blocks of this row have listed.
template <class Body>
__device__ __forceinline__ void each_listed(const Draw& d, const Row& r, int n, const Shared& s,
                                            Body body) {
  if (n <= MAX_LISTED) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) body(s.listed[i].x, (int)s.listed[i].y);
    return;
  }
  const int stride = ((int)d.vocab + 3) / 4 * 4, n_warps = blockDim.x / 32;
  for (int block = threadIdx.x / 32; block < gridDim.x; block += n_warps) {
    const uint2* list = d.list + (long long)r.row * stride + slice(d, block);
    const int size = d.list_sizes[r.row * MAX_BLOCKS + block];
    for (int i = threadIdx.x % 32; i < size; i += 32) body(list[i].x, (int)list[i].y);
  }
}

// The largest key such that the listed keys from it upwards measure `target` in total; 0 if all do
// not. Of few keys each thread sums up what is not below its own.
template <class Measure>
__device__ uint32_t lowest_of_few(int n, uint64_t target, Shared& s, Measure measure) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) s.measures[i] = measure(s.listed[i].x);
  __syncthreads();  // measures of all
  uint64_t best = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const uint32_t key = s.listed[i].x;
    uint64_t sum = 0;
    for (int other = 0; other < n; other++)
      if (s.listed[other].x >= key) sum += s.measures[other];
    if (sum >= target) best = larger(best, key);
  }
  return (uint32_t)largest_of_block(best, s);
}

// The same by a radix search: eleven bits at a time, from the first in which keys differ.
template <class Measure>
__device__ uint32_t lowest_kept(const Draw& d, const Row& r, int n_listed, uint64_t target,
                                Shared& s, Measure measure) {
  if (n_listed <= (int)blockDim.x) return lowest_of_few(n_listed, target, s, measure);
  uint64_t bits = 0;  // that are 1 in some key, and that are 0 in some
  each_listed(d, r, n_listed, s,
              [&](uint32_t key, int) { bits |= (uint64_t)key << 32 | (key ^ 0xffffffffu); });
  bits = over_block(bits, s, [](uint64_t a, uint64_t b) { return a | b; });
  const uint32_t ones = (uint32_t)(bits >> 32), differ = ones & (uint32_t)bits;
  int left = 0;
  ROLL while (left < 32 && differ >> left) left++;
  uint32_t prefix = left < 32 ? ones >> left << left : 0;
  do {
    const int shift = left > 11 ? left - 11 : 0, n = 1 << (left - shift);
    clear_bins(s);
    each_listed(d, r, n_listed, s, [&](uint32_t key, int) {
      if ((key ^ prefix) >> shift >= (uint32_t)n) return;  // not that prefix
      if (const uint64_t m = measure(key)) add_mass(s, key >> shift & (n - 1), m);
    });
    __syncthreads();  // sums of all digits
    const Found found = find(n, target, s, [&](int i) { return mass_in(s, n - 1 - i); });
    if (found.at == n) return 0;
    prefix |= (uint32_t)(n - 1 - found.at) << shift;
    target -= found.before;
    left = shift;
  } while (left > 0);
  return prefix;
}

// The key from which on listed tokens are kept.
__device__ uint32_t exact_cut(const Draw& d, const Row& r, const Cut& cut, float top, int n_listed,
                              Shared& s) {
  auto bin = [&](uint32_t key) { return bin_of(top - from_ordered(key)); };
  auto mass = [&](uint32_t key) { return mass_of(exp_(from_ordered(key) - top)); };
  uint32_t k_key = 0;
  uint64_t sum = cut.k_mass;
  if (r.top_k > 0) {
    k_key = lowest_kept(d, r, n_listed, cut.k_left, s,
                        [&](uint32_t key) { return (uint64_t)(bin(key) == cut.k_bin); });
  }
  if (r.top_p >= 1.0f) return k_key;
  if (r.top_k > 0) {
    uint64_t own = 0;
    each_listed(d, r, n_listed, s, [&](uint32_t key, int) {
      if (bin(key) == cut.k_bin && key >= k_key) own += mass(key);
    });
    sum += sum_of_block(own, s);
  }
  // The sum is of what top_k keeps, so this key is not below k_key.
  const uint64_t target = share(sum, r.top_p) - cut.p_mass;
  return lowest_kept(d, r, n_listed, target, s, [&](uint32_t key) {
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
  // Nobody is among the first n who is not among the first n of the blocks' best: few are left.
  const int n_blocks = (int)gridDim.x, n = r.n_logprobs;
  const uint64_t* of_blocks = d.tops + (long long)r.row * MAX_BLOCKS * TOP_LOGPROBS;
  for (int i = threadIdx.x; i < n_blocks && n > 0; i += blockDim.x)
    s.keys[i] = of_blocks[i * TOP_LOGPROBS];
  if (threadIdx.x == 0) s.bound = 1, s.n_listed = 0;
  __syncthreads();  // best of all blocks
  for (int i = threadIdx.x; i < n_blocks && n > 0; i += blockDim.x) {
    int rank = 0;
    for (int other = 0; other < n_blocks; other++) rank += s.keys[other] > s.keys[i];
    if (rank == n - 1 && s.keys[i] > 0) s.bound = s.keys[i];
  }
  __syncthreads();  // the bound; nobody reads the best any more
  for (int i = threadIdx.x; i < n_blocks * n; i += blockDim.x) {
    const uint64_t key = of_blocks[i / n * TOP_LOGPROBS + i % n];
    if (key >= s.bound) s.keys[atomicAdd(&s.n_listed, 1)] = key;
  }
  __syncthreads();  // those that are left
  const int n_left = s.n_listed;
  for (int i = threadIdx.x; i < n_left; i += blockDim.x) {
    const uint64_t key = s.keys[i];
    int rank = 0;
    for (int other = 0; other < n_left; other++) rank += s.keys[other] > key;
    if (rank < n) {
      ids[rank] = token_of(key);
      tops[rank] = (value_of(key) - top) - log_sum;
    }
  }
}

// By the last block of a row: its token.
__device__ void finish_row(const Draw& d, const Row& r, const Cut& cut, float top, Shared& s) {
  uint64_t winner = largest_of(r.temperature > 0.0f ? d.drawn : d.largest, r, s);
  if (r.filters()) {
    const int n_listed = gather_listed(d, r, s);
    const uint32_t floor = exact_cut(d, r, cut, top, n_listed, s);
    uint64_t own = 0;
    each_listed(d, r, n_listed, s, [&](uint32_t key, int token) {
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
