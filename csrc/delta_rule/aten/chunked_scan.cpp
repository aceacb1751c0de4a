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
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "delta_rule/aten/gates.h"
#include "delta_rule/aten/layout.h"
#include "delta_rule/aten/pairs.h"
#include "delta_rule/aten/unit_triangular.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/chunk_runs.h"
#include "torch/sequence_batches.h"

namespace ssm_kernels::delta_rule {
namespace {

at::Tensor transposed(const at::Tensor& matrices) { return matrices.transpose(-2, -1); }

// (chunks, rows, heads, ...) as matrices of a batch, and those of each chunk.
at::Tensor matrices(const at::Tensor& tensor) { return tensor.flatten(0, 2); }
std::vector<at::Tensor> by_chunk(const at::Tensor& tensor) { return tensor.flatten(1, 2).unbind(0); }

at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor) { return factor.defined() ? tensor * factor : tensor; }

// A copy without the steps where the mask is true; the tensor itself without a mask.
at::Tensor without(const at::Tensor& tensor, const at::Tensor& mask) {
  return mask.defined() ? zero_steps_where_(tensor.clone(), mask) : tensor;
}

// The same for the matrices of one chunk.
at::Tensor without(const at::Tensor& tensor, const Chunks& chunks, const at::Tensor& mask, int64_t chunk) {
  if (!mask.defined()) return tensor;
  const at::Tensor of_heads = tensor.unflatten(0, {chunks.run.rows, -1}).unsqueeze(0);
  return without(of_heads, mask.narrow(0, chunk, 1)).flatten(0, 2);
}

// Forward computes these tensors of a run, and backward recomputes them.
struct Computed {
  Pairs pairs;
  at::Tensor q_in, k_in, k_out;  // e^c . Q, e^c . K and e^(c_last - c) . K, of value heads
  at::Tensor k_read;             // diag(beta) (e^c . K)
  at::Tensor M, U;
  at::Tensor states;  // before each chunk and after the last, (chunks + 1, rows, value_heads, value_dim, key_dim)
};

// The factors, (rows * heads, 1, 1 or key_dim), by which each chunk decays the state before it and the gradient of the state
// after it; empty if nothing decays. A chunk in which a sequence begins has the factor zero, and a mask, as 0 times NaN is NaN.
std::vector<at::Tensor> factors_of_chunks(const Decays& decays) {
  return decays.all.defined() ? by_chunk(decays.all) : std::vector<at::Tensor>();
}
void clear_cut_(const at::Tensor& state, const Chunks& chunks, int64_t chunk) {
  if (!chunks.is_cut.defined()) return;
  state.unflatten(0, {chunks.run.rows, -1}).masked_fill_(chunks.is_cut.select(0, chunk).unsqueeze(-1).unsqueeze(-1), 0);
}

Computed compute(const Scan& scan, const Chunks& chunks, const at::Tensor& first) {
  Computed of;
  const Vectors& vectors = chunks.vectors;
  of.pairs = make_pairs(vectors, chunks.log_decay, chunks.sequence);
  const Decays& decays = of.pairs.decays;
  const at::Tensor k = vectors.of_value_heads(vectors.k);
  of.k_in = scaled(k, decays.from_start);
  of.k_out = scaled(k, decays.to_end);
  of.q_in = scaled(vectors.of_value_heads(vectors.q),
                   decays.from_start.defined() ? vectors.reading(decays.from_start, 3) : at::Tensor());
  of.M = unit_triangular_inverse(matrices(of.pairs.kk * chunks.beta)).view(of.pairs.kk.sizes());

  of.k_read = of.k_in * chunks.beta;

  const int64_t count = chunks.run.chunks;
  of.U = empty_contiguous_like(chunks.v);
  of.states = empty_tensor({count + 1, chunks.run.rows, scan.value_heads, scan.value_dim, scan.key_dim}, scan.options);
  of.states.select(0, 0).copy_(first);
  // Few operations in the loop: on a device, each takes longer to launch than to run.
  const std::vector<at::Tensor> states = by_chunk(of.states), written = by_chunk(chunks.v * chunks.beta),
                                read = by_chunk(of.k_read), k_out = by_chunk(of.k_out), M = by_chunk(of.M),
                                factors = factors_of_chunks(decays);
  std::vector<at::Tensor> U = by_chunk(of.U);
  for (int64_t i = 0; i < count; ++i) {
    at::Tensor difference = written[i], next = states[i + 1];
    if (chunks.sequence.defined()) {
      difference.sub_(without(at::bmm(read[i], transposed(states[i])), chunks, chunks.is_after_beginning, i));
    } else {
      difference.baddbmm_(read[i], transposed(states[i]), 1, -1);
    }
    at::bmm_out(U[i], M[i], difference);
    const at::Tensor kept = transposed(without(U[i], chunks, chunks.is_before_beginning, i));
    if (factors.empty()) {
      at::baddbmm_out(next, states[i], kept, k_out[i]);
      continue;
    }
    at::mul_out(next, states[i], factors[i]);
    clear_cut_(next, chunks, i);
    next.baddbmm_(kept, k_out[i]);
  }
  return of;
}

at::Tensor reading_mask(const Chunks& chunks) {
  return chunks.sequence.defined() ? chunks.vectors.reading(chunks.is_after_beginning, 2) : at::Tensor();
}

at::Tensor output(const Chunks& chunks, const Computed& of) {
  const at::Tensor S = of.states.narrow(0, 0, chunks.run.chunks);
  const at::Tensor out = zero_steps_where_(at::matmul(of.q_in, transposed(S)), reading_mask(chunks));
  matrices(out).baddbmm_(matrices(of.pairs.P), matrices(of.U));
  return out;
}

void forward_part(const Scan& scan, const Part& part, const FwdOutputs& outputs, const ChosenStates& chosen) {
  at::Tensor state = scan.load_states(scan.in.initial_states, part);
  if (at::Tensor first = chosen.first(part); first.defined()) first.copy_(state);
  for (const Run& run : scan.runs(part, chosen.positions)) {
    const Chunks chunks = scan.load(run);
    const Computed of = compute(scan, chunks, state);
    scan.write_by_head(outputs.out, run, output(chunks, of), false);
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
      : bwd_(bwd), scan_(bwd.in), grads_(grads), sums_(sums), grad_chosen_(grad_chosen) {}

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
  std::pair<at::Tensor, at::Tensor> chain(const Chunks& chunks, const Computed& of, const at::Tensor& grad_out,
                                          const at::Tensor& last) const;
  void gate_adjoint(const Chunks& chunks, const at::Tensor& grad_log_decay);

  const BwdInputs& bwd_;
  const Scan scan_;
  const GradTensors& grads_;
  ParameterSums& sums_;
  const ChosenStates grad_chosen_;
};

void Adjoint::part_adjoint(const Part& part) {
  const std::vector<Run> runs = scan_.runs(part, grad_chosen_.positions);
  std::vector<at::Tensor> states = {scan_.load_states(bwd_.in.initial_states, part)};  // before each run
  for (size_t i = 0; i + 1 < runs.size(); ++i) {
    states.push_back(compute(scan_, scan_.load(runs[i]), states.back()).states.select(0, runs[i].chunks).clone());
  }
  at::Tensor grad_state = scan_.load_states(bwd_.grad_final_states, part);
  for (size_t i = runs.size(); i-- > 0; states.pop_back()) grad_state = run_adjoint(runs[i], states[i], grad_state);
  if (!needs(kGradInitialStates)) return;
  if (const at::Tensor first = grad_chosen_.first(part); first.defined()) grad_state = grad_state + first;
  grads_[kGradInitialStates].narrow(0, part.row, part.rows).copy_(grad_state);
}

// Y, and the gradients of the states before each chunk and after the last, like the states.
std::pair<at::Tensor, at::Tensor> Adjoint::chain(const Chunks& chunks, const Computed& of, const at::Tensor& grad_out,
                                                 const at::Tensor& last) const {
  const int64_t count = chunks.run.chunks;
  const at::Tensor grad_U = at::matmul(transposed(of.pairs.P), grad_out), Y = empty_contiguous_like(grad_U),
                   grads = empty_contiguous_like(of.states);
  at::Tensor before = matrices(grads.narrow(0, 0, count));
  at::bmm_out(before, matrices(transposed(without(grad_out, reading_mask(chunks)))), matrices(of.q_in));
  grads.select(0, count).copy_(last);
  grad_chosen_.visit(chunks.run, grads, [](const at::Tensor& chosen, at::Tensor bound) { bound.add_(chosen); });
  const std::vector<at::Tensor> of_states = by_chunk(grads), read = by_chunk(of.k_read), k_out = by_chunk(of.k_out),
                                M = by_chunk(of.M), factors = factors_of_chunks(of.pairs.decays);
  std::vector<at::Tensor> of_U = by_chunk(grad_U), of_Y = by_chunk(Y);
  for (int64_t i = count; i-- > 0;) {
    const at::Tensor after = of_states[i + 1];
    if (chunks.sequence.defined()) {
      of_U[i].add_(without(at::bmm(k_out[i], transposed(after)), chunks, chunks.is_before_beginning, i));
    } else {
      of_U[i].baddbmm_(k_out[i], transposed(after));
    }
    at::bmm_out(of_Y[i], transposed(M[i]), of_U[i]);
    if (factors.empty()) {
      of_states[i].add_(after);
    } else if (chunks.sequence.defined()) {
      const at::Tensor decayed = after * factors[i];
      clear_cut_(decayed, chunks, i);
      of_states[i].add_(decayed);
    } else {
      of_states[i].addcmul_(after, factors[i]);
    }
    of_states[i].baddbmm_(transposed(without(of_Y[i], chunks, chunks.is_after_beginning, i)), read[i], 1, -1);
  }
  return {Y, grads};
}

// Returns the gradient of the run's first state, given the gradient of its last; writes all other gradients.
at::Tensor Adjoint::run_adjoint(const Run& run, const at::Tensor& state, const at::Tensor& grad_state) {
  const Chunks chunks = scan_.load(run);
  const Vectors& vectors = chunks.vectors;
  const Computed of = compute(scan_, chunks, state);
  const Decays& decays = of.pairs.decays;
  const at::Tensor grad_out =
      is_present(bwd_.grad_out)
          ? scan_.copied(scan_.by_head(*bwd_.grad_out, run, false))
          : at::zeros({run.chunks, run.rows, scan_.value_heads, run.length, scan_.value_dim}, scan_.options);
  const auto [Y, grad_states] = chain(chunks, of, grad_out, grad_state);
  const at::Tensor S = of.states.narrow(0, 0, run.chunks), D = grad_states.narrow(0, 1, run.chunks);

  if (needs(kGradV)) scan_.write_by_head(grads_[kGradV], run, Y * chunks.beta, true);
  const at::Tensor YS = zero_steps_where_(at::matmul(Y, S), chunks.is_after_beginning);
  const at::Tensor grad_A = at::matmul(Y, transposed(of.U)).neg_().tril_(-1);
  if (needs(kGradBeta)) {
    const at::Tensor grad = (Y * chunks.v).sum(-1).sub_((YS * of.k_in).sum(-1)).add_((grad_A * of.pairs.kk).sum(-1));
    scan_.write_by_head(grads_[kGradBeta], run, betas_adjoint(bwd_.in, chunks.raw_beta, grad), true);
  }
  if (!needs(kGradQ) && !needs(kGradK) && !needs_gate()) return grad_states.select(0, 0);

  const at::Tensor grad_P = at::matmul(grad_out, transposed(of.U));
  const at::Tensor grad_q_in = zero_steps_where_(at::matmul(grad_out, S), reading_mask(chunks));
  const at::Tensor grad_k_in = YS * -chunks.beta;
  const at::Tensor grad_k_out = zero_steps_where_(at::matmul(of.U, D), chunks.is_before_beginning);
  const PairGrads pairs = pairs_adjoint(vectors, of.pairs, chunks.log_decay, chunks.sequence, grad_A * chunks.beta,
                                        clear_unread_(vectors, grad_P), needs_gate());
  if (needs(kGradQ)) {
    const at::Tensor from_state =
        scaled(grad_q_in, decays.from_start.defined() ? vectors.reading(decays.from_start, 3) : at::Tensor());
    const at::Tensor grad = (pairs.q + vectors.sum_of_heads(from_state)).mul_(scale_of(bwd_.in));
    scan_.write_by_head(grads_[kGradQ], run, normalized_adjoint(chunks.q, grad), false);
  }
  if (needs(kGradK)) {
    const at::Tensor from_states = scaled(grad_k_in, decays.from_start) + scaled(grad_k_out, decays.to_end);
    scan_.write_by_head(grads_[kGradK], run, normalized_adjoint(chunks.k, pairs.k + vectors.sum_of_heads(from_states)), true);
  }
  if (needs_gate()) {
    at::Tensor to_start = grad_k_in * of.k_in;
    vectors.reading(to_start, 3).add_(grad_q_in * of.q_in);
    at::Tensor to_end = grad_k_out * of.k_out, all = (S * D).sum(-2, /*keepdim=*/true) * decays.all;
    if (chunks.is_cut.defined()) zero_steps_where_(all, chunks.is_cut);
    if (chunks.log_decay.dim() == 4) {
      to_start = to_start.sum(-1, /*keepdim=*/true);
      to_end = to_end.sum(-1, /*keepdim=*/true);
      all = all.sum(-1, /*keepdim=*/true);
    }
    const at::Tensor through = boundary_adjoint(to_start, to_end, all);
    gate_adjoint(chunks, through.add_(pairs.log_decay.view_as(through)));
  }
  return grad_states.select(0, 0);
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
