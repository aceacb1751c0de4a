// The results of each chunk of mlstm_scan with wgmma (compute capability 9.0a), from the states between chunks
// (chunk_states.cuh). With P = rows columns^T of the chunk's steps, all of them are
//
//   result = scale of the state . (rows state) + (P o weights) others
//
//   result  rows columns others state  weights of the pair (row, column)
//   out     q    k       v      S^T    c_j f_i e^(s_i - s_j), row i, column j <= i
//   grad q  g    v       k      S      the same
//   grad k  v    g       q      T      the same, row j, column i >= j
//   grad v  k    q       g      T^T    the same
//
// In a forward that divides, f_i is 1: the kernel computes the divisor of step i from n before the chunk and the sum of the
// weighted row of P, and divides the row of out by it.
//
// A block has all steps of a chunk and 256 columns of a result: two consumer warpgroups keep 64 rows each, in registers, and
// their P of 64 columns on the diagonal. One of them also has the 64 columns beside it. A sum over rows' columns takes one tile
// of 64 columns after another, of the rows, of the columns and of the state, from a ring in shared memory which one thread
// fills by TMA. The weighted P are operands in registers: rounded, and for out split into hi and lo parts.
//
// The gradients of the gates need, for each step, the result's products with q or k: of the part from the state, of the part
// from other steps of the chunk, and of its own. The own part is computed in fp32. Weights of both grad q and grad k include
// gain and factor, so that both round the same numbers and their sums over pairs cancel.
//
// Blocks are persistent. The loading thread is ahead of the consumers by the ring, across chunks. A result leaves through the
// rows' slot `Y` by TMA stores.
#pragma once

#include "common/math.h"
#include "mlstm/cuda/chunk_states.cuh"
#include "mlstm/cuda/divisor.cuh"
#include "mlstm/mlstm.h"

namespace ssm_kernels::mlstm {

// A slot of the ring: a step of the sum over columns, or the rows of all steps of the chunk, with all keys or as many values.
struct ProductTile {
  SmemTile<kTile> rows[2], columns[2];  // of the first 64 steps, and of the others
  SmemTile<kHalfKeys> state[2];
};
struct ProductRows {
  SmemTile<kTile> panels[kMatrixKeys / kTile][2];
  static constexpr int kPanelBytes = 2 * SmemTile<kTile>::kPanelBytes;
};
union alignas(cuda::kOperandAlignment) ProductSlot {
  ProductTile tile;
  ProductRows rows;
};
static_assert(sizeof(ProductSlot) == sizeof(ProductTile) && sizeof(ProductTile) == sizeof(ProductRows));
static_assert(kMatrixKeys == kMatrixValues, "results of keys and of values have equally many columns");

// Numbers of a chunk: its tables and, in a forward that divides, n before the chunk.
struct alignas(16) ProductNumbers {
  float tables[kChunkTables][kMatrixChunk], normalizer[kMatrixKeys];
};

struct ProductsShared {
  static constexpr int kSlots = 3, kTables = 2;
  ProductSlot slots[kSlots];
  ProductNumbers numbers[kTables];
  Mbarrier full[kSlots], empty[kSlots], tables_full[kTables], tables_empty[kTables];
};

// One kernel computes one of these: gradients of keys and values together would need more registers than there are.
enum class Results { kOut, kGradQK, kGradV };

// A result of a chunk: number of the chunk among those of all lines.
template <Results results>
struct ProductJob {
  static constexpr bool kSumsValues = results == Results::kGradQK;
  int number, kind;

  static __device__ __forceinline__ int kinds(const ChunkParams& p) {
    return kSumsValues ? 2 : static_cast<int>(p.value_dim) / kMatrixValues;
  }
  // Blocks that run at the same time have all results of a chunk, and each block has all kinds in turn.
  __device__ __forceinline__ ProductJob(const ChunkParams& p, int round) {
    const int count = kinds(p), in_round = blockIdx.x / count;
    number = round * static_cast<int>(gridDim.x / count) + in_round;
    kind = static_cast<int>((blockIdx.x - in_round * count + round) % count);
  }

  __device__ __forceinline__ bool is_reverse() const { return kSumsValues ? kind != 0 : results == Results::kGradV; }
  __device__ __forceinline__ int first_value() const { return kSumsValues ? 0 : kind * kMatrixValues; }
  // Coordinates of the chunk in tensors.
  __device__ __forceinline__ int step(const ChunkParams& p) const { return number % static_cast<int>(p.chunks) * kMatrixChunk; }
  __device__ __forceinline__ int entry(const ChunkParams& p) const {
    return static_cast<int>(p.first_entry) + number / static_cast<int>(p.chunks) / static_cast<int>(p.part_heads);
  }
  __device__ __forceinline__ int head(const ChunkParams& p) const {
    return static_cast<int>(p.first_head) + number / static_cast<int>(p.chunks) % static_cast<int>(p.part_heads);
  }
};

// Keeps the compiler from loading ahead what later iterations of an unrolled loop read, for which there are no registers.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

template <Results results>
struct ChunkProducts {
  using Scalar = __nv_bfloat16;
  using Job = ProductJob<results>;
  static constexpr bool kSumsValues = Job::kSumsValues;
  const ChunkParams& p;
  ProductsShared& shared;

  // Calls body(job, index of the job in the block).
  template <typename Body>
  __device__ __forceinline__ void for_each_job(const Body& body) const {
    const int chunks = static_cast<int>(p.lines() * p.chunks);
#pragma unroll 1
    for (int round = 0;; ++round) {
      const Job job(p, round);
      if (job.number >= chunks) break;
      body(job, round);
    }
  }

  __device__ __forceinline__ void load_numbers(const Job& job, ProductNumbers& target, Mbarrier& full) const {
    const float* normalizer = nullptr;
    if (results == Results::kOut && p.normalizers != nullptr) {
      const int step = job.step(p);
      if (step > 0) {
        const int64_t chunk = job.entry(p) * normalizer_chunks(p.seqlen) + step / kNormalizerChunk;
        normalizer = p.normalizers + (chunk * p.heads + job.head(p)) * kMatrixKeys;
      } else if (p.initial_normalizers != nullptr) {
        normalizer = p.initial_normalizers + (job.entry(p) * p.heads + job.head(p)) * kMatrixKeys;
      }
    }
    full.arrive_and_expect_tx(sizeof(target.tables) + (normalizer == nullptr ? 0 : sizeof(target.normalizer)));
    cuda::tma_load(target.tables, p.tables + int64_t(job.number) * (kChunkTables * kMatrixChunk), sizeof(target.tables), full);
    if (normalizer != nullptr) cuda::tma_load(target.normalizer, normalizer, sizeof(target.normalizer), full);
  }

  __device__ __forceinline__ void load() const {
    PipelineState at;
    for_each_job([&](const Job& job, int round) {
      const int entry = job.entry(p), head = job.head(p), step = job.step(p);
      const bool is_reverse = job.is_reverse();
      const auto load_tile = [&](SmemTile<kTile>& target, const cuda::TmaDescriptor& map, int column, int half,
                                 Mbarrier& full) {
        cuda::tma_load_tile(&target, map, column, head, step + half * kTile, entry, full);
      };
      const auto fill = [&](int bytes, const auto& body) {
        if (at.phase > 0) shared.empty[at.stage].wait(at.phase - 1);
        shared.full[at.stage].arrive_and_expect_tx(bytes);
        body(shared.slots[at.stage], shared.full[at.stage]);
        at.advance(ProductsShared::kSlots);
      };
      const auto fill_rows = [&](const cuda::TmaDescriptor& map, int column) {
        fill(sizeof(ProductRows), [&](ProductSlot& slot, Mbarrier& full) {
#pragma unroll 1
          for (int i = 0; i < 2 * kMatrixKeys / kTile; ++i) {
            load_tile(slot.rows.panels[i / 2][i % 2], map, column + i / 2 * kTile, i % 2, full);
          }
        });
      };
      const int table = round % ProductsShared::kTables, uses = round / ProductsShared::kTables;
      if (uses > 0) shared.tables_empty[table].wait(uses - 1);
      load_numbers(job, shared.numbers[table], shared.tables_full[table]);

      const cuda::TmaDescriptor& rows = kSumsValues ? (is_reverse ? p.v : p.grad_out) : is_reverse ? p.k : p.q;
      const cuda::TmaDescriptor& columns = kSumsValues ? (is_reverse ? p.grad_out : p.v) : is_reverse ? p.q : p.k;
      const auto* const states =
          static_cast<const Scalar*>(is_reverse ? p.grad_states : p.states) + job.number * (p.value_dim * kMatrixKeys);
      const int tiles = static_cast<int>(kSumsValues ? p.value_dim : kMatrixKeys) / kTile;
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        fill(sizeof(ProductTile), [&](ProductSlot& slot, Mbarrier& full) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            load_tile(slot.tile.rows[half], rows, t * kTile, half, full);
            load_tile(slot.tile.columns[half], columns, t * kTile, half, full);
          }
          if constexpr (kSumsValues) {
            cuda::tma_load(slot.tile.state, states + t * kStateTileElements, sizeof(slot.tile.state), full);
            return;
          }
          // The t-th 64 keys of 256 values.
          constexpr int kPanelElements = kTile * kTile;
#pragma unroll
          for (int i = 0; i < kMatrixValues / kTile; ++i) {
            cuda::tma_load(reinterpret_cast<SmemTile<kTile>*>(slot.tile.state) + i,
                           states + (job.first_value() / kTile + i) * kStateTileElements + t * kPanelElements,
                           sizeof(SmemTile<kTile>), full);
          }
        });
      }
      if constexpr (kSumsValues) {
        fill_rows(is_reverse ? p.k : p.q, 0);
        fill_rows(is_reverse ? p.q : p.k, 0);
      } else {
        fill(0, [](ProductSlot&, Mbarrier&) {});
        fill_rows(is_reverse ? p.grad_out : p.v, job.first_value());
      }
    });
  }

  // The weighted P of 64 columns, as operands A: hi parts and, if `splits`, lo parts.
  template <bool splits>
  struct Weighted {
    uint32_t hi[4][4], lo[splits ? 4 : 1][4];
  };

  // A warpgroup's rows of a chunk, and the tables of these and of columns. Back in time, decays and distances have the other
  // sign.
  struct Weights {
    const float (&tables)[kChunkTables][kMatrixChunk];
    const FragmentLane& lane;
    bool is_reverse;
    int first_row;
    float log2_decay[2], of_row[2];

    __device__ __forceinline__ Weights(const float (&tables)[kChunkTables][kMatrixChunk], const FragmentLane& lane, int index,
                                       bool is_reverse)
        : tables(tables), lane(lane), is_reverse(is_reverse), first_row(index * kTile + lane.row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        log2_decay[half] = tables[kTableLog2Decay][first_row + 8 * half];
        if (is_reverse) log2_decay[half] = -log2_decay[half];
        of_row[half] = tables[is_reverse ? kTableGain : kTableFactor][first_row + 8 * half];
      }
    }
    __device__ __forceinline__ float of_state(int half) const {
      return tables[is_reverse ? kTableToEnd : kTableFromStart][first_row + 8 * half];
    }

    // Weights P of 64 columns, and adds them to `row_sums`. On the diagonal, pairs in which the column does not come before the
    // row are zero. With `own`, the pairs of a step with itself go there instead.
    template <bool is_diagonal, bool has_own, bool splits>
    __device__ __forceinline__ void apply(const float (&products)[8][4], int first_column, Weighted<splits>& weighted,
                                          float (&own)[2], float (&row_sums)[2]) const {
      const float minus_sign = is_reverse ? 1.0f : -1.0f;
      const int direction = is_reverse ? -1 : 1;
      const int first_distance = direction * (lane.quad - 2 * lane.pair + 16 * lane.warp);
      const float *const log2_of = &tables[kTableLog2Decay][first_column + 2 * lane.pair],
                         *const of_columns = &tables[is_reverse ? kTableFactor : kTableGain][first_column + 2 * lane.pair];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 column_log2 = *reinterpret_cast<const float2*>(log2_of + 8 * n),
                     of_column = *reinterpret_cast<const float2*>(of_columns + 8 * n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float log2 = fmaf(minus_sign, e == 0 ? column_log2.x : column_log2.y, log2_decay[half]);
            const float weight = of_row[half] * (e == 0 ? of_column.x : of_column.y) * Math<float>::exp2(log2);
            values[e] = products[n][2 * half + e] * weight;
            if constexpr (is_diagonal) {
              // How many steps the column is before the row, in the order of the scan.
              const int distance = first_distance + direction * (8 * half - 8 * n - e);
              if constexpr (has_own) {
                if (distance == 0) own[half] = values[e];
              }
              values[e] = distance > (has_own ? 0 : -1) ? values[e] : 0.0f;
            }
          }
          row_sums[half] += values[0] + values[1];
          const uint32_t hi = cuda::pack<Scalar>(values[0], values[1]);
          weighted.hi[n / 2][n % 2 * 2 + half] = hi;
          if constexpr (splits) weighted.lo[n / 2][n % 2 * 2 + half] = cuda::pack_lo<Scalar>(values[0], values[1], hi);
        }
        keep_order();
      }
    }
  };

  // result += weighted others, for the 64 rows of `others` from `block` on.
  template <bool splits>
  static __device__ __forceinline__ void add_others(KeyAccumulator& result, const Weighted<splits>& weighted,
                                                    const ProductRows& others, int block) {
    uint64_t operands[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      operands[h] = cuda::make_wgmma_descriptor(&others.panels[2 * h][block], ProductRows::kPanelBytes);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        cuda::gemm<Scalar, true>(result[h], weighted.hi[j], cuda::rows_of(operands[h], j), true);
        if constexpr (splits) cuda::gemm<Scalar, true>(result[h], weighted.lo[j], cuda::rows_of(operands[h], j), true);
      }
    }
  }

  // The lane's pair of a row of the chunk.
  static __device__ __forceinline__ uint32_t& pair_of(ProductRows& rows, const FragmentPairs<>& pairs, int index, int h, int n,
                                                      int half) {
    return pairs.at(rows.panels[2 * h + n / 8][index], n % 8, half);
  }
  static __device__ __forceinline__ float over_row(float sum) {
    sum += __shfl_xor_sync(cuda::kAllLanes, sum, 1);
    return sum + __shfl_xor_sync(cuda::kAllLanes, sum, 2);
  }

  // A warpgroup's 64 rows of a result: those with columns on both sides of the diagonal, if it `has_beside`. Both directions of
  // time are one code, because instructions of two do not fit in the cache.
  template <bool has_beside>
  __device__ __forceinline__ void compute(const Job& job, int round, const FragmentLane& lane, PipelineState& at,
                                          int& held_slot) const {
    constexpr bool kSplits = results == Results::kOut, kDivides = results == Results::kOut;
    const bool is_reverse = job.is_reverse();
    const int index = is_reverse == has_beside ? 0 : 1;
    const FragmentPairs<> pairs(lane);
    KeyAccumulator result;
    float diagonal[8][4], beside[has_beside ? 8 : 1][4];
    for_each_pair(result, [](float& low, float& high, int, int, int) { low = high = 0; });
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        diagonal[n][i] = 0;
        if constexpr (has_beside) beside[n][i] = 0;
      }
    }
    const int tiles = static_cast<int>(kSumsValues ? p.value_dim : kMatrixKeys) / kTile;
    // With the first tile goes the slot of the last result, whose rows TMA stores have read by then.
    int previous = max(held_slot, 0);
    bool arrives = held_slot >= 0;
    const int table = round % ProductsShared::kTables;
    const ProductNumbers& numbers = shared.numbers[table];
    // The rows' products with n before the chunk.
    float of_normalizer[2] = {0, 0};
    if constexpr (kDivides) shared.tables_full[table].wait(round / ProductsShared::kTables);
    // At least one: a loop that may be skipped would keep two copies of the accumulators.
    int left = tiles;
#pragma unroll 1
    do {
      shared.full[at.stage].wait(at.phase);
      const ProductTile& tile = shared.slots[at.stage].tile;
      const uint64_t rows = cuda::make_operand(tile.rows[index]), columns = cuda::make_operand(tile.columns[index]);
      if constexpr (kDivides) {
        const float* const normalizer = numbers.normalizer + (tiles - left) * kTile + 2 * lane.pair;
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
          const float2 of_columns = *reinterpret_cast<const float2*>(normalizer + 8 * n);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 pair = cuda::unpack<Scalar>(pairs.at(shared.slots[at.stage].tile.rows[index], n, half));
            of_normalizer[half] = fmaf(pair.x, of_columns.x, fmaf(pair.y, of_columns.y, of_normalizer[half]));
          }
        }
      }
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cuda::gemm<Scalar, false, false>(diagonal, cuda::columns_of(rows, j), cuda::columns_of(columns, j), true);
        if constexpr (has_beside) {
          const uint64_t columns_beside = cuda::make_operand(tile.columns[1 - index]);
          cuda::gemm<Scalar, false, false>(beside, cuda::columns_of(rows, j), cuda::columns_of(columns_beside, j), true);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint64_t state = cuda::make_operand(tile.state[h]);
          if constexpr (kSumsValues) {
            cuda::gemm<Scalar, false, true>(result[h], cuda::columns_of(rows, j), cuda::rows_of(state, j), true);
          } else {
            cuda::gemm<Scalar, false, false>(result[h], cuda::columns_of(rows, j), cuda::columns_of(state, j), true);
          }
        }
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_wait_for_earlier<1>();
      cuda::tma_store_wait_read<0>();
      shared.empty[previous].arrive_if(lane.index == 0 && arrives);
      previous = at.stage;
      arrives = true;
      at.advance(ProductsShared::kSlots);
    } while (--left > 0);
    cuda::warpgroup_wait<0>(diagonal);
    if constexpr (has_beside) cuda::warpgroup_wait<0>(beside);
    cuda::warpgroup_wait<0>(result[0]);
    cuda::warpgroup_wait<0>(result[1]);
    release(shared.empty[previous], lane);

    if constexpr (!kDivides) shared.tables_full[table].wait(round / ProductsShared::kTables);
    const Weights weights(numbers.tables, lane, index, is_reverse);
    Weighted<kSplits> on_diagonal, of_beside;
    float own[2] = {0, 0}, row_sums[2] = {0, 0};
    weights.template apply<true, kSumsValues, kSplits>(diagonal, index * kTile, on_diagonal, own, row_sums);
    if constexpr (has_beside) {
      weights.template apply<false, false, kSplits>(beside, (1 - index) * kTile, of_beside, own, row_sums);
    }
    const float of_state[2] = {weights.of_state(0), weights.of_state(1)};
    float factors[2] = {1, 1};
    if constexpr (kDivides) {
      const bool has_normalizer = job.step(p) > 0 || p.initial_normalizers != nullptr;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Without any decay left, n before the chunk is dropped: zero times Inf would be NaN.
        const float before = has_normalizer && of_state[half] != 0 ? of_state[half] * of_normalizer[half] : 0.0f;
        const float divisor = static_cast<float>(p.scale) * over_row(before + row_sums[half]);
        const int row = index * kTile + lane.row + 8 * half, step = job.step(p) + row;
        if (p.normalizers == nullptr) continue;
        factors[half] =
            static_cast<float>(p.scale) / (divisor_size(divisor, numbers.tables[kTableFloor][row]) + static_cast<float>(p.eps));
        if (lane.pair == 0 && job.kind == 0 && step < p.seqlen) {
          p.written_divisor[(job.entry(p) * p.seqlen + step) * p.heads + job.head(p)] = divisor;
        }
      }
    }
    if constexpr (kSumsValues) {
#pragma unroll
      for (int half = 0; half < 2; ++half) own[half] = over_row(own[half]);
    }
    release(shared.tables_empty[table], lane);

    shared.full[at.stage].wait(at.phase);
    const int slot_of_y = at.stage;
    ProductRows& y = shared.slots[slot_of_y].rows;
    at.advance(ProductsShared::kSlots);
    float from_state[2] = {0, 0};
    for_each_pair(result, [&](float& low, float& high, int h, int n, int half) {
      low *= of_state[half];
      high *= of_state[half];
      if constexpr (kSumsValues) {
        const float2 other = cuda::unpack<Scalar>(pair_of(y, pairs, index, h, n, half));
        from_state[half] = fmaf(low, other.x, fmaf(high, other.y, from_state[half]));
        keep_order();
      }
    });

    shared.full[at.stage].wait(at.phase);
    const int slot_of_z = at.stage;
    ProductRows& z = shared.slots[slot_of_z].rows;
    at.advance(ProductsShared::kSlots);
    cuda::warpgroup_arrive();
    add_others(result, on_diagonal, z, index);
    if constexpr (has_beside) add_others(result, of_beside, z, 1 - index);
    cuda::warpgroup_commit();
    cuda::warpgroup_wait<0>(result[0]);
    cuda::warpgroup_wait<0>(result[1]);

    float all[2] = {0, 0}, same[2] = {0, 0};
    for_each_pair(result, [&](float& low, float& high, int h, int n, int half) {
      uint32_t& target = pair_of(y, pairs, index, h, n, half);
      if constexpr (kSumsValues) {
        const float2 other = cuda::unpack<Scalar>(target), mine = cuda::unpack<Scalar>(pair_of(z, pairs, index, h, n, half));
        all[half] = fmaf(low, other.x, fmaf(high, other.y, all[half]));
        same[half] = fmaf(mine.x, other.x, fmaf(mine.y, other.y, same[half]));
        low = fmaf(own[half], mine.x, low);
        high = fmaf(own[half], mine.y, high);
      }
      if constexpr (kDivides) {
        low *= factors[half];
        high *= factors[half];
      }
      target = cuda::pack<Scalar>(low, high);
    });
    cuda::fence_proxy_async();
    sync_consumer(has_beside ? 1 : 0);
    release(shared.empty[slot_of_z], lane);
    store(job, y, index);
    held_slot = slot_of_y;

    if constexpr (kSumsValues) {
      float* const sums = p.sums + int64_t(job.number) * (kChunkSums * kMatrixChunk) + index * kTile + lane.row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of_same = over_row(same[half]) * own[half], of_state_sum = over_row(from_state[half]),
                    of_others = over_row(all[half] - from_state[half]);
        if (lane.pair == 0) {
          sums[(is_reverse ? kSumToEnd : kSumFromState) * kMatrixChunk + 8 * half] = of_state_sum;
          sums[(is_reverse ? kSumLater : kSumEarlier) * kMatrixChunk + 8 * half] = of_others;
          if (!is_reverse) sums[kSumSame * kMatrixChunk + 8 * half] = of_same;
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Job& job, ProductRows& y, int index) const {
    const cuda::TmaDescriptor& map = results == Results::kOut     ? p.out
                                     : results == Results::kGradV ? p.grad_v
                                     : job.is_reverse()           ? p.grad_k
                                                                  : p.grad_q;
    const int entry = job.entry(p), head = job.head(p), step = job.step(p) + index * kTile;
    const bool starts = threadIdx.x % kWarpgroupThreads == 0 && step < p.seqlen;
#pragma unroll
    for (int i = 0; i < kMatrixKeys / kTile; ++i) {
      cuda::tma_store_tile(map, job.first_value() + i * kTile, head, step, entry, &y.panels[i][index], starts);
    }
  }

  template <bool has_beside>
  __device__ __forceinline__ void consume() const {
    const FragmentLane lane;
    PipelineState at;
    int held_slot = -1;
    for_each_job([&](const Job& job, int round) { compute<has_beside>(job, round, lane, at, held_slot); });
    cuda::tma_store_wait_read<0>();
  }
};

template <Results results>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? kChunkThreads : kWarpSize, 1)
    mlstm_chunk_products_kernel(const __grid_constant__ ChunkParams p) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  ProductsShared& shared = cuda::align_shared<ProductsShared>(unaligned_memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < ProductsShared::kSlots; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < ProductsShared::kTables; ++i) {
      shared.tables_full[i].init(1);
      shared.tables_empty[i].init(kConsumerWarps);
    }
    cuda::fence_proxy_async();
  }
  __syncthreads();
  const ChunkProducts<results> products{p, shared};
  // The shuffle tells the compiler that all lanes have the same value.
  const int warpgroup = __shfl_sync(cuda::kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
  if (warpgroup == kConsumers) {
    cuda::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (threadIdx.x == kConsumers * kWarpgroupThreads) products.load();
  } else {
    cuda::warpgroup_reg_alloc<kChunkRegisters>();
    if (warpgroup == 0) {
      products.template consume<false>();
    } else {
      products.template consume<true>();
    }
  }
#endif
}

}  // namespace ssm_kernels::mlstm
