// CPU entry points of selective_scan: allocate, choose the instruction set and distribute tasks over threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "common/integers.h"
#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "selective_scan/cpu/kernels.h"
#include "selective_scan/selective_scan_op.h"
#include "selective_scan/two_sample_op.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::selective_scan {

SSM_DEFINE_CPU_KERNELS()

namespace {

// Raises unless cu_seqlens partitions the steps.
PackedRows checked_rows(const Inputs& in) {
  if (is_present(in.cu_seqlens)) check_cu_seqlens_values("selective_scan", *in.cu_seqlens, in.u.size(2));
  return make_packed_rows(in);
}

FwdOutputs run_fwd(const Inputs& in, Discretization method, const TwoSampleParams* two_samples) {
  const PackedRows rows = checked_rows(in);
  FwdOutputs outputs = allocate_fwd(in);
  const SelectiveScanFwdParams params = make_fwd_params(in, method, rows, outputs);

  const CpuKernels& kernels = cpu_kernels();
  const ScalarKind kind = scalar_kind(in.u.scalar_type());
  const Blocking blocking(params, parse_method_parameters(in.discretization), kernels.vector_bytes() / in.A.element_size(),
                          two_samples);
  const int64_t mean_steps = params.is_packed()
                                 ? params.seqlen / std::max<int64_t>(1, params.rows / std::max<int64_t>(1, params.batch))
                                 : params.seqlen;
  const int64_t task_work = blocking.blocks_per_task * blocking.lanes * params.dstate * mean_steps;
  ThreadScratch threads(kernels.fwd_scratch_bytes(params, blocking, kind));
  threads.parallel_for(params.rows * blocking.tasks_per_row(), task_work,
                       [&](int64_t task, std::byte* scratch) { kernels.fwd_task(params, blocking, kind, task, scratch); });
  return outputs;
}

FwdOutputs fwd_cpu(const FwdInputs& in) { return run_fwd(in, check_inputs(in), nullptr); }

FwdOutputs two_sample_fwd_cpu(const TwoSampleFwdInputs& in) {
  const Discretization method = check_two_sample_inputs(in);
  const TwoSampleParams two_samples = make_two_sample_params(in);
  return run_fwd(in, method, &two_samples);
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

// The number of the state that a row begins from or ends in, or -1, is column 3 or 4 of a row's fields.
constexpr int64_t kInitial = 3, kLast = 4;

// The gradients of the last states of some rows, zero for rows that return none.
at::Tensor grads_of_rows(const at::Tensor& grad_last_state, const PackedRows& rows, int64_t first, int64_t count) {
  if (!rows.fields.defined()) return grad_last_state.narrow(0, first, count);
  const at::Tensor last = rows.fields.narrow(0, first, count).select(1, kLast);
  at::Tensor result = at::zeros({count, grad_last_state.size(1), grad_last_state.size(2)}, grad_last_state.options());
  const at::Tensor with_state = last.ge(0).nonzero().flatten();
  return result.index_copy_(0, with_state, grad_last_state.index_select(0, last.index_select(0, with_state)));
}

// The inverse, for the initial states.
void put_grads_of_rows(const at::Tensor& target, const at::Tensor& grads, const PackedRows& rows, int64_t first) {
  const int64_t count = grads.size(0);
  if (!rows.fields.defined()) {
    target.narrow(0, first, count).copy_(grads);
    return;
  }
  const at::Tensor initial = rows.fields.narrow(0, first, count).select(1, kInitial);
  const at::Tensor with_state = initial.ge(0).nonzero().flatten();
  target.index_copy_(0, initial.index_select(0, with_state), grads.index_select(0, with_state));
}

// The largest number of chunks among these rows.
int64_t most_chunks(const SelectiveScanParams& p, int64_t first_row, int64_t rows) {
  int64_t steps = 0;
  for (int64_t i = first_row; i < first_row + rows; ++i) {
    const ScanRow row = p.row(i);
    steps = std::max(steps, row.end - row.begin);
  }
  return ceil_div(steps, p.chunk_length);
}

// `grad_previous` receives the gradient of the sample before each sequence, if it has elements.
void run_bwd(const BwdInputs& bwd, Discretization method, const GradTensors& grads, const TwoSampleParams* two_samples,
             const at::Tensor& grad_previous) {
  const Inputs& in = bwd.in;
  const PackedRows rows = checked_rows(in);
  const at::Tensor states = bwd.chunk_states.contiguous();
  const SelectiveScanBwdParams params = make_bwd_params(bwd, method, rows, states, grads);

  const CpuKernels& kernels = cpu_kernels();
  const ScalarKind kind = scalar_kind(in.u.scalar_type());
  const Blocking blocking(params, parse_method_parameters(in.discretization), kernels.vector_bytes() / in.A.element_size(),
                          two_samples);
  // Sums over the lanes of each block, and the parts of grad_B and grad_C of each task. Sums for gradients that nothing needs
  // have no elements. Packed sequences take turns in the memory of rows_per_pass rows, to whose sums each of them adds.
  const int64_t rows_per_pass = params.is_packed() ? std::min(params.rows, kRowsPerPass) : params.rows;
  const auto sums = [&](Grad grad, int64_t count) {
    const bool is_needed = grads[grad].numel() > 0;
    return at::zeros({rows_per_pass, blocking.blocks_per_row(), is_needed ? count : 0, blocking.lanes}, in.A.options());
  };
  const auto matrix_sums = [&](Grad grad, const MatrixView& view) {
    if (!view.per_step) return sums(grad, params.dstate);
    return empty_tensor({rows_per_pass * blocking.tasks_per_row() * blocking.chunks_per_sweep * blocking.part_size()},
                        in.A.options());
  };
  const bool has_grad_state = is_present(bwd.grad_last_state) && bwd.grad_last_state->numel() > 0;
  const at::Tensor grad_A = sums(kGradA, params.dstate), grad_B = matrix_sums(kGradB, params.grad_B),
                   grad_C = matrix_sums(kGradC, params.grad_C), grad_D = sums(kGradD, 1),
                   grad_delta_bias = sums(kGradDeltaBias, 1);

  ThreadScratch threads(kernels.bwd_scratch_bytes(params, blocking, kind));
  const int64_t steps = std::min(params.chunk_length, params.seqlen);
  const int64_t task_work = blocking.blocks_per_task * blocking.lanes * params.dstate * steps;
  const int64_t reduce_work = blocking.tasks_per_row() * params.dstate * steps;
  for (int64_t first_row = 0; first_row < params.rows; first_row += rows_per_pass) {
    const int64_t pass_rows = std::min(rows_per_pass, params.rows - first_row);
    const at::Tensor grad_state =
        has_grad_state ? to_lanes(grads_of_rows(*bwd.grad_last_state, rows, first_row, pass_rows), blocking)
                       : at::zeros({pass_rows * blocking.blocks_per_row(), params.dstate, blocking.lanes}, in.A.options());
    const at::Tensor of_previous =
        at::zeros({two_samples != nullptr ? grad_state.size(0) : 0, params.dstate, blocking.lanes}, in.A.options());
    const BwdWorkspace workspace{first_row,
                                 grad_state.mutable_data_ptr(),
                                 grad_A.mutable_data_ptr(),
                                 grad_B.mutable_data_ptr(),
                                 grad_C.mutable_data_ptr(),
                                 grad_D.mutable_data_ptr(),
                                 grad_delta_bias.mutable_data_ptr(),
                                 of_previous.mutable_data_ptr()};
    const int64_t tasks = blocking.tasks_per_row(), first_task = first_row * tasks;
    for (int64_t end = most_chunks(params, first_row, pass_rows); end > 0;) {
      // Sweeps begin at multiples of their length, so that a chunk's place in its sweep is its remainder.
      const int64_t begin = (end - 1) / blocking.chunks_per_sweep * blocking.chunks_per_sweep, chunks = end - begin;
      threads.parallel_for(pass_rows * tasks, chunks * task_work, [&](int64_t task, std::byte* scratch) {
        for (int64_t chunk = end - 1; chunk >= begin; --chunk) {
          kernels.bwd_task(params, blocking, workspace, kind, first_task + task, chunk, scratch);
        }
      });
      if (params.grad_B.per_step || params.grad_C.per_step) {
        threads.parallel_for(pass_rows * chunks, reduce_work, [&](int64_t index, std::byte* scratch) {
          kernels.bwd_reduce(params, blocking, workspace, kind, first_row + index / chunks, begin + index % chunks, scratch);
        });
      }
      end = begin;
    }
    const auto put = [&](const at::Tensor& target, const at::Tensor& lanes) {
      if (target.numel() == 0) return;
      put_grads_of_rows(target, from_lanes(lanes.unflatten(0, {pass_rows, blocking.blocks_per_row()}), blocking), rows,
                        first_row);
    };
    put(grads[kGradInitialState], grad_state);
    put(grad_previous, of_previous);
  }

  const auto add_rows = [&](Grad grad, const at::Tensor& blocks) {
    if (grads[grad].numel() > 0) grads[grad].copy_(from_lanes(blocks.sum(0, /*keepdim=*/true), blocking).view_as(grads[grad]));
  };
  add_rows(kGradA, grad_A);
  if (!params.grad_B.per_step) add_rows(kGradB, grad_B);
  if (!params.grad_C.per_step) add_rows(kGradC, grad_C);
  add_rows(kGradD, grad_D);
  add_rows(kGradDeltaBias, grad_delta_bias);
}

GradTensors bwd_cpu(const BwdInputs& bwd) {
  const Discretization method = check_inputs(bwd.in);
  const GradTensors grads = allocate_bwd(bwd);
  run_bwd(bwd, method, grads, nullptr, empty_tensor({0}, bwd.in.A.options()));
  return grads;
}

TwoSampleGrads two_sample_bwd_cpu(const TwoSampleBwdInputs& in) {
  const Discretization method = check_two_sample_inputs(in.in);
  TwoSampleBwd bwd(in);
  const TwoSampleParams two_samples = make_two_sample_params(in.in, bwd);
  run_bwd(bwd.scan, method, bwd.of_scan(), &two_samples, bwd.grad_previous);
  return std::move(bwd).finish(in.in);
}

KernelNames name_cpu_kernels(const PlanInputs& in) {
  check_inputs(in);
  return {"cpu", "cpu"};
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  register_kernels<&fwd_cpu, &bwd_cpu>(m);
  register_two_sample_kernels<&two_sample_fwd_cpu, &two_sample_bwd_cpu>(m);
  implement<&name_cpu_kernels>(m, "_selective_scan_plan");
}

}  // namespace ssm_kernels::selective_scan
