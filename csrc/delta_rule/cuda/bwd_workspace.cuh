// The workspaces of the delta rule's backward, for each chunk of each value head: bwd_matrices.cuh writes the matrices,
// bwd_states.cuh reads them and writes the states, and bwd_chunks.cuh reads the states and the tables. Tiles are in the order
// of shared memory (cuda/smem_tile.cuh), so that a copy of bytes loads an operand.
#pragma once

#include "cuda/chunked/span.cuh"
#include "delta_rule/cuda/step_pairs.cuh"

namespace ssm_kernels::delta_rule {

// The last kernel divides the gradients of v, diag(beta) Y, by betas from this one on. The quotient is as accurate as Y,
// rounded to the inputs' type: in fp16, products with a smaller beta could be subnormal.
template <typename Scalar>
constexpr float kLeastDivisor = std::is_same_v<Scalar, __half> ? 0x1p-6f : 0x1p-40f;

// NaN is not small.
template <typename Scalar>
__device__ __forceinline__ bool is_small_beta(float beta) {
  return fabsf(beta) < kLeastDivisor<Scalar>;
}

struct alignas(16) BwdTables : DeltaRuleTables {
  bool has_small_beta;  // whether any step's is below kLeastDivisor
};

// With A the strictly lower part of diag(beta) (K K^T G), the inverse of I + A is I + diag(beta) N: N is without the factor
// beta of its row, so that a step with beta = 0 is as any other.
struct alignas(128) BwdMatricesOfChunk {
  SmemTile<kChunk> n;  // N^T, of which rows are steps j
  BwdTables tables;
};
static_assert(sizeof(BwdMatricesOfChunk) == kBwdMatricesBytes, "the host allocates the matrices");

// For kStateRows rows of V: S before the chunk, D after it, and E^T and Y^T, of which columns are steps.
template <int columns>
struct alignas(128) StatesOfChunk {
  SmemTile<columns> s, d;
  SmemTile<kChunk> e, y;  // with gates of a head Y^T of chunks with a small beta alone
};
// Gates of a head in bf16 need the low bits of E, too (bwd_low_bits.cuh).
template <int columns>
struct BwdStatesOfChunk : StatesOfChunk<columns> {
  uint4 low_bits[kWarpgroupThreads];
};
static_assert(sizeof(BwdStatesOfChunk<kStateColumns>) == bwd_states_bytes(kStateColumns), "the host allocates the states");

template <typename Params>
__device__ __forceinline__ BwdMatricesOfChunk* matrices_of_chunk(const Params& p, int64_t chunk_number, int head) {
  return static_cast<BwdMatricesOfChunk*>(p.matrices) + chunk_number * p.heads + head;
}
// For keys of more than kStateColumns columns. These follow the matrices of all chunks.
struct alignas(128) WideMatricesOfChunk {
  SmemTile<kChunk> n_lo;  // the low part of a hi/lo split of N^T
  SmemTile<kChunk> p;     // scale (Q K^T G), of which rows are steps i
};
static_assert(sizeof(WideMatricesOfChunk) == kWideMatricesBytes - kBwdMatricesBytes, "the host allocates the matrices");

template <typename Params>
__device__ __forceinline__ WideMatricesOfChunk* wide_matrices_of_chunk(const Params& p, int64_t chunk_number, int head) {
  const int64_t count = chunk_numbers(p.batch, p.seqlen, is_packed(p)) * p.heads;
  return reinterpret_cast<WideMatricesOfChunk*>(static_cast<BwdMatricesOfChunk*>(p.matrices) + count) + chunk_number * p.heads +
         head;
}
template <int columns>
__device__ __forceinline__ BwdStatesOfChunk<columns>* states_of_chunk(const DeltaRuleBwdParams& p, int64_t chunk_number,
                                                                      int head, int row_block) {
  return static_cast<BwdStatesOfChunk<columns>*>(p.states) + (chunk_number * p.heads + head) * row_blocks(p.headdim) +
         row_block;
}

// For keys of more than kStateColumns columns: S and D of the columns from kStateColumns on. They follow the states of all
// chunks, which have the other columns.
struct alignas(128) BwdStatePart {
  SmemTile<kStateColumns> s, d;
};
static_assert(sizeof(BwdStatePart) == kBwdStatePartBytes, "the host allocates the states");

__device__ __forceinline__ BwdStatePart* second_part_of(const DeltaRuleBwdParams& p,
                                                        const BwdStatesOfChunk<kStateColumns>* of) {
  auto* const states = static_cast<BwdStatesOfChunk<kStateColumns>*>(p.states);
  const int64_t count = chunk_numbers(p.batch, p.seqlen, is_packed(p)) * p.heads * row_blocks(p.headdim);
  return reinterpret_cast<BwdStatePart*>(states + count) + (of - states);
}

// A chunk of one value head, by its place among all heads of all chunk numbers (cuda/chunked/span.cuh), fewer than 2^31.
struct ChunkOfHead : ChunkSpan {
  int number, chunk, head;

  __device__ __forceinline__ ChunkOfHead(const DeltaRuleBwdParams& p, int place)
      : ChunkOfHead(p, place, static_cast<unsigned>(place) / static_cast<unsigned>(p.heads)) {}
  // Whether a sequence has this chunk: with packed sequences some numbers belong to none.
  __device__ __forceinline__ bool is_there() const { return chunk < chunks; }
  __device__ __forceinline__ int first() const { return static_cast<int>(start) + chunk * kChunk; }
  __device__ __forceinline__ int steps() const { return steps_of(chunk); }

 private:
  __device__ __forceinline__ ChunkOfHead(const DeltaRuleBwdParams& p, int place, int number)
      : ChunkSpan(p, entry_of(p, number)),
        number(number),
        chunk(number - static_cast<int>(first_chunk_index(p, entry))),
        head(place - number * static_cast<int>(p.heads)) {}

  static __device__ __forceinline__ int64_t entry_of(const DeltaRuleBwdParams& p, int number) {
    if (is_packed(p)) return sequence_of_chunk(p, number);
    return static_cast<unsigned>(number) / static_cast<unsigned>((p.seqlen + kChunk - 1) / kChunk);
  }
};

}  // namespace ssm_kernels::delta_rule
