// The gradients of a chunk, given the states before it and the gradient of that after it, for cpu/kernel.cpp.
#pragma once

#include "delta_rule/cpu/decays.h"

namespace ssm_kernels::delta_rule {
inline namespace CPU_CAPABILITY {

template <typename T>
class ChunkAdjoint {
 public:
  using V = Vec<T>;

  ChunkAdjoint(const CpuRunParams& p, int64_t matrix, std::byte* memory)
      : p_(p), at_{p, matrix}, scratch_(memory), steps_(p.steps), columns_(p.key_dim), values_(p.value_dim) {
    k_ = at_.k_rows<T>(scratch_);
    q_ = at_.q_rows<T>(scratch_);
    for (Rows<T>* const rows : {&YS_, &GS_, &UD_, &grad_q_, &grad_k_}) *rows = take_rows<T>(scratch_, steps_, columns_);
    E_ = take_rows<T>(scratch_, steps_, steps_);
    F_ = take_rows<T>(scratch_, steps_, steps_);
    beta_ = at_.of<T>(p.beta, steps_);
    log_decay_of_pairs_ = scratch_.take<T>(round_up(steps_, kCpuPadding));
  }

  void run() {
    multiply_states();
    write_grad_v();
    multiply_corrections();
    write_grad_beta();
    if (p_.grad_q == nullptr && p_.grad_k == nullptr && p_.grad_log_decay == nullptr) return;
    if (p_.gate == CpuGate::kChannel) {
      channel_pairs();
    } else {
      if (p_.gate == CpuGate::kHead) apply_head_decays();
      head_pairs();
    }
    add_states();
    if (p_.grad_log_decay == nullptr) return;
    if (p_.gate == CpuGate::kChannel) {
      write_channel_log_decay();
    } else {
      write_head_log_decay();
    }
  }

 private:
  int64_t state_size() const { return values_ * columns_; }
  const T* state() const { return at_.of<T>(static_cast<const void*>(p_.states), state_size()); }
  const T* grad_state_after() const {
    const int64_t of_chunk = p_.rows * p_.value_heads * state_size();
    return at_.of<T>(static_cast<const void*>(p_.grad_states), state_size()) + of_chunk;
  }
  const T* of_steps(const void* data) const { return at_.of<T>(data, steps_ * values_); }
  const T* grad_out() const { return at_.of<T>(p_.grad_out, at_.reads() * values_); }
  // The rows after which q reads, of rows of all steps.
  Rows<T> reading(const Rows<T>& rows) const { return {rows[p_.updates - 1], rows.row * p_.updates}; }
  // The rows of the run's matrices.
  const T* row_of(const void* matrices, int64_t i) const { return at_.of<T>(matrices, steps_ * steps_) + i * steps_; }
  const T* row_of_P(int64_t i) const {
    return at_.of<T>(static_cast<const void*>(p_.P), at_.reads() * steps_) + at_.read_of(i) * steps_;
  }

  // Y S, G S and U D, without what a beginning sequence cuts off.
  void multiply_states() {
    Scratch scratch = scratch_;
    const Rows<const T> S = as_rows<T>(scratch, state(), values_, columns_);
    const Rows<const T> D = as_rows<T>(scratch, grad_state_after(), values_, columns_);
    if (p_.updates > 1) std::fill(GS_[0], GS_[steps_], T(0));
    multiply<false, T>(steps_, columns_, values_, {of_steps(p_.Y), values_}, S, YS_);
    multiply<false, T>(at_.reads(), columns_, values_, {grad_out(), values_}, S, reading(GS_));
    multiply<false, T>(steps_, columns_, values_, {of_steps(p_.U), values_}, D, UD_);
    const auto clear = [&](T* row) { std::fill(row, row + padded<T>(columns_), T(0)); };
    for (int64_t i = 0; i < steps_; ++i) {
      if (at_.is_after_beginning(i)) {
        clear(YS_[i]);
        clear(GS_[i]);
      }
      if (at_.is_before_beginning(i)) clear(UD_[i]);
    }
  }

  void write_grad_v() const {
    if (p_.grad_v == nullptr) return;
    const T* const Y = of_steps(p_.Y);
    T* const target = at_.of<T>(p_.grad_v, steps_ * values_);
    for (int64_t i = 0; i < steps_; ++i) {
      const V strength(beta_[i]);
      for (int64_t c = 0; c < values_; c += V::size()) {
        const int64_t count = std::min<int64_t>(V::size(), values_ - c), place = i * values_ + c;
        (load_as<T>(Y + place, count) * strength).store(target + place, count);
      }
    }
  }

  // E: Y U^T below the diagonal; F: G U^T, on it too. Other elements are arbitrary.
  void multiply_corrections() {
    Scratch scratch = scratch_;
    const Rows<T> transposed = take_rows<T>(scratch, values_, steps_);
    transpose<T>(steps_, values_, as_rows<T>(scratch, of_steps(p_.U), steps_, values_), transposed);
    const Factor<T> Y{of_steps(p_.Y), values_}, G{grad_out(), values_};
    for_each_tile(steps_, [&](int64_t i, int64_t count) {
      multiply<false, T>(count, i + count, values_, Y.from(i, 0), transposed, E_.from(i));
    });
    const Rows<T> F = reading(F_);
    for_each_tile(at_.reads(), [&](int64_t i, int64_t count) {
      multiply<false, T>(count, (i + count) * p_.updates, values_, G.from(i, 0), transposed, F.from(i));
    });
  }

  // With dA = -Y U^T. Then makes E the gradient of kk, diag(beta) dA, and F that of P, with zeros elsewhere.
  void write_grad_beta() {
    const T *const Y = of_steps(p_.Y), *const v = of_steps(p_.v);
    T* const target = p_.grad_beta == nullptr ? nullptr : at_.of<T>(p_.grad_beta, steps_);
    for (int64_t i = 0; i < steps_; ++i) {
      if (target != nullptr) {
        const T of_state =
            dot(YS_[i], at_.of<T>(static_cast<const void*>(p_.k_in), steps_ * columns_) + i * columns_, columns_);
        target[i] = dot(Y + i * values_, v + i * values_, values_) - of_state - dot<T>(E_[i], row_of(p_.kk, i), i);
      }
      const V factor(-beta_[i]);
      map_row(E_[i], i, [&](const V& x) { return x * factor; }, E_[i]);
      std::fill(E_[i] + i, E_[i] + padded<T>(steps_), T(0));
      T* const end_of_F = F_[i] + (at_.is_read(i) ? i + 1 : 0);
      std::fill(end_of_F, F_[i] + padded<T>(steps_), T(0));
    }
  }

  // The gradient of the log decays by pairs, sum_{j < t <= i} of E kk + F P, from the last step to the first; then E and F
  // times the decays.
  void apply_head_decays() {
    Scratch scratch = scratch_;
    T* const sums = scratch.take<T>(padded<T>(steps_));  // over the rows so far
    std::fill(sums, sums + padded<T>(steps_), T(0));
    for (int64_t i = steps_; i-- > 0;) {
      const T *const kk = row_of(p_.kk, i), *const between = row_of(p_.between, i);
      const T* const P = at_.is_read(i) ? row_of_P(i) : nullptr;
      V total(T(0));
      for (int64_t j = 0; j <= i; j += V::size()) {
        const int64_t size = V::size(), before = std::min(size, i - j), count = std::min(size, i + 1 - j);
        const V of_E = V::loadu(E_[i] + j), of_F = V::loadu(F_[i] + j), decay = load_as<T>(between + j, count);
        if (before > 0) {
          V sum = at::vec::fmadd(of_E, load_as<T>(kk + j, before), V::loadu(sums + j));
          if (P != nullptr) sum = at::vec::fmadd(of_F, load_as<T>(P + j, before), sum);
          sum.store(sums + j);
          total = total + (before == size ? sum : V::set(V(T(0)), sum, before));
        }
        (of_E * decay).store(E_[i] + j);
        (of_F * decay).store(F_[i] + j);
      }
      log_decay_of_pairs_[i] = sum_of<T>(total);
    }
  }

  void head_pairs() {
    for_each_tile(steps_, [&](int64_t i, int64_t count) {
      const Factor<T> E_columns{E_[i] + i, 1, E_.row}, F_columns{F_[i] + i, 1, F_.row};
      multiply<false, T>(count, columns_, i + count, {F_[i], F_.row}, k_, grad_q_.from(i));
      multiply<false, T>(count, columns_, i + count, {E_[i], E_.row}, k_, grad_k_.from(i));
      multiply<true, T>(count, columns_, steps_ - i, E_columns, k_.from(i), grad_k_.from(i));
      multiply<true, T>(count, columns_, steps_ - i, F_columns, q_.from(i), grad_k_.from(i));
    });
  }

  void channel_pairs() {
    grad_g_ = take_rows<T>(scratch_, steps_, columns_);
    Scratch scratch = scratch_;
    ChannelDecays<T> decays(scratch, at_);
    const int64_t half_steps = (steps_ + 1) / 2 * 2;
    const auto take = [&] { return take_rows<T>(scratch, half_steps, columns_); };
    const Rows<T> of_later = take(), k_rows = take(), q_rows = take(), k_columns = take(), of_k = take(), of_q = take();
    for (int64_t i = 0; i < steps_; ++i) {
      const V diagonal(F_[i][i]);
      const auto times = [&](const V& x) { return x * diagonal; };
      map_row(grad_q_[i], columns_, times, k_[i]);
      map_row(grad_k_[i], columns_, times, q_[i]);
    }
    std::fill(grad_g_[0], grad_g_[steps_], T(0));
    decays.for_each_block([&](int64_t earlier, int64_t half, int64_t later, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t c = 0; c < columns_; c += V::size()) {
          const V decay = decays.since(later + i, c);
          decay.store(of_later[i] + c);
          (V::loadu(k_[later + i] + c) * decay).store(k_rows[i] + c);
          (V::loadu(q_[later + i] + c) * decay).store(q_rows[i] + c);
        }
      }
      for (int64_t j = 0; j < half; ++j) {
        for (int64_t c = 0; c < columns_; c += V::size()) {
          (V::loadu(k_[earlier + j] + c) * decays.until(earlier + j, c)).store(k_columns[j] + c);
        }
      }
      const Factor<T> E{E_[later] + earlier, E_.row}, F{F_[later] + earlier, F_.row};
      multiply<false, T>(count, columns_, half, E, k_columns, of_k);
      multiply<false, T>(count, columns_, half, F, k_columns, of_q);
      for (int64_t c = 0; c < columns_; c += V::size()) {
        V sum(T(0));  // from the last step
        for (int64_t i = count; i-- > 0;) {
          const V decay = V::loadu(of_later[i] + c), k_grad = V::loadu(of_k[i] + c), q_grad = V::loadu(of_q[i] + c);
          add_product(grad_k_[later + i] + c, k_grad, decay);
          add_product(grad_q_[later + i] + c, q_grad, decay);
          sum = at::vec::fmadd(V::loadu(k_rows[i] + c), k_grad, sum);
          sum = at::vec::fmadd(V::loadu(q_rows[i] + c), q_grad, sum);
          T* const target = grad_g_[later + i] + c;
          (V::loadu(target) + sum).store(target);
        }
      }
      multiply<false, T>(half, columns_, count, E.transposed(), k_rows, of_k);
      multiply<true, T>(half, columns_, count, F.transposed(), q_rows, of_k);
      for (int64_t c = 0; c < columns_; c += V::size()) {
        V sum(T(0));  // of the steps before
        for (int64_t j = 0; j < half; ++j) {
          T* const target = grad_g_[earlier + j] + c;
          (V::loadu(target) + sum).store(target);
          const V grad = V::loadu(of_k[j] + c);
          sum = at::vec::fmadd(V::loadu(k_columns[j] + c), grad, sum);
          add_product(grad_k_[earlier + j] + c, grad, decays.until(earlier + j, c));
        }
      }
    });
  }

  static void add_product(T* target, const V& a, const V& b) { at::vec::fmadd(a, b, V::loadu(target)).store(target); }

  V decay_of(const void* decays, int64_t i, int64_t c, int64_t count) const {
    if (p_.gate == CpuGate::kNone) return V(T(1));
    if (p_.gate == CpuGate::kHead) return V(at_.of<T>(decays, steps_)[i]);
    return load_as<T>(at_.of<T>(decays, steps_ * columns_) + i * columns_ + c, count);
  }

  // Adds the gradients of q and k through the states, and writes them. Then YS has the products of q_in and k_in with their
  // gradients, and UD those of k_out, which pass over steps.
  void add_states() {
    T* const grad_q = p_.grad_q == nullptr ? nullptr : at_.of<T>(p_.grad_q, at_.reads() * columns_);
    T* const grad_k = p_.grad_k == nullptr ? nullptr : at_.of<T>(p_.grad_k, steps_ * columns_);
    for (int64_t i = 0; i < steps_; ++i) {
      const V negative(-beta_[i]);
      for (int64_t c = 0; c < columns_; c += V::size()) {
        const int64_t count = std::min<int64_t>(V::size(), columns_ - c);
        const V start = decay_of(p_.from_start, i, c, count), end = decay_of(p_.to_end, i, c, count);
        const V of_q = V::loadu(GS_[i] + c) * start, of_k = V::loadu(YS_[i] + c) * negative * start;
        const V of_k_out = V::loadu(UD_[i] + c) * end, key = V::loadu(k_[i] + c);
        if (grad_q != nullptr && at_.is_read(i)) {
          (V::loadu(grad_q_[i] + c) + of_q).store(grad_q + at_.read_of(i) * columns_ + c, count);
        }
        if (grad_k != nullptr) (V::loadu(grad_k_[i] + c) + (of_k + of_k_out)).store(grad_k + i * columns_ + c, count);
        at::vec::fmadd(V::loadu(q_[i] + c), of_q, of_k * key).store(YS_[i] + c);
        (of_k_out * key).store(UD_[i] + c);
      }
    }
  }

  T sum_of_row(const T* row) const {
    V sum(T(0));
    for (int64_t c = 0; c < columns_; c += V::size()) {
      const int64_t count = std::min<int64_t>(V::size(), columns_ - c);
      sum = sum + load_as<T>(row + c, count);
    }
    return sum_of<T>(sum);
  }

  // A step's gradient sums the terms that pass over it: from the state before the chunk to later steps, from earlier steps to
  // the state after the chunk, and from state to state.
  void write_head_log_decay() const {
    double* const target = at_.of<double>(p_.grad_log_decay, steps_);
    double all = 0;
    if (!at_.is_cut()) {
      for (int64_t r = 0; r < values_; ++r) all += dot(state() + r * columns_, grad_state_after() + r * columns_, columns_);
      all *= *at_.of<T>(static_cast<const void*>(p_.all), 1);
    }
    double sum = 0;
    for (int64_t i = steps_; i-- > 0;) target[i] = (sum += sum_of_row(YS_[i])) + log_decay_of_pairs_[i] + all;
    sum = 0;
    for (int64_t i = 0; i < steps_; sum += sum_of_row(UD_[i++])) target[i] += sum;
  }

  void write_channel_log_decay() {
    T* const target = at_.of<T>(p_.grad_log_decay, steps_ * columns_);
    const int64_t size = padded<T>(columns_);
    double* const sums = scratch_.take<double>(size);
    double* const all = scratch_.take<double>(size);
    const T* const decays = at_.of<T>(static_cast<const void*>(p_.all), columns_);
    for (double* const row : {sums, all}) std::fill(row, row + size, 0.0);
    for (int64_t r = 0; r < values_ && !at_.is_cut(); ++r) {
      const T *const S = state() + r * columns_, *const D = grad_state_after() + r * columns_;
      for (int64_t c = 0; c < columns_; ++c) all[c] += static_cast<double>(S[c]) * D[c];
    }
    for (int64_t c = 0; c < columns_ && !at_.is_cut(); ++c) all[c] *= decays[c];
    for (int64_t i = 0; i < steps_; ++i) {
      const T *const to_end = UD_[i], *const of_pairs = grad_g_[i];
      T* const result = target + i * columns_;
      for (int64_t c = 0; c < columns_; ++c) {
        result[c] = static_cast<T>(all[c] + sums[c] + of_pairs[c]);
        sums[c] += to_end[c];
      }
    }
    std::fill(sums, sums + size, 0.0);
    for (int64_t i = steps_; i-- > 0;) {
      const T* const from_start = YS_[i];
      T* const result = target + i * columns_;
      for (int64_t c = 0; c < columns_; ++c) {
        sums[c] += from_start[c];
        result[c] = static_cast<T>(result[c] + sums[c]);
      }
    }
  }

  const CpuRunParams& p_;
  const ChunkPlace at_;
  Scratch scratch_;
  const int64_t steps_, columns_, values_;
  const T* beta_;
  Rows<const T> k_, q_;
  Rows<T> YS_, GS_, UD_, E_, F_, grad_q_, grad_k_, grad_g_;
  T* log_decay_of_pairs_;
};

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::delta_rule
