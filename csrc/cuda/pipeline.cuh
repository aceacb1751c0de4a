// How the warps that move data hand a ring of stages in shared memory to those that multiply, and take it back: at two barriers
// for each stage, `full` when all of it is there and `empty` when nobody reads it any more. Some warps copy, others make tables
// for the same stages; each runs ahead of the products by as many stages as there are.
#pragma once

#include <type_traits>

#include <cstddef>
#include <cstdint>
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace ssm_kernels::cuda {

// A stage, and how often the ring came round to it before.
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

// Of the positions that so many warps take in turns, those of one.
template <int warps>
struct WarpShare {
  int of_warp = 0;

  __device__ __forceinline__ int first() const { return warps == 1 ? 0 : of_warp; }
};

// A block's shared memory: what it has once, then as many stages as there is room for.
template <typename Once, typename Stage_, typename Mma, int max_stages>
struct StagedShared : Once {
  using Stage = Stage_;
  static constexpr int kMaxStages = max_stages;
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

// By the warps that copy: copy(position, stage) starts what one position takes. A stage is handed over while the copies of up
// to `pending` later ones run, if there are stages for them beside that being read; the first at once.
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

// By a warp that makes tables. fetch(position, fetched) begins to load what a position's are made of, kFetchedAhead of its
// positions ahead; make(fetched) makes those of `at_once`, and store(stage, fetched, made, k) writes the k-th of them where
// nobody reads any more. `empty`: of the tables.
template <int at_once, typename Fetched, int warps, typename Fetch, typename Make, typename Store>
__device__ __forceinline__ void produce_tables(int positions, WarpShare<warps> share, int stages, PipelineState& at,
                                               Mbarrier* full, Mbarrier* empty, const Fetch& fetch, const Make& make,
                                               const Store& store) {
  constexpr int kFetchedAhead = 4;
  static_assert(kFetchedAhead % at_once == 0, "what was fetched is used up in turns");
  std::conditional_t<warps == 1, PipelineState&, PipelineState> own = at;
  if constexpr (warps > 1) {
    own.advance(stages, share.first());
    at.advance(stages, positions);
  }
  Fetched fetched[kFetchedAhead] = {};
#pragma unroll
  for (int i = 0; i < kFetchedAhead; ++i) {
    const int position = share.first() + i * warps;
    if (position < positions) fetch(position, fetched[i]);
  }
#pragma unroll 1
  for (int first = share.first(); first < positions; first += kFetchedAhead * warps) {
#pragma unroll
    for (int i = 0; i < kFetchedAhead; i += at_once) {
      if (first + i * warps >= positions) return;
      const auto made = make(&fetched[i]);
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int position = first + (i + k) * warps, next = position + kFetchedAhead * warps;
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
