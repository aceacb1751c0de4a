#include "torch/states_at.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <set>
#include <utility>

#include "torch/checks.h"

namespace ssm_kernels {

void check_states_at(const char* op, at::IntArrayRef positions, const c10::SymInt& seqlen, bool reverse) {
  TORCH_CHECK_VALUE(!reverse, op, ": expected states_at without reverse, got both");
  for (const int64_t position : positions) {
    TORCH_CHECK_VALUE(position >= 0 && position <= seqlen, op, ": expected states_at from 0 to seqlen = ", seqlen, ", got ",
                      position);
  }
}

at::Tensor Piece::of_steps(int64_t axis, const at::Tensor& tensor) const {
  return tensor.slice_symint(axis, c10::SymInt(begin), end);
}
std::optional<at::Tensor> Piece::of_steps(int64_t axis, const std::optional<at::Tensor>& tensor) const {
  return is_present(tensor) ? std::optional<at::Tensor>(of_steps(axis, *tensor)) : tensor;
}

std::vector<at::Tensor> one_state(const std::optional<at::Tensor>& state) {
  return is_present(state) ? std::vector<at::Tensor>{*state} : std::vector<at::Tensor>{};
}

at::Tensor stack_states(at::IntArrayRef positions, const std::map<int64_t, at::Tensor>& states, const at::Tensor& last,
                        double empty) {
  if (positions.empty()) {
    std::vector<c10::SymInt> shape = last.sym_sizes().vec();
    shape.insert(shape.begin() + 1, 0);
    return last.new_empty_symint(shape);
  }
  std::vector<at::Tensor> chosen;
  for (const int64_t position : positions) {
    const auto found = states.find(position);
    const at::Tensor state = found != states.end() ? found->second : position == 0 ? at::full_like(last, empty) : last;
    chosen.push_back(state.to(last.scalar_type()));
  }
  return at::stack(chosen, 1);
}

namespace {

// The packed sequence of a step, (1,); the host does not read it.
at::Tensor sequence_of(const at::Tensor& cu_seqlens, int64_t step) {
  return cu_seqlens.slice(0, 1).le(step).sum(at::IntArrayRef{0}, /*keepdim=*/true);
}

// The states before a piece: where seq_idx changes there, those of a sequence that begins.
void reset_states(const ScanCall& call, Piece& piece) {
  if (!is_present(call.seq_idx) || piece.begin == 0 || piece.states.empty()) return;
  at::Tensor resets = call.seq_idx->select(1, piece.begin).ne(call.seq_idx->select(1, piece.begin - 1));
  if (is_present(call.cu_seqlens)) {
    const at::Tensor number = sequence_of(*call.cu_seqlens, piece.begin);
    const at::Tensor before = sequence_of(*call.cu_seqlens, piece.begin - 1);
    const at::Tensor rows = at::arange(piece.states[0].sym_size(0), number.options());
    resets = resets & number.eq(before) & rows.eq(number);
  }
  for (size_t i = 0; i < piece.states.size(); ++i) {
    std::vector<int64_t> one_each(piece.states[i].dim(), 1);
    one_each[0] = -1;
    const at::Tensor begins = resets.view(one_each);
    const std::optional<at::Tensor> first = call.first ? call.first(i, piece.begin) : std::nullopt;
    piece.states[i] =
        is_present(first) ? at::where(begins, *first, piece.states[i]) : piece.states[i].masked_fill(begins, call.empty[i]);
  }
}

// The offsets of the sequences in a piece. Those that have ended, or not begun, have no steps here: their states pass through.
// The first and the last piece leave the scan to check where cu_seqlens begins and ends.
void cut_sequences(const ScanCall& call, Piece& piece, bool is_last) {
  piece.cu_seqlens = call.cu_seqlens;
  if (!is_present(call.cu_seqlens) || (piece.begin == 0 && is_last)) return;
  const auto low = piece.begin > 0 ? std::optional<at::Scalar>(piece.begin) : std::nullopt;
  const auto high = is_last ? std::nullopt : std::optional<at::Scalar>(piece.end.expect_int());
  piece.cu_seqlens = call.cu_seqlens->clamp(low, high) - piece.begin;
}

// With cu_seqlens, the state at a position, (1, ...), is that of the sequence of the step before it, at 0 of the sequence of
// step 0. `states` has all sequences. A call without steps has no such sequence, and its state is empty.
at::Tensor state_of_sequence(const ScanCall& call, int64_t position, const at::Tensor& states, double empty) {
  if (!is_present(call.cu_seqlens)) return states;
  if (call.seqlen == 0 || states.sym_size(0) == 0) {
    std::vector<c10::SymInt> shape = states.sym_sizes().vec();
    shape[0] = 1;
    return states.new_full_symint(shape, empty);
  }
  const int64_t step = position > 0 ? position - 1 : 0;
  return states.index_select(0, sequence_of(*call.cu_seqlens, step).clamp_max(states.sym_size(0) - 1));
}

at::Tensor join(const ScanCall& call, std::vector<at::Tensor>& outputs) {
  if (outputs.size() == 1) return outputs[0];
  if (!call.is_transposed) return at::cat(outputs, call.axis);
  for (at::Tensor& output : outputs) output = output.transpose(1, 2);
  return at::cat(outputs, 3 - call.axis).transpose(1, 2);
}

}  // namespace

SeveralStatesAt scan_pieces(const ScanCall& call, at::IntArrayRef positions) {
  std::set<int64_t> between;
  for (const int64_t position : positions) {
    if (position > 0 && position < call.seqlen) between.insert(position);
  }
  // Each state's map has all positions but the last one: seqlen may be a symbol. Of packed sequences it has one at each.
  std::vector<std::map<int64_t, at::Tensor>> states(call.empty.size());
  const auto keep = [&](int64_t position, const std::vector<at::Tensor>& values) {
    for (size_t i = 0; i < values.size(); ++i)
      states[i][position] = state_of_sequence(call, position, values[i], call.empty[i]);
  };
  keep(0, call.initial_states);
  std::vector<at::Tensor> outputs;
  Piece piece{0, 0, call.initial_states, {}};
  std::vector<at::Tensor> last;
  try {
    for (auto next = between.begin();; ++next) {
      const bool is_last = next == between.end();
      piece.end = is_last ? call.seqlen : c10::SymInt(*next);
      reset_states(call, piece);
      cut_sequences(call, piece, is_last);
      last = call.scan(piece);
      outputs.push_back(last[0]);
      last.erase(last.begin());
      if (is_last) break;
      keep(*next, last);
      piece.begin = *next;
      piece.states = last;
    }
  } catch (const c10::ValueError&) {
    call.scan({0, call.seqlen, call.initial_states, call.cu_seqlens});  // the message has the sizes of the whole tensors
    throw;
  }
  std::vector<at::Tensor> stacked;
  for (size_t i = 0; i < last.size(); ++i) {
    const auto is_last = [&](int64_t position) { return position > 0 && states[i].count(position) == 0; };
    const auto* const found = std::find_if(positions.begin(), positions.end(), is_last);
    const at::Tensor of_last = state_of_sequence(call, found == positions.end() ? 0 : *found, last[i], call.empty[i]);
    stacked.push_back(stack_states(positions, states[i], of_last, call.empty[i]));
  }
  return {join(call, outputs), std::move(last), std::move(stacked)};
}

}  // namespace ssm_kernels
