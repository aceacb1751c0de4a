#include "delta_rule/aten/unit_triangular.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve_triangular.h>

#include <algorithm>

#include "torch/allocation.h"

namespace ssm_kernels::delta_rule {
namespace {

// Rows i of X = (I + A)^-1: e_i - sum_{j < i} A_ij X_j.
template <typename T>
void invert(const T* A, T* X, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T* const row = X + i * n;
    std::fill(row, row + n, T(0));
    row[i] = T(1);
    for (int64_t j = 0; j < i; ++j) {
      const T factor = A[i * n + j];
      const T* const other = X + j * n;
      for (int64_t l = 0; l <= j; ++l) row[l] -= factor * other[l];
    }
  }
}

}  // namespace

at::Tensor unit_triangular_inverse(const at::Tensor& A) {
  const int64_t count = A.size(0), n = A.size(1);
  if (!A.is_cpu()) {
    return at::linalg_solve_triangular(A, at::eye(n, A.options()).expand_as(A), /*upper=*/false, /*left=*/true,
                                       /*unitriangular=*/true);
  }
  at::Tensor X = empty_tensor(A.sym_sizes(), A.options());
  AT_DISPATCH_FLOATING_TYPES(A.scalar_type(), "unit_triangular_inverse", [&] {
    const scalar_t* const from = A.const_data_ptr<scalar_t>();
    scalar_t* const to = X.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) invert(from + i * n * n, to + i * n * n, n);
    });
  });
  return X;
}

}  // namespace ssm_kernels::delta_rule
