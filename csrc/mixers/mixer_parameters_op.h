// The parameters of a mixer in the form that its convolution and scan read.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ssm_kernels::mixers {

using OptionalTensor = std::optional<at::Tensor>;

// A = -e^A_log, the bias of the step sizes and D, in the accumulation type. `saved` is a 1-D tensor that contains A and the
// converted parameters; the others have the accumulation type already.
struct Parameters {
  at::Tensor saved, A;
  OptionalTensor bias, D;
};

// Converts the parameters for activations of `dtype`. On a GPU this takes one kernel.
Parameters compute_parameters(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D,
                              at::ScalarType dtype);
// Returns the parameters as views of `saved`.
Parameters restore_parameters(const at::Tensor& saved, const at::Tensor& A_log, const OptionalTensor& bias,
                              const OptionalTensor& D);

// Convert the gradients of A and of the converted parameters to those of A_log and of the original dtypes. grad_of_A_log may
// overwrite grad_A.
at::Tensor grad_of_A_log(const at::Tensor& grad_A, const at::Tensor& A, at::ScalarType dtype);
at::Tensor in_dtype_of(const at::Tensor& grad, const at::Tensor& parameter);

// The convolution's weight as (channels, width); nn.Conv1d stores (channels, 1, width).
inline at::Tensor taps_of(const at::Tensor& weight) { return weight.dim() == 3 ? weight.squeeze(1) : weight; }

}  // namespace ssm_kernels::mixers
