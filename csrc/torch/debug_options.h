// Process-wide options for tests, sanitizer runs and measurements: they choose between kernels that compute the same results,
// or pretend that the device has less memory. torch.ops.ssm_kernels._set_debug_option(name, value) sets one and returns its
// previous value; it exists in every build. Options of CUDA kernels have no effect in a build without them.
#pragma once

#include <cstdint>

namespace ssm_kernels {

// No supported device (compute capability 8.0 and newer) gives a block less shared memory.
constexpr int64_t kMinSharedBytesPerBlock = 99 * 1024;

// In the order of the table in debug_options.cpp.
enum class DebugOption : int {
  // The CUDA kernels of causal_conv1d's forward: 0, by layout and size; 1, by layout alone, whatever the size.
  kCausalConv1dKernel,
  // The CUDA kernels of the linear recurrences: a value of linear_scan::KernelChoice. Calls that the sequential kernels do not
  // support take tiles.
  kLinearScanKernel,
  // The CUDA kernels of selective_scan: a value of selective_scan::KernelChoice. A call that they do not support takes others.
  kSelectiveScanKernel,
  // selective_scan plans as for a device whose blocks have no more shared memory.
  kSelectiveScanSharedBytes,
  // The tensor-core instructions of ssd_chunk_scan: 0, wgmma where the device has it; 1, mma.sync.
  kSsdMma,
  // Backward of ssd_chunk_scan splits a call whose states would take more; one head of one batch row is the least. That of
  // mamba3_chunk_scan splits one whose k, q and their gradients would; one batch row is the least.
  kSsdWorkspaceBytes,
  // ssd_chunk_scan's mma.sync kernels run as on a device whose blocks have no more shared memory.
  kSsdSharedBytes,
  // The tensor-core instructions of delta_rule_scan with one gate a head or none: 0, wgmma where the device has it; 1,
  // mma.sync.
  kDeltaRuleMma,
  // delta_rule_scan's mma.sync kernels run as on a device whose blocks have no more shared memory.
  kDeltaRuleSharedBytes,
  // The products of delta_rule_scan on the CPU: 0, by its kernels; 1, as PyTorch matmuls, like those of other devices.
  kDeltaRuleCpu,
  // The rotation of mamba3_chunk_scan on the CPU: likewise.
  kMamba3Cpu,
  kCount
};

int64_t debug_option(DebugOption option);

}  // namespace ssm_kernels
