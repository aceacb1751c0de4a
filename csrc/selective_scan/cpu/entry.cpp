// CPU entry points of selective_scan: allocate, choose the instruction set and distribute tasks over threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "selective_scan/cpu/kernels.h"
#include "selective_scan/selective_scan_op.h"
#include "torch/checks.h"

namespace ssm_kernels::selective_scan {

SSM_DEFINE_CPU_KERNELS()

namespace {

FwdOutputs fwd_cpu(const FwdInputs& in) {
  const Discretization method = check_inputs(in);
  FwdOutputs outputs = allocate_fwd(in);
  const SelectiveScanFwdParams params = make_fwd_params(in, method, outputs);

  const CpuKernels& kernels = cpu_kernels();
  const ScalarKind kind = scalar_kind(in.u.scalar_type());
  const Blocking blocking(params, kernels.vector_bytes() / in.A.element_size());
  const int64_t task_work = blocking.blocks_per_task * blocking.lanes * params.dstate * params.seqlen;
  ThreadScratch threads(kernels.fwd_scratch_bytes(params, blocking, kind));
  threads.parallel_for(params.batch * blocking.tasks_per_batch(), task_work,
                       [&](int64_t task, std::byte* scratch) { kernels.fwd_task(params, blocking, kind, task, scratch); });
  return outputs;
}

// Converts between (batch, dim, rows) and [batch][block][row][lane]. The last block of a segment is padded.
at::Tensor to_lanes(const at::Tensor& values, const Blocking& blocking) {
  const int64_t segments = values.size(0) * blocking.segments, rows = values.size(2);
  const int64_t padding = blocking.blocks_per_segment * blocking.lanes - blocking.segment;
  return at::constant_pad_nd(values.reshape({segments, blocking.segment, rows}), {0, 0, 0, padding})
      .reshape({segments * blocking.blocks_per_segment, blocking.lanes, rows})
      .transpose(1, 2)
      .contiguous();
}
at::Tensor from_lanes(const at::Tensor& blocks, const Blocking& blocking) {
  const int64_t batch = blocks.size(0), rows = blocks.size(2), padded = blocking.blocks_per_segment * blocking.lanes;
  return blocks.transpose(2, 3)
      .reshape({batch, blocking.segments, padded, rows})
      .narrow(2, 0, blocking.segment)
      .reshape({batch, blocking.segments * blocking.segment, rows});
}

GradTensors bwd_cpu(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const Discretization method = check_inputs(in);
  const GradTensors grads = allocate_bwd(bwd);
  const at::Tensor states = bwd.chunk_states.contiguous();
  const SelectiveScanBwdParams params = make_bwd_params(bwd, method, states, grads);

  const CpuKernels& kernels = cpu_kernels();
  const ScalarKind kind = scalar_kind(in.u.scalar_type());
  const Blocking blocking(params, kernels.vector_bytes() / in.A.element_size());
  const int64_t tasks = params.batch * blocking.tasks_per_batch();
  // Sums over the lanes of each block, and the parts of grad_B and grad_C of each task. Those of gradients that are not needed
  // have no elements.
  const auto sums = [&](Grad grad, int64_t rows) {
    const bool is_needed = grads[grad].numel() > 0;
    return at::zeros({params.batch, blocking.blocks_per_batch(), is_needed ? rows : 0, blocking.lanes}, in.A.options());
  };
  const auto matrix_sums = [&](Grad grad, const MatrixView& view) {
    if (!view.per_step) return sums(grad, params.dstate);
    return at::empty({tasks * blocking.chunks_per_sweep * blocking.part_size()}, in.A.options());
  };
  const bool has_grad_state = is_present(bwd.grad_last_state) && bwd.grad_last_state->numel() > 0;
  const at::Tensor grad_state =
      has_grad_state ? to_lanes(*bwd.grad_last_state, blocking)
                     : at::zeros({params.batch * blocking.blocks_per_batch(), params.dstate, blocking.lanes}, in.A.options());
  const at::Tensor grad_A = sums(kGradA, params.dstate), grad_B = matrix_sums(kGradB, params.grad_B),
                   grad_C = matrix_sums(kGradC, params.grad_C), grad_D = sums(kGradD, 1),
                   grad_delta_bias = sums(kGradDeltaBias, 1);
  const BwdWorkspace workspace{grad_state.mutable_data_ptr(), grad_A.mutable_data_ptr(), grad_B.mutable_data_ptr(),
                               grad_C.mutable_data_ptr(),     grad_D.mutable_data_ptr(), grad_delta_bias.mutable_data_ptr()};

  ThreadScratch threads(kernels.bwd_scratch_bytes(params, blocking, kind));
  const int64_t steps = std::min(params.chunk_length, params.seqlen);
  const int64_t task_work = blocking.blocks_per_task * blocking.lanes * params.dstate * steps;
  const int64_t reduce_work = blocking.tasks_per_batch() * params.dstate * steps;
  for (int64_t end = params.chunk_boundaries - 1; end > 0;) {
    // Sweeps begin at multiples of their length, so that a chunk's place in its sweep is its remainder.
    const int64_t begin = (end - 1) / blocking.chunks_per_sweep * blocking.chunks_per_sweep, chunks = end - begin;
    threads.parallel_for(tasks, chunks * task_work, [&](int64_t task, std::byte* scratch) {
      for (int64_t chunk = end - 1; chunk >= begin; --chunk) {
        kernels.bwd_task(params, blocking, workspace, kind, task, chunk, scratch);
      }
    });
    if (params.grad_B.per_step || params.grad_C.per_step) {
      threads.parallel_for(params.batch * chunks, reduce_work, [&](int64_t index, std::byte* scratch) {
        kernels.bwd_reduce(params, blocking, workspace, kind, index / chunks, begin + index % chunks, scratch);
      });
    }
    end = begin;
  }

  const auto add_batch = [&](Grad grad, const at::Tensor& blocks) {
    if (grads[grad].numel() > 0) grads[grad].copy_(from_lanes(blocks.sum(0, /*keepdim=*/true), blocking).view_as(grads[grad]));
  };
  add_batch(kGradA, grad_A);
  if (!params.grad_B.per_step) add_batch(kGradB, grad_B);
  if (!params.grad_C.per_step) add_batch(kGradC, grad_C);
  add_batch(kGradD, grad_D);
  add_batch(kGradDeltaBias, grad_delta_bias);
  if (grads[kGradInitialState].numel() > 0) {
    grads[kGradInitialState].copy_(from_lanes(grad_state.unflatten(0, {params.batch, blocking.blocks_per_batch()}), blocking));
  }
  return grads;
}

KernelNames name_cpu_kernels(const Inputs& in) {
  check_inputs(in);
  return {"cpu", "cpu"};
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  register_kernels<&fwd_cpu, &bwd_cpu>(m);
  implement<&name_cpu_kernels>(m, "_selective_scan_plan");
}

}  // namespace ssm_kernels::selective_scan
