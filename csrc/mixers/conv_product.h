// Backward of a Mamba mixer's convolution from a gradient of its output that is a sum with a product.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "causal_conv1d/causal_conv1d_op.h"

namespace ssm_kernels::mixers {

// The gradient of the convolution's output is bwd.grad_out plus rows weight, with rows (batch * seqlen, terms) and weight
// (terms, channels). Writes the gradient of x to bwd.required_grad_x. Without a kernel for such a call it does nothing and
// returns nothing: the caller adds the product to grad_out.
std::optional<causal_conv1d::BwdOutGrads> conv_bwd_of_product(const causal_conv1d::BwdOutInputs& bwd, const at::Tensor& rows,
                                                              const at::Tensor& weight);

}  // namespace ssm_kernels::mixers
