// CPU entry point of mamba3_state_update: chooses the instruction set and distributes heads over threads.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "mamba3/cpu/step_kernels.h"
#include "mamba3/mamba3_step_op.h"
#include "torch/debug_options.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels::mamba3::step {

SSM_DEFINE_CPU_KERNELS()

namespace {

at::Tensor cpu(const Inputs& in) {
  if (debug_option(DebugOption::kMamba3Cpu) != 0) {
    check_slot_indices("mamba3_state_update", in.state_batch_indices, in.ssm.size(0));
    return step_aten(in);
  }
  check_inputs(in);
  check_memory(in);
  const at::Tensor out = allocate_out(in);
  const StepParams params = make_params(in, out);
  check_slot_indices("mamba3_state_update", in.state_batch_indices, params.slots);
  const CpuKernels& kernel = cpu_kernels();
  ThreadScratch scratch(scratch_bytes(params));
  scratch.parallel_for(params.rows * params.heads, params.headdim * params.dstate, [&](int64_t index, std::byte* memory) {
    kernel.update_head(params, index / params.heads, index % params.heads, memory);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement<&cpu>(m, "mamba3_state_update"); }

}  // namespace ssm_kernels::mamba3::step
