// The operands of a chunk with a gate per channel, as the kernels store and load them, and the rows that they are made of.
#pragma once

#include "common/math.h"
#include "cuda/chunked/chunk_tables.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "delta_rule/cuda/kda.h"
#include "delta_rule/cuda/toolkit.cuh"

namespace ssm_kernels::delta_rule {

// With c_i the sum of log decays, per channel, from the chunk's start to step i, and l its last step. Rows are steps; tiles are
// as in shared memory. Rows past the end of a sequence and columns past the channels are zeros.
struct alignas(128) KdaChunk {
  SmemTile<kStateColumns> q;      // scale e^(c_i) q_i
  SmemTile<kStateColumns> k_in;   // e^(c_i) k_i, which reads the state before the chunk
  SmemTile<kStateColumns> k_out;  // e^(c_l - c_i) k_i, which is added to the state after it
  SmemTile<kChunk> p;             // P
  float decay[kStateColumns];     // e^(c_l)
};
static_assert(sizeof(KdaChunk) == kKdaChunkBytes);

// The same for backward. The inverse of I + A is I + diag(beta) N.
struct alignas(128) KdaBwdChunk {
  SmemTile<kStateColumns> q, k_in, k_out;
  SmemTile<kChunk> p;
  SmemTile<kChunk> n;  // N^T, of which rows are steps j
  float decay[kStateColumns];
  float beta[kChunk];
};
static_assert(sizeof(KdaBwdChunk) == kKdaBwdChunkBytes);

// The rows of a chunk of a key head.
struct KdaRows {
  SmemTile<kStateColumns> q, k;
};
// Binary logarithms of the decays from the chunk's start to each step. The length of a row puts pairs of channels in eight rows
// into different banks.
using KdaSums = float[kChunk][kStateColumns + 8];

// Tensor cores truncate fp32 operands to TF32, which makes them smaller by 0.72 * 2^-11 on average. A decay that is larger by
// as much, a difference of binary logarithms, makes up for it: the errors are as small as those of rounding, and bf16 elements
// without decay stay exact.
constexpr float kTruncatedLog2 = 5e-4f;

// Run by all threads of a block; a barrier must follow. Steps past the end of the sequence have zeros, and no decay.
template <typename Scalar, int threads, typename Params>
__device__ __forceinline__ void load_kda_rows(const Params& p, const ChunkSpan& span, int chunk, int head, KdaRows& rows,
                                              KdaSums& log2_cumsum, float (&beta)[kChunk]) {
  constexpr int kVectors = kStateColumns / kRowElements, kParts = threads / kStateColumns;
  static_assert(threads % kStateColumns == 0, "as many threads sum the log decays of each channel");
  const int thread = threadIdx.x, steps = span.steps_of(chunk), key_head = head / p.value_heads_per_key_head;
  const auto copy = [&](const RowsView& view, SmemTile<kStateColumns>& tile) {
    const Scalar* const source = span.rows<const Scalar>(view, key_head, chunk);
    const int vector = thread % kVectors;
#pragma unroll
    for (int i = 0; i < kChunk * kVectors / threads; ++i) {
      const int row = thread / kVectors + i * (threads / kVectors);
      const bool is_there = row < steps && vector * kRowElements < p.dstate;
      cuda::cp_async(tile.vector(row, vector), is_there ? source + row * view.stride_step + vector * kRowElements : source,
                     is_there ? cuda::kCpAsyncBytes : 0);
    }
  };
  copy(p.k, rows.k);
  copy(p.q, rows.q);
  // Neighboring lanes have neighboring channels, and those further apart later steps.
  constexpr int kChannels = kWarpSize / kParts, kSteps = kChunk / kParts;
  const int channel = thread / kWarpSize * kChannels + thread % kChannels, part = thread % kWarpSize / kChannels;
  const int first = part * kSteps, count = channel < p.dstate ? steps - first : 0;
  const float* log_decay = span.rows<const float>(p.log_decay, head, chunk) + channel + first * p.log_decay.stride_step;
  float log2[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    log2[i] = i < count ? *log_decay : 0.0f;
    log_decay += p.log_decay.stride_step;
  }
  if (thread < kChunk) {
    beta[thread] = thread < steps ? span.rows<const float>(p.beta, head, chunk)[thread * p.beta.stride_step] : 0.0f;
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const float scaled = log2[i] * static_cast<float>(kLog2E);
    sum += scaled < kLowestLog2Decay ? kLowestLog2Decay : scaled;
    log2[i] = sum;
  }
  float before = 0;
#pragma unroll
  for (int other = 0; other < kParts - 1; ++other) {
    const float of_part = __shfl_sync(kAllLanes, sum, other * kChannels + thread % kChannels);
    if (other < part) before += of_part;
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) log2_cumsum[first + i][channel] = kParts == 1 ? log2[i] : before + log2[i];
  cuda::cp_async_wait();
}

}  // namespace ssm_kernels::delta_rule
