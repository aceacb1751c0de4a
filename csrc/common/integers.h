#pragma once

#include <cstdint>

#include "common/macros.h"

namespace ssm_kernels {

// For n >= 0.
SSM_HOST_DEVICE constexpr int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
SSM_HOST_DEVICE constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

}  // namespace ssm_kernels
