// The normalizer n of mlstm_scan on the CPU and the divisors scale n q, in a loop over the steps of a head. n q is a sum of
// terms that cancel, and gradients divide by it: all sums are float64. This file is compiled once per instruction set.

#include <algorithm>
#include <cmath>

#include "cpu/scalar_types.h"
#include "mlstm/cpu/normalizer_kernels.h"

namespace ssm_kernels::mlstm {
inline namespace CPU_CAPABILITY {
namespace {

// n after a step, from n before it, and its product with q. Whatever an empty memory holds is zero.
template <typename T>
double advance(double* n, const T* k, const T* q, int64_t columns, double decay, double gain) {
  double product = 0;
  if (decay == 0) std::fill(n, n + columns, 0.0);
#pragma omp simd reduction(+ : product)
  for (int64_t c = 0; c < columns; ++c) {
    n[c] = decay * n[c] + gain * static_cast<double>(k[c]);
    product += n[c] * static_cast<double>(q[c]);
  }
  return product;
}

template <typename T>
void run(const NormalizerParams& p, int64_t sequence, int64_t head, double* n) {
  const bool is_packed = p.cu_seqlens != nullptr;
  const int64_t row = is_packed ? 0 : sequence, begin = is_packed ? p.cu_seqlens[sequence] : 0;
  const int64_t end = is_packed ? p.cu_seqlens[sequence + 1] : p.seqlen;
  const auto row_of = [&](const KeyView& view, int64_t step) {
    return static_cast<const T*>(view.data) + row * view.stride_batch + step * view.stride_step + head * view.stride_head;
  };
  T* const state = static_cast<T*>(p.final_n) + (sequence * p.heads + head) * p.key_dim;
  std::copy(state, state + p.key_dim, n);
  for (int64_t step = begin; step < end; ++step) {
    const int64_t at = (row * p.seqlen + step) * p.heads + head;
    const double decay = std::exp(static_cast<double>(static_cast<const T*>(p.log_decay)[at]));
    const double gain = static_cast<double>(static_cast<const T*>(p.gain)[at]);
    const double product = advance(n, row_of(p.k, step), row_of(p.q, step), p.key_dim, decay, gain);
    static_cast<T*>(p.divisor)[at] = static_cast<T>(p.scale * product);
  }
  std::transform(n, n + p.key_dim, state, [](double value) { return static_cast<T>(value); });
}

}  // namespace

void normalize_head(const NormalizerParams& p, ScalarKind kind, int64_t sequence, int64_t head, void* scratch) {
  double* const n = static_cast<double*>(scratch);
  if (kind == ScalarKind::kDouble) return run<double>(p, sequence, head, n);
  run<float>(p, sequence, head, n);
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&normalize_head};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::mlstm
