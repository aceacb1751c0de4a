#pragma once

#include <cstdint>

namespace ssm_kernels {

// The largest dstate: states of a channel (selective_scan) or of a row of a head (ssd_chunk_scan), decoding steps included.
constexpr int64_t kMaxDstate = 256;

// Backward's bound of rates, such as A, that may be infinite: where an infinite rate has decayed a state to zero, the rate
// times that zero is the limit, zero, and not NaN. The bound leaves room for factors such as log2 e.
template <typename T>
constexpr T kLargestRate = T(sizeof(T) == 8 ? 1e300 : 1e38);

}  // namespace ssm_kernels
