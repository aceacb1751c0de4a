// Rows of B and C in shared memory, for the warp scan's forward and backward: a slice of states at a time, widened to the
// accumulation type, with the steps of a state contiguous. kVectorBytes of padding before each lane's steps put the lanes'
// vectors into different banks.
#pragma once

#include "selective_scan/cuda/warp_scan_tile.cuh"

namespace ssm_kernels::selective_scan::warp_scan {

// A slice of B or C: at most `slice_states` states of a tile's steps.
template <typename TileConfig, int slice_states>
struct MatrixSlice {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr int kVector = kVectorSize<Scalar>;
  static constexpr int kLanePitch = TileConfig::kSteps + kVectorSize<Acc>;
  static constexpr int kPitch = TileConfig::kTimeLanes * kLanePitch;

  Acc* data;

  __device__ __forceinline__ const Acc* lane(int state, int time_lane) const {
    return data + state * kPitch + time_lane * kLanePitch;
  }
  __device__ __forceinline__ Acc* at(int state, int step) const {
    return data + state * kPitch + step + step / TileConfig::kSteps * kVectorSize<Acc>;
  }

  // Called by the whole block, with the first row of its group. ascending: whether the access may be kAlongSteps or
  // kAlongChannels.
  template <bool ascending = true>
  __device__ __forceinline__ void stage(VectorAccess access, const MatrixView& view, const Scalar* row, int first_state,
                                        int64_t first_step, int states, int steps) const {
    const Scalar* const source = row + first_state * view.stride_state + first_step * view.stride_step;
    const int thread = opaque_thread();
    if (ascending && is_access(access, VectorAccess::kAlongSteps)) {
      constexpr int kRowVectors = TileConfig::kTileSteps / kVector, kRows = TileConfig::kThreads / kRowVectors;
      static_assert(TileConfig::kThreads % kRowVectors == 0, "a thread's vectors are the same steps of several states");
      const int step = thread % kRowVectors * kVector;
#pragma unroll 1
      for (int state = thread / kRowVectors; state < states; state += kRows) {
        const Scalar* const vector_source = source + state * view.stride_state + step;
        auto vector = Vector<Scalar, kVector>::zero();
        if (step + kVector <= steps) {
          vector = Vector<Scalar, kVector>::load(vector_source);
        } else {
          for (int j = 0; j < kVector; ++j) {
            if (step + j < steps) vector.set(j, vector_source[j]);
          }
        }
        Vector<Acc, kVector> wide;
#pragma unroll
        for (int j = 0; j < kVector; ++j) wide.set(j, vector.accumulate(j));
        wide.store(at(state, step));
      }
    } else if (is_access(access, VectorAccess::kDescending)) {
      constexpr int kRowVectors = TileConfig::kTileSteps / kVector;
#pragma unroll 1
      for (int i = thread; i < states * kRowVectors; i += TileConfig::kThreads) {
        const int state = i / kRowVectors, step = i % kRowVectors * kVector;
        auto vector = Vector<Scalar, kVector>::zero();
        if (step < steps) vector = Vector<Scalar, kVector>::load(source + state * view.stride_state - step);
#pragma unroll
        for (int j = 0; j < kVector; ++j) at(state, step)[kVector - 1 - j] = vector.accumulate(j);
      }
    } else if (ascending && access == VectorAccess::kAlongChannels) {
      constexpr int kRowVectors = slice_states / kVector;
      static_assert(slice_states % kVector == 0, "a slice is whole vectors of states");
      for (int i = thread; i < TileConfig::kTileSteps * kRowVectors; i += TileConfig::kThreads) {
        const int step = i / kRowVectors, state = i % kRowVectors * kVector;
        if (state >= states) continue;
        auto vector = Vector<Scalar, kVector>::zero();
        if (step < steps) vector = Vector<Scalar, kVector>::load(source + state + step * view.stride_step);
#pragma unroll
        for (int j = 0; j < kVector; ++j) *at(state + j, step) = vector.accumulate(j);
      }
    } else {
      const bool steps_are_closer = are_steps_closer(view.stride_step, view.stride_state);
      const auto stage_element = [&](int i) {
        const int state = steps_are_closer ? i / TileConfig::kTileSteps : i % slice_states;
        const int step = steps_are_closer ? i % TileConfig::kTileSteps : i / slice_states;
        if (state >= states) return;
        *at(state, step) = step < steps ? to_accumulate(source[state * view.stride_state + step * view.stride_step]) : Acc(0);
      };
      constexpr int kElements = TileConfig::kTileSteps * slice_states;
      if constexpr (ascending) {
        for (int i = thread; i < kElements; i += TileConfig::kThreads) stage_element(i);
      } else {
#pragma unroll 1
        for (int i = thread; i < kElements; i += TileConfig::kThreads) stage_element(i);
      }
    }
  }

  // The same for B and C at once, whose states are contiguous: each lane reads a row of its own, so that a thread's vectors of
  // both should be in flight together.
  __device__ __forceinline__ static void stage_states(const MatrixSlice (&slices)[2], const MatrixView* const (&views)[2],
                                                      const Scalar* const (&rows)[2], int first_state, int64_t first_step,
                                                      int states, int steps) {
    constexpr int kRowVectors = slice_states / kVector, kVectors = TileConfig::kTileSteps * kRowVectors;
    constexpr int kRounds = kVectors / TileConfig::kThreads, kAtOnce = kRounds < 2 ? kRounds : 2;
    static_assert(kVectors % TileConfig::kThreads == 0 && kRounds % kAtOnce == 0, "threads have equally many vectors");
    static_assert(TileConfig::kThreads % kRowVectors == 0, "a thread's vectors are the same states of several steps");
    const int thread = opaque_thread(), state = thread % kRowVectors * kVector;
    if (state >= states) return;
#pragma unroll
    for (int first = 0; first < kRounds; first += kAtOnce) {
      Vector<Scalar, kVector> vectors[2][kAtOnce];
      const auto for_each = [&](const auto& visit) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            visit(k, vectors[k][i], thread / kRowVectors + (first + i) * (TileConfig::kThreads / kRowVectors));
          }
        }
      };
      for_each([&](int k, auto& vector, int step) {
        vector = Vector<Scalar, kVector>::zero();
        const Scalar* const source = rows[k] + first_state + state;
        if (step < steps) vector = Vector<Scalar, kVector>::load(source + (first_step + step) * views[k]->stride_step);
      });
      for_each([&](int k, const auto& vector, int step) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) *slices[k].at(state + j, step) = vector.accumulate(j);
      });
    }
  }

  // The same of a matrix that may have shifted vectors, or be constant. Aligned vectors move as shifted ones do.
  __device__ __forceinline__ void stage_any(const SelectiveScanParams& p, const Position& position, VectorAccess access,
                                            const MatrixView& view, const Scalar* row, int first_state, int64_t first_step,
                                            int states) const {
    if (!view.per_step) return;
    const int steps = position.steps_from(first_step, TileConfig::kTileSteps);
    if (access != VectorAccess::kSingly && access != VectorAccess::kDescending) {
      const Scalar* const source = row + first_state * view.stride_state + first_step * view.stride_step;
      // Aligned rows of states are whole vectors, whose pieces end with them.
      const int states_left = static_cast<int>(p.dstate) - first_state + (access == VectorAccess::kAlongChannels ? kVector : 0);
      stage_shifted(selective_scan::is_along_channels(access), view, source, states, steps, states_left,
                    position.steps_from(first_step, 2 * TileConfig::kTileSteps));
    } else {
      stage<false>(access, view, row, first_state, first_step, states, steps);
    }
  }

 private:
  // Stages vectors that start at any element, along the states or along the steps. Pieces of a vector may reach into the states
  // and the steps that follow in its row: states_left and steps_left count these, too.
  __device__ __forceinline__ void stage_shifted(bool along_states, const MatrixView& view, const Scalar* source, int states,
                                                int steps, int states_left, int steps_left) const {
    const int thread = opaque_thread();
    if (along_states) {
      constexpr int kRowVectors = slice_states / kVector;
#pragma unroll 1
      for (int i = thread; i < TileConfig::kTileSteps * kRowVectors; i += TileConfig::kThreads) {
        const int step = i / kRowVectors, state = i % kRowVectors * kVector;
        const int count = step < steps ? (state + kVector <= states ? states_left : states) - state : 0;
        const auto vector = cuda::ShiftedLoad<Scalar, kVector>(source + state + step * view.stride_step, count).vector();
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (state + j < states) *at(state + j, step) = vector.accumulate(j);
        }
      }
    } else {
      constexpr int kRowVectors = TileConfig::kTileSteps / kVector, kRows = TileConfig::kThreads / kRowVectors;
      const int step = thread % kRowVectors * kVector;
#pragma unroll 1
      for (int state = thread / kRowVectors; state < states; state += kRows) {
        const auto vector =
            cuda::ShiftedLoad<Scalar, kVector>(source + state * view.stride_state + step, steps_left - step).vector();
        Vector<Acc, kVector> wide;
#pragma unroll
        for (int j = 0; j < kVector; ++j) wide.set(j, vector.accumulate(j));
        wide.store(at(state, step));
      }
    }
  }
};

// The value of a constant matrix for one channel and state.
template <typename Acc>
__device__ __forceinline__ Acc constant_value(const MatrixView& view, int64_t channel, int state) {
  return static_cast<const Acc*>(view.data)[channel * view.stride_channel + state * view.stride_state];
}

template <int size, typename T>
__device__ __forceinline__ Vector<T, size> fill(T value) {
  Vector<T, size> vector;
#pragma unroll
  for (int i = 0; i < size; ++i) vector.set(i, value);
  return vector;
}

// A lane's values of B or C at its steps: from shared memory, or a constant matrix's one value. Zero without a channel.
template <Pass pass, int steps, typename Acc>
__device__ __forceinline__ Vector<Acc, steps> read_matrix(const MatrixView& view, const Acc* staged, int64_t channel,
                                                          bool is_channel, int state) {
  if (pass == Pass::kPerStep || view.per_step) return Vector<Acc, steps>::load(staged);
  return fill<steps>(is_channel ? constant_value<Acc>(view, channel, state) : Acc(0));
}

}  // namespace ssm_kernels::selective_scan::warp_scan
