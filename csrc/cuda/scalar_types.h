// Maps a ScalarKind to the element type of CUDA kernels. Host code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/scalar_kind.h"

namespace ssm_kernels::cuda {

inline int element_bytes(ScalarKind kind) {
  switch (kind) {
    case ScalarKind::kDouble:
      return 8;
    case ScalarKind::kFloat:
      return 4;
    case ScalarKind::kHalf:
    case ScalarKind::kBFloat16:
      return 2;
  }
  return 0;
}

// Returns visitor(Scalar()) for the element type of that kind.
template <typename Visitor>
auto visit_scalar(ScalarKind kind, const Visitor& visitor) {
  switch (kind) {
    case ScalarKind::kFloat:
      return visitor(float());
    case ScalarKind::kDouble:
      return visitor(double());
    case ScalarKind::kHalf:
      return visitor(__half());
    default:
      return visitor(__nv_bfloat16());
  }
}

// For kernels that do not exist for double: returns visitor(Scalar()), or visitor(float()) in its place.
template <typename Visitor>
auto visit_scalar_but_double(ScalarKind kind, const Visitor& visitor) {
  switch (kind) {
    case ScalarKind::kHalf:
      return visitor(__half());
    case ScalarKind::kBFloat16:
      return visitor(__nv_bfloat16());
    default:
      return visitor(float());
  }
}

}  // namespace ssm_kernels::cuda
