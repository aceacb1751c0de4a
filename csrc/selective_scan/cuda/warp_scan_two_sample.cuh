// Two samples a step in the warp scan, for forward and backward: a lane takes u and B before its first step from the lane
// before it, and the first lane of a tile from memory.
//
// In backward the first step of a segment adds to the gradients of u and B of the step before, which belong to the block of the
// segment before: that block runs the adjoint through this one step, too, before its own, in a tile with no other step, of
// which it stores nothing. The carry pass therefore finds the maps of the segments' steps from the second to the first one of
// the next segment.
//
// Kernels with a step of its own for A read it, and store its gradient, element by element.
#pragma once

#include "selective_scan/cuda/two_sample.cuh"
#include "selective_scan/cuda/warp_scan_matrix.cuh"

namespace ssm_kernels::selective_scan::warp_scan {

// A block of these methods has besides: the parameters; B before the tile, of each state of a slice; and, in backward, the
// terms that the tile's first step adds to the gradient of B before it, summed over the channels of each warp, (warps, dstate).
template <typename TileConfig>
struct TwoSampleBlock {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr int K = TileConfig::kSteps;

  const TwoSampleParams* two = nullptr;
  Acc* before = nullptr;
  Acc* carry_of_B = nullptr;
  int dstate = 0;

  __device__ __forceinline__ Acc u_before(const SelectiveScanParams& p, const ScanPlan& plan, const Position& at,
                                          const Scalar* row, int channel, int64_t t0) const {
    return to_accumulate(load_or_zero(u_address_before<Scalar>(p, *two, at, plan.u, row, channel, t0)));
  }
  // Called by the whole block, which synchronizes before and after.
  __device__ __forceinline__ void stage_B_before(const SelectiveScanParams& p, const ScanPlan& plan, const Position& at,
                                                 const Scalar* row, int first_state, int states, int64_t t0) const {
    for (int s = threadIdx.x; s < states; s += TileConfig::kThreads) {
      before[s] = to_accumulate(load_or_zero(B_address_before<Scalar>(p, *two, at, plan.B, row, first_state + s, t0)));
    }
  }
  // B before a lane's first step, of state s of the slice, whose steps begin at B_steps.
  __device__ __forceinline__ Acc B_before(const Acc* B_steps, int s, bool is_first, bool is_channel = true) const {
    if (!is_channel) return 0;
    return is_first ? before[s] : B_steps[-kVectorSize<Acc> - 1];
  }

  // lam, or the weight in its place, of a lane's steps from t on.
  __device__ __forceinline__ void read_weights(const SelectiveScanParams& p, const Position& at, int channel, int64_t t,
                                               int valid, Acc (&weight)[K]) const {
    const SequenceView& view = two->lam;
    if (view.data == nullptr) {
#pragma unroll
      for (int j = 0; j < K; ++j) weight[j] = constant_weight<Acc>(p, *two);
      return;
    }
    const Scalar* const first = first_row<Scalar>(view, at) + channel * view.stride_dim + t * view.stride_step;
#pragma unroll
    for (int j = 0; j < K; ++j) weight[j] = j < valid ? load_lam(*two, first + j * view.stride_step) : Acc(0);
  }

  // Moves a lane's steps from t on from `delta` to `own`, the steps of the input, or ones; `delta` becomes the steps of A. The
  // bound of these keeps their sums finite, so that a rate of zero keeps the state.
  __device__ __forceinline__ void read_delta_A(const Position& at, int channel, int64_t t, int valid, bool has_delta,
                                               Acc (&delta)[K], Acc (&own)[K]) const {
    constexpr Acc kLargest = kLargestRate<Acc> / (std::is_same_v<Acc, float> ? 64 : 1);
    const Scalar* const first = first_row<Scalar>(two->delta_A, at) + channel * two->delta_A.stride_dim;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      own[j] = has_delta ? delta[j] : Acc(1);
      delta[j] = 0;
      if (j < valid) {
        delta[j] = Math<Acc>::min(to_accumulate(first[(t + j) * two->delta_A.stride_step]), kLargest);
      }
    }
  }
  __device__ __forceinline__ void store_grad_delta_A(const Position& at, int channel, int64_t t, int valid,
                                                     const Acc (&gradient)[K]) const {
    const SequenceView& view = two->grad_delta_A;
    if (view.data == nullptr) return;
    Scalar* const first = first_row<Scalar>(view, at) + channel * view.stride_dim;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      if (j < valid) first[(t + j) * view.stride_step] = from_accumulate<Scalar>(gradient[j]);
    }
  }

  // The factors a of B_t and w of B_{t-1}, of a lane's steps from t on. `u_before` is u before the tile, and becomes that
  // before the next one.
  __device__ __forceinline__ void weigh(const SelectiveScanParams& p, const Position& at, const Lane<TileConfig>& lane,
                                        int64_t t, int valid, const Acc (&delta)[K], const Acc (&u)[K], Acc& u_before,
                                        Acc (&current)[K], Acc (&previous)[K]) const {
    const Acc earlier = u_of_lane_before(lane, u[K - 1], u_before);
    u_before = __shfl_sync(kAllLanes, u[K - 1], kWarpSize - TileConfig::kLanesPerStep + lane.channel_in_warp);
    read_weights(p, at, lane.channel, t, valid, previous);
    const bool is_weighted = p.discretization != Discretization::kFohRamp;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      const SampleSteps<Acc> sizes(is_weighted, delta[j], previous[j]);
      current[j] = sizes.current * u[j];
      previous[j] = j < valid ? sizes.previous * (j > 0 ? u[j > 0 ? j - 1 : 0] : earlier) : Acc(0);
    }
  }

  // The same in backward, where tiles come in the opposite order. u becomes a. `first_size` is the step size of the previous
  // sample of the lane's first step.
  __device__ __forceinline__ void weigh(const SelectiveScanParams& p, const ScanPlan& plan, const Position& at,
                                        const Lane<TileConfig>& lane, const Scalar* row, int64_t t0, int valid,
                                        const Acc (&delta)[K], Acc (&u)[K], Acc (&previous)[K], Acc& first_size) const {
    const bool is_tile_first = lane.is_first() && lane.channel < at.channels;
    Acc earlier = u_of_lane_before(lane, u[K - 1], is_tile_first ? u_before(p, plan, at, row, lane.channel, t0) : Acc(0));
    read_weights(p, at, lane.channel, t0 + lane.time * K, valid, previous);
    const bool is_weighted = p.discretization != Discretization::kFohRamp;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      const SampleSteps<Acc> sizes(is_weighted, delta[j], previous[j]);
      if (j == 0) first_size = sizes.previous;
      const Acc own = u[j];
      previous[j] = j < valid ? sizes.previous * earlier : Acc(0);
      u[j] = sizes.current * own;
      earlier = own;
    }
  }

  // Sets the end of the block's steps. Called by the whole block.
  __device__ __forceinline__ static void set_end(Position* position, int64_t end) {
    __syncthreads();
    if (threadIdx.x == 0) position->end = end;
    __syncthreads();
  }
  __device__ __forceinline__ static void zero_from(int valid, Acc (&values)[K]) {
#pragma unroll
    for (int j = 0; j < K; ++j) values[j] = j < valid ? values[j] : Acc(0);
  }
  // Makes the segment's first step the identity, in a carry pass.
  __device__ __forceinline__ static void skip_first(Acc (&delta)[K], Acc (&dy)[K], Acc& sum_of_delta) {
    delta[0] = dy[0] = sum_of_delta = 0;
#pragma unroll
    for (int j = 1; j < K; ++j) sum_of_delta += delta[j];
  }

  __device__ __forceinline__ bool repeats(const Position& at) const { return repeats_first(*two, at); }

  // The gradients of a B and of w B_before over B and B_before, and that of z.
  struct Terms {
    Acc current, previous, of_z;
  };
  template <typename Transition>
  __device__ __forceinline__ Terms terms(const Transition& step, Acc g, Acc before, Acc current, Acc previous, Acc b,
                                         Acc b_before) const {
    const SampleFactors<Acc> factors = step.factors(step.z, step.basis);
    const SampleDerivatives<Acc> derivatives = step.derivatives(step.z, step.basis);
    const Acc of_inputs = Math<Acc>::fma(derivatives.current, current * b, derivatives.previous * (previous * b_before));
    return {g * factors.current, g * factors.previous, g * Math<Acc>::fma(derivatives.abar, before, of_inputs)};
  }
  // Stores the gradient of the sample before the row.
  __device__ __forceinline__ void store_first(const SelectiveScanParams& p, const Position& at, int channel, int state,
                                              int64_t t0, bool is_first, Acc gradient) const {
    if (two->grad_previous == nullptr || t0 > 0 || !is_first || at.initial < 0) return;
    static_cast<Acc*>(two->grad_previous)[state_offset(p, at.initial, at.first_channel + channel, state)] = gradient;
  }

  __device__ __forceinline__ void clear_carry() const { clear<TileConfig>(carry_of_B, TileConfig::kWarps * dstate); }
  // Adds a lane's term of the gradient of B before its first step to that of the lane before, or keeps it for the tile before.
  // The gradient of a constant B stays with its step, but for that of the sample before the row. Called by the whole warp.
  __device__ __forceinline__ void move_to_step_before(const Lane<TileConfig>& lane, int state, bool has_B_steps,
                                                      bool has_step_before, bool repeats, Acc term, Acc (&to_B)[K]) const {
    if (repeats || (!has_B_steps && has_step_before)) to_B[0] += term;
    if (!has_B_steps) return;
    Acc* const carry = carry_of_B + static_cast<int>(threadIdx.x) / kWarpSize * dstate + state;
    const Acc later = shuffle_later(term, TileConfig::kLanesPerStep);
    const Acc of_tile = lane.is_last() && lane.channel_in_warp == 0 ? *carry : Acc(0);
    to_B[K - 1] += lane.is_last() ? of_tile : later;
    Acc sum = term;
#pragma unroll
    for (int distance = 1; distance < TileConfig::kLanesPerStep; distance *= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    __syncwarp();
    if (lane.is_first() && lane.channel_in_warp == 0) *carry = sum;
  }

  // Makes the gradient of u, but for its part of D, in of_u; the part of delta's gradient that goes through the samples, in
  // grad_previous; and stores that of lam. `current` and `grad_previous` are the sums for the two samples.
  __device__ __forceinline__ void finish(const SelectiveScanParams& p, const ScanPlan& plan, const Position& at,
                                         const Lane<TileConfig>& lane, const Scalar* row, int64_t t0, int valid, bool repeats,
                                         bool stores_lam, const Acc (&delta)[K], const Acc (&u)[K], const Acc (&current)[K],
                                         Acc (&grad_previous)[K], Acc (&of_u)[K], Acc& carry_of_u) const {
    const bool is_tile_first = lane.is_first() && lane.channel < at.channels;
    Acc earlier = u_of_lane_before(lane, u[K - 1], is_tile_first ? u_before(p, plan, at, row, lane.channel, t0) : Acc(0));
    const int64_t t = t0 + lane.time * K;
    Acc weight[K];
    read_weights(p, at, lane.channel, t, valid, weight);
    const bool is_weighted = p.discretization != Discretization::kFohRamp;
    Acc first = 0;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      const SampleSteps<Acc> sizes(is_weighted, delta[j], weight[j]);
      const Acc to_before = sizes.previous * grad_previous[j];
      of_u[j] = sizes.current * current[j];
      if (j == 0) {
        first = to_before;
        if (repeats) of_u[0] += to_before;
      } else {
        of_u[j > 0 ? j - 1 : 0] += to_before;
      }
      const Acc of_current = u[j] * current[j], of_previous = (j < valid ? earlier : Acc(0)) * grad_previous[j];
      earlier = u[j];
      grad_previous[j] =
          is_weighted ? Math<Acc>::fma(weight[j], of_current - of_previous, of_previous) : of_current + of_previous;
      if (stores_lam && two->grad_lam.data != nullptr && j < valid) {
        Acc of_lam = delta[j] * (of_current - of_previous);
        if (two->lam_sigmoid) of_lam *= weight[j] * (1 - weight[j]);
        Scalar* const target = first_row<Scalar>(two->grad_lam, at) + lane.channel * two->grad_lam.stride_dim +
                               (t + j) * two->grad_lam.stride_step;
        *target = from_accumulate<Scalar>(of_lam);
      }
    }
    const Acc later = shuffle_later(first, TileConfig::kLanesPerStep);
    of_u[K - 1] += lane.is_last() ? carry_of_u : later;
    carry_of_u = __shfl_sync(kAllLanes, first, lane.channel_in_warp);
  }

 private:
  __device__ __forceinline__ static Acc u_of_lane_before(const Lane<TileConfig>& lane, Acc last_u, Acc u_before) {
    const Acc shuffled = shuffle_earlier(last_u, TileConfig::kLanesPerStep);
    return lane.is_first() ? u_before : shuffled;
  }
};

}  // namespace ssm_kernels::selective_scan::warp_scan
