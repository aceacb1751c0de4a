// The SSD kernels' work between their matrix products, on accumulator fragments (cuda/fragment.cuh): the state, decays and
// gains, and out. A warp has 16 rows; a lane has two of these, `row` and row + 8, and of each block of 8 columns the two
// columns 2 pair and 2 pair + 1.
//
// The stages by mamba_ssm's names: State accumulates chunk_state and scales the state before the chunk (state_passing),
// DecayMask makes M^T of bmm_chunk's product, and round_out ends chunk_scan.
#pragma once

#include <type_traits>

#include "cuda/carry.cuh"
#include "cuda/fragment.cuh"
#include "ssd/cuda/chunk_cumsum.cuh"

namespace ssm_kernels::ssd {

constexpr int kStepBlocks = kChunk / 8, kStepGroups = kChunk / 16;

// Stands for the decay of a segment in which a sequence begins: nothing is left of the state before it.
constexpr float kReset = -1;
__device__ __forceinline__ void add_decay(const SsdParams& p, float& segment_decay, const ChunkTables& tables) {
  segment_decay = has_reset(p, tables) || segment_decay == kReset ? kReset : segment_decay * tables.chunk_decay;
}

// The states of one sequence; null if `states` is null.
template <typename Pointer>
__device__ __forceinline__ Pointer* states_of(const SsdParams& p, Pointer* states, int64_t entry) {
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
  static __device__ __forceinline__ void for_each_pair(Self& self, const SsdParams& p, const StateTile& state_tile,
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
  __device__ __forceinline__ void load(const SsdParams& p, const float* states, const StateTile& state_tile,
                                       const FragmentLane& lane) {
    const float* const source = states + int64_t(state_tile.head) * p.headdim * p.state_columns;
    const bool is_given = states != nullptr;
    for_each_pair(*this, p, state_tile, lane, [&](float& low, float& high, bool is_there, int64_t offset) {
      const float2 pair = load_pair(source + offset, is_there && is_given);
      low = pair.x;
      high = pair.y;
    });
  }
  __device__ __forceinline__ void store(const SsdParams& p, float* states, const StateTile& state_tile,
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
  __device__ __forceinline__ void pack(int group, cuda::OperandA<Scalar>& a) const {
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

// Summaries of segments for the state tiles: the state after the segment, begun with zero, in the order of the threads'
// registers, and the segment's decay.
template <int dstate>
struct SegmentSummaries {
  float *states, *decays;

  __device__ __forceinline__ float* registers_of(int index) const { return states + int64_t(index) * (kStateRows * dstate); }

  // Called by all threads of the warpgroup.
  __device__ __forceinline__ void store(const State<dstate>& after_zero, float decay, int index) const {
    after_zero.store_registers(registers_of(index));
    if (threadIdx.x % kWarpgroupThreads == 0) decays[index] = decay;
  }

  // Takes a state, or its blocks of columns from first_block on, through the segments of indices first, first + stride, ...
  // below end, in that order.
  template <int columns>
  __device__ __forceinline__ void fold_into(State<columns>& state, int first, int end, int stride, int first_block = 0) const {
#pragma unroll 1
    for (int index = first; index < end; index += stride) {
      const float decay = __ldcg(decays + index);
      const float* const source = registers_of(index) + first_block * (kWarpgroupThreads * 4);
      state.read_registers(source, [&](float (&values)[4], const float (&stored)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = cuda::AffineMap<float>{decay, stored[i]}(values[i], decay == kReset);
      });
    }
  }
};

// For a matrix whose rows are steps in that order: the block of eight steps in one half of the warp's rows, and the lane's
// step.
template <typename Order>
__device__ __forceinline__ int block_of(const FragmentLane& lane, int half) {
  return Order::block_at(2 * lane.warp + half);
}
template <typename Order>
__device__ __forceinline__ int step_of(const FragmentLane& lane, int half) {
  return kBlockSteps * block_of<Order>(lane, half) + lane.quad;
}

// Clears the blocks of M^T left of the diagonal, once. DecayMask writes only the others.
template <typename Order>
__device__ __forceinline__ void clear_left_of_diagonal(SmemTile<kChunk>& bmm, const FragmentLane& lane) {
  if (lane.pair != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int block = 0; block < block_of<Order>(lane, half); ++block) {
      *bmm.vector(lane.row + 8 * half, block) = {0, 0, 0, 0};
    }
  }
}

// Applies decays and gains to this warp's rows of (B C^T)^T, or to `blocks` column blocks of them, which turns them into M^T.
// The constructor reads the table values that all warps need; apply() reads the others, when registers are free.
template <typename Order, bool has_resets, typename Tables = ChunkTables, int blocks = kStepBlocks>
class DecayMask {
 public:
  __device__ __forceinline__ DecayMask(const Tables& tables, const FragmentLane& lane, int first_block = 0)
      : tables_(tables), lane_(lane), first_block_(first_block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int step = step_of<Order>(lane, half);
      log2_cumsum_[half] = tables.log2_cumsum[step];
      gain_[half] = tables.gain[step];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) columns_[i] = column_pair(tables.log2_cumsum, first_block + kFirstColumn + i);
  }

  // Calls put(low, high, n, half) for the lane's pairs of neighboring elements that are not left of the diagonal, indexed as in
  // FragmentPairs.
  template <typename Put>
  __device__ __forceinline__ void apply(const float (&m)[blocks][4], const Put& put) const {
    if constexpr (kIsBalanced) {
      float2 chosen[kChosen];
#pragma unroll
      for (int i = 0; i < kChosen; ++i) chosen[i] = column_pair(tables_.log2_cumsum, is_of_first(i) ? i : kLastChosen - i);
#pragma unroll
      for (int n = kFirstColumn; n < kStepBlocks; ++n) {
        const bool is_on_diagonal = n == kFirstColumn && lane_.warp == n;
        apply_block(m[n][0], m[n][1], columns_[n - kFirstColumn], n, 0, is_on_diagonal, put);
      }
      apply_block(m[kStepBlocks - 1][2], m[kStepBlocks - 1][3], columns_[kColumns - 1], kStepBlocks - 1, 1, lane_.warp == 0,
                  put);
#pragma unroll
      for (int i = 0; i < kChosen; ++i) {
        const int other = kLastChosen - i;
        const bool is_first = is_of_first(i), is_on_diagonal = i == lane_.warp || i == lane_.warp - 1;
        apply_block(is_first ? m[i][0] : m[other][2], is_first ? m[i][1] : m[other][3], chosen[i], is_first ? i : other,
                    is_first ? 0 : 1, is_on_diagonal, put);
      }
    } else {
#pragma unroll
      for (int i = 0; i < blocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = first_block_ + i, block = block_of<Order>(lane_, half);
          if (n < block) continue;
          apply_block(m[i][2 * half], m[i][2 * half + 1], columns_[i], n, half, n == block, put);
        }
      }
    }
  }

 private:
  // FromBothEnds gives each warp 9 blocks (8 x 8) that are not left of the diagonal. Warp w has columns w to 7 in the first
  // half of its rows, and 7 - w to 7 in the second. Columns 3 to 7 of the first half and 7 of the second are common to all
  // warps. The other three, for i = 0, 1, 2, are column i of the first half if i >= w, else column 6 - i of the second.
  static constexpr bool kIsBalanced = std::is_same_v<Order, FromBothEnds>;
  static constexpr int kChosen = kWarpgroupWarps - 1, kLastChosen = kStepBlocks - 2;
  static_assert(kStepBlocks == 2 * kWarpgroupWarps, "each warp has two blocks of steps");
  static_assert(!kIsBalanced || blocks == kStepBlocks, "the warps have equally many blocks only if they have all columns");
  __device__ __forceinline__ bool is_of_first(int i) const { return i >= lane_.warp; }

  static constexpr int kFirstColumn = kIsBalanced ? kChosen : 0, kColumns = blocks - kFirstColumn;

  template <typename Pair = float2, typename Element>
  __device__ __forceinline__ Pair column_pair(const Element (&table)[kChunk], int block) const {
    return *reinterpret_cast<const Pair*>(&table[kBlockSteps * block + 2 * lane_.pair]);
  }

  template <typename Put>
  __device__ __forceinline__ void apply_block(float low, float high, const float2& log2_cumsum, int n, int half,
                                              bool is_on_diagonal, const Put& put) const {
    const float log2_of_row = half == 0 ? log2_cumsum_[0] : log2_cumsum_[1], gain = half == 0 ? gain_[0] : gain_[1];
    float log2_between[2] = {log2_cumsum.x - log2_of_row, log2_cumsum.y - log2_of_row};
    if constexpr (std::is_same_v<Tables, Fp32ChunkTables>) {
      const float2 lo = column_pair(tables_.log2_cumsum_lo, n);
      const float lo_of_row = tables_.log2_cumsum_lo[step_of<Order>(lane_, half)];
      log2_between[0] += lo.x - lo_of_row;
      log2_between[1] += lo.y - lo_of_row;
    }
    float scaled[2] = {low * (gain * Math<float>::exp2(log2_between[0])), high * (gain * Math<float>::exp2(log2_between[1]))};
    // Zero where step j is after step i, the column, or of an earlier sequence. The product may be Inf or NaN there.
    if (is_on_diagonal && lane_.quad > 2 * lane_.pair) scaled[0] = 0;
    if (is_on_diagonal && lane_.quad > 2 * lane_.pair + 1) scaled[1] = 0;
    if constexpr (has_resets) {
      const int2 first = column_pair<int2>(tables_.first, n);
      const int row = step_of<Order>(lane_, half);
      if (row < first.x) scaled[0] = 0;
      if (row < first.y) scaled[1] = 0;
    }
    put(scaled[0], scaled[1], n, half);
  }

  const Tables& tables_;
  const FragmentLane& lane_;
  int first_block_;
  float log2_cumsum_[2], gain_[2];
  float2 columns_[kColumns];
};

// Scales y^T, a column for each step, by the decay from before the chunk.
__device__ __forceinline__ void scale_by_exp_cumsum(float (&y)[kStepBlocks][4], const ChunkTables& tables,
                                                    const FragmentLane& lane) {
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
    const auto exp_cumsum = *reinterpret_cast<const float2*>(&tables.exp_cumsum[8 * n + 2 * lane.pair]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      y[n][2 * half] *= exp_cumsum.x;
      y[n][2 * half + 1] *= exp_cumsum.y;
    }
  }
}

// Loads an operand A: x^T of the warp's rows, and of 16 steps, the group-th 16 rows of the tile.
__device__ __forceinline__ void load_inputs(uint32_t (&x)[4], SmemTile<kStateRows>& tile, int group, const FragmentLane& lane) {
  cuda::ldmatrix_transposed(x, tile.ldmatrix_row(16 * group, 2 * lane.warp, lane.index));
}
__device__ __forceinline__ void load_inputs(float (&x)[8], SmemTile<kStateRows, 4>& tile, int group, const FragmentLane& lane) {
  const auto operand = cuda::make_warp_operand<4>(&tile, SmemTile<kStateRows, 4>::kPanelBytes, lane.index);
  cuda::load_a<true>(x, cuda::rows_of(cuda::columns_of(operand, lane.warp), group));
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
      const float2 values = cuda::unpack<Scalar>(x[i]);
      const float low = values.x * weight.x, high = values.y * weight.y;
      scaled[i] = cuda::pack<Scalar>(low, high);
      if (lo != nullptr) lo[i] = cuda::pack_lo<Scalar>(low, high, scaled[i]);
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

// D for the lane's two rows.
__device__ __forceinline__ float2 load_D(const SsdFwdParams& p, const StateTile& state_tile, const FragmentLane& lane) {
  const auto load = [&](int row) {
    return p.D != nullptr && row < state_tile.rows
               ? p.D[state_tile.head * p.D_stride_head + (state_tile.first_row + row) * p.D_stride_row]
               : 0.0f;
  };
  return {load(lane.row), load(lane.row + 8)};
}

// The math of the epilogue: out = (y + D x) silu(z), rounded to this warp's columns of a tile, from y^T, x^T, whose steps are
// in that order, and a tile of z or null.
template <typename Scalar, typename Order>
__device__ __forceinline__ void round_out(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4], float2 D,
                                          SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile, const FragmentLane& lane) {
  const auto round_gated = [&](const auto& gate) {
#pragma unroll
    for (int i = 0; i < kStepGroups; ++i) {
      float2 values[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int position = Order::position_of(2 * i + word / 2);
        const float2 u = cuda::unpack<Scalar>(x[position / 2][position % 2 * 2 + word % 2]);
        const float D_of_row = word % 2 == 0 ? D.x : D.y;
        const float (&ungated)[4] = y[2 * i + word / 2];
        values[word] = {fmaf(D_of_row, u.x, ungated[word % 2 * 2]), fmaf(D_of_row, u.y, ungated[word % 2 * 2 + 1])};
      }
      gate(i, values);
      uint32_t rounded[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) rounded[word] = cuda::pack<Scalar>(values[word].x, values[word].y);
      cuda::stmatrix_transposed(tile.ldmatrix_row(16 * i, 2 * lane.warp, lane.index), rounded);
    }
  };
  if (z_tile == nullptr) {
    round_gated([](int, float2(&)[4]) {});
    return;
  }
  round_gated([&](int group, float2(&values)[4]) {
    uint32_t z[4];
    cuda::ldmatrix_transposed(z, z_tile->ldmatrix_row(16 * group, 2 * lane.warp, lane.index));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float2 gate = cuda::unpack<Scalar>(z[word]);
      values[word].x *= silu(gate.x);
      values[word].y *= silu(gate.y);
    }
  });
}

// The fp32 version.
template <typename Scalar, typename Order>
__device__ __forceinline__ void round_out(const float (&y)[kStepBlocks][4], const float (&x)[kStepGroups][8], float2 D,
                                          SmemTile<kStateRows, 4>* z_tile, SmemTile<kStateRows, 4>& tile,
                                          const FragmentLane& lane) {
  const auto round_gated = [&](const auto& gate) {
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, step = 8 * n + 2 * lane.pair + i % 2, row = lane.row + 8 * half;
        const float value = fmaf(half == 0 ? D.x : D.y, x[n / 2][n % 2 * 4 + i % 2 * 2 + half], y[n][i]);
        tile.element(step, row) = gate(value, step, row);
      }
    }
  };
  if (z_tile == nullptr) {
    round_gated([](float value, int, int) { return value; });
  } else {
    round_gated([&](float value, int step, int row) { return value * silu(z_tile->element(step, row)); });
  }
}

}  // namespace ssm_kernels::ssd
