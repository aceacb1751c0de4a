// states_at of the scans: their states after the first p steps, for positions p from 0 to seqlen, which may repeat and need no
// order. A scan whose kernels do not return them all runs on the pieces between the positions.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

namespace ssm_kernels {

// The results of a scan and its states at the positions, (batch, positions, ...).
struct StatesAt {
  at::Tensor out, last, states;

  auto fields() { return std::tie(out, last, states); }
};

// The arguments of a scan, and these.
template <typename ScanInputs>
struct StatesAtInputs : ScanInputs {
  std::vector<int64_t> states_at;
  bool by_pieces = false;  // call the public operator alone

  auto fields() { return std::tuple_cat(ScanInputs::fields(), std::tie(states_at, by_pieces)); }
};

void check_states_at(const char* op, at::IntArrayRef positions, const c10::SymInt& seqlen, bool reverse);

// The steps from `begin` to before `end`, and the states and offsets of its sequences.
struct Piece {
  int64_t begin = 0;
  c10::SymInt end;
  std::optional<at::Tensor> state, cu_seqlens;

  // Cuts tensors of steps along the axis of time; absent ones stay absent.
  template <typename... Tensors>
  void cut(int64_t axis, Tensors&... tensors) const {
    ((tensors = of_steps(axis, tensors)), ...);
  }

 private:
  at::Tensor of_steps(int64_t axis, const at::Tensor& tensor) const;
  std::optional<at::Tensor> of_steps(int64_t axis, const std::optional<at::Tensor>& tensor) const;
};

// A call of a scan.
struct ScanCall {
  c10::SymInt seqlen;
  int64_t axis = 0;            // of time, in the output
  bool is_transposed = false;  // the output has the memory of its transpose of axes 1 and 2
  std::optional<at::Tensor> initial_state, seq_idx, cu_seqlens;
  std::function<std::tuple<at::Tensor, at::Tensor>(const Piece&)> scan;  // returns the output and the last state
};
StatesAt scan_pieces(const ScanCall& call, at::IntArrayRef positions);

// The states at the positions, in the dtype of `last`, (batch, positions, ...). Those absent are zero at 0 and else `last`.
at::Tensor stack_states(at::IntArrayRef positions, const std::map<int64_t, at::Tensor>& states, const at::Tensor& last);

}  // namespace ssm_kernels
