// Rotations of rows by phases in turns, for Mamba-3's kernels on the CPU. Included by cpu/*kernel.cpp files alone.
//
// The cosine and the sine are polynomials of the distance to the nearest quarter of a turn.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ssm_kernels::mamba3 {
inline namespace CPU_CAPABILITY {

constexpr double kPi = 3.14159265358979323846;

// sin(x) / x and cos(x) as polynomials of y = x^2, |x| <= pi / 4: Taylor series whose remainders are below the type's rounding.
inline float sine_over(float y) { return 1.0f + y * (-1.0f / 6 + y * (1.0f / 120 + y * (-1.0f / 5040 + y * (1.0f / 362880)))); }
inline float cosine(float y) {
  return 1.0f + y * (-0.5f + y * (1.0f / 24 + y * (-1.0f / 720 + y * (1.0f / 40320 - y * (1.0f / 3628800)))));
}
inline double sine_over(double y) {
  const double high = 1.0 / 6227020800 + y * (-1.0 / 1307674368000 + y * (1.0 / 355687428096000));
  return 1 + y * (-1.0 / 6 + y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880 + y * (-1.0 / 39916800 + y * high)))));
}
inline double cosine(double y) {
  const double high = 1.0 / 479001600 + y * (-1.0 / 87178291200 + y * (1.0 / 20922789888000 - y * (1.0 / 6402373705728000)));
  return 1 + y * (-0.5 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320 + y * (-1.0 / 3628800 + y * high)))));
}

// The cosines and sines of phases in turns, from half a turn below zero to half a turn above.
template <typename T, typename Turns>
inline void cosines_and_sines(const Turns* turns, T* c, T* s, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const double turn = static_cast<double>(turns[i]), quarter = std::rint(4 * turn);
    const T x = static_cast<T>(2 * kPi * (turn - 0.25 * quarter)), y = x * x;
    const T of_sine = x * sine_over(y), of_cosine = cosine(y);
    // quarter is from -2 to 2.
    const bool is_odd = quarter * quarter == 1, is_half = quarter * quarter == 4;
    const T sign = static_cast<T>(quarter);
    c[i] = is_odd ? -sign * of_sine : is_half ? -of_cosine : of_cosine;
    s[i] = is_odd ? sign * of_cosine : is_half ? -of_sine : of_sine;
  }
}

// Which columns of a row are the pairs of its angles.
struct Pairs {
  bool is_adjacent;  // (2 i, 2 i + 1), else (i, i + dstate / 2)
  int64_t angles, dstate;
};

// Rotates the pairs of a row, by minus the phases if `direction` is -1, and copies its other columns.
template <typename T>
inline void rotate_row(const Pairs& p, const T* row, T* out, const T* c, const T* s, T direction) {
  const int64_t count = p.angles;
  if (p.is_adjacent) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const T first = row[2 * i], second = row[2 * i + 1], sine = direction * s[i];
      out[2 * i] = c[i] * first - sine * second;
      out[2 * i + 1] = sine * first + c[i] * second;
    }
    std::copy(row + 2 * count, row + p.dstate, out + 2 * count);
    return;
  }
  const int64_t half = p.dstate / 2;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const T first = row[i], second = row[half + i], sine = direction * s[i];
    out[i] = c[i] * first - sine * second;
    out[half + i] = sine * first + c[i] * second;
  }
  std::copy(row + count, row + half, out + count);
  std::copy(row + half + count, row + p.dstate, out + half + count);
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::mamba3
