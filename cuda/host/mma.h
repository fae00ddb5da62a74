// mma.sync.m16n8k16 (bf16 x bf16 + f32) with the sums that Hopper's tensor cores make.
//
// `fused_sum` is `one_sum` (mma_model.h) for many rows at a time, on floats: the power of two in a
// number (its bits without the significand) stands for its exponent, a product of two bf16 is
// exact, and scaling by 2^(F - e) and converting to int cuts towards zero. It is used where no step
// can leave the range of a float.
#pragma once

#include <bit>
#include <cstdint>

#include "mma_model.h"
#include "warp.h"

namespace host {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int ROWS = 16;  // per vector
#elif defined(__AVX2__)
constexpr int ROWS = 8;
#else
constexpr int ROWS = 4;
#endif
typedef float Floats __attribute__((vector_size(ROWS * 4)));
typedef int32_t Ints __attribute__((vector_size(ROWS * 4)));
typedef double Doubles __attribute__((vector_size(ROWS * 8)));
typedef int64_t Longs __attribute__((vector_size(ROWS * 8)));

constexpr int32_t EXPONENT = 0x7f800000;
constexpr int M = 16, N = 8, K = 16;

template <class V>
HOST_RUNTIME inline bool any(const V& lanes) {
  int32_t all = 0;
  for (size_t i = 0; i < sizeof(V) / sizeof(int32_t); i++) all |= lanes[i];
  return all != 0;
}

// The A operand as floats, with the power of two of each. k = 2 pair + half.
struct Rows {
  Floats value[K / 2][2][M / ROWS];
  Floats power[K / 2][2][M / ROWS];
  Ints zero[M / ROWS];  // whole rows of zeros
  bool ordinary;        // no infinity, NaN or denormal
};

HOST_RUNTIME inline void unpack(const MmaBuffer& x, Rows& rows) {
  Ints strange{};
  for (int i = 0; i < M / ROWS; i++) {
    Ints all{};
    for (int p = 0; p < K / 2; p++) {
      Ints pair = *reinterpret_cast<const Ints*>(&x.a[p][i * ROWS]);
      Ints halves[2] = {pair << 16, pair & static_cast<int32_t>(0xffff0000u)};
      for (int h = 0; h < 2; h++) {
        Ints power = halves[h] & EXPONENT;
        strange |= (power == EXPONENT) | ((power == 0) & ((halves[h] & 0x7fffffff) != 0));
        all |= power;
        rows.value[p][h][i] = reinterpret_cast<Floats>(halves[h]);
        rows.power[p][h][i] = reinterpret_cast<Floats>(power);
      }
    }
    rows.zero[i] = all == 0;
  }
  rows.ordinary = !any(strange);
}

// One column of B, likewise.
typedef int32_t Pairs __attribute__((vector_size(K / 2 * 4)));
struct Column {
  alignas(64) float value[2][K / 2];
  float power[2][K / 2];
  bool ordinary;
};

HOST_RUNTIME inline bool is_zero(const uint32_t (&pairs)[K / 2]) {
  uint64_t all = 0;
  for (int p = 0; p < K / 2; p += 2) all |= *reinterpret_cast<const uint64_t*>(&pairs[p]);
  return (all & 0x7fff7fff7fff7fff) == 0;
}

HOST_RUNTIME inline void unpack(const uint32_t (&pairs)[K / 2], Column& column) {
  Pairs pair = *reinterpret_cast<const Pairs*>(pairs);
  Pairs halves[2] = {pair << 16, pair & static_cast<int32_t>(0xffff0000u)};
  Pairs strange{};
  for (int h = 0; h < 2; h++) {
    Pairs power = halves[h] & EXPONENT;
    strange |= (power == EXPONENT) | ((power == 0) & ((halves[h] & 0x7fffffff) != 0));
    *reinterpret_cast<Pairs*>(column.value[h]) = halves[h];
    *reinterpret_cast<Pairs*>(column.power[h]) = power;
  }
  column.ordinary = !any(strange);
}

// What a sum makes of c when nothing is added: -0 becomes +0, and there is one NaN.
HOST_RUNTIME inline Floats unchanged(Floats c) {
  Ints nan = Ints{} + static_cast<int32_t>(MmaModel::NAN_BITS);
  return c == c ? c + 0.0f : reinterpret_cast<Floats>(nan);
}

// Fused sums of the rows in vector `i` with the pairs of k from `first` on. Returns the rows that
// are not in the safe range; their c is left as it was.
HOST_RUNTIME inline __attribute__((always_inline)) Ints fused_sum(Floats& c, const Rows& rows,
                                                                  const Column& column, int i,
                                                                  int first) {
  constexpr int F = MmaModel::FRACTION_BITS, PAIRS = MmaModel::FUSED_PRODUCTS / 2;
  static_assert(F <= 25 && PAIRS <= 8, "the int32 sum of products could overflow");
  static_assert(F >= F32_FRACTION, "c alone would be cut");
  // Below LOW a term may be a denormal float, above HIGH the result an infinity.
  constexpr float LOW = 0x1p-100f, HIGH = 0x1p120f;
  Floats most[2] = {reinterpret_cast<Floats>(reinterpret_cast<Ints>(c) & EXPONENT), Floats{}};
  for (int p = first; p < first + PAIRS; p++) {
    for (int h = 0; h < 2; h++) {
      Floats power = rows.power[p][h][i] * column.power[h][p];
      most[h] = most[h] > power ? most[h] : power;
    }
  }
  Floats largest = most[0] > most[1] ? most[0] : most[1];
  Ints unsafe = ~((largest >= LOW) & (largest <= HIGH));
  // 2^(F - e), built from the exponent field of 2^e
  Ints scale_bits = ((2 * F32_BIAS + F) << F32_FRACTION) - reinterpret_cast<Ints>(largest);
  Floats scale = reinterpret_cast<Floats>(scale_bits & ~unsafe);
  Ints sums[2] = {};
  for (int p = first; p < first + PAIRS; p++) {
    for (int h = 0; h < 2; h++) {
      Floats product = rows.value[p][h][i] * column.value[h][p];
      sums[h] += __builtin_convertvector(product * scale, Ints);
    }
  }
  Floats safe_c = reinterpret_cast<Floats>(reinterpret_cast<Ints>(c) & ~unsafe);
  Ints start = __builtin_convertvector(safe_c * scale, Ints);
  // The sum needs up to 33 bits. In a double it is exact; clearing low bits cuts towards zero.
  Doubles total =
      __builtin_convertvector(sums[0] + sums[1], Doubles) + __builtin_convertvector(start, Doubles);
  Longs cut = reinterpret_cast<Longs>(total) & ~((int64_t{1} << (53 - MmaModel::RESULT_BITS)) - 1);
  Floats result = __builtin_convertvector(reinterpret_cast<Doubles>(cut), Floats);
  Floats unit = reinterpret_cast<Floats>(reinterpret_cast<Ints>(largest) - (F << F32_FRACTION));
  c = rows.zero[i] ? unchanged(c) : unsafe ? c : result * unit;
  return unsafe & ~rows.zero[i];
}

// One column of c <- c + A B; returns the rows that are still to be done.
HOST_RUNTIME inline void multiply_column(MmaBuffer& x, const Rows& rows, int j, int first,
                                         Ints (&left)[M / ROWS]) {
  Floats* c = reinterpret_cast<Floats*>(x.c[j]);
  if (is_zero(x.b[j]) && rows.ordinary) {
    for (int i = 0; i < M / ROWS; i++) c[i] = unchanged(c[i]), left[i] = Ints{};
    return;
  }
  Column column;
  unpack(x.b[j], column);
  for (int i = 0; i < M / ROWS; i++) {
    bool ordinary = rows.ordinary && column.ordinary;
    left[i] = ordinary ? fused_sum(c[i], rows, column, i, first) : ~Ints{};
  }
}

// c <- c + A B for the whole warp.
HOST_RUNTIME __attribute__((noinline)) inline void multiply(MmaBuffer& x) {
  Rows rows;
  unpack(x, rows);
  for (int first = 0; first < K / 2; first += MmaModel::FUSED_PRODUCTS / 2) {
    Ints left[N][M / ROWS], all{};
    for (int j = 0; j < N; j++) {
      multiply_column(x, rows, j, first, left[j]);
      for (int i = 0; i < M / ROWS; i++) all |= left[j][i];
    }
    if (!any(all)) continue;
    for (int j = 0; j < N; j++) {
      for (int row = 0; row < M; row++) {
        if (left[j][row / ROWS][row % ROWS] == 0) continue;
        x.c[j][row] = one_sum(x.c[j][row], x.a, row, x.b[j], first);
      }
    }
  }
}

typedef float Quad __attribute__((vector_size(16)));

// The instruction, as one lane of a warp sees it. Fragments as in the PTX manual: g = lane / 4,
// t = lane % 4; a holds (row g or g+8, k 2t or 2t+8), b (k 2t or 2t+8, column g), c (row, column
// 2t). c comes and goes in a register: writing its parts to memory and loading them as one would
// stall.
HOST_RUNTIME __attribute__((noinline)) inline Quad mma(Quad c, const uint32_t* a, const uint32_t* b,
                                                       Site site) {
  Fiber* self = current;
  Warp* w = self->warp;
  MmaBuffer& x = w->now->mma;
  unsigned g = unsigned(self->lane) >> 2, t = unsigned(self->lane) & 3;
  uint32_t* to_a = &x.a[t][g];
  uint32_t* to_b = &x.b[g][t];
  float* to_c = &x.c[2 * t][g];
  to_a[0] = a[0];
  to_a[8] = a[1];
  to_a[4 * M] = a[2];
  to_a[4 * M + 8] = a[3];
  to_b[0] = b[0];
  to_b[4] = b[1];
  to_c[0] = c[0];
  to_c[M] = c[1];
  to_c[8] = c[2];
  to_c[M + 8] = c[3];
  meet(self, w, Collective::Mma, site, [&x] { multiply(x); });
  return Quad{to_c[0], to_c[M], to_c[8], to_c[M + 8]};
}

}  // namespace host
