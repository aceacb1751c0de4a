// The summary of a span as PyTorch matmuls, and its adjoint: any device, any dtype.
#pragma once

#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// The inputs have been checked; the results are written to tensors that have been allocated.
void summary_aten(const Inputs& in, Discretization method, const SummaryOutputs& outputs);
// Makes the decay, or its gradient, zero in rows of the batch in which a sequence begins.
void zero_where_cut(const at::Tensor& decay, const OptionalTensor& seq_idx);
// The gradient of the states before the span, from that of its outputs, in.x, and from in.C.
at::Tensor initial_gradient_aten(const Inputs& in, Discretization method);
void summary_adjoint_aten(const SummaryBwdInputs& bwd, Discretization method, const SummaryGrads& grads);

}  // namespace ssm_kernels::ssd
