// The adjoint of linear_scan written in operators that are themselves differentiable: what backward is when its own gradient
// will be asked for.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ssm_kernels::linear_scan {

// The gradients of {a, b}, and of h0.
std::tuple<std::vector<at::Tensor>, at::Tensor> differentiable_adjoint(
    const std::optional<at::Tensor>& grad_h, const std::optional<at::Tensor>& grad_last_state, const at::Tensor& a,
    const at::Tensor& h, const std::optional<at::Tensor>& h0, const std::optional<at::Tensor>& cu_seqlens, bool reverse);

}  // namespace ssm_kernels::linear_scan
