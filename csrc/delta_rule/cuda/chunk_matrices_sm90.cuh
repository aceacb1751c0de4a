// The matrix of each chunk and value head by which the delta rule multiplies its corrections: with A the strictly lower part of
// diag(beta) (K K^T G), as in fwd_sm90.cuh,
//
//   M = (I + A)^-1, or M diag(beta)
//
// It depends on k, beta and the decays alone. A kernel before the chain over chunks computes it for all chunks at once: one
// warpgroup takes a chunk of a key head, for its value heads in turn, and several blocks share a multiprocessor. The chain of
// dependent instructions of one inverse (cuda/triangular_inverse.cuh) takes longer than a chunk of the scan; those of several
// blocks overlap.
//
// M^T, of which rows are steps j, is stored as a hi/lo split of the dtype: for each chunk number (cuda/chunked/span.cuh) and
// value head the high part, then the low part, each a tile of 64 x 64 elements in the layout of SmemTile, so that a kernel
// fetches it as an operand by one copy. Blocks of 16 x 16 left of the diagonal are zeros. Steps past the end of a sequence are
// rows and columns of zeros but for their diagonal.
#pragma once

#include "cuda/chunked/decay_mask.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/triangular_inverse.cuh"
#include "delta_rule/cuda/decay_gates.cuh"
#include "delta_rule/cuda/step_pairs.cuh"

namespace ssm_kernels::delta_rule {

// M^T of a chunk and value head.
struct ChunkMatrix {
  SmemTile<kChunk> high, low;
};
static_assert(sizeof(ChunkMatrix) == kChunkMatrixBytes, "the host allocates the matrices");

// The place of the matrix of the span's chunk.
template <typename Params>
__device__ __forceinline__ int64_t chunk_number(const Params& p, const ChunkSpan& span, int chunk) {
  const int64_t earlier = is_packed(p) ? 0 : span.start / kChunk;  // chunks of the sequence before the span
  return first_chunk_index(p, span.entry) + earlier + chunk;
}
template <typename Params>
__device__ __forceinline__ ChunkMatrix* chunk_matrix(const Params& p, int64_t chunk_number, int64_t head) {
  return static_cast<ChunkMatrix*>(p.matrices) + chunk_number * p.heads + head;
}

template <int columns>
struct ChunkMatricesShared {
  static constexpr int kTables = kWarpgroupWarps;  // value heads whose tables are computed at a time, each by a warp
  SmemTile<columns> k;
  ChunkMatrix matrix;
  cuda::TriangularInverse inverse;
  DeltaRuleTables tables[kTables];
  Mbarrier loaded;

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(ChunkMatricesShared)); }
};

template <typename Scalar, int columns>
struct ChunkMatrices {
  using Params = DeltaRuleMatricesParams;
  using Gates = DecayGates<Scalar>;
  using Shared = ChunkMatricesShared<columns>;
  static constexpr int kThreads = kWarpgroupThreads, kBlocksOfMultiprocessor = 4, kTileColumns = 64;
  static constexpr int kMatrixBarrier = 1;  // __syncthreads() is 0

  const Params& p;
  Shared& shared;

  __device__ __forceinline__ void run() {
    const int key_heads = static_cast<int>(p.heads) / p.value_heads_per_key_head,
              number = static_cast<int>(blockIdx.x) / key_heads, key_head = static_cast<int>(blockIdx.x) % key_heads;
    const ChunkSpan span(p, entry_of(number));
    const int chunk = number - static_cast<int>(first_chunk_index(p, span.entry));
    if (chunk >= span.chunks) return;
    const FragmentLane lane = FragmentLane::opaque_thread();
    if (threadIdx.x == 0) {
      shared.loaded.init(1);
      load_keys(span, chunk, key_head);
    }
    clear_left_of_diagonal<InOrder>(shared.matrix.high, lane);
    clear_left_of_diagonal<InOrder>(shared.matrix.low, lane);
    const int first_head = key_head * p.value_heads_per_key_head, end = first_head + p.value_heads_per_key_head;
    make_tables(span, chunk, first_head, end, lane);
    __syncthreads();
    shared.loaded.wait(0);
    if (is_packed(p) && span.steps_of(chunk) < kChunk) {
      clear_steps(shared.k.panels, span.steps_of(chunk));
      __syncthreads();
    }
#pragma unroll 1
    for (int head = first_head; head < end; ++head) {
      const int place = (head - first_head) % Shared::kTables;
      if (place == 0 && head > first_head) {
        make_tables(span, chunk, head, end, lane);
        __syncthreads();
      }
      make_matrix(shared.tables[place], lane);
      cuda::fence_proxy_async();
      __syncthreads();
      cuda::tma_store(chunk_matrix(p, number, head), &shared.matrix, sizeof(ChunkMatrix), threadIdx.x == 0);
    }
    cuda::tma_store_wait_read<0>();
  }

  __device__ __forceinline__ int64_t entry_of(int number) const {
    if (is_packed(p)) return sequence_of_chunk(p, number);
    return static_cast<unsigned>(number) / static_cast<unsigned>((p.seqlen + kChunk - 1) / kChunk);
  }

  // Run by one thread. Steps past the end of the tensor are zeros; those past the end of a packed sequence belong to the next
  // one.
  __device__ __forceinline__ void load_keys(const ChunkSpan& span, int chunk, int key_head) {
    cuda::fence_proxy_async();
    shared.loaded.arrive_and_expect_tx(sizeof(shared.k));
#pragma unroll
    for (int panel = 0; panel < columns / kTileColumns; ++panel) {
      cuda::tma_load_tile(&shared.k.panels[panel], p.k_descriptor, panel * kTileColumns, key_head,
                          static_cast<int>(span.start + first_step(chunk)), static_cast<int>(span.batch), shared.loaded);
    }
  }

  // Each warp those of one value head.
  __device__ __forceinline__ void make_tables(const ChunkSpan& span, int chunk, int first_head, int end,
                                              const FragmentLane& lane) {
    const int head = first_head + lane.warp;
    if (head >= end) return;
    const Gates gates;
    FetchedSteps<Gates> fetched;
    fetched.fetch(p, Gates::source(p, span, head, chunk), span.resets(p, chunk), span.steps_of(chunk));
    ChunkCumsum<1, Gates> made;
    made.make(p, gates, &fetched);
    DeltaRuleTables& tables = shared.tables[lane.warp];
    made.store(0, tables);
    reinterpret_cast<float2*>(tables.beta)[lane.index] = {fetched.loaded[0].beta, fetched.loaded[1].beta};
  }

  __device__ __forceinline__ void make_matrix(const DeltaRuleTables& tables, const FragmentLane& lane) {
    float products[kStepBlocks][4], beta[2];
    multiply_by_keys<Scalar>(shared.k, shared.k, products);
#pragma unroll
    for (int half = 0; half < 2; ++half) beta[half] = tables.beta[lane.row + 8 * half];
    const FragmentPairs<> pairs(lane);
    visit_warp(lane, [&](auto warp) {
      cuda::TriangularInverse::DiagonalBlock diagonal;
      apply_decays<warp, /*has_diagonal=*/false>(p, products, beta, tables, lane);
      shared.inverse.template put<warp>(products, diagonal, lane);
      // The copy of the value head before has read the matrix. All warps have put their blocks.
      cuda::tma_store_wait_read<0>();
      cuda::barrier_sync(kMatrixBarrier, kThreads);
      shared.inverse.template multiply<warp>(diagonal, lane, [&](int n, const float (&transposed)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float factor = p.scales_by_beta ? beta[half] : 1.0f, low = factor * transposed[2 * half],
                      high = factor * transposed[2 * half + 1];
          const uint32_t rounded = cuda::pack<Scalar>(low, high);
          pairs.at(shared.matrix.high, n, half) = rounded;
          pairs.at(shared.matrix.low, n, half) = cuda::pack_lo<Scalar>(low, high, rounded);
        }
      });
    });
  }
};

template <typename Scalar, int columns>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? ChunkMatrices<Scalar, columns>::kThreads : kWarpSize,
                                  ChunkMatrices<Scalar, columns>::kBlocksOfMultiprocessor)
    delta_rule_chunk_matrices_kernel(const __grid_constant__ DeltaRuleMatricesParams p) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  cuda::launch_dependents();
  ChunkMatrices<Scalar, columns>{p, align_shared<ChunkMatricesShared<columns>>(unaligned_memory)}.run();
#endif
}

}  // namespace ssm_kernels::delta_rule
