// SSD backward: the gradients of the log decays and the gains from the sums that a state tile's products leave for each step,
// computed by one warp. A lane has two steps. See bwd.cuh for the formulas. The gates turn them into gradients of their inputs.
#pragma once

#include "cuda/chunked/chunk_tables.cuh"
#include "ssd/cuda/toolkit.cuh"

namespace ssm_kernels::ssd {

constexpr int kHalves = 2;  // of a product's columns, one for each consumer warpgroup

// The type of sums whose differences matter: wider than their terms for fp32 inputs.
template <typename Scalar>
using PairSum = std::conditional_t<kIsFp32<Scalar>, double, float>;

// Sums over a state tile's products, for each step and for the chunk.
template <typename Scalar>
struct StepSums {
  // With V_ji = x_j . g_i (C_i . B_j) e^(s_i - s_j): `later` has for step j the sum over i > j, from each half of the columns
  // i. `earlier` has for step i the sum of c_j V_ji over j < i, from the rows j of each warp. `same` has V_jj, without a decay.
  PairSum<Scalar> later[kHalves][kChunk], earlier[kWarpgroupWarps][kChunk];
  float same[kChunk];
  float read_state[kHalves][kChunk];  // g_i . S C_i, over each half of the state's columns
  float grad_state[kHalves][kChunk];  // x_j . T B_j, likewise
  float states;                       // <S, T>
};

// The tables of a state tile: of the chunk's steps, of the gates' inputs, of D and of the head.
template <typename Gates>
struct TileTables {
  TablesOfGates<Gates> steps;
  typename Gates::Kept kept[kChunk];
  float D[kStateRows];
  Gates gates;
};

// The decay from a step to the chunk's last: zero if a sequence begins in between.
template <typename Tables>
__device__ __forceinline__ float decay_to_chunk_end(const Tables& tables, int step) {
  const float decay = Math<float>::exp2(log2_between(tables, step, kChunk - 1));
  return step >= tables.first[kChunk - 1] ? decay : 0.0f;
}

// Adds the two rows of each lane of a step, of 2^rank_shift rows, and places the sum at the step's first or last row: the
// others receive zero.
template <typename Sum>
__device__ __forceinline__ void place_sum_of_step(Sum (&values)[2], bool at_last, int rank_shift, const FragmentLane& lane) {
  const int lanes = 1 << (rank_shift - 1), lane_of_step = lane.index % lanes;
  Sum sum = values[0] + values[1];
  for (int distance = 1; distance < lanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  values[0] = !at_last && lane_of_step == 0 ? sum : Sum(0);
  values[1] = at_last && lane_of_step == lanes - 1 ? sum : Sum(0);
}

// Adds the gradients from one state tile. If steps have several rows (gates.cuh), the first one receives the gradient of the
// log decay, and each row its part of the gradients of the gains.
template <typename Scalar, typename Tables>
__device__ __forceinline__ void add_step_gradients(const Tables& tables, const StepSums<Scalar>& sums, const FragmentLane& lane,
                                                   int rank_shift, GateGradients& grads) {
  constexpr bool kDiagonal = kAreDiagonal<Tables>;
  using Sum = PairSum<Scalar>;
  // After a step whose decay is below 2 to this power, the running sums over pairs are smaller than their rounding errors.
  constexpr float kForgottenLog2Decay = kIsFp32<Scalar> ? -48 : -24;
  Sum pairs[2], ended[2];
  float before[2], from[2];
  bool is_forgotten[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = 2 * lane.index + i;
    const float gain = tables.gain[step];
    const Sum later = sums.later[0][step] + sums.later[1][step];
    const float grad_state = (sums.grad_state[0][step] + sums.grad_state[1][step]) * decay_to_chunk_end(tables, step);
    const Sum earlier = (sums.earlier[0][step] + sums.earlier[1][step]) + (sums.earlier[2][step] + sums.earlier[3][step]);
    if constexpr (kDiagonal) {
      grads.gain[i] += static_cast<float>(later) + grad_state;
      grads.diagonal_gain[i] += sums.same[step];
      pairs[i] = Sum(gain) * later;
      ended[i] = earlier;
    } else {
      grads.gain[i] += static_cast<float>(later) + sums.same[step] + grad_state;
      pairs[i] = fma(Sum(gain), later, -earlier);
    }
    before[i] = gain * grad_state;
    from[i] = tables.exp_cumsum[step] * (sums.read_state[0][step] + sums.read_state[1][step]);
    if constexpr (kDiagonal) {
      grads.outputs[i] += fmaf(tables.diagonal_gain[step], sums.same[step], static_cast<float>(earlier)) + from[i];
    } else {
      grads.outputs[i] += fmaf(gain, sums.same[step], static_cast<float>(earlier)) + from[i];
    }
    is_forgotten[i] =
        step == tables.first[step] || tables.log2_cumsum[step] - tables.log2_cumsum[step - 1] < kForgottenLog2Decay;
  }
  if constexpr (kDiagonal) {
    // The running sums at a step's first row have the outputs of all rows of the step, and no inputs of the step.
    if (rank_shift > 0) {
      place_sum_of_step(pairs, /*at_last=*/true, rank_shift, lane);
      place_sum_of_step(ended, /*at_last=*/false, rank_shift, lane);
      place_sum_of_step(before, /*at_last=*/true, rank_shift, lane);
      place_sum_of_step(from, /*at_last=*/false, rank_shift, lane);
    }
    // The sum at step t is over j < t < i: the pairs (t - 1, i > t - 1) are added and (j < t, t) are subtracted.
    const Sum begun[2] = {__shfl_up_sync(kAllLanes, pairs[1], 1), pairs[0]};
#pragma unroll
    for (int i = 0; i < 2; ++i) pairs[i] = is_forgotten[i] ? Sum(0) : begun[i] - ended[i];
  }
  // Running sums: of `pairs` and `before` up to a step, of `from` from a step on. The running sum of `pairs` restarts at a step
  // that forgets, so that no rounding error from before it remains.
  Sum pairs_prefix = is_forgotten[1] ? pairs[1] : pairs[0] + pairs[1];
  float before_prefix = before[0] + before[1], from_suffix = from[0] + from[1];
  bool is_cut = is_forgotten[0] || is_forgotten[1];
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const Sum more_pairs = __shfl_up_sync(kAllLanes, pairs_prefix, distance);
    const bool more_are_cut = __shfl_up_sync(kAllLanes, is_cut, distance);
    const float earlier = __shfl_up_sync(kAllLanes, before_prefix, distance);
    const float later = __shfl_down_sync(kAllLanes, from_suffix, distance);
    if (lane.index >= distance) {
      if (!is_cut) pairs_prefix += more_pairs;
      is_cut |= more_are_cut;
      before_prefix += earlier;
    }
    if (lane.index + distance < kWarpSize) from_suffix += later;
  }
  const auto from_previous_lane = [&](auto value) {
    const auto shifted = __shfl_up_sync(kAllLanes, value, 1);
    return lane.index == 0 ? decltype(value)(0) : shifted;
  };
  const Sum pairs_before_lane = from_previous_lane(pairs_prefix);
  const float sum_before = from_previous_lane(before_prefix);
  const Sum pairs_before = is_forgotten[0] ? Sum(0) : pairs_before_lane;
  const float from_next = __shfl_down_sync(kAllLanes, from_suffix, 1);
  const float sum_after = lane.index + 1 == kWarpSize ? 0.0f : from_next;
  const float through = tables.has_reset ? 0.0f : tables.chunk_decay * sums.states;
  const Sum pairs_before_second = is_forgotten[1] ? Sum(0) : pairs_before + pairs[0];
  if constexpr (kDiagonal) {
    grads.log_decay[0] += static_cast<float>(pairs_before + pairs[0]) + (sum_before + (sum_after + from[1]) + through);
    grads.log_decay[1] += static_cast<float>(pairs_before_second + pairs[1]) + (sum_before + before[0]) + sum_after + through;
  } else {
    grads.log_decay[0] += static_cast<float>(pairs_before) + (sum_before + from_suffix + through);
    grads.log_decay[1] += static_cast<float>(pairs_before_second) + (sum_before + before[0]) + (sum_after + from[1]) + through;
  }
}

}  // namespace ssm_kernels::ssd
