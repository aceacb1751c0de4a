// A pipeline of stages in shared memory from producer warps to consumer warps. Each stage has two mbarriers: `full` completes
// when the stage is filled, `empty` when no thread reads it any more. Some producer warps copy tiles, others compute tables for
// the same stages. Each runs ahead of the consumers by as many stages as there are.
#pragma once

#include <type_traits>

#include <cstddef>
#include <cstdint>
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace ssm_kernels::cuda {

// A stage, and how many times the pipeline has used that stage before.
struct PipelineState {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      ++phase;
    }
  }
  __device__ __forceinline__ void advance(int stages, int count) {
    phase += (stage + count) / stages;
    stage = (stage + count) % stages;
  }
};

// One warp's share of the positions that `warps` warps process in turn.
template <int warps>
struct WarpShare {
  int warp = 0;

  __device__ __forceinline__ int first() const { return warps == 1 ? 0 : warp; }
};

// A block's shared memory: the members of Once, then up to max_stages stages.
template <typename Once, typename Stage_, typename Mma, int max_stages>
struct StagedShared : Once {
  using Stage = Stage_;
  static constexpr int kMaxStages = max_stages;
  // With wgmma all stages fit; else the host says how many do.
  static __device__ __forceinline__ int stages(int given) { return Mma::kIsAsync ? kMaxStages : given; }
  Mbarrier full[max_stages], empty[max_stages];

  __device__ __forceinline__ Stage& stage(int index) {
    return *reinterpret_cast<Stage*>(reinterpret_cast<unsigned char*>(this) + align(sizeof(*this)) + index * kStageBytes);
  }
  static constexpr int bytes(int stages) { return Mma::kAlignment + align(sizeof(StagedShared)) + stages * kStageBytes; }
  static __device__ __forceinline__ StagedShared& at(unsigned char* memory) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    return *reinterpret_cast<StagedShared*>(memory + align(address) - address);
  }

 private:
  static constexpr int align(size_t bytes) {
    return static_cast<int>((bytes + Mma::kAlignment - 1) / Mma::kAlignment * Mma::kAlignment);
  }
  static constexpr int kStageBytes = align(sizeof(Stage));
};

// Run by the warps that copy: copy(position, stage) starts the copies for a position. With at least pending + 2 stages, the
// copies of `pending` later positions are in flight when a stage is committed to the consumers. The first position is committed
// as soon as it has arrived; with fewer stages every position is.
template <int pending, typename Copy>
__device__ __forceinline__ void produce_copies(int positions, int stages, PipelineState& at, Mbarrier* full, Mbarrier* empty,
                                               const Copy& copy) {
  const bool runs_ahead = stages >= pending + 2;
  const auto commit_stage = [&](int positions_ago) {
    const int stage = at.stage - positions_ago;
    fence_proxy_async();
    full[stage < 0 ? stage + stages : stage].arrive();
  };
#pragma unroll 1
  for (int position = 0; position < positions; ++position) {
    if (at.phase > 0) empty[at.stage].wait(at.phase - 1);
    copy(position, at.stage);
    cp_async_commit();
    at.advance(stages);
    if (!runs_ahead || position == 0) {
      cp_async_wait<0>();
      commit_stage(1);
    } else if (position > pending) {
      cp_async_wait<pending>();
      commit_stage(1 + pending);
    }
  }
  if (!runs_ahead) return;
  cp_async_wait<0>();
  for (int ago = min(pending, positions - 1); ago > 0; --ago) commit_stage(ago);
}

// Run by a warp that computes tables. fetch(position, fetched) starts to load the inputs of a position, `fetched_ahead` of the
// warp's positions ahead. make(fetched) computes the tables of `at_once` positions together. store(stage, fetched, made, k)
// writes the k-th of them, once its stage is empty. `empty` are the mbarriers of the tables.
template <int at_once, typename Fetched, int fetched_ahead = 4, int warps, typename Fetch, typename Make, typename Store>
__device__ __forceinline__ void produce_tables(int positions, WarpShare<warps> share, int stages, PipelineState& at,
                                               Mbarrier* full, Mbarrier* empty, const Fetch& fetch, const Make& make,
                                               const Store& store) {
  static_assert(fetched_ahead % at_once == 0, "tables are computed from whole groups of fetched positions");
  std::conditional_t<warps == 1, PipelineState&, PipelineState> own = at;
  if constexpr (warps > 1) {
    own.advance(stages, share.first());
    at.advance(stages, positions);
  }
  Fetched fetched[fetched_ahead] = {};
#pragma unroll
  for (int i = 0; i < fetched_ahead; ++i) {
    const int position = share.first() + i * warps;
    if (position < positions) fetch(position, fetched[i]);
  }
#pragma unroll 1
  for (int first = share.first(); first < positions; first += fetched_ahead * warps) {
#pragma unroll
    for (int i = 0; i < fetched_ahead; i += at_once) {
      if (first + i * warps >= positions) return;
      const auto made = make(&fetched[i]);
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int position = first + (i + k) * warps, next = position + fetched_ahead * warps;
        if (k > 0 && position >= positions) return;
        if (own.phase > 0) empty[own.stage].wait(own.phase - 1);
        store(own.stage, fetched[i + k], made, k);
        full[own.stage].arrive();
        if (next < positions) fetch(next, fetched[i + k]);
        if constexpr (warps == 1) {
          own.advance(stages);
        } else {
          own.advance(stages, warps);
        }
      }
    }
  }
}

}  // namespace ssm_kernels::cuda
