// Run CUDA source on a CPU, unchanged: included in front of a kernel file by the host build.
//
//   c++ -x c++ -std=c++20 -O2 -ffp-contract=off -include cuda/host/cuda_host.h kernel.cu ...
//
// A CUDA thread is a fiber (fiber.h, context.h), a block belongs to one OS thread (scheduler.h),
// and inline PTX hides behind `ptx::` functions (ptx.h). launch.h starts a kernel and ends it: with
// a result, or with a report of who waited where. What is not here: partial masks, clusters, wgmma,
// tensor maps, textures, static __shared__ arrays, fences (ThreadSanitizer cannot see them).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Vector types with CUDA's names, sizes and alignments.
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
constexpr int2 make_int2(int x, int y) {
  return {x, y};
}
constexpr int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
constexpr uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
constexpr float2 make_float2(float x, float y) {
  return {x, y};
}
constexpr float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

#include "ptx.h"

#define threadIdx (::host::current->thread)
#define blockIdx (::host::current->block->index)
#define blockDim (::host::current->block->dim)
#define gridDim (::host::current->block->grid)

inline void __syncthreads(HOST_SITE) {
  host::barrier_wait(0, 0, site);
}
inline void __syncwarp(unsigned = 0xffffffffu, HOST_SITE) {
  host::sync_warp(site);
}
inline unsigned __ballot_sync(unsigned, int predicate, HOST_SITE) {
  return host::ballot(predicate != 0, site);
}
template <class T>
inline T __shfl_sync(unsigned, T value, int source, HOST_SITE) {
  return host::shuffle_value(value, source, site);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask, HOST_SITE) {
  return host::shuffle_value(value, host::current->lane ^ mask, site);
}
template <class T>
inline T __shfl_down_sync(unsigned, T value, int delta, HOST_SITE) {
  int source = host::current->lane + delta;
  return host::shuffle_value(value, source < host::WARP_SIZE ? source : host::current->lane, site);
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, int delta, HOST_SITE) {
  int source = host::current->lane - delta;
  return host::shuffle_value(value, source >= 0 ? source : host::current->lane, site);
}

inline unsigned __reduce_max_sync(unsigned, unsigned value, HOST_SITE) {
  auto larger = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
  return static_cast<unsigned>(host::reduce(value, larger, site));
}
inline unsigned __reduce_min_sync(unsigned, unsigned value, HOST_SITE) {
  auto smaller = [](uint64_t a, uint64_t b) { return a < b ? a : b; };
  return static_cast<unsigned>(host::reduce(value, smaller, site));
}

// Of integers, in shared or global memory; it orders nothing.
template <class T>
inline T atomicAdd(T* p, T v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

inline unsigned __float_as_uint(float v) {
  return std::bit_cast<unsigned>(v);
}
inline float __uint_as_float(unsigned v) {
  return std::bit_cast<float>(v);
}
inline int __float_as_int(float v) {
  return std::bit_cast<int>(v);
}
inline float __int_as_float(int v) {
  return std::bit_cast<float>(v);
}
inline int __popc(unsigned v) {
  return std::popcount(v);
}
inline int __ffs(int v) {
  return v ? std::countr_zero(static_cast<unsigned>(v)) + 1 : 0;
}
inline int __clz(int v) {
  return std::countl_zero(static_cast<unsigned>(v));
}

#include "export.h"
#include "launch.h"

// CUDA's qualifiers; last, because the standard library spells attributes like some of them.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define UNROLL  // the compiler knows best
#define ROLL
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static const
#define __align__(n) alignas(n)
// Blocks share OS threads, so a static array cannot be a block's own.
#define __shared__ static_assert(false, "use ptx::shared_memory(), not __shared__, for the host");
