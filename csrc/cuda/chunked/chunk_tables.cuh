// mamba_ssm's chunk_cumsum: tables of cumulative log decays and gains of a chunk's steps, for one head, computed by one warp.
#pragma once

#include <type_traits>

#include "common/math.h"
#include "cuda/chunked/gates.cuh"
#include "cuda/chunked/span.cuh"
#include "cuda/pipeline.cuh"

namespace ssm_kernels::cuda::chunked {

static_assert(kChunk == 2 * kWarpSize, "a lane of the warp that computes the tables has two steps");

using StepTable = float[kChunk];

// Tables of a chunk's steps for one head; l is the chunk's last step. A product of decays a_t = e^zeta_t is the exponential of
// a difference of `log2_cumsum`. These are sums from the chunk's first step, restarted where a sequence begins.
struct alignas(16) ChunkTables {
  float log2_cumsum[kChunk];
  float gain[kChunk];               // c = d k(zeta), of the input
  float exp_cumsum[kChunk];         // the decay from before the chunk to the step; zero if a sequence begins in between
  float gain_to_chunk_end[kChunk];  // the gain times the decay from the step to l; likewise
  int first[kChunk];                // the first step, in the chunk, of the step's sequence
  float chunk_decay;                // the decay from before the chunk to l; likewise
  bool has_reset;                   // whether any sequence begins in the chunk
};
// For fp32 inputs the sums have twice the significant bits, so that differences of large sums are exact enough.
struct Fp32ChunkTables : ChunkTables {
  alignas(16) float log2_cumsum_lo[kChunk];  // the low part of log2_cumsum
  bool starts_with_reset;                    // whether a sequence begins at the first step: the state before is not read
};
template <typename Scalar>
using TablesOf = std::conditional_t<kIsFp32<Scalar>, Fp32ChunkTables, ChunkTables>;

// Gates with a gain on the diagonal have two more tables, because the output of a step reads the state before the step. The
// decay from step j to the state that step i reads is the exponential of log2_before[i] - log2_cumsum[j]. It is at most one for
// j < i, and not used for j = i. exp_cumsum then is the decay from before the chunk to the state that the step reads.
struct DiagonalTables {
  // The sum up to the previous step: zero where a sequence begins. All rows of a step have the one of its first row.
  alignas(16) float log2_before[kChunk];
  float diagonal_gain[kChunk];
};
struct DiagonalChunkTables : ChunkTables, DiagonalTables {};
struct Fp32DiagonalChunkTables : Fp32ChunkTables, DiagonalTables {
  alignas(16) float log2_before_lo[kChunk];
};
template <typename Tables>
constexpr bool kAreDiagonal = std::is_base_of_v<DiagonalTables, Tables>;
template <typename Gates>
using TablesOfGates =
    std::conditional_t<kHasDiagonalGain<Gates>,
                       std::conditional_t<kIsFp32<typename Gates::Scalar>, Fp32DiagonalChunkTables, DiagonalChunkTables>,
                       TablesOf<typename Gates::Scalar>>;

// The binary logarithm of the decay from one step to a later one.
__device__ __forceinline__ float log2_between(const ChunkTables& tables, int from, int to) {
  return tables.log2_cumsum[to] - tables.log2_cumsum[from];
}
__device__ __forceinline__ float log2_between(const Fp32ChunkTables& tables, int from, int to) {
  return (tables.log2_cumsum[to] - tables.log2_cumsum[from]) + (tables.log2_cumsum_lo[to] - tables.log2_cumsum_lo[from]);
}

// Whether any sequence begins in the chunk. p.resets is mostly null, which is known sooner than the value in the table.
template <typename Params>
__device__ __forceinline__ bool has_reset(const Params& p, const ChunkTables& tables) {
  return p.resets != nullptr && tables.has_reset;
}

// The lowest binary logarithm of a step's decay; 2^-160 is zero in fp32. Lower ones would make the sums so large that
// differences between later, weaker decays lose their accuracy.
constexpr float kLowestLog2Decay = -160;

// The type of cumulative log decays.
template <typename Scalar>
using ChunkSum = std::conditional_t<kIsFp32<Scalar>, double, float>;

// A lane's part of the tables that gates with a gain on the diagonal add.
template <int count, typename Sum, bool has_diagonal_gain>
struct DiagonalCumsum {};
template <int count, typename Sum>
struct DiagonalCumsum<count, Sum, true> {
  Sum log2_before[count][2];
  float diagonal_gain[count][2];
};

// A lane's two steps of the tables of `count` chunks. One warp computes these together, because each is a chain of dependent
// operations.
template <int count, typename Gates>
struct ChunkCumsum : DiagonalCumsum<count, ChunkSum<typename Gates::Scalar>, kHasDiagonalGain<Gates>> {
  using Scalar = typename Gates::Scalar;
  using Sum = ChunkSum<Scalar>;
  Sum log2_cumsum[count][2];
  float gain[count][2], exp_cumsum[count][2], gain_to_chunk_end[count][2];
  int first[count][2];
  Sum last[count];  // the whole chunk's sum
  bool has_reset[count], starts_with_reset[count];

  template <typename Params>
  __device__ __forceinline__ void make(const Params& p, const Gates& gates, const FetchedSteps<Gates>* steps) {
    const int lane = threadIdx.x % kWarpSize;
    float log_decay[count][2];
    for_each_step<count>([&](int k, int i) {
      const auto kept = Gates::keep(p, steps[k].loaded[i]);
      const float unscaled = gates.gain(p, kept);
      gain[k][i] = steps[k].is_there(i) ? unscaled : 0.0f;
      log_decay[k][i] = steps[k].is_there(i) ? gates.template log_decay<float>(kept, unscaled) : 0.0f;
      Sum log2;
      if constexpr (kIsFp32<Scalar>) {
        log2 = steps[k].is_there(i) ? gates.template log_decay<Sum>(kept, unscaled) * kLog2E : Sum(0);
      } else {
        log2 = log_decay[k][i] * static_cast<float>(kLog2E);
      }
      log2_cumsum[k][i] = log2 < kLowestLog2Decay ? Sum(kLowestLog2Decay) : log2;
    });
    gates.scale_gains(p, log_decay, gain);

    // A step's sum goes back to the first step of its sequence, or of the chunk.
    unsigned begins[count][2];
    Sum sum[count];
    bool any_reset = false;
#pragma unroll
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) begins[k][i] = __ballot_sync(kAllLanes, steps[k].resets[i] != 0);
      has_reset[k] = (begins[k][0] | begins[k][1]) != 0;
      starts_with_reset[k] = (begins[k][0] & 1) != 0;
      any_reset |= has_reset[k];
      sum[k] = steps[k].resets[1] != 0 ? log2_cumsum[k][1] : log2_cumsum[k][0] + log2_cumsum[k][1];
    }
    const auto add_earlier_lanes = [&](auto may_be_cut) {
      bool is_cut[count];
#pragma unroll
      for (int k = 0; k < count; ++k) is_cut[k] = steps[k].resets[0] != 0 || steps[k].resets[1] != 0;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
#pragma unroll
        for (int k = 0; k < count; ++k) {
          const Sum earlier = __shfl_up_sync(kAllLanes, sum[k], distance);
          if constexpr (decltype(may_be_cut)::value) {
            const bool earlier_is_cut = __shfl_up_sync(kAllLanes, is_cut[k], distance);
            if (lane >= distance && !is_cut[k]) sum[k] += earlier;
            is_cut[k] |= lane >= distance && earlier_is_cut;
          } else {
            if (lane >= distance) sum[k] += earlier;
          }
        }
      }
    };
    if (any_reset) {
      add_earlier_lanes(std::true_type());
    } else {
      add_earlier_lanes(std::false_type());
    }
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const Sum before = __shfl_up_sync(kAllLanes, sum[k], 1);
      last[k] = __shfl_sync(kAllLanes, sum[k], kWarpSize - 1);
      if (steps[k].resets[0] == 0 && lane > 0) log2_cumsum[k][0] += before;
      log2_cumsum[k][1] = sum[k];
      if constexpr (kHasDiagonalGain<Gates>) {
        this->log2_before[k][0] = steps[k].resets[0] == 0 && lane > 0 ? before : Sum(0);
        this->log2_before[k][1] = steps[k].resets[1] == 0 ? log2_cumsum[k][0] : Sum(0);
        if (p.rank_shift > 0) {
          const int first_lane = lane >> (p.rank_shift - 1) << (p.rank_shift - 1);
          this->log2_before[k][0] = __shfl_sync(kAllLanes, this->log2_before[k][0], first_lane);
          this->log2_before[k][1] = this->log2_before[k][0];
        }
      }
    }
    for_each_step<count>([&](int k, int i) {
      if constexpr (kHasDiagonalGain<Gates>) {
        exp_cumsum[k][i] = Math<float>::exp2(static_cast<float>(this->log2_before[k][i]));
        this->diagonal_gain[k][i] = steps[k].is_there(i) ? gates.diagonal_gain(p, steps[k].loaded[i]) : 0.0f;
      } else {
        exp_cumsum[k][i] = Math<float>::exp2(static_cast<float>(log2_cumsum[k][i]));
      }
      gain_to_chunk_end[k][i] = gain[k][i] * Math<float>::exp2(static_cast<float>(last[k] - log2_cumsum[k][i]));
      first[k][i] = 0;
    });
    if constexpr (kScalesOutputs<Gates, Params>) {
      for_each_step<count>([&](int k, int i) {
        if (steps[k].is_there(i)) gates.scale_output(p, steps[k].loaded[i], log2_cumsum[k][i], gain[k][i], exp_cumsum[k][i]);
      });
    }
    if (!any_reset) return;
    const unsigned earlier_lanes = (1u << lane) - 1, this_lane = 1u << lane;
    for_each_step<count>([&](int k, int i) {
      const unsigned even_begins = begins[k][0] & (earlier_lanes | this_lane);
      const unsigned odd_begins = begins[k][1] & (i == 0 ? earlier_lanes : earlier_lanes | this_lane);
      if ((even_begins | odd_begins) != 0) exp_cumsum[k][i] = 0;
      if (even_begins != begins[k][0] || odd_begins != begins[k][1]) gain_to_chunk_end[k][i] = 0;
      first[k][i] = max(0, max(2 * (31 - __clz(even_begins)), 2 * (31 - __clz(odd_begins)) + 1));
    });
  }

  // Stores the tables of the k-th chunk; with states_only, those that the states need.
  template <bool states_only = false, typename Tables>
  __device__ __forceinline__ void store(int k, Tables& tables) const {
    const int lane = threadIdx.x % kWarpSize;
    const auto store_floats = [&](float (&table)[kChunk], const float (&values)[2]) {
      reinterpret_cast<float2*>(table)[lane] = {values[0], values[1]};
    };
    store_floats(tables.gain_to_chunk_end, gain_to_chunk_end[k]);
    if constexpr (!states_only) {
      const float rounded[2] = {static_cast<float>(log2_cumsum[k][0]), static_cast<float>(log2_cumsum[k][1])};
      store_floats(tables.log2_cumsum, rounded);
      if constexpr (kIsFp32<Scalar>) {
        store_floats(tables.log2_cumsum_lo,
                     {static_cast<float>(log2_cumsum[k][0] - rounded[0]), static_cast<float>(log2_cumsum[k][1] - rounded[1])});
      }
      store_floats(tables.gain, gain[k]);
      store_floats(tables.exp_cumsum, exp_cumsum[k]);
      reinterpret_cast<int2*>(tables.first)[lane] = {first[k][0], first[k][1]};
      if constexpr (kAreDiagonal<Tables>) {
        const Sum(&before)[2] = this->log2_before[k];
        const float rounded_before[2] = {static_cast<float>(before[0]), static_cast<float>(before[1])};
        store_floats(tables.log2_before, rounded_before);
        if constexpr (kIsFp32<Scalar>) {
          store_floats(tables.log2_before_lo,
                       {static_cast<float>(before[0] - rounded_before[0]), static_cast<float>(before[1] - rounded_before[1])});
        }
        store_floats(tables.diagonal_gain, this->diagonal_gain[k]);
      }
    }
    if (lane == 0) {
      tables.has_reset = has_reset[k];
      if constexpr (kIsFp32<Scalar>) tables.starts_with_reset = starts_with_reset[k];
      tables.chunk_decay = has_reset[k] ? 0.0f : Math<float>::exp2(static_cast<float>(last[k]));
    }
  }
};

// produce_tables() for the chunks chunk_at(position) of one head; tables_at(stage) are the tables of its warpgroup.
template <typename Gates, int at_once, bool states_only, int warps, typename Params, typename ChunkAt, typename TablesAt>
__device__ __forceinline__ void produce_chunk_cumsum(const Params& p, const ChunkSpan& span, int64_t head,
                                                     WarpShare<warps> share, int stages, PipelineState& at, Mbarrier* full,
                                                     Mbarrier* empty, const ChunkAt& chunk_at, const TablesAt& tables_at) {
  const Gates gates(p, head);
  const typename Gates::Source source = Gates::source(p, span, head, 0);
  using Fetched = FetchedSteps<Gates>;
  produce_tables<at_once, Fetched>(
      span.chunks, share, stages, at, full, empty,
      [&](int position, Fetched& fetched) {
        const int chunk = chunk_at(position);
        fetched.fetch(p, Gates::later(p, source, chunk), span.resets(p, chunk), span.steps_of(chunk));
      },
      [&](const Fetched* fetched) {
        ChunkCumsum<at_once, Gates> made;
        made.make(p, gates, fetched);
        return made;
      },
      [&](int stage, const Fetched&, const ChunkCumsum<at_once, Gates>& made, int k) {
        made.template store<states_only>(k, tables_at(stage));
      });
}

}  // namespace ssm_kernels::cuda::chunked
