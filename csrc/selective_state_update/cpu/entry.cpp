// CPU entry point of selective_state_update: chooses the instruction set and distributes blocks of rows over threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/capability.h"
#include "selective_state_update/cpu/kernels.h"
#include "selective_state_update/selective_state_update_op.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::selective_state_update {

SSM_DEFINE_CPU_KERNELS()

namespace {

at::Tensor cpu(const Inputs& in) {
  const Discretization method = check_inputs(in);
  at::Tensor out = allocate_out(in);
  const StateUpdateParams params = make_params(in, method, out);
  check_slot_indices("selective_state_update", in.state_batch_indices, params.slots);
  if (out.numel() == 0) return out;

  const CpuKernels& kernel = cpu_kernels();
  const Blocking blocking(params, kernel.vector_size(params));
  // A thread gets at least 16384 states, below which starting it costs more than it saves.
  const int64_t grain = std::max<int64_t>(1, 16384 / (blocking.block_channels * params.dstate));
  at::parallel_for(0, blocking.blocks, grain,
                   [&](int64_t begin, int64_t end) { kernel.update_blocks(params, blocking, begin, end); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement<&cpu>(m, "selective_state_update"); }

}  // namespace ssm_kernels::selective_state_update
