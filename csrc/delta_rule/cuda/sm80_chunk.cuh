// The delta rule with mma.sync and cp.async, for compute capability 8.0 and newer. fp32 takes these kernels on every device,
// fp16 and bf16 take these kernels on devices without wgmma. Chunks and their matrices are those of bwd_matrices.cuh: with A
// the strictly lower part of diag(beta) (K K^T G),
//
//   (I + A)^-1 = I + diag(beta) N        P = scale (Q K^T G)
//
// Kernels: sm80_matrices.cuh computes N, P and the tables of all chunks at once; sm80_states.cuh takes the states through time,
// for out, or for backward, which also takes their gradients back; sm80_gradients.cuh computes the gradients of all chunks.
// This file has what they share: workspaces, copies, and operands made of accumulators.
//
// fp16 and bf16: N is a hi/lo split. fp32: nothing is rounded, and products are 3xTF32 (cuda/mma_tf32x3.cuh).
#pragma once

#include <type_traits>

#include "cuda/chunked/state.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/sm80.h"
#include "delta_rule/cuda/step_tables.cuh"

namespace ssm_kernels::delta_rule {

struct Fp32DeltaRuleTables : Fp32ChunkTables {
  alignas(16) float query_factor[kChunk];  // as in ScanTables
  float query_decay[kChunk];
  float beta[kChunk];
};
template <typename Scalar>
using DeltaRuleTablesOf = std::conditional_t<kIsFp32<Scalar>, Fp32DeltaRuleTables, DeltaRuleTables>;

// Tiles of 64 rows of a type's elements.
template <typename Scalar, int columns>
using TileOf = SmemTile<columns, sizeof(Scalar)>;
template <typename Scalar>
using StepTile = TileOf<Scalar, kChunk>;

// Workspaces: tiles are in the order of shared memory.
template <typename Scalar>
struct alignas(128) Sm80MatricesOfChunk {
  static constexpr int kParts = kIsFp32<Scalar> ? 1 : 2;  // of N
  StepTile<Scalar> n[kParts];                             // N^T, of which rows are steps j
  StepTile<Scalar> p;                                     // P, of which rows are steps i
  DeltaRuleTablesOf<Scalar> tables;
};
static_assert(sizeof(Sm80MatricesOfChunk<float>) == sm80_matrices_bytes(4), "the host allocates the matrices");
static_assert(sizeof(Sm80MatricesOfChunk<__half>) == sm80_matrices_bytes(2), "the host allocates the matrices");

template <typename Scalar>
__device__ __forceinline__ Sm80MatricesOfChunk<Scalar>* sm80_matrices_of(const DeltaRuleSm80Params& p, int64_t chunk_number,
                                                                         int head) {
  return static_cast<Sm80MatricesOfChunk<Scalar>*>(p.matrices) + chunk_number * p.heads + head;
}

template <typename Tile>
__device__ __forceinline__ auto operand_of(const Tile& tile, const FragmentLane& lane) {
  constexpr int kElementBytes = static_cast<int>(sizeof(uint4)) / Tile::kVectorElements;
  return cuda::make_warp_operand<kElementBytes>(&tile, Tile::kPanelBytes, lane.index);
}

// Starts the copies of rows, of which `elements` elements and `steps` rows are there; the tile's others become zeros. The
// caller's `threads` threads share the copies.
template <typename Scalar, int columns>
__device__ __forceinline__ void copy_rows(TileOf<Scalar, columns>& tile, const Scalar* source, int64_t stride_step,
                                          int elements, int steps, int thread, int threads) {
  using Tile = TileOf<Scalar, columns>;
#pragma unroll 4
  for (int i = thread; i < cuda::kTileRows * Tile::kVectors; i += threads) {
    const int row = i / Tile::kVectors, vector = i % Tile::kVectors, column = vector * Tile::kVectorElements;
    cuda::cp_async(tile.vector(row, vector), source + row * stride_step + column,
                   row < steps && column < elements ? cuda::kCpAsyncBytes : 0);
  }
}
// The same for bytes that are there, a multiple of 16.
template <int bytes>
__device__ __forceinline__ void copy_bytes(void* target, const void* source, int thread, int threads) {
  static_assert(bytes % cuda::kCpAsyncBytes == 0, "bytes are copied 16 at a time");
#pragma unroll 4
  for (int i = thread; i < bytes / cuda::kCpAsyncBytes; i += threads) {
    cuda::cp_async<cuda::kCpAsyncBytes>(static_cast<uint4*>(target) + i, static_cast<const uint4*>(source) + i);
  }
}

// The lane's two values of the n-th block of columns, in row lane.row + 8 half, of an operand A that load_inputs() loaded.
template <typename Scalar>
__device__ __forceinline__ float2 pair_of(const cuda::OperandA<Scalar>& x, int n, int half) {
  if constexpr (kIsFp32<Scalar>) {
    return {x[n % 2 * 4 + half], x[n % 2 * 4 + half + 2]};
  } else {
    return cuda::unpack<Scalar>(x[n % 2 * 2 + half]);
  }
}

// How often loops over groups of an operand in shared memory are unrolled. fp32 products take too many instructions for it.
template <typename Scalar>
constexpr int kUnrolledGroups = kIsFp32<Scalar> ? 1 : kStepGroups;

// Calls body(group, place) for the groups of 16 columns of accumulators; `place` is where the group then is among them. In fp32
// the accumulators rotate instead, because registers have no index.
template <typename Scalar, typename Body>
__device__ __forceinline__ void for_each_group(State<kChunk>& d, const Body& body) {
  if constexpr (kIsFp32<Scalar>) {
#pragma unroll 1
    for (int group = 0; group < kStepGroups; ++group) {
      body(group, 0);
      d.rotate(2);
    }
  } else {
#pragma unroll
    for (int group = 0; group < kStepGroups; ++group) body(group, group);
  }
}

// The operand A of the 16 columns of accumulators at place `group`, each times its factor: factor(0) and factor(1) have those
// of the lane's columns in both blocks. fp16 and bf16 are rounded; `lo` receives the low parts of a hi/lo split if it is not
// null.
template <typename Scalar, typename Factor>
__device__ __forceinline__ void scale_operand(const float (&d)[kStepBlocks][4], int group, const Factor& factor,
                                              cuda::OperandA<Scalar>& a, cuda::OperandA<Scalar>* lo = nullptr) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = 2 * group + i;
    const float2 by = factor(i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float first = by.x * d[n][2 * half], second = by.y * d[n][2 * half + 1];
      if constexpr (kIsFp32<Scalar>) {
        a[4 * i + half] = first;
        a[4 * i + half + 2] = second;
      } else {
        a[2 * i + half] = cuda::pack<Scalar>(first, second);
        if (lo != nullptr) (*lo)[2 * i + half] = cuda::pack_lo<Scalar>(first, second, a[2 * i + half]);
      }
    }
  }
}

// The product; zero for a decay of zero, even of Inf and NaN.
__device__ __forceinline__ float decayed(float value, float decay) { return decay == 0.0f ? 0.0f : value * decay; }

// Stores accumulators, rounded, to a tile in shared or global memory.
template <typename Scalar, int columns, int blocks>
__device__ __forceinline__ void put_tile(TileOf<Scalar, columns>& tile, const float (&d)[blocks][4],
                                         const FragmentPairs<sizeof(Scalar)>& pairs) {
  static_assert(blocks == columns / 8, "the tile has the accumulators' columns");
#pragma unroll
  for (int n = 0; n < blocks; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pairs.at(tile, n, half) = cuda::pack<Scalar>(d[n][2 * half], d[n][2 * half + 1]);
    }
  }
}

// Multiplies accumulators of pairs of steps, rows i and columns j, by factors[half] of the row, the column's factor
// of_columns(block).x or .y, and the decay from j to i. Elements above the diagonal become zero, on it too unless has_diagonal,
// and those of two sequences.
template <bool has_diagonal, typename Tables, typename Columns>
__device__ __forceinline__ void scale_pairs(bool may_reset, float (&d)[kStepBlocks][4], const float (&factors)[2],
                                            const Columns& of_columns, const Tables& tables, const FragmentLane& lane) {
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
    const float2 column_factors = of_columns(n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane.row + 8 * (i / 2), column = kBlockSteps * n + 2 * lane.pair + i % 2;
      const bool is_there = (has_diagonal ? column <= row : column < row) && (!may_reset || column >= tables.first[row]);
      // Above the diagonal the decay may be Inf: it is selected.
      const float factor = factors[i / 2] * (i % 2 == 0 ? column_factors.x : column_factors.y) *
                           Math<float>::exp2(log2_between(tables, column, row));
      d[n][i] = is_there ? d[n][i] * factor : 0.0f;
    }
  }
}

}  // namespace ssm_kernels::delta_rule
