// How the warps that move data hand a ring of stages in shared memory to those that multiply, and take it back: at two barriers
// for each stage, `full` when all of it is there and `empty` when nobody reads it any more. Some warps copy, others make tables
// for the same stages; each runs ahead of the products by as many stages as there are.
#pragma once

#include <type_traits>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "ssd/cuda/chunk_cumsum.cuh"

namespace ssm_kernels::ssd {

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
struct Share {
  int of_warp = 0;

  __device__ __forceinline__ int first() const { return warps == 1 ? 0 : of_warp; }
};

// By the warps that copy: copy(position, stage) starts what one position takes. A stage is handed over while the copies of up
// to `pending` later ones run, if there are stages for them beside that being read; the first at once.
template <int pending, typename Copy>
__device__ __forceinline__ void produce_copies(int positions, int stages, PipelineState& at, cuda::Mbarrier* full,
                                               cuda::Mbarrier* empty, const Copy& copy) {
  const bool runs_ahead = stages >= pending + 2;
  const auto commit_stage = [&](int positions_ago) {
    const int stage = at.stage - positions_ago;
    cuda::fence_proxy_async();
    full[stage < 0 ? stage + stages : stage].arrive();
  };
#pragma unroll 1
  for (int position = 0; position < positions; ++position) {
    if (at.phase > 0) empty[at.stage].wait(at.phase - 1);
    copy(position, at.stage);
    cuda::cp_async_commit();
    at.advance(stages);
    if (!runs_ahead || position == 0) {
      cuda::cp_async_wait<0>();
      commit_stage(1);
    } else if (position > pending) {
      cuda::cp_async_wait<pending>();
      commit_stage(1 + pending);
    }
  }
  if (!runs_ahead) return;
  cuda::cp_async_wait<0>();
  for (int ago = min(pending, positions - 1); ago > 0; --ago) commit_stage(ago);
}

// By a warp that makes tables. fetch(position, fetched) begins to load what a position's are made of, kFetchedAhead of its
// positions ahead; make(fetched) makes those of `at_once`, and store(stage, fetched, made, k) writes the k-th of them where
// nobody reads any more. `empty`: of the tables.
template <int at_once, typename Fetched, int warps, typename Fetch, typename Make, typename Store>
__device__ __forceinline__ void produce_tables(int positions, Share<warps> share, int stages, PipelineState& at,
                                               cuda::Mbarrier* full, cuda::Mbarrier* empty, const Fetch& fetch,
                                               const Make& make, const Store& store) {
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

// The same of chunks of a head, chunk_at(position); tables_at(stage) are the unit's.
template <typename Scalar, int at_once, bool states_only, int warps, typename ChunkAt, typename TablesAt>
__device__ __forceinline__ void produce_chunk_cumsum(const SsdParams& p, const ChunkSpan& span, int64_t head,
                                                     Share<warps> share, int stages, PipelineState& at, cuda::Mbarrier* full,
                                                     cuda::Mbarrier* empty, const ChunkAt& chunk_at,
                                                     const TablesAt& tables_at) {
  const HeadSteps steps_of_head(p, head);
  const Scalar* const dt = span.template rows<const Scalar>(p.dt, head, 0);
  using Fetched = FetchedSteps<Scalar>;
  produce_tables<at_once, Fetched>(
      span.chunks, share, stages, at, full, empty,
      [&](int position, Fetched& fetched) {
        const int chunk = chunk_at(position);
        fetched.fetch(p, dt + first_step(chunk) * p.dt.stride_step, span.resets(p, chunk), span.steps_of(chunk));
      },
      [&](const Fetched* fetched) {
        ChunkCumsum<at_once, Scalar> made;
        made.make(p, steps_of_head, fetched);
        return made;
      },
      [&](int stage, const Fetched&, const ChunkCumsum<at_once, Scalar>& made, int k) {
        made.template store<states_only>(k, tables_at(stage));
      });
}

}  // namespace ssm_kernels::ssd
