// Chooses the kernel of a call (sequential, short or warp scan) and divides its channels and time among blocks. The choice
// depends on sizes, strides and the device only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "common/kernel_abi.h"
#include "selective_scan/cuda/launch.h"
#include "selective_scan/cuda/sequential.h"
#include "selective_scan/cuda/short_scan.h"
#include "selective_scan/cuda/warp_scan.h"

namespace ssm_kernels::selective_scan {

struct DeviceLimits {
  int64_t multiprocessors = 0, shared_bytes_per_block = 0;
  // Shared memory of a multiprocessor, and what the system reserves of it per block.
  int64_t shared_bytes = 0, reserved_shared_bytes_per_block = 0;
};

// The fastest kernel, or the named one if it supports the call. The values of DebugOption::kSelectiveScanKernel.
enum class KernelChoice : int { kFaster, kSequential, kWarpScan };

struct Plan {
  bool is_sequential = false, is_short = false;
  short_scan::ScanPlan short_scan;
  sequential::ScanPlan sequential;
  // Also the plan of the sequential scan's carry pass, with the same segments.
  warp_scan::ScanPlan warp_scan;
  // Whether the carry pass is that of segment_maps.h, which the caller queues before the launch.
  bool has_segment_maps = false;
  // Shared memory per block of the call's largest launch. Above the device's limit only if no tile size fits.
  int64_t shared_bytes = 0;

  const ChannelPartition& partition() const {
    if (is_short) return short_scan;
    return is_sequential ? static_cast<const ChannelPartition&>(sequential) : warp_scan;
  }
};

// Doubles have the warp scan alone.
template <typename Scalar>
constexpr bool kHasAllScans = !std::is_same_v<Scalar, double>;

template <typename Scalar>
Plan plan_fwd(const SelectiveScanFwdParams& params, const DeviceLimits& device, KernelChoice choice);
// The choice does not depend on grad_out's layout: the caller copies a grad_out without has_layout.
template <typename Scalar>
Plan plan_bwd(const SelectiveScanBwdParams& params, const DeviceLimits& device, KernelChoice choice);

// The steps of a span of backward, a multiple of a tile or all steps.
int64_t span_steps(const SelectiveScanBwdParams& params, const Plan& plan);
// Whether a tile's partial sums of the gradients of B and C fit into the memory of the states before it, which the tile alone
// reads and has read by then.
bool can_reuse_chunk_states(const SelectiveScanBwdParams& params, const Plan& plan);
// The parameters of a span of `steps` steps from `begin` on, for the plan of the whole call. `carry`, (batch, dim, dstate),
// holds the adjoint of the state after a span that is not the last, and receives that of the state before one that is not the
// first.
template <typename Scalar>
SelectiveScanBwdParams span_params(const SelectiveScanBwdParams& params, int64_t begin, int64_t steps, void* carry);

// The carry pass of the warp scan alone, for the maps of all segments of a call that is neither packed nor reverse: the summary
// (Fwd), or the gradient of the initial state from the gradients of the outputs (Bwd). Fewer tensors are read: delta, A, u and
// B, or delta, A, grad_out, z and C.
template <typename Scalar, typename Params>
Plan plan_carry_pass(const Params& params, const DeviceLimits& device);

// To be called before a launch: moves the data of each tensor that the plan's scan accesses as kDescending from its first step
// to the vector that ends there. Where a sequential scan does not, its carry pass, which shares the parameters, moves elements.
template <typename Scalar, typename Params>
void point_at_vectors(Params& params, Plan& plan);

// Queue the plan's kernels on the stream.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const Plan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const Plan& plan, const PartialSums& partial_sums,
                                      cudaStream_t stream);
// The plan is that of plan_carry_pass, with memory for its maps.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_carry_pass(const SelectiveScanFwdParams& params, const Plan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_carry_pass(const SelectiveScanBwdParams& params, const Plan& plan, cudaStream_t stream);

// The same for the methods of SSM_FURTHER_DISCRETIZATIONS.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_further_fwd(const SelectiveScanFwdParams& params, const MethodParameters& parameters,
                                              const Plan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_further_bwd(const SelectiveScanBwdParams& params, const MethodParameters& parameters,
                                              const Plan& plan, const PartialSums& partial_sums, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_further_carry_pass(const SelectiveScanFwdParams& params, const MethodParameters& parameters,
                                                     const Plan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_further_carry_pass(const SelectiveScanBwdParams& params, const MethodParameters& parameters,
                                                     const Plan& plan, cudaStream_t stream);

// The same for the methods of SSM_TWO_SAMPLE_DISCRETIZATIONS.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_two_sample_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two,
                                                 const Plan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_two_sample_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two,
                                                 const Plan& plan, const PartialSums& partial_sums, cudaStream_t stream);

// The same with a step of its own for A, of methods that read one sample. The plan is one of the warp scan, for a
// discretization that reads two.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_separate_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two,
                                               const Plan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_separate_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two,
                                               const Plan& plan, const PartialSums& partial_sums, cudaStream_t stream);

// Whether a tensor can be moved in the plan's vectors.
template <typename Scalar>
bool has_layout(const SequenceView& view, const SelectiveScanParams& params, const sequential::ScanPlan& plan);

SSM_KERNEL_STRUCT(Plan, 384);

}  // namespace ssm_kernels::selective_scan
