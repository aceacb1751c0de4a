#pragma once

namespace ssm_kernels {

// The element types that kernels take, as plain data. float64 accumulates in float64, all others in float32.
enum class ScalarKind : int { kFloat, kDouble, kHalf, kBFloat16 };

}  // namespace ssm_kernels
