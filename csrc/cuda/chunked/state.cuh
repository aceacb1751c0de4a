// A state tile in the registers of a warpgroup, as an accumulator of matrix products and as their operand A, and the operand
// that a chunk adds to it. In accumulator fragments (cuda/fragment.cuh) a warp has 16 rows; a lane has two of these, `row` and
// row + 8, and of each block of 8 columns the two columns 2 pair and 2 pair + 1.
//
// State accumulates mamba_ssm's chunk_state and scales the state before the chunk (state_passing).
#pragma once

#include <type_traits>

#include "cuda/chunked/span.cuh"
#include "cuda/fragment.cuh"
#include "cuda/warp_mma.cuh"

namespace ssm_kernels::cuda::chunked {

static_assert(kStateRows == kWarpgroupWarps * 16, "each warp of a warpgroup has 16 rows of a state tile, those of one mma");
static_assert(kChunk == kTileRows, "a chunk's steps are the rows of a tile");

// The states of one sequence; null if `states` is null.
template <typename Params, typename Pointer>
__device__ __forceinline__ Pointer* states_of(const Params& p, Pointer* states, int64_t entry) {
  return states == nullptr ? nullptr : states + entry * p.states_stride_entry;
}

// The warp's 16 rows of a state tile, in registers.
template <int dstate>
struct State {
  static constexpr int kBlocks = dstate / 8;
  float values[kBlocks][4];

  // Calls body(low, high, is_there, offset) for pairs of neighboring elements, at that offset in a (headdim, state_columns)
  // matrix.
  template <typename Self, typename Body>
  static __device__ __forceinline__ void for_each_pair(Self& self, const ChunkedGeometry& p, const StateTile& state_tile,
                                                       const FragmentLane& lane, const Body& body) {
    // The offsets of a row differ by constants, so that one address serves all of them.
    const int first_column = state_tile.first_column + 2 * lane.pair, columns = p.state_columns - first_column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      const int64_t offset = (int64_t(state_tile.first_row) + row) * p.state_columns + first_column;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        body(self.values[n][2 * half], self.values[n][2 * half + 1], row < state_tile.rows && 8 * n < columns, offset + 8 * n);
      }
    }
  }

  static __device__ __forceinline__ float2 load_pair(const float* source, bool is_there) {
    return is_there ? *reinterpret_cast<const float2*>(source) : float2{0, 0};
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] = 0;
    }
  }

  // Load from and store to the states of all heads of one sequence. A null pointer loads zeros.
  __device__ __forceinline__ void load(const ChunkedGeometry& p, const float* states, const StateTile& state_tile,
                                       const FragmentLane& lane) {
    const float* const source = states + int64_t(state_tile.head) * p.headdim * p.state_columns;
    const bool is_given = states != nullptr;
    for_each_pair(*this, p, state_tile, lane, [&](float& low, float& high, bool is_there, int64_t offset) {
      const float2 pair = load_pair(source + offset, is_there && is_given);
      low = pair.x;
      high = pair.y;
    });
  }
  __device__ __forceinline__ void store(const ChunkedGeometry& p, float* states, const StateTile& state_tile,
                                        const FragmentLane& lane) const {
    float* const target = states + int64_t(state_tile.head) * p.headdim * p.state_columns;
    for_each_pair(*this, p, state_tile, lane, [&](float low, float high, bool is_there, int64_t offset) {
      if (is_there) *reinterpret_cast<float2*>(target + offset) = {low, high};
    });
  }

  // Scales the state. Where a sequence begins in the chunk, callers drop the state instead: zero times Inf would be NaN.
  __device__ __forceinline__ void decay(float chunk_decay) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] *= chunk_decay;
    }
  }

  // The address of this thread's registers of a block of columns, in a workspace in register order.
  template <typename Float>
  static __device__ __forceinline__ auto registers_of(Float* states, int block) {
    using Vector = std::conditional_t<std::is_const_v<Float>, const float4, float4>;
    return reinterpret_cast<Vector*>(states) + block * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
  }
  // Stores the registers as they are, for the thread of the same index in another warpgroup.
  __device__ __forceinline__ void store_registers(float* target) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      __stcg(registers_of(target, n), float4{values[n][0], values[n][1], values[n][2], values[n][3]});
    }
  }
  // Calls body(values, stored) for each block of columns.
  template <typename Body>
  __device__ __forceinline__ void read_registers(const float* source, const Body& body) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float4 stored = __ldcg(registers_of(source, n));
      body(values[n], {stored.x, stored.y, stored.z, stored.w});
    }
  }

  // Rotates the blocks of columns: block `blocks` becomes the first.
  __device__ __forceinline__ void rotate(int blocks) {
    const State before = *this;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] = before.values[(n + blocks) % kBlocks][i];
    }
  }

  // Rounds to a tile with the warpgroup's rows: all columns of the state, or its panel-th `columns` columns.
  template <typename Scalar, int columns>
  __device__ __forceinline__ void round(SmemTile<columns, sizeof(Scalar)>& tile, const FragmentPairs<sizeof(Scalar)>& pairs,
                                        int panel = 0) const {
    constexpr int kTileBlocks = columns / 8;
#pragma unroll
    for (int n = 0; n < kTileBlocks; ++n) {
      const float (&block)[4] = values[panel * kTileBlocks + n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pairs.at(tile, n, half) = cuda::pack<Scalar>(block[2 * half], block[2 * half + 1]);
      }
    }
  }

  // The operand A of the state's group-th 16 columns.
  template <typename Scalar>
  __device__ __forceinline__ void pack(int group, OperandA<Scalar>& a) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&block)[4] = values[2 * group + i / 2];
      if constexpr (std::is_same_v<Scalar, float>) {
        a[i / 2 * 4 + i % 2] = block[i % 2 * 2];
        a[i / 2 * 4 + i % 2 + 2] = block[i % 2 * 2 + 1];
      } else {
        a[i] = cuda::pack<Scalar>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
      }
    }
  }
};

// Loads an operand A: x^T of the warp's rows, and of 16 steps, the group-th 16 rows of the tile.
__device__ __forceinline__ void load_inputs(uint32_t (&x)[4], SmemTile<kStateRows>& tile, int group, const FragmentLane& lane) {
  ldmatrix_transposed(x, tile.ldmatrix_row(16 * group, 2 * lane.warp, lane.index));
}
__device__ __forceinline__ void load_inputs(float (&x)[8], SmemTile<kStateRows, 4>& tile, int group, const FragmentLane& lane) {
  const auto operand = make_warp_operand<4>(&tile, SmemTile<kStateRows, 4>::kPanelBytes, lane.index);
  load_a<true>(x, rows_of(columns_of(operand, lane.warp), group));
}

// x^T of the group-th 16 rows, which are steps in that order, each step times its weight. `lo`, if given, receives the low
// parts of a hi/lo split.
template <typename Scalar, typename Order = InOrder>
__device__ __forceinline__ void scale_inputs(const uint32_t (&x)[4], const float (&weights)[kChunk], int group,
                                             const FragmentLane& lane, uint32_t (&scaled)[4], uint32_t* lo = nullptr) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto weight =
        *reinterpret_cast<const float2*>(&weights[kBlockSteps * Order::block_at(2 * group + half) + 2 * lane.pair]);
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float2 values = unpack<Scalar>(x[i]);
      const float low = values.x * weight.x, high = values.y * weight.y;
      scaled[i] = pack<Scalar>(low, high);
      if (lo != nullptr) lo[i] = pack_lo<Scalar>(low, high, scaled[i]);
    }
  }
}

// The fp32 version. Steps before `first` become zero even if x is NaN.
template <typename Scalar>
__device__ __forceinline__ void scale_inputs(const float (&x)[8], const float (&weights)[kChunk], int group,
                                             const FragmentLane& lane, float (&scaled)[8], int first = 0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int step = kBlockSteps * (2 * group + half) + 2 * lane.pair;
    const auto weight = *reinterpret_cast<const float2*>(&weights[step]);
#pragma unroll
    for (int i = 4 * half; i < 4 * half + 4; ++i) {
      const bool is_second = i % 4 >= 2;
      scaled[i] = step + is_second < first ? 0.0f : x[i] * (is_second ? weight.y : weight.x);
    }
  }
}

}  // namespace ssm_kernels::cuda::chunked
