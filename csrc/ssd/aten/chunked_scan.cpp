// The chunked scan (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6) and its adjoint.
//
// With zeta_t the logarithm of the state's decay at step t, c_t the input's factor and cs_i = zeta_1 + ... + zeta_i inside a
// chunk, the recurrence S_t = e^zeta_t S_{t-1} + c_t x_t B_t^T, y_t = S_t C_t is, for a chunk that begins with the state S,
//
//   y_i = sum_{j <= i} M_ij c_j x_j + e^cs_i S C_i,      M_ij = (C_i . B_j) e^(cs_i - cs_j)
//   S'  = e^cs_last S + sum_j e^(cs_last - cs_j) c_j x_j B_j^T
//
// Everything is a matmul except the recurrence in the second line, which alone connects the chunks. With g the gradient of y,
// and T the gradient of S', which the next chunk returns, the adjoint is
//
//   grad S       = e^cs_last T + sum_i e^cs_i g_i C_i^T
//   grad (c x)_j = sum_{i >= j} M_ij g_i + e^(cs_last - cs_j) T B_j
//   grad C_i     = sum_{j <= i} W_ij B_j + e^cs_i S^T g_i,       W_ij = (g_i . c_j x_j) e^(cs_i - cs_j)
//   grad B_j     = sum_{i >= j} W_ij C_i + e^(cs_last - cs_j) T^T c_j x_j
//   grad zeta_t  = sum_{j < t <= i} W_ij (C_i . B_j) + sum_{i >= t} e^cs_i (g_i . S C_i)
//                  + sum_{j < t} e^(cs_last - cs_j) (c_j x_j . T B_j) + e^cs_last <T, S>
//
// zeta_t is in the exponent of every pair of steps (j, i) with j < t <= i, and of pairs of a step and a chunk boundary. As sums
// over these pairs its gradient has no terms that cancel, however strong the decay. The heads of a group share C_i . B_j, and
// their W are summed before the products with B and C.
//
// The sums cs are fp64 and their differences are rounded once, so that no exponent loses accuracy to a long or a strong decay.
// With a diagonal gain d the output of a step reads the state before the step, and the step's own input by d:
// y_i = S_{i-1} C_i + d_i (C_i . B_i) x_i. Sums up to i, as exponents of what y_i reads, then end at i - 1, and pairs (j, i)
// have j < i. The pairs (i, i) have no decay: they are products of rows.
//
// With ranks (Inputs::ranks) a step has several samples, rows of x, B, C and y, and a chunk's matrices have a row for each. All
// samples of a step share its gates: e^(cs_i - cs_j) is that of their steps, and the pairs (i, i) are a block of samples of one
// step, whose products the diagonal gain multiplies. No output reads a gate of a later step.
//
// Where seq_idx begins a sequence, the decay between steps before and after is zero, and contributions through a state are
// masked. That stops NaN too, except in the products of its own chunk.
//
// Memory: a call takes chunks in runs whose temporaries have a bounded size. Forward goes from the first run to the last.
// Backward does so too, to find the states between runs, and then goes from the last run to the first, recomputing the states
// inside each. The states between runs are at most dstate / (steps of a chunk) times as large as x. Packed sequences of equal
// length that do not follow one another are copied.

#include "ssd/aten/chunked_scan.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <vector>

#include "ssd/aten/layout.h"
#include "ssd/aten/ranks.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/sequence_batches.h"

namespace ssm_kernels::ssd {
namespace {

// sum_{i >= t}, sum_{i > t} and sum_{j < t} for each step t of (chunks, rows, steps, heads), in float64: products with
// triangles of ones.
at::Tensor ones_for(const at::Tensor& values) {
  return at::ones({values.size(2), values.size(2)}, values.options().dtype(at::kDouble));
}
at::Tensor sum_from(const at::Tensor& values) { return at::matmul(ones_for(values).triu_(), values.to(at::kDouble)); }
at::Tensor sum_after(const at::Tensor& values) { return at::matmul(ones_for(values).triu_(1), values.to(at::kDouble)); }
at::Tensor sum_before(const at::Tensor& values) { return at::matmul(ones_for(values).tril_(-1), values.to(at::kDouble)); }

// The pairs of steps inside chunks.
struct Pairs {
  at::Tensor products;  // C_i . B_j: a matrix (i, j) of each group
  at::Tensor decay;     // of decay_between
  at::Tensor M;         // a matrix (i, j) of each head
  at::Tensor input;     // c_j x_j by head
};

Pairs make_pairs(const Scan& scan, const Chunks& chunks) {
  Pairs pairs;
  pairs.products = at::bmm(chunks.C, transposed(chunks.B));
  pairs.decay = scan.decay_between(chunks);
  pairs.M = (pairs.decay * scan.by_pairs(pairs.products, chunks.run)).flatten(4, 5).flatten(2, 3).flatten(0, 1);
  pairs.input = scan.by_head(chunks.x, chunks.gain);
  return pairs;
}

// e^cs_i S C_i by step, with the states S before each chunk.
at::Tensor read_states(const Scan& scan, const Chunks& chunks, const at::Tensor& states) {
  const at::Tensor S = scan.state_matrices(states, 0, chunks.run.chunks);
  const at::Tensor products = scan.group_by_step(at::bmm(chunks.C, transposed(S)), chunks.run);
  return zero_where_(products.mul_(chunks.exp_cumsum), chunks.is_after_beginning);
}

// C_i . B_i, by step with 1 for the heads of a group and for headdim.
at::Tensor own_products(const Scan& scan, const Run& run, const Pairs& pairs) {
  const at::Tensor diagonal = pairs.products.diagonal(0, 1, 2);
  return diagonal.reshape({run.chunks, run.rows, scan.groups, run.length}).transpose(2, 3).unsqueeze(-1).unsqueeze(-1);
}

// The products C_i . B_i of all samples of a step, (chunks, rows, steps, groups, 1, ranks, ranks).
at::Tensor own_blocks(const Scan& scan, const Run& run, const Pairs& pairs) {
  const at::Tensor blocks =
      pairs.products.view({-1, run.length, scan.ranks, run.length, scan.ranks}).diagonal(0, 1, 3).movedim(3, 1);
  return blocks.unflatten(0, {run.chunks, run.rows, scan.groups}).transpose(2, 3).unsqueeze(4);
}

// Reorders samples by step as a matrix (ranks, headdim) of each step and head, (chunks, rows, steps, groups, heads of a group,
// ranks, headdim), and back.
at::Tensor by_own_step(const Scan& scan, const at::Tensor& samples) { return scan.by_rank(samples).movedim(3, 5); }
at::Tensor from_own_step(const at::Tensor& matrices) { return matrices.movedim(5, 3).flatten(2, 3); }

// y with D x, by step, given the result of read_states.
at::Tensor output(const Scan& scan, const Chunks& chunks, const Pairs& pairs, const at::Tensor& from_states) {
  at::Tensor y = from_states + scan.head_by_step(at::bmm(pairs.M, pairs.input), chunks.run);
  if (scan.in.ranks != nullptr) {
    const at::Tensor own = at::matmul(own_blocks(scan, chunks.run, pairs), by_own_step(scan, chunks.x));
    y.addcmul_(from_own_step(own), chunks.diagonal);
  } else if (chunks.diagonal.defined()) {
    y.addcmul_(chunks.x, chunks.diagonal * own_products(scan, chunks.run, pairs));
  }
  if (is_present(scan.in.D)) y.addcmul_(chunks.x, scan.D());
  return y;
}

void forward_part(const Scan& scan, const Part& part, const FwdOutputs& outputs, const ChosenStates& chosen) {
  at::Tensor state = scan.load_states(scan.in.initial_states, part);
  if (at::Tensor first = chosen.first(part); first.defined()) first.copy_(state);
  for (const Run& run : scan.runs(part, chosen.positions)) {
    const Chunks chunks = scan.load(run);
    const at::Tensor states = scan.boundary_states(chunks, state);
    at::Tensor y = output(scan, chunks, make_pairs(scan, chunks), read_states(scan, chunks, states));
    if (scan.in.ranks != nullptr) {
      y = sum_of_ranks(scan, run, y);
    } else if (is_present(scan.in.z)) {
      y.mul_(at::silu(scan.by_step(*scan.in.z, run)));
    }
    scan.write_by_step(outputs.out, run, y);
    chosen.visit(run, states, [](at::Tensor asked, const at::Tensor& bound) { asked.copy_(bound); });
    state = states.select(0, run.chunks);
  }
  outputs.final_states.narrow(0, part.row, part.rows).copy_(state);
}

void forward(const Inputs& in, Discretization method, const FwdOutputs& outputs, const ChosenStates& chosen = {}) {
  const Scan scan(in, method);
  for (const Part& part : scan.parts()) forward_part(scan, part, outputs, chosen);
}

// The gradients of the parameters, float64, summed over the runs.
struct ParameterSums {
  at::Tensor A, dt_bias, D;

  explicit ParameterSums(const Inputs& in) {
    const auto zeros = [&](at::IntArrayRef shape) { return at::zeros(shape, in.x.options().dtype(at::kDouble)); };
    A = zeros({in.x.size(2)});
    dt_bias = zeros({in.x.size(2)});
    D = zeros({in.x.size(2), in.x.size(3)});
  }

  void write(const BwdInputs& bwd, const GradTensors& grads) const {
    const auto write_one = [&](Grad grad, const at::Tensor& sum) {
      if (grads[grad].numel() > 0) grads[grad].copy_(sum);
    };
    write_one(kGradA, A);
    write_one(kGradDtBias, dt_bias);
    write_one(kGradD, is_present(bwd.in.D) && bwd.in.D->dim() == 1 ? D.sum(1) : D);
  }
};

// Writes the gradients of a batch; adds the gradients of parameters to their sums.
class Adjoint {
 public:
  Adjoint(const BwdInputs& bwd, Discretization method, const GradTensors& grads, ParameterSums& sums,
          const ChosenStates& grad_chosen = {})
      : bwd_(bwd), scan_(bwd.in, method), grads_(grads), sums_(sums), grad_chosen_(grad_chosen) {}

  void compute() {
    if (scan_.heads == 0) {  // no run, but B and C have elements
      grads_[kGradB].zero_();
      grads_[kGradC].zero_();
    }
    for (const Part& part : scan_.parts()) part_adjoint(part);
  }

 private:
  bool needs(Grad grad) const { return grads_[grad].numel() > 0; }

  void part_adjoint(const Part& part);
  at::Tensor run_adjoint(const Run& run, const at::Tensor& state, const at::Tensor& grad_state);
  at::Tensor gate_adjoint(const Chunks& chunks, const Pairs& pairs, const at::Tensor& from_states);
  at::Tensor boundary_grads(const Chunks& chunks, const at::Tensor& decayed_grad, const at::Tensor& last) const;
  void write_matrices(Grad grad, const Run& run, at::Tensor from_states, const at::Tensor& mask, const at::Tensor& pairs,
                      const at::Tensor& others) const;
  void steps_adjoint(const Chunks& chunks, const at::Tensor& grad_zeta, const at::Tensor& grad_gain);

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
    states.push_back(scan_.boundary_states(scan_.load(runs[i]), states.back()).select(0, runs[i].chunks).clone());
  }
  at::Tensor grad_state = scan_.load_states(bwd_.grad_final_states, part);
  for (size_t i = runs.size(); i-- > 0; states.pop_back()) grad_state = run_adjoint(runs[i], states[i], grad_state);
  if (!needs(kGradInitialStates)) return;
  if (const at::Tensor first = grad_chosen_.first(part); first.defined()) grad_state = grad_state + first;
  grads_[kGradInitialStates].narrow(0, part.row, part.rows).copy_(grad_state);
}

// Returns the gradient of y, by step; writes the gradients of z and D.
at::Tensor Adjoint::gate_adjoint(const Chunks& chunks, const Pairs& pairs, const at::Tensor& from_states) {
  const Run& run = chunks.run;
  at::Tensor grad = is_present(bwd_.grad_out)   ? scan_.by_step(*bwd_.grad_out, run)
                    : scan_.in.ranks == nullptr ? at::zeros_like(chunks.x)
                                                : at::zeros_like(scan_.by_step(scan_.in.x, run));
  if (scan_.in.ranks != nullptr) {
    const at::Tensor y = output(scan_, chunks, pairs, from_states);
    grad = sum_of_ranks_adjoint(scan_, run, y, grad, grads_[kGradZ], *bwd_.rank_grads);
  } else if (is_present(bwd_.in.z)) {
    const at::Tensor z = scan_.by_step(*bwd_.in.z, run);
    if (needs(kGradZ)) {
      const at::Tensor y = output(scan_, chunks, pairs, from_states);
      scan_.write_by_step(grads_[kGradZ], run, at::silu_backward(y.mul_(grad), z));
    }
    grad = grad * at::silu(z);
  }
  if (needs(kGradD)) sums_.D.add_((grad * chunks.x).sum({0, 1, 2}).flatten(0, 1));
  return grad;
}

// The gradients of the states before each chunk and after the last, (chunks + 1, rows, heads, headdim, dstate). decayed_grad:
// e^cs_i g_i, by group.
at::Tensor Adjoint::boundary_grads(const Chunks& chunks, const at::Tensor& decayed_grad, const at::Tensor& last) const {
  const int64_t count = chunks.run.chunks;
  at::Tensor grads = empty_tensor({count + 1, chunks.run.rows, scan_.heads, scan_.headdim, scan_.dstate}, scan_.options);
  at::Tensor increments = scan_.state_matrices(grads, 0, count);
  at::bmm_out(increments, transposed(decayed_grad), scan_.without(chunks.C, chunks.is_after_beginning, chunks.run));
  grads.select(0, count).copy_(last);
  grad_chosen_.visit(chunks.run, grads, [](const at::Tensor& chosen, at::Tensor bound) { bound.add_(chosen); });
  for (int64_t k = count; k-- > 0;) {
    grads.select(0, k).addcmul_(Scan::across(grads.select(0, k + 1), chunks, k), chunks.decay.select(0, k));
  }
  return grads;
}

// The gradient of B or C: from_states, the part through a state, zero where the mask is true, plus the pairs of steps times the
// other matrices.
void Adjoint::write_matrices(Grad grad, const Run& run, at::Tensor from_states, const at::Tensor& mask, const at::Tensor& pairs,
                             const at::Tensor& others) const {
  zero_where_(scan_.matrices_by_step(from_states, run), mask);
  const at::Tensor written = scan_.matrices_by_step(from_states.baddbmm_(pairs, others), run);
  scan_.write(grads_[grad], run, scan_.in.ranks == nullptr ? written : scan_.by_rank(written));
}

// Returns the gradient of the run's first state, given the gradient of its last; writes all other gradients.
at::Tensor Adjoint::run_adjoint(const Run& run, const at::Tensor& state, const at::Tensor& grad_state) {
  const Chunks chunks = scan_.load(run);
  const at::Tensor states = scan_.boundary_states(chunks, state), from_states = read_states(scan_, chunks, states);
  const Pairs pairs = make_pairs(scan_, chunks);
  const at::Tensor grad_y = gate_adjoint(chunks, pairs, from_states);
  const at::Tensor decayed_grad = scan_.decayed(grad_y, chunks), g = scan_.by_head(grad_y);
  const at::Tensor grad_states = boundary_grads(chunks, decayed_grad, grad_state);
  const at::Tensor S = scan_.state_matrices(states, 0, run.chunks), T = scan_.state_matrices(grad_states, 1, run.chunks);

  at::Tensor W = scan_.by_pairs(at::bmm(g, transposed(pairs.input)), run).mul_(pairs.decay);
  const at::Tensor grad_products = W.sum(1).view(pairs.products.sizes());
  at::Tensor own, own_outputs;  // C_i . B_i, and g_i . x_i by step
  if (scan_.in.ranks != nullptr) {
    own = own_blocks(scan_, run, pairs);
    own_outputs = at::matmul(by_own_step(scan_, grad_y), by_own_step(scan_, chunks.x).transpose(-2, -1));
    const at::Tensor gain = scan_.by_rank(chunks.diagonal).select(3, 0).unsqueeze(-1);  // of steps
    const at::Tensor of_groups = (own_outputs * gain).sum(4).transpose(2, 3).flatten(0, 2);
    scan_.by_pairs(grad_products, run).squeeze(1).diagonal(0, 1, 3).add_(of_groups.movedim(1, 3));
  } else if (chunks.diagonal.defined()) {
    own = own_products(scan_, run, pairs);
    own_outputs = row_products(grad_y, chunks.x);
    const at::Tensor of_groups = (own_outputs * chunks.diagonal.squeeze(-1)).sum(-1).transpose(2, 3);
    grad_products.diagonal(0, 1, 2).add_(of_groups.reshape({-1, run.length}));
  }
  if (needs(kGradB)) {
    write_matrices(kGradB, run, at::bmm(scan_.weighted_input(chunks), T), chunks.is_before_beginning, transposed(grad_products),
                   chunks.C);
  }
  if (needs(kGradC)) {
    write_matrices(kGradC, run, at::bmm(decayed_grad, S), chunks.is_after_beginning, grad_products, chunks.B);
  }

  const at::Tensor from_end = scan_.group_by_step(at::bmm(chunks.B, transposed(T)), run).mul_(chunks.decay_to_chunk_end);
  zero_where_(from_end, chunks.is_before_beginning);
  const at::Tensor grad_input = scan_.head_by_step(at::bmm(transposed(pairs.M), g), run).add(from_end);
  if (needs(kGradX)) {
    at::Tensor grad_x = grad_input * chunks.gain;
    if (scan_.in.ranks != nullptr) {
      const at::Tensor of_own = at::matmul(own.transpose(-2, -1), by_own_step(scan_, grad_y));
      grad_x.addcmul_(from_own_step(of_own), chunks.diagonal);
    } else if (own.defined()) {
      grad_x.addcmul_(grad_y, chunks.diagonal * own);
    }
    if (is_present(bwd_.in.D)) grad_x.addcmul_(grad_y, scan_.D());
    if (scan_.in.ranks != nullptr) grad_x = input_of_ranks_adjoint(scan_, run, grad_x, *bwd_.rank_grads);
    scan_.write_by_step(grads_[kGradX], run, grad_x);
  }

  if (is_present(bwd_.grad_diagonal_gain)) {
    const at::Tensor products =
        scan_.in.ranks != nullptr ? (own_outputs * own).sum(at::IntArrayRef({-2, -1})) : own_outputs * own.squeeze(-1);
    scan_.write(*bwd_.grad_diagonal_gain, run, scan_.merge_heads(products));
  }
  if (needs(kGradDt) || needs(kGradA) || needs(kGradDtBias) || needs(kGradLogDecay) || needs(kGradGain)) {
    const at::Tensor input_to_end = row_products(from_end, chunks.x).mul_(chunks.gain.squeeze(-1));
    W.mul_(scan_.by_pairs(pairs.products, run));
    W = scan_.ranks == 1 ? W.flatten(4, 5).flatten(2, 3) : W.sum(at::IntArrayRef({3, 5}));
    // If gates have a diagonal gain, y_i reads what step i - 1 left.
    if (own.defined()) W = at::constant_pad_nd(W.narrow(-2, 1, run.length - 1), {0, 0, 0, 1});
    const at::Tensor within = sum_across(W);
    const at::Tensor read = scan_.of_steps(scan_.merge_heads(row_products(from_states, grad_y)));
    const at::Tensor through =
        zero_where_(states.narrow(0, 0, run.chunks) * grad_states.narrow(0, 1, run.chunks), chunks.is_cut).sum({-2, -1});
    const at::Tensor grad_zeta = (own.defined() ? sum_after(read) : sum_from(read)) +
                                 sum_before(scan_.of_steps(scan_.merge_heads(input_to_end))) +
                                 within.view({run.chunks, run.rows, scan_.heads, run.length}).transpose(2, 3) +
                                 (through * chunks.decay.flatten(2)).unsqueeze(2);
    steps_adjoint(chunks, grad_zeta, scan_.of_steps(scan_.merge_heads(row_products(grad_input, chunks.x))));
  }
  return grad_states.select(0, 0);
}

// grad_zeta is the gradient of zeta as the decay's logarithm. Both are (chunks, rows, steps, heads).
void Adjoint::steps_adjoint(const Chunks& chunks, const at::Tensor& grad_zeta, const at::Tensor& grad_gain) {
  const StepGrads grads = step_grads(bwd_.in, scan_.method, chunks.steps, grad_zeta, grad_gain);
  if (needs(kGradA)) sums_.A.add_(grads.A);
  if (needs(kGradDtBias)) sums_.dt_bias.add_(grads.biased.sum({0, 1, 2}));
  if (needs(kGradDt)) scan_.write(grads_[kGradDt], chunks.run, grads.biased);
  if (needs(kGradLogDecay)) scan_.write(grads_[kGradLogDecay], chunks.run, grads.log_decay);
  if (needs(kGradGain)) scan_.write(grads_[kGradGain], chunks.run, grads.gain);
}

std::vector<SequencesOfLength> packed_by_length(const Inputs& in) {
  return sequences_by_length("ssd_chunk_scan", *in.cu_seqlens, in.x.size(1), in.x.device());
}

// The arguments of the call restricted to sequences of equal length, as a batch.
Inputs packed_batch(const Inputs& call, const SequencesOfLength& of) {
  Inputs batch = call;
  for (at::Tensor* sequence : {&batch.x, &batch.B, &batch.C}) *sequence = of.steps.take(*sequence);
  for (OptionalTensor* sequence : {&batch.dt, &batch.z, &batch.log_decay, &batch.gain, &batch.diagonal_gain}) {
    *sequence = of.steps.take(*sequence);
  }
  batch.initial_states = of.states.take(call.initial_states);
  batch.seq_idx = of.steps.take(call.seq_idx);
  batch.cu_seqlens.reset();
  return batch;
}

}  // namespace

FwdOutputs fwd_aten(const Inputs& in) {
  const ExactProducts exact;
  const Discretization method = check_inputs(in);
  const FwdOutputs outputs = allocate_fwd(in);
  if (!is_present(in.cu_seqlens)) {
    forward(in, method, outputs);
  } else {
    for (const SequencesOfLength& of : packed_by_length(in)) {
      const FwdOutputs of_batch{of.steps.place(outputs.out), of.states.place(outputs.final_states)};
      forward(packed_batch(in, of), method, of_batch);
      of.steps.put(of_batch.out, outputs.out);
      of.states.put(of_batch.final_states, outputs.final_states);
    }
  }
  return outputs;
}

StatesOutputs states_aten(const StatesInputs& in) {
  const ExactProducts exact;
  const Discretization method = check_states_inputs(in);
  const StatesOutputs outputs = allocate_states(in);
  forward(in, method, outputs, {in.states_at, outputs.states});
  return outputs;
}

GradTensors states_bwd_aten(const StatesBwdInputs& states_bwd) {
  const ExactProducts exact;
  const Discretization method = check_states_inputs(states_bwd.in);
  const GradTensors grads = allocate_states_bwd(states_bwd);
  const BwdInputs bwd = states_bwd.of_scan();
  ParameterSums sums(bwd.in);
  ChosenStates grad_chosen;
  if (is_present(states_bwd.grad_states)) grad_chosen = {states_bwd.in.states_at, *states_bwd.grad_states};
  Adjoint(bwd, method, grads, sums, grad_chosen).compute();
  sums.write(bwd, grads);
  return grads;
}

GradTensors bwd_aten(const BwdInputs& bwd) {
  const ExactProducts exact;
  const Discretization method = check_inputs(bwd.in);
  const GradTensors grads = allocate_bwd(bwd);
  ParameterSums sums(bwd.in);
  if (!is_present(bwd.in.cu_seqlens)) {
    Adjoint(bwd, method, grads, sums).compute();
  } else {
    for (const SequencesOfLength& of : packed_by_length(bwd.in)) {
      BwdInputs batch = bwd;
      batch.grad_out = of.steps.take(bwd.grad_out);
      batch.grad_final_states = of.states.take(bwd.grad_final_states);
      batch.in = packed_batch(bwd.in, of);
      GradTensors grads_of_batch = grads;
      const auto for_each_grad = [&](const auto& body) {
        for (const Grad grad : {kGradX, kGradDt, kGradB, kGradC, kGradZ, kGradInitialStates, kGradLogDecay, kGradGain}) {
          if (grads[grad].numel() > 0) body(grad == kGradInitialStates ? of.states : of.steps, grad);
        }
      };
      for_each_grad([&](const auto& rows, Grad grad) { grads_of_batch[grad] = rows.place(grads[grad]); });
      if (is_present(bwd.grad_diagonal_gain)) batch.grad_diagonal_gain = of.steps.place(*bwd.grad_diagonal_gain);
      Adjoint(batch, method, grads_of_batch, sums).compute();
      for_each_grad([&](const auto& rows, Grad grad) { rows.put(grads_of_batch[grad], grads[grad]); });
      if (is_present(bwd.grad_diagonal_gain)) of.steps.put(*batch.grad_diagonal_gain, *bwd.grad_diagonal_gain);
    }
  }
  sums.write(bwd, grads);
  return grads;
}

std::string plan_aten(const Inputs& in) {
  const Scan scan(in, check_inputs(in));
  return c10::str("kernel=aten products=", scan.options.dtype().name(), " chunk=", scan.chunk_length);
}

}  // namespace ssm_kernels::ssd
