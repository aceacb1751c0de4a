// The parameters of a mixer's recurrence in the accumulation type, for the mixers' operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ssm_kernels::mixers {

using OptionalTensor = std::optional<at::Tensor>;

// A = -e^A_log, the bias of the step sizes and D as the scans read them. `saved` is one 1-D tensor with the converted
// parameters; those already in the accumulation type are not in it.
struct Parameters {
  at::Tensor saved, A;
  OptionalTensor bias, D;
};

// Converts the parameters for activations of that dtype, by one kernel on a GPU.
Parameters compute_parameters(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D,
                              at::ScalarType dtype);
// Cuts the parameters out of `saved`, as forward saved it.
Parameters restore_parameters(const at::Tensor& saved, const at::Tensor& A_log, const OptionalTensor& bias,
                              const OptionalTensor& D);

// Convert gradients of A and of the wide parameters to those of A_log and of the original dtypes. grad_of_A_log overwrites
// grad_A.
at::Tensor grad_of_A_log(const at::Tensor& grad_A, const at::Tensor& A, at::ScalarType dtype);
at::Tensor in_dtype_of(const at::Tensor& grad, const at::Tensor& parameter);

}  // namespace ssm_kernels::mixers
