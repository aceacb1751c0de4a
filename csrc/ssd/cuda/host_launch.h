// Launches the SSD kernels on the current device and stream.
#pragma once

#include <string>

#include "ssd/cuda/tensors.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Whether the kernels of forward, or of backward, support a call: all dtypes but fp64, if a block can have the shared memory.
bool have_kernels_for(const Inputs& in, bool is_backward);
// Whether these multiply by wgmma, else by mma.sync. The forward kernel with wgmma also needs TMA stores to out, which have no
// negative strides: a reverse scan takes mma.sync, in backward too.
bool use_wgmma(const at::Tensor& x, bool reverse = false);
// The products of a call now: PyTorch's switch for fp32 matrix products on CUDA decides about TF32.
Products choose_products(const at::Tensor& x, bool reverse);

// Memory for states inside of the sequences: after `every` chunks, twice as many, and so on.
struct ChunkStates {
  at::Tensor states;  // (batch, count, heads, headdim, dstate); states of a row of the batch are contiguous. Undefined: none
  int64_t every = 1;
};

// Writes `out`, in the layout of inputs.x, `final_states`, in that of inputs.empty_states(), and the states of chunk_states, of
// sequences that are not packed and have so many chunks.
// The copies, of the inputs at least, are launched before the kernels.
void launch_forward(const KernelInputs& inputs, PendingCopies& copies, const OptionalTensor& z, const at::Tensor& out,
                    const at::Tensor& final_states, const ChunkStates& chunk_states = {});

// Writes the gradients that bwd.needs_grad asks for.
void launch_backward(const BwdInputs& bwd, Discretization method, const GradTensors& grads);

// Columns of a state that backward's kernels take at a time.
int64_t backward_columns_at_once(const Inputs& in);

// Writes the states that span_states_cuda computes, from the initial states if any.
void launch_span_states(const Inputs& in, Discretization method, bool is_reverse, const at::Tensor& states);

// Writes the decay of all steps of each row of the batch, e^(A sum of the step sizes) or e^(sum of the log decays).
void launch_decay(const Inputs& in, const at::Tensor& decay);

// For plan_cuda: the kernels that launch_forward and launch_backward launch.
std::string describe_kernel(const at::Tensor& x, Products products);
std::string describe_forward(const Inputs& in, Discretization method);
std::string describe_backward(const Inputs& in);

}  // namespace ssm_kernels::ssd
