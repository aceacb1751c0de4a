// Selective scan, backward, on CUDA: sequential in time, parallel over channels and states.
//
// With y_t = <C_t, h_t> + D u_t, out_t = y_t silu(z_t) and dy_t = grad_out_t silu(z_t), the adjoint g of the state runs against
// time,
//
//   g_t = C_t dy_t + Abar_{t+1} g_{t+1}
//
// and with p_t = g_t B_t and q_t = g_t h_{t-1} Abar'(z_t), summed over states, channels or time,
//
//   grad_delta_t = sum_n (A q_t + u_t p_t (z k)')
//   grad_u_t     = delta_t sum_n p_t k + D dy_t
//   grad_z_t     = grad_out_t y_t silu'(z_t)
//   grad_A       = sum_t delta_t (q_t + delta_t u_t p_t k')
//   grad_B_t     = sum_d g_t delta_t u_t k
//   grad_C_t     = sum_d dy_t h_t
//
// sequential.h describes tiles, lanes and states per lane; sequential_fwd.cuh the producer and consumer warps. A block scans
// its tiles from the last to the first. A tile is one chunk and starts from the state that forward saved. Consumers take two
// passes:
// * forwards through the tile, where each thread stores its states before each group of steps in shared memory;
// * backwards, group by group: they recompute the group's states and coefficients in registers from the stored state, then run
//   the adjoint through the group.
// A group's sums over states are added over the state lanes and overwrite delta, the input and dy. Its sums over channels are
// added over the rows of a warp, at the end of the tile over the warps, and over tiles of channels by bwd_reduce.cuh. Every
// order of additions is fixed. Producers read a tile's tensors twice: for delta, the input and dy, and again for the gradients.
//
// sequential_step.cuh has the methods' forms of a step. The limit is the issue rate.
#pragma once

#include "cuda/ptx/setmaxnreg.cuh"
#include "selective_scan/cuda/sequential_bwd_consumer.cuh"
#include "selective_scan/cuda/sequential_bwd_producer.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Registers per thread after setmaxnreg.
constexpr int
    kConsumerRegisters = 144,
    kProducerRegisters =
        cuda::producer_registers<kConsumerWarps * kWarpSize, kConsumerRegisters, kProducerWarps * kWarpSize, kResidentBlocks>();

template <typename Scalar>
using BwdTileConfig = TileConfig<Scalar, kBwdTileSteps>;

template <typename Scalar, typename Method>
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads, kResidentBlocks)
    sequential_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params, const __grid_constant__ ScanPlan plan,
                          const __grid_constant__ PartialSums partial_sums) {
  using C = BwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const BwdShared<C> shared(memory);
  if (threadIdx.x == 0) shared.sums_are_read->init(C::kConsumers);
  for (int i = threadIdx.x; i < shared.kChannelSums; i += C::kThreads) shared.channel_sums[i] = 0;
  begin_block<C, BwdRows<Scalar>>(params, plan, shared);
  if (threadIdx.x < C::kConsumers) {
    cuda::warpgroup_reg_alloc<kConsumerRegisters>();
    visit_method<Method>(
        params, [&](auto method) { BwdConsumer<C, decltype(method)>(params, method, plan, partial_sums, shared).run(); });
  } else {
    cuda::warpgroup_reg_dealloc<kProducerRegisters>();
    const auto run = [&](auto producer) { producer.run(); };
    const VectorAccess sequences = static_cast<VectorAccess>(opaque(static_cast<int>(plan.sequences)));
    if (sequences == VectorAccess::kAlongSteps) {
      run(BwdProducer<C, Method, VectorAccess::kAlongSteps>(params, plan, partial_sums, shared));
    } else if (sequences == VectorAccess::kAlongChannels) {
      run(BwdProducer<C, Method, VectorAccess::kAlongChannels>(params, plan, partial_sums, shared));
    } else if (sequences == VectorAccess::kDescending) {
      run(BwdProducer<C, Method, VectorAccess::kDescending>(params, plan, partial_sums, shared));
    } else if (sequences == VectorAccess::kShifted) {
      run(BwdProducer<C, Method, VectorAccess::kShifted>(params, plan, partial_sums, shared));
    } else {
      run(BwdProducer<C, Method, VectorAccess::kShiftedChannels>(params, plan, partial_sums, shared));
    }
  }
}

// The kernel has a body of its own: a function that both kernels call would change the code of sequential_bwd_kernel.
template <typename Scalar>
__global__ void __launch_bounds__(BwdTileConfig<Scalar>::kThreads, kResidentBlocks)
    sequential_further_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params, const __grid_constant__ ScanPlan plan,
                                  const __grid_constant__ PartialSums partial_sums,
                                  const __grid_constant__ MethodParameters parameters) {
  using C = BwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const BwdShared<C> shared(memory);
  if (threadIdx.x == 0) shared.sums_are_read->init(C::kConsumers);
  for (int i = threadIdx.x; i < shared.kChannelSums; i += C::kThreads) shared.channel_sums[i] = 0;
  begin_block<C, BwdRows<Scalar>>(params, plan, shared);
  if (threadIdx.x < C::kConsumers) {
    cuda::warpgroup_reg_alloc<kConsumerRegisters>();
    visit_method<FurtherMethod>(params, parameters, [&](auto method) {
      BwdConsumer<C, decltype(method)>(params, method, plan, partial_sums, shared).run();
    });
  } else {
    cuda::warpgroup_reg_dealloc<kProducerRegisters>();
    const auto run = [&](auto producer) { producer.run(); };
    const VectorAccess sequences = static_cast<VectorAccess>(opaque(static_cast<int>(plan.sequences)));
    if (sequences == VectorAccess::kAlongSteps) {
      run(BwdProducer<C, FurtherMethod, VectorAccess::kAlongSteps>(params, plan, partial_sums, shared));
    } else if (sequences == VectorAccess::kAlongChannels) {
      run(BwdProducer<C, FurtherMethod, VectorAccess::kAlongChannels>(params, plan, partial_sums, shared));
    } else if (sequences == VectorAccess::kDescending) {
      run(BwdProducer<C, FurtherMethod, VectorAccess::kDescending>(params, plan, partial_sums, shared));
    } else if (sequences == VectorAccess::kShifted) {
      run(BwdProducer<C, FurtherMethod, VectorAccess::kShifted>(params, plan, partial_sums, shared));
    } else {
      run(BwdProducer<C, FurtherMethod, VectorAccess::kShiftedChannels>(params, plan, partial_sums, shared));
    }
  }
}

template <typename Scalar>
int64_t shared_bytes(const SelectiveScanBwdParams& params) {
  return is_two_sample(params.discretization) ? BwdShared<BwdTileConfig<Scalar>, true>(nullptr).bytes
                                              : BwdShared<BwdTileConfig<Scalar>>(nullptr).bytes;
}

template <typename Scalar, typename Method>
cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const ScanPlan& plan, const PartialSums& partial_sums,
                       cudaStream_t stream) {
  return launch_blocks(sequential_bwd_kernel<Scalar, OwnOrRareMethod<Method>>, BwdTileConfig<Scalar>::kThreads,
                       shared_bytes<Scalar>(params), stream, params, plan, partial_sums);
}

template <typename Scalar>
cudaError_t launch_further_bwd(const SelectiveScanBwdParams& params, const MethodParameters& parameters, const ScanPlan& plan,
                               const PartialSums& partial_sums, cudaStream_t stream) {
  return launch_blocks(sequential_further_bwd_kernel<Scalar>, BwdTileConfig<Scalar>::kThreads, shared_bytes<Scalar>(params),
                       stream, params, plan, partial_sums, parameters);
}

}  // namespace ssm_kernels::selective_scan::sequential
