// SSD backward, the second kernel: all gradients, from the states before each chunk and the gradients of the states after each
// chunk (state_passing.cuh). It is the adjoint of mamba_ssm's bmm_chunk, chunk_scan and chunk_cumsum. See bwd.cuh for the
// formulas.
//
// A block has one chunk, its group's B and C, and some of the group's heads. It processes their state tiles, of up to
// kStateRows rows, one after another. Two consumer warpgroups compute the products. The rows of every product are steps, so
// that gains and decays, which belong to rows, scale fp32 sums: x, g, B and C are multiplied as given. Each warpgroup has half
// of the columns: of the steps i in x g^T and all that follows from it, of the state's columns n in g S and x T, of the rows p
// of x in B T^T + M^T g. The last one sums over all i, so the warpgroups share their halves of M^T through shared memory. B C^T
// and the sums over heads, W^T and the gradients of B and C, stay in registers for all state tiles.
//
// The third warpgroup has four warps with a role each. One copies the tiles of x, g, S and T to shared memory, and one computes
// the tables of decays; both run ahead (cuda/pipeline.cuh). The third multiplies S with T, and g with x for the gradient of D,
// element by element: for fp16 and bf16 as the diagonal of a matrix product. The fourth turns the products' sums for each step
// (StepSums) into the gradients of dt, A and dt_bias.
//
// wgmma products (cuda/mma_policy.cuh) start as soon as their operands are there. mma.sync products are complete on return, so
// each is called where its result is needed, and registers are few: x g^T and the products with S and T are computed in two
// passes, except for 64 columns of state in fp32. M^T then has one tile instead of two in turn, and the consumer warps wait for
// one another once more before they overwrite it.
#pragma once

#include "cuda/chunked/state_passing.cuh"
#include "cuda/ptx/mma_sm80.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tma.cuh"
#include "ssd/cuda/bwd_pairs.cuh"

namespace ssm_kernels::ssd {

static_assert(kStateRows == kChunk, "tiles of x and g, of M^T, and of S and T have equally many rows");

template <typename Scalar, int dstate, typename Gates>
struct ChunksStage {
  SmemTile<kStateRows, sizeof(Scalar)> x, g;
  SmemTile<dstate, sizeof(Scalar)> S, T;
  TileTables<Gates> tables;
  StepSums<Scalar> sums;
};
// A block's work.
struct BlockOfChunks {
  ChunkSpan at;
  int steps;  // of the chunk
  int group, chunk_index, first_head;
  int state_tiles;
};
constexpr int kChunksStages = 3;
template <typename Scalar, int dstate, bool is_async>
struct ChunksOnce {
  SmemTile<dstate, sizeof(Scalar)> B, C;
  // M^T, of two state tiles in turn where there is room; at the end W^T.
  static constexpr int kWeights = is_async ? 2 : 1;
  SmemTile<kChunk, sizeof(Scalar)> weights[kWeights];
  Mbarrier tables_empty[kChunksStages];
  BlockOfChunks block;
};
template <typename Scalar, int dstate, typename Mma, typename Gates>
using ChunksShared =
    StagedShared<ChunksOnce<Scalar, dstate, Mma::kIsAsync>, ChunksStage<Scalar, dstate, Gates>, Mma, kChunksStages>;

// Iterates over the block's state tiles: the row blocks of one head after another.
struct TileCursor {
  int head;
  int row_block = 0;

  __device__ __forceinline__ bool is_last_of_head(int row_blocks) const { return row_block + 1 == row_blocks; }
  __device__ __forceinline__ void advance(int row_blocks) {
    if (++row_block == row_blocks) {
      row_block = 0;
      ++head;
    }
  }
};

template <typename Scalar, int dstate, typename Mma, typename Gates>
struct BwdChunks {
  using Params = typename Gates::BwdParams;
  using Shared = ChunksShared<Scalar, dstate, Mma, Gates>;
  using Stage = typename Shared::Stage;
  using Tables = TileTables<Gates>;
  using SwizzledState = SmemTile<dstate, sizeof(Scalar)>;
  using HeadTile = SmemTile<kStateRows, sizeof(Scalar)>;
  using PairTile = SmemTile<kChunk, sizeof(Scalar)>;
  using FragmentPairs = cuda::FragmentPairs<sizeof(Scalar)>;
  static constexpr int kStateGroups = dstate / 16, kHalfGroups = kStateGroups / kHalves,
                       kHalfStateBlocks = dstate / 8 / kHalves;
  // Passes in which x g^T and the products with S and T are computed: mma.sync needs the registers of one pass only. In fp32 a
  // product of few column blocks is a chain of dependent instructions, so there are passes only where registers require them.
  static constexpr int kPasses = Mma::kIsAsync || (kIsFp32<Scalar> && dstate <= 64) ? 1 : 2,
                       kPairBlocks = kHalfBlocks / kPasses, kPassGroups = kHalfGroups / kPasses,
                       kPassBlocks = kHalfStateBlocks / kPasses;
  using TilePairProducts = PairProducts<Scalar, kPairBlocks>;
  // Steps of a product that are unrolled: the loads of later steps take registers too.
  static constexpr int kUnrolled = Mma::kIsAsync ? kStateGroups : kIsFp32<Scalar> ? 1 : 2;
  // Whether TMA loads S and T, where the device has it. For fp16 and bf16 the mma.sync kernel takes the path of other devices,
  // which is tested this way.
  static constexpr bool kUsesTma = SSM_KERNELS_HAS_WGMMA && (Mma::kIsAsync || kIsFp32<Scalar>);
  static constexpr int kConsumerThreads = kHalves * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  // Registers per thread.
  static constexpr int kConsumerRegisters = kIsFp32<Scalar> ? 216 : 208,
                       kProducerRegisters = cuda::producer_registers<kConsumerThreads, kConsumerRegisters, kWarpgroupThreads>();
  // Named barriers. Number 0 is __syncthreads.
  enum Barrier : int { kConsumerBarrier = 1 };

  const Params& p;
  const WorkPartition& partition;
  Shared& shared;
  // In shared memory where registers are few: warps read little of it, and seldom.
  const std::conditional_t<Mma::kIsAsync, BlockOfChunks, BlockOfChunks&> block;

  // Called by all threads before a __syncthreads().
  static __device__ __forceinline__ BwdChunks make(const Params& p, const WorkPartition& partition, Shared& shared,
                                                   const BlockOfChunks& block) {
    if constexpr (Mma::kIsAsync) {
      return {p, partition, shared, block};
    } else {
      if (threadIdx.x == 0) shared.block = block;
      return {p, partition, shared, shared.block};
    }
  }

  __device__ __forceinline__ int stages() const { return Shared::stages(partition.stages); }
  // Row blocks of a head.
  __device__ __forceinline__ int row_blocks() const { return (p.headdim + kStateRows - 1) / kStateRows; }

  // The third warpgroup: a role for each warp.
  __device__ __forceinline__ void produce() const {
    const FragmentLane lane;
    switch (lane.warp) {
      case 0:
        copy(lane);
        break;
      case 1:
        produce_cumsum(lane);
        break;
      case 2:
        reduce_elements(lane);
        break;
      default:
        reduce_step_gradients(lane);
    }
  }

  // A consumer warpgroup.
  __device__ __forceinline__ void consume(int half) const {
    const FragmentLane lane = Mma::kIsAsync ? FragmentLane() : FragmentLane::opaque_thread();
    const FragmentPairs pairs(lane);
    float grad_B[kHalfStateBlocks][4], grad_C[kHalfStateBlocks][4];
#pragma unroll
    for (int b = 0; b < kHalfStateBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) grad_B[b][i] = grad_C[b][i] = 0;
    }
    shared.full[0].wait(0);
    TilePairProducts pair_products;
    const auto B_rows = Mma::describe(shared.B, lane), C_rows = Mma::describe(shared.C, lane);
    Mma::fence();
#pragma unroll
    for (int k = 0; k < kStateGroups; ++k) {
      cuda::gemm<Scalar, false, false>(pair_products.CB, columns_of(B_rows, k), columns_of(rows_of(C_rows, 2 * half), k),
                                       k > 0);
    }
    Mma::commit();
    Mma::template wait<0>(pair_products.CB);
    pair_products.begin(half, shared.stage(0).tables.steps, lane, rank_shift_of<Gates>(p));

    for_each_tile(shared.full, shared.empty, [&](int index, Stage& stage, const TileCursor& cursor) {
      consume_tile(half, stage, shared.weights[index % Shared::kWeights], cursor, Mma::opaque(pairs), Mma::opaque(lane),
                   pair_products, grad_B, grad_C);
    });
    end_block(half, pair_products.W, pairs, lane, grad_B, grad_C);
  }

 private:
  // Calls body(index, stage, cursor) for each state tile, between a wait for `filled` and an arrival at `read`.
  template <typename Body>
  __device__ __forceinline__ void for_each_tile(Mbarrier* filled, Mbarrier* read, const Body& body) const {
    TileCursor cursor{block.first_head};
    PipelineState pipeline;
#pragma unroll 1
    for (int index = 0; index < block.state_tiles; ++index) {
      filled[pipeline.stage].wait(pipeline.phase);
      body(index, shared.stage(pipeline.stage), cursor);
      read[pipeline.stage].arrive();
      pipeline.advance(stages());
      cursor.advance(row_blocks());
    }
  }

  // Processes one state tile; M receives its M^T.
  __device__ __forceinline__ void consume_tile(int half, Stage& tiles, PairTile& M, const TileCursor& cursor,
                                               const FragmentPairs& pairs, const FragmentLane& lane,
                                               TilePairProducts& pair_products, float (&grad_B)[kHalfStateBlocks][4],
                                               float (&grad_C)[kHalfStateBlocks][4]) const {
    const Tables& tables = tiles.tables;
    float xg[kPairBlocks][4], grad_x[kHalfBlocks][4], state_product[kPassBlocks][4];
    const auto begin_grad_x = [&] {
      const auto B = Mma::describe(shared.B, lane), T_half = rows_of(Mma::describe(tiles.T, lane), 2 * half);
#pragma unroll kUnrolled
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::gemm<Scalar, false, false>(grad_x, columns_of(B, k), columns_of(T_half, k), k > 0);
      }
      Mma::commit();
    };
    const auto begin_state_product = [&](const HeadTile& step_rows, const SwizzledState& states, int pass) {
      const auto steps = Mma::describe(step_rows, lane),
                 columns = columns_of(columns_of(Mma::describe(states, lane), half * kHalfGroups), pass * kPassGroups);
#pragma unroll kUnrolled
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::gemm<Scalar, false, true>(state_product, columns_of(steps, k), rows_of(columns, k), k > 0);
      }
      Mma::commit();
    };
    const auto begin_xg = [&](int pass) {
      const auto x = Mma::describe(tiles.x, lane),
                 g_pass = rows_of(Mma::describe(tiles.g, lane), 2 * half + pass * kPairBlocks / 2);
#pragma unroll kUnrolled
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::gemm<Scalar, false, false>(xg, columns_of(x, k), columns_of(g_pass, k), k > 0);
      }
      Mma::commit();
    };
    // wgmma starts early; mma.sync runs where its result is needed.
    if constexpr (Mma::kIsAsync) {
      Mma::fence();
      begin_xg(0);
      begin_grad_x();
      begin_state_product(tiles.g, tiles.S, 0);
    } else {
      // Waits until the other warps have read M^T of the previous state tile.
      cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
    }

    PairRowSums<Scalar> pair_row_sums = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if constexpr (!Mma::kIsAsync) begin_xg(pass);
      Mma::template wait<2>(xg);
      pair_products.apply(half, pass * kPairBlocks, tables.steps, xg, pairs, lane, M, pair_row_sums, tiles.sums);
    }
    pair_row_sums.store(half, lane, tiles.sums);
    Mma::publish();
    const float to_end[2] = {weight_to_chunk_end(tables.steps, lane.row), weight_to_chunk_end(tables.steps, lane.row + 8)};
    if constexpr (!Mma::kIsAsync) begin_grad_x();
    Mma::template wait<1>(grad_x);
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) grad_x[b][i] *= to_end[i / 2];
    }
    cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
    const auto M_rows = Mma::describe(M, lane), g_half = columns_of(Mma::describe(tiles.g, lane), 2 * half);
    Mma::fence();
#pragma unroll kUnrolled
    for (int k = 0; k < kStepGroups; ++k) {
      cuda::gemm<Scalar, false, true>(grad_x, columns_of(M_rows, k), rows_of(g_half, k), true);
    }
    Mma::commit();

    float row_sums[4] = {};
    if constexpr (!Mma::kIsAsync) write_grad_x(half, cursor, grad_x, tiles.g, tables, pairs, lane);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if constexpr (!Mma::kIsAsync) begin_state_product(tiles.g, tiles.S, pass);
      Mma::template wait<1>(state_product);
      add_states(half, pass, state_product, shared.C, tables.steps.exp_cumsum, pairs, lane, grad_C, &row_sums[0]);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      Mma::fence();
      begin_state_product(tiles.x, tiles.T, pass);
      if constexpr (Mma::kIsAsync) {
        Mma::template wait<1>(grad_x);
        write_grad_x(half, cursor, grad_x, tiles.g, tables, pairs, lane);
      }
      Mma::template wait<0>(state_product);
      add_states(half, pass, state_product, shared.B, tables.steps.gain_to_chunk_end, pairs, lane, grad_B, &row_sums[2]);
    }
    const float row_sum = sum_over_row(row_sums, lane);
    StepSums<Scalar>& sums = tiles.sums;
    (lane.pair < 2 ? sums.read_state : sums.grad_state)[half][lane.row + lane.pair % 2 * 8] = row_sum;
  }

  // Adds to the gradient of B or C the product, each row scaled by its weight. row_sums receive each row's inner product with B
  // or C, over this lane's columns.
  __device__ __forceinline__ void add_states(int half, int pass, const float (&product)[kPassBlocks][4],
                                             SwizzledState& group_rows, const float (&weights)[kChunk],
                                             const FragmentPairs& pairs, const FragmentLane& lane,
                                             float (&grads)[kHalfStateBlocks][4], float* row_sums) const {
    const float weight[2] = {weights[lane.row], weights[lane.row + 8]};
    constexpr int kPanelsOfHalf = SwizzledState::kPanels / kHalves;
    SwizzledState& half_tile = *reinterpret_cast<SwizzledState*>(reinterpret_cast<unsigned char*>(&group_rows) +
                                                                 half * kPanelsOfHalf * SwizzledState::kPanelBytes);
    const FragmentPairs half_pairs = kPanelsOfHalf > 0 ? pairs : pairs.moved(half * kHalfStateBlocks);
#pragma unroll
    for (int b = 0; b < kPassBlocks; ++b) {
      float (&grad)[4] = grads[pass * kPassBlocks + b];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = cuda::unpack<Scalar>(half_pairs.at(half_tile, pass * kPassBlocks + b, h));
        row_sums[h] = fmaf(product[b][2 * h], pair.x, fmaf(product[b][2 * h + 1], pair.y, row_sums[h]));
        grad[2 * h] = fmaf(weight[h], product[b][2 * h], grad[2 * h]);
        grad[2 * h + 1] = fmaf(weight[h], product[b][2 * h + 1], grad[2 * h + 1]);
      }
    }
  }

  // The factor of T B_j in the sum for grad x, which is multiplied by the gain later unless M^T has the gains.
  template <typename StepTables>
  static __device__ __forceinline__ float weight_to_chunk_end(const StepTables& tables, int step) {
    if constexpr (kAreDiagonal<StepTables>) {
      return tables.gain_to_chunk_end[step];
    } else {
      return decay_to_chunk_end(tables, step);
    }
  }

  // Writes grad x; `sum` has its sums over i and over the state's columns, without the gain unless M^T has the gains.
  __device__ __forceinline__ void write_grad_x(int half, const TileCursor& cursor, const float (&sum)[kHalfBlocks][4],
                                               HeadTile& g, const Tables& tables, const FragmentPairs& pairs,
                                               const FragmentLane& lane) const {
    float gain[2] = {1, 1};
    if constexpr (!kHasDiagonalGain<Gates>) {
      gain[0] = tables.steps.gain[lane.row];
      gain[1] = tables.steps.gain[lane.row + 8];
    }
    const int column = half * kHalfChunk + 2 * lane.pair, rows = p.headdim - cursor.row_block * kStateRows;
    Scalar* const target = block.at.template rows<Scalar>(p.grad_x, cursor.head, 0) + cursor.row_block * kStateRows + column;
    const bool is_there[2] = {p.grad_x.data != nullptr && lane.row < block.steps,
                              p.grad_x.data != nullptr && lane.row + 8 < block.steps};
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
      const auto D = *reinterpret_cast<const float2*>(&tables.D[column + 8 * b]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 skipped = cuda::unpack<Scalar>(pairs.at(g, half * kHalfBlocks + b, h));
        const cuda::Packed<Scalar> rounded = cuda::pack<Scalar>(fmaf(D.x, skipped.x, gain[h] * sum[b][2 * h]),
                                                                fmaf(D.y, skipped.y, gain[h] * sum[b][2 * h + 1]));
        if (is_there[h] && column + 8 * b < rows) {
          *reinterpret_cast<cuda::Packed<Scalar>*>(target + (lane.row + 8 * h) * p.grad_x.stride_step + 8 * b) = rounded;
        }
      }
    }
  }

  // Adds the contributions of the pairs of steps to the gradients of B and C, and writes these, or the block's part of them.
  __device__ __forceinline__ void end_block(int half, const float (&W)[kHalfBlocks][4], const FragmentPairs& pairs,
                                            const FragmentLane& lane, float (&grad_B)[kHalfStateBlocks][4],
                                            float (&grad_C)[kHalfStateBlocks][4]) const {
    const auto B_half = columns_of(Mma::describe(shared.B, lane), half * kHalfGroups),
               C_half = columns_of(Mma::describe(shared.C, lane), half * kHalfGroups);
    // For fp16 and bf16 W^T is a hi/lo split: both parts at once, or one after the other.
    constexpr int kAtOnce = Shared::kWeights, kWords = kIsFp32<Scalar> ? 1 : 2,
                  kUnrolledAtEnd = kIsFp32<Scalar> ? 1 : kStepGroups;
#pragma unroll
    for (int first = 0; first < kWords; first += kAtOnce) {
      cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
#pragma unroll
      for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float low = W[b][2 * h], high = W[b][2 * h + 1];
          cuda::Packed<Scalar> words[kWords] = {cuda::pack<Scalar>(low, high)};
          if constexpr (kWords > 1) words[1] = cuda::pack_lo<Scalar>(low, high, words[0]);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) pairs.at(shared.weights[i], half * kHalfBlocks + b, h) = words[first + i];
        }
      }
      Mma::publish();
      cuda::barrier_sync(kConsumerBarrier, kConsumerThreads);
      Mma::fence();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const auto weights = Mma::describe(shared.weights[i], lane);
#pragma unroll kUnrolledAtEnd
        for (int k = 0; k < kStepGroups; ++k) {
          cuda::gemm<Scalar, false, true>(grad_B, columns_of(weights, k), rows_of(C_half, k), true);
          cuda::gemm<Scalar, true, true>(grad_C, rows_of(weights, k), rows_of(B_half, k), true);
        }
      }
      Mma::commit();
      Mma::template wait<0>(grad_B);
      Mma::template wait<0>(grad_C);
    }
    write_group_gradient(half, p.grad_B, p.grad_B_parts, grad_B, lane);
    write_group_gradient(half, p.grad_C, p.grad_C_parts, grad_C, lane);
  }

  __device__ __forceinline__ void write_group_gradient(int half, const RowsView& view, const RowsView& parts,
                                                       const float (&grad)[kHalfStateBlocks][4],
                                                       const FragmentLane& lane) const {
    // Recomputed here instead of kept in a register.
    const int64_t split = blockIdx.x % static_cast<unsigned>(p.splits);
    const int first_column = 8 * half * kHalfStateBlocks + 2 * lane.pair;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane.row + 8 * h;
      if (row >= block.steps) continue;
      if (view.data != nullptr) {
        Scalar* const target = block.at.template rows<Scalar>(view, block.group, 0) + row * view.stride_step + first_column;
#pragma unroll
        for (int b = 0; b < kHalfStateBlocks; ++b) {
          const cuda::Packed<Scalar> rounded = cuda::pack<Scalar>(grad[b][2 * h], grad[b][2 * h + 1]);
          if (first_column + 8 * b < p.dstate) *reinterpret_cast<cuda::Packed<Scalar>*>(target + 8 * b) = rounded;
        }
      } else if (parts.data != nullptr) {
        float* const target = block.at.template rows<float>(parts, block.group, 0) + split * p.parts_stride_split +
                              row * parts.stride_step + first_column;
#pragma unroll
        for (int b = 0; b < kHalfStateBlocks; ++b) {
          if (first_column + 8 * b < p.dstate) {
            *reinterpret_cast<float2*>(target + 8 * b) = {grad[b][2 * h], grad[b][2 * h + 1]};
          }
        }
      }
    }
  }

  __device__ __forceinline__ void copy(const FragmentLane& lane) const {
    const int thread = lane.index;
    using HeadRows = RowCopier<Scalar, kStateRows, kWarpSize>;
    using GroupRows = RowCopier<Scalar, dstate, kWarpSize>;
    const auto copy_group_rows = [&](const RowsView& view, SwizzledState& tile) {
      GroupRows(block.at.template rows<Scalar>(view, block.group, 0), view.stride_step, p.dstate, thread)
          .copy(tile, block.steps, view.stride_step);
    };
    copy_group_rows(p.B, shared.B);
    copy_group_rows(p.C, shared.C);
    cuda::grid_dependency_sync();
    TileCursor cursor{block.first_head};
    const int64_t first_state = block.chunk_index * p.state_tiles + block.first_head * row_blocks();
    const SwizzledState* S = static_cast<const SwizzledState*>(p.states) + first_state;
    const SwizzledState* T = static_cast<const SwizzledState*>(p.grad_states) + first_state;
    PipelineState pipeline;
    cuda::produce_copies<Shared::kMaxStages - 2>(
        block.state_tiles, stages(), pipeline, shared.full, shared.empty, [&](int, int stage) {
          Stage& target = shared.stage(stage);
          const int first_row = cursor.row_block * kStateRows;
          const auto copy_tile_rows = [&](const RowsView& view, HeadTile& tile) {
            const Scalar* const source = block.at.template rows<Scalar>(view, cursor.head, 0) + first_row;
            HeadRows(source, view.stride_step, p.headdim - first_row, thread).copy(tile, block.steps, view.stride_step);
          };
          if constexpr (!kUsesTma) {
            copy_swizzled_state(*T, target.T, lane);
            copy_swizzled_state(*S, target.S, lane);
          } else if (thread == 0) {
            shared.full[stage].arrive_and_expect_tx(sizeof(target.S) + sizeof(target.T));
            cuda::tma_load(&target.T, T, sizeof(target.T), shared.full[stage]);
            cuda::tma_load(&target.S, S, sizeof(target.S), shared.full[stage]);
          }
          copy_tile_rows(p.x, target.x);
          copy_tile_rows(p.grad_out, target.g);
          ++S;
          ++T;
          cursor.advance(row_blocks());
        });
  }

  static __device__ __forceinline__ void copy_swizzled_state(const SwizzledState& source, SwizzledState& target,
                                                             const FragmentLane& lane) {
    constexpr int kVectors = sizeof(SwizzledState) / sizeof(uint4);
    const auto* const from = reinterpret_cast<const uint4*>(&source) + lane.index;
    auto* const to = reinterpret_cast<uint4*>(&target) + lane.index;
#pragma unroll
    for (int i = 0; i < kVectors; i += kWarpSize) cuda::cp_async(to + i, from + i, cuda::kCpAsyncBytes);
  }

  __device__ __forceinline__ void produce_cumsum(const FragmentLane& lane) const {
    TileCursor next{block.first_head}, cursor{block.first_head};
    PipelineState pipeline;
    using Fetched = FetchedSteps<Gates>;
    cuda::produce_tables<1, Fetched>(
        block.state_tiles, WarpShare<1>(), stages(), pipeline, shared.full, shared.tables_empty,
        [&](int, Fetched& fetched) {
          fetched.fetch(p, Gates::source(p, block.at, next.head, 0), block.at.resets(p, 0), block.steps);
          next.advance(row_blocks());
        },
        [&](const Fetched* fetched) {
          ChunkCumsum<1, Gates> made;
          made.make(p, Gates(p, cursor.head), fetched);
          return made;
        },
        [&](int stage, const Fetched& fetched, const ChunkCumsum<1, Gates>& made, int k) {
          Tables& tables = shared.stage(stage).tables;
          made.store(k, tables.steps);
          if (lane.index == 0) tables.gates = Gates(p, cursor.head);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int element = 2 * lane.index + i, row = cursor.row_block * kStateRows + element;
            tables.kept[element] = Gates::keep(p, fetched.loaded[i]);
            tables.D[element] =
                p.D != nullptr && row < p.headdim ? p.D[cursor.head * p.D_stride_head + row * p.D_stride_row] : 0.0f;
          }
          cursor.advance(row_blocks());
        });
  }

  // The elementwise products: <S, T>, and g x for the gradient of D.
  __device__ __forceinline__ void reduce_elements(const FragmentLane& lane) const {
    for_each_tile(shared.full, shared.empty, [&](int, Stage& tiles, const TileCursor& cursor) {
      const float states = inner_product<Scalar>(tiles.S, tiles.T, lane);
      if (lane.index == 0) tiles.sums.states = states;
      if (p.grad_D_parts != nullptr) write_grad_D(cursor, tiles, lane);
    });
  }

  __device__ __forceinline__ void reduce_step_gradients(const FragmentLane& lane) const {
    GateGradients grads = {};
    for_each_tile(shared.empty, shared.tables_empty, [&](int, const Stage& stage, const TileCursor& cursor) {
      const Tables& tables = stage.tables;
      add_step_gradients<Scalar>(tables.steps, stage.sums, lane, rank_shift_of<Gates>(p), grads);
      if (cursor.is_last_of_head(row_blocks())) {
        tables.gates.write_gradients(p, block.at, block.steps, block.chunk_index, cursor.head, tables.kept, lane, grads);
        grads = {};
      }
    });
  }

  // Writes the chunk's part of D's gradient: the sums over steps of g x.
  __device__ __forceinline__ void write_grad_D(const TileCursor& cursor, Stage& tiles, const FragmentLane& lane) const {
    const int first_row = cursor.row_block * kStateRows;
    float* const target =
        p.grad_D_parts + (block.chunk_index * p.parts_heads + cursor.head) * padded_row(p.headdim) + first_row;
    write_column_products<Scalar>(tiles.g, tiles.x, target, p.headdim - first_row, lane);
  }
};

template <typename Scalar, int dstate, typename Mma, typename Gates>
__global__ void __launch_bounds__(Mma::kAreCompiled ? BwdChunks<Scalar, dstate, Mma, Gates>::kThreads : kWarpSize, 1)
    ssd_bwd_chunks_kernel(const __grid_constant__ typename Gates::BwdParams p,
                          const __grid_constant__ WorkPartition partition) {
  if constexpr (Mma::kAreCompiled) {
    using Chunks = BwdChunks<Scalar, dstate, Mma, Gates>;
    extern __shared__ unsigned char unaligned_memory[];
    auto& shared = Chunks::Shared::at(unaligned_memory);

    // There are fewer than 2^31 blocks, so the numbers of chunks, groups and splits are ints.
    const auto groups = static_cast<unsigned>(p.groups), splits = static_cast<unsigned>(p.splits);
    const int split = static_cast<int>(blockIdx.x % splits), group = static_cast<int>(blockIdx.x / splits % groups),
              chunk_index = static_cast<int>(blockIdx.x / splits / groups);
    const int heads_per_group = static_cast<int>(p.heads) / static_cast<int>(groups);
    const int first_in_group = split * static_cast<int>(p.heads_per_split);
    const int heads = min(static_cast<int>(p.heads_per_split), heads_per_group - first_in_group);
    const int first_head = group * heads_per_group + first_in_group;
    const int64_t entry = sequence_of_chunk(p, chunk_index), chunk = chunk_index - first_chunk_index(p, entry);
    ChunkSpan at(p, entry);
    if (chunk < 0 || chunk >= at.chunks) {
      cuda::grid_dependency_sync();
      for (int head = first_head + static_cast<int>(threadIdx.x); head < first_head + heads; head += blockDim.x) {
        Gates::clear_gradients(p, chunk_index, head);
        for (int row = 0; p.grad_D_parts != nullptr && row < p.headdim; ++row)
          p.grad_D_parts[(chunk_index * p.parts_heads + head) * padded_row(p.headdim) + row] = 0;
      }
      return;
    }
    at.narrow(static_cast<int>(chunk), 1);
    const BlockOfChunks block = {at, at.steps_of(0), group, chunk_index, first_head, heads * partition.row_blocks};
    const Chunks chunks = Chunks::make(p, partition, shared, block);
    if (threadIdx.x < chunks.stages()) {
      shared.full[threadIdx.x].init(2 * kWarpSize + (Chunks::kUsesTma ? 1 : 0));
      shared.empty[threadIdx.x].init(Chunks::kConsumerThreads + kWarpSize);
      shared.tables_empty[threadIdx.x].init(kWarpSize);
      // TMA loads arrive there too.
      if constexpr (Chunks::kUsesTma) cuda::fence_proxy_async();
    }
    __syncthreads();
    // The shuffle tells the compiler that all lanes have the same value.
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    if (warpgroup == kHalves) {
      cuda::warpgroup_reg_dealloc<Chunks::kProducerRegisters>();
      chunks.produce();
    } else {
      cuda::warpgroup_reg_alloc<Chunks::kConsumerRegisters>();
      chunks.consume(warpgroup);
    }
  }
}

}  // namespace ssm_kernels::ssd
