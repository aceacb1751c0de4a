// Mamba-3's decoding step on CUDA in one kernel: a block has one head of one row of the call (mamba3_step.h has the equations).
//
// 1. Every thread starts copies of its part of the state, kLaneRows rows of kLaneColumns columns, to shared memory. They are in
//    flight during the next two steps.
// 2. A thread advances one phase in float64 turns, and writes it, reduced to half a turn around zero, its cosine and its sine.
//    Threads load k, q and the previous k, (ranks, columns), and make four numbers for each rank and row of the state: the
//    factors of the previous and the new k, D x, and norm_weight silu(z) mimo_out, which multiplies the result.
// 3. After a barrier threads rotate the pairs of k and q, and write k and x to the states: all reads of both have finished.
// 4. After a barrier each warp updates its rows with every rank, writes them, and adds their products with q of each rank to
//    D x. A group of lanes has 8 rows: one exchange sums 8 products over the group.
// 5. After a barrier a thread has a row of the head: it adds the ranks' results, each with its factor, and, with a
//    norm_weight, its 1 / rms, which each warp sums by itself.
//
// The state is read and written once. With has_vectors a lane's columns are consecutive and an access has all four; otherwise
// they are a group's lanes apart, so that any strides and any dstate have accesses that are contiguous over the lanes.
#pragma once

#include <cuda_runtime.h>

#include "common/activations.h"
#include "common/math.h"
#include "cuda/either.cuh"
#include "cuda/index_math.cuh"
#include "cuda/lane_sums.cuh"
#include "cuda/launch.cuh"
#include "cuda/opaque.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/vector_io.cuh"
#include "mamba3/cuda/step_launch.h"

namespace ssm_kernels::mamba3::step {

using cuda::Either, cuda::from_accumulate, cuda::kWarpSize, cuda::to_accumulate, cuda::Vector;

// Loads an element of a tensor that the call may lack.
template <typename Input>
__device__ __forceinline__ Either<Input> load_element(const TokenView& view, int64_t offset) {
  Either<Input> element;
  if (view.data != nullptr) element.load(view.data, offset, view.is_input_kind);
  return element;
}

template <typename Input>
__device__ __forceinline__ float value_or(const Either<Input>& element, const TokenView& view, float absent) {
  return view.data == nullptr ? absent : element.value(view.is_input_kind);
}

// The head of a block: offsets, and arrays in shared memory. Places of arrays are sums of constants, not registers.
struct Head {
  const StepParams& p;
  const StepTiling& tiling;
  int row, slot, head;
  float* shared;

  __device__ __forceinline__ float* cosines() const { return shared; }
  __device__ __forceinline__ float* sines() const { return shared + tiling.angle_floats; }
  // (ranks, columns), zero from dstate on.
  __device__ __forceinline__ float* k() const { return shared + 2 * tiling.angle_floats; }
  __device__ __forceinline__ float* previous_k() const { return k() + tiling.column_floats; }
  __device__ __forceinline__ float* q() const { return k() + 2 * tiling.column_floats; }
  // (ranks, rows): the factors of k and of the previous k; D x and later the result, and its factor.
  __device__ __forceinline__ float* now() const { return k() + 3 * tiling.column_floats; }
  __device__ __forceinline__ float* before() const { return now() + tiling.row_floats; }
  __device__ __forceinline__ float* y() const { return now() + 2 * tiling.row_floats; }
  __device__ __forceinline__ float* scale() const { return now() + 3 * tiling.row_floats; }

  // Offsets of the head's elements. The launch checks that strides and offsets inside a row or a slot fit 31 bits.
  __device__ __forceinline__ int64_t offset(const TokenView& view, int of_head, int rank = 0, int column = 0) const {
    const int inside = of_head * static_cast<int>(view.stride_head) + rank * static_cast<int>(view.stride_rank) +
                       column * static_cast<int>(view.stride_column);
    return cuda::widening_multiply(static_cast<uint32_t>(row), static_cast<uint32_t>(view.stride_row)) + inside;
  }
  __device__ __forceinline__ int64_t offset(const StateView& view, int of_row = 0, int column = 0) const {
    const int inside = head * static_cast<int>(view.stride_head) + of_row * static_cast<int>(view.stride_row) +
                       column * static_cast<int>(view.stride_column);
    return cuda::widening_multiply(static_cast<uint32_t>(slot), static_cast<uint32_t>(view.stride_slot)) + inside;
  }
  template <typename Input>
  __device__ __forceinline__ float gate(const TokenView& view) const {
    return load_element<Input>(view, offset(view, head)).value(view.is_input_kind);
  }
  template <typename Input>
  __device__ __forceinline__ Input* out(int i) const {
    return static_cast<Input*>(p.out.data) + offset(p.out, head, 0, i);
  }
  __device__ __forceinline__ float* state_k(int rank, int column) const {
    return static_cast<float*>(p.k.data) + offset(p.k, rank, column);
  }
  // Whether a column is one of a pair that an angle rotates.
  __device__ __forceinline__ bool is_rotated(int column) const {
    const int angles = static_cast<int>(p.angles), half = static_cast<int>(p.dstate) / 2;
    if (p.is_pairs) return column < 2 * angles;
    return column < angles || (column >= half && column < half + angles);
  }
};

// A column of k, q and the previous k.
template <typename Input>
struct Column {
  int rank = 0, column = 0;
  Either<Input> B, C, B_bias, C_bias;
  float previous = 0;

  __device__ __forceinline__ void load(const Head& h, int index) {
    const StepParams& p = h.p;
    rank = static_cast<int>(h.tiling.columns_divisor.divide(static_cast<uint32_t>(index)));
    column = index - rank * h.tiling.columns;
    if (column >= p.dstate) return;
    const int group = static_cast<int>(h.tiling.heads_per_group.divide(static_cast<uint32_t>(h.head)));
    B = load_element<Input>(p.B, h.offset(p.B, group, rank, column));
    C = load_element<Input>(p.C, h.offset(p.C, group, rank, column));
    B_bias = load_element<Input>(p.B_bias, h.offset(p.B_bias, h.head, rank, column));
    C_bias = load_element<Input>(p.C_bias, h.offset(p.C_bias, h.head, rank, column));
    previous = *h.state_k(rank, column);
  }

  __device__ __forceinline__ void store(const Head& h) const {
    const StepParams& p = h.p;
    const bool is_inside = column < p.dstate;
    const float key = is_inside ? B.value(p.B.is_input_kind) + value_or(B_bias, p.B_bias, 0) : 0.0f;
    const float query = is_inside ? C.value(p.C.is_input_kind) + value_or(C_bias, p.C_bias, 0) : 0.0f;
    const int place = rank * h.tiling.columns + column;
    h.k()[place] = key;
    h.q()[place] = query;
    h.previous_k()[place] = is_inside ? previous : 0.0f;
    if (is_inside && !h.is_rotated(column)) *h.state_k(rank, column) = key;
  }
};

// A row of the state, with a rank.
template <typename Input>
struct Row {
  int rank = 0, i = 0;
  Either<Input> x, previous_x, mimo_x, D, z, norm_weight, mimo_z, mimo_out;

  __device__ __forceinline__ void load(const Head& h, int index) {
    const StepParams& p = h.p;
    rank = static_cast<int>(h.tiling.rows_divisor.divide(static_cast<uint32_t>(index)));
    i = index - rank * h.tiling.rows;
    if (i >= p.headdim) return;
    const auto element = [&](const TokenView& view) { return load_element<Input>(view, h.offset(view, h.head, rank, i)); };
    x = element(p.x);
    previous_x.load(p.previous_x.data, h.offset(p.previous_x, 0, i), true);
    mimo_x = element(p.mimo_x);
    D = element(p.D);
    z = element(p.z);
    norm_weight = element(p.norm_weight);
    mimo_z = element(p.mimo_z);
    mimo_out = element(p.mimo_out);
  }

  __device__ __forceinline__ void store(const Head& h, float of_before, float of_now) const {
    const StepParams& p = h.p;
    const int place = rank * h.tiling.rows + i;
    const bool is_inside = i < p.headdim;
    const float factor = value_or(mimo_x, p.mimo_x, 1), v = x.value(true) * factor;
    h.now()[place] = is_inside ? of_now * v : 0.0f;
    h.before()[place] = is_inside ? of_before * (previous_x.value(true) * factor) : 0.0f;
    h.y()[place] = is_inside && p.D.data != nullptr ? D.value(p.D.is_input_kind) * v : 0.0f;
    float scale = value_or(norm_weight, p.norm_weight, 1) * value_or(mimo_out, p.mimo_out, 1);
    if (p.z.data != nullptr) scale *= silu(z.value(p.z.is_input_kind) * value_or(mimo_z, p.mimo_z, 1));
    h.scale()[place] = scale;
  }
};

// A phase, in turns.
template <typename Input>
struct Phase {
  int index;
  double radians = 0;
  Either<Input> rate;

  __device__ __forceinline__ Phase(const Head& h, int index) : index(index) {
    if (index >= h.p.angles) return;
    const StateView& view = h.p.angle;
    const int64_t at = h.offset(view, 0, index);
    radians = view.kind == ScalarKind::kDouble ? static_cast<const double*>(view.data)[at]
                                               : static_cast<double>(static_cast<const float*>(view.data)[at]);
    rate = load_element<Input>(h.p.rates, h.offset(h.p.rates, h.head, 0, index));
  }

  __device__ __forceinline__ void advance(const Head& h, float dt) const {
    if (index >= h.p.angles) return;
    constexpr double kTurn = 6.283185307179586476925;
    const double speed = ::tanh(static_cast<double>(rate.value(h.p.rates.is_input_kind)));
    double turns = radians * (1 / kTurn) + 0.5 * speed * static_cast<double>(dt);
    turns -= ::rint(turns);
    const StateView& view = h.p.angle;
    const int64_t at = h.offset(view, 0, index);
    if (view.kind == ScalarKind::kDouble) {
      static_cast<double*>(view.data)[at] = kTurn * turns;
    } else {
      static_cast<float*>(view.data)[at] = static_cast<float>(kTurn * turns);
    }
    // float32 takes the distance to the nearest quarter of a turn.
    const double quarter = ::rint(4 * turns);
    float sine, cosine;
    ::sincospif(static_cast<float>(2 * (turns - 0.25 * quarter)), &sine, &cosine);
    const int quarters = static_cast<int>(quarter) & 3;
    const float first = quarters % 2 == 0 ? cosine : -sine, second = quarters % 2 == 0 ? sine : cosine;
    h.cosines()[index] = quarters < 2 ? first : -first;
    h.sines()[index] = quarters < 2 ? second : -second;
  }
};

// Rotates a pair of k, which goes to the state too, or of q in shared memory: both have `pairs` of them.
__device__ __forceinline__ void rotate_pair(const Head& h, int index, int pairs) {
  const bool is_k = index < pairs;
  if (!is_k) index -= pairs;
  const int rank = static_cast<int>(h.tiling.angles.divide(static_cast<uint32_t>(index)));
  const int angle = index - rank * static_cast<int>(h.p.angles);
  const int first = h.p.is_pairs ? 2 * angle : angle;
  const int second = h.p.is_pairs ? first + 1 : angle + static_cast<int>(h.p.dstate) / 2;
  const float cosine = h.cosines()[angle], sine = h.sines()[angle];
  float* const row = (is_k ? h.k() : h.q()) + rank * h.tiling.columns;
  const float a = row[first], b = row[second], turned = cosine * a - sine * b, other = sine * a + cosine * b;
  row[first] = turned;
  row[second] = other;
  if (!is_k) return;
  *h.state_k(rank, first) = turned;
  *h.state_k(rank, second) = other;
}

// kLaneRows rows of the state, of which a lane has kLaneColumns columns. Copies to shared memory bring them, so that no
// register waits for them. A lane reads only what it has copied, so that no barrier is needed.
template <typename State, bool has_vectors>
struct StateTile {
  static constexpr int kCopies = has_vectors ? 1 : kLaneColumns, kCopiedColumns = kLaneColumns / kCopies;
  using Columns = Vector<State, kCopiedColumns>;
  static constexpr bool kIsCopied = is_state_copied(sizeof(State), has_vectors);
  const Head& h;
  int lane, lanes;        // of the group
  State* buffer;          // of the lane in shared memory
  int row = 0, left = 0;  // of the group's first row; the rows from it on that exist
  int chunk = 0;          // the first column of the chunk

  // `shared` is that of the block's tiles.
  __device__ __forceinline__ StateTile(const Head& h, int lane, int lanes, void* shared) : h(h), lane(lane), lanes(lanes) {
    const int place = threadIdx.x / kWarpSize * (kLaneRows * kCopies) * kWarpSize + threadIdx.x % kWarpSize;
    buffer = static_cast<State*>(shared) + place * kCopiedColumns;
  }

  __device__ __forceinline__ int column(int j) const {
    return chunk + (has_vectors ? lane * kLaneColumns + j : lane + j * lanes);
  }

  __device__ __forceinline__ State* copy(int r, int c) const {
    return buffer + (r * kCopies + c) * (kWarpSize * kCopiedColumns);
  }

  // Calls visitor(row of the tile, copy of the row, its address) for each copy of columns that exist.
  template <typename Visitor>
  __device__ __forceinline__ void for_each_copy(int row, const Visitor& visitor) const {
    const StateView& view = h.p.ssm;
    State* const slot = static_cast<State*>(view.data) +
                        cuda::widening_multiply(static_cast<uint32_t>(h.slot), static_cast<uint32_t>(view.stride_slot));
    const int stride_row = static_cast<int>(view.stride_row), stride_column = static_cast<int>(view.stride_column);
    int inside = h.head * static_cast<int>(view.stride_head) + row * stride_row + column(0) * stride_column;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCopies; ++c) {
        if (r < left && column(c) < static_cast<int>(h.p.dstate)) visitor(r, c, slot + (inside + c * lanes * stride_column));
      }
      inside += stride_row;
    }
  }

  __device__ __forceinline__ void start_copies() const {
    if constexpr (kIsCopied) {
      for_each_copy(row, [&](int r, int c, const State* place) { cuda::cp_async<Columns::kBytes>(copy(r, c), place); });
    }
  }

  // Loads the states times the decay. Columns that the row does not have are zero.
  __device__ __forceinline__ void load(float decay, float (&states)[kLaneRows][kLaneColumns]) const {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) states[r][j] = 0;
    }
    if constexpr (kIsCopied) cuda::cp_async_wait();
    for_each_copy(row, [&](int r, int c, const State* place) {
      Columns columns;
      if constexpr (kIsCopied) {
        columns = Columns::load(copy(r, c));
      } else {
        columns = Columns::load_once(place);
      }
#pragma unroll
      for (int j = 0; j < kCopiedColumns; ++j) states[r][c + j] = decay * columns.accumulate(j);
    });
  }

  __device__ __forceinline__ void store(const float (&states)[kLaneRows][kLaneColumns]) const {
    // Opaque: the addresses of the copies would stay in registers until here.
    for_each_copy(cuda::opaque(row), [&](int r, int c, State* place) {
      float columns[kCopiedColumns];
#pragma unroll
      for (int j = 0; j < kCopiedColumns; ++j) columns[j] = states[r][c + j];
      Columns::round(columns).store_once(place);
    });
  }

  // This lane's columns of a row in shared memory.
  __device__ __forceinline__ void load_columns(const float* source, float (&columns)[kLaneColumns]) const {
    if constexpr (has_vectors) {
      const auto vector = Vector<float, kLaneColumns>::load(source + column(0));
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) columns[j] = vector[j];
    } else {
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) columns[j] = source[column(j)];
    }
  }

  // Updates the rows that are loaded, and adds their products with q to y.
  __device__ __forceinline__ void update(float decay) const {
    const int ranks = static_cast<int>(h.p.ranks);
    float states[kLaneRows][kLaneColumns];
    load(decay, states);
#pragma unroll 1
    for (int rank = 0; rank < ranks; ++rank) {
      const auto add = [&](const float* factors, const float* row_of_k) {
        float k[kLaneColumns];
        load_columns(row_of_k + rank * h.tiling.columns, k);
        const auto of_rows = Vector<float, kLaneRows>::load(factors + rank * h.tiling.rows + row);
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
          for (int j = 0; j < kLaneColumns; ++j) states[r][j] = Math<float>::fma(of_rows[r], k[j], states[r][j]);
        }
      };
      add(h.before(), h.previous_k());
      add(h.now(), h.k());
    }
    store(states);
#pragma unroll 1
    for (int rank = 0; rank < ranks; ++rank) {
      float q[kLaneColumns], sums[kLaneRows] = {};
      load_columns(h.q() + rank * h.tiling.columns, q);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) sums[r] = Math<float>::fma(states[r][j], q[j], sums[r]);
      }
      const float sum = cuda::sum_of_each(sums, lane, lanes);
      if (lane < kLaneRows) h.y()[rank * h.tiling.rows + row + lane] += sum;
    }
  }
};

// Writes element i of the output. All lanes of the warp take part.
template <typename Input>
__device__ __forceinline__ void write_out(const Head& h, int i) {
  const StepParams& p = h.p;
  const int headdim = static_cast<int>(p.headdim), ranks = static_cast<int>(p.ranks);
  float out = 0;
#pragma unroll 1
  for (int rank = 0; rank < ranks; ++rank) {
    const float* const y = h.y() + rank * h.tiling.rows;
    float scale = 1;
    if (p.norm_weight.data != nullptr) {
      float squares = 0;
      for (int j = i % kWarpSize; j < headdim; j += kWarpSize) squares = Math<float>::fma(y[j], y[j], squares);
      scale =
          rsqrtf(Math<float>::fma(cuda::sum_over_warp(squares), h.tiling.reciprocal_headdim, static_cast<float>(p.norm_eps)));
    }
    if (i < headdim) out = Math<float>::fma(y[i] * scale, h.scale()[rank * h.tiling.rows + i], out);
  }
  if (i < headdim) *h.out<Input>(i) = from_accumulate<Input>(out);
}

template <typename Input, typename State, bool has_vectors>
__global__ void __launch_bounds__(kMaxThreads, 4)
    mamba3_step_kernel(const __grid_constant__ StepParams p, const __grid_constant__ StepTiling tiling, int first_row) {
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = threadIdx.x, threads = blockDim.x, headdim = static_cast<int>(p.headdim);
  const int index = static_cast<int>(tiling.heads.divide(blockIdx.x)), row = first_row + index;
  const int head = static_cast<int>(blockIdx.x) - index * tiling.heads.template value<int>();
  const int64_t slot = p.slot(row);
  const Head h{p, tiling, row, static_cast<int>(slot), head, reinterpret_cast<float*>(shared + tiling.state_bytes)};
  if (slot < 0 || slot >= p.slots) {
    if (thread < headdim) *h.out<Input>(thread) = from_accumulate<Input>(0.0f);
    return;
  }

  // The rows of group g of warp w in pass i are those from ((i warps + w) groups + g) kLaneRows on.
  const int warp = thread / kWarpSize, warp_lane = thread % kWarpSize, lanes = 1 << tiling.log2_lanes;
  const int warp_rows = tiling.warp_rows();
  int first = warp * warp_rows;
  StateTile<State, has_vectors> tile(h, warp_lane & (lanes - 1), lanes, shared);
  const auto set_rows = [&] {
    tile.row = first + (warp_lane >> tiling.log2_lanes) * kLaneRows;
    tile.left = headdim - tile.row;
  };
  set_rows();
  tile.start_copies();

  const Phase<Input> phase(h, thread);
  const float dt = h.gate<Input>(p.dt), trap = h.gate<Input>(p.trap), A = h.gate<Input>(p.A);
  const int rows = tiling.row_floats, columns = tiling.column_floats;
  // The first phases, rows and columns belong to different warps. The number of threads is a power of two.
  const int first_of_rows = thread ^ (threads / 4), first_of_columns = thread ^ (threads / 2);
  Row<Input> of_row;
  Column<Input> of_column;
  if (first_of_rows < rows) of_row.load(h, first_of_rows);
  if (first_of_columns < columns) of_column.load(h, first_of_columns);
  // Otherwise the compiler converts one value, and so waits for it, before it issues the next load.
  asm volatile("" ::: "memory");
  const float decay = Math<float>::exp(A * dt), of_now = sigmoid(trap) * dt, of_before = sigmoid(-trap) * dt * decay;
#pragma unroll 1
  for (int index = first_of_rows; index < rows;) {
    of_row.store(h, of_before, of_now);
    index += threads;
    if (index < rows) of_row.load(h, index);
  }
#pragma unroll 1
  for (int index = first_of_columns; index < columns;) {
    of_column.store(h);
    index += threads;
    if (index < columns) of_column.load(h, index);
  }
  phase.advance(h, dt);
  __syncthreads();
  // The launch has a thread for each row of the state.
  if (thread < headdim) {
    static_cast<Input*>(p.previous_x.data)[h.offset(p.previous_x, 0, thread)] =
        static_cast<const Input*>(p.x.data)[h.offset(p.x, head, 0, thread)];
  }
  const int pairs = static_cast<int>(p.ranks * p.angles);
#pragma unroll 1
  for (int index = thread ^ (threads / 2); index < 2 * pairs; index += threads) rotate_pair(h, index, pairs);
  __syncthreads();
#pragma unroll 1
  while (first < headdim) {
    tile.update(decay);
    tile.chunk += tiling.chunk_columns();
    if (tile.chunk >= p.dstate) {
      tile.chunk = 0;
      first += tiling.warps * warp_rows;
      set_rows();
    }
    if (first < headdim) tile.start_copies();
  }
  __syncthreads();
  if (warp * kWarpSize < headdim) write_out<Input>(h, thread);
}

// Whether the lanes' columns are whole vectors at multiples of their size.
template <typename State>
bool has_vector_columns(const StateView& view, int64_t dstate) {
  constexpr int64_t kBytes = kLaneColumns * sizeof(State);
  return view.stride_column == 1 && reinterpret_cast<int64_t>(view.data) % kBytes == 0 && dstate % kLaneColumns == 0 &&
         view.stride_slot % kLaneColumns == 0 && view.stride_head % kLaneColumns == 0 && view.stride_row % kLaneColumns == 0;
}

template <typename Input, typename State>
cudaError_t launch_mamba3_step(const StepParams& params, cudaStream_t stream) {
  const bool has_vectors = has_vector_columns<State>(params.ssm, params.dstate);
  StepTiling tiling(params);
  if (is_state_copied(sizeof(State), has_vectors)) tiling.state_bytes = state_bytes(tiling.warps, sizeof(State));
  const int bytes = static_cast<int>(tiling.shared_bytes());
  auto* const kernel = has_vectors ? mamba3_step_kernel<Input, State, true> : mamba3_step_kernel<Input, State, false>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  const int64_t most = ((int64_t(1) << 31) - 1) / params.heads;  // rows of a grid, whose size is limited
  for (int64_t first = 0; first < params.rows; first += most) {
    const int64_t rows = params.rows - first < most ? params.rows - first : most;
    const cudaError_t error = cuda::launch(kernel, rows * params.heads, tiling.warps * kWarpSize, bytes, stream,
                                           cuda::has_pdl(kernel), params, tiling, static_cast<int>(first));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ssm_kernels::mamba3::step
