// Division by a number that the host knows before it launches the kernel.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace ssm_kernels::cuda {

// divide(n) returns n / divisor for n >= 0. For n and a divisor d below 2^31 the 32-bit form is one multiplication and one
// shift: floor(n m / 2^(32 + s)) with s = ceil(log2 d) - 1 and m = ceil(2^(32 + s) / d) < 2^32. It is exact: m / 2^(32 + s)
// exceeds 1 / d by at most 2^-(32 + s) <= 2^-31 / d, which times n < 2^31 is less than 1 / d.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t divisor) : divisor_(divisor) {
    if (divisor < 2 || divisor >= int64_t(1) << 31) return;
    int log2_ceiling = 1;
    while ((int64_t(1) << log2_ceiling) < divisor) ++log2_ceiling;
    shift_ = log2_ceiling - 1;
    multiplier_ = static_cast<uint32_t>(((uint64_t(1) << (32 + shift_)) + divisor - 1) / divisor);
  }

  SSM_HOST_DEVICE int64_t divide(int64_t n) const { return n / divisor_; }
  SSM_HOST_DEVICE uint32_t divide(uint32_t n) const {
    return multiplier_ == 0 ? n : static_cast<uint32_t>((uint64_t(n) * multiplier_) >> 32) >> shift_;
  }

  template <typename Index>
  SSM_HOST_DEVICE Index value() const {
    return static_cast<Index>(divisor_);
  }

 private:
  int64_t divisor_ = 1;
  uint32_t multiplier_ = 0;  // 0 for a divisor of 1
  int shift_ = 0;
};

}  // namespace ssm_kernels::cuda
