// Sizes that every kernel takes as given.
#pragma once

namespace ssm_kernels::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpgroupWarps = 4, kWarpgroupThreads = kWarpgroupWarps * kWarpSize;  // of wgmma and setmaxnreg
constexpr int kVectorBytes = 16;                                                     // of the widest load and store

}  // namespace ssm_kernels::cuda
