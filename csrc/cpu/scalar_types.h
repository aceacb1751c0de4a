// Maps a ScalarKind to its C++ type. Included only by cpu/*kernel.cpp files.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <type_traits>

#include "common/scalar_kind.h"
#include "common/unknown_enumerator.h"

namespace ssm_kernels {
inline namespace CPU_CAPABILITY {

template <typename Acc>
using Vec = at::vec::Vectorized<Acc>;

template <typename Scalar>
using AccumulateType = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;

// Calls visitor(Scalar()) with the type of the kind.
template <typename Visitor>
void visit_scalar(ScalarKind kind, Visitor&& visitor) {
  switch (kind) {
    case ScalarKind::kFloat:
      return visitor(float());
    case ScalarKind::kDouble:
      return visitor(double());
    case ScalarKind::kHalf:
      return visitor(c10::Half());
    case ScalarKind::kBFloat16:
      return visitor(c10::BFloat16());
  }
  SSM_UNKNOWN_ENUMERATOR("an element type", static_cast<int>(ScalarKind::kBFloat16) + 1, kind);
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels
