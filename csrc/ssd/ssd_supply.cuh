// How the warps that move data hand a ring of stages in shared memory to those that multiply, and take it back: at two barriers
// for each stage, `full` when all of it is there and `empty` when nobody reads it any more. Some warps copy, others make tables
// for the same stages; each runs ahead of the products by as many stages as there are.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/shared_barrier.cuh"
#include "cuda/wgmma.cuh"
#include "ssd/ssd_chunk.cuh"

namespace ssm_kernels::ssd {

// A stage, and how often the ring came round to it before.
struct RingPosition {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      ++phase;
    }
  }
};

// By the warps that copy: copy(position, stage) starts what one position takes.
template <typename Copy>
__device__ __forceinline__ void supply_copies(int positions, int stages, cuda::SharedBarrier* full, cuda::SharedBarrier* empty,
                                              const Copy& copy) {
  // A stage is handed over while the next one's copies run, if it need not be taken back for them; the first at once.
  const bool runs_ahead = stages > 2;
  RingPosition at;
  int previous = 0;
#pragma unroll 1
  for (int position = 0; position <= positions; ++position) {
    const bool is_there = position < positions;
    if (is_there) {
      if (position >= stages) empty[at.stage].wait(at.phase - 1);
      copy(position, at.stage);
      cuda::commit_async_copies();
    }
    const bool is_own = is_there && (!runs_ahead || position == 0);
    if (is_own || (runs_ahead && position > 1)) {
      if (is_there && !is_own) {
        cuda::wait_for_async_copies<1>();
      } else {
        cuda::wait_for_async_copies<0>();
      }
      const int stage = is_own ? at.stage : previous;
      cuda::publish_to_products();
      full[stage].arrive();
    }
    previous = at.stage;
    at.advance(stages);
  }
}
// By a warp that makes tables: make(position, stage, fetched) of what fetch(position, fetched) began to load kFetchedAhead
// positions before. `empty`: of the tables.
template <typename Fetched, typename Fetch, typename Make>
__device__ __forceinline__ void supply_tables(int positions, int stages, cuda::SharedBarrier* full, cuda::SharedBarrier* empty,
                                              const Fetch& fetch, const Make& make) {
  constexpr int kFetchedAhead = 4;
  RingPosition at;
  Fetched fetched[kFetchedAhead];
#pragma unroll
  for (int i = 0; i < kFetchedAhead; ++i) {
    if (i < positions) fetch(i, fetched[i]);
  }
#pragma unroll 1
  for (int first = 0; first < positions; first += kFetchedAhead) {
#pragma unroll
    for (int i = 0; i < kFetchedAhead; ++i) {
      const int position = first + i;
      if (position >= positions) return;
      if (position >= stages) empty[at.stage].wait(at.phase - 1);
      make(position, at.stage, fetched[i]);
      full[at.stage].arrive();
      if (position + kFetchedAhead < positions) fetch(position + kFetchedAhead, fetched[i]);
      at.advance(stages);
    }
  }
}

}  // namespace ssm_kernels::ssd
