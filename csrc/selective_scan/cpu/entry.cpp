// CPU entry points of selective_scan: allocate, choose the instruction set and distribute tasks over threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
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

// One of backward's sums, [batch][block][rows][lane], zero at first, seen channel by channel.
template <typename Acc>
class LaneSums {
 public:
  LaneSums(const SelectiveScanParams& p, const Blocking& blocking, int64_t rows, const at::TensorOptions& options)
      : p_(p), blocking_(blocking), rows_(rows) {
    sums_ = at::zeros({p.batch * blocking.blocks_per_batch() * rows * blocking.lanes}, options);
  }

  Acc* data() { return sums_.mutable_data_ptr<Acc>(); }

  // One channel's row 0; row r is r * lanes further.
  Acc* channel(int64_t batch, int64_t channel) {
    const int64_t in_segment = channel % blocking_.segment;
    const int64_t block = batch * blocking_.blocks_per_batch() + channel / blocking_.segment * blocking_.blocks_per_segment +
                          in_segment / blocking_.lanes;
    return data() + block * rows_ * blocking_.lanes + in_segment % blocking_.lanes;
  }

  // visit(batch, channel, row, sum)
  template <typename Visitor>
  void for_each(const Visitor& visit) {
    at::parallel_for(0, p_.batch * p_.dim, 64, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        Acc* sums = channel(index / p_.dim, index % p_.dim);
        for (int64_t row = 0; row < rows_; ++row) visit(index / p_.dim, index % p_.dim, row, sums[row * blocking_.lanes]);
      }
    });
  }

  // Writes the sum over the batch, (dim, rows).
  void sum_batch(void* target) {
    at::parallel_for(0, p_.dim, 64, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        for (int64_t row = 0; row < rows_; ++row) {
          Acc sum(0);
          for (int64_t batch = 0; batch < p_.batch; ++batch) sum += channel(batch, index)[row * blocking_.lanes];
          static_cast<Acc*>(target)[index * rows_ + row] = sum;
        }
      }
    });
  }

 private:
  const SelectiveScanParams& p_;
  const Blocking& blocking_;
  int64_t rows_;
  at::Tensor sums_;
};

template <typename Acc>
void run_bwd(const SelectiveScanBwdParams& params, const Blocking& blocking, ScalarKind kind,
             const at::TensorOptions& options) {
  const CpuKernels& kernels = cpu_kernels();
  const int64_t parts = params.batch * blocking.tasks_per_batch() * blocking.chunks_per_sweep * blocking.part_size();
  const auto sums = [&](const void* grad, int64_t rows) {
    return LaneSums<Acc>(params, blocking, grad == nullptr ? 0 : rows, options);
  };
  const auto matrix_sums = [&](const MatrixView& grad) { return sums(grad.per_step ? nullptr : grad.data, params.dstate); };
  const auto matrix_parts = [&](const MatrixView& grad) { return at::empty({grad.per_step ? parts : 0}, options); };

  LaneSums<Acc> grad_state(params, blocking, params.dstate, options), grad_A = sums(params.grad_A, params.dstate);
  LaneSums<Acc> grad_B = matrix_sums(params.grad_B), grad_C = matrix_sums(params.grad_C);
  const at::Tensor grad_B_parts = matrix_parts(params.grad_B), grad_C_parts = matrix_parts(params.grad_C);
  LaneSums<Acc> grad_D = sums(params.grad_D, 1), grad_delta_bias = sums(params.grad_delta_bias, 1);
  const BwdWorkspace workspace{grad_state.data(),
                               grad_A.data(),
                               params.grad_B.per_step ? grad_B_parts.mutable_data_ptr() : grad_B.data(),
                               params.grad_C.per_step ? grad_C_parts.mutable_data_ptr() : grad_C.data(),
                               grad_D.data(),
                               grad_delta_bias.data()};

  if (const StateView& from = params.grad_last_state; from.data != nullptr) {
    grad_state.for_each([&](int64_t batch, int64_t channel, int64_t state, Acc& value) {
      value =
          static_cast<const Acc*>(from.data)[batch * from.stride_batch + channel * from.stride_dim + state * from.stride_state];
    });
  }
  ThreadScratch threads(kernels.bwd_scratch_bytes(params, blocking, kind));
  const int64_t steps = std::min(params.chunk_length, params.seqlen);
  const int64_t task_work = blocking.blocks_per_task * blocking.lanes * params.dstate * steps;
  const int64_t reduce_work = blocking.tasks_per_batch() * params.dstate * steps;
  for (int64_t end = params.chunk_boundaries - 1; end > 0;) {
    // Sweeps begin at multiples of their length, so that a chunk's place in its sweep is its remainder.
    const int64_t begin = (end - 1) / blocking.chunks_per_sweep * blocking.chunks_per_sweep, chunks = end - begin;
    threads.parallel_for(params.batch * blocking.tasks_per_batch(), chunks * task_work, [&](int64_t task, std::byte* scratch) {
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

  if (params.grad_A != nullptr) grad_A.sum_batch(params.grad_A);
  if (params.grad_B.data != nullptr && !params.grad_B.per_step) grad_B.sum_batch(params.grad_B.data);
  if (params.grad_C.data != nullptr && !params.grad_C.per_step) grad_C.sum_batch(params.grad_C.data);
  if (params.grad_D != nullptr) grad_D.sum_batch(params.grad_D);
  if (params.grad_delta_bias != nullptr) grad_delta_bias.sum_batch(params.grad_delta_bias);
  if (params.grad_initial_state != nullptr) {
    grad_state.for_each([&](int64_t batch, int64_t channel, int64_t state, const Acc& value) {
      static_cast<Acc*>(params.grad_initial_state)[(batch * params.dim + channel) * params.dstate + state] = value;
    });
  }
}

GradTensors bwd_cpu(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const Discretization method = check_inputs(in);
  const GradTensors grads = allocate_bwd(bwd);
  const at::Tensor states = bwd.chunk_states.contiguous();
  const SelectiveScanBwdParams params = make_bwd_params(bwd, method, states, grads);

  const ScalarKind kind = scalar_kind(in.u.scalar_type());
  const Blocking blocking(params, cpu_kernels().vector_bytes() / in.A.element_size());
  if (kind == ScalarKind::kDouble) {
    run_bwd<double>(params, blocking, kind, in.A.options());
  } else {
    run_bwd<float>(params, blocking, kind, in.A.options());
  }
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { register_kernels<&fwd_cpu, &bwd_cpu>(m); }

}  // namespace ssm_kernels::selective_scan
