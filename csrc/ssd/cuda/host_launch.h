// Launches the SSD kernels on the current device and stream.
#pragma once

#include "ssd/cuda/tensors.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Whether the kernels of forward, or of backward, support a call: all dtypes but fp64, if a block can have the shared memory.
bool have_kernels_for(const Inputs& in, bool is_backward);

// Writes `out`, in the layout of inputs.x, and `final_states`, in that of inputs.empty_states().
void launch_forward(const KernelInputs& inputs, const OptionalTensor& z, const at::Tensor& out, const at::Tensor& final_states,
                    bool may_use_wgmma);

// Writes the gradients of sequences in place. Replaces the members of grads that are sums over the batch: A, D and dt_bias.
void launch_backward(const BwdInputs& bwd, Discretization method, GradTensors& grads, bool may_use_wgmma);

}  // namespace ssm_kernels::ssd
