// Makes the gates of rules with two input samples by the kernels of two_sample_gates.cuh.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "common/integers.h"
#include "cuda/scalar_types.h"
#include "ssd/aten/two_sample_gates.h"
#include "ssd/cuda/tensors.h"
#include "ssd/cuda/two_sample_gates.h"
#include "torch/allocation.h"
#include "torch/checks.h"

namespace ssm_kernels::ssd {
namespace {

RowsView view_of_steps(const TwoSampleInputs& in, const at::Tensor& steps) { return const_rows_view(steps, in.reverse); }

// The parameters of a launch, and the tensors that they point to.
template <typename Params>
struct GateCall {
  Params params;
  at::Tensor A, dt_bias, starts, given;

  GateCall(const TwoSampleInputs& in, Discretization method) {
    TORCH_INTERNAL_ASSERT(in.A.scalar_type() == at::kFloat, "the kernels read A in fp32");
    TORCH_INTERNAL_ASSERT(!is_present(in.lam) || in.lam->scalar_type() == in.dt.scalar_type(), "the kernels have one type");
    params.batch = in.x.size(0);
    params.seqlen = in.x.size(1);
    params.heads = in.x.size(2);
    check_count(ceil_div(params.seqlen, kGateBlockSteps) * params.batch * params.heads, "gates of a block");
    params.discretization = method;
    params.dt_softplus = in.dt_softplus;
    params.lam_sigmoid = in.lam_sigmoid;
    std::tie(params.dt_min, params.dt_max) = std::tuple_cat(kernel_dt_limit(in.dt_min, in.dt_max));
    TORCH_INTERNAL_ASSERT(has_A_of_steps(in) || !in.premultiplied, "zeta has a value for each step");
    params.premultiplied = in.premultiplied;
    if (has_A_of_steps(in)) {
      params.A_of_steps = view_of_steps(in, in.A);
    } else {
      A = in.A.contiguous();
      params.A = A.const_data_ptr<float>();
    }
    if (is_present(in.dt_bias)) {
      dt_bias = in.dt_bias->contiguous();
      params.dt_bias = dt_bias.const_data_ptr<float>();
    }
    params.dt = view_of_steps(in, in.dt);
    if (is_present(in.lam)) params.lam = view_of_steps(in, *in.lam);
    const bool has_resets = is_present(in.seq_idx), is_packed = is_present(in.cu_seqlens);
    if (has_resets || is_packed) {
      starts = starts_in_scan_order(in, /*with_resets=*/true).contiguous();
      params.starts = static_cast<const uint8_t*>(starts.const_data_ptr());
    }
    // Sequences with a given sample before them do not repeat one.
    params.repeats_first = in.repeats_first && (has_resets || !is_present(in.previous_x));
    if (params.repeats_first && is_present(in.previous_x)) {
      given = starts_in_scan_order(in, /*with_resets=*/false).contiguous();
      params.given = static_cast<const uint8_t*>(given.const_data_ptr());
    }
  }

  void set_gates(const TwoSampleInputs& in, const at::Tensor& log_decay, const at::Tensor& gain,
                 const at::Tensor& diagonal_gain) {
    params.log_decay = view_of_steps(in, log_decay);
    params.gain = view_of_steps(in, gain);
    params.diagonal_gain = view_of_steps(in, diagonal_gain);
  }
};

// The sequence that begins at each step in the order of the scan, or -1, (1, seqlen), int32. Empty sequences begin nowhere.
at::Tensor sequences_by_first_step(const TwoSampleInputs& in, const TwoSampleGates& gates) {
  const int64_t seqlen = in.x.size(1), count = gates.first_steps.size(0);
  const at::TensorOptions ints = gates.first_steps.options().dtype(at::kInt);
  const at::Tensor nowhere = at::full_like(gates.first_steps, seqlen), result = at::full({seqlen + 1}, -1, ints);
  const at::Tensor steps = in.reverse ? at::rsub(gates.first_steps, seqlen - 1) : gates.first_steps;
  result.index_put_({at::where(gates.has_steps.squeeze(-1), steps, nowhere)}, at::arange(count, ints));
  return result;
}

// Calls launch(scalar, has_A_of_steps) with the parameters of the instantiation for the steps' type.
template <typename Launch>
cudaError_t visit_instantiation(const TwoSampleInputs& in, const Launch& launch) {
  if (has_A_of_steps(in)) {
    TORCH_INTERNAL_ASSERT(in.dt.scalar_type() == at::kFloat, "the kernels with an A for each step read fp32");
    return launch(float(), std::true_type());
  }
  return cuda::visit_scalar_but_double(scalar_kind(in.dt.scalar_type()),
                                       [&](auto scalar) { return launch(scalar, std::false_type()); });
}

}  // namespace

bool has_gate_kernels(const TwoSampleInputs& in) { return in.x.is_cuda() && in.dt.scalar_type() != at::kDouble; }

void two_sample_gates_cuda(const TwoSampleInputs& in, Discretization method, TwoSampleGates& gates) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  const at::Tensor all = empty_tensor({3, in.x.size(0), in.x.size(1), in.x.size(2)}, wide_options(in.x));
  gates.log_decay = all[0];
  gates.gain = all[1];
  gates.diagonal_gain = all[2];
  if (all.numel() == 0) return;
  GateCall<TwoSampleGateParams> call(in, method);
  call.set_gates(in, gates.log_decay, gates.gain, gates.diagonal_gain);
  C10_CUDA_CHECK(visit_instantiation(in, [&](auto scalar, auto of_steps) {
    return launch_two_sample_gates<decltype(scalar), of_steps>(call.params, c10::cuda::getCurrentCUDAStream());
  }));
}

void two_sample_gates_adjoint_cuda(const TwoSampleInputs& in, Discretization method, const TwoSampleGates& gates,
                                   const GateGrads& grad_gates, const FirstStepGrads& grad_first, const TwoSampleGrads& grads) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  const auto needs = [&](int grad) { return grads[grad].numel() > 0; };
  if (in.x.size(0) == 0 || in.x.size(2) == 0) {
    for (const int grad : {int(kGradA), int(kGradDtBias)}) grads[grad].zero_();
    return;
  }
  GateCall<TwoSampleGateBwdParams> call(in, method);
  call.set_gates(in, grad_gates.log_decay, grad_gates.gain, grad_gates.diagonal_gain);
  TwoSampleGateBwdParams& params = call.params;
  at::Tensor first_zeta, first_previous, sequences;
  if (grad_first.zeta.defined() || grad_first.previous.defined()) {
    const at::Tensor& some = grad_first.zeta.defined() ? grad_first.zeta : grad_first.previous;
    const auto as_floats = [&](const at::Tensor& grad) {
      return (grad.defined() ? grad : at::zeros_like(some)).to(at::kFloat).contiguous();
    };
    first_zeta = as_floats(grad_first.zeta);
    first_previous = as_floats(grad_first.previous);
    params.first_zeta = first_zeta.const_data_ptr<float>();
    params.first_previous = first_previous.const_data_ptr<float>();
    if (gates.first_steps.defined()) {
      sequences = sequences_by_first_step(in, gates);
      params.sequences = sequences.const_data_ptr<int>();
    }
  }
  const auto target = [&](int grad) { return needs(grad) ? rows_view(grads[grad], in.reverse) : RowsView(); };
  params.grad_dt = target(kGradDt);
  params.grad_lam = target(kGradLam);
  const int64_t blocks = params.batch * ceil_div(params.seqlen, kGateBlockSteps);
  if (has_A_of_steps(in)) params.grad_A = target(kGradA);
  const at::Tensor parts = empty_tensor({2, blocks, params.heads}, wide_options(in.x));
  params.grad_A_parts = parts[0].data_ptr<float>();
  params.grad_bias_parts = parts[1].data_ptr<float>();
  C10_CUDA_CHECK(visit_instantiation(in, [&](auto scalar, auto of_steps) {
    return launch_two_sample_gates_bwd<decltype(scalar), of_steps>(params, c10::cuda::getCurrentCUDAStream());
  }));
  const auto sum_parts = [&](int grad, int64_t of) {
    if (!needs(grad)) return;
    at::Tensor result = grads[grad];
    at::sum_out(result, parts[of], {0});
  };
  if (!has_A_of_steps(in)) sum_parts(kGradA, 0);
  sum_parts(kGradDtBias, 1);
}

}  // namespace ssm_kernels::ssd

#endif
