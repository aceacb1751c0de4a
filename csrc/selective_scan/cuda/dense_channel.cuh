// Shared by forward and backward of selective_scan_dense in fp32 with up to 16 states: a channel to a thread.
//
// A warp is a block and takes kChannels channels, its tile, through time. A thread has the matrix T of its channel in
// registers: a product with T, or a solve, needs no other thread. The rotations by the orthogonal Q of a channel are products
// on tensor cores in 3xTF32 (cuda/mma_tf32x3.cuh), of kSteps steps at once, and their results go through shared memory.
//
// T is taken as blocks of two rows: the reduction has moved the pairs of complex eigenvalues to even rows, and other blocks
// hold two real eigenvalues, with zero below the diagonal. A solve takes the blocks from the last to the first, by the inverse
// of each.
#pragma once

#include <type_traits>

#include "common/activations.h"
#include "cuda/constants.h"
#include "cuda/mma_tf32x3.cuh"
#include "cuda/vector_io.cuh"
#include "selective_scan/cuda/dense_launch.h"
#include "selective_scan/cuda/dense_shared.cuh"

namespace ssm_kernels::selective_scan::dense::channel {

constexpr int kStates = 16, kChannels = kWarpSize, kSteps = 8, kParts = kStates / 4;
static_assert(kChannels == kThreadChannels, "the host divides the channels into tiles of a warp");
static_assert(kDenseChunk == 2 * kSteps, "backward computes a chunk as two halves");
static_assert(kSteps == 8 && kStates == 16,
              "one mma has the steps of two operands as rows, and two have all states as columns");

struct alignas(16) Part {
  float values[4];
};

// A vector of states for each row and channel. The order of the parts avoids bank conflicts where a thread reads its channel's
// vector and where a warp reads or writes eight rows of a channel as an operand of an mma.
struct Vectors {
  Part* parts;

  // Part 0; part i is at this index ^ i.
  static __device__ __forceinline__ int place(int row, int channel) {
    return row * (kChannels * kParts) + (channel ^ (row & 1)) * kParts + ((channel >> 1 & 3) ^ (row & 2));
  }
  __device__ __forceinline__ Part& part(int row, int channel, int i) const { return parts[place(row, channel) ^ i]; }
  __device__ __forceinline__ float& at(int row, int channel, int state) const {
    return parts[place(row, channel) ^ state / 4].values[state % 4];
  }
  // Calls body(state, value) for each state.
  template <typename Body>
  __device__ __forceinline__ void visit(int row, int channel, const Body& body) const {
    const int begin = place(row, channel);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const Part part = parts[begin ^ i];
#pragma unroll
      for (int j = 0; j < 4; ++j) body(4 * i + j, part.values[j]);
    }
  }
  template <typename Value>
  __device__ __forceinline__ void store(int row, int channel, const Value& value) const {
    const int begin = place(row, channel);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      Part part;
#pragma unroll
      for (int j = 0; j < 4; ++j) part.values[j] = value(4 * i + j);
      parts[begin ^ i] = part;
    }
  }
};

// The thread's channel.
struct Place {
  int64_t first, d, matrix;
  int count, lane;
  bool is_active;

  __device__ __forceinline__ Place(const DenseParams& dense, int64_t tile) {
    first = dense.tiles.first_channel(tile);
    count = static_cast<int>(dense.tiles.count(tile));
    lane = static_cast<int>(threadIdx.x);
    is_active = lane < count;
    // Threads without a channel compute the last one, and store nothing.
    d = first + (is_active ? lane : count - 1);
    matrix = dense.matrix(d);
  }
};

__device__ __forceinline__ const Part* matrix_parts(const void* matrices, int64_t index) {
  return static_cast<const Part*>(matrices) + index * (kStates * kParts);
}

// T of a channel: entries (i, k) with k >= i - i % 2.
struct Transition {
  float T[kStates][kStates];

  __device__ __forceinline__ void load(const DenseParams& dense, const Place& place) {
    const Part* const rows = matrix_parts(dense.T, place.matrix);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
#pragma unroll
      for (int part = i / 4; part < kParts; ++part) {
        const Part four = rows[i * kParts + part];
#pragma unroll
        for (int j = 0; j < 4; ++j) T[i][4 * part + j] = four.values[j];
      }
    }
  }

  // x becomes T x.
  __device__ __forceinline__ void multiply(float (&x)[kStates]) const {
#pragma unroll
    for (int i = 0; i < kStates; i += 2) {
      float first = T[i][i] * x[i], second = T[i + 1][i] * x[i];
#pragma unroll
      for (int k = i + 1; k < kStates; ++k) {
        first = Math<float>::fma(T[i][k], x[k], first);
        second = Math<float>::fma(T[i + 1][k], x[k], second);
      }
      x[i] = first;
      x[i + 1] = second;
    }
  }
  // b becomes the solution of (I - c T) x = b, or of the transposed system.
  template <bool kTransposed>
  __device__ __forceinline__ void solve(float c, float (&b)[kStates]) const {
#pragma unroll
    for (int step = 0; step < kStates; step += 2) {
      const int i = kTransposed ? step : kStates - 2 - step;
      const float first = Math<float>::fma(-c, T[i][i], 1.0f), second = Math<float>::fma(-c, T[i + 1][i + 1], 1.0f);
      const float above = c * (kTransposed ? T[i + 1][i] : T[i][i + 1]), below = c * (kTransposed ? T[i][i + 1] : T[i + 1][i]);
      const float inverse = Math<float>::reciprocal(Math<float>::fma(first, second, -above * below));
      const float x = Math<float>::fma(second, b[i], above * b[i + 1]) * inverse;
      const float y = Math<float>::fma(first, b[i + 1], below * b[i]) * inverse;
      b[i] = x;
      b[i + 1] = y;
      const float cx = c * x, cy = c * y;
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        if (kTransposed ? k < i + 2 : k >= i) continue;
        const float a = kTransposed ? T[i][k] : T[k][i], a_next = kTransposed ? T[i + 1][k] : T[k][i + 1];
        b[k] = Math<float>::fma(a, cx, Math<float>::fma(a_next, cy, b[k]));
      }
    }
  }
};

// x becomes M x, with M by its rows, for the channel of the thread alone: at the borders of a call.
__device__ __forceinline__ void apply(const void* matrices, const Place& place, float (&x)[kStates]) {
  const Part* const rows = matrix_parts(matrices, place.matrix);
  float result[kStates];
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    result[i] = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Part four = rows[i * kParts + part];
#pragma unroll
      for (int j = 0; j < 4; ++j) result[i] = Math<float>::fma(four.values[j], x[4 * part + j], result[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kStates; ++i) x[i] = result[i];
}

// A row of a (rows, dim, dstate) tensor, or zero.
__device__ __forceinline__ void load_state(const SelectiveScanParams& p, const void* data, int64_t offset, int64_t stride,
                                           float (&h)[kStates]) {
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    h[i] = data != nullptr && i < p.dstate ? static_cast<const float*>(data)[offset + i * stride] : 0.0f;
  }
}
// To a contiguous one.
__device__ __forceinline__ void store_state(const SelectiveScanParams& p, const Place& place, void* data, int64_t row,
                                            const float (&h)[kStates]) {
  if (!place.is_active) return;
  float* const to = static_cast<float*>(data) + (row * p.dim + place.d) * p.dstate;
  if (p.dstate == kStates && reinterpret_cast<uintptr_t>(data) % sizeof(Part) == 0) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      *reinterpret_cast<Part*>(to + 4 * part) = {h[4 * part], h[4 * part + 1], h[4 * part + 2], h[4 * part + 3]};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    if (i < p.dstate) to[i] = h[i];
  }
}

// Values of kSteps steps of the thread's channel; `steps` of them exist. A vector where eight steps are contiguous and aligned.
template <typename Scalar>
__device__ __forceinline__ Scalar* step_pointer(const SequenceView& view, int64_t batch, int64_t d, int64_t begin) {
  return static_cast<Scalar*>(view.data) + batch * view.stride_batch + d * view.stride_dim + begin * view.stride_step;
}
template <typename Scalar>
__device__ __forceinline__ bool is_vector(const SequenceView& view, const Scalar* at, int steps) {
  return view.stride_step == 1 && steps == kSteps && reinterpret_cast<uintptr_t>(at) % 16 == 0;
}
template <typename Scalar>
__device__ __forceinline__ void load_steps(const SequenceView& view, int64_t batch, int64_t d, int64_t begin, int steps,
                                           float (&values)[kSteps]) {
  const Scalar* const from = step_pointer<const Scalar>(view, batch, d, begin);
  if (is_vector(view, from, steps)) {
    const auto vector = cuda::Vector<Scalar, kSteps>::load(from);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) values[s] = vector.accumulate(s);
    return;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) values[s] = s < steps ? cuda::to_accumulate(from[s * view.stride_step]) : 0.0f;
}
template <typename Scalar>
__device__ __forceinline__ void store_steps(const SequenceView& view, int64_t batch, int64_t d, int64_t begin, int steps,
                                            const float (&values)[kSteps]) {
  Scalar* const to = step_pointer<Scalar>(view, batch, d, begin);
  if (is_vector(view, static_cast<const Scalar*>(to), steps)) {
    cuda::Vector<Scalar, kSteps>::round(values).store(to);
    return;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (s < steps) to[s * view.stride_step] = cuda::from_accumulate<Scalar>(values[s]);
  }
}

// B or C of kSteps steps, as given: element 32 k + lane of (states, steps), or of (steps, states).
struct Raw {
  float values[kSteps][kStates];

  template <typename Scalar>
  __device__ __forceinline__ void load(const SelectiveScanParams& p, const MatrixView& view, int64_t batch, int64_t first,
                                       int64_t begin, int steps) {
    const bool along_steps = is_along_steps(view.stride_step);
    const Scalar* const from = static_cast<const Scalar*>(view.data) + batch * view.stride_batch +
                               first / (p.dim / view.groups) * view.stride_channel + begin * view.stride_step;
    float loaded[kSteps * kStates / kWarpSize];
    const auto visit = [&](const auto& body) {
#pragma unroll
      for (int k = 0; k < kSteps * kStates / kWarpSize; ++k) {
        const int i = k * kWarpSize + static_cast<int>(threadIdx.x);
        body(k, along_steps ? i % kSteps : i / kStates, along_steps ? i / kSteps : i % kStates);
      }
    };
    visit([&](int k, int s, int i) {
      loaded[k] = s < steps && i < p.dstate ? cuda::to_accumulate(from[i * view.stride_state + s * view.stride_step]) : 0.0f;
    });
    visit([&](int k, int s, int i) { values[s][i] = loaded[k]; });
  }
  // Part lane % 4 of step lane / 4.
  __device__ __forceinline__ Part part() const {
    return *reinterpret_cast<const Part*>(&values[threadIdx.x / 4][threadIdx.x % 4 * 4]);
  }
};

// Two parts as the A operands of the two products over half of the states each: rows `above`, and below them `below`.
__device__ __forceinline__ void prepare_rows(const Part& above, const Part& below, cuda::Tf32A (&a)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float values[4] = {above.values[2 * half], below.values[2 * half], above.values[2 * half + 1],
                             below.values[2 * half + 1]};
    a[half].prepare(values);
  }
}

// A row of a matrix as the B operands of these products. The high part is truncated.
__device__ __forceinline__ void prepare_matrix(const Part& part, cuda::Tf32B (&b)[2]) {
  constexpr uint32_t kHigh = ~0u << 13;  // the bits of TF32
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t high = __float_as_uint(part.values[i]) & kHigh;
    b[i / 2].high[i % 2] = high;
    b[i / 2].low[i % 2] = __float_as_uint(part.values[i] - __uint_as_float(high));
  }
}

// Rows lane / 4 and lane / 4 + 8 of a channel's matrix, part lane % 4.
struct MatrixParts {
  Part parts[2];

  __device__ __forceinline__ void load(const void* matrices, const DenseParams& dense, const Place& place, int channel) {
    const int last = place.count - 1;
    const Part* const from = matrix_parts(matrices, dense.matrix(place.first + (channel < last ? channel : last)));
    parts[0] = from[place.lane];
    parts[1] = from[place.lane + kWarpSize];
  }
};

// Rotates the rows of `above`, lane / 4, into rows of `to_above` from `row_above` on, for each channel, and those of `below`
// into rows of `to_below`. 16-bit elements need no low part. Where `stores_above` is false for a lane its row is not stored.
__device__ __forceinline__ void rotate(const DenseParams& dense, const Place& place, const Part& above, const Part& below,
                                       bool has_low, const Vectors& to_above, int row_above, bool stores_above,
                                       const Vectors& to_below, bool stores_below) {
  constexpr int kAhead = 4, kTogether = 2;
  const int row = place.lane / 4, column = place.lane % 4;
  cuda::Tf32A a[2];
  prepare_rows(above, below, a);
  MatrixParts ahead[kAhead];
#pragma unroll
  for (int c = 0; c < kAhead; ++c) ahead[c].load(dense.Q_columns, dense, place, c);
#pragma unroll 1
  for (int begin = 0; begin < place.count; begin += kAhead) {
#pragma unroll
    for (int c = 0; c < kAhead; c += kTogether) {
      cuda::Tf32B b[kTogether][2][2];
      float d[kTogether][2][4] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        prepare_matrix(ahead[c + i].parts[0], b[i][0]);
        prepare_matrix(ahead[c + i].parts[1], b[i][1]);
        ahead[c + i].load(dense.Q_columns, dense, place, begin + kAhead + c + i);
      }
      const auto multiply = [&](const auto& body) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
#pragma unroll
            for (int n = 0; n < 2; ++n) body(d[i][n], a[half], b[i][n][half]);
          }
        }
      };
      if (has_low) {
        multiply([](float (&to)[4], const cuda::Tf32A& x, const cuda::Tf32B& y) { cuda::mma_tf32(to, x.low, y.high); });
      }
      multiply([](float (&to)[4], const cuda::Tf32A& x, const cuda::Tf32B& y) { cuda::mma_tf32(to, x.high, y.low); });
      multiply([](float (&to)[4], const cuda::Tf32A& x, const cuda::Tf32B& y) { cuda::mma_tf32(to, x.high, y.high); });
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int state = 8 * n + 2 * column, channel = begin + c + i;
          struct alignas(8) Pair {
            float x, y;
          };
          if (stores_above) {
            *reinterpret_cast<Pair*>(&to_above.at(row_above + row, channel, state)) = {d[i][n][0], d[i][n][1]};
          }
          if (stores_below) *reinterpret_cast<Pair*>(&to_below.at(row, channel, state)) = {d[i][n][2], d[i][n][3]};
        }
      }
    }
  }
}

// w of a step, without A h: row `row` + 1 of B is that of the step, and `before` is u of the step before.
__device__ __forceinline__ void load_sample(const DenseParams& dense, const Vectors& B, int lane, int row, float u,
                                            float before, float (&w)[kStates]) {
  const float factor = static_cast<float>(dense.current) * u;
  B.visit(row + 1, lane, [&](int i, float value) { w[i] = factor * value; });
  if (dense.previous == 0) return;
  const float other = static_cast<float>(dense.previous) * before;
  B.visit(row, lane, [&](int i, float value) { w[i] = Math<float>::fma(other, value, w[i]); });
}

// h of a step from the one before, and the step's w without A h. kHasRk4: also by rk4.
template <bool kHasRk4>
__device__ __forceinline__ void step(const DenseParams& dense, const Transition& transition, float delta, float (&w)[kStates],
                                     float (&h)[kStates]) {
  const float alpha = static_cast<float>(dense.alpha), c = alpha * delta;
  const bool is_rk4 = kHasRk4 && dense.is_rk4;
  if (!is_rk4 && alpha >= 0.5f) {
    // m = h + alpha delta x solves (I - alpha Z) m = h + alpha delta w.
    const float inverse = static_cast<float>(1 / dense.alpha);
#pragma unroll
    for (int i = 0; i < kStates; ++i) w[i] = Math<float>::fma(c, w[i], h[i]);
    transition.solve<false>(c, w);
#pragma unroll
    for (int i = 0; i < kStates; ++i) h[i] = Math<float>::fma(inverse, w[i] - h[i], h[i]);
    return;
  }
  float x[kStates];
#pragma unroll
  for (int i = 0; i < kStates; ++i) x[i] = h[i];
  transition.multiply(x);
#pragma unroll
  for (int i = 0; i < kStates; ++i) x[i] += w[i];
  if (!is_rk4) {
    if (dense.alpha != 0) transition.solve<false>(c, x);
  } else {
#pragma unroll
    for (int i = 0; i < kStates; ++i) w[i] = x[i];
#pragma unroll 1
    for (int stage = 4; stage >= 2; --stage) {
      const float part = delta / static_cast<float>(stage);
      transition.multiply(x);
#pragma unroll
      for (int i = 0; i < kStates; ++i) x[i] = Math<float>::fma(part, x[i], w[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kStates; ++i) h[i] = Math<float>::fma(delta, x[i], h[i]);
}

// The sample before the first step of a row, or of a half of a chunk in backward: u, and in row 0 of B the rotated B.
// All threads call it together.
template <typename Scalar>
__device__ __forceinline__ float load_before(const SelectiveScanParams& p, const DenseParams& dense, const Place& place,
                                             const ScanRow& row, int64_t begin, const Vectors& B, bool has_low) {
  const bool is_given = begin == row.begin && dense.previous_u.data != nullptr && row.initial >= 0;
  const bool is_zero = begin == row.begin && !is_given && !dense.repeats_first;
  const int64_t t = begin > row.begin ? begin - 1 : begin;
  const Scalar* const from = is_given ? static_cast<const Scalar*>(dense.previous_u.data) +
                                            row.initial * dense.previous_u.stride_batch + place.d * dense.previous_u.stride_dim
                                      : step_pointer<const Scalar>(p.u, row.batch, place.d, t);
  const float u = is_zero ? 0.0f : cuda::to_accumulate(*from);
  if (!p.B.per_step) return u;
  Part part = {}, none = {};
  if (place.lane < kParts && !is_zero) {
    const int64_t group = place.first / (p.dim / p.B.groups);
    const int64_t stride = is_given ? dense.previous_B.stride_state : p.B.stride_state;
    const Scalar* const matrix = is_given
                                     ? static_cast<const Scalar*>(dense.previous_B.data) +
                                           row.initial * dense.previous_B.stride_batch + group * dense.previous_B.stride_dim
                                     : static_cast<const Scalar*>(p.B.data) + row.batch * p.B.stride_batch +
                                           group * p.B.stride_channel + t * p.B.stride_step;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * place.lane + j;
      part.values[j] = i < p.dstate ? cuda::to_accumulate(matrix[i * stride]) : 0.0f;
    }
  }
  rotate(dense, place, part, none, has_low, B, 0, place.lane < 4, B, false);
  return u;
}

}  // namespace ssm_kernels::selective_scan::dense::channel
