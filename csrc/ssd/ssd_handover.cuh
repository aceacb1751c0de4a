// The states of a unit where a piece of a walk begins and ends (ssd_runs.cuh): given, final, or handed from run to run.
#pragma once

#include "cuda/named_barrier.cuh"
#include "cuda/ready_flag.cuh"
#include "ssd/ssd_fragments.cuh"
#include "ssd/ssd_runs.cuh"

namespace ssm_kernels::ssd {

template <int dstate, typename Params>
class Handover {
 public:
  // For the unit of that index in its block.
  __device__ __forceinline__ Handover(const Params& p, const Runs& runs, int index) : p_(p), runs_(runs), index_(index) {}

  // The state before the piece.
  __device__ __forceinline__ void begin(State<dstate>& state, const Pieces<Params>& pieces, const Lane& lane) const {
    const Walk walk = pieces.walk();
    if (pieces.begins(walk) || pieces.is_long(walk)) {
      const Place at(p_, runs_, walk.index);
      state.load(p_, states_of(p_, p_.initial_states, at.entry), Unit(p_, runs_, at, index_), lane);
    }
    if (pieces.begins(walk)) return;
    if (!pieces.is_long(walk)) {
      const int cut = cut_of(run_of_block() - 1);
      // One thread of each warp: with a barrier of the unit here, for one of all, the loop over chunks takes more registers.
      if (threadIdx.x % kWarpSize == 0) cuda::wait_for_flag(runs_.ready + cut);
      __syncwarp();
      state.read_registers(effects().registers_of(cut), [](float (&values)[4], const float (&stored)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = stored[i];
      });
      return;
    }
    effects().fold_into(state, cut_of(pieces.run_of(walk.first)), cut_of(run_of_block()), kUnits);
  }

  // Hands on the state after the piece.
  __device__ __forceinline__ void end(const State<dstate>& state, const Pieces<Params>& pieces, const Lane& lane) const {
    const Walk walk = pieces.walk();
    if (pieces.ends(walk)) {
      const Place at(p_, runs_, walk.index);
      state.store(p_, states_of(p_, p_.final_states, at.entry), Unit(p_, runs_, at, index_), lane);
    } else if (!pieces.is_long(walk)) {
      const int cut = cut_of(run_of_block());
      state.store_registers(effects().registers_of(cut));
      cuda::barrier_sync(1 + index_, kUnitThreads);
      if (threadIdx.x % kUnitThreads == 0) cuda::raise_flag(runs_.ready + cut);
    }
  }

  // What the piece does to a state.
  __device__ __forceinline__ void leave(const State<dstate>& after_zero, float decay) const {
    effects().leave(after_zero, decay, cut_of(run_of_block()));
  }

 private:
  __device__ __forceinline__ int cut_of(int run) const { return run * kUnits + index_; }
  __device__ __forceinline__ PieceEffects<dstate> effects() const { return {runs_.states, runs_.decays}; }

  const Params& p_;
  const Runs& runs_;
  int index_;
};

// By the threads of a unit, for each piece of the block's run, with the state before it: multiply(state, place, unit) takes
// that through the piece and returns the piece's decay.
template <bool states_only, int dstate, typename Params, typename Multiply>
__device__ __forceinline__ void walk_pieces(const Params& p, const Runs& runs, int index, const Lane& lane,
                                            const Multiply& multiply) {
  const Handover<dstate, Params> handover(p, runs, index);
  for_each_piece<states_only>(p, runs, [&](const auto& pieces, const Place& at) {
    const Unit unit(p, runs, at, index);
    State<dstate> state;
    if constexpr (states_only) {
      state.clear();
      const float decay = multiply(state, at, unit);
      handover.leave(state, decay);
    } else {
      handover.begin(state, pieces, lane);
      multiply(state, at, unit);
      handover.end(state, pieces, lane);
    }
  });
}

}  // namespace ssm_kernels::ssd
