// The delta rule in chunks (Yang et al., "Parallelizing linear transformers with the delta rule over sequence length", arXiv
// 2406.06484, and "Gated delta networks", arXiv 2412.06464) and its adjoint.
//
// The state S is (value_dim, key_dim); a step decays it, moves the value that it has for k_t towards v_t, and reads it:
//
//   S <- S Diag(e^g_t)      S <- S + beta_t (v_t - S k_t) k_t^T      out_t = S q_t      (q_t is scaled)
//
// With c_i the sum of g of a chunk up to step i, and kk and P of pairs.h, a chunk that begins with S is
//
//   A = diag(beta) kk         M = (I + A)^-1         U = M diag(beta) (V - (e^c . K) S^T)
//   out = (e^c . Q) S^T + P U             S' = S Diag(e^c_last) + U^T (e^(c_last - c) . K)
//
// Products of all chunks of a run are batched; U and S' alone go from chunk to chunk. M multiplies the difference: where a
// state already has most of V, M diag(beta) V and its counterpart of S are much larger than U, and their difference loses
// digits. M inverts the decayed matrix: without the decay, its elements may overflow where keys are not normalized and the
// decay keeps S bounded. With G the gradient of out, and D that of S', which the next chunk returns, the adjoint is
//
//   dU = P^T G + (e^(c_last - c) . K) D^T           Y = M^T dU           dV = diag(beta) Y
//   dS = D Diag(e^c_last) + G^T (e^c . Q) - dV^T (e^c . K)
//   dA = -tril(Y U^T, -1)                           dP = tril(G U^T)
//   dbeta_i = Y_i . (V_i - S (e^c . K)_i) + sum_j dA_ij kk_ij
//   d(e^c . Q) = G S      d(e^c . K) = -diag(beta) Y S      d(e^(c_last - c) . K) = U D
//
// and pairs.h has that of kk and P. The gradient of M needs no second product with M: M^T (dU X^T) M^T = Y U^T with U = M X.
// dS does not need S: with U of all chunks known, both directions are as long as the chain of states.
//
// Where seq_idx begins a sequence, the decay across the beginning is zero, and contributions through a state are masked. That
// stops NaN where a sequence begins with a chunk; inside a chunk M carries it on. Backward saves the inputs only: it finds the
// states between runs, and then goes from the last run to the first, recomputing the states inside each.

#include "delta_rule/aten/chunked_scan.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "delta_rule/aten/gates.h"
#include "delta_rule/aten/layout.h"
#include "delta_rule/aten/products.h"
#include "delta_rule/cpu/products.h"
#include "torch/checks.h"
#include "torch/chunk_runs.h"
#include "torch/debug_options.h"
#include "torch/sequence_batches.h"

namespace ssm_kernels::delta_rule {
namespace {

const Products& products_for(const Inputs& in) {
  return in.q.is_cpu() && debug_option(DebugOption::kDeltaRuleCpu) == 0 ? kCpuProducts : kMatmuls;
}

void forward_part(const Scan& scan, const Part& part, const FwdOutputs& outputs, const ChosenStates& chosen) {
  const Products& products = products_for(scan.in);
  at::Tensor state = scan.load_states(scan.in.initial_states, part);
  if (at::Tensor first = chosen.first(part); first.defined()) first.copy_(state);
  for (const Run& run : scan.runs(part, chosen.positions)) {
    const Chunks chunks = scan.load(run);
    const Computed of = products.compute(chunks, state, /*needs_out=*/true);
    scan.write_by_head(outputs.out, run, of.out, false);
    chosen.visit(run, of.states, [](at::Tensor asked, const at::Tensor& bound) { asked.copy_(bound); });
    state = of.states.select(0, run.chunks);
  }
  outputs.final_states.narrow(0, part.row, part.rows).copy_(state);
}

void forward(const Inputs& in, const FwdOutputs& outputs, const ChosenStates& chosen) {
  const Scan scan(in);
  for (const Part& part : scan.parts()) forward_part(scan, part, outputs, chosen);
}

// The gradients of the gate's parameters, float64, summed over the runs.
struct ParameterSums {
  at::Tensor A_log, dt_bias;

  explicit ParameterSums(const Inputs& in) {
    const auto zeros = [&](const OptionalTensor& like) {
      return is_present(like) ? at::zeros(like->sizes(), like->options().dtype(at::kDouble)) : at::Tensor();
    };
    A_log = zeros(in.A_log);
    dt_bias = zeros(in.dt_bias);
  }

  void write(const GradTensors& grads) const {
    if (grads[kGradALog].numel() > 0) grads[kGradALog].copy_(A_log);
    if (grads[kGradDtBias].numel() > 0) grads[kGradDtBias].copy_(dt_bias);
  }
};

// Writes the gradients of a batch; adds the gradients of parameters to their sums.
class Adjoint {
 public:
  Adjoint(const BwdInputs& bwd, const GradTensors& grads, ParameterSums& sums, const ChosenStates& grad_chosen)
      : bwd_(bwd), scan_(bwd.in), products_(products_for(bwd.in)), grads_(grads), sums_(sums), grad_chosen_(grad_chosen) {}

  void compute_all() {
    if (scan_.value_heads == 0) {  // no run, but q and k have elements
      grads_[kGradQ].zero_();
      grads_[kGradK].zero_();
    }
    for (const Part& part : scan_.parts()) part_adjoint(part);
  }

 private:
  bool needs(Grad grad) const { return grads_[grad].numel() > 0; }
  bool needs_gate() const { return needs(kGradG) || needs(kGradALog) || needs(kGradDtBias); }

  void part_adjoint(const Part& part);
  at::Tensor run_adjoint(const Run& run, const at::Tensor& state, const at::Tensor& grad_state);
  void gate_adjoint(const Chunks& chunks, const at::Tensor& grad_log_decay);

  const BwdInputs& bwd_;
  const Scan scan_;
  const Products& products_;
  const GradTensors& grads_;
  ParameterSums& sums_;
  const ChosenStates grad_chosen_;
};

void Adjoint::part_adjoint(const Part& part) {
  const std::vector<Run> runs = scan_.runs(part, grad_chosen_.positions);
  std::vector<at::Tensor> states = {scan_.load_states(bwd_.in.initial_states, part)};  // before each run
  for (size_t i = 0; i + 1 < runs.size(); ++i) {
    states.push_back(
        products_.compute(scan_.load(runs[i]), states.back(), /*needs_out=*/false).states.select(0, runs[i].chunks).clone());
  }
  at::Tensor grad_state = scan_.load_states(bwd_.grad_final_states, part);
  for (size_t i = runs.size(); i-- > 0; states.pop_back()) grad_state = run_adjoint(runs[i], states[i], grad_state);
  if (!needs(kGradInitialStates)) return;
  if (const at::Tensor first = grad_chosen_.first(part); first.defined()) grad_state = grad_state + first;
  grads_[kGradInitialStates].narrow(0, part.row, part.rows).copy_(grad_state);
}

// Returns the gradient of the run's first state, given the gradient of its last; writes all other gradients.
at::Tensor Adjoint::run_adjoint(const Run& run, const at::Tensor& state, const at::Tensor& grad_state) {
  const Chunks chunks = scan_.load(run);
  const at::Tensor grad_out =
      is_present(bwd_.grad_out)
          ? scan_.copied(scan_.by_head(*bwd_.grad_out, run, false))
          : at::zeros({run.chunks, run.rows, scan_.value_heads, run.length, scan_.value_dim}, scan_.options);
  const auto add_chosen = [&](const at::Tensor& grads) {
    grad_chosen_.visit(run, grads, [](const at::Tensor& chosen, at::Tensor bound) { bound.add_(chosen); });
  };
  const NeededGrads needed{needs(kGradQ), needs(kGradK), needs(kGradV), needs(kGradBeta), needs_gate()};
  const Computed of = products_.compute(chunks, state, /*needs_out=*/false);
  const RunGrads grads = products_.adjoint(chunks, of, grad_out, grad_state, add_chosen, needed);

  if (needed.v) scan_.write_by_head(grads_[kGradV], run, grads.v, true);
  if (needed.beta) scan_.write_by_head(grads_[kGradBeta], run, betas_adjoint(bwd_.in, chunks.raw_beta, grads.beta), true);
  if (needed.q) {
    scan_.write_by_head(grads_[kGradQ], run, normalized_adjoint(chunks.q, grads.q * scale_of(bwd_.in)), false);
  }
  if (needed.k) scan_.write_by_head(grads_[kGradK], run, normalized_adjoint(chunks.k, grads.k), true);
  if (needed.gate) gate_adjoint(chunks, grads.log_decay);
  return grads.first_state;
}

// grad_log_decay: (chunks, rows, value_heads, steps, 1 or key_dim).
void Adjoint::gate_adjoint(const Chunks& chunks, const at::Tensor& grad_log_decay) {
  at::Tensor of_steps = grad_log_decay.slice(3, 0, std::nullopt, scan_.updates).transpose(2, 3);
  if (!bwd_.in.has_gate_per_channel()) of_steps = of_steps.squeeze(-1);
  const GateGrads grads = log_decays_adjoint(bwd_.in, chunks.raw_g, of_steps);
  if (needs(kGradG)) scan_.write(grads_[kGradG], chunks.run, grads.raw);
  if (needs(kGradALog)) sums_.A_log.add_(grads.A_log);
  if (needs(kGradDtBias)) sums_.dt_bias.add_(grads.raw.sum(at::IntArrayRef({0, 1, 2}), false, at::kDouble));
}

// Sequences of equal length as a batch; one with chosen states is a batch of its own.
struct PackedBatch {
  SequencesOfLength of;
  std::vector<int64_t> positions;  // in the sequence
  int64_t first_position;          // its place among those of the call

  // The arguments of the call restricted to these sequences.
  Inputs restricted(const Inputs& call) const {
    Inputs in = call;
    for (at::Tensor* sequence : {&in.q, &in.k, &in.v, &in.beta}) *sequence = of.steps.take(*sequence);
    in.g = of.steps.take(call.g);
    in.seq_idx = of.steps.take(call.seq_idx);
    in.initial_states = of.states.take(call.initial_states);
    in.cu_seqlens.reset();
    return in;
  }

  // The states at its positions, of those at all positions of the call, or their gradients.
  ChosenStates chosen(const at::Tensor& states) const {
    if (positions.empty()) return {};
    return {positions, states.narrow(1, first_position, static_cast<int64_t>(positions.size()))};
  }
};

std::vector<PackedBatch> packed_batches(const Inputs& in) {
  std::vector<PackedBatch> batches;
  const int64_t seqlen = in.q.size(1);
  for (SequencesOfLength& of : sequences_by_length("delta_rule_scan", *in.cu_seqlens, seqlen, in.q.device(), in.states_at)) {
    PackedBatch batch{std::move(of), {}, 0};
    const SequenceRows& steps = batch.of.steps;
    for (size_t i = 0; i < in.states_at.size() && steps.sequences == 1; ++i) {
      const int64_t position = in.states_at[i];
      if (!is_in_sequence(position, steps.first, steps.length)) continue;
      if (batch.positions.empty()) batch.first_position = static_cast<int64_t>(i);
      batch.positions.push_back(position - steps.first);
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

}  // namespace

FwdOutputs fwd_aten(const Inputs& call) {
  const ExactProducts exact;
  check_inputs(call);
  const FwdOutputs outputs = allocate_fwd(call);
  const Inputs in = by_update(call);
  if (!is_present(in.cu_seqlens)) {
    forward(in, outputs, {in.states_at, outputs.states});
    return outputs;
  }
  if (in.q.size(1) == 0) outputs.states.zero_();  // no step is of a sequence
  for (const PackedBatch& batch : packed_batches(in)) {
    const SequencesOfLength& of = batch.of;
    const FwdOutputs of_batch{of.steps.place(outputs.out), of.states.place(outputs.final_states), {}};
    forward(batch.restricted(in), of_batch, batch.chosen(outputs.states));
    of.steps.put(of_batch.out, outputs.out);
    of.states.put(of_batch.final_states, outputs.final_states);
  }
  return outputs;
}

GradTensors bwd_aten(const BwdInputs& call) {
  const ExactProducts exact;
  check_inputs(call.in);
  const GradTensors allocated = allocate_bwd(call);
  BwdInputs bwd = call;
  bwd.in = by_update(call.in);
  GradTensors grads = allocated;
  for (const Grad grad : {kGradK, kGradV, kGradBeta}) {
    if (grads[grad].numel() > 0) grads[grad] = grads[grad].unflatten(1, {bwd.in.k.size(1), bwd.in.k.size(2)});
  }
  ParameterSums sums(bwd.in);
  if (!is_present(bwd.in.cu_seqlens)) {
    ChosenStates grad_chosen;
    if (is_present(bwd.grad_states)) grad_chosen = {bwd.in.states_at, *bwd.grad_states};
    Adjoint(bwd, grads, sums, grad_chosen).compute_all();
  } else {
    for (const PackedBatch& packed : packed_batches(bwd.in)) {
      const SequencesOfLength& of = packed.of;
      BwdInputs batch = bwd;
      batch.grad_out = of.steps.take(bwd.grad_out);
      batch.grad_final_states = of.states.take(bwd.grad_final_states);
      batch.in = packed.restricted(bwd.in);
      GradTensors of_batch = grads;
      const auto for_each_grad = [&](const auto& body) {
        for (const Grad grad : {kGradQ, kGradK, kGradV, kGradBeta, kGradG, kGradInitialStates}) {
          if (grads[grad].numel() > 0) body(grad == kGradInitialStates ? of.states : of.steps, grad);
        }
      };
      for_each_grad([&](const auto& rows, Grad grad) { of_batch[grad] = rows.place(grads[grad]); });
      const bool has_chosen = is_present(bwd.grad_states);
      Adjoint(batch, of_batch, sums, has_chosen ? packed.chosen(*bwd.grad_states) : ChosenStates{}).compute_all();
      for_each_grad([&](const auto& rows, Grad grad) { rows.put(of_batch[grad], grads[grad]); });
    }
  }
  sums.write(allocated);
  return allocated;
}

}  // namespace ssm_kernels::delta_rule
