// 16_shared_expert.cu - a shared expert: a SwiGLU that every token passes, beside the chosen ones.
//
//   h = silu(gate y) * (up y)        x += down h
//
// What runs.  Two launches, where every port starts: the same operation as a task is in
//             16_shared_expert.diff.
// Launch.     shared_up<<<(blocks, rows), 256>>>      a warp per element of h
//             shared_down<<<(blocks, rows), 256>>>    a warp per element of x
//             With fewer blocks in x than elements / 8, a warp takes several elements.
// Arguments.  h         bf16     [rows, width]     out of shared_up, into shared_down
//             x         float32  [rows, hidden]    residual stream, added to in place
//             y         bf16     [rows, hidden]    normed x
//             gate, up  bf16     [width, hidden]
//             down      bf16     [hidden, width]
//             hidden, width

#ifdef __CUDACC__  // no headers
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
#endif

// USE ops/06_experts.cu: bf16_to_float float_to_bf16 dot

// BEGIN EXERCISE 16.1
// Row-major: y [rows, hidden], h [rows, width], x [rows, hidden]; gate, up [width, hidden] and
// down [hidden, width]. dot(w, y, depth) is one output of a product: w points to a row of a matrix.
// A whole warp computes it, and every lane gets it. float_to_bf16(v) rounds.
extern "C" __global__ void shared_up(uint16_t* h, const uint16_t* y, const uint16_t* gate,
                                     const uint16_t* up, int hidden, int width) {
  const int n_warps = blockDim.x / 32, warp = blockIdx.x * n_warps + threadIdx.x / 32;
  // BEGIN SOLUTION
  y += (long long)blockIdx.y * hidden;
  h += (long long)blockIdx.y * width;
  for (int out = warp; out < width; out += gridDim.x * n_warps) {
    const float g = dot(gate + (long long)out * hidden, y, hidden);
    const float u = dot(up + (long long)out * hidden, y, hidden);
    if (threadIdx.x % 32 == 0) h[out] = float_to_bf16(g / (1.0f + expf(-g)) * u);
  }
  // END SOLUTION
}

extern "C" __global__ void shared_down(float* x, const uint16_t* h, const uint16_t* down,
                                       int hidden, int width) {
  const int n_warps = blockDim.x / 32, warp = blockIdx.x * n_warps + threadIdx.x / 32;
  // BEGIN SOLUTION
  x += (long long)blockIdx.y * hidden;
  h += (long long)blockIdx.y * width;
  for (int out = warp; out < hidden; out += gridDim.x * n_warps) {
    const float sum = dot(down + (long long)out * width, h, width);
    if (threadIdx.x % 32 == 0) x[out] += sum;
  }
  // END SOLUTION
}
// END EXERCISE 16.1
