// Rows that start and end at any element, in shared memory of the general kernels.
//
// A team has an image of its group, or of a chunk of it, for each tensor: the columns in order, and kVectorBytes more. It
// copies the columns by cp.async as the aligned pieces of memory that hold them, and each lane reads its vectors from where
// they start in the image. Outputs take the opposite way: lanes write their vectors to an image that begins with the first
// column, in the place of an input that has been read, and the team stores the aligned pieces of the row. Its first and last
// elements, whose pieces belong in part to other rows, are stored singly, by a lane each.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/shifted_segment.cuh"
#include "norm/cuda/row_values.cuh"

namespace ssm_kernels::norm {

// The lane's place in its team, and the team's in the block.
struct TeamPlace {
  int lanes, lane, index;

  // All lanes see what the team's lanes have written to shared memory. All threads of the block call it together.
  __device__ __forceinline__ void sync() const {
    if (lanes > kWarpSize) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }
};

// Images of rows of elements of type Element, of `vectors` vectors for each lane of a team.
template <typename Element, int size, int vectors>
struct Image {
  using Values = Vector<Element, size>;
  static constexpr int kElementBytes = sizeof(Element), kLaneBytes = size * kElementBytes;
  static constexpr int kPieces = kLaneBytes / kVectorBytes, kLanePieces = vectors * kPieces;  // of a vector, of a lane
  static_assert(kVectorBytes == cuda::kCpAsyncBytes && kLaneBytes % kVectorBytes == 0, "a lane copies whole pieces");

  // Copies the `count` columns from `source` on, at most those of the team; zeros follow them.
  static __device__ __forceinline__ void copy(char* image, const Element* source, int count, const TeamPlace& team) {
    const int past = cuda::bytes_past_multiple<kVectorBytes>(source), own = team.lane * kVectorBytes;
    const char* const first = reinterpret_cast<const char*>(source) - past;
    const int valid = count > 0 ? count * kElementBytes + past : 0;
#pragma unroll
    for (int k = 0; k < kLanePieces; ++k) {
      const int position = own + k * team.lanes * kVectorBytes;
      cuda::cp_async(image + position, first + position, max(0, min(valid - position, kVectorBytes)));
    }
    const int end = kLanePieces * team.lanes * kVectorBytes;
    if (team.lane == 0 && past != 0) cuda::cp_async(image + end, first + end, max(0, min(valid - end, kVectorBytes)));
  }
  // The lane's vectors as copied from an address that is `past` bytes past a multiple of 16, when all copies of the team are
  // visible. `past` is the same for the team.
  static __device__ __forceinline__ void load(Values (&values)[vectors], const char* image, int past, const TeamPlace& team) {
    const char* const own = image + team.lane * kLaneBytes;
    if (team.lanes < kWarpSize) {
      // Teams of a warp differ in `past`.
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        values[i] = cuda::load_shifted_shared<Element, size>(own + i * team.lanes * kLaneBytes, past);
      }
      return;
    }
    const unsigned int selected = cuda::select_half_words(past);
    cuda::visit_index<kVectorBytes / 4>(past / 4, [&](auto skipped) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const uint4* const source = reinterpret_cast<const uint4*>(own + i * team.lanes * kLaneBytes);
        uint4 pieces[kPieces + 1], joined[kPieces];
#pragma unroll
        for (int k = 0; k <= kPieces; ++k) pieces[k] = source[k];
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          joined[k] = cuda::join_pieces<Element, decltype(skipped)::value>(pieces[k], pieces[k + 1], selected);
        }
        memcpy(&values[i], joined, sizeof(joined));
      }
    });
  }
  // Vector i of the lane in an image that begins with the first column.
  static __device__ __forceinline__ Element* own(char* image, int i, const TeamPlace& team) {
    return reinterpret_cast<Element*>(image + (i * team.lanes + team.lane) * kLaneBytes);
  }
  static __device__ __forceinline__ void store_own(const Values (&values)[vectors], char* image, const TeamPlace& team) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) values[i].store(own(image, i, team));
  }
  // Stores the first `count` columns, at most those of the team, of what its lanes have written to an image.
  static __device__ __forceinline__ void store(Element* target, const char* image, int count, const TeamPlace& team) {
    constexpr int kPieceElements = kVectorBytes / kElementBytes;
    if (count <= 0) return;
    // Bytes before the first multiple of 16 in the row, and after it.
    const int skipped = -cuda::bytes_past_multiple<kVectorBytes>(target) & (kVectorBytes - 1);
    const int bytes = count * kElementBytes, inner = bytes - skipped;
    char* const first = reinterpret_cast<char*>(target);
    const unsigned int selected = cuda::select_half_words(skipped);
    const auto store_pieces = [&](const auto& join) {
#pragma unroll
      for (int k = 0; k < kLanePieces; ++k) {
        const int position = (team.lane + k * team.lanes) * kVectorBytes;
        if (inner >= position + kVectorBytes) join(image + position, first + skipped + position);
      }
    };
    if (team.lanes < kWarpSize) {
      store_pieces([&](const char* source, char* piece) {
        cuda::load_shifted_shared<Element, kPieceElements>(source, skipped).store(reinterpret_cast<Element*>(piece));
      });
    } else {
      cuda::visit_index<kVectorBytes / 4>(skipped / 4, [&](auto index) {
        store_pieces([&](const char* source, char* piece) {
          const uint4* const pieces = reinterpret_cast<const uint4*>(source);
          *reinterpret_cast<uint4*>(piece) = cuda::join_pieces<Element, decltype(index)::value>(pieces[0], pieces[1], selected);
        });
      });
    }
    const int last = inner < 0 ? bytes : bytes - inner % kVectorBytes;
    for (int i = team.lane; i < 2 * kPieceElements; i += team.lanes) {
      const bool is_first = i < kPieceElements;
      const int position = i * kElementBytes + (is_first ? 0 : last - kVectorBytes);
      if (position >= (is_first ? min(skipped, bytes) : bytes)) continue;
      *reinterpret_cast<Element*>(first + position) = *reinterpret_cast<const Element*>(image + position);
    }
  }
};

// The images of one tensor, of type Scalar or of the accumulation type.
template <typename Scalar>
class StagedTensor {
 public:
  using Acc = AccumulateType<Scalar>;
  static constexpr int kSize = kVectorSize<Scalar>, kVectors = kVectorsOfThread<Scalar>;
  using Narrow = Image<Scalar, kSize, kVectors>;
  using Wide = Image<Acc, kSize, kVectors>;

  __device__ __forceinline__ StagedTensor(char* image, bool is_accumulate)
      : is_wide_(!std::is_same_v<Scalar, Acc> && is_accumulate), image_(image) {}

  __device__ __forceinline__ void copy(const void* data, int64_t offset, int count, const TeamPlace& team) const {
    visit([&](auto image, auto* element) { image.copy(image_, static_cast<decltype(element)>(data) + offset, count, team); });
  }
  __device__ __forceinline__ void load(const void* data, int64_t offset, Acc (&values)[kVectors][kSize],
                                       const TeamPlace& team) const {
    visit([&](auto image, auto* element) {
      typename decltype(image)::Values loaded[kVectors];
      image.load(loaded, image_, past(static_cast<decltype(element)>(data) + offset), team);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) to_values(loaded[i], values[i]);
    });
  }
  __device__ __forceinline__ void load_narrow(const void* data, int64_t offset, Vector<Scalar, kSize> (&values)[kVectors],
                                              const TeamPlace& team) const {
    Narrow::load(values, image_, past(static_cast<const Scalar*>(data) + offset), team);
  }
  __device__ __forceinline__ void own(int i, Acc (&values)[kSize], const TeamPlace& team) const {
    visit([&](auto image, auto* element) {
      to_values(Vector<std::decay_t<decltype(*element)>, kSize>::load(image.own(image_, i, team)), values);
    });
  }
  __device__ __forceinline__ void replace(int i, const Acc (&values)[kSize], const TeamPlace& team) const {
    visit([&](auto image, auto* element) {
      from_values<std::decay_t<decltype(*element)>>(values).store(image.own(image_, i, team));
    });
  }
  __device__ __forceinline__ void store(void* data, int64_t offset, int count, const TeamPlace& team) const {
    visit([&](auto image, auto* element) {
      image.store(static_cast<std::decay_t<decltype(*element)>*>(data) + offset, image_, count, team);
    });
  }

 private:
  static __device__ __forceinline__ int past(const void* source) { return cuda::bytes_past_multiple<kVectorBytes>(source); }
  template <typename Function>
  __device__ __forceinline__ void visit(const Function& function) const {
    if constexpr (!std::is_same_v<Scalar, Acc>) {
      if (is_wide_) return function(Wide(), static_cast<const Acc*>(nullptr));
    }
    function(Narrow(), static_cast<const Scalar*>(nullptr));
  }

  bool is_wide_;
  char* image_;
};

}  // namespace ssm_kernels::norm
