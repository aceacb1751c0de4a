// The normalizer n of mlstm_scan on the CPU and the divisors scale n q, in a loop over the steps. n q is a sum of terms that
// cancel, and gradients divide by it: all sums are float64.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "mlstm/mlstm_op.h"

namespace ssm_kernels::mlstm {
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

}  // namespace

void normalizer_cpu(const Inputs& in, const Gates& gates, const at::Tensor& divisor, const at::Tensor& final_n) {
  const auto with_rows = [](const at::Tensor& tensor) { return tensor.stride(3) == 1 ? tensor : tensor.contiguous(); };
  const at::Tensor q = with_rows(in.q), k = with_rows(in.k);
  const at::Tensor bounds = is_present(in.cu_seqlens) ? in.cu_seqlens->to(at::kLong).contiguous() : at::Tensor();
  const int64_t seqlen = q.size(1), heads = q.size(2), columns = q.size(3);
  const int64_t sequences = bounds.defined() ? bounds.size(0) - 1 : q.size(0);
  if (is_present(in.initial_n)) {
    at::Tensor(final_n).copy_(*in.initial_n);
  } else {
    at::Tensor(final_n).zero_();
  }
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "mlstm_normalizer", [&] {
    const scalar_t* const log_decay = gates.log_decay.const_data_ptr<scalar_t>();
    const scalar_t* const gain = gates.gain.const_data_ptr<scalar_t>();
    const auto row_of = [](const at::Tensor& tensor, int64_t row, int64_t step, int64_t head) {
      return tensor.const_data_ptr<scalar_t>() + row * tensor.stride(0) + step * tensor.stride(1) + head * tensor.stride(2);
    };
    at::parallel_for(0, sequences * heads, 1, [&](int64_t first, int64_t last) {
      std::vector<double> n(columns);
      for (int64_t index = first; index < last; ++index) {
        const int64_t sequence = index / heads, head = index % heads, row = bounds.defined() ? 0 : sequence;
        const int64_t* const at = bounds.defined() ? bounds.const_data_ptr<int64_t>() + sequence : nullptr;
        const int64_t begin = at == nullptr ? 0 : at[0], end = at == nullptr ? seqlen : at[1];
        scalar_t* const state = final_n.mutable_data_ptr<scalar_t>() + index * columns;
        std::copy(state, state + columns, n.begin());
        for (int64_t step = begin; step < end; ++step) {
          const int64_t place = (row * seqlen + step) * heads + head;
          const double decay = std::exp(static_cast<double>(log_decay[place]));
          divisor.mutable_data_ptr<scalar_t>()[place] =
              static_cast<scalar_t>(scale_of(in) * advance(n.data(), row_of(k, row, step, head), row_of(q, row, step, head),
                                                           columns, decay, static_cast<double>(gain[place])));
        }
        std::transform(n.begin(), n.end(), state, [](double value) { return static_cast<scalar_t>(value); });
      }
    });
  });
}

}  // namespace ssm_kernels::mlstm
