#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/cuda/plain_calls.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "delta_rule/aten/gates.h"
#include "delta_rule/cuda/fwd_cuda.h"
#include "delta_rule/delta_rule.h"
#include "torch/checks.h"
#include "torch/flip.h"

namespace ssm_kernels::delta_rule {
namespace {

// Tensors of a call, and those of its plain call.
class StepsOfCall {
 public:
  explicit StepsOfCall(const Inputs& call)
      : updates_(call.num_householder), rows_(takes_updates(call) ? 1 : updates_), is_reverse_(call.reverse) {}

  // Whether q, g and out of the plain call have the call's rows.
  bool keep_rows() const { return rows_ == 1; }

  // (batch, seqlen, ...) in the scan's order.
  at::Tensor in_order(const at::Tensor& steps) const { return is_reverse_ ? flip_steps(steps) : steps; }
  // (batch, updates * seqlen, ...) in the scan's order, which keeps the updates of a step in theirs.
  at::Tensor updates_in_order(const at::Tensor& updates) const {
    return is_reverse_ && updates_ > 1 ? flip_steps(updates.unflatten(1, {-1, updates_})).flatten(1, 2) : in_order(updates);
  }
  // (sequences, ...) in the scan's order.
  at::Tensor states_in_order(const at::Tensor& states, bool is_packed) const {
    return is_reverse_ && is_packed ? states.flip(0) : states;
  }

  // The steps' values (batch, seqlen, ...) as rows of the plain call: at one update of each step, and zeros at the others.
  at::Tensor rows_at(const at::Tensor& steps, int64_t update) const {
    return keep_rows() ? in_order(steps) : rows_at(steps, update, steps.options());
  }
  at::Tensor rows_at(const at::Tensor& steps, int64_t update, const at::TensorOptions& options) const {
    std::vector<int64_t> sizes = steps.sizes().vec();
    sizes[1] *= rows_;
    const at::Tensor result = at::zeros(sizes, options);
    of_rows(result, update).copy_(in_order(steps));
    return result;
  }
  // A view of the rows of the plain call that rows_at() fills.
  at::Tensor of_rows(const at::Tensor& rows, int64_t update) const {
    return keep_rows() ? rows : rows.slice(1, update, std::nullopt, rows_);
  }

 private:
  int64_t updates_, rows_;  // of a step: of k, and of q in the plain call
  bool is_reverse_;
};

template <typename Transform>
OptionalTensor if_present(const OptionalTensor& tensor, const Transform& transform) {
  return is_present(tensor) ? OptionalTensor(transform(*tensor)) : OptionalTensor();
}

}  // namespace

bool is_plain(const Inputs& in) { return in.num_householder == 1 && !in.reverse; }

bool takes_updates(const Inputs& in) {
  return kChunk % in.num_householder == 0 && !in.has_gate_per_channel() && !is_wide(in.q.size(3)) &&
         fwd_kernels_for(in) == Kernels::kSm90;
}

int log2_updates(const Inputs& plain) {
  int result = 0;
  while (int64_t{1} << result < plain.num_householder) ++result;
  return result;
}

Inputs plain_call(const Inputs& call) {
  const StepsOfCall steps(call);
  const int64_t updates = call.num_householder;
  Inputs in = call;
  in.q = steps.rows_at(call.q, updates - 1);
  in.k = call.k.is_same(call.q) && updates == 1 ? in.q : steps.updates_in_order(call.k);
  in.v = steps.updates_in_order(call.v);
  in.beta = steps.updates_in_order(call.beta);
  in.scale = scale_of(call);
  if (steps.keep_rows()) {
    in.g = if_present(call.g, [&](const at::Tensor& g) { return steps.in_order(g); });
  } else if (is_present(call.g)) {
    // A raw gate of zero is not a log decay of zero.
    in.g = steps.rows_at(call.has_raw_gate() ? log_decays(call, *call.g) : *call.g, 0,
                         call.g->options().dtype(accumulate_type(call.q.scalar_type())));
    in.A_log.reset();
    in.dt_bias.reset();
    in.gate_lower_bound.reset();
  }
  in.initial_states = if_present(call.initial_states, [&](const at::Tensor& states) {
    return steps.states_in_order(states, is_present(call.cu_seqlens));
  });
  in.seq_idx = if_present(call.seq_idx, [&](const at::Tensor& ids) {
    const at::Tensor in_order = steps.in_order(ids);
    return updates == 1 ? in_order : in_order.unsqueeze(2).expand({-1, -1, updates}).flatten(1);
  });
  in.cu_seqlens = if_present(call.cu_seqlens, [&](const at::Tensor& bounds) {
    const at::Tensor in_order = call.reverse ? bounds.flip(0).neg().add_(call.q.size(1)) : bounds;
    return updates == 1 ? in_order : in_order * updates;
  });
  for (int64_t& position : in.states_at) position *= updates;
  if (!steps.keep_rows()) in.num_householder = 1;
  in.reverse = false;
  return in;
}

FwdOutputs results_of(const Inputs& call, const FwdOutputs& plain) {
  const StepsOfCall steps(call);
  if (steps.keep_rows() && !call.reverse) return plain;
  FwdOutputs results = plain;
  results.final_states = steps.states_in_order(plain.final_states, is_present(call.cu_seqlens));
  results.out = allocate_fwd(call).out;
  results.out.copy_(steps.in_order(steps.of_rows(plain.out, call.num_householder - 1)));
  return results;
}

BwdInputs plain_call(const BwdInputs& call) {
  const StepsOfCall steps(call.in);
  BwdInputs bwd = call;
  bwd.in = plain_call(call.in);
  bwd.grad_out =
      if_present(call.grad_out, [&](const at::Tensor& grad) { return steps.rows_at(grad, call.in.num_householder - 1); });
  bwd.grad_final_states = if_present(call.grad_final_states, [&](const at::Tensor& grad) {
    return steps.states_in_order(grad, is_present(call.in.cu_seqlens));
  });
  if (!steps.keep_rows()) {
    bwd.needs_grad[kGradG] |= call.needs_grad[kGradALog] || call.needs_grad[kGradDtBias];
    bwd.needs_grad[kGradALog] = bwd.needs_grad[kGradDtBias] = false;
  }
  return bwd;
}

// Several updates of a step keep their order.
bool reverses_rows(const Inputs& call) { return call.reverse && call.num_householder == 1; }

GradTensors allocate_plain(const BwdInputs& call, const BwdInputs& plain, const GradTensors& grads) {
  if (StepsOfCall(call.in).keep_rows() && !call.in.reverse) return grads;
  std::vector<Grad> shared;
  if (reverses_rows(call.in)) {
    shared = {kGradQ, kGradK, kGradV};
  } else if (!call.in.reverse) {
    shared = {kGradK, kGradV, kGradBeta, kGradInitialStates};
  }
  BwdInputs others = plain;
  for (const Grad grad : shared) others.needs_grad[grad] = false;
  GradTensors result = allocate_bwd(others);
  for (const Grad grad : shared) result[grad] = grads[grad];
  return result;
}

void write_grads(const BwdInputs& call, const GradTensors& plain, const GradTensors& grads) {
  const Inputs& in = call.in;
  const StepsOfCall steps(in);
  const int64_t updates = in.num_householder;
  const auto write = [&](Grad grad, const auto& value) {
    if (grads[grad].numel() > 0 && !grads[grad].is_same(plain[grad])) grads[grad].copy_(value());
  };
  write(kGradQ, [&] { return steps.in_order(steps.of_rows(plain[kGradQ], updates - 1)); });
  for (const Grad grad : {kGradK, kGradV, kGradBeta}) {
    write(grad, [&] { return steps.updates_in_order(plain[grad]); });
  }
  write(kGradInitialStates, [&] { return steps.states_in_order(plain[kGradInitialStates], is_present(in.cu_seqlens)); });
  if (steps.keep_rows()) {
    write(kGradG, [&] { return steps.in_order(plain[kGradG]); });
    for (const Grad grad : {kGradALog, kGradDtBias}) write(grad, [&] { return plain[grad]; });
  } else if (plain[kGradG].numel() > 0) {
    const GateGrads gates = log_decays_adjoint(in, *in.g, steps.in_order(steps.of_rows(plain[kGradG], 0)));
    write(kGradG, [&] { return gates.raw; });
    write(kGradALog, [&] { return gates.A_log; });
    write(kGradDtBias, [&] { return gates.raw.sum(at::IntArrayRef({0, 1}), false, at::kDouble); });
  }
}

}  // namespace ssm_kernels::delta_rule

#endif
