// The real Schur form of a square matrix, A = Q T Q^T, by orthogonal transformations alone: T is upper triangular but for
// blocks of two rows on its diagonal, one for each pair of complex eigenvalues. A need not be diagonalizable.
//
// First Householder reflections bring A to Hessenberg form, with one subdiagonal (Golub and Van Loan, Matrix Computations,
// 7.4.2). Then QR steps with two implicit shifts make the subdiagonal zero, from the last row up (7.5.1). The tests of what is
// zero, and the rotation that makes the diagonal entries of a block equal, b c < 0 off its diagonal, are LAPACK's dlahqr and
// dlanv2. The errors of all steps are those of a change of A by some units of rounding.
//
// `Group` is the threads that reduce a matrix together: lane of count, and sync(), a barrier that orders their memory. Scalars
// are computed by all of them, rows and columns are divided. A CPU thread is a group of one.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/macros.h"

namespace ssm_kernels {

struct OneThread {
  int lane = 0, count = 1;
  SSM_HOST_DEVICE void sync() const {}
};

// n x n matrices with `stride` elements from row to row.
struct SchurForm {
  double* T;
  double* Q;
  int n, stride;

  SSM_HOST_DEVICE double& t(int i, int j) const { return T[i * stride + j]; }
  SSM_HOST_DEVICE double& q(int i, int j) const { return Q[i * stride + j]; }
};

namespace schur {

// x -> x - scale v (v . x) for the `count` entries of v from `first`, in columns of T from `begin` on, then in rows of T up to
// `end`, and in rows of Q. `v` are registers of all threads.
template <int kLargest, typename Group>
SSM_HOST_DEVICE void reflect(const SchurForm& m, const Group& group, const double (&v)[kLargest], double scale, int first,
                             int count, int begin, int end) {
  for (int j = begin + group.lane; j < m.n; j += group.count) {
    double sum = 0;
    for (int i = 0; i < kLargest; ++i) {
      if (i < count) sum += v[i] * m.t(first + i, j);
    }
    sum *= scale;
    for (int i = 0; i < kLargest; ++i) {
      if (i < count) m.t(first + i, j) -= sum * v[i];
    }
  }
  group.sync();
  const auto columns = [&](double* row) {
    double sum = 0;
    for (int i = 0; i < kLargest; ++i) {
      if (i < count) sum += v[i] * row[i];
    }
    sum *= scale;
    for (int i = 0; i < kLargest; ++i) {
      if (i < count) row[i] -= sum * v[i];
    }
  };
  for (int j = group.lane; j < end; j += group.count) columns(&m.t(j, first));
  for (int j = group.lane; j < m.n; j += group.count) columns(&m.q(j, first));
  group.sync();
}

// The reflection that takes x to (value, 0, ..., 0): v begins with 1, and `scale` is 0 if the other entries of x are 0.
template <int kLargest>
SSM_HOST_DEVICE double reflection(double (&v)[kLargest], int count, double& value) {
  double largest = 0;
  for (int i = 1; i < kLargest; ++i) {
    if (i < count && fabs(v[i]) > largest) largest = fabs(v[i]);
  }
  value = v[0];
  v[0] = 1;
  if (largest == 0) return 0;
  if (fabs(value) > largest) largest = fabs(value);
  double sum = value / largest * (value / largest);
  for (int i = 1; i < kLargest; ++i) {
    if (i < count) sum += v[i] / largest * (v[i] / largest);
  }
  const double first = value, norm = sqrt(sum) * largest;
  value = first >= 0 ? -norm : norm;
  for (int i = 1; i < kLargest; ++i) {
    if (i < count) v[i] /= first - value;
  }
  return (value - first) / value;
}

template <int kLargest, typename Group>
SSM_HOST_DEVICE void reduce_to_hessenberg(const SchurForm& m, const Group& group) {
  for (int k = 0; k + 2 < m.n; ++k) {
    double v[kLargest], value;
    const int count = m.n - k - 1;
    for (int i = 0; i < kLargest; ++i) v[i] = i < count ? m.t(k + 1 + i, k) : 0;
    group.sync();
    const double scale = reflection(v, count, value);
    if (scale == 0) continue;
    reflect(m, group, v, scale, k + 1, count, k, m.n);
    for (int i = k + 1 + group.lane; i < m.n; i += group.count) m.t(i, k) = i == k + 1 ? value : 0;
    group.sync();
  }
}

SSM_HOST_DEVICE bool is_small(const SchurForm& m, int k) {
  constexpr double kSmallest = DBL_MIN / DBL_EPSILON;
  const double below = fabs(m.t(k, k - 1)), above = fabs(m.t(k - 1, k)), here = fabs(m.t(k, k));
  if (below <= kSmallest) return true;
  if (below > DBL_EPSILON * (fabs(m.t(k - 1, k - 1)) + here)) return false;
  const double difference = fabs(m.t(k - 1, k - 1) - m.t(k, k));
  const double aa = here > difference ? here : difference, bb = here > difference ? difference : here;
  const double ab = below > above ? below : above, ba = below > above ? above : below, sum = aa + ab;
  const double limit = DBL_EPSILON * (bb * (aa / sum));
  return ba * (ab / sum) <= (limit > kSmallest ? limit : kSmallest);
}

SSM_HOST_DEVICE double with_sign(double value, double sign) { return sign < 0 ? -fabs(value) : fabs(value); }

// The rotation of the block of rows k and k + 1.
template <typename Group>
SSM_HOST_DEVICE void standardize(const SchurForm& m, const Group& group, int k) {
  double a = m.t(k, k), b = m.t(k, k + 1), c = m.t(k + 1, k), d = m.t(k + 1, k + 1), cosine = 1, sine = 0;
  group.sync();
  if (c == 0) {
    return;
  } else if (b == 0) {
    cosine = 0, sine = 1;
    const double first = a;
    a = d, d = first, b = -c, c = 0;
  } else if (a != d || (b < 0) == (c < 0)) {
    const double difference = a - d, p = 0.5 * difference;
    const double larger = fabs(b) > fabs(c) ? fabs(b) : fabs(c), smaller = fabs(b) > fabs(c) ? fabs(c) : fabs(b);
    const double product = with_sign(with_sign(smaller, b), (b < 0) == (c < 0) ? 1 : -1);
    const double scale = fabs(p) > larger ? fabs(p) : larger;
    const double z = p / scale * p + larger / scale * product;
    if (z >= 4 * DBL_EPSILON) {  // real eigenvalues
      const double root = p + with_sign(sqrt(scale) * sqrt(z), p), norm = hypot(c, root);
      a = d + root;
      d -= larger / root * product;
      cosine = root / norm, sine = c / norm;
      b -= c, c = 0;
    } else {
      const double sigma = b + c, norm = hypot(sigma, difference);
      cosine = sqrt(0.5 * (1 + fabs(sigma) / norm));
      sine = -(p / (norm * cosine)) * with_sign(1, sigma);
      const double aa = a * cosine + b * sine, bb = -a * sine + b * cosine, cc = c * cosine + d * sine,
                   dd = -c * sine + d * cosine;
      b = bb * cosine + dd * sine;
      c = -aa * sine + cc * cosine;
      a = d = 0.5 * ((aa * cosine + cc * sine) + (-bb * sine + dd * cosine));
      if (c != 0 && b == 0) {
        b = -c, c = 0;
        const double first = cosine;
        cosine = -sine, sine = first;
      } else if (c != 0 && (b < 0) == (c < 0)) {  // real after all
        const double root_b = sqrt(fabs(b)), root_c = sqrt(fabs(c)), root = with_sign(root_b * root_c, c);
        const double inverse = 1 / sqrt(fabs(b + c)), further_cosine = root_b * inverse, further_sine = root_c * inverse;
        d = a - root, a += root;
        b -= c, c = 0;
        const double first = cosine;
        cosine = first * further_cosine - sine * further_sine;
        sine = first * further_sine + sine * further_cosine;
      }
    }
  }
  const auto rotate = [&](double& x, double& y) {
    const double first = x;
    x = cosine * first + sine * y;
    y = cosine * y - sine * first;
  };
  for (int j = k + 2 + group.lane; j < m.n; j += group.count) rotate(m.t(k, j), m.t(k + 1, j));
  for (int j = group.lane; j < k; j += group.count) rotate(m.t(j, k), m.t(j, k + 1));
  for (int j = group.lane; j < m.n; j += group.count) rotate(m.q(j, k), m.q(j, k + 1));
  if (group.lane == 0) m.t(k, k) = a, m.t(k, k + 1) = b, m.t(k + 1, k) = c, m.t(k + 1, k + 1) = d;
  group.sync();
}

// A QR step of rows `low` to `high` with two shifts, complex or real.
template <typename Group>
SSM_HOST_DEVICE void qr_step(const SchurForm& m, const Group& group, int low, int high, bool is_exceptional) {
  double h11, h21, h12, h22;
  if (is_exceptional) {
    const double s = fabs(m.t(high, high - 1)) + fabs(m.t(high - 1, high - 2));
    h11 = h22 = 0.75 * s + m.t(high, high);
    h12 = -0.4375 * s, h21 = s;
  } else {
    h11 = m.t(high - 1, high - 1), h12 = m.t(high - 1, high), h21 = m.t(high, high - 1), h22 = m.t(high, high);
  }
  double real1 = 0, real2 = 0, imaginary = 0;
  const double s = fabs(h11) + fabs(h12) + fabs(h21) + fabs(h22);
  if (s != 0) {
    h11 /= s, h12 /= s, h21 /= s, h22 /= s;
    const double middle = (h11 + h22) / 2, determinant = (h11 - middle) * (h22 - middle) - h12 * h21;
    const double root = sqrt(fabs(determinant));
    if (determinant >= 0) {
      real1 = real2 = middle * s, imaginary = root * s;
    } else {
      const double first = middle + root, second = middle - root;
      real1 = real2 = (fabs(first - h22) <= fabs(second - h22) ? first : second) * s;
    }
  }
  double v[3];
  int begin = high - 2;
  for (;; --begin) {
    const double below = fabs(m.t(begin + 1, begin)), scale = fabs(m.t(begin, begin) - real2) + fabs(imaginary) + below;
    const double ratio = m.t(begin + 1, begin) / scale;
    v[0] = ratio * m.t(begin, begin + 1) + (m.t(begin, begin) - real1) * ((m.t(begin, begin) - real2) / scale) +
           imaginary * (imaginary / scale);
    v[1] = ratio * (m.t(begin, begin) + m.t(begin + 1, begin + 1) - real1 - real2);
    v[2] = ratio * m.t(begin + 2, begin + 1);
    const double sum = fabs(v[0]) + fabs(v[1]) + fabs(v[2]);
    for (double& each : v) each /= sum;
    if (begin == low) break;
    const double around = fabs(m.t(begin - 1, begin - 1)) + fabs(m.t(begin, begin)) + fabs(m.t(begin + 1, begin + 1));
    if (fabs(m.t(begin, begin - 1)) * (fabs(v[1]) + fabs(v[2])) <= DBL_EPSILON * fabs(v[0]) * around) break;
  }
  for (int k = begin; k < high; ++k) {
    const int count = high - k + 1 < 3 ? high - k + 1 : 3;
    if (k > begin) {
      for (int i = 0; i < 3; ++i) v[i] = i < count ? m.t(k + i, k - 1) : 0;
    }
    group.sync();
    double value;
    const double scale = reflection(v, count, value);
    if (group.lane == 0) {
      if (k > begin) {
        m.t(k, k - 1) = value;
        for (int i = 1; i < count; ++i) m.t(k + i, k - 1) = 0;
      } else if (k > low) {
        m.t(k, k - 1) *= 1 - scale;
      }
    }
    reflect(m, group, v, scale, k, count, k, (k + 3 < high ? k + 3 : high) + 1);
  }
}

// Exchanges the real eigenvalue of row k with the complex pair of rows k + 1 and k + 2. The reflection takes w, with
// w^T T = T_kk w^T in these three rows, to the last of them.
template <typename Group>
SSM_HOST_DEVICE void exchange(const SchurForm& m, const Group& group, int k) {
  double a = m.t(k + 1, k + 1) - m.t(k, k), b = m.t(k + 1, k + 2), c = m.t(k + 2, k + 1), d = m.t(k + 2, k + 2) - m.t(k, k);
  const double s = fabs(a) + fabs(b) + fabs(c) + fabs(d), first = m.t(k, k + 1) / s, second = m.t(k, k + 2) / s;
  a /= s, b /= s, c /= s, d /= s;
  double v[3] = {first * b - second * a, second * c - first * d, a * d - b * c}, value;
  group.sync();
  const double scale = reflection(v, 3, value);
  const double reversed[3] = {v[2], v[1], v[0]};
  reflect(m, group, reversed, scale, k, 3, k, k + 3);
  if (group.lane == 0) m.t(k + 2, k) = m.t(k + 2, k + 1) = 0;
  group.sync();
  standardize(m, group, k);
}

}  // namespace schur

// Moves complex pairs so that each begins in an even row. Rows 2 i and 2 i + 1 are then a block on the diagonal for each i.
template <typename Group>
SSM_HOST_DEVICE void align_pairs(const SchurForm& m, const Group& group) {
  for (int k = 0; k + 2 < m.n; k += 2) {
    const bool is_odd_pair = m.t(k + 1, k) == 0 && m.t(k + 2, k + 1) != 0;
    group.sync();
    if (is_odd_pair) schur::exchange(m, group, k);
  }
}

// On entry T is A. kLargest is at least n. A matrix with an entry that is not finite, or, which has not been seen, without
// convergence, has T = NaN and Q = I.
template <int kLargest, typename Group>
SSM_HOST_DEVICE void reduce_to_schur(const SchurForm& m, const Group& group) {
  bool is_finite = true;
  for (int i = 0; i < m.n * m.n; ++i) is_finite = is_finite && fabs(m.t(i / m.n, i % m.n)) <= DBL_MAX;
  for (int i = group.lane; i < m.n * m.n; i += group.count) m.q(i / m.n, i % m.n) = i / m.n == i % m.n ? 1 : 0;
  group.sync();
  if (is_finite) schur::reduce_to_hessenberg<kLargest>(m, group);
  int high = m.n - 1, steps = 0;
  while (is_finite && high > 0) {
    int low = high;
    while (low > 0 && !schur::is_small(m, low)) --low;
    group.sync();
    if (low > 0 && group.lane == 0) m.t(low, low - 1) = 0;
    group.sync();
    if (low >= high - 1) {
      if (low == high - 1) schur::standardize(m, group, low);
      high = low - 1;
      steps = 0;
      continue;
    }
    schur::qr_step(m, group, low, high, steps % 10 == 9);
    is_finite = ++steps < 300;
  }
  if (is_finite) return;
  for (int i = group.lane; i < m.n * m.n; i += group.count) {
    m.t(i / m.n, i % m.n) = sqrt(-1.0);
    m.q(i / m.n, i % m.n) = i / m.n == i % m.n ? 1 : 0;
  }
  group.sync();
}

}  // namespace ssm_kernels
