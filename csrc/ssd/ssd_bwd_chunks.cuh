// SSD chunk-scan, backward: all gradients, from the states before each chunk and the gradients of the states after it. See
// ssd_bwd.cuh for the formulas.
//
// A block has one chunk, its group's B and C, and some of the group's heads, one unit of up to kUnitRows rows after another.
// Two warpgroups multiply. Steps are down the rows of every product, so that gains and decays, which are a row's, meet fp32
// sums: x, g, B and C are read as they were given. Of the columns each warpgroup has one half: of the steps i in x g^T and what
// comes of it, of the states n in g S and x T, of the rows p in B T^T + M^T g. For the last, which sums over all i, the halves
// of M^T meet in shared memory. In registers through all units stay C B^T and the sums over heads, W^T and the gradients of B
// and C.
//
// Of a third warpgroup one warp copies the units ahead to shared memory and one makes the tables of their decays
// (ssd_supply.cuh). The third multiplies S with T, and g with x for the gradient of D, element by element: in 16 bits
// as the diagonal of a matrix product. The last turns what the products have of each step (StepSums) into the gradients of dt,
// A and dt_bias.
//
// Products that run while their warps go on (ssd_products.cuh) are begun as early as their operands are there. Those of a warp
// are done when they are called, so that each is called where its result is asked for, and registers are few: x g^T, and the
// products with S and T, are taken in two parts, but for 64 states in fp32. M^T has one tile then, not two in turn, and the
// multiplying warps meet once more before it is written again.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "cuda/mma.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/register_trade.cuh"
#include "ssd/ssd_bwd_pairs.cuh"
#include "ssd/ssd_bwd_states.cuh"
#include "ssd/ssd_products.cuh"

namespace ssm_kernels::ssd {

static_assert(kUnitRows == kChunk, "x and g, the decays between steps, and S and T are tiles of as many rows");

template <typename Scalar, int dstate>
struct ChunksStage {
  Tile<kUnitRows, sizeof(Scalar)> x, g;
  Tile<dstate, sizeof(Scalar)> S, T;
  UnitTables<Scalar> tables;
  StepSums<Scalar> sums;
};
// What a block has.
struct BlockOfChunks {
  Span at;
  int steps;  // of the chunk
  int group, slot, first_head;
  int units;
};
constexpr int kChunksStages = 3;
template <typename Scalar, int dstate, bool is_async>
struct ChunksOnce {
  Tile<dstate, sizeof(Scalar)> B, C;
  // M^T, of two units in turn where there is room; in the end W^T.
  static constexpr int kWeights = is_async ? 2 : 1;
  Tile<kChunk, sizeof(Scalar)> weights[kWeights];
  cuda::SharedBarrier tables_empty[kChunksStages];
  BlockOfChunks block;
};
template <typename Scalar, int dstate, typename Products>
using ChunksShared =
    StagedShared<ChunksOnce<Scalar, dstate, Products::kIsAsync>, ChunksStage<Scalar, dstate>, Products, kChunksStages>;

// One unit after another.
struct UnitWalk {
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

template <typename Scalar, int dstate, typename Products>
struct BwdChunks {
  using Shared = ChunksShared<Scalar, dstate, Products>;
  using Stage = typename Shared::Stage;
  using Tables = UnitTables<Scalar>;
  using Image = Tile<dstate, sizeof(Scalar)>;
  using HeadTile = Tile<kUnitRows, sizeof(Scalar)>;
  using PairTile = Tile<kChunk, sizeof(Scalar)>;
  using PairsOfTile = ssd::PairsOfTile<sizeof(Scalar)>;
  static constexpr int kStateGroups = dstate / 16, kHalfGroups = kStateGroups / kHalves,
                       kHalfStateBlocks = dstate / 8 / kHalves;
  // What x g^T is, and products with S and T, is used in so many parts: products that do not run meanwhile need the registers
  // of one. In fp32 few blocks of columns are products that wait for one another, so that there are parts where they must be.
  static constexpr int kParts = Products::kIsAsync || (kIsFp32<Scalar> && dstate <= 64) ? 1 : 2,
                       kPairBlocks = kHalfBlocks / kParts, kPartGroups = kHalfGroups / kParts,
                       kPartBlocks = kHalfStateBlocks / kParts;
  using OfPairs = PairProducts<Scalar, kPairBlocks>;
  // So many steps of a product at once, as loads of later ones take registers too.
  static constexpr int kUnrolled = Products::kIsAsync ? kStateGroups : kIsFp32<Scalar> ? 1 : 2;
  // S and T, where the device has such copies. In 16 bits products of a warp do as on other devices, which is tested so.
  static constexpr bool kCopiesInBulk = SSM_KERNELS_HAS_WGMMA && (Products::kIsAsync || kIsFp32<Scalar>);
  static constexpr int kMultiplyingThreads = kHalves * kUnitThreads;
  static constexpr int kThreads = kMultiplyingThreads + kUnitThreads;
  // Of a thread.
  static constexpr int kMultiplierRegisters = kIsFp32<Scalar> ? 216 : 208,
                       kMoverRegisters = cuda::registers_left<kMultiplyingThreads, kMultiplierRegisters, kUnitThreads>();
  static constexpr int kMultipliers = 1;  // the number of their named barrier

  const SsdBwdParams& p;
  Shared& shared;
  // In shared memory where registers are few: all warps need little of it, now and then.
  const std::conditional_t<Products::kIsAsync, BlockOfChunks, BlockOfChunks&> block;

  // By all threads, before they meet.
  static __device__ __forceinline__ BwdChunks make(const SsdBwdParams& p, Shared& shared, const BlockOfChunks& block) {
    if constexpr (Products::kIsAsync) {
      return {p, shared, block};
    } else {
      if (threadIdx.x == 0) shared.block = block;
      return {p, shared, shared.block};
    }
  }

  __device__ __forceinline__ int stages() const { return Shared::stages(p); }
  // Of a head.
  __device__ __forceinline__ int row_blocks() const { return (p.headdim + kUnitRows - 1) / kUnitRows; }

  // The warpgroup after the multipliers'.
  __device__ __forceinline__ void move() const {
    const Lane lane;
    switch (lane.warp) {
      case 0:
        copy(lane);
        break;
      case 1:
        tabulate(lane);
        break;
      case 2:
        multiply_elements(lane);
        break;
      default:
        end_units(lane);
    }
  }

  // A warpgroup that multiplies.
  __device__ __forceinline__ void multiply(int half) const {
    const Lane lane = Products::kIsAsync ? Lane() : Lane::in_register();
    const PairsOfTile pairs(lane);
    float grad_B[kHalfStateBlocks][4], grad_C[kHalfStateBlocks][4];
#pragma unroll
    for (int b = 0; b < kHalfStateBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) grad_B[b][i] = grad_C[b][i] = 0;
    }
    shared.full[0].wait(0);
    OfPairs of_pairs;
    const auto B_rows = Products::describe(shared.B, lane), C_rows = Products::describe(shared.C, lane);
    Products::fence();
#pragma unroll
    for (int k = 0; k < kStateGroups; ++k) {
      cuda::multiply<Scalar, false, false>(of_pairs.CB, columns_of(B_rows, k), columns_of(rows_of(C_rows, 2 * half), k), k > 0);
    }
    Products::commit();
    Products::template wait<0>(of_pairs.CB);
    of_pairs.begin(half, shared.stage(0).tables.steps, lane);

    UnitWalk walk{block.first_head};
    RingPosition ring;
#pragma unroll 1
    for (int index = 0; index < block.units; ++index) {
      shared.full[ring.stage].wait(ring.phase);
      multiply_unit(half, shared.stage(ring.stage), shared.weights[index % Shared::kWeights], walk, Products::anew(pairs),
                    Products::anew(lane), of_pairs, grad_B, grad_C);
      shared.empty[ring.stage].arrive();
      ring.advance(stages());
      walk.advance(row_blocks());
    }
    end_block(half, of_pairs.W, pairs, lane, grad_B, grad_C);
  }

 private:
  // M: where M^T of this unit goes.
  __device__ __forceinline__ void multiply_unit(int half, Stage& tiles, PairTile& M, const UnitWalk& walk,
                                                const PairsOfTile& pairs, const Lane& lane, OfPairs& of_pairs,
                                                float (&grad_B)[kHalfStateBlocks][4],
                                                float (&grad_C)[kHalfStateBlocks][4]) const {
    const Tables& tables = tiles.tables;
    float xg[kPairBlocks][4], grad_x[kHalfBlocks][4], of_states[kPartBlocks][4];
    const auto begin_grad_x = [&] {
      const auto B = Products::describe(shared.B, lane), T_half = rows_of(Products::describe(tiles.T, lane), 2 * half);
#pragma unroll kUnrolled
      for (int k = 0; k < kStateGroups; ++k) {
        cuda::multiply<Scalar, false, false>(grad_x, columns_of(B, k), columns_of(T_half, k), k > 0);
      }
      Products::commit();
    };
    const auto begin_of_states = [&](const HeadTile& of_steps, const Image& states, int part) {
      const auto steps = Products::describe(of_steps, lane),
                 columns = columns_of(columns_of(Products::describe(states, lane), half * kHalfGroups), part * kPartGroups);
#pragma unroll kUnrolled
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::multiply<Scalar, false, true>(of_states, columns_of(steps, k), rows_of(columns, k), k > 0);
      }
      Products::commit();
    };
    const auto begin_xg = [&](int part) {
      const auto x = Products::describe(tiles.x, lane),
                 g_part = rows_of(Products::describe(tiles.g, lane), 2 * half + part * kPairBlocks / 2);
#pragma unroll kUnrolled
      for (int k = 0; k < kStepGroups; ++k) {
        cuda::multiply<Scalar, false, false>(xg, columns_of(x, k), columns_of(g_part, k), k > 0);
      }
      Products::commit();
    };
    // What runs meanwhile is begun early; what does not, where its registers are needed.
    if constexpr (Products::kIsAsync) {
      Products::fence();
      begin_xg(0);
      begin_grad_x();
      begin_of_states(tiles.g, tiles.S, 0);
    } else {
      // The others have done with M^T of the unit before.
      cuda::barrier_sync(kMultipliers, kMultiplyingThreads);
    }

    PairRowSums<Scalar> of_pair_rows = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if constexpr (!Products::kIsAsync) begin_xg(part);
      Products::template wait<2>(xg);
      of_pairs.weigh(half, part * kPairBlocks, tables.steps, xg, pairs, lane, M, of_pair_rows, tiles.sums);
    }
    of_pair_rows.store(half, lane, tiles.sums);
    Products::publish();
    const float to_end[2] = {decay_to_end(tables.steps, lane.row), decay_to_end(tables.steps, lane.row + 8)};
    if constexpr (!Products::kIsAsync) begin_grad_x();
    Products::template wait<1>(grad_x);
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) grad_x[b][i] *= to_end[i / 2];
    }
    cuda::barrier_sync(kMultipliers, kMultiplyingThreads);
    const auto M_rows = Products::describe(M, lane), g_half = columns_of(Products::describe(tiles.g, lane), 2 * half);
    Products::fence();
#pragma unroll kUnrolled
    for (int k = 0; k < kStepGroups; ++k) {
      cuda::multiply<Scalar, false, true>(grad_x, columns_of(M_rows, k), rows_of(g_half, k), true);
    }
    Products::commit();

    float of_rows[4] = {};
    if constexpr (!Products::kIsAsync) write_grad_x(half, walk, grad_x, tiles.g, tables, pairs, lane);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if constexpr (!Products::kIsAsync) begin_of_states(tiles.g, tiles.S, part);
      Products::template wait<1>(of_states);
      add_states(half, part, of_states, shared.C, tables.steps.from_start, pairs, lane, grad_C, &of_rows[0]);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Products::fence();
      begin_of_states(tiles.x, tiles.T, part);
      if constexpr (Products::kIsAsync) {
        Products::template wait<1>(grad_x);
        write_grad_x(half, walk, grad_x, tiles.g, tables, pairs, lane);
      }
      Products::template wait<0>(of_states);
      add_states(half, part, of_states, shared.B, tables.steps.to_end, pairs, lane, grad_B, &of_rows[2]);
    }
    const float of_row = sum_over_row(of_rows, lane);
    StepSums<Scalar>& sums = tiles.sums;
    (lane.pair < 2 ? sums.read_state : sums.grad_state)[half][lane.row + lane.pair % 2 * 8] = of_row;
  }

  // grad += weights product, a row's; of_rows: the rows' products with those of B or C, of this lane's states.
  __device__ __forceinline__ void add_states(int half, int part, const float (&product)[kPartBlocks][4], Image& of_group,
                                             const float (&weights)[kChunk], const PairsOfTile& pairs, const Lane& lane,
                                             float (&grads)[kHalfStateBlocks][4], float* of_rows) const {
    const float weight[2] = {weights[lane.row], weights[lane.row + 8]};
    constexpr int kPartsOfHalf = Image::kParts / kHalves;
    Image& of_half =
        *reinterpret_cast<Image*>(reinterpret_cast<unsigned char*>(&of_group) + half * kPartsOfHalf * Image::kPartBytes);
    const PairsOfTile pairs_of_half = kPartsOfHalf > 0 ? pairs : pairs.moved(half * kHalfStateBlocks);
#pragma unroll
    for (int b = 0; b < kPartBlocks; ++b) {
      float (&grad)[4] = grads[part * kPartBlocks + b];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = cuda::unpack<Scalar>(pairs_of_half.at(of_half, part * kPartBlocks + b, h));
        of_rows[h] = fmaf(product[b][2 * h], pair.x, fmaf(product[b][2 * h + 1], pair.y, of_rows[h]));
        grad[2 * h] = fmaf(weight[h], product[b][2 * h], grad[2 * h]);
        grad[2 * h + 1] = fmaf(weight[h], product[b][2 * h + 1], grad[2 * h + 1]);
      }
    }
  }

  // From the sums over i and over the states, without the gain.
  __device__ __forceinline__ void write_grad_x(int half, const UnitWalk& walk, const float (&sum)[kHalfBlocks][4], HeadTile& g,
                                               const Tables& tables, const PairsOfTile& pairs, const Lane& lane) const {
    const float gain[2] = {tables.steps.gain[lane.row], tables.steps.gain[lane.row + 8]};
    const int column = half * kHalfChunk + 2 * lane.pair, rows = p.headdim - walk.row_block * kUnitRows;
    Scalar* const target = block.at.template rows<Scalar>(p.grad_x, walk.head, 0) + walk.row_block * kUnitRows + column;
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

  // Adds what B and C have of the pairs of steps, and writes their gradients, or the block's part of them.
  __device__ __forceinline__ void end_block(int half, const float (&W)[kHalfBlocks][4], const PairsOfTile& pairs,
                                            const Lane& lane, float (&grad_B)[kHalfStateBlocks][4],
                                            float (&grad_C)[kHalfStateBlocks][4]) const {
    const auto B_half = columns_of(Products::describe(shared.B, lane), half * kHalfGroups),
               C_half = columns_of(Products::describe(shared.C, lane), half * kHalfGroups);
    // Of 16 bits W^T rounded, and what that leaves: together, or one after the other.
    constexpr int kAtOnce = Shared::kWeights, kWords = kIsFp32<Scalar> ? 1 : 2,
                  kUnrolledAtEnd = kIsFp32<Scalar> ? 1 : kStepGroups;
#pragma unroll
    for (int first = 0; first < kWords; first += kAtOnce) {
      cuda::barrier_sync(kMultipliers, kMultiplyingThreads);
#pragma unroll
      for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float low = W[b][2 * h], high = W[b][2 * h + 1];
          cuda::Packed<Scalar> words[kWords] = {cuda::pack<Scalar>(low, high)};
          if constexpr (kWords > 1) words[1] = cuda::pack_rest<Scalar>(low, high, words[0]);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) pairs.at(shared.weights[i], half * kHalfBlocks + b, h) = words[first + i];
        }
      }
      Products::publish();
      cuda::barrier_sync(kMultipliers, kMultiplyingThreads);
      Products::fence();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const auto weights = Products::describe(shared.weights[i], lane);
#pragma unroll kUnrolledAtEnd
        for (int k = 0; k < kStepGroups; ++k) {
          cuda::multiply<Scalar, false, true>(grad_B, columns_of(weights, k), rows_of(C_half, k), true);
          cuda::multiply<Scalar, true, true>(grad_C, rows_of(weights, k), rows_of(B_half, k), true);
        }
      }
      Products::commit();
      Products::template wait<0>(grad_B);
      Products::template wait<0>(grad_C);
    }
    write_of_group(half, p.grad_B, p.grad_B_parts, grad_B, lane);
    write_of_group(half, p.grad_C, p.grad_C_parts, grad_C, lane);
  }

  __device__ __forceinline__ void write_of_group(int half, const RowsView& view, float* parts,
                                                 const float (&grad)[kHalfStateBlocks][4], const Lane& lane) const {
    // Found again here rather than kept in a register.
    const int64_t split = blockIdx.x % static_cast<unsigned>(p.splits);
    const int64_t first_step = block.at.batch * p.seqlen + block.at.start;
    const int64_t all_steps = (is_packed(p) ? 1 : p.batch) * p.seqlen;
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
      } else if (parts != nullptr) {
        float* const target =
            parts + ((split * all_steps + first_step + row) * p.groups + block.group) * p.dstate + first_column;
#pragma unroll
        for (int b = 0; b < kHalfStateBlocks; ++b) {
          if (first_column + 8 * b < p.dstate) {
            *reinterpret_cast<float2*>(target + 8 * b) = {grad[b][2 * h], grad[b][2 * h + 1]};
          }
        }
      }
    }
  }

  __device__ __forceinline__ void copy(const Lane& lane) const {
    const int thread = lane.index;
    using HeadRows = RowCopier<Scalar, kUnitRows, kWarpSize>;
    using GroupRows = RowCopier<Scalar, dstate, kWarpSize>;
    const auto copy_of_group = [&](const RowsView& view, Image& tile) {
      GroupRows(block.at.template rows<Scalar>(view, block.group, 0), view.stride_step, p.dstate, thread)
          .copy(tile, block.steps, view.stride_step);
    };
    copy_of_group(p.B, shared.B);
    copy_of_group(p.C, shared.C);
    cuda::wait_for_kernel_before();
    UnitWalk walk{block.first_head};
    const int64_t first_image = block.slot * p.units + block.first_head * row_blocks();
    const Image* S = static_cast<const Image*>(p.states) + first_image;
    const Image* T = static_cast<const Image*>(p.grad_states) + first_image;
    RingPosition ring;
    supply_copies<Shared::kMaxStages - 2>(block.units, stages(), ring, shared.full, shared.empty, [&](int, int stage) {
      Stage& target = shared.stage(stage);
      const int first_row = walk.row_block * kUnitRows;
      const auto copy_of_unit = [&](const RowsView& view, HeadTile& tile) {
        const Scalar* const source = block.at.template rows<Scalar>(view, walk.head, 0) + first_row;
        HeadRows(source, view.stride_step, p.headdim - first_row, thread).copy(tile, block.steps, view.stride_step);
      };
      if constexpr (!kCopiesInBulk) {
        copy_image(*T, target.T, lane);
        copy_image(*S, target.S, lane);
      } else if (thread == 0) {
        shared.full[stage].arrive_expecting(sizeof(target.S) + sizeof(target.T));
        cuda::bulk_load(&target.T, T, sizeof(target.T), shared.full[stage]);
        cuda::bulk_load(&target.S, S, sizeof(target.S), shared.full[stage]);
      }
      copy_of_unit(p.x, target.x);
      copy_of_unit(p.grad_out, target.g);
      ++S;
      ++T;
      walk.advance(row_blocks());
    });
  }

  static __device__ __forceinline__ void copy_image(const Image& source, Image& target, const Lane& lane) {
    constexpr int kPieces = sizeof(Image) / sizeof(uint4);
    const auto* const from = reinterpret_cast<const uint4*>(&source) + lane.index;
    auto* const to = reinterpret_cast<uint4*>(&target) + lane.index;
#pragma unroll
    for (int i = 0; i < kPieces; i += kWarpSize) cuda::async_copy(to + i, from + i, cuda::kAsyncCopyBytes);
  }

  __device__ __forceinline__ void tabulate(const Lane& lane) const {
    UnitWalk next{block.first_head}, walk{block.first_head};
    RingPosition ring;
    using Fetched = FetchedSteps<Scalar>;
    supply_tables<1, Fetched>(
        block.units, Share<1>(), stages(), ring, shared.full, shared.tables_empty,
        [&](int, Fetched& fetched) {
          fetched.fetch(p, block.at.template rows<const Scalar>(p.dt, next.head, 0), block.at.resets(p, 0), block.steps);
          next.advance(row_blocks());
        },
        [&](const Fetched* fetched) {
          TableSteps<1, Scalar> made;
          made.make(p, HeadSteps(p, walk.head), fetched);
          return made;
        },
        [&](int stage, const Fetched& fetched, const TableSteps<1, Scalar>& made, int k) {
          Tables& tables = shared.stage(stage).tables;
          made.store(k, tables.steps);
          if (lane.index == 0) tables.head = HeadSteps(p, walk.head);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int element = 2 * lane.index + i, row = walk.row_block * kUnitRows + element;
            tables.dt[element] = cuda::to_accumulate(fetched.dt[i]);
            tables.D[element] =
                p.D != nullptr && row < p.headdim ? p.D[walk.head * p.D_stride_head + row * p.D_stride_row] : 0.0f;
          }
          walk.advance(row_blocks());
        });
  }

  // S T and g x.
  __device__ __forceinline__ void multiply_elements(const Lane& lane) const {
    UnitWalk walk{block.first_head};
    RingPosition ring;
#pragma unroll 1
    for (int index = 0; index < block.units; ++index) {
      shared.full[ring.stage].wait(ring.phase);
      Stage& tiles = shared.stage(ring.stage);
      const float states = inner_product<Scalar>(tiles.S, tiles.T, lane);
      if (lane.index == 0) tiles.sums.states = states;
      if (p.grad_D_parts != nullptr) write_grad_D(walk, tiles, lane);
      shared.empty[ring.stage].arrive();
      ring.advance(stages());
      walk.advance(row_blocks());
    }
  }

  __device__ __forceinline__ void end_units(const Lane& lane) const {
    StepGradients grads = {};
    UnitWalk walk{block.first_head};
    RingPosition ring;
#pragma unroll 1
    for (int index = 0; index < block.units; ++index) {
      shared.empty[ring.stage].wait(ring.phase);
      const Stage& stage = shared.stage(ring.stage);
      const Tables& tables = stage.tables;
      add_step_gradients<Scalar>(tables.steps, stage.sums, lane, grads);
      if (walk.is_last_of_head(row_blocks())) {
        write_step_gradients<Scalar>(p, block.at, block.steps, block.slot, walk.head, tables, lane, grads);
      }
      shared.tables_empty[ring.stage].arrive();
      ring.advance(stages());
      walk.advance(row_blocks());
    }
  }

  // Over steps of g x.
  __device__ __forceinline__ void write_grad_D(const UnitWalk& walk, Stage& tiles, const Lane& lane) const {
    const int first_row = walk.row_block * kUnitRows;
    float* const target = p.grad_D_parts + (block.slot * p.heads + walk.head) * p.headdim + first_row;
    write_column_products<Scalar>(tiles.g, tiles.x, target, p.headdim - first_row, lane);
  }
};

// Of a chunk, its sequence; packed sequences leave some numbers to nobody.
__device__ __forceinline__ int64_t sequence_of_slot(const SsdParams& p, int64_t slot) {
  if (!is_packed(p)) return slot / ((p.seqlen + kChunk - 1) / kChunk);
  int64_t low = 0, high = p.batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_slot(p, middle) <= slot ? low : high) = middle;
  }
  return low;
}

template <typename Scalar, int dstate, typename Products>
__global__ void __launch_bounds__(Products::kAreCompiled ? BwdChunks<Scalar, dstate, Products>::kThreads : kWarpSize, 1)
    ssd_bwd_chunks_kernel(const __grid_constant__ SsdBwdParams p, const __grid_constant__ Partition partition) {
  if constexpr (Products::kAreCompiled) {
    using Chunks = BwdChunks<Scalar, dstate, Products>;
    extern __shared__ unsigned char unaligned_memory[];
    auto& shared = Chunks::Shared::at(unaligned_memory);

    // There are fewer than 2^31 blocks, and so of all that they are numbered by.
    const auto groups = static_cast<unsigned>(p.groups), splits = static_cast<unsigned>(p.splits);
    const int split = static_cast<int>(blockIdx.x % splits), group = static_cast<int>(blockIdx.x / splits % groups),
              slot = static_cast<int>(blockIdx.x / splits / groups);
    const int heads_per_group = static_cast<int>(p.heads) / static_cast<int>(groups);
    const int first_of_group = split * static_cast<int>(p.heads_per_split);
    const int heads = min(static_cast<int>(p.heads_per_split), heads_per_group - first_of_group);
    const int first_head = group * heads_per_group + first_of_group;
    const int64_t entry = sequence_of_slot(p, slot), chunk = slot - first_slot(p, entry);
    Span at(p, entry);
    if (chunk < 0 || chunk >= at.chunks) {
      cuda::wait_for_kernel_before();
      for (int head = first_head + static_cast<int>(threadIdx.x); head < first_head + heads; head += blockDim.x) {
        const int64_t place = slot * p.heads + head;
        p.grad_A_parts[place] = p.grad_bias_parts[place] = 0;
        for (int row = 0; p.grad_D_parts != nullptr && row < p.headdim; ++row) p.grad_D_parts[place * p.headdim + row] = 0;
      }
      return;
    }
    at.narrow(static_cast<int>(chunk), 1);
    const BlockOfChunks block = {at, at.steps_of(0), group, slot, first_head, heads * partition.row_blocks};
    const Chunks chunks = Chunks::make(p, shared, block);
    if (threadIdx.x < chunks.stages()) {
      shared.full[threadIdx.x].init(2 * kWarpSize + (Chunks::kCopiesInBulk ? 1 : 0));
      shared.empty[threadIdx.x].init(Chunks::kMultiplyingThreads + kWarpSize);
      shared.tables_empty[threadIdx.x].init(kWarpSize);
      // Bulk loads arrive there too.
      if constexpr (Chunks::kCopiesInBulk) cuda::publish_to_products();
    }
    __syncthreads();
    // By a shuffle the compiler sees that it is the same for all lanes.
    const int warpgroup = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kUnitThreads, 0);
    if (warpgroup == kHalves) {
      cuda::leave_registers<Chunks::kMoverRegisters>();
      chunks.move();
    } else {
      cuda::take_registers<Chunks::kMultiplierRegisters>();
      chunks.multiply(warpgroup);
    }
  }
}

}  // namespace ssm_kernels::ssd
