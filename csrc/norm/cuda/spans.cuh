// Spans of memory that start and end at any element, as images in shared memory.
//
// The columns of a group, or of all groups of a warp's teams where they follow each other in memory, are one span. Several
// lanes copy it as the aligned pieces of 16 bytes that hold it. An image has the pieces in the same order, so that an element
// is as far past a multiple of 16 bytes as in global memory. A lane reads and writes its vectors as words, wherever they start;
// a span of outputs leaves its image as whole pieces, without another move. Elements of pieces that belong in part to other
// spans are stored singly.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/device.cuh"

namespace ssm_kernels::norm {

// A lane's place among those that move a span.
struct SpanLane {
  int index, count;
};

template <typename Element>
struct Span {
  static_assert(sizeof(Element) == 2 || sizeof(Element) == 4, "words hold one or two elements");
  static_assert(kVectorBytes == cuda::kCpAsyncBytes, "a piece takes one copy");
  static constexpr int kElementBytes = sizeof(Element), kPieceElements = kVectorBytes / kElementBytes;
  static constexpr bool kIsHalfWord = kElementBytes == 2;

  // Starts the copies of the `count` elements from `source` on. The image begins with the piece that holds the first one. Of
  // memory after the last element nothing is read; memory before the first one is read in its 16 bytes.
  static __device__ __forceinline__ void copy(char* image, const Element* source, int count, SpanLane lane) {
    const int past = cuda::bytes_past_multiple<kVectorBytes>(source);
    const int bytes = count > 0 ? past + count * kElementBytes : 0;
    const char* const first = reinterpret_cast<const char*>(source) - past;
    for (int position = lane.index * kVectorBytes; position < bytes; position += lane.count * kVectorBytes) {
      cuda::cp_async(image + position, first + position, min(bytes - position, kVectorBytes));
    }
  }

  // Stores `count` elements from `target` on. In the image they are as far past a multiple of 16 bytes as there.
  static __device__ __forceinline__ void store(Element* target, const char* image, int count, SpanLane lane) {
    const int past = cuda::bytes_past_multiple<kVectorBytes>(target);
    const int bytes = count > 0 ? past + count * kElementBytes : 0, whole = bytes & -kVectorBytes;
    char* const first = reinterpret_cast<char*>(target) - past;
    for (int position = lane.index * kVectorBytes; position < whole; position += lane.count * kVectorBytes) {
      if (position >= past) *reinterpret_cast<uint4*>(first + position) = *reinterpret_cast<const uint4*>(image + position);
    }
    // The first piece unless it is whole, and the last one.
    for (int i = lane.index; i < 2 * kPieceElements; i += lane.count) {
      const bool is_first = i < kPieceElements;
      const int position = (is_first ? i : i - kPieceElements) * kElementBytes + (is_first ? 0 : whole);
      const bool is_own = is_first ? past != 0 && position >= past : whole != 0 || past == 0;
      if (is_own && position < bytes) {
        *reinterpret_cast<Element*>(first + position) = *reinterpret_cast<const Element*>(image + position);
      }
    }
  }

  // A vector that starts at any element of an image. Its last word may hold another element, too.
  template <int size>
  static __device__ __forceinline__ Vector<Element, size> load(const char* first) {
    constexpr int kWords = size * kElementBytes / 4;
    const int past = kIsHalfWord ? cuda::bytes_past_multiple<4>(first) : 0;
    const uint32_t* const source = reinterpret_cast<const uint32_t*>(first - past);
    uint32_t words[kWords + 1];
#pragma unroll
    for (int k = 0; k < kWords + (kIsHalfWord ? 1 : 0); ++k) words[k] = source[k];
    if constexpr (kIsHalfWord) {
      const unsigned int selected = past != 0 ? 0x5432 : 0x3210;
#pragma unroll
      for (int k = 0; k < kWords; ++k) words[k] = __byte_perm(words[k], words[k + 1], selected);
    }
    Vector<Element, size> vector;
    memcpy(&vector, words, sizeof(vector));
    return vector;
  }

  template <int size>
  static __device__ __forceinline__ void write(char* first, const Vector<Element, size>& vector) {
    constexpr int kWords = size * kElementBytes / 4;
    uint32_t words[kWords];
    memcpy(words, &vector, sizeof(vector));
    if constexpr (kIsHalfWord) {
      const bool is_odd = cuda::bytes_past_multiple<4>(first) != 0;
      const unsigned int selected = is_odd ? 0x5432 : 0x3210;
      uint32_t* const target = reinterpret_cast<uint32_t*>(first + (is_odd ? kElementBytes : 0));
#pragma unroll
      for (int k = 0; k < kWords - 1; ++k) target[k] = __byte_perm(words[k], words[k + 1], selected);
      if (is_odd) {
        *reinterpret_cast<uint16_t*>(first) = static_cast<uint16_t>(words[0]);
        *reinterpret_cast<uint16_t*>(target + kWords - 1) = static_cast<uint16_t>(words[kWords - 1] >> 16);
      } else {
        target[kWords - 1] = words[kWords - 1];
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWords; ++k) reinterpret_cast<uint32_t*>(first)[k] = words[k];
    }
  }

  // The same with accesses of 16 bytes if is_whole, that is, if `first` is a multiple of 16 bytes.
  template <int size>
  static __device__ __forceinline__ Vector<Element, size> load(const char* first, bool is_whole) {
    return is_whole ? Vector<Element, size>::load(reinterpret_cast<const Element*>(first)) : load<size>(first);
  }
  template <int size>
  static __device__ __forceinline__ void write(char* first, const Vector<Element, size>& vector, bool is_whole) {
    if (is_whole) {
      vector.store(reinterpret_cast<Element*>(first));
    } else {
      write<size>(first, vector);
    }
  }
};

// A thread's parameters, widened: weight, then bias, of which those that are absent take no memory.
template <typename Scalar, int vectors, int size>
class StagedParameters {
 public:
  // Accesses of a thread and a chunk to one parameter, kWarpBytes apart.
  static constexpr int kAccesses = vectors * size * static_cast<int>(sizeof(float)) / kVectorBytes;
  static constexpr int kWarpBytes = kWarpSize * kVectorBytes, kVectorAccesses = kAccesses / vectors;
  static_assert(kAccesses * kVectorBytes == kThreadColumns * static_cast<int>(sizeof(float)), "the plan counts them");

  __device__ __forceinline__ StagedParameters(const NormParams& p, const ParameterView& bias, char* memory)
      : p_(p),
        bias_(bias),
        chunk_bytes_(((p.weight.data != nullptr) + (bias.data != nullptr)) * kAccesses * kWarpBytes),
        bias_offset_(p.weight.data != nullptr ? kAccesses * kWarpBytes : 0),
        own_(memory + threadIdx.x % kWarpSize * kVectorBytes) {}

  // Of the thread's columns in a chunk, which the function column(i) gives for each vector, of the group from first_column on.
  template <typename Column>
  __device__ __forceinline__ void fill(int chunk, int first_column, int group_size, const Column& column) const {
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const ParameterView view{which == 0 ? p_.weight.data : bias_.data,
                               which == 0 ? p_.weight.is_accumulate : bias_.is_accumulate};
      if (view.data == nullptr) continue;
      const bool has_vectors = is_vector_aligned<Scalar>(view, first_column);
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const int left = group_size - column(i);
        if (left <= 0) continue;
        float values[size];
        load_parameter_part<Scalar, false>(p_, view, first_column + column(i), has_vectors && left >= size, left, 0, values);
#pragma unroll
        for (int j = 0; j < size; j += 4) {
          *reinterpret_cast<float4*>(access(chunk, which * bias_offset_, i, j)) = {values[j], values[j + 1], values[j + 2],
                                                                                   values[j + 3]};
        }
      }
    }
  }
  __device__ __forceinline__ void load_weight(int chunk, int i, float (&values)[size]) const {
    load(p_.weight, chunk, 0, i, 1, values);
  }
  __device__ __forceinline__ void load_bias(int chunk, int i, float (&values)[size]) const {
    load(bias_, chunk, bias_offset_, i, 0, values);
  }

 private:
  __device__ __forceinline__ char* access(int chunk, int offset, int i, int j) const {
    const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize;
    return own_ + (chunk * warps + warp) * chunk_bytes_ + offset + (i * kVectorAccesses + j / 4) * kWarpBytes;
  }
  __device__ __forceinline__ void load(const ParameterView& view, int chunk, int offset, int i, float absent,
                                       float (&values)[size]) const {
#pragma unroll
    for (int j = 0; j < size; j += 4) {
      float4 part{absent, absent, absent, absent};
      if (view.data != nullptr) part = *reinterpret_cast<const float4*>(access(chunk, offset, i, j));
      values[j] = part.x, values[j + 1] = part.y, values[j + 2] = part.z, values[j + 3] = part.w;
    }
  }

  const NormParams& p_;
  const ParameterView bias_;
  int chunk_bytes_, bias_offset_;
  char* own_;
};

}  // namespace ssm_kernels::norm
