// Several recurrences as one variant, which selects the formulas at run time: the kernels of rare calls take it, where compile
// time matters more than speed. has_tile_kernel (launch.h) and launch_sequential_variant say which calls these are. A tile
// kernel selects the recurrence once a step, for all channels of a thread; a sequential kernel, once a segment.
#pragma once

#include <array>
#include <string_view>
#include <type_traits>

#include "cuda/vector_io.cuh"
#include "linear_scan/cuda/launch.h"

namespace ssm_kernels::linear_scan {

// The recurrences of `least` to `most` inputs, of which any may be absent. If the recurrences have different numbers of inputs,
// all but the first may also have any shape that broadcasts: how many are staged is known at run time.
template <size_t least, size_t most>
struct AnyRecurrence {
  static constexpr bool kIsPair = most == 2;
  static constexpr std::array<std::string_view, most> kNames = {};
  static constexpr int kAdded = kNoInput;
  static constexpr size_t kFirstBroadcast = kIsPair ? 2 : 1;
  static constexpr int kMostStaged = kIsPair ? 2 : 3;

  Recurrence recurrence;
  RecurrenceOptions options;

  // Declares the type. The gates of a recurrence of two inputs are a number.
  template <typename T>
  __device__ T gates(const T*) const;

  // Calls visitor(variant) with the variant of the call.
  template <typename Visitor>
  __device__ __forceinline__ void visit(const Visitor& visitor) const {
    switch (recurrence) {
#define SSM_ROW(enumerator, name, type)                                                                  \
  case Recurrence::enumerator:                                                                           \
    static_assert(type::kNames.size() >= 2, "no instance has recurrences of one input");                 \
    if constexpr (type::kNames.size() >= least && type::kNames.size() <= most) {                         \
      static_assert(kIsPair ? type::kFirstBroadcast == 2 : type::kFirstBroadcast <= size_t(kMostStaged), \
                    "shared memory has room for the staged inputs");                                     \
      visitor(make_variant<typename type::AtRunTime>(options));                                          \
    }                                                                                                    \
    return;
      SSM_RECURRENCES(SSM_ROW)
#undef SSM_ROW
    }
  }

  // The number of inputs that pass through shared memory.
  static __device__ __forceinline__ int staged(Recurrence recurrence) {
    switch (recurrence) {
#define SSM_ROW(enumerator, name, type) \
  case Recurrence::enumerator:          \
    return static_cast<int>(type::kFirstBroadcast);
      SSM_RECURRENCES(SSM_ROW)
#undef SSM_ROW
    }
    return 1;
  }
};

// Whether a kernel takes several recurrences.
template <typename Variant>
constexpr bool kIsAny = false;
template <size_t least, size_t most>
constexpr bool kIsAny<AnyRecurrence<least, most>> = true;

template <size_t least, size_t most, bool is_forward>
constexpr int kStagedInputs<AnyRecurrence<least, most>, is_forward> = AnyRecurrence<least, most>::kMostStaged;

// The number of a call's inputs that pass through shared memory.
template <typename Variant, bool is_forward>
__device__ __forceinline__ int staged_inputs_of(const LinearScanParams& p) {
  if constexpr (kIsAny<Variant> && Variant::kFirstBroadcast < kStagedInputs<Variant, is_forward>) {
    return Variant::staged(p.recurrence);
  } else {
    return kStagedInputs<Variant, is_forward>;
  }
}

// The variant of a call.
template <typename Variant>
__device__ __forceinline__ Variant variant_of(const LinearScanParams& p) {
  if constexpr (kIsAny<Variant>) {
    return Variant{p.recurrence, p.options};
  } else {
    return make_variant<Variant>(p.options);
  }
}

// Calls body(variant) with the variant of one recurrence.
template <typename Variant, typename Body>
__device__ __forceinline__ void with_recurrence(const Variant& variant, const Body& body) {
  if constexpr (kIsAny<Variant>) {
    variant.visit(body);
  } else {
    body(variant);
  }
}

// The variant of the tile kernel that takes several recurrences, of which one is a call's. Those of two inputs have more steps
// a thread (fwd_thread_steps), but not in float64.
template <typename Scalar, typename Variant>
using GeneralVariant = std::conditional_t<!std::is_same_v<Scalar, double> && Variant::kNames.size() == 2, AnyRecurrence<2, 2>,
                                          AnyRecurrence<std::is_same_v<Scalar, double> ? 2 : 3, kMaxRecurrenceInputs>>;

template <typename Scalar>
constexpr ScalarKind scalar_kind_of() {
  if constexpr (std::is_same_v<Scalar, double>) return ScalarKind::kDouble;
  if constexpr (std::is_same_v<Scalar, float>) return ScalarKind::kFloat;
  return std::is_same_v<Scalar, __half> ? ScalarKind::kHalf : ScalarKind::kBFloat16;
}

}  // namespace ssm_kernels::linear_scan
