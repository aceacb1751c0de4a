// states_at of the scans: their states after the first p steps, for positions p from 0 to seqlen, which may repeat and need no
// order. A scan whose kernels do not return them all runs on the pieces between the positions.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace ssm_kernels {

// The results of a scan of one state and its states at the positions, (batch, positions, ...).
struct StatesAt {
  at::Tensor out, last, states;

  auto fields() { return std::tie(out, last, states); }
};
// The same of a scan of several states, which have one tensor each.
struct SeveralStatesAt {
  at::Tensor out;
  std::vector<at::Tensor> last, states;

  StatesAt of_one() && { return {std::move(out), std::move(last[0]), std::move(states[0])}; }
};

// The arguments of a scan, and these.
template <typename ScanInputs>
struct StatesAtInputs : ScanInputs {
  std::vector<int64_t> states_at;
  bool by_pieces = false;  // call the public operator alone

  auto fields() { return std::tuple_cat(ScanInputs::fields(), std::tie(states_at, by_pieces)); }
};

void check_states_at(const char* op, at::IntArrayRef positions, const c10::SymInt& seqlen, bool reverse);

// The steps from `begin` to before `end`, and the states and offsets of its sequences. `states` is empty without initial ones.
struct Piece {
  int64_t begin = 0;
  c10::SymInt end;
  std::vector<at::Tensor> states;
  std::optional<at::Tensor> cu_seqlens;

  std::optional<at::Tensor> state(size_t i = 0) const {
    return states.empty() ? std::nullopt : std::optional<at::Tensor>(states[i]);
  }

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
  int64_t axis = 0;                        // of time, in the output
  bool is_transposed = false;              // the output has the memory of its transpose of axes 1 and 2
  std::vector<at::Tensor> initial_states;  // none, or one of each state
  std::optional<at::Tensor> seq_idx, cu_seqlens;
  std::function<std::vector<at::Tensor>(const Piece&)> scan;  // returns the output and the last states
  std::vector<double> empty = {0};                            // each state of a sequence that begins
  // The i-th state, (batch, ...), of sequences that begin at a step of seq_idx, where it is not `empty`.
  std::function<std::optional<at::Tensor>(size_t i, int64_t step)> first;
};
SeveralStatesAt scan_pieces(const ScanCall& call, at::IntArrayRef positions);

// The initial states of a scan of one state.
std::vector<at::Tensor> one_state(const std::optional<at::Tensor>& state);

// The states at the positions, in the dtype of `last`, (batch, positions, ...). Those absent are `empty` at 0 and else `last`.
at::Tensor stack_states(at::IntArrayRef positions, const std::map<int64_t, at::Tensor>& states, const at::Tensor& last,
                        double empty = 0);

}  // namespace ssm_kernels
