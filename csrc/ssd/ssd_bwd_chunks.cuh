// SSD chunk-scan, backward: all gradients, from the states before each chunk and the gradients of the states after it. See
// ssd_bwd.cuh for the formulas.
//
// A block has one chunk, its group's B and C, and some of the group's heads, one unit of up to kUnitRows rows after another.
// Two warpgroups multiply; each has all steps and one half of the columns that a product spreads: of the steps i in x g^T and
// what comes of it, of the states n in g S and x T, and of what is summed over in B T^T + M^T g, whose halves meet in shared
// memory. Steps are down the rows of every product, so that weights and decays, which are a row's, meet fp32 sums: x, g, B and
// C are read as they were given. In registers through all units stay the sums over heads, W^T and the gradients of B and C.
//
// A third warpgroup copies the units ahead to shared memory, makes the tables of their decays, multiplies S with T, and turns
// what the products have of each step into the gradients of dt, A and dt_bias.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/register_trade.cuh"
#include "cuda/shared_barrier.cuh"
#include "cuda/wgmma.cuh"
#include "ssd/ssd_bwd_states.cuh"

namespace ssm_kernels::ssd {

constexpr int kHalves = 2, kHalfChunk = kChunk / kHalves, kHalfChunkBlocks = kHalfChunk / 8;
static_assert(kUnitRows == kChunk, "x and g, the decays between steps, and S and T are tiles of as many rows");

// What a unit leaves of each step, or row, for the warp that ends it.
struct StepSums {
  // With V = x_j . g_i (C_i . B_j) e^(s_i - s_j): over i > j, of each half of these; for i = j; and over j < i, times c_j, of
  // each warp's j.
  float later[kHalves][kChunk], same[kChunk], earlier[kUnitWarps][kChunk];
  float read_state[kHalves][kChunk];     // g_i . S C_i, of each half of the states
  float grad_state[kHalves][kChunk];     // x_j . T B_j, likewise
  float skipped[kUnitWarps][kUnitRows];  // over steps of g x, of each warp's steps
  float states[kUnitWarps];              // <S, T>, of each warp of the movers
};

template <int dstate>
struct ChunksShared {
  static constexpr int kStages = 3;
  struct Stage {
    Tile<kUnitRows> x, g;
    Tile<dstate> S, T;
  };
  struct Tables {
    ChunkTables steps;
    float dt[kChunk];
    float D[kUnitRows];
  };
  Tile<dstate> B, C;
  Stage stages[kStages];
  union {
    // Of B T^T + M^T g, a half's sum for the other half of the columns; of two units in turn.
    float4 exchanged[2][kHalves][kHalfChunkBlocks][kUnitThreads];
    Tile<kChunk> weights[2];  // W^T, and what rounding it leaves
  };
  Tables tables[kStages];
  StepSums sums[kStages];
  cuda::SharedBarrier full[kStages], empty[kStages];
};

// Sums of `count` numbers over the eight lanes of a warp with the same `pair`: each has one of them, which sum_index names.
template <int count>
__device__ __forceinline__ float sum_over_quads(float (&values)[count], const Lane& lane) {
  static_assert(count == 8, "as many sums as lanes");
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int kept = 4 >> step, distance = 16 >> step;
    const bool is_upper = (lane.index & distance) != 0;
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const float own = is_upper ? values[k + kept] : values[k];
      values[k] = own + __shfl_xor_sync(kWholeWarp, is_upper ? values[k] : values[k + kept], distance);
    }
  }
  return values[0];
}
__device__ __forceinline__ int sum_index(const Lane& lane) {
  return (lane.index & 16) / 4 + (lane.index & 8) / 4 + (lane.index & 4) / 4;
}
// Over the four lanes of a row.
__device__ __forceinline__ float sum_over_pairs(float value) {
  value += __shfl_xor_sync(kWholeWarp, value, 1);
  return value + __shfl_xor_sync(kWholeWarp, value, 2);
}
__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kWholeWarp, value, distance);
  return value;
}

// Two neighboring elements of a tile's row: of block `block` of 8 columns, those of the lane.
template <typename Scalar, int columns>
__device__ __forceinline__ float2 read_pair(Tile<columns>& tile, int row, int block, const Lane& lane) {
  return cuda::unpack<Scalar>(reinterpret_cast<const uint32_t*>(tile.piece(row, block))[lane.pair]);
}

template <typename Scalar, int dstate>
struct BwdChunks {
  using Shared = ChunksShared<dstate>;
  using Stage = typename Shared::Stage;
  using Tables = typename Shared::Tables;
  static constexpr int kStages = Shared::kStages;
  static constexpr int kPartBytes = sizeof(uint4) * kChunk * 8;
  static constexpr int kStateGroups = dstate / 16, kHalfGroups = kStateGroups / kHalves, kHalfBlocks = dstate / 8 / kHalves;
  static constexpr int kConsumers = kHalves * kUnitThreads;
  enum NamedBarrier { kMultipliers = 1, kMovers = 2 };

  const SsdBwdParams& p;
  Shared& shared;
  const Place at;  // one chunk
  int64_t slot, row_blocks, split;
  int units;  // of the block
  int steps;

  // Of 16 columns, inside a part's rows of 128 bytes; of 16 rows.
  static __device__ __forceinline__ uint64_t columns(uint64_t operand, int group) {
    return operand + (group / 4 * kPartBytes + group % 4 * 32) / 16;
  }
  static __device__ __forceinline__ uint64_t rows(uint64_t operand, int group) { return operand + group * 16 * 128 / 16; }
  static __device__ __forceinline__ uint64_t describe(const void* tile) { return cuda::describe_operand(tile, kPartBytes); }

  // The decay from a step to the chunk's last: zero if a sequence begins between.
  static __device__ __forceinline__ float decay_to_end(const ChunkTables& tables, int step) {
    const float decay = Math<float>::exp2(tables.log2_decay[kChunk - 1] - tables.log2_decay[step]);
    return step >= tables.first[kChunk - 1] ? decay : 0.0f;
  }

  // The warpgroup after the multipliers'.
  __device__ __forceinline__ void move() const;
  // In turn for each unit, by one warp.
  struct Ending {
    float grad_zeta[2], grad_gain[2];  // of a lane's two steps of one head
  };
  __device__ __forceinline__ void end_unit(int index, int stage, Ending& ending, const Lane& lane) const;
  __device__ __forceinline__ void end_head(int64_t head, const Tables& tables, Ending& ending, const Lane& lane) const;

  // A warpgroup that multiplies.
  __device__ __forceinline__ void multiply(int half) const {
    const Lane lane;
    const uint64_t B_rows = describe(&shared.B), C_rows = describe(&shared.C);
    float grad_B[kHalfBlocks][4], grad_C[kHalfBlocks][4], W[kHalfChunkBlocks][4], products[kHalfChunkBlocks][4];
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) grad_B[b][i] = grad_C[b][i] = 0;
    }
#pragma unroll
    for (int b = 0; b < kHalfChunkBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) W[b][i] = 0;
    }

    shared.full[0].wait(0);
    cuda::fence_products();
#pragma unroll
    for (int k = 0; k < kStateGroups; ++k) {
      cuda::multiply<Scalar, false, false>(products, columns(B_rows, k), columns(rows(C_rows, 2 * half), k), k > 0);
    }
    cuda::commit_products();
    cuda::wait_for_products<0>(products);

    int stage = 0, phase = 0;
#pragma unroll 1
    for (int index = 0; index < units; ++index) {
      shared.full[stage].wait(phase);
      Stage& tiles = shared.stages[stage];
      const Tables& tables = shared.tables[stage];
      StepSums& sums = shared.sums[stage];
      const Unit unit(p, row_blocks, at, index);
      const uint64_t x_rows = describe(&tiles.x), g_rows = describe(&tiles.g), S_rows = describe(&tiles.S),
                     T_rows = describe(&tiles.T);

      float xg[kHalfChunkBlocks][4], grad_x[kStepBlocks][4], of_states[kHalfBlocks][4];
      cuda::fence_products();
#pragma unroll
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::multiply<Scalar, false, false>(xg, columns(x_rows, k), columns(rows(g_rows, 2 * half), k), k > 0);
      }
      cuda::commit_products();
#pragma unroll
      for (int k = 0; k < kHalfGroups; ++k) {
        const int group = half * kHalfGroups + k;
        cuda::multiply<Scalar, false, false>(grad_x, columns(B_rows, group), columns(T_rows, group), k > 0);
      }
#pragma unroll
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::multiply<Scalar, false, true>(of_states, columns(g_rows, k), rows(columns(S_rows, half * kHalfGroups), k), k > 0);
      }
      cuda::commit_products();
      cuda::wait_for_products<1>(xg);
      uint32_t M[kHalfChunk / 16][4];
      weigh(half, tables.steps, lane, products, xg, W, M, sums);

      cuda::wait_for_products<0>(grad_x);
      cuda::wait_for_products<0>(of_states);
      const float to_end[2] = {decay_to_end(tables.steps, lane.row), decay_to_end(tables.steps, lane.row + 8)};
#pragma unroll
      for (int b = 0; b < kStepBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) grad_x[b][i] *= to_end[i / 2];
      }
      cuda::fence_products();
#pragma unroll
      for (int k = 0; k < kHalfChunk / 16; ++k) cuda::multiply<Scalar, true>(grad_x, M[k], rows(g_rows, 2 * half + k), true);
      cuda::commit_products();
      const float from_start[2] = {tables.steps.from_start[lane.row], tables.steps.from_start[lane.row + 8]};
      add_states(half, of_states, shared.C, from_start, grad_C, sums.read_state[half], lane);

      cuda::fence_products();
#pragma unroll
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::multiply<Scalar, false, true>(of_states, columns(x_rows, k), rows(columns(T_rows, half * kHalfGroups), k), k > 0);
      }
      cuda::commit_products();
      cuda::wait_for_products<1>(grad_x);
      write_grad_x(half, index, unit, grad_x, tiles, tables, sums, lane);
      cuda::wait_for_products<0>(of_states);
      const float weights[2] = {tables.steps.to_end[lane.row], tables.steps.to_end[lane.row + 8]};
      add_states(half, of_states, shared.B, weights, grad_B, sums.grad_state[half], lane);

      shared.empty[stage].arrive();
      if (++stage == kStages) {
        stage = 0;
        ++phase;
      }
    }
    end_block(half, W, grad_B, grad_C, lane);
  }

 private:
  // From C_i . B_j and x_j . g_i, rows j: adds W^T, makes M^T without gain, as the operand A, and the sums over V.
  __device__ __forceinline__ void weigh(int half, const ChunkTables& tables, const Lane& lane,
                                        const float (&products)[kHalfChunkBlocks][4], const float (&xg)[kHalfChunkBlocks][4],
                                        float (&W)[kHalfChunkBlocks][4], uint32_t (&M)[kHalfChunk / 16][4],
                                        StepSums& sums) const {
    const float log2_decay[2] = {tables.log2_decay[lane.row], tables.log2_decay[lane.row + 8]};
    const float gain[2] = {tables.gain[lane.row], tables.gain[lane.row + 8]};
    float later[2] = {}, same[2] = {}, earlier[8] = {};
#pragma unroll
    for (int b = 0; b < kHalfChunkBlocks; ++b) {
      const int step = half * kHalfChunk + 8 * b + 2 * lane.pair;
      const auto log2_at = *reinterpret_cast<const float2*>(&tables.log2_decay[step]);
      const auto first = *reinterpret_cast<const int2*>(&tables.first[step]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = lane.row + 8 * h;
        float of_pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int first_of_sequence = e == 0 ? first.x : first.y;
          const bool is_pair =
              static_cast<unsigned>(row - first_of_sequence) <= static_cast<unsigned>(step + e - first_of_sequence);
          const float between = Math<float>::exp2((e == 0 ? log2_at.x : log2_at.y) - log2_decay[h]);
          const float decay = is_pair ? between : 0.0f;
          const float u = is_pair ? xg[b][2 * h + e] : 0.0f;
          of_pair[e] = is_pair ? products[b][2 * h + e] * between : 0.0f;
          const float V = u * of_pair[e];
          const bool is_same = row == step + e;
          later[h] += is_same ? 0.0f : V;
          same[h] += is_same ? V : 0.0f;
          earlier[2 * b + e] = fmaf(gain[h], is_same ? 0.0f : V, earlier[2 * b + e]);
          W[b][2 * h + e] = fmaf(u * gain[h], decay, W[b][2 * h + e]);
        }
        M[b / 2][b % 2 * 2 + h] = cuda::pack<Scalar>(of_pair[0], of_pair[1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      later[h] = sum_over_pairs(later[h]);
      same[h] = sum_over_pairs(same[h]);
      const int row = lane.row + 8 * h;
      if (lane.pair == 0) sums.later[half][row] = later[h];
      if (lane.pair == 0 && row / kHalfChunk == half) sums.same[row] = same[h];
    }
    const float sum = sum_over_quads(earlier, lane);
    const int column = sum_index(lane);
    sums.earlier[lane.warp][half * kHalfChunk + column / 2 * 8 + 2 * lane.pair + column % 2] = sum;
  }

  // grad += weights product, a row's; the rows' products with those of B or C, of this half of the states, go to `sums`.
  __device__ __forceinline__ void add_states(int half, const float (&product)[kHalfBlocks][4], Tile<dstate>& of_group,
                                             const float (&weights)[2], float (&grad)[kHalfBlocks][4], float (&sums)[kChunk],
                                             const Lane& lane) const {
    float of_rows[2] = {};
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = read_pair<Scalar>(of_group, lane.row + 8 * h, half * kHalfBlocks + b, lane);
        of_rows[h] = fmaf(product[b][2 * h], pair.x, fmaf(product[b][2 * h + 1], pair.y, of_rows[h]));
        grad[b][2 * h] = fmaf(weights[h], product[b][2 * h], grad[b][2 * h]);
        grad[b][2 * h + 1] = fmaf(weights[h], product[b][2 * h + 1], grad[b][2 * h + 1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      of_rows[h] = sum_over_pairs(of_rows[h]);
      if (lane.pair == 0) sums[lane.row + 8 * h] = of_rows[h];
    }
  }

  // From what this half has of B T^T + M^T g, with the other's: this half of the columns.
  __device__ __forceinline__ void write_grad_x(int half, int index, const Unit& unit, const float (&sum)[kStepBlocks][4],
                                               Stage& tiles, const Tables& tables, StepSums& sums, const Lane& lane) const {
    auto& exchanged = shared.exchanged[index % 2];
    const int thread = threadIdx.x % kUnitThreads;
    float own[kHalfChunkBlocks][4];
#pragma unroll
    for (int b = 0; b < kHalfChunkBlocks; ++b) {
      const int other_b = b + kHalfChunkBlocks;
      float4 sent;
      sent.x = half == 0 ? sum[other_b][0] : sum[b][0];
      sent.y = half == 0 ? sum[other_b][1] : sum[b][1];
      sent.z = half == 0 ? sum[other_b][2] : sum[b][2];
      sent.w = half == 0 ? sum[other_b][3] : sum[b][3];
      exchanged[half][b][thread] = sent;
#pragma unroll
      for (int i = 0; i < 4; ++i) own[b][i] = half == 0 ? sum[b][i] : sum[other_b][i];
    }
    cuda::barrier_sync(kMultipliers, kConsumers);
    const float gain[2] = {tables.steps.gain[lane.row], tables.steps.gain[lane.row + 8]};
    Scalar* const target = at.template rows<Scalar>(p.grad_x, unit.head, 0) + unit.first_row;
    float skipped[8] = {};
#pragma unroll
    for (int b = 0; b < kHalfChunkBlocks; ++b) {
      const float4 received = exchanged[1 - half][b][thread];
      const int block = half * kHalfChunkBlocks + b, column = 8 * block + 2 * lane.pair;
      const auto D = *reinterpret_cast<const float2*>(&tables.D[column]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = lane.row + 8 * h;
        const float2 g = read_pair<Scalar>(tiles.g, row, block, lane);
        const float low = own[b][2 * h] + (h == 0 ? received.x : received.z);
        const float high = own[b][2 * h + 1] + (h == 0 ? received.y : received.w);
        const uint32_t rounded = cuda::pack<Scalar>(fmaf(D.x, g.x, gain[h] * low), fmaf(D.y, g.y, gain[h] * high));
        if (p.grad_x.data != nullptr && row < steps && column < unit.rows) {
          *reinterpret_cast<uint32_t*>(target + row * p.grad_x.stride_step + column) = rounded;
        }
        if (p.grad_D_parts != nullptr) {
          const float2 x = read_pair<Scalar>(tiles.x, row, block, lane);
          skipped[2 * b] = fmaf(g.x, x.x, skipped[2 * b]);
          skipped[2 * b + 1] = fmaf(g.y, x.y, skipped[2 * b + 1]);
        }
      }
    }
    if (p.grad_D_parts != nullptr) {
      const float over_steps = sum_over_quads(skipped, lane);
      const int column = sum_index(lane);
      sums.skipped[lane.warp][half * kHalfChunk + column / 2 * 8 + 2 * lane.pair + column % 2] = over_steps;
    }
  }

  // Adds what B and C have of the pairs of steps, and writes their gradients, or the block's part of them.
  __device__ __forceinline__ void end_block(int half, const float (&W)[kHalfChunkBlocks][4], float (&grad_B)[kHalfBlocks][4],
                                            float (&grad_C)[kHalfBlocks][4], const Lane& lane) const {
    cuda::barrier_sync(kMultipliers, kConsumers);
#pragma unroll
    for (int b = 0; b < kHalfChunkBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = W[b][2 * h], high = W[b][2 * h + 1];
        const uint32_t word = cuda::pack<Scalar>(low, high);
        const float2 rounded = cuda::unpack<Scalar>(word);
        const auto word_of = [&](Tile<kChunk>& tile) -> uint32_t& {
          return reinterpret_cast<uint32_t*>(tile.piece(lane.row + 8 * h, half * kHalfChunkBlocks + b))[lane.pair];
        };
        word_of(shared.weights[0]) = word;
        word_of(shared.weights[1]) = cuda::pack<Scalar>(low - rounded.x, high - rounded.y);
      }
    }
    cuda::publish_to_products();
    cuda::barrier_sync(kMultipliers, kConsumers);
    const uint64_t B_half = columns(describe(&shared.B), half * kHalfGroups),
                   C_half = columns(describe(&shared.C), half * kHalfGroups);
    cuda::fence_products();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint64_t weights = describe(&shared.weights[part]);
#pragma unroll
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::multiply<Scalar, false, true>(grad_B, columns(weights, k), rows(C_half, k), true);
        cuda::multiply<Scalar, true, true>(grad_C, rows(weights, k), rows(B_half, k), true);
      }
    }
    cuda::commit_products();
    cuda::wait_for_products<0>(grad_B);
    cuda::wait_for_products<0>(grad_C);
    write_of_group(half, p.grad_B, p.grad_B_parts, grad_B, lane);
    write_of_group(half, p.grad_C, p.grad_C_parts, grad_C, lane);
  }

  __device__ __forceinline__ void write_of_group(int half, const RowsView& view, float* parts,
                                                 const float (&grad)[kHalfBlocks][4], const Lane& lane) const {
    const int64_t first_step = at.batch * p.seqlen + at.start + at.step_of(0),
                  all_steps = (p.cu_seqlens ? 1 : p.batch) * p.seqlen;
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = lane.row + 8 * h, column = 8 * (half * kHalfBlocks + b) + 2 * lane.pair;
        if (row >= steps || column >= p.dstate) continue;
        const float low = grad[b][2 * h], high = grad[b][2 * h + 1];
        if (view.data != nullptr) {
          Scalar* const target = at.template rows<Scalar>(view, at.group, 0) + row * view.stride_step + column;
          *reinterpret_cast<uint32_t*>(target) = cuda::pack<Scalar>(low, high);
        } else if (parts != nullptr) {
          float* const target = parts + (((split * all_steps + first_step + row) * p.groups) + at.group) * p.dstate + column;
          *reinterpret_cast<float2*>(target) = {low, high};
        }
      }
    }
  }
};

template <typename Scalar, int dstate>
__device__ __forceinline__ void BwdChunks<Scalar, dstate>::move() const {
  const int thread = threadIdx.x % kUnitThreads;
  const Lane lane;
  // The warps take turns in making tables; one more ends the units.
  const int ending_warp = kStages;
  static_assert(kStages < kUnitWarps, "a warp for the tables of each stage, and one that ends the units");
  using Image = Tile<dstate>;
  const auto copy = [&](int index, Stage& target) {
    const Unit unit(p, row_blocks, at, index);
    const auto copy_unit = [&](const RowsView& view, Tile<kUnitRows>& tile) {
      const Scalar* const source = at.template rows<Scalar>(view, unit.head, 0) + unit.first_row;
      RowCopier<kUnitRows, kUnitThreads>(source, view.stride_step, unit.rows, thread).copy(tile, steps);
    };
    copy_unit(p.x, target.x);
    copy_unit(p.grad_out, target.g);
    const int64_t image = slot * p.units + unit.head * row_blocks + unit.first_row / kUnitRows;
    const auto copy_image = [&](const void* images, Image& tile) {
      const auto* const source = reinterpret_cast<const uint4*>(static_cast<const Image*>(images) + image);
#pragma unroll
      for (int i = 0; i < int(sizeof(Image) / sizeof(uint4)) / kUnitThreads; ++i) {
        const int piece = thread + i * kUnitThreads;
        cuda::async_copy(&tile.parts[0][0][0] + piece, source + piece, cuda::kAsyncCopyBytes);
      }
    };
    copy_image(p.states, target.S);
    copy_image(p.grad_states, target.T);
  };
  FetchedSteps<Scalar> fetched;
  const auto fetch = [&](int index) {
    if (index >= units) return;
    const Unit unit(p, row_blocks, at, index);
    fetched.fetch(p, at.template rows<const Scalar>(p.dt, unit.head, 0), at.resets(p, 0), steps);
  };
  const auto tabulate = [&](int index, Tables& tables) {
    const Unit unit(p, row_blocks, at, index);
    make_tables(p, HeadSteps(p, unit.head), fetched, tables.steps);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int element = 2 * lane.index + i;
      tables.dt[element] = fetched.is_there[i] ? cuda::to_accumulate(fetched.dt[i]) : 0.0f;
      tables.D[element] = p.D != nullptr && element < unit.rows
                              ? p.D[unit.head * p.D_stride_head + (unit.first_row + element) * p.D_stride_row]
                              : 0.0f;
    }
  };
  // <S, T>
  const auto multiply_states = [&](Stage& tiles, float& sum) {
    float products[2] = {};
#pragma unroll 2
    for (int i = 0; i < int(sizeof(Image) / sizeof(uint4)) / kUnitThreads; ++i) {
      const int piece = thread + i * kUnitThreads;
      const uint4 s = *(&tiles.S.parts[0][0][0] + piece), t = *(&tiles.T.parts[0][0][0] + piece);
      const auto add = [&](uint32_t s, uint32_t t) {
        const float2 of_S = cuda::unpack<Scalar>(s), of_T = cuda::unpack<Scalar>(t);
        products[0] = fmaf(of_S.x, of_T.x, products[0]);
        products[1] = fmaf(of_S.y, of_T.y, products[1]);
      };
      add(s.x, t.x);
      add(s.y, t.y);
      add(s.z, t.z);
      add(s.w, t.w);
    }
    const float of_warp = sum_over_warp(products[0] + products[1]);
    if (lane.index == 0) sum = of_warp;
  };

  RowCopier<dstate, kUnitThreads>(at.template rows<Scalar>(p.B, at.group, 0), p.B.stride_step, p.dstate, thread)
      .copy(shared.B, steps);
  RowCopier<dstate, kUnitThreads>(at.template rows<Scalar>(p.C, at.group, 0), p.C.stride_step, p.dstate, thread)
      .copy(shared.C, steps);
  if (lane.warp < kStages) fetch(lane.warp);
  Ending ending = {};
  int stage = 0, phase = 0, previous = 0;
#pragma unroll 1
  for (int index = 0; index < units + kStages; ++index) {
    if (index >= kStages) shared.empty[stage].wait(phase - 1);
    if (index < units) {
      copy(index, shared.stages[stage]);
      cuda::commit_async_copies();
    }
    if (lane.warp == ending_warp && index >= kStages) end_unit(index - kStages, stage, ending, lane);
    if (index > 0 && index <= units) {
      if (index < units) {
        cuda::wait_for_async_copies<1>();
      } else {
        cuda::wait_for_async_copies<0>();
      }
      cuda::publish_to_products();
      shared.full[previous].arrive();
      // All copies of the unit, not this thread's alone.
      shared.full[previous].wait((index - 1) / kStages);
      multiply_states(shared.stages[previous], shared.sums[previous].states[lane.warp]);
    }
    cuda::barrier_sync(kMovers, kUnitThreads);
    if (index < units && lane.warp == stage) {
      tabulate(index, shared.tables[stage]);
      fetch(index + kStages);
    }
    previous = stage;
    if (++stage == kStages) {
      stage = 0;
      ++phase;
    }
  }
}

template <typename Scalar, int dstate>
__device__ __forceinline__ void BwdChunks<Scalar, dstate>::end_unit(int index, int stage, Ending& ending,
                                                                    const Lane& lane) const {
  const Unit unit(p, row_blocks, at, index);
  const Tables& tables = shared.tables[stage];
  const StepSums& sums = shared.sums[stage];
  float before[2], from[2];  // what of a step is the gradient of each zeta after it, and of each up to its own
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = 2 * lane.index + i;
    const float later = sums.later[0][step] + sums.later[1][step];
    const float grad_state = (sums.grad_state[0][step] + sums.grad_state[1][step]) * decay_to_end(tables.steps, step);
    const float earlier = (sums.earlier[0][step] + sums.earlier[1][step]) + (sums.earlier[2][step] + sums.earlier[3][step]);
    ending.grad_gain[i] += later + sums.same[step] + grad_state;
    before[i] = fmaf(tables.steps.gain[step], later + grad_state, -earlier);
    from[i] = tables.steps.from_start[step] * (sums.read_state[0][step] + sums.read_state[1][step]);
  }
  float up_to = before[0] + before[1], from_on = from[0] + from[1];
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const float earlier = __shfl_up_sync(kWholeWarp, up_to, distance);
    const float later = __shfl_down_sync(kWholeWarp, from_on, distance);
    if (lane.index >= distance) up_to += earlier;
    if (lane.index + distance < kWarpSize) from_on += later;
  }
  const float up_to_lane = __shfl_up_sync(kWholeWarp, up_to, 1), from_next = __shfl_down_sync(kWholeWarp, from_on, 1);
  const float before_lane = lane.index == 0 ? 0.0f : up_to_lane, after_lane = lane.index + 1 == kWarpSize ? 0.0f : from_next;
  const float states = (sums.states[0] + sums.states[1]) + (sums.states[2] + sums.states[3]);
  const float through = tables.steps.has_begun ? 0.0f : tables.steps.whole * states;
  ending.grad_zeta[0] += before_lane + from_on + through;
  ending.grad_zeta[1] += (before_lane + before[0]) + (after_lane + from[1]) + through;

  if (p.grad_D_parts != nullptr) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane.index + i;
      const float skipped = (sums.skipped[0][row] + sums.skipped[1][row]) + (sums.skipped[2][row] + sums.skipped[3][row]);
      if (row < unit.rows) p.grad_D_parts[(slot * p.heads + unit.head) * p.headdim + unit.first_row + row] = skipped;
    }
  }
  if (unit.rows <= kUnitRows) end_head(unit.head, tables, ending, lane);
}

template <typename Scalar, int dstate>
__device__ __forceinline__ void BwdChunks<Scalar, dstate>::end_head(int64_t head, const Tables& tables, Ending& ending,
                                                                    const Lane& lane) const {
  const HeadSteps of_head(p, head);
  float grad_A = 0, grad_bias = 0;
  Scalar* const target = at.template rows<Scalar>(p.grad_dt, head, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = 2 * lane.index + i;
    const float dt = tables.dt[step], unlimited = of_head.before_limits(p, dt), d = of_head.step_size(p, dt);
    const float zeta = d * of_head.A;
    const float grad_zeta = ending.grad_zeta[i], grad_gain = ending.grad_gain[i];
    // c = d k(d A): its derivative by d is (z k)', by A it is d^2 k'.
    float by_size = 0, by_A = 0;
    visit_exponential(p.discretization, [&](auto method) {
      using Method = decltype(method);
      const float basis = Method::basis(zeta);
      const auto derivatives = Method::derivatives(zeta, basis, Method::gain(zeta, basis));
      by_size = fmaf(grad_zeta, of_head.A, grad_gain * derivatives.z_gain);
      by_A = fmaf(grad_gain * d, derivatives.gain, grad_zeta) * d;
    });
    float grad = unlimited < p.dt_min || unlimited > p.dt_max ? 0.0f : by_size;
    if (p.dt_softplus) grad *= softplus_derivative(dt + of_head.dt_bias);
    if (step < steps) {
      grad_A += by_A;
      grad_bias += grad;
      if (p.grad_dt.data != nullptr) target[step * p.grad_dt.stride_step] = cuda::from_accumulate<Scalar>(grad);
    }
    ending.grad_zeta[i] = ending.grad_gain[i] = 0;
  }
  grad_A = sum_over_warp(grad_A);
  grad_bias = sum_over_warp(grad_bias);
  if (lane.index == 0) {
    p.grad_A_parts[slot * p.heads + head] = grad_A;
    p.grad_bias_parts[slot * p.heads + head] = grad_bias;
  }
}

// Of a chunk, its sequence; packed sequences leave some numbers to nobody.
__device__ __forceinline__ int64_t sequence_of_slot(const SsdParams& p, int64_t slot) {
  if (p.cu_seqlens == nullptr) return slot / ((p.seqlen + kChunk - 1) / kChunk);
  int64_t low = 0, high = p.batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_slot(p, middle) <= slot ? low : high) = middle;
  }
  return low;
}

template <typename Scalar, int dstate>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? (kHalves + 1) * kUnitThreads : kWarpSize, 1)
    ssd_bwd_chunks_kernel(const __grid_constant__ SsdBwdParams p, const __grid_constant__ Partition partition) {
#if SSM_KERNELS_HAS_WGMMA
  using Chunks = BwdChunks<Scalar, dstate>;
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<typename Chunks::Shared>(unaligned_memory);

  const int64_t heads_per_group = p.heads / p.groups, split = blockIdx.x % p.splits;
  const int64_t group = blockIdx.x / p.splits % p.groups, slot = blockIdx.x / p.splits / p.groups;
  const int64_t first_head = split * p.heads_per_split, heads = min(p.heads_per_split, heads_per_group - first_head);
  const int64_t entry = sequence_of_slot(p, slot), chunk = slot - first_slot(p, entry);
  const Place at(Span(p, entry, chunk, 1), group, first_head * partition.row_blocks);
  if (chunk < 0 || at.chunks == 0) {
    for (int64_t head = threadIdx.x; head < heads; head += blockDim.x) {
      const int64_t place = slot * p.heads + group * heads_per_group + first_head + head;
      p.grad_A_parts[place] = p.grad_bias_parts[place] = 0;
      for (int row = 0; p.grad_D_parts != nullptr && row < p.headdim; ++row) p.grad_D_parts[place * p.headdim + row] = 0;
    }
    return;
  }
  const Chunks chunks{
      p, shared, at, slot, partition.row_blocks, split, static_cast<int>(heads * partition.row_blocks), at.steps_of(0)};
  if (threadIdx.x < Chunks::kStages) {
    shared.full[threadIdx.x].init(kUnitThreads);
    shared.empty[threadIdx.x].init(Chunks::kConsumers);
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kUnitThreads;
  if (warpgroup == kHalves) {
    cuda::leave_registers<88>();
    chunks.move();
  } else {
    cuda::take_registers<208>();
    chunks.multiply(warpgroup);
  }
#endif
}

}  // namespace ssm_kernels::ssd
