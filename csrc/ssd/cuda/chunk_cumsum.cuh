// mamba_ssm's chunk_cumsum: tables of cumulative log decays and gains of a chunk's steps, for one head, computed by one warp.
// Also the spans of chunks and the state tiles that the SSD kernels process.
#pragma once

#include <type_traits>

#include "common/activations.h"
#include "cuda/fragment.cuh"
#include "cuda/mma_policy.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/vector_io.cuh"
#include "ssd/cuda/launch.h"

namespace ssm_kernels::ssd {

// Names of the toolkit in cuda/.
using cuda::align_shared, cuda::make_operand, cuda::columns_of, cuda::rows_of;
using cuda::Empty, cuda::SmemTile, cuda::RowCopier, cuda::InOrder, cuda::FromBothEnds, cuda::FragmentLane, cuda::FragmentPairs;
using cuda::kWarpSize, cuda::kAllLanes, cuda::kWarpgroupWarps, cuda::kWarpgroupThreads, cuda::kOperandAlignment,
    cuda::kBlockSteps;
using cuda::Mbarrier, cuda::PipelineState, cuda::Sm80Mma, cuda::Sm90Wgmma, cuda::StagedShared, cuda::WarpShare;

static_assert(kChunk == 2 * kWarpSize, "a lane of the warp that computes the tables has two steps");
static_assert(kStateRows == kWarpgroupWarps * 16, "each warp of a warpgroup has 16 rows of a state tile, those of one mma");
static_assert(kChunk == cuda::kTileRows, "a chunk's steps are the rows of a tile");

// Named barriers of kernels whose consumer warpgroups hold a state tile each. __syncthreads() is barrier 0.
enum NamedBarrier : int {
  kWarpgroupBarrier = 1,  // and the next ones, one for each warpgroup
  kPartialOutIsThere = kWarpgroupBarrier + kWarpgroups,
  kPartialOutIsRead,
};
__device__ __forceinline__ void sync_warpgroup(int index) { cuda::barrier_sync(kWarpgroupBarrier + index, kWarpgroupThreads); }

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
constexpr bool kIsFp32 = std::is_same_v<Scalar, float>;
template <typename Scalar>
using TablesOf = std::conditional_t<kIsFp32<Scalar>, Fp32ChunkTables, ChunkTables>;

// The binary logarithm of the decay from one step to a later one.
__device__ __forceinline__ float log2_between(const ChunkTables& tables, int from, int to) {
  return tables.log2_cumsum[to] - tables.log2_cumsum[from];
}
__device__ __forceinline__ float log2_between(const Fp32ChunkTables& tables, int from, int to) {
  return (tables.log2_cumsum[to] - tables.log2_cumsum[from]) + (tables.log2_cumsum_lo[to] - tables.log2_cumsum_lo[from]);
}

// Whether any sequence begins in the chunk. p.resets is mostly null, which is known sooner than the value in the table.
__device__ __forceinline__ bool has_reset(const SsdParams& p, const ChunkTables& tables) {
  return p.resets != nullptr && tables.has_reset;
}

// The lowest binary logarithm of a step's decay; 2^-160 is zero in fp32. Lower ones would make the sums so large that
// differences between later, weaker decays lose their accuracy.
constexpr float kLowestLog2Decay = -160;

// Whether sequences are packed: read at run time, or known from the type of the parameters.
__device__ __forceinline__ bool is_packed(const SsdParams& p) { return p.cu_seqlens != nullptr; }
__device__ __forceinline__ constexpr bool is_packed(const PackedFwdParams&) { return true; }
__device__ __forceinline__ constexpr bool is_packed(const UnpackedFwdParams&) { return false; }

// Calls visitor with the discretization as a type.
template <typename Visitor>
__device__ __forceinline__ void visit_exponential(Discretization discretization, const Visitor& visitor) {
  switch (discretization) {
#define SSM_ROW(enumerator, name, type)                \
  case Discretization::enumerator:                     \
    if constexpr (type::kExponential) visitor(type()); \
    break;
    SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW
  }
}

// The parameters of one head that turn dt into step sizes.
struct HeadSteps {
  float A, dt_bias;

  HeadSteps() = default;
  __device__ __forceinline__ HeadSteps(const SsdParams& p, int64_t head)
      : A(p.A[head]), dt_bias(p.dt_bias != nullptr ? p.dt_bias[head] : 0.0f) {}

  // The step size d: dt with bias, softplus and limits.
  __device__ __forceinline__ float step_size(const SsdParams& p, float dt) const {
    return clamp(before_limits(p, dt), p.dt_min, p.dt_max);
  }
  __device__ __forceinline__ float before_limits(const SsdParams& p, float dt) const {
    const float biased = dt + dt_bias;
    return p.dt_softplus ? softplus(biased) : biased;
  }
};

// A lane's two steps of a chunk, loaded ahead. They keep the input's type, so that no instruction waits for them yet.
template <typename Scalar>
struct FetchedSteps {
  Scalar dt[2];
  uint8_t resets[2];
  int steps;  // that exist in the chunk

  __device__ __forceinline__ void fetch(const SsdParams& p, const Scalar* source, const uint8_t* resets_source,
                                        int steps_of_chunk) {
    steps = steps_of_chunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dt[i] = is_there(i) ? source[step(i) * p.dt.stride_step] : Scalar{};
      resets[i] = resets_source != nullptr && is_there(i) ? resets_source[step(i)] : 0;
    }
  }

  static __device__ __forceinline__ int step(int i) { return 2 * (threadIdx.x % kWarpSize) + i; }
  __device__ __forceinline__ bool is_there(int i) const { return step(i) < steps; }
};

// A lane's two steps of the tables of `count` chunks. One warp computes these together, because each is a chain of dependent
// operations.
template <int count, typename Scalar>
struct ChunkCumsum {
  using Sum = std::conditional_t<kIsFp32<Scalar>, double, float>;
  Sum log2_cumsum[count][2];
  float gain[count][2], exp_cumsum[count][2], gain_to_chunk_end[count][2];
  int first[count][2];
  Sum last[count];  // the whole chunk's sum
  bool has_reset[count], starts_with_reset[count];

  // Calls body(k, i) for the lane's step i of each chunk k.
  template <typename Body>
  static __device__ __forceinline__ void for_each(const Body& body) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) body(k, i);
    }
  }

  __device__ __forceinline__ void make(const SsdParams& p, const HeadSteps& head, const FetchedSteps<Scalar>* steps) {
    const int lane = threadIdx.x % kWarpSize;
    float zeta[count][2];
    for_each([&](int k, int i) {
      const float d = head.step_size(p, cuda::to_accumulate(steps[k].dt[i]));
      gain[k][i] = steps[k].is_there(i) ? d : 0.0f;
      zeta[k][i] = steps[k].is_there(i) ? d * head.A : 0.0f;
      Sum log2;
      if constexpr (kIsFp32<Scalar>) {
        log2 = steps[k].is_there(i) ? Sum(d) * Sum(head.A) * kLog2E : Sum(0);
      } else {
        log2 = zeta[k][i] * static_cast<float>(kLog2E);
      }
      log2_cumsum[k][i] = log2 < kLowestLog2Decay ? Sum(kLowestLog2Decay) : log2;
    });
    visit_exponential(p.discretization, [&](auto method) {
      using Method = decltype(method);
      if constexpr (!Method::kUnitGain) {
        for_each([&](int k, int i) { gain[k][i] *= current_gain(Method(), zeta[k][i], Method::basis(zeta[k][i])); });
      }
    });

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
    }
    for_each([&](int k, int i) {
      exp_cumsum[k][i] = Math<float>::exp2(static_cast<float>(log2_cumsum[k][i]));
      gain_to_chunk_end[k][i] = gain[k][i] * Math<float>::exp2(static_cast<float>(last[k] - log2_cumsum[k][i]));
      first[k][i] = 0;
    });
    if (!any_reset) return;
    const unsigned earlier_lanes = (1u << lane) - 1, this_lane = 1u << lane;
    for_each([&](int k, int i) {
      const unsigned even_begins = begins[k][0] & (earlier_lanes | this_lane);
      const unsigned odd_begins = begins[k][1] & (i == 0 ? earlier_lanes : earlier_lanes | this_lane);
      if ((even_begins | odd_begins) != 0) exp_cumsum[k][i] = 0;
      if (even_begins != begins[k][0] || odd_begins != begins[k][1]) gain_to_chunk_end[k][i] = 0;
      first[k][i] = max(0, max(2 * (31 - __clz(even_begins)), 2 * (31 - __clz(odd_begins)) + 1));
    });
  }

  // Stores the tables of the k-th chunk; with states_only, those that the states need.
  template <bool states_only = false>
  __device__ __forceinline__ void store(int k, TablesOf<Scalar>& tables) const {
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
    }
    if (lane == 0) {
      tables.has_reset = has_reset[k];
      if constexpr (kIsFp32<Scalar>) tables.starts_with_reset = starts_with_reset[k];
      tables.chunk_decay = has_reset[k] ? 0.0f : Math<float>::exp2(static_cast<float>(last[k]));
    }
  }
};

// Consecutive chunks of a sequence.
struct ChunkSpan {
  int64_t entry;  // the row of the batch, or the packed sequence
  int64_t batch;
  int64_t start, length;  // the first step in the row of the batch, and the steps from there to the end of the sequence
  int chunks;

  // The whole sequence.
  template <typename Params>
  __device__ __forceinline__ ChunkSpan(const Params& p, int64_t entry) : entry(entry) {
    start = is_packed(p) ? sequence_start(p, entry) : 0;
    batch = is_packed(p) ? 0 : entry;
    length = is_packed(p) ? max(int64_t(0), sequence_start(p, entry + 1) - start) : p.seqlen;
    chunks = static_cast<int>((length + kChunk - 1) / kChunk);
  }

  // Clamped to the tensors: during the capture of a graph nobody checks cu_seqlens.
  static __device__ __forceinline__ int64_t sequence_start(const SsdParams& p, int64_t entry) {
    return max(int64_t(0), min(p.cu_seqlens[entry], p.seqlen));
  }

  __device__ __forceinline__ void narrow(int first, int count) {
    start += first_step(first);
    length -= first_step(first);
    chunks = count;
  }

  // The number of steps in a chunk.
  __device__ __forceinline__ int steps_of(int chunk) const {
    return static_cast<int>(min(int64_t(kChunk), length - first_step(chunk)));
  }

  template <typename Scalar>
  __device__ __forceinline__ Scalar* rows(const RowsView& view, int64_t head_or_group, int chunk) const {
    return static_cast<Scalar*>(view.data) + batch * view.stride_batch + step_of(chunk) * view.stride_step +
           head_or_group * view.stride_head;
  }
  __device__ __forceinline__ const uint8_t* resets(const SsdParams& p, int chunk) const {
    return p.resets == nullptr ? nullptr : p.resets + batch * p.seqlen + step_of(chunk);
  }

 private:
  __device__ __forceinline__ int64_t step_of(int chunk) const { return start + first_step(chunk); }
};

// Consecutive chunks of a work tile. There are fewer than 2^31 work tiles.
struct WorkSpan : ChunkSpan {
  int group;
  int first_tile;  // the first state tile, among the group's

  // The whole work tile.
  template <typename Params>
  __device__ __forceinline__ WorkSpan(const Params& p, const WorkPartition& partition, int work_tile)
      : ChunkSpan(p, work_tile / partition.work_tiles_per_entry),
        group(work_tile / partition.work_tiles_per_group % static_cast<int>(p.groups)),
        first_tile(work_tile % partition.work_tiles_per_group * kWarpgroups) {}
};

// One of a block's two state tiles: up to kStateRows rows and kStateColumns columns of one head's state.
struct StateTile {
  int head;
  int first_row, first_column;  // of the head's state
  int rows;                     // the head's from first_row on; 0 if the group has no more state tiles

  __device__ __forceinline__ StateTile(const SsdParams& p, const WorkPartition& partition, const WorkSpan& at, int index) {
    const bool is_there = at.first_tile + index < partition.tiles_per_group;
    const int state_tile = (at.first_tile + index) / partition.column_blocks;
    first_column = (at.first_tile + index) % partition.column_blocks * kStateColumns;
    head = at.group * partition.heads_per_group + (is_there ? state_tile / partition.row_blocks : 0);
    first_row = is_there ? state_tile % partition.row_blocks * kStateRows : 0;
    rows = is_there ? p.headdim - first_row : 0;
  }
  __device__ __forceinline__ bool is_there() const { return rows > 0; }
};

// cuda::produce_tables for the chunks chunk_at(position) of one head; tables_at(stage) are the tables of its warpgroup.
template <typename Scalar, int at_once, bool states_only, int warps, typename ChunkAt, typename TablesAt>
__device__ __forceinline__ void produce_chunk_cumsum(const SsdParams& p, const ChunkSpan& span, int64_t head,
                                                     WarpShare<warps> share, int stages, PipelineState& at, Mbarrier* full,
                                                     Mbarrier* empty, const ChunkAt& chunk_at, const TablesAt& tables_at) {
  const HeadSteps head_steps(p, head);
  const Scalar* const dt = span.template rows<const Scalar>(p.dt, head, 0);
  using Fetched = FetchedSteps<Scalar>;
  cuda::produce_tables<at_once, Fetched>(
      span.chunks, share, stages, at, full, empty,
      [&](int position, Fetched& fetched) {
        const int chunk = chunk_at(position);
        fetched.fetch(p, dt + first_step(chunk) * p.dt.stride_step, span.resets(p, chunk), span.steps_of(chunk));
      },
      [&](const Fetched* fetched) {
        ChunkCumsum<at_once, Scalar> made;
        made.make(p, head_steps, fetched);
        return made;
      },
      [&](int stage, const Fetched&, const ChunkCumsum<at_once, Scalar>& made, int k) {
        made.template store<states_only>(k, tables_at(stage));
      });
}

}  // namespace ssm_kernels::ssd
