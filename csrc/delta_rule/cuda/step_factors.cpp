#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/cuda/step_factors.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "common/integers.h"
#include "delta_rule/aten/gates.h"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/cuda/plain_calls.h"
#include "delta_rule/cuda/tensors.h"
#include "torch/allocation.h"
#include "torch/checks.h"

namespace ssm_kernels::delta_rule {

at::Tensor empty_by_head(const Inputs& in, int64_t steps, int64_t heads, int64_t elements) {
  const at::Tensor result = empty_tensor({heads, in.q.size(0), steps, elements}, in.q.options().dtype(at::kFloat));
  const at::Tensor by_step = result.permute({1, 2, 0, 3});
  return elements == 1 ? by_step.squeeze(3) : by_step;
}

GateParameters::GateParameters(const Inputs& in) {
  if (is_present(in.A_log)) A_log = in.A_log->contiguous();
  if (is_present(in.dt_bias)) dt_bias = in.dt_bias->contiguous();
}

DeltaRuleGateOptions GateParameters::options(const Inputs& in) const {
  DeltaRuleGateOptions options;
  options.has_raw_gate = in.has_raw_gate();
  options.is_bounded = in.gate_lower_bound.has_value();
  options.gate_lower_bound = static_cast<float>(in.gate_lower_bound.value_or(0));
  options.beta_sigmoid = in.beta_sigmoid;
  options.allow_neg_eigval = in.allow_neg_eigval;
  if (A_log.defined()) options.A_log = A_log.const_data_ptr<float>();
  if (dt_bias.defined()) options.dt_bias = dt_bias.const_data_ptr<float>();
  return options;
}

bool has_row_factors(const Inputs& in) {
  return in.qk_l2norm && in.q.scalar_type() == at::kBFloat16 && !in.has_gate_per_channel();
}

bool has_normalized_rows(const Inputs& in) { return in.qk_l2norm && !has_row_factors(in) && !in.has_gate_per_channel(); }

KdaArguments kda_arguments(const Inputs& in, const GateParameters& parameters) {
  KdaArguments arguments;
  arguments.qk_l2norm = in.qk_l2norm;
  arguments.gate_is_fp32 = in.g->scalar_type() == at::kFloat;
  arguments.beta_is_fp32 = in.beta.scalar_type() == at::kFloat;
  arguments.options = parameters.options(in);
  return arguments;
}

StepFactors step_factors(const Inputs& in, const at::Tensor& q, const at::Tensor& k, bool keeps_beta) {
  StepFactors result;
  if (in.has_gate_per_channel()) {
    // Rows of channels are contiguous.
    result.log_decay = in.g->stride(3) == 1 ? *in.g : in.g->contiguous();
    result.beta = in.beta;
    return result;
  }
  if (in.q.scalar_type() == at::kFloat) {
    if (is_present(in.g)) result.log_decay = log_decays(in, *in.g).to(at::kFloat);
    result.beta = betas(in, in.beta);
    return result;
  }
  const int64_t heads = q.size(2), value_heads = in.v.size(2);
  DeltaRuleFactorsParams params;
  params.batch = q.size(0);
  params.seqlen = k.size(1);
  params.log2_updates = log2_updates(in);
  params.heads = params.groups = value_heads;
  params.value_heads_per_key_head = static_cast<int>(value_heads / heads);
  params.dstate = static_cast<int>(q.size(3));
  params.q = view_of(q);
  params.k = view_of(k);
  const GateParameters parameters(in);
  params.options = parameters.options(in);
  const auto of_steps = [](const at::Tensor& tensor) { return view_of(tensor.unsqueeze(3)); };
  if (has_row_factors(in)) {
    result.rows = empty_by_head(in, k.size(1), heads, 2);
    params.row_factors = view_of(result.rows);
  }
  if (is_present(in.g)) {
    params.gate_is_fp32 = in.g->scalar_type() == at::kFloat;
    if (params.gate_is_fp32 && !in.has_raw_gate()) {
      result.log_decay = *in.g;
    } else {
      result.log_decay = empty_by_head(in, q.size(1), value_heads);
      params.raw_gate = of_steps(*in.g);
      params.log_decay = of_steps(result.log_decay);
    }
  }
  params.beta_is_fp32 = in.beta.scalar_type() == at::kFloat;
  if ((params.beta_is_fp32 || keeps_beta) && !in.beta_sigmoid) {
    result.beta = in.beta;
  } else {
    result.beta = empty_by_head(in, k.size(1), value_heads);
    params.raw_beta = of_steps(in.beta);
    params.beta = of_steps(result.beta);
  }
  if (params.row_factors.data == nullptr && params.log_decay.data == nullptr && params.beta.data == nullptr) return result;
  const auto launch =
      in.q.scalar_type() == at::kHalf ? launch_delta_rule_factors<__half> : launch_delta_rule_factors<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(params, c10::cuda::getCurrentCUDAStream()));
  return result;
}

void finish_gate_grads(const Inputs& in, const at::Tensor& grad_log_decay, const at::Tensor& grad_beta,
                       const GradTensors& grads) {
  DeltaRuleGateGradsParams params;
  params.heads = in.v.size(2);
  const GateParameters parameters(in);
  params.options = parameters.options(in);
  const auto of_steps = [](const at::Tensor& tensor) { return view_of(tensor.unsqueeze(3)); };
  const auto needs = [&](Grad grad) { return grads[grad].numel() > 0; };
  at::Tensor sums;
  const bool is_fp32 = in.q.scalar_type() == at::kFloat,
             has_own_gates = grad_log_decay.defined() && !grad_log_decay.is_same(grads[kGradG]);
  if (has_own_gates && is_fp32) {
    const GateGrads gates = log_decays_adjoint(in, *in.g, grad_log_decay);
    if (needs(kGradG)) grads[kGradG].copy_(gates.raw);
    if (needs(kGradALog)) grads[kGradALog].copy_(gates.A_log);
    if (needs(kGradDtBias)) grads[kGradDtBias].copy_(gates.raw.sum(at::IntArrayRef({0, 1}), false, at::kDouble));
  } else if (has_own_gates) {
    params.gate_is_fp32 = in.g->scalar_type() == at::kFloat;
    params.raw_gate = of_steps(*in.g);
    params.grad_log_decay = of_steps(grad_log_decay);
    if (needs(kGradG)) params.grad_raw_gate = of_steps(grads[kGradG]);
    if (needs(kGradALog) || needs(kGradDtBias)) {
      sums = empty_tensor({ceil_div(in.q.size(0) * in.q.size(1), kGateGradSteps), 2, params.heads},
                          in.q.options().dtype(at::kDouble));
      params.sums = sums.data_ptr<double>();
    }
  }
  const bool has_own_betas = grad_beta.defined() && !grad_beta.is_same(grads[kGradBeta]);
  if (has_own_betas && is_fp32) {
    grads[kGradBeta].copy_(betas_adjoint(in, in.beta, grad_beta));
  } else if (has_own_betas) {
    params.beta_is_fp32 = in.beta.scalar_type() == at::kFloat;
    params.raw_beta = of_steps(in.beta);
    params.grad_beta = of_steps(grad_beta);
    params.grad_raw_beta = of_steps(grads[kGradBeta]);
  }
  const auto launch = [&](DeltaRuleGateGradsParams of, int64_t seqlen) {
    if (of.grad_log_decay.data == nullptr && of.grad_beta.data == nullptr) return;
    of.seqlen = seqlen;
    of.steps = in.q.size(0) * seqlen;
    const auto launch_kernel =
        in.q.scalar_type() == at::kHalf ? launch_delta_rule_gate_grads<__half> : launch_delta_rule_gate_grads<__nv_bfloat16>;
    C10_CUDA_CHECK(launch_kernel(of, c10::cuda::getCurrentCUDAStream()));
  };
  if (in.num_householder > 1) {
    // g has fewer rows than beta.
    DeltaRuleGateGradsParams of_beta = params;
    of_beta.grad_log_decay = {};
    of_beta.sums = nullptr;
    launch(of_beta, in.v.size(1));
    params.grad_beta = {};
  }
  launch(params, in.q.size(1));
  if (!sums.defined()) return;
  const at::Tensor summed = sums.sum(0);
  if (needs(kGradALog)) grads[kGradALog].copy_(summed.select(0, 0));
  if (needs(kGradDtBias)) grads[kGradDtBias].copy_(summed.select(0, 1));
}

}  // namespace ssm_kernels::delta_rule

#endif
