// Selective scan, forward, on CUDA.
//
//   delta_t = softplus?(delta_raw_t + delta_bias)
//   h_t     = Abar(delta_t A) h_{t-1} + delta_t k(delta_t A) B_t u_t
//   out_t   = (<C_t, h_t> + D u_t) silu(z_t)
//
// sequential.h says how the work is cut. A block's warps have two roles, which meet once a tile:
// * Movers read. Of each tile they leave delta and delta u in shared memory, and the rows of B and C, widened.
// * Walkers take their states through the steps of the tile, four steps between two loads, and leave for each channel and step
//   the part of <C_t, h_t> that belongs to their states.
// * Movers write: they add up these parts, add D u, multiply by the gate, while the walkers are at the next tile.
// What a tile needs lies in shared memory twice, the parts of two of the state lanes in the place of delta and delta u: a warp
// has read a group of steps before it writes there.
//
// The bounds, close to each other: the special function unit, one exponential per state and step at 16 a clock and
// multiprocessor; what shared memory hands to registers, 32 values a clock; the rate at which instructions are issued.
#pragma once

#include "cuda/launch.cuh"
#include "selective_scan/cuda/sequential_fwd_consumer.cuh"
#include "selective_scan/cuda/sequential_fwd_producer.cuh"

namespace ssm_kernels::selective_scan::sequential {

template <typename Scalar>
using FwdTileConfig = TileConfig<Scalar, fwd_tile_steps(sizeof(Scalar))>;

template <typename Scalar, typename Method>
__global__ void __launch_bounds__(FwdTileConfig<Scalar>::kThreads, kResidentBlocks)
    sequential_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params, const __grid_constant__ ScanPlan plan) {
  using C = FwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const FwdShared<C> shared(memory, params);
  begin_block<C, FwdRows<Scalar>>(params, plan, shared);
  if (threadIdx.x < C::kConsumers) {
    FwdConsumer<C, Method>(params, shared).run();
  } else {
    FwdProducer<C>(params, plan, shared).run();
  }
}

template <typename Scalar>
size_t fwd_shared_bytes(const SelectiveScanFwdParams& params) {
  return FwdShared<FwdTileConfig<Scalar>>(nullptr, params).bytes;
}

template <typename Scalar, typename Method>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const ScanPlan& plan, cudaStream_t stream) {
  const auto kernel = sequential_fwd_kernel<Scalar, Method>;
  const size_t bytes = fwd_shared_bytes<Scalar>(params);
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned int>(params.batch * plan.tiles), FwdTileConfig<Scalar>::kThreads, bytes, stream>>>(params,
                                                                                                                   plan);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::selective_scan::sequential
