// Shared by forward and backward of selective_scan_dense on CUDA: a channel's matrices in the registers of its lanes, products
// and solves with them, and the tiles of steps.
//
// kLanes neighboring lanes take a channel through time. With N = kLanes kRows, at least dstate, state i belongs to lane
// i % kLanes, as its row i / kLanes. A lane has the entries of T and of Q in the rows, or the columns, of its states, so that
// a product needs the vector alone, which lanes publish in shared memory and read in whole vectors. Columns of a triangular
// matrix that are zero for all lanes of a row take no register and no instruction.
//
// The solve with I - c T. A lane inverts the diagonal, or the block of two rows, of its state: r = 1 / (1 - c T_ii), or
// (r, s) = (1 - c T_ii, c T_ip) / determinant with the partner p of the state. The diagonal entries of a block are equal and
// the product of the others negative: the determinant is (1 - c T_ii)^2 - c^2 T_ip T_pi, a sum of two squares. With b <- r b +
// s b_p, the last state is a result, and x_i = b_i + c r sum_k T_ik x_k + c s sum_k T_pk x_k over the states k below: from the
// last to the first, each x_k takes one shuffle. The transposed solve goes from the first to the last.
#pragma once

#include <type_traits>

#include "common/activations.h"
#include "cuda/constants.h"
#include "cuda/vector_io.cuh"
#include "selective_scan/cuda/dense_launch.h"

namespace ssm_kernels::selective_scan::dense {

using cuda::kAllLanes, cuda::kWarpSize;

// The variants of the kernels. At least kBlocks blocks are resident on a multiprocessor.
template <typename Acc_, int kLanes_, int kRows_, int kWarps_, int kBlocks_ = 1>
struct Layout {
  using Acc = Acc_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kLanes = kLanes_, kRows = kRows_, kWarps = kWarps_, kStates = kLanes * kRows;
  static constexpr int kChannels = kWarps * kWarpSize / kLanes, kThreads = kWarps * kWarpSize;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Acc));  // values of a load from shared memory
  static constexpr int kSteps = static_cast<int>(kDenseChunk);
};

// Values that one load from shared memory takes.
template <typename Acc>
struct alignas(16) Part {
  Acc values[16 / sizeof(Acc)];
};

// The lane and the channel of a thread.
template <typename L>
struct Place {
  int lane, channel;
  int64_t d, index;  // the channel, and its matrix
  bool is_active;

  __device__ __forceinline__ Place(const DenseParams& dense, int64_t tile) {
    lane = threadIdx.x % L::kLanes;
    channel = threadIdx.x / L::kLanes;
    const int64_t count = dense.tiles.count(tile);
    is_active = channel < count;
    // Lanes without a channel compute the last one, and store nothing.
    d = dense.tiles.first_channel(tile) + (is_active ? channel : count - 1);
    index = dense.matrix(d);
  }
  __device__ __forceinline__ int state(int row) const { return lane + L::kLanes * row; }
};

// Reads entry (i, j) of the place's matrix.
template <typename L>
__device__ __forceinline__ typename L::Acc entry(const void* matrices, const DenseParams& dense, int64_t index, int i, int j) {
  return static_cast<const typename L::Acc*>(matrices)[(index * L::kStates + i) * L::kStates + j];
}

// A lane's part of the diagonal of T.
template <typename L>
struct Diagonal {
  using Acc = typename L::Acc;
  int partner[L::kRows];                                // the state itself without a block
  Acc own[L::kRows], upper[L::kRows], lower[L::kRows];  // T_ii, T_ip and T_pi, or 0
  bool has_blocks;                                      // of any lane

  __device__ __forceinline__ void load(const DenseParams& dense, const Place<L>& place) {
    bool has_block = false;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const int i = place.state(r);
      const auto at = [&](int row, int column) { return entry<L>(dense.T, dense, place.index, row, column); };
      partner[r] = i;
      if (i + 1 < L::kStates && at(i + 1, i) != Acc(0)) partner[r] = i + 1;
      if (i > 0 && at(i, i - 1) != Acc(0)) partner[r] = i - 1;
      const bool is_block = partner[r] != i;
      own[r] = at(i, i);
      upper[r] = is_block ? at(i, partner[r]) : Acc(0);
      lower[r] = is_block ? at(partner[r], i) : Acc(0);
      has_block |= is_block;
    }
    has_blocks = __any_sync(kAllLanes, has_block);
  }
};

// Loads the entries of T above the blocks: of rows, T_ik and T_pk; of columns, T_ki and T_kp.
template <typename L, bool kColumns>
struct Triangle {
  using Acc = typename L::Acc;
  Acc own[L::kRows][L::kStates], partner[L::kRows][L::kStates];

  // Whether a lane's row r may have an entry k that is not zero. Known at compile time.
  static constexpr bool has(int r, int k) { return kColumns ? k < L::kLanes * (r + 1) - 1 : k > L::kLanes * r; }

  __device__ __forceinline__ void load(const DenseParams& dense, const Place<L>& place, const Diagonal<L>& diagonal) {
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const int i = place.state(r), p = diagonal.partner[r], first = i < p ? i : p, last = i < p ? p : i;
#pragma unroll
      for (int k = 0; k < L::kStates; ++k) {
        if (!has(r, k)) continue;
        const bool is_above = kColumns ? k < first : k > last;
        const void* const from = kColumns ? dense.T : dense.T_columns;  // lanes read neighbors
        own[r][k] = is_above ? entry<L>(from, dense, place.index, k, i) : Acc(0);
        partner[r][k] = is_above && p != i ? entry<L>(from, dense, place.index, k, p) : Acc(0);
      }
    }
  }
};

// Q^T by its rows, or Q by its rows.
template <typename L, bool kTransposed>
struct Rotation {
  using Acc = typename L::Acc;
  Acc rows[L::kRows][L::kStates];

  __device__ __forceinline__ void load(const DenseParams& dense, const Place<L>& place) {
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
      for (int j = 0; j < L::kStates; ++j) {
        rows[r][j] = entry<L>(kTransposed ? dense.Q : dense.Q_columns, dense, place.index, j, place.state(r));
      }
    }
  }

  // `vector` is in shared memory, of kStates values.
  __device__ __forceinline__ void apply(const Acc* vector, Acc (&result)[L::kRows]) const {
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) result[r] = Acc(0);
#pragma unroll
    for (int j = 0; j < L::kStates; j += L::kVector) {
      const Part<Acc> part = *reinterpret_cast<const Part<Acc>*>(vector + j);
#pragma unroll
      for (int v = 0; v < L::kVector; ++v) {
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) result[r] = Math<Acc>::fma(rows[r][j + v], part.values[v], result[r]);
      }
    }
  }
};

// Stores a vector of the channel's states for its lanes, which have read the one before.
template <typename L>
__device__ __forceinline__ void publish(typename L::Acc* vector, const Place<L>& place, const typename L::Acc (&x)[L::kRows]) {
  __syncwarp();
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) vector[place.state(r)] = x[r];
  __syncwarp();
}

// result += factor T x, or T^T x, of a published x.
template <typename L, bool kColumns>
__device__ __forceinline__ void add_product(const Triangle<L, kColumns>& T, const Diagonal<L>& diagonal, const Place<L>& place,
                                            const typename L::Acc* x, typename L::Acc factor,
                                            typename L::Acc (&result)[L::kRows]) {
  using Acc = typename L::Acc;
  Acc sums[L::kRows];
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const Acc beside = kColumns ? diagonal.lower[r] : diagonal.upper[r];
    sums[r] = diagonal.own[r] * x[place.state(r)] + beside * x[diagonal.partner[r]];
  }
#pragma unroll
  for (int k = 0; k < L::kStates; k += L::kVector) {
    const Part<Acc> part = *reinterpret_cast<const Part<Acc>*>(x + k);
#pragma unroll
    for (int v = 0; v < L::kVector; ++v) {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        if (T.has(r, k + v)) sums[r] = Math<Acc>::fma(T.own[r][k + v], part.values[v], sums[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) result[r] = Math<Acc>::fma(factor, sums[r], result[r]);
}

// b becomes the solution of (I - c T) x = b, or of the transposed system. `vector` is shared memory of the channel.
template <typename L, bool kColumns>
__device__ __forceinline__ void solve(const Triangle<L, kColumns>& T, const Diagonal<L>& diagonal, const Place<L>& place,
                                      typename L::Acc c, typename L::Acc* vector, typename L::Acc (&b)[L::kRows]) {
  using Acc = typename L::Acc;
  Acc own[L::kRows], beside[L::kRows];
  if (diagonal.has_blocks) publish<L>(vector, place, b);
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const Acc pivot = Acc(1) - c * diagonal.own[r];
    if (diagonal.has_blocks) {
      const bool is_block = diagonal.partner[r] != place.state(r);
      const Acc product = (c * diagonal.upper[r]) * (c * diagonal.lower[r]);
      const Acc inverse = Math<Acc>::reciprocal(is_block ? pivot * pivot - product : pivot);
      own[r] = is_block ? pivot * inverse : inverse;
      beside[r] = c * (kColumns ? diagonal.lower[r] : diagonal.upper[r]) * inverse;
      b[r] = own[r] * b[r] + (is_block ? beside[r] * vector[diagonal.partner[r]] : Acc(0));
    } else {
      own[r] = Math<Acc>::reciprocal(pivot);
      beside[r] = Acc(0);
      b[r] *= own[r];
    }
    own[r] *= c;
    beside[r] *= c;
  }
  // The sums of T_ik x_k and T_pk x_k so far.
  Acc sums[L::kRows] = {}, partner_sums[L::kRows] = {};
  const auto value = [&](int r) { return Math<Acc>::fma(own[r], sums[r], Math<Acc>::fma(beside[r], partner_sums[r], b[r])); };
#pragma unroll
  for (int step = 0; step + 1 < L::kStates; ++step) {
    const int k = kColumns ? step : L::kStates - 1 - step;
    const Acc x = __shfl_sync(kAllLanes, value(k / L::kLanes), k % L::kLanes, L::kLanes);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      if (!T.has(r, k)) continue;
      sums[r] = Math<Acc>::fma(T.own[r][k], x, sums[r]);
      partner_sums[r] = Math<Acc>::fma(T.partner[r][k], x, partner_sums[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) b[r] = value(r);
}

// The sum over the lanes of a channel; all of them get the same bits.
template <typename L>
__device__ __forceinline__ typename L::Acc sum_over_channel(typename L::Acc value) {
#pragma unroll
  for (int distance = L::kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// Calls visitor(Scalar()) with the element type. Kernels for double have one.
template <typename Acc, typename Visitor>
__device__ __forceinline__ void visit_elements(ScalarKind kind, const Visitor& visitor) {
  if constexpr (std::is_same_v<Acc, double>) {
    visitor(double());
  } else if (kind == ScalarKind::kBFloat16) {
    visitor(__nv_bfloat16());
  } else if (kind == ScalarKind::kHalf) {
    visitor(__half());
  } else {
    visitor(float());
  }
}

// Calls body(step, other) for all of both, divided over the block: neighboring threads take neighboring steps, or others.
// kOthers is the number of others of a whole tile, so that no index is divided by a variable.
template <typename L, int kOthers, typename Body>
__device__ __forceinline__ void for_each_of_tile(int steps, int others, bool along_steps, const Body& body) {
#pragma unroll 1
  for (int i = threadIdx.x; i < L::kSteps * kOthers; i += L::kThreads) {
    const int step = along_steps ? i % L::kSteps : i / kOthers, other = along_steps ? i / L::kSteps : i % kOthers;
    if (step < steps && other < others) body(step, other);
  }
}
__device__ __forceinline__ bool is_along_steps(int64_t stride_step) { return stride_step == 1 || stride_step == -1; }

// D or delta_bias of the channel.
template <typename Acc>
__device__ __forceinline__ Acc of_channel(const ChannelView& view, int64_t d) {
  return view.data == nullptr ? Acc(0) : static_cast<const Acc*>(view.data)[d * view.stride];
}

// The inputs of a chunk's steps, as accumulation values. Row 0 of B and u is the sample before the chunk.
template <typename L>
struct Tile {
  using Acc = typename L::Acc;
  Acc B[L::kSteps + 1][L::kStates], C[L::kSteps][L::kStates];
  Acc u[L::kSteps + 1][L::kChannels], delta[L::kSteps][L::kChannels];  // delta after bias and softplus
  Acc z[L::kSteps][L::kChannels];

  // Channels of the tile from `first`; `count` of them.
  __device__ __forceinline__ void load(const SelectiveScanParams& p, const DenseParams& dense, ScalarKind kind,
                                       const ScanRow& row, int64_t begin, int steps, int64_t first, int count) {
    visit_elements<Acc>(kind, [&](auto scalar) {
      using Scalar = decltype(scalar);
      const auto load_steps = [&](const SequenceView& view, Acc(*to)[L::kChannels], const auto& change) {
        const Scalar* const from = static_cast<const Scalar*>(view.data) + row.batch * view.stride_batch +
                                   first * view.stride_dim + begin * view.stride_step;
        for_each_of_tile<L, L::kChannels>(steps, count, is_along_steps(view.stride_step), [&](int t, int c) {
          to[t][c] = change(cuda::to_accumulate(from[c * view.stride_dim + t * view.stride_step]), c);
        });
      };
      const auto load_matrix = [&](const MatrixView& view, Acc(*to)[L::kStates]) {
        if (!view.per_step) return;
        const Scalar* const from = static_cast<const Scalar*>(view.data) + row.batch * view.stride_batch +
                                   first / (p.dim / view.groups) * view.stride_channel + begin * view.stride_step;
        for_each_of_tile<L, L::kStates>(steps, L::kStates, is_along_steps(view.stride_step), [&](int t, int i) {
          to[t][i] = i < p.dstate ? cuda::to_accumulate(from[i * view.stride_state + t * view.stride_step]) : Acc(0);
        });
      };
      const auto as_given = [](Acc value, int) { return value; };
      load_steps(p.u, u + 1, as_given);
      load_steps(p.delta, delta, [&](Acc value, int c) {
        value += of_channel<Acc>(p.delta_bias, first + c);
        return p.delta_softplus ? softplus(value) : value;
      });
      if (p.z.data != nullptr) load_steps(p.z, z, as_given);
      load_matrix(p.B, B + 1);
      load_matrix(p.C, C);
      if (dense.previous == 0) return;

      // The sample before step `begin`.
      const bool is_given = begin == row.begin && dense.previous_u.data != nullptr && row.initial >= 0;
      const bool is_zero = begin == row.begin && !is_given && !dense.repeats_first;
      const int64_t t = begin > row.begin ? begin - 1 : begin;
      for (int c = threadIdx.x; c < count; c += L::kThreads) {
        const Scalar* const given = static_cast<const Scalar*>(dense.previous_u.data) +
                                    row.initial * dense.previous_u.stride_batch + (first + c) * dense.previous_u.stride_dim;
        const Scalar* const own = static_cast<const Scalar*>(p.u.data) + row.batch * p.u.stride_batch +
                                  (first + c) * p.u.stride_dim + t * p.u.stride_step;
        u[0][c] = is_zero ? Acc(0) : cuda::to_accumulate(is_given ? *given : *own);
      }
      if (!p.B.per_step) return;
      const int64_t group = first / (p.dim / p.B.groups);
      for (int i = threadIdx.x; i < L::kStates; i += L::kThreads) {
        const Scalar* const given = static_cast<const Scalar*>(dense.previous_B.data) +
                                    row.initial * dense.previous_B.stride_batch + group * dense.previous_B.stride_dim +
                                    i * dense.previous_B.stride_state;
        const Scalar* const own = static_cast<const Scalar*>(p.B.data) + row.batch * p.B.stride_batch +
                                  group * p.B.stride_channel + i * p.B.stride_state + t * p.B.stride_step;
        B[0][i] = is_zero || i >= p.dstate ? Acc(0) : cuda::to_accumulate(is_given ? *given : *own);
      }
    });
  }
};

// A channel's row of a (rows, dim, dstate) tensor, or zero.
template <typename L>
__device__ __forceinline__ void load_state(const SelectiveScanParams& p, const Place<L>& place, const void* data,
                                           int64_t offset, int64_t stride, typename L::Acc (&h)[L::kRows]) {
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const int i = place.state(r);
    const bool is_state = data != nullptr && i < p.dstate;
    h[r] = is_state ? static_cast<const typename L::Acc*>(data)[offset + i * stride] : typename L::Acc(0);
  }
}
template <typename L>
__device__ __forceinline__ void store_state(const SelectiveScanParams& p, const Place<L>& place, void* data, int64_t row,
                                            const typename L::Acc (&h)[L::kRows]) {
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const int i = place.state(r);
    if (place.is_active && i < p.dstate) {
      static_cast<typename L::Acc*>(data)[(row * p.dim + place.d) * p.dstate + i] = h[r];
    }
  }
}

// The matrix of a channel with a constant B or C, rotated.
template <typename L>
__device__ __forceinline__ void load_constant(const SelectiveScanParams& p, const Place<L>& place, const MatrixView& view,
                                              typename L::Acc (&values)[L::kRows]) {
  load_state<L>(p, place, view.data, place.d * view.stride_channel, view.stride_state, values);
}

// The recurrence from a state to the next, of both passes.
template <typename L>
struct Stepper {
  using Acc = typename L::Acc;
  Diagonal<L> diagonal;
  Triangle<L, false> T;
  Rotation<L, true> rotation;
  Acc B[L::kRows];  // a constant one, rotated

  __device__ __forceinline__ void load(const SelectiveScanParams& p, const DenseParams& dense, const Place<L>& place,
                                       Acc* vector) {
    diagonal.load(dense, place);
    T.load(dense, place, diagonal);
    rotation.load(dense, place);
    if (p.B.per_step) return;
    load_constant<L>(p, place, p.B, B);
    publish<L>(vector, place, B);
    rotation.apply(vector, B);
  }

  // B of a step of the tile, rotated; step 0 is the one before the chunk.
  __device__ __forceinline__ void matrix_at(const SelectiveScanParams& p, const Tile<L>& tile, int step,
                                            Acc (&result)[L::kRows]) const {
    if (p.B.per_step) {
      rotation.apply(tile.B[step], result);
    } else {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) result[r] = B[r];
    }
  }

  // The sample before the chunk, rotated.
  __device__ __forceinline__ void load_before(const SelectiveScanParams& p, const DenseParams& dense, const Tile<L>& tile,
                                              const Place<L>& place, Acc (&before)[L::kRows]) const {
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) before[r] = Acc(0);
    if (dense.previous == 0) return;
    matrix_at(p, tile, 0, before);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) before[r] *= tile.u[0][place.channel];
  }

  // x of a step, from the state before and the sample before, which becomes the step's. `stages` receives s2, s1 and w of rk4,
  // in kStates values each, unless it is null.
  __device__ __forceinline__ void respond(const SelectiveScanParams& p, const DenseParams& dense, const Tile<L>& tile,
                                          const Place<L>& place, int step, Acc delta, const Acc (&h)[L::kRows],
                                          Acc (&before)[L::kRows], Acc* vector, Acc* stages, Acc (&x)[L::kRows]) const {
    Acc w[L::kRows];
    matrix_at(p, tile, step + 1, w);
    const Acc u = tile.u[step + 1][place.channel];
    if (dense.previous == 0) {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) w[r] *= u;
    } else {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        const Acc sample = w[r] * u;
        w[r] = Acc(dense.current) * sample + Acc(dense.previous) * before[r];
        before[r] = sample;
      }
    }
    publish<L>(vector, place, h);
    add_product(T, diagonal, place, vector, Acc(1), w);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) x[r] = w[r];
    if (!dense.is_rk4) {
      if (dense.alpha != 0) solve(T, diagonal, place, Acc(dense.alpha) * delta, vector, x);
      return;
    }
#pragma unroll 1
    for (int stage = 2; stage >= 0; --stage) {
      if (stages != nullptr) {
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) stages[stage * L::kStates + place.state(r)] = x[r];
      }
      publish<L>(vector, place, x);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) x[r] = w[r];
      add_product(T, diagonal, place, vector, delta / Acc(stage + 2), x);
    }
  }
};

}  // namespace ssm_kernels::selective_scan::dense
