// The operands of the delta rule's chunks with a gate per channel of the key. For all chunks and value heads at once, with c_i
// the sum of log decays from the chunk's start to step i, a vector of channels, and products of vectors by channel:
//
//   A(i, j) = beta_i sum(k_i k_j e^(c_i - c_j)), j < i        M = (I + A)^-1 diag(beta)
//   P(i, j) = scale sum(q_i k_j e^(c_i - c_j)), j <= i
//
// and the scaled rows of KdaChunk. The decays differ by channel, so that A and P are no products of keys and queries times a
// matrix, and e^(-c_j) overflows. Every exponential here has an argument of at most zero (up to rounding of c):
//
//   * Pairs of different blocks of 16 steps: products by tensor cores (TF32) of e^(c_i - r) k_i and e^(r - c_j) k_j, with r the
//     sum before the later block.
//   * Pairs of the two halves of a block of 16: the same, with r the sum at the end of the first half.
//   * Pairs inside of 8 steps: k_j times the decays up to step i, step after step, in fp32.
//
// A block of four warps computes a chunk of a value head; a warp has 16 rows of A and P. Which 16 changes from block to block:
// later rows have more pairs, and each warp of a block issues on another scheduler of the multiprocessor.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/triangular_inverse.cuh"
#include "delta_rule/cuda/chunk_matrices_sm90.cuh"
#include "delta_rule/cuda/kda_chunk.cuh"

namespace ssm_kernels::delta_rule {

struct KdaChunksShared {
  static constexpr int kPartBlocks = 10;
  union {
    KdaRows rows;
    // They take the place of the rows.
    struct {
      cuda::TriangularInverse inverse;
      float4 of_keys[kPartBlocks][kWarpSize], of_queries[kPartBlocks][kWarpSize];  // products for other warps
    };
  };
  KdaSums log2_cumsum;
  float diagonal[kStepBlocks][kBlockSteps][2 * kBlockSteps];  // of a row of a block of 8: products of keys, then of queries
  float beta[kChunk];
  KdaRowFactors factors;

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(KdaChunksShared)); }
};

// The chunk of all sequences that is computed at a place in the order of a kernel. The first chunks of the sequences come last:
// the scan begins with them, and finds them in the cache.
struct ChunkInTurn {
  int64_t entry;  // of its sequence
  int number, chunk;

  template <typename Params>
  __device__ __forceinline__ ChunkInTurn(const Params& p, int place) {
    if (is_packed(p)) {
      number = place;
      entry = sequence_of_chunk(p, number);
      chunk = number - static_cast<int>(first_chunk_index(p, entry));
      return;
    }
    const int chunks = static_cast<int>((p.seqlen + kChunk - 1) / kChunk);
    const unsigned batch = static_cast<unsigned>(p.batch), row = static_cast<unsigned>(place) % batch;
    entry = row;
    chunk = chunks - 1 - static_cast<int>(static_cast<unsigned>(place) / batch);
    number = static_cast<int>(row) * chunks + chunk;
  }
};

// For backward the block writes N instead of M, with (I + A)^-1 = I + diag(beta) N. To get N it divides each row of the inverse
// by that row's beta. A beta below kLeastBeta, which is too small to change another row, counts as kLeastBeta.
template <typename Scalar, bool is_backward>
struct KdaChunks {
  using Target = std::conditional_t<is_backward, KdaBwdChunk, KdaChunk>;
  using Shared = KdaChunksShared;
  static constexpr int kThreads = kWarpgroupThreads, kBlocksOfMultiprocessor = 3;
  static constexpr float kLeastBeta = 0x1p-40f;
  static constexpr int kVectors = kStateColumns / kRowElements, kRowsAtOnce = kThreads / kVectors;

  const KdaChunksParams& p;
  Shared& shared;

  __device__ __forceinline__ void run(const ChunkSpan& span, int chunk, int head, int64_t place) {
    const uint64_t begins = sequence_begins(p, span, chunk);
    load_kda_rows<Scalar, kThreads>(p, span, chunk, head, begins, shared.rows, shared.log2_cumsum, shared.beta);
    __syncthreads();
    make_row_factors<Scalar, kThreads>(shared.rows, p.arguments.qk_l2norm, shared.factors);
    FragmentLane lane;
    lane.warp = (lane.warp + static_cast<int>(blockIdx.x)) % kWarpgroupWarps;
    lane.row = 16 * lane.warp + lane.quad;
    Target& target = static_cast<Target*>(p.chunks)[place];
    if (threadIdx.x == 0) target.begins_sequence = begins & 1;
    multiply_pairs_of_eight(lane);
    float of_keys[kStepBlocks][4] = {}, of_queries[kStepBlocks][4] = {}, halves[4] = {};
    multiply_halves(halves, lane);
    multiply_blocks(of_keys, of_queries, lane);
    // All warps have written their factors.
    __syncthreads();
    if (p.arguments.qk_l2norm) {
      write_rows<true>(target);
    } else {
      write_rows<false>(target);
    }
    // All warps have read the rows.
    __syncthreads();
    give_products(of_keys, of_queries, lane);
    __syncthreads();
    take_products(of_keys, of_queries, lane);
    float left[4], right[4];
    take_diagonal(left, right, halves, kBlockSteps, lane);
    apply_factors(of_queries, left, right, shared.factors.of_queries, lane);
    write_p(target.p, of_queries, left, right, lane);
    take_diagonal(left, right, halves, 0, lane);
    apply_factors(of_keys, left, right, shared.factors.of_keys, lane);
    if constexpr (is_backward) {
      write_n(target, of_keys, left, right, lane);
    } else {
      write_m(of_keys, left, right, place, lane);
    }
  }

 private:
  static __device__ __forceinline__ float exp2(float x) { return Math<float>::exp2(x); }
  static __device__ __forceinline__ float2 exp2_difference(float2 a, float2 b) { return {exp2(a.x - b.x), exp2(a.y - b.y)}; }

  // Half of a warp takes the pairs of steps of one block of 8, a lane 8 channels of them.
  __device__ __forceinline__ void multiply_pairs_of_eight(const FragmentLane& lane) {
    constexpr int kHalf = kWarpSize / 2, kChannels = 8;
    const int block = 2 * lane.warp + lane.index / kHalf, part = lane.index % kHalf;
    float decayed[kBlockSteps][kChannels], before[kChannels];
#pragma unroll
    for (int i = 0; i < kBlockSteps; ++i) {
      const int row = kBlockSteps * block + i;
      float k[kChannels], q[kChannels], log2[kChannels], sums[2 * kBlockSteps] = {};
#pragma unroll
      for (int panel = 0; panel < 2; ++panel) {
        const int vector = 8 * panel + part / 2;
        unpack_half(shared.rows.k, row, vector, part % 2, &k[4 * panel]);
        unpack_half(shared.rows.q, row, vector, part % 2, &q[4 * panel]);
        const float4 values = *reinterpret_cast<const float4*>(&shared.log2_cumsum[row][64 * panel + 4 * part]);
        log2[4 * panel] = values.x, log2[4 * panel + 1] = values.y;
        log2[4 * panel + 2] = values.z, log2[4 * panel + 3] = values.w;
      }
#pragma unroll
      for (int channel = 0; channel < kChannels; ++channel) {
        const float decay = i == 0 ? 1.0f : exp2(log2[channel] - before[channel]);
        before[channel] = log2[channel];
#pragma unroll
        for (int j = 0; j < i; ++j) {
          decayed[j][channel] *= decay;
          sums[j] = fmaf(k[channel], decayed[j][channel], sums[j]);
          sums[kBlockSteps + j] = fmaf(q[channel], decayed[j][channel], sums[kBlockSteps + j]);
        }
        decayed[i][channel] = k[channel];
        sums[kBlockSteps + i] = fmaf(q[channel], k[channel], sums[kBlockSteps + i]);
      }
      // Each lane of the half ends with the sum, over all lanes, of one of the values.
      exchange<8>(sums, part);
      exchange<4>(sums, part);
      exchange<2>(sums, part);
      exchange<1>(sums, part);
      shared.diagonal[block][i][part] = sums[0];
    }
  }

  // A lane has 2 count values. It sends one half of them to another lane, and adds that lane's values to the other half.
  template <int count>
  static __device__ __forceinline__ void exchange(float (&sums)[2 * kBlockSteps], int lane) {
    const bool is_upper = lane & count;
#pragma unroll
    for (int value = 0; value < count; ++value) {
      const float kept = is_upper ? sums[value + count] : sums[value], sent = is_upper ? sums[value] : sums[value + count];
      sums[value] = kept + __shfl_xor_sync(kAllLanes, sent, count);
    }
  }

  static __device__ __forceinline__ void unpack_half(SmemTile<kStateColumns>& tile, int row, int vector, int half,
                                                     float* values) {
    const uint2 pairs = reinterpret_cast<const uint2*>(tile.vector(row, vector))[half];
    const float2 low = cuda::unpack<Scalar>(pairs.x), high = cuda::unpack<Scalar>(pairs.y);
    values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
  }

  // A lane's two channels of the group-th 8.
  static __device__ __forceinline__ float2 pair_of(SmemTile<kStateColumns>& tile, int row, int group,
                                                   const FragmentLane& lane) {
    return cuda::unpack<Scalar>(reinterpret_cast<const uint32_t*>(tile.vector(row, group))[lane.pair]);
  }
  __device__ __forceinline__ float2 log2_pair(int row, int group, const FragmentLane& lane) const {
    return *reinterpret_cast<const float2*>(&shared.log2_cumsum[row][8 * group + 2 * lane.pair]);
  }

  static __device__ __forceinline__ uint32_t bits(float value) { return __float_as_uint(value); }
  // Decays until and after a step, of operands that are truncated.
  static __device__ __forceinline__ float2 until(float2 step, float2 log2) {
    return exp2_difference({step.x + kTruncatedLog2, step.y + kTruncatedLog2}, log2);
  }
  static __device__ __forceinline__ float2 after(float2 step, float2 log2) {
    return exp2_difference(log2, {step.x - kTruncatedLog2, step.y - kTruncatedLog2});
  }

  // The products of the warp's last 8 rows with its first 8 steps: the first two elements are of keys, the others of queries.
  __device__ __forceinline__ void multiply_halves(float (&halves)[4], const FragmentLane& lane) {
#pragma unroll 4
    for (int group = 0; group < kVectors; ++group) {
      const int row = lane.row + kBlockSteps;
      const float2 first = pair_of(shared.rows.k, lane.row, group, lane), k = pair_of(shared.rows.k, row, group, lane),
                   q = pair_of(shared.rows.q, row, group, lane), middle = log2_pair(16 * lane.warp + 7, group, lane),
                   to = until(middle, log2_pair(lane.row, group, lane)), from = after(middle, log2_pair(row, group, lane));
      const uint32_t a[4] = {bits(k.x * from.x), bits(q.x * from.x), bits(k.y * from.y), bits(q.y * from.y)};
      cuda::mma_tf32(halves, a, {bits(first.x * to.x), bits(first.y * to.y)});
    }
  }

  // The products of rows of a block of 16 with the steps of earlier blocks. Block 3 has three of these, and block 0 none: warps
  // multiply for others, so that each has about as much to do. Warp 0 has the rows of block 3 and half of the channels, and
  // warp 1, beside its own rows, those of block 2 and an eighth of the channels, as column blocks from the third on.
  static constexpr int kSplit3 = kVectors / 2, kSplit2 = kVectors - 2, kFirstOther = 2;
  __device__ __forceinline__ void multiply_blocks(float (&of_keys)[kStepBlocks][4], float (&of_queries)[kStepBlocks][4],
                                                  const FragmentLane& lane) {
    const int block = lane.warp == 0 ? 3 : lane.warp, begin = lane.warp == 0 ? kSplit3 : 0,
              end = lane.warp == 3   ? kSplit3
                    : lane.warp == 2 ? kSplit2
                                     : kVectors;
    multiply_block<0>(block, begin, end, of_keys, of_queries, lane);
    if (lane.warp == 1) multiply_block<kFirstOther>(2, kSplit2, kVectors, of_keys, of_queries, lane);
  }
  template <int first_column_block>
  __device__ __forceinline__ void multiply_block(int block, int begin, int end, float (&of_keys)[kStepBlocks][4],
                                                 float (&of_queries)[kStepBlocks][4], const FragmentLane& lane) {
    const int first = 16 * block, row = first + lane.quad;
#pragma unroll 2
    for (int group = begin; group < end; ++group) {
      const float2 start = log2_pair(first - 1, group, lane), low = after(start, log2_pair(row, group, lane)),
                   high = after(start, log2_pair(row + 8, group, lane));
      const float2 k[2] = {pair_of(shared.rows.k, row, group, lane), pair_of(shared.rows.k, row + 8, group, lane)},
                   q[2] = {pair_of(shared.rows.q, row, group, lane), pair_of(shared.rows.q, row + 8, group, lane)};
      const uint32_t keys[4] = {bits(k[0].x * low.x), bits(k[1].x * high.x), bits(k[0].y * low.y), bits(k[1].y * high.y)},
                     queries[4] = {bits(q[0].x * low.x), bits(q[1].x * high.x), bits(q[0].y * low.y), bits(q[1].y * high.y)};
#pragma unroll
      for (int earlier = 0; earlier < kWarpgroupWarps - 1; ++earlier) {
        if (earlier >= block) break;
#pragma unroll
        for (int n = 2 * earlier; n < 2 * earlier + 2; ++n) {
          const int step = kBlockSteps * n + lane.quad;
          const float2 key = pair_of(shared.rows.k, step, group, lane), decay = until(start, log2_pair(step, group, lane));
          const uint32_t b[2] = {bits(key.x * decay.x), bits(key.y * decay.y)};
          cuda::mma_tf32(of_keys[first_column_block + n], keys, b);
          cuda::mma_tf32(of_queries[first_column_block + n], queries, b);
        }
      }
    }
  }

  // Products that warps have for others pass through shared memory: first the six column blocks of block 3, then the four of
  // block 2.
  __device__ __forceinline__ void give_products(const float (&of_keys)[kStepBlocks][4],
                                                const float (&of_queries)[kStepBlocks][4], const FragmentLane& lane) {
    const auto give = [&](int place, int n) {
      shared.of_keys[place][lane.index] = {of_keys[n][0], of_keys[n][1], of_keys[n][2], of_keys[n][3]};
      shared.of_queries[place][lane.index] = {of_queries[n][0], of_queries[n][1], of_queries[n][2], of_queries[n][3]};
    };
#pragma unroll
    for (int n = 0; n < 6; ++n) {
      if (lane.warp == 0) give(n, n);
      if (lane.warp == 1 && n < 4) give(6 + n, kFirstOther + n);
    }
  }
  __device__ __forceinline__ void take_products(float (&of_keys)[kStepBlocks][4], float (&of_queries)[kStepBlocks][4],
                                                const FragmentLane& lane) const {
    const auto take = [&](float (&target)[4], const float4& part) {
      target[0] += part.x;
      target[1] += part.y;
      target[2] += part.z;
      target[3] += part.w;
    };
    const int first = lane.warp == 3 ? 0 : 6;
#pragma unroll
    for (int n = 0; n < 6; ++n) {
      if (lane.warp < 2 || n >= 2 * lane.warp) continue;
      take(of_keys[n], shared.of_keys[first + n][lane.index]);
      take(of_queries[n], shared.of_queries[first + n][lane.index]);
    }
  }

  // The two column blocks of the warp's diagonal block, of products of keys or, with an offset, of queries.
  __device__ __forceinline__ void take_diagonal(float (&left)[4], float (&right)[4], const float (&halves)[4], int offset,
                                                const FragmentLane& lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      left[i] = shared.diagonal[2 * lane.warp][lane.quad][offset + 2 * lane.pair + i];
      left[2 + i] = halves[(offset > 0 ? 2 : 0) + i];
      right[i] = 0;
      right[2 + i] = shared.diagonal[2 * lane.warp + 1][lane.quad][offset + 2 * lane.pair + i];
    }
  }

  // Applies the norms to products of rows, which have the factors `of_rows`, with keys.
  __device__ __forceinline__ void apply_factors(float (&products)[kStepBlocks][4], float (&left)[4], float (&right)[4],
                                                const float (&of_rows)[kChunk], const FragmentLane& lane) const {
    if (!p.arguments.qk_l2norm) return;
    const float rows[2] = {of_rows[lane.row], of_rows[lane.row + 8]};
    const auto apply = [&](float (&block)[4], int n) {
      const float2 columns = column_pair(shared.factors.of_keys, n, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) block[i] *= rows[i / 2] * (i % 2 == 0 ? columns.x : columns.y);
    };
#pragma unroll
    for (int n = 0; n < kStepBlocks - 2; ++n) apply(products[n], n);
    apply(left, 2 * lane.warp);
    apply(right, 2 * lane.warp + 1);
  }

  __device__ __forceinline__ void write_p(SmemTile<kChunk>& target, const float (&of_queries)[kStepBlocks][4],
                                          const float (&left)[4], const float (&right)[4], const FragmentLane& lane) const {
    const FragmentPairs<> pairs(lane);
    const auto pack = [&](const float (&block)[4], int half) {
      return cuda::pack<Scalar>(p.scale * block[2 * half], p.scale * block[2 * half + 1]);
    };
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t value = 0;
        if (n < 2 * lane.warp) value = pack(of_queries[n], half);
        if (n == 2 * lane.warp) value = pack(left, half);
        if (n == 2 * lane.warp + 1) value = pack(right, half);
        pairs.at(target, n, half) = value;
      }
    }
  }

  template <bool has_norms>
  __device__ __forceinline__ void write_rows(Target& target) {
    const int thread = threadIdx.x, vector = thread % kVectors;
    const auto load_log2 = [&](int row, float (&log2)[kRowElements]) {
      const auto* const source = reinterpret_cast<const float4*>(&shared.log2_cumsum[row][kRowElements * vector]);
      const float4 low = source[0], high = source[1];
      log2[0] = low.x, log2[1] = low.y, log2[2] = low.z, log2[3] = low.w;
      log2[4] = high.x, log2[5] = high.y, log2[6] = high.z, log2[7] = high.w;
    };
    float last[kRowElements];
    load_log2(kChunk - 1, last);
    target.decay[thread] = exp2(shared.log2_cumsum[kChunk - 1][thread]);
#pragma unroll 2
    for (int row = thread / kVectors; row < kChunk; row += kRowsAtOnce) {
      float log2[kRowElements];
      load_log2(row, log2);
      const float of_key = has_norms ? shared.factors.of_keys[row] : 1.0f,
                  of_query = p.scale * (has_norms ? shared.factors.of_queries[row] : 1.0f);
      const uint4 keys = *shared.rows.k.vector(row, vector), queries = *shared.rows.q.vector(row, vector);
      const uint32_t k[4] = {keys.x, keys.y, keys.z, keys.w}, q[4] = {queries.x, queries.y, queries.z, queries.w};
      uint32_t q_in[4], k_in[4], k_out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 key = cuda::unpack<Scalar>(k[i]), query = cuda::unpack<Scalar>(q[i]);
        const float2 in = {exp2(log2[2 * i]), exp2(log2[2 * i + 1])},
                     out = {exp2(last[2 * i] - log2[2 * i]), exp2(last[2 * i + 1] - log2[2 * i + 1])};
        q_in[i] = cuda::pack<Scalar>(of_query * in.x * query.x, of_query * in.y * query.y);
        k_in[i] = cuda::pack<Scalar>(of_key * in.x * key.x, of_key * in.y * key.y);
        k_out[i] = cuda::pack<Scalar>(of_key * out.x * key.x, of_key * out.y * key.y);
      }
      *target.q.vector(row, vector) = {q_in[0], q_in[1], q_in[2], q_in[3]};
      *target.k_in.vector(row, vector) = {k_in[0], k_in[1], k_in[2], k_in[3]};
      *target.k_out.vector(row, vector) = {k_out[0], k_out[1], k_out[2], k_out[3]};
    }
  }

  // Calls emit(n, M^T) for each block of 8 columns from the diagonal on, with M = (I + diag(beta) A)^-1.
  template <typename Emit>
  __device__ __forceinline__ void invert(float (&of_keys)[kStepBlocks][4], float (&left)[4], float (&right)[4],
                                         const float (&beta)[2], const FragmentLane& lane, const Emit& emit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < kStepBlocks - 2; ++n) of_keys[n][i] *= beta[i / 2];
      left[i] *= beta[i / 2];
      right[i] *= beta[i / 2];
    }
    cuda::TriangularInverse::DiagonalBlock diagonal;
    shared.inverse.put_left(of_keys, lane);
    shared.inverse.put_diagonal(left, right, diagonal, lane);
    __syncthreads();
    shared.inverse.multiply(diagonal, lane, emit);
  }

  __device__ __forceinline__ void write_m(float (&of_keys)[kStepBlocks][4], float (&left)[4], float (&right)[4], int64_t place,
                                          const FragmentLane& lane) {
    const float beta[2] = {shared.beta[lane.row], shared.beta[lane.row + 8]};
    const ChunkMatrixPairs target(p.inverses, place, lane);
    invert(of_keys, left, right, beta, lane, [&](int n, const float (&transposed)[4]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = beta[half] * transposed[2 * half], high = beta[half] * transposed[2 * half + 1];
        const uint32_t rounded = cuda::pack<Scalar>(low, high);
        target.put(n, half, rounded, cuda::pack_lo<Scalar>(low, high, rounded));
      }
    });
  }

  static __device__ __forceinline__ float not_zero(float beta) { return fabsf(beta) < kLeastBeta ? kLeastBeta : beta; }

  __device__ __forceinline__ void write_n(KdaBwdChunk& target, float (&of_keys)[kStepBlocks][4], float (&left)[4],
                                          float (&right)[4], const FragmentLane& lane) {
    const FragmentPairs<> pairs(lane);
    if (threadIdx.x < kChunk) target.beta[threadIdx.x] = shared.beta[threadIdx.x];
#pragma unroll
    for (int n = 0; n < kStepBlocks - 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (n < 2 * lane.warp) pairs.at(target.n, n, half) = 0;
      }
    }
    const float beta[2] = {not_zero(shared.beta[lane.row]), not_zero(shared.beta[lane.row + 8])};
    invert(of_keys, left, right, beta, lane, [&](int n, const float (&transposed)[4]) {
      const int column = kBlockSteps * (2 * lane.warp + n) + 2 * lane.pair;
      const float inverse[2] = {__fdividef(1, not_zero(shared.beta[column])), __fdividef(1, not_zero(shared.beta[column + 1]))};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + 8 * half;
        const float low = column > row ? transposed[2 * half] * inverse[0] : 0.0f,
                    high = column + 1 > row ? transposed[2 * half + 1] * inverse[1] : 0.0f;
        pairs.at(target.n, 2 * lane.warp + n, half) = cuda::pack<Scalar>(low, high);
      }
    });
  }
};

template <typename Scalar, bool is_backward>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? KdaChunks<Scalar, is_backward>::kThreads : kWarpSize,
                                  KdaChunks<Scalar, is_backward>::kBlocksOfMultiprocessor)
    kda_chunks_kernel(const __grid_constant__ KdaChunksParams p) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  cuda::launch_dependents();
  const unsigned heads = static_cast<unsigned>(p.heads);
  const ChunkInTurn at(p, static_cast<int>(blockIdx.x / heads));
  const ChunkSpan span(p, at.entry);
  if (at.chunk >= span.chunks) return;
  const int head = static_cast<int>(blockIdx.x % heads);
  KdaChunks<Scalar, is_backward>{p, align_shared<KdaChunksShared>(unaligned_memory)}.run(span, at.chunk, head,
                                                                                         int64_t(at.number) * heads + head);
#endif
}

}  // namespace ssm_kernels::delta_rule
