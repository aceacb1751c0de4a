// The parameters of a mixer's recurrence in the accumulation type, for the mixers' operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ssm_kernels::mixers {

using OptionalTensor = std::optional<at::Tensor>;

// A = -e^A_log, the bias of the step sizes and D as the scans read them. `saved` is the tensor that what was computed is in,
// of one axis; parameters that already have the accumulation type are not copied to it.
struct Parameters {
  at::Tensor saved, A;
  OptionalTensor bias, D;
};

// For activations of that dtype: computed, by one kernel on a GPU.
Parameters compute_parameters(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D,
                              at::ScalarType dtype);
// From what forward saved.
Parameters restore_parameters(const at::Tensor& saved, const at::Tensor& A_log, const OptionalTensor& bias,
                              const OptionalTensor& D);

// Gradients of the parameters from those of what was computed of them, which nobody else uses.
at::Tensor grad_of_A_log(const at::Tensor& grad_A, const at::Tensor& A, at::ScalarType dtype);
at::Tensor in_dtype_of(const at::Tensor& grad, const at::Tensor& parameter);

}  // namespace ssm_kernels::mixers
