// Gates of the delta rule, for one number or a SIMD vector: the log decay of a step from a raw gate, and the strength of a
// write. The norm of q and k.
#pragma once

#include "common/activations.h"
#include "common/math.h"

namespace ssm_kernels {

// Added to the sum of squares of a row of q or k that is divided by its norm.
constexpr double kNormEpsilon = 1e-6;

// -e^A_log softplus(raw), with rate = e^A_log. `raw` has the bias.
template <typename T>
SSM_HOST_DEVICE T softplus_gate(T raw, T rate) {
  return Math<T>::negate(rate * softplus(raw));
}

// lower_bound sigmoid(e^A_log raw): between lower_bound and 0.
template <typename T>
SSM_HOST_DEVICE T bounded_gate(T raw, T rate, T lower_bound) {
  return lower_bound * sigmoid(rate * raw);
}

// sigmoid(raw), or raw itself, and twice that for eigenvalues 1 - beta of the update down to -1.
template <typename T>
SSM_HOST_DEVICE T write_strength(T raw, bool is_logit, bool is_doubled) {
  const T beta = is_logit ? sigmoid(raw) : raw;
  return is_doubled ? beta + beta : beta;
}

}  // namespace ssm_kernels
