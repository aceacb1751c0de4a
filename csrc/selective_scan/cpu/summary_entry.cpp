// CPU entry points of selective_scan_summary and of the initial state's gradient.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "selective_scan/cpu/summary_kernels.h"
#include "selective_scan/selective_scan_summary_op.h"
#include "torch/checks.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::selective_scan::summary {

SSM_DEFINE_CPU_KERNELS()

namespace {

SelectiveScanSummaryParams make_params(const Inputs& scan, Discretization method, const at::Tensor& state) {
  SelectiveScanSummaryParams params;
  fill_params(params, scan, method, PackedRows());
  params.state = state.data_ptr();
  return params;
}

void run(const SelectiveScanSummaryParams& params, const MethodParameters& method, const at::Tensor& like,
         int64_t accumulate_bytes) {
  const CpuKernels& kernels = cpu_kernels();
  const ScalarKind kind = scalar_kind(like.scalar_type());
  const Blocking blocking(params, method, kernels.vector_bytes() / accumulate_bytes);
  const int64_t task_work = blocking.blocks_per_task * blocking.lanes * params.dstate * params.seqlen;
  ThreadScratch threads(kernels.scratch_bytes(params, blocking, kind));
  threads.parallel_for(params.batch * blocking.tasks_per_row(), task_work,
                       [&](int64_t task, std::byte* scratch) { kernels.task(params, blocking, kind, task, scratch); });
}

SummaryOutputs summary_cpu(const SummaryInputs& in) {
  const Discretization method = check_summary_inputs(in);
  SummaryOutputs outputs = allocate_summary(in);
  SelectiveScanSummaryParams params = make_params(in.scan(), method, outputs.last_state);
  params.decay = outputs.decay.data_ptr();
  run(params, parse_method_parameters(in.discretization), in.u, in.A.element_size());
  return outputs;
}

at::Tensor initial_gradient_cpu(const InitialGradientInputs& in) {
  const Discretization method = check_initial_gradient_inputs(in);
  const at::Tensor grad = allocate_initial_gradient(in);
  SelectiveScanSummaryParams params = make_params(in.scan(), method, grad);
  params.is_adjoint = true;
  run(params, parse_method_parameters(in.discretization), in.grad_out, in.A.element_size());
  return grad;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { register_summary_kernels<&summary_cpu, &summary_adjoint, &initial_gradient_cpu>(m); }

}  // namespace ssm_kernels::selective_scan::summary
