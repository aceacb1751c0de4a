// All recurrences as one variant, which selects the formulas at run time: the kernels of doubles take it, where compile time
// matters more than speed.
#pragma once

#include <array>
#include <string_view>
#include <type_traits>

#include "linear_scan/linear_scan.h"

namespace ssm_kernels::linear_scan {

// Only the first input is staged: all others may be absent, or have any shape that broadcasts.
struct AnyRecurrence {
  static constexpr std::array<std::string_view, kMaxRecurrenceInputs> kNames = {};
  static constexpr int kAdded = kNoInput;
  static constexpr size_t kFirstBroadcast = 1;
  struct Gates {};

  Recurrence recurrence;
  RecurrenceOptions options;

  template <typename T>
  static __device__ __forceinline__ Gates gates(const T*) {
    return {};
  }
  template <typename T>
  __device__ __forceinline__ Step<T> step(Gates, const T* x) const {
    Step<T> result{};
    visit([&](const auto& variant) { result = variant.step(variant.gates(x), x); });
    return result;
  }
  template <typename T>
  __device__ __forceinline__ void gradients(Gates, const T* x, T h, T g, T* grad) const {
#pragma unroll
    for (size_t i = 0; i < kMaxRecurrenceInputs; ++i) grad[i] = 0;
    visit([&](const auto& variant) { variant.gradients(variant.gates(x), x, h, g, grad); });
  }

 private:
  template <typename Visitor>
  __device__ __forceinline__ void visit(const Visitor& visitor) const {
    switch (recurrence) {
#define SSM_ROW(enumerator, name, type) \
  case Recurrence::enumerator:          \
    return visitor(make_variant<typename type::AtRunTime>(options));
      SSM_RECURRENCES(SSM_ROW)
#undef SSM_ROW
    }
  }
};

// Whether inputs of a call may be absent, whose values are zero.
template <typename Variant>
constexpr bool kMayLackInputs = std::is_same_v<Variant, AnyRecurrence>;

// The variant of a call.
template <typename Variant>
__device__ __forceinline__ Variant variant_of(const LinearScanParams& p) {
  if constexpr (std::is_same_v<Variant, AnyRecurrence>) {
    return AnyRecurrence{p.recurrence, p.options};
  } else {
    return make_variant<Variant>(p.options);
  }
}

}  // namespace ssm_kernels::linear_scan
