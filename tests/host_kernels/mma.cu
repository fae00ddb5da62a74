// One mma per warp on fragments that the test lays out: n of them, one after another.
extern "C" __global__ void fragments(float4* c, const uint4* a, const uint2* b, int n) {
  int lane = threadIdx.x & 31;
  for (int i = blockIdx.x; i < n; i += gridDim.x) {
    float4 start = c[i * 32 + lane];
    float sums[4] = {start.x, start.y, start.z, start.w};
    ptx::mma_m16n8k16(sums, a[i * 32 + lane], b[i * 32 + lane]);
    c[i * 32 + lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
}

// A chain c <- mma(c, A, B) of n tiles, as a projection makes it; for timing, too.
extern "C" __global__ void chain(float4* c, const uint4* a, const uint2* b, int n_tiles, int n) {
  int lane = threadIdx.x & 31;
  float sums[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; i++) {
    int tile = i % n_tiles;
    ptx::mma_m16n8k16(sums, a[tile * 32 + lane], b[tile * 32 + lane]);
  }
  c[(blockIdx.x * blockDim.x + threadIdx.x)] = make_float4(sums[0], sums[1], sums[2], sums[3]);
}
