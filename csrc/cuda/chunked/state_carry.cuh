// The state carry of forward: the state of a state tile before and after a segment (scheduler.cuh). It is the initial or final
// state, or passes from block to block. With the loop over a segment's chunks this is mamba_ssm's state_passing. The states
// after chunks inside of a segment are stored if they are among the call's chunk states. The parameters have, as SsdFwdParams,
// `final_states` and the members that begin with `chunk_states`.
#pragma once

#include "cuda/chunked/barriers.cuh"
#include "cuda/chunked/scheduler.cuh"
#include "cuda/chunked/span_map.cuh"

namespace ssm_kernels::cuda::chunked {

template <int dstate, typename Map, typename Params>
class StateCarry {
 public:
  // `index` is the state tile's in its block.
  __device__ __forceinline__ StateCarry(const Params& p, const Schedule& schedule, int index)
      : p_(p), schedule_(schedule), index_(index) {}

  // Loads the state before the current segment.
  __device__ __forceinline__ void load_before(State<dstate>& state, const TileScheduler<Params>& scheduler,
                                              const FragmentLane& lane) const {
    const WorkTile work_tile = scheduler.work_tile();
    if (scheduler.begins(work_tile) || is_long(scheduler, work_tile)) {
      const WorkSpan at(p_, schedule_, work_tile.index);
      state.load(p_, states_of(p_, p_.initial_states, at.entry), StateTile(p_, schedule_, at, index_), lane);
    }
    if (scheduler.begins(work_tile)) return;
    if (!is_long(scheduler, work_tile)) {
      const int slot = summary_index(ticket_of_block() - 1);
      // One thread of each warp waits: with one of the warpgroup and a barrier, the loop over chunks takes more registers.
      if (threadIdx.x % kWarpSize == 0) wait_for_flag(schedule_.ready + slot);
      __syncwarp();
      state.read_registers(summaries().registers_of(slot), [](float (&values)[4], const float (&stored)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = stored[i];
      });
      return;
    }
    if constexpr (kFolds)
      summaries().fold_into(state, summary_index(scheduler.block_of_chunk(work_tile.first)), summary_index(ticket_of_block()),
                            kWarpgroups);
  }

  // Stores the state after the current segment: as the final state, or for the next block.
  __device__ __forceinline__ void store_after(const State<dstate>& state, const TileScheduler<Params>& scheduler,
                                              const FragmentLane& lane) const {
    const WorkTile work_tile = scheduler.work_tile();
    if (scheduler.ends(work_tile)) {
      const WorkSpan at(p_, schedule_, work_tile.index);
      state.store(p_, states_of(p_, p_.final_states, at.entry), StateTile(p_, schedule_, at, index_), lane);
    } else if (!is_long(scheduler, work_tile)) {
      const int slot = summary_index(ticket_of_block());
      state.store_registers(summaries().registers_of(slot));
      sync_warpgroup(index_);
      if (threadIdx.x % kWarpgroupThreads == 0) raise_flag(schedule_.ready + slot);
    }
  }

  // Stores the state `left` chunks before the end of the current segment, if it is one of the chunk states. Recomputes the
  // place of the segment: kept through the loop over chunks, it would spill.
  __device__ __forceinline__ void store_chunk_state(const State<dstate>& state, const TileScheduler<Params>& scheduler,
                                                    int left, const FragmentLane& lane) const {
    if constexpr (!kAreKnownPacked<Params>) {
      if (p_.chunk_states == nullptr) return;
      const WorkTile work_tile = scheduler.work_tile();
      const int chunks = scheduler.end() - left - work_tile.first, number = chunks / p_.chunk_states_every;
      if (chunks != number * p_.chunk_states_every || number > p_.chunk_states_count) return;
      const WorkSpan at(p_, schedule_, work_tile.index);
      state.store(p_, states_of(p_, p_.chunk_states, at.entry * p_.chunk_states_row + number - 1),
                  StateTile(p_, schedule_, at, index_), lane);
    }
  }

 private:
  static constexpr bool kFolds = !std::is_same_v<Map, NoMap>;

  static __device__ __forceinline__ bool is_long(const TileScheduler<Params>& scheduler, const WorkTile& work_tile) {
    return kFolds && scheduler.is_long(work_tile);
  }
  __device__ __forceinline__ int summary_index(int block) const { return block * kWarpgroups + index_; }
  __device__ __forceinline__ SegmentSummaries<dstate, Map> summaries() const { return {schedule_.states, schedule_.maps}; }

  const Params& p_;
  const Schedule& schedule_;
  int index_;
};

// Run by a consumer warpgroup: for each segment of the block's range, scan(state, span, state_tile, store_chunk_state) takes
// the state before the segment through it. It calls store_chunk_state(left) with the state after each chunk, and with the
// number of chunks that are left.
template <int dstate, typename Map, typename Params, typename Scan>
__device__ __forceinline__ void scan_segments(const Params& p, const Schedule& schedule, int index, const FragmentLane& lane,
                                              const Scan& scan) {
  const StateCarry<dstate, Map, Params> carry(p, schedule, index);
  for_each_segment(p, schedule, [&](const auto& scheduler, const WorkSpan& at) {
    const StateTile state_tile(p, schedule, at, index);
    State<dstate> state;
    carry.load_before(state, scheduler, lane);
    scan(state, at, state_tile, [&](int left) { carry.store_chunk_state(state, scheduler, left, lane); });
    carry.store_after(state, scheduler, lane);
  });
}

}  // namespace ssm_kernels::cuda::chunked
