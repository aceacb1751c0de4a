// Inverses of unit lower triangular matrices.
#pragma once

#include <ATen/core/Tensor.h>

namespace ssm_kernels::delta_rule {

// (I + A)^-1 of contiguous, strictly lower triangular matrices A, (matrices, n, n), by forward substitution: its error does not
// grow with powers of A, as that of Neumann series does. Elements of A on the diagonal and above are not read.
at::Tensor unit_triangular_inverse(const at::Tensor& A);

}  // namespace ssm_kernels::delta_rule
