// Selective scan, forward, on CUDA, sequential: the consumer warps. sequential_fwd.cuh describes the whole kernel.
//
// A consumer thread holds kLaneStates states of two channels in registers. It loads delta, the input and its rows of B and C
// for kGroupSteps steps at a time, advances its states through these steps, and stores its partial sums of <C_t, h_t>.
#pragma once

#include "selective_scan/cuda/sequential_fwd_shared.cuh"
#include "selective_scan/cuda/sequential_step.cuh"
#include "selective_scan/cuda/shared_arrays.cuh"
#include "selective_scan/cuda/states.cuh"
#include "selective_scan/cuda/transition.cuh"

namespace ssm_kernels::selective_scan::sequential {

// delta, inputs, B and C -> partial outputs and states.
template <typename TileConfig, typename Method>
struct FwdConsumer {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = FwdShared<TileConfig>;
  using Step = sequential::Step<Method, Scalar>;
  using Group = Vector<Acc, kGroupSteps>;
  static constexpr int kBytes = sizeof(Acc);

  const SelectiveScanFwdParams& p;
  const Method method;
  const Shared& shared;
  const Position& at;
  ConsumerLane<TileConfig, false> lane;
  int dstate;
  // Zero for channels and states that do not exist.
  typename Step::Rate rates[kLaneChannels][kLaneStates];
  Acc h[kLaneChannels][kLaneStates];
  // Methods that read two samples need B before the next step, and Step::kConstant.
  Acc b_before[Method::kUsesPreviousInput ? kLaneStates : 1], constant;

  __device__ __forceinline__ FwdConsumer(const SelectiveScanFwdParams& p_, const Method& method_, const Shared& shared_)
      : p(p_), method(method_), shared(shared_), at(*shared_.position), dstate(static_cast<int>(p_.dstate)) {
    for_each_state(p, at, lane, [&](int k, int i, int channel, int state, bool exists) {
      rates[k][i] = typename Step::Rate(0);
      h[k][i] = 0;
      if (!exists) return;
      const int64_t d = at.first_channel + channel;
      const Acc rate = [&] {
        if constexpr (Method::kUsesPreviousInput) return load_bounded_A<Acc>(p, d, state, Step::kLargestA);
        return load_state<Acc>(p.A, 0, d, state);
      }();
      rates[k][i] = typename Step::Rate(rate * Step::kScaleOfA);
      h[k][i] = load_optional_state<Acc>(p.initial_state, at.initial, d, state);
    });
  }

  // To be called before run() for methods that read two samples.
  template <typename ReadB>
  __device__ __forceinline__ void set_samples_before(const ReadB& read_B) {
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) b_before[i] = lane.state(i) < dstate && at.end > 0 ? read_B(lane.state(i)) : Acc(0);
    // From the thread's number, which has no sign: a constant would be moved to a register at each use.
    constant = __uint_as_float(__float_as_uint(Step::kConstant) + (static_cast<uint32_t>(opaque_thread()) >> 31));
  }

  __device__ __forceinline__ void save(void* array, int64_t row) const { save_states(p, at, lane, h, array, row); }

  // The lane's part of a tile in shared memory.
  struct Tile {
    LaneRows<TileConfig> deltas, parts;
    uint32_t matrices;  // B's row of the first state
    int to_previous;    // the bytes from delta to the factors of B_{t-1}

    __device__ __forceinline__ Tile(const ConsumerLane<TileConfig, false>& lane, const Shared& shared, int tile)
        : deltas(lane, shared.delta(tile)),
          parts(lane, shared.part(tile, lane.state_lane)),
          matrices(cuda::opaque_shared_address(shared.matrices(tile).B + lane.state(0) * Matrices<TileConfig>::kPitch)),
          to_previous(static_cast<int>(shared.previous(tile).data - shared.delta(tile).data) * kBytes) {}
  };

  // Scans a group of steps; if not full, only its first `count` steps and the states that exist. Padding with zeros would not
  // do: a step size of zero times an infinite A is NaN, and so is a zero of B times an infinite input.
  template <bool is_full>
  __device__ __forceinline__ void scan_group(int t, int count, const Tile& tile) {
    Group delta[kLaneChannels], v[kLaneChannels], b[kLaneStates], c[kLaneStates];
    [[maybe_unused]] Group w[kLaneChannels];
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) {
      delta[k] = Group::load_shared(tile.deltas.at(k, t));
      v[k] = Group::load_shared(tile.deltas.at(k, t) + Shared::kArray * kBytes);
      if constexpr (Method::kUsesPreviousInput) w[k] = Group::load_shared(tile.deltas.at(k, t) + tile.to_previous);
    }
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) {
      const uint32_t row = tile.matrices + (i * kStateLanes * Matrices<TileConfig>::kPitch + t) * kBytes;
      b[i] = Group::load_shared(row);
      c[i] = Group::load_shared(row + Matrices<TileConfig>::kCapacity * kBytes);
    }
    Acc y[kLaneChannels][kGroupSteps];
#pragma unroll
    for (int j = 0; j < kGroupSteps; ++j) {
#pragma unroll
      for (int k = 0; k < kLaneChannels; ++k) {
        y[k][j] = 0;
        if (!is_full && j >= count) continue;
        const auto input = [&] {
          if constexpr (Method::kUsesPreviousInput) {
            return typename Step::Advance(method, delta[k][j], v[k][j], w[k][j], constant);
          } else {
            return make_input<Step>(method, delta[k][j], v[k][j]);
          }
        }();
#pragma unroll
        for (int i = 0; i < kLaneStates; ++i) {
          if (!is_full && lane.state(i) >= dstate) continue;
          if constexpr (Method::kUsesPreviousInput) {
            const Acc earlier = j > 0 ? b[i][j > 0 ? j - 1 : 0] : b_before[i];
            h[k][i] = input(rates[k][i], h[k][i], b[i][j], earlier);
          } else {
            h[k][i] = Step(input, rates[k][i]).advance(input, rates[k][i], h[k][i], b[i][j]);
          }
          y[k][j] = is_full && i == 0 ? c[i][j] * h[k][i] : Math<Acc>::fma(c[i][j], h[k][i], y[k][j]);
        }
      }
    }
    if constexpr (Method::kUsesPreviousInput) {
#pragma unroll
      for (int i = 0; i < kLaneStates; ++i) b_before[i] = b[i][kGroupSteps - 1];
    }
    __syncwarp();  // partial outputs overwrite delta and the input
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) vector_of(y[k]).store_shared(tile.parts.at(k, t));
  }

  __device__ __forceinline__ void scan_tile(int tile, int steps) {
    const Tile addresses(lane, shared, tile);
    // Full groups have a loop of their own, without other code in it.
#pragma unroll 1
    for (int t = 0; t < steps;) {
      int end = steps / kGroupSteps * kGroupSteps;  // of the full groups from t on
      if (dstate < kStates) {
        bool finite = is_finite(shared.input(tile), lane, t);
        if (!Step::kInputHasDelta) finite &= is_finite(shared.delta(tile), lane, t);
        if (Method::kUsesPreviousInput) finite &= is_finite(shared.previous(tile), lane, t);
        end = min(end, finite ? t + kGroupSteps : t);
      }
      if (t >= end) {
        scan_group<false>(t, steps - t, addresses);
        t += kGroupSteps;
      }
#pragma unroll 2
      for (; t < end; t += kGroupSteps) scan_group<true>(t, kGroupSteps, addresses);
    }
  }

  __device__ __forceinline__ void run() {
    constexpr int64_t kChunk = chunk_length(kStates);
    if (p.chunk_states != nullptr && !p.is_packed()) save(p.chunk_states, at.chunk_states);
    int tile = 0;
    if (at.end > 0) sync_roles<TileConfig>();
    for (int64_t t0 = 0; t0 < at.end; t0 += TileConfig::kTileSteps, ++tile) {
      const int64_t t_end = min(t0 + TileConfig::kTileSteps, at.end);
      scan_tile(tile, static_cast<int>(t_end - t0));
      sync_roles<TileConfig>();
      if (p.chunk_states != nullptr && (t_end % kChunk == 0 || t_end == at.end)) {
        const int64_t boundary = (t_end + kChunk - 1) / kChunk;
        if (boundary < at.saved_states) save(p.chunk_states, at.chunk_states + boundary);
      }
    }
    if (at.last >= 0) save(p.last_state, at.last);
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
