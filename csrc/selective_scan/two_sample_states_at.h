// states_at of the scans whose call ends with a state and an input sample.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "selective_scan/two_sample_op.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"
#include "torch/states_at.h"

namespace ssm_kernels::selective_scan {

// Takes the last step of each sequence, in the scan's time, of a tensor of steps. A sequence without steps takes that of
// `before`, or zero.
inline at::Tensor last_steps(const TwoSampleInputs& in, const at::Tensor& steps, const OptionalTensor& before) {
  const c10::SymInt seqlen = steps.sym_size(-1);
  c10::SymDimVector shape(steps.sym_sizes().begin(), steps.sym_sizes().end() - 1);
  shape[0] = count_sequences(in);
  const auto given = [&] { return is_present(before) ? *before : at::zeros_symint(shape, steps.options()); };
  if (seqlen == 0) return given().clone();
  if (!is_present(in.cu_seqlens)) return steps.select(-1, in.reverse ? 0 : -1).clone();
  const at::Tensor begins = in.cu_seqlens->slice(0, 0, -1), ends = in.cu_seqlens->slice(0, 1);
  const at::Tensor index = in.reverse ? begins : ends - 1;
  const at::Tensor found = steps.select(0, 0).index_select(-1, index.clamp(0).clamp_max(at::Scalar(seqlen - 1)));
  std::vector<int64_t> one_each(steps.dim() - 1, 1);
  one_each[0] = -1;
  return at::where(ends.gt(begins).view(one_each), found.movedim(-1, 0), given());
}

// The states at none of the positions, like the states of all sequences.
inline at::Tensor no_positions(const TwoSampleInputs& in, const at::Tensor& last) {
  c10::SymDimVector shape(last.sym_sizes().begin(), last.sym_sizes().end());
  if (is_present(in.cu_seqlens)) shape[0] = 1;
  shape.insert(shape.begin() + 1, 0);
  return last.new_empty_symint(shape);
}

// A scan, and its states and samples at positions. A composition of operators, so that autograd, vmap and exporters know only
// those. `Scan` is the differentiable operator, whose `check` returns the method.
template <typename Scan>
struct SampleStatesAt {
  using ScanInputs = typename Scan::Inputs;
  static constexpr bool kIsPublic = false;
  struct Inputs : ScanInputs {
    std::vector<int64_t> states_at;

    auto fields() { return std::tuple_cat(ScanInputs::fields(), std::tie(states_at)); }
  };
  struct Result {
    at::Tensor out, last_state, last_u, last_B, states, states_u, states_B;

    auto fields() { return std::tie(out, last_state, last_u, last_B, states, states_u, states_B); }
  };

  static void cast(Inputs& in, const Autocast& to) {
    operator_of<Scan>().check(in);
    Scan::cast(in, to);
  }

  static Result call(Inputs& in) {
    operator_of<Scan>().check(in);
    const bool has_u = is_two_sample(Scan::check(in)), has_B = has_u && in.B.dim() > 2;
    const c10::SymInt seqlen = in.u.sym_size(2);
    const at::Tensor none = empty_tensor({0}, in.B.options());
    if (in.states_at.empty()) {
      const auto [out, last_state] = operator_of<Scan>()(in);
      const at::Tensor last_u = has_u ? last_steps(in, in.u, in.previous_u) : none,
                       last_B = has_B ? last_steps(in, in.B, in.previous_B) : none;
      return {out,
              last_state,
              last_u,
              last_B,
              no_positions(in, last_state),
              has_u ? no_positions(in, last_u) : none,
              has_B ? no_positions(in, last_B) : none};
    }
    check_states_at(Scan::name(in), in.states_at, seqlen, in.reverse);
    // The states of each piece, of sequences that have not begun too, are h, u and B.
    std::vector<at::Tensor> first;
    const c10::SymDimVector state_shape = {count_sequences(in), in.u.sym_size(1), in.A.sym_size(1)};
    first.push_back(is_present(in.initial_state) ? *in.initial_state : at::zeros_symint(state_shape, in.A.options()));
    if (has_u) first.push_back(before_sequences(in, in.u, in.previous_u));
    if (has_B) first.push_back(before_sequences(in, in.B, in.previous_B));
    const bool is_transposed = in.u.sym_stride(1) == 1 && in.u.sym_stride(2) != 1;  // out has the layout of u
    const auto scan = [&](const Piece& piece) -> std::vector<at::Tensor> {
      const ScanInputs part = part_of(in, piece, has_u, has_B);
      const auto [out, last_state] = operator_of<Scan>()(part);
      std::vector<at::Tensor> results = {out, last_state};
      if (has_u) results.push_back(last_steps(part, part.u, part.previous_u));
      if (has_B) results.push_back(last_steps(part, part.B, part.previous_B));
      return results;
    };
    const std::vector<double> empty(first.size(), 0);
    const auto first_sample = [&](size_t i, int64_t step) -> OptionalTensor {
      if (i == 0 || !in.repeats_first) return std::nullopt;
      return (i == 1 ? in.u : in.B).select(-1, step);
    };
    SeveralStatesAt found =
        scan_pieces({seqlen, 2, is_transposed, first, in.seq_idx, in.cu_seqlens, scan, empty, first_sample}, in.states_at);
    return {found.out,
            found.last[0],
            has_u ? found.last[1] : none,
            has_B ? found.last[2] : none,
            found.states[0],
            has_u ? found.states[1] : none,
            has_B ? found.states[2] : none};
  }

 private:
  // The samples before the sequences, which with repeats_first are their first ones.
  static at::Tensor before_sequences(const TwoSampleInputs& in, const at::Tensor& steps, const OptionalTensor& given) {
    if (is_present(given)) return *given;
    TwoSampleInputs first = in;
    first.reverse = true;  // whose last step is step 0
    if (in.repeats_first) return last_steps(first, steps, {});
    c10::SymDimVector shape(steps.sym_sizes().begin(), steps.sym_sizes().end() - 1);
    shape[0] = count_sequences(in);
    return at::zeros_symint(shape, steps.options());
  }

  static ScanInputs part_of(const ScanInputs& in, const Piece& piece, bool has_u, bool has_B) {
    ScanInputs part = in;
    piece.cut(-1, part.u, part.delta, part.z, part.lam, part.delta_A, part.seq_idx);
    for (at::Tensor* matrix : {&part.B, &part.C}) {
      if (matrix->dim() > 2) piece.cut(-1, *matrix);
    }
    part.initial_state = piece.state();
    if (has_u) part.previous_u = piece.state(1);
    if (has_B) part.previous_B = piece.state(2);
    part.cu_seqlens = piece.cu_seqlens;
    return part;
  }
};

}  // namespace ssm_kernels::selective_scan
