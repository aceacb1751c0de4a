#pragma once

#include <cstdint>

namespace ssm_kernels {

// The largest state per channel, or per row of a head, of the scans and of their decoding step.
constexpr int64_t kMaxDstate = 256;

}  // namespace ssm_kernels
