// One sum of the tensor core: "One mma" of docs/numerics.md for a single output, step by step.
//
// mma.h computes the same for whole tiles and comes here only where its floats could leave their
// range.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "sanitize.h"

namespace host {

// The model of the hardware, in one place. A probe of a real GPU may adjust it.
struct MmaModel {
  static constexpr int FRACTION_BITS = 25;   // F: terms are cut to multiples of 2^(e - F)
  static constexpr int FUSED_PRODUCTS = 16;  // products added to c in one fused sum: 16, 8 or 4
  static constexpr int RESULT_BITS = 24;     // the sum is cut to so many significant bits
  static constexpr uint32_t NAN_BITS = 0x7fffffff;
};

constexpr int BF16_FRACTION = 7, F32_FRACTION = 23, F32_BIAS = 127;

// A finite number as sign, integer significand and exponent: value = significand 2^(exponent -
// fraction).
struct Term {
  bool negative;
  uint32_t significand;
  int exponent;
};

HOST_RUNTIME inline Term split(float v, int fraction) {
  uint32_t bits = std::bit_cast<uint32_t>(v);
  uint32_t field = bits >> F32_FRACTION & 0xff;
  uint32_t significand = (bits & 0x7fffff) | (field ? 0x800000u : 0);  // denormals: no hidden bit
  return {(bits >> 31) != 0, significand >> (F32_FRACTION - fraction),
          static_cast<int>(field ? field : 1) - F32_BIAS};
}

// `significand 2^(exponent - fraction)` in units of 2^(e - F), cut towards zero.
HOST_RUNTIME inline int64_t aligned(const Term& t, int fraction, int e) {
  int shift = MmaModel::FRACTION_BITS - fraction - (e - t.exponent);
  int64_t magnitude = shift >= 0    ? static_cast<int64_t>(t.significand) << shift
                      : shift > -64 ? static_cast<int64_t>(t.significand) >> -shift
                                    : 0;
  return t.negative ? -magnitude : magnitude;
}

// One output: c + the products of row `row` and one column, as one fused sum over the
// FUSED_PRODUCTS values of k that start with pair `first`. A sum of zero, or cut to nothing, is +0.
HOST_RUNTIME __attribute__((noinline)) inline float one_sum(float c, const uint32_t (&a)[8][16],
                                                            int row, const uint32_t (&b)[8],
                                                            int first) {
  constexpr int PRODUCT_FRACTION = 2 * BF16_FRACTION, N_TERMS = MmaModel::FUSED_PRODUCTS;
  double plain = c;  // decides infinities and NaN; a double holds every finite partial sum
  Term terms[N_TERMS];
  Term start = split(c, F32_FRACTION);
  int e = start.significand ? start.exponent : INT32_MIN;
  for (int k = 0; k < N_TERMS; k++) {
    int pair = first + k / 2, low_half = k % 2 ? 0 : 16;
    float x_value = std::bit_cast<float>((a[pair][row] << low_half) & 0xffff0000u);
    float y_value = std::bit_cast<float>((b[pair] << low_half) & 0xffff0000u);
    plain += static_cast<double>(x_value) * y_value;
    Term x = split(x_value, BF16_FRACTION), y = split(y_value, BF16_FRACTION);
    terms[k] = {x.negative != y.negative, x.significand * y.significand, x.exponent + y.exponent};
    if (terms[k].significand && terms[k].exponent > e) e = terms[k].exponent;
  }
  if (!std::isfinite(plain)) {
    return plain != plain ? std::bit_cast<float>(MmaModel::NAN_BITS) : static_cast<float>(plain);
  }
  if (e == INT32_MIN) return 0.0f;
  int64_t sum = start.significand ? aligned(start, F32_FRACTION, e) : 0;
  for (int k = 0; k < N_TERMS; k++) {
    if (terms[k].significand) sum += aligned(terms[k], PRODUCT_FRACTION, e);
  }
  // Cut to RESULT_BITS, and to a multiple of the smallest denormal.
  uint64_t magnitude = sum < 0 ? -static_cast<uint64_t>(sum) : static_cast<uint64_t>(sum);
  int unit = e - MmaModel::FRACTION_BITS;
  int drop = std::bit_width(magnitude) - MmaModel::RESULT_BITS;
  int smallest = 1 - F32_BIAS - F32_FRACTION;
  if (drop < smallest - unit) drop = smallest - unit;
  if (drop > 0) {
    magnitude = drop < 64 ? magnitude >> drop : 0;
    unit += drop;
  }
  float result = std::ldexp(static_cast<float>(magnitude), unit);
  return sum < 0 && magnitude ? -result : result;
}

}  // namespace host
