// The tensors that the delta rule's kernels read for each step beside q, k and v, and the kernel that computes them.
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>

#include "delta_rule/cuda/kda.h"
#include "delta_rule/delta_rule.h"
#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Whether the kernels multiply rows of q and k as they are and apply the norms, given as factors of rows, to products. Products
// with long or short rows leave the range of fp16, which gets rounded normalized rows. The kernels of gates of channels compute
// the norms themselves.
bool has_row_factors(const Inputs& in);
bool has_normalized_rows(const Inputs& in);

// fp32, except that beta may have the inputs' type; undefined tensors are absent.
struct StepFactors {
  at::Tensor log_decay, beta;  // as g and beta; with gates of channels the arguments themselves
  at::Tensor rows;             // if has_row_factors(), of keys and their queries, (batch, updates, heads, 2)
};
// Given q and k as vectors (tensors.h). The arguments themselves where nothing is to be computed; else a kernel computes all.
// A given beta, which needs no sigmoid, stays of the inputs' type if keeps_beta is set.
StepFactors step_factors(const Inputs& in, const at::Tensor& q, const at::Tensor& k, bool keeps_beta);

// A float of each step and head, (batch, steps, heads) or (batch, steps, heads, 2), uninitialized. Steps are contiguous.
at::Tensor empty_by_head(const Inputs& in, int64_t steps, int64_t heads, int64_t elements = 1);

// Without gates of channels: writes the gradients of g, beta, A_log and dt_bias that are needed, given those of log decays and
// of beta, fp32 and undefined where they are not needed. The latter may be the results themselves.
void finish_gate_grads(const Inputs& in, const at::Tensor& grad_log_decay, const at::Tensor& grad_beta,
                       const GradTensors& grads);

// How gates and beta follow from the arguments. The caller keeps the parameters, contiguous, until the kernel is queued.
struct GateParameters {
  at::Tensor A_log, dt_bias;

  explicit GateParameters(const Inputs& in);
  DeltaRuleGateOptions options(const Inputs& in) const;
};

// The kernels of gates of channels compute gates and betas of these arguments; q and k are not among them.
KdaArguments kda_arguments(const Inputs& in, const GateParameters& parameters);

}  // namespace ssm_kernels::delta_rule

#endif
