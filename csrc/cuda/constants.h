// Hardware sizes that every kernel uses.
#pragma once

namespace ssm_kernels::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpgroupWarps = 4, kWarpgroupThreads = kWarpgroupWarps * kWarpSize;  // what wgmma and setmaxnreg act on
constexpr int kVectorBytes = 16;                                                     // of a thread's widest load and store
constexpr int kMaxClusterBlocks = 8;  // every device with thread block clusters takes so many

}  // namespace ssm_kernels::cuda
