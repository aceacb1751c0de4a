// Rows of B and C of the sequential scan on the device, for forward and backward.
#pragma once

#include "cuda/shifted_io.cuh"
#include "selective_scan/cuda/position.cuh"
#include "selective_scan/cuda/sequential.h"

namespace ssm_kernels::selective_scan::sequential {

// A vector whose first `valid` elements exist, `stride` apart, or contiguous and aligned if `is_vector`. The others are zeros.
template <typename Scalar, int size>
__device__ __forceinline__ Vector<Scalar, size> load_vector(const Scalar* source, int64_t stride, bool is_vector, int valid) {
  auto vector = Vector<Scalar, size>::zero();
  if (is_vector && valid == size) {
    vector = Vector<Scalar, size>::load_once(source);
  } else {
#pragma unroll
    for (int j = 0; j < size; ++j) {
      if (j < valid) vector.set(j, source[j * stride]);
    }
  }
  return vector;
}

// B and C at the steps of a tile, in shared memory, with the steps of a state contiguous. Producers move them in vectors along
// the steps, shifted or not, descending or not, or along the states, shifted or not.
template <typename TileConfig>
struct Matrices {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr int kVector = kVectorSize<Scalar>;
  static constexpr int kPitch = TileConfig::kTileSteps + kGroupSteps;
  static constexpr int kCapacity = kStates * kPitch;  // of one matrix
  static constexpr int kPerMatrix = kStates * TileConfig::kTileSteps / kVector;
  static constexpr int kCount = 2 * kPerMatrix / TileConfig::kProducers;  // vectors of a thread
  static constexpr int kPerRow = TileConfig::kTileSteps / kVector, kPerStep = kStates / kVector;
  // Vectors of a raw matrix and of both; as in ThreadVectors. A matrix has kStates rows of steps or kTileSteps rows of states.
  static constexpr int kRawMatrix = kPerMatrix + (kStates > TileConfig::kTileSteps ? kStates : TileConfig::kTileSteps);
  static constexpr int kStage = 2 * kRawMatrix;
  static_assert(kPerMatrix % kWarpSize == 0, "a warp reads from one matrix at a time");
  static_assert(2 * kPerMatrix % TileConfig::kProducers == 0, "threads share the matrices evenly");
  static_assert(kWarpSize % kPerRow == 0 && kWarpSize % kPerStep == 0, "a warp copies whole rows, and reads no others");
  static_assert(TileConfig::kTileSteps * sizeof(Scalar) % kVectorBytes == 0, "a vector has the same shift in all tiles");
  using Raw = Vector<Scalar, kVector>;

  Acc *B, *C;

  // Vector i of a producer thread. Its index is opaque and computed once for each use.
  struct ThreadVector {
    int index;  // among the vectors of both matrices
    bool is_B;
    VectorAccess access;

    __device__ __forceinline__ ThreadVector(const ScanPlan& plan, int i)
        : index(i * TileConfig::kProducers + opaque_thread() - TileConfig::kConsumers) {
      if constexpr (kPerMatrix % TileConfig::kProducers == 0) {
        is_B = i < kPerMatrix / TileConfig::kProducers;
      } else {
        is_B = index < kPerMatrix;
      }
      access = is_B ? plan.B : plan.C;
    }
    // The first state and step.
    __device__ __forceinline__ int state() const {
      const int vector = index % kPerMatrix;
      return is_along_channels(access) ? vector % kPerStep * kVector : vector / kPerRow;
    }
    __device__ __forceinline__ int step() const {
      const int vector = index % kPerMatrix;
      return is_along_channels(access) ? vector / kPerStep : vector % kPerRow * kVector;
    }
    // The place of the first element, from the beginning of B on; C follows.
    __device__ __forceinline__ int target() const { return (is_B ? 0 : kCapacity) + state() * kPitch + step(); }
    // The vectors of a row in memory.
    __device__ __forceinline__ int row_vectors() const { return is_along_channels(access) ? kPerStep : kPerRow; }
    __device__ __forceinline__ bool is_last_in_row() const { return index % row_vectors() == row_vectors() - 1; }
    // The place among the raw matrices in shared memory; of a shifted vector, the block that holds its first byte. C begins
    // after the memory of a shifted B, whatever the access of either.
    __device__ __forceinline__ int place() const {
      const int vector = index % kPerMatrix;
      return (is_B ? 0 : kRawMatrix) + vector + (is_shifted(access) ? vector / row_vectors() : 0);
    }
  };

  // The address of this thread's vector i in the tile that starts at step 0.
  __device__ __forceinline__ static const Scalar* address(const SelectiveScanParams& p, const ScanPlan& plan,
                                                          const Scalar* B_row, const Scalar* C_row, int i) {
    const ThreadVector vector(plan, i);
    return (vector.is_B ? B_row : C_row) + vector.state() * (vector.is_B ? p.B.stride_state : p.C.stride_state) +
           vector.step() * (vector.is_B ? p.B.stride_step : p.C.stride_step);
  }

  // From one element of a vector to the next.
  __device__ __forceinline__ static int64_t stride(const SelectiveScanParams& p, const ThreadVector& vector) {
    const MatrixView& view = vector.is_B ? p.B : p.C;
    return is_along_channels(vector.access) ? view.stride_state : view.stride_step;
  }
  // How many elements exist from a vector's first on: at most its own, or those of a shifted row up to step `steps` of the
  // tile; none if it is not positive.
  __device__ __forceinline__ static int left(const SelectiveScanParams& p, const ThreadVector& vector, int steps) {
    const int states = static_cast<int>(p.dstate);
    const bool along_states = is_along_channels(vector.access);
    if (states == kStates && steps >= TileConfig::kTileSteps && vector.access != VectorAccess::kShifted) return kVector;
    const int n = vector.state(), t = vector.step();
    if (along_states) return t < steps ? states - n : -kVector;
    return n < states ? steps - t : -kVector;
  }

  // As ThreadVectors::copy_async, get_raw and load, for one vector. States and steps that do not exist are zeros.
  __device__ __forceinline__ static void copy_async(const SelectiveScanParams& p, const ThreadVector& vector,
                                                    const Scalar* source, int steps, Raw* stage) {
    constexpr int kBytes = sizeof(Scalar);
    const int left = Matrices::left(p, vector, steps), valid = max(0, min(left, kVector));
    Raw* const target = stage + vector.place();
    if (vector.access == VectorAccess::kSingly) {
      *target = load_vector<Scalar, kVector>(source, stride(p, vector), false, valid);
    } else if (is_shifted(vector.access)) {
      cuda::cp_async_block<false>(target, source, left * kBytes);
      if (vector.is_last_in_row()) cuda::cp_async_block<true>(target + 1, source, left * kBytes);
    } else {
      cuda::cp_async(target, source, valid * kBytes);
    }
  }
  __device__ __forceinline__ static Raw get_raw(VectorAccess access, const Scalar* source, const Raw* staged) {
    if (!is_shifted(access)) return Raw::load(reinterpret_cast<const Scalar*>(staged));
    const int past = cuda::bytes_past_multiple<kVectorBytes>(source);
    return cuda::load_shifted_shared<Scalar, kVector>(reinterpret_cast<const char*>(staged), past);
  }
  // Whether a vector is loaded in pieces. They leave any value in elements that do not exist: in steps, which no one reads, but
  // not in states, which consumers add up.
  __device__ __forceinline__ static bool has_pieces(const ThreadVector& vector, int left) {
    return vector.access == VectorAccess::kShifted || (vector.access == VectorAccess::kShiftedChannels && left >= kVector);
  }
  // The loads of a shifted vector are still in flight when this returns, those of others need not be complete.
  using Pieces = cuda::ShiftedPieces<Scalar, kVector>;
  __device__ __forceinline__ static Pieces load_pieces(const SelectiveScanParams& p, const ThreadVector& vector,
                                                       const Scalar* source, int steps) {
    const int left = Matrices::left(p, vector, steps);
    if (has_pieces(vector, left)) return Pieces(source, left);
    return Pieces(
        load_vector<Scalar, kVector>(source, stride(p, vector), vector.access != VectorAccess::kSingly, min(left, kVector)));
  }
  __device__ __forceinline__ static Raw load(const SelectiveScanParams& p, const ThreadVector& vector, const Scalar* source,
                                             int steps) {
    const int left = Matrices::left(p, vector, steps);
    if (has_pieces(vector, left)) return Pieces(source, left).vector();
    return load_vector<Scalar, kVector>(source, stride(p, vector), vector.access != VectorAccess::kSingly, min(left, kVector));
  }

  // Widens a vector, which is in the order of memory. `target` is its first element's place.
  __device__ __forceinline__ static void put(Acc* target, VectorAccess access, const Raw& raw) {
    const bool descends = access == VectorAccess::kDescending;
    if (is_along_channels(access) || descends) {
      const int step = descends ? -1 : kPitch;
      if (descends) target += kVector - 1;
#pragma unroll
      for (int j = 0; j < kVector; ++j) target[j * step] = raw.accumulate(j);
    } else {
      Vector<Acc, kVector> wide;
#pragma unroll
      for (int j = 0; j < kVector; ++j) wide.set(j, raw.accumulate(j));
      wide.store_shared(cuda::shared_address(target));
    }
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
