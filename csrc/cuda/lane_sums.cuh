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

// Sums each of 8 values over groups of `lanes` neighboring lanes, a power of two of at least 8. Lane l of a group returns the
// sum of value l modulo 8.
template <typename Value>
__device__ __forceinline__ Value sum_of_each(const Value (&values)[8], int lane, int lanes) {
  Value fours[4], twos[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Value even = values[2 * i], odd = values[2 * i + 1];
    fours[i] = (lane & 1 ? odd : even) + __shfl_xor_sync(kAllLanes, lane & 1 ? even : odd, 1);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Value even = fours[2 * i], odd = fours[2 * i + 1];
    twos[i] = (lane & 2 ? odd : even) + __shfl_xor_sync(kAllLanes, lane & 2 ? even : odd, 2);
  }
  Value sum = (lane & 4 ? twos[1] : twos[0]) + __shfl_xor_sync(kAllLanes, lane & 4 ? twos[0] : twos[1], 4);
#pragma unroll 1
  for (int distance = 8; distance < lanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

}  // namespace ssm_kernels::cuda
