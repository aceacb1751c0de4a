#include "mamba3/rotation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <utility>

#include "torch/debug_options.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::mamba3 {
namespace {

bool has_several_sequences(const Inputs& in) { return is_present(in.seq_idx) || is_present(in.cu_seqlens); }

// The steps before which phases start anew, (batch, seqlen), bool: those of sequences.
at::Tensor first_steps(const Inputs& in) {
  const int64_t batch = in.x.size(0), seqlen = in.x.size(1);
  const at::Tensor begins = at::zeros({batch, seqlen + 1}, in.x.options().dtype(at::kBool));
  begins.select(1, 0).fill_(true);
  if (is_present(in.seq_idx)) begins.narrow(1, 0, seqlen).logical_or_(sequence_starts(*in.seq_idx));
  if (is_present(in.cu_seqlens)) begins.select(0, 0).index_fill_(0, in.cu_seqlens->to(at::kLong).clamp(0, seqlen), true);
  return begins.narrow(1, 0, seqlen);
}

// The sums over time of (batch, seqlen, ...), float64, that begin anew at the steps where `begins` is true.
at::Tensor sums_of_sequences(const at::Tensor& values, const at::Tensor& begins) {
  const int64_t seqlen = values.size(1);
  const at::Tensor steps = at::arange(seqlen, begins.options().dtype(at::kLong)).expand_as(begins);
  const at::Tensor first = std::get<0>(at::cummax(at::where(begins, steps, at::zeros_like(steps)), 1));
  const at::Tensor index = first.view({begins.size(0), seqlen, 1, 1}).expand_as(values);
  const auto sums = [&](const at::Tensor& summed) {
    const at::Tensor all = at::cumsum(summed, 1);
    return all - (all - summed).gather(1, index);
  };
  // NaN and infinities stay in their sequence.
  const at::Tensor is_finite = values.isfinite();
  const at::Tensor found = sums(values.masked_fill(is_finite.logical_not(), 0));
  const at::Tensor has_others = sums(is_finite.logical_not().to(at::kDouble)).gt(0);
  return found.masked_fill_(has_others, std::numeric_limits<double>::quiet_NaN());
}

at::Tensor sums_over_time(const Inputs& in, const at::Tensor& values) {
  return has_several_sequences(in) ? sums_of_sequences(values, first_steps(in)) : at::cumsum(values, 1);
}

// The sums of a step and all later ones of its sequence.
at::Tensor sums_from(const Inputs& in, const at::Tensor& values) {
  const at::Tensor flipped = values.flip(1);
  if (!has_several_sequences(in)) return at::cumsum(flipped, 1).flip(1);
  const at::Tensor begins = first_steps(in);
  const at::Tensor ends = at::zeros_like(begins);
  ends.select(1, -1).fill_(true);
  ends.narrow(1, 0, begins.size(1) - 1).copy_(begins.narrow(1, 1, begins.size(1) - 1));
  return sums_of_sequences(flipped, ends.flip(1)).flip(1);
}

// Adds to the first or the last step of each sequence, of (batch, seqlen, ...).
void add_at_bounds(const Inputs& in, const at::Tensor& steps, const at::Tensor& added, bool is_first) {
  if (!is_present(in.cu_seqlens)) {
    steps.select(1, is_first ? 0 : -1).add_(added);
    return;
  }
  const at::Tensor offsets = in.cu_seqlens->to(at::kLong), begin = offsets.slice(0, 0, -1), end = offsets.slice(0, 1);
  const at::Tensor index = (is_first ? begin : end - 1).clamp(0, in.x.size(1) - 1);
  const at::Tensor has_steps = end.gt(begin).view({-1, 1, 1});
  steps.select(0, 0).index_add_(0, index, at::where(has_steps, added, at::zeros_like(added)));
}

// That step of each sequence, or `otherwise` for a sequence without steps.
at::Tensor take_at_bounds(const Inputs& in, const at::Tensor& steps, const at::Tensor& otherwise, bool is_first) {
  if (!is_present(in.cu_seqlens)) return steps.select(1, is_first ? 0 : -1);
  const at::Tensor offsets = in.cu_seqlens->to(at::kLong), begin = offsets.slice(0, 0, -1), end = offsets.slice(0, 1);
  const at::Tensor index = (is_first ? begin : end - 1).clamp(0, in.x.size(1) - 1);
  return at::where(end.gt(begin).view({-1, 1, 1}), steps.select(0, 0).index_select(0, index), otherwise);
}

// The two columns of each rotated pair, (..., angles), views of the rows.
std::pair<at::Tensor, at::Tensor> pairs_of(const Inputs& in, const at::Tensor& rows) {
  const int64_t count = in.angles.size(-1);
  if (!in.is_pairs()) return {rows.narrow(-1, 0, count), rows.narrow(-1, rows.size(-1) / 2, count)};
  const at::Tensor pairs = rows.narrow(-1, 0, 2 * count).unflatten(-1, {count, 2});
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}

void rotate_rows(const Inputs& in, const at::Tensor& rows, const at::Tensor& cos, const at::Tensor& sin) {
  const auto [first, second] = pairs_of(in, rows);
  const at::Tensor rotated = cos * first - sin * second;
  second.copy_(sin * first + cos * second);
  first.copy_(rotated);
}

// B or C by head, in memory of its own, with the bias.
at::Tensor rows_of_heads(const Inputs& in, const at::Tensor& rows, const OptionalTensor& bias) {
  const int64_t groups = in.B.size(-2);
  const at::Tensor result = rows.to(in.wide()).repeat_interleave(in.x.size(2) / groups, -2);
  return is_present(bias) ? result + bias_of_ranks(in, *bias) : result.clone(at::MemoryFormat::Contiguous);
}

// Those of turns, (batch, seqlen, heads, angles). With ranks both have an axis of size 1 for them before the heads.
std::pair<at::Tensor, at::Tensor> cosines_and_sines(const Inputs& in, const at::Tensor& turns) {
  const at::Tensor radians = (in.has_ranks() ? turns.unsqueeze(2) : turns) * (2 * kPi);
  return {radians.cos(), radians.sin()};
}

bool runs_kernels(const Inputs& in) { return in.x.is_cpu() && debug_option(DebugOption::kMamba3Cpu) == 0; }

}  // namespace

#ifndef SSM_KERNELS_WITH_CUDA
bool rotates_by_cuda_kernels(const Inputs&) { return false; }
Rotation rotate_cuda(const Inputs&, at::ScalarType) { return {}; }
void rotate_adjoint_cuda(const Inputs&, const Rotation&, const RotationGrads&, const GradTensors&) {}
#endif

at::Tensor bias_of_ranks(const Inputs& in, const at::Tensor& bias) {
  if (!in.has_ranks()) return bias;
  return bias.dim() == 3 ? bias.transpose(0, 1) : bias.unsqueeze(0).expand({in.ranks(), -1, -1});
}

Rotation rotate_aten(const Inputs& in, Rotation rotation) {
  const at::Tensor rates = rotation.rates.dim() == 4 ? rotation.rates : rotation.rates.unsqueeze(2);
  at::Tensor added = rates * rotation.sizes.unsqueeze(-1) * 0.5;
  add_at_bounds(in, added, rotation.phases, /*is_first=*/true);
  at::Tensor turns = sums_over_time(in, added);
  turns.sub_(turns.round());
  rotation.phases = take_at_bounds(in, turns, rotation.phases, /*is_first=*/false);
  const auto [cos, sin] = cosines_and_sines(in, turns);
  rotation.turns = turns.to(in.wide());
  rotation.k = rows_of_heads(in, in.B, in.B_bias);
  rotation.q = rows_of_heads(in, in.C, in.C_bias);
  const at::Tensor wide_cos = cos.to(in.wide()), wide_sin = sin.to(in.wide());
  rotate_rows(in, rotation.k, wide_cos, wide_sin);
  rotate_rows(in, rotation.q, wide_cos, wide_sin);
  return rotation;
}

void rotate_adjoint_aten(const Inputs& in, Rotation& rotation, const at::Tensor& grad_k, const at::Tensor& grad_q) {
  const auto of_phases = [&](const at::Tensor& rows, const at::Tensor& grad) {
    const auto [first, second] = pairs_of(in, rows);
    const auto [grad_first, grad_second] = pairs_of(in, grad);
    const at::Tensor of_rows = first * grad_second - second * grad_first;
    return in.has_ranks() ? of_rows.sum(2) : of_rows;
  };
  const at::Tensor grads = (of_phases(rotation.k, grad_k) + of_phases(rotation.q, grad_q)).to(at::kDouble);
  add_at_bounds(in, grads, rotation.phases, /*is_first=*/false);
  const at::Tensor sums = sums_from(in, grads);
  rotation.phases = take_at_bounds(in, sums, rotation.phases, /*is_first=*/true);
  const auto [cos, sin] = cosines_and_sines(in, rotation.turns.to(at::kDouble));
  const at::Tensor wide_cos = cos.to(in.wide()), minus_sin = sin.neg().to(in.wide());
  rotate_rows(in, grad_k, wide_cos, minus_sin);
  rotate_rows(in, grad_q, wide_cos, minus_sin);
  rotation.turns = sums.to(in.wide());
}

Rotation rotate(const Inputs& in) {
  Rotation rotation;
  rotation.rates = in.angles.to(at::kDouble).tanh().contiguous();
  rotation.sizes = in.dt.to(at::kDouble).contiguous();
  if (is_present(in.initial_angle)) {
    const at::Tensor turns = in.initial_angle->to(at::kDouble) * (1 / (2 * kPi));
    rotation.phases = (turns - turns.round()).contiguous();
  } else {
    const int64_t sequences = is_present(in.cu_seqlens) ? in.cu_seqlens->size(0) - 1 : in.x.size(0);
    rotation.phases = at::zeros({sequences, in.x.size(2), in.angles.size(-1)}, in.x.options().dtype(at::kDouble));
  }
  return runs_kernels(in) ? rotate_cpu(in, std::move(rotation)) : rotate_aten(in, std::move(rotation));
}

void rotate_adjoint(const Inputs& in, Rotation& rotation, const at::Tensor& grad_k, const at::Tensor& grad_q) {
  return runs_kernels(in) ? rotate_adjoint_cpu(in, rotation, grad_k, grad_q)
                          : rotate_adjoint_aten(in, rotation, grad_k, grad_q);
}

}  // namespace ssm_kernels::mamba3
