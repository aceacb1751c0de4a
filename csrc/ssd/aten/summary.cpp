// The map from the states S before a span of steps to those after it, decay S + S_0, and its adjoint. In the notation of
// chunked_scan.cpp, for a span whose first step follows cs_0 = 0,
//
//   S_0 = sum_j e^(cs_last - cs_j) c_j x_j B_j^T          decay = e^cs_last
//
// No two steps meet, so a chunk may be as long as memory allows: a run of steps is one product. Runs follow one another as
// chunks do. With T the gradient of S_0 after a run, S the state before it, and E the gradient of the decay,
//
//   grad (c x)_j = e^(cs_last - cs_j) T B_j          grad B_j = e^(cs_last - cs_j) T^T c_j x_j
//   grad zeta_t  = sum_{j < t} e^(cs_last - cs_j) (c_j x_j . T B_j) + e^cs_last <T, S> + E decay
//
// with the sum over steps of the run, and the gradient of S is e^cs_last T. The sums cs and the sum of all zeta are fp64. Where
// seq_idx begins a sequence, contributions of earlier steps and the decay are zero.
//
// The mirror of the summary is the gradient of the states before the span, from the gradients g of the outputs:
// sum_i e^cs_i g_i C_i^T, over the steps of the first sequence.

#include "ssd/aten/summary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "ssd/aten/layout.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {

void zero_where_cut(const at::Tensor& decay, const OptionalTensor& seq_idx) {
  if (is_present(seq_idx)) decay.masked_fill_(sequence_starts(*seq_idx).any(1, /*keepdim=*/true), 0);
}

namespace {

// The states after a run, from those before it.
at::Tensor after_run(const Scan& scan, const Chunks& chunks, const at::Tensor& before) {
  return scan.boundary_states(chunks, before).select(0, 1);
}

class SummaryAdjoint {
 public:
  SummaryAdjoint(const SummaryBwdInputs& bwd, const Inputs& in, Discretization method, const SummaryGrads& grads)
      : bwd_(bwd), scan_(in, method), grads_(grads) {
    const at::TensorOptions doubles = in.x.options().dtype(at::kDouble);
    sum_A_ = at::zeros({scan_.heads}, doubles);
    sum_dt_bias_ = at::zeros({scan_.heads}, doubles);
    if (is_present(bwd.grad_decay)) {
      grad_total_ = bwd.grad_decay->to(at::kDouble) * log_decay_of_all_steps(in).exp_();
      zero_where_cut(grad_total_, in.seq_idx);
    }
  }

  void compute() {
    if (scan_.heads == 0 && needs(kSummaryGradB)) grads_[kSummaryGradB].zero_();  // no run, but B has elements
    for (const Part& part : scan_.parts()) part_adjoint(part);
    if (needs(kSummaryGradA)) grads_[kSummaryGradA].copy_(sum_A_);
    if (needs(kSummaryGradDtBias)) grads_[kSummaryGradDtBias].copy_(sum_dt_bias_);
  }

 private:
  bool needs(SummaryGrad grad) const { return grads_[grad].numel() > 0; }

  void part_adjoint(const Part& part) {
    const std::vector<Run> runs = scan_.long_runs(part);
    std::vector<at::Tensor> states = {scan_.load_states({}, part)};  // before each run
    for (size_t i = 0; i + 1 < runs.size(); ++i) {
      states.push_back(after_run(scan_, scan_.load(runs[i]), states.back()).clone());
    }
    at::Tensor T = scan_.load_states(bwd_.grad_final_states, part);
    for (size_t i = runs.size(); i-- > 0;) T = run_adjoint(runs[i], states[i], T);
  }

  // Returns the gradient of the states before the run.
  at::Tensor run_adjoint(const Run& run, const at::Tensor& before, const at::Tensor& after) {
    const Chunks chunks = scan_.load(run);
    const at::Tensor T = scan_.state_matrices(after.unsqueeze(0), 0, 1);
    const at::Tensor from_end = scan_.group_by_step(at::bmm(chunks.B, transposed(T)), run).mul_(chunks.decay_to_chunk_end);
    zero_where_(from_end, chunks.is_before_beginning);
    if (needs(kSummaryGradX)) {
      scan_.split_heads(Scan::run_of(grads_[kSummaryGradX], run)).copy_(from_end * chunks.gain);
    }
    if (needs(kSummaryGradB)) {
      const at::Tensor grad_B = scan_.matrices_by_step(at::bmm(scan_.weighted_input(chunks), T), run);
      Scan::run_of(grads_[kSummaryGradB], run).copy_(zero_where_(grad_B, chunks.is_before_beginning));
    }
    const at::Tensor at_start = Scan::across(after, chunks, 0) * chunks.decay.select(0, 0);
    if (needs(kSummaryGradDt) || needs(kSummaryGradA) || needs(kSummaryGradDtBias) || needs(kSummaryGradLogDecay) ||
        needs(kSummaryGradGain)) {
      const at::Tensor grad_gain = scan_.merge_heads(row_products(from_end, chunks.x));
      const at::Tensor input_to_end = (grad_gain * scan_.merge_heads(chunks.gain.squeeze(-1))).to(at::kDouble);
      at::Tensor of_all_steps = (at_start * before).sum({-2, -1}).to(at::kDouble);
      if (grad_total_.defined()) of_all_steps = of_all_steps + grad_total_.narrow(0, run.row, run.rows);
      const at::Tensor grad_zeta = (cumsum_of_steps(input_to_end) - input_to_end).add_(of_all_steps.unsqueeze(1));
      const StepGrads grads = step_grads(scan_.in, scan_.method, chunks.steps, grad_zeta, grad_gain);
      if (needs(kSummaryGradA)) sum_A_.add_(grads.A);
      if (needs(kSummaryGradDtBias)) sum_dt_bias_.add_(grads.biased.sum({0, 1, 2}));
      if (needs(kSummaryGradDt)) Scan::run_of(grads_[kSummaryGradDt], run).copy_(grads.biased);
      if (needs(kSummaryGradLogDecay)) Scan::run_of(grads_[kSummaryGradLogDecay], run).copy_(grads.log_decay);
      if (needs(kSummaryGradGain)) Scan::run_of(grads_[kSummaryGradGain], run).copy_(grads.gain);
    }
    return at_start;
  }

  const SummaryBwdInputs& bwd_;
  const Scan scan_;
  const SummaryGrads& grads_;
  at::Tensor sum_A_, sum_dt_bias_;  // over all steps, float64
  at::Tensor grad_total_;           // of the sum of zeta as the decay's logarithm, (batch, heads), float64
};

}  // namespace

void summary_aten(const Inputs& in, Discretization method, const SummaryOutputs& outputs) {
  const ExactProducts exact;
  const Scan scan(in, method);
  at::Tensor total = at::zeros({scan.batch, scan.heads}, in.x.options().dtype(at::kDouble));
  for (const Part& part : scan.parts()) {
    at::Tensor state = scan.load_states({}, part);
    for (const Run& run : scan.long_runs(part)) {
      const Chunks chunks = scan.load(run);
      state = after_run(scan, chunks, state);
      total.narrow(0, run.row, run.rows).add_(chunks.steps.zeta.sum(at::IntArrayRef({0, 2})));
    }
    outputs.final_states.narrow(0, part.row, part.rows).copy_(state);
  }
  outputs.decay.copy_(total.exp_());
  zero_where_cut(outputs.decay, in.seq_idx);
}

at::Tensor initial_gradient_aten(const Inputs& in, Discretization method) {
  const ExactProducts exact;
  const Scan scan(in, method);
  const at::Tensor result = empty_tensor({scan.batch, scan.heads, scan.headdim, scan.dstate}, scan.options);
  for (const Part& part : scan.parts()) {
    at::Tensor grad = scan.load_states({}, part);
    const std::vector<Run> runs = scan.long_runs(part);
    for (size_t i = runs.size(); i-- > 0;) {
      const Chunks chunks = scan.load(runs[i]);
      const at::Tensor C = scan.without(chunks.C, chunks.is_after_beginning, runs[i]);
      const at::Tensor of_run = at::bmm(transposed(scan.decayed(chunks.x, chunks)), C).view(grad.sizes());
      grad = Scan::across(grad, chunks, 0).mul(chunks.decay.select(0, 0)).add_(of_run);
    }
    result.narrow(0, part.row, part.rows).copy_(grad);
  }
  return result;
}

void summary_adjoint_aten(const SummaryBwdInputs& bwd, Discretization method, const SummaryGrads& grads) {
  const ExactProducts exact;
  Inputs in = bwd.in.scan();
  in.C.reset();
  SummaryAdjoint(bwd, in, method, grads).compute();
}

}  // namespace ssm_kernels::ssd
