// The matrix of each chunk and value head by which the delta rule multiplies its corrections: with A the strictly lower part of
// diag(beta) (K K^T G), as in fwd_sm90.cuh,
//
//   M = (I + A)^-1 diag(beta)
//
// It depends on k, beta and the decays alone. A kernel before the chain over chunks computes it for all chunks at once. The
// chain of dependent instructions of one inverse (cuda/triangular_inverse.cuh) takes longer than a chunk of the scan; those of
// several blocks of a multiprocessor overlap. A block takes chunks of key heads in turn, and the value heads of each: one
// warpgroup multiplies and inverts, while a producer warp loads the keys of the next chunk by TMA and computes the tables of
// the next value head.
//
// M^T, of which rows are steps j, is stored as a hi/lo split of the dtype (chunk_matrices.h), for each chunk number
// (cuda/chunked/span.cuh) and value head. Rows and columns of steps past the end of a sequence are zeros.
#pragma once

#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/triangular_inverse.cuh"
#include "delta_rule/cuda/chunk_matrices.h"
#include "delta_rule/cuda/step_tables.cuh"

namespace ssm_kernels::delta_rule {

// M^T of a chunk and value head in shared memory: an operand B.
class alignas(128) ChunkMatrix {
 public:
  // Clears the blocks left of the diagonal, which load() leaves as they are. Run by `threads` threads, each of which must call
  // fence_proxy_async() before the next barrier.
  __device__ __forceinline__ void clear_left_of_diagonal(int thread, int threads) {
#pragma unroll
    for (int band = 1; band < kBands; ++band) {
      for (int i = thread; i < 2 * band * kColumnVectors; i += threads) {
        bands_[band][i / kColumnVectors][i % kColumnVectors] = {0, 0, 0, 0};
      }
    }
  }

  // Run by one thread. An earlier arrive_and_expect_tx(kChunkMatrixBytes) made the phase of `barrier` wait.
  __device__ __forceinline__ void load(const void* matrices, int64_t place, Mbarrier& barrier) {
    const char* const matrix = static_cast<const char*>(matrices) + place * kChunkMatrixBytes;
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      cuda::tma_load(&bands_[band][2 * band], matrix + band_offset(band), band_bytes(band), barrier);
    }
  }

  // d (64 x steps i) = a (64 x steps j) M^T, by wgmma; the caller commits.
  template <typename Scalar>
  __device__ __forceinline__ void multiply(float (&d)[kStepBlocks][4], const uint32_t (&a)[kStepGroups][4]) const {
    static_assert(kBands == kStepGroups, "a band is the rows of one product");
    const uint64_t blocks = operand();
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) {
      cuda::gemm<Scalar, true>(d, a[j], blocks + j * kBand, j > 0);
      cuda::gemm<Scalar, true>(d, a[j], blocks + j * kBand + kLowPart, true);
    }
  }
  // d += a times the high part of M^T.
  template <typename Scalar>
  __device__ __forceinline__ void multiply_high(float (&d)[kStepBlocks][4], const uint32_t (&a)[kStepGroups][4]) const {
#pragma unroll
    for (int j = 0; j < kStepGroups; ++j) cuda::gemm<Scalar, true>(d, a[j], operand() + j * kBand, true);
  }

 private:
  static constexpr int kColumnVectors = kMatrixColumnBytes / 16;
  // Distances in an operand: of neighboring bands, and of the low part from the high part.
  static constexpr uint64_t kBand = band_bytes(0) / 16, kLowPart = 2 * kMatrixBlockBytes / 16;

  __device__ __forceinline__ uint64_t operand() const {
    return cuda::make_wgmma_block_descriptor(bands_, kMatrixColumnBytes, kMatrixBlockBytes);
  }

  uint4 bands_[kBands][kStepBlocks][kColumnVectors];
};

// The lane's pairs of M^T in memory.
class ChunkMatrixPairs {
 public:
  __device__ __forceinline__ ChunkMatrixPairs(void* matrices, int64_t place, const FragmentLane& lane)
      : pairs_(static_cast<uint32_t*>(matrices) + (place * kChunkMatrixBytes + band_offset(lane.warp)) / kPairBytes +
               lane.index) {}

  // In row lane.row + 8 half, of the n-th block of 8 columns from the diagonal block on.
  __device__ __forceinline__ void put(int n, int half, uint32_t high, uint32_t low) const {
    uint32_t* const target = pairs_ + (n * kMatrixColumnBytes + half * kMatrixBlockBytes) / kPairBytes;
    target[0] = high;
    target[2 * kMatrixBlockBytes / kPairBytes] = low;
  }

 private:
  static constexpr int kPairBytes = 4;

  uint32_t* pairs_;
};

// The chunk number of the span's `chunk`-th chunk.
template <typename Params>
__device__ __forceinline__ int64_t chunk_number(const Params& p, const ChunkSpan& span, int chunk) {
  const int64_t earlier = is_packed(p) ? 0 : span.start / kChunk;  // chunks of the sequence before the span
  return first_chunk_index(p, span.entry) + earlier + chunk;
}

// The tables of a chunk of a value head, and the place of its matrix.
struct MatrixTables : DeltaRuleTables {
  int64_t place;  // among all matrices: chunk number * heads + head; -1 after the block's last
  int steps;
  bool is_first_head, is_last_head;  // of the key head
};

template <int columns>
struct ChunkMatricesShared {
  static constexpr int kStages = 2;
  SmemTile<columns> k;
  cuda::TriangularInverse inverse;
  MatrixTables tables[kStages];
  Mbarrier keys_full, keys_empty, full[kStages], empty[kStages];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(ChunkMatricesShared)); }
};

template <typename Scalar, int columns>
struct ChunkMatrices {
  using Params = DeltaRuleMatricesParams;
  using Gates = DecayGates<Scalar>;
  using Shared = ChunkMatricesShared<columns>;
  static constexpr int kThreads = kWarpgroupThreads + kWarpSize, kBlocksOfMultiprocessor = 6, kTileColumns = 64;
  static constexpr int kMatrixBarrier = 1;  // __syncthreads() is 0

  const Params& p;
  Shared& shared;

  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      shared.keys_full.init(1);
      shared.keys_empty.init(kWarpgroupThreads);
    }
    if (threadIdx.x < Shared::kStages) {
      shared.full[threadIdx.x].init(kWarpSize);
      shared.empty[threadIdx.x].init(kWarpgroupThreads);
    }
  }

  // Run by the producer warp.
  __device__ __forceinline__ void produce() {
    const int heads_of_key = p.value_heads_per_key_head, key_heads = static_cast<int>(p.heads) / heads_of_key;
    const int items = static_cast<int>(chunk_numbers(p.batch, p.seqlen, is_packed(p))) * key_heads;
    PipelineState stages;
    int loads = 0;
#pragma unroll 1
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
      const int number = number_of(item / key_heads), key_head = item % key_heads;
      const ChunkSpan span(p, sequence_of_chunk(p, number));
      const int chunk = number - static_cast<int>(first_chunk_index(p, span.entry));
      if (chunk >= span.chunks) continue;
      if (threadIdx.x % kWarpSize == 0) {
        if (loads > 0) shared.keys_empty.wait(loads - 1);
        load_keys(span, chunk, key_head);
      }
      ++loads;
#pragma unroll 1
      for (int i = 0; i < heads_of_key; ++i) {
        const int head = key_head * heads_of_key + i;
        FetchedSteps<Gates> fetched;
        fetched.fetch(p, Gates::source(p, span, head, chunk), span.resets(p, chunk), span.steps_of(chunk));
        StepTables<Gates> made;
        made.make(p, fetched);
        if (stages.phase > 0) shared.empty[stages.stage].wait(stages.phase - 1);
        MatrixTables& tables = shared.tables[stages.stage];
        made.store(fetched, tables);
        tables.place = int64_t(number) * p.heads + head;
        tables.steps = span.steps_of(chunk);
        tables.is_first_head = i == 0;
        tables.is_last_head = i == heads_of_key - 1;
        shared.full[stages.stage].arrive();
        stages.advance(Shared::kStages);
      }
    }
    if (stages.phase > 0) shared.empty[stages.stage].wait(stages.phase - 1);
    shared.tables[stages.stage].place = -1;
    shared.full[stages.stage].arrive();
  }

  // The place-th chunk number that is computed. The first chunks of the sequences come last: the scan begins with them, and
  // finds them in the cache.
  __device__ __forceinline__ int number_of(int place) const {
    if (is_packed(p)) return place;
    const int chunks = static_cast<int>((p.seqlen + kChunk - 1) / kChunk), batch = static_cast<int>(p.batch);
    return place % batch * chunks + chunks - 1 - place / batch;
  }

  // Run by one thread. Steps past the end of the tensor are zeros; those past the end of a packed sequence belong to the next
  // one.
  __device__ __forceinline__ void load_keys(const ChunkSpan& span, int chunk, int key_head) {
    shared.keys_full.arrive_and_expect_tx(sizeof(shared.k));
#pragma unroll
    for (int panel = 0; panel < columns / kTileColumns; ++panel) {
      cuda::tma_load_tile(&shared.k.panels[panel], p.k_descriptor, panel * kTileColumns, key_head,
                          static_cast<int>(span.start + first_step(chunk)), static_cast<int>(span.batch), shared.keys_full);
    }
  }

  // Run by the warpgroup.
  __device__ __forceinline__ void make_matrices() {
    const FragmentLane lane = FragmentLane::opaque_thread();
    PipelineState stages;
    int loads = 0;
#pragma unroll 1
    for (;; stages.advance(Shared::kStages)) {
      shared.full[stages.stage].wait(stages.phase);
      const MatrixTables& tables = shared.tables[stages.stage];
      if (tables.place < 0) return;
      if (tables.is_first_head) {
        shared.keys_full.wait(loads++);
        if (is_packed(p) && tables.steps < kChunk) {
          clear_steps(shared.k.panels, tables.steps);
          cuda::barrier_sync(kMatrixBarrier, kWarpgroupThreads);
        }
      }
      make_matrix(tables, shared.empty[stages.stage], lane);
    }
  }

  __device__ __forceinline__ void make_matrix(const MatrixTables& tables, Mbarrier& empty, const FragmentLane& kept_lane) {
    const FragmentLane lane = kept_lane.opaque();  // addresses are recomputed: kept through the loop, they would spill
    float products[kStepBlocks][4], beta[2], factors[2];
    multiply_by_keys<Scalar>(shared.k, shared.k, products);
    if (tables.is_last_head) shared.keys_empty.arrive();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      beta[half] = tables.beta[lane.row + 8 * half];
      factors[half] = key_row_factor(tables, lane.row + 8 * half, beta[half]);
    }
    float left[4], right[4];
    apply_decays(products, factors, tables, left, right, lane);
    const ChunkMatrixPairs target(p.inverses, tables.place, lane);
    empty.arrive();
    // All warps have read the blocks of the inverse before.
    cuda::barrier_sync(kMatrixBarrier, kWarpgroupThreads);
    cuda::TriangularInverse::DiagonalBlock diagonal;
    shared.inverse.put_left(products, lane);
    shared.inverse.put_diagonal(left, right, diagonal, lane);
    cuda::barrier_sync(kMatrixBarrier, kWarpgroupThreads);
    shared.inverse.multiply(diagonal, lane, [&](int n, const float (&transposed)[4]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = beta[half] * transposed[2 * half], high = beta[half] * transposed[2 * half + 1];
        const uint32_t rounded = cuda::pack<Scalar>(low, high);
        target.put(n, half, rounded, cuda::pack_lo<Scalar>(low, high, rounded));
      }
    });
  }

  // Makes A of products of keys, as delta_rule::apply_decays, but by the same code in all warps: the two column blocks of the
  // diagonal are `left` and `right`; blocks right of them are left with anything.
  __device__ __forceinline__ void apply_decays(float (&products)[kStepBlocks][4], const float (&factors)[2],
                                               const ChunkTables& tables, float (&left)[4], float (&right)[4],
                                               const FragmentLane& lane) const {
    const float log2_of_first = tables.log2_cumsum[lane.row - lane.quad];
    float log2_of_row[2], rows[2];
    int first[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      log2_of_row[half] = tables.log2_cumsum[lane.row + 8 * half];
      rows[half] = factors[half] * Math<float>::exp2(log2_of_row[half] - log2_of_first);
      if (has_reset(p, tables)) first[half] = tables.first[lane.row + 8 * half];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float (&block)[4] = n == 0 ? left : right;
      const float2 log2 = column_pair(tables.log2_cumsum, 2 * lane.warp + n, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float product = products[n][i];
#pragma unroll
        for (int warp = 1; warp < kWarpgroupWarps; ++warp) product = lane.warp == warp ? products[2 * warp + n][i] : product;
        const int column = kBlockSteps * n + 2 * lane.pair + i % 2, row = lane.quad + 8 * (i / 2);
        // Above the diagonal the decay may be Inf: it is selected.
        const float decay = factors[i / 2] * Math<float>::exp2(log2_of_row[i / 2] - (i % 2 == 0 ? log2.x : log2.y));
        block[i] = column < row && column + 16 * lane.warp >= first[i / 2] ? product * decay : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < kStepBlocks - 2; ++n) {
      if (n >= 2 * lane.warp) break;
      const float2 log2 = column_pair(tables.log2_cumsum, n, lane);
      const float of_columns[2] = {Math<float>::exp2(log2_of_first - log2.x), Math<float>::exp2(log2_of_first - log2.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) products[n][i] *= rows[i / 2] * of_columns[i % 2];
    }
    if (!has_reset(p, tables)) return;
#pragma unroll
    for (int n = 0; n < kStepBlocks - 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kBlockSteps * n + 2 * lane.pair + i % 2 < first[i / 2]) products[n][i] = 0;
      }
    }
  }
};

template <typename Scalar, int columns>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? ChunkMatrices<Scalar, columns>::kThreads : kWarpSize,
                                  ChunkMatrices<Scalar, columns>::kBlocksOfMultiprocessor)
    delta_rule_chunk_matrices_kernel(const __grid_constant__ DeltaRuleMatricesParams p) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  cuda::launch_dependents();
  ChunkMatrices<Scalar, columns> matrices{p, align_shared<ChunkMatricesShared<columns>>(unaligned_memory)};
  matrices.init();
  __syncthreads();
  if (threadIdx.x >= kWarpgroupThreads) {
    matrices.produce();
  } else {
    matrices.make_matrices();
  }
#endif
}

}  // namespace ssm_kernels::delta_rule
