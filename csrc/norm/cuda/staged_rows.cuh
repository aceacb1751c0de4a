// Rows that start and end at any element, in shared memory of the general kernels.
//
// A run is the lanes of a warp that belong to one team: the whole warp or, of a smaller team, all of its lanes. Vector i of a
// run's lanes is contiguous in a row. The run copies it by cp.async as the aligned pieces of memory that hold it, which take 16
// bytes more than the vectors, and each lane moves its own vector to its place. Outputs take the opposite way: lanes write
// their vectors to the place of an input that has been read, and the run stores the aligned pieces of the row. Its first and
// last elements, whose pieces belong in part to other runs, are stored singly, by a lane each.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/device.cuh"

namespace ssm_kernels::norm {

// The lane's run.
struct Run {
  int lanes, lane;  // in the run
  int index;        // of the run in the warp

  __device__ __forceinline__ explicit Run(int team_lanes) {
    lanes = min(team_lanes, kWarpSize);
    lane = threadIdx.x & (lanes - 1);
    index = threadIdx.x % kWarpSize / lanes;
  }
};

// The vectors of a warp's lanes in rows of elements of type Element. A place is the lane's vector i in shared memory; vector
// i + 1 follows vector_bytes() later (launch.h). `left`: how many columns the group has from the lane's vector on, possibly
// fewer than 0. The warp calls copy() and store() together.
template <typename Element, int size>
struct StagedVectors {
  using Values = Vector<Element, size>;
  static constexpr int kElementBytes = sizeof(Element), kLaneBytes = size * kElementBytes;
  static constexpr int kPieces = kLaneBytes / kVectorBytes, kPieceElements = kVectorBytes / kElementBytes;
  static_assert(kVectorBytes == cuda::kCpAsyncBytes && kLaneBytes % kVectorBytes == 0, "a lane copies whole pieces");

  // The place of vector 0 in a warp's memory for the tensor.
  static __device__ __forceinline__ char* place(char* memory, const Run& run) {
    return memory + threadIdx.x % kWarpSize * kLaneBytes + run.index * kVectorBytes;
  }
  static __device__ __forceinline__ void copy(char* place, const Element* source, int left, const Run& run) {
    const int past = cuda::bytes_past_multiple<kVectorBytes>(source);
    const char* const first = reinterpret_cast<const char*>(source) - past;
    const int valid = min(left, 2 * size) * kElementBytes + past;
    const auto copy_piece = [&](int k) {
      cuda::cp_async(place + k * kVectorBytes, first + k * kVectorBytes, max(0, min(valid - k * kVectorBytes, kVectorBytes)));
    };
#pragma unroll
    for (int k = 0; k < kPieces; ++k) copy_piece(k);
    if (run.lane == run.lanes - 1 && past != 0) copy_piece(kPieces);
  }
  // The vector as copied from an address that is `past` bytes past a multiple of 16, when all copies of the run are visible;
  // zeros beyond the group.
  static __device__ __forceinline__ Values load(const char* place, int past) {
    return cuda::load_shifted_shared<Element, size>(place, past);
  }
  static __device__ __forceinline__ Values load(const char* place, const Element* source) {
    return load(place, cuda::bytes_past_multiple<kVectorBytes>(source));
  }
  // Once the lane has written its vector to its place, or moved it there.
  static __device__ __forceinline__ Values own(const char* place) {
    return Values::load(reinterpret_cast<const Element*>(place));
  }
  static __device__ __forceinline__ void replace(char* place, const Values& values) {
    values.store(reinterpret_cast<Element*>(place));
  }
  // Stores what all lanes of the run have written to their places.
  static __device__ __forceinline__ void store(Element* target, const char* place, int left, const Run& run) {
    // Bytes of the run before the lane's vector, in the row, and before the first multiple of 16 bytes.
    const int before = run.lane * kLaneBytes;
    const int count = min(min(left, kWarpSize * size) * kElementBytes + before, run.lanes * kLaneBytes);
    const int skipped = -cuda::bytes_past_multiple<kVectorBytes>(target) & (kVectorBytes - 1), inner = count - skipped;
    char* const first = reinterpret_cast<char*>(target) - before;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      if (inner < before + (k + 1) * kVectorBytes) continue;
      const auto piece = cuda::load_shifted_shared<Element, kPieceElements>(place + k * kVectorBytes, skipped);
      piece.store(reinterpret_cast<Element*>(first + before + skipped + k * kVectorBytes));
    }
    const int last = inner < 0 ? count : count - inner % kVectorBytes;
    for (int i = run.lane; i < 2 * kPieceElements; i += run.lanes) {
      const bool is_first = i < kPieceElements;
      const int position = i * kElementBytes + (is_first ? 0 : last - kVectorBytes);
      if (position >= (is_first ? min(skipped, count) : count)) continue;
      *reinterpret_cast<Element*>(first + position) = *reinterpret_cast<const Element*>(place - before + position);
    }
  }
};

// One tensor of a warp's rows, or a parameter, of type Scalar or of the accumulation type.
template <typename Scalar>
class StagedTensor {
 public:
  using Acc = AccumulateType<Scalar>;
  static constexpr int kSize = kVectorSize<Scalar>;
  using Narrow = StagedVectors<Scalar, kSize>;
  using Wide = StagedVectors<Acc, kSize>;

  // Takes the memory of its vectors.
  __device__ __forceinline__ StagedTensor(char*& memory, int vectors, bool is_accumulate, const Run& run)
      : is_wide_(!std::is_same_v<Scalar, Acc> && is_accumulate),
        stride_(vector_bytes(is_wide_ ? Wide::kLaneBytes : Narrow::kLaneBytes, run.lanes)),
        place_(is_wide_ ? Wide::place(memory, run) : Narrow::place(memory, run)) {
    memory += vectors * stride_;
  }

  __device__ __forceinline__ void copy(int i, const void* data, int64_t offset, int left, const Run& run) const {
    visit([&](auto vectors, auto* element) { vectors.copy(at(i), static_cast<decltype(element)>(data) + offset, left, run); });
  }
  // The vector as copied.
  __device__ __forceinline__ void load(int i, const void* data, int64_t offset, Acc (&values)[kSize]) const {
    visit([&](auto vectors, auto* element) {
      to_values(vectors.load(at(i), static_cast<decltype(element)>(data) + offset), values);
    });
  }
  // Moves the lane's vectors, whose first one has been copied from `offset`, to their places. The warp calls the function
  // together.
  template <int count>
  __device__ __forceinline__ void align(const void* data, int64_t offset) const {
    visit([&](auto vectors, auto* element) {
      using Vectors = decltype(vectors);
      // All vectors of a lane start equally far from multiples of 16 bytes.
      const int past = cuda::bytes_past_multiple<kVectorBytes>(static_cast<decltype(element)>(data) + offset);
      if (!__any_sync(kAllLanes, past != 0)) return;
      typename Vectors::Values moved[count];
#pragma unroll
      for (int i = 0; i < count; ++i) moved[i] = Vectors::load(at(i), past);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < count; ++i) Vectors::replace(at(i), moved[i]);
    });
  }
  __device__ __forceinline__ void own(int i, Acc (&values)[kSize]) const {
    visit([&](auto vectors, auto*) { to_values(vectors.own(at(i)), values); });
  }
  __device__ __forceinline__ void replace(int i, const Acc (&values)[kSize]) const {
    visit([&](auto vectors, const auto* element) {
      vectors.replace(at(i), from_values<std::decay_t<decltype(*element)>>(values));
    });
  }
  __device__ __forceinline__ void store(int i, void* data, int64_t offset, int left, const Run& run) const {
    visit([&](auto vectors, const auto* element) {
      using Element = std::decay_t<decltype(*element)>;
      vectors.store(static_cast<Element*>(data) + offset, at(i), left, run);
    });
  }
  __device__ __forceinline__ bool is_wide() const { return is_wide_; }
  // The same in a stage that begins `bytes` later.
  __device__ __forceinline__ StagedTensor in_stage(int bytes) const {
    StagedTensor moved = *this;
    moved.place_ += bytes;
    return moved;
  }
  __device__ __forceinline__ Vector<Scalar, kSize> load_narrow(int i, const void* data, int64_t offset) const {
    return Narrow::load(at(i), static_cast<const Scalar*>(data) + offset);
  }

 private:
  __device__ __forceinline__ char* at(int i) const { return place_ + i * stride_; }
  template <typename Function>
  __device__ __forceinline__ void visit(const Function& function) const {
    if constexpr (!std::is_same_v<Scalar, Acc>) {
      if (is_wide_) return function(Wide(), static_cast<const Acc*>(nullptr));
    }
    function(Narrow(), static_cast<const Scalar*>(nullptr));
  }

  bool is_wide_;
  int stride_;
  char* place_;
};

}  // namespace ssm_kernels::norm
