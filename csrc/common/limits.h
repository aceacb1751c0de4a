#pragma once

#include <cstdint>

namespace ssm_kernels {

// The largest state per channel of the scan and of its decoding step.
constexpr int64_t kMaxDstate = 256;

}  // namespace ssm_kernels
