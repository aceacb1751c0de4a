// CPU entry point of mlstm_step: chooses the instruction set and distributes heads over threads.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "mlstm/cpu/step_kernels.h"
#include "mlstm/mlstm_step_op.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::mlstm::step {

SSM_DEFINE_CPU_KERNELS()

namespace {

at::Tensor cpu(const Inputs& in) {
  check_inputs(in);
  const at::Tensor out = allocate_out(in);
  const StepParams params = make_params(in, out);
  check_slot_indices("mlstm_step", in.state_batch_indices, params.slots);
  const CpuKernels& kernel = cpu_kernels();
  ThreadScratch scratch(kScratchBytes);
  scratch.parallel_for(params.rows * params.heads, params.value_dim * params.key_dim, [&](int64_t index, std::byte* memory) {
    kernel.update_head(params, index / params.heads, index % params.heads, memory);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement<&cpu>(m, "mlstm_step"); }

}  // namespace ssm_kernels::mlstm::step
