// Sums over the lanes of a warp, or over neighboring lanes.
#pragma once

#include "cuda/constants.h"

namespace ssm_kernels::cuda {

// Sums each of `count` values over `lanes` neighboring lanes, a power of two. Afterwards lane l of them has the sums of values
// l count / lanes to (l + 1) count / lanes - 1, as its first values. Each exchange halves the number of values that a lane
// still sums, so that there are count - count / lanes shuffles instead of count log2(lanes).
template <int lanes, typename Value, int count, int kept = count / 2>
__device__ __forceinline__ void sum_over_lanes(Value (&values)[count]) {
  static_assert(lanes <= 32 && (lanes & (lanes - 1)) == 0 && count % lanes == 0, "every lane ends with equally many sums");
  if constexpr (lanes > 1) {
    constexpr int kDistance = lanes / 2;
    const bool is_upper = (threadIdx.x & kDistance) != 0;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      const Value own = is_upper ? values[kept + i] : values[i], other = is_upper ? values[i] : values[kept + i];
      values[i] = own + __shfl_xor_sync(kAllLanes, other, kDistance);
    }
    sum_over_lanes<kDistance, Value, count, kept / 2>(values);
  }
}

// The sum over the lanes of a warp; all of them get the same bits.
template <typename Value>
__device__ __forceinline__ Value sum_over_warp(Value value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

}  // namespace ssm_kernels::cuda
