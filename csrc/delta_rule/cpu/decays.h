// The place of a matrix in the tensors of a run, and the decays of a chunk, for cpu/kernel.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/vec_math.h"
#include "delta_rule/cpu/kernels.h"
#include "delta_rule/cpu/small_products.h"

namespace ssm_kernels::delta_rule {
inline namespace CPU_CAPABILITY {

// Its exponential is zero even in float64, and the sum of a chunk is finite.
constexpr double kLowestLogDecay = -800;

struct ChunkPlace {
  const CpuRunParams& p;
  int64_t matrix;

  int64_t steps() const { return p.steps; }
  int64_t reads() const { return p.steps / p.updates; }  // steps after which q reads
  bool is_read(int64_t step) const { return (step + 1) % p.updates == 0; }
  int64_t read_of(int64_t step) const { return (step + 1) / p.updates - 1; }

  // Its part of a tensor that has `size` elements for each matrix, or for each of those of key heads.
  template <typename T>
  T* of(void* data, int64_t size) const {
    return static_cast<T*>(data) + matrix * size;
  }
  template <typename T>
  const T* of(const void* data, int64_t size) const {
    return static_cast<const T*>(data) + matrix * size;
  }
  template <typename T>
  const T* of_key_head(const void* data, int64_t size) const {
    const int64_t head = matrix % p.value_heads / (p.value_heads / p.heads);
    return static_cast<const T*>(data) + (matrix / p.value_heads * p.heads + head) * size;
  }

  // Where sequences begin in the chunk: whether the state before the chunk does not reach the step, the step does not reach the
  // state after it, and the state before it does not reach that after it.
  const int64_t* sequence() const { return p.sequence == nullptr ? nullptr : p.sequence + matrix / p.value_heads * steps(); }
  bool is_after_beginning(int64_t step) const { return sequence() != nullptr && sequence()[step] != 0; }
  bool is_before_beginning(int64_t step) const { return sequence() != nullptr && sequence()[step] != sequence()[steps() - 1]; }
  bool is_cut() const { return is_after_beginning(steps() - 1); }

  template <typename T>
  Rows<const T> k_rows(Scratch& scratch) const {
    return as_rows<T>(scratch, of_key_head<T>(p.k, steps() * p.key_dim), steps(), p.key_dim);
  }
  // q at all steps, zero at those after which it does not read. Other rows of `reads` are treated alike.
  template <typename T>
  Rows<const T> at_steps(Scratch& scratch, const T* rows, int64_t columns) const {
    if (p.updates == 1) return as_rows<T>(scratch, rows, steps(), columns);
    const Rows<T> result = take_rows<T>(scratch, steps(), columns);
    std::fill(result[0], result[steps()], T(0));
    for (int64_t i = 0; i < reads(); ++i) load_row(result[(i + 1) * p.updates - 1], rows + i * columns, columns);
    return result;
  }
  template <typename T>
  Rows<const T> q_rows(Scratch& scratch) const {
    return at_steps(scratch, of_key_head<T>(p.q, reads() * p.key_dim), p.key_dim);
  }
};

// target = body(vectors of the rows), over whole vectors.
template <typename T, typename Body, typename... Sources>
void map_row(T* target, int64_t columns, const Body& body, const Sources*... sources) {
  for (int64_t c = 0; c < columns; c += Vec<T>::size()) body(Vec<T>::loadu(sources + c)...).store(target + c);
}

// The decays of pairs of one gate a head: e^(c_i - c_j) for j <= i. c is fp64, and its differences are accurate to a few
// roundings of T.
template <typename T>
class HeadDecays {
 public:
  HeadDecays(Scratch& scratch, const ChunkPlace& at) : at_(at), steps_(at.steps()) {
    const int64_t length = round_up(steps_, kCpuPadding);
    high_ = scratch.take<T>(length);
    low_ = scratch.take<T>(length);
    from_start_ = scratch.take<double>(length);
    to_end_ = scratch.take<double>(length);
    for (double* const sums : {from_start_, to_end_}) std::fill(sums, sums + length, 0.0);
    const double* const log_decay = at.of<double>(at.p.log_decay, steps_);
    // The comparison lets NaN through.
    const auto bounded = [&](int64_t i) { return log_decay[i] < kLowestLogDecay ? kLowestLogDecay : log_decay[i]; };
    double sum = 0;
    for (int64_t i = 0; i < steps_; ++i) {
      from_start_[i] = sum += bounded(i);
      high_[i] = static_cast<T>(sum);
      low_[i] = static_cast<T>(sum - high_[i]);
    }
    // A difference of sums from the start would be NaN after a NaN of an earlier sequence.
    sum = 0;
    for (int64_t i = steps_; i-- > 0; sum += bounded(i)) to_end_[i] = sum;
    for (double* const sums : {from_start_, to_end_}) {
      map_row(sums, steps_, [](const Vec<double>& x) { return Math<Vec<double>>::exp(x); }, sums);
    }
  }

  // Elements after column i are arbitrary.
  void write_between(int64_t i, T* row) const {
    using V = Vec<T>;
    const V high(high_[i]), low(low_[i]);
    map_row(row, i + 1, [&](const V& h, const V& l) { return Math<V>::exp((high - h) + low - l); }, high_, low_);
    const int64_t* const sequence = at_.sequence();
    if (sequence == nullptr) return;
    for (int64_t j = 0; j <= i; ++j) {
      if (sequence[j] != sequence[i]) row[j] = T(0);
    }
  }

  void write_boundary(T* from_start, T* to_end, T* all) const {
    for (int64_t i = 0; i < steps_; ++i) {
      from_start[i] = at_.is_after_beginning(i) ? T(0) : static_cast<T>(from_start_[i]);
      to_end[i] = at_.is_before_beginning(i) ? T(0) : static_cast<T>(to_end_[i]);
    }
    *all = from_start[steps_ - 1];
  }

 private:
  const ChunkPlace& at_;
  int64_t steps_;
  T *high_, *low_;
  double *from_start_, *to_end_;
};

// The decays of pairs of one gate a channel, by blocks of 2 * half steps: decays from and to the boundary between the halves
// scale rows and columns (aten/pairs.h).
template <typename T>
class ChannelDecays {
 public:
  using V = Vec<T>;

  ChannelDecays(Scratch& scratch, const ChunkPlace& at) : steps_(at.steps()), columns_(at.p.key_dim) {
    since_ = take_rows<T>(scratch, steps_, columns_);
    until_ = take_rows<T>(scratch, steps_, columns_);
    joined_ = scratch.take<T>(padded<T>(columns_));
    const T* const log_decay = at.of<T>(at.p.log_decay, steps_ * columns_);
    for (int64_t i = 0; i < steps_; ++i) load_row(since_[i], log_decay + i * columns_, columns_);
    std::fill(until_[0], until_[steps_], T(0));
  }

  // Calls body(first earlier step, half, first later step, later steps) for all blocks, the shortest first.
  template <typename Body>
  void for_each_block(const Body& body) {
    for (int64_t half = 1; half < steps_; half *= 2) {
      for (int64_t begin = 0; begin + half < steps_; begin += 2 * half) {
        const int64_t later = begin + half, count = std::min(half, steps_ - later);
        body(begin, half, later, count);
        join(begin, half, later, count);
      }
    }
  }

  // From the boundary of a block to after a later step, and from after an earlier step to the boundary; of the whole chunk once
  // all blocks are joined.
  V since(int64_t i, int64_t column) const { return Math<V>::exp(V::loadu(since_[i] + column)); }
  V until(int64_t i, int64_t column) const { return Math<V>::exp(V::loadu(until_[i] + column)); }

 private:
  void join(int64_t begin, int64_t half, int64_t later, int64_t count) {
    const auto add = [&](T* row, const T* sum) {
      map_row(row, columns_, [](const V& a, const V& b) { return a + b; }, row, sum);
    };
    std::copy(since_[later + count - 1], since_[later + count - 1] + padded<T>(columns_), joined_);
    for (int64_t i = 0; i < count; ++i) add(since_[later + i], since_[later - 1]);
    for (int64_t i = 0; i < half; ++i) add(until_[begin + i], joined_);
  }

  int64_t steps_, columns_;
  Rows<T> since_, until_;  // sums of a half's log decays up to a step and after it
  T* joined_;
};

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::delta_rule
