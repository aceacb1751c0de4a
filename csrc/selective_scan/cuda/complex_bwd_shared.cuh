// The plan and the sums over lanes of both backward kernels of complex states.
#pragma once

#include "selective_scan/cuda/complex_scan.cuh"

namespace ssm_kernels::selective_scan::complex_scan {

// A block's channels. Both kernels have the same tiles, whose partial sums the entry point allocates.
constexpr int kBwdChannels = 2 * kWarpSize;

struct BwdPlan {
  SelectiveScanBwdParams p;
  TwoSampleParams two;
  PartialSums partial;
  ComplexWorkspace workspace;
  Tiles tiles;
};

// The sums of each value over the lanes; lane i returns that of values[i % count]. Each exchange halves the values of a lane.
template <int count, int half = count / 2, typename Acc>
__device__ __forceinline__ Acc sum_over_lanes(Acc (&values)[count], int lane) {
  static_assert(count == 16 || count == 32);
  const bool is_upper = (lane & half) != 0;
#pragma unroll
  for (int i = 0; i < half; ++i) {
    const Acc sent = is_upper ? values[i] : values[i + half], kept = is_upper ? values[i + half] : values[i];
    values[i] = kept + __shfl_xor_sync(kAllLanes, sent, half);
  }
  if constexpr (half > 1) {
    return sum_over_lanes<count, half / 2>(values, lane);
  } else {
    return count == kWarpSize ? values[0] : values[0] + __shfl_xor_sync(kAllLanes, values[0], 16);
  }
}

}  // namespace ssm_kernels::selective_scan::complex_scan
