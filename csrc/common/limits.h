#pragma once

#include <cstdint>

namespace ssm_kernels {

// The largest dstate: states of a channel (selective_scan) or of a row of a head (ssd_chunk_scan), decoding steps included.
constexpr int64_t kMaxDstate = 256;

}  // namespace ssm_kernels
