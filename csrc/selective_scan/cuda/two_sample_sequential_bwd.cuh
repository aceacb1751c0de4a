// Selective scan, backward, on CUDA, sequential, for the methods of two_sample_forms.cuh: sequential in time, parallel over
// channels and states.
//
// The factors a and w of two_sample_forms.cuh and the adjoint g of sequential_bwd.cuh give, summed over states or channels,
//
//   P_t = sum_n g_t current(z_t) B_t                 Q_t = sum_n g_t previous(z_t) B_{t-1}
//   grad_u_t     = delta_t lam_t P_t + delta_{t+1} (1 - lam_{t+1}) Q_{t+1} + D dy_t
//   grad_delta_t = lam_t u_t P_t + (1 - lam_t) u_{t-1} Q_t + sum_n A grad_z
//   grad_lam_t   = delta_t (u_t P_t - u_{t-1} Q_t)
//   grad_B_t     = sum_d (g_t current(z_t) a_t + g_{t+1} previous(z_{t+1}) w_{t+1})
//
// In the bilinear rules' form of a step (two_sample_step.cuh), the sum over states that is A grad_z for others is all of
// grad_delta_t.
//
// The terms of step t + 1 pass from group to group and from tile to tile in registers: one for each state of a thread, and one
// for its channel; at the end of a segment that is not the last, from the next segment's first step, which the block computes,
// too. Those of a row's first step belong to the sample before the row, or with repeats_first to the step itself.
//
// sequential_bwd.cuh describes the kernel. There are these differences:
// * Producers store u, and lam if the method has it, instead of the input. Consumers compute a and w of a group of steps, and
//   finish the gradients of u, delta and lam, because they have the values of neighboring steps.
// * A tile has four arrays. Shared memory for them comes from the warps' sums over channels: a warp stores those of a group in
//   the place of its own states before the group, which it has read by then.
#pragma once

#include "selective_scan/cuda/sequential_bwd.cuh"
#include "selective_scan/cuda/two_sample_sequential_bwd_consumer.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Registers per thread after setmaxnreg.
constexpr int kTwoSampleConsumerRegisters = 176,
              kTwoSampleProducerRegisters = cuda::producer_registers<kConsumerWarps * kWarpSize, kTwoSampleConsumerRegisters,
                                                                     kProducerWarps * kWarpSize, kResidentBlocks>();

template <typename Scalar>
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads, kResidentBlocks)
    sequential_two_sample_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params,
                                     const __grid_constant__ ScanPlan plan, const __grid_constant__ PartialSums partial_sums,
                                     const __grid_constant__ TwoSampleParams two) {
  using C = BwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const BwdShared<C, true> shared(memory);
  if (threadIdx.x == 0) shared.sums_are_read->init(C::kConsumers);
  for (int i = threadIdx.x; i < shared.kChannelSums; i += C::kThreads) shared.channel_sums[i] = 0;
  begin_block<C, BwdRows<Scalar>>(params, plan, shared);
  if (threadIdx.x < C::kConsumers) {
    cuda::warpgroup_reg_alloc<kTwoSampleConsumerRegisters>();
    visit_method<TwoSampleMethod>(params, two.method, [&](auto method) {
      TwoSampleBwdConsumer<C, decltype(method)>(params, two, method, plan, partial_sums, shared).run();
    });
  } else {
    cuda::warpgroup_reg_dealloc<kTwoSampleProducerRegisters>();
    const auto run = [&](auto access) {
      BwdProducer<C, TwoSampleMethod, decltype(access)::value>(params, plan, partial_sums, shared, &two).run();
    };
    const VectorAccess sequences = static_cast<VectorAccess>(opaque(static_cast<int>(plan.sequences)));
    constexpr bool kIsAligned = kHasWholeTiles<TwoSampleMethod, Scalar>;
    if (kIsAligned && sequences == VectorAccess::kAlongSteps) {
      run(std::integral_constant<VectorAccess, kIsAligned ? VectorAccess::kAlongSteps : VectorAccess::kShifted>());
    } else if (kIsAligned && sequences == VectorAccess::kAlongChannels) {
      run(std::integral_constant<VectorAccess, kIsAligned ? VectorAccess::kAlongChannels : VectorAccess::kShiftedChannels>());
    } else if (sequences == VectorAccess::kDescending) {
      run(std::integral_constant<VectorAccess, VectorAccess::kDescending>());
    } else if (is_along_channels(sequences)) {
      run(std::integral_constant<VectorAccess, VectorAccess::kShiftedChannels>());
    } else {
      run(std::integral_constant<VectorAccess, VectorAccess::kShifted>());
    }
  }
}

template <typename Scalar>
cudaError_t launch_two_sample_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two, const ScanPlan& plan,
                                  const PartialSums& partial_sums, cudaStream_t stream) {
  return launch_blocks(sequential_two_sample_bwd_kernel<Scalar>, BwdTileConfig<Scalar>::kThreads, shared_bytes<Scalar>(params),
                       stream, params, plan, partial_sums, two);
}

}  // namespace ssm_kernels::selective_scan::sequential
