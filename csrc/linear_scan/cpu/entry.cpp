// CPU entry points of the linear recurrences: allocate, choose the instruction set and distribute tasks over threads.

#include "linear_scan/cpu/kernels.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "linear_scan/linear_scan_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::linear_scan {

SSM_DEFINE_CPU_KERNELS()

namespace {

template <typename Body>
void for_each_task(const LinearScanParams& params, const Body& body) {
  ThreadScratch threads(kScratchBytes);
  const Tasks tasks(params, at::get_num_threads());
  threads.parallel_for(tasks.count, params.seqlen * tasks.channels,
                       [&](int64_t task, std::byte* scratch) { body(tasks, task, scratch); });
}

FwdOutputs fwd_cpu(const Inputs& in) {
  const Member member = check_inputs(in);
  const at::Tensor& first = in.tensors[0];
  if (is_present(in.cu_seqlens)) check_cu_seqlens_values(in.recurrence, *in.cu_seqlens, first.size(1));
  FwdOutputs outputs = allocate_fwd(in);
  const at::Tensor sequences = sequence_of_step(in);
  const LinearScanFwdParams params = make_fwd_params(in, member, sequences, outputs);
  const ScalarKind kind = scalar_kind(first.scalar_type());
  for_each_task(params, [&](const Tasks& tasks, int64_t task, std::byte* scratch) {
    cpu_kernels().fwd_task(params, kind, tasks, task, scratch);
  });
  return outputs;
}

GradTensors bwd_cpu(const BwdInputs& bwd) {
  const Member member = check_inputs(bwd.in);
  GradTensors grads = allocate_bwd(bwd);
  const at::Tensor sequences = sequence_of_step(bwd.in);
  const LinearScanBwdParams params = make_bwd_params(bwd, member, sequences, grads);
  const ScalarKind kind = scalar_kind(bwd.in.tensors[0].scalar_type());
  for_each_task(params, [&](const Tasks& tasks, int64_t task, std::byte* scratch) {
    cpu_kernels().bwd_task(params, kind, tasks, task, scratch);
  });
  return grads;
}

SummaryOutputs summary_cpu(const SummaryInputs& in) {
  const Member member = check_inputs(in);
  const at::Tensor& first = in.tensors[0];
  if (is_present(in.cu_seqlens)) check_cu_seqlens_values(in.recurrence, *in.cu_seqlens, first.size(1));
  SummaryOutputs outputs = allocate_summary(in);
  const at::Tensor sequences = sequence_of_step(in);
  const LinearScanSummaryParams params = make_summary_params(in, member, sequences, outputs);
  const ScalarKind kind = scalar_kind(first.scalar_type());
  for_each_task(params, [&](const Tasks& tasks, int64_t task, std::byte* scratch) {
    cpu_kernels().summary_task(params, kind, tasks, task, scratch);
  });
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  register_kernels<&fwd_cpu, &bwd_cpu>(m);
  register_summary_kernels<&summary_cpu, &summary_adjoint>(m);
}

}  // namespace ssm_kernels::linear_scan
