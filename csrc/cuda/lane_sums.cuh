// Sums over the lanes of a warp, or over neighboring lanes.
#pragma once

#include "cuda/constants.h"

namespace ssm_kernels::cuda {

// Sums each of `count` values over `lanes` lanes, `stride` apart, both powers of two. Afterwards lane l of them has the sums of
// values l count / lanes to (l + 1) count / lanes - 1, as its first values; with fewer values than lanes, neighbors have the
// same sum. Each exchange halves the number of values that a lane still sums, so that there are count - count / lanes shuffles
// instead of count log2(lanes).
template <int lanes, int stride = 1, typename Value, int count, int kept = count / 2>
__device__ __forceinline__ void sum_over_lanes(Value (&values)[count], unsigned lane = threadIdx.x) {
  static_assert(lanes * stride <= 32 && (lanes & (lanes - 1)) == 0 && (count % lanes == 0 || lanes % count == 0),
                "every lane ends with equally many sums, or every sum is in equally many lanes");
  constexpr int kDistance = lanes / 2 * stride;
  if constexpr (lanes > 1 && kept == 0) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], kDistance);
    sum_over_lanes<lanes / 2, stride, Value, count, 0>(values, lane);
  } else if constexpr (lanes > 1) {
    const bool is_upper = (lane & kDistance) != 0;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      const Value own = is_upper ? values[kept + i] : values[i], other = is_upper ? values[i] : values[kept + i];
      values[i] = own + __shfl_xor_sync(kAllLanes, other, kDistance);
    }
    sum_over_lanes<lanes / 2, stride, Value, count, kept / 2>(values, lane);
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
