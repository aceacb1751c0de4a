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

// Calls visitor(Scalar()) with the element type of that kind.
template <typename Visitor>
void visit_scalar(ScalarKind kind, const Visitor& visitor) {
  switch (kind) {
    case ScalarKind::kFloat:
      return visitor(float());
    case ScalarKind::kDouble:
      return visitor(double());
    case ScalarKind::kHalf:
      return visitor(__half());
    case ScalarKind::kBFloat16:
      return visitor(__nv_bfloat16());
  }
}

}  // namespace ssm_kernels::cuda
