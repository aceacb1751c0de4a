// The matrices of a chunk and its scaled rows, for cpu/kernel.cpp.
#pragma once

#include "delta_rule/cpu/decays.h"

namespace ssm_kernels::delta_rule {
inline namespace CPU_CAPABILITY {

// Products of pairs of steps, (steps, steps): of k below the diagonal, and of q and k on it too.
template <typename T>
struct PairProducts {
  Rows<T> kk, qk;
};

template <typename T>
void head_pairs(const ChunkPlace& at, Scratch& scratch, Rows<const T> q, Rows<const T> k, const PairProducts<T>& products) {
  const int64_t steps = at.steps(), columns = at.p.key_dim;
  const Rows<T> transposed = take_rows<T>(scratch, columns, steps);
  transpose<T>(steps, columns, k, transposed);
  for_each_tile(steps, [&](int64_t i, int64_t rows) {
    multiply<false, T>(rows, i + rows, columns, {k[i], k.row}, transposed, products.kk.from(i));
    multiply<false, T>(rows, i + rows, columns, {q[i], q.row}, transposed, products.qk.from(i));
  });
  if (at.p.gate == CpuGate::kNone) return;
  const HeadDecays<T> decays(scratch, at);
  T* const between = at.of<T>(at.p.between, steps * steps);
  T* const row = scratch.take<T>(padded<T>(steps));
  const auto product = [](const Vec<T>& a, const Vec<T>& b) { return a * b; };
  for (int64_t i = 0; i < steps; ++i) {
    decays.write_between(i, row);
    map_row(products.kk[i], i + 1, product, products.kk[i], row);
    map_row(products.qk[i], i + 1, product, products.qk[i], row);
    std::copy(row, row + i + 1, between + i * steps);
  }
  decays.write_boundary(at.of<T>(at.p.from_start, steps), at.of<T>(at.p.to_end, steps), at.of<T>(at.p.all, 1));
}

template <typename T>
void channel_pairs(const ChunkPlace& at, Scratch& scratch, Rows<const T> q, Rows<const T> k, const PairProducts<T>& products) {
  using V = Vec<T>;
  const int64_t steps = at.steps(), columns = at.p.key_dim;
  ChannelDecays<T> decays(scratch, at);
  const Rows<T> k_rows = take_rows<T>(scratch, steps, columns), q_rows = take_rows<T>(scratch, steps, columns),
                k_columns = take_rows<T>(scratch, steps, columns), transposed = take_rows<T>(scratch, columns, steps),
                pairs = take_rows<T>(scratch, steps, steps);
  decays.for_each_block([&](int64_t earlier, int64_t half, int64_t later, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < columns; c += V::size()) {
        const V decay = decays.since(later + i, c);
        (V::loadu(k[later + i] + c) * decay).store(k_rows[i] + c);
        (V::loadu(q[later + i] + c) * decay).store(q_rows[i] + c);
      }
    }
    for (int64_t i = 0; i < half; ++i) {
      for (int64_t c = 0; c < columns; c += V::size()) {
        (V::loadu(k[earlier + i] + c) * decays.until(earlier + i, c)).store(k_columns[i] + c);
      }
    }
    const Rows<T> of_columns{transposed.data, padded<T>(half)}, of_pairs{pairs.data, padded<T>(half)};
    transpose<T>(half, columns, k_columns, of_columns);
    const auto write = [&](const Rows<T>& rows, const Rows<T>& target) {
      multiply<false, T>(count, half, columns, rows.factor(), of_columns, of_pairs);
      for (int64_t i = 0; i < count; ++i) std::copy(of_pairs[i], of_pairs[i] + half, target[later + i] + earlier);
    };
    write(k_rows, products.kk);
    write(q_rows, products.qk);
  });
  for (int64_t i = 0; i < steps; ++i) products.qk[i][i] = dot(q[i], k[i], columns);

  T* const from_start = at.of<T>(at.p.from_start, steps * columns);
  T* const to_end = at.of<T>(at.p.to_end, steps * columns);
  for (int64_t i = 0; i < steps; ++i) {
    const bool has_start = !at.is_after_beginning(i), has_end = !at.is_before_beginning(i);
    for (int64_t c = 0; c < columns; c += V::size()) {
      const int64_t count = std::min<int64_t>(V::size(), columns - c);
      (has_start ? decays.since(i, c) : V(T(0))).store(from_start + i * columns + c, count);
      (has_end ? decays.until(i, c) : V(T(0))).store(to_end + i * columns + c, count);
    }
  }
  std::copy(from_start + (steps - 1) * columns, from_start + steps * columns, at.of<T>(at.p.all, columns));
}

// `count` elements, and zeros.
template <typename T>
void write_lower(T* target, const T* row, int64_t count, int64_t steps) {
  std::copy(row, row + count, target);
  std::fill(target + count, target + steps, T(0));
}

// M = (I + A)^-1 of A = diag(beta) kk, by forward substitution, tile by tile: rows i of M are e_i - sum_{j < i} A_ij M_j.
template <typename T>
void invert(int64_t steps, Scratch& scratch, Rows<const T> kk, const T* beta, T* M) {
  using V = Vec<T>;
  const Rows<T> negative = take_rows<T>(scratch, steps, steps), inverse = take_rows<T>(scratch, steps, steps);
  std::fill(inverse[0], inverse[steps], T(0));
  for_each_tile(steps, [&](int64_t first, int64_t rows) {
    for (int64_t i = first; i < first + rows; ++i) {
      const V factor(-beta[i]);
      map_row(negative[i], i, [&](const V& x) { return x * factor; }, kk[i]);
    }
    multiply<false, T>(rows, first, first, {negative[first], negative.row}, inverse, inverse.from(first));
    for (int64_t i = first; i < first + rows; ++i) {
      for (int64_t j = first; j < i; ++j) {
        const V factor(negative[i][j]);
        map_row(
            inverse[i], j + 1, [&](const V& a, const V& b) { return at::vec::fmadd(factor, b, a); }, inverse[i], inverse[j]);
      }
      inverse[i][i] = T(1);
      write_lower(M + i * steps, inverse[i], i + 1, steps);
    }
  });
}

// q_in, k_in, k_out and k_read: rows times the decays, (steps, 1 or key_dim).
template <typename T>
void scale_rows(const ChunkPlace& at, Rows<const T> q, Rows<const T> k, const T* beta) {
  using V = Vec<T>;
  const CpuRunParams& p = at.p;
  const int64_t steps = at.steps(), columns = p.key_dim;
  const T *const from_start = at.of<T>(p.from_start, p.gate == CpuGate::kChannel ? steps * columns : steps),
                 *const to_end = at.of<T>(p.to_end, p.gate == CpuGate::kChannel ? steps * columns : steps);
  T* const q_in = at.of<T>(p.q_in, at.reads() * columns);
  T *const k_in = at.of<T>(p.k_in, steps * columns), *const k_out = at.of<T>(p.k_out, steps * columns),
           *const k_read = at.of<T>(p.k_read, steps * columns);
  const auto decay_of = [&](const T* decays, int64_t i, int64_t c, int64_t count) {
    if (p.gate == CpuGate::kNone) return V(T(1));
    return p.gate == CpuGate::kHead ? V(decays[i]) : load_as<T>(decays + i * columns + c, count);
  };
  for (int64_t i = 0; i < steps; ++i) {
    const V strength(beta[i]);
    for (int64_t c = 0; c < columns; c += V::size()) {
      const int64_t count = std::min<int64_t>(V::size(), columns - c), place = i * columns + c;
      const V key = V::loadu(k[i] + c), since = decay_of(from_start, i, c, count), decayed = key * since;
      decayed.store(k_in + place, count);
      (key * decay_of(to_end, i, c, count)).store(k_out + place, count);
      (decayed * strength).store(k_read + place, count);
      if (at.is_read(i)) (V::loadu(q[i] + c) * since).store(q_in + at.read_of(i) * columns + c, count);
    }
  }
}

template <typename T>
void chunk_matrices(const CpuRunParams& p, int64_t matrix, std::byte* memory) {
  const ChunkPlace at{p, matrix};
  Scratch scratch(memory);
  const int64_t steps = p.steps;
  const Rows<const T> k = at.k_rows<T>(scratch), q = at.q_rows<T>(scratch);
  const PairProducts<T> products{take_rows<T>(scratch, steps, steps), take_rows<T>(scratch, steps, steps)};
  if (p.gate == CpuGate::kChannel) {
    channel_pairs(at, scratch, q, k, products);
  } else {
    head_pairs(at, scratch, q, k, products);
  }
  T *const kk = at.of<T>(p.kk, steps * steps), *const P = at.of<T>(p.P, at.reads() * steps);
  for (int64_t i = 0; i < steps; ++i) {
    std::copy(products.kk[i], products.kk[i] + i, kk + i * steps);
    if (at.is_read(i)) write_lower(P + at.read_of(i) * steps, products.qk[i], i + 1, steps);
  }
  const T* const beta = at.of<T>(p.beta, steps);
  invert<T>(steps, scratch, products.kk, beta, at.of<T>(p.M, steps * steps));
  scale_rows(at, q, k, beta);
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::delta_rule
