// megakernel.cu - one launch is one whole decode step, from token ids to the next token ids.
//
// What runs.  One persistent block per SM walks its own list of tasks (`mkref/plan`). Nine warps:
//             eight consumers compute, one loader streams weights and KV pages ahead through
//             a ring in shared memory. SMs talk through counters in global memory; there is no grid
//             barrier and no floating-point atomic.
// One file.   The same source runs on a GPU (NVRTC, sm_80 and newer) and on a CPU (`cuda/host`).
//             What differs is the meaning of the `ptx::` functions below.
// Generated.  `mkref/machine/source.py` puts a header in front of this file: the geometry as
//             constants, opcodes, flags, `struct Task` and `struct Params`, each from its one
//             definition in Python.
// Numbers.    docs/numerics.md states every rounding and the order of every sum. Compile with
//             --fmad=false.
// Left out.   Prefill, top-p and top-k sampling, more than eight rows, several tokens per launch.
//
// Contents.   1 ptx, 2 geometry, 3 arithmetic, 4 shared memory and the ring, 5 bounded waits,
//             6 run-time work, 7 loader, 8 products, 9 the ten tasks, 10 the persistent loop.

// ---- 1 ptx -------------------------------------------------------------------------------------
// Everything that is not plain C++. On a CPU these functions come from cuda/host/.

#ifdef __CUDACC__
namespace ptx {

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return bytes;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

// Counters between SMs. Acquire pairs with release at GPU scope: what the producer wrote before its
// release is visible after the acquire that sees it.
__device__ __forceinline__ int ld_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int ld_relaxed(const int* p) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void red_release_add(int* p, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ int atomic_cas(int* p, int compare, int value) {
  return atomicCAS(p, compare, value);
}

// mbarriers: a phase completes when the expected arrivals and the expected bytes have come.
__device__ __forceinline__ void mbar_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count)
               : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint64_t* bar) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(shared_address(bar))
               : "memory");
}

#if __CUDA_ARCH__ >= 900
constexpr int FULL_ARRIVALS = 1;
// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbar_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ bool mbar_try_wait(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return done;
}
// One bulk copy by the copy engine. evict_first: a weight is used once per step and must not push
// out activations.
__device__ __forceinline__ void copy_async(void* shared, const void* global, uint32_t bytes,
                                           uint64_t* bar) {
  if ((threadIdx.x & 31) == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], policy; }" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(bar))
        : "memory");
  }
}
#else
// Before sm_90 there is no copy engine: 32 lanes copy 16 bytes at a time, and each lane's arrival
// waits for its copies.
constexpr int FULL_ARRIVALS = 32;
__device__ __forceinline__ void mbar_fence_init() {}
__device__ __forceinline__ bool mbar_try_wait(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return done;
}
__device__ __forceinline__ void copy_async(void* shared, const void* global, uint32_t bytes,
                                           uint64_t* bar) {
  for (uint32_t at = (threadIdx.x & 31) * 16; at < bytes; at += 32 * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared) + at),
                 "l"((const char*)global + at)
                 : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(bar))
               : "memory");
}
#endif

// c += A (16x16, bf16) * B (16x8, bf16), summed as the tensor core does (docs/numerics.md, "One
// mma").
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint4& a, const uint2& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
__device__ __forceinline__ void bar_sync(int id, int n_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ void pause() {}

}  // namespace ptx
#endif

// ---- 2 geometry --------------------------------------------------------------------------------

constexpr int ROWS = 8;       // rows of a batch: the n of m16n8k16
constexpr int CONSUMERS = 8;  // consumer warps: the numeric contract adds this many partial sums
constexpr int THREADS = (CONSUMERS + 1) * 32;  // 288, with the loader warp
constexpr int TILE_BYTES = 512;                // 16 x 16 bf16, an mma A fragment: 16 bytes per lane
constexpr int LANES = 32;                      // uint4 per weight tile, uint2 per activation tile
constexpr int PAGE = 64;                       // keys per KV page
constexpr int CHUNK_PAGES = 2;                 // pages per attention chunk
constexpr int KEY_TILES = PAGE / 16;           // 4
constexpr int DIM_TILES = HEAD_DIM / 16;       // 2, 4 or 8
constexpr int PAGE_TILES = 2 * KEY_TILES * DIM_TILES;  // K and V^T of one KV head
constexpr int HIDDEN_TILES = HIDDEN / 16;
constexpr int Q_WIDTH = N_HEADS * HEAD_DIM;
constexpr int KV_WIDTH = N_KV_HEADS * HEAD_DIM;
constexpr int GROUP = N_HEADS / N_KV_HEADS;  // query heads of a KV head: columns in attention
constexpr int MAX_ACTIVE = N_EXPERTS < ROWS * TOP_K ? N_EXPERTS : ROWS * TOP_K;
constexpr uint32_t ALL = 0xffffffffu;  // all lanes of a warp

static_assert(HIDDEN % 16 == 0 && EXPERT_WIDTH % 16 == 0 && DENSE_WIDTH % 16 == 0,
              "widths are whole tiles");
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128,
              "one warp per tile of dimensions, at most 8");
static_assert(GROUP >= 1 && GROUP <= 8 && GROUP * N_KV_HEADS == N_HEADS,
              "query heads of a KV head fit in n = 8");
static_assert(STAGE_TILES % DIM_TILES == 0 && STAGE_TILES % KEY_TILES == 0,
              "a warp's KV tiles lie in one stage");
static_assert(N_EXPERTS <= 128 && TOP_K <= 8 && TOP_K <= N_EXPERTS,
              "four experts per lane of one warp");

// ---- 3 arithmetic ------------------------------------------------------------------------------
// All of it rounds once per operation, so that a GPU, a CPU and NumPy agree bit for bit.

__device__ __forceinline__ float negative_infinity() {
  return __uint_as_float(0xff800000u);
}

__device__ __forceinline__ float bf16_to_float(uint16_t v) {
  return __uint_as_float((uint32_t)v << 16);
}

__device__ __forceinline__ uint16_t float_to_bf16(float v) {
#ifdef __CUDACC__
  uint16_t u;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(u) : "f"(v));  // NaN becomes 0x7fff
  return u;
#else
  const uint32_t u = __float_as_uint(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  return (uint32_t)float_to_bf16(low) | (uint32_t)float_to_bf16(high) << 16;
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

// Word `id % 4` of Philox4x32-10 with counter (id / 4, position, 0, 0): noise that depends on the
// request's seed, the token's position and the vocabulary entry, and on nothing else.
__device__ uint32_t philox(uint32_t id, uint32_t position, uint32_t key0, uint32_t key1) {
  uint32_t c0 = id / 4, c1 = position, c2 = 0, c3 = 0;
#pragma unroll 1
  for (int round = 0; round < 10; round++) {
    const uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
    const uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ key0, n2 = (uint32_t)(a >> 32) ^ c3 ^ key1;
    c1 = (uint32_t)b;
    c3 = (uint32_t)a;
    c0 = n0;
    c2 = n2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const uint32_t word = id % 4;
  return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

__device__ float gumbel(uint32_t id, uint32_t position, uint32_t key0, uint32_t key1) {
  float u = (float)(philox(id, position, key0, key1) >> 8) + 0.5f;
  u = fminf(u * 5.9604644775390625e-8f,
            0.99999994f);  // 2^-24; the largest word would round up to 1
  return -log_(-log_(u));
}

// Where value k of a 16-deep activation tile sits among its column's 16: a lane reads its four
// values as 8 bytes.
__device__ __forceinline__ int b_order(int k) {
  return ((k & 7) >> 1) * 4 + (k & 1) + (k >> 3) * 2;
}

// Where element (row, k) of a 16 x 16 tile sits among its 256: the A fragment of mma.m16n8k16.
__device__ __forceinline__ int a_order(int row, int k) {
  return ((row & 7) * 4 + ((k & 7) >> 1)) * 8 + ((row >> 3) + (k >> 3) * 2) * 2 + (k & 1);
}

// ---- 4 shared memory and the ring --------------------------------------------------------------

// A candidate for the next token. The winner does not depend on who compares first: larger value,
// then lower id.
struct Best {
  float value;
  int token;
  __device__ __forceinline__ void offer(float v, int t) {
    if (v > value || (v == value && t < token)) {
      value = v;
      token = t;
    }
  }
};

// The experts of one layer: written by the loader, read by the consumers.
struct Route {
  int n_active;
  int expert[MAX_ACTIVE];        // ascending
  float score[N_EXPERTS][ROWS];  // 0: this row did not choose this expert
};

// One lane arrives at an mbarrier for its warp, or one thread for all consumers, after a barrier
// that orders the others before it. `compute-sanitizer --tool racecheck` does not follow that order
// into an mbarrier; for it there is a build (CHECKED) in which every thread arrives and waits for
// itself.
struct Shared {
  alignas(16) uint8_t ring[RING_STAGES][STAGE_TILES * TILE_BYTES];
  alignas(16) uint2 activation[HIDDEN_TILES * LANES];  // normed x of all rows in B order
  float partial[2][CONSUMERS]
               [16 * ROWS];        // sums of the eight warps; two buffers: one barrier per block
  float scores[2][PAGE][ROWS];     // attention scores of one page; two buffers
  float squares[ROWS][CONSUMERS];  // RMSNorm
  Best best[4][ROWS];              // head
  Route route;
  alignas(
      8) uint64_t full[RING_STAGES];  // loader -> consumers: the bytes of this stage have landed
  uint64_t empty[RING_STAGES];  // consumers -> loader: all eight warps are done with this stage
  uint64_t route_full, route_empty;  // the same for `route`
  int stop;                          // a wait gave up: every warp leaves at the next task
};
static_assert(sizeof(Shared) <= SHARED_BYTES,
              "mkref/machine/source.py computes the launch's shared memory");

// A position in the ring. It only moves forward, through tasks and layers; `phase` is the parity of
// the barriers at this position, so nothing is initialised again between tasks.
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == RING_STAGES) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// What one thread carries along.
struct Context {
  const Params& p;
  Shared& s;
  int thread, warp, lane, group,
      quad;         // group = lane / 4 and quad = lane % 4: row and column of a fragment
  int task = 0;     // record that is being worked on
  int buffer = 0;   // of Shared::partial
  int normed = -1;  // layer whose normed x is in Shared::activation
  bool stopped = false;
  RingPosition ring;
};

// ---- 5 bounded waits ---------------------------------------------------------------------------
// Every wait ends: with what it waited for, or with a report in `status` after
// `timeout_ns`. Whoever gives up first writes the report; everybody else sees it and stops waiting
// too, so the launch ends and the host can read why.

enum WaitCode { WAIT_COUNTER = 1, WAIT_FULL = 2, WAIT_EMPTY = 3, WAIT_ROUTE = 4, NOT_FINITE = 5 };

// Where a thread waits, for the report.
struct Place {
  int code, task, what;
};

__device__ __noinline__ void report(const Params& p, Place place, int have, int want) {
  if (ptx::atomic_cas(p.status, 0, place.code) == 0) {
    p.status[1] = blockIdx.x;
    p.status[2] = place.task;
    p.status[3] = place.what;
    p.status[4] = have;
    p.status[5] = want;
  }
}

// Counters and targets wrap at 2^32. Subtracted without a sign: of a signed difference, whose
// overflow is undefined, compilers make `have >= want`, and that lets everybody through in the step
// in which `want` wraps.
__device__ __forceinline__ bool reached(int have, int want) {
  return (int)((uint32_t)have - (uint32_t)want) >= 0;
}

__device__ bool expired(const Params& p, uint64_t deadline, Place place, int have, int want) {
  const int seen = ptx::ld_relaxed(p.status);
  if (seen == 0 || seen == NOT_FINITE) {
    if (ptx::now_ns() < deadline) return false;
    report(p, place, have, want);
  }
  return true;
}

// The slow halves of the two waits. Not inlined: machine code must stay within the instruction
// cache.
__device__ __noinline__ bool poll_counter(const Params& p, const int* at, int want, Place place) {
  const uint64_t deadline = ptx::now_ns() + p.timeout_ns;
#pragma unroll 1
  for (int spin = 1;; spin++) {
    const int have = ptx::ld_acquire(at);
    if (reached(have, want)) return false;
    if ((spin & 63) == 0 && expired(p, deadline, place, have, want)) return true;
    ptx::pause();
  }
}
__device__ __noinline__ bool poll_barrier(const Params& p, uint64_t* bar, uint32_t parity,
                                          Place place) {
  const uint64_t deadline = ptx::now_ns() + p.timeout_ns;
#pragma unroll 1
  for (int spin = 1; !ptx::mbar_try_wait(bar, parity); spin++) {
    if ((spin & 63) == 0 && expired(p, deadline, place, (int)parity ^ 1, (int)parity)) return true;
    ptx::pause();
  }
  return false;
}

// One lane polls: the acquire orders the producers' writes before this lane, the caller's barrier
// passes that on.
__device__ __forceinline__ void wait_counter(Context& c, int counter, int arrivals) {
  const int* at = c.p.counters + counter * COUNTER_STRIDE;
  const int want =
      (int)((uint32_t)arrivals * (uint32_t)(c.p.step + 1));  // monotonic: never reset between steps
  if (c.stopped || reached(ptx::ld_acquire(at), want)) return;
  c.stopped = poll_counter(c.p, at, want, Place{WAIT_COUNTER, c.task, counter});
}
__device__ __forceinline__ void wait_barrier(Context& c, uint64_t* bar, uint32_t parity, int code,
                                             int what) {
  if (c.stopped || ptx::mbar_try_wait(bar, parity)) return;
  c.stopped = poll_barrier(c.p, bar, parity, Place{code, c.task, what});
}

// Barrier 1 joins the 256 consumers; the loader is never held up by it.
__device__ __forceinline__ void consumers_sync() {
  ptx::bar_sync(1, CONSUMERS * 32);
}

// ---- 6 run-time work ---------------------------------------------------------------------------
// Loader and consumers compute the same lists from the same inputs: positions, page
// tables, routes.

// First granule of a slot's share; `mkref/plan/share.py` is the same function.
__device__ __forceinline__ int share(int total, int n_slots, int slot) {
  return (int)((unsigned)total * (unsigned)slot /
               (unsigned)n_slots);  // < 2^22 granules, 2^10 slots
}

// The keys that a row sees in one layer, and the chunks of 128 keys, aligned to absolute positions,
// that hold them.
struct KeyRange {
  int first, last;  // `last` is the token of this step
  int chunk, n_chunks;
};
__device__ __forceinline__ KeyRange key_range(const Params& p, int row, int window) {
  KeyRange r;
  r.last = p.positions[row];
  r.first = window > 0 && r.last >= window ? r.last - window + 1 : 0;
  r.chunk = r.first / (PAGE * CHUNK_PAGES);
  r.n_chunks = r.last / (PAGE * CHUNK_PAGES) - r.chunk + 1;
  return r;
}

// Item `i` of a layer's attention: one chunk of one KV head of one row. Items are dealt to the
// slots in turn.
struct AttentionItem {
  int row, head, chunk;  // chunk counts from the row's first visible chunk
  int first_page, last_page;
  KeyRange range;
};
__device__ bool attention_item(const Params& p, const Task& task, int i, AttentionItem& item) {
  for (int row = 0; row < p.rows; row++) {
    const KeyRange r = key_range(p, row, task.window);
    if (i < r.n_chunks * N_KV_HEADS) {
      const int first = (r.chunk + i / N_KV_HEADS) * CHUNK_PAGES, last = first + CHUNK_PAGES - 1;
      item.row = row;
      item.head = i % N_KV_HEADS;
      item.chunk = i / N_KV_HEADS;
      item.first_page = first > r.first / PAGE ? first : r.first / PAGE;
      item.last_page = last < r.last / PAGE ? last : r.last / PAGE;
      item.range = r;
      return true;
    }
    i -= r.n_chunks * N_KV_HEADS;
  }
  return false;
}
// First tile of a page of one KV head in the pool.
__device__ __forceinline__ long long page_tile(const Params& p, const Task& task,
                                               const AttentionItem& item, int page) {
  const int kind = task.flags & FLAG_SLIDING ? 1 : 0;
  const int at = p.page_table[((long long)kind * ROWS + item.row) * p.max_pages + page];
  return task.kv_tiles + ((long long)at * N_KV_HEADS + item.head) * PAGE_TILES;
}

// The granules (8 outputs: 8 gate and 8 up rows) of all active experts are numbered through, and a
// slot owns one range of them. A segment is the part of that range within one expert.
struct Segment {
  int active, granule, count;
};
__device__ __forceinline__ Segment segment(const Task& task, int unit, int end) {
  Segment s;
  s.active = unit / task.blocks;
  s.granule = unit % task.blocks;
  const int left = task.blocks - s.granule;
  s.count = end - unit < left ? end - unit : left;
  return s;
}

// ---- 7 loader ----------------------------------------------------------------------------------
// One warp walks the task list and keeps the ring full. It waits for free stages and, where
// the bytes depend on it, for the router; never for activations. So it runs ahead of the consumers,
// across tasks and layers.

// The order in which experts are taken, (logit, then lower id), as one 64-bit key. A NaN loses
// against everything.
__device__ __forceinline__ uint64_t route_key(float logit, int expert) {
  uint32_t u = __float_as_uint(logit + 0.0f);  // -0 is +0
  u = logit != logit ? 0u : u & 0x80000000u ? ~u : u | 0x80000000u;
  return (uint64_t)u << 32 | (ALL - (uint32_t)expert);
}

// The top-k of every row, by one warp: a lane looks at experts lane, lane + 32, ...
__device__ void find_experts(Context& c) {
  Route& r = c.s.route;
  for (int i = c.lane; i < N_EXPERTS * ROWS; i += 32) r.score[i / ROWS][i % ROWS] = 0.0f;
  __syncwarp();
#pragma unroll 1
  for (int row = 0; row < c.p.rows; row++) {
    const float* logits = c.p.router_logits + row * N_EXPERTS;
    uint32_t taken = 0;  // bit q: expert lane + 32 q
#pragma unroll 1
    for (int k = 0; k < TOP_K; k++) {
      uint64_t best = 0;
#pragma unroll 1
      for (int e = c.lane, q = 0; e < N_EXPERTS; e += 32, q++) {
        const uint64_t key = route_key(logits[e], e);
        if (!(taken >> q & 1) && key > best) best = key;
      }
#pragma unroll 1
      for (int x = 16; x > 0; x >>= 1) {
        const uint64_t other = __shfl_xor_sync(ALL, best, x);
        if (other > best) best = other;
      }
      const int expert = (int)(ALL - (uint32_t)best);
      if (expert % 32 == c.lane) {
        taken |= 1u << (expert / 32);
        const float logit = logits[expert];
        r.score[expert][row] = 1.0f / (1.0f + exp_(-logit)) + (logit - logit);  // NaN stays NaN
      }
    }
  }
  __syncwarp();  // scores of all lanes
  if (NORM_TOPK && c.lane < c.p.rows) {
    float sum = 0.0f;
#pragma unroll 1
    for (int e = 0; e < N_EXPERTS; e++) sum = sum + r.score[e][c.lane];
#pragma unroll 1
    for (int e = 0; e < N_EXPERTS; e++) r.score[e][c.lane] = r.score[e][c.lane] / sum;
  }
  __syncwarp();
  int n_active = 0;
#pragma unroll 1
  for (int base = 0; base < N_EXPERTS; base += 32) {
    const int e = base + c.lane;
    bool active = false;
#pragma unroll 1
    for (int n = 0; n < c.p.rows && e < N_EXPERTS; n++) active = active || r.score[e][n] != 0.0f;
    const uint32_t votes = __ballot_sync(ALL, active);
    if (active) r.expert[n_active + __popc(votes & ((1u << c.lane) - 1))] = e;
    n_active += __popc(votes);
  }
  if (c.lane == 0) r.n_active = n_active;
}

// Loader side of `route`: once per layer, at the first task that needs the experts. The consumers
// give it back after their last task that uses it (Flag.RELEASE).
__device__ void publish_route(Context& c, const Task& task, uint32_t phase) {
  wait_barrier(c, &c.s.route_empty, phase ^ 1, WAIT_ROUTE, task.layer);
  if (!(task.flags & FLAG_DENSE) && c.lane == 0) wait_counter(c, task.route_wait, task.route_count);
  c.stopped = __ballot_sync(ALL, c.stopped) != 0;
  __syncwarp();  // lane 0's acquire now orders the logits before every lane
  if (c.stopped) return;
  if (task.flags & FLAG_DENSE) {
    if (c.lane < ROWS) c.s.route.score[0][c.lane] = 1.0f;
    if (c.lane == 0) {
      c.s.route.expert[0] = 0;
      c.s.route.n_active = 1;
    }
  } else {
    find_experts(c);
  }
  __syncwarp();
  if (CHECKED || c.lane == 0) ptx::mbar_arrive(&c.s.route_full);
}

// The bytes of a task are a sequence of runs of consecutive tiles; the consumers open one Reader
// per run, in the same order. `i` and `j` are the cursor, both 0 at first.
struct Run {
  const uint4* tiles;
  int n_tiles;
};
__device__ bool next_run(Context& c, const Task& task, int& i, int& j, Run& run) {
  const uint4* weights = c.p.weights + (long long)task.weights * LANES;
  const long long block_uint4 = (long long)task.k_tiles * LANES;  // of one row block
  switch (task.op) {
    case OP_ROUTER:
    case OP_QKV:
    case OP_O_PROJ:
    case OP_HEAD:
      run = Run{weights + task.first * block_uint4, task.count * task.k_tiles};
      return i++ == 0;
    case OP_ATTENTION: {  // i: items of earlier rounds, j: pages of this item
      AttentionItem item;
      if (!attention_item(c.p, task, task.first + i, item)) return false;
      const int page = item.first_page + j;
      run = Run{c.p.kv + page_tile(c.p, task, item, page) * LANES, PAGE_TILES};
      j = page == item.last_page ? 0 : j + 1;
      if (j == 0) i += task.count;
      return true;
    }
    case OP_GATE_UP: {  // i: granules done
      const int units = c.s.route.n_active * task.blocks,
                end = share(units, task.count, task.first + 1);
      const int unit = share(units, task.count, task.first) + i;
      if (unit >= end) return false;
      const Segment s = segment(task, unit, end);
      const int granule = c.s.route.expert[s.active] * task.blocks + s.granule;
      run = Run{weights + granule * block_uint4, s.count * task.k_tiles};
      i += s.count;
      return true;
    }
    case OP_DOWN: {  // i: row blocks done, j: experts of this block
      if (i >= task.count) return false;
      run = Run{weights + (c.s.route.expert[j] * task.blocks + task.first + i) * block_uint4,
                task.k_tiles};
      if (++j == c.s.route.n_active) j = 0, i++;
      return true;
    }
  }
  return false;  // EMBED, MERGE and SAMPLE stream nothing
}

__device__ __forceinline__ void stream(Context& c, const Run& run) {
#pragma unroll 1
  for (int at = 0; at < run.n_tiles; at += STAGE_TILES) {
    wait_barrier(c, &c.s.empty[c.ring.slot], c.ring.phase ^ 1, WAIT_EMPTY, c.ring.slot);
    c.stopped = __ballot_sync(ALL, c.stopped) != 0;
    if (c.stopped) return;
    const int n = run.n_tiles - at < STAGE_TILES ? run.n_tiles - at : STAGE_TILES;
    ptx::copy_async(c.s.ring[c.ring.slot], run.tiles + (long long)at * LANES, n * TILE_BYTES,
                    &c.s.full[c.ring.slot]);
    c.ring.advance();
  }
}

__device__ void loader(Context& c, int begin, int end) {
  uint32_t route_phase = 0;
  int routed_layer = -1;
#pragma unroll 1
  for (c.task = begin; c.task < end && !c.stopped; c.task++) {
    const Task task = c.p.tasks[c.task];
    if ((task.op == OP_GATE_UP || task.op == OP_DOWN) && task.layer != routed_layer) {
      publish_route(c, task, route_phase);
      route_phase ^= 1;
      routed_layer = task.layer;
    }
    Run run;
#pragma unroll 1
    for (int i = 0, j = 0; !c.stopped && next_run(c, task, i, j, run);) stream(c, run);
    if (TRACE && c.lane == 0) c.p.trace[(long long)c.task * 4 + 3] = ptx::now_ns();
  }
  if (c.stopped) {
    // Copies may still be on their way into this block's shared memory: let them land before it is
    // given up.
    const uint64_t until = ptx::now_ns() + 10000000ull;
    while (ptx::now_ns() < until) ptx::pause();
  }
}

// ---- 8 products --------------------------------------------------------------------------------

// Consumer side of the ring. Tiles of a run are asked for in ascending order; every warp passes
// through every stage, also where it has no tile, so that the parity of a barrier is never
// ambiguous.
struct Reader {
  Context& c;
  int held = -1;  // stage of the run that this warp holds
  __device__ __forceinline__ void next() {
    if (held >= 0) release();
    held++;
    wait_barrier(c, &c.s.full[c.ring.slot], c.ring.phase, WAIT_FULL, c.ring.slot);
  }
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read
    if (CHECKED || c.lane == 0) ptx::mbar_arrive(&c.s.empty[c.ring.slot]);
    c.ring.advance();
  }
  // This lane's 16 bytes of tile `i`; tile `i + 1`, if in the same stage, lies LANES further.
  __device__ __forceinline__ const uint4* tile(int i) {
#pragma unroll 1
    while (held < i / STAGE_TILES) next();
    return (const uint4*)c.s.ring[c.ring.slot] + i % STAGE_TILES * LANES + c.lane;
  }
  // Also a warp without a tile of its own must let go of the stages that the others are done with.
  // The run must be passed before it is closed.
  __device__ __forceinline__ void pass(int n_tiles) { tile(n_tiles - 1); }
  __device__ __forceinline__ void close() { release(); }
};

// This warp's part of a 16 x 8 output block of depth k_tiles: tiles warp, warp + 8, ... chained in
// ascending order. `first` is the block's first tile in the run, `b` its activations in B order.
// Rows without a request are zeros. One copy of the code for all products, so everything goes in
// and out by value: the context would otherwise live in memory.
struct Chain {
  float acc[4];
  RingPosition ring;
  int held;
  bool stopped;
};
__device__ __noinline__ Chain chain_tiles(Context c, int held, int first, int k_tiles,
                                          const uint2* b) {
  Reader reader{c, held};
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const bool active = c.group < c.p.rows;
  b += c.lane;
  // Eight tiles of this warp span up to 64 tiles of the run. Where those lie in one stage, all
  // loads go out before the first product: activations may come from L2, a microsecond away.
  constexpr int BATCH = 8, SPAN = BATCH * CONSUMERS;
#pragma unroll 1
  for (int at = c.warp; at < k_tiles; at += SPAN) {
    const int end = at + SPAN < k_tiles ? at + SPAN : k_tiles;
    if ((first + at) / STAGE_TILES == (first + end - 1) / STAGE_TILES) {
      uint2 x[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        x[i] = uint2{0u, 0u};
        if (active && at + i * CONSUMERS < end) x[i] = b[(at + i * CONSUMERS) * LANES];
      }
      const uint4* tiles = reader.tile(first + at);
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (at + i * CONSUMERS < end) ptx::mma_m16n8k16(acc, tiles[i * CONSUMERS * LANES], x[i]);
    } else {
#pragma unroll 1
      for (int kt = at; kt < end; kt += CONSUMERS) {
        uint2 x = {0u, 0u};
        if (active) x = b[kt * LANES];
        ptx::mma_m16n8k16(acc, *reader.tile(first + kt), x);
      }
    }
  }
  reader.pass(first + k_tiles);
  return Chain{{acc[0], acc[1], acc[2], acc[3]}, c.ring, reader.held, c.stopped};
}
__device__ __forceinline__ Chain chain(Context& c, Reader& reader, int first, int k_tiles,
                                       const uint2* b) {
  const Chain done = chain_tiles(c, reader.held, first, k_tiles, b);
  c.ring = done.ring;
  c.stopped = done.stopped;
  reader.held = done.held;
  return done;
}

// Show this warp's 16 x 8 sums to the other warps; after it, `total` adds the eight of one element.
__device__ __forceinline__ void exchange(Context& c, const float (&acc)[4]) {
  c.buffer ^= 1;  // readers of the last block may still be in the other buffer
  float* at = c.s.partial[c.buffer][c.warp];
  at[c.group * ROWS + 2 * c.quad] = acc[0];
  at[c.group * ROWS + 2 * c.quad + 1] = acc[1];
  at[(c.group + 8) * ROWS + 2 * c.quad] = acc[2];
  at[(c.group + 8) * ROWS + 2 * c.quad + 1] = acc[3];
  consumers_sync();  // writers above, readers in `total`
}
__device__ __forceinline__ float total(const Context& c, int row, int column) {
  float sum = c.s.partial[c.buffer][0][row * ROWS + column];
  for (int w = 1; w < CONSUMERS; w++) sum = sum + c.s.partial[c.buffer][w][row * ROWS + column];
  return sum;
}

// `n_blocks` row blocks of one contiguous run of weights; `finish(block)` turns the sums into
// outputs.
template <class Finish>
__device__ __forceinline__ void project(Context& c, int n_blocks, int k_tiles, const uint2* b,
                                        Finish finish) {
  Reader reader{c};
#pragma unroll 1
  for (int block = 0; block < n_blocks; block++) {
    exchange(c, chain(c, reader, block * k_tiles, k_tiles, b).acc);
    finish(block);
  }
  reader.close();
}

// RMSNorm of x with the layer's gamma, into shared memory in B order. Every SM does it for itself:
// reading 8 KB per row from L2 is cheaper than a hop between SMs.
__device__ __noinline__ void load_normed(const Params& p, Shared& s, int thread, int layer) {
  const float* x = p.x + (long long)(layer & 1) * ROWS * HIDDEN;
  const uint16_t* gamma = p.gammas + (long long)layer * HIDDEN;
#pragma unroll 1
  for (int row = 0; row < p.rows; row++) {
    float sum = 0.0f;
    for (int i = thread; i < HIDDEN; i += CONSUMERS * 32)
      sum = sum + x[row * HIDDEN + i] * x[row * HIDDEN + i];
    for (int m = 16; m > 0; m >>= 1) sum = sum + __shfl_xor_sync(ALL, sum, m);
    if (thread % 32 == 0) s.squares[row][thread / 32] = sum;
  }
  consumers_sync();  // sums of all warps
#pragma unroll 1
  for (int row = 0; row < p.rows; row++) {
    float sum = s.squares[row][0];
    for (int w = 1; w < CONSUMERS; w++) sum = sum + s.squares[row][w];
    const float r = 1.0f / sqrtf(sum / (float)HIDDEN + RMS_EPS);
    uint16_t* out = (uint16_t*)s.activation;
    for (int i = thread; i < HIDDEN; i += CONSUMERS * 32)
      out[((i >> 4) * ROWS + row) * 16 + b_order(i & 15)] =
          float_to_bf16((x[row * HIDDEN + i] * r) * bf16_to_float(gamma[i]));
  }
  consumers_sync();  // activations of all threads
}

// x does not change within a layer: its second product finds the activations in place.
__device__ __forceinline__ void need_normed(Context& c, int layer) {
  if (c.normed == layer) return;
  load_normed(c.p, c.s, c.thread, layer);
  c.normed = layer;
}

// ---- 9 the ten tasks ---------------------------------------------------------------------------

// x <- embedding of the row's token, gathered from the packed head (the two are tied).
__device__ void embed(Context& c, const Task& task) {
  const uint16_t* tiles = (const uint16_t*)c.p.weights;
#pragma unroll 1
  for (int i = c.thread; i < c.p.rows * task.count * 16; i += CONSUMERS * 32) {
    const int row = i / (task.count * 16), k = task.first * 16 + i % (task.count * 16);
    const int token = c.p.tokens[row];
    const long long tile = task.weights + (long long)(token >> 4) * HIDDEN_TILES + (k >> 4);
    c.p.x[row * HIDDEN + k] = bf16_to_float(tiles[tile * 256 + a_order(token & 15, k & 15)]);
  }
}

__device__ void router(Context& c, const Task& task) {
  need_normed(c, task.layer);
  project(c, task.count, task.k_tiles, c.s.activation, [&](int block) {
    const int r = c.thread / ROWS, row = c.thread % ROWS, expert = (task.first + block) * 16 + r;
    if (r < 16 && expert < N_EXPERTS && row < c.p.rows)
      c.p.router_logits[row * N_EXPERTS + expert] = total(c, r, row);
  });
}

// q in the B order of the attention products; k and v as plain vectors, which `append_kv` puts into
// their page.
__device__ void qkv(Context& c, const Task& task) {
  need_normed(c, task.layer);
  project(c, task.count, task.k_tiles, c.s.activation, [&](int block) {
    const int r = c.thread / ROWS, row = c.thread % ROWS,
              out = (task.first + block) * 16 + r;  // row of [q; k; v]
    if (r >= 16) return;                            // whole warps
    float v = total(c, r, row);
    const float other = __shfl_xor_sync(ALL, v, ROWS);  // the other one of the pair (2i, 2i + 1)
    if (row >= c.p.rows) return;
    const int dim = out % HEAD_DIM;
    if ((task.flags & FLAG_ROPE) && out < Q_WIDTH + KV_WIDTH) {
      const float* angle =
          c.p.rope + ((long long)c.p.positions[row] * (HEAD_DIM / 2) + dim / 2) * 2;  // cos, sin
      v = dim & 1 ? v * angle[0] + other * angle[1] : v * angle[0] - other * angle[1];
    }
    if (out < Q_WIDTH) {
      const int head = out / HEAD_DIM;
      const long long tile = ((long long)row * N_KV_HEADS + head / GROUP) * DIM_TILES + dim / 16;
      c.p.q[(tile * ROWS + head % GROUP) * 16 + b_order(dim % 16)] = float_to_bf16(v);
    } else if (out < Q_WIDTH + KV_WIDTH) {
      c.p.k_new[row * KV_WIDTH + out - Q_WIDTH] = float_to_bf16(v);
    } else {
      c.p.v_new[row * KV_WIDTH + out - Q_WIDTH - KV_WIDTH] = float_to_bf16(v);
    }
  });
}

// The token of this step is not in its page yet when the loader copies it: its key and value are
// put into the fragments in registers. Values that the row does not see, after that token or before
// its window, become zeros: their weight is 0, but 0 times the NaN of a page used before is NaN.
__device__ __forceinline__ uint32_t patch_values(uint32_t pair, int key, int first, int now,
                                                 uint16_t value) {
  uint32_t low = key == now ? value : pair & 0xffffu;
  uint32_t high = key + 1 == now ? value : pair >> 16;
  if (key < first || key > now) low = 0;
  if (key + 1 < first || key + 1 > now) high = 0;
  return low | high << 16;
}

// Scores of the 16 keys of this warp's tile against the heads of the group: rows are keys, columns
// are heads.
__device__ __forceinline__ void score_keys(Context& c, Reader& reader, const AttentionItem& item,
                                           int page, int buffer) {
  const int now = item.range.last - page * PAGE,
            key = c.warp * 16 + c.group;  // keys within the page
  const uint2* q =
      (const uint2*)c.p.q + ((long long)item.row * N_KV_HEADS + item.head) * DIM_TILES * LANES;
  const uint32_t* k_new = (const uint32_t*)(c.p.k_new + item.row * KV_WIDTH + item.head * HEAD_DIM);
  const uint4* tiles = reader.tile(c.warp * DIM_TILES);
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int dt = 0; dt < DIM_TILES; dt++) {
    uint4 a = tiles[dt * LANES];
    uint2 heads = {0u, 0u};
    if (c.group < GROUP) heads = q[dt * LANES + c.lane];
    if (key == now) {
      a.x = k_new[dt * 8 + c.quad];
      a.z = k_new[dt * 8 + c.quad + 4];
    }
    if (key + 8 == now) {
      a.y = k_new[dt * 8 + c.quad];
      a.w = k_new[dt * 8 + c.quad + 4];
    }
    ptx::mma_m16n8k16(acc, a, heads);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = key + i / 2 * 8, absolute = page * PAGE + at;
    const bool visible = absolute >= item.range.first && absolute <= item.range.last;
    c.s.scores[buffer][at][2 * c.quad + (i & 1)] =
        visible ? acc[i] * SCORE_SCALE : negative_infinity();
  }
}

// Online softmax over one page and o += V p, for this warp's 16 dimensions. Lane (group, quad)
// works on head `group`; the output fragment has heads 2 quad and 2 quad + 1 as columns.
__device__ __forceinline__ void weigh_values(Context& c, Reader& reader, const AttentionItem& item,
                                             int page, int buffer, float& m, float& l,
                                             float (&o)[4]) {
  // This lane's keys in a key tile: 2t, 2t + 1, 2t + 8, 2t + 9.
  const float (*scores)[ROWS] = c.s.scores[buffer] + 2 * c.quad;
  float top = m;
#pragma unroll
  for (int i = 0; i < KEY_TILES * 4; i++)
    top = fmaxf(top, scores[i / 4 * 16 + (i & 1) + (i & 2) * 4][c.group]);
  top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
  top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
  const float scale = exp2_(m - top);
  m = top;
  const float scale0 = __shfl_sync(ALL, scale, 8 * c.quad);
  const float scale1 = __shfl_sync(ALL, scale, 8 * c.quad + 4);
  o[0] = o[0] * scale0;
  o[1] = o[1] * scale1;
  o[2] = o[2] * scale0;
  o[3] = o[3] * scale1;
  float sum = 0.0f;
  // Keys of the page that the row sees: first..now.
  const int first = item.range.first - page * PAGE, now = item.range.last - page * PAGE;
  const uint16_t* v_new = c.p.v_new + item.row * KV_WIDTH + item.head * HEAD_DIM + c.warp * 16;
  const uint4* tiles = reader.tile(KEY_TILES * DIM_TILES + c.warp * KEY_TILES);
#pragma unroll 1
  for (int j = 0; j < KEY_TILES; j++, scores += 16) {
    const uint2 p = {pack_bf16(exp2_(scores[0][c.group] - top), exp2_(scores[1][c.group] - top)),
                     pack_bf16(exp2_(scores[8][c.group] - top), exp2_(scores[9][c.group] - top))};
    sum = sum + bf16_to_float((uint16_t)p.x);
    sum = sum + bf16_to_float((uint16_t)(p.x >> 16));
    sum = sum + bf16_to_float((uint16_t)p.y);
    sum = sum + bf16_to_float((uint16_t)(p.y >> 16));
    uint4 a = tiles[j * LANES];
    if (now < PAGE || first > 0) {
      const int key = j * 16 + 2 * c.quad;
      a.x = patch_values(a.x, key, first, now, v_new[c.group]);
      a.y = patch_values(a.y, key, first, now, v_new[c.group + 8]);
      a.z = patch_values(a.z, key + 8, first, now, v_new[c.group]);
      a.w = patch_values(a.w, key + 8, first, now, v_new[c.group + 8]);
    }
    ptx::mma_m16n8k16(o, a, p);
  }
  sum = sum + __shfl_xor_sync(ALL, sum, 1);
  sum = sum + __shfl_xor_sync(ALL, sum, 2);
  l = l * scale + sum;
}

// One chunk of one KV head: warps 0-3 score 16 keys each; then each warp that owns a tile of
// dimensions turns all scores of the page into probabilities and adds its values.
__device__ void attention_chunk(Context& c, const AttentionItem& item, int& buffer) {
  float m = negative_infinity(), l = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int page = item.first_page; page <= item.last_page; page++) {
    Reader reader{c};
    buffer ^= 1;  // readers of the last page's scores may still be in the other buffer
    if (c.warp < KEY_TILES) score_keys(c, reader, item, page, buffer);
    reader.pass(PAGE_TILES / 2);
    consumers_sync();  // writers above, readers below
    if (c.warp < DIM_TILES) weigh_values(c, reader, item, page, buffer, m, l, o);
    reader.pass(PAGE_TILES);
    reader.close();
  }
  // The chunk's result: output before division, maximum and sum.
  const long long part =
      (((long long)item.row * N_KV_HEADS + item.head) * c.p.max_chunks + item.chunk) * ROWS;
  if (c.warp < DIM_TILES)
    for (int i = 0; i < 4; i++) {
      const int head = 2 * c.quad + (i & 1), dim = c.warp * 16 + c.group + i / 2 * 8;
      if (head < GROUP) c.p.part_o[(part + head) * HEAD_DIM + dim] = o[i];
    }
  if (c.warp == 0 && c.quad == 0 && c.group < GROUP) {
    c.p.part_ml[(part + c.group) * 2] = m;
    c.p.part_ml[(part + c.group) * 2 + 1] = l;
  }
}

// Append this step's key and value to their page. The owner of the row's last chunk does it after
// its own copy of the page has landed, so no copy in flight ever sees a half-written page.
__device__ void append_kv(Context& c, const Task& task, const AttentionItem& item) {
  const int page = item.range.last / PAGE, key = item.range.last % PAGE, dim = c.thread;
  if (page > item.last_page || dim >= HEAD_DIM) return;
  uint16_t* tiles = (uint16_t*)c.p.kv + page_tile(c.p, task, item, page) * 256;
  const int at = item.row * KV_WIDTH + item.head * HEAD_DIM + dim;
  tiles[(key / 16 * DIM_TILES + dim / 16) * 256 + a_order(key % 16, dim % 16)] = c.p.k_new[at];
  tiles[(KEY_TILES * DIM_TILES + dim / 16 * KEY_TILES + key / 16) * 256 +
        a_order(dim % 16, key % 16)] = c.p.v_new[at];
}

__device__ void attention(Context& c, const Task& task) {
  int buffer = 0;
  AttentionItem item;
#pragma unroll 1
  for (int i = task.first; attention_item(c.p, task, i, item); i += task.count) {
    attention_chunk(c, item, buffer);
    append_kv(c, task, item);
  }
}

// Attention output from the results of the chunks, in ascending order; in B order for the output
// projection. A warp makes 32 outputs of one head; for 32 chunks at a time its lanes hold one
// weight each, so that every output costs one load and one addition per chunk.
__device__ void merge(Context& c, const Task& task) {
  const int n_units = (int)c.p.rows * (Q_WIDTH / 32);
#pragma unroll 1
  for (int unit = task.first + task.count * c.warp; unit < n_units;
       unit += task.count * CONSUMERS) {
    const int row = unit / (Q_WIDTH / 32), out = unit % (Q_WIDTH / 32) * 32 + c.lane;
    const int head = out / HEAD_DIM, n_chunks = key_range(c.p, row, task.window).n_chunks;
    const long long part =
        ((long long)row * N_KV_HEADS + head / GROUP) * c.p.max_chunks * ROWS + head % GROUP;
    const float* sums = c.p.part_ml + part * 2;  // maximum and sum of chunk 0
    const float* values = c.p.part_o + part * HEAD_DIM + out % HEAD_DIM;
    float m = negative_infinity(), l = 0.0f, o = 0.0f;
#pragma unroll 1
    for (int k = c.lane; k < n_chunks; k += 32) m = fmaxf(m, sums[k * ROWS * 2]);
    for (int x = 16; x > 0; x >>= 1) m = fmaxf(m, __shfl_xor_sync(ALL, m, x));
#pragma unroll 1
    for (int base = 0; base < n_chunks; base += 32) {
      float weight = 0.0f, part_l = 0.0f;
      if (base + c.lane < n_chunks) {
        weight = exp2_(sums[(base + c.lane) * ROWS * 2] - m);
        part_l = sums[(base + c.lane) * ROWS * 2 + 1] * weight;
      }
      // Eight loads go out together. Beyond the last chunk the weight is 0, and so is the addend.
#pragma unroll 1
      for (int k = 0; k < 32 && base + k < n_chunks; k += 8, values += 8 * ROWS * HEAD_DIM) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
          v[i] = base + k + i < n_chunks ? values[i * ROWS * HEAD_DIM] : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
          l = l + __shfl_sync(ALL, part_l, k + i);
          o = o + v[i] * __shfl_sync(ALL, weight, k + i);
        }
      }
    }
    c.p.attn[(out / 16 * ROWS + row) * 16 + b_order(out % 16)] = float_to_bf16(o / l);
  }
}

// h = silu(gate) * up. A granule is one row block: eight gate rows above the eight up rows that
// belong to them. All rows of the batch go through every active expert, since the eight columns are
// there anyway; `down` adds only the chosen ones.
__device__ void gate_up(Context& c, const Task& task) {
  need_normed(c, task.layer);
  const int units = c.s.route.n_active * task.blocks,
            end = share(units, task.count, task.first + 1);
#pragma unroll 1
  for (int unit = share(units, task.count, task.first); unit < end;) {
    const Segment s = segment(task, unit, end);
    uint16_t* h = c.p.h + (long long)s.active * task.blocks * 8 * ROWS;
    project(c, s.count, task.k_tiles, c.s.activation, [&](int block) {
      const int r = c.thread / ROWS, row = c.thread % ROWS, out = (s.granule + block) * 8 + r;
      if (r >= 8 || row >= c.p.rows) return;
      const float gate = total(c, r, row), up = total(c, r + 8, row);
      h[(out / 16 * ROWS + row) * 16 + b_order(out % 16)] =
          float_to_bf16((gate / (1.0f + exp_(-gate))) * up);
    });
    unit += s.count;
  }
}

__device__ void o_proj(Context& c, const Task& task) {
  const float* x = c.p.x + (long long)(task.layer & 1) * ROWS * HIDDEN;
  project(c, task.count, task.k_tiles, (const uint2*)c.p.attn, [&](int block) {
    const int r = c.thread / ROWS, row = c.thread % ROWS, out = (task.first + block) * 16 + r;
    if (r < 16 && row < c.p.rows)
      c.p.x_mid[row * HIDDEN + out] = x[row * HIDDEN + out] + total(c, r, row);
  });
}

// x of the next layer. This SM owns the same rows as in `o_proj`, so attention and all experts add
// up here.
__device__ void down(Context& c, const Task& task) {
  float* x_next = c.p.x + (long long)((task.layer + 1) & 1) * ROWS * HIDDEN;
#pragma unroll 1
  for (int block = 0; block < task.count; block++) {
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int j = 0; j < c.s.route.n_active; j++) {
      Reader reader{c};
      const Chain part = chain(c, reader, 0, task.k_tiles,
                               (const uint2*)c.p.h + (long long)j * task.k_tiles * LANES);
      reader.close();
      const float* score = c.s.route.score[c.s.route.expert[j]];
      const float s0 = score[2 * c.quad], s1 = score[2 * c.quad + 1];
      if (s0 != 0.0f) {
        acc[0] = acc[0] + s0 * part.acc[0];
        acc[2] = acc[2] + s0 * part.acc[2];
      }
      if (s1 != 0.0f) {
        acc[1] = acc[1] + s1 * part.acc[1];
        acc[3] = acc[3] + s1 * part.acc[3];
      }
    }
    exchange(c, acc);
    const int r = c.thread / ROWS, row = c.thread % ROWS, out = (task.first + block) * 16 + r;
    if (r < 16 && row < c.p.rows)
      x_next[row * HIDDEN + out] = c.p.x_mid[row * HIDDEN + out] + total(c, r, row);
  }
}

// Logits of this task's vocabulary rows, and the best token among them for every row of the batch.
__device__ void head(Context& c, const Task& task) {
  need_normed(c, task.layer);
  const int r = c.thread / ROWS, row = c.thread % ROWS;
  const bool mine = r < 16 && row < c.p.rows;
  const float temperature = mine ? c.p.temperatures[row] : 0.0f;
  Best best = {negative_infinity(), 0x7fffffff};
  if (task.count > 0)
    project(c, task.count, task.k_tiles, c.s.activation, [&](int block) {
      const int token = (task.first + block) * 16 + r;
      if (!mine || token >= VOCAB) return;
      float v = total(c, r, row) * LOGIT_SCALE;
      c.p.logits[(long long)row * VOCAB + token] = v;
      if (!(fabsf(v) <= 3.402823466e38f)) report(c.p, Place{NOT_FINITE, c.task, row}, token, 0);
      if (temperature > 0.0f)
        v = v / temperature +
            gumbel(token, c.p.positions[row], c.p.seeds[2 * row], c.p.seeds[2 * row + 1]);
      best.offer(v, token);
    });
  // Sixteen threads hold candidates of the same row: four lanes in each of four warps.
  for (int x = ROWS; x < 32; x <<= 1) {
    const float v = __shfl_xor_sync(ALL, best.value, x);
    const int t = __shfl_xor_sync(ALL, best.token, x);
    best.offer(v, t);
  }
  if (c.warp < 4 && c.lane < ROWS) c.s.best[c.warp][c.lane] = best;
  consumers_sync();  // candidates of the four warps
  if (c.thread < c.p.rows) {
    for (int w = 0; w < 4; w++) best.offer(c.s.best[w][row].value, c.s.best[w][row].token);
    c.p.best_values[task.index * ROWS + row] = best.value;
    c.p.best_tokens[task.index * ROWS + row] = best.token;
  }
}

__device__ void sample(Context& c, const Task& task) {
  if (c.thread >= c.p.rows) return;
  Best best = {negative_infinity(), 0x7fffffff};
#pragma unroll 1
  for (int i = 0; i < task.index; i++)
    best.offer(c.p.best_values[i * ROWS + c.thread], c.p.best_tokens[i * ROWS + c.thread]);
  c.p.next_tokens[c.thread] = best.token;
}

// ---- 10 the persistent loop --------------------------------------------------------------------

__device__ void run_task(Context& c, const Task& task) {
  switch (task.op) {
    case OP_EMBED: embed(c, task); break;
    case OP_ROUTER: router(c, task); break;
    case OP_QKV: qkv(c, task); break;
    case OP_ATTENTION: attention(c, task); break;
    case OP_MERGE: merge(c, task); break;
    case OP_GATE_UP: gate_up(c, task); break;
    case OP_O_PROJ: o_proj(c, task); break;
    case OP_DOWN: down(c, task); break;
    case OP_HEAD: head(c, task); break;
    case OP_SAMPLE: sample(c, task); break;
  }
}

// The calling convention. Every task: wait for its inputs, compute, make the outputs visible,
// signal.
__device__ void consumer(Context& c, int begin, int end) {
  uint32_t route_phase = 0;
  int routed_layer = -1;
#pragma unroll 1
  for (c.task = begin; c.task < end; c.task++) {
    const Task task = c.p.tasks[c.task];
    if (TRACE && c.thread == 0) c.p.trace[(long long)c.task * 4] = ptx::now_ns();
    const bool needs_route =
        (task.op == OP_GATE_UP || task.op == OP_DOWN) && task.layer != routed_layer;
    if (c.thread == 0) {
      if (task.wait >= 0) wait_counter(c, task.wait, task.wait_count);
      if (needs_route) wait_barrier(c, &c.s.route_full, route_phase, WAIT_ROUTE, task.layer);
      if (c.stopped) c.s.stop = 1;
    }
    if (needs_route) {
      if (CHECKED) wait_barrier(c, &c.s.route_full, route_phase, WAIT_ROUTE, task.layer);
      routed_layer = task.layer;
      route_phase ^= 1;
    }
    consumers_sync();  // thread 0's acquires now order the inputs before every consumer
    if (c.s.stop) return;
    if (TRACE && c.thread == 0) c.p.trace[(long long)c.task * 4 + 1] = ptx::now_ns();
    run_task(c, task);
    consumers_sync();  // every consumer's stores now precede thread 0's release
    if (c.thread == 0) {
      if (task.signal >= 0) ptx::red_release_add(c.p.counters + task.signal * COUNTER_STRIDE, 1);
    }
    if ((task.flags & FLAG_RELEASE) && (CHECKED || c.thread == 0))
      ptx::mbar_arrive(&c.s.route_empty);
    if (TRACE && c.thread == 0) c.p.trace[(long long)c.task * 4 + 2] = ptx::now_ns();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    megakernel(const __grid_constant__ Params p) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const int thread = threadIdx.x, lane = thread & 31;
  Context c{p, s, thread, thread / 32, lane, lane / 4, lane % 4};
  if (thread == 0) {
    for (int i = 0; i < RING_STAGES; i++) {
      ptx::mbar_init(&s.full[i], ptx::FULL_ARRIVALS);
      ptx::mbar_init(&s.empty[i], CHECKED ? CONSUMERS * 32 : CONSUMERS);
    }
    ptx::mbar_init(&s.route_full, CHECKED ? 32 : 1);
    ptx::mbar_init(&s.route_empty, CHECKED ? CONSUMERS * 32 : 1);
    s.stop = 0;
    ptx::mbar_fence_init();
  }
  __syncthreads();  // barriers are initialised
  const int begin = p.task_offsets[blockIdx.x], end = p.task_offsets[blockIdx.x + 1];
  if (c.warp < CONSUMERS)
    consumer(c, begin, end);
  else
    loader(c, begin, end);
}
