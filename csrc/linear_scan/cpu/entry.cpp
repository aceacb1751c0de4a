// CPU entry points of the linear scan's family: allocate, choose the instruction set, hand tasks to threads.

#include "linear_scan/cpu/kernels.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "linear_scan/linear_scan_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::linear_scan {

#define SSM_CPU_KERNELS(CAPABILITY)                                                         \
  namespace CAPABILITY {                                                                    \
  void fwd_task(const LinearScanFwdParams&, ScalarKind, const Tasks&, int64_t, std::byte*); \
  void bwd_task(const LinearScanBwdParams&, ScalarKind, const Tasks&, int64_t, std::byte*); \
  constexpr CpuKernels kKernels{&fwd_task, &bwd_task};                                      \
  }

SSM_CPU_CAPABILITIES(SSM_CPU_KERNELS)
#undef SSM_CPU_KERNELS

namespace {

const CpuKernels& cpu_kernels() {
#define SSM_ROW(CAPABILITY) &CAPABILITY::kKernels,
  static constexpr const CpuKernels* kBuilt[] = {SSM_CPU_CAPABILITIES(SSM_ROW)};
#undef SSM_ROW
  return *kBuilt[cpu_capability_index()];
}

template <typename Body>
void for_each_task(const LinearScanParams& params, const Body& body) {
  ThreadScratch threads(kScratchBytes);
  const Tasks tasks(params, at::get_num_threads());
  threads.parallel_for(tasks.count, params.seqlen * tasks.channels,
                       [&](int64_t task, std::byte* scratch) { body(tasks, task, scratch); });
}

std::tuple<at::Tensor, at::Tensor> fwd_cpu(at::TensorList inputs, const OptionalTensor& h0, const OptionalTensor& cu_seqlens,
                                           std::string_view recurrence, std::string_view candidate_activation,
                                           bool gate_is_logit, bool reverse) {
  const Inputs in{inputs, h0, cu_seqlens, recurrence, candidate_activation, gate_is_logit, reverse};
  const Member member = check_inputs(in);
  if (is_present(cu_seqlens)) check_cu_seqlens_values(recurrence, *cu_seqlens, inputs[0].size(1));
  FwdOutputs outputs = allocate_fwd(in);
  const at::Tensor sequences = sequence_of_step(in);
  const LinearScanFwdParams params = make_fwd_params(in, member, sequences, outputs);
  const ScalarKind kind = scalar_kind(inputs[0].scalar_type());
  for_each_task(params, [&](const Tasks& tasks, int64_t task, std::byte* scratch) {
    cpu_kernels().fwd_task(params, kind, tasks, task, scratch);
  });
  return {outputs.h, outputs.last_state};
}

std::tuple<std::vector<at::Tensor>, at::Tensor> bwd_cpu(const OptionalTensor& grad_h, const OptionalTensor& grad_last_state,
                                                        at::TensorList inputs, const at::Tensor& h, const OptionalTensor& h0,
                                                        const OptionalTensor& cu_seqlens, std::string_view recurrence,
                                                        std::string_view candidate_activation, bool gate_is_logit, bool reverse,
                                                        NeedsGrad needs_grad) {
  const Inputs in{inputs, h0, cu_seqlens, recurrence, candidate_activation, gate_is_logit, reverse};
  const Member member = check_inputs(in);
  GradTensors grads = allocate_bwd(in, h, grad_h, grad_last_state, needs_grad);
  const at::Tensor sequences = sequence_of_step(in);
  const LinearScanBwdParams params = make_bwd_params(in, member, sequences, h, grad_h, grad_last_state, grads);
  const ScalarKind kind = scalar_kind(inputs[0].scalar_type());
  for_each_task(params, [&](const Tasks& tasks, int64_t task, std::byte* scratch) {
    cpu_kernels().bwd_task(params, kind, tasks, task, scratch);
  });
  return {std::move(grads.inputs), grads.h0};
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  m.impl("_linear_recurrence_fwd", &fwd_cpu);
  m.impl("_linear_recurrence_bwd", &bwd_cpu);
}

}  // namespace ssm_kernels::linear_scan
