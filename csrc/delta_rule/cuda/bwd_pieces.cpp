#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/cuda/bwd_pieces.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "delta_rule/cuda/fwd_cuda.h"
#include "delta_rule/cuda/tensors.h"
#include "torch/allocation.h"
#include "torch/checks.h"

namespace ssm_kernels::delta_rule {
namespace {

// The steps of a piece, which count updates.
struct PieceOfSteps {
  int64_t begin, steps, updates;

  at::Tensor of_updates(const at::Tensor& tensor) const { return tensor.narrow(1, begin, steps); }
  // These members are of tensors with a row for all updates of a step.
  at::Tensor of_rows(const at::Tensor& tensor) const { return tensor.narrow(1, begin / updates, steps / updates); }

  BwdInputs of(const BwdInputs& call) const {
    BwdInputs piece = call;
    Inputs& in = piece.in;
    for (at::Tensor* tensor : {&in.k, &in.v, &in.beta}) *tensor = of_updates(*tensor);
    in.q = of_rows(in.q);
    if (is_present(in.g)) in.g = of_rows(*in.g);
    if (is_present(piece.grad_out)) piece.grad_out = of_rows(*piece.grad_out);
    if (is_present(in.cu_seqlens)) in.cu_seqlens = in.cu_seqlens->sub(begin).clamp(0, steps);
    in.seq_idx.reset();
    in.states_at.clear();
    piece.grad_states.reset();
    return piece;
  }
};

at::Tensor zero_states(const Inputs& in) {
  const int64_t count = is_present(in.cu_seqlens) ? in.cu_seqlens->size(0) - 1 : in.q.size(0);
  return at::zeros({count, in.v.size(2), in.v.size(3), in.q.size(3)},
                   in.q.options().dtype(accumulate_type(in.q.scalar_type())));
}

// The states before a position, given those of states_at_positions(). Packed sequences that begin later have their initial
// states there, and those that have ended have no steps after it: their states are not read.
at::Tensor states_before(const Inputs& in, int64_t position, const at::Tensor& stored) {
  if (!stored.defined()) return zero_states(in);
  if (!is_present(in.cu_seqlens)) return stored;
  const at::Tensor states =
      is_present(in.initial_states) ? in.initial_states->clone(at::MemoryFormat::Contiguous) : zero_states(in);
  return states.index_copy_(0, sequence_before(in, position), stored);
}

}  // namespace

void bwd_of_pieces(const BwdInputs& bwd, const GradTensors& grads, const RunPiece& run) {
  const Inputs& in = bwd.in;
  const auto needs = [&](Grad grad) { return grads[grad].numel() > 0; };
  std::vector<at::Tensor> states = states_at_positions(in);
  const at::Tensor resets = is_present(in.seq_idx) ? resets_of(in) : at::Tensor();
  for (const Grad grad : {kGradALog, kGradDtBias}) grads[grad].zero_();

  // Runs the piece from the position before `end`, or the first step, and makes grad_states the gradient of the states before
  // it.
  OptionalTensor grad_states = bwd.grad_final_states;
  const auto run_piece = [&](int64_t begin, int64_t end, const OptionalTensor& initial_states, bool needs_states) {
    const PieceOfSteps steps{begin, end - begin, in.v.size(1) / in.q.size(1)};
    BwdInputs piece = steps.of(bwd);
    piece.in.initial_states = initial_states;
    piece.grad_final_states = grad_states;
    GradTensors of_piece = grads;
    for (const Grad grad : {kGradQ, kGradG}) {
      if (needs(grad)) of_piece[grad] = steps.of_rows(grads[grad]);
    }
    for (const Grad grad : {kGradK, kGradV, kGradBeta}) {
      if (needs(grad)) of_piece[grad] = steps.of_updates(grads[grad]);
    }
    for (const Grad grad : {kGradALog, kGradDtBias}) of_piece[grad] = empty_tensor_like(grads[grad]);
    piece.needs_grad[kGradInitialStates] = needs_states;
    if (needs_states) of_piece[kGradInitialStates] = empty_tensor_like(*initial_states);
    run(piece, of_piece, resets.defined() ? steps.of_updates(resets).contiguous() : resets);
    for (const Grad grad : {kGradALog, kGradDtBias}) grads[grad].add_(of_piece[grad]);
    grad_states = needs_states ? OptionalTensor(of_piece[kGradInitialStates]) : OptionalTensor();
  };

  int64_t end = in.v.size(1);
  for (size_t i = in.states_at.size(); i-- > 0;) {
    const int64_t begin = in.states_at[i];
    if (begin < end) run_piece(begin, end, states_before(in, begin, states[i]), /*needs_states=*/true);
    states.pop_back();
    end = begin;
    if (!is_present(bwd.grad_states)) continue;
    at::Tensor sum = is_present(grad_states) ? grad_states->clone() : zero_states(in);
    const at::Tensor of_result = bwd.grad_states->select(1, static_cast<int64_t>(i));
    if (is_present(in.cu_seqlens)) {
      sum.index_add_(0, sequence_before(in, begin), of_result);
    } else {
      sum.add_(of_result);
    }
    grad_states = sum;
  }
  if (end > 0) run_piece(0, end, in.initial_states, needs(kGradInitialStates));
  if (!needs(kGradInitialStates)) return;
  if (is_present(grad_states)) {
    grads[kGradInitialStates].copy_(*grad_states);
  } else {
    grads[kGradInitialStates].zero_();
  }
}

}  // namespace ssm_kernels::delta_rule

#endif
