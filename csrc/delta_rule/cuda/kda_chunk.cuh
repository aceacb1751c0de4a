// The operands of a chunk with a gate per channel, as the kernels store and load them, and the rows that they are made of.
#pragma once

#include <type_traits>

#include "common/math.h"
#include "cuda/chunked/chunk_tables.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "delta_rule/cuda/gate_arguments.cuh"
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
  bool begins_sequence;           // whether seq_idx begins a sequence with the chunk: the state before is not read
};
static_assert(sizeof(KdaChunk) == kKdaChunkBytes);

// The same for backward. The inverse of I + A is I + diag(beta) N.
struct alignas(128) KdaBwdChunk {
  SmemTile<kStateColumns> q, k_in, k_out;
  SmemTile<kChunk> p;
  SmemTile<kChunk> n;  // N^T, of which rows are steps j
  float decay[kStateColumns];
  float beta[kChunk];
  bool begins_sequence;
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

// The factors of the rows are 1 without qk_l2norm.
struct KdaRowFactors {
  float of_keys[kChunk], of_queries[kChunk];
};

// The flags of a chunk's steps at which seq_idx begins a sequence, the first step the lowest bit. Run by whole warps.
template <typename Params>
__device__ __forceinline__ uint64_t sequence_begins(const Params& p, const ChunkSpan& span, int chunk) {
  if (p.resets == nullptr) return 0;
  const uint8_t* const resets = span.resets(p, chunk);
  const int lane = threadIdx.x % kWarpSize, steps = span.steps_of(chunk);
  const unsigned low = __ballot_sync(kAllLanes, lane < steps && resets[lane] != 0),
                 high = __ballot_sync(kAllLanes, lane + kWarpSize < steps && resets[lane + kWarpSize] != 0);
  return uint64_t{high} << kWarpSize | low;
}

// Whether rows of fp32 gates are whole vectors of 16 bytes.
template <typename Params>
__device__ __forceinline__ bool has_gate_vectors(const Params& p) {
  constexpr int kElements = cuda::kCpAsyncBytes / sizeof(float);
  const RowsView& gates = p.log_decay;
  return p.arguments.gate_is_fp32 && p.dstate % kElements == 0 &&
         (reinterpret_cast<uint64_t>(gates.data) / sizeof(float) | gates.stride_batch | gates.stride_step | gates.stride_head) %
                 kElements ==
             0;
}

// Run by all threads of a block; a barrier must follow. Steps past the end of the sequence have zeros, and no decay. The step
// at which seq_idx begins a sequence has the decay zero in all channels.
template <typename Scalar, int threads, typename Params>
__device__ __forceinline__ void load_kda_rows(const Params& p, const ChunkSpan& span, int chunk, int head, uint64_t begins,
                                              KdaRows& rows, KdaSums& log2_cumsum, float (&beta)[kChunk]) {
  constexpr int kVectors = kStateColumns / kRowElements, kParts = threads / kStateColumns;
  static_assert(threads % kStateColumns == 0, "as many threads sum the log decays of each channel");
  const KdaArguments& arguments = p.arguments;
  const DeltaRuleGateOptions& options = arguments.options;
  const int thread = threadIdx.x, steps = span.steps_of(chunk), key_head = head / p.value_heads_per_key_head;
  // `vectors` vectors of a row that begins at `source`, of which the first `elements` elements are there.
  const auto copy = [&](auto vectors, const auto* source, int64_t stride, int elements, const auto& target) {
    constexpr int kRowVectors = decltype(vectors)::value, kRowsAtOnce = threads / kRowVectors,
                  kElements = cuda::kCpAsyncBytes / sizeof(*source);
    const int vector = thread % kRowVectors, first = thread / kRowVectors;
    const bool has_columns = vector * kElements < elements;
    const auto* row = source + first * stride + vector * kElements;
    if (steps == kChunk) {
#pragma unroll
      for (int i = 0; i < kChunk / kRowsAtOnce; ++i) {
        cuda::cp_async(target(first + i * kRowsAtOnce, vector), row, has_columns ? cuda::kCpAsyncBytes : 0);
        row += kRowsAtOnce * stride;
      }
    } else {
#pragma unroll 1
      for (int i = first; i < kChunk; i += kRowsAtOnce) {
        const bool is_there = has_columns && i < steps;
        cuda::cp_async(target(i, vector), is_there ? row : source, is_there ? cuda::kCpAsyncBytes : 0);
        row += kRowsAtOnce * stride;
      }
    }
  };
  const auto copy_rows = [&](const RowsView& view, SmemTile<kStateColumns>& tile) {
    copy(std::integral_constant<int, kVectors>(), span.rows<const Scalar>(view, key_head, chunk), view.stride_step, p.dstate,
         [&](int row, int vector) { return tile.vector(row, vector); });
  };
  copy_rows(arguments.k, rows.k);
  copy_rows(arguments.q, rows.q);
  // Neighboring lanes have neighboring channels, and those further apart later steps.
  constexpr int kChannels = kWarpSize / kParts, kSteps = kChunk / kParts;
  const int channel = thread / kWarpSize * kChannels + thread % kChannels, part = thread % kWarpSize / kChannels;
  const int first = part * kSteps, count = channel < p.dstate ? steps - first : 0;
  float log2[kSteps];
  // Where a thread has a channel of all steps, it would compute an address for each of its gates.
  const bool copies_gates = kParts == 1 && has_gate_vectors(p);
  if (copies_gates) {
    copy(std::integral_constant<int, kStateColumns * sizeof(float) / cuda::kCpAsyncBytes>(),
         span.rows<const float>(p.log_decay, head, chunk), p.log_decay.stride_step, p.dstate,
         [&](int row, int vector) { return &log2_cumsum[row][cuda::kCpAsyncBytes / sizeof(float) * vector]; });
  }
  const auto load_gates = [&](const auto* gate) {
    gate += channel + first * p.log_decay.stride_step;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      log2[i] = i < count ? cuda::to_accumulate(*gate) : 0.0f;
      gate += p.log_decay.stride_step;
    }
  };
  if (copies_gates) {
    cuda::cp_async_wait();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) log2[i] = log2_cumsum[first + i][channel];
  } else if (arguments.gate_is_fp32) {
    load_gates(span.rows<const float>(p.log_decay, head, chunk));
  } else {
    load_gates(span.rows<const Scalar>(p.log_decay, head, chunk));
  }
  if (thread < kChunk) {
    const int64_t step = span.start + first_step(chunk) + thread;
    beta[thread] = thread < steps ? write_strength(argument_at<Scalar>(p.beta, arguments.beta_is_fp32, span.batch, step, head),
                                                   options.beta_sigmoid, options.allow_neg_eigval)
                                  : 0.0f;
  }
  if (options.has_raw_gate) {
    // The thread's elements of log2_cumsum are an array that a loop can index.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) log2_cumsum[first + i][channel] = log2[i];
    if (count > 0) {
      const GateOfHead gate(options, head, channel, p.dstate);
      visit_gate(options, [&](auto is_bounded) {
#pragma unroll 8
        for (int i = 0; i < kSteps; ++i) {
          float& value = log2_cumsum[first + i][channel];
          const float log_decay = gate.log_decay<is_bounded>(options, value);
          value = i < count ? log_decay : 0.0f;
        }
      });
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) log2[i] = log2_cumsum[first + i][channel];
  }
  if (begins != 0) {
    const uint64_t of_part = begins >> first;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (of_part >> i & 1) log2[i] = -INFINITY;
    }
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

// The factors of rows in shared memory. Run by all threads of a block; a barrier must follow.
template <typename Scalar, int threads>
__device__ __forceinline__ void make_row_factors(KdaRows& rows, bool qk_l2norm, KdaRowFactors& factors) {
  constexpr int kRows = 2 * kChunk, kLanes = threads / kRows, kVectors = kStateColumns / kRowElements;
  const int row = static_cast<int>(threadIdx.x) / kLanes % kChunk, part = threadIdx.x % kLanes;
  const bool is_key = static_cast<int>(threadIdx.x) / kLanes < kChunk;
  float factor = 1;
  if (qk_l2norm) {
    SmemTile<kStateColumns>& tile = is_key ? rows.k : rows.q;
    float sum = 0;
#pragma unroll 4
    for (int vector = part; vector < kVectors; vector += kLanes) {
      const uint4 values = *tile.vector(row, vector);
      const uint32_t pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = cuda::unpack<Scalar>(pairs[i]);
        sum = fmaf(pair.x, pair.x, sum);
        sum = fmaf(pair.y, pair.y, sum);
      }
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    factor = rsqrtf(sum + static_cast<float>(kNormEpsilon));
  }
  if (part == 0) (is_key ? factors.of_keys : factors.of_queries)[row] = factor;
}

}  // namespace ssm_kernels::delta_rule
