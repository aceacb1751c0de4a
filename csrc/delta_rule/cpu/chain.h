// The chain of a run's chunks for some rows of a head's state, forward and backward, for cpu/kernel.cpp.
#pragma once

#include "delta_rule/cpu/decays.h"

namespace ssm_kernels::delta_rule {
inline namespace CPU_CAPABILITY {

// The rows of a state that a chain has, and what it reads and writes for a chunk.
template <typename T>
class Chain {
 public:
  using V = Vec<T>;

  Chain(const CpuRunParams& p, int64_t chain)
      : p(p),
        of_run(chain / p.chains_of_head()),
        first(chain % p.chains_of_head() * p.chain_rows),
        rows(std::min(p.chain_rows, p.value_dim - first)) {}

  ChunkPlace place(int64_t chunk) const { return {p, chunk * p.rows * p.value_heads + of_run}; }
  int64_t state_size() const { return p.value_dim * p.key_dim; }

  // The chain's rows of the state before a chunk.
  T* state(void* states, int64_t chunk) const {
    return static_cast<T*>(states) + place(chunk).matrix * state_size() + first * p.key_dim;
  }
  // The chain's columns of rows of steps.
  template <typename Data>
  auto of_steps(const ChunkPlace& at, Data* data, int64_t steps) const {
    return at.of<T>(data, steps * p.value_dim) + first;
  }

  // The transpose of the chain's rows of a state, (key_dim, rows).
  void transpose_state(const T* state, Scratch scratch, const Rows<T>& target) const {
    transpose<T>(rows, p.key_dim, as_rows<T>(scratch, state, rows, p.key_dim), target);
  }

  // target = state times the decay of the chunk; zero where a sequence begins in it.
  template <bool adds>
  void decay_state(const ChunkPlace& at, const T* state, T* target) const {
    const int64_t columns = p.key_dim;
    const T* const decays = at.of<T>(static_cast<const void*>(p.all), p.gate == CpuGate::kChannel ? columns : 1);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < columns; c += V::size()) {
        const int64_t count = std::min<int64_t>(V::size(), columns - c);
        V value = load_as<T>(state + i * columns + c, count);
        if (at.is_cut()) {
          value = V(T(0));
        } else if (p.gate != CpuGate::kNone) {
          value = value * (p.gate == CpuGate::kHead ? V(*decays) : load_as<T>(decays + c, count));
        }
        T* const place = target + i * columns + c;
        if (adds) value = value + load_as<T>(place, count);
        value.store(place, count);
      }
    }
  }

  // Adds the product of (steps, rows), transposed, and (steps, key_dim) to the state.
  void add_product(int64_t steps, Rows<const T> left, const void* right, T* state, Scratch scratch) const {
    const int64_t columns = p.key_dim;
    const Rows<const T> rows_of_steps = as_rows<T>(scratch, right, steps, columns);
    const Factor<T> factor{left.data, 1, left.row};
    if (padded<T>(columns) == columns) return multiply<true, T>(rows, columns, steps, factor, rows_of_steps, {state, columns});
    const Rows<T> sums = take_rows<T>(scratch, rows, columns);
    for (int64_t i = 0; i < rows; ++i) load_row(sums[i], state + i * columns, columns);
    multiply<true, T>(rows, columns, steps, factor, rows_of_steps, sums);
    for (int64_t i = 0; i < rows; ++i) store_row(state + i * columns, sums[i], columns);
  }

  void clear(T* row) const { std::fill(row, row + padded<T>(rows), T(0)); }

  const CpuRunParams& p;
  const int64_t of_run, first, rows;
};

template <typename T>
void run_chain(const CpuRunParams& p, int64_t index, std::byte* memory) {
  using V = Vec<T>;
  const Chain<T> chain(p, index);
  Scratch scratch(memory);
  const int64_t steps = p.steps, rows = chain.rows;
  const Rows<T> state_columns = take_rows<T>(scratch, p.key_dim, rows), errors = take_rows<T>(scratch, steps, rows),
                U = take_rows<T>(scratch, steps, rows);
  for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
    const ChunkPlace at = chain.place(chunk);
    const T* const state = chain.state(p.states, chunk);
    chain.transpose_state(state, scratch, state_columns);
    const T *const k_read = at.of<T>(p.k_read, steps * p.key_dim), *const beta = at.of<T>(p.beta, steps);
    multiply<false, T>(steps, rows, p.key_dim, {k_read, p.key_dim}, state_columns, errors);
    const T* const v = chain.of_steps(at, p.v, steps);
    for (int64_t i = 0; i < steps; ++i) {
      if (at.is_after_beginning(i)) chain.clear(errors[i]);
      const V strength(beta[i]);
      for (int64_t c = 0; c < rows; c += V::size()) {
        const V written = load_as<T>(v + i * p.value_dim + c, std::min<int64_t>(V::size(), rows - c)) * strength;
        (written - V::loadu(errors[i] + c)).store(errors[i] + c);
      }
    }
    const T* const M = at.of<T>(p.M, steps * steps);
    for_each_tile(steps, [&](int64_t i, int64_t count) {
      multiply<false, T>(count, rows, i + count, {M + i * steps, steps}, errors, U.from(i));
    });
    T* const stored = chain.of_steps(at, p.U, steps);
    for (int64_t i = 0; i < steps; ++i) store_row(stored + i * p.value_dim, U[i], rows);

    if (p.out != nullptr) {
      const int64_t reads = at.reads();
      const Rows<T> out = errors;
      multiply<false, T>(reads, rows, p.key_dim, {at.of<T>(p.q_in, reads * p.key_dim), p.key_dim}, state_columns, out);
      const T* const P = at.of<T>(p.P, reads * steps);
      T* const target = chain.of_steps(at, p.out, reads);
      for_each_tile(reads, [&](int64_t first, int64_t count) {
        for (int64_t i = first; i < first + count; ++i) {
          if (at.is_after_beginning((i + 1) * p.updates - 1)) chain.clear(out[i]);
        }
        multiply<true, T>(count, rows, (first + count) * p.updates, {P + first * steps, steps}, U, out.from(first));
        for (int64_t i = first; i < first + count; ++i) store_row(target + i * p.value_dim, out[i], rows);
      });
    }

    for (int64_t i = 0; i < steps; ++i) {
      if (at.is_before_beginning(i)) chain.clear(U[i]);
    }
    T* const next = chain.state(p.states, chunk + 1);
    chain.template decay_state<false>(at, state, next);
    chain.add_product(steps, U, at.of<T>(p.k_out, steps * p.key_dim), next, scratch);
  }
}

template <typename T>
void run_chain_adjoint(const CpuRunParams& p, int64_t index, std::byte* memory) {
  using V = Vec<T>;
  const Chain<T> chain(p, index);
  Scratch scratch(memory);
  const int64_t steps = p.steps, rows = chain.rows, reads = steps / p.updates;
  const Rows<T> state_columns = take_rows<T>(scratch, p.key_dim, rows), grad_U = take_rows<T>(scratch, steps, rows),
                Y = take_rows<T>(scratch, steps, rows), grad_out = take_rows<T>(scratch, reads, rows);
  for (int64_t chunk = p.chunks; chunk-- > 0;) {
    const ChunkPlace at = chain.place(chunk);
    const T* const after = chain.state(p.grad_states, chunk + 1);
    chain.transpose_state(after, scratch, state_columns);
    multiply<false, T>(steps, rows, p.key_dim, {at.of<T>(p.k_out, steps * p.key_dim), p.key_dim}, state_columns, grad_U);
    for (int64_t i = 0; i < steps; ++i) {
      if (at.is_before_beginning(i)) chain.clear(grad_U[i]);
    }
    const T *const of_out = chain.of_steps(at, p.grad_out, reads), *const P = at.of<T>(p.P, reads * steps);
    for (int64_t i = 0; i < reads; ++i) load_row(grad_out[i], of_out + i * p.value_dim, rows);
    for_each_tile(steps, [&](int64_t j, int64_t count) {
      const int64_t read = j / p.updates;  // the first one at step j or after it
      multiply<true, T>(count, rows, reads - read, {P + read * steps + j, 1, steps}, grad_out.from(read), grad_U.from(j));
    });
    const T* const M = at.of<T>(p.M, steps * steps);
    for_each_tile(steps, [&](int64_t j, int64_t count) {
      multiply<false, T>(count, rows, steps - j, {M + j * steps + j, 1, steps}, grad_U.from(j), Y.from(j));
    });
    T* const stored = chain.of_steps(at, p.Y, steps);
    for (int64_t i = 0; i < steps; ++i) store_row(stored + i * p.value_dim, Y[i], rows);

    T* const before = chain.state(p.grad_states, chunk);
    chain.template decay_state<true>(at, after, before);
    for (int64_t i = 0; i < reads; ++i) {
      if (at.is_after_beginning((i + 1) * p.updates - 1)) chain.clear(grad_out[i]);
    }
    chain.add_product(reads, grad_out, at.of<T>(p.q_in, reads * p.key_dim), before, scratch);
    for (int64_t i = 0; i < steps; ++i) {
      if (at.is_after_beginning(i)) {
        chain.clear(Y[i]);
      } else {
        map_row(Y[i], rows, [](const V& y) { return y.neg(); }, Y[i]);
      }
    }
    chain.add_product(steps, Y, at.of<T>(p.k_read, steps * p.key_dim), before, scratch);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::delta_rule
