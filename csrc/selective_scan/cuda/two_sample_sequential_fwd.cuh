// Selective scan, forward, on CUDA, sequential, for the methods of two_sample_forms.cuh. sequential_fwd.cuh describes the
// kernel. Besides delta, or 1 / delta for the bilinear rules, producers store the factors a and w of B_t and of B_{t-1}: w
// takes the place of a partial sum, which overwrites it. A producer takes u before its vectors from other lanes; a consumer
// keeps B of the step before in registers.
#pragma once

#include "cuda/ptx/setmaxnreg.cuh"
#include "selective_scan/cuda/sequential_fwd.cuh"
#include "selective_scan/cuda/two_sample_step.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Registers per thread after setmaxnreg.
constexpr int kTwoSampleFwdConsumerRegisters = 120,
              kTwoSampleFwdProducerRegisters =
                  cuda::producer_registers<kConsumerWarps * kWarpSize, kTwoSampleFwdConsumerRegisters,
                                           kProducerWarps * kWarpSize, kResidentBlocks>();

template <typename Scalar>
__global__ void __launch_bounds__(FwdTileConfig<Scalar>::kThreads, kResidentBlocks)
    sequential_two_sample_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params,
                                     const __grid_constant__ ScanPlan plan, const __grid_constant__ TwoSampleParams two) {
  using C = FwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const FwdShared<C> shared(memory, params);
  begin_block<C, FwdRows<Scalar>>(params, plan, shared);
  if (threadIdx.x < C::kConsumers) {
    cuda::warpgroup_reg_dealloc<kTwoSampleFwdConsumerRegisters>();
    visit_method<TwoSampleMethod>(params, two.method, [&](auto method) {
      FwdConsumer<C, decltype(method)> consumer(params, method, shared);
      consumer.set_samples_before([&](int state) {
        return to_accumulate(
            load_or_zero(B_address_before<Scalar>(params, two, *shared.position, plan.B, shared.rows->B, state, 0)));
      });
      consumer.run();
    });
  } else {
    cuda::warpgroup_reg_alloc<kTwoSampleFwdProducerRegisters>();
    FwdProducer<C, TwoSampleMethod>(params, plan, shared, &two).run();
  }
}

template <typename Scalar>
cudaError_t launch_two_sample_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two, const ScanPlan& plan,
                                  cudaStream_t stream) {
  return launch_blocks(sequential_two_sample_fwd_kernel<Scalar>, FwdTileConfig<Scalar>::kThreads, shared_bytes<Scalar>(params),
                       stream, params, plan, two);
}

}  // namespace ssm_kernels::selective_scan::sequential
