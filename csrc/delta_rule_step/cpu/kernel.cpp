// The delta rule's decoding step on the CPU: a state of one head is updated in place, row by row.
//
//   S <- S diag(e^g);  S <- S + beta (v - S k) k^T;  out = S q
//
// The row that a block's rows share, e^g, k and q with its norms and its scale, is prepared once an update. A row of the state
// is then read once for both of its products, <S, k> and <S, q>, and once more to be updated: with d = beta (v - <S, k>) the
// output is <S, q> + d <k, q>. A SIMD lane has a column. Rows that are not contiguous, and states that pass from token to
// token, are copied through scratch memory. This file is compiled once per instruction set.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "common/delta_gates.h"
#include "common/integers.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"
#include "delta_rule_step/cpu/kernels.h"

namespace ssm_kernels::delta_rule_step {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Acc>
Acc sum_of(const Vec<Acc>& values) {
  return at::vec::vec_reduce_all<Acc>([](Vec<Acc>& a, Vec<Acc>& b) { return a + b; }, values);
}

// The part of an update that the rows of a head share. Columns after the last are zero.
template <typename Acc>
struct Update {
  alignas(64) Acc decay[kMaxKeyDim], k[kMaxKeyDim], q[kMaxKeyDim];
  Acc beta, kq;
};

template <typename Input, typename Acc>
struct Reader {
  const StepParams& p;

  Acc at(const void* data, int64_t offset, bool is_input_kind) const {
    return is_input_kind ? static_cast<Acc>(static_cast<const Input*>(data)[offset]) : static_cast<const Acc*>(data)[offset];
  }
  Acc parameter(const ParameterView& view, int64_t head, int64_t column) const {
    return at(view.data, head * view.stride_head + column * view.stride_column, view.is_input_kind);
  }
  int64_t padded() const { return round_up(p.key_dim, Vec<Acc>::size()); }

  // A row of q or k, divided by its norm if that is an option, times `scale`.
  void row(Acc* target, const TokenView& view, int64_t b, int64_t token, int64_t head, Acc scale) const {
    using V = Vec<Acc>;
    const Input* const source = static_cast<const Input*>(view.data) + view.offset(b, token, head);
    if (view.stride_column == 1) {
      load_row(target, source, p.key_dim);
    } else {
      for (int64_t c = 0; c < p.key_dim; ++c) target[c] = static_cast<Acc>(source[c * view.stride_column]);
      std::fill(target + p.key_dim, target + padded(), Acc(0));
    }
    if (p.qk_l2norm) {
      V squares(Acc(0));
      for (int64_t c = 0; c < padded(); c += V::size()) {
        const V x = V::loadu(target + c);
        squares = at::vec::fmadd(x, x, squares);
      }
      scale /= std::sqrt(sum_of<Acc>(squares) + static_cast<Acc>(kNormEpsilon));
    }
    if (scale != Acc(1)) {
      for (int64_t c = 0; c < padded(); c += V::size()) (V::loadu(target + c) * V(scale)).store(target + c);
    }
  }

  // e^g, of all columns.
  void decay(Acc* target, int64_t b, int64_t token, int64_t head) const {
    using V = Vec<Acc>;
    const int64_t columns = p.has_column_gate ? p.key_dim : 1, offset = p.g.offset(b, token, head);
    for (int64_t c = 0; c < columns; ++c) {
      target[c] = at(p.g.data, offset + c * p.g.stride_column, p.g_is_input_kind);
      if (p.dt_bias.data != nullptr) target[c] += parameter(p.dt_bias, head, c);
    }
    const int64_t padded_columns = round_up(columns, V::size());
    std::fill(target + columns, target + padded_columns, Acc(0));
    const V rate = p.A_log.data == nullptr ? V(Acc(1)) : Math<V>::exp(V(parameter(p.A_log, head, 0)));
    for (int64_t c = 0; c < padded_columns; c += V::size()) {
      V g = V::loadu(target + c);
      if (p.has_raw_gate) {
        g = p.is_bounded ? bounded_gate(g, rate, V(static_cast<Acc>(p.gate_lower_bound))) : softplus_gate(g, rate);
      }
      Math<V>::exp(g).store(target + c);
    }
    if (!p.has_column_gate) std::fill(target + 1, target + padded(), target[0]);
  }
};

// Fills in `update` for update i of a token. Only the last one has q.
template <typename Input, typename Acc>
void prepare(const StepParams& p, int64_t b, int64_t token, int64_t head, int64_t i, Update<Acc>& update) {
  using V = Vec<Acc>;
  const Reader<Input, Acc> read{p};
  const int64_t key_head = head / p.heads_per_key(), entry = token * p.updates + i;
  read.row(update.k, p.k, b, entry, key_head, Acc(1));
  if (i == p.updates - 1) {
    read.row(update.q, p.q, b, token, key_head, static_cast<Acc>(p.scale));
  } else {
    std::fill(update.q, update.q + read.padded(), Acc(0));
  }
  V kq(Acc(0));
  for (int64_t c = 0; c < read.padded(); c += V::size()) {
    kq = at::vec::fmadd(V::loadu(update.k + c), V::loadu(update.q + c), kq);
  }
  update.kq = sum_of<Acc>(kq);
  const Acc raw = read.at(p.beta.data, p.beta.offset(b, entry, head), p.beta_is_input_kind);
  alignas(64) Acc strengths[V::size()];
  write_strength(V(raw), p.beta_sigmoid, p.allow_neg_eigval).store(strengths);
  update.beta = strengths[0];
  if (p.g.data != nullptr && i == 0) {
    read.decay(update.decay, b, token, head);
  } else {
    std::fill(update.decay, update.decay + read.padded(), Acc(1));
  }
}

// Updates a contiguous row of the state; returns its output.
template <typename Acc, typename State>
Acc update_row(State* h, int64_t columns, const Update<Acc>& update, Acc v) {
  using V = Vec<Acc>;
  constexpr int64_t kSize = V::size();
  V hk(Acc(0)), hq(Acc(0));
  const auto decayed = [&](int64_t c, int64_t count) {
    const V value = V::loadu(update.decay + c) * load_as<Acc>(h + c, count);
    // A decay of inf makes even a zero state NaN.
    return count == kSize ? value : V::set(V(Acc(0)), value, count);
  };
  for (int64_t c = 0; c < columns; c += kSize) {
    const V value = decayed(c, std::min(kSize, columns - c));
    hk = at::vec::fmadd(value, V::loadu(update.k + c), hk);
    hq = at::vec::fmadd(value, V::loadu(update.q + c), hq);
  }
  const Acc correction = update.beta * (v - sum_of<Acc>(hk));
  for (int64_t c = 0; c < columns; c += kSize) {
    const int64_t count = std::min(kSize, columns - c);
    store_as<Acc>(h + c, at::vec::fmadd(V(correction), V::loadu(update.k + c), decayed(c, count)), count);
  }
  return std::fma(correction, update.kq, sum_of<Acc>(hq));
}

// Copies `rows` rows between a state and contiguous memory.
template <bool to_state, typename State>
void copy_rows(State* state, const StateView& view, State* contiguous, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    State* const strided = state + r * view.stride_row;
    State* const packed = contiguous + r * columns;
    for (int64_t c = 0; c < columns; ++c) {
      if constexpr (to_state) {
        strided[c * view.stride_column] = packed[c];
      } else {
        packed[c] = strided[c * view.stride_column];
      }
    }
  }
}

template <typename Input, typename State>
void run(const StepParams& p, const TokenParams* tokens, const Blocking& blocking, int64_t block, State* scratch) {
  using Acc = AccumulateType<Input>;
  const int64_t row_of_call = block / blocking.blocks_per_head, first_row = block % blocking.blocks_per_head * kBlockRows;
  const int64_t b = row_of_call / p.value_heads, head = row_of_call % p.value_heads;
  const int64_t rows = std::min(kBlockRows, p.value_dim - first_row);
  const auto rows_of = [&](const StateView& view, int64_t slot) {
    return static_cast<State*>(view.data) + slot * view.stride_slot + head * view.stride_head + first_row * view.stride_row;
  };
  const auto out_of = [&](int64_t token) {
    return static_cast<Input*>(p.out.data) + p.out.offset(b, token, head) + first_row * p.out.stride_column;
  };
  const auto clear_out = [&](int64_t token) {
    for (int64_t r = 0; r < rows; ++r) out_of(token)[r * p.out.stride_column] = Input(0);
  };
  Update<Acc> update;
  // One token: the block's rows of the state are `row_stride` apart.
  const auto step = [&](int64_t token, State* states, int64_t row_stride) {
    for (int64_t i = 0; i < p.updates; ++i) {
      prepare<Input, Acc>(p, b, token, head, i, update);
      const Input* const v = static_cast<const Input*>(p.v.data) + p.v.offset(b, token * p.updates + i, head);
      for (int64_t r = 0; r < rows; ++r) {
        const Acc value = static_cast<Acc>(v[(first_row + r) * p.v.stride_column]);
        const Acc y = update_row<Acc, State>(states + r * row_stride, p.key_dim, update, value);
        if (i == p.updates - 1) out_of(token)[r * p.out.stride_column] = static_cast<Input>(y);
      }
    }
  };

  if (tokens == nullptr) {
    const int64_t slot = p.slot(b);
    if (slot < 0) return clear_out(0);
    State* const states = rows_of(p.state, slot);
    if (p.state.stride_column == 1) return step(0, states, p.state.stride_row);
    copy_rows<false>(states, p.state, scratch, rows, p.key_dim);
    step(0, scratch, p.key_dim);
    return copy_rows<true>(states, p.state, scratch, rows, p.key_dim);
  }
  const DecodingRows& decoding = tokens->rows;
  const TokenRange range = decoding.tokens_of(b);
  const int64_t read = decoding.read_slot(b), entry = decoding.intermediate_entry(b);
  if (read >= 0 && range.count > 0) copy_rows<false>(rows_of(p.state, read), p.state, scratch, rows, p.key_dim);
  for (int64_t t = 0; t < range.count; ++t) {
    if (read < 0) {
      clear_out(range.first + t);
      continue;
    }
    step(range.first + t, scratch, p.key_dim);
    const int64_t write = decoding.write_slot(b, t, range.count);
    if (write >= 0) copy_rows<true>(rows_of(p.state, write), p.state, scratch, rows, p.key_dim);
    if (entry < 0) continue;
    State* const target = rows_of(tokens->intermediate, entry) + t * tokens->intermediate_token;
    copy_rows<true>(target, tokens->intermediate, scratch, rows, p.key_dim);
  }
}

}  // namespace

void update_block(const StepParams& p, const TokenParams* tokens, const Blocking& blocking, int64_t block, void* scratch) {
  visit_scalar(p.input_kind, [&](auto input) {
    using Input = decltype(input);
    if (p.state_kind == p.input_kind) return run<Input, Input>(p, tokens, blocking, block, static_cast<Input*>(scratch));
    if constexpr (!std::is_same_v<Input, AccumulateType<Input>>) {
      run<Input, float>(p, tokens, blocking, block, static_cast<float*>(scratch));
    }
  });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&update_block};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::delta_rule_step
