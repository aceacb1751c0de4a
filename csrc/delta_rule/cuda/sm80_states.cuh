// The chains over time of the delta rule with mma.sync. S is V x K; s is the cumulative sum of log decays from the chunk's
// start, l its last step, N and P are those of sm80_chunk.cuh, D the gradient of the state after the chunk, g that of out.
// Forward in time, for out (kOut) or for backward (kStates):
//
//   R^T = V^T - (S K^T) e^(s_i)                   E^T = R^T + (R^T diag(beta)) N^T
//   O^T = scale (S Q^T) e^(s_i) + (diag(beta) E)^T P^T
//   S  <- e^(s_l) S + (beta_j e^(s_l - s_j) E_j)^T K
//
// and backward in time (kGradients), as in bwd_states.cuh:
//
//   dU^T = g^T P + (D K^T) e^(s_l - s_j)          Y^T = dU^T + (dU^T diag(beta)) N
//   D  <- e^(s_l) D + scale (e^(s_i) g_i)^T Q - (e^(s_j) beta_j Y_j)^T K
//
// A block takes 64 or 128 rows of V of one head and one sequence, with a warpgroup for each 64. Each warp holds 16 rows of S or
// D as accumulators, and makes all values of the chain of these. K, Q, N and P are operands B in shared memory; warps exchange
// nothing. Where shared memory has two stages, a block copies the next chunk during this one.
//
// fp16 and bf16: S, U = diag(beta) E and P are rounded once. In fp16 the operands that are added to D are scaled by a power of
// two, by which D is divided again: the decays from the chunk's start may be below fp16's range. The operand of N, and in
// kStates what is added to S, are hi/lo splits: for correlated keys their roundings would make most of the error.
#pragma once

#include "cuda/chunked/epilogue.cuh"
#include "delta_rule/cuda/segment_maps.cuh"
#include "delta_rule/cuda/sm80_chunk.cuh"

namespace ssm_kernels::delta_rule {

enum class Sm80Pass { kOut, kStates, kGradients };

// out = y. (cuda/chunked/epilogue.cuh)
struct Sm80RoundOut {
  __device__ __forceinline__ Sm80RoundOut(const DeltaRuleSm80Params&, const StateTile&, const FragmentLane&) {}

  template <typename Scalar, typename Order>
  __device__ __forceinline__ void round(const float (&y)[kStepBlocks][4], const cuda::OperandA<Scalar> (&)[kStepGroups],
                                        TileOf<Scalar, kStateRows>*, TileOf<Scalar, kStateRows>& tile,
                                        const FragmentLane& lane) const {
    if constexpr (kIsFp32<Scalar>) {
#pragma unroll
      for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile.element(8 * n + 2 * lane.pair + i % 2, lane.row + 8 * (i / 2)) = y[n][i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kStepGroups; ++i) {
        uint32_t rounded[4];
        pack_operand<Scalar>(y, i, rounded);
        cuda::stmatrix_transposed(tile.ldmatrix_row(16 * i, 2 * lane.warp, lane.index), rounded);
      }
    }
  }
};

template <typename Scalar, int columns>
struct alignas(128) Sm80Stage {
  TileOf<Scalar, columns> k, q;  // q except in kStates
  Sm80MatricesOfChunk<Scalar> matrices;
  // Followed by a tile of v or g for each warpgroup.
  using RowTile = TileOf<Scalar, kStateRows>;

  static SSM_HOST_DEVICE constexpr int bytes(int warpgroups) {
    return static_cast<int>(sizeof(Sm80Stage) + warpgroups * sizeof(RowTile));
  }
  __device__ __forceinline__ RowTile& rows(int warpgroup) { return reinterpret_cast<RowTile*>(this + 1)[warpgroup]; }
};
static_assert(Sm80Stage<float, 64>::bytes(2) == sm80_scan_bytes(64, 4, 2), "the host chooses the warpgroups");
static_assert(Sm80Stage<__half, 128>::bytes(1) == sm80_scan_bytes(128, 2, 1), "the host chooses the warpgroups");

template <typename Scalar, int columns, Sm80Pass pass>
struct Sm80States {
  using Params = DeltaRuleSm80Params;
  using Stage = Sm80Stage<Scalar, columns>;
  using Operand = cuda::OperandA<Scalar>;
  using Epilogue = RegisterEpilogue<Scalar, Sm80RoundOut, Params>;
  static constexpr bool kIsReverse = pass == Sm80Pass::kGradients;
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads, kStateGroups = columns / 16, kMaxStages = 2;

  const Params& p;
  int stages;
  unsigned char* memory;
  const WorkSpan& at;
  const StateTile& state_tile;
  int warpgroup;
  const FragmentLane& lane;

  __device__ __forceinline__ void run() const {
    State<columns> state;
    const auto of_entry = [&](auto* states) { return states_of(p, states, at.entry); };
    state.load(p, of_entry(kIsReverse ? p.grad_final_states : p.initial_states), state_tile, lane);
    Epilogue out(p, at, state_tile, lane);
    if (stages > 1) copy(0);
#pragma unroll 1
    for (int position = 0; position < at.chunks; ++position) {
      if (stages == 1) {
        __syncthreads();  // all warps have read the chunk before
        copy(position);
      }
      cuda::cp_async_wait<0>();
      __syncthreads();
      if (stages > 1) copy(position + 1);
      const int chunk = chunk_at(position);
      Stage& stage = stage_of(position);
      if constexpr (kIsReverse) {
        take_back(chunk, state, stage);
      } else {
        take_forward(chunk, state, stage, out);
      }
    }
    float* const target = of_entry(kIsReverse ? p.grad_initial_states : p.final_states);
    if (target != nullptr) state.store(p, target, state_tile, lane);
  }

 private:
  __device__ __forceinline__ int chunk_at(int position) const { return kIsReverse ? at.chunks - 1 - position : position; }
  __device__ __forceinline__ int64_t number_of(int chunk) const { return first_chunk_index(p, at.entry) + chunk; }
  __device__ __forceinline__ Stage& stage_of(int position) const {
    const int warpgroups = blockDim.x / kWarpgroupThreads;
    return *reinterpret_cast<Stage*>(memory + position % stages * Stage::bytes(warpgroups));
  }

  // Starts the block's copies of a chunk, if there is one, and commits a group.
  __device__ __forceinline__ void copy(int position) const {
    if (position < at.chunks) {
      const int chunk = chunk_at(position), steps = at.steps_of(chunk), key_head = state_tile.head / p.value_heads_per_key_head,
                thread = threadIdx.x, threads = blockDim.x;
      Stage& target = stage_of(position);
      const RowsView& rows = kIsReverse ? p.grad_out : p.v;
      copy_rows<Scalar, columns>(target.k, at.template rows<Scalar>(p.k, key_head, chunk), p.k.stride_step, p.dstate, steps,
                                 thread, threads);
      copy_bytes<sizeof(target.matrices)>(&target.matrices, sm80_matrices_of<Scalar>(p, number_of(chunk), state_tile.head),
                                          thread, threads);
      const int value_rows = p.first_segments != nullptr ? p.value_rows - state_tile.first_row : state_tile.rows;
      copy_rows<Scalar, kStateRows>(target.rows(warpgroup),
                                    at.template rows<Scalar>(rows, state_tile.head, chunk) + state_tile.first_row,
                                    rows.stride_step, value_rows, steps, thread % kWarpgroupThreads, kWarpgroupThreads);
      if constexpr (pass != Sm80Pass::kStates) {
        copy_rows<Scalar, columns>(target.q, at.template rows<Scalar>(p.q, key_head, chunk), p.q.stride_step, p.dstate, steps,
                                   thread, threads);
      }
    }
    cuda::cp_async_commit();
  }

  // d = state rows^T. In fp32 the loop over the tile's panels is not unrolled, and rotates the state's registers.
  __device__ __forceinline__ void multiply_state(float (&d)[kStepBlocks][4], State<columns>& state,
                                                 const TileOf<Scalar, columns>& rows) const {
    constexpr int kPanels = kIsFp32<Scalar> ? TileOf<Scalar, columns>::kPanels : 1, kGroups = kStateGroups / kPanels;
    const auto b = operand_of(rows, lane.opaque());
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] = 0;
    }
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const auto of_panel = columns_of(b, panel * kGroups);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        Operand a;
        state.template pack<Scalar>(group, a);
        cuda::gemm<Scalar, false>(d, a, columns_of(of_panel, group), true);
      }
      if constexpr (kPanels > 1) state.rotate(2 * kGroups);
    }
  }

  // In fp16 a power of two that makes a chunk's first decay from its start 1/2 or more; 1 for decays of zero and subnormal
  // ones. Gates are at most zero: after a strong decay, a large positive gate would take the scaled decays beyond fp16's range.
  struct DecayScale {
    static constexpr bool kIsThere = std::is_same_v<Scalar, __half> && pass == Sm80Pass::kGradients;
    static constexpr int kMantissaBits = 23, kExponentOfHalf = 126;

    int exponent;  // the biased one of the decay

    __device__ __forceinline__ explicit DecayScale(float first_decay) {
      exponent = min(__float_as_int(first_decay) >> kMantissaBits & 0xff, kExponentOfHalf);
      if (exponent == 0) exponent = kExponentOfHalf;
    }
    __device__ __forceinline__ float up(float decay) const {
      return kIsThere ? decay * __int_as_float((2 * kExponentOfHalf + 1 - exponent) << kMantissaBits) : decay;
    }
    __device__ __forceinline__ float down() const { return __int_as_float((exponent + 1) << kMantissaBits); }
  };

  // The state before the chunk, decayed to its end.
  __device__ __forceinline__ void decay(State<columns>& state, float chunk_decay) const {
    if (chunk_decay == 0.0f) {
      state.clear();
    } else {
      state.decay(chunk_decay);
    }
  }

  __device__ __forceinline__ void take_forward(int chunk, State<columns>& state, Stage& stage, Epilogue& out) const {
    const auto& tables = stage.matrices.tables;
    if constexpr (pass == Sm80Pass::kStates) put_state(chunk, state, 0);

    State<kChunk> errors;
    float (&e)[kStepBlocks][4] = errors.values;
    multiply_state(e, state, stage.k);
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) {
      Operand v;
      load_inputs(v, stage.rows(warpgroup), j, lane);
#pragma unroll
      for (int n = 2 * j; n < 2 * j + 2; ++n) {
        const float2 by = column_pair(tables.exp_cumsum, n, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 values = pair_of<Scalar>(v, n, half);
          e[n][2 * half] = values.x - decayed(e[n][2 * half], by.x);
          e[n][2 * half + 1] = values.y - decayed(e[n][2 * half + 1], by.y);
        }
      }
    }
    // The sums are in place: steps of a group add to themselves and to later ones alone.
#pragma unroll
    for (int j = kStepGroups - 1; j >= 0; --j) {
      Operand a, lo;
      const auto inverse = operand_of(stage.matrices.n[0], lane.opaque());
      scale_operand<Scalar>(e, j, [&](int n) { return column_pair(tables.beta, 2 * j + n, lane); }, a, &lo);
      cuda::gemm<Scalar, true>(e, a, rows_of(inverse, j), true, 2 * j);
      if constexpr (!kIsFp32<Scalar>) {
        cuda::gemm<Scalar, true>(e, lo, rows_of(inverse, j), true, 2 * j);
        cuda::gemm<Scalar, true>(e, a, rows_of(operand_of(stage.matrices.n[1], lane), j), true, 2 * j);
      }
    }
    if constexpr (pass == Sm80Pass::kOut) write_out(chunk, state, stage, errors, out);
    if constexpr (pass == Sm80Pass::kStates) put_steps(chunk, e, 0);
    decay(state, tables.chunk_decay);
    for_each_group<Scalar>(errors, [&](int j, int place) {
      const auto k = operand_of(stage.k, lane.opaque());
      Operand a, lo;
      scale_operand<Scalar>(
          e, place,
          [&](int n) {
            const float2 by = column_pair(tables.gain_to_chunk_end, 2 * j + n, lane),
                         beta = column_pair(tables.beta, 2 * j + n, lane);
            return float2{by.x * beta.x, by.y * beta.y};
          },
          a, &lo);
      cuda::gemm<Scalar, true>(state.values, a, rows_of(k, j), true);
      if constexpr (pass == Sm80Pass::kStates && !kIsFp32<Scalar>) {
        cuda::gemm<Scalar, true>(state.values, lo, rows_of(k, j), true);
      }
    });
  }

  __device__ __forceinline__ void write_out(int chunk, State<columns>& state, Stage& stage, State<kChunk>& errors,
                                            Epilogue& out) const {
    const auto& tables = stage.matrices.tables;
    float y[kStepBlocks][4];
    multiply_state(y, state, stage.q);
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
      const float2 by = column_pair(tables.query_decay, n, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[n][i] = decayed(y[n][i], i % 2 == 0 ? by.x : by.y);
    }
    // Steps i before those of the group have zeros in P.
    for_each_group<Scalar>(errors, [&](int j, int place) {
      const auto p_rows = operand_of(stage.matrices.p, lane.opaque());
      Operand a;
      scale_operand<Scalar>(errors.values, place, [&](int n) { return column_pair(tables.beta, 2 * j + n, lane); }, a);
      cuda::gemm<Scalar, false>(y, a, columns_of(p_rows, j), true, 2 * place);
    });
    // The warp has read its columns of v.
    __syncwarp();
    const Operand unused[kStepGroups] = {};
    auto& tile = stage.rows(warpgroup);
    out.write(y, unused, nullptr, tile, lane, at.steps_of(chunk));
  }

  __device__ __forceinline__ void take_back(int chunk, State<columns>& state, Stage& stage) const {
    const auto& tables = stage.matrices.tables;
    put_state(chunk, state, 1);

    State<kChunk> grads;
    float (&y)[kStepBlocks][4] = grads.values;
    multiply_state(y, state, stage.k);
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
      const float2 by = column_pair(tables.gain_to_chunk_end, n, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[n][i] = decayed(y[n][i], i % 2 == 0 ? by.x : by.y);
    }
#pragma unroll kUnrolledGroups < Scalar>
    for (int i = 0; i < kStepGroups; ++i) {
      const FragmentLane here = lane.opaque();
      Operand g;
      load_inputs(g, stage.rows(warpgroup), i, here);
      cuda::gemm<Scalar, true>(y, g, rows_of(operand_of(stage.matrices.p, here), i), true);
    }
    // The sums are in place: steps of a group add to themselves and to earlier ones; N has zeros for the others.
#pragma unroll
    for (int i = 0; i < kStepGroups; ++i) {
      Operand a, lo;
      const auto inverse = operand_of(stage.matrices.n[0], lane.opaque());
      scale_operand<Scalar>(y, i, [&](int n) { return column_pair(tables.beta, 2 * i + n, lane); }, a, &lo);
      cuda::gemm<Scalar, false>(y, a, columns_of(inverse, i), true);
      if constexpr (!kIsFp32<Scalar>) {
        cuda::gemm<Scalar, false>(y, lo, columns_of(inverse, i), true);
        cuda::gemm<Scalar, false>(y, a, columns_of(operand_of(stage.matrices.n[1], lane), i), true);
      }
    }
    put_steps(chunk, y, 1);
    const DecayScale scale(tables.exp_cumsum[0]);
    decay(state, scale.up(tables.chunk_decay));
    for_each_group<Scalar>(grads, [&](int i, int place) {
      const FragmentLane here = lane.opaque();
      Operand g, scaled;
      load_inputs(g, stage.rows(warpgroup), i, here);
      if constexpr (DecayScale::kIsThere) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 by = column_pair(tables.query_decay, 2 * i + n, here);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 values = pair_of<Scalar>(g, n, half);
            scaled[2 * n + half] = cuda::pack<Scalar>(values.x * scale.up(by.x), values.y * scale.up(by.y));
          }
        }
      } else {
        scale_inputs<Scalar>(g, tables.query_decay, i, here, scaled);
      }
      cuda::gemm<Scalar, true>(state.values, scaled, rows_of(operand_of(stage.q, here), i), true);
      scale_operand<Scalar>(
          y, place,
          [&](int n) {
            const float2 by = column_pair(tables.exp_cumsum, 2 * i + n, here), beta = column_pair(tables.beta, 2 * i + n, here);
            return float2{-scale.up(by.x) * beta.x, -scale.up(by.y) * beta.y};
          },
          scaled);
      cuda::gemm<Scalar, true>(state.values, scaled, rows_of(operand_of(stage.k, here), i), true);
    });
    if constexpr (DecayScale::kIsThere) {
      if (scale.down() != 1.0f) state.decay(scale.down());
    }
  }

  // The workspace of a chunk and the warpgroup's rows: S, D, E^T and Y^T.
  __device__ __forceinline__ unsigned char* workspace_of(int chunk) const {
    const int64_t place =
        (number_of(chunk) * p.heads + state_tile.head) * row_blocks(p.headdim) + state_tile.first_row / kStateRows;
    return static_cast<unsigned char*>(p.states) + place * sm80_states_bytes(columns, sizeof(Scalar));
  }
  __device__ __forceinline__ bool has_workspace() const { return p.states != nullptr && state_tile.is_there(); }
  __device__ __forceinline__ void put_state(int chunk, const State<columns>& state, int index) const {
    if (!has_workspace()) return;
    auto* const tiles = reinterpret_cast<TileOf<Scalar, columns>*>(workspace_of(chunk));
    put_tile<Scalar>(tiles[index], state.values, FragmentPairs<sizeof(Scalar)>(lane));
  }
  __device__ __forceinline__ void put_steps(int chunk, const float (&d)[kStepBlocks][4], int index) const {
    if (!has_workspace()) return;
    auto* const tiles = reinterpret_cast<StepTile<Scalar>*>(workspace_of(chunk) + 2 * sizeof(TileOf<Scalar, columns>));
    put_tile<Scalar>(tiles[index], d, FragmentPairs<sizeof(Scalar)>(lane));
  }
};

// A block has a warpgroup for each state tile of a work tile, or one warpgroup: then two blocks share a work tile of two.
template <typename Scalar, int columns, Sm80Pass pass>
__global__ void __launch_bounds__(Sm80States<Scalar, columns, pass>::kThreads, 1)
    delta_rule_sm80_states_kernel(const __grid_constant__ DeltaRuleSm80Params p,
                                  const __grid_constant__ WorkPartition partition) {
  extern __shared__ __align__(128) unsigned char memory[];
  const FragmentLane lane = FragmentLane::opaque_thread();
  const int blocks_of_tile = static_cast<int>(gridDim.x / static_cast<unsigned>(partition.work_tiles)),
            warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
  const WorkSpan at(p, partition, static_cast<int>(blockIdx.x) / blocks_of_tile);
  const int tile_of_block = static_cast<int>(blockIdx.x) % blocks_of_tile;
  if (is_unread_map(p, at.entry, StateTile(p, partition, at, tile_of_block).first_row, pass == Sm80Pass::kGradients)) return;
  const StateTile state_tile(p, partition, at, tile_of_block + warpgroup);
  Sm80States<Scalar, columns, pass>{p, partition.stages, memory, at, state_tile, warpgroup, lane}.run();
}

}  // namespace ssm_kernels::delta_rule
