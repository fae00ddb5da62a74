// megakernel.cu - one launch is one or more whole decode steps, from token ids to the next ones.
//
// What runs.  One persistent block per SM walks its own list of tasks (`mkref/plan`), once a step.
//             Twelve warps: eight consumers compute; the loader streams weights and KV pages ahead
//             through a ring in shared memory; the helper finds the experts and merges attention;
//             the waiter fetches task records and waits for their inputs; the signaller says when
//             their outputs are there. SMs talk through counters in global memory; there is no grid
//             barrier and no floating-point atomic.
// One file.   The same source runs on a GPU (NVRTC, sm_80 and newer) and on a CPU (`cuda/host`).
//             What differs is the meaning of the `ptx::` functions below.
// Generated.  `mkref/machine/source.py` puts a header in front of this file: the geometry as
//             constants, opcodes, flags, `struct Task` and `struct Params`, each from its one
//             definition in Python.
// Numbers.    docs/numerics.md states every rounding and the order of every sum. Compile with
//             --fmad=false.
// Left out.   Top-p, top-k and the like: cuda/sampler/ draws from the logits that are left behind.
//
// Contents.   1 ptx, 2 geometry, 3 arithmetic, 4 shared memory, 5 bounded waits, 6 run-time work,
//             7 loader, 8 products, 9 attention, 10 the other tasks, 11 the calling convention.

// ---- 1 ptx -------------------------------------------------------------------------------------
// Everything that is not plain C++. On a CPU these functions come from cuda/host/.

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define ROLL _Pragma("unroll 1")  // a small loop stays in the instruction cache
namespace ptx {

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return bytes;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void* shared_pointer(uint32_t address) {
  return __cvta_shared_to_generic(address);
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
// Words that tell by themselves whether they have been written need no order, only that each
// arrives in one piece.
__device__ __forceinline__ void red_relaxed_add(int* p, int v) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint4 ld_relaxed(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ uint64_t ld_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// The same for words that the host reads or writes while the kernel runs.
__device__ __forceinline__ void st_release_host(int* p, int v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ int ld_relaxed_host(const int* p) {
  int v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Flags between warps of one block.
__device__ __forceinline__ int ld_relaxed_shared(const int* p) {
  int v;
  asm volatile("ld.relaxed.cta.shared.s32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed_shared(int* p, int v) {
  asm volatile("st.relaxed.cta.shared.s32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
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
// Programmatic dependent launch: the next kernel may start, and this one needs what the one before
// has written.
__device__ __forceinline__ void launch_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Global memory written by ordinary stores is about to be read by the copy engine.
__device__ __forceinline__ void fence_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
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
__device__ __forceinline__ void fence_copies() {}
__device__ __forceinline__ void launch_next() {}
__device__ __forceinline__ void wait_for_previous() {}
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

constexpr int CONSUMERS = 8;  // consumer warps: the numeric contract adds this many partial sums
enum Warps { LOADER = CONSUMERS, HELPER, WAITER, SIGNALLER, N_WARPS };
constexpr int THREADS = N_WARPS * 32;  // 384
constexpr int COLUMNS = 8;             // the n of an mma
// Buffers in global memory have places for ROWS rows. A build serves up to MOST_ROWS of them, and
// `rows_in_use` says how many there are: one row needs less shared memory and fewer instructions.
constexpr int N_TILES = (MOST_ROWS + COLUMNS - 1) / COLUMNS;  // n tiles of a product
constexpr int TILE_BYTES = 512;           // 16 x 16 bf16, an mma A fragment: 16 bytes per lane
constexpr int LANES = 32;                 // uint4 per weight tile, uint2 per activation tile
constexpr int KEY_TILES = PAGE / 16;      // 4
constexpr int DIM_TILES = HEAD_DIM / 16;  // 2, 4 or 8
constexpr int PAGE_TILES = 2 * KEY_TILES * DIM_TILES;  // K and V^T of one KV head
constexpr int PAGE_STAGES = (PAGE_TILES + STAGE_TILES - 1) / STAGE_TILES;
// A chunk's pages come as they are, unless the ring is too short: then first all keys, then all
// values.
constexpr bool KEYS_FIRST = CHUNK_PAGES * PAGE_STAGES > RING_STAGES;
constexpr int RUN_TILES = KEYS_FIRST ? PAGE_TILES / 2 : PAGE_TILES;
constexpr int RUN_STAGES = (RUN_TILES + STAGE_TILES - 1) / STAGE_TILES;
constexpr int ITEM_RUNS = KEYS_FIRST ? 2 * CHUNK_PAGES : CHUNK_PAGES;
constexpr int CHUNK = PAGE * CHUNK_PAGES;  // 128 keys: one key tile per consumer warp
constexpr int LIST = (MOST_SPLITS + CONSUMERS - 1) / CONSUMERS;  // most splits in one sum of MERGE
constexpr int SPLIT_PLACES = (MOST_SPLITS + 31) / 32 * 32;       // in shared memory: whole warps
constexpr int HIDDEN_TILES = HIDDEN / 16;
constexpr int Q_WIDTH = N_HEADS * HEAD_DIM;
constexpr int KV_WIDTH = N_KV_HEADS * HEAD_DIM;
constexpr int GROUP = N_HEADS / N_KV_HEADS;  // query heads of a KV head: columns in attention
constexpr int MAX_ACTIVE = N_EXPERTS < MOST_ROWS * TOP_K ? N_EXPERTS : MOST_ROWS * TOP_K;
constexpr int MOST_TOP_K = 8;
constexpr uint32_t ALL = 0xffffffffu;  // all lanes of a warp

// Tuning. What was measured for each is in bench/LOG.md.
// Stages asked for and not there yet; more than the ring has would alias the parity of a barrier.
constexpr int IN_FLIGHT_FEW = 2;      // up to four rows: 64 KB
constexpr int IN_FLIGHT_BATCH = 3;    // more rows
constexpr int IN_FLIGHT_WAITING = 1;  // while the consumers wait for another SM's results
constexpr int WANTED_IN_FLIGHT = MOST_ROWS <= 4 ? IN_FLIGHT_FEW : IN_FLIGHT_BATCH;
constexpr int IN_FLIGHT = WANTED_IN_FLIGHT < RING_STAGES ? WANTED_IN_FLIGHT : RING_STAGES;
constexpr int MERGE_ROWS = 1;  // builds for so many rows: the consumers do MERGE, else the helper
constexpr int EARLY_ROWS = 2;  // builds for so many: x is read before its counter, see section 5
constexpr bool CONSUMERS_MERGE = MOST_ROWS <= MERGE_ROWS;
constexpr bool READ_EARLY = MOST_ROWS <= EARLY_ROWS;
constexpr int HOLD_BACK_AFTER =  // tasks before such a wait
    1 << OP_EMBED | 1 << OP_QKV | 1 << OP_GATE_UP | 1 << OP_O_PROJ | 1 << OP_DOWN;

static_assert(HIDDEN % 16 == 0 && EXPERT_WIDTH % 16 == 0 && DENSE_WIDTH % 16 == 0,
              "widths are whole tiles");
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128,
              "one warp per tile of dimensions, at most 8");
static_assert(GROUP >= 1 && GROUP <= 8 && GROUP * N_KV_HEADS == N_HEADS,
              "query heads of a KV head fit in n = 8");
static_assert(STAGE_TILES % DIM_TILES == 0 && STAGE_TILES % KEY_TILES == 0,
              "a warp's KV tiles lie in one stage");
static_assert(CHUNK == 16 * CONSUMERS && CHUNK_PAGES * RUN_STAGES <= RING_STAGES,
              "a warp per key tile, and a chunk, or its keys, in the ring");
static_assert(MOST_ROWS >= 1 && MOST_ROWS <= ROWS && ROWS <= 32 &&
                  (MOST_ROWS & (MOST_ROWS - 1)) == 0,
              "a power of two, at most 32 rows");
static_assert(N_EXPERTS <= 128 && TOP_K <= MOST_TOP_K && TOP_K <= N_EXPERTS,
              "four experts per lane of one warp");

// ---- 3 arithmetic ------------------------------------------------------------------------------
// All of it rounds once per operation, so that a GPU, a CPU and NumPy agree bit for bit.

__device__ __forceinline__ float negative_infinity() {
  return __uint_as_float(0xff800000u);
}

__device__ __forceinline__ float bf16_to_float(uint16_t v) {
  return __uint_as_float((uint32_t)v << 16);
}

// Two at once: a single number is converted by the slow unit that also takes square roots.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef __CUDACC__
  uint32_t words;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words) : "f"(high), "f"(low));  // NaN becomes 0x7fff
  return words;
#else
  auto round = [](float v) -> uint32_t {
    const uint32_t u = __float_as_uint(v);
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
#endif
}
__device__ __forceinline__ uint16_t float_to_bf16(float v) {
  return (uint16_t)pack_bf16(v, 0.0f);
}

// Without a branch, so that several of them run side by side.
__device__ __forceinline__ float exp2_(float x) {
  const float near = fmaxf(fminf(x, 127.0f), -126.0f);
  const float shifted = near + 12582912.0f;  // 1.5 * 2^23: its low bits are x as an integer
  const float f = near - (shifted - 12582912.0f);
  float p = 0.000154034632f;
  p = p * f + 0.00133953290f;
  p = p * f + 0.00961813703f;
  p = p * f + 0.0555028692f;
  p = p * f + 0.240226462f;
  p = p * f + 0.693147182f;
  p = p * f + 1.0f;
  const float power = __uint_as_float((__float_as_uint(shifted) + 127u) << 23);
  return x < -126.0f ? 0.0f : p * power;
}

__device__ __forceinline__ float exp_(float x) {
  return exp2_(x * 1.44269502f);
}

// One copy of a division that rounds correctly is long enough.
__device__ __noinline__ float divide(float a, float b) {
  return a / b;
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
  ROLL for (int round = 0; round < 10; round++) {
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

__device__ __noinline__ float gumbel(uint32_t id, uint32_t position, uint32_t key0, uint32_t key1) {
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

// ---- 4 shared memory ---------------------------------------------------------------------------

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

// The experts of one layer: written by the helper, read by the loader and the consumers.
struct Route {
  alignas(16) float score[(N_EXPERTS + 3) / 4 * 4][MOST_ROWS];  // 0: not chosen by this row
  int expert[MAX_ACTIVE];                                       // ascending
  int n_active;
  // This SM's share of GATE_UP, granules numbered through all active experts: begin, middle, end;
  // and where its halves begin, as active expert and granule.
  int unit[3], active[2], granule[2];
};

constexpr int ROPE_ROWS = MOST_ROWS <= 8 ? MOST_ROWS : 1;      // with more, shared memory is short
constexpr int PARTIALS = MOST_ROWS < 4 ? 64 : 16 * MOST_ROWS;  // sums of a warp; MERGE has 33
constexpr int TASK_SLOTS = 4;  // records that the waiter may be ahead

// One lane arrives at an mbarrier for its warp, after a barrier that orders the others before it.
// `compute-sanitizer --tool racecheck` does not follow that order into an mbarrier; for it there is
// a build (CHECKED) in which every thread arrives for itself.
struct Shared {
  alignas(16) uint8_t ring[RING_STAGES][STAGE_TILES * TILE_BYTES];
  alignas(16) uint2 activation[HIDDEN_TILES * MOST_ROWS * 4];  // normed x of all rows, B order
  // Sums of the eight warps; two buffers, so that one barrier per block is enough.
  alignas(16) float partial[2][CONSUMERS][PARTIALS];
  // Attention: exp2(s - m) of a chunk, B order.
  alignas(16) uint2 weight[CONSUMERS][LANES];
  alignas(16) Task tasks[TASK_SLOTS];
  int records[TASK_SLOTS];  // numbers of those tasks
  alignas(16) Route route;
  float tops[CONSUMERS][COLUMNS];  // attention: maximum score of a key tile; MERGE: of splits
  float sums[CONSUMERS][COLUMNS];  // and the sum of its weights
  // MERGE by the helper: maxima of the splits and then their weights; their sums, times the weight.
  alignas(16) float merge_weight[SPLIT_PLACES];
  float merge_l[SPLIT_PLACES];
  alignas(16) Task loading;             // the loader's record
  float squares[MOST_ROWS][CONSUMERS];  // RMSNorm
  Best best[CONSUMERS][MOST_ROWS];      // HEAD
  float rope[ROPE_ROWS][HEAD_DIM];      // cos and sin of the position of this step
  // Of this launch: tokens drawn last, first positions, rows that have drawn a stop token.
  int tokens[MOST_ROWS], positions[MOST_ROWS], earlier[MOST_ROWS], row_stopped[MOST_ROWS];
  float temperatures[MOST_ROWS];
  alignas(
      8) uint64_t full[RING_STAGES];  // loader -> consumers: the bytes of this stage have landed
  uint64_t empty[RING_STAGES];  // consumers -> loader: all eight warps are done with this stage
  uint64_t route_full, route_scored;  // helper -> loader and waiter: experts; -> waiter: scores
  uint64_t route_empty;               // consumers and loader -> helper
  uint64_t ready[TASK_SLOTS];  // waiter -> consumers: the record is here and its inputs are there
  uint64_t done[TASK_SLOTS];   // consumers -> signaller: all eight warps have stored their outputs
  uint64_t free[TASK_SLOTS];   // signaller -> waiter: the record may be overwritten
  Params params;  // for functions that are not inlined: constants behind a pointer are slow
  int waiting;    // consumers wait for another SM's results: the loader leaves them the memory
  int ended;      // the last step is over: whoever ran ahead stops
  int gave_up;    // a wait ran out of time
};
static_assert(sizeof(Shared) <= SHARED_BYTES,
              "mkref/machine/source.py computes the launch's shared memory");

// A position in a ring of N slots. It only moves forward, through tasks, layers and steps; `phase`
// is the parity of the barriers at this position, so nothing is initialised again.
template <int N>
struct Position {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == N) {
      slot = 0;
      phase ^= 1;
    }
  }
};
typedef Position<RING_STAGES> RingPosition;
typedef Position<TASK_SLOTS> TaskPosition;

constexpr int GAMMAS = (HIDDEN / 4 + CONSUMERS * 32 - 1) / (CONSUMERS * 32);

__device__ __forceinline__ int rows_in_use(const Params& p) {
  return MOST_ROWS == 1 ? 1 : (int)p.rows;
}

// What one thread carries along.
struct Context {
  const Params& p;
  Shared& s;
  int thread, warp, lane, group, quad;  // group = lane / 4 and quad = lane % 4: row and column of
                                        // a fragment
  int task = 0;                         // record that is being worked on
  int step = 0;                         // of this launch
  int buffer = 0;                       // of Shared::partial
  int normed = -1;                      // layer whose normed x is in Shared::activation
  bool stopped = false;                 // gave up: no more waiting
  RingPosition ring;
  int stage = 0;        // stages passed, counted for the trace only
  uint2 gamma[GAMMAS];  // of the next RMSNorm: four values of every 1024, fetched before x is there
};

// ---- 5 bounded waits ---------------------------------------------------------------------------
// Every wait ends: with what it waited for, or with a report in `status` after `timeout_ns`.
// Whoever gives up first writes the report; everybody else sees it and stops waiting too. The
// waiter then hands out OP_STOP instead of the next record, so that all consumers leave together,
// and the host can read why.

enum WaitCode {
  WAIT_COUNTER = 1,
  WAIT_FULL = 2,
  WAIT_EMPTY = 3,
  WAIT_ROUTE = 4,
  NOT_FINITE = 5,
  WAIT_TASK = 6,
  WAIT_X = 7
};

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

// Flags, 0 or 1, in shared memory that change while others look at them. Relaxed accesses are no
// race, but racecheck knows only of atomics.
__device__ __forceinline__ int look(const int& flag) {
  return CHECKED ? ptx::atomic_cas((int*)&flag, 0, 0) : ptx::ld_relaxed_shared(&flag);
}
__device__ __forceinline__ void set(int& flag, int value) {
  if (CHECKED)
    ptx::atomic_cas(&flag, 1 - value, value);
  else
    ptx::st_relaxed_shared(&flag, value);
}

// A barrier in shared memory and the parity that is waited for, in one register.
struct Arrivals {
  uint32_t word;  // a barrier lies at a multiple of eight bytes
  __device__ __forceinline__ Arrivals(uint64_t* bar, uint32_t parity)
      : word(ptx::shared_address(bar) | parity) {}
  __device__ __forceinline__ uint64_t* barrier() const {
    return (uint64_t*)ptx::shared_pointer(word & ~7u);
  }
  __device__ __forceinline__ uint32_t parity() const { return word & 1u; }
};
// Which barrier that is, for the report. They stand in this order in `Shared`.
__device__ __forceinline__ Place place_of(const Shared& s, const uint64_t* bar, int task) {
  const int at = (int)(bar - s.full), route = 2 * RING_STAGES, record = route + 3;
  if (at < RING_STAGES) return Place{WAIT_FULL, task, at};
  if (at < route) return Place{WAIT_EMPTY, task, at - RING_STAGES};
  if (at < record) return Place{WAIT_ROUTE, task, s.params.tasks[task].layer};
  return Place{WAIT_TASK, task, (at - record) % TASK_SLOTS};
}

// The slow halves of the waits; true if they gave up. Not inlined, and with few arguments: machine
// code must stay within the instruction cache. Who ran ahead of the last step of a launch gives up
// in silence.
__device__ __noinline__ bool poll_counter(const int* at, int want, Place place) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const Params& p = s.params;
  const uint64_t deadline = ptx::now_ns() + p.timeout_ns;
  ROLL for (int spin = 1;; spin++) {
    const int have = ptx::ld_acquire(at);
    if (reached(have, want)) return false;
    if (look(s.ended)) return true;
    if ((spin & 63) == 0 && expired(p, deadline, place, have, want)) break;
    ptx::pause();
  }
  set(s.gave_up, 1);
  return true;
}
__device__ __noinline__ bool poll_barrier(Arrivals arrivals, int task) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const Params& p = s.params;
  uint64_t* bar = arrivals.barrier();
  const uint32_t parity = arrivals.parity();
  const uint64_t deadline = ptx::now_ns() + p.timeout_ns;
  ROLL for (int spin = 1;; spin++) {
    if (ptx::mbar_try_wait(bar, parity)) return false;
    if (look(s.ended) || look(s.gave_up)) return true;
    if ((spin & 63) == 0 &&
        expired(p, deadline, place_of(s, bar, task), (int)parity ^ 1, (int)parity))
      break;
    ptx::pause();
  }
  set(s.gave_up, 1);
  return true;
}
// Records go round between the warps of one SM. These waits end when every other wait has ended, so
// they do not look at `status`: all warps must agree on which record is the last.
__device__ __noinline__ bool poll_record(Arrivals arrivals, int task) {
  const Shared& s = *(Shared*)ptx::shared_memory();
  const Params& p = s.params;
  uint64_t* bar = arrivals.barrier();
  const uint32_t parity = arrivals.parity();
  const uint64_t deadline = ptx::now_ns() + 4 * (uint64_t)p.timeout_ns;
  ROLL while (!ptx::mbar_try_wait(bar, parity)) {
    if (ptx::now_ns() > deadline) {
      report(p, place_of(s, bar, task), (int)parity ^ 1, (int)parity);
      return true;
    }
    ptx::pause();
  }
  return false;
}

// One lane polls: the acquire orders the producers' writes before this lane, the barrier that the
// caller arrives at passes that on.
__device__ __forceinline__ void wait_counter(Context& c, int counter, int arrivals,
                                             int of_this_step = 1, bool announced = false) {
  const int* at = c.p.counters + counter * COUNTER_STRIDE + announced;
  // Monotonic: never reset between steps or launches. Of announcements the last few may be missing:
  // by the time that the words have been asked for they are there.
  const int want = (int)((uint32_t)arrivals * (uint32_t)(c.p.step + c.step + of_this_step) -
                         (announced ? (uint32_t)arrivals / 32 : 0u));
  if (c.stopped || reached(ptx::ld_acquire(at), want)) return;
  c.stopped = poll_counter(at, want, Place{WAIT_COUNTER, c.task, counter});
}
__device__ __forceinline__ void wait_barrier(Context& c, uint64_t* bar, uint32_t parity) {
  if (!ptx::mbar_try_wait(bar, parity) && poll_barrier(Arrivals(bar, parity), c.task))
    c.stopped = true;
}

// False if there is nothing to wait for any more.
__device__ __forceinline__ bool wait_record(const Context& c, uint64_t* bar, uint32_t parity) {
  return ptx::mbar_try_wait(bar, parity) || !poll_record(Arrivals(bar, parity), c.task);
}

// One arrival of a warp whose lanes have all come this far.
__device__ __forceinline__ void warp_arrive(const Context& c, uint64_t* bar) {
  __syncwarp();
  if (CHECKED || c.lane == 0) ptx::mbar_arrive(bar);
}

// Barrier 1 joins the 256 consumers; the other warps are never held up by it.
__device__ __forceinline__ void consumers_sync() {
  ptx::bar_sync(1, CONSUMERS * 32);
}

// Words that announce themselves. A counter that is signalled with release comes a microsecond
// after the data, because the release waits until memory has confirmed them. Where everybody waits,
// the data themselves say that they are there:
//   router logits   carry a number that grows with every layer and step (`version`);
//   x               is ABSENT, a NaN that no arithmetic makes, until DOWN has written it. DOWN
//                   makes the x that it no longer needs ABSENT; EMBED does so for the other copy.
// So that nobody polls many words for long, x is looked at once its writers have announced it: in
// the word beside their counter, without release. The counter itself follows, and whoever needs
// more than x waits for it (GATE_UP). `mkref/plan/hazards.py` checks that this is enough.
constexpr uint32_t ABSENT = 0xffffffffu;

__device__ __forceinline__ float* x_of(const Context& c, int layer) {
  return c.p.x + (long long)(layer & 1) * ROWS * HIDDEN;
}
__device__ __forceinline__ void put_x(float* at, float value) {
  ptx::st_relaxed((uint32_t*)at, __float_as_uint(value));
}
__device__ __forceinline__ void make_absent(float* at) {
  ptx::st_relaxed((uint32_t*)at, ABSENT);
}
__device__ __forceinline__ bool any_absent(const uint4& v) {
  return v.x == ABSENT || v.y == ABSENT || v.z == ABSENT || v.w == ABSENT;
}
__device__ __forceinline__ uint32_t version(const Context& c, int layer) {
  return (uint32_t)(c.p.step + c.step) * N_LAYERS + layer + 1;
}

// Has somebody who looks for words since then waited for too long?
__device__ __noinline__ bool too_long(uint64_t since, Place place) {
  Shared& s = *(Shared*)ptx::shared_memory();
  if (look(s.ended)) return true;
  if (!expired(s.params, since + s.params.timeout_ns, place, 0, 0)) return false;
  set(s.gave_up, 1);
  return true;
}
// Counts the looks at words that are not there.
struct Patience {
  uint64_t since = 0;
  int looks = 0;
  __device__ __forceinline__ bool over(Place place) {
    ptx::pause();
    if (since == 0) since = ptx::now_ns();
    return (++looks & 63) == 0 && too_long(since, place);
  }
};

// ---- 6 run-time work ---------------------------------------------------------------------------
// Loader and consumers compute the same lists from the same inputs: positions, page tables, routes.

// First granule of a slot's share; `mkref/plan/share.py` is the same function.
__device__ __noinline__ int share(int total, int n_slots, int slot) {
  return (int)((unsigned)total * (unsigned)slot /
               (unsigned)n_slots);  // < 2^22 granules, 2^10 slots
}

// The keys that a row sees in one layer, and the chunks of 128 keys, aligned to absolute positions,
// that hold them. A row has at most MOST_SPLITS splits, of a chunk or of several that one SM works
// on one after the other. How many, and where they begin, depends on the row's length alone.
struct KeyRange {
  int first, last;  // `last` is the token of this step
  int chunk, n_chunks;
  __device__ __forceinline__ int n_splits() const {
    return n_chunks < MOST_SPLITS ? n_chunks : MOST_SPLITS;
  }
  __device__ __forceinline__ int split_begin(int split) const {
    return n_chunks <= MOST_SPLITS ? split : (int)((unsigned)(split * n_chunks) / MOST_SPLITS);
  }
};
__device__ __forceinline__ KeyRange key_range(int position, int window) {
  KeyRange r;
  r.last = position;
  r.first = window > 0 && r.last >= window ? r.last - window + 1 : 0;
  r.chunk = r.first / CHUNK;
  r.n_chunks = r.last / CHUNK - r.chunk + 1;
  return r;
}

// One chunk of an item, which is one split of one KV head of one row. Items are dealt to the slots
// in turn, row after row. `row` is -1 beyond the last item.
struct AttentionItem {
  int row, number;              // of the item in its row
  int head, split, chunk, end;  // chunks count from the row's first visible one
  int first_page, last_page;
  KeyRange range;
  __device__ __forceinline__ void find_row(const Shared& s, int r, int step, int window) {
    row = r;
    range = key_range(s.positions[r] + step, window);
  }
  __device__ __forceinline__ void find_pages() {
    const int page = (range.chunk + chunk) * CHUNK_PAGES;
    first_page = page > range.first / PAGE ? page : range.first / PAGE;
    const int last = page + CHUNK_PAGES - 1;
    last_page = last < range.last / PAGE ? last : range.last / PAGE;
  }
  // To the first chunk of item `number`, if the row has so many; else `number` becomes what it is
  // for the next row.
  __device__ __forceinline__ bool find_item() {
    const int n_items = range.n_splits() * N_KV_HEADS;
    if (number >= n_items) {
      number -= n_items;
      return false;
    }
    head = number % N_KV_HEADS;
    split = number / N_KV_HEADS;
    chunk = range.split_begin(split);
    end = range.split_begin(split + 1);
    return true;
  }
};
// Chunk `nth` of those that slot `first` of `count` has.
__device__ __noinline__ AttentionItem nth_chunk(const Shared& s, int rows, int step, int window,
                                                int first, int count, int nth) {
  AttentionItem item;
  item.number = first;
  ROLL for (int row = 0; row < rows; row++) {
    item.find_row(s, row, step, window);
    ROLL for (; item.find_item(); item.number += count) {
      if (nth < item.end - item.chunk) {
        item.chunk += nth;
        item.find_pages();
        return item;
      }
      nth -= item.end - item.chunk;
    }
  }
  item.row = -1;
  return item;
}
// First tile of a page of one KV head in the pool. Kind 1: the layer slides.
__device__ __forceinline__ int kind_of(const Task& task) {
  return task.flags & FLAG_SLIDING ? 1 : 0;
}
__device__ __forceinline__ long long page_tile(const Params& p, int kv_tiles, int kind, int row,
                                               int head, int page) {
  const int at = p.page_table[(kind * ROWS + row) * (int)p.max_pages + page];
  return kv_tiles + ((long long)at * N_KV_HEADS + head) * PAGE_TILES;
}

// First granule of a slot's share if the slots have shares of another operator with `other`
// granules too: of both together each gets as many as the next, give or take one.
__device__ __forceinline__ int share_beside(int total, int other, int n_slots, int slot) {
  if (total < n_slots) return share(total, n_slots, slot);
  return share(total + other, n_slots, slot) - share(other, n_slots, slot);
}

// The granules (8 outputs: 8 gate and 8 up rows) of all active experts are numbered through, and a
// slot owns one range of them; a task is one half of it.
// The loader and the consumers need it at once, so the helper works it out, lane 0 the begin and
// lane 1 the end.
__device__ __forceinline__ void share_gate_up(Context& c, const Task& task, int n_active) {
  Route& r = c.s.route;
  const int slot = task.first / 2, n_slots = task.count / 2, total = n_active * task.blocks;
  const int at = share_beside(total, task.index, n_slots, slot + (c.lane > 0));
  const int begin = __shfl_sync(ALL, at, 0), end = __shfl_sync(ALL, at, 1);
  const int unit = c.lane == 0 ? begin : c.lane == 1 ? begin + (end - begin + 1) / 2 : end;
  if (c.lane < 3) r.unit[c.lane] = unit;
  if (c.lane < 2) {
    r.active[c.lane] = unit / task.blocks;
    r.granule[c.lane] = unit % task.blocks;
  }
}
// Half of that share: runs of granules, each within one expert.
struct Segment {
  int active = 0, granule = 0, count = 0, left = 0;
  __device__ __forceinline__ void begin(const Route& r, int half, int blocks) {
    active = r.active[half];
    granule = r.granule[half];
    left = r.unit[half + 1] - r.unit[half];
    cut(blocks);
  }
  __device__ __forceinline__ void cut(int blocks) {
    count = left < blocks - granule ? left : blocks - granule;
  }
  __device__ __forceinline__ void next(int blocks) {
    left -= count;
    granule = 0;
    active++;
    cut(blocks);
  }
};

// ---- 7 loader ----------------------------------------------------------------------------------
// One warp walks the task list and keeps the ring full. It waits for free stages and, where the
// bytes depend on it, for the router; never for activations. So it runs ahead of the consumers,
// across tasks, layers and steps.

// Larger logits have larger keys; a NaN loses against everything, 0 stands for nobody.
__device__ __forceinline__ uint32_t route_key(float logit) {
  const uint32_t u = __float_as_uint(logit + 0.0f);  // -0 is +0
  return logit != logit ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}

__device__ __forceinline__ float logit_of(uint32_t key) {
  return __uint_as_float(key == 1u ? 0x7fffffffu : key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The place for the next layer's scores, before its logits are there.
__device__ __forceinline__ void clear_scores(Context& c) {
  float4* score = (float4*)c.s.route.score;
  ROLL for (int i = c.lane; i < (N_EXPERTS + 3) / 4 * MOST_ROWS; i += 32) score[i] =
      float4{0.0f, 0.0f, 0.0f, 0.0f};
}

// The top-k of every row, by one warp. It is on everybody's path, and one warp is slow: what counts
// is the number of dependent instructions. Lane l has experts l, l + 32, ... of a row, sorted; the
// largest of all lanes is taken k times. Scores are not needed before DOWN: those of the last four
// rows are left to `score_experts`, after the loader has been told which experts there are.
struct Picks {
  uint32_t key = 0, expert = 0;  // lane 8 r + k: what row `first_row` + r took as its k-th
  int first_row = 0;
};
constexpr int PICK_ROWS = 32 / MOST_TOP_K;

__device__ __forceinline__ void score_experts(Context& c, const Picks& picks) {
  const int row = picks.first_row + c.lane / MOST_TOP_K;
  if (row >= rows_in_use(c.p) || c.lane % MOST_TOP_K >= TOP_K) return;
  const float logit = logit_of(picks.key);
  c.s.route.score[picks.expert][row] =
      divide(1.0f, 1.0f + exp_(-logit)) + (logit - logit);  // NaN stays NaN
}

__device__ __forceinline__ Picks find_experts(Context& c, int layer) {
  constexpr int PER_LANE = (N_EXPERTS + 31) / 32;
  Route& r = c.s.route;
  const uint32_t want = version(c, layer);
  uint32_t active = 0;  // bit q: some row took expert lane + 32 q
  uint64_t words[PER_LANE];
  auto look_at = [&](int row) {
    UNROLL for (int q = 0; q < PER_LANE; q++) {
      words[q] = (uint64_t)want << 32;
      if (row < rows_in_use(c.p) && c.lane + 32 * q < N_EXPERTS)
        words[q] = ptx::ld_relaxed(c.p.router_logits + row * N_EXPERTS + c.lane + 32 * q);
    }
  };
  Picks picks;
  look_at(0);
  ROLL for (int row = 0; row < rows_in_use(c.p); row++) {
    Patience patience;
    ROLL for (;;) {
      bool missing = false;
      UNROLL for (int q = 0; q < PER_LANE; q++) missing |= (uint32_t)(words[q] >> 32) != want;
      if (__ballot_sync(ALL, missing) == 0) break;
      const bool late = patience.over(Place{WAIT_ROUTE, c.task, layer});
      c.stopped = __ballot_sync(ALL, late) != 0;
      if (c.stopped) return picks;
      look_at(row);
    }
    uint32_t key[PER_LANE], expert_of[PER_LANE];
    UNROLL for (int q = 0; q < PER_LANE; q++) {
      expert_of[q] = c.lane + 32 * q;
      key[q] = expert_of[q] < N_EXPERTS ? route_key(__uint_as_float((uint32_t)words[q])) : 0u;
    }
    if (MOST_ROWS > 1) look_at(row + 1);  // a microsecond away
    // Descending; of equal keys the lower expert stays first.
    UNROLL for (int last = PER_LANE - 1; last > 0; last--) UNROLL for (int q = 0; q < last; q++) {
      const bool swap = key[q] < key[q + 1];
      const uint32_t k = key[q], e = expert_of[q];
      key[q] = swap ? key[q + 1] : k;
      key[q + 1] = swap ? k : key[q + 1];
      expert_of[q] = swap ? expert_of[q + 1] : e;
      expert_of[q + 1] = swap ? e : expert_of[q + 1];
    }
    if (row % PICK_ROWS == 0) {
      if (row > 0) score_experts(c, picks);
      picks.first_row = row;
    }
    ROLL for (int k = 0; k < TOP_K; k++) {
      const uint32_t top = __reduce_max_sync(ALL, key[0]);
      // Equal logits: the lower expert.
      const uint32_t expert = __reduce_min_sync(ALL, key[0] == top ? expert_of[0] : ALL);
      if (c.lane == row % PICK_ROWS * MOST_TOP_K + k) picks.key = top, picks.expert = expert;
      const bool taken = key[0] == top && expert_of[0] == expert;
      if (taken) active |= 1u << (expert / 32);
      UNROLL for (int q = 1; q < PER_LANE; q++) {
        key[q - 1] = taken ? key[q] : key[q - 1];
        expert_of[q - 1] = taken ? expert_of[q] : expert_of[q - 1];
      }
      if (taken) key[PER_LANE - 1] = 0;
    }
  }
  int n_active = 0;
  UNROLL for (int q = 0; q < PER_LANE; q++) {
    const bool mine = active >> q & 1;
    const uint32_t votes = __ballot_sync(ALL, mine);
    if (mine) r.expert[n_active + __popc(votes & ((1u << c.lane) - 1))] = c.lane + 32 * q;
    n_active += __popc(votes);
  }
  if (c.lane == 0) r.n_active = n_active;
  return picks;
}

// What the layer's scores lack when its experts are known.
__device__ __forceinline__ void finish_scores(Context& c, const Picks& picks) {
  score_experts(c, picks);
  if (!NORM_TOPK) return;
  __syncwarp();  // scores of all lanes
  if (c.lane >= rows_in_use(c.p)) return;
  Route& r = c.s.route;
  float sum = 0.0f;
  ROLL for (int e = 0; e < N_EXPERTS; e++) sum = sum + r.score[e][c.lane];
  ROLL for (int e = 0; e < N_EXPERTS; e++) r.score[e][c.lane] = divide(r.score[e][c.lane], sum);
}

// The next 32 runs of an ATTENTION task, each a page, or its keys or values: lane l knows run l.
// Looked up ahead of need, since a table lookup is a trip to L2.
struct Pages {
  long long tile;
  bool exists;
};
__device__ __noinline__ Pages find_pages(int first, int count, int window, int kv_tiles, int kind,
                                         int step, int round) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const int lane = threadIdx.x % 32;
  const AttentionItem item =
      nth_chunk(s, rows_in_use(s.params), step, window, first, count, round + lane / ITEM_RUNS);
  Pages found = {0, false};
  if (item.row >= 0) {
    const int run = lane % ITEM_RUNS, page = item.first_page + run % CHUNK_PAGES;
    found.exists = page <= item.last_page;
    if (found.exists)
      found.tile = page_tile(s.params, kv_tiles, kind, item.row, item.head, page) +
                   run / CHUNK_PAGES * RUN_TILES;
  }
  return found;
}
__device__ __forceinline__ Pages find_pages(const Context& c, const Task& task, int round) {
  return find_pages(task.first, task.count, task.window, task.kv_tiles, kind_of(task), c.step,
                    round);
}

// Column 0 to 3 of a stage: asked for, seen to have landed, taken and given back by a consumer.
__device__ __forceinline__ void stamp_stage(const Context& c, int stage, int column) {
  c.p.stage_trace[((long long)blockIdx.x * STAGE_TRACE + stage % STAGE_TRACE) * 4 + column] =
      ptx::now_ns();
}

// The loader's side of the ring.
struct Stream {
  Context& c;
  RingPosition landed;  // stages before it are known to have arrived
  int in_flight = 0, issued = 0;

  __device__ __forceinline__ void wait_landed() {
    wait_barrier(c, &c.s.full[landed.slot], landed.phase);
    landed.advance();
    if (TRACE && c.lane == 0) stamp_stage(c, issued - in_flight, 1);
    in_flight--;
  }
  // A run of consecutive tiles. The consumers take runs in the same order.
  __device__ __forceinline__ void run(const uint4* tiles, int n_tiles) {
    ROLL for (; n_tiles > 0 && !c.stopped; n_tiles -= STAGE_TILES, tiles += STAGE_TILES * LANES) {
      wait_barrier(c, &c.s.empty[c.ring.slot], c.ring.phase ^ 1);
      const int most = look(c.s.waiting) ? IN_FLIGHT_WAITING : IN_FLIGHT;
      ROLL while (in_flight >= most && !c.stopped) wait_landed();
      c.stopped = __ballot_sync(ALL, c.stopped) != 0;
      if (c.stopped) return;
      ptx::copy_async(c.s.ring[c.ring.slot], tiles,
                      (n_tiles < STAGE_TILES ? n_tiles : STAGE_TILES) * TILE_BYTES,
                      &c.s.full[c.ring.slot]);
      if (TRACE && c.lane == 0) stamp_stage(c, issued, 0);
      c.ring.advance();
      in_flight++;
      issued++;
    }
  }
};

// Without running ahead, for comparison: wait until the consumers have been given the task.
__device__ __forceinline__ bool taken_by_consumers(Context& c, const Task& task, TaskPosition& at) {
  if (task.op == OP_MERGE && !CONSUMERS_MERGE) return true;
  wait_barrier(c, &c.s.ready[at.slot], at.phase);
  c.stopped = __ballot_sync(ALL, c.stopped || look(c.s.gave_up)) != 0;
  at.advance();
  return !c.stopped;
}

__device__ void loader(Context& c, int begin, int end) {
  Stream stream{c};
  TaskPosition at;
  uint32_t route_phase = 0;
  // Records come from L2, a microsecond away, and this warp must not stand still: each is asked for
  // two tasks before its turn. Lane l holds word l; shared memory gives all words to all lanes.
  constexpr int WORDS = sizeof(Task) / 4;
  auto fetch = [&](int number) {
    const int* words = (const int*)(c.p.tasks + (number < end ? number : begin));
    return c.lane < WORDS ? words[c.lane] : 0;
  };
  auto unpack = [&](int word) {
    __syncwarp();  // the last record has been read
    if (c.lane < WORDS) ((int*)&c.s.loading)[c.lane] = word;
    __syncwarp();  // words of all lanes
    return c.s.loading;
  };
  int soon = fetch(begin), later = fetch(begin + 1);
  Pages next_pages = {0, false};
  ROLL for (c.step = 0; c.step < c.p.n_steps && !c.stopped; c.step++) {
    int routed_layer = -1;
    if (__shfl_sync(ALL, soon, 0) == OP_ATTENTION) next_pages = find_pages(c, unpack(soon), 0);
    ROLL for (c.task = begin; c.task < end && !c.stopped; c.task++) {
      const Task task = unpack(soon);
      Pages pages = next_pages;
      soon = later;
      later = fetch(c.task + 2 < end ? c.task + 2 : c.task + 2 - (end - begin));
      if (DEPENDENT_LAUNCH &&
          (task.op == OP_ATTENTION || task.op == OP_GATE_UP || task.op == OP_DOWN))
        ptx::wait_for_previous();  // all others read nothing but weights here
      if (!RUN_AHEAD && !taken_by_consumers(c, task, at)) break;
      if (c.task + 1 < end && __shfl_sync(ALL, soon, 0) == OP_ATTENTION)
        next_pages = find_pages(c, unpack(soon), 0);
      if (!TRACE && task.op == OP_MERGE) continue;  // has no bytes
      const uint4* weights = c.p.weights + (long long)task.weights * LANES;
      const long long block = (long long)task.k_tiles * LANES;  // uint4 of a row block
      const bool routed = task.op == OP_GATE_UP || task.op == OP_DOWN;
      if (routed && task.layer != routed_layer) {
        wait_barrier(c, &c.s.route_full, route_phase);
        c.stopped = __ballot_sync(ALL, c.stopped || look(c.s.gave_up)) != 0;
        if (c.stopped) break;
        route_phase ^= 1;
        routed_layer = task.layer;
      }
      if (task.op == OP_ATTENTION) {
        // Keys that the step before appended: waited for where no route before says that they are
        // there.
        if (c.lane == 0 && task.route_wait >= 0)
          wait_counter(c, task.route_wait, task.route_count, 0);
        c.stopped = __ballot_sync(ALL, c.stopped) != 0;
        __syncwarp();         // lane 0's acquire now orders the keys before the copies
        ptx::fence_copies();  // also of those that the helper's acquire has shown
      }
      const Route& route = c.s.route;
      // How many runs the task has, and which.
      int n_runs =
          task.op == OP_ROUTER || task.op == OP_QKV || task.op == OP_O_PROJ || task.op == OP_HEAD;
      Segment part;
      if (task.op == OP_GATE_UP) {
        part.begin(route, task.first % 2, task.blocks);
        n_runs = N_EXPERTS;  // at most: ends with the last granule
      }
      if (task.op == OP_DOWN) n_runs = task.count * route.n_active;
      if (task.op == OP_ATTENTION) n_runs = 1 << 30;  // ends with the last item
      int expert = 0, row_block = task.first;
      ROLL for (int i = 0; i < n_runs && !c.stopped; i++) {
        const uint4* tiles = weights + task.first * block;
        int n_tiles = task.count * task.k_tiles;
        if (task.op == OP_GATE_UP) {
          if (part.left <= 0) break;
          tiles = weights + (route.expert[part.active] * task.blocks + part.granule) * block;
          n_tiles = part.count * task.k_tiles;
          part.next(task.blocks);
        } else if (task.op == OP_DOWN) {
          tiles = weights + (route.expert[expert] * task.blocks + row_block) * block;
          n_tiles = task.k_tiles;
          if (++expert == route.n_active) expert = 0, row_block++;
        } else if (task.op == OP_ATTENTION) {
          if (i > 0 && i % 32 == 0) pages = find_pages(c, task, i / ITEM_RUNS);
          const bool exists = __shfl_sync(ALL, (int)pages.exists, i % 32) != 0;
          if (!exists && i % ITEM_RUNS == 0) break;  // every chunk has a first page
          if (!exists) continue;
          tiles = c.p.kv + __shfl_sync(ALL, pages.tile, i % 32) * LANES;
          n_tiles = RUN_TILES;
        }
        stream.run(tiles, n_tiles);
      }
      if (task.flags & FLAG_RELEASE) warp_arrive(c, &c.s.route_empty);
      if (TRACE && c.lane == 0) c.p.trace[(long long)c.task * 4 + 3] = ptx::now_ns();
    }
  }
  // Copies that nobody will read may still be on their way into this block's shared memory: let
  // them land before it is given up.
  const uint64_t deadline = ptx::now_ns() + 100000000ull;
  ROLL for (; stream.in_flight > 0; stream.in_flight--, stream.landed.advance()) while (
      !ptx::mbar_try_wait(&c.s.full[stream.landed.slot], stream.landed.phase) &&
      ptx::now_ns() < deadline) ptx::pause();
}

// The best candidate of lanes that are `first`, 2 `first`, ... 16 apart.
__device__ __noinline__ Best best_of_lanes(Best best, int first) {
  ROLL for (int x = first; x < 32; x <<= 1) {
    const float v = __shfl_xor_sync(ALL, best.value, x);
    const int t = __shfl_xor_sync(ALL, best.token, x);
    best.offer(v, t);
  }
  return best;
}

// ---- 8 products --------------------------------------------------------------------------------
// Everything heavy is weights (M) times activations of all rows (N). A block is 16 outputs; its k
// tiles are dealt to the eight consumer warps, and their sums meet in shared memory.

// This warp is done with the stage that it is at.
__device__ __forceinline__ void leave_stage(Context& c) {
  warp_arrive(c, &c.s.empty[c.ring.slot]);
  c.ring.advance();
  if (TRACE && c.thread == 0) stamp_stage(c, c.stage, 3);
  c.stage++;
}

// Consumer side of the ring within one run. Every warp passes through every stage, also where it
// has no tile, so that the parity of a barrier is never ambiguous.
struct Reader {
  Context& c;
  int held = -1;  // stage of the run that this warp holds
  __device__ __forceinline__ void next() {
    if (held >= 0) release();
    held++;
    wait_barrier(c, &c.s.full[c.ring.slot], c.ring.phase);
    if (TRACE && c.thread == 0) stamp_stage(c, c.stage, 2);
  }
  __device__ __forceinline__ void release() { leave_stage(c); }
  // This lane's 16 bytes of tile `i`; tile `i + 1`, if in the same stage, lies LANES further. Tiles
  // are asked for in ascending order.
  __device__ __forceinline__ const uint4* tile(int i) {
    ROLL while (held < i / STAGE_TILES) next();
    return (const uint4*)c.s.ring[c.ring.slot] + i % STAGE_TILES * LANES + c.lane;
  }
  __device__ __forceinline__ void close() {
    if (held >= 0) release();
    held = -1;
  }
};

// Sums of one warp for 16 outputs: the C fragment of an mma per eight rows.
struct Sums {
  float v[N_TILES][4];
};

constexpr int TILES = 8, SPAN = TILES * CONSUMERS;  // a warp's eight tiles of a stage of 64
constexpr int X_STAGES = HIDDEN_TILES / SPAN, O_STAGES = Q_WIDTH / 16 / SPAN;
constexpr int EXPERT_TILES =  // a warp's tiles of an expert in DOWN
    EXPERT_WIDTH < 16 * CONSUMERS ? 1 : EXPERT_WIDTH / 16 / CONSUMERS;
// Is the geometry such that stages and blocks meet, as in North Mini Code? Then each warp has the
// same number of tiles in each stage, known when this is compiled.
constexpr bool STAGES_FIT = N_TILES == 1 && STAGE_TILES == SPAN && HIDDEN_TILES % SPAN == 0 &&
                            Q_WIDTH / 16 % SPAN == 0 && X_STAGES <= 2 && O_STAGES <= 4;
constexpr bool EXPERTS_FIT = N_TILES == 1 && EXPERT_WIDTH % (16 * CONSUMERS) == 0 &&
                             EXPERT_WIDTH / 16 <= STAGE_TILES && EXPERT_TILES <= TILES;
constexpr int AHEAD = 2;  // experts in DOWN whose activations are on their way

// A chain whose tiles may lie across stages anywhere: small models, and more than eight rows. One
// tile after another, and one copy of the code, so everything goes in and out by value. `wanted`,
// bit t: this lane's row of n tile t is needed; all others are zeros.
struct Chain {
  Sums sums;
  RingPosition ring;
  int held, stage;
  bool stopped;
};
__device__ __noinline__ Chain chain_anywhere(Context c, int held, int first, int k_tiles,
                                             const uint2* b, int tile_rows, uint32_t wanted) {
  Reader reader{c, held};
  Sums sums = {};
  ROLL for (int kt = c.warp; kt < k_tiles; kt += CONSUMERS) {
    const uint4 a = *reader.tile(first + kt);
    UNROLL for (int t = 0; t < N_TILES; t++) {
      uint2 x = {0u, 0u};
      if (wanted >> t & 1) x = b[kt * tile_rows * 4 + t * LANES + c.lane];
      ptx::mma_m16n8k16(sums.v[t], a, x);
    }
  }
  reader.tile(first + k_tiles - 1);  // pass all stages, also without a tile in them
  return Chain{sums, c.ring, reader.held, c.stage, c.stopped};
}
__device__ __forceinline__ Sums chain(Context& c, Reader& reader, int first, int k_tiles,
                                      const uint2* b, int tile_rows, uint32_t wanted) {
  const Chain done = chain_anywhere(c, reader.held, first, k_tiles, b, tile_rows, wanted);
  c.ring = done.ring;
  c.stopped = done.stopped;
  c.stage = done.stage;
  reader.held = done.held;
  return done.sums;
}

// Rows of this lane's columns that take part; with an expert, those that chose it.
__device__ __forceinline__ uint32_t wanted_rows(const Context& c, const float* score) {
  uint32_t wanted = 0;
  UNROLL for (int t = 0; t < N_TILES; t++) {
    const int row = t * COLUMNS + c.group;
    if (row < rows_in_use(c.p) && (score == nullptr || score[row] != 0.0f)) wanted |= 1u << t;
  }
  return wanted;
}

// N tiles of this warp, eight tiles apart, in the stage that the consumers are at: chained in
// ascending order. All loads go out before the first product.
template <int N>
__device__ __forceinline__ void chain_stage(Context& c, float (&acc)[4], const uint2 (&x)[N]) {
  wait_barrier(c, &c.s.full[c.ring.slot], c.ring.phase);
  if (TRACE && c.thread == 0) stamp_stage(c, c.stage, 2);
  const uint4* tiles = (const uint4*)c.s.ring[c.ring.slot] + c.thread;
  uint4 a[N];
  UNROLL for (int i = 0; i < N; i++) a[i] = tiles[i * CONSUMERS * LANES];
  UNROLL for (int i = 0; i < N; i++) ptx::mma_m16n8k16(acc, a[i], x[i]);
  leave_stage(c);
}

// The activations of a whole product in registers: loaded once, used for every block.
template <int N_STAGES>
struct Resident {
  uint2 x[N_STAGES][TILES];
  // `tile_rows`: rows that a tile of `b` has places for.
  // A column of an mma depends on no other: lanes beyond the last row read again what row 0 has.
  __device__ __forceinline__ void load(const Context& c, const uint2* b, int tile_rows) {
    const int at = c.group < rows_in_use(c.p) ? c.lane : c.quad;
    UNROLL for (int stage = 0; stage < N_STAGES; stage++) UNROLL for (int i = 0; i < TILES; i++)
        x[stage][i] = b[((stage * TILES + i) * CONSUMERS + c.warp) * tile_rows * 4 + at];
  }
  __device__ __forceinline__ Sums multiply(Context& c) const {
    Sums sums = {};
    UNROLL for (int stage = 0; stage < N_STAGES; stage++) chain_stage(c, sums.v[0], x[stage]);
    return sums;
  }
};

// acc += score * part for the rows that chose the expert.
__device__ __forceinline__ void add_expert(const Context& c, Sums& sums, const Sums& part,
                                           const float* score) {
  UNROLL for (int t = 0; t < N_TILES; t++) UNROLL for (int i = 0; i < 2; i++) {
    const int row = t * COLUMNS + 2 * c.quad + i;
    const float s = row < MOST_ROWS ? score[row] : 0.0f;
    if (s == 0.0f) continue;
    sums.v[t][i] = sums.v[t][i] + s * part.v[t][i];
    sums.v[t][i + 2] = sums.v[t][i + 2] + s * part.v[t][i + 2];
  }
}

// This warp's sums of DOWN for one block: one part per active expert, each a run of its own. Each
// expert's h comes from L2, a microsecond away, so those of AHEAD experts are always on their way.
__device__ __forceinline__ Sums multiply_experts(Context& c, int k_tiles) {
  const Route& route = c.s.route;
  const int n_active = route.n_active;
  const uint2* h = (const uint2*)c.p.h;
  Sums sums = {};
  if constexpr (EXPERTS_FIT) {
    if (k_tiles == EXPERT_TILES * CONSUMERS) {
      uint2 ahead[AHEAD][EXPERT_TILES] = {};  // a lane that needs none keeps what it has
      auto fetch = [&](uint2(&x)[EXPERT_TILES], int active) {
        const bool wanted = active < n_active && c.group < rows_in_use(c.p) &&
                            (MOST_ROWS == 1 || route.score[route.expert[active]][c.group] != 0.0f);
        const uint2* from =
            h + (active * (EXPERT_TILES * CONSUMERS) + c.warp) * (ROWS * 4) + c.lane;
        UNROLL for (int i = 0; i < EXPERT_TILES; i++) if (wanted) x[i] =
            from[i * CONSUMERS * (ROWS * 4)];
      };
      UNROLL for (int j = 0; j < AHEAD; j++) fetch(ahead[j], j);
      ROLL for (int base = 0; base < n_active; base += AHEAD)
          UNROLL for (int j = 0; j < AHEAD; j++) {
        if (base + j >= n_active) break;
        Sums part = {};
        chain_stage(c, part.v[0], ahead[j]);
        add_expert(c, sums, part, route.score[route.expert[base + j]]);
        fetch(ahead[j], base + j + AHEAD);
      }
      return sums;
    }
  }
  ROLL for (int active = 0; active < n_active; active++) {
    const float* score = route.score[route.expert[active]];
    Reader reader{c};
    const Sums part = chain(c, reader, 0, k_tiles, h + (long long)active * k_tiles * ROWS * 4, ROWS,
                            wanted_rows(c, score));
    reader.close();
    add_expert(c, sums, part, score);
  }
  return sums;
}

// Show this warp's sums to the other warps; after it, `total` adds the eight of one element.
__device__ __forceinline__ void exchange(Context& c, const Sums& sums) {
  c.buffer ^= 1;  // readers of the last block may still be in the other buffer
  float* at = c.s.partial[c.buffer][c.warp];
  UNROLL for (int t = 0; t < N_TILES; t++) UNROLL for (int i = 0; i < 4; i++) {
    const int row = t * COLUMNS + 2 * c.quad + i % 2;
    if (row < MOST_ROWS) at[(c.group + i / 2 * 8) * MOST_ROWS + row] = sums.v[t][i];
  }
  consumers_sync();  // writers above, readers in `total`
}
__device__ __forceinline__ float total(const Shared& s, int buffer, int r, int row) {
  float sum = s.partial[buffer][0][r * MOST_ROWS + row];
  UNROLL for (int w = 1; w < CONSUMERS; w++) sum = sum + s.partial[buffer][w][r * MOST_ROWS + row];
  return sum;
}

__device__ __forceinline__ void fetch_gamma(Context& c, int layer) {
  const uint2* gamma = (const uint2*)(c.p.gammas + (long long)layer * HIDDEN);
  UNROLL for (int i = 0; i < GAMMAS; i++) if (c.thread + i * CONSUMERS * 32 < HIDDEN / 4)
      c.gamma[i] = gamma[c.thread + i * CONSUMERS * 32];
}

// RMSNorm of x with the layer's gamma, into shared memory in B order. Every SM does it for itself:
// reading 8 KB per row from L2 is cheaper than a hop between SMs. Four rows at a time are on their
// way from L2.
__device__ __forceinline__ void load_normed(Context& c, int layer) {
  constexpr int QUADS = HIDDEN / 4, EACH = CONSUMERS * 32, PER = GAMMAS;
  constexpr int SIDE = MOST_ROWS < 4 ? MOST_ROWS : 4;
  const uint4* x = (const uint4*)x_of(c, layer);
  ROLL for (int base = 0; base < rows_in_use(c.p); base += SIDE) {
    float4 v[SIDE][PER];
    Patience patience;
    ROLL for (;;) {  // once, if the counter of x has been waited for
      bool missing = false;
      UNROLL for (int j = 0; j < SIDE; j++) UNROLL for (int i = 0; i < PER; i++) {
        v[j][i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
        if (base + j < rows_in_use(c.p) && c.thread + i * EACH < QUADS) {
          const uint4 quad = ptx::ld_relaxed(x + (base + j) * QUADS + c.thread + i * EACH);
          missing |= any_absent(quad);
          v[j][i] = float4{__uint_as_float(quad.x), __uint_as_float(quad.y),
                           __uint_as_float(quad.z), __uint_as_float(quad.w)};
        }
      }
      if (!missing || c.stopped) break;
      c.stopped = patience.over(Place{WAIT_X, c.task, layer});
    }
    float sum[SIDE];
    UNROLL for (int j = 0; j < SIDE; j++) {
      sum[j] = 0.0f;
      UNROLL for (int i = 0; i < PER; i++) {
        sum[j] = sum[j] + v[j][i].x * v[j][i].x;
        sum[j] = sum[j] + v[j][i].y * v[j][i].y;
        sum[j] = sum[j] + v[j][i].z * v[j][i].z;
        sum[j] = sum[j] + v[j][i].w * v[j][i].w;
      }
    }
    ROLL for (int m = 16; m > 0; m >>= 1) UNROLL for (int j = 0; j < SIDE; j++) sum[j] =
        sum[j] + __shfl_xor_sync(ALL, sum[j], m);
    UNROLL for (int j = 0; j < SIDE; j++) if (c.lane == 0 && base + j < rows_in_use(c.p))
        c.s.squares[base + j][c.warp] = sum[j];
    consumers_sync();    // sums of all warps
    float scale = 0.0f;  // lane j: of row base + j
    if (c.lane < SIDE && base + c.lane < rows_in_use(c.p)) {
      const float* squares = c.s.squares[base + c.lane];
      float sum = squares[0];
      for (int w = 1; w < CONSUMERS; w++) sum = sum + squares[w];
      constexpr bool EXACT = (HIDDEN & (HIDDEN - 1)) == 0;  // then a product is the quotient
      const float mean = EXACT ? sum * (1.0f / HIDDEN) : divide(sum, (float)HIDDEN);
      scale = 1.0f / sqrtf(mean + RMS_EPS);
    }
    UNROLL for (int j = 0; j < SIDE; j++) {
      const float r = __shfl_sync(ALL, scale, j);
      if (base + j >= rows_in_use(c.p)) break;
      UNROLL for (int i = 0; i < PER; i++) {
        const int k = (c.thread + i * EACH) * 4;
        if (k >= HIDDEN) continue;
        uint32_t* out = (uint32_t*)c.s.activation + ((k >> 4) * MOST_ROWS + base + j) * 8;
        out[b_order(k & 15) / 2] =
            pack_bf16((v[j][i].x * r) * bf16_to_float((uint16_t)c.gamma[i].x),
                      (v[j][i].y * r) * bf16_to_float((uint16_t)(c.gamma[i].x >> 16)));
        out[b_order((k & 15) + 2) / 2] =
            pack_bf16((v[j][i].z * r) * bf16_to_float((uint16_t)c.gamma[i].y),
                      (v[j][i].w * r) * bf16_to_float((uint16_t)(c.gamma[i].y >> 16)));
      }
    }
  }
  consumers_sync();  // activations of all threads
}

// The angles of this step, for RoPE in every layer.
__device__ __forceinline__ const float* angles_in_memory(const Context& c, int row) {
  return c.p.rope + (long long)(c.s.positions[row] + c.step) * HEAD_DIM;
}
__device__ __forceinline__ void load_rope(Context& c) {
  if (ROPE_ROWS < MOST_ROWS) return;
  ROLL for (int i = c.thread; i < rows_in_use(c.p) * HEAD_DIM; i += CONSUMERS * 32)
      c.s.rope[i / HEAD_DIM][i % HEAD_DIM] = angles_in_memory(c, i / HEAD_DIM)[i % HEAD_DIM];
}
__device__ __forceinline__ const float* angles(const Context& c, int row) {
  if constexpr (ROPE_ROWS < MOST_ROWS) return angles_in_memory(c, row);
  return c.s.rope[row];
}

// What one thread does with the sum of output `r` of a block of a product of x, for one row. `out`
// is the output's number among all of the operator, `h` where an expert's activations go.
__device__ __forceinline__ void finish(const Context& c, const Task& task, int out, int r, int row,
                                       uint16_t* h, Best& best) {
  float v = total(c.s, c.buffer, r, row);
  switch (task.op) {
    case OP_ROUTER:
      if (out < N_EXPERTS)
        ptx::st_relaxed(c.p.router_logits + row * N_EXPERTS + out,
                        (uint64_t)version(c, task.layer) << 32 | __float_as_uint(v));
      break;
    case OP_QKV: {  // q in the B order of the attention products; k and v as plain vectors
      const int dim = out % HEAD_DIM;
      if ((task.flags & FLAG_ROPE) && out < Q_WIDTH + KV_WIDTH) {
        const float other = total(c.s, c.buffer, r ^ 1, row);  // of the pair (2i, 2i + 1)
        const float* angle = angles(c, row) + dim / 2 * 2;     // cos, sin
        v = dim & 1 ? v * angle[0] + other * angle[1] : v * angle[0] - other * angle[1];
      }
      if (out < Q_WIDTH) {
        const int head = out / HEAD_DIM;
        const int tile = (row * N_KV_HEADS + head / GROUP) * DIM_TILES + dim / 16;
        c.p.q[(tile * COLUMNS + head % GROUP) * 16 + b_order(dim % 16)] = float_to_bf16(v);
      } else if (out < Q_WIDTH + KV_WIDTH) {
        c.p.k_new[row * KV_WIDTH + out - Q_WIDTH] = float_to_bf16(v);
      } else {
        c.p.v_new[row * KV_WIDTH + out - Q_WIDTH - KV_WIDTH] = float_to_bf16(v);
      }
      break;
    }
    case OP_GATE_UP: {  // h = silu(gate) * up; gate in rows 0-7 of the block, up in rows 8-15
      const float up = total(c.s, c.buffer, r + 8, row);
      h[(out / 16 * ROWS + row) * 16 + b_order(out % 16)] =
          float_to_bf16((v / (1.0f + exp_(-v))) * up);
      break;
    }
    case OP_HEAD: {
      if (out >= VOCAB) break;
      v = v * LOGIT_SCALE;
      c.p.logits[(long long)row * VOCAB + out] = v;
      if (!(fabsf(v) <= 3.402823466e38f)) report(c.p, Place{NOT_FINITE, c.task, row}, out, 0);
      if (c.s.temperatures[row] > 0.0f)
        v = divide(v, c.s.temperatures[row]) +
            gumbel(out, c.s.positions[row] + c.step, c.p.seeds[2 * row], c.p.seeds[2 * row + 1]);
      best.offer(v, out);
    }
  }
}

// Which element of a block of `n` outputs a thread finishes rotates from block to block, so that no
// warp is always late.
constexpr int EACH = (16 * MOST_ROWS + CONSUMERS * 32 - 1) / (CONSUMERS * 32);  // of one thread
__device__ __forceinline__ int element(const Context& c, int i, int block, int n) {
  return (c.thread + i * CONSUMERS * 32 - block * n * MOST_ROWS) & (EACH * CONSUMERS * 32 - 1);
}
// The residual stream before this block's outputs are added: read early, the sum is far from done.
__device__ __forceinline__ void load_before(const Context& c, const float* from, int block,
                                            int first_out, float (&before)[EACH]) {
  UNROLL for (int i = 0; i < EACH; i++) {
    const int at = element(c, i, block, 16), r = at / MOST_ROWS, row = at % MOST_ROWS;
    before[i] = 0.0f;
    if (r < 16 && row < rows_in_use(c.p)) before[i] = from[row * HIDDEN + first_out + r];
  }
}
template <typename Store>
__device__ __forceinline__ void store_after(Context& c, const Sums& sums, int block, int first_out,
                                            const float (&before)[EACH], Store store) {
  exchange(c, sums);
  UNROLL for (int i = 0; i < EACH; i++) {
    const int at = element(c, i, block, 16), r = at / MOST_ROWS, row = at % MOST_ROWS;
    if (r < 16) store(row, row * HIDDEN + first_out + r, before[i] + total(c.s, c.buffer, r, row));
  }
}

// ROUTER, QKV, GATE_UP and HEAD: products of the normed x.
__device__ __forceinline__ void product_of_x(Context& c, const Task& task, Best& best) {
  // x does not change within a layer: its second product finds the activations in place.
  if (c.normed != task.layer) {
    load_normed(c, task.layer);
    c.normed = task.layer;
  }
  const bool gate_up = task.op == OP_GATE_UP;
  const int n = gate_up ? 8 : 16;  // outputs of one block
  Segment run;
  if (gate_up)
    run.begin(c.s.route, task.first % 2, task.blocks);
  else
    run.granule = task.first, run.count = run.left = task.count;
  Resident<STAGES_FIT ? X_STAGES : 1> x;
  if constexpr (STAGES_FIT) x.load(c, c.s.activation, MOST_ROWS);
  Reader reader{c};
  // A run of blocks: all of them, or those of one expert.
  ROLL for (; run.left > 0; run.next(task.blocks)) {
    uint16_t* h = c.p.h + (long long)run.active * task.blocks * 8 * ROWS;
    ROLL for (int block = 0; block < run.count; block++) {
      Sums sums;
      if constexpr (STAGES_FIT)
        sums = x.multiply(c);
      else
        sums = chain(c, reader, block * task.k_tiles, task.k_tiles, c.s.activation, MOST_ROWS,
                     wanted_rows(c, nullptr));
      exchange(c, sums);
      UNROLL for (int i = 0; i < EACH; i++) {
        const int at = element(c, i, block, n), r = at / MOST_ROWS, row = at % MOST_ROWS;
        if (r < n && row < rows_in_use(c.p))
          finish(c, task, (run.granule + block) * n + r, r, row, h, best);
      }
    }
    reader.close();
  }
}

// x_mid <- x + output projection, for the rows that this SM owns.
__device__ __forceinline__ void o_proj(Context& c, const Task& task) {
  const float* x = x_of(c, task.layer);
  float before[EACH];
  Resident<STAGES_FIT ? O_STAGES : 1> attn;
  if constexpr (STAGES_FIT) attn.load(c, (const uint2*)c.p.attn, ROWS);
  Reader reader{c};
  ROLL for (int block = 0; block < task.count; block++) {
    const int first_out = (task.first + block) * 16;
    load_before(c, x, block, first_out, before);
    Sums sums;
    if constexpr (STAGES_FIT)
      sums = attn.multiply(c);
    else
      sums = chain(c, reader, block * task.k_tiles, task.k_tiles, (const uint2*)c.p.attn, ROWS,
                   wanted_rows(c, nullptr));
    store_after(c, sums, block, first_out, before, [&](int row, int at, float value) {
      if (row < rows_in_use(c.p)) c.p.x_mid[at] = value;
    });
  }
  reader.close();
}

// x of the next layer <- x_mid + experts. This SM owns the same rows as in `o_proj`: attention and
// all experts add up here.
__device__ __forceinline__ void down(Context& c, const Task& task) {
  float *x_next = x_of(c, task.layer + 1), *x_old = x_of(c, task.layer);
  float before[EACH];
  ROLL for (int block = 0; block < task.count; block++) {
    const int first_out = (task.first + block) * 16;
    load_before(c, c.p.x_mid, block, first_out, before);
    const Sums sums = multiply_experts(c, task.k_tiles);
    store_after(c, sums, block, first_out, before, [&](int row, int at, float value) {
      if (row >= rows_in_use(c.p)) return;
      put_x(x_next + at, value);
      make_absent(x_old + at);
    });
    // Announces x at once, past the signaller; in every build, since this word only grows, too.
    if (task.signal >= 0 && block + 1 == task.count && element(c, 0, block, 16) == 0)
      ptx::red_relaxed_add(c.p.counters + task.signal * COUNTER_STRIDE + 1, 1);
  }
}

__device__ __forceinline__ void product(Context& c, const Task& task) {
  Best best = {negative_infinity(), 0x7fffffff};
  if (task.op == OP_O_PROJ) return o_proj(c, task);
  if (task.op == OP_DOWN) return down(c, task);
  product_of_x(c, task, best);
  if (task.op != OP_HEAD) return;
  // The best token of this task's vocabulary rows: lanes of a warp, then warps.
  best = best_of_lanes(best, MOST_ROWS);
  if (c.lane < MOST_ROWS) c.s.best[c.warp][c.lane] = best;
  if (task.index == 0 && c.thread == 0) c.p.control[0] = ptx::ld_relaxed_host(c.p.progress + 1);
  consumers_sync();  // candidates of the eight warps
  if (c.thread < rows_in_use(c.p)) {
    ROLL for (int w = 0; w < CONSUMERS; w++)
        best.offer(c.s.best[w][c.thread].value, c.s.best[w][c.thread].token);
    c.p.best_values[task.index * ROWS + c.thread] = best.value;
    c.p.best_tokens[task.index * ROWS + c.thread] = best.token;
  }
}

// ---- 9 attention -------------------------------------------------------------------------------
// A chunk of 128 keys of one KV head: a warp scores 16 keys against the query heads of the group,
// then sums the values of 16 dimensions over all keys.

// Keys and values of this step are not in their page yet when the loader copies it. `earlier` rows
// directly before a row belong to the same sequence: their keys are not there either.
struct NewKeys {
  int first;   // absolute position of the first key that comes from k_new
  int row_of;  // row of the key at position p is p - row_of
};

// A tile of values, rows are dimensions: this lane's keys are `key` (absolute), + 1, + 8, + 9; its
// two values of the row's own key are in `own`. Values that the row does not see, after its token
// or before its window, become zeros: their weight is 0, but 0 times the NaN of a page used before
// is NaN.
__device__ __noinline__ uint4 patch_tile(uint4 a, int key, KeyRange range, NewKeys fresh,
                                         const uint16_t* v_new, uint32_t own) {
  uint32_t words[4] = {a.x, a.y, a.z, a.w};  // dimensions g, g + 8 of keys 0, 1; then of 8, 9
  uint16_t value[4][2];
  UNROLL for (int i = 0; i < 8; i++) {
    const int k = key + i / 4 * 8 + i % 2;
    value[i / 2][i % 2] = 0;
    if (k >= range.first && k <= range.last)
      value[i / 2][i % 2] =
          (uint16_t)((k == range.last ? own >> (i / 2 % 2 * 16) : words[i / 2] >> (i % 2 * 16)));
  }
  if (fresh.first < range.last) {
    UNROLL for (int i = 0; i < 8; i++) {
      const int k = key + i / 4 * 8 + i % 2, dim = i / 2 % 2 * 8;
      if (k >= fresh.first && k < range.last)
        value[i / 2][i % 2] = v_new[(k - fresh.row_of) * KV_WIDTH + dim];
    }
  }
  UNROLL for (int i = 0; i < 4; i++) words[i] = value[i][0] | (uint32_t)value[i][1] << 16;
  return uint4{words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void attention(Context& c, const Task& task) {
  uint2 q[DIM_TILES];
  uint32_t own_k[2 * DIM_TILES] = {}, own_v = 0;  // this lane's part of the row's own key and value
  const int rows = rows_in_use(c.p);
  AttentionItem item = {};
  item.row = -1;
  item.number = task.first;
  auto find_item = [&] {  // item.number of item.row, or of a later row
    ROLL while (item.row < 0 || !item.find_item()) {
      if (item.row + 1 >= rows) {
        item.row = -1;
        return;
      }
      item.find_row(c.s, item.row + 1, c.step, task.window);
    }
  };
  auto load_q = [&] {
    const uint2* from =
        (const uint2*)c.p.q + (item.row * N_KV_HEADS + item.head) * DIM_TILES * LANES + c.lane;
    UNROLL for (int dt = 0; dt < DIM_TILES; dt++) {
      q[dt] = uint2{0u, 0u};
      if (c.group < GROUP && item.row >= 0) q[dt] = from[dt * LANES];
    }
  };
  // Place of the row's own key, if it is in the item's chunk; of warp `place / 16`.
  auto own_place = [&](const AttentionItem& of) {
    return of.range.last - (of.range.chunk + of.chunk) * CHUNK;
  };
  auto has_own = [&](int place) { return place / 16 == c.warp && place % 8 == c.group; };
  // With the queries, since L2 is a microsecond away and everybody waits for the last chunk.
  auto load_own = [&] {
    if (item.row < 0 || own_place(item) >= CHUNK) return;
    const int at = item.row * KV_WIDTH + item.head * HEAD_DIM;
    const uint32_t* k = (const uint32_t*)(c.p.k_new + at) + c.quad;
    const uint16_t* v = c.p.v_new + at + c.warp * 16 + c.group;
    if (has_own(own_place(item)))
      UNROLL for (int w = 0; w < 2 * DIM_TILES; w++) own_k[w] = k[w * 4];
    if (c.warp < DIM_TILES) own_v = v[0] | (uint32_t)v[8] << 16;
  };
  find_item();
  item.find_pages();
  load_q();
  load_own();
  // Of the split so far: output before division, and of heads 2 quad, 2 quad + 1 the maximum and
  // the sum.
  float o[4], running[2], total[2];
  ROLL while (item.row >= 0) {
    const AttentionItem now = item;
    const KeyRange range = now.range;
    const int chunk_key = (range.chunk + now.chunk) * CHUNK;  // absolute
    const int place = own_place(now);
    const NewKeys fresh = {range.last - c.s.earlier[now.row], range.last - now.row};
    const bool has_fresh = chunk_key + CHUNK > fresh.first;
    const int first = now.first_page - chunk_key / PAGE, last = now.last_page - chunk_key / PAGE;

    // All stages of the chunk, or of its keys. They are let go of together.
    const int n_stages = (last - first + 1) * RUN_STAGES;
    auto wait_stages = [&] {
      RingPosition at = c.ring;
      bool landed = true;  // mostly: the looks at all of them overlap
      UNROLL for (int k = 0; k < CHUNK_PAGES * RUN_STAGES; k++, at.advance()) if (k < n_stages)
          landed &= ptx::mbar_try_wait(&c.s.full[at.slot], at.phase);
      if (landed && !TRACE) return;
      at = c.ring;
      ROLL for (int k = 0; k < n_stages; k++, at.advance()) {
        wait_barrier(c, &c.s.full[at.slot], at.phase);
        if (TRACE && c.thread == 0) stamp_stage(c, c.stage + k, 2);
      }
    };
    wait_stages();
    auto tile = [&](int page, int t) {  // this lane's 16 bytes of tile t of page 0 or 1
      int slot = c.ring.slot + (page - first) * RUN_STAGES + t / STAGE_TILES;
      if (slot >= RING_STAGES) slot -= RING_STAGES;
      return (const uint4*)c.s.ring[slot] + t % STAGE_TILES * LANES + c.lane;
    };

    // Scores of this warp's 16 keys: rows are keys, columns are heads.
    const int page = c.warp / KEY_TILES, key = chunk_key + c.warp * 16 + c.group;
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (page >= first && page <= last) {
      const uint4* tiles = tile(page, c.warp % KEY_TILES * DIM_TILES);
      uint4 a[DIM_TILES];
      UNROLL for (int dt = 0; dt < DIM_TILES; dt++) a[dt] = tiles[dt * LANES];
      if (has_own(place)) {
        UNROLL for (int dt = 0; dt < DIM_TILES; dt++) {
          const uint32_t low = own_k[2 * dt], high = own_k[2 * dt + 1];
          if (place % 16 < 8)
            a[dt].x = low, a[dt].z = high;
          else
            a[dt].y = low, a[dt].w = high;
        }
      }
      if (has_fresh && fresh.first < range.last) {  // several tokens of a prompt in one step
        const uint32_t* k_new = (const uint32_t*)(c.p.k_new + now.head * HEAD_DIM) + c.quad;
        const uint32_t* k0 = k_new + (key - fresh.row_of) * (KV_WIDTH / 2);
        const uint32_t* k1 = k0 + 8 * (KV_WIDTH / 2);
        const bool fresh0 = key >= fresh.first && key < range.last;
        const bool fresh1 = key + 8 >= fresh.first && key + 8 < range.last;
        UNROLL for (int dt = 0; dt < DIM_TILES; dt++) {
          if (fresh0) a[dt].x = k0[dt * 8], a[dt].z = k0[dt * 8 + 4];
          if (fresh1) a[dt].y = k1[dt * 8], a[dt].w = k1[dt * 8 + 4];
        }
      }
      UNROLL for (int dt = 0; dt < DIM_TILES; dt++) ptx::mma_m16n8k16(s, a[dt], q[dt]);
    }
    if (KEYS_FIRST) {
      ROLL for (int k = 0; k < n_stages; k++) leave_stage(c);
    }
    // What comes next, and its queries if they are others, while this arithmetic goes on.
    const bool split_goes_on = ++item.chunk < item.end;
    if (!split_goes_on) {
      item.number += task.count;
      find_item();
    }
    item.find_pages();
    if (item.row != now.row || item.head != now.head) load_q();
    const uint32_t now_v = own_v;
    load_own();

    const bool pages = page >= first && page <= last;
    UNROLL for (int e = 0; e < 4; e++) {
      const int k = key + e / 2 * 8;
      s[e] =
          pages && k >= range.first && k <= range.last ? s[e] * SCORE_SCALE : negative_infinity();
    }
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};  // heads 2 quad, 2 quad + 1
    UNROLL for (int x = 4; x < 32; x <<= 1) UNROLL for (int e = 0; e < 2; e++) top[e] =
        fmaxf(top[e], __shfl_xor_sync(ALL, top[e], x));
    if (c.group == 0) {
      c.s.tops[c.warp][2 * c.quad] = top[0];
      c.s.tops[c.warp][2 * c.quad + 1] = top[1];
    }
    consumers_sync();  // maxima of all key tiles; the last chunk's weights have been read
    UNROLL for (int w = 0; w < CONSUMERS; w++) UNROLL for (int e = 0; e < 2; e++) top[e] =
        fmaxf(top[e], c.s.tops[w][2 * c.quad + e]);
    if (now.chunk == range.split_begin(now.split)) {
      UNROLL for (int e = 0; e < 4; e++) o[e] = 0.0f;
      UNROLL for (int e = 0; e < 2; e++) total[e] = 0.0f;
    } else {
      UNROLL for (int e = 0; e < 2; e++) {
        top[e] = fmaxf(top[e], running[e]);
        const float scale = exp2_(running[e] - top[e]);
        total[e] = total[e] * scale;
        o[e] = o[e] * scale;
        o[e + 2] = o[e + 2] * scale;
      }
    }
    UNROLL for (int e = 0; e < 2; e++) running[e] = top[e];
    uint16_t* weight = (uint16_t*)c.s.weight[c.warp];
    float sum[2];
    UNROLL for (int e = 0; e < 2; e++) {
      const uint32_t both = pack_bf16(exp2_(s[e] - top[e]), exp2_(s[e + 2] - top[e]));
      const uint16_t w0 = (uint16_t)both, w1 = (uint16_t)(both >> 16);
      weight[(2 * c.quad + e) * 16 + b_order(c.group)] = w0;
      weight[(2 * c.quad + e) * 16 + b_order(c.group + 8)] = w1;
      sum[e] = bf16_to_float(w0) + bf16_to_float(w1);
    }
    UNROLL for (int x = 4; x < 32; x <<= 1) UNROLL for (int e = 0; e < 2; e++) sum[e] =
        sum[e] + __shfl_xor_sync(ALL, sum[e], x);
    if (c.group == 0) {
      c.s.sums[c.warp][2 * c.quad] = sum[0];
      c.s.sums[c.warp][2 * c.quad + 1] = sum[1];
    }
    if (KEYS_FIRST) wait_stages();
    consumers_sync();  // weights of all keys

    // Values: rows are this warp's 16 dimensions, columns are heads.
    const int part =
        ((now.row * N_KV_HEADS + now.head) * (int)c.p.max_splits + now.split) * COLUMNS;
    if (c.warp < DIM_TILES) {
      const bool patch = has_fresh || chunk_key < range.first;
      const uint16_t* v_new = c.p.v_new + now.head * HEAD_DIM + c.warp * 16 + c.group;
      const int values = (KEYS_FIRST ? c.warp : DIM_TILES + c.warp) * KEY_TILES;
      const uint2* weights = c.s.weight[0] + c.lane;
      if (!patch && last - first + 1 == CHUNK_PAGES) {
        uint4 a[CHUNK_PAGES][KEY_TILES];
        UNROLL for (int p = 0; p < CHUNK_PAGES; p++) {
          const uint4* tiles = tile(p, values);
          UNROLL for (int j = 0; j < KEY_TILES; j++) a[p][j] = tiles[j * LANES];
        }
        UNROLL for (int t = 0; t < CONSUMERS; t++)
            ptx::mma_m16n8k16(o, a[t / KEY_TILES][t % KEY_TILES], weights[t * LANES]);
      } else {
        ROLL for (int p = first; p <= last; p++) {
          const uint4* tiles = tile(p, values);
          uint4 a[KEY_TILES];
          UNROLL for (int j = 0; j < KEY_TILES; j++) a[j] = tiles[j * LANES];
          UNROLL for (int j = 0; j < KEY_TILES; j++) {
            const int k = chunk_key + p * PAGE + j * 16;
            if (k < range.first || k + 15 >= fresh.first)
              a[j] = patch_tile(a[j], k + 2 * c.quad, range, fresh, v_new, now_v);
          }
          UNROLL for (int j = 0; j < KEY_TILES; j++)
              ptx::mma_m16n8k16(o, a[j], weights[(p * KEY_TILES + j) * LANES]);
        }
      }
      // The split's result: output before division, maximum and sum.
      if (!split_goes_on) UNROLL for (int e = 0; e < 4; e++) {
          const int head = 2 * c.quad + e % 2, dim = c.warp * 16 + c.group + e / 2 * 8;
          if (head < GROUP) c.p.part_o[(long long)(part + head) * HEAD_DIM + dim] = o[e];
        }
    }
    if (c.warp == 0 && c.group == 0) UNROLL for (int e = 0; e < 2; e++) {
        const int head = 2 * c.quad + e;
        float l = c.s.sums[0][head];
        UNROLL for (int w = 1; w < CONSUMERS; w++) l = l + c.s.sums[w][head];
        total[e] = total[e] + l;
        if (head < GROUP && !split_goes_on)
          ((float2*)c.p.part_ml)[part + head] = float2{top[e], total[e]};
      }
    UNROLL for (int k = 0; k < CHUNK_PAGES * RUN_STAGES; k++) if (k < n_stages) leave_stage(c);
  }
}

// This step's keys and values into their pages. Nobody copies a page now: all attention of the
// layer is over, and the next step's comes after this task.
__device__ __noinline__ void append_kv(int first, int count, int kv_tiles, int kind, int step) {
  const Shared& s = *(Shared*)ptx::shared_memory();
  const Params& p = s.params;
  const int n_units = rows_in_use(p) * N_KV_HEADS;
  ROLL for (int unit = count - 1 - first; unit < n_units; unit += count) {
    const int row = unit / N_KV_HEADS, head = unit % N_KV_HEADS;
    const int position = s.positions[row] + step, key = position % PAGE;
    uint16_t* tiles =
        (uint16_t*)p.kv + page_tile(p, kv_tiles, kind, row, head, position / PAGE) * 256;
    const int lane = threadIdx.x % 32, at = row * KV_WIDTH + head * HEAD_DIM + lane;
    uint16_t* to_k =
        tiles + (key / 16 * DIM_TILES + lane / 16) * 256 + a_order(key % 16, lane % 16);
    uint16_t* to_v = tiles + (KEY_TILES * DIM_TILES + lane / 16 * KEY_TILES + key / 16) * 256 +
                     a_order(lane % 16, key % 16);
    constexpr int DIMS = HEAD_DIM / 32;  // of this lane
    uint16_t k[DIMS], v[DIMS];
    UNROLL for (int i = 0; i < DIMS; i++) k[i] = p.k_new[at + i * 32], v[i] = p.v_new[at + i * 32];
    UNROLL for (int i = 0; i < DIMS; i++) {
      to_k[i * 2 * 256] = k[i];
      to_v[i * 2 * KEY_TILES * 256] = v[i];
    }
    ptx::fence_copies();
  }
}

// Attention output from the results of the splits; in B order for the output projection. A unit is
// 32 outputs of one head of one row, one per lane. The sum is eight sums, over splits w, w + 8, ...
// in ascending order, which are then added. With few rows the consumers do it, a warp per sum, as
// all wait for it; else one warp beside them. Same bits. L2 is far: all is asked for at once.
struct MergeUnit {
  int row, out, n_splits;  // this lane's output
  const float2* ml;        // maximum and sum of split 0
  const float* values;     // and its output
};
__device__ __noinline__ MergeUnit merge_unit(int unit, int window, int step) {
  const Shared& s = *(Shared*)ptx::shared_memory();
  MergeUnit u;
  u.row = unit / (Q_WIDTH / 32);
  u.out = unit % (Q_WIDTH / 32) * 32 + threadIdx.x % 32;
  u.n_splits = key_range(s.positions[u.row] + step, window).n_splits();
  const int head = u.out / HEAD_DIM;
  const int part = (u.row * N_KV_HEADS + head / GROUP) * (int)s.params.max_splits * COLUMNS;
  u.ml = (const float2*)s.params.part_ml + part + head % GROUP;
  u.values = s.params.part_o + (long long)(part + head % GROUP) * HEAD_DIM + u.out % HEAD_DIM;
  return u;
}

__device__ __forceinline__ void merge_by_consumers(Context& c, const Task& task) {
  constexpr int STRIDE = COLUMNS * HEAD_DIM;
  const int n_units = rows_in_use(c.p) * (Q_WIDTH / 32);
  ROLL for (int unit = task.first; unit < n_units; unit += task.count) {
    const MergeUnit u = merge_unit(unit, task.window, c.step);
    // This warp's splits: their values, and in lane i maximum and sum of number i.
    const int n = (u.n_splits - c.warp + CONSUMERS - 1) / CONSUMERS;
    const float* values = u.values + c.warp * STRIDE;
    float v[LIST];
    UNROLL for (int i = 0; i < LIST; i++) v[i] = i < n ? values[i * CONSUMERS * STRIDE] : 0.0f;
    float2 ml = {negative_infinity(), 0.0f};
    if (c.lane < n) ml = u.ml[(c.warp + c.lane * CONSUMERS) * COLUMNS];
    float m = ml.x;
    UNROLL for (int x = 1; x < LIST; x <<= 1) m = fmaxf(m, __shfl_xor_sync(ALL, m, x));
    if (c.lane == 0) c.s.tops[c.warp][0] = m;
    consumers_sync();  // maxima of all warps
    UNROLL for (int w = 0; w < CONSUMERS; w++) m = fmaxf(m, c.s.tops[w][0]);
    const float weight = exp2_(ml.x - m), l_weight = ml.y * weight;
    float l = 0.0f, o = 0.0f;
    UNROLL for (int i = 0; i < LIST; i++) {  // beyond the last split weight and addend are 0
      l = l + __shfl_sync(ALL, l_weight, i);
      o = o + v[i] * __shfl_sync(ALL, weight, i);
    }
    c.buffer ^= 1;
    float (*sums)[PARTIALS] = c.s.partial[c.buffer];
    sums[c.warp][c.lane] = o;
    if (c.lane == 0) sums[c.warp][32] = l;
    consumers_sync();  // sums of all warps
    if (c.warp > 0) continue;
    o = sums[0][c.lane];
    l = sums[0][32];
    UNROLL for (int w = 1; w < CONSUMERS; w++) {
      o = o + sums[w][c.lane];
      l = l + sums[w][32];
    }
    c.p.attn[(u.out / 16 * ROWS + u.row) * 16 + b_order(u.out % 16)] = float_to_bf16(o / l);
  }
  if (c.warp == CONSUMERS - 1)
    append_kv(task.first, task.count, task.kv_tiles, kind_of(task), c.step);
}

__device__ __forceinline__ void merge_by_helper(Context& c, const Task& task) {
  constexpr int STRIDE = COLUMNS * HEAD_DIM;
  const int n_units = rows_in_use(c.p) * (Q_WIDTH / 32);
  ROLL for (int unit = task.first; unit < n_units; unit += task.count) {
    const MergeUnit u = merge_unit(unit, task.window, c.step);
    float v[MOST_SPLITS];
    UNROLL for (int i = 0; i < MOST_SPLITS; i++) v[i] =
        i < u.n_splits ? u.values[i * STRIDE] : 0.0f;
    __syncwarp();  // the last unit's weights have been read
    float m = negative_infinity();
    UNROLL for (int split = c.lane; split < SPLIT_PLACES; split += LANES) {
      float2 ml = {negative_infinity(), 0.0f};
      if (split < u.n_splits) ml = u.ml[split * COLUMNS];
      c.s.merge_weight[split] = ml.x;
      c.s.merge_l[split] = ml.y;
      m = fmaxf(m, ml.x);
    }
    ROLL for (int x = 16; x > 0; x >>= 1) m = fmaxf(m, __shfl_xor_sync(ALL, m, x));
    ROLL for (int split = c.lane; split < SPLIT_PLACES; split += LANES) {
      const float weight = exp2_(c.s.merge_weight[split] - m);
      c.s.merge_weight[split] = weight;
      c.s.merge_l[split] = c.s.merge_l[split] * weight;
    }
    __syncwarp();  // weights of all lanes
    // Beyond the last split weight and addend are 0. Lane w has the l of sum w.
    float sums[CONSUMERS] = {}, l = 0.0f;
    UNROLL for (int i = 0; i < MOST_SPLITS; i++) sums[i % CONSUMERS] =
        sums[i % CONSUMERS] + v[i] * c.s.merge_weight[i];
    UNROLL for (int i = 0; i < LIST; i++) l = l + c.s.merge_l[i * CONSUMERS + c.lane % CONSUMERS];
    float o = sums[0], total = __shfl_sync(ALL, l, 0);
    UNROLL for (int w = 1; w < CONSUMERS; w++) o = o + sums[w];
    ROLL for (int w = 1; w < CONSUMERS; w++) total = total + __shfl_sync(ALL, l, w);
    c.p.attn[(u.out / 16 * ROWS + u.row) * 16 + b_order(u.out % 16)] =
        float_to_bf16(divide(o, total));
  }
  append_kv(task.first, task.count, task.kv_tiles, kind_of(task), c.step);
}

// What one warp does beside the consumers, because it is latency and not work: finding the experts
// of each layer as soon as the router's logits are complete, and MERGE from the wait to the signal.
// The consumers give the place of the experts back after their last task that uses it
// (Flag.RELEASE).
__device__ void helper(Context& c, int begin, int end) {
  uint32_t phase = 0;
  // Rows that are not in use keep no logits of long ago: after 2^32 layers versions come again.
  if (blockIdx.x == 0)
    ROLL for (int i = rows_in_use(c.p) * N_EXPERTS + c.lane; i < ROWS * N_EXPERTS; i += 32)
        c.p.router_logits[i] = (uint64_t)version(c, -1) << 32;
  ROLL for (c.step = 0; c.step < c.p.n_steps; c.step++) {
    int routed_layer = -1;
    Task next = c.p.tasks[begin];
    ROLL for (c.task = begin; c.task < end; c.task++) {
      const Task task = next;
      if (c.task + 1 < end) next = c.p.tasks[c.task + 1];
      const bool routed = task.op == OP_GATE_UP || task.op == OP_DOWN;
      const bool dense = task.flags & FLAG_DENSE;
      if (task.op == OP_MERGE ? CONSUMERS_MERGE : !routed || task.layer == routed_layer) continue;
      if (routed) {
        wait_barrier(c, &c.s.route_empty, phase ^ 1);
        if (__ballot_sync(ALL, c.stopped || look(c.s.gave_up)) != 0) return;
        clear_scores(c);
        // One row takes TOP_K experts, whichever they are: no need to know them.
        if (MOST_ROWS == 1 && task.op == OP_GATE_UP) share_gate_up(c, task, dense ? 1 : TOP_K);
      }
      if (TRACE && !routed && c.lane == 0) c.p.trace[(long long)c.task * 4] = ptx::now_ns();
      if (c.lane == 0 && !routed && task.wait >= 0) wait_counter(c, task.wait, task.wait_count);
      c.stopped = __ballot_sync(ALL, c.stopped || look(c.s.gave_up)) != 0;
      __syncwarp();  // lane 0's acquire now orders the inputs before every lane
      if (c.stopped) return;
      if (!routed) {
        if (TRACE && c.lane == 0) c.p.trace[(long long)c.task * 4 + 1] = ptx::now_ns();
        if constexpr (!CONSUMERS_MERGE) merge_by_helper(c, task);
        __syncwarp();  // outputs of all lanes
        if (c.lane == 0) {
          if (task.signal >= 0)
            ptx::red_release_add(c.p.counters + task.signal * COUNTER_STRIDE, 1);
          if (TRACE) c.p.trace[(long long)c.task * 4 + 2] = ptx::now_ns();
        }
        continue;
      }
      routed_layer = task.layer;
      Picks picks;
      if (!dense) {
        picks = find_experts(c, task.layer);
        if (c.stopped) return;
      } else if (c.lane == 0) {
        c.s.route.expert[0] = 0;
        c.s.route.n_active = 1;
      }
      __syncwarp();  // n_active
      if (MOST_ROWS > 1 && task.op == OP_GATE_UP) share_gate_up(c, task, c.s.route.n_active);
      warp_arrive(c, &c.s.route_full);
      phase ^= 1;
      if (!dense)
        finish_scores(c, picks);
      else if (c.lane < MOST_ROWS)
        c.s.route.score[0][c.lane] = 1.0f;
      warp_arrive(c, &c.s.route_scored);
      if (c.lane == 0 && blockIdx.x == 0) c.p.active_experts[task.layer] += c.s.route.n_active;
      // Only now, with time to spare: who wrote the logits has also seen all keys that the step
      // before appended. The loader, which waits for the next route, may copy them after it.
      if (c.lane == 0 && task.route_wait >= 0) wait_counter(c, task.route_wait, task.route_count);
    }
  }
}

// ---- 10 the other tasks ------------------------------------------------------------------------

// x <- embedding of the row's token, gathered from the packed head (the two are tied).
__device__ __forceinline__ void embed(Context& c, const Task& task) {
  const uint16_t* tiles = (const uint16_t*)c.p.weights;
  ROLL for (int i = c.thread; i < rows_in_use(c.p) * task.count * 16; i += CONSUMERS * 32) {
    const int row = i / (task.count * 16), k = task.first * 16 + i % (task.count * 16);
    make_absent(x_of(c, 1) + row * HIDDEN + k);
    const int token = c.s.tokens[row];
    const long long tile = task.weights + (long long)(token >> 4) * HIDDEN_TILES + (k >> 4);
    const float value = bf16_to_float(tiles[tile * 256 + a_order(token & 15, k & 15)]);
    put_x(x_of(c, 0) + row * HIDDEN + k, value);
  }
}

// The next token of every row, and whether this was the last step. Every SM finds out for itself;
// the first also tells the host.
__device__ __forceinline__ bool sample(Context& c, const Task& task) {
  ROLL for (int row = c.warp; row < rows_in_use(c.p); row += CONSUMERS) {
    Best best = {negative_infinity(), 0x7fffffff};
    ROLL for (int i = c.lane; i < task.index; i += 32)
        best.offer(c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]);
    best = best_of_lanes(best, 1);
    const bool stops = c.lane < STOP_IDS && c.p.stop_ids[row * STOP_IDS + c.lane] == best.token;
    const bool any = __ballot_sync(ALL, stops) != 0;
    if (c.lane == 0) {
      c.s.tokens[row] = best.token;
      if (any) c.s.row_stopped[row] = 1;
      if (task.first == 0) c.p.tokens_out[c.step * ROWS + row] = best.token;
    }
  }
  consumers_sync();  // tokens of all rows
  int n_stopped = 0;
  ROLL for (int row = 0; row < rows_in_use(c.p); row++) n_stopped += c.s.row_stopped[row];
  // A logit that is not finite: every HEAD has reported before any SAMPLE, so all SMs see it.
  const bool lost = ptx::ld_relaxed(c.p.status) == NOT_FINITE;
  const bool ended = c.step + 1 == c.p.n_steps || lost || c.p.control[0] != 0 ||
                     (c.p.stop_after > 0 && n_stopped >= c.p.stop_after);
  if (c.thread == 0) {
    if (task.first == 0 && !lost) ptx::st_release_host(c.p.progress, c.step + 1);
    if (ended) set(c.s.ended, 1);
  }
  return ended;
}

// ---- 11 the calling convention -----------------------------------------------------------------
// Every task: wait for its inputs, compute, make the outputs visible, signal. Three kinds of warps
// share that work, so that none of it is in the way of the arithmetic.

// Fetches records ahead of need and waits for their inputs.
__device__ void waiter(Context& c, int begin, int end) {
  TaskPosition at;
  constexpr int WORDS = sizeof(Task) / 4;
  const int* words = (const int*)c.p.tasks;
  int word = c.lane < WORDS ? words[begin * WORDS + c.lane] : 0;
  uint32_t route_phase = 0;
  ROLL for (c.step = 0;; c.step++) {
    int routed_layer = -1;
    ROLL for (c.task = begin; c.task < end; c.task++) {
      const bool skip = __shfl_sync(ALL, word, 0) == OP_MERGE && !CONSUMERS_MERGE;
      const int next = c.task + 1 < end ? c.task + 1 : begin;
      const int now = word;
      if (c.lane < WORDS) word = words[next * WORDS + c.lane];
      if (skip) continue;  // the helper's
      Task& task = c.s.tasks[at.slot];
      if (!wait_record(c, &c.s.free[at.slot], at.phase ^ 1)) return;
      if (c.lane < WORDS) ((int*)&task)[c.lane] = now;
      if (c.lane == 0) c.s.records[at.slot] = c.task;
      __syncwarp();  // the whole record
      if ((task.op == OP_GATE_UP || task.op == OP_DOWN) && task.layer != routed_layer) {
        wait_barrier(c, &c.s.route_full, route_phase);
        routed_layer = task.layer;
        route_phase ^= 1;
      }
      if (task.op == OP_DOWN)  // of the layer that has been routed last
        wait_barrier(c, &c.s.route_scored, route_phase ^ 1);
      if (c.lane == 0 && task.wait >= 0)
        wait_counter(c, task.wait, task.wait_count, 1, READ_EARLY && task.flags & FLAG_EARLY);
      c.stopped = __ballot_sync(ALL, c.stopped || look(c.s.gave_up)) != 0;
      if (c.stopped && c.lane == 0) task.op = OP_STOP;
      warp_arrive(c, &c.s.ready[at.slot]);
      if (c.stopped) return;
      if (c.task + 1 == end && task.op != OP_SAMPLE) return;  // a part of a step
      if (c.task + 1 == end) {  // the consumers decide whether there is another step
        if (!wait_record(c, &c.s.done[at.slot], at.phase)) return;
        if (look(c.s.ended)) return;
      }
      at.advance();
    }
  }
}

// A list that does not end with SAMPLE is a part of a step: its last record ends the launch.
__device__ void consumer(Context& c, int begin, int end) {
  TaskPosition at;
  int last_op = OP_SAMPLE;
  bool ended = false;
  int gamma_of = c.p.tasks[begin].layer;  // layer of the next RMSNorm, -1 if it has been fetched
  load_rope(c);
  ROLL while (!ended) {
    if (gamma_of >= 0) fetch_gamma(c, gamma_of);
    gamma_of = -1;
    const uint64_t began = TRACE ? ptx::now_ns() : 0;
    uint64_t* ready = &c.s.ready[at.slot];
    const bool hold_back = c.thread == 0 && (HOLD_BACK_AFTER >> last_op & 1);
    if (hold_back && !ptx::mbar_try_wait(ready, at.phase)) set(c.s.waiting, 1);
    if (!wait_record(c, ready, at.phase)) return;
    if (hold_back) set(c.s.waiting, 0);
    const Task task = c.s.tasks[at.slot];
    c.task = c.s.records[at.slot];
    if (task.op == OP_STOP) return;
    last_op = task.op;
    uint64_t* trace = c.p.trace + (long long)c.task * 4;
    if (TRACE && c.thread == 0) {
      trace[0] = began;
      trace[1] = ptx::now_ns();
    }
    switch (task.op) {
      case OP_EMBED: embed(c, task); break;
      case OP_ATTENTION: attention(c, task); break;
      case OP_MERGE:
        if constexpr (CONSUMERS_MERGE) merge_by_consumers(c, task);
        break;
      case OP_SAMPLE:
        ended = sample(c, task);
        c.step++;
        if (!ended) load_rope(c);
        break;
      default: product(c, task);
    }
    if (task.op != OP_SAMPLE && c.task + 1 == end) ended = true;
    if (task.flags & FLAG_LAST_OF_LAYER) gamma_of = task.op == OP_SAMPLE ? 0 : task.layer + 1;
    if (task.flags & FLAG_RELEASE) warp_arrive(c, &c.s.route_empty);
    warp_arrive(c, &c.s.done[at.slot]);
    if (TRACE && c.thread == 0) trace[2] = ptx::now_ns();
    at.advance();
  }
}

// One lane's release makes the outputs of all consumers visible to other SMs; nobody else has to
// wait until that has happened.
__device__ void signaller(Context& c, int end) {
  TaskPosition at;
  ROLL for (;; at.advance()) {
    if (!wait_record(c, &c.s.ready[at.slot], at.phase)) return;
    const int op = c.s.tasks[at.slot].op, signal = c.s.tasks[at.slot].signal;
    if (op == OP_STOP) return;
    if (!wait_record(c, &c.s.done[at.slot], at.phase)) return;
    if (c.lane == 0 && signal >= 0) ptx::red_release_add(c.p.counters + signal * COUNTER_STRIDE, 1);
    const bool last = c.s.records[at.slot] + 1 == end;
    warp_arrive(c, &c.s.free[at.slot]);
    if (op == OP_SAMPLE ? look(c.s.ended) : last) return;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    megakernel(const __grid_constant__ Params p) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const int thread = threadIdx.x, lane = thread & 31;
  Context c{p, s, thread, thread / 32, lane, lane / 4, lane % 4};
  if (thread == 0) {
    constexpr int WARP = CHECKED ? 32 : 1;  // arrivals of one warp
    ROLL for (int i = 0; i < RING_STAGES; i++) {
      ptx::mbar_init(&s.full[i], ptx::FULL_ARRIVALS);
      ptx::mbar_init(&s.empty[i], CONSUMERS * WARP);
    }
    ROLL for (int i = 0; i < TASK_SLOTS; i++) {
      ptx::mbar_init(&s.ready[i], WARP);
      ptx::mbar_init(&s.done[i], CONSUMERS * WARP);
      ptx::mbar_init(&s.free[i], WARP);
    }
    ptx::mbar_init(&s.route_full, WARP);
    ptx::mbar_init(&s.route_scored, WARP);
    ptx::mbar_init(&s.route_empty, (CONSUMERS + 1) * WARP);
    s.waiting = s.ended = s.gave_up = 0;
    ptx::mbar_fence_init();
  }
  if (thread < (int)(sizeof(Params) / 8))
    ((uint64_t*)&s.params)[thread] = ((const uint64_t*)&p)[thread];
  if (thread < MOST_ROWS) {
    s.tokens[thread] = thread < p.rows ? p.tokens[thread] : 0;
    s.positions[thread] = thread < p.rows ? p.positions[thread] : 0;
    s.earlier[thread] = thread < p.rows ? p.earlier[thread] : 0;
    s.temperatures[thread] = thread < p.rows ? p.temperatures[thread] : 0.0f;
    s.row_stopped[thread] = 0;
  }
  __syncthreads();  // barriers are initialised
  const int begin = p.task_offsets[blockIdx.x], end = p.task_offsets[blockIdx.x + 1];
  if (begin == end) return;
  if (DEPENDENT_LAUNCH) {
    ptx::launch_next();
    if (c.warp != LOADER) ptx::wait_for_previous();
  }
  if (c.warp < CONSUMERS)
    consumer(c, begin, end);
  else if (c.warp == LOADER)
    loader(c, begin, end);
  else if (c.warp == HELPER)
    helper(c, begin, end);
  else if (c.warp == WAITER)
    waiter(c, begin, end);
  else
    signaller(c, end);
}
