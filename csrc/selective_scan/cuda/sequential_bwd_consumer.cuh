// Selective scan, backward, on CUDA, sequential: the consumer warps. sequential_bwd.cuh describes the whole kernel.
//
// A consumer thread holds kLaneStates states of two channels. For a group of kGroupSteps steps it first recomputes each h_t and
// each coefficient forwards, then runs the adjoint g backwards. It adds to sums over states, exchanged among the kStateLanes
// lanes of a channel, to sums over channels, exchanged among the rows of the warp, and to the gradient of A, which it keeps in
// registers.
//
// A sum over n lanes of n values takes log2(n) exchanges, each of which halves the values per lane: a lane keeps one register
// of a pair and sends the other. ConsumerLane's permutation makes these the same registers in all lanes.
#pragma once

#include "selective_scan/cuda/sequential_bwd_shared.cuh"
#include "selective_scan/cuda/sequential_step.cuh"
#include "selective_scan/cuda/shared_arrays.cuh"
#include "selective_scan/cuda/states.cuh"
#include "selective_scan/cuda/transition.cuh"

namespace ssm_kernels::selective_scan::sequential {

// delta, inputs, dy, B, C and saved states -> sums over states, sums over channels, and adjoints.
template <typename TileConfig, typename Method>
struct BwdConsumer : Method {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig, Method::kUsesPreviousInput>;
  using Step = sequential::Step<Method, Scalar>;
  using Rate = typename Step::Rate;
  using Input = typename Step::Input;
  using Group = Vector<Acc, kGroupSteps>;
  using States = Acc[kLaneChannels][kLaneStates];
  static constexpr int kBytes = sizeof(Acc);
  static constexpr int kG = kGroupSteps;
  static_assert(kGroupSteps == 4 && kLaneStates == 4 && kStateLanes == 4 && TileConfig::kWarpRows == 8 && kLaneChannels == 2,
                "the exchanges between lanes are written out for these");

  const SelectiveScanBwdParams& p;
  const ScanPlan& plan;
  const PartialSums& partial_sums;
  const Shared& shared;
  const Position& at;
  ConsumerLane<TileConfig, true> lane;
  bool needs_y;
  uint32_t states_before_groups, sums_over_channels;  // addresses of the thread's first values there
  // Zero for channels and states that do not exist. `adjoint` is Abar_{t+1} g_{t+1}.
  States A, adjoint, grad_A, h;

  // The lane's part of a tile in shared memory: groups of delta, the input or dy, or of the sums over states that replace them,
  // and rows of B and C. Addresses are kept in registers from group to group, but not by methods whose steps need the
  // registers.
  struct KeptTile {
    LaneRows<TileConfig> deltas;
    // B's row of the lane's first state, and the bytes from there to the rows of its states 1 and 2.
    uint32_t row;
    int to_state_1, to_state_2;

    __device__ __forceinline__ KeptTile(const ConsumerLane<TileConfig, true>& lane, const Shared& shared, int tile)
        : deltas(lane, shared.delta(tile)),
          row(cuda::opaque_shared_address(shared.matrices(tile).B + lane.state(0) * kPitch)),
          to_state_1(opaque((lane.state(1) - lane.state(0)) * kPitch * kBytes)),
          to_state_2(opaque((lane.state(2) - lane.state(0)) * kPitch * kBytes)) {}
    __device__ __forceinline__ uint32_t group(int array, int k, int t) const {
      return deltas.at(k, t) + array * Shared::kArray * kBytes;
    }
    __device__ __forceinline__ uint32_t B(int i, int t) const {
      return row + (i & 1 ? to_state_1 : 0) + (i & 2 ? to_state_2 : 0) + t * kBytes;
    }
  };
  struct ComputedTile {
    const ConsumerLane<TileConfig, true>& lane;
    const Shared& shared;
    int tile;

    __device__ __forceinline__ ComputedTile(const ConsumerLane<TileConfig, true>& lane_, const Shared& shared_, int tile_)
        : lane(lane_), shared(shared_), tile(tile_) {}
    __device__ __forceinline__ uint32_t group(int array, int k, int t) const {
      return cuda::shared_address(shared.array(tile, array).at(lane.channel(k), t));
    }
    __device__ __forceinline__ uint32_t B(int i, int t) const {
      return cuda::shared_address(shared.matrices(tile).B + lane.state(i) * kPitch + t);
    }
  };
  static constexpr int kPitch = Matrices<TileConfig>::kPitch, kFromBToC = Matrices<TileConfig>::kCapacity * kBytes;
  using Tile = std::conditional_t<Step::kKeepsAddresses, KeptTile, ComputedTile>;

  __device__ __forceinline__ BwdConsumer(const SelectiveScanBwdParams& p_, const Method& method_, const ScanPlan& plan_,
                                         const PartialSums& partial_sums_, const Shared& shared_)
      : Method(method_),
        p(p_),
        plan(plan_),
        partial_sums(partial_sums_),
        shared(shared_),
        at(*shared_.position),
        needs_y(p_.grad_z.data != nullptr || p_.replaces_grad_out),
        states_before_groups(cuda::opaque_shared_address(shared_.states + threadIdx.x)),
        sums_over_channels(cuda::opaque_shared_address(shared_.sums + threadIdx.x / kWarpSize * Shared::kSums +
                                                       ((lane.row & 4 ? kStates : 0) + lane.state(0)) * Shared::kSumsPitch)) {
    for_each_state(p, at, lane, [&](int k, int i, int channel, int state, bool exists) {
      A[k][i] = adjoint[k][i] = grad_A[k][i] = 0;
      if (!exists) return;
      const int64_t d = at.first_channel + channel;
      A[k][i] = load_bounded_A<Acc>(p, d, state, Step::kLargestA) * Step::kScaleOfA;
      adjoint[k][i] = load_optional_state<Acc>(p.grad_last_state, at.last, d, state);
    });
#pragma unroll 1
    for (int64_t s = plan.segments - 1; s > at.segment; --s) {
      for_each_state(p, at, lane, [&](int k, int i, int channel, int state, bool exists) {
        const int64_t offset = state_offset(p, at.row * plan.segments + s, at.first_channel + channel, state);
        if (exists) adjoint[k][i] = fold_segment(plan, offset, adjoint[k][i]);
      });
    }
  }

  __device__ __forceinline__ const Method& method() const { return *this; }

  __device__ __forceinline__ void load_saved_states(int64_t t0) {
    const Acc* const saved = shared.rows->states_before(p, t0 / kBwdTileSteps);
    for_each_state(p, at, lane, [&](int k, int i, int channel, int state, bool exists) {
      h[k][i] = exists && saved != nullptr ? __ldcg(saved + (channel * static_cast<int>(p.dstate) + state)) : Acc(0);
    });
  }

  __device__ __forceinline__ uint32_t states_before(int t, int k) const {
    constexpr int kVectorsOfGroup = kLaneChannels * TileConfig::kConsumers, kVectorBytes = sizeof(typename Shared::LaneStates);
    return states_before_groups + t * (kVectorsOfGroup * kVectorBytes / kG) + k * TileConfig::kConsumers * kVectorBytes;
  }

  // Advances the states through a group that is not the tile's last, and saves the states before it.
  __device__ __forceinline__ void scan_forward(int t, const Tile& tile) {
    Group delta[kLaneChannels], v[kLaneChannels];
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) {
      delta[k] = Group::load_shared(tile.group(Shared::kDelta, k, t));
      v[k] = Group::load_shared(tile.group(Shared::kInput, k, t));
      save_states_before(t, k);
    }
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) {
      const Group b = Group::load_shared(tile.B(i, t));
#pragma unroll
      for (int k = 0; k < kLaneChannels; ++k) {
        const Rate rate(A[k][i]);
#pragma unroll
        for (int j = 0; j < kG; ++j) {
          const Input input = make_input<Step>(method(), delta[k][j], v[k][j]);
          h[k][i] = Step(input, rate).advance(input, rate, h[k][i], b[j]);
        }
      }
    }
  }
  // Padding states are NaN after an infinite input or step size.
  __device__ __forceinline__ void zero_padding_states() {
    for_each_state(p, at, lane, [&](int k, int i, int, int, bool exists) {
      if (!exists) h[k][i] = 0;
    });
  }
  __device__ __forceinline__ void save_states_before(int t, int k) const { vector_of(h[k]).store_shared(states_before(t, k)); }

  // Runs the adjoint through a group of steps; if not full, through its first `count` steps only, for the states and channels
  // that exist (FwdConsumer::scan_group explains why).
  template <bool is_full>
  __device__ __forceinline__ void scan_backward(int t, int count, const Tile& tile, int tile_index) {
    Group delta[kLaneChannels], v[kLaneChannels], dy[kLaneChannels];
    Acc y[kLaneChannels][kG], sum_input[kLaneChannels][kG], sum_step[kLaneChannels][kG];
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) {
      if constexpr (is_full || Step::kKeepsAddresses) {
        delta[k] = Group::load_shared(tile.group(Shared::kDelta, k, t));
        v[k] = Group::load_shared(tile.group(Shared::kInput, k, t));
        dy[k] = Group::load_shared(tile.group(Shared::kDy, k, t));
      }
#pragma unroll
      for (int j = 0; j < kG; ++j) y[k][j] = sum_input[k][j] = sum_step[k][j] = 0;
    }
    // The variant that is not full loads them again at each use, to save registers.
    const auto at_step = [&](const Group& group, int array, int k, int j) {
      if constexpr (is_full || Step::kKeepsAddresses) return group[j];
      return *shared.array(tile_index, array).at(opaque(lane.channel(k)), t + j);
    };
    const auto input_at = [&](int k, int j) {
      return make_input<Step>(method(), at_step(delta[k], Shared::kDelta, k, j), at_step(v[k], Shared::kInput, k, j));
    };
    const auto dy_at = [&](int k, int j) { return at_step(dy[k], Shared::kDy, k, j); };
    Acc of_half[2][2][kG];  // (states of a lane after the first exchange, B and C, steps)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Acc of_state[2][2][kG];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int i = 2 * half + s;
        const Group b = Group::load_shared(tile.B(i, t)), c = Group::load_shared(tile.B(i, t) + kFromBToC);
        Acc(&to_B)[kG] = of_state[s][0];
        Acc(&to_C)[kG] = of_state[s][1];
#pragma unroll
        for (int j = 0; j < kG; ++j) to_B[j] = to_C[j] = 0;
#pragma unroll
        for (int k = 0; k < kLaneChannels; ++k) {
          if (!is_full && !(lane.channel(k) < at.channels && lane.state(i) < static_cast<int>(p.dstate))) continue;
          const Acc h_before = *static_cast<const Acc*>(__cvta_shared_to_generic(states_before(t, k) + i * kBytes));
          const Rate rate(A[k][i]);
          Step step[kG] = {};
          Acc states[kG], state = h_before;
#pragma unroll
          for (int j = 0; j < kG; ++j) {
            if (!is_full && j >= count) continue;
            const Input input = input_at(k, j);
            step[j] = Step(input, rate);
            state = states[j] = step[j].advance(input, rate, state, b[j]);
          }
#pragma unroll
          for (int j = kG - 1; j >= 0; --j) {
            if (!is_full && j >= count) continue;
            const Acc g = Math<Acc>::fma(dy_at(k, j), c[j], adjoint[k][i]);
            const Acc previous = j > 0 ? states[j > 0 ? j - 1 : 0] : h_before;
            const GradientSums<Acc> sums{sum_input[k][j], sum_step[k][j], to_B[j], grad_A[k][i]};
            adjoint[k][i] = step[j].add_gradients(sums, input_at(k, j), rate, b[j], g, previous, states[j]);
            to_C[j] = Math<Acc>::fma(dy_at(k, j), states[j], to_C[j]);
            if (needs_y) y[k][j] = Math<Acc>::fma(c[j], states[j], y[k][j]);
          }
        }
      }
      // Exchange between rows one apart: each keeps the state in its first register and sends the other.
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
        for (int j = 0; j < kG; ++j) {
          of_half[half][kind][j] = of_state[0][kind][j] + __shfl_xor_sync(kAllLanes, of_state[1][kind][j], kStateLanes);
        }
      }
    }
    store_sums_over_channels(of_half, t);
    __syncwarp();  // the sums overwrite arrays that the other state lanes have read
    store_sums_over_states(y, sum_input, sum_step, t, tile);
  }

  // Exchanges between rows two and four apart leave each lane with one state, half of the lanes with B and half with C.
  __device__ __forceinline__ void store_sums_over_channels(const Acc (&of_half)[2][2][kG], int t) const {
    const bool has_C = lane.row & 4;
    Group sum;
#pragma unroll
    for (int j = 0; j < kG; ++j) {
      const Acc of_B = of_half[0][0][j] + __shfl_xor_sync(kAllLanes, of_half[1][0][j], 2 * kStateLanes);
      const Acc of_C = of_half[0][1][j] + __shfl_xor_sync(kAllLanes, of_half[1][1][j], 2 * kStateLanes);
      sum.set(j, (has_C ? of_C : of_B) + __shfl_xor_sync(kAllLanes, has_C ? of_B : of_C, 4 * kStateLanes));
    }
    sum.store_shared(sums_over_channels + t * kBytes);
  }

  // Exchanges between state lanes: those one apart split the channels, those two apart the two sums, or the steps of y.
  __device__ __forceinline__ void store_sums_over_states(const Acc (&y)[kLaneChannels][kG],
                                                         const Acc (&sum_input)[kLaneChannels][kG],
                                                         const Acc (&sum_step)[kLaneChannels][kG], int t,
                                                         const Tile& tile) const {
    const bool late = lane.state_lane & 2;
    const auto both = [&](Acc kept, Acc sent, int lanes) { return kept + __shfl_xor_sync(kAllLanes, sent, lanes); };
    Group sum;
#pragma unroll
    for (int j = 0; j < kG; ++j) {
      const Acc input = both(sum_input[0][j], sum_input[1][j], 1), step = both(sum_step[0][j], sum_step[1][j], 1);
      sum.set(j, both(late ? step : input, late ? input : step, 2));
    }
    sum.store_shared(tile.group(late ? Shared::kStep : Shared::kInput, 0, t));
    if (!needs_y) return;
    Acc of_channel[kG];
#pragma unroll
    for (int j = 0; j < kG; ++j) of_channel[j] = both(y[0][j], y[1][j], 1);
    Vector<Acc, 2> sum_y;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sum_y.set(j, both(late ? of_channel[2 + j] : of_channel[j], late ? of_channel[j] : of_channel[2 + j], 2));
    }
    sum_y.store_shared(tile.group(Shared::kY, 0, t) + (late ? 2 : 0) * kBytes);
  }

  // Adds the warps' sums over channels and stores the block's partial sums.
  __device__ __forceinline__ void write_sums_over_channels(int64_t t0, int steps) const {
    if (!p.grad_B.per_step && !p.grad_C.per_step) return;
    constexpr int kPerRow = TileConfig::kTileSteps / kG;
    for (int i = threadIdx.x; i < 2 * kStates * kPerRow; i += TileConfig::kConsumers) {
      const int row = i / kPerRow, step = i % kPerRow * kG, state = row % kStates;
      if (state >= static_cast<int>(p.dstate)) continue;
      Group sum = Group::load(shared.sums + row * Shared::kSumsPitch + step);
#pragma unroll
      for (int warp = 1; warp < kConsumerWarps; ++warp) {
        const Group part = Group::load(shared.sums + warp * Shared::kSums + row * Shared::kSumsPitch + step);
#pragma unroll
        for (int j = 0; j < kG; ++j) sum.set(j, sum[j] + part[j]);
      }
      store_matrix_sum<Scalar>(p, partial_sums, at, row < kStates, state, t0 + step, steps - step, sum);
    }
  }

  __device__ __forceinline__ void scan_tile(int tile, int steps) {
    const Tile addresses(lane, shared, tile);
    const int last = (steps - 1) / kG * kG;
#pragma unroll 1
    for (int t = 0; t < last; t += kG) {
      scan_forward(t, addresses);
      if (p.dstate < kStates && !(is_finite(shared.delta(tile), lane, t) && is_finite(shared.input(tile), lane, t))) {
        zero_padding_states();
      }
    }
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) save_states_before(last, k);
    if (tile > 0) shared.sums_are_read->wait(tile - 1);
    const auto is_full = [&](int t) {
      bool full = at.channels == kTileChannels && t + kG <= steps;
      if (p.dstate < kStates) {
        full &= is_finite(shared.delta(tile), lane, t) & is_finite(shared.input(tile), lane, t) &
                is_finite(shared.dy(tile), lane, t);
      }
      return full;
    };
    if constexpr (Step::kKeepsAddresses) {
      // Full groups have a loop of their own, without other code in it.
#pragma unroll 1
      for (int t = last; t >= 0;) {
        int begin = is_full(t) ? (p.dstate < kStates ? t : 0) : t + kG;  // of the full groups down from t
        if (t < begin) {
          scan_backward<false>(t, steps - t, addresses, tile);
          t -= kG;
        }
#pragma unroll 1
        for (; t >= begin; t -= kG) scan_backward<true>(t, kG, addresses, tile);
      }
    } else {
#pragma unroll 1
      for (int t = last; t >= 0; t -= kG) {
        if (is_full(t)) {
          scan_backward<true>(t, kG, addresses, tile);
        } else {
          scan_backward<false>(t, steps - t, addresses, tile);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (at.begin < at.end) {
      // Computed on use, to save registers.
      const auto first_step = [&](int tile) { return last_tile<TileConfig>(at) - int64_t(tile) * TileConfig::kTileSteps; };
      load_saved_states(first_step(0));
      sync_roles<TileConfig>();
      for (int tile = 0; first_step(tile) >= at.begin; ++tile) {
        scan_tile(tile, at.steps_from(first_step(tile), TileConfig::kTileSteps));
        if (first_step(tile) > at.begin) load_saved_states(first_step(tile + 1));
        sync_roles<TileConfig>();
        write_sums_over_channels(first_step(tile), at.steps_from(first_step(tile), TileConfig::kTileSteps));
        shared.sums_are_read->arrive();
      }
    }
    sync_roles<TileConfig>();  // for finish() of the producers
    store_sums();
  }

  // Stores the sums over time.
  __device__ __forceinline__ void store_sums() {
    if (partial_sums.grad_A != nullptr) {
#pragma unroll
      for (int k = 0; k < kLaneChannels; ++k) {
#pragma unroll
        for (int i = 0; i < kLaneStates; ++i) grad_A[k][i] *= Step::kScaleOfGradA;
      }
      save_states(p, at, lane, grad_A, partial_sums.grad_A, at.row * plan.segments + at.segment);
    }
    if (p.grad_initial_state != nullptr && at.segment == 0 && at.initial >= 0) {
      save_states(p, at, lane, adjoint, p.grad_initial_state, at.initial);
    }
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
