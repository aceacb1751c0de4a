// The SSD kernels' work between their matrix products, on fragments as cuda/ptx/mma_sm80.cuh and cuda/ptx/wgmma_sm90.cuh spread
// them: a warp has 16 rows, a lane of those two, `row` and 8 further, and of each block of 8 columns two, 2 pair and the next.
#pragma once

#include <type_traits>

#include "cuda/fragment.cuh"
#include "ssd/cuda/chunk_cumsum.cuh"

namespace ssm_kernels::ssd {

constexpr int kStepBlocks = kChunk / 8, kStepGroups = kChunk / 16;

// In place of a piece's decay: a sequence begins in it, and nothing is left of the state before.
constexpr float kReset = -1;
__device__ __forceinline__ void add_decay(const SsdParams& p, float& segment_decay, const ChunkTables& tables) {
  segment_decay = has_reset(p, tables) || segment_decay == kReset ? kReset : segment_decay * tables.chunk_decay;
}

// Of the matrices of several sequences, those of one: null of null.
template <typename Pointer>
__device__ __forceinline__ Pointer* states_of(const SsdParams& p, Pointer* states, int64_t entry) {
  return states == nullptr ? nullptr : states + entry * p.heads * p.headdim * p.dstate;
}

// The warp's rows of a head's state, in registers.
template <int dstate>
struct State {
  static constexpr int kBlocks = dstate / 8;
  float values[kBlocks][4];

  // body(low, high, is_there, offset) for two neighboring elements at that offset of a (headdim, dstate) matrix.
  template <typename Self, typename Body>
  static __device__ __forceinline__ void for_each_pair(Self& self, const SsdParams& p, const StateTile& state_tile,
                                                       const FragmentLane& lane, const Body& body) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + 8 * half, column = state_tile.first_column + 8 * n + 2 * lane.pair;
        const bool is_there = row < state_tile.rows && column < p.dstate;
        body(self.values[n][2 * half], self.values[n][2 * half + 1], is_there,
             (int64_t(state_tile.first_row) + row) * p.dstate + column);
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

  // From, and to, the matrices of all heads of one sequence; zero from a null pointer.
  __device__ __forceinline__ void load(const SsdParams& p, const float* states, const StateTile& state_tile,
                                       const FragmentLane& lane) {
    const float* const source = states + int64_t(state_tile.head) * p.headdim * p.dstate;
    const bool is_given = states != nullptr;
    for_each_pair(*this, p, state_tile, lane, [&](float& low, float& high, bool is_there, int64_t offset) {
      const float2 pair = load_pair(source + offset, is_there && is_given);
      low = pair.x;
      high = pair.y;
    });
  }
  __device__ __forceinline__ void store(const SsdParams& p, float* states, const StateTile& state_tile,
                                        const FragmentLane& lane) const {
    float* const target = states + int64_t(state_tile.head) * p.headdim * p.dstate;
    for_each_pair(*this, p, state_tile, lane, [&](float low, float high, bool is_there, int64_t offset) {
      if (is_there) *reinterpret_cast<float2*>(target + offset) = {low, high};
    });
  }

  // Where a sequence begins in the chunk nothing is left of the state: that is not a product with zero.
  __device__ __forceinline__ void decay(float chunk_decay) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] *= chunk_decay;
    }
  }

  // A thread's place in a block of columns, where registers are stored as they are.
  template <typename Float>
  static __device__ __forceinline__ auto registers_of(Float* states, int block) {
    using Vector = std::conditional_t<std::is_const_v<Float>, const float4, float4>;
    return reinterpret_cast<Vector*>(states) + block * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
  }
  // The registers as they are, one block of columns after another, between threads of the same place in their units.
  __device__ __forceinline__ void store_registers(float* target) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      __stcg(registers_of(target, n), float4{values[n][0], values[n][1], values[n][2], values[n][3]});
    }
  }
  // body(values, stored) for each block.
  template <typename Body>
  __device__ __forceinline__ void read_registers(const float* source, const Body& body) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float4 stored = __ldcg(registers_of(source, n));
      body(values[n], {stored.x, stored.y, stored.z, stored.w});
    }
  }

  // The blocks from that number on become the first.
  __device__ __forceinline__ void rotate(int blocks) {
    const State before = *this;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] = before.values[(n + blocks) % kBlocks][i];
    }
  }

  // To a tile whose rows are the unit's: all columns, or the part-th of as many as the tile has.
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

  // The operand A of 16 columns.
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

// What pieces of walks do to the state of a unit, each piece at a place of its own: the state after it, begun with zero, in the
// order of its threads' registers, and its decay.
template <int dstate>
struct SegmentSummaries {
  float *states, *decays;

  __device__ __forceinline__ float* registers_of(int place) const { return states + int64_t(place) * (kStateRows * dstate); }

  // By the threads of the unit.
  __device__ __forceinline__ void store(const State<dstate>& after_zero, float decay, int place) const {
    after_zero.store_registers(registers_of(place));
    if (threadIdx.x % kWarpgroupThreads == 0) decays[place] = decay;
  }

  // Takes a state through the pieces at each `stride`-th place from the first on, up to `end`, in that order.
  __device__ __forceinline__ void fold_into(State<dstate>& state, int first, int end, int stride) const {
#pragma unroll 1
    for (int place = first; place < end; place += stride) {
      const float decay = __ldcg(decays + place);
      state.read_registers(registers_of(place), [&](float (&values)[4], const float (&stored)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = decay == kReset ? stored[i] : fmaf(decay, values[i], stored[i]);
      });
    }
  }
};

// Of the warp's rows of a matrix whose rows are steps in that order, the eight steps of one half.
template <typename Order>
__device__ __forceinline__ int block_of(const FragmentLane& lane, int half) {
  return Order::block_at(2 * lane.warp + half);
}
template <typename Order>
__device__ __forceinline__ int step_of(const FragmentLane& lane, int half) {
  return kBlockSteps * block_of<Order>(lane, half) + lane.quad;
}

// Of M^T only blocks on and right of the diagonal are ever weighed: the others, to be made once.
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

// Weighs this warp's rows of (B C^T)^T, or so many blocks of their columns, which makes M^T of them. What all warps take of the
// tables is read when it is made; what is left, when registers are there.
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
    for (int i = 0; i < kColumns; ++i) columns_[i] = of_columns(tables.log2_cumsum, first_block + kFirstColumn + i);
  }

  // put(low, high, n, half) for a lane's pairs of neighboring elements that are not left of the diagonal, in the order of
  // FragmentPairs.
  template <typename Put>
  __device__ __forceinline__ void apply(const float (&m)[blocks][4], const Put& put) const {
    if constexpr (kIsBalanced) {
      float2 chosen[kChosen];
#pragma unroll
      for (int i = 0; i < kChosen; ++i) chosen[i] = of_columns(tables_.log2_cumsum, is_of_first(i) ? i : kLastChosen - i);
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
  // FromBothEnds a warp w has 9 blocks of 8 by 8 that are not left of the diagonal, all but 3 of them the same in all warps: in
  // the first half of its rows from column w on, and so 3 to 7, in the second half from 7 - w on, and so 7. For i = 0, 1, 2 the
  // others are column i of the first half, if i >= w, else column 6 - i of the second.
  static constexpr bool kIsBalanced = std::is_same_v<Order, FromBothEnds>;
  static constexpr int kChosen = kWarpgroupWarps - 1, kLastChosen = kStepBlocks - 2;
  static_assert(kStepBlocks == 2 * kWarpgroupWarps, "two blocks of steps to a warp");
  static_assert(!kIsBalanced || blocks == kStepBlocks, "all warps have equally many blocks of all columns");
  __device__ __forceinline__ bool is_of_first(int i) const { return i >= lane_.warp; }

  static constexpr int kFirstColumn = kIsBalanced ? kChosen : 0, kColumns = blocks - kFirstColumn;

  template <typename Pair = float2, typename Element>
  __device__ __forceinline__ Pair of_columns(const Element (&table)[kChunk], int block) const {
    return *reinterpret_cast<const Pair*>(&table[kBlockSteps * block + 2 * lane_.pair]);
  }

  template <typename Put>
  __device__ __forceinline__ void apply_block(float low, float high, const float2& log2_cumsum, int n, int half,
                                              bool is_on_diagonal, const Put& put) const {
    const float log2_of_row = half == 0 ? log2_cumsum_[0] : log2_cumsum_[1], gain = half == 0 ? gain_[0] : gain_[1];
    float log2_between[2] = {log2_cumsum.x - log2_of_row, log2_cumsum.y - log2_of_row};
    if constexpr (std::is_same_v<Tables, Fp32ChunkTables>) {
      const float2 lo = of_columns(tables_.log2_cumsum_lo, n);
      const float lo_of_row = tables_.log2_cumsum_lo[step_of<Order>(lane_, half)];
      log2_between[0] += lo.x - lo_of_row;
      log2_between[1] += lo.y - lo_of_row;
    }
    float scaled[2] = {low * (gain * Math<float>::exp2(log2_between[0])), high * (gain * Math<float>::exp2(log2_between[1]))};
    // After i, the column, or of an earlier sequence: it may be anything then, also no number.
    if (is_on_diagonal && lane_.quad > 2 * lane_.pair) scaled[0] = 0;
    if (is_on_diagonal && lane_.quad > 2 * lane_.pair + 1) scaled[1] = 0;
    if constexpr (has_resets) {
      const int2 first = of_columns<int2>(tables_.first, n);
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

// y^T, a column for each step, times the decay from before the chunk.
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

// x^T of the warp's rows and the 16 steps of a group of a tile's rows: an operand A.
__device__ __forceinline__ void load_inputs(uint32_t (&x)[4], SmemTile<kStateRows>& tile, int group, const FragmentLane& lane) {
  cuda::ldmatrix_transposed(x, tile.ldmatrix_row(16 * group, 2 * lane.warp, lane.index));
}
__device__ __forceinline__ void load_inputs(float (&x)[8], SmemTile<kStateRows, 4>& tile, int group, const FragmentLane& lane) {
  const auto operand = cuda::make_warp_operand<4>(&tile, SmemTile<kStateRows, 4>::kPanelBytes, lane.index);
  cuda::load_a<true>(x, cuda::rows_of(cuda::columns_of(operand, lane.warp), group));
}

// x^T of the 16 steps of a group of rows in that order, each times its weight; `rest` is what rounding these leaves, if asked
// for.
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

// Those of steps before `first` are zero, be x no number.
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

// D of the lane's two rows.
__device__ __forceinline__ float2 load_D(const SsdFwdParams& p, const StateTile& state_tile, const FragmentLane& lane) {
  const auto load = [&](int row) {
    return p.D != nullptr && row < state_tile.rows
               ? p.D[state_tile.head * p.D_stride_head + (state_tile.first_row + row) * p.D_stride_row]
               : 0.0f;
  };
  return {load(lane.row), load(lane.row + 8)};
}

// Rounds out from y^T, x^T, whose steps are in that order, and, if there is one, z: this warp's columns.
template <typename Scalar, typename Order>
class EpilogueMath {
 public:
  __device__ __forceinline__ EpilogueMath(const SsdFwdParams& p, const StateTile& state_tile, const FragmentLane& lane)
      : D_(load_D(p, state_tile, lane)) {}

  // To a tile of which each warp has columns of its own.
  __device__ __forceinline__ void round(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                        SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile,
                                        const FragmentLane& lane) const {
    if (z_tile == nullptr) {
      round_gated(y, x, tile, lane, [](int, float2(&)[4]) {});
    } else {
      round_gated(y, x, tile, lane, [&](int group, float2(&values)[4]) {
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
  }

 private:
  template <typename Gate>
  __device__ __forceinline__ void round_gated(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                              SmemTile<kStateRows>& tile, const FragmentLane& lane, const Gate& gate) const {
#pragma unroll
    for (int i = 0; i < kStepGroups; ++i) {
      float2 values[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int position = Order::position_of(2 * i + word / 2);
        const float2 u = cuda::unpack<Scalar>(x[position / 2][position % 2 * 2 + word % 2]);
        const float D = word % 2 == 0 ? D_.x : D_.y;
        const float (&ungated)[4] = y[2 * i + word / 2];
        values[word] = {fmaf(D, u.x, ungated[word % 2 * 2]), fmaf(D, u.y, ungated[word % 2 * 2 + 1])};
      }
      gate(i, values);
      uint32_t rounded[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) rounded[word] = cuda::pack<Scalar>(values[word].x, values[word].y);
      cuda::stmatrix_transposed(tile.ldmatrix_row(16 * i, 2 * lane.warp, lane.index), rounded);
    }
  }

  float2 D_;
};

template <>
class EpilogueMath<float, InOrder> {
 public:
  __device__ __forceinline__ EpilogueMath(const SsdFwdParams& p, const StateTile& state_tile, const FragmentLane& lane)
      : D_(load_D(p, state_tile, lane)) {}

  __device__ __forceinline__ void round(const float (&y)[kStepBlocks][4], const float (&x)[kStepGroups][8],
                                        SmemTile<kStateRows, 4>* z_tile, SmemTile<kStateRows, 4>& tile,
                                        const FragmentLane& lane) const {
    if (z_tile == nullptr) {
      round_gated(y, x, tile, lane, [](float value, int, int) { return value; });
    } else {
      round_gated(y, x, tile, lane, [&](float value, int step, int row) { return value * silu(z_tile->element(step, row)); });
    }
  }

 private:
  template <typename Gate>
  __device__ __forceinline__ void round_gated(const float (&y)[kStepBlocks][4], const float (&x)[kStepGroups][8],
                                              SmemTile<kStateRows, 4>& tile, const FragmentLane& lane, const Gate& gate) const {
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, step = 8 * n + 2 * lane.pair + i % 2, row = lane.row + 8 * half;
        const float value = fmaf(half == 0 ? D_.x : D_.y, x[n / 2][n % 2 * 4 + i % 2 * 2 + half], y[n][i]);
        tile.element(step, row) = gate(value, step, row);
      }
    }
  }

  float2 D_;
};

}  // namespace ssm_kernels::ssd
